// What goes with the warpgroup matrix instructions of hopper.py.

#ifndef EMULATED
namespace kernels {

// Orders what this thread wrote to shared memory before the group products that come after a
// barrier.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before the first product, and before one that uses registers written since the last.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from reading results, or from writing operands, on the other side of a wait.
template <int N>
__device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void settle(unsigned (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// Where threads meet whose arrival and wait lie apart: a barrier object in shared memory, which is
// prepared for as many arrivals as make a phase.
__device__ __forceinline__ void prepare_meeting(unsigned long long* meeting, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(meeting)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive_at(unsigned long long* meeting) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(meeting))
               : "memory");
}

// Waits until phase number `phase` is complete; none further is, before this thread arrives.
__device__ __forceinline__ void wait_at(unsigned long long* meeting, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(
          shared_address(meeting)),
      "r"(phase & 1)
      : "memory");
}

}  // namespace kernels
#endif

namespace kernels {

// Describes a swizzled tile at `start`, which may be some elements of K into it: 32 bytes for each
// 16 of them, or, across, 16 rows. `next` is the bytes to the next 64 columns of a tile across.
__device__ __forceinline__ unsigned long long describe_tile(const void* start, int next = 16) {
  return (unsigned long long)((shared_address(start) & 0x3ffff) >> 4) |
         (unsigned long long)(next >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// The block's dynamic shared memory from where a tile may begin: up to 1 008 bytes in.
__device__ __forceinline__ unsigned char* tiles_in_shared_memory() {
  extern __shared__ __align__(16) unsigned char shared[];
  return shared + (1024 - shared_address(shared) % 1024) % 1024;
}

// Where 16-byte piece `piece` of row `row` lies in a swizzled tile, in bytes.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * 128 + ((piece ^ row % 8) << 4);
}

}  // namespace kernels
