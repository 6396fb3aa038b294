// How heads of q and k are finished between the q/k/v projections and attention: normalised, then
// rotated; and VALUES: those of v normalised, without weights. A decode step does it on its way into attention (attention.cu); RotateAndWrite does it
// for steps whose queries are attended by another launch.

namespace kernels {

// What the q/k/v projections made of a step, and how to finish it: (rows, q_heads + 2 kv_heads,
// D), heads of q first, then k, then v; GATED: each head of q has a gate behind it, which is skipped
// here, (rows, 2 q_heads + 2 kv_heads, D). `rotation` is (rows, ROTARY) float32: what the model's
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

template <typename T>
__device__ __forceinline__ float squares(unsigned word, const T* type) {
  float2 x = unpack(word, type);
  return x.x * x.x + x.y * x.y;
}

// 1 / rms of a head of D elements, of which LANES lanes have added up their squares.
template <int D, int LANES>
__device__ __forceinline__ float inverse_rms(float squares, float epsilon) {
#pragma unroll
  for (int o = LANES / 2; o; o /= 2) squares += shuffle_xor(squares, o);
  return rsqrtf(squares / D + epsilon);
}

template <typename T>
__device__ __forceinline__ unsigned multiplied(unsigned word, float factor) {
  const T* type = nullptr;
  const float2 x = unpack(word, type);
  return pack(x.x * factor, x.y * factor, type);
}

// Words that lie side by side, in one access.
__device__ __forceinline__ void read(unsigned (&to)[1], const void* from) {
  to[0] = *static_cast<const unsigned*>(from);
}

__device__ __forceinline__ void read(unsigned (&to)[4], const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  to[0] = words.x;
  to[1] = words.y;
  to[2] = words.z;
  to[3] = words.w;
}

__device__ __forceinline__ void write(void* to, const unsigned (&from)[1]) {
  *static_cast<unsigned*>(to) = from[0];
}

__device__ __forceinline__ void write(void* to, const unsigned (&from)[4]) {
  write_global(static_cast<uint4*>(to), make_uint4(from[0], from[1], from[2], from[3]));
}

// 4 * WORDS elements of a head: half of them from d on and half from e on, where the rotation pairs
// the ones with the others (or, TRADITIONAL or beyond ROTARY, where they are all neighbours).
template <typename T, int D, int ROTARY, bool TRADITIONAL, bool NORM, int WORDS>
struct Portion {
  static constexpr int HALF = ROTARY / 2;
  static_assert(TRADITIONAL || HALF % (2 * WORDS) == 0, "no portion is both rotated and not");

  int d, e;
  unsigned low[WORDS], high[WORDS];

  // Cosines and sines of a portion, as far as it is rotated.
  struct Turn {
    float2 low[WORDS], high[WORDS];
  };

  Portion() = default;

  // The `number`th of a head's D / 4 / WORDS.
  __device__ __forceinline__ explicit Portion(int number) {
    const bool apart = !TRADITIONAL && number < HALF / (2 * WORDS);
    d = number * (apart ? 2 : 4) * WORDS;
    e = d + (apart ? HALF : 2 * WORDS);
  }

  __device__ __forceinline__ void take(const T* head) {
    read(low, head + d);
    read(high, head + e);
  }

  __device__ __forceinline__ float sum_of_squares() const {
    const T* type = nullptr;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WORDS; i++) sum += squares(low[i], type) + squares(high[i], type);
    return sum;
  }

