// What the kernels need of the Metal Shading Language, for clang's front end: nothing is run.
//
// Metal is a dialect of C++14 that clang reads, too. Its address spaces are numbers here, so that a
// pointer into one is no pointer into another: a missing `device` is an error, as it is there.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef _Float16 half, float16_t;
typedef __bf16 bfloat, bfloat16_t;
struct uint3 { uint x, y, z; };

template <typename To, typename From>
To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  return __builtin_bit_cast(To, x);
}

namespace metal {
// No pairs of types but these: a call that mixes others is ambiguous in Metal, too.
float max(float, float);
int max(int, int);
uint max(uint, uint);
float min(float, float);
int min(int, int);
uint min(uint, uint);
float exp2(float);
float rsqrt(float);
namespace precise { float tanh(float); }
float simd_shuffle_xor(float, ushort);
int simd_shuffle_xor(int, ushort);
float simd_shuffle(float, ushort);
int simd_shuffle(int, ushort);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
enum memory_order { memory_order_relaxed };
struct atomic_uint { uint value; };
void atomic_store_explicit(volatile threadgroup atomic_uint*, uint, memory_order);
uint atomic_load_explicit(const volatile threadgroup atomic_uint*, memory_order);
uint atomic_fetch_add_explicit(volatile threadgroup atomic_uint*, uint, memory_order);
uint atomic_fetch_max_explicit(volatile threadgroup atomic_uint*, uint, memory_order);
}  // namespace metal
