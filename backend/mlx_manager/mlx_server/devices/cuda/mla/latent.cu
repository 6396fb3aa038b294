// Multi-head latent attention over pages (DeepSeek-V2, arXiv:2405.04434) for NVIDIA GPUs of compute
// capability 8.0 and later, in its absorbed form: of each token pages keep a latent vector and a
// rotated one, which all heads share. A head scores with its query, taken through the head's own
// matrix, beside the rotated end of it, and sums up the latent vectors.
//
// A block's rows are queries times heads: one query's heads in a decode step, those of a few
// consecutive queries of a prompt's chunk. It walks the context in tiles of tokens, each a latent
// and a rotated vector side by side, that lie in a ring of stages in shared memory filled by
// cp.async, so a tile is read once for all rows. Of the scores' products (mma) warps share the
// inner dimension, which saves most of the reads of shared memory; each row's scores are then added
// up and weighed, online in base 2 with float32 sums, by neighbouring threads. Of the output each
// warp has columns, for all rows.

namespace kernels {

constexpr int kLatentWarps = 8;
constexpr int kLatentThreads = kLatentWarps * 32;

// `absorbed`: (heads, tokens, RANK). `ends`: (tokens, heads, PLAIN + DIMS), of which the last DIMS
// are still to be rotated, by `rotation` as `Fresh` of heads.cu has it.
template <typename T>
struct LatentQueries {
  const T* absorbed;
  const T* ends;
  const float* rotation;
  int tokens;
};

template <typename T>
struct LatentPages {
  const T* latents;
  const T* turned;
  const int* table;
  int table_width;
};

// An item of a decode step, see FIELDS of splits.py, as one of a chunk of one query.
__device__ __forceinline__ ChunkItem item_of_step(const int* item, const int* lengths) {
  const int length = lengths[item[0]];
  // The last split is open: a plan outlives the steps that lengthen its queries.
  const int end = item[4] == item[5] - 1 ? length : item[3] * kTile;
  const int begin = item[2] * kTile;
  const int fields[] = {item[0], 1, item[1], length, begin, end, item[4], item[5], item[6]};
  return ChunkItem(fields);
}

__device__ __forceinline__ void add(float4& sum, float weight, const float4& value) {
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
}

__host__ __device__ constexpr int at_most(int x, int most) { return x < most ? x : most; }

// HEADS of Q_HEADS, those of block blockIdx.x, and QUERIES a block.
template <typename T, int RANK, int DIMS, int PLAIN, int Q_HEADS, int HEADS, int QUERIES, int PAGE,
          int TOKENS, int STAGES, bool TRADITIONAL>
struct AttendLatent {
  static constexpr int BLOCKS = (Q_HEADS + HEADS - 1) / HEADS;
  static constexpr int ROWS = HEADS * QUERIES, TILES = (ROWS + 15) / 16;
  static constexpr int WIDTH = RANK + DIMS, STRIDE = shared_stride(WIDTH), STEPS = WIDTH / 16;
  // Of the scores a warp has ROW_TILES times COLUMNS tiles, for one of INNER parts of the steps.
  static constexpr int ROW_GROUPS = TILES % 2 == 0 ? 2 : 1;
  static constexpr int COLUMN_GROUPS = TILES % 2 && TOKENS % 32 == 0 ? 2 : 1;
  static constexpr int INNER = kLatentWarps / (ROW_GROUPS * COLUMN_GROUPS);
  static constexpr int ROW_TILES = TILES / ROW_GROUPS, COLUMNS = TOKENS / 8 / COLUMN_GROUPS;
  // Threads that weigh a row's scores, PAIRS each.
  static constexpr int SHARING = at_most(TILES == 1 ? 16 : TILES == 2 ? 8 : 4, TOKENS / 2);
  static constexpr int PAIRS = TOKENS / 2 / SHARING;
  static constexpr int WEIGHTS_STRIDE = TOKENS + 8;
  // Of the output, pieces of 16 columns: a warp has every eighth.
  static constexpr int PIECES = RANK / 16, OWN = (PIECES + kLatentWarps - 1) / kLatentWarps;
  // Threads that copy a token.
  static constexpr int COPYING = kLatentThreads / TOKENS;

