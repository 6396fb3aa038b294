// What a decode step begins with: its newest tokens' embeddings, and what all layers take of where
// those stand. That is written in place, so that of all that comes after this launch only the first
// product and its residual wait for it: where a step's graph forks, the device waits until the
// driver has queued every branch, 14 to 200 microseconds at each step.

namespace kernels {

// One row of `embeddings`, `width` elements, a multiple of 8; SCALED: times `scale`, a T.
template <bool SCALED, typename T>
__device__ __forceinline__ void embed(const T* embedding, int width, float scale, T* hidden) {
  const uint4* from = reinterpret_cast<const uint4*>(embedding);
  uint4* to = reinterpret_cast<uint4*>(hidden);
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
    uint4 of = from[i];
    if constexpr (SCALED) {
      const unsigned by = pack(scale, scale, embedding);
      of = make_uint4(multiply_pair(of.x, by, embedding), multiply_pair(of.y, by, embedding),
                      multiply_pair(of.z, by, embedding), multiply_pair(of.w, by, embedding));
    }
    to[i] = of;
  }
}

// The same of a row as MLX packs it, BITS an integer and GROUP of them with a scale and a bias.
template <int BITS, int GROUP, bool SCALED, typename T>
__device__ __forceinline__ void embed_packed(const unsigned* words, const T* scales, const T* biases,
                                             int width, float by, T* hidden) {
  constexpr int EACH = 32 / BITS;
  for (int i = threadIdx.x; i < width / EACH; i += blockDim.x) {
    const unsigned word = words[i];
    const int at = i * EACH;
    const float scale = float(scales[at / GROUP]), bias = float(biases[at / GROUP]);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const T of = T(float(word >> e * BITS & ((1u << BITS) - 1)) * scale + bias);
      hidden[at + e] = SCALED ? T(float(of) * by) : of;
    }
  }
}

// Cosines and sines as `Fresh` of heads.cu has them; `frequencies` are DIMS / 2 radians a position.
template <int DIMS, bool TRADITIONAL>
__device__ __forceinline__ void turn(int position, const float* frequencies, float amplitude,
                                     float* rotation) {
  constexpr int HALF = DIMS / 2;
  for (int d = threadIdx.x; d < DIMS; d += blockDim.x) {
    const float angle = float(position) * frequencies[TRADITIONAL ? d / 2 : d % HALF];
    const bool cosine = TRADITIONAL ? d % 2 == 0 : d < HALF;
    rotation[d] = (cosine ? cosf(angle) : sinf(angle)) * amplitude;
  }
}

}  // namespace kernels
