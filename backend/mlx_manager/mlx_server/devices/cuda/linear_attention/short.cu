// Gated short convolutions, as LFM 2 has them: what lies between a layer's first product and its last.
//
//   y = C * convolution(B * x)
//
// The first product gives B, C and x, [CHANNELS] each, one behind the other. The convolution is causal
// and sees TAPS tokens, each channel by itself; its weights are [TAPS][CHANNELS], the newest token's
// last. What it sees, B * x, is kept of the last TAPS tokens in a ring, [slot][TAPS][CHANNELS], that of
// position p in place p % TAPS. What a slot held before is not read where a text begins.
//
// One token a row is one launch (`step`), and a step with prompts in it is one (`chunks`). As in MLX,
// what each operation gives is rounded.

namespace kernels {

template <typename T, int CHANNELS, int TAPS>
struct Short {
  // Channels of a thread, and threads that have all.
  static constexpr int EACH = 4, LANES = CHANNELS / EACH, BEFORE = TAPS - 1;
  static_assert(CHANNELS % EACH == 0);
  using Part = Neighbours<T, EACH>;

  __device__ __forceinline__ static T* place(const T* ring, long slot, int position) {
    return const_cast<T*>(ring) + (slot * TAPS + position % TAPS) * CHANNELS;
  }

  __device__ __forceinline__ static Part product(const Part& a, const Part& b) {
    Part result;
#pragma unroll
    for (int e = 0; e < EACH; e++) result.of[e] = T(float(a.of[e]) * float(b.of[e]));
    return result;
  }

  __device__ __forceinline__ static Part nothing() {
    Part result;
#pragma unroll
    for (int e = 0; e < EACH; e++) result.of[e] = T(0.f);
    return result;
  }

  // What the first product gives of a token.
  struct Given {
    Part before, behind, x;

    // row: from the thread's first channel on.
    __device__ __forceinline__ static Given at(const T* row) {
      return {Part::at(row), Part::at(row + CHANNELS), Part::at(row + 2 * CHANNELS)};
    }
    // What is convolved.
    __device__ __forceinline__ Part input() const { return product(before, x); }
  };

  // Of the last of TAPS tokens, whose inputs begin there.
  __device__ __forceinline__ static Part output(const Part* inputs, const Part (&taps)[TAPS],
                                                const Part& gate) {
    Part convolved;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      float sum = 0.f;
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++)
        sum = fmaf(float(taps[tap].of[e]), float(inputs[tap].of[e]), sum);
      convolved.of[e] = T(sum);
    }
    return product(gate, convolved);
  }

  __device__ __forceinline__ static void ask(const T* weights, int channel, Part (&taps)[TAPS]) {
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) taps[tap] = Part::at(weights + tap * CHANNELS + channel);
  }

  // The inputs before a position, as they were kept; nothing before a text's first token.
  __device__ __forceinline__ static void recall(const T* ring, long slot, int position, int channel,
                                                Part* inputs) {
#pragma unroll
    for (int i = 0; i < BEFORE; i++) {
      const int back = BEFORE - i;
      inputs[i] = position >= back ? Part::at(place(ring, slot, position - back) + channel)
                                   : nothing();
    }
  }

  // One token of each row; a row of length 0 is padding.
  __device__ static void step(const T* heads, int width, int rows, const int* lengths,
                              const int* slots, const T* weights, const T* ring, T* out) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = number / LANES, channel = number % LANES * EACH;
    if (row >= rows) return;
    // What does not depend on the position is asked for at once with it.
    const Given own = Given::at(heads + (long)row * width + channel);
    Part inputs[TAPS], taps[TAPS];
    ask(weights, channel, taps);
    const int position = lengths[row] - 1;
    const long slot = slots[row];
    T* to = out + (long)row * CHANNELS + channel;
    if (position < 0) {
      nothing().put(to);
      return;
    }
    recall(ring, slot, position, channel, inputs);
    inputs[BEFORE] = own.input();
    inputs[BEFORE].put(place(ring, slot, position) + channel);
    output(inputs, taps, own.behind).put(to);
  }

  // The span that begins at a token of the step: spans are in order, five numbers each (see `Texts`).
  __device__ __forceinline__ static const int* span_at(const int* spans, int count, int first) {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (spans[middle * 5] <= first)
        low = middle;
      else
        high = middle - 1;
    }
    return spans + low * 5;
  }

  // All tokens of a step with prompts in it: LANES threads have a piece of a text. Who has a text's
  // first piece alone reads what was kept of it, and then keeps what is to be. Padding, the last span,
  // is shared out among all.
  __device__ __forceinline__ static void share_of_chunks(const T* heads, int width,
                                                         const int* spans, int span_count,
                                                         const int* pieces, int count,
                                                         const T* weights, const T* ring, T* out) {
    constexpr int GROUP = 4;
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    const int piece = number / LANES, channel = number % LANES * EACH;
    if (piece >= count) return;
    const int first = pieces[piece * 4], tokens = pieces[piece * 4 + 1];
    const int slot = pieces[piece * 4 + 2], position = pieces[piece * 4 + 3];
    const T* own = heads + (long)first * width + channel;
    T* to = out + (long)first * CHANNELS + channel;
    Part inputs[BEFORE + GROUP], taps[TAPS];
    Given given[GROUP];
    ask(weights, channel, taps);
    if (slot >= 0) {
      recall(ring, slot, position, channel, inputs);
    } else {
#pragma unroll
      for (int i = 0; i < BEFORE; i++) inputs[i] = Given::at(own - (long)(BEFORE - i) * width).input();
    }
    for (int begun = 0; begun < tokens; begun += GROUP) {
#pragma unroll
      for (int i = 0; i < GROUP; i++)
        if (begun + i < tokens) given[i] = Given::at(own + (long)(begun + i) * width);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        if (begun + i >= tokens) break;
        inputs[BEFORE + i] = given[i].input();
        output(inputs + i, taps, given[i].behind).put(to + (long)(begun + i) * CHANNELS);
      }
#pragma unroll
      for (int i = 0; i < BEFORE; i++) inputs[i] = inputs[GROUP + i];
    }
    if (slot >= 0) {
      const int* span = span_at(spans, span_count, first);
      const int all = span[1];
      for (int token = all < TAPS ? 0 : all - TAPS; token < all; token++)
        Given::at(own + (long)token * width)
            .input()
            .put(place(ring, slot, position + token) + channel);
    }
    const int* padding = spans + (span_count - 1) * 5;
    for (int token = piece; token < padding[1]; token += count)
      nothing().put(out + (long)(padding[0] + token) * CHANNELS + channel);
  }

  // `written` is what later launches wait for.
  __device__ static void chunks(const T* heads, int width, const int* spans, int span_count,
                                const int* pieces, int count, const T* weights, const T* ring,
                                T* out, int* written) {
    share_of_chunks(heads, width, spans, span_count, pieces, count, weights, ring, out);
    if (blockIdx.x + threadIdx.x == 0) written[0] = 0;
  }

  // A slot's content, one after another by all threads.
  __device__ static void restore(const T* kept, const int* slots, const T* ring, int* written) {
    const long slot = slots[0];
    constexpr int INPUTS = TAPS * CHANNELS;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < INPUTS; i += gridDim.x * blockDim.x)
      const_cast<T*>(ring)[slot * INPUTS + i] = kept[i];
    if (blockIdx.x + threadIdx.x == 0) written[0] = 0;
  }
};

}  // namespace kernels