  static_assert(TILES <= 4 && TOKENS % 16 == 0 && TOKENS <= 32 && PAGE % kTile == 0);
  static_assert(RANK % 16 == 0 && DIMS % 16 == 0 && PLAIN % 8 == 0);

  const ChunkItem item;
  const LatentQueries<T> given;
  const LatentPages<T> pages;
  const int* pages_of_row;
  int end, count, warp, lane, page;
  T* queries;
  T* stages;
  T* weights;
  float* sums;
  float* factors;

  float output[TILES][OWN][2][4];
  // Of the row that this thread weighs; the sum is of its own scores.
  float maximum, sum;

  __device__ __forceinline__ AttendLatent(const ChunkItem& item, const LatentQueries<T>& given,
                                          const LatentPages<T>& pages)
      : item(item), given(given), pages(pages) {
    extern __shared__ __align__(16) unsigned char shared[];
    queries = reinterpret_cast<T*>(shared);
    stages = queries + ROWS * STRIDE;
    weights = stages + STAGES * TOKENS * STRIDE;
    sums = reinterpret_cast<float*>(weights + ROWS * WEIGHTS_STRIDE);
    factors = sums + INNER * ROWS * TOKENS;
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    pages_of_row = pages.table + (long)item.queries.table_row * pages.table_width;
    end = at_most(item.end, item.queries.length + item.queries.count - 1);
    count = item.begin < end ? (end - item.begin + TOKENS - 1) / TOKENS : 0;
    maximum = kLowest;
    sum = 0.f;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) output[m][n][0][e] = output[m][n][1][e] = 0.f;
  }

  __device__ __forceinline__ static int head_of(int row) {
    return blockIdx.x * HEADS + row % HEADS;
  }
  // The number of a row's query among all.
  __device__ __forceinline__ int token_of(int row) const {
    return item.queries.first + row / HEADS;
  }
  __device__ __forceinline__ bool is_there(int row) const {
    return row < ROWS && row / HEADS < item.queries.count && head_of(row) < Q_HEADS;
  }
  // Of a row that is there, among those of absorbed queries and of results.
  __device__ __forceinline__ long place_of(int row) const {
    return (long)head_of(row) * given.tokens + token_of(row);
  }
  // A row that there is room for: what is computed of those past the last goes nowhere.
  __device__ __forceinline__ static int held(int row) {
    return TILES * 16 == ROWS ? row : at_most(row, ROWS - 1);
  }
  __device__ __forceinline__ T* stage(int i) const { return stages + i % STAGES * TOKENS * STRIDE; }

  // The token of tile `i` that this thread copies, or the first one in place of none.
  __device__ __forceinline__ int token_to_copy(int i, bool& there) const {
    const int token = item.begin + i * TOKENS + threadIdx.x / COPYING;
    there = token < end;
    return there ? token : item.begin;
  }
  __device__ __forceinline__ void look_up(int i) {
    bool there;
    if (i < count) page = pages_of_row[token_to_copy(i, there) / PAGE];
  }

  // Tiles are fetched one after another: a page is looked up a turn before it is needed.
  __device__ __forceinline__ void fetch(int i) {
    if (i < count) {
      bool there;
      const long slot = (long)page * PAGE + token_to_copy(i, there) % PAGE;
      const T* latent = pages.latents + slot * RANK;
      const T* turned = pages.turned + slot * DIMS;
      T* to = stage(i) + threadIdx.x / COPYING * STRIDE;
#pragma unroll
      for (int j = 0; j < (WIDTH / 8 + COPYING - 1) / COPYING; j++) {
        const int d = (j * COPYING + threadIdx.x % COPYING) * 8;
        if (d < WIDTH)
          copy_async_of_line(to + d, d < RANK ? latent + d : turned + d - RANK, there ? 16 : 0);
      }
      look_up(i + 1);
    }
    commit_copies();
  }

