// Weights as numbers of half precision, (outputs, inputs), for products.cu.
//
// Which 4 of a lane's 8 neighbouring elements count as which k of an mma is the same for weights and
// rows, so each lane reads its 16 bytes as they lie.

namespace kernels {

template <typename T>
struct Plain {
  static constexpr int WIDTH = 64, SWAP = 4;
  static constexpr bool kBegins = false;

  const T* of;

  template <int OUTPUTS>
  __host__ __device__ static constexpr int stage() {
    return OUTPUTS * WIDTH * int(sizeof(T));
  }

  // Where 16-byte piece `piece` of row `row` lies in a stage; see `Product::place`.
  __device__ __forceinline__ static int place(int row, int piece) {
    return row * WIDTH + (piece ^ (row % 2 * 4)) * 8;
  }

  template <int OUTPUTS>
  __device__ __forceinline__ void fetch(unsigned char* stage, Lines lines, int inputs, int k,
                                        int lane) const {
    const int row = lane / 8, piece = lane % 8;
    T* to = reinterpret_cast<T*>(stage);
    const T* from = of + (unsigned(row) * inputs + k + piece * 8);
    const T* halves[2] = {from + lines.first * inputs, from + lines.second * inputs};
#pragma unroll
    for (int j = 0; j < OUTPUTS / 4; j++) {
      const unsigned below = j * 4 % (OUTPUTS / 2);
      copy_async(to + place(j * 4 + row, piece), halves[j * 4 / (OUTPUTS / 2)] + below * inputs, 16);
    }
  }

  __device__ __forceinline__ static uint4 read(const T* stage, int row, int piece) {
    return *reinterpret_cast<const uint4*>(stage + place(row, piece));
  }

  // Adds a stage's share; `rows` gives 8 columns of the rows.
  template <int TILES, int COLUMNS, typename READER>
  __device__ __forceinline__ void take(float (&output)[TILES][COLUMNS][4],
                                       const unsigned char* stage, int, int, int lane,
                                       READER rows) const {
    const T* weights = reinterpret_cast<const T*>(stage);
    const T* type = nullptr;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int piece = half * 4 + lane % 4;
      uint4 b[COLUMNS];
      rows(b, piece);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint4 upper = read(weights, t * 16 + lane / 4, piece);
        const uint4 lower = read(weights, t * 16 + 8 + lane / 4, piece);
        const unsigned early[4] = {upper.x, lower.x, upper.y, lower.y};
        const unsigned late[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          multiply(output[t][n], early, b[n].x, b[n].y, type);
          multiply(output[t][n], late, b[n].z, b[n].w, type);
        }
      }
    }
  }
};

}  // namespace kernels
