// What stands between two products of a layer that has norms behind them, too: bound by reading the
// rows once.
//
//   sum = residual + norm(x), times a number where there is one
//   ahead = following(sum), where a norm follows
//
// Where two things stand beside each other in a layer, x is what they give, each normed by itself and
// then added up.
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

// What is added to rows before both are normed, and the norms of both by themselves; or nothing.
template <typename T>
struct Other {
  const T *x, *norm_of_first, *norm;
};

// `PIECES` of 8 elements that a thread has at most. TWO: there is an `other`.
template <typename T, int WARPS, int PIECES, bool TWO, bool FOLLOWED, bool SCALED>
__device__ __forceinline__ void add_normed(const T* residual, const T* x, Other<T> other,
                                           const T* norm, const T* following, const T* times,
                                           T* out, T* ahead, int width, float epsilon,
                                           float following_epsilon) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* shares = reinterpret_cast<float*>(shared);
  using Values = Neighbours<T, 8>;
  Values of[PIECES], sums[PIECES], by[PIECES], next_by[PIECES];
  Values others[PIECES], first_by[PIECES], other_by[PIECES];
  const auto each = [&](auto give) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int at = (threadIdx.x + piece * WARPS * 32) * 8;
      if (at < width) give(piece, at, (long)blockIdx.x * width + at);
    }
  };
  each([&](int piece, int at, long place) {
    of[piece] = Values::at(x + place);
    if constexpr (TWO) {
      others[piece] = Values::at(other.x + place);
      first_by[piece] = Values::at(other.norm_of_first + at);
      other_by[piece] = Values::at(other.norm + at);
    }
    sums[piece] = Values::at(residual + place);
    by[piece] = Values::at(norm + at);
    if constexpr (FOLLOWED) next_by[piece] = Values::at(following + at);
  });
  const auto scale_of = [&](const Values(&row)[PIECES], float* shares, float epsilon) {
    float squares = 0.f;
    each([&](int piece, int, long) {
#pragma unroll
      for (int e = 0; e < 8; e++)
        squares = fmaf(float(row[piece].of[e]), float(row[piece].of[e]), squares);
    });
    return rsqrtf(sum_of_block<WARPS>(squares, shares) / width + epsilon);
  };
  if constexpr (TWO) {
    const float first_scale = scale_of(of, shares + 2 * WARPS, epsilon);
    const float other_scale = scale_of(others, shares + 3 * WARPS, epsilon);
    each([&](int piece, int, long) {
#pragma unroll
      for (int e = 0; e < 8; e++)
        of[piece].of[e] = T(float(normed(of[piece].of[e], first_scale, first_by[piece].of[e])) +
                            float(normed(others[piece].of[e], other_scale, other_by[piece].of[e])));
    });
  }
  const float scale = scale_of(of, shares, epsilon);
  each([&](int piece, int, long place) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const T added = normed(of[piece].of[e], scale, by[piece].of[e]);
      T sum = T(float(sums[piece].of[e]) + float(added));
      if constexpr (SCALED) sum = T(float(sum) * float(*times));
      sums[piece].of[e] = sum;
    }
    sums[piece].put(out + place);
  });
  if constexpr (FOLLOWED) {
    const float next_scale = scale_of(sums, shares + WARPS, following_epsilon);
    each([&](int piece, int, long place) {
#pragma unroll
      for (int e = 0; e < 8; e++)
        of[piece].of[e] = normed(sums[piece].of[e], next_scale, next_by[piece].of[e]);
      of[piece].put(ahead + place);
    });
  }
}

}  // namespace kernels