  __device__ __forceinline__ void fetch_queries() const {
    for (int x = threadIdx.x; x < ROWS * (RANK / 8); x += kLatentThreads) {
      const int row = x / (RANK / 8), d = x % (RANK / 8) * 8;
      const bool there = is_there(row);
      const T* from = given.absorbed + (there ? place_of(row) : 0) * RANK + d;
      copy_async(queries + row * STRIDE + d, from, there ? 16 : 0);
    }
    commit_copies();
  }

  // The ends of the queries, rotated.
  __device__ __forceinline__ void turn_queries() const {
    for (int x = threadIdx.x; x < ROWS * (DIMS / 4); x += kLatentThreads) {
      const int row = x / (DIMS / 4);
      if (!is_there(row)) continue;
      const long token = token_of(row);
      Portion<T, DIMS, DIMS, TRADITIONAL, false, 1> portion(x % (DIMS / 4));
      portion.take(given.ends + (token * Q_HEADS + head_of(row)) * (PLAIN + DIMS) + PLAIN);
      portion.finish(nullptr, 1.f, portion.turn(given.rotation + token * DIMS));
      portion.put(queries + row * STRIDE + RANK);
    }
  }

  // Where scores of a row lie, by pairs: so that neither those who write nor those who read them
  // meet in a bank.
  __device__ __forceinline__ static int place_of_pair(int row, int pair) {
    return row * TOKENS + (pair ^ row % (TOKENS / 8) * 4) * 2;
  }

  // Leaves this warp's share of each of its scores.
  __device__ __forceinline__ void score(const T* tile) const {
    const T* type = nullptr;
    const int part = warp % INNER, group = warp / INNER;
    const int first = group % ROW_GROUPS * ROW_TILES, column = group / ROW_GROUPS * COLUMNS;
    float s[ROW_TILES][COLUMNS][4];
    const T* row[ROW_TILES];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      row[m] = queries + held((first + m) * 16 + lane % 16) * STRIDE + lane / 16 * 8;
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[m][n][e] = 0.f;
    }
    const T* token = tile + (column * 8 + lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < (STEPS + INNER - 1) / INNER; i++) {
      const int step = i * INNER + part;
      if (STEPS % INNER && step >= STEPS) break;
      unsigned a[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) load_matrices(a[m], row[m] + step * 16);
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        unsigned b[4];
        load_matrices(b, token + n * 8 * STRIDE + step * 16);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          multiply(s[m][n], a[m], b[0], b[1], type);
          multiply(s[m][n + 1], a[m], b[2], b[3], type);
        }
      }
    }
    float* to = sums + part * ROWS * TOKENS;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = (first + m) * 16 + lane / 4 + half * 8;
        if (at >= ROWS) continue;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
          *reinterpret_cast<float2*>(to + place_of_pair(at, (column + n) * 4 + lane % 4)) =
              make_float2(s[m][n][half * 2], s[m][n][half * 2 + 1]);
      }
  }

  // Threads without a row to weigh are whole warps.
  __device__ __forceinline__ static bool weighs() { return threadIdx.x < TILES * 16 * SHARING; }

  // Makes weights of the scores of the tile from token `start` on.
  __device__ __forceinline__ void weigh(int start, float unit) {
    const T* type = nullptr;
    const int own = threadIdx.x / SHARING, row = held(own), first = threadIdx.x % SHARING;
    const int sees = at_most(item.queries.length + row / HEADS, end) - start;
    float2 s[PAIRS];
    float top = maximum;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int pair = first + j * SHARING;
      const float* from = sums + place_of_pair(row, pair);
      float2 total = make_float2(0.f, 0.f);
#pragma unroll
      for (int part = 0; part < INNER; part++) {
        const float2 share = *reinterpret_cast<const float2*>(from + part * ROWS * TOKENS);
        total.x += share.x;
        total.y += share.y;
      }
      s[j].x = pair * 2 < sees ? total.x * unit : kMasked;
      s[j].y = pair * 2 + 1 < sees ? total.y * unit : kMasked;
      top = fmaxf(top, fmaxf(s[j].x, s[j].y));
    }
