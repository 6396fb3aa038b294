// What draw.h needs of Metal.

#define FUNCTION inline
#define SHARED threadgroup
#define GLOBAL device
#define LOCAL thread
#define UNROLL _Pragma("unroll")

namespace kernels {

constant constexpr float kLog2e = 1.4426950408889634f;

typedef metal::atomic_uint Counter;
typedef ulong Wide;

inline void clear(threadgroup Counter* counter) {
  metal::atomic_store_explicit(counter, 0u, metal::memory_order_relaxed);
}
inline unsigned read(threadgroup Counter* counter) {
  return metal::atomic_load_explicit(counter, metal::memory_order_relaxed);
}
inline void add(threadgroup Counter* counter, unsigned x) {
  metal::atomic_fetch_add_explicit(counter, x, metal::memory_order_relaxed);
}
inline void raise(threadgroup Counter* counter, unsigned x) {
  metal::atomic_fetch_max_explicit(counter, x, metal::memory_order_relaxed);
}
inline void meet() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

inline unsigned bits_of(float x) { return as_type<unsigned>(x); }
inline float float_of(unsigned bits) { return as_type<float>(bits); }
// Minus infinity.
inline float lowest() { return float_of(0xff800000u); }
inline float larger(float a, float b) { return metal::max(a, b); }
inline float smaller(float a, float b) { return metal::min(a, b); }
inline float power_of_two(float x) { return metal::exp2(x); }
inline int from_lane(int x, int lane) { return metal::simd_shuffle(x, ushort(lane)); }
inline float from_lane(float x, int lane) { return metal::simd_shuffle(x, ushort(lane)); }

// Eight neighbours of a row; minus infinity beyond its end.
template <typename T>
struct Piece {
  T elements[8];

  float at(int j) const { return float(elements[j]); }

  void take(const device T* from, int count, bool) {
    for (int j = 0; j < 8; j++) elements[j] = j < count ? from[j] : T(lowest());
  }
};

template <typename T>
inline bool pieces_are_aligned(const device T*, int) {
  return true;
}

}  // namespace kernels
