// Experts: of a layer's many MLPs each row goes through the few that its router gives it.
//
//   normed = norm(x), logits = normed @ router^T, whose CHOSEN largest are a row's experts
//   gated = silu(gate) * up, or another activation, of a row's expert
//   given = down(gated)
//   out = residual + the sum of what its experts gave, weighted by the softmax of their logits
//
// Some routers score by the sigmoid of each logit instead, and choose by that plus a correction of
// each expert. Weights are multiplied by `scale`, and by a number of each expert where there are
// such. Some routers norm rows by weights of their own.
//
// Where a norm stands behind what experts give, the sum of that is `out`, without the residual.
//
// Some layers have experts that all rows share, the last SHARED, which are always among the CHOSEN:
// their weights are sigmoids of their logits, or 1 where the router has none for them.
//
// with biases behind the router, and behind gate, up and down, where there are any.
//
// Four launches, of which the first and the last are here, and the products in experts.cu; with few
// rows three, since the last blocks of the way down do what the fourth would. With many rows norm
// and logits are MLX's, and two launches do what is left of the first. What a row and an
// expert have in common is a pair. Pairs are put in order by expert, so that an expert's
// weights are read once for up to HELD of its rows: an errand.

namespace kernels {

// Up to HELD pairs of an expert, from the place `first` on in the order of all.
struct Errand {
  int expert, first, rows;

  __device__ __forceinline__ static Errand at(const int* errands, int i) {
    const int* of = errands + i * 4;
    return {of[0], of[1], of[2]};
  }
};

__device__ __forceinline__ void put_errand(int* errands, int i, int expert, int first, int rows) {
  int* to = errands + i * 4;
  to[0] = expert;
  to[1] = first;
  to[2] = rows;
}

template <typename T>
__device__ __forceinline__ float product_of(uint4 a, uint4 b, float sum, const T* type) {
  const unsigned left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 x = unpack(left[i], type), y = unpack(right[i], type);
    sum = fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
  }
  return sum;
}

// Of an expert: as other blocks of the launch have left it, or as an earlier launch has.
__device__ __forceinline__ float logit_at(const float* logits) {
  return read_shared_result(logits);
}

template <typename T>
__device__ __forceinline__ float logit_at(const T* logits) {
  return float(*logits);
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Of `x` and those of the lanes before this one.
__device__ __forceinline__ int sum_up_to(int x, int lane) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int before = shuffle(x, lane < lanes ? lane : lane - lanes);
    if (lane >= lanes) x += before;
  }
  return x;
}

__device__ __forceinline__ float sigmoid_of(float x) {
  return 1.f / (1.f + power_of_two(-x * kLog2e));
}

// What an expert's score is made of its logit by.
enum class Scoring { kSoftmax, kSigmoid };

// How a row's experts are chosen and weighted. GATED: there are logits of those that are shared,
// too. NORMALISED: a row's weights add up to 1, before they are scaled; otherwise they are the
// scores, of a softmax those over all experts. CORRECTED: experts are chosen by score + correction.
// A sum of sigmoids has `least` added to it. `scales`: of each expert, or null.
template <Scoring SCORING, bool GATED, bool NORMALISED, bool CORRECTED>
struct Choice {
  static constexpr bool kSigmoid = SCORING == Scoring::kSigmoid, kGated = GATED;
  static constexpr bool kNormalised = NORMALISED, kCorrected = CORRECTED;
  static_assert(kSigmoid || !CORRECTED);

  const float *correction, *scales;
  float scale, least;
};

// A block has EACH rows, up to 8, and 16 experts. CHOICE: see `Choice`. BIAS: a number of each
// expert is added to its logits.
template <typename T, int EACH, int WARPS, int EXPERTS, int CHOSEN, int SHARED, typename CHOICE,
          bool BIAS>
struct Router {
  static constexpr int OWN = EXPERTS - SHARED, OWN_CHOSEN = CHOSEN - SHARED;
  static constexpr int LOGITS = CHOICE::kGated ? EXPERTS : OWN;
  static constexpr int SHARES = WARPS / EACH, OF_LANE = (OWN + 31) / 32;
  static constexpr int TILE = 16, TILES = (LOGITS + TILE - 1) / TILE, COLUMNS = 8;
  // Pieces of 16 bytes that 4 lanes take of a row, and how often a warp asks for weights before the
  // rows are normed.
  static constexpr int PIECES = 4, EARLY = 4;

  int inputs, rows, warp, lane;
  uint4* normed;
  float* merged;

