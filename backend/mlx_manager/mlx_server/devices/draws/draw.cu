// What draw.h needs of CUDA.

#define FUNCTION __device__ __forceinline__
#define SHARED
#define GLOBAL
#define LOCAL
#define UNROLL _Pragma("unroll")

namespace kernels {

typedef unsigned Counter;
typedef unsigned long long Wide;

FUNCTION void clear(Counter* counter) { *counter = 0; }
FUNCTION unsigned read(const Counter* counter) { return *counter; }
FUNCTION void add(Counter* counter, unsigned x) { atomicAdd(counter, x); }
FUNCTION void raise(Counter* counter, unsigned x) { atomicMax(counter, x); }
FUNCTION void meet() { __syncthreads(); }

FUNCTION unsigned bits_of(float x) { return __float_as_uint(x); }
FUNCTION float float_of(unsigned bits) { return __uint_as_float(bits); }
// Minus infinity.
FUNCTION float lowest() { return float_of(0xff800000u); }
FUNCTION float larger(float a, float b) { return fmaxf(a, b); }
FUNCTION float smaller(float a, float b) { return fminf(a, b); }
FUNCTION int from_lane(int x, int lane) { return shuffle(x, lane); }
FUNCTION float from_lane(float x, int lane) {
  return float_of(unsigned(shuffle(int(bits_of(x)), lane)));
}

// Eight neighbours of a row; minus infinity beyond its end.
template <typename T>
struct Piece {
  __align__(16) T elements[8];

  FUNCTION float at(int j) const { return float(elements[j]); }

  FUNCTION void take(const T* from, int count, bool aligned) {
    if (aligned && count >= 8) {
      UNROLL
      for (int i = 0; i < int(sizeof(T)) / 2; i++)
        reinterpret_cast<uint4*>(elements)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
      UNROLL
      for (int j = 0; j < 8; j++) elements[j] = j < count ? from[j] : T(lowest());
    }
  }
};

template <typename T>
FUNCTION bool pieces_are_aligned(const T* row, int vocabulary) {
  return vocabulary % 8 == 0 && reinterpret_cast<unsigned long long>(row) % 16 == 0;
}

template <typename S>
FUNCTION S* shared_by_block() {
  extern __shared__ __align__(16) unsigned char shared[];
  return reinterpret_cast<S*>(shared);
}

}  // namespace kernels
