// The gated product of a step's rows with a large matrix on compute capability 9.0, by warpgroups.
//
// A block gives 32 * GROUPS outputs of up to ROWS rows: it multiplies as many gates and as many ups
// with the rows. Its stages hold 64 inputs of every weight row and of every row, filled by cp.async;
// each warpgroup multiplies its 64 weight rows, the first operand, with all rows, straight from
// shared memory. An RMS norm before the product costs no launch: each thread multiplies the norm's
// weights into the pieces that it has copied, and sums their squares, if who made the rows has not
// done that; 1 / rms comes at the end.

namespace kernels {

constexpr int kGroupInputs = 64;

// `AT`: where the rows are.
template <typename T, int GROUPS, int ROWS, int STAGES, int NORM, typename AT = InOrder>
struct GroupProduct {
  static constexpr int THREADS = GROUPS * 128;
  static constexpr int OUTPUTS = GROUPS * 64;
  static constexpr int STAGE = (OUTPUTS + ROWS) * 128;
  static constexpr int STRIDE = OUTPUTS + 4;
  // 16-byte pieces of a stage's rows that a thread copies.
  static constexpr int PIECES = (ROWS * 8 + THREADS - 1) / THREADS;
  // Many rows keep the tensor cores busy: what is next is fetched behind their backs.
  static constexpr bool BUSY = ROWS > 64;
  static constexpr int LOOKED_UP = AT::kInOrder ? 1 : PIECES;

  const T* x;
  const T* norm;
  const float* made;
  const T* weight;
  int rows, inputs;
  // Weight rows of the block: `first` on, and from its middle `second` on.
  long first, second;
  unsigned char* shared_memory;
  AT at;
  // Where the rows begin that this thread copies, unless they are in order.
  unsigned starts[LOOKED_UP];

  float product[ROWS / 2];
  float squares[PIECES];
  // The norm's weights for the pieces that this thread copies.
  uint4 scale;

  __device__ __forceinline__ unsigned char* stage(int i) const {
    return shared_memory + i % STAGES * STAGE;
  }

  __device__ __forceinline__ long weight_row(int row) const {
    return row < OUTPUTS / 2 ? first + row : second + row - OUTPUTS / 2;
  }

  // Where piece `j` of this thread lies among a stage's rows.
  __device__ __forceinline__ static int row_of(int j) { return (threadIdx.x + j * THREADS) / 8; }

  __device__ __forceinline__ void look_up() {
    if constexpr (!AT::kInOrder) {
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        const int row = row_of(j);
        starts[j] = row < rows ? at.start(row, inputs) : 0;
      }
    }
  }

  __device__ __forceinline__ const T* row_at(int j) const {
    if constexpr (AT::kInOrder) return x + (long)row_of(j) * inputs;
    else return x + starts[j];
  }

  __device__ __forceinline__ void fetch(int i) const {
    if (i < inputs / kGroupInputs) {
      const int piece = threadIdx.x % 8;
      const long k = (long)i * kGroupInputs + piece * 8;
      unsigned char* to = stage(i);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int row = row_of(j);
        copy_async_in_order(to + swizzled(row, piece), weight + weight_row(row) * inputs + k);
      }
      to += OUTPUTS * 128;
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        const int row = row_of(j);
        if (row < rows) copy_async(to + swizzled(row, piece), row_at(j) + k, 16);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void fetch_scale(int i) {
    if (NORM == kNormHere && i < inputs / kGroupInputs) {
      const T* from = norm + (long)i * kGroupInputs + threadIdx.x % 8 * 8;
      scale = *reinterpret_cast<const uint4*>(from);
    }
  }

  __device__ __forceinline__ void scale_rows(int i) {
    const T* type = nullptr;
    const uint4 by = scale;
    fetch_scale(i + 1);
    unsigned char* tile = stage(i) + OUTPUTS * 128;
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      const int row = row_of(j);
      if (row >= rows) continue;
      uint4* at = reinterpret_cast<uint4*>(tile + swizzled(row, threadIdx.x % 8));
      uint4 of = *at;
      of.x = scaled(of.x, by.x, squares[j], type);
      of.y = scaled(of.y, by.y, squares[j], type);
      of.z = scaled(of.z, by.z, squares[j], type);
      of.w = scaled(of.w, by.w, squares[j], type);
      *at = of;
    }
  }