#pragma unroll
    for (int lanes = SHARING / 2; lanes; lanes /= 2) top = fmaxf(top, shuffle_xor(top, lanes));
    const float factor = power_of_two(maximum - top);
    maximum = top;
    sum *= factor;
    if (own < ROWS && first == 0) factors[row] = factor;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const float low = power_of_two(s[j].x - top), high = power_of_two(s[j].y - top);
      sum += low + high;
      if (own < ROWS)
        *reinterpret_cast<unsigned*>(weights + row * WEIGHTS_STRIDE + (first + j * SHARING) * 2) =
            pack(low, high, type);
    }
  }

  // Multiplies what there is so far with the factors that the tile's maxima ask for.
  __device__ __forceinline__ void rescale() {
    float by[TILES][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        by[m][half] = factors[held(m * 16 + lane / 4 + half * 8)];
        grew = grew || by[m][half] != 1.f;
      }
    if (!any_lane(grew)) return;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          output[m][n][0][e] *= by[m][e / 2];
          output[m][n][1][e] *= by[m][e / 2];
        }
  }

  __device__ __forceinline__ bool owns(int n) const {
    return PIECES % kLatentWarps == 0 || warp + n * kLatentWarps < PIECES;
  }
  __device__ __forceinline__ int column_of(int n) const { return (warp + n * kLatentWarps) * 16; }

  __device__ __forceinline__ void take(const T* tile) {
    const T* type = nullptr;
    rescale();
    const T* token = tile + (lane % 8 + lane / 8 % 2 * 8) * STRIDE + lane / 16 * 8;
    const T* row[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++)
      row[m] = weights + held(m * 16 + lane % 16) * WEIGHTS_STRIDE + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < TOKENS; k += 16) {
      unsigned a[TILES][4];
#pragma unroll
      for (int m = 0; m < TILES; m++) load_matrices(a[m], row[m] + k);
#pragma unroll
      for (int n = 0; n < OWN; n++) {
        if (!owns(n)) break;
        unsigned b[4];
        load_matrices_transposed(b, token + k * STRIDE + column_of(n));
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          multiply(output[m][n][0], a[m], b[0], b[1], type);
          multiply(output[m][n][1], a[m], b[2], b[3], type);
        }
      }
    }
  }

  // Leaves the block's share of its rows' results: the result itself if the context is not cut.
  __device__ __forceinline__ void attend(float scale, const ChunkResults<T>& results) {
    if (count > 0) {
      look_up(0);
      fetch_queries();
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch(i);
      turn_queries();
    }
    for (int i = 0; i < count; i++) {
      wait_copies<STAGES - 2>();
      __syncthreads();
      fetch(i + STAGES - 1);
      score(stage(i));
      __syncthreads();
      if (weighs()) weigh(item.begin + i * TOKENS, scale * kLog2e);
      __syncthreads();
      take(stage(i));
    }
    give(results);
  }

  __device__ __forceinline__ long partial_row(int part, int row) const {
    return ((long)(item.place + part) * BLOCKS + blockIdx.x) * ROWS + row;
  }

  __device__ __forceinline__ void give(const ChunkResults<T>& results) const {
    const T* type = nullptr;
    // Nobody reads the sums any more.
    float2* figures = reinterpret_cast<float2*>(sums);
    if (weighs()) {
      float total = sum;
#pragma unroll
      for (int lanes = SHARING / 2; lanes; lanes /= 2) total += shuffle_xor(total, lanes);
      const int row = threadIdx.x / SHARING;
      if (row < ROWS && threadIdx.x % SHARING == 0) {
        figures[row] = make_float2(maximum, total);
        if (item.parts > 1)
          reinterpret_cast<float2*>(results.figures)[partial_row(item.part, row)] = figures[row];
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = m * 16 + lane / 4 + half * 8;
        if (!is_there(row)) continue;
        const float by = Denominator(figures[row].x, figures[row].y, false, 0.f).scale;
        T* out = results.out + place_of(row) * RANK + lane % 4 * 2;
        float* partial = results.partial + partial_row(item.part, row) * RANK + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < OWN; n++) {
          if (!owns(n)) break;
#pragma unroll
          for (int side = 0; side < 2; side++) {
            const int column = column_of(n) + side * 8;
            const float low = output[m][n][side][half * 2];
            const float high = output[m][n][side][half * 2 + 1];
            if (item.parts == 1)
              *reinterpret_cast<unsigned*>(out + column) = pack(low * by, high * by, type);
            else
              *reinterpret_cast<float2*>(partial + column) = make_float2(low, high);
          }
        }
      }
  }

  // The block of a chunk that arrives last merges the parts.
  __device__ void merge(const ChunkResults<T>& results) const {
    const T* type = nullptr;
    const int* counter = results.arrivals + (long)item.place * BLOCKS + blockIdx.x;
    __syncthreads();
    if (!arrives_last(counter, item.parts, reinterpret_cast<int*>(sums))) return;
    const float2* figures = reinterpret_cast<const float2*>(results.figures);
    const float4* partial = reinterpret_cast<const float4*>(results.partial);
    for (int x = threadIdx.x; x < ROWS * (RANK / 4); x += kLatentThreads) {
      const int row = x / (RANK / 4), d = x % (RANK / 4);
      if (!is_there(row)) continue;
      float top = kLowest, total = 0.f;
      for (int part = 0; part < item.parts; part++)
        top = fmaxf(top, read_shared_result(figures + partial_row(part, row)).x);
      float4 values = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int part = 0; part < item.parts; part++) {
        const long at = partial_row(part, row);
        const float2 figure = read_shared_result(figures + at);
        const float weight = power_of_two(figure.x - top);
        total += weight * figure.y;
        add(values, weight, read_shared_result(partial + at * (RANK / 4) + d));
      }
      const float by = Denominator(top, total, false, 0.f).scale;
      unsigned* to = reinterpret_cast<unsigned*>(results.out + place_of(row) * RANK) + d * 2;
      to[0] = pack(values.x * by, values.y * by, type);
      to[1] = pack(values.z * by, values.w * by, type);
    }
  }
};

