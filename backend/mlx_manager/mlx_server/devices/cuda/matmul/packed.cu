// Weights as MLX packs them, for products.cu and row.cu: of 4 or 8 bits, (outputs, inputs), the first
// lowest in its word, and for each GROUP of a row's inputs what they are multiplied with.
//
// Unsigned integers have a scale and a bias: weight = scale * integer + bias. They are unpacked by
// putting 4 bits into a number's lowest: 128 + q is bfloat16 0x4300 | q, and 1024 + q is float16
// 0x6400 | q, exactly; the upper 4 of 8 bits likewise, where a last bit is worth 16. These are
// multiplied with the rows, a group at a time, and scale and bias are applied to the group's float32
// sum: what was added to every q is taken away there, with the sum of the rows' elements, which is a
// product with ones. So weights are rounded nowhere. Integers 4 apart (of 8 bits: 2) are unpacked at
// once, and the rows' elements are paired like that, too. The 4 lanes of an mma's row have
// neighbouring columns of one group.
//
// Floats of 4 bits (mxfp4: a sign, two bits of exponent, one of mantissa; Open Compute Project,
// Microscaling Formats, version 1.0) have a power of two, a byte. Moved to where a wider number has
// its sign, and the ends of its exponent and the beginning of its mantissa, they are themselves times
// a power of two, subnormal ones as well; that is made good in the group's sum, and for bfloat16, where
// it is 2^-126, half of it in the rows, so that no product falls out of float32's range.

namespace kernels {

// A pair of the numbers that `q`s 4 bits are the lowest of, at bits 0 to 3 and 16 to 19, which are
// `mask`. UPPER: the bits are worth 16 times as much.
template <bool UPPER>
__device__ __forceinline__ unsigned number_pair(unsigned q, unsigned mask, const __nv_bfloat16*) {
  return (q & mask) | (UPPER ? 0x45004500u : 0x43004300u);
}
template <bool UPPER>
__device__ __forceinline__ unsigned number_pair(unsigned q, unsigned mask, const __half*) {
  return (q & mask) | (UPPER ? 0x74007400u : 0x64006400u);
}
// What is added to 4 bits, or to 8.
template <int BITS>
__host__ __device__ constexpr float offset_of(const __nv_bfloat16*) {
  return BITS == 4 ? 128.f : 128.f + 2048.f;
}
template <int BITS>
__host__ __device__ constexpr float offset_of(const __half*) {
  return BITS == 4 ? 1024.f : 1024.f + 16384.f;
}
__device__ __forceinline__ unsigned pair_of_ones(const __nv_bfloat16*) { return 0x3f803f80u; }
__device__ __forceinline__ unsigned pair_of_ones(const __half*) { return 0x3c003c00u; }

// 8 neighbouring elements of a row in pairs: 0 and 4, 1 and 5, 2 and 6, 3 and 7; for 8 bits 0 and 2,
// 1 and 3, 4 and 6, 5 and 7.
template <int BITS>
__device__ __forceinline__ uint4 paired(uint4 x) {
  if (BITS == 4)
    return make_uint4(lower_halves(x.x, x.z), upper_halves(x.x, x.z), lower_halves(x.y, x.w),
                      upper_halves(x.y, x.w));
  return make_uint4(lower_halves(x.x, x.y), upper_halves(x.x, x.y), lower_halves(x.z, x.w),
                    upper_halves(x.z, x.w));
}

// Products of an mma's first operand, `a`, with a pair of pairs of the rows; the first of a sum.
template <int COLUMNS, typename T>
__device__ __forceinline__ void multiply_all(float (&sums)[COLUMNS][4], const unsigned (&a)[4],
                                             const uint4 (&b)[COLUMNS], bool second, bool first,
                                             const T* type) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    const unsigned b0 = second ? b[n].z : b[n].x, b1 = second ? b[n].w : b[n].y;
    if (first)
      multiply_alone(sums[n], a, b0, b1, type);
    else
      multiply(sums[n], a, b0, b1, type);
  }
}

