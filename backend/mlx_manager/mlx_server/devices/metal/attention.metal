// Decode attention over pages for Apple GPUs: the twin of attention.cu, item for item.
//
// One threadgroup takes one work item (a run of 16-token tiles of one query's context) for one
// block of at most 4 query heads that share a key/value head, so that a token's key and value are
// read once for all of them. A simdgroup takes a tile; `lanes_per_token` lanes hold one token's
// elements, and 32 / lanes_per_token tokens are in hand at once. Softmax runs online in base 2
// with float32 sums, separately for each set of lanes; the sets are merged in threadgroup memory.
// Splits of a query are merged by `merge_splits`, a second launch: Metal has no way to publish
// results to another threadgroup of the same launch before version 3.2.
//
// Arrays of fewer than 8 elements reach a kernel in the constant address space and others in the
// device space, so pointers to small arrays are template parameters.

namespace kernels {

constant constexpr int kTile = 16;
constant constexpr float kLog2e = 1.4426950408889634f;
// Stands for minus infinity where a difference of two of them must be 0 and not NaN.
constant constexpr float kLowest = -1e30f;
// The score of a token that must not be seen: its weight is 0 whatever the maximum.
constant constexpr float kMasked = -3e38f;

// Of heads of more than 256 elements a lane holds twice as many: half as many heads of a block, whose
// outputs have to fit into threadgroup memory, and half as many tokens in hand.
constexpr int heads_per_block(int group, int head_dim) {
  return head_dim > 256 ? (group < 2 ? group : 2) : group < 4 ? group : 4;
}
constexpr int lanes_per_token(int head_dim) {
  return head_dim >= 160 ? 32 : head_dim == 64 || head_dim % 16 ? 8 : 16;
}
// Lanes that measure a head together, before there are tokens to be held.
constexpr int lanes_per_head(int head_dim) { return head_dim % 16 ? 8 : 16; }
constexpr int tokens_at_once(int head_dim) { return head_dim > 256 ? 2 : 4; }

// One head's elements, normalised if NORM.
template <typename T, int D, bool NORM, typename Norm>
struct Head {
  const device T* values;
  Norm norm;
  float factor;

  float at(int d) const {
    const float x = float(values[d]);
    if (!NORM) return x;
    return float(T(float(T(x * factor)) * float(norm[NORM ? d : 0])));
  }

  // Sets `factor` to 1 / rms, `LANES` lanes together: this one takes DIMS elements from d0.
  template <int DIMS, int LANES>
  void measure(int d0, float epsilon) {
    float squares = 0.0f;
    for (int d = 0; d < DIMS; d++) squares += float(values[d0 + d]) * float(values[d0 + d]);
    for (int o = LANES / 2; o > 0; o /= 2) squares += metal::simd_shuffle_xor(squares, ushort(o));
    factor = metal::rsqrt(squares / D + epsilon);
  }
};

// Queries that are ready, over pages that are written.
template <typename T, int D, int GROUP>
struct Ready {
  typedef Head<T, D, false, const device T*> Query;
  const device T* q;

  void write_newest(int, int, int, device T*, device T*, int, int) const {}
  bool holds(int, int) const { return false; }
  float newest_key(int) const { return 0.0f; }
  float newest_value(int) const { return 0.0f; }

  template <int DIMS, int LANES>
  Query query(int q_row, int kv_heads, int head, int) const {
    Query made = {q + (long(q_row) * kv_heads * GROUP + head) * D, q, 1.0f};
    return made;
  }
  T finished(Query head, int, int d) const { return T(head.at(d)); }
};

// The product of the q/k/v projections, (rows, q_heads + 2 kv_heads, D), or, GATED, with a gate
// behind each head of q, which is skipped here: normalised and rotated on its way into registers;
// VALUES: those of v normalised without weights. ALONE: there are heads of q alone. `rotation` is
// (rows, ROTARY): what the model's rotation makes of ones in the first half (or, TRADITIONAL, even
// places) and zeros in the second, so cosines there and sines here. `newest` is the new token's key and value, for the threadgroup that meets its tile and
// writes it into its page.
template <typename T, int D, int GROUP, int ROTARY, bool TRADITIONAL, bool NORM, bool GATED,
          bool VALUES, bool ALONE, typename Norm, typename Rotation>
struct Fresh {
  typedef Head<T, D, NORM, Norm> Query;
  enum { NORMED = NORM, QUERIES_ALONE = ALONE };
  const device T* qkv;
  Rotation rotation;
  Norm q_norm;
  Norm k_norm;
  float epsilon;
  threadgroup T* newest;

