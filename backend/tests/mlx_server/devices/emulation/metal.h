// What the kernels need of the Metal Shading Language, on a CPU.
//
// What needs no kernel is in metal.cpp, which is compiled once.
#pragma once
#include <algorithm>

#include "group.h"

#define device
#define constant
#define thread

struct uint3 { unsigned x, y, z; };
typedef unsigned short ushort;
typedef uint64_t ulong;

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) : bits(bfloat16_of_float(x)) {}
  operator float() const { return float_of_bfloat16(bits); }
};
struct float16_t {
  uint16_t bits;
  float16_t() = default;
  explicit float16_t(float x) : bits(float16_of_float(x)) {}
  operator float() const { return float_of_float16(bits); }
};

extern uint3 threadgroup_position_in_grid, threadgroups_per_grid, threads_per_threadgroup;
#define thread_index_in_threadgroup (unsigned(group::current))
#define simdgroup_index_in_threadgroup (unsigned(group::current) / 32)
#define thread_index_in_simdgroup (unsigned(group::current) % 32)
#define thread_position_in_grid                                                              \
  (uint3{threadgroup_position_in_grid.x * threads_per_threadgroup.x + unsigned(group::current), \
         threadgroup_position_in_grid.y, 0})

namespace metal {
inline float max(float a, float b) { return std::max(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline int min(int a, int b) { return std::min(a, b); }
inline float exp2(float x) { return std::exp2(x); }
inline float rsqrt(float x) { return 1.f / std::sqrt(x); }
inline float min(float a, float b) { return std::min(a, b); }
inline float simd_shuffle_xor(float x, ushort lanes) {
  return group::exchange(x, group::lane() ^ lanes);
}
template <typename T>
T simd_shuffle(T x, ushort lane) {
  return group::exchange(x, lane);
}
enum memory_order { memory_order_relaxed };
struct atomic_uint { unsigned value; };
inline void atomic_store_explicit(atomic_uint* p, unsigned x, memory_order) { p->value = x; }
inline unsigned atomic_load_explicit(atomic_uint* p, memory_order) { return p->value; }
inline void atomic_fetch_add_explicit(atomic_uint* p, unsigned x, memory_order) { p->value += x; }
inline void atomic_fetch_max_explicit(atomic_uint* p, unsigned x, memory_order) {
  p->value = std::max(p->value, x);
}
enum class mem_flags { mem_threadgroup, mem_device };
inline void threadgroup_barrier(mem_flags) { group::block_barrier(); }
namespace precise {
inline float tanh(float x) { return std::tanh(x); }
}
}  // namespace metal

void launch(uint3 grid, uint3 block, std::function<void()> kernel);
