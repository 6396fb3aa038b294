// What the kernels need of CUDA, on a CPU.
//
// Matrix instructions follow the fragment layouts of the PTX ISA (warp-level matrix instructions).
// Asynchronous copies take place when they are waited for and not before, so that a missing wait
// shows as stale data.
//
// What needs no kernel is in cuda.cpp, which is compiled once.
#pragma once
#include <algorithm>
#include <array>
#include <deque>

#include "group.h"

#define EMULATED
#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(n)

struct Index { int x, y, z; };
extern Index blockIdx, gridDim, blockDim;
#define threadIdx (Index{group::current, 0, 0})

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) : bits(bfloat16_of_float(x)) {}
  operator float() const { return float_of_bfloat16(bits); }
};
struct __half {
  uint16_t bits;
  __half() = default;
  __half(float x) : bits(float16_of_float(x)) {}
  operator float() const { return float_of_float16(bits); }
};
struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { group::block_barrier(); }
inline void __syncwarp() { group::warp_barrier(); }
inline void __threadfence() {}
inline int atomicAdd(int* p, int x) { int old = *p; *p += x; return old; }
inline unsigned atomicAdd(unsigned* p, unsigned x) { unsigned old = *p; *p += x; return old; }
inline unsigned atomicMax(unsigned* p, unsigned x) {
  unsigned old = *p;
  *p = std::max(old, x);
  return old;
}
inline unsigned __float_as_uint(float x) { return as_type<unsigned>(x); }
inline float __uint_as_float(unsigned bits) { return as_type<float>(bits); }
using Strides = std::array<int64_t, 8>;
using Shape = std::array<int32_t, 8>;

namespace kernels {

alignas(1024) extern unsigned char shared[256 * 1024];

inline unsigned shared_address(const void* pointer) {
  return unsigned(static_cast<const unsigned char*>(pointer) - shared);
}

struct Copy { void* to; const void* from; int bytes, size = 16; };
using Copies = std::vector<Copy>;
extern std::deque<Copies> committed[1024];
extern Copies pending[1024];

// 16-byte pieces of shared memory that copies have written and no fence has shown to the group
// products yet (hopper.h), and those of each thread.
extern bool hidden[sizeof shared / 16];
extern std::vector<unsigned> unshown[1024];

void copy_async(void* to, const void* from, int bytes);
inline void copy_async_of_line(void* to, const void* from, int bytes) {
  copy_async(to, from, bytes);
}
inline void copy_async_in_order(void* to, const void* from) { copy_async(to, from, 16); }
void commit_copies();
void wait_copies_but(int last);
template <int PENDING>
inline void wait_copies() { wait_copies_but(PENDING); }

void load(unsigned (&r)[4], const void* row, bool transposed);
inline void load_matrices(unsigned (&r)[4], const void* row) { load(r, row, false); }
inline void load_matrices_transposed(unsigned (&r)[4], const void* row) { load(r, row, true); }

unsigned transpose_matrix(unsigned x);

template <typename T>
float element(unsigned word, int which) {
  return float(as_type<T>(uint16_t(word >> which * 16)));
}

// m16n8k16: a has rows lane/4 (+8 for odd registers), columns lane%4*2 (+8 for registers 2, 3);
// b has rows lane%4*2 (+8 for register 1), columns lane/4; c has rows lane/4 (+8 for registers 2,
// 3), columns lane%4*2.
template <typename T>
void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const T*) {
  auto& shown = group::self().shown;
  for (int i = 0; i < 4; i++) shown[i] = a[i];
  shown[4] = b0;
  shown[5] = b1;
  group::warp_barrier();
  for (int r = 0; r < 4; r++) {
    int row = group::lane() / 4 + r / 2 * 8, column = group::lane() % 4 * 2 + r % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      unsigned left = group::peer(row % 8 * 4 + k % 8 / 2).shown[row / 8 + k / 8 * 2];
      unsigned right = group::peer(column * 4 + k % 8 / 2).shown[4 + k / 8];
      sum += element<T>(left, k % 2) * element<T>(right, k % 2);
    }
    c[r] += sum;
  }
  group::warp_barrier();
}

extern template void multiply(float (&)[4], const unsigned (&)[4], unsigned, unsigned,
                              const __nv_bfloat16*);
extern template void multiply(float (&)[4], const unsigned (&)[4], unsigned, unsigned,
                              const __half*);

template <typename T>
void multiply_alone(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const T* type) {
  for (float& sum : c) sum = 0.f;
  multiply(c, a, b0, b1, type);
}

template <typename T>
unsigned pack(float low, float high, const T*) {
  T pair[2] = {T(low), T(high)};
  unsigned x;
  std::memcpy(&x, pair, 4);
  return x;
}
template <typename T>
float2 unpack(unsigned x, const T*) { return {element<T>(x, 0), element<T>(x, 1)}; }
template <typename T>
unsigned multiply_pair(unsigned a, unsigned b, const T* type) {
  return pack(element<T>(a, 0) * element<T>(b, 0), element<T>(a, 1) * element<T>(b, 1), type);
}

inline unsigned lower_halves(unsigned a, unsigned b) { return (a & 0xffff) | b << 16; }
inline unsigned upper_halves(unsigned a, unsigned b) { return a >> 16 | (b & 0xffff0000); }

inline float power_of_two(float x) { return std::exp2(x); }
inline float shuffle_xor(float x, int lanes) { return group::exchange(x, group::lane() ^ lanes); }
inline int shuffle(int x, int lane) { return group::exchange(x, lane); }
inline float shuffle(float x, int lane) { return group::exchange(x, lane); }
bool any_lane(bool x);
inline float4 read_shared_result(const float4* p) { return *p; }
inline float2 read_shared_result(const float2* p) { return *p; }
inline uint4 read_shared_result(const uint4* p) { return *p; }
inline unsigned read_shared_result(const unsigned* p) { return *p; }
inline float read_shared_result(const float* p) { return *p; }
inline int count_after_writes(int* counter) { return (*counter)++; }
// Blocks take turns where one waits for another (`launch`).
inline void await_count(const int* counter, int count) {
  group::wait_until([=] { return *counter >= count; });
}
inline void write_global(uint4* p, uint4 x) { *p = x; }

}  // namespace kernels

#include "hopper.h"

void launch(Index grid, Index block, std::function<void()> kernel);