  // A head of q, then k, then v.
  const device T* head(int q_row, int kv_heads, int number) const {
    const int gates = GATED ? GROUP * kv_heads : 0;
    const long row = long(q_row) * ((GROUP + (ALONE ? 0 : 2)) * kv_heads + gates);
    return qkv + (row + number + metal::min(number, gates)) * D;
  }

  T finished(Query head, int q_row, int d) const {
    const float x = head.at(d);
    if (d >= ROTARY) return T(x);
    const int apart = TRADITIONAL ? 1 : ROTARY / 2;
    const bool first = TRADITIONAL ? d % 2 == 0 : d < apart;
    const int low = first ? d : d - apart;
    const float cosine = rotation[long(q_row) * ROTARY + low];
    const float sine = rotation[long(q_row) * ROTARY + low + apart];
    const float other = head.at(first ? d + apart : low);
    return T(first ? x * cosine - other * sine : x * cosine + other * sine);
  }

  // Of v: as it is, or normalised without weights.
  T finished_value(Query head, int d) const {
    return VALUES ? T(float(head.values[d]) * head.factor) : head.values[d];
  }

  template <int DIMS, int LANES>
  Query query(int q_row, int kv_heads, int head, int d0) const {
    Query made = {this->head(q_row, kv_heads, head), q_norm, 1.0f};
    if (NORM) made.template measure<DIMS, LANES>(d0, epsilon);
    return made;
  }

