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

#ifndef PAGED_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace paged {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, of which those beyond `bytes` are written as zeros and not read.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ unsigned transpose_matrix(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1, const __nv_bfloat16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1, const __half*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack(float low, float high, const __nv_bfloat16*) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&x);
}

__device__ __forceinline__ unsigned pack(float low, float high, const __half*) {
  __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&x);
}

__device__ __forceinline__ float2 unpack(unsigned x, const __nv_bfloat16*) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x));
}

__device__ __forceinline__ float2 unpack(unsigned x, const __half*) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float shuffle_xor(float x, int lanes) {
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}

__device__ __forceinline__ int shuffle(int x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// Reads past the first-level cache, where another block's results can't be seen.
__device__ __forceinline__ float4 read_shared_result(const float4* p) { return __ldcg(p); }
__device__ __forceinline__ float2 read_shared_result(const float2* p) { return __ldcg(p); }

}  // namespace paged
#endif

namespace paged {

constexpr int kTile = 16;
constexpr int kMaxSplits = 64;
constexpr float kLog2e = 1.4426950408889634f;
// Stands for minus infinity where a difference of two of them must be 0 and not NaN.
constexpr float kLowest = -1e30f;
// The score of a token that must not be seen: its weight is 0 whatever the maximum.
constexpr float kMasked = -3e38f;

__host__ __device__ constexpr int heads_per_block(int group) { return group < 16 ? group : 16; }

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

// Where results go. `arrivals` counts the blocks of each split query that are done.
template <typename T>
struct Results {
  T* out;
  float* partial;
  float* figures;
  const int* arrivals;
};

// Which query, heads and split a block serves.
struct Place {
  int q_row, kv_head, kv_heads, first_head, heads, split, splits, base;
};

// What the q/k/v projections made of a step, and how to finish it: (rows, q_heads + 2 kv_heads,
// D), heads of q first, then k, then v. `rotation` is (rows, ROTARY) float32: what the model's
// rotation makes of ones in the first half (or, TRADITIONAL, even places) and zeros in the second,
// so cosines there and sines here. The norms are (D,), or unused.
template <typename T>
struct Fresh {
  const T* qkv;
  const float* rotation;
  const T* q_norm;
  const T* k_norm;
  float epsilon;
};

// Normalises and rotates elements `d` and `d + 1` of a head. `at(d)` reads such a pair, `factor` is
// 1 / rms.
template <typename T, int ROTARY, bool TRADITIONAL, bool NORM, typename At>
__device__ __forceinline__ unsigned finish_pair(int d, At at, const T* norm, float factor,
                                                const float* rotation) {
  const T* type = nullptr;
  auto read = [&](int i) {
    float2 x = at(i);
    if constexpr (NORM) {
      float2 by = unpack(*reinterpret_cast<const unsigned*>(norm + i), type);
      x = unpack(pack(x.x * factor, x.y * factor, type), type);
      x = unpack(pack(x.x * by.x, x.y * by.y, type), type);
    }
    return x;
  };
  float2 x = read(d);
  if (d < ROTARY) {
    if constexpr (TRADITIONAL) {
      float2 turn = *reinterpret_cast<const float2*>(rotation + d);
      x = make_float2(x.x * turn.x - x.y * turn.y, x.x * turn.y + x.y * turn.x);
    } else {
      constexpr int HALF = ROTARY / 2;
      bool first = d < HALF;
      float2 other = read(first ? d + HALF : d - HALF);
      float2 cosine = *reinterpret_cast<const float2*>(rotation + (first ? d : d - HALF));
      float2 sine = *reinterpret_cast<const float2*>(rotation + (first ? d + HALF : d));
      float sign = first ? -1.f : 1.f;
      x = make_float2(x.x * cosine.x + sign * other.x * sine.x,
                      x.y * cosine.y + sign * other.y * sine.y);
    }
  }
  return pack(x.x, x.y, type);
}

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

template <typename T, int D, int GROUP, int PAGE, int WARPS, int STAGES, int WINDOW, bool CAP,
          bool SINKS>
struct Attend {
  static constexpr int HEADS = heads_per_block(GROUP);
  static constexpr int BLOCKS = (GROUP + HEADS - 1) / HEADS;
  static constexpr int COLUMNS = (HEADS + 7) / 8;
  static constexpr int STRIDE = shared_stride(D);
  static constexpr int PIECES = kTile * D / 8 / 32;
  static constexpr int STEPS = D / 16;
  static constexpr int MERGE_STRIDE = D + 4;

  static_assert(D % 16 == 0 && PAGE % kTile == 0, "head size and page size in tiles of 16");

