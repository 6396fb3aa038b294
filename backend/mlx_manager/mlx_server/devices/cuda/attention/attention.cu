// Decode attention over pages for NVIDIA GPUs of compute capability 8.0 and later.
//
// One thread block takes one work item (a run of 16-token tiles of one query's context) for one
// block of query heads that share a key/value head. Each warp walks its own tiles through a ring
// of shared-memory stages filled by cp.async, so no block-wide barrier is met before the merge.
// Scores are computed transposed, tokens x heads, on the tensor cores: tokens fill the 16 rows of
// an mma and the heads of the group its 8 columns, so a group of 1 to 8 heads costs the same. The
// tile after softmax is turned with movmatrix into the second operand of values^T x weights.
// Softmax runs online in base 2 with float32 sums. The last block of a split query merges the
// partial results, so nothing is launched after it.
//
// `run` takes queries that are ready and pages that are written. `run_fused` takes the product of
// the q/k/v projections instead: it normalises and rotates queries and the new key on their way
// into registers, and the warp that meets the new token's tile writes the token into its page.

namespace kernels {

constexpr int kTile = 16;
constexpr int kMaxSplits = 64;
// Stands for minus infinity where a difference of two of them must be 0 and not NaN.
constexpr float kLowest = -1e30f;
// The score of a token that must not be seen: its weight is 0 whatever the maximum.
constexpr float kMasked = -3e38f;

// Two columns of 8, as many as registers hold the output of; of wide heads, one column.
__host__ __device__ constexpr int heads_per_block(int group, int head_dim) {
  const int most = head_dim <= 256 ? 16 : 8;
  return group < most ? group : most;
}

// Elements from one token to the next in shared memory: an odd number of 16-byte pieces, so that
// the 8 rows that ldmatrix reads at once fall into different banks.
__host__ __device__ constexpr int shared_stride(int head_dim) { return (head_dim / 8 | 1) * 8; }

// The pages of one layer and a step's work over them; see PagedKernels for the arrays.
template <typename T>
struct Pages {
  const T* k_pool;
  const T* v_pool;
  const int* table;
  const int* lengths;
  const int* items;
  long slots;
  int table_width;
};

// The same in 8 bits; see CodedKernels.
struct CodedPages {
  const int8_t* codes;
  const __nv_bfloat16* scales;
  const int* table;
  const int* lengths;
  const int* items;
  long slots;
  int table_width;
};

// Keys or values of one head in 8 bits, from D numbers a token on, with a scale for G of them.
template <typename T, int D, int G>
struct CodedHead {
  const int8_t* codes;
  const __nv_bfloat16* scales;

  __device__ void point(const CodedPages& pages, long head) {
    codes = pages.codes + head * pages.slots * D;
    scales = pages.scales + head * pages.slots * (D / G);
  }

  // The 8 numbers from `place` on, which share a scale; zeros if they are not `seen`.
  __device__ __forceinline__ uint4 piece(long place, bool seen) const {
    if (!seen) return make_uint4(0u, 0u, 0u, 0u);
    const uint2 word = *reinterpret_cast<const uint2*>(codes + place);
    const unsigned bits = reinterpret_cast<const unsigned short*>(scales)[place / G];
    const float scale = unpack(bits, static_cast<const __nv_bfloat16*>(nullptr)).x;
    return make_uint4(pair(word.x, scale), pair(word.x >> 16, scale), pair(word.y, scale),
                      pair(word.y >> 16, scale));
  }

  __device__ __forceinline__ static unsigned pair(unsigned codes, float scale) {
    const float low = float(int8_t(codes)), high = float(int8_t(codes >> 8));
    return pack(low * scale, high * scale, static_cast<const T*>(nullptr));
  }
};

// Where results go. `partial` has the unnormalised results of all items, and behind these the
// maximum and the sum of each; one array, since each costs the host time. `arrivals` counts the
// blocks of each split query that are done.
template <typename T>
struct Results {
  T* out;
  float* partial;
  const int* arrivals;

