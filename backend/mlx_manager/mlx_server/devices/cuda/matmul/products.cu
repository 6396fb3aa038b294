// Products of few rows with large matrices: bound by reading the matrix once.
//
// A block gives 16 * TILES outputs of up to HELD rows, by 8 as columns. Its warps take turns at the
// columns of a stage: each walks its own through a ring filled by cp.async, 128 bytes of every
// weight row and the same columns of every input row at a time, and adds up its share on the tensor
// cores with the weights as the first operand and the rows as the second. How the weights are stored
// is a type of its own: plain.cu, packed.cu. The shares meet in shared memory at the end. An RMS norm
// before the product costs no launch: its weights are multiplied into the rows on the way, the
// squares are summed beside the product, and 1 / rms is applied to the result. As every block does
// that for all rows, the product that makes the rows may do it: it leaves them multiplied with the
// weights, and each of its blocks the squares of its outputs. Copies go past the first-level cache:
// the more of a multiprocessor's memory is shared, the fewer through that cache are under way.

namespace kernels {

// Rows that are there when the launch begins.
struct Awaited {
  static constexpr bool kNeeded = false;
  __device__ __forceinline__ void operator()() const {}
};

template <typename E, int N>
__device__ __forceinline__ void add(float (&sum)[N], const Neighbours<E, N>& x) {
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] += float(x.of[e]);
}

// `W`: how the weights are stored. `HELD`: how many rows there may be. `AT`: where they are.
template <typename T, typename W, int TILES, int HELD, int WARPS, int STAGES, int NORM,
          typename AT = InOrder>
struct Product {
  static constexpr int OUTPUTS = TILES * 16;
  static constexpr int COLUMNS = HELD / 8, ROWS = HELD;
  static constexpr int WIDTH = W::WIDTH, PIECES = WIDTH / 8;
  // Of a stage, in bytes: the weights, the rows, the norm's weights.
  static constexpr int WEIGHTS = W::template stage<OUTPUTS>();
  static constexpr int STAGE =
      WEIGHTS + (HELD + (NORM == kNormHere ? 1 : 0)) * WIDTH * int(sizeof(T));
  static constexpr int MERGE_STRIDE = OUTPUTS + 4;
  // Outputs that a thread gives at once: with few rows there are more threads than outputs.
  static constexpr int AT_ONCE = COLUMNS == 1 ? 1 : 4;
  // A row's squares: of few rows as the diagonal of their product with themselves, since tensor
  // cores have time then.
  static constexpr bool DIAGONAL = COLUMNS == 1;
  static constexpr int SUMS = DIAGONAL ? 4 : 1;
  // Rows that a warp copies at once, and how often it does for a stage.
  static constexpr int EACH = 32 / PIECES, LOOKED_UP = AT::kInOrder ? 1 : (HELD + EACH - 1) / EACH;

  W weight;
  const T* x;
  const T* norm;
  const float* made;
  int inputs, rows, count, warp, lane;
  Lines lines;
  AT at;
  unsigned char* stages;
  // Where the rows begin that this lane copies, unless they are in order: looked up once.
  unsigned starts[LOOKED_UP];

  float output[TILES][COLUMNS][4];
  float squares[COLUMNS][SUMS];

  // Where 16-byte piece `piece` of an input row lies among those of a stage: the two rows that 8
  // lanes read at once fall into different banks.
  __device__ __forceinline__ static int place(int row, int piece) {
    return row * WIDTH + (piece ^ (row % 2 * W::SWAP)) * 8;
  }

  __device__ __forceinline__ unsigned char* stage(int i) const {
    return stages + (i % STAGES) * STAGE;
  }

  __device__ __forceinline__ static T* rows_of(unsigned char* stage) {
    return reinterpret_cast<T*>(stage + WEIGHTS);
  }

  __device__ __forceinline__ static T* norm_of(unsigned char* stage) {
    return rows_of(stage) + HELD * WIDTH;
  }

  // The first column of stage `i`.
  __device__ __forceinline__ int column(int i) const { return (warp + i * WARPS) * WIDTH; }

