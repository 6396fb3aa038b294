// Layers of the gated delta rule ("Gated Delta Networks", Yang et al. 2024), as Qwen 3.5 and Qwen 3
// Next have them: what lies between a layer's first product and its last.
//
// A head keeps a matrix, [VALUE_DIM][KEY_DIM] float32, for each row, and forgets by `decay`:
//
//   delta = (v - decay * state k) * beta
//   state = decay * state + delta k'
//   y = state q
//
// Before that q, k and v go through a causal convolution of TAPS tokens, each channel by itself; q and
// k are normed; behind it y is normed and gated by z. The last TAPS inputs of the convolution are kept
// in a ring, [slot][TAPS][CHANNELS], that of position p in place p % TAPS: who reads the TAPS - 1
// before it and who writes it do not meet. A row's state and ring are in its slot. What a slot held
// before is not read where a text begins.
//
// One token a row is one launch (`step`). A step with prompts in it is three: `convolve`, `chunk`,
// which has a block go through all tokens of a text with a part of a head in registers, and `finish`.

namespace kernels {

// Where things are in a row of the first product. GROUPED: all of a key head and its value heads
// together, q, k, v and z, and behind all of them beta and decay, in the same way; else all heads of
// q, of k, of v, of z, of beta and of decay.
template <typename T, int KEY_HEADS_, int VALUE_HEADS_, int KEY_DIM_, int VALUE_DIM_, int TAPS_,
          bool GROUPED>
struct DeltaShape {
  using Element = T;
  static constexpr int KEY_HEADS = KEY_HEADS_, VALUE_HEADS = VALUE_HEADS_;
  static constexpr int KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_, TAPS = TAPS_;
  static constexpr int SHARE = VALUE_HEADS / KEY_HEADS;
  static constexpr int KEYS = KEY_HEADS * KEY_DIM, VALUES = VALUE_HEADS * VALUE_DIM;
  static constexpr int CHANNELS = 2 * KEYS + VALUES, HEADS = 2 * KEY_HEADS + VALUE_HEADS;
  static constexpr int GROUP = 2 * KEY_DIM + 2 * SHARE * VALUE_DIM;
  static_assert(KEY_DIM % 32 == 0 && VALUE_DIM % 32 == 0 && VALUE_HEADS % KEY_HEADS == 0);

  // The first column of a head among q's, then k's, then v's.
  __device__ __forceinline__ static int column(int head) {
    if constexpr (!GROUPED) return channel(head);
    if (head < 2 * KEY_HEADS) return head % KEY_HEADS * GROUP + head / KEY_HEADS * KEY_DIM;
    const int own = head - 2 * KEY_HEADS;
    return own / SHARE * GROUP + 2 * KEY_DIM + own % SHARE * VALUE_DIM;
  }
  // And the first channel of the convolution.
  __device__ __forceinline__ static int channel(int head) {
    return head < 2 * KEY_HEADS ? head * KEY_DIM : 2 * KEYS + (head - 2 * KEY_HEADS) * VALUE_DIM;
  }
  __device__ __forceinline__ static int gate(int value_head) {
    return column(2 * KEY_HEADS + value_head) + (GROUPED ? SHARE * VALUE_DIM : VALUES);
  }
  __device__ __forceinline__ static int beta(int value_head) {
    constexpr int BEHIND = CHANNELS + VALUES;
    return BEHIND + (GROUPED ? value_head / SHARE * SHARE + value_head : value_head);
  }
  __device__ __forceinline__ static int decay(int value_head) {
    return beta(value_head) + (GROUPED ? SHARE : VALUE_HEADS);
  }
};

// A layer's weights: of the convolution, [CHANNELS][TAPS]; -exp(A_log) and what is added to a, each
// [VALUE_HEADS]; of the norm, [VALUE_DIM].
template <typename T>
struct DeltaWeights {
  const T* convolution;
  const float* rates;
  const float* offsets;
  const T* norm;
  float epsilon;
};

template <typename T>
__device__ __forceinline__ float rounded_to(float x) { return float(T(x)); }

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

template <typename S>
struct Delta {
  using T = typename S::Element;
  using Weights = DeltaWeights<T>;

