// Attention of prompt chunks over pages for NVIDIA GPUs of compute capability 9.0; see
// chunk_rows.cu. Each warpgroup takes 64 rows, whose scores and output it multiplies in shared
// memory (wgmma), queries and keys as rows and values across.
//
// A warpgroup begins the next tile's scores and this tile's output together, and makes weights of
// the scores while the output is still being multiplied (Shah et al., FlashAttention-3,
// arXiv:2407.08608). Meanwhile the tiles after them are under way (cp.async), in runs of 16 tokens,
// each copied by a warp from wherever its page is. The threads meet once a tile; with four stages or
// more they arrive there in the middle of a tile, so that a group may be half a tile ahead of the
// others: one multiplies while another makes weights.

namespace kernels {

template <int N>
__device__ __forceinline__ float (&flat(float (&x)[N][4]))[N * 4] {
  return reinterpret_cast<float (&)[N * 4]>(x);
}

template <typename T, int D, int GROUP, int PAGE, int GROUPS, int TOKENS, int STAGES, int WINDOW,
          bool CAP, bool SINKS, int VALUES>
struct AttendChunkInGroups : ChunkRows<T, D, GROUP, PAGE, TOKENS, WINDOW, CAP, SINKS, VALUES> {
  typedef ChunkRows<T, D, GROUP, PAGE, TOKENS, WINDOW, CAP, SINKS, VALUES> Rows;
  using Rows::begin, Rows::end, Rows::warp, Rows::lane, Rows::output, Rows::COLUMNS;
  static constexpr int ROWS = GROUPS * 64;
  static constexpr int WARPS = GROUPS * 4;
  // A row of D elements lies in so many tiles, which are so many bytes.
  static constexpr int TILES = (D + 63) / 64;
  static constexpr int QUERIES_BYTES = ROWS * 128;
  static constexpr int TOKENS_BYTES = TOKENS * 128;
  static constexpr int STAGE_BYTES = 2 * TILES * TOKENS_BYTES;
  // Runs of keys and of values in a tile, and how many of both a warp copies.
  static constexpr int RUNS = TOKENS / kTile;
  static constexpr int EACH = (2 * RUNS + WARPS - 1) / WARPS;

  static constexpr bool APART = STAGES >= 4;
  // Tiles that are under way, the one at hand included.
  static constexpr int AHEAD = APART ? STAGES - 1 : STAGES;

  static_assert(GROUP <= ROWS && STAGES >= 2 && D <= VALUES && VALUES <= TILES * 64);

  unsigned char* query_tile;
  unsigned char* stages;
  unsigned long long* meeting;
  int first, last;  // tiles of the context
  int pages[EACH];  // of this warp's runs of the next tile

  using Rows::Rows;

  __device__ __forceinline__ unsigned char* keys(int tile) const {
    return stages + tile % STAGES * STAGE_BYTES;
  }
  __device__ __forceinline__ unsigned char* values(int tile) const {
    return keys(tile) + TILES * TOKENS_BYTES;
  }

  // What a warp copies `i`th for `tile`: a run of its keys, or of the values of the one before.
  struct Run {
    bool is_values;
    int number, tile, start;
    __device__ __forceinline__ Run(int warp, int i, int tile) {
      const int run = warp + i * WARPS;
      is_values = run >= RUNS;
      number = is_values ? run - RUNS : run;
      this->tile = is_values ? tile - 1 : tile;
      start = this->tile * TOKENS + number * kTile;
    }
  };

  __device__ __forceinline__ bool has(const Run& run) const {
    return run.number < RUNS && run.tile >= first && run.tile < last;
  }

  // Whether any of the run is seen. If not, zeros are copied.
  __device__ __forceinline__ bool sees(const Run& run) const {
    return run.start + kTile > begin && run.start < end;
  }

  __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const Run run(warp, i, tile);
      if (has(run)) pages[i] = this->pages_of_row[(sees(run) ? run.start : begin) / PAGE];
    }
  }

  // Begins to copy the keys of `tile` and the values of the one before, and looks up the next.
  __device__ __forceinline__ void fetch(int tile) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const Run run(warp, i, tile);
      if (!has(run)) continue;
      const T* from = (run.is_values ? this->v_head : this->k_head) +
                      ((long)pages[i] * PAGE + run.start % PAGE) * D + lane * 8;
      unsigned char* to = run.is_values ? values(run.tile) : keys(run.tile);