// A decode step by blocks of `WORK`, an AttendLatent; each item has FIELDS numbers.
template <typename WORK, int FIELDS, typename T>
__device__ __forceinline__ void attend_step(const LatentQueries<T>& given,
                                            const LatentPages<T>& pages, const int* lengths,
                                            const int* items, const ChunkResults<T>& results,
                                            float scale) {
  const int* item = items + blockIdx.y * FIELDS;
  if (item[0] < 0) return;
  WORK work(item_of_step(item, lengths), given, pages);
  work.attend(scale, results);
}

// The same for chunks.
template <typename WORK, int FIELDS, typename T>
__device__ __forceinline__ void attend_chunks(const LatentQueries<T>& given,
                                              const LatentPages<T>& pages, const int* items,
                                              const ChunkResults<T>& results, float scale) {
  WORK work(ChunkItem(items + blockIdx.y * FIELDS), given, pages);
  work.attend(scale, results);
  if (work.item.parts > 1) work.merge(results);
}

// Merges the splits of a decode step's queries, in a launch of its own: a query's results are too
// large to be left to its last block. Each item's block takes some heads of its query. What was not
// split is in `whole`, (heads, tokens, RANK), and copied.
template <typename T, int RANK, int Q_HEADS, int HEADS, int FIELDS>
struct MergeLatent {
  static constexpr int BLOCKS = (Q_HEADS + HEADS - 1) / HEADS;