  // Of a head's token, `row` of the first product. ROUNDED: as sums and powers in T.
  template <bool ROUNDED>
  __device__ __forceinline__ static float decay(const T* row, int value_head, const Weights& by) {
    float x = float(row[S::decay(value_head)]) + by.offsets[value_head];
    if constexpr (ROUNDED) x = rounded_to<T>(x);
    x = fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
    if constexpr (ROUNDED) x = rounded_to<T>(x);
    return expf(by.rates[value_head] * x);
  }

  __device__ __forceinline__ static float beta(const T* row, int value_head) {
    return rounded_to<T>(sigmoid(float(row[S::beta(value_head)])));
  }

  // What an element of q or k is multiplied by, twice, so that its head has the length 1, and that of
  // q is divided by the root of KEY_DIM once more. `squares`: of all the head's elements.
  __device__ __forceinline__ static float normed(float x, float squares, bool is_query) {
    const float root = rsqrtf(float(S::KEY_DIM));
    const float factor = rsqrtf((squares + 1e-6f) / S::KEY_DIM);
    return rounded_to<T>(rounded_to<T>(x * factor) * rounded_to<T>(is_query ? root * root : root));
  }

  __device__ __forceinline__ static float activated(float sum) {
    return rounded_to<T>(Silu::gated(rounded_to<T>(sum), 1.f));
  }

  // An element of y, normed, times the activation of its gate.
  __device__ __forceinline__ static T finished(float y, float squares, T norm, T gate,
                                               float epsilon) {
    const float factor = rsqrtf(squares / S::VALUE_DIM + epsilon);
    const float of = rounded_to<T>(rounded_to<T>(y * factor) * float(norm));
    return T(Silu::gated(float(gate), 1.f) * of);
  }

  __device__ __forceinline__ static T* place(const T* ring, long slot, int position) {
    return const_cast<T*>(ring) + (slot * S::TAPS + position % S::TAPS) * S::CHANNELS;
  }

  __device__ __forceinline__ static float* matrix(const float* states, long slot, int value_head) {
    return const_cast<float*>(states) +
           (slot * S::VALUE_HEADS + value_head) * S::VALUE_DIM * S::KEY_DIM;
  }