// Adds the products of 8 integers of an upper and of a lower output with 8 columns of the rows.
// `first`: of a sum.
template <int BITS, int COLUMNS, typename T>
__device__ __forceinline__ void multiply_integers(float (&sums)[COLUMNS][4], const unsigned* upper,
                                                  const unsigned* lower, unsigned mask,
                                                  const uint4 (&b)[COLUMNS], bool first,
                                                  const T* type) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (BITS == 4) {
      const unsigned above = i ? *upper >> 8 : *upper, below = i ? *lower >> 8 : *lower;
      const unsigned a[4] = {number_pair<false>(above, mask, type),
                             number_pair<false>(below, mask, type),
                             number_pair<false>(above >> 4, mask, type),
                             number_pair<false>(below >> 4, mask, type)};
      multiply_all(sums, a, b, i == 1, first && i == 0, type);
    } else {
      const unsigned above = upper[i], below = lower[i];
      const unsigned low[4] = {number_pair<false>(above, mask, type),
                               number_pair<false>(below, mask, type),
                               number_pair<false>(above >> 8, mask, type),
                               number_pair<false>(below >> 8, mask, type)};
      const unsigned high[4] = {number_pair<true>(above >> 4, mask, type),
                                number_pair<true>(below >> 4, mask, type),
                                number_pair<true>(above >> 12, mask, type),
                                number_pair<true>(below >> 12, mask, type)};
      multiply_all(sums, low, b, i == 1, first && i == 0, type);
      multiply_all(sums, high, b, i == 1, false, type);
    }
  }
}

// What weights of all kinds have in common: how a stage holds them.
template <int BITS, int GROUP, int COLUMNS_OF_STAGE>
struct PackedRows {
  static constexpr int WIDTH = COLUMNS_OF_STAGE, OF_GROUP = GROUP;
  // Bytes of a row in a stage, its 16-byte pieces, its groups.
  static constexpr int ROW = WIDTH * BITS / 8, PIECES = ROW / 16, GROUPS = WIDTH / GROUP;
  // Columns that 4 lanes read at once, of which each has OCTETS times 8, in so many words.
  static constexpr int UNIT = GROUP < 64 ? 32 : 64, OCTETS = UNIT / 32, UNITS = GROUP / UNIT;
  static constexpr int WORDS = OCTETS * BITS / 4;
  static constexpr int SWAP = OCTETS == 2 ? 1 : 4;

  const unsigned* words;

  // Where 16-byte piece `piece` of row `row` lies in a stage: rows that lanes read at once fall into
  // different banks.
  __device__ __forceinline__ static int place(int row, int piece) {
    constexpr int LINES = ROW < 128 ? 128 / ROW : 1, AT_ONCE = 8 / WORDS / LINES;
    return row * ROW + (piece ^ (row / LINES % AT_ONCE * WORDS)) * 16;
  }

  template <int OUTPUTS>
  __device__ __forceinline__ void fetch(unsigned char* stage, Lines lines, int inputs, int k,
                                        int lane) const {
    constexpr int EACH = 32 / PIECES, HALF = OUTPUTS / 2;
    const int row = lane / PIECES, piece = lane % PIECES;
    const unsigned line = unsigned(inputs) * BITS / 8;
    const unsigned offset = row * line + unsigned(k) * BITS / 8 + piece * 16;
    const unsigned char* of = reinterpret_cast<const unsigned char*>(words) + offset;
    const unsigned char* halves[2] = {of + lines.first * line, of + lines.second * line};
#pragma unroll
    for (int j = 0; j < OUTPUTS / EACH; j++) {
      const unsigned char* from;
      if constexpr (EACH <= HALF)
        from = halves[j * EACH / HALF] + j * EACH % HALF * line;
      else
        from = row < HALF ? halves[0] : halves[1] - HALF * line;
      copy_async(stage + place(j * EACH + row, piece), from, 16);
    }
  }

  // What a lane has of a row's weights.
  struct alignas(WORDS * 4) Own {
    unsigned of[WORDS];
  };

  __device__ __forceinline__ static Own read(const unsigned char* stage, int row, int unit,
                                             int lane) {
    const int at = (unit * 4 + lane % 4) * WORDS * 4;
    return *reinterpret_cast<const Own*>(stage + place(row, at / 16) + at % 16);
  }
};

template <typename T, int BITS, int GROUP, int COLUMNS_OF_STAGE>
struct Packed : PackedRows<BITS, GROUP, COLUMNS_OF_STAGE> {
  using Rows = PackedRows<BITS, GROUP, COLUMNS_OF_STAGE>;
  using Rows::GROUPS, Rows::OCTETS, Rows::ROW, Rows::UNITS;
  using typename Rows::Own;
  static constexpr bool kBegins = false;
  // Bytes of a row's scales, or biases, that are copied at once, and how many those are.
  static constexpr int TERMS = 16, IN_TERMS = TERMS / int(sizeof(T));

  static_assert(GROUPS <= IN_TERMS);

  const T* scales;
  const T* biases;

  template <int OUTPUTS>
  __host__ __device__ static constexpr int stage() {
    return OUTPUTS * (ROW + 2 * TERMS);
  }

