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
// One token a row is one launch (`step`). A step with prompts in it is four: `convolve`, `relate`,
// `chunk` and `finish`. A text is cut in pieces of up to 16 tokens, i and j, whose deltas solve a
// triangular system (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"). With
// L(i) the logarithm of what all decays up to i leave of the state before the piece,
//
//   delta(i) = beta(i) (v(i) - e^L(i) state k(i)) - sum over j < i of A(i, j) delta(j)
//              where A(i, j) = beta(i) e^(L(i) - L(j)) k(i)'k(j)
//   y(i) = e^L(i) state q(i) + sum over j <= i of M(i, j) delta(j)
//              where M(i, j) = e^(L(i) - L(j)) q(i)'k(j)
//
// What does not depend on the state, the inverse of 1 + A and M, is made by `relate`, for all pieces
// at once. `chunk` has the state of 16 rows of a matrix in a warp's registers, as what tensor cores
// add to, and these registers are what they multiply by the keys, too: both are laid out alike.

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

template <typename S>
struct Delta {
  using T = typename S::Element;
  using Weights = DeltaWeights<T>;

  // The logarithm of a head's decay at a token, `row` of the first product. ROUNDED: made in T.
  template <bool ROUNDED>
  __device__ __forceinline__ static float decay(const T* row, int value_head, const Weights& by) {
    float x = float(row[S::decay(value_head)]) + by.offsets[value_head];
    if constexpr (ROUNDED) x = rounded_to<T>(x);
    x = fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
    if constexpr (ROUNDED) x = rounded_to<T>(x);
    return by.rates[value_head] * x;
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

  // One token of one row through one of SPLITS parts of a head, by a block of WARPS. The last of a
  // head's blocks norms and gates all of it; `arrivals` counts them, [rows][VALUE_HEADS].
  template <int WARPS, int SPLITS, bool ROUNDED>
  __device__ static void step(const T* heads, int width, const int* lengths, const int* slots,
                              const Weights& by, const T* ring, const float* states,
                              const int* arrivals, T* out) {
    constexpr int EACH = S::KEY_DIM / 32, OWN = S::VALUE_DIM / SPLITS, ROWS = OWN / WARPS;
    extern __shared__ __align__(16) unsigned char shared[];
    float* q = reinterpret_cast<float*>(shared);
    float* k = q + S::KEY_DIM;
    float* v = k + S::KEY_DIM;
    float* y = v + OWN;
    const int number = blockIdx.x / SPLITS, first = blockIdx.x % SPLITS * OWN;
    const int value_head = number % S::VALUE_HEADS, row_number = number / S::VALUE_HEADS;
    const int key_head = value_head / S::SHARE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int position = lengths[row_number] - 1;
    T* to = out + (long)row_number * S::VALUES + value_head * S::VALUE_DIM;
    if (position < 0) {
      for (int d = threadIdx.x; d < OWN; d += WARPS * 32) to[first + d] = T(0.f);
      return;
    }
    const long slot = slots[row_number];
    const T* row = heads + (long)row_number * width;
    using Part = Neighbours<float, EACH>;
    Part state[ROWS];
    float* own = matrix(states, slot, value_head) + first * S::KEY_DIM + lane * EACH;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (position > 0) {
        state[i] = Part::at(own + (i * WARPS + warp) * S::KEY_DIM);
      } else {
#pragma unroll
        for (int e = 0; e < EACH; e++) state[i].of[e] = 0.f;
      }
    }
    convolve_newest<WARPS * 32, OWN>(row, by.convolution, ring, slot, position, key_head, value_head,
                                     first, q);
    constexpr int FINISHED = (S::VALUE_DIM + WARPS * 32 - 1) / (WARPS * 32);
    T norms[FINISHED], gates[FINISHED];
#pragma unroll
    for (int i = 0; i < FINISHED; i++) {
      const int d = i * WARPS * 32 + threadIdx.x;
      if (d >= S::VALUE_DIM) continue;
      norms[i] = by.norm[d];
      gates[i] = row[S::gate(value_head) + d];
    }
    __syncthreads();
    if (warp < 2) {
      float* head = warp == 0 ? q : k;
      float squares = 0.f;
#pragma unroll
      for (int e = 0; e < EACH; e++) squares += head[e * 32 + lane] * head[e * 32 + lane];
      squares = sum_of_lanes(squares);
#pragma unroll
      for (int e = 0; e < EACH; e++)
        head[e * 32 + lane] = normed(head[e * 32 + lane], squares, warp == 0);
    }
    const float keeps = expf(decay<ROUNDED>(row, value_head, by)), learns = beta(row, value_head);
    __syncthreads();
    const Part key = Part::at(k + lane * EACH), query = Part::at(q + lane * EACH);
    float both = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) both = fmaf(key.of[e], query.of[e], both);
    both = sum_of_lanes(both);
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
      const float result = rounded_to<T>(fmaf(delta, both, keeps * asked[i]));
      if (lane == 0) {
        y[first + d] = result;
        if constexpr (SPLITS > 1) to[first + d] = T(result);
      }
    }
    if constexpr (SPLITS > 1) {
      if (!arrives_last(arrivals + number, SPLITS, reinterpret_cast<int*>(shared))) return;
      const unsigned* words = reinterpret_cast<const unsigned*>(to);
      for (int d = threadIdx.x; d < S::VALUE_DIM / 2; d += WARPS * 32) {
        const float2 pair = unpack(read_shared_result(words + d), to);
        y[2 * d] = pair.x;
        y[2 * d + 1] = pair.y;
      }
    }
    __syncthreads();
    float squares = 0.f;