  // The figures of heads of D elements, HEADS of them in each block.
  template <int D, int HEADS>
  __device__ __forceinline__ float* figures() const {
    return partial + (long)gridDim.y * gridDim.x * HEADS * D;
  }
};

// Which query, heads and split a block serves.
struct Place {
  int q_row, kv_head, kv_heads, first_head, heads, split, splits, base;
};

// What an unnormalised output is multiplied with, once the denominator takes in the head's sink.
struct Denominator {
  float scale;
  __device__ Denominator(float maximum, float sum, bool has_sink, float sink) {
    float factor = 1.f;
    if (has_sink) {
      float top = fmaxf(maximum, sink * kLog2e);
      factor = power_of_two(maximum - top);
      sum = sum * factor + power_of_two(sink * kLog2e - top);
    }
    scale = sum > 0.f ? factor / sum : 0.f;
  }
};

// CODED: numbers with one scale, of pages in 8 bits; 0 for other pages.
template <typename T, int D, int GROUP, int PAGE, int WARPS, int STAGES, int WINDOW, bool CAP,
          bool SINKS, int CODED = 0>
struct Attend {
  static constexpr int HEADS = heads_per_block(GROUP, D);
  static constexpr int BLOCKS = (GROUP + HEADS - 1) / HEADS;
  static constexpr int COLUMNS = (HEADS + 7) / 8;
  static constexpr int STRIDE = shared_stride(D);
  static constexpr int PIECES = kTile * D / 8 / 32;
  // All would take registers that the output of wide heads leaves none of.
  static constexpr int PIECES_AT_ONCE = D <= 256 ? PIECES : 8;
  static constexpr int STEPS = D / 16;
  static constexpr int MERGE_STRIDE = D + 4;

  static_assert(D % 16 == 0 && PAGE % kTile == 0, "head size and page size in tiles of 16");

  const T* k_head;
  const T* v_head;
  CodedHead<T, D, CODED ? CODED : D> coded_keys, coded_values;
  const int* pages_of_row;
  int first_tile, count, begin, end;
  int stored;  // tokens before this one are in pages; the rest, if any, is fresh
  int warp, lane;
  T* stages;
  int page_of_lane;

  float output[STEPS][COLUMNS][4];
  float maximum[COLUMNS][2];
  float sum[COLUMNS][2];

  __device__ __forceinline__ int tile(int i) const { return first_tile + warp + i * WARPS; }

