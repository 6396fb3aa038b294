// Draws a token for each row of logits: a block takes a row, and reads it a few times.
//
// One text for both GPU languages; draw.cu and draw.metal say what it needs of them. A row lies in
// tiles of 256 tokens, of which each lane of a warp takes 8 neighbours, and each warp takes tiles
// that follow one another. All sums are made in an order that only the vocabulary decides, or are
// sums of integers, which no order changes: a row draws the same alone and in any company.
//
// A token is known by its distance from the best one, `best - logit`: bits of floats that are not
// negative are in the order of the floats, so that what top_k and top_p leave ends at a distance
// that is found 11, 10 and 10 bits at a time, and ties with the last one kept are kept.

namespace kernels {

enum { kPiece = 8, kTile = 32 * kPiece, kAhead = 4, kBins = 2048, kLevels = 3 };
enum { kLargestFinite = 0x7f7fffff };

// Of a row, in the order of parameter.py. `log_min_p` is a natural logarithm, `top_k` 0 for all, and
// `chance`, at least 0 and below 1, decides the draw.
struct Parameters {
  float temperature;
  bool greedy;
  float log_min_p;
  int top_k;
  float top_p;
  float chance;
};

// What decides a row's token after `drawn`, from SplitMix64's output function (Steele, Lea, Flood
// 2014): 23 bits, so that its product with a float sum stays below that sum.
FUNCTION float chance_of(Wide seed, unsigned drawn) {
  Wide x = seed + (Wide(drawn) + 1) * Wide(0x9E3779B97F4A7C15);
  x = (x ^ (x >> 30)) * Wide(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * Wide(0x94D049BB133111EB);
  x ^= x >> 31;
  return float(unsigned(x >> 41)) / 8388608.0f;
}

// The sum of `x` over the lanes up to this one, in an order of its own for each lane.
FUNCTION float sum_to_lane(float x, int lane) {
  UNROLL
  for (int apart = 1; apart < 32; apart *= 2) {
    const float other = from_lane(x, lane >= apart ? lane - apart : lane);
    if (lane >= apart) x += other;
  }
  return x;
}

// The least `x` of the lanes.
FUNCTION int least(int x, int lane) {
  UNROLL
  for (int apart = 16; apart > 0; apart /= 2) {
    const int other = from_lane(x, lane ^ apart);
    if (other < x) x = other;
  }
  return x;
}

// What the threads of a block share. Lanes that meet in a bin wait for each other, unless they count
// in different copies of it.
template <int WARPS, int COPIES>
struct Scratch {
  Counter high[kBins * COPIES], low[kBins * COPIES];
  Counter chosen;
  float best[WARPS], bins[WARPS], sums[WARPS];
  int places[WARPS];
  float before, content;
};

// The largest logit and where it is first met.
template <typename T>
struct Best {
  float value;
  int place;

  FUNCTION void take(float other, int at) {
    if (other > value || (other == value && at < place)) {
      value = other;
      place = at;
    }
  }

  FUNCTION void see(LOCAL const Piece<T>& piece, int first) {
    UNROLL
    for (int j = 0; j < kPiece; j++) {
      const float x = piece.at(j);
      if (x > value) {
        value = x;
        place = first + j;
      }
    }
  }
};

// A row as one thread sees it.
template <typename T, int WARPS>
struct Row {
  const GLOBAL T* logits;
  int vocabulary;
  int warp, lane;

  // Shows `visit` this thread's pieces in their order; all lanes of a warp go along.
  template <typename Visit>
  FUNCTION void walk(LOCAL Visit& visit) const {
    const int tiles = (vocabulary + kTile - 1) / kTile, each = (tiles + WARPS - 1) / WARPS;
    const int end = tiles < (warp + 1) * each ? tiles : (warp + 1) * each;
    const bool aligned = pieces_are_aligned(logits, vocabulary);
    for (int tile = warp * each; tile < end; tile += kAhead) {
      Piece<T> pieces[kAhead];
      UNROLL
      for (int i = 0; i < kAhead; i++) {
        const int first = (tile + i) * kTile + lane * kPiece;
        pieces[i].take(logits + first, tile + i < end ? vocabulary - first : 0, aligned);
      }
      UNROLL
      for (int i = 0; i < kAhead; i++)
        visit.see(pieces[i], (tile + i) * kTile + lane * kPiece);
    }
  }
};

// What lies at the distances of a search's bins: how many tokens, or, SUMS, how much weight. A
// weight is counted in 2^-24 of that at the near end of its bin, in two parts so that neither
// counter overflows.
template <typename T, int WARPS, int COPIES, bool SUMS>
struct Tally {
  SHARED Scratch<WARPS, COPIES>* scratch;
  int lane;
  float top, scale;
  unsigned widest, prefix;
  int shift, bits;

  FUNCTION void see(LOCAL const Piece<T>& piece, int) {
    UNROLL
    for (int j = 0; j < kPiece; j++) {
      const float distance = top - piece.at(j);
      const unsigned key = bits_of(distance);
      if (key <= widest && key >> (shift + bits) == prefix) {
        const int bin = int(key >> shift & ((1u << bits) - 1)) * COPIES + lane % COPIES;
        if (SUMS) {
          const float near = float_of(key >> shift << shift);
          const float part = power_of_two((near - distance) * scale);
          const unsigned weight = unsigned(part * 16777216.0f + 0.5f);
          add(&scratch->high[bin], weight >> 12);
          add(&scratch->low[bin], weight & 4095);
        } else {
          add(&scratch->low[bin], 1);
        }
      }
    }
  }

  FUNCTION float content(int bin) const {
    unsigned high = 0, low = 0;
    for (int i = bin * COPIES; i < (bin + 1) * COPIES; i++) {
      low += read(&scratch->low[i]);
      if (SUMS) high += read(&scratch->high[i]);
    }
    if (!SUMS) return float(low);
    const float near = float_of((prefix << bits | unsigned(bin)) << shift);
    const float weight = float(high) * 4096.0f + float(low);
    return weight > 0.0f ? weight / 16777216.0f * power_of_two(-near * scale) : 0.0f;
  }
};

// The distance `key` of the last token that is kept, how much comes before that distance, and how
// much lies at it.
struct Border {
  unsigned key;
  float before, content;
};

// The farthest distance, up to `widest`, before which there is less than is wanted: tokens, or,
// SUMS, a part of the weight of all of them but `excess`.
template <bool SUMS, typename T, int WARPS, int COPIES>
FUNCTION Border search(LOCAL const Row<T, WARPS>& row, SHARED Scratch<WARPS, COPIES>* scratch,
                       float top, float scale, unsigned widest, float wanted, float excess) {
  enum { EACH = kBins / (WARPS * 32) };
  const int me = row.warp * 32 + row.lane;
  Border found = {0, 0.0f, 0.0f};
  Tally<T, WARPS, COPIES, SUMS> tally = {scratch, row.lane, top, scale, widest, 0, 31, 0};
  float target = wanted;
  for (int level = 0; level < kLevels; level++) {
    tally.bits = level == 0 ? 11 : 10;
    tally.shift -= tally.bits;
    tally.prefix = found.key;
    for (int i = me; i < kBins * COPIES; i += WARPS * 32) {
      clear(&scratch->high[i]);
      clear(&scratch->low[i]);
    }
    if (me == 0) clear(&scratch->chosen);
    meet();
    row.walk(tally);
    meet();

    float contents[EACH], own = 0.0f;
    UNROLL
    for (int i = 0; i < EACH; i++) {
      contents[i] = tally.content(me * EACH + i);
      own += contents[i];
    }
    const float upto = sum_to_lane(own, row.lane);
    if (row.lane == 31) scratch->bins[row.warp] = upto;
    const float previous = from_lane(upto, row.lane ? row.lane - 1 : 0);
    meet();
    float running = found.before, whole = found.before;
    for (int warp = 0; warp < WARPS; warp++) {
      if (warp < row.warp) running += scratch->bins[warp];
      whole += scratch->bins[warp];
    }
    if (row.lane) running += previous;
    // A part of nothing still has the best token in it.
    if (SUMS && level == 0) target = larger(wanted * (whole - excess), 1e-30f);

    float befores[EACH];
    int last = -1;
    UNROLL
    for (int i = 0; i < EACH; i++) {
      befores[i] = running;
      if (contents[i] > 0.0f && running < target) last = i;
      running += contents[i];
    }
    if (last >= 0) raise(&scratch->chosen, unsigned(me * EACH + last) + 1);
    meet();
    const int chosen = int(read(&scratch->chosen)) - 1;
    UNROLL
    for (int i = 0; i < EACH; i++)
      if (chosen == me * EACH + i) {
        scratch->before = befores[i];
        scratch->content = contents[i];
      }
    meet();
    // Only where no logit is a number.
    if (chosen < 0) return {widest, 0.0f, 0.0f};
    found = {found.key << tally.bits | unsigned(chosen), scratch->before, scratch->content};
  }
  return found;
}

// Weights of a piece: 0 for what lies beyond `reach`, or is no number.
template <typename T>
struct Weights {
  float top, scale, reach;

  FUNCTION float at(LOCAL const Piece<T>& piece, int j) const {
    const float distance = top - piece.at(j);
    return distance <= reach ? power_of_two(-distance * scale) : 0.0f;
  }
};

template <typename T>
struct Sum {
  Weights<T> weights;
  float sum;

  FUNCTION void see(LOCAL const Piece<T>& piece, int) {
    UNROLL
    for (int j = 0; j < kPiece; j++) sum += weights.at(piece, j);
  }
};

// The first token of a warp at which the sum of weights, `running` before the warp, is past
// `target`; or, where rounding has the sum end before, the last that has a weight.
template <typename T>
struct Search {
  Weights<T> weights;
  float running, target;
  int lane;
  int place, last;

  FUNCTION void see(LOCAL const Piece<T>& piece, int first) {
    if (place >= 0) return;
    float own = 0.0f;
    UNROLL
    for (int j = 0; j < kPiece; j++) own += weights.at(piece, j);
    const float upto = sum_to_lane(own, lane);
    const float previous = from_lane(upto, lane ? lane - 1 : 0);
    const int winner = least(own > 0.0f && running + upto > target ? lane : 32, lane);
    if (own > 0.0f) {
      float sum = lane ? running + previous : running;
      bool past = false;
      UNROLL
      for (int j = 0; j < kPiece; j++) {
        const float weight = weights.at(piece, j);
        sum += weight;
        if (weight > 0.0f && !past) {
          last = first + j;
          past = sum > target;
        }
      }
    }
    if (winner < 32) place = from_lane(last, winner);
    running += from_lane(upto, 31);
  }
};

template <typename T, int WARPS, int COPIES>
FUNCTION Best<T> best_of(LOCAL const Row<T, WARPS>& row, SHARED Scratch<WARPS, COPIES>* scratch) {
  Best<T> best = {lowest(), 0};
  row.walk(best);
  UNROLL
  for (int apart = 16; apart > 0; apart /= 2) {
    const float value = from_lane(best.value, row.lane ^ apart);
    best.take(value, from_lane(best.place, row.lane ^ apart));
  }
  if (row.lane == 0) {
    scratch->best[row.warp] = best.value;
    scratch->places[row.warp] = best.place;
  }
  meet();
  for (int warp = 0; warp < WARPS; warp++) best.take(scratch->best[warp], scratch->places[warp]);
  // Of two zeros the difference is then 0 and not -0, whose bits are not in order.
  best.value += 0.0f;
  return best;
}

// The token of a row, for thread `me` of the block; known to one thread, -1 to all others.
template <typename T, int WARPS, int COPIES>
FUNCTION int draw(const GLOBAL T* logits, int vocabulary, Parameters parameters,
                  SHARED Scratch<WARPS, COPIES>* scratch, int me) {
  const Row<T, WARPS> row = {logits, vocabulary, me / 32, me % 32};
  const Best<T> best = best_of(row, scratch);
  if (parameters.greedy) return me == 0 ? best.place : -1;

  const float top = best.value, scale = smaller(kLog2e / parameters.temperature, 1e30f);
  unsigned widest = kLargestFinite;
  float excess = 0.0f;
  if (parameters.top_k > 0 && parameters.top_k < vocabulary) {
    const float keep = float(parameters.top_k);
    const Border border = search<false>(row, scratch, top, scale, widest, keep, 0.0f);
    widest = border.key;
    // Ties with the last one kept are kept, but top_p is a part of what top_k asks for.
    const float beyond = larger(border.before + border.content - keep, 0.0f);
    excess = beyond * power_of_two(-float_of(widest) * scale);
  }
  if (parameters.top_p < 1.0f)
    widest = search<true>(row, scratch, top, scale, widest, parameters.top_p, excess).key;
  const Weights<T> weights = {top, scale, smaller(float_of(widest), -parameters.log_min_p * parameters.temperature)};

  Sum<T> mine = {weights, 0.0f};
  row.walk(mine);
  const float sum = sum_to_lane(mine.sum, row.lane);
  if (row.lane == 31) scratch->sums[row.warp] = sum;
  meet();
  float total = 0.0f;
  for (int warp = 0; warp < WARPS; warp++) total += scratch->sums[warp];
  const float target = parameters.chance * total;
  float running = 0.0f;
  int chosen = -1;
  for (int warp = 0; warp < WARPS && chosen < 0; warp++) {
    const float next = running + scratch->sums[warp];
    if (next > target) chosen = warp;
    else running = next;
  }
  // Only where the best logit is no finite number.
  if (chosen < 0) return me == 0 ? best.place : -1;
  if (row.warp != chosen) return -1;
  Search<T> found = {weights, running, target, row.lane, -1, -1};
  row.walk(found);
  const int last = -least(-found.last, row.lane);
  if (row.lane) return -1;
  return found.place >= 0 ? found.place : last;
}

// Draws for a row of `logits` by the same row of `parameters`, of which there are `asked`; later rows
// are padding. `seeds` has the lower half of each first. Metal has inputs of few elements in another
// address space, so their types are deduced.
template <typename T, int WARPS, int COPIES, typename Floats, typename Seeds, typename Drawn>
FUNCTION void draw_row(const GLOBAL T* logits, int vocabulary, Floats parameters, int asked,
                       Seeds seeds, Drawn drawn, GLOBAL unsigned* tokens,
                       GLOBAL unsigned* following, SHARED Scratch<WARPS, COPIES>* scratch, int row,
                       int me) {
  if (row >= asked) {
    if (me == 0) tokens[row] = 0;
    return;
  }
  const Wide seed = Wide(seeds[2 * row + 1]) << 32 | seeds[2 * row];
  const Parameters own = {parameters[row * 5],     bool(parameters[row * 5 + 1]),
                          parameters[row * 5 + 2], int(parameters[row * 5 + 3]),
                          parameters[row * 5 + 4], chance_of(seed, drawn[row])};
  const int token =
      draw<T, WARPS, COPIES>(logits + long(row) * vocabulary, vocabulary, own, scratch, me);
  if (token >= 0) tokens[row] = token;
  if (me == 0) following[row] = drawn[row] + 1;
}

// The most likely token alone.
template <typename T, int WARPS, int COPIES>
FUNCTION void best_of_row(const GLOBAL T* logits, int vocabulary, GLOBAL unsigned* tokens,
                          SHARED Scratch<WARPS, COPIES>* scratch, unsigned number, unsigned me) {
  const Row<T, WARPS> row = {logits + long(number) * vocabulary, vocabulary, me / 32, me % 32};
  const int place = best_of(row, scratch).place;
  if (me == 0) tokens[number] = place;
}

}  // namespace kernels