#pragma unroll
    for (int d = 0; d < S::VALUE_DIM; d += 32) squares += y[d + lane] * y[d + lane];
    squares = sum_of_lanes(squares);
#pragma unroll
    for (int i = 0; i < FINISHED; i++) {
      const int d = i * WARPS * 32 + threadIdx.x;
      if (d < S::VALUE_DIM) to[d] = finished(y[d], squares, norms[i], gates[i], by.epsilon);
    }
  }

  // Leaves the convolved q, k and OWN elements of v from `first` on, of a row's newest token, and that
  // in the ring. All that is read is asked for at once.
  template <int THREADS, int OWN>
  __device__ __forceinline__ static void convolve_newest(const T* row, const T* convolution,
                                                         const T* ring, long slot, int position,
                                                         int key_head, int value_head, int first,
                                                         float* convolved) {
    constexpr int ALL = 2 * S::KEY_DIM + OWN, TURNS = (ALL + THREADS - 1) / THREADS;
    Neighbours<T, S::TAPS> taps[TURNS];
    T inputs[TURNS][S::TAPS];
    int channels[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int x = turn * THREADS + threadIdx.x, part = x / S::KEY_DIM < 2 ? x / S::KEY_DIM : 2;
      if (x >= ALL) continue;
      const int d = x - part * S::KEY_DIM + (part < 2 ? 0 : first);
      const int head = part < 2 ? part * S::KEY_HEADS + key_head : 2 * S::KEY_HEADS + value_head;
      channels[turn] = S::channel(head) + d;
      taps[turn] = Neighbours<T, S::TAPS>::at(convolution + channels[turn] * S::TAPS);
#pragma unroll
      for (int back = 0; back < S::TAPS; back++)
        inputs[turn][back] = back == 0 ? row[S::column(head) + d]
                             : position >= back
                                 ? place(ring, slot, position - back)[channels[turn]]
                                 : T(0.f);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int x = turn * THREADS + threadIdx.x;
      if (x >= ALL) continue;
      float sum = 0.f;
#pragma unroll
      for (int back = S::TAPS - 1; back >= 0; back--)
        sum = fmaf(float(taps[turn].of[S::TAPS - 1 - back]), float(inputs[turn][back]), sum);
      convolved[x] = activated(sum);
      if (x >= 2 * S::KEY_DIM || (value_head % S::SHARE == 0 && first == 0))
        place(ring, slot, position)[channels[turn]] = inputs[turn][0];
    }
  }

  // A piece of a text: up to TOKENS tokens from `first` on, of which the first has the position.
  static constexpr int TOKENS = 16;

  struct Piece {
    int first, tokens, slot, position;

    __device__ __forceinline__ static Piece at(const int* pieces, int number) {
      const int* of = pieces + number * 4;
      return {of[0], of[1], of[2], of[3]};
    }
  };

  // The convolved heads, (tokens, CHANNELS), q and k normed: a warp has a piece of one of HEADS.
  __device__ static void convolve(const T* heads, int width, const int* pieces, int count,
                                  const T* convolution, const T* ring, T* out) {
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int head = warp % S::HEADS;
    if (warp / S::HEADS >= count) return;
    const Piece piece = Piece::at(pieces, warp / S::HEADS);
    if (head >= 2 * S::KEY_HEADS)
      convolve_head<S::VALUE_DIM, false>(heads, width, piece, head, convolution, ring, out, lane);
    else
      convolve_head<S::KEY_DIM, true>(heads, width, piece, head, convolution, ring, out, lane);
  }

  template <int DIM, bool NORMED>
  __device__ __forceinline__ static void convolve_head(const T* heads, int width,
                                                       const Piece& piece, int head,
                                                       const T* convolution, const T* ring, T* out,
                                                       int lane) {
    constexpr int EACH = DIM / 32, BEFORE = S::TAPS - 1, GROUP = 4;
    using Part = Neighbours<T, EACH>;
    const int channel = S::channel(head) + lane * EACH;
    const T* newest = heads + (long)piece.first * width + S::column(head) + lane * EACH;
    Neighbours<T, S::TAPS> taps[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++)
      taps[e] = Neighbours<T, S::TAPS>::at(convolution + (channel + e) * S::TAPS);
    // Of the tokens before some, and of these; and of those that come next, which are under way.
    Part inputs[BEFORE + GROUP], coming[GROUP];
#pragma unroll
    for (int i = 0; i < BEFORE; i++) {
      const int back = BEFORE - i;
      if (piece.position >= back) {
        // Before a text's first piece of a step is what was kept.
        inputs[i] = piece.slot < 0
                        ? Part::at(newest - (long)back * width)
                        : Part::at(place(ring, piece.slot, piece.position - back) + channel);
      } else {
#pragma unroll
        for (int e = 0; e < EACH; e++) inputs[i].of[e] = T(0.f);
      }
    }
    const auto ask = [&](int first) {
#pragma unroll
      for (int i = 0; i < GROUP; i++)
        if (first + i < piece.tokens) coming[i] = Part::at(newest + (long)(first + i) * width);
    };
    ask(0);
    for (int first = 0; first < piece.tokens; first += GROUP) {
#pragma unroll
      for (int i = 0; i < GROUP; i++) inputs[BEFORE + i] = coming[i];
      ask(first + GROUP);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        if (first + i >= piece.tokens) break;
        float sums[EACH], squares = 0.f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          sums[e] = 0.f;
#pragma unroll
          for (int tap = 0; tap < S::TAPS; tap++)
            sums[e] = fmaf(float(taps[e].of[tap]), float(inputs[i + tap].of[e]), sums[e]);
          sums[e] = activated(sums[e]);
          squares += sums[e] * sums[e];
        }
        Part result;
        if constexpr (NORMED) squares = sum_of_lanes(squares);
#pragma unroll
        for (int e = 0; e < EACH; e++)
          result.of[e] = T(NORMED ? normed(sums[e], squares, head < S::KEY_HEADS) : sums[e]);
        result.put(out + (long)(piece.first + first + i) * S::CHANNELS + channel);
      }