  __device__ __forceinline__ void fetch(int i) {
    if (i < count) {
      if (i % 32 == 0) {
        int mine = i + lane < count ? i + lane : i;
        page_of_lane = pages_of_row[tile(mine) * kTile / PAGE];
      }
      long page = shuffle(page_of_lane, i % 32);
      int start = tile(i) * kTile;
      long offset = (page * PAGE + start % PAGE) * D;
      T* k_stage = stages + (i % STAGES) * 2 * kTile * STRIDE;
      T* v_stage = k_stage + kTile * STRIDE;
#pragma unroll(PIECES_AT_ONCE)
      for (int j = 0; j < PIECES; j++) {
        int piece = j * 32 + lane;
        int token = piece / (D / 8);
        int to = token * STRIDE + piece % (D / 8) * 8;
        const bool seen = start + token >= begin && start + token < stored;
        if constexpr (CODED > 0) {
          const long place = offset + piece * 8;
          *reinterpret_cast<uint4*>(k_stage + to) = coded_keys.piece(place, seen);
          *reinterpret_cast<uint4*>(v_stage + to) = coded_values.piece(place, seen);
        } else {
          copy_async_of_line(k_stage + to, k_head + offset + piece * 8, seen ? 16 : 0);
          copy_async_of_line(v_stage + to, v_head + offset + piece * 8, seen ? 16 : 0);
        }
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void scores(const T* k_stage, const unsigned (&query)[STEPS][COLUMNS][2],
                                         float (&s)[COLUMNS][4]) const {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = 0.f;
    const T* row = k_stage + (lane % 16) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      unsigned a[4];
      load_matrices(a, row + step * 16);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
        multiply(s[n], a, query[step][n][0], query[step][n][1], static_cast<const T*>(nullptr));
    }
  }

  __device__ __forceinline__ void mask(int start, float scale, float cap,
                                       float (&s)[COLUMNS][4]) const {
    bool whole = start >= begin && start + kTile <= end;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x = s[n][e] * scale;
        if constexpr (CAP) x = cap * tanhf(x / cap);
        int token = start + lane / 4 + (e / 2) * 8;
        s[n][e] = whole || (token >= begin && token < end) ? x * kLog2e : kMasked;
      }
  }

  __device__ __forceinline__ void rescale(const float (&s)[COLUMNS][4]) {
    bool grew = false;
    float top[COLUMNS][2];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float x = fmaxf(s[n][e], s[n][e + 2]);
        x = fmaxf(x, shuffle_xor(x, 4));
        x = fmaxf(x, shuffle_xor(x, 8));
        x = fmaxf(x, shuffle_xor(x, 16));
        top[n][e] = x;
        grew = grew || x > maximum[n][e];
      }
    if (!any_lane(grew)) return;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float higher = fmaxf(maximum[n][e], top[n][e]);
        float factor = power_of_two(maximum[n][e] - higher);
        maximum[n][e] = higher;
        sum[n][e] *= factor;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          output[step][n][e] *= factor;
          output[step][n][e + 2] *= factor;
        }
      }
  }

  __device__ __forceinline__ void take(const T* v_stage, float (&s)[COLUMNS][4]) {
    unsigned weights[COLUMNS][2];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[n][e] = power_of_two(s[n][e] - maximum[n][e % 2]);
        sum[n][e % 2] += s[n][e];
      }
      weights[n][0] = transpose_matrix(pack(s[n][0], s[n][1], static_cast<const T*>(nullptr)));
      weights[n][1] = transpose_matrix(pack(s[n][2], s[n][3], static_cast<const T*>(nullptr)));
    }
    const T* row = v_stage + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      unsigned a[4];
      load_matrices_transposed(a, row + step * 16);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
        multiply(output[step][n], a, weights[n][0], weights[n][1], static_cast<const T*>(nullptr));
    }
  }

  // Loads the queries as the second operand of the scores' products; heads past the group are 0.
  __device__ __forceinline__ void load_queries(const T* q, int stride, int heads,
                                               unsigned (&query)[STEPS][COLUMNS][2]) const {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      int head = n * 8 + lane / 4;
      const unsigned* from = reinterpret_cast<const unsigned*>(q + head * stride) + lane % 4;
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        query[step][n][0] = head < heads ? from[step * 8] : 0u;
        query[step][n][1] = head < heads ? from[step * 8 + 4] : 0u;
      }
    }
  }

  // Leaves each warp's unnormalised output, maximum and sum in shared memory.
  __device__ __forceinline__ void publish(float* merged, float* figures) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int head = n * 8 + lane % 4 * 2 + e;
        float total = sum[n][e];
        total += shuffle_xor(total, 4);
        total += shuffle_xor(total, 8);
        total += shuffle_xor(total, 16);
        if (head >= HEADS) continue;
        float* to = merged + (warp * HEADS + head) * MERGE_STRIDE + lane / 4;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          to[step * 16] = output[step][n][e];
          to[step * 16 + 8] = output[step][n][e + 2];
        }
        if (lane < 4) {
          figures[(warp * HEADS + head) * 2] = maximum[n][e];
          figures[(warp * HEADS + head) * 2 + 1] = total;
        }
      }
  }

  // What run_fused keeps in shared memory behind the stages: queries as the scores' products want
  // them, the new key and value, and 1 / rms of each head.
  static constexpr int QUERY_STRIDE = D + 8;
  static constexpr int FRESH = HEADS * QUERY_STRIDE + 2 * D;

  // Finishes the queries and, in a last split, the new key, by all threads of the block.
  template <int ROTARY, bool TRADITIONAL, bool NORM, bool GATED, bool VALUES>
  __device__ __forceinline__ void finish_heads(const Fresh<T>& fresh, const Place& place,
                                               bool newest, T* queries, float* factors) const {
    const int q_heads = place.kv_heads * GROUP;
    constexpr int PLACES = GATED ? 2 : 1;
    const T* row = fresh.qkv + (long)place.q_row * (PLACES * q_heads + 2 * place.kv_heads) * D;
    const T* q = row + place.first_head * PLACES * D;
    const T* k = row + (PLACES * q_heads + place.kv_head) * D;
    const T* v = k + place.kv_heads * D;
    const float* rotation = fresh.rotation + (long)place.q_row * ROTARY;
    const int heads = place.heads + (newest ? 1 : 0);
    static_assert(NORM || !VALUES, "values are normed where keys are");
    if constexpr (NORM) {
      // That of the new value comes last.
      const int measured = heads + (VALUES && newest ? 1 : 0);
      for (int head = warp; head < measured; head += WARPS) {
        const T* from = head < place.heads ? q + head * PLACES * D : head == place.heads ? k : v;
        float sum = 0.f;
        for (int d = lane * 2; d < D; d += 64)
          sum += squares(*reinterpret_cast<const unsigned*>(from + d), from);
        const float factor = inverse_rms<D, 32>(sum, fresh.epsilon);
        if (lane == 0) factors[head] = factor;
      }
      __syncthreads();
    }
    T* newest_key = queries + HEADS * QUERY_STRIDE;
    const long slot =
        newest ? (long)pages_of_row[(end - 1) / PAGE] * PAGE + (end - 1) % PAGE : 0;
    for (int x = threadIdx.x; x < heads * (D / 4); x += WARPS * 32) {
      const int head = x / (D / 4);
      const bool is_query = head < place.heads;
      Portion<T, D, ROTARY, TRADITIONAL, NORM, 1> quartet(x % (D / 4));
      quartet.take(is_query ? q + head * PLACES * D : k);
      quartet.finish(is_query ? fresh.q_norm : fresh.k_norm, NORM ? factors[head] : 1.f,
                     quartet.turn(rotation));
      quartet.put(is_query ? queries + head * QUERY_STRIDE : newest_key);
      if (!is_query) quartet.put(const_cast<T*>(k_head) + slot * D);
    }
#pragma unroll
    for (int first = 0; first < D / 8; first += WARPS * 32) {
      const unsigned x = first + threadIdx.x;
      if (!newest || x >= D / 8) break;
      uint4 piece = reinterpret_cast<const uint4*>(v)[x];
      if constexpr (VALUES) {
        const float factor = factors[heads];
        piece = make_uint4(multiplied<T>(piece.x, factor), multiplied<T>(piece.y, factor),
                           multiplied<T>(piece.z, factor), multiplied<T>(piece.w, factor));
      }
      reinterpret_cast<uint4*>(newest_key + D)[x] = piece;
      reinterpret_cast<uint4*>(const_cast<T*>(v_head) + slot * D)[x] = piece;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void point(const Pages<T>& pages, int kv_head, int) {
    k_head = pages.k_pool + kv_head * pages.slots * D;
    v_head = pages.v_pool + kv_head * pages.slots * D;
  }
  __device__ __forceinline__ void point(const CodedPages& pages, int kv_head, int kv_heads) {
    coded_keys.point(pages, kv_head);
    coded_values.point(pages, kv_heads + kv_head);
  }

  // The item that this block serves. False for padding.
  template <typename P>
  __device__ __forceinline__ bool begin_item(const P& pages, Place& place) {
    const int* item = pages.items + blockIdx.y * 8;
    place.q_row = item[0];
    if (place.q_row < 0) return false;
    const int kv_head = blockIdx.x / BLOCKS, head0 = blockIdx.x % BLOCKS * HEADS;
    place.kv_head = kv_head;
    place.kv_heads = gridDim.x / BLOCKS;
    place.first_head = kv_head * GROUP + head0;
    place.heads = GROUP - head0 < HEADS ? GROUP - head0 : HEADS;
    place.split = item[4];
    place.splits = item[5];
    place.base = item[6];

    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    end = pages.lengths[place.q_row];
    begin = WINDOW > 0 && end > WINDOW ? end - WINDOW : 0;
    stored = end;
    // The last split is open: a plan outlives the steps that lengthen its queries.
    const int last_tile = place.split == place.splits - 1 ? (end + kTile - 1) / kTile : item[3];
    first_tile = item[2] > begin / kTile ? item[2] : begin / kTile;
    count = (last_tile - first_tile - warp + WARPS - 1) / WARPS;
    point(pages, kv_head, place.kv_heads);
    pages_of_row = pages.table + (long)item[1] * pages.table_width;
    extern __shared__ __align__(16) unsigned char shared[];
    stages = reinterpret_cast<T*>(shared) + warp * STAGES * 2 * kTile * STRIDE;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        maximum[n][e] = kLowest;
        sum[n][e] = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) output[step][n][e] = output[step][n][e + 2] = 0.f;
      }
    return true;
  }

  __device__ __forceinline__ void fetch_first() {
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
  }

  // Walks this warp's tiles. `patch(i, k_stage)` may change tile i once it has arrived.
  template <typename Patch>
  __device__ __forceinline__ void walk(const unsigned (&query)[STEPS][COLUMNS][2], float scale,
                                       float cap, Patch patch) {
    for (int i = 0; i < count; i++) {
      wait_copies<STAGES - 2>();
      __syncwarp();
      fetch(i + STAGES - 1);
      T* k_stage = stages + (i % STAGES) * 2 * kTile * STRIDE;
      patch(i, k_stage);
      float s[COLUMNS][4];
      scores(k_stage, query, s);
      mask(tile(i) * kTile, scale, cap, s);
      rescale(s);
      take(k_stage + kTile * STRIDE, s);
      __syncwarp();
    }
    wait_copies<0>();
    __syncthreads();
  }

  template <typename P>
  __device__ void run(const T* q, const P& pages, const Results<T>& results, const float* sinks,
                      float scale, float cap) {
    Place place;
    if (!begin_item(pages, place)) return;
    fetch_first();
    unsigned query[STEPS][COLUMNS][2];
    const long row = (long)place.q_row * place.kv_heads * GROUP;
    load_queries(q + (row + place.first_head) * D, D, place.heads, query);
    walk(query, scale, cap, [](int, T*) {});
    merge(place, results, sinks);
  }

  template <int ROTARY, bool TRADITIONAL, bool NORM, bool GATED, bool VALUES, int OFFSET>
  __device__ void run_fused(const Fresh<T>& fresh, const Pages<T>& pages,
                            const Results<T>& results, const float* sinks, float scale,
                            float cap) {
    Place place;
    if (!begin_item(pages, place)) return;
    stored = end - 1;
    fetch_first();
    extern __shared__ __align__(16) unsigned char shared[];
    T* queries = reinterpret_cast<T*>(shared + OFFSET);
    T* newest_key = queries + HEADS * QUERY_STRIDE;
    const bool newest = end > 0 && place.split == place.splits - 1;
    finish_heads<ROTARY, TRADITIONAL, NORM, GATED, VALUES>(
        fresh, place, newest, queries, reinterpret_cast<float*>(queries + FRESH));
    unsigned query[STEPS][COLUMNS][2];
    load_queries(queries, QUERY_STRIDE, place.heads, query);
    const int newest_tile = (end - 1) / kTile;
    walk(query, scale, cap, [&](int i, T* k_stage) {
      if (tile(i) != newest_tile) return;
      for (int piece = lane; piece < D / 4; piece += 32) {
        const int value = piece / (D / 8), d = piece % (D / 8) * 8;
        T* to = k_stage + (value * kTile + (end - 1) % kTile) * STRIDE + d;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(newest_key + value * D + d);
      }
      __syncwarp();
    });
    merge(place, results, sinks);
  }

  // Adds up the warps' shares and gives the result, or this split's part of it.
  __device__ __forceinline__ void merge(const Place& place, const Results<T>& results,
                                        const float* sinks) {
    extern __shared__ __align__(16) unsigned char shared[];
    float* merged = reinterpret_cast<float*>(shared);
    float* figures = merged + WARPS * HEADS * MERGE_STRIDE;
    publish(merged, figures);
    __syncthreads();

    const long q_head = (long)place.q_row * place.kv_heads * GROUP + place.first_head;
    const long part = ((long)(place.base + place.split) * gridDim.x + blockIdx.x) * HEADS;
    for (int x = threadIdx.x; x < place.heads * (D / 2); x += WARPS * 32) {
      int head = x / (D / 2), d = x % (D / 2) * 2;
      float top = kLowest, total = 0.f, low = 0.f, high = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, figures[(w * HEADS + head) * 2]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        float factor = power_of_two(figures[(w * HEADS + head) * 2] - top);
        total += factor * figures[(w * HEADS + head) * 2 + 1];
        low += factor * merged[(w * HEADS + head) * MERGE_STRIDE + d];
        high += factor * merged[(w * HEADS + head) * MERGE_STRIDE + d + 1];
      }
      if (place.splits == 1) {
        float sink = SINKS ? sinks[place.first_head + head] : 0.f;
        float by = Denominator(top, total, SINKS, sink).scale;
        reinterpret_cast<unsigned*>(results.out + (q_head + head) * D)[d / 2] =
            pack(low * by, high * by, static_cast<const T*>(nullptr));
      } else {
        results.partial[(part + head) * D + d] = low;
        results.partial[(part + head) * D + d + 1] = high;
        if (d == 0) {
          float* of_head = results.template figures<D, HEADS>() + (part + head) * 2;
          of_head[0] = top;
          of_head[1] = total;
        }
      }
    }
    if (place.splits > 1) finish(place, q_head, results, sinks, reinterpret_cast<float*>(shared));
  }

  // The block that arrives last merges the splits.
  __device__ void finish(const Place& place, long q_head, const Results<T>& results,
                         const float* sinks, float* shared) {
    const int heads = place.heads, base = place.base, splits = place.splits;
    const int* counter = results.arrivals + (long)place.q_row * gridDim.x + blockIdx.x;
    int* last = reinterpret_cast<int*>(shared + HEADS * kMaxSplits);
    if (!arrives_last(counter, splits, last)) return;

    const float2* figures = reinterpret_cast<const float2*>(results.template figures<D, HEADS>());
    float* weights = shared;
    for (int head = warp; head < heads; head += WARPS) {
      float tops[kMaxSplits / 32], sums[kMaxSplits / 32], top = kLowest, total = 0.f;
#pragma unroll
      for (int j = 0; j < kMaxSplits / 32; j++) {
        int s = j * 32 + lane;
        float2 figure = make_float2(kLowest, 0.f);
        if (s < splits) {
          long at = ((long)(base + s) * gridDim.x + blockIdx.x) * HEADS + head;
          figure = read_shared_result(figures + at);
        }
        tops[j] = figure.x;
        sums[j] = figure.y;
        top = fmaxf(top, figure.x);
      }
#pragma unroll
      for (int o = 16; o; o /= 2) top = fmaxf(top, shuffle_xor(top, o));
#pragma unroll
      for (int j = 0; j < kMaxSplits / 32; j++) {
        tops[j] = power_of_two(tops[j] - top);
        total += sums[j] * tops[j];
      }
#pragma unroll
      for (int o = 16; o; o /= 2) total += shuffle_xor(total, o);
      float by = Denominator(top, total, SINKS, SINKS ? sinks[place.first_head + head] : 0.f).scale;
#pragma unroll
      for (int j = 0; j < kMaxSplits / 32; j++)
        if (j * 32 + lane < splits) weights[head * kMaxSplits + j * 32 + lane] = tops[j] * by;
    }
    __syncthreads();
    const float4* from = reinterpret_cast<const float4*>(results.partial);
    for (int x = threadIdx.x; x < heads * (D / 4); x += WARPS * 32) {
      int head = x / (D / 4);
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
      for (int s = 0; s < splits; s++) {
        long at = ((long)(base + s) * gridDim.x + blockIdx.x) * HEADS + head;
        float4 value = read_shared_result(from + at * (D / 4) + x % (D / 4));
        float weight = weights[head * kMaxSplits + s];
        total.x += weight * value.x;
        total.y += weight * value.y;
        total.z += weight * value.z;
        total.w += weight * value.w;
      }
      unsigned* to = reinterpret_cast<unsigned*>(results.out + (q_head + head) * D) + x % (D / 4) * 2;
      to[0] = pack(total.x, total.y, static_cast<const T*>(nullptr));
      to[1] = pack(total.z, total.w, static_cast<const T*>(nullptr));
    }
  }
};

