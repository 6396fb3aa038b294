// The product of one row with a matrix whose weights are packed: bound by reading that once.
//
// With few rows much of products.cu's work per weight is what it does to the rows, in every lane.
// Here a block arranges its row once, in shared memory: times the norm's weights, in pairs, with the
// sums of its groups beside it. Its warps then see weights alone: each gives 16 outputs, or where a
// product has too few for that, a share of their inputs, which meet at the end. A warp's first
// weights are under way before the row is there.

namespace kernels {

// `SPLIT`: how many warps share the inputs of 16 outputs.
template <typename T, typename W, int SPLIT, int WARPS, int STAGES, int NORM>
struct RowProduct {
  static constexpr int TEAMS = WARPS / SPLIT, OUTPUTS = 16 * TEAMS;
  static constexpr int WIDTH = W::WIDTH, STAGE = W::template stage<16>();

  W weight;
  int inputs, warp, lane, begin, count;
  Lines lines;
  uint4* row;
  float* sums;
  unsigned char* stages;
  float output[1][1][4];

  // By which `W` reads the row.
  struct Reader {
    static constexpr bool ARRANGED = true;
    const uint4* row;
    const float* sums;

    __device__ __forceinline__ void operator()(uint4 (&b)[1], int piece) const {
      b[0] = row[piece];
    }
    __device__ __forceinline__ float sum(int group) const { return sums[group]; }
  };

  __device__ __forceinline__ unsigned char* stage(int i) const {
    return stages + i % STAGES * STAGE;
  }

  __device__ __forceinline__ void fetch(int i) {
    if (i < count)
      weight.template fetch<16>(stage(i), lines, inputs, (begin + i) * WIDTH, lane);
    commit_copies();
  }

  // Leaves the row as it is multiplied and the sums of its groups; returns the thread's share of
  // the sum of squares.
  __device__ __forceinline__ float arrange(const T* x, const T* norm) {
    const T* type = nullptr;
    constexpr int EACH = W::OF_GROUP / 8;
    const int pieces = inputs / 8;
    float squares = 0.f;
#pragma unroll 4
    for (int first = warp * 32; first < pieces; first += WARPS * 32) {
      const int piece = first + lane;
      uint4 of = make_uint4(0, 0, 0, 0);
      if (piece < pieces) of = read_shared_result(reinterpret_cast<const uint4*>(x) + piece);
      if constexpr (NORM == kNormHere) {
        uint4 by = make_uint4(0, 0, 0, 0);
        if (piece < pieces) by = reinterpret_cast<const uint4*>(norm)[piece];
        of = make_uint4(scaled(of.x, by.x, squares, type), scaled(of.y, by.y, squares, type),
                        scaled(of.z, by.z, squares, type), scaled(of.w, by.w, squares, type));
      }
      float sum =
          sum_of(of.x, type) + sum_of(of.y, type) + (sum_of(of.z, type) + sum_of(of.w, type));
#pragma unroll
      for (int lanes = 1; lanes < EACH; lanes *= 2) sum += shuffle_xor(sum, lanes);
      if (piece < pieces) {
        row[piece] = W::arranged(of);
        if (lane % EACH == 0) sums[piece / EACH] = sum;
      }
    }
    return squares;
  }

  // Leaves [WARPS][16] shares, then each warp's share of the sum of squares. `await_row` returns
  // once the row is there; `of_team` gives the lines of a team, by its number.
  template <typename AWAIT, typename LINES>
  __device__ __forceinline__ float* run(const T* x, const T* norm, AWAIT await_row, LINES of_team) {
    extern __shared__ __align__(16) unsigned char shared[];
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    row = reinterpret_cast<uint4*>(shared);
    sums = reinterpret_cast<float*>(shared + inputs * sizeof(T));
    const int of_sums = inputs / W::OF_GROUP * int(sizeof(float));
    unsigned char* behind = shared + inputs * sizeof(T) + (of_sums + 15) / 16 * 16;
    float* merged = reinterpret_cast<float*>(behind);
    stages = behind + WARPS * 20 * sizeof(float) + warp * STAGES * STAGE;
    const int all = inputs / WIDTH, part = warp % SPLIT;
    begin = all * part / SPLIT;
    count = all * (part + 1) / SPLIT - begin;
    lines = of_team(warp / SPLIT);
#pragma unroll
    for (int e = 0; e < 4; e++) output[0][0][e] = 0.f;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
    await_row();
    float squares = arrange(x, norm);
    __syncthreads();
    for (int i = 0; i < count; i++) {
      wait_copies<STAGES - 2>();
      __syncwarp();
      fetch(i + STAGES - 1);
      const int k = (begin + i) * WIDTH;
      weight.take(output, stage(i), inputs, k, lane,
                  Reader{row + k / 8, sums + k / W::OF_GROUP});
      __syncwarp();
    }
    wait_copies<0>();
    if (lane % 4 == 0) {
      merged[warp * 16 + lane / 4] = output[0][0][0];
      merged[warp * 16 + 8 + lane / 4] = output[0][0][2];
    }
    if constexpr (NORM == kNormHere) {
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) squares += shuffle_xor(squares, lanes);
      if (lane == 0) merged[WARPS * 16 + warp] = squares;
    }
    __syncthreads();
    return merged;
  }

