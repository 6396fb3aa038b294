// Products of few rows with a matrix of each head: see products.cu. The matrices of all heads are one
// weight, one below the other, and a block has outputs of one head.

namespace kernels {

// Rows that are so many elements apart.
struct Apart {
  static constexpr bool kInOrder = false;
  unsigned by;
  __device__ __forceinline__ unsigned start(int row, int) const { return row * by; }
};

// Elements from a head to the next, and from a row to the next.
struct Steps {
  int head, row;
};

// out = x @ weight^T of each of HEADS, whose weights have `lines` together. ROWS_FIRST: x has all
// heads of a row side by side, `width` elements, and out all rows of a head; else the other way round.
template <typename T, int TILES, int HELD, int WARPS, int STAGES, int HEADS, bool ROWS_FIRST,
          typename W>
__device__ __forceinline__ void multiply_heads(const T* x, W weight, T* out, int rows, int width,
                                               int inputs, int lines) {
  const int outputs = lines / HEADS;
  const Steps from = {ROWS_FIRST ? width / HEADS : rows * width, width};
  const Steps to = {ROWS_FIRST ? rows * outputs : outputs, ROWS_FIRST ? outputs : lines};
  Product<T, W, TILES, HELD, WARPS, STAGES, kNoNorm, Apart> product;
  const Share share = Share::of<HELD>(rows);
  const int parts = outputs / product.OUTPUTS, head = share.block / parts;
  const int first = share.block % parts * product.OUTPUTS;
  const long line = (long)head * outputs + first;
  product.weight = weight;
  product.x = x + (long)head * from.head + (long)share.first * from.row;
  product.at = {unsigned(from.row)};
  product.inputs = inputs;
  product.rows = share.rows;
  product.lines = {line, line + product.OUTPUTS / 2};
  const float* merged = product.run(Awaited(), [] {});
  constexpr int N = product.AT_ONCE, PIECES = product.OUTPUTS / N;
  T* own = out + (long)head * to.head + (long)share.first * to.row + first;
  for (int i = threadIdx.x; i < share.rows * PIECES; i += WARPS * 32) {
    const int row = i / PIECES, at = i % PIECES * N;
    float y[N];
    product.total(y, merged, row, at, 1.f);
    Neighbours<T, N> result;
#pragma unroll
    for (int e = 0; e < N; e++) result.of[e] = T(y[e]);
    result.put(own + (long)row * to.row + at);
  }
}

}  // namespace kernels