#pragma unroll
      for (int j = 0; j < D / 16; j++) {
        const int token = (j * 32 + lane) / (D / 8), piece = (j * 32 + lane) % (D / 8);
        const bool there = run.start + token >= begin && run.start + token < end;
        copy_async(to + piece / 8 * TOKENS_BYTES + swizzled(run.number * kTile + token, piece % 8),
                   from + j * 256, there ? 16 : 0);
      }
    }
    commit_copies();
    look_up(tile + 1);
  }

  // Says that this thread's copies but those of the last PENDING tiles are there, and that it is
  // done with what it multiplied before.
  template <int PENDING>
  __device__ __forceinline__ void arrive() const {
    wait_copies<PENDING>();
    show_to_products();
    if constexpr (APART) {
      __syncwarp();
      if (lane == 0) arrive_at(meeting);
    } else {
      __syncthreads();
    }
  }

  // Waits until all threads have arrived for `tile`.
  __device__ __forceinline__ void enter(int tile) const {
    if constexpr (APART) wait_at(meeting, tile - first);
  }

  __device__ __forceinline__ void scores(int tile, float (&s)[COLUMNS][4]) const {
    const unsigned char* rows = query_tile + warp / 4 * 64 * 128;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
      multiply_group(flat(s), describe_tile(rows + step / 4 * QUERIES_BYTES + step % 4 * 32),
                     describe_tile(keys(tile) + step / 4 * TOKENS_BYTES + step % 4 * 32), step > 0,
                     static_cast<const T*>(nullptr));
    commit_products();
  }

  __device__ __forceinline__ void take(int tile, const unsigned (&weights)[RUNS][4]) {
#pragma unroll
    for (int run = 0; run < RUNS; run++)
      multiply_group_across(flat(output), weights[run],
                            describe_tile(values(tile) + run * kTile * 128, TOKENS_BYTES), true,
                            static_cast<const T*>(nullptr));
    commit_products();
  }

  // Makes weights of the scores of `tile`; see `raise`.
  __device__ __forceinline__ bool weigh_scores(int tile, float scale, float cap,
                                               float (&s)[COLUMNS][4], float (&factor)[2]) {
    // What turns a score into the exponent of 2.
    const float unit = CAP ? kLog2e : scale * kLog2e;
    if constexpr (CAP) Rows::cap(s, scale, cap);
    this->mask(tile * TOKENS, s);
    const bool grew = this->raise(unit, s, factor);
    this->weigh(unit, s);
    return grew;
  }

  __device__ __forceinline__ static void pack_weights(const float (&s)[COLUMNS][4],
                                                      unsigned (&weights)[RUNS][4]) {
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
      Rows::operand(s, run * 2, weights[run]);
      settle(weights[run]);
    }
  }

  __device__ __forceinline__ void run(const T* q, const ChunkResults<T>& results, const float* sinks,
                                      float scale, float cap) {
    query_tile = tiles_in_shared_memory();
    stages = query_tile + TILES * QUERIES_BYTES;
    meeting = reinterpret_cast<unsigned long long*>(stages + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) prepare_meeting(meeting, WARPS);
    first = begin / TOKENS;
    last = (end + TOKENS - 1) / TOKENS;
    look_up(first);
    this->template fetch_queries<ROWS, WARPS * 32>(q, [&](int row, int piece) {
      return query_tile + piece / 8 * QUERIES_BYTES + swizzled(row, piece % 8);
    });
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) fetch(first + ahead);
    wait_copies<AHEAD - 1>();
    show_to_products();
    __syncthreads();
    float s[COLUMNS][4], factor[2];
    unsigned weights[RUNS][4];
    begin_products();
    scores(first, s);
    wait_products<0>();
    settle(flat(s));
    weigh_scores(first, scale, cap, s, factor);
    pack_weights(s, weights);
    arrive<AHEAD - 2>();
    for (int tile = first; tile + 1 < last; tile++) {
      settle(flat(output));
      enter(tile);
      begin_products();
      scores(tile + 1, s);
      take(tile, weights);
      fetch(tile + AHEAD);
      if constexpr (APART) arrive<AHEAD - 2>();
      wait_products<1>();
      settle(flat(s));
      const bool grew = weigh_scores(tile + 1, scale, cap, s, factor);
      wait_products<0>();
      settle(flat(output));
      if (grew) this->rescale(factor);
      pack_weights(s, weights);
      if constexpr (!APART) arrive<AHEAD - 2>();
    }
    settle(flat(output));
    enter(last - 1);
    begin_products();
    take(last - 1, weights);
    wait_products<0>();
    settle(flat(output));
    this->template give<ROWS, WARPS * 32>(results, sinks);
  }
};

}  // namespace kernels