  // Where a piece of a row lies: the two rows that 8 lanes read at once fall into different banks.
  __device__ __forceinline__ int place(int row, int piece) const {
    return row * (inputs / 8) + (piece ^ (row % 2 * PIECES));
  }

  // As MLX computes it: rounded before the weights, and after them. `out`: for one block of the rows.
  // `own`: the norm's weights for the router, if they are others than for `out`, or null.
  __device__ __forceinline__ void norm_rows(const T* x, const T* norm, const T* own, T* out,
                                            float epsilon) {
    const T* type = nullptr;
    const int row = warp / SHARES, pieces = inputs / 8;
    if (row < rows) {
      const uint4* from = reinterpret_cast<const uint4*>(x) + row * pieces;
      uint4* to = reinterpret_cast<uint4*>(out) + row * pieces;
      float sum = 0.f;
#pragma unroll 4
      for (int piece = lane; piece < pieces; piece += 32) {
        const uint4 of = from[piece];
        sum = product_of(of, of, sum, type);
      }
      const float by = rsqrtf(sum_of_lanes(sum) / inputs + epsilon);
      const auto pair = [&](unsigned of, unsigned weights) {
        const float2 a = unpack(of, type);
        return multiply_pair(pack(a.x * by, a.y * by, type), weights, type);
      };
      const auto times = [&](uint4 of, const T* all, int piece) {
        const uint4 weights = reinterpret_cast<const uint4*>(all)[piece];
        return make_uint4(pair(of.x, weights.x), pair(of.y, weights.y), pair(of.z, weights.z),
                          pair(of.w, weights.w));
      };
      for (int piece = warp % SHARES * 32 + lane; piece < pieces; piece += SHARES * 32) {
        const uint4 of = from[piece], result = times(of, norm, piece);
        normed[place(row, piece)] = own == nullptr ? result : times(of, own, piece);
        if (out != nullptr) to[piece] = result;
      }
    }
    __syncthreads();
  }

  // Weights of the two experts that a lane has, and the same of 4 lanes' next pieces.
  struct Weights {
    uint4 upper, lower;
  };

  __device__ __forceinline__ Weights weights_at(const T* router, int first, int turn) const {
    const int pieces = inputs / 8, piece = (turn * WARPS + warp) * PIECES;
    const int upper = first + lane / 4, lower = upper + 8, last = LOGITS - 1;
    if (piece >= pieces) return {};
    const uint4* of = reinterpret_cast<const uint4*>(router) + piece + lane % 4;
    return {of[(upper < last ? upper : last) * pieces], of[(lower < last ? lower : last) * pieces]};
  }

  // Leaves the logits of experts from `first` on; those of a row are LOGITS.
  __device__ __forceinline__ void multiply(const T* router, const T* bias, int first,
                                           const Weights (&early)[EARLY], float* logits) {
    const T* type = nullptr;
    const int pieces = inputs / 8, row = lane / 4;
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    const auto take = [&](int turn, const Weights& of) {
      const int piece = (turn * WARPS + warp) * PIECES + lane % 4;
      const uint4 x = row < rows ? normed[place(row, piece)] : make_uint4(0, 0, 0, 0);
      const unsigned a[4] = {of.upper.x, of.lower.x, of.upper.y, of.lower.y};
      const unsigned b[4] = {of.upper.z, of.lower.z, of.upper.w, of.lower.w};
      kernels::multiply(sums, a, x.x, x.y, type);
      kernels::multiply(sums, b, x.z, x.w, type);
    };
    const int turns = (pieces / PIECES - warp + WARPS - 1) / WARPS;
#pragma unroll
    for (int turn = 0; turn < EARLY; turn++)
      if (turn < turns) take(turn, early[turn]);
#pragma unroll 2
    for (int turn = EARLY; turn < turns; turn++) take(turn, weights_at(router, first, turn));
    float* own = merged + (warp * TILE + row) * COLUMNS + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4; e++) own[e / 2 * 8 * COLUMNS + e % 2] = sums[e];
    __syncthreads();
    const int expert = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    if (expert < TILE && first + expert < LOGITS && column < rows) {
      float sum = BIAS ? float(bias[first + expert]) : 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += merged[w * TILE * COLUMNS + threadIdx.x];
      logits[column * LOGITS + first + expert] = float(T(sum));
    }
  }

  // Of equal ones the first is the larger.
  template <typename L>
  __device__ __forceinline__ void choose(const L* logits, const CHOICE& choice, int* chosen,
                                         float* scores) const {
    const int row = warp;
    if (row >= rows) return;
    // What a lane's experts are chosen by, and their scores where that is something else.
    float own[OF_LANE], plain[CHOICE::kCorrected ? OF_LANE : 1];
    float all = 0.f, top = 0.f, total = 0.f, score = 0.f;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      const int expert = i * 32 + lane;
      own[i] = minus_infinity();
      if (expert < OWN) {
        own[i] = logit_at(logits + row * LOGITS + expert);
        if (CHOICE::kSigmoid) own[i] = sigmoid_of(own[i]);
      }
      if constexpr (CHOICE::kCorrected) {
        plain[i] = own[i];
        if (expert < OWN) own[i] += choice.correction[expert];
      }
    }