  __device__ __forceinline__ void fetch_weights(int i) {
    if (i >= count) return;
    const int k = column(i);
    weight.template fetch<OUTPUTS>(stage(i), lines, inputs, k, lane);
    if (NORM == kNormHere && lane < PIECES)
      copy_async(norm_of(stage(i)) + lane * 8, norm + k + lane * 8, 16);
  }

  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int j = 0; j < LOOKED_UP; j++) {
      const int row = lane / PIECES + j * EACH;
      starts[j] = row < rows ? at.start(row, inputs) : 0;
    }
  }

  __device__ __forceinline__ void fetch_rows(int i) {
    const int row = lane / PIECES, piece = lane % PIECES, left = rows - row;
    if (i < count) {
      T* to = rows_of(stage(i));
      // Where rows lie whose places differ by more than their number.
      T* by_turns[2] = {to + place(row, piece), to + place(row + EACH, piece) - EACH * WIDTH};
      if constexpr (AT::kInOrder) {
        const T* from = x + (unsigned(row * inputs) + column(i) + piece * 8);
#pragma unroll
        for (int j = 0; j < (HELD + EACH - 1) / EACH; j++, from += EACH * inputs)
          if (j * EACH < left) copy_async(by_turns[j % 2] + j * EACH * WIDTH, from, 16);
      } else {
        const T* from = x + (column(i) + piece * 8);
#pragma unroll
        for (int j = 0; j < LOOKED_UP; j++)
          if (j * EACH < left)
            copy_async(by_turns[j % 2] + j * EACH * WIDTH, from + starts[j], 16);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void fetch(int i) {
    fetch_weights(i);
    fetch_rows(i);
  }

  // 8 neighbouring columns of the rows that this lane holds for an mma's second operand, multiplied
  // with the norm's weights.
  __device__ __forceinline__ void read(uint4 (&b)[COLUMNS], const T* of, int piece) {
    const T* type = nullptr;
    uint4 by;
    if constexpr (NORM == kNormHere)
      by = *reinterpret_cast<const uint4*>(of + HELD * WIDTH + piece * 8);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const int row = n * 8 + lane / 4;
      b[n] = *reinterpret_cast<const uint4*>(of + place(row, piece));
      if constexpr (NORM == kNormHere) {
        if constexpr (DIAGONAL) {
          const unsigned early[4] = {b[n].x, 0, b[n].y, 0}, late[4] = {b[n].z, 0, b[n].w, 0};
          multiply(squares[n], early, b[n].x, b[n].y, type);
          multiply(squares[n], late, b[n].z, b[n].w, type);
          b[n] = {multiply_pair(b[n].x, by.x, type), multiply_pair(b[n].y, by.y, type),
                  multiply_pair(b[n].z, by.z, type), multiply_pair(b[n].w, by.w, type)};
        } else {
          b[n].x = scaled(b[n].x, by.x, squares[n][0], type);
          b[n].y = scaled(b[n].y, by.y, squares[n][0], type);
          b[n].z = scaled(b[n].z, by.z, squares[n][0], type);
          b[n].w = scaled(b[n].w, by.w, squares[n][0], type);
        }
      }
    }
  }

  // By which `W` reads a stage's rows.
  struct Reader {
    static constexpr bool ARRANGED = false;
    Product& own;
    const T* rows;

    __device__ __forceinline__ void operator()(uint4 (&b)[COLUMNS], int piece) const {
      own.read(b, rows, piece);
    }
  };

  __device__ __forceinline__ void take(int i) {
    weight.take(output, stage(i), inputs, column(i), lane, Reader{*this, rows_of(stage(i))});
  }

  // Leaves [WARPS][ROWS][MERGE_STRIDE] shares, then sums of squares: [WARPS][ROWS], or if others have
  // made them [ROWS]. `await_rows` returns once the rows are there; the first weights are under way
  // by then, unless it does so at once. `ask` reads what is needed at the end.
  template <typename AWAIT, typename ASK>
  __device__ __forceinline__ float* run(AWAIT await_rows, ASK ask) {
    Squares<NORM, ROWS, WARPS> summed;
    extern __shared__ __align__(16) unsigned char shared[];
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    stages = shared + warp * STAGES * STAGE;
    count = (inputs / WIDTH - warp + WARPS - 1) / WARPS;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int e = 0; e < SUMS; e++) squares[n][e] = 0.f;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) output[t][n][e] = 0.f;
    }
    if constexpr (W::kBegins)
      weight.template begin<OUTPUTS, WARPS * 32>(shared + WARPS * STAGES * STAGE, lines, inputs);
    if constexpr (AWAIT::kNeeded) {
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch_weights(i);
      await_rows();
      ask();
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch_rows(i);
    } else {
      summed.ask(made, rows);
      ask();
      if constexpr (AT::kInOrder) {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) fetch(i);
      } else {
        // Weights are under way while rows are looked up.
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) fetch_weights(i);
        look_up();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) fetch_rows(i);
      }
    }
    if constexpr (W::kBegins) {
      wait_copies<STAGES - 2>();
      __syncthreads();
    }
    for (int i = 0; i < count; i++) {
      wait_copies<STAGES - 2>();
      __syncwarp();
      fetch(i + STAGES - 1);
      take(i);
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
      if constexpr (NORM == kNormHere) {
        float sum;
        if constexpr (DIAGONAL) {
          sum = lane / 4 % 2 ? squares[n][1] : squares[n][0];
        } else {
          sum = squares[n][0];
          sum += shuffle_xor(sum, 1);
          sum += shuffle_xor(sum, 2);
        }
        if (lane % 4 == (DIAGONAL ? lane / 8 : 0)) sums[warp * ROWS + n * 8 + lane / 4] = sum;
      }
    }
    summed.add_up(sums);
    __syncthreads();
    return merged;
  }

  // The product at a row and the outputs of the block from `out` on, from what `run` left.
  __device__ __forceinline__ void total(float (&y)[AT_ONCE], const float* merged, int row, int out,
                                        float by) const {
#pragma unroll
    for (int e = 0; e < AT_ONCE; e++) y[e] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      add(y, Neighbours<float, AT_ONCE>::at(merged + (w * ROWS + row) * MERGE_STRIDE + out));
    if constexpr (NORM != kNoNorm) {
#pragma unroll
      for (int e = 0; e < AT_ONCE; e++) y[e] *= by;
    }
  }

  // What the norm multiplies a row by in the end.
  __device__ __forceinline__ float factor(const float* merged, int row, float epsilon) const {
    const float* sums = merged + WARPS * ROWS * MERGE_STRIDE;
    float sum = 0.f;
    if constexpr (NORM != kNoNorm) {
#pragma unroll
      for (int w = 0; w < (NORM == kNormHere ? WARPS : 1); w++) sum += sums[w * ROWS + row];
    }
    return rsqrtf(sum / inputs + epsilon);
  }
};

