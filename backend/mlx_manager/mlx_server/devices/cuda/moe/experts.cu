// The products of experts: see route.cu. A block does a part of an errand.
//
// Gates and ups of all experts are one weight, the gates of the first to the last before the ups,
// and so is the way down.

namespace kernels {

// gated[place] of an errand's pairs, for their rows of `x`. `width` gates of each expert. BIAS: a
// number of each line of the weight is added.
template <typename T, int TILES, int HELD, int WARPS, int STAGES, typename ACTIVATION, bool BIAS,
          typename W>
__device__ __forceinline__ void gate_errand(const T* x, const int* order, const int* errands,
                                            W weight, const T* bias, T* out, int inputs, int width,
                                            int experts) {
  constexpr int EACH = TILES * 8;
  const int parts = width / EACH, first = blockIdx.x % parts * EACH;
  const Errand errand = Errand::at(errands, blockIdx.x / parts);
  if (errand.rows == 0) return;
  Product<T, W, TILES, HELD, WARPS, STAGES, kNoNorm, Listed> product;
  const long line = (long)errand.expert * width + first;
  product.weight = weight;
  product.x = x;
  product.at = {order + errand.first};
  product.inputs = inputs;
  product.rows = errand.rows;
  product.lines = {line, (long)experts * width + line};
  const float* merged = product.run(Awaited(), [] {});
  constexpr int N = product.AT_ONCE, PIECES = EACH / N;
  using Values = Neighbours<T, N>;
  for (int i = threadIdx.x; i < errand.rows * PIECES; i += WARPS * 32) {
    const int row = i / PIECES, at = i % PIECES * N;
    float gate[N], up[N];
    product.total(gate, merged, row, at, 1.f);
    product.total(up, merged, row, EACH + at, 1.f);
    if (BIAS) {
      add(gate, Values::at(bias + product.lines.first + at));
      add(up, Values::at(bias + product.lines.second + at));
    }
    Values result;
#pragma unroll
    for (int e = 0; e < N; e++) result.of[e] = T(ACTIVATION::gated(gate[e], up[e]));
    result.put(out + (long)(errand.first + row) * width + first + at);
  }
}

// What is mixed, (rows, width), where it is; see mix_rows. `done`: of the blocks that have the same
// outputs.
template <typename T>
struct Mixed {
  const int* done;
  const T* residual;
  const int* places;
  const float* scores;
  T* out;
  int rows;
};

// given[place] of an errand's pairs, for their `gated`. `outputs` of each expert. BIAS: as above.
// CHOSEN: 0, or as many as a row's experts are: the last block of those that have the same outputs
// mixes these.
template <typename T, int TILES, int HELD, int WARPS, int STAGES, bool BIAS, int CHOSEN, typename W>
__device__ __forceinline__ void lower_errand(const T* gated, const int* errands, W weight,
                                             const T* bias, T* out, int inputs, int outputs,
                                             Mixed<T> mixed) {
  Product<T, W, TILES, HELD, WARPS, STAGES, kNoNorm> product;
  const int parts = outputs / product.OUTPUTS, part = blockIdx.x % parts;
  const int first = part * product.OUTPUTS;
  const Errand errand = Errand::at(errands, blockIdx.x / parts);
  if (errand.rows > 0) {
    const long line = (long)errand.expert * outputs + first;
    product.weight = weight;
    product.x = gated + (long)errand.first * inputs;
    product.inputs = inputs;
    product.rows = errand.rows;
    product.lines = {line, line + product.OUTPUTS / 2};
    const float* merged = product.run(Awaited(), [] {});
    constexpr int N = product.AT_ONCE, PIECES = product.OUTPUTS / N;
    using Values = Neighbours<T, N>;
    for (int i = threadIdx.x; i < errand.rows * PIECES; i += WARPS * 32) {
      const int row = i / PIECES, at = i % PIECES * N;
      float y[N];
      product.total(y, merged, row, at, 1.f);
      if (BIAS) add(y, Values::at(bias + line + at));
      Values result;
#pragma unroll
      for (int e = 0; e < N; e++) result.of[e] = T(y[e]);
      result.put(out + (long)(errand.first + row) * outputs + first + at);
    }
  }
  if constexpr (CHOSEN > 0) {
    extern __shared__ __align__(16) unsigned char shared[];
    int* last = reinterpret_cast<int*>(shared);
    if (!arrives_last(mixed.done + part, gridDim.x / parts, last)) return;
    constexpr int PIECES = product.OUTPUTS / 8;
    for (int i = threadIdx.x; i < mixed.rows * PIECES; i += WARPS * 32)
      mix_rows<T, CHOSEN>(mixed.residual, out, mixed.places, mixed.scores, mixed.out, mixed.rows,
                          outputs, i / PIECES * (outputs / 8) + first / 8 + i % PIECES);
  }
}

}  // namespace kernels
