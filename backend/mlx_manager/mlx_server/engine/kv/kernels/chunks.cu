// Attention of prompt chunks over pages for NVIDIA GPUs of compute capability 8.0 and later.
//
// One thread block takes a tile of consecutive queries of one sequence for one key/value head: its
// rows are the queries times the heads of the group, 16 a warp. The block walks the context in
// tiles of tokens that lie in shared memory, the next one under way (cp.async) while this one is
// multiplied (mma), with an online softmax in base 2 (Dao, FlashAttention-2, arXiv:2307.08691).
// Nothing is gathered: a tile's tokens are copied from wherever their pages are.

namespace kernels {

// Consecutive queries `first` to `first + count` of row `table_row`; the first of them sees
// `length` tokens, itself included, and each one a token more than the one before.
struct Queries {
  int first, count, table_row, length;
};

template <typename T, int D, int GROUP, int PAGE, int WARPS, int TOKENS, int WINDOW, bool CAP,
          bool SINKS>
struct AttendChunk {
  static constexpr int ROWS = WARPS * 16;
  static constexpr int STRIDE = shared_stride(D);
  static constexpr int STEPS = D / 16;
  static constexpr int COLUMNS = TOKENS / 8;
  static constexpr int STAGES = 2;

  static_assert(GROUP <= ROWS && D % 16 == 0 && TOKENS % 16 == 0 && PAGE % kTile == 0);

  const Queries queries;
  const T* k_head;
  const T* v_head;
  const int* pages_of_row;
  int begin, end, warp, lane;
  T* stages;

  float output[D / 8][4];
  float maximum[2], sum[2];

  // The query that a row of the tile belongs to.
  __device__ __forceinline__ static int query_of(int row) { return row / GROUP; }

  __device__ __forceinline__ void fetch_queries(const T* q, long q_heads, int kv_head, T* to) const {
    for (int piece = threadIdx.x; piece < ROWS * (D / 8); piece += WARPS * 32) {
      int row = piece / (D / 8), d = piece % (D / 8) * 8, query = query_of(row);
      bool there = query < queries.count;
      long from = (queries.first + (there ? query : 0)) * q_heads + kv_head * GROUP + row % GROUP;
      copy_async(to + row * STRIDE + d, q + from * D + d, there ? 16 : 0);
    }
    commit_copies();
  }

  __device__ __forceinline__ void fetch(int start) const {
    if (start < end) {
      T* k_stage = stages + start / TOKENS % STAGES * 2 * TOKENS * STRIDE;
      T* v_stage = k_stage + TOKENS * STRIDE;
      for (int piece = threadIdx.x; piece < TOKENS * (D / 8); piece += WARPS * 32) {
        int token = start + piece / (D / 8), d = piece % (D / 8) * 8;
        bool there = token >= begin && token < end;
        int at = there ? token : begin;
        long from = ((long)pages_of_row[at / PAGE] * PAGE + at % PAGE) * D + d;
        int to = piece / (D / 8) * STRIDE + d;
        copy_async(k_stage + to, k_head + from, there ? 16 : 0);
        copy_async(v_stage + to, v_head + from, there ? 16 : 0);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void scores(const T* tile, const T* k_stage,
                                         float (&s)[COLUMNS][4]) const {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = 0.f;
    const T* row = tile + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8;
    const T* column = k_stage + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      unsigned a[4];
      load_matrices(a, row + step * 16);
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        unsigned b[4];
        load_matrices(b, column + n * 8 * STRIDE + step * 16);
        multiply(s[n], a, b[0], b[1], static_cast<const T*>(nullptr));
        multiply(s[n + 1], a, b[2], b[3], static_cast<const T*>(nullptr));
      }
    }
  }

  // Hides what a row must not see. Most tiles are seen by every row, and left alone.
  __device__ __forceinline__ void mask(int start, float (&s)[COLUMNS][4]) const {
    const bool whole = start >= begin && start + TOKENS <= queries.length &&
                       (WINDOW == 0 || start >= queries.length + queries.count - 1 - WINDOW);
    if (whole) return;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int sees = queries.length + query_of(warp * 16 + lane / 4 + e / 2 * 8);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int token = start + n * 8 + lane % 4 * 2 + e % 2;
        if (token >= sees || (WINDOW != 0 && token < sees - WINDOW)) s[n][e] = kMasked;
      }
    }
  }