#pragma unroll
    for (int k = 0; k < OWN_CHOSEN; k++) {
      float best = minus_infinity();
      int at = lane;
#pragma unroll
      for (int i = 0; i < OF_LANE; i++)
        if (own[i] > best) {
          best = own[i];
          at = i * 32 + lane;
        }
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) {
        const float other = shuffle_xor(best, lanes);
        const int from = shuffle(at, lane ^ lanes);
        if (other > best || (other == best && from < at)) {
          best = other;
          at = from;
        }
      }
      if (!CHOICE::kSigmoid && k == 0) {
        top = best;
        if (!CHOICE::kNormalised) {
#pragma unroll
          for (int i = 0; i < OF_LANE; i++) all += power_of_two((own[i] - top) * kLog2e);
          all = sum_of_lanes(all);
        }
      }
      float weight = CHOICE::kSigmoid ? best : power_of_two((best - top) * kLog2e);
      if constexpr (CHOICE::kCorrected) {
        float found = 0.f;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++)
          if (i * 32 + lane == at) found = plain[i];
        weight = shuffle(found, at % 32);
      }
      total += weight;
      if (lane == k) {
        score = weight;
        mine = at;
      }
#pragma unroll
      for (int i = 0; i < OF_LANE; i++)
        if (i * 32 + lane == at) own[i] = minus_infinity();
    }
    if (CHOICE::kNormalised)
      score /= CHOICE::kSigmoid ? total + choice.least : total;
    else if (!CHOICE::kSigmoid)
      score /= all;
    score *= choice.scale;
    if (choice.scales != nullptr) score *= choice.scales[mine];
    if (SHARED && lane >= OWN_CHOSEN && lane < CHOSEN) {
      mine = OWN + lane - OWN_CHOSEN;
      score = 1.f;
      if constexpr (CHOICE::kGated)
        score = sigmoid_of(logit_at(logits + row * LOGITS + mine));
    }
    if (lane < CHOSEN) {
      chosen[row * CHOSEN + lane] = mine;
      scores[row * CHOSEN + lane] = score;
    }
  }
};

// Of experts' pairs, by their `counts`: where in the order of all they start, and the errands that
// they make, as many as there may be.
template <int EXPERTS, int HELD, int THREADS>
__device__ __forceinline__ void lay_out(const int* counts, int* starts, int* begin, int* errands,
                                        int most_errands) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    int given = 0, errands_given = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
      const int e = first + lane, count = e < EXPERTS ? counts[e] : 0;
      const int needed = (count + HELD - 1) / HELD;
      const int sum = sum_up_to(count, lane), all_needed = sum_up_to(needed, lane);
      if (e < EXPERTS) {
        starts[e] = given + sum - count;
        begin[e] = errands_given + all_needed - needed;
      }
      given += shuffle(sum, 31);
      errands_given += shuffle(all_needed, 31);
    }
    if (lane == 0) begin[EXPERTS] = errands_given;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    const int count = counts[e], first = starts[e];
    for (int done = 0, i = begin[e]; done < count; done += HELD, i++)
      put_errand(errands, i, e, first + done, count - done < HELD ? count - done : HELD);
  }
  for (int i = begin[EXPERTS] + threadIdx.x; i < most_errands; i += THREADS)
    put_errand(errands, i, 0, 0, 0);
  __syncthreads();
}