  __device__ __forceinline__ Turn turn(const float* rotation) const {
    Turn found;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      if (d + 2 * i < ROTARY) found.low[i] = reinterpret_cast<const float2*>(rotation + d)[i];
      if (e + 2 * i < ROTARY) found.high[i] = reinterpret_cast<const float2*>(rotation + e)[i];
    }
    return found;
  }

  // 1 / rms is `factor`.
  __device__ __forceinline__ void finish(const T* norm, float factor, const Turn& by) {
    const T* type = nullptr;
    unsigned low_norm[WORDS], high_norm[WORDS];
    if constexpr (NORM) {
      read(low_norm, norm + d);
      read(high_norm, norm + e);
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      float2 x = normalised(low[i], low_norm[i], factor);
      float2 y = normalised(high[i], high_norm[i], factor);
      const float2 first = by.low[i], second = by.high[i];
      if constexpr (TRADITIONAL) {
        if (d + 2 * i < ROTARY)
          x = make_float2(x.x * first.x - x.y * first.y, x.x * first.y + x.y * first.x);
        if (e + 2 * i < ROTARY)
          y = make_float2(y.x * second.x - y.y * second.y, y.x * second.y + y.y * second.x);
      } else if (d < ROTARY) {
        float2 turned = make_float2(x.x * first.x - y.x * second.x, x.y * first.y - y.y * second.y);
        y = make_float2(x.x * second.x + y.x * first.x, x.y * second.y + y.y * first.y);
        x = turned;
      }
      low[i] = pack(x.x, x.y, type);
      high[i] = pack(y.x, y.y, type);
    }
  }

  // Normalised without weights: 1 / rms is `factor`.
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      low[i] = multiplied<T>(low[i], factor);
      high[i] = multiplied<T>(high[i], factor);
    }
  }

  __device__ __forceinline__ void put(T* head) const {
    write(head + d, low);
    write(head + e, high);
  }

 private:
  __device__ __forceinline__ static float2 normalised(unsigned word, unsigned norm, float factor) {
    const T* type = nullptr;
    float2 x = unpack(word, type);
    if constexpr (NORM) {
      float2 by = unpack(norm, type);
      x = unpack(pack(x.x * factor, x.y * factor, type), type);
      x = make_float2(x.x * by.x, x.y * by.y);
      x = unpack(pack(x.x, x.y, type), type);
    }
    return x;
  }
};

// Finishes the heads of a step: queries go to `out`, (tokens, Q_HEADS, D), keys and values to their
// slots; a slot below 0 is skipped. Without KV_HEADS there are queries alone.
//
// A head is taken by LANES threads, 16 elements each, in pieces of 16 bytes. They take EACH heads
// of a token, so that as many reads are under way and the token's rotation is read once for them.
template <typename T, int D, int Q_HEADS, int KV_HEADS, int LANES, int EACH, int ROTARY,
          bool TRADITIONAL, bool NORM, bool GATED, bool VALUES>
struct RotateAndWrite {
  typedef Portion<T, D, ROTARY, TRADITIONAL, NORM, 4> Mine;
  static constexpr int HEADS = Q_HEADS + 2 * KV_HEADS, GATES = GATED ? Q_HEADS : 0;
  static constexpr int SETS = (HEADS + EACH - 1) / EACH;

  static_assert(D % 16 == 0 && LANES >= D / 16 && 32 % LANES == 0);

  __device__ static void run(const Fresh<T>& fresh, const T* k_pool, const T* v_pool,
                             const int* slot_of_token, long pool_slots, int tokens, T* out) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = thread % LANES, first = thread / LANES % SETS, token = thread / LANES / SETS;
    // Threads without work go along as far as lanes meet.
    const bool works = lane < D / 16 && token < tokens;
    const T* row = fresh.qkv + (long)token * (HEADS + GATES) * D;
    Mine mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int head = first + i * SETS;
      mine[i] = Mine(lane);
      const int gates = head < GATES ? head : GATES;
      if (works && head < HEADS) mine[i].take(row + (head + gates) * D);
    }
    float factors[EACH];
    if constexpr (NORM || VALUES) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const bool has = works && first + i * SETS < HEADS;
        factors[i] = inverse_rms<D, LANES>(has ? mine[i].sum_of_squares() : 0.f, fresh.epsilon);
      }
    }
    if (!works) return;
    const long slot = slot_of_token[token];
    const typename Mine::Turn turn = mine[0].turn(fresh.rotation + (long)token * ROTARY);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int head = first + i * SETS;
      if (head >= HEADS) return;
      const bool is_query = head < Q_HEADS, is_value = head >= Q_HEADS + KV_HEADS;
      if (!is_value)
        mine[i].finish(is_query ? fresh.q_norm : fresh.k_norm, NORM ? factors[i] : 1.f, turn);
      else if constexpr (VALUES)
        mine[i].scale(factors[i]);
      const long kv_head = (head - Q_HEADS) % (KV_HEADS > 0 ? KV_HEADS : 1);
      T* pool = const_cast<T*>(is_value ? v_pool : k_pool);
      T* to = is_query ? out + ((long)token * Q_HEADS + head) * D
                       : pool + (kv_head * pool_slots + slot) * D;
      if (is_query || slot >= 0) mine[i].put(to);
    }
  }
};

}  // namespace kernels