#pragma unroll
      for (int i = 0; i < BEFORE; i++) inputs[i] = inputs[GROUP + i];
    }
  }

  // What `relate` makes of each piece for each head: `relations`, [2][TOKENS][TOKENS], the inverse of
  // 1 + A and then M, and `figures`, [3][TOKENS]: beta, e^L, and e^(L of the last - L).
  static constexpr int RELATIONS = 2 * TOKENS * TOKENS, FIGURES = 3 * TOKENS;

  // A warp has a head's piece.
  template <bool ROUNDED>
  __device__ static void relate(const T* convolved, const T* heads, int width, const int* pieces,
                                int count, const Weights& by, T* relations, float* figures) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int in_block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long number = (long)blockIdx.x * (blockDim.x / 32) + in_block;
    if (number >= (long)count * S::VALUE_HEADS) return;
    const int value_head = number % S::VALUE_HEADS;
    const Piece piece = Piece::at(pieces, number / S::VALUE_HEADS);
    const int first = piece.first, tokens = piece.tokens;
    float* sums = reinterpret_cast<float*>(shared) + in_block * (TOKENS * TOKENS + 2 * TOKENS);
    float *betas = sums + TOKENS, *related = betas + TOKENS;
    float own = 0.f, learns = 0.f;
    if (lane < tokens) {
      const T* row = heads + (long)(first + lane) * width;
      own = decay<ROUNDED>(row, value_head, by);
      learns = beta(row, value_head);
    }
    if (lane < TOKENS) {
      betas[lane] = learns;
      related[lane] = own;
    }
    __syncwarp();
    float up_to = 0.f;
    for (int token = 0; token < TOKENS; token++)
      if (token <= lane) up_to += related[token];
    __syncwarp();
    if (lane < TOKENS) sums[lane] = up_to;
    __syncwarp();
    figures += number * FIGURES;
    if (lane < TOKENS) {
      figures[lane] = learns;
      figures[TOKENS + lane] = expf(up_to);
      figures[2 * TOKENS + lane] = expf(sums[TOKENS - 1] - up_to);
    }
    relations += number * RELATIONS;
    multiply_tokens(convolved + (long)first * S::CHANNELS, tokens, value_head / S::SHARE, sums, betas,
                    related, relations + TOKENS * TOKENS, lane);
    __syncwarp();
    // A column of the inverse in each of 16 lanes, from above.
    float column[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      column[i] = i == lane ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; j++) column[i] = fmaf(-related[i * TOKENS + j], column[j], column[i]);
    }
    if (lane < TOKENS)