  // One token of one row through one head, by a block of WARPS.
  template <int WARPS, bool ROUNDED>
  __device__ static void step(const T* heads, int width, const int* lengths, const int* slots,
                              const Weights& by, const T* ring, const float* states, T* out) {
    constexpr int EACH = S::KEY_DIM / 32, ROWS = S::VALUE_DIM / WARPS;
    extern __shared__ __align__(16) unsigned char shared[];
    float* q = reinterpret_cast<float*>(shared);
    float* k = q + S::KEY_DIM;
    float* v = k + S::KEY_DIM;
    float* y = v + S::VALUE_DIM;
    const int value_head = blockIdx.x % S::VALUE_HEADS, row_number = blockIdx.x / S::VALUE_HEADS;
    const int key_head = value_head / S::SHARE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int position = lengths[row_number] - 1;
    T* to = out + (long)row_number * S::VALUES + value_head * S::VALUE_DIM;
    if (position < 0) {
      for (int d = threadIdx.x; d < S::VALUE_DIM; d += WARPS * 32) to[d] = T(0.f);
      return;
    }
    const long slot = slots[row_number];
    const T* row = heads + (long)row_number * width;
    using Part = Neighbours<float, EACH>;
    Part state[ROWS];
    float* own = matrix(states, slot, value_head) + lane * EACH;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (position > 0) {
        state[i] = Part::at(own + (i * WARPS + warp) * S::KEY_DIM);
      } else {
#pragma unroll
        for (int e = 0; e < EACH; e++) state[i].of[e] = 0.f;
      }
    }
    for (int x = threadIdx.x; x < 2 * S::KEY_DIM + S::VALUE_DIM; x += WARPS * 32) {
      const int part = x / S::KEY_DIM < 2 ? x / S::KEY_DIM : 2, d = x - part * S::KEY_DIM;
      const int head =
          part < 2 ? part * S::KEY_HEADS + key_head : 2 * S::KEY_HEADS + value_head;
      const int channel = S::channel(head) + d;
      const T newest = row[S::column(head) + d];
      const T* taps = by.convolution + channel * S::TAPS;
      float sum = 0.f;
#pragma unroll
      for (int back = S::TAPS - 1; back > 0; back--)
        if (position >= back)
          sum = fmaf(float(taps[S::TAPS - 1 - back]),
                     float(place(ring, slot, position - back)[channel]), sum);
      sum = fmaf(float(taps[S::TAPS - 1]), float(newest), sum);
      q[x] = activated(sum);
      if (part == 2 || value_head % S::SHARE == 0) place(ring, slot, position)[channel] = newest;
    }
    __syncthreads();
    if (warp < 2) {
      float* head = warp == 0 ? q : k;
      float squares = 0.f;
#pragma unroll
      for (int e = 0; e < EACH; e++) squares += head[e * 32 + lane] * head[e * 32 + lane];
      squares = sum_of_warp(squares);
#pragma unroll
      for (int e = 0; e < EACH; e++)
        head[e * 32 + lane] = normed(head[e * 32 + lane], squares, warp == 0);
    }
    const float keeps = decay<ROUNDED>(row, value_head, by), learns = beta(row, value_head);
    __syncthreads();
    const Part key = Part::at(k + lane * EACH), query = Part::at(q + lane * EACH);
    float both = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) both = fmaf(key.of[e], query.of[e], both);
    both = sum_of_warp(both);
    float told[ROWS], asked[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      told[i] = asked[i] = 0.f;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        told[i] = fmaf(state[i].of[e], key.of[e], told[i]);
        asked[i] = fmaf(state[i].of[e], query.of[e], asked[i]);
      }
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        told[i] += shuffle_xor(told[i], lanes);
        asked[i] += shuffle_xor(asked[i], lanes);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int d = i * WARPS + warp;
      const float delta = (v[d] - keeps * told[i]) * learns;
#pragma unroll
      for (int e = 0; e < EACH; e++)
        state[i].of[e] = fmaf(key.of[e], delta, keeps * state[i].of[e]);
      state[i].put(own + d * S::KEY_DIM);
      if (lane == 0) y[d] = rounded_to<T>(fmaf(delta, both, keeps * asked[i]));
    }
    __syncthreads();
    float squares = 0.f;
#pragma unroll
    for (int d = 0; d < S::VALUE_DIM; d += 32) squares += y[d + lane] * y[d + lane];
    squares = sum_of_warp(squares);
    for (int d = threadIdx.x; d < S::VALUE_DIM; d += WARPS * 32)
      to[d] = finished(y[d], squares, by.norm[d], row[S::gate(value_head) + d], by.epsilon);
  }

  // The convolved heads, (tokens, CHANNELS), q and k normed: a warp has a token of one of HEADS. Of
  // `spans`, [n][4], the first token, how many, the slot and the position of the first; of each token
  // its span in `owners`, or -1.
  __device__ static void convolve(const T* heads, int width, int tokens, const int* owners,
                                  const int* spans, const T* convolution, const T* ring, T* out) {
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int token = warp / S::HEADS, head = warp % S::HEADS;
    if (token >= tokens || owners[token] < 0) return;
    const bool is_value = head >= 2 * S::KEY_HEADS;
    if (is_value)
      convolve_head<S::VALUE_DIM, false>(heads, width, token, head, spans + owners[token] * 4,
                                         convolution, ring, out, lane);
    else
      convolve_head<S::KEY_DIM, true>(heads, width, token, head, spans + owners[token] * 4,
                                      convolution, ring, out, lane);
  }

  template <int DIM, bool NORMED>
  __device__ __forceinline__ static void convolve_head(const T* heads, int width, int token,
                                                       int head, const int* span,
                                                       const T* convolution, const T* ring, T* out,
                                                       int lane) {
    constexpr int EACH = DIM / 32;
    using Part = Neighbours<T, EACH>;
    const int at = token - span[0], position = span[3] + at, d = lane * EACH;
    const int channel = S::channel(head) + d;
    const T* newest = heads + (long)token * width + S::column(head) + d;
    float sums[EACH];
    T taps[EACH * S::TAPS];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      sums[e] = 0.f;
      const auto own = Neighbours<T, S::TAPS>::at(convolution + (channel + e) * S::TAPS);
#pragma unroll
      for (int tap = 0; tap < S::TAPS; tap++) taps[e * S::TAPS + tap] = own.of[tap];
    }