// What a product leaves for the one behind it: its rows times the norm's weights between the two,
// and of each row the squares that each block gave, [rows][blocks].
template <typename T>
struct Ahead {
  const T* norm;
  T* scaled;
  float* squares;
};

struct FewRows {
  // Of a block.
  template <int TILES, int WARPS>
  __host__ __device__ static constexpr int outputs() {
    return TILES * 16;
  }

  // out = norm(x) @ weight^T + bias + residual, whichever of them there are. `outputs` in all.
  // By block number `block` of as many as it takes.
  template <typename T, int TILES, int HELD, int WARPS, int STAGES, int NORM, bool BIAS,
            bool RESIDUAL, bool AHEAD, typename W, typename AWAIT>
  __device__ __forceinline__ static void multiply(const T* x, const T* norm, const float* made,
                                                  W weight, const T* bias, const T* residual,
                                                  T* out, Ahead<T> ahead, int rows, int inputs,
                                                  int outputs, float epsilon, int block,
                                                  AWAIT await_rows) {
    Product<T, W, TILES, HELD, WARPS, STAGES, NORM> product;
    const int first = block * product.OUTPUTS;
    product.made = made;
    product.weight = weight;
    product.x = x;
    product.norm = norm;
    product.inputs = inputs;
    product.rows = rows;
    product.lines = {first, first + product.OUTPUTS / 2};
    constexpr int N = product.AT_ONCE, PIECES = product.OUTPUTS / N, THREADS = WARPS * 32;
    // How often a thread gives N outputs of a row, and what goes with them.
    constexpr int TURNS = (product.ROWS * PIECES + THREADS - 1) / THREADS;
    using Values = Neighbours<T, N>;
    Values biases[TURNS], residuals[TURNS], norms[TURNS];
    const auto each = [&](auto give) {
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const int i = threadIdx.x + turn * THREADS, row = i / PIECES, at = i % PIECES * N;
        if (row < rows) give(turn, row, at, (long)row * outputs + first + at);
      }
    };
    const auto ask = [&](int turn, int, int at, long to) {
      if (BIAS) biases[turn] = Values::at(bias + first + at);
      if (RESIDUAL) residuals[turn] = Values::at(residual + to);
      if (AHEAD) norms[turn] = Values::at(ahead.norm + first + at);
    };
    float* merged = product.run(await_rows, [&] {
      if (AHEAD) each(ask);
    });
    each([&](int turn, int row, int at, long to) {
      if (!AHEAD) ask(turn, row, at, to);
      float y[N];
      product.total(y, merged, row, at, product.factor(merged, row, epsilon));
      if (BIAS) add(y, biases[turn]);
      if (RESIDUAL) add(y, residuals[turn]);
      Values result;
#pragma unroll
      for (int e = 0; e < N; e++) result.of[e] = T(y[e]);
      result.put(out + to);
      if constexpr (AHEAD) {
        float sum = 0.f;
#pragma unroll
        for (int e = 0; e < N; e++) {
          const float value = float(result.of[e]);
          sum += value * value;
          result.of[e] = T(value * float(norms[turn].of[e]));
        }
        result.put(ahead.scaled + to);
        // Where no other thread reads.
        merged[row * product.MERGE_STRIDE + at] = sum;
      }
    });
    if constexpr (AHEAD) {
      __syncthreads();
      if (threadIdx.x < rows) {
        const float* of = merged + threadIdx.x * product.MERGE_STRIDE;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; i++) sum += of[i * N];
        ahead.squares[threadIdx.x * (outputs / product.OUTPUTS) + block] = sum;
      }
    }
  }

  // out = ACTIVATION of gate and up, the first and the last `outputs` of norm(x) @ weight^T + bias.
  // By block number `block` of as many as it takes.
  template <typename ACTIVATION, typename T, int TILES, int HELD, int WARPS, int STAGES, int NORM,
            bool BIAS, typename W, typename AWAIT>
  __device__ __forceinline__ static void gated(const T* x, const T* norm, const float* made,
                                               W weight, const T* bias, T* out, int rows,
                                               int inputs, int outputs, float epsilon, int block,
                                               AWAIT await_rows) {
    Product<T, W, TILES, HELD, WARPS, STAGES, NORM> product;
    product.made = made;
    constexpr int EACH = TILES * 8;
    const int first = block * EACH;
    product.weight = weight;
    product.x = x;
    product.norm = norm;
    product.inputs = inputs;
    product.rows = rows;
    product.lines = {first, outputs + first};
    const float* merged = product.run(await_rows, [] {});
    constexpr int N = product.AT_ONCE, PIECES = EACH / N;
    using Values = Neighbours<T, N>;
    for (int i = threadIdx.x; i < rows * PIECES; i += WARPS * 32) {
      const int row = i / PIECES, at = i % PIECES * N;
      const float by = product.factor(merged, row, epsilon);
      float gate[N], up[N];
      product.total(gate, merged, row, at, by);
      product.total(up, merged, row, EACH + at, by);
      if (BIAS) {
        add(gate, Values::at(bias + first + at));
        add(up, Values::at(bias + outputs + first + at));
      }
      Values result;
#pragma unroll
      for (int e = 0; e < N; e++) result.of[e] = T(ACTIVATION::gated(gate[e], up[e]));
      result.put(out + (long)row * outputs + first + at);
    }
  }
};

