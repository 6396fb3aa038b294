// Attention of prompt chunks over pages for NVIDIA GPUs of compute capability 8.0 and later; see
// chunk_rows.cu. Each warp takes 16 rows. A tile's tokens lie in shared memory, the next ones under
// way (cp.async) while these are multiplied (mma). Nothing is gathered: tokens are copied from
// wherever their pages are.

namespace kernels {

template <typename T, int D, int GROUP, int PAGE, int WARPS, int TOKENS, int WINDOW, bool CAP,
          bool SINKS>
struct AttendChunk : ChunkRows<T, D, GROUP, PAGE, TOKENS, WINDOW, CAP, SINKS> {
  typedef ChunkRows<T, D, GROUP, PAGE, TOKENS, WINDOW, CAP, SINKS> Rows;
  using Rows::begin, Rows::end, Rows::warp, Rows::lane, Rows::output, Rows::COLUMNS;
  static constexpr int ROWS = WARPS * 16;
  static constexpr int STRIDE = shared_stride(D);
  static constexpr int STEPS = D / 16;
  static constexpr int STAGES = 2;

  static_assert(GROUP <= ROWS);

  T* stages;

  using Rows::Rows;

  __device__ __forceinline__ void fetch(int start) const {
    if (start < end) {
      T* k_stage = stages + start / TOKENS % STAGES * 2 * TOKENS * STRIDE;
      T* v_stage = k_stage + TOKENS * STRIDE;
      for (int piece = threadIdx.x; piece < TOKENS * (D / 8); piece += WARPS * 32) {
        int token = start + piece / (D / 8), d = piece % (D / 8) * 8;
        bool there = token >= begin && token < end;
        int at = there ? token : begin;
        long from = ((long)this->pages_of_row[at / PAGE] * PAGE + at % PAGE) * D + d;
        int to = piece / (D / 8) * STRIDE + d;
        copy_async(k_stage + to, this->k_head + from, there ? 16 : 0);
        copy_async(v_stage + to, this->v_head + from, there ? 16 : 0);
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

  __device__ __forceinline__ void take(const T* v_stage, const float (&s)[COLUMNS][4]) {
    const T* type = nullptr;
    const T* row = v_stage + (lane % 8 + lane / 8 % 2 * 8) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      unsigned a[4];
      Rows::operand(s, n, a);
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        unsigned b[4];
        load_matrices_transposed(b, row + n * 8 * STRIDE + d * 8);
        multiply(output[d], a, b[0], b[1], type);
        multiply(output[d + 1], a, b[2], b[3], type);
      }
    }
  }

  __device__ __forceinline__ void run(const T* q, const ChunkResults<T>& results, const float* sinks,
                                      float scale, float cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    T* tile = reinterpret_cast<T*>(shared);
    stages = tile + ROWS * STRIDE;
    this->template fetch_queries<ROWS, WARPS * 32>(
        q, [&](int row, int piece) { return tile + row * STRIDE + piece * 8; });
    commit_copies();
    // What turns a score into the exponent of 2.
    const float unit = CAP ? kLog2e : scale * kLog2e;
    const int start = begin / TOKENS * TOKENS;
    fetch(start);
    for (int at = start; at < end; at += TOKENS) {
      fetch(at + TOKENS);
      wait_copies<1>();
      __syncthreads();
      const T* k_stage = stages + at / TOKENS % STAGES * 2 * TOKENS * STRIDE;
      float s[COLUMNS][4], factor[2];
      scores(tile, k_stage, s);
      if constexpr (CAP) Rows::cap(s, scale, cap);
      this->mask(at, s);
      if (this->raise(unit, s, factor)) this->rescale(factor);
      this->weigh(unit, s);
      take(k_stage + TOKENS * STRIDE, s);
      __syncthreads();
    }
    this->template give<ROWS, WARPS * 32>(results, sinks);
  }
};

}  // namespace kernels
