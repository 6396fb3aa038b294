// The instructions of NVIDIA GPUs of compute capability 8.0 and later that the kernels are made of.
// Fragments of matrices are laid out as in the PTX ISA, warp-level matrix instructions.

#ifndef EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kernels {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, of which those beyond `bytes` are written as zeros and not read.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes));
}

// Copies 16 bytes where the rest of their 128 is copied, too; those beyond `bytes` as zeros.
__device__ __forceinline__ void copy_async_of_line(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes));
}

// The same for 16, where what follows them is copied soon after.
__device__ __forceinline__ void copy_async_in_order(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ unsigned transpose_matrix(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1, const __nv_bfloat16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1, const __half*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same, added to nothing.
__device__ __forceinline__ void multiply_alone(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1, const __nv_bfloat16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

__device__ __forceinline__ void multiply_alone(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1, const __half*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

__device__ __forceinline__ unsigned pack(float low, float high, const __nv_bfloat16*) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&x);
}

__device__ __forceinline__ unsigned pack(float low, float high, const __half*) {
  __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&x);
}

__device__ __forceinline__ float2 unpack(unsigned x, const __nv_bfloat16*) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x));
}

__device__ __forceinline__ float2 unpack(unsigned x, const __half*) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}

// Each half of `a` times the same of `b`, rounded once.
__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b, const __nv_bfloat16*) {
  __nv_bfloat162 x = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a),
                             *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<unsigned*>(&x);
}

__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b, const __half*) {
  __half2 x = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<unsigned*>(&x);
}

// The lower and the upper halves of two words.
__device__ __forceinline__ unsigned lower_halves(unsigned a, unsigned b) {
  return __byte_perm(a, b, 0x5410);
}