  __device__ static void run(const T* whole, const float* partial, const float* figures,
                             const int* items, int tokens, T* out) {
    const int* item = items + blockIdx.y * FIELDS;
    const int token = item[0], split = item[4], splits = item[5], base = item[6];
    if (token < 0) return;
    for (int head = split; head < Q_HEADS; head += splits) {
      const long to = ((long)head * tokens + token) * RANK;
      if (splits == 1) {
        for (int d = threadIdx.x * 8; d < RANK; d += blockDim.x * 8)
          *reinterpret_cast<uint4*>(out + to + d) = *reinterpret_cast<const uint4*>(whole + to + d);
        continue;
      }
      // Of the first split; that of the next is BLOCKS * HEADS further on.
      const long first = ((long)base * BLOCKS + head / HEADS) * HEADS + head % HEADS;
      merge(reinterpret_cast<const float4*>(partial) + first * (RANK / 4),
            reinterpret_cast<const float2*>(figures) + first, splits, out + to);
    }
  }

  __device__ __forceinline__ static void merge(const float4* values, const float2* figures,
                                               int splits, T* to) {
    const T* type = nullptr;
    const int lane = threadIdx.x % 32;
    float top = kLowest, total = 0.f;
    for (int s = lane; s < splits; s += 32) top = fmaxf(top, figures[s * BLOCKS * HEADS].x);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) top = fmaxf(top, shuffle_xor(top, lanes));
    for (int s = lane; s < splits; s += 32) {
      const float2 figure = figures[s * BLOCKS * HEADS];
      total += figure.y * power_of_two(figure.x - top);
    }
    const float by = Denominator(top, sum_of_lanes(total), false, 0.f).scale;
    for (int d = threadIdx.x; d < RANK / 4; d += blockDim.x) {
      float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
      for (int s = 0; s < splits; s++) {
        const long at = (long)s * BLOCKS * HEADS;
        add(result, power_of_two(figures[at].x - top) * by, values[at * (RANK / 4) + d]);
      }
      reinterpret_cast<unsigned*>(to)[d * 2] = pack(result.x, result.y, type);
      reinterpret_cast<unsigned*>(to)[d * 2 + 1] = pack(result.z, result.w, type);
    }
  }
};

// Finishes what the first product gives for a block's token: QUERIED elements for its queries,
// which are normalised, or else copied; its latent vector and the end of its key, which go into
// pages. A slot below 0 is skipped.
template <typename T, int QUERIED, int RANK, int DIMS, bool TRADITIONAL, bool NORM>
struct WriteLatent {
  // Of 16 elements.
  typedef Portion<T, QUERIED, 0, true, true, 4> OfQueries;
  typedef Portion<T, RANK, 0, true, true, 4> OfLatent;
  typedef Portion<T, DIMS, DIMS, TRADITIONAL, false, 1> OfEnd;
  static constexpr int EACH = (QUERIED / 16 + kLatentThreads - 1) / kLatentThreads;

  static_assert(QUERIED % 16 == 0 && RANK % 16 == 0 && RANK / 16 <= kLatentThreads);

