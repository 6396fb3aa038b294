// The products of experts of many rows by warpgroups: see experts.cu, whose errands these are, and
// groups.cu. A block has up to ROWS pairs of an expert, whose weights it reads once for all of them.

namespace kernels {

// gated[place] of an errand's pairs, for their rows of `x`. `width` gates of each expert. BIAS: a
// number of each line of the weight is added.
template <typename T, int GROUPS, int ROWS, int STAGES, typename ACTIVATION, bool BIAS>
__device__ __forceinline__ void gate_group_errand(const T* x, const int* order, const int* errands,
                                                  const T* weight, const T* bias, T* out,
                                                  int inputs, int width, int experts) {
  using Product = GroupProduct<T, GROUPS, ROWS, STAGES, kNoNorm, Listed>;
  constexpr int EACH = Product::OUTPUTS / 2, PAIRS = EACH / 2;
  const int parts = width / EACH, first = blockIdx.x % parts * EACH;
  const Errand errand = Errand::at(errands, blockIdx.x / parts);
  if (errand.rows == 0) return;
  const long line = (long)errand.expert * width + first;
  Product product;
  product.x = x;
  product.at = {order + errand.first};
  product.made = nullptr;
  product.weight = weight;
  product.rows = errand.rows;
  product.inputs = inputs;
  product.shared_memory = tiles_in_shared_memory();
  product.first = line;
  product.second = (long)experts * width + line;
  const float* result = product.run();
  for (int i = threadIdx.x; i < errand.rows * PAIRS; i += Product::THREADS) {
    const int row = i / PAIRS, at = i % PAIRS * 2;
    const float* from = result + row * Product::STRIDE + at;
    float2 gate = *reinterpret_cast<const float2*>(from);
    float2 up = *reinterpret_cast<const float2*>(from + EACH);
    if (BIAS) {
      const float2 gates = pair_at(bias + product.first + at);
      const float2 ups = pair_at(bias + product.second + at);
      gate.x += gates.x;
      gate.y += gates.y;
      up.x += ups.x;
      up.y += ups.y;
    }
    *reinterpret_cast<unsigned*>(out + (long)(errand.first + row) * width + first + at) =
        pack(ACTIVATION::gated(gate.x, up.x), ACTIVATION::gated(gate.y, up.y), out);
  }
}

// given[place] of an errand's pairs, for their `gated`. `outputs` of each expert. BIAS: as above.
template <typename T, int GROUPS, int ROWS, int STAGES, bool BIAS>
__device__ __forceinline__ void lower_group_errand(const T* gated, const int* errands,
                                                   const T* weight, const T* bias, T* out,
                                                   int inputs, int outputs) {
  using Product = GroupProduct<T, GROUPS, ROWS, STAGES, kNoNorm>;
  constexpr int PAIRS = Product::OUTPUTS / 2;
  const int parts = outputs / Product::OUTPUTS, first = blockIdx.x % parts * Product::OUTPUTS;
  const Errand errand = Errand::at(errands, blockIdx.x / parts);
  if (errand.rows == 0) return;
  const long line = (long)errand.expert * outputs + first;
  Product product;
  product.x = gated + (long)errand.first * inputs;
  product.made = nullptr;
  product.weight = weight;
  product.rows = errand.rows;
  product.inputs = inputs;
  product.shared_memory = tiles_in_shared_memory();
  product.first = line;
  product.second = line + Product::OUTPUTS / 2;
  const float* result = product.run();
  for (int i = threadIdx.x; i < errand.rows * PAIRS; i += Product::THREADS) {
    const int row = i / PAIRS, at = i % PAIRS * 2;
    float2 y = *reinterpret_cast<const float2*>(result + row * Product::STRIDE + at);
    if (BIAS) {
      const float2 more = pair_at(bias + line + at);
      y.x += more.x;
      y.y += more.y;
    }
    *reinterpret_cast<unsigned*>(out + (long)(errand.first + row) * outputs + first + at) =
        pack(y.x, y.y, out);
  }
}

}  // namespace kernels