#pragma unroll
    for (int back = S::TAPS - 1; back >= 0; back--) {
      if (position < back) continue;
      const Part x = Part::at(at >= back ? newest - (long)back * width
                                         : place(ring, span[2], position - back) + channel);
#pragma unroll
      for (int e = 0; e < EACH; e++)
        sums[e] = fmaf(float(taps[e * S::TAPS + S::TAPS - 1 - back]), float(x.of[e]), sums[e]);
    }
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      sums[e] = activated(sums[e]);
      squares += sums[e] * sums[e];
    }
    Part result;
    if constexpr (NORMED) squares = sum_of_warp(squares);
#pragma unroll
    for (int e = 0; e < EACH; e++)
      result.of[e] = T(NORMED ? normed(sums[e], squares, head < S::KEY_HEADS) : sums[e]);
    result.put(out + (long)token * S::CHANNELS + channel);
  }

  // How `chunk` divides a head: LANES threads have a row of the matrix, a block 128 / LANES rows.
  // They go through the tokens so many at a time, whose q, k and v are in shared memory.
  static constexpr int LANES = 4, CHUNK_THREADS = 128, TOKENS = 16;
  static constexpr int BLOCK_ROWS = CHUNK_THREADS / LANES, SPLITS = S::VALUE_DIM / BLOCK_ROWS;
  static constexpr int PIECES = S::KEY_DIM / (4 * LANES);

  struct Stage {
    float k[TOKENS][S::KEY_DIM], q[TOKENS][S::KEY_DIM], v[TOKENS][BLOCK_ROWS];
    float keeps[TOKENS], learns[TOKENS];
  };

  // What a thread brings of the next stage: pieces of 8 of q and k, and of one v each.
  static constexpr int KEYS_EACH = 2 * TOKENS * S::KEY_DIM / 8 / CHUNK_THREADS;
  static constexpr int VALUES_EACH = TOKENS * BLOCK_ROWS / CHUNK_THREADS;
  static_assert(KEYS_EACH > 0 && VALUES_EACH > 0);

  struct Coming {
    Neighbours<T, 8> keys[KEYS_EACH];
    T values[VALUES_EACH];
    float keeps, learns;

    // `convolved`: of the stage's first token, of which there are `tokens`.
    template <bool ROUNDED>
    __device__ __forceinline__ void ask(const T* convolved, const T* row, int width, int tokens,
                                        int key_head, int value_head, int first_row,
                                        const Weights& by) {
#pragma unroll
      for (int i = 0; i < KEYS_EACH; i++) {
        const int x = i * CHUNK_THREADS + threadIdx.x, piece = x % (S::KEY_DIM / 4);
        const int token = x / (S::KEY_DIM / 4);
        const bool is_key = piece >= S::KEY_DIM / 8;
        const int head = is_key ? S::KEY_HEADS + key_head : key_head;
        if (token < tokens)
          keys[i] = Neighbours<T, 8>::at(convolved + (long)token * S::CHANNELS + S::channel(head) +
                                         piece % (S::KEY_DIM / 8) * 8);
      }
#pragma unroll
      for (int i = 0; i < VALUES_EACH; i++) {
        const int x = i * CHUNK_THREADS + threadIdx.x, token = x / BLOCK_ROWS;
        if (token < tokens)
          values[i] = convolved[(long)token * S::CHANNELS +
                                S::channel(2 * S::KEY_HEADS + value_head) + first_row +
                                x % BLOCK_ROWS];
      }
      if (int(threadIdx.x) < tokens) {
        const T* own = row + (long)threadIdx.x * width;
        keeps = decay<ROUNDED>(own, value_head, by);
        learns = beta(own, value_head);
      }
    }

    __device__ __forceinline__ void put(Stage& stage, int tokens) const {
#pragma unroll
      for (int i = 0; i < KEYS_EACH; i++) {
        const int x = i * CHUNK_THREADS + threadIdx.x, piece = x % (S::KEY_DIM / 4);
        const int token = x / (S::KEY_DIM / 4);
        float* to = piece >= S::KEY_DIM / 8 ? stage.k[token] : stage.q[token];
        if (token < tokens)
#pragma unroll
          for (int e = 0; e < 8; e++) to[piece % (S::KEY_DIM / 8) * 8 + e] = float(keys[i].of[e]);
      }
#pragma unroll
      for (int i = 0; i < VALUES_EACH; i++) {
        const int x = i * CHUNK_THREADS + threadIdx.x, token = x / BLOCK_ROWS;
        if (token < tokens) stage.v[token][x % BLOCK_ROWS] = float(values[i]);
      }
      if (int(threadIdx.x) < tokens) {
        stage.keeps[threadIdx.x] = keeps;
        stage.learns[threadIdx.x] = learns;
      }
    }
  };

  // All tokens of a span through a part of a head. Leaves y, (tokens, VALUES), the states and the
  // ring. A span without a slot is padding.
  template <bool ROUNDED>
  __device__ static void chunk(const T* convolved, const T* heads, int width, const int* spans,
                               const Weights& by, const T* ring, const float* states, T* y) {
    extern __shared__ __align__(16) unsigned char shared[];
    Stage& stage = *reinterpret_cast<Stage*>(shared);
    const int value_head = blockIdx.x / SPLITS, first_row = blockIdx.x % SPLITS * BLOCK_ROWS;
    const int key_head = value_head / S::SHARE, lane = threadIdx.x % LANES;
    const int row = threadIdx.x / LANES;
    const int* span = spans + blockIdx.y * 4;
    const int first = span[0], count = span[1], slot = span[2], position = span[3];
    T* to = y + (long)first * S::VALUES + value_head * S::VALUE_DIM + first_row + row;
    if (slot < 0) {
      for (int token = lane; token < count; token += LANES) to[(long)token * S::VALUES] = T(0.f);
      return;
    }
    using Part = Neighbours<float, 4>;
    Part state[PIECES];
    float* own = matrix(states, slot, value_head) + (first_row + row) * S::KEY_DIM + lane * 4;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (position > 0) {
        state[i] = Part::at(own + i * 4 * LANES);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) state[i].of[e] = 0.f;
      }
    }
    const T* convolved_row = convolved + (long)first * S::CHANNELS;
    const T* row_of_heads = heads + (long)first * width;
    Coming coming;
    coming.template ask<ROUNDED>(convolved_row, row_of_heads, width,
                                 count < TOKENS ? count : TOKENS, key_head, value_head, first_row,
                                 by);
    for (int begin = 0; begin < count; begin += TOKENS) {
      const int tokens = count - begin < TOKENS ? count - begin : TOKENS;
      __syncthreads();
      coming.put(stage, tokens);
      __syncthreads();
      const int next = begin + TOKENS, left = count - next < TOKENS ? count - next : TOKENS;
      if (left > 0)
        coming.template ask<ROUNDED>(convolved_row + (long)next * S::CHANNELS,
                                     row_of_heads + (long)next * width, width, left, key_head,
                                     value_head, first_row, by);
      for (int token = 0; token < tokens; token++) {
        const float result = follow(state, stage, token, row, lane);
        if (lane == 0) to[(long)(begin + token) * S::VALUES] = T(result);
      }
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) state[i].put(own + i * 4 * LANES);
    if (first_row == 0) keep_inputs(row_of_heads, width, span, key_head, value_head, ring);
  }

  // One token: the state becomes the next, and a row's part of y is returned.
  __device__ __forceinline__ static float follow(Neighbours<float, 4> (&state)[PIECES],
                                                 const Stage& stage, int token, int row,
                                                 int lane) {
    using Part = Neighbours<float, 4>;
    Part key[PIECES];
    float told[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      key[i] = Part::at(stage.k[token] + (i * LANES + lane) * 4);
#pragma unroll
      for (int e = 0; e < 4; e++) told[e] = fmaf(state[i].of[e], key[i].of[e], told[e]);
    }
    const float sum = across((told[0] + told[1]) + (told[2] + told[3]));
    const float keeps = stage.keeps[token];
    const float delta = (stage.v[token][row] - keeps * sum) * stage.learns[token];
    float asked[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const Part query = Part::at(stage.q[token] + (i * LANES + lane) * 4);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        state[i].of[e] = fmaf(key[i].of[e], delta, keeps * state[i].of[e]);
        asked[e] = fmaf(state[i].of[e], query.of[e], asked[e]);
      }
    }
    return across((asked[0] + asked[1]) + (asked[2] + asked[3]));
  }

  __device__ __forceinline__ static float across(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
  }

  // The last inputs of a span's convolution, of what this head alone has or has first.
  __device__ __forceinline__ static void keep_inputs(const T* row, int width, const int* span,
                                                     int key_head, int value_head,
                                                     const T* ring) {
    const int count = span[1], kept = count < S::TAPS ? count : S::TAPS;
    const bool keys = value_head % S::SHARE == 0;
    for (int x = threadIdx.x; x < 2 * S::KEY_DIM + S::VALUE_DIM; x += CHUNK_THREADS) {
      const int part = x / S::KEY_DIM < 2 ? x / S::KEY_DIM : 2, d = x - part * S::KEY_DIM;
      const int head =
          part < 2 ? part * S::KEY_HEADS + key_head : 2 * S::KEY_HEADS + value_head;
      if (part < 2 && !keys) continue;
      for (int token = count - kept; token < count; token++)
        place(ring, span[2], span[3] + token)[S::channel(head) + d] =
            row[(long)token * width + S::column(head) + d];
    }
  }

  // Norms and gates of y: a warp has a token of a value head.
  __device__ static void finish(const T* y, const T* heads, int width, int tokens, const T* norm,
                                float epsilon, T* out) {
    constexpr int EACH = S::VALUE_DIM / 32;
    using Part = Neighbours<T, EACH>;
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int token = warp / S::VALUE_HEADS, head = warp % S::VALUE_HEADS;
    if (token >= tokens) return;
    const long at = (long)token * S::VALUES + head * S::VALUE_DIM + lane * EACH;
    Part own = Part::at(y + at);
    const Part by = Part::at(norm + lane * EACH);
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) squares += float(own.of[e]) * float(own.of[e]);
    squares = sum_of_warp(squares);
    const T* gate = heads + (long)token * width + S::gate(head) + lane * EACH;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      own.of[e] = finished(float(own.of[e]), squares, by.of[e], gate[e], epsilon);
    own.put(out + at);
  }

  // A slot's content, one after another by all threads.
  __device__ static void restore(const T* kept_ring, const float* kept_state, long slot,
                                 const T* ring, const float* states) {
    constexpr long INPUTS = S::TAPS * S::CHANNELS;
    constexpr long STATE = (long)S::VALUE_HEADS * S::VALUE_DIM * S::KEY_DIM;
    const long thread = (long)blockIdx.x * blockDim.x + threadIdx.x;
    const long threads = (long)gridDim.x * blockDim.x;
    for (long i = thread; i < INPUTS; i += threads)
      const_cast<T*>(ring)[slot * INPUTS + i] = kept_ring[i];
    for (long i = thread; i < STATE; i += threads)
      const_cast<float*>(states)[slot * STATE + i] = kept_state[i];
  }
};

}  // namespace kernels