#pragma unroll
      for (int i = 0; i < TOKENS; i++) relations[i * TOKENS + lane] = T(column[i]);
  }

  // Leaves A in `related` and M in `asked`, both [TOKENS][TOKENS]. Tokens that there are not have keys
  // of 0.
  __device__ __forceinline__ static void multiply_tokens(const T* convolved, int tokens,
                                                         int key_head, const float* sums,
                                                         const float* betas, float* related,
                                                         T* asked, int lane) {
    const T* type = nullptr;
    float keys[2][4] = {}, queries[2][4] = {};
    const int row = lane / 4;
    const T* of = convolved + (long)row * S::CHANNELS + lane % 4 * 2;
    const auto words = [&](unsigned(&to)[4], int head, int step) {
      const T* from = of + S::channel(head) + step * 16;
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[i] = row + i % 2 * 8 < tokens
                    ? *reinterpret_cast<const unsigned*>(from + (long)(i % 2 * 8) * S::CHANNELS +
                                                         i / 2 * 8)
                    : 0u;
    };
#pragma unroll
    for (int step = 0; step < S::KEY_DIM / 16; step++) {
      unsigned key[4], query[4];
      words(key, S::KEY_HEADS + key_head, step);
      words(query, key_head, step);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        multiply(keys[n], key, key[n], key[n + 2], type);
        multiply(queries[n], query, key[n], key[n + 2], type);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = row + half * 8, j = n * 8 + lane % 4 * 2;
        float m[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float left = j + e <= i ? expf(sums[i] - sums[j + e]) : 0.f;
          m[e] = left * queries[n][half * 2 + e];
          related[i * TOKENS + j + e] =
              j + e < i ? betas[i] * left * keys[n][half * 2 + e] : 0.f;
        }
        *reinterpret_cast<unsigned*>(asked + i * TOKENS + j) = pack(m[0], m[1], type);
      }
  }

  // How `chunk` divides a head: a warp has 16 rows of the matrix, a block two warps. Of `spans`,
  // [n][SPAN], the first token, how many, the slot, the position of the first and the number of its
  // first piece.
  static constexpr int CHUNK_WARPS = 2, CHUNK_THREADS = CHUNK_WARPS * 32;
  static constexpr int BLOCK_ROWS = CHUNK_WARPS * 16;
  static constexpr int SPLITS = S::VALUE_DIM / BLOCK_ROWS, TILES = S::KEY_DIM / 8;
  static constexpr int KEY_STRIDE = S::KEY_DIM + 8, VALUE_STRIDE = BLOCK_ROWS + 8;
  // Pieces whose copies are under way or there: a copy takes as long as two pieces do.
  static constexpr int STAGES = 4, SPAN = 5;

  struct Stage {
    T keys[TOKENS][KEY_STRIDE], queries[TOKENS][KEY_STRIDE], values[TOKENS][VALUE_STRIDE];
    T relations[2][TOKENS][TOKENS];
    float figures[3][TOKENS];
  };

  // What a thread copies of every piece, found once: 16 bytes of keys and of queries of one token in
  // AT_ONCE, and of values, relations and figures.
  struct Copies {
    static constexpr int OF_KEYS = S::KEY_DIM / 8, OF_VALUES = BLOCK_ROWS / 8;
    static constexpr int AT_ONCE = CHUNK_THREADS / OF_KEYS;
    static_assert(CHUNK_THREADS == TOKENS * OF_VALUES && CHUNK_THREADS == RELATIONS / 8 &&
                  CHUNK_THREADS % OF_KEYS == 0 && TOKENS % AT_ONCE == 0);
    int token, at, value_token, value_at;
    const T *keys, *values, *relations;
    const float* figures;

    // From a span's first token and its first piece on.
    __device__ __forceinline__ Copies(const T* convolved, const T* of, const float* more,
                                      int value_head, int first_row) {
      const int own = threadIdx.x;
      token = own / OF_KEYS;
      at = own % OF_KEYS * 8;
      value_token = own / OF_VALUES;
      value_at = own % OF_VALUES * 8;
      keys = convolved + (long)token * S::CHANNELS +
             S::channel(S::KEY_HEADS + value_head / S::SHARE) + at;
      values = convolved + (long)value_token * S::CHANNELS +
               S::channel(2 * S::KEY_HEADS + value_head) + first_row + value_at;
      relations = of + value_head * RELATIONS + own * 8;
      figures = more + value_head * FIGURES + own * 4;
    }

    // Begins those of the next piece. Tokens beyond `tokens` are zeros, for which nothing is read.
    __device__ __forceinline__ void next(Stage& stage, int tokens) {
#pragma unroll
      for (int i = 0; i < TOKENS; i += AT_ONCE) {
        const int bytes = token + i < tokens ? 16 : 0;
        copy_async(stage.keys[token + i] + at, keys + i * S::CHANNELS, bytes);
        copy_async(stage.queries[token + i] + at, keys + i * S::CHANNELS - S::KEYS, bytes);
      }
      copy_async(stage.values[value_token] + value_at, values, value_token < tokens ? 16 : 0);
      copy_async(&stage.relations[0][0][0] + threadIdx.x * 8, relations, 16);
      if (threadIdx.x < FIGURES / 4)
        copy_async(&stage.figures[0][0] + threadIdx.x * 4, figures, 16);
      keys += TOKENS * S::CHANNELS;
      values += TOKENS * S::CHANNELS;
      relations += S::VALUE_HEADS * RELATIONS;
      figures += S::VALUE_HEADS * FIGURES;
    }
  };

  // All spans of a step; `written` is what later launches wait for.
  __device__ static void chunks(const T* convolved, const T* relations, const float* figures,
                                const T* heads, int width, const int* spans, const T* ring,
                                const float* states, T* y, int* written) {
    chunk(convolved, relations, figures, heads, width, spans, ring, states, y);
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) written[0] = 0;
  }

  // 16 rows of the matrix, as tensor cores add to them.
  using State = float[TILES][4];

  // All tokens of a span through a part of a head. Leaves y, (tokens, VALUES), the states and the
  // ring. A span without a slot is padding.
  __device__ static void chunk(const T* convolved, const T* relations, const float* figures,
                               const T* heads, int width, const int* spans, const T* ring,
                               const float* states, T* y) {
    extern __shared__ __align__(16) unsigned char shared[];
    Stage* stages = reinterpret_cast<Stage*>(shared);
    const int value_head = blockIdx.x / SPLITS, first_row = blockIdx.x % SPLITS * BLOCK_ROWS;
    const int key_head = value_head / S::SHARE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int* span = spans + blockIdx.y * SPAN;
    const int first = span[0], count = span[1], slot = span[2], position = span[3];
    T* to = y + (long)first * S::VALUES + value_head * S::VALUE_DIM + first_row;
    if (slot < 0) {
      for (int x = threadIdx.x; x < count * BLOCK_ROWS; x += CHUNK_THREADS)
        to[(long)(x / BLOCK_ROWS) * S::VALUES + x % BLOCK_ROWS] = T(0.f);
      return;
    }
    float* own = matrix(states, slot, value_head) +
                 (first_row + warp * 16 + lane / 4) * S::KEY_DIM + lane % 4 * 2;
    State state;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float2 pair = make_float2(0.f, 0.f);
        if (position > 0)
          pair = *reinterpret_cast<const float2*>(own + half * 8 * S::KEY_DIM + tile * 8);
        state[tile][half * 2] = pair.x;
        state[tile][half * 2 + 1] = pair.y;
      }
    const int pieces = (count + TOKENS - 1) / TOKENS;
    const long before = (long)span[4] * S::VALUE_HEADS;
    Copies copies(convolved + (long)first * S::CHANNELS, relations + before * RELATIONS,
                  figures + before * FIGURES, value_head, first_row);
    const auto bring = [&](int piece) {
      if (piece < pieces) copies.next(stages[piece % STAGES], count - piece * TOKENS);
      commit_copies();
    };
