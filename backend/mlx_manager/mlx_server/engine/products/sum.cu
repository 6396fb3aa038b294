// What stands between two products of a layer that has norms behind them, too: bound by reading the
// rows once.
//
//   sum = residual + norm(x), times a number where there is one
//   ahead = following(sum), where a norm follows
//
// A block has a row, and a thread the same pieces of it from beginning to end, in registers: all that
// is read is under way before the first of it is there.

namespace kernels {

// Of a block's threads; `shares` has room for one of each warp.
template <int WARPS>
__device__ __forceinline__ float sum_of_block(float x, float* shares) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
  if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += shares[warp];
  return sum;
}

// As MLX computes a norm: rounded before the weight, and after it.
template <typename T>
__device__ __forceinline__ T normed(T x, float scale, T by) {
  return T(float(T(float(x) * scale)) * float(by));
}

// `PIECES` of 8 elements that a thread has at most.
template <typename T, int WARPS, int PIECES, bool FOLLOWED, bool SCALED>
__device__ __forceinline__ void add_normed(const T* residual, const T* x, const T* norm,
                                           const T* following, const T* times, T* out, T* ahead,
                                           int width, float epsilon, float following_epsilon) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* shares = reinterpret_cast<float*>(shared);
  using Values = Neighbours<T, 8>;
  Values of[PIECES], sums[PIECES], by[PIECES], next_by[PIECES];
  const auto each = [&](auto give) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int at = (threadIdx.x + piece * WARPS * 32) * 8;
      if (at < width) give(piece, at, (long)blockIdx.x * width + at);
    }
  };
  each([&](int piece, int at, long place) {
    of[piece] = Values::at(x + place);
    sums[piece] = Values::at(residual + place);
    by[piece] = Values::at(norm + at);
    if constexpr (FOLLOWED) next_by[piece] = Values::at(following + at);
  });
  float squares = 0.f;
  each([&](int piece, int, long) {
#pragma unroll
    for (int e = 0; e < 8; e++)
      squares = fmaf(float(of[piece].of[e]), float(of[piece].of[e]), squares);
  });
  const float scale = rsqrtf(sum_of_block<WARPS>(squares, shares) / width + epsilon);
  squares = 0.f;
  each([&](int piece, int, long place) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const T added = normed(of[piece].of[e], scale, by[piece].of[e]);
      T sum = T(float(sums[piece].of[e]) + float(added));
      if constexpr (SCALED) sum = T(float(sum) * float(*times));
      sums[piece].of[e] = sum;
      squares = fmaf(float(sums[piece].of[e]), float(sums[piece].of[e]), squares);
    }
    sums[piece].put(out + place);
  });
  if constexpr (FOLLOWED) {
    const float sum = sum_of_block<WARPS>(squares, shares + WARPS);
    const float next_scale = rsqrtf(sum / width + following_epsilon);
    each([&](int piece, int, long place) {
#pragma unroll
      for (int e = 0; e < 8; e++)
        of[piece].of[e] = normed(sums[piece].of[e], next_scale, next_by[piece].of[e]);
      of[piece].put(ahead + place);
    });
  }
}

}  // namespace kernels