  // Behind the weights of a stage lie the rows' scales, and then their biases: of each the 16 bytes
  // where they are, as fewer can't be copied past the first-level cache.
  template <int OUTPUTS>
  __device__ __forceinline__ void fetch(unsigned char* stage, Lines lines, int inputs, int k,
                                        int lane) const {
    Rows::template fetch<OUTPUTS>(stage, lines, inputs, k, lane);
    unsigned char* to = stage + OUTPUTS * ROW + lane / 16 * OUTPUTS * TERMS;
    const unsigned groups = inputs / GROUP;
    const T* own = lane < 16 ? scales : biases;
#pragma unroll
    for (int t = 0; t < OUTPUTS / 16; t++) {
      const int row = t * 16 + lane % 16;
      const int below = row % (OUTPUTS / 2);
      const long line = (row < OUTPUTS / 2 ? lines.first : lines.second);
      const long at = (line * groups + below * groups + k / GROUP) / IN_TERMS * IN_TERMS;
      copy_async(to + row * TERMS, own + at, TERMS);
    }
  }

  // Where the scales that a lane reads lie in those 16 bytes: rows 8 apart are alike.
  __device__ __forceinline__ static int term(int inputs, int k, int lane) {
    return (lane / 4 * (inputs / GROUP) + k / GROUP) % IN_TERMS;
  }

  // 8 neighbouring elements of a row as they are multiplied.
  __device__ __forceinline__ static uint4 arranged(uint4 x) { return paired<BITS>(x); }

  // A row's scales, or its biases.
  struct alignas(Rows::GROUPS * sizeof(T)) Terms {
    T of[GROUPS];
  };

  // Adds a stage's share; `rows` gives 8 columns of the rows, or of a single row that is arranged
  // already, and then the sums of its groups, too.
  template <int TILES, int COLUMNS, typename READER>
  __device__ __forceinline__ void take(float (&output)[TILES][COLUMNS][4],
                                       const unsigned char* stage, int inputs, int k, int lane,
                                       READER rows) const {
    constexpr int OUTPUTS = TILES * 16;
    const T* type = nullptr;
    const T* terms = reinterpret_cast<const T*>(stage + OUTPUTS * ROW) + term(inputs, k, lane);
    const auto scales_of = [&](int row) -> const Terms& {
      return *reinterpret_cast<const Terms*>(terms + row * IN_TERMS);
    };
    const auto biases_of = [&](int row) -> const Terms& { return scales_of(OUTPUTS + row); };
    const unsigned one = pair_of_ones(type);
    const unsigned ones[4] = {one, one, one, one};
    // The compiler does not know that this adds 0: it would make the mask anew for each use.
    const unsigned mask = 0x000f000fu | blockIdx.z;
    // With many sums there are no registers for several groups at once.
    constexpr int AT_ONCE = TILES * COLUMNS > 4 ? 1 : GROUPS;
    Terms by_all[TILES][2], plus_all[TILES][2];
    if constexpr (AT_ONCE > 1) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          by_all[t][half] = scales_of(t * 16 + half * 8 + lane / 4);
          plus_all[t][half] = biases_of(t * 16 + half * 8 + lane / 4);
        }
    }
#pragma unroll AT_ONCE
    for (int group = 0; group < GROUPS; group++) {
      uint4 b[UNITS * OCTETS][COLUMNS];
      float totals[COLUMNS][4];
#pragma unroll
      for (int i = 0; i < UNITS * OCTETS; i++) {
        const int unit = group * UNITS + i / OCTETS;
        rows(b[i], (unit * 4 + lane % 4) * OCTETS + i % OCTETS);
        if constexpr (!READER::ARRANGED) {
#pragma unroll
          for (int n = 0; n < COLUMNS; n++) b[i][n] = arranged(b[i][n]);
          multiply_all(totals, ones, b[i], false, i == 0, type);
          multiply_all(totals, ones, b[i], true, false, type);
        }
      }
      if constexpr (READER::ARRANGED) totals[0][0] = rows.sum(group);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        float sums[COLUMNS][4];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
          const int unit = group * UNITS + u;
          const Own upper = Rows::read(stage, t * 16 + lane / 4, unit, lane);
          const Own lower = Rows::read(stage, t * 16 + 8 + lane / 4, unit, lane);
#pragma unroll
          for (int o = 0; o < OCTETS; o++)
            multiply_integers<BITS>(sums, upper.of + o * (BITS / 4), lower.of + o * (BITS / 4), mask,
                                    b[u * OCTETS + o], u + o == 0, type);
        }
        float by[2], plus[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = t * 16 + half * 8 + lane / 4;
          by[half] = float((AT_ONCE > 1 ? by_all[t][half] : scales_of(row)).of[group]);
          const float bias = float((AT_ONCE > 1 ? plus_all[t][half] : biases_of(row)).of[group]);
          plus[half] = fmaf(by[half], -offset_of<BITS>(type), bias);
        }
        // A single row is in all columns.
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
#pragma unroll
          for (int e = 0; e < 4; e += READER::ARRANGED ? 2 : 1)
            output[t][n][e] = fmaf(plus[e / 2], totals[n][e % 2],
                                   fmaf(by[e / 2], sums[n][e], output[t][n][e]));
      }
    }
  }
};