  // By all threads of the group. `k_to` and `v_to` are the new token's place in its page.
  void write_newest(int q_row, int kv_heads, int kv_head, device T* k_to, device T* v_to,
                    int thread_index, int threads) const {
    const device T* k = head(q_row, kv_heads, GROUP * kv_heads + kv_head);
    const device T* v = k + kv_heads * D;
    constexpr int LANES = lanes_per_head(D);
    constexpr int DIMS = D / LANES;
    Query newest_head = {k, k_norm, 1.0f};
    if (NORM) newest_head.template measure<DIMS, LANES>(thread_index % LANES * DIMS, epsilon);
    Query value = {v, k_norm, 1.0f};
    if (VALUES) value.template measure<DIMS, LANES>(thread_index % LANES * DIMS, epsilon);
    for (int d = thread_index; d < D; d += threads) {
      newest[d] = finished(newest_head, q_row, d);
      newest[D + d] = finished_value(value, d);
      k_to[d] = newest[d];
      v_to[d] = newest[D + d];
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  bool holds(int token, int length) const { return token == length - 1; }
  float newest_key(int d) const { return float(newest[d]); }
  float newest_value(int d) const { return float(newest[D + d]); }
};

// Pages of codes of 8 bits, each to be multiplied by the scale of its group of G: of heads of keys,
// and behind these of values. `before` heads come before those that are meant.
template <int D, int G>
struct Codes {
  const device int8_t* codes;
  const device bfloat16_t* scales;
  long slots;
  int before;

  float operator[](long place) const {
    const long at = before * slots * D + place;
    return float(codes[at]) * float(scales[at / G]);
  }
};

// Where the new token's elements go. Nothing is written into pages of codes here.
template <typename T>
inline device T* to_write(const device T* pool, long place) {
  return const_cast<device T*>(pool) + place;
}
template <typename T, int D, int G>
inline device T* to_write(Codes<D, G>, long) {
  return nullptr;
}

// What the unnormalised output is multiplied with, once the denominator takes in the head's sink.
inline float normaliser(float maximum, float sum, bool has_sink, float sink) {
  float factor = 1.0f;
  if (has_sink) {
    float top = metal::max(maximum, sink * kLog2e);
    factor = metal::exp2(maximum - top);
    sum = sum * factor + metal::exp2(sink * kLog2e - top);
  }
  return sum > 0.0f ? factor / sum : 0.0f;
}

// `Fresh` with the types of its arrays, whatever their address spaces.
template <typename T, int D, int GROUP, int ROTARY, bool TRADITIONAL, bool NORM, bool GATED,
          bool VALUES, bool ALONE, typename Norm, typename Rotation>
inline Fresh<T, D, GROUP, ROTARY, TRADITIONAL, NORM, GATED, VALUES, ALONE, Norm, Rotation> fresh(
    const device T* qkv, Rotation rotation, Norm q_norm, Norm k_norm, float epsilon,
    threadgroup T* newest) {
  return {qkv, rotation, q_norm, k_norm, epsilon, newest};
}

// What the threads of `attend` share.
template <int D, int GROUP, int SIMDGROUPS>
struct Shared {
  enum { ROWS = SIMDGROUPS * (32 / lanes_per_token(D)) * heads_per_block(GROUP, D) };
  float merged[ROWS * D];
  float figures[ROWS * 2];
};

template <typename T, int D, int GROUP, int PAGE, int SIMDGROUPS, int WINDOW, bool CAP, bool SINKS,
          bool SPLIT, typename Queries, typename Pool, typename Table, typename Lengths,
          typename Sinks>
inline void attend(Queries queries, Pool k_pool, Pool v_pool, Table table, Lengths lengths,
                   const device int* items, Sinks sinks, device T* out,
                   device float* partial, device float* partial_figures,
                   threadgroup Shared<D, GROUP, SIMDGROUPS>* shared, long slots, int table_width,
                   float scale, float cap, uint3 group, uint3 groups, int thread_index,
                   int simdgroup, int lane) {
  threadgroup float* merged = shared->merged;
  threadgroup float* figures = shared->figures;
  constexpr int HEADS = heads_per_block(GROUP, D);
  constexpr int BLOCKS = (GROUP + HEADS - 1) / HEADS;
  constexpr int LANES = lanes_per_token(D);
  constexpr int DIMS = D / LANES;
  constexpr int TOKENS = 32 / LANES;
  constexpr int UNROLL = tokens_at_once(D);
  constexpr int SETS = SIMDGROUPS * TOKENS;
  static_assert(SETS * HEADS * (D + 2) * sizeof(float) + 2 * D * sizeof(T) <= 32768,
                "a threadgroup has 32 KB of memory");

  const int kv_head = int(group.x) / BLOCKS;
  const int head0 = int(group.x) % BLOCKS * HEADS;
  const int heads = metal::min(HEADS, GROUP - head0);
  const device int* item = items + group.y * 8;
  const int q_row = item[0], table_row = item[1];
  const int split = item[4], splits = item[5], base = item[6];
  if (q_row < 0) return;
  const int kv_heads = int(groups.x) / BLOCKS;
  const long q_head = long(q_row) * kv_heads * GROUP + kv_head * GROUP + head0;
  const int length = lengths[q_row];
  const int begin = WINDOW > 0 ? metal::max(0, length - WINDOW) : 0;
  // The last split is open: a plan outlives the steps that lengthen its queries.
  const int last_tile = split == splits - 1 ? (length + kTile - 1) / kTile : item[3];
  const int first_tile = metal::max(item[2], begin / kTile);
  const int set = simdgroup * TOKENS + lane / LANES;
  const int d0 = lane % LANES * DIMS;

  float query[HEADS][DIMS], output[HEADS][DIMS], maximum[HEADS], sum[HEADS];
  for (int h = 0; h < HEADS; h++) {
    maximum[h] = kLowest;
    sum[h] = 0.0f;
    for (int d = 0; d < DIMS; d++) {
      query[h][d] = 0.0f;
      output[h][d] = 0.0f;
    }
  }
  // Arrays stay in registers where all that indexes them is known to the compiler.
  for (int h = 0; h < HEADS; h++)
    if (h < heads) {
      const typename Queries::Query head =
          queries.template query<DIMS, LANES>(q_row, kv_heads, kv_head * GROUP + head0 + h, d0);
      for (int d = 0; d < DIMS; d++)
        query[h][d] = float(queries.finished(head, q_row, d0 + d)) * scale;
    }
  const int newest_tile = (length - 1) / kTile;
  if (length > 0 && newest_tile >= first_tile && newest_tile < last_tile) {
    const long page = table[long(table_row) * table_width + (length - 1) / PAGE];
    const long slot = kv_head * slots + page * PAGE + (length - 1) % PAGE;
    queries.write_newest(q_row, kv_heads, kv_head, to_write<T>(k_pool, slot * D),
                         to_write<T>(v_pool, slot * D), thread_index, SIMDGROUPS * 32);
  }

  for (int tile = first_tile + simdgroup; tile < last_tile; tile += SIMDGROUPS) {
    const int start = tile * kTile;
    const long page = table[long(table_row) * table_width + start / PAGE];
    const long place = (kv_head * slots + page * PAGE + start % PAGE) * D + d0;
    for (int pass = 0; pass < kTile; pass += TOKENS * UNROLL) {
      float key[UNROLL][DIMS], value[UNROLL][DIMS], score[UNROLL][HEADS];
      bool visible[UNROLL];
      for (int u = 0; u < UNROLL; u++) {
        const int token = pass + u * TOKENS + lane / LANES;
        visible[u] = start + token >= begin && start + token < length;
        const bool fresh = queries.holds(start + token, length);
        for (int d = 0; d < DIMS; d++) {
          key[u][d] = value[u][d] = 0.0f;
          if (fresh) {
            key[u][d] = queries.newest_key(d0 + d);
            value[u][d] = queries.newest_value(d0 + d);
          } else if (visible[u]) {
            key[u][d] = float(k_pool[place + token * D + d]);
            value[u][d] = float(v_pool[place + token * D + d]);
          }
        }
      }
      for (int u = 0; u < UNROLL; u++)
        for (int h = 0; h < HEADS; h++) {
          float x = 0.0f;
          for (int d = 0; d < DIMS; d++) x += query[h][d] * key[u][d];
          for (int o = LANES / 2; o > 0; o /= 2) x += metal::simd_shuffle_xor(x, ushort(o));
          if (CAP) x = cap * metal::precise::tanh(x / cap);
          score[u][h] = visible[u] ? x * kLog2e : kMasked;
        }
      for (int h = 0; h < HEADS; h++) {
        float top = maximum[h];
        for (int u = 0; u < UNROLL; u++) top = metal::max(top, score[u][h]);
        const float factor = metal::exp2(maximum[h] - top);
        maximum[h] = top;
        sum[h] *= factor;
        for (int d = 0; d < DIMS; d++) output[h][d] *= factor;
        for (int u = 0; u < UNROLL; u++) {
          const float weight = metal::exp2(score[u][h] - top);
          sum[h] += weight;
          for (int d = 0; d < DIMS; d++) output[h][d] += weight * value[u][d];
        }
      }
    }
  }

  for (int h = 0; h < HEADS; h++)
    if (h < heads) {
      for (int d = 0; d < DIMS; d++) merged[(set * HEADS + h) * D + d0 + d] = output[h][d];
      if (d0 == 0) {
        figures[(set * HEADS + h) * 2] = maximum[h];
        figures[(set * HEADS + h) * 2 + 1] = sum[h];
      }
    }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  const long place = (long(base + split) * groups.x + group.x) * HEADS;
  for (int x = thread_index; x < heads * D; x += SIMDGROUPS * 32) {
    const int head = x / D, d = x % D;
    float top = kLowest, total = 0.0f, value = 0.0f;
    for (int s = 0; s < SETS; s++) top = metal::max(top, figures[(s * HEADS + head) * 2]);
    for (int s = 0; s < SETS; s++) {
      const float factor = metal::exp2(figures[(s * HEADS + head) * 2] - top);
      total += factor * figures[(s * HEADS + head) * 2 + 1];
      value += factor * merged[(s * HEADS + head) * D + d];
    }
    if (SPLIT) {
      partial[(place + head) * D + d] = value;
      if (d == 0) {
        partial_figures[(place + head) * 2] = top;
        partial_figures[(place + head) * 2 + 1] = total;
      }
    } else {
      const float sink = SINKS ? float(sinks[kv_head * GROUP + head0 + head]) : 0.0f;
      out[(q_head + head) * D + d] = T(value * normaliser(top, total, SINKS, sink));
    }
  }
}

// One threadgroup of D threads for each query head and work item; the first split of a query
// merges them all.
template <typename T, int D, int GROUP, bool SINKS, typename Sinks>
inline void merge_splits(const device float* partial, const device float* partial_figures,
                         const device int* items, Sinks sinks, device T* out, uint3 group,
                         uint3 groups, int d) {
  constexpr int HEADS = heads_per_block(GROUP, D);
  constexpr int BLOCKS = (GROUP + HEADS - 1) / HEADS;
  const device int* item = items + group.y * 8;
  const int q_row = item[0], split = item[4], splits = item[5], base = item[6];
  if (q_row < 0 || split != 0) return;
  const int q_head = int(group.x), q_heads = int(groups.x), in_group = q_head % GROUP;
  const int block = q_head / GROUP * BLOCKS + in_group / HEADS;
  const int blocks = q_heads / GROUP * BLOCKS;
  float top = kLowest, total = 0.0f, value = 0.0f;
  for (int s = 0; s < splits; s++) {
    const long place = (long(base + s) * blocks + block) * HEADS + in_group % HEADS;
    top = metal::max(top, partial_figures[place * 2]);
  }
  for (int s = 0; s < splits; s++) {
    const long place = (long(base + s) * blocks + block) * HEADS + in_group % HEADS;
    const float factor = metal::exp2(partial_figures[place * 2] - top);
    total += factor * partial_figures[place * 2 + 1];
    value += factor * partial[place * D + d];
  }
  const float sink = SINKS ? float(sinks[q_head]) : 0.0f;
  out[(long(q_row) * q_heads + q_head) * D + d] = T(value * normaliser(top, total, SINKS, sink));
}

// Finishes the heads of a step: queries go to `out`, (tokens, q heads, D), keys and values to their
// slots; a slot below 0 is skipped. A head is taken by `lanes_per_head` threads.
template <typename T, int D, int GROUP, typename Heads, typename Slots>
inline void rotate_and_write(Heads fresh, const device T* k_pool, const device T* v_pool,
                             Slots slot_of_token, long pool_slots, int kv_heads, int tokens,
                             device T* out, uint3 place) {
  const int position = int(place.x);
  constexpr int LANES = lanes_per_head(D);
  constexpr int DIMS = D / LANES;
  const int q_heads = GROUP * kv_heads;
  const int heads = q_heads + (Heads::QUERIES_ALONE ? 0 : 2 * kv_heads);
  const int lane = position % LANES, number = position / LANES;
  // Threads without work go along as far as lanes meet.
  const bool works = number < tokens * heads;
  const int token = works ? number / heads : 0, head = works ? number % heads : 0;
  const bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
  typename Heads::Query mine = {fresh.head(token, kv_heads, head),
                                is_query ? fresh.q_norm : fresh.k_norm, 1.0f};
  if (Heads::NORMED) mine.template measure<DIMS, LANES>(lane * DIMS, fresh.epsilon);
  const long slot = slot_of_token[token];
  if (!works || (!is_query && slot < 0)) return;
  const long kv_head = (head - q_heads) % kv_heads;
  device T* pool = const_cast<device T*>(is_value ? v_pool : k_pool);
  device T* to = is_query ? out + (long(token) * q_heads + head) * D
                          : pool + (kv_head * pool_slots + slot) * D;
  for (int d = lane; d < D; d += LANES)
    to[d] = is_value ? fresh.finished_value(mine, d) : fresh.finished(mine, token, d);
}

// Writes one token of one head, keys of K elements and values of V, one of each a thread. A slot
// below 0 is skipped.
template <typename T, int K, int V, typename Slots>
inline void write_token(const device T* k_pool, const device T* v_pool, const device T* k,
                        const device T* v, Slots slot_of_token, long pool_slots, int tokens,
                        const constant int64_t* k_strides, const constant int64_t* v_strides,
                        uint3 position, device int* written) {
  if (position.x + position.y == 0) written[0] = 0;
  const int widest = K > V ? K : V;
  const int head = int(position.x) / widest, d = int(position.x) % widest;
  const int row = int(position.y) / tokens, token = int(position.y) % tokens;
  const long slot = slot_of_token[position.y];
  if (slot < 0) return;
  const long to = head * pool_slots + slot;
  const long k_from = row * k_strides[0] + head * k_strides[1] + token * k_strides[2];
  const long v_from = row * v_strides[0] + head * v_strides[1] + token * v_strides[2];
  if (d < K) const_cast<device T*>(k_pool)[to * K + d] = k[k_from + d * k_strides[3]];
  if (d < V) const_cast<device T*>(v_pool)[to * V + d] = v[v_from + d * v_strides[3]];
}

}  // namespace kernels