  const T* k_head;
  const T* v_head;
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
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        int piece = j * 32 + lane;
        int token = piece / (D / 8);
        int to = token * STRIDE + piece % (D / 8) * 8;
        int bytes = start + token >= begin && start + token < stored ? 16 : 0;
        copy_async(k_stage + to, k_head + offset + piece * 8, bytes);
        copy_async(v_stage + to, v_head + offset + piece * 8, bytes);
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
  __device__ __forceinline__ void load_queries(const T* q, int heads,
                                               unsigned (&query)[STEPS][COLUMNS][2]) const {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      int head = n * 8 + lane / 4;
      const unsigned* from = reinterpret_cast<const unsigned*>(q + (long)head * D) + lane % 4;
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

  // The same from the projections' product, normalised and rotated.
  template <int ROTARY, bool TRADITIONAL, bool NORM>
  __device__ __forceinline__ void load_fresh_queries(const T* q, int heads, const Fresh<T>& fresh,
                                                     const float* rotation,
                                                     unsigned (&query)[STEPS][COLUMNS][2]) const {
    const T* type = nullptr;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const int head = n * 8 + lane / 4;
      const unsigned* from = reinterpret_cast<const unsigned*>(q + (long)head * D) + lane % 4;
      unsigned raw[2 * STEPS];
      float squares = 0.f;
#pragma unroll
      for (int unit = 0; unit < 2 * STEPS; unit++) {
        raw[unit] = head < heads ? from[unit * 4] : 0u;
        float2 x = unpack(raw[unit], type);
        squares += x.x * x.x + x.y * x.y;
      }
      float factor = 1.f;
      if constexpr (NORM) {
        squares += shuffle_xor(squares, 1);
        squares += shuffle_xor(squares, 2);
        factor = rsqrtf(squares / D + fresh.epsilon);
      }
      // A unit of 8 elements holds this lane's pair at lane % 4 * 2; rotation partners lie whole
      // units apart, in the same lane.
#pragma unroll
      for (int unit = 0; unit < 2 * STEPS; unit++) {
        const int within = lane % 4 * 2;
        query[unit / 2][n][unit % 2] = finish_pair<T, ROTARY, TRADITIONAL, NORM>(
            unit * 8 + within, [&](int d) { return unpack(raw[d / 8], type); }, fresh.q_norm,
            factor, rotation);
      }
    }
  }

