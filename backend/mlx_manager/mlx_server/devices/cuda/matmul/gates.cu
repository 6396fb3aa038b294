// Gates and ups of many rows, which MLX has multiplied: bound by reading them once. MLX's own
// operations go through the halves of a row element by element, and take twice as long.

namespace kernels {

// out = ACTIVATION of gate and up, the first and the last `width` of each row of `both`. A thread
// takes 8 of each, 16 bytes.
template <typename ACTIVATION, typename T>
__device__ __forceinline__ void gate_rows(const T* both, T* out, unsigned rows, unsigned width) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned pieces = width / 8, row = thread / pieces, at = thread % pieces * 8;
  if (row >= rows) return;
  const T* gates = both + (long)row * 2 * width + at;
  const uint4 gate4 = *reinterpret_cast<const uint4*>(gates);
  const uint4 up4 = *reinterpret_cast<const uint4*>(gates + width);
  const unsigned gate_pairs[4] = {gate4.x, gate4.y, gate4.z, gate4.w};
  const unsigned up_pairs[4] = {up4.x, up4.y, up4.z, up4.w};
  unsigned gated[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 gate = unpack(gate_pairs[i], both), up = unpack(up_pairs[i], both);
    gated[i] = pack(ACTIVATION::gated(gate.x, up.x), ACTIVATION::gated(gate.y, up.y), both);
  }
  const uint4 result = {gated[0], gated[1], gated[2], gated[3]};
  write_global(reinterpret_cast<uint4*>(out + (long)row * width + at), result);
}

}  // namespace kernels