// 8 elements from `d` on.
template <typename T>
__device__ __forceinline__ void write_piece(T* to, const T* from, int d) {
  if ((unsigned long)(from + d) % 16 == 0) {
    *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(from + d);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) to[d + i] = from[d + i];
}

// Writes one token of one head, keys of K elements and values of V, 8 of each a thread. `k` and `v`
// are (rows, heads, tokens, K or V). A slot below 0 is skipped.
template <typename T, int K, int V>
__device__ __forceinline__ void write_token(const T* k_pool, const T* v_pool, const T* k,
                                            const T* v, const int* slot_of_token, long pool_slots,
                                            int heads, int tokens) {
  static_assert(K % 8 == 0 && V % 8 == 0);
  constexpr int PIECES = (K > V ? K : V) / 8;
  const int piece = blockIdx.x * blockDim.x + threadIdx.x;
  const int head = piece / PIECES, d = piece % PIECES * 8;
  if (head >= heads) return;
  const int row = blockIdx.y / tokens, token = blockIdx.y % tokens;
  const long slot = slot_of_token[blockIdx.y];
  if (slot < 0) return;
  const long to = head * pool_slots + slot, from = (long(row) * heads + head) * tokens + token;
  if (d < K) write_piece(const_cast<T*>(k_pool) + to * K, k + from * K, d);
  if (d < V) write_piece(const_cast<T*>(v_pool) + to * V, v + from * V, d);
}

// Writes all of them; `written` is what later launches wait for.
template <typename T, int K, int V>
__device__ __forceinline__ void write_tokens(const T* k_pool, const T* v_pool, const T* k,
                                             const T* v, const int* slot_of_token, long pool_slots,
                                             int heads, int tokens, int* written) {
  write_token<T, K, V>(k_pool, v_pool, k, v, slot_of_token, pool_slots, heads, tokens);
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) written[0] = 0;
}

}  // namespace kernels
