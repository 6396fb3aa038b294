// Products of few rows with large matrices: bound by reading the matrix once.
//
// A block gives 16 * TILES outputs of up to 8 * COLUMNS rows. Its warps take turns at the 64 columns
// of a stage: each walks its own through a ring filled by cp.async, 128 bytes of every weight row
// and of every input row at a time, and adds up its share on the tensor cores with the weights as
// the first operand and the rows as the second. Which 4 of a lane's 8 neighbouring elements count as
// which k of an mma is the same for both, so each lane reads its 16 bytes as they lie. The shares
// meet in shared memory at the end. An RMS norm before the product costs nothing: its weights are
// multiplied into the rows on the way, the squares are summed beside the product, and 1 / rms is
// applied to the result.

namespace kernels {

constexpr int kWidth = 64;

// Rows that are there when the launch begins.
struct Awaited {
  static constexpr bool kNeeded = false;
  __device__ __forceinline__ void operator()() const {}
};

template <typename T, int TILES, int COLUMNS, int WARPS, int STAGES, bool NORM>
struct Product {
  static constexpr int OUTPUTS = TILES * 16;
  static constexpr int ROWS = COLUMNS * 8;
  static constexpr int STAGE = (OUTPUTS + ROWS + (NORM ? 1 : 0)) * kWidth;
  static constexpr int MERGE_STRIDE = OUTPUTS + 4;

  const T* weight;
  const T* x;
  const T* norm;
  int inputs, rows, count, warp, lane;
  // Weight rows of the block's tiles: `first` on, and from tile TILES / 2 on `second` on.
  long first, second;
  T* stages;

  float output[TILES][COLUMNS][4];
  float squares[COLUMNS];

  __device__ __forceinline__ long weight_row(int row) const {
    return row < OUTPUTS / 2 ? first + row : second + row - OUTPUTS / 2;
  }

  // Where 16-byte piece `piece` of row `row` lies in a stage. Odd rows swap their halves, so that
  // the two rows that 8 lanes read at once fall into different banks.
  __device__ __forceinline__ static int place(int row, int piece) {
    return row * kWidth + (piece ^ (row % 2 * 4)) * 8;
  }

  // Of the columns of stage `i`: the first that this lane copies.
  __device__ __forceinline__ long column(int i) const {
    return (long)(warp + i * WARPS) * kWidth + lane % 8 * 8;
  }

  __device__ __forceinline__ void fetch_weights(int i) {
    if (i >= count) return;
    const long k = column(i);
    T* stage = stages + (i % STAGES) * STAGE;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 4; j++) {
      const int row = j * 4 + lane / 8;
      copy_async(stage + place(row, lane % 8), weight + weight_row(row) * inputs + k, 16);
    }
    if (NORM && lane < 8) copy_async_cached(stage + place(OUTPUTS + ROWS, lane), norm + k);
  }

