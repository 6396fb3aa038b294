// What attention of prompt chunks over pages has in common: chunks.cu for GPUs of compute capability
// 8.0 and later, chunks_hopper.cu for 9.0.
//
// One thread block takes a tile of consecutive queries of one sequence for one key/value head: its
// rows are the queries times the heads of the group. The block walks the context in tiles of
// tokens, with an online softmax in base 2 (Dao, FlashAttention-2, arXiv:2307.08691). Each thread
// has parts of two rows, 8 apart, of the scores and of the output, laid out as `mma` lays out D.

namespace kernels {

// Consecutive queries `first` to `first + count` of row `table_row`; the first of them sees
// `length` tokens, itself included, and each one a token more than the one before.
struct Queries {
  int first, count, table_row, length;
};

// What a block does: see FIELDS of chunk_plan.py.
struct ChunkItem {
  Queries queries;
  int begin, end, part, parts, place;

  __device__ __forceinline__ explicit ChunkItem(const int* item)
      : queries{item[0], item[1], item[2], item[3]},
        begin(item[4]),
        end(item[5]),
        part(item[6]),
        parts(item[7]),
        place(item[8]) {}
};

// Where results go. Parts of a context leave the sums of each row, unnormalised, in `partial`, and
// its maximum and denominator in `figures`; `arrivals` counts those that are done.
template <typename T>
struct ChunkResults {
  T* out;
  float* partial;
  float* figures;
  const int* arrivals;
};

// VALUES: columns of the output, D and whatever else the products make.
template <typename T, int D, int GROUP, int PAGE, int TOKENS, int WINDOW, bool CAP, bool SINKS,
          int VALUES = D>
struct ChunkRows {
  static constexpr int COLUMNS = TOKENS / 8;

  static_assert(D % 16 == 0 && TOKENS % 16 == 0 && PAGE % kTile == 0);

  const ChunkItem item;
  const Queries queries;
  const T* k_head;
  const T* v_head;
  const int* pages_of_row;
  int begin, end, warp, lane;

  float output[VALUES / 8][4];
  float maximum[2], sum[2];

  __device__ __forceinline__ ChunkRows(const ChunkItem& item, const T* k_pool, const T* v_pool,
                                       const int* table, long slots, int table_width)
      : item(item), queries(item.queries) {
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    k_head = k_pool + blockIdx.x * slots * D;
    v_head = v_pool + blockIdx.x * slots * D;
    pages_of_row = table + (long)queries.table_row * table_width;
    const int seen = queries.length + queries.count - 1;
    const int left_behind = WINDOW && queries.length > WINDOW ? queries.length - WINDOW : 0;
    begin = item.begin > left_behind ? item.begin : left_behind;
    end = item.end < seen ? item.end : seen;
#pragma unroll
    for (int n = 0; n < VALUES / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) output[n][e] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      maximum[half] = kLowest;
      sum[half] = 0.f;
    }
  }

  // The query that a row of the tile belongs to.
  __device__ __forceinline__ static int query_of(int row) { return row / GROUP; }

  // Copies the queries' pieces of 8 elements to where `to(row, piece)` says.
  template <int ROWS, int THREADS, typename To>
  __device__ __forceinline__ void fetch_queries(const T* q, To to) const {
    const long q_heads = (long)gridDim.x * GROUP;
    for (int x = threadIdx.x; x < ROWS * (D / 8); x += THREADS) {
      const int row = x / (D / 8), piece = x % (D / 8), query = query_of(row);
      const bool there = query < queries.count;
      const long from =
          (queries.first + (there ? query : 0)) * q_heads + blockIdx.x * GROUP + row % GROUP;
      copy_async(to(row, piece), q + from * D + piece * 8, there ? 16 : 0);
    }
  }

  __device__ __forceinline__ static void cap(float (&s)[COLUMNS][4], float scale, float most) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = most * tanhf(s[n][e] * (scale / most));
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