// Puts `pairs` pairs in order by what is `chosen` for them. `errands`: see `lay_out`.
template <int EXPERTS, int CHOSEN, int HELD, int THREADS>
__device__ __forceinline__ void order_pairs(const int* chosen, int* places, int* order,
                                            int* errands, int most_errands, int pairs,
                                            int* numbers) {
  int *counts = numbers, *starts = numbers + EXPERTS, *begin = starts + EXPERTS;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += THREADS) atomicAdd(counts + chosen[i], 1);
  __syncthreads();
  lay_out<EXPERTS, HELD, THREADS>(counts, starts, begin, errands, most_errands);
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    const int place = atomicAdd(starts + chosen[i], 1);
    places[i] = place;
    order[place] = i / CHOSEN;
  }
}

// Most errands of so many rows: see RouterForm.most_errands.
template <int EXPERTS, int CHOSEN, int HELD>
__device__ __forceinline__ int most_errands_of(int rows) {
  const int pairs = rows * CHOSEN, bound = EXPERTS + pairs / HELD;
  return pairs < bound ? pairs : bound;
}

// The last block of those that have the same rows chooses, and the last of all puts the pairs in
// order. `done` counts them: all, and then those of the same rows.
template <typename T, int EACH, int WARPS, int EXPERTS, int CHOSEN, int SHARED, bool BIAS, int HELD,
          typename CHOICE>
__device__ __forceinline__ void route_rows(const T* x, const T* norm, const T* router_norm,
                                           const T* router, const T* bias, CHOICE choice,
                                           const int* done, T* normed, float* logits, int* chosen,
                                           float* scores, int* places, int* order, int* errands,
                                           int rows, int inputs, float epsilon) {
  const int most_errands = most_errands_of<EXPERTS, CHOSEN, HELD>(rows);
  extern __shared__ __align__(16) unsigned char shared[];
  static_assert(WARPS % EACH == 0 && EACH <= 8 && CHOSEN <= 32);
  using Own = Router<T, EACH, WARPS, EXPERTS, CHOSEN, SHARED, CHOICE, BIAS>;
  const int group = blockIdx.x / Own::TILES, tile = blockIdx.x % Own::TILES;
  const int first = group * EACH, left = rows - first;
  Own own;
  own.inputs = inputs;
  own.rows = left < EACH ? left : EACH;
  own.warp = threadIdx.x / 32;
  own.lane = threadIdx.x % 32;
  own.normed = reinterpret_cast<uint4*>(shared);
  own.merged = reinterpret_cast<float*>(shared + EACH * inputs * sizeof(T));
  typename Own::Weights early[Own::EARLY];
#pragma unroll
  for (int turn = 0; turn < Own::EARLY; turn++)
    early[turn] = own.weights_at(router, tile * Own::TILE, turn);
  own.norm_rows(x + (long)first * inputs, norm, router_norm,
                tile == 0 ? normed + (long)first * inputs : nullptr, epsilon);
  own.multiply(router, bias, tile * Own::TILE, early, logits + (long)first * Own::LOGITS);
  // What is behind the numbers is still read while these are written.
  int *numbers = reinterpret_cast<int*>(shared), *last = numbers + 3 * EXPERTS + 1;
  if (!arrives_last(done + 1 + group, Own::TILES, last)) return;
  own.choose(logits + (long)first * Own::LOGITS, choice, chosen + first * CHOSEN,
             scores + first * CHOSEN);
  if constexpr (EACH == 1) {
    // The only row: its pairs are in order as they are.
    const int i = threadIdx.x;
    if (i < CHOSEN) {
      places[i] = i;
      order[i] = 0;
      put_errand(errands, i, chosen[i], i, 1);
    }
  } else {
    const int groups = (rows + EACH - 1) / EACH;
    if (arrives_last(done, groups, last))
      order_pairs<EXPERTS, CHOSEN, HELD, WARPS * 32>(chosen, places, order, errands, most_errands,
                                                     rows * CHOSEN, numbers);
  }
}

// Many rows, whose logits are a product by themselves: a block has ROWS of them, and one block would
// take long to put all pairs in order. It leaves in `counts`, (blocks + 1, EXPERTS), how many pairs
// of each expert the blocks before each have, and at its end where those of an expert start.
template <typename T, int ROWS, int WARPS, int EXPERTS, int CHOSEN, int SHARED, int HELD,
          typename CHOICE>