  __device__ __forceinline__ void fetch_rows(int i) {
    if (i < count) {
      const long k = column(i);
      T* stage = stages + (i % STAGES) * STAGE;
#pragma unroll
      for (int j = 0; j < ROWS / 4; j++) {
        const int row = j * 4 + lane / 8;
        if (row < rows)
          copy_async_cached(stage + place(OUTPUTS + row, lane % 8), x + (long)row * inputs + k);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void fetch(int i) {
    fetch_weights(i);
    fetch_rows(i);
  }

  __device__ __forceinline__ static uint4 read(const T* stage, int row, int piece) {
    return *reinterpret_cast<const uint4*>(stage + place(row, piece));
  }

  // `x` times `by`, pair by pair; adds the squares of `x` to `sum`.
  __device__ __forceinline__ static unsigned scaled(unsigned x, unsigned by, float& sum) {
    const T* type = nullptr;
    float2 a = unpack(x, type), b = unpack(by, type);
    sum += a.x * a.x + a.y * a.y;
    return pack(a.x * b.x, a.y * b.y, type);
  }

  __device__ __forceinline__ void take(const T* stage) {
    const T* type = nullptr;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int piece = half * 4 + lane % 4;
      uint4 b[COLUMNS];
      uint4 by;
      if constexpr (NORM) by = read(stage, OUTPUTS + ROWS, piece);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        b[n] = read(stage, OUTPUTS + n * 8 + lane / 4, piece);
        if constexpr (NORM) {
          b[n].x = scaled(b[n].x, by.x, squares[n]);
          b[n].y = scaled(b[n].y, by.y, squares[n]);
          b[n].z = scaled(b[n].z, by.z, squares[n]);
          b[n].w = scaled(b[n].w, by.w, squares[n]);
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint4 upper = read(stage, t * 16 + lane / 4, piece);
        const uint4 lower = read(stage, t * 16 + 8 + lane / 4, piece);
        const unsigned early[4] = {upper.x, lower.x, upper.y, lower.y};
        const unsigned late[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          multiply(output[t][n], early, b[n].x, b[n].y, type);
          multiply(output[t][n], late, b[n].z, b[n].w, type);
        }
      }
    }
  }

  // Leaves [WARPS][ROWS][MERGE_STRIDE] shares, then [WARPS][ROWS] sums of squares. `await_rows`
  // returns once the rows are there; the first weights are under way by then.
  template <typename AWAIT>
  __device__ __forceinline__ float* run(AWAIT await_rows) {
    extern __shared__ __align__(16) unsigned char shared[];
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    stages = reinterpret_cast<T*>(shared) + warp * STAGES * STAGE;
    count = (inputs / kWidth - warp + WARPS - 1) / WARPS;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      squares[n] = 0.f;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) output[t][n][e] = 0.f;
    }
    if constexpr (AWAIT::kNeeded) {
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch_weights(i);
      await_rows();
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch_rows(i);
    } else {
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch(i);
    }
    for (int i = 0; i < count; i++) {
      wait_copies<STAGES - 2>();
      __syncwarp();
      fetch(i + STAGES - 1);
      take(stages + (i % STAGES) * STAGE);
      __syncwarp();
    }
    wait_copies<0>();
    __syncthreads();

    float* merged = reinterpret_cast<float*>(shared);
    float* sums = merged + WARPS * ROWS * MERGE_STRIDE;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const int row = n * 8 + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          merged[(warp * ROWS + row + e % 2) * MERGE_STRIDE + t * 16 + e / 2 * 8 + lane / 4] =
              output[t][n][e];
      if constexpr (NORM) {
        float sum = squares[n];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (lane % 4 == 0) sums[warp * ROWS + n * 8 + lane / 4] = sum;
      }
    }
    __syncthreads();
    return merged;
  }

  // The product at a row and an output of the block, from what `run` left.
  __device__ __forceinline__ float at(const float* merged, int row, int out, float epsilon) const {
    const float* sums = merged + WARPS * ROWS * MERGE_STRIDE;
    float total = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      total += merged[(w * ROWS + row) * MERGE_STRIDE + out];
      if constexpr (NORM) sum += sums[w * ROWS + row];
    }
    return NORM ? total * rsqrtf(sum / inputs + epsilon) : total;
  }
};

// out = norm(x) @ weight^T + bias + residual, whichever of them there are. `outputs` in all.
// By block number `block` of as many as it takes.
template <typename T, int TILES, int COLUMNS, int WARPS, int STAGES, bool NORM, bool BIAS,
          bool RESIDUAL, typename AWAIT>
__device__ __forceinline__ void multiply_rows(const T* x, const T* norm, const T* weight,
                                              const T* bias, const T* residual, T* out, int rows,
                                              int inputs, int outputs, float epsilon, int block,
                                              AWAIT await_rows) {
  Product<T, TILES, COLUMNS, WARPS, STAGES, NORM> product;
  const int first = block * product.OUTPUTS;
  product.weight = weight;
  product.x = x;
  product.norm = norm;
  product.inputs = inputs;
  product.rows = rows;
  product.first = first;
  product.second = first + product.OUTPUTS / 2;
  const float* merged = product.run(await_rows);
  for (int i = threadIdx.x; i < rows * product.OUTPUTS; i += WARPS * 32) {
    const int row = i / product.OUTPUTS, at = i % product.OUTPUTS;
    float y = product.at(merged, row, at, epsilon);
    if (BIAS) y += float(bias[first + at]);
    if (RESIDUAL) y += float(residual[(long)row * outputs + first + at]);
    out[(long)row * outputs + first + at] = T(y);
  }
}

// out = silu(gate) * up, with gate and up the first and the last `outputs` of norm(x) @ weight^T +
// bias.
// By block number `block` of as many as it takes.
template <typename T, int TILES, int COLUMNS, int WARPS, int STAGES, bool NORM, bool BIAS,
          typename AWAIT>
__device__ __forceinline__ void multiply_gated(const T* x, const T* norm, const T* weight,
                                               const T* bias, T* out, int rows, int inputs,
                                               int outputs, float epsilon, int block,
                                               AWAIT await_rows) {
  Product<T, TILES, COLUMNS, WARPS, STAGES, NORM> product;
  constexpr int EACH = TILES * 8;
  const int first = block * EACH;
  product.weight = weight;
  product.x = x;
  product.norm = norm;
  product.inputs = inputs;
  product.rows = rows;
  product.first = first;
  product.second = outputs + first;
  const float* merged = product.run(await_rows);
  for (int i = threadIdx.x; i < rows * EACH; i += WARPS * 32) {
    const int row = i / EACH, at = i % EACH;
    float gate = product.at(merged, row, at, epsilon);
    float up = product.at(merged, row, EACH + at, epsilon);
    if (BIAS) {
      gate += float(bias[first + at]);
      up += float(bias[outputs + first + at]);
    }
    out[(long)row * outputs + first + at] = T(silu_times(gate, up));
  }
}

}  // namespace kernels