  // Raises the running maxima to take in the scores, whose exponents of 2 are s * unit, and says
  // whether any of the warp grew. `factor` is what the output must then be multiplied with.
  __device__ __forceinline__ bool raise(float unit, const float (&s)[COLUMNS][4],
                                        float (&factor)[2]) {
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x = s[0][half * 2];
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) x = fmaxf(x, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      x = fmaxf(x, shuffle_xor(x, 1));
      x = fmaxf(x, shuffle_xor(x, 2));
      const float top = fmaxf(maximum[half], x * unit);
      grew = grew || top > maximum[half];
      factor[half] = power_of_two(maximum[half] - top);
      maximum[half] = top;
      sum[half] *= factor[half];
    }
    return any_lane(grew);
  }

  // Makes weights of scores: 2^(s * unit - maximum).
  __device__ __forceinline__ void weigh(float unit, float (&s)[COLUMNS][4]) {
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

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < VALUES / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) output[n][e] *= factor[e / 2];
  }

  // The weights of 16 tokens from 8 * n on as the first operand of a product.
  __device__ __forceinline__ static void operand(const float (&s)[COLUMNS][4], int n,
                                                 unsigned (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[i] = pack(s[n + i / 2][i % 2 * 2], s[n + i / 2][i % 2 * 2 + 1],
                  static_cast<const T*>(nullptr));
  }

  // Of a head's share of the queries: where a row of the tile goes.
  __device__ __forceinline__ long place_of(int row) const {
    return (queries.first + query_of(row)) * (long)gridDim.x * GROUP + head_of(row);
  }
  __device__ __forceinline__ static int head_of(int row) {
    return blockIdx.x * GROUP + row % GROUP;
  }
  __device__ __forceinline__ static float sink_of(const float* sinks, int row) {
    return SINKS ? sinks[head_of(row)] : 0.f;
  }

  // Gives the result, or this part of it. The block must be done with its shared memory.
  template <int ROWS, int THREADS>
  __device__ __forceinline__ void give(const ChunkResults<T>& results, const float* sinks) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = sum[half];
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      const int row = warp * 16 + lane / 4 + half * 8;
      if (query_of(row) >= queries.count) continue;
      if (item.parts == 1) {
        const float by = Denominator(maximum[half], total, SINKS, sink_of(sinks, row)).scale;
        unsigned* to = reinterpret_cast<unsigned*>(results.out + place_of(row) * D);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
          to[n * 4 + lane % 4] = pack(output[n][half * 2] * by, output[n][half * 2 + 1] * by,
                                      static_cast<const T*>(nullptr));
      } else {
        const long at = partial_row<ROWS>(item.part, row);
        float2* to = reinterpret_cast<float2*>(results.partial + at * D);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
          to[n * 4 + lane % 4] = make_float2(output[n][half * 2], output[n][half * 2 + 1]);
        if (lane % 4 == 0)
          reinterpret_cast<float2*>(results.figures)[at] = make_float2(maximum[half], total);
      }
    }
    if (item.parts > 1) merge<ROWS, THREADS>(results, sinks);
  }

  template <int ROWS>
  __device__ __forceinline__ long partial_row(int part, int row) const {
    return ((long)(item.place + part) * gridDim.x + blockIdx.x) * ROWS + row;
  }

  // The block that arrives last merges the parts.
  template <int ROWS, int THREADS>
  __device__ void merge(const ChunkResults<T>& results, const float* sinks) const {
    extern __shared__ __align__(16) unsigned char shared[];
    const int* counter = results.arrivals + (long)item.place * gridDim.x + blockIdx.x;
    if (!arrives_last(counter, item.parts, reinterpret_cast<int*>(shared))) return;
    const float2* figures = reinterpret_cast<const float2*>(results.figures);
    const float4* partial = reinterpret_cast<const float4*>(results.partial);
    for (int x = threadIdx.x; x < queries.count * GROUP * (D / 4); x += THREADS) {
      const int row = x / (D / 4), d = x % (D / 4);
      float top = kLowest, total = 0.f;
      for (int part = 0; part < item.parts; part++)
        top = fmaxf(top, read_shared_result(figures + partial_row<ROWS>(part, row)).x);
      float4 sums = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int part = 0; part < item.parts; part++) {
        const long at = partial_row<ROWS>(part, row);
        const float2 figure = read_shared_result(figures + at);
        const float4 value = read_shared_result(partial + at * (D / 4) + d);
        const float weight = power_of_two(figure.x - top);
        total += weight * figure.y;
        sums.x += weight * value.x;
        sums.y += weight * value.y;
        sums.z += weight * value.z;
        sums.w += weight * value.w;
      }
      const float by = Denominator(top, total, SINKS, sink_of(sinks, row)).scale;
      unsigned* to = reinterpret_cast<unsigned*>(results.out + place_of(row) * D) + d * 2;
      to[0] = pack(sums.x * by, sums.y * by, static_cast<const T*>(nullptr));
      to[1] = pack(sums.z * by, sums.w * by, static_cast<const T*>(nullptr));
    }
  }
};

// A step's work over pages, by blocks of `WORK`, items of FIELDS numbers.
template <typename WORK, int FIELDS, typename T>
__device__ __forceinline__ void attend_chunks(const T* q, const T* k_pool, const T* v_pool,
                                              const int* table, const int* items, long slots,
                                              int table_width, const ChunkResults<T>& results,
                                              const float* sinks, float scale, float cap) {
  WORK work(ChunkItem(items + blockIdx.y * FIELDS), k_pool, v_pool, table, slots, table_width);
  work.run(q, results, sinks, scale, cap);
}

}  // namespace kernels