// A product of any number of rows by `BY`, as FewRows::multiply: each block has its share of them.
template <typename BY, typename T, int SHARE, int HELD, int WARPS, int STAGES, int NORM, bool BIAS,
          bool RESIDUAL, bool AHEAD, typename W>
__device__ __forceinline__ void multiply(const T* x, const T* norm, const float* made, W weight,
                                         const T* bias, const T* residual, T* out, Ahead<T> ahead,
                                         int rows, int inputs, int outputs, float epsilon) {
  const Share share = Share::of<HELD>(rows);
  const long first = share.first;
  const int blocks = outputs / BY::template outputs<SHARE, WARPS>();
  if (AHEAD) ahead = {ahead.norm, ahead.scaled + first * outputs, ahead.squares + first * blocks};
  BY::template multiply<T, SHARE, HELD, WARPS, STAGES, NORM, BIAS, RESIDUAL, AHEAD>(
      x + first * inputs, norm, NORM > 0 ? made + first * NORM : nullptr, weight, bias,
      RESIDUAL ? residual + first * outputs : nullptr, out + first * outputs, ahead, share.rows,
      inputs, outputs, epsilon, share.block, Awaited());
}

// The same as FewRows::gated.
template <typename BY, typename ACTIVATION, typename T, int SHARE, int HELD, int WARPS, int STAGES,
          int NORM, bool BIAS, typename W>
__device__ __forceinline__ void gated(const T* x, const T* norm, const float* made, W weight,
                                      const T* bias, T* out, int rows, int inputs, int outputs,
                                      float epsilon) {
  const Share share = Share::of<HELD>(rows);
  const long first = share.first;
  BY::template gated<ACTIVATION, T, SHARE, HELD, WARPS, STAGES, NORM, BIAS>(
      x + first * inputs, norm, NORM > 0 ? made + first * NORM : nullptr, weight, bias,
      out + first * outputs, share.rows, inputs, outputs, epsilon, share.block, Awaited());
}

}  // namespace kernels
