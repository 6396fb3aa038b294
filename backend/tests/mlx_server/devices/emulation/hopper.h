// Warpgroup matrix instructions of compute capability 9.0, on a CPU: the functions that hopper.py
// writes and those of hopper.cu.
//
// Tiles are found through their descriptors, as the PTX ISA defines them (asynchronous warpgroup
// level matrix instructions, canonical layouts, 128-byte swizzle). What a careless kernel would get
// wrong only now and then is made to show: accumulators hold NaN from a product until it is waited
// for; a product that reads what a copy wrote and no fence has shown gives NaN, and so does one
// whose tiles change before it is waited for; a product behind a wait needs a new fence.
#pragma once
#include <cmath>
#include <deque>
#include <map>

namespace kernels {

// Apart, since kernels have names like these.
namespace emulated {

struct PendingProduct {
  float* d;
  bool add;
  std::vector<float> found;
  // Pieces that it reads, as they were.
  std::vector<std::pair<unsigned, std::array<unsigned, 4>>> read;
};
using Products = std::vector<PendingProduct>;
extern std::deque<Products> committed_products[1024];
extern Products pending_products[1024];
// The values of accumulators that products have been begun on.
extern std::map<float*, std::vector<float>> accumulators[1024];
extern bool may_multiply[1024];

void forget_products();
void show_to_products();
void begin_products();
void commit_products();

inline std::array<unsigned, 4> piece_at(unsigned offset) {
  std::array<unsigned, 4> found;
  std::memcpy(found.data(), shared + offset, 16);
  return found;
}

void wait_products_but(int last);
template <int PENDING>
void wait_products() { wait_products_but(PENDING); }

template <typename T, int N>
void settle(T (&)[N]) {}

struct Tile {
  unsigned start, leading, stride;

  explicit Tile(unsigned long long descriptor) {
    start = unsigned(descriptor & 0x3fff) << 4;
    leading = unsigned(descriptor >> 16 & 0x3fff) << 4;
    stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) {
      std::fprintf(stderr, "the descriptor is of no tile with a 128-byte swizzle\n");
      std::abort();
    }
  }

  // Where element k of row or column `line` lies; across, a row of the tile is one k.
  unsigned offset(int line, int k, bool across) const {
    unsigned at = across ? start + k % 8 * 128 + k / 8 * stride + line / 64 * leading + line % 64 * 2
                         : start + line % 8 * 128 + line / 8 * stride + k * 2;
    return at ^ (at >> 7 & 7) << 4;
  }

  template <typename T>
  float element(int line, int k, bool across) const {
    unsigned at = offset(line, k, across);
    if (hidden[at / 16]) return std::nanf("");
    T x;
    std::memcpy(&x, shared + at, 2);
    return float(x);
  }

  // Remembers the pieces of `lines` from `first` on.
  void remember(int first, int lines, bool across, PendingProduct& by) const {
    for (int line = first; line < first + lines; line += across ? 8 : 1)
      for (int k = 0; k < 16; k += across ? 1 : 8) {
        unsigned at = offset(line, k, across) & ~15u;
        by.read.push_back({at, piece_at(at)});
      }
  }
};

// The two rows of A, lane / 4 and 8 more, that a thread's part of D comes from.
using Rows = float[2][16];

template <typename T, int COUNT>
void add_product(float (&d)[COUNT], const Rows& a, const Tile& b, bool add, bool across,
                 PendingProduct product) {
  if (!may_multiply[group::current]) {
    std::fprintf(stderr, "a product behind a wait without a fence between them\n");
    std::abort();
  }
  auto& values = accumulators[group::current];
  if (!values.count(d)) values[d].assign(d, d + COUNT);
  product.d = d;
  product.add = add;
  product.found.resize(COUNT);
  for (int j = 0; j < COUNT / 4; j++)
    for (int e = 0; e < 2; e++) {
      int column = j * 8 + group::lane() % 4 * 2 + e;
      float low = 0.f, high = 0.f;
      for (int k = 0; k < 16; k++) {
        float x = b.element<T>(column, k, across);
        low += a[0][k] * x;
        high += a[1][k] * x;
      }
      product.found[j * 4 + e] = low;
      product.found[j * 4 + 2 + e] = high;
    }
  for (float& x : d) x = std::nanf("");
  if (group::lane() == 0) b.remember(0, COUNT * 2, across, product);
  pending_products[group::current].push_back(std::move(product));
}

template <typename T, int COUNT>
void multiply_tiles(float (&d)[COUNT], unsigned long long a, unsigned long long b, bool add,
                    bool across) {
  const Tile tile(a);
  const int warp = group::current / group::kLanes % 4;
  PendingProduct product;
  Rows rows;
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 16; k++)
      rows[half][k] = tile.element<T>(warp * 16 + group::lane() / 4 + half * 8, k, false);
  if (group::lane() == 0) tile.remember(warp * 16, 16, false, product);
  group::warp_barrier();
  add_product<T>(d, rows, Tile(b), add, across, product);
}

template <typename T, int COUNT>
void multiply_registers(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, bool add,
                        bool across) {
  for (int i = 0; i < 4; i++) group::self().shown[i] = a[i];
  group::warp_barrier();
  Rows rows;
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 16; k++) {
      unsigned word = group::peer(group::lane() / 4 * 4 + k % 8 / 2).shown[half + k / 8 * 2];
      rows[half][k] = element<T>(word, k % 2);
    }
  group::warp_barrier();
  add_product<T>(d, rows, Tile(b), add, across, {});
}

template <typename T, int COUNT>
void multiply_group(float (&d)[COUNT], unsigned long long a, unsigned long long b, bool add,
                    const T*) {
  multiply_tiles<T>(d, a, b, add, false);
}
template <typename T, int COUNT>
void multiply_group(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, bool add,
                    const T*) {
  multiply_registers<T>(d, a, b, add, false);
}
template <typename T, int COUNT>
void multiply_group_across(float (&d)[COUNT], unsigned long long a, unsigned long long b, bool add,
                           const T*) {
  multiply_tiles<T>(d, a, b, add, true);
}
template <typename T, int COUNT>
void multiply_group_across(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b,
                           bool add, const T*) {
  multiply_registers<T>(d, a, b, add, true);
}

struct Meeting {
  uint16_t arrivals, missing;
  uint32_t phase;
};
static_assert(sizeof(Meeting) == 8);

inline Meeting& meeting_at(unsigned long long* place) {
  return *reinterpret_cast<Meeting*>(place);
}
inline void prepare_meeting(unsigned long long* place, int arrivals) {
  meeting_at(place) = {uint16_t(arrivals), uint16_t(arrivals), 0};
}
inline void arrive_at(unsigned long long* place) {
  Meeting& meeting = meeting_at(place);
  if (--meeting.missing) return;
  meeting.missing = meeting.arrivals;
  meeting.phase++;
}
inline void wait_at(unsigned long long* place, int phase) {
  group::wait_until([=] { return (meeting_at(place).phase & 1) != unsigned(phase & 1); });
}

}  // namespace emulated

using emulated::arrive_at;
using emulated::begin_products;
using emulated::commit_products;
using emulated::forget_products;
using emulated::multiply_group;
using emulated::multiply_group_across;
using emulated::prepare_meeting;
using emulated::settle;
using emulated::show_to_products;
using emulated::wait_at;
using emulated::wait_products;

}  // namespace kernels
