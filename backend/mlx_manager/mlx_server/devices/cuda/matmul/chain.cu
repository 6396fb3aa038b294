// What lies between the attentions of two layers, in one launch: four products, of which each takes
// the rows that the one before gives.
//
//   hidden = residual + output(attended)
//   gated = ACTIVATION of gate and up, both of norm(hidden)
//   result = hidden + down(gated)
//   heads = qkv(norm(result)), of the layer that follows, if one does
//
// `between` has all rows of `hidden`, then all of `gated`.
//
// Each block has a part of one product, in that order. It has the first of its weights under way
// while the product before ends, and waits until all parts of that are counted. A block waits for
// blocks of lower numbers alone, which the device begins before it (CUB's scans build on that, too):
// so those waited for are running or done, whatever else the device does.

namespace kernels {

// Rows that `makers` earlier blocks of the launch make, which count themselves in `made`.
struct After {
  static constexpr bool kNeeded = true;
  const int* made;
  int makers;

  __device__ __forceinline__ void operator()() const {
    if (threadIdx.x == 0) await_count(made, makers);
    __syncthreads();
  }
};

// Counts this block in `made`, and says how many were before it; to the first thread alone.
__device__ __forceinline__ int count_in(const int* made) {
  __syncthreads();
  return threadIdx.x == 0 ? count_after_writes(const_cast<int*>(made)) : -1;
}

// A product: its weight is (outputs, inputs), and `bias` and `norm` are there if it has them.
template <typename T, typename W>
struct Link {
  W weight;
  const T *bias, *norm;
  int outputs, inputs;
  float epsilon;
};

// `made` counts the blocks that are done with each product, and is all 0 again at the end. `BY`: what
// multiplies. `T0` to `T3`: tiles of the products' blocks, or warps that share 16 outputs; `B0` to
// `B3`: which products have biases. `COUNT`: 3, or 4 if a layer follows.
template <typename BY, typename ACTIVATION, typename T, int T0, int T1, int T2, int T3, int HELD,
          int WARPS, int STAGES, bool B0, bool B1, bool B2, bool B3, typename W, int COUNT>
__device__ __forceinline__ void chain_products(const T* attended, const T* residual,
                                               const Link<T, W> (&links)[COUNT], const int* made,
                                               T* between, T* result, T* heads, int rows) {
  const Link<T, W>&output = links[0], &gate_up = links[1], &down = links[2];
  T *hidden = between, *gated = between + (long)rows * output.outputs;
  const int of_output = output.outputs / BY::template outputs<T0, WARPS>();
  const int of_gate_up = gate_up.outputs / BY::template outputs<T1, WARPS>();
  const int of_down = down.outputs / BY::template outputs<T2, WARPS>();
  int block = blockIdx.x;
  int done = -1;
  if (block < of_output) {
    BY::template multiply<T, T0, HELD, WARPS, STAGES, kNoNorm, B0, true, false>(
        attended, output.norm, nullptr, output.weight, output.bias, residual, hidden, {}, rows,
        output.inputs, output.outputs, 0.f, block, Awaited());
    count_in(made);
    return;
  }
  block -= of_output;
  if (block < of_gate_up) {
    BY::template gated<ACTIVATION, T, T1, HELD, WARPS, STAGES, kNormHere, B1>(
        hidden, gate_up.norm, nullptr, gate_up.weight, gate_up.bias, gated, rows, gate_up.inputs,
        gate_up.outputs / 2, gate_up.epsilon, block, After{made, of_output});
    count_in(made + 1);
    return;
  }
  block -= of_gate_up;
  if (block < of_down) {
    BY::template multiply<T, T2, HELD, WARPS, STAGES, kNoNorm, B2, true, false>(
        gated, down.norm, nullptr, down.weight, down.bias, hidden, result, {}, rows, down.inputs,
        down.outputs, 0.f, block, After{made + 1, of_gate_up});
    done = count_in(made + 2) - (of_down - 1);
    if (COUNT == 4) return;
  } else if constexpr (COUNT == 4) {
    const Link<T, W>& qkv = links[3];
    block -= of_down;
    BY::template multiply<T, T3, HELD, WARPS, STAGES, kNormHere, B3, false, false>(
        result, qkv.norm, nullptr, qkv.weight, qkv.bias, nullptr, heads, {}, rows, qkv.inputs,
        qkv.outputs, qkv.epsilon, block, After{made + 2, of_down});
    done = count_in(made + 3) - (qkv.outputs / BY::template outputs<T3, WARPS>() - 1);
  }
  // Of the last product, the last block: nobody waits any more.
  if (done == 0)
    for (int i = 0; i < 4; i++) const_cast<int*>(made)[i] = 0;
}

}  // namespace kernels