// The pair of floats of 4 bits at bits AT and 16 + AT, of which AT is 0 or 4: themselves times 2^-126,
// or 2^-14. One product moves the sign, and three bits, to where they belong; what it moves elsewhere
// is none of both. Where a number has more exponent they would meet, and two shifts move them.
template <int AT>
__device__ __forceinline__ unsigned float_pair(unsigned q, const __nv_bfloat16*) {
  return (q & 0x000f000fu << AT) * (0x1040u >> AT) & 0x81c081c0u;
}
template <int AT>
__device__ __forceinline__ unsigned float_pair(unsigned q, const __half*) {
  return (q << (9 - AT) & 0x0e000e00u) | (q << (12 - AT) & 0x80008000u);
}
// 8 neighbouring elements of a row, raised so that their products stay in float32's range.
__device__ __forceinline__ uint4 raised(uint4 x, const __nv_bfloat16* type) {
  constexpr unsigned by = 0x5f805f80u;  // 2^64
  return make_uint4(multiply_pair(x.x, by, type), multiply_pair(x.y, by, type),
                    multiply_pair(x.z, by, type), multiply_pair(x.w, by, type));
}
__device__ __forceinline__ uint4 raised(uint4 x, const __half*) { return x; }
// What sums are then to be multiplied with for a scale of 2^0, as its exponent; scales are no more
// than 2^65.
__device__ __forceinline__ constexpr unsigned raised_by(const __nv_bfloat16*) { return 62; }
__device__ __forceinline__ constexpr unsigned raised_by(const __half*) { return 14; }

// Floats of 4 bits in groups of 32.
template <typename T, int COLUMNS_OF_STAGE>
struct Microscaled : PackedRows<4, 32, COLUMNS_OF_STAGE> {
  using Rows = PackedRows<4, 32, COLUMNS_OF_STAGE>;
  using Rows::GROUPS, Rows::ROW;
  static constexpr bool kBegins = true;

  const unsigned char* scales;
  // Those of the block's rows, a row after the other.
  const unsigned char* own;

  template <int OUTPUTS>
  __host__ __device__ static constexpr int stage() {
    return OUTPUTS * ROW;
  }

  // Copies the scales of all of a block's rows, which lie together: a stage's would be a byte or two
  // of each row. Rows are 8 or more, and have an even number of groups.
  template <int OUTPUTS, int THREADS>
  __device__ __forceinline__ void begin(unsigned char* to, Lines lines, int inputs) {
    own = to;
    const int groups = inputs / 32, pieces = OUTPUTS * groups / 16;
    const unsigned char* first = scales + lines.first * groups;
    const unsigned char* second = scales + (lines.second - OUTPUTS / 2) * groups;
    for (int i = threadIdx.x; i < pieces; i += THREADS)
      copy_async(to + i * 16, (i < pieces / 2 ? first : second) + i * 16, 16);
  }

  // Adds a stage's share; `rows` gives 8 columns of the rows.
  template <int TILES, int COLUMNS, typename READER>
  __device__ __forceinline__ void take(float (&output)[TILES][COLUMNS][4],
                                       const unsigned char* stage, int inputs, int k, int lane,
                                       READER rows) const {
    static_assert(!READER::ARRANGED);
    const T* type = nullptr;
    const int groups = inputs / 32;
    const unsigned char* exponents = own + k / 32;
    const auto scale = [&](int row, int group) {
      return __uint_as_float((exponents[row * groups + group] + raised_by(type)) << 23);
    };
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      uint4 b[COLUMNS];
      rows(b, group * 4 + lane % 4);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) b[n] = paired<4>(raised(b[n], type));
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int upper = t * 16 + lane / 4, lower = upper + 8;
        const unsigned above = Rows::read(stage, upper, group, lane).of[0];
        const unsigned below = Rows::read(stage, lower, group, lane).of[0];
        float sums[COLUMNS][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const unsigned a = i ? above >> 8 : above, c = i ? below >> 8 : below;
          const unsigned of[4] = {float_pair<0>(a, type), float_pair<0>(c, type),
                                  float_pair<4>(a, type), float_pair<4>(c, type)};
          multiply_all(sums, of, b, i == 1, i == 0, type);
        }
        const float by[2] = {scale(upper, group), scale(lower, group)};
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            output[t][n][e] = fmaf(by[e / 2], sums[n][e], output[t][n][e]);
      }
    }
  }
};

}  // namespace kernels