  // Raises the running maxima to take in the scores, which become weights: 2^(s * unit - maximum).
  __device__ __forceinline__ void weigh(float unit, float (&s)[COLUMNS][4]) {
    float top[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x = s[0][half * 2];
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) x = fmaxf(x, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      x = fmaxf(x, shuffle_xor(x, 1));
      x = fmaxf(x, shuffle_xor(x, 2));
      top[half] = fmaxf(maximum[half], x * unit);
      grew = grew || top[half] > maximum[half];
    }
    if (any_lane(grew)) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float factor = power_of_two(maximum[half] - top[half]);
        maximum[half] = top[half];
        sum[half] *= factor;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
          output[n][half * 2] *= factor;
          output[n][half * 2 + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; e++) {
          s[n][e] = power_of_two(fmaf(s[n][e], unit, -maximum[half]));
          sum[half] += s[n][e];
        }
  }

  __device__ __forceinline__ void take(const T* v_stage, const float (&s)[COLUMNS][4]) {
    const T* type = nullptr;
    const T* row = v_stage + (lane % 8 + lane / 8 % 2 * 8) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      const unsigned a[4] = {pack(s[n][0], s[n][1], type), pack(s[n][2], s[n][3], type),
                             pack(s[n + 1][0], s[n + 1][1], type),
                             pack(s[n + 1][2], s[n + 1][3], type)};
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        unsigned b[4];
        load_matrices_transposed(b, row + n * 8 * STRIDE + d * 8);
        multiply(output[d], a, b[0], b[1], type);
        multiply(output[d + 1], a, b[2], b[3], type);
      }
    }
  }

  __device__ __forceinline__ void give(T* out, long q_heads, int kv_head, const float* sinks) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = sum[half];
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      const int row = warp * 16 + lane / 4 + half * 8, query = query_of(row);
      const int head = kv_head * GROUP + row % GROUP;
      if (query >= queries.count) continue;
      const float by = Denominator(maximum[half], total, SINKS, SINKS ? sinks[head] : 0.f).scale;
      unsigned* to = reinterpret_cast<unsigned*>(out + ((queries.first + query) * q_heads + head) * D);
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        to[n * 4 + lane % 4] = pack(output[n][half * 2] * by, output[n][half * 2 + 1] * by,
                                    static_cast<const T*>(nullptr));
    }
  }

  __device__ __forceinline__ AttendChunk(const Queries& queries, const T* k_pool, const T* v_pool,
                                         const int* table, long slots, int table_width)
      : queries(queries) {
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    k_head = k_pool + blockIdx.x * slots * D;
    v_head = v_pool + blockIdx.x * slots * D;
    pages_of_row = table + (long)queries.table_row * table_width;
    end = queries.length + queries.count - 1;
    begin = WINDOW && queries.length > WINDOW ? queries.length - WINDOW : 0;
  }

  __device__ __forceinline__ void run(const T* q, T* out, const float* sinks, float scale,
                                      float cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    T* tile = reinterpret_cast<T*>(shared);
    stages = tile + ROWS * STRIDE;
    const long q_heads = (long)gridDim.x * GROUP;
    const int kv_head = blockIdx.x;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) output[n][e] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      maximum[half] = kLowest;
      sum[half] = 0.f;
    }
    fetch_queries(q, q_heads, kv_head, tile);
    // What turns a score into the exponent of 2.
    const float unit = CAP ? kLog2e : scale * kLog2e;
    const int start = begin / TOKENS * TOKENS;
    fetch(start);
    for (int at = start; at < end; at += TOKENS) {
      fetch(at + TOKENS);
      wait_copies<1>();
      __syncthreads();
      const T* k_stage = stages + at / TOKENS % STAGES * 2 * TOKENS * STRIDE;
      float s[COLUMNS][4];
      scores(tile, k_stage, s);
      if constexpr (CAP) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) s[n][e] = cap * tanhf(s[n][e] * (scale / cap));
      }
      mask(at, s);
      weigh(unit, s);
      take(k_stage + TOKENS * STRIDE, s);
      __syncthreads();
    }
    give(out, q_heads, kv_head, sinks);
  }
};

}  // namespace kernels
