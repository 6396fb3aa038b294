// What a decode step begins with: its newest tokens' embeddings, and what all layers take of where
// those stand. That is written in place, so that of all that comes after this launch only the first
// product and its residual wait for it: where a step's graph forks, the device waits until the
// driver has queued every branch, 14 to 200 microseconds at each step.

namespace kernels {

// Embeddings of some width, a multiple of 8; SCALED: times a number, a T.
template <bool SCALED, typename T>
struct Embeddings {
  const T* rows;

  __device__ __forceinline__ void look_up(long token, int width, float scale, T* hidden) const {
    const uint4* from = reinterpret_cast<const uint4*>(rows + token * width);
    uint4* to = reinterpret_cast<uint4*>(hidden);
    for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
      uint4 of = from[i];
      if constexpr (SCALED) {
        const unsigned by = pack(scale, scale, rows);
        of = make_uint4(multiply_pair(of.x, by, rows), multiply_pair(of.y, by, rows),
                        multiply_pair(of.z, by, rows), multiply_pair(of.w, by, rows));
      }
      to[i] = of;
    }
  }
};

// The same as MLX packs them, BITS an integer and GROUP of them with a scale and a bias.
template <bool SCALED, typename T, int BITS, int GROUP>
struct PackedEmbeddings {
  const unsigned* words;
  const T *scales, *biases;

  __device__ __forceinline__ void look_up(long token, int width, float by, T* hidden) const {
    constexpr int EACH = 32 / BITS;
    const long group = token * (width / GROUP);
    for (int i = threadIdx.x; i < width / EACH; i += blockDim.x) {
      const unsigned word = words[token * (width / EACH) + i];
      const int at = i * EACH;
      const float scale = float(scales[group + at / GROUP]);
      const float bias = float(biases[group + at / GROUP]);
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const T of = T(float(word >> e * BITS & ((1u << BITS) - 1)) * scale + bias);
        hidden[at + e] = SCALED ? T(float(of) * by) : of;
      }
    }
  }
};

// Cosines and sines of a kind of rotation as `Fresh` of heads.cu has them; `frequencies` are DIMS / 2
// radians a position.
template <int DIMS, bool TRADITIONAL>
struct Turned {
  const float* frequencies;
  const float* rotations;
  float amplitude;

  __device__ __forceinline__ void write(int row, int position) const {
    constexpr int HALF = DIMS / 2;
    float* rotation = const_cast<float*>(rotations) + (long)row * DIMS;
    for (int d = threadIdx.x; d < DIMS; d += blockDim.x) {
      const float angle = float(position) * frequencies[TRADITIONAL ? d / 2 : d % HALF];
      const bool cosine = TRADITIONAL ? d % 2 == 0 : d < HALF;
      rotation[d] = (cosine ? cosf(angle) : sinf(angle)) * amplitude;
    }
  }
};

// A block has a row. SHIFTED: `shifts` are added to positions.
template <bool SHIFTED, typename T, typename EMBEDDINGS, typename... TURNED>
__device__ __forceinline__ void open_step(const unsigned* tokens, const int* before,
                                          const int* shifts, EMBEDDINGS embeddings, int width,
                                          float scale, T* hidden, int* following,
                                          const int* lengths, TURNED... turned) {
  const int row = blockIdx.x;
  embeddings.look_up(tokens[row], width, scale, hidden + (long)row * width);
  const int position = before[row];
  if (threadIdx.x == 0)
    const_cast<int*>(lengths)[row] = following[row] = position > 0 ? position + 1 : 0;
  (turned.write(row, SHIFTED ? position + shifts[row] : position), ...);
}

}  // namespace kernels