  // Two sums over the block, in `shared`.
  __device__ __forceinline__ static float2 sums_of_block(float x, float y, float2* shared) {
    const float2 of_warp = make_float2(sum_of_lanes(x), sum_of_lanes(y));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = of_warp;
    __syncthreads();
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int warp = 0; warp < kLatentWarps; warp++) {
      total.x += shared[warp].x;
      total.y += shared[warp].y;
    }
    return total;
  }

  __device__ static void run(const T* all_projected, int width, const float* rotations,
                             const T* query_norm, const T* latent_norm, float epsilon,
                             const int* slots, const T* latents, const T* all_turned,
                             T* all_queries) {
    const long token = blockIdx.x, slot = slots[token];
    const T* projected = all_projected + token * width;
    const float* rotation = rotations + token * DIMS;
    T *latent = const_cast<T*>(latents), *turned = const_cast<T*>(all_turned);
    T* queries = all_queries + token * QUERIED;
    extern __shared__ __align__(16) unsigned char shared[];
    // The last threads have the latent vector, which others' queries do not wait for.
    const int number = kLatentThreads - 1 - threadIdx.x;
    const bool has_latent = number < RANK / 16;
    OfLatent own(number);
    if (has_latent) own.take(projected + QUERIED);
    OfQueries mine[NORM ? EACH : 1];
    float squares = 0.f;
    if constexpr (NORM) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        mine[i] = OfQueries(threadIdx.x + i * kLatentThreads);
        if (mine[i].d >= QUERIED) continue;
        mine[i].take(projected);
        squares += mine[i].sum_of_squares();
      }
    } else {
      for (int d = threadIdx.x * 8; d < QUERIED; d += kLatentThreads * 8)
        *reinterpret_cast<uint4*>(queries + d) = *reinterpret_cast<const uint4*>(projected + d);
    }
    if (slot >= 0)
      for (int x = threadIdx.x; x < DIMS / 4; x += kLatentThreads) {
        OfEnd end(x);
        end.take(projected + QUERIED + RANK);
        end.finish(nullptr, 1.f, end.turn(rotation));
        end.put(turned + slot * DIMS);
      }
    const float2 sums = sums_of_block(squares, has_latent ? own.sum_of_squares() : 0.f,
                                      reinterpret_cast<float2*>(shared));
    if constexpr (NORM) {
      const float factor = rsqrtf(sums.x / QUERIED + epsilon);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (mine[i].d >= QUERIED) continue;
        mine[i].finish(query_norm, factor, typename OfQueries::Turn());
        mine[i].put(queries);
      }
    }
    if (has_latent && slot >= 0) {
      own.finish(latent_norm, rsqrtf(sums.y / RANK + epsilon), typename OfLatent::Turn());
      own.put(latent + slot * RANK);
    }
  }
};

// Heads of queries as they meet keys of their own: their ends rotated, and zeros behind them. A
// thread has 8 elements, or 4 of those that are rotated.
template <typename T, int PLAIN, int DIMS, int WIDTH, bool TRADITIONAL>
struct TurnQueries {
  typedef Portion<T, DIMS, DIMS, TRADITIONAL, false, 1> OfEnd;
  static constexpr int COPIED = PLAIN / 8, TURNED = DIMS / 4;
  static constexpr int PIECES = COPIED + TURNED + (WIDTH - PLAIN - DIMS) / 8;

  static_assert(PLAIN % 8 == 0 && DIMS % 8 == 0 && WIDTH % 8 == 0);

  // `q_heads` of a token share a row of `rotation`.
  __device__ __forceinline__ static void run(const T* queries, int tokens, int q_heads,
                                             const float* rotation, T* out) {
    // Of a piece among those of all heads.
    const long number = (long)blockIdx.x * kLatentThreads + threadIdx.x;
    const long heads = (long)tokens * q_heads;
    const long head = number / PIECES;
    const int piece = number % PIECES;
    if (head >= heads) return;
    queries += head * (PLAIN + DIMS);
    out += head * WIDTH;
    if (piece < COPIED) {
      reinterpret_cast<uint4*>(out)[piece] = reinterpret_cast<const uint4*>(queries)[piece];
    } else if (piece < COPIED + TURNED) {
      OfEnd end(piece - COPIED);
      end.take(queries + PLAIN);
      end.finish(nullptr, 1.f, end.turn(rotation + head / q_heads * DIMS));
      end.put(out + PLAIN);
    } else {
      const int d = PLAIN + DIMS + (piece - COPIED - TURNED) * 8;
      *reinterpret_cast<uint4*>(out + d) = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace kernels