  // Output `at` of a team's, from what `run` left.
  __device__ __forceinline__ float total(const float* merged, int team, int at, float by) const {
    float y = 0.f;
#pragma unroll
    for (int part = 0; part < SPLIT; part++) y += merged[(team * SPLIT + part) * 16 + at];
    return NORM == kNormHere ? y * by : y;
  }

  // What the norm multiplies the row by in the end.
  __device__ __forceinline__ float factor(const float* merged, float epsilon) const {
    float sum = 0.f;
    if constexpr (NORM == kNormHere) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += merged[WARPS * 16 + w];
    }
    return rsqrtf(sum / inputs + epsilon);
  }
};

struct OneRow {
  // Of a block.
  template <int SPLIT, int WARPS>
  __host__ __device__ static constexpr int outputs() {
    return 16 * WARPS / SPLIT;
  }

  // As FewRows::multiply, for one row, and no part of a norm but its own.
  template <typename T, int SPLIT, int HELD, int WARPS, int STAGES, int NORM, bool BIAS,
            bool RESIDUAL, bool AHEAD, typename W, typename AWAIT>
  __device__ __forceinline__ static void multiply(const T* x, const T* norm, const float*, W weight,
                                                  const T* bias, const T* residual, T* out,
                                                  Ahead<T>, int, int inputs, int, float epsilon,
                                                  int block, AWAIT await_row) {
    static_assert(HELD == 1 && NORM <= 0 && !AHEAD);
    RowProduct<T, W, SPLIT, WARPS, STAGES, NORM> product;
    product.weight = weight;
    product.inputs = inputs;
    const int first = block * product.OUTPUTS;
    const float* merged = product.run(x, norm, await_row, [&](int team) {
      return Lines{first + team * 16, first + team * 16 + 8};
    });
    const int at = threadIdx.x;
    if (at >= product.OUTPUTS) return;
    float y = product.total(merged, at / 16, at % 16, product.factor(merged, epsilon));
    if (BIAS) y += float(bias[first + at]);
    if (RESIDUAL) y += float(residual[first + at]);
    out[first + at] = T(y);
  }

  // As FewRows::gated.
  template <typename ACTIVATION, typename T, int SPLIT, int HELD, int WARPS, int STAGES, int NORM,
            bool BIAS, typename W, typename AWAIT>
  __device__ __forceinline__ static void gated(const T* x, const T* norm, const float*, W weight,
                                               const T* bias, T* out, int, int inputs, int outputs,
                                               float epsilon, int block, AWAIT await_row) {
    static_assert(HELD == 1 && NORM <= 0);
    RowProduct<T, W, SPLIT, WARPS, STAGES, NORM> product;
    product.weight = weight;
    product.inputs = inputs;
    const int first = block * product.OUTPUTS / 2;
    const float* merged = product.run(x, norm, await_row, [&](int team) {
      return Lines{first + team * 8, outputs + first + team * 8};
    });
    const int at = threadIdx.x;
    if (at >= product.OUTPUTS / 2) return;
    const float by = product.factor(merged, epsilon);
    float gate = product.total(merged, at / 8, at % 8, by);
    float up = product.total(merged, at / 8, 8 + at % 8, by);
    if (BIAS) {
      gate += float(bias[first + at]);
      up += float(bias[outputs + first + at]);
    }
    out[first + at] = T(ACTIVATION::gated(gate, up));
  }
};

}  // namespace kernels