__device__ __forceinline__ void choose_rows(const T* logits, CHOICE choice, const int* done,
                                            int* chosen, float* scores, int* counts, int* errands,
                                            int rows) {
  const int most_errands = most_errands_of<EXPERTS, CHOSEN, HELD>(rows);
  extern __shared__ __align__(16) unsigned char shared[];
  using Own = Router<T, 1, WARPS, EXPERTS, CHOSEN, SHARED, CHOICE, false>;
  constexpr int THREADS = WARPS * 32, AHEAD = 16;
  const int blocks = (rows + ROWS - 1) / ROWS;
  const long first = (long)blockIdx.x * ROWS;
  Own own;
  own.rows = rows - first < ROWS ? rows - first : ROWS;
  own.lane = threadIdx.x % 32;
  logits += first * Own::LOGITS;
  chosen += first * CHOSEN;
  scores += first * CHOSEN;
  for (own.warp = threadIdx.x / 32; own.warp < own.rows; own.warp += WARPS)
    own.choose(logits, choice, chosen, scores);
  int *numbers = reinterpret_cast<int*>(shared), *starts = numbers + EXPERTS;
  int *begin = starts + EXPERTS, *last = begin + EXPERTS + 1;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) numbers[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < own.rows * CHOSEN; i += THREADS) atomicAdd(numbers + chosen[i], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS)
    counts[blockIdx.x * EXPERTS + e] = numbers[e];
  if (!arrives_last(done, blocks, last)) return;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    int sum = 0;
    for (int block = 0; block < blocks; block += AHEAD) {
      int* at = counts + block * EXPERTS + e;
      unsigned of[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (block + i < blocks)
          of[i] = read_shared_result(reinterpret_cast<const unsigned*>(at + i * EXPERTS));
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (block + i < blocks) {
          at[i * EXPERTS] = sum;
          sum += of[i];
        }
    }
    numbers[e] = sum;
  }
  __syncthreads();
  lay_out<EXPERTS, HELD, THREADS>(numbers, starts, begin, errands, most_errands);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[blocks * EXPERTS + e] = starts[e];
}

// Behind `choose_rows`, with as many blocks.
template <int ROWS, int EXPERTS, int CHOSEN, int THREADS>
__device__ __forceinline__ void place_pairs(const int* chosen, const int* counts, int* places,
                                            int* order, int rows) {
  extern __shared__ __align__(16) unsigned char shared[];
  int* next = reinterpret_cast<int*>(shared);
  const int blocks = (rows + ROWS - 1) / ROWS, first = blockIdx.x * ROWS * CHOSEN;
  const int left = rows * CHOSEN - first, own = left < ROWS * CHOSEN ? left : ROWS * CHOSEN;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS)
    next[e] = counts[blocks * EXPERTS + e] + counts[blockIdx.x * EXPERTS + e];
  __syncthreads();
  for (int i = first + threadIdx.x; i < first + own; i += THREADS) {
    const int place = atomicAdd(next + chosen[i], 1);
    places[i] = place;
    order[place] = i / CHOSEN;
  }
}

// 8 neighbours of a row. `residual`: null where it is not added.
template <typename T, int CHOSEN>
__device__ __forceinline__ void mix_rows(const T* residual, const T* given, const int* places,
                                         const float* scores, T* out, int rows, int width, int at) {
  const int pieces = width / 8, row = at / pieces, piece = at % pieces;
  if (row >= rows) return;
  using Values = Neighbours<T, 8>;
  const T* type = nullptr;
  Values result;
  if (residual != nullptr) result = Values::at(residual + (long)row * width + piece * 8);
  uint4 of[CHOSEN];
#pragma unroll
  for (int k = 0; k < CHOSEN; k++) {
    const T* from = given + (long)places[row * CHOSEN + k] * width + piece * 8;
    of[k] = read_shared_result(reinterpret_cast<const uint4*>(from));
  }
  float sum[8];
#pragma unroll
  for (int e = 0; e < 8; e++) sum[e] = residual == nullptr ? 0.f : float(result.of[e]);
#pragma unroll
  for (int k = 0; k < CHOSEN; k++) {
    const float by = scores[row * CHOSEN + k];
    const unsigned pairs[4] = {of[k].x, of[k].y, of[k].z, of[k].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpack(pairs[i], type);
      sum[2 * i] = fmaf(by, pair.x, sum[2 * i]);
      sum[2 * i + 1] = fmaf(by, pair.y, sum[2 * i + 1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e++) result.of[e] = T(sum[e]);
  result.put(out + (long)row * width + piece * 8);
}

// All rows, in a launch of its own.
template <typename T, int CHOSEN>
__device__ __forceinline__ void mix_all_rows(const T* residual, const T* given, const int* places,
                                             const float* scores, T* out, int rows, int width) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  mix_rows<T, CHOSEN>(residual, given, places, scores, out, rows, width, at);
}

}  // namespace kernels