#pragma unroll
    for (int piece = 0; piece < STAGES - 1; piece++) bring(piece);
    for (int piece = 0; piece < pieces; piece++) {
      wait_copies<STAGES - 2>();
      // The stage that is filled next is done with, too.
      __syncthreads();
      bring(piece + STAGES - 1);
      const int left = count - piece * TOKENS;
      follow(state, stages[piece % STAGES], to + (long)piece * TOKENS * S::VALUES + warp * 16,
             left < TOKENS ? left : TOKENS, warp, lane);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(own + half * 8 * S::KEY_DIM + tile * 8) =
            make_float2(state[tile][half * 2], state[tile][half * 2 + 1]);
    if (first_row == 0)
      keep_inputs(heads + (long)first * width, width, span, key_head, value_head, ring);
  }

  // Two tiles of sums, side by side, as a factor.
  __device__ __forceinline__ static void as_factor(unsigned (&to)[4], const float (&a)[4],
                                                   const float (&b)[4]) {
    const T* type = nullptr;
    to[0] = pack(a[0], a[1], type);
    to[1] = pack(a[2], a[3], type);
    to[2] = pack(b[0], b[1], type);
    to[3] = pack(b[2], b[3], type);
  }

  // A piece: the state becomes the next. y goes to `to`, of the warp's first row. All that has rows of
  // the matrix as rows has the piece's tokens as columns.
  __device__ __forceinline__ static void follow(State& state, const Stage& stage, T* to, int tokens,
                                                int warp, int lane) {
    const T* type = nullptr;
    const int row = lane / 4, column = lane % 4 * 2;
    float told[2][4] = {}, asked[2][4] = {};
    const int token_read = lane / 16 * 8 + lane % 8, at_read = lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < S::KEY_DIM / 16; step++) {
      unsigned of[4], keys[4], queries[4];
      as_factor(of, state[2 * step], state[2 * step + 1]);
      load_matrices(keys, stage.keys[token_read] + step * 16 + at_read);
      load_matrices(queries, stage.queries[token_read] + step * 16 + at_read);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        multiply(told[n], of, keys[2 * n], keys[2 * n + 1], type);
        multiply(asked[n], of, queries[2 * n], queries[2 * n + 1], type);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int token = n * 8 + column + e % 2;
        const float v = float(stage.values[token][warp * 16 + row + e / 2 * 8]);
        told[n][e] = stage.figures[0][token] * (v - stage.figures[1][token] * told[n][e]);
        asked[n][e] *= stage.figures[1][token];
      }
    unsigned factor[4];
    as_factor(factor, told[0], told[1]);
    float deltas[2][4] = {};
    const auto related = [&](float(&sums)[2][4], int which) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const T* from = stage.relations[which][n * 8 + row] + column;
        multiply(sums[n], factor, *reinterpret_cast<const unsigned*>(from),
                 *reinterpret_cast<const unsigned*>(from + 8), type);
      }
    };
    related(deltas, 0);
    as_factor(factor, deltas[0], deltas[1]);
    related(asked, 1);
    unsigned given[4];
    as_factor(given, asked[0], asked[1]);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      // Turned, a thread has two rows of the matrix of one token.
      const unsigned pair = transpose_matrix(given[n]);
      const int token = n / 2 * 8 + row;
      if (token < tokens)
        *reinterpret_cast<unsigned*>(to + (long)token * S::VALUES + n % 2 * 8 + column) = pair;
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        deltas[n][e] *= stage.figures[2][n * 8 + column + e % 2];
    as_factor(factor, deltas[0], deltas[1]);
    const float keeps = stage.figures[1][TOKENS - 1];
    const int token_added = lane / 8 % 2 * 8 + lane % 8, at_added = lane / 16 * 8;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
      unsigned keys[4];
      load_matrices_transposed(keys, stage.keys[token_added] + tile * 8 + at_added);
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) state[tile + n][e] *= keeps;
        multiply(state[tile + n], factor, keys[2 * n], keys[2 * n + 1], type);
      }
    }
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
    squares = sum_of_lanes(squares);
    const T* gate = heads + (long)token * width + S::gate(head) + lane * EACH;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      own.of[e] = finished(float(own.of[e]), squares, by.of[e], gate[e], epsilon);
    own.put(out + at);
  }

  // A slot's content, one after another by all threads.
  __device__ static void restore(const T* kept_ring, const float* kept_state, const int* slots,
                                 const T* ring, const float* states, int* written) {
    const long slot = slots[0];
    constexpr long INPUTS = S::TAPS * S::CHANNELS;
    constexpr long STATE = (long)S::VALUE_HEADS * S::VALUE_DIM * S::KEY_DIM;
    const long thread = (long)blockIdx.x * blockDim.x + threadIdx.x;
    const long threads = (long)gridDim.x * blockDim.x;
    for (long i = thread; i < INPUTS; i += threads)
      const_cast<T*>(ring)[slot * INPUTS + i] = kept_ring[i];
    for (long i = thread; i < STATE; i += threads)
      const_cast<float*>(states)[slot * STATE + i] = kept_state[i];
    if (blockIdx.x + threadIdx.x == 0) written[0] = 0;
  }
};

}  // namespace kernels