  // Puts this lane's 8 elements of the new key and value into `k_new` and `v_new`, and all lanes'
  // into their page.
  template <int ROTARY, bool TRADITIONAL, bool NORM>
  __device__ __forceinline__ void make_fresh(const T* k, const T* v, const Fresh<T>& fresh,
                                             const float* rotation, uint4& k_new,
                                             uint4& v_new) const {
    const T* type = nullptr;
    const bool active = lane < D / 8;
    const int d0 = active ? lane * 8 : 0;
    auto at = [&](int d) { return unpack(*reinterpret_cast<const unsigned*>(k + d), type); };
    float factor = 1.f;
    if constexpr (NORM) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        float2 x = at(d0 + i);
        squares += active ? x.x * x.x + x.y * x.y : 0.f;
      }
#pragma unroll
      for (int o = 16; o; o /= 2) squares += shuffle_xor(squares, o);
      factor = rsqrtf(squares / D + fresh.epsilon);
    }
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = finish_pair<T, ROTARY, TRADITIONAL, NORM>(d0 + 2 * i, at, fresh.k_norm, factor,
                                                           rotation);
    k_new = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    v_new = *reinterpret_cast<const uint4*>(v + d0);
    if (!active) return;
    const int token = end - 1;
    const long slot = (long)pages_of_row[token / PAGE] * PAGE + token % PAGE;
    *reinterpret_cast<uint4*>(const_cast<T*>(k_head) + slot * D + d0) = k_new;
    *reinterpret_cast<uint4*>(const_cast<T*>(v_head) + slot * D + d0) = v_new;
  }

  // The item that this block serves. False for padding.
  __device__ __forceinline__ bool begin_item(const Pages<T>& pages, Place& place) {
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
    k_head = pages.k_pool + kv_head * pages.slots * D;
    v_head = pages.v_pool + kv_head * pages.slots * D;
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

  __device__ void run(const T* q, const Pages<T>& pages, const Results<T>& results,
                      const float* sinks, float scale, float cap) {
    Place place;
    if (!begin_item(pages, place)) return;
    fetch_first();
    unsigned query[STEPS][COLUMNS][2];
    const long row = (long)place.q_row * place.kv_heads * GROUP;
    load_queries(q + (row + place.first_head) * D, place.heads, query);
    walk(query, scale, cap, [](int, T*) {});
    merge(place, results, sinks);
  }

  template <int ROTARY, bool TRADITIONAL, bool NORM>
  __device__ void run_fused(const Fresh<T>& fresh, const Pages<T>& pages,
                            const Results<T>& results, const float* sinks, float scale,
                            float cap) {
    Place place;
    if (!begin_item(pages, place)) return;
    stored = end - 1;
    fetch_first();
    const int q_heads = place.kv_heads * GROUP;
    const T* row = fresh.qkv + (long)place.q_row * (q_heads + 2 * place.kv_heads) * D;
    const float* rotation = fresh.rotation + (long)place.q_row * ROTARY;
    const int newest = (end - 1) / kTile - first_tile - warp;
    const bool owns = count > 0 && newest == (count - 1) * WARPS;
    uint4 k_new, v_new;
    if (owns)
      make_fresh<ROTARY, TRADITIONAL, NORM>(row + (q_heads + place.kv_head) * D,
                                            row + (q_heads + place.kv_heads + place.kv_head) * D,
                                            fresh, rotation, k_new, v_new);
    unsigned query[STEPS][COLUMNS][2];
    load_fresh_queries<ROTARY, TRADITIONAL, NORM>(row + place.first_head * D, place.heads, fresh,
                                                  rotation, query);
    walk(query, scale, cap, [&](int i, T* k_stage) {
      if (!owns || i != count - 1) return;
      if (lane < D / 8) {
        T* to = k_stage + (end - 1) % kTile * STRIDE + lane * 8;
        *reinterpret_cast<uint4*>(to) = k_new;
        *reinterpret_cast<uint4*>(to + kTile * STRIDE) = v_new;
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
          results.figures[(part + head) * 2] = top;
          results.figures[(part + head) * 2 + 1] = total;
        }
      }
    }
    if (place.splits > 1) finish(place, q_head, results, sinks, reinterpret_cast<float*>(shared));
  }

  // The block that arrives last merges the splits. It sets the counter back to 0 for the next
  // launch, so that the counters are cleared once in the life of the process.
  __device__ void finish(const Place& place, long q_head, const Results<T>& results,
                         const float* sinks, float* shared) {
    const int heads = place.heads, base = place.base, splits = place.splits;
    int* last = reinterpret_cast<int*>(shared + HEADS * kMaxSplits);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int* mine = const_cast<int*>(results.arrivals) + (long)place.q_row * gridDim.x + blockIdx.x;
      *last = atomicAdd(mine, 1) == splits - 1;
      if (*last) *mine = 0;
    }
    __syncthreads();
    if (!*last) return;
    __threadfence();

    float* weights = shared;
    for (int head = warp; head < heads; head += WARPS) {
      float tops[kMaxSplits / 32], sums[kMaxSplits / 32], top = kLowest, total = 0.f;
#pragma unroll
      for (int j = 0; j < kMaxSplits / 32; j++) {
        int s = j * 32 + lane;
        float2 figure = make_float2(kLowest, 0.f);
        if (s < splits) {
          long at = ((long)(base + s) * gridDim.x + blockIdx.x) * HEADS + head;
          figure = read_shared_result(reinterpret_cast<const float2*>(results.figures) + at);
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

// Writes one token of one head, 8 elements a thread. A slot below 0 is skipped.
template <typename T, int D, typename Strides>
__device__ __forceinline__ void write_token(const T* k_pool, const T* v_pool, const T* k,
                                            const T* v, const int* slot_of_token, long pool_slots,
                                            int heads, int tokens,
                                            const Strides& k_strides, const Strides& v_strides) {
  const int piece = blockIdx.x * blockDim.x + threadIdx.x;
  const int head = piece / (D / 8), d = piece % (D / 8) * 8;
  if (head >= heads) return;
  const int row = blockIdx.y / tokens, token = blockIdx.y % tokens;
  const long slot = slot_of_token[blockIdx.y];
  if (slot < 0) return;
  const long to = (head * pool_slots + slot) * D + d;
  const T* k_from = k + row * k_strides[0] + head * k_strides[1] + token * k_strides[2];
  const T* v_from = v + row * v_strides[0] + head * v_strides[1] + token * v_strides[2];
  T* k_to = const_cast<T*>(k_pool) + to;
  T* v_to = const_cast<T*>(v_pool) + to;
  const bool dense = k_strides[3] == 1 && v_strides[3] == 1;
  const unsigned long ends = (unsigned long)(k_from + d) | (unsigned long)(v_from + d);
  if (dense && ends % 16 == 0) {
    *reinterpret_cast<uint4*>(k_to) = *reinterpret_cast<const uint4*>(k_from + d);
    *reinterpret_cast<uint4*>(v_to) = *reinterpret_cast<const uint4*>(v_from + d);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    k_to[i] = k_from[(d + i) * k_strides[3]];
    v_to[i] = v_from[(d + i) * v_strides[3]];
  }
}

}  // namespace paged