  // Returns the product, [ROWS][STRIDE], then sums of squares, [ROWS].
  __device__ __forceinline__ const float* run() {
    const T* type = nullptr;
    const int group = threadIdx.x / 128;
    const int count = inputs / kGroupInputs;
#pragma unroll
    for (int e = 0; e < ROWS / 2; e++) product[e] = 0.f;
#pragma unroll
    for (int j = 0; j < PIECES; j++) squares[j] = 0.f;
    Squares<NORM, ROWS, GROUPS * 4> summed;
    summed.ask(made, rows);
    look_up();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
    fetch_scale(0);
    for (int i = 0; i < count; i++) {
      wait_copies<STAGES - 2>();
      if constexpr (NORM == kNormHere) scale_rows(i);
      show_to_products();
      wait_products<0>();
      __syncthreads();
      if constexpr (!BUSY) fetch(i + STAGES - 1);
      const unsigned char* a = stage(i) + group * 64 * 128;
      const unsigned char* b = stage(i) + OUTPUTS * 128;
      begin_products();
#pragma unroll
      for (int step = 0; step < 4; step++)
        multiply_group(product, describe_tile(a + step * 32), describe_tile(b + step * 32), true,
                       type);
      commit_products();
      if constexpr (BUSY) fetch(i + STAGES - 1);
    }
    wait_products<0>();
    settle(product);
    wait_copies<0>();
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      squares[j] += shuffle_xor(squares[j], 1);
      squares[j] += shuffle_xor(squares[j], 2);
      squares[j] += shuffle_xor(squares[j], 4);
    }
    __syncthreads();
    return publish(summed);
  }

  __device__ __forceinline__ const float* publish(
      const Squares<NORM, ROWS, GROUPS * 4>& summed) const {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float* result = reinterpret_cast<float*>(shared_memory);
    float* sums = result + ROWS * STRIDE;
    const int out = group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        result[(j * 8 + lane % 4 * 2 + e % 2) * STRIDE + out + e / 2 * 8] = product[j * 4 + e];
    summed.add_up(sums);
    if constexpr (NORM == kNormHere) {
#pragma unroll
      for (int j = 0; j < PIECES; j++)
        if (lane % 8 == 0 && row_of(j) < ROWS) sums[row_of(j)] = squares[j];
    }
    __syncthreads();
    return result;
  }

  __device__ __forceinline__ float factor(const float* result, int row, float epsilon) const {
    return NORM == kNoNorm ? 1.f : rsqrtf(result[ROWS * STRIDE + row] / inputs + epsilon);
  }
};

template <typename T>
__device__ __forceinline__ float2 pair_at(const T* from) {
  return unpack(*reinterpret_cast<const unsigned*>(from), from);
}

struct ByGroups {};

// out = ACTIVATION of gate and up, the first and the last `outputs` of norm(x) @ weight^T + bias, for
// any number of rows: each block has its share of them.
template <typename, typename ACTIVATION, typename T, int GROUPS, int ROWS, int STAGES, int NORM,
          bool BIAS>
__device__ __forceinline__ void gated(const T* all_x, const T* norm, const float* all_made,
                                      const T* weight, const T* bias, T* all_out, int all_rows,
                                      int inputs, int outputs, float epsilon) {
  const Share share = Share::of<ROWS>(all_rows);
  const int rows = share.rows, block = share.block;
  const T* x = all_x + (long)share.first * inputs;
  const float* made = NORM > 0 ? all_made + (long)share.first * NORM : nullptr;
  T* out = all_out + (long)share.first * outputs;
  using Product = GroupProduct<T, GROUPS, ROWS, STAGES, NORM>;
  constexpr int EACH = Product::OUTPUTS / 2, PAIRS = EACH / 2;
  Product product;
  product.x = x;
  product.norm = norm;
  product.made = made;
  product.weight = weight;
  product.rows = rows;
  product.inputs = inputs;
  product.shared_memory = tiles_in_shared_memory();
  const long first = (long)block * EACH;
  product.first = first;
  product.second = outputs + first;
  const float* result = product.run();
  for (int i = threadIdx.x; i < rows * PAIRS; i += Product::THREADS) {
    const int row = i / PAIRS, at = i % PAIRS * 2;
    const float by = product.factor(result, row, epsilon);
    const float* from = result + row * Product::STRIDE + at;
    float2 gate = *reinterpret_cast<const float2*>(from);
    float2 up = *reinterpret_cast<const float2*>(from + EACH);
    gate.x *= by;
    gate.y *= by;
    up.x *= by;
    up.y *= by;
    if (BIAS) {
      const float2 gates = pair_at(bias + first + at), ups = pair_at(bias + outputs + first + at);
      gate.x += gates.x;
      gate.y += gates.y;
      up.x += ups.x;
      up.y += ups.y;
    }
    *reinterpret_cast<unsigned*>(out + (long)row * outputs + first + at) =
        pack(ACTIVATION::gated(gate.x, up.x), ACTIVATION::gated(gate.y, up.y), out);
  }
}

}  // namespace kernels