__device__ __forceinline__ unsigned upper_halves(unsigned a, unsigned b) {
  return __byte_perm(a, b, 0x7632);
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float shuffle_xor(float x, int lanes) {
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}

__device__ __forceinline__ int shuffle(int x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

__device__ __forceinline__ float shuffle(float x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// Reads past the first-level cache, where another block's results can't be seen.
__device__ __forceinline__ float4 read_shared_result(const float4* p) { return __ldcg(p); }
__device__ __forceinline__ float2 read_shared_result(const float2* p) { return __ldcg(p); }
__device__ __forceinline__ uint4 read_shared_result(const uint4* p) { return __ldcg(p); }
__device__ __forceinline__ unsigned read_shared_result(const unsigned* p) { return __ldcg(p); }
__device__ __forceinline__ float read_shared_result(const float* p) { return __ldcg(p); }

// Counts one more, after all that the block has written before its last barrier; returns how many
// there were.
__device__ __forceinline__ int count_after_writes(int* counter) {
  int before;
  asm volatile("atom.release.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// Waits until other blocks have counted to `count`; after the next barrier the block sees what they
// had written.
__device__ __forceinline__ void await_count(const int* counter, int count) {
  int seen;
  do {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
}

// Writes 16 bytes of global memory at once: a plain store of values in hand may be taken apart.
__device__ __forceinline__ void write_global(uint4* p, uint4 x) { __stcg(p, x); }

}  // namespace kernels
#endif

namespace kernels {
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// Whether this block is the last of `blocks` to arrive at `counter`, and sees what the others have
// written. It sets the counter back to 0 for the next launch, so that counters are cleared once in
// the life of the process. `last` is in shared memory that the block is done with.
__device__ __forceinline__ bool arrives_last(const int* counter, int blocks, int* last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* mine = const_cast<int*>(counter);
    *last = atomicAdd(mine, 1) == blocks - 1;
    if (*last) *mine = 0;
  }
  __syncthreads();
  if (!*last) return false;
  __threadfence();
  return true;
}

// What an MLP makes of a gate and an up.
struct Silu {
  __device__ __forceinline__ static float gated(float gate, float up) {
    return gate / (1.f + power_of_two(-gate * kLog2e)) * up;
  }
};

// By the approximation with a tanh: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 * u)). With `gate` outside
// the cube, what overflows is infinite, and never infinity less infinity.
struct Gelu {
  __device__ __forceinline__ static float gated(float gate, float up) {
    constexpr float kTwice = 2.f * 0.7978845608f * kLog2e;
    const float u = gate * fmaf(gate * gate, 0.044715f, 1.f);
    return gate / (1.f + power_of_two(-u * kTwice)) * up;
  }
};

// That of GPT-OSS, for its constants.
struct ClampedSilu {
  __device__ __forceinline__ static float gated(float gate, float up) {
    const float most = 7.f, of = fminf(gate, most);
    return of / (1.f + power_of_two(-1.702f * of * kLog2e)) * (fminf(fmaxf(up, -most), most) + 1.f);
  }
};

// A pair `x` times a pair `by`; adds the squares of `x` to `sum`.
template <typename T>
__device__ __forceinline__ unsigned scaled(unsigned x, unsigned by, float& sum, const T* type) {
  const float2 a = unpack(x, type);
  sum = fmaf(a.y, a.y, fmaf(a.x, a.x, sum));
  return multiply_pair(x, by, type);
}

// The sum of a pair.
template <typename T>
__device__ __forceinline__ float sum_of(unsigned x, const T* type) {
  const float2 a = unpack(x, type);
  return a.x + a.y;
}

// Neighbours that are read and written at once.
template <typename E, int N>
struct alignas(N * sizeof(E)) Neighbours {
  E of[N];

  __device__ __forceinline__ static Neighbours at(const E* from) {
    return *reinterpret_cast<const Neighbours*>(from);
  }
  __device__ __forceinline__ void put(E* to) const { *reinterpret_cast<Neighbours*>(to) = *this; }
};

// The part of a product that a block gives: so many rows from `first` on, and of the outputs the
// part number `block`. Neighbours among the blocks share weights.
struct Share {
  int block, first, rows;

  template <int ROWS>
  __device__ __forceinline__ static Share of(int rows) {
    const int parts = (rows + ROWS - 1) / ROWS, first = blockIdx.x % parts * ROWS;
    return {int(blockIdx.x) / parts, first, rows - first < ROWS ? rows - first : ROWS};
  }
};

// Rows of the weights that a block multiplies with: half of them from `first` on, half from `second`.
struct Lines {
  long first, second;
};

// Rows one after the other; others begin where `start` says.
struct InOrder {
  static constexpr bool kInOrder = true;
};

// Rows that a list names.
struct Listed {
  static constexpr bool kInOrder = false;
  const int* of;
  __device__ __forceinline__ unsigned start(int row, int inputs) const {
    return unsigned(of[row]) * inputs;
  }
};

// What NORM says of the RMS norm before a product: there is none; the product multiplies its weights
// into the rows and sums up their squares; or so many blocks, which have made the rows, did that.
constexpr int kNoNorm = -1, kNormHere = 0;

// Sums of rows' squares by the blocks that have made the rows, [rows][NORM], of which there is an
// even number. A block of WARPS asks for them before all else and adds them up at the end: behind
// weights under way an answer takes as long as those do.
template <int NORM, int ROWS, int WARPS>
struct Squares {
  static constexpr int EACH = (ROWS + WARPS - 1) / WARPS, PAIRS = (NORM + 63) / 64;
  float2 of[EACH][PAIRS];

  __device__ __forceinline__ static int row(int i) { return threadIdx.x / 32 + i * WARPS; }

  __device__ __forceinline__ void ask(const float* sums, int rows) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int maker = j * 64 + threadIdx.x % 32 * 2;
        of[i][j] = make_float2(0.f, 0.f);
        if (row(i) < rows && maker < NORM)
          of[i][j] = *reinterpret_cast<const float2*>(sums + row(i) * NORM + maker);
      }
  }

  // Leaves each row's in `totals`.
  __device__ __forceinline__ void add_up(float* totals) const {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < PAIRS; j++) sum += of[i][j].x + of[i][j].y;
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) sum += shuffle_xor(sum, lanes);
      if (threadIdx.x % 32 == 0 && row(i) < ROWS) totals[row(i)] = sum;
    }
  }
};

struct NoSquares {
  __device__ __forceinline__ void ask(const float*, int) {}
  __device__ __forceinline__ void add_up(float*) const {}
};

template <int ROWS, int WARPS>
struct Squares<kNoNorm, ROWS, WARPS> : NoSquares {};

template <int ROWS, int WARPS>
struct Squares<kNormHere, ROWS, WARPS> : NoSquares {};
}  // namespace kernels
