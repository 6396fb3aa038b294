#include "cuda.h"

Index blockIdx, gridDim, blockDim;

namespace kernels {

unsigned char shared[256 * 1024];
std::deque<Copies> committed[1024];
Copies pending[1024];
bool hidden[sizeof shared / 16];
std::vector<unsigned> unshown[1024];

static void forget_copies() {
  for (auto& copies : committed) copies.clear();
  for (auto& copies : pending) copies.clear();
  for (auto& pieces : unshown) pieces.clear();
  std::memset(hidden, 0, sizeof hidden);
}

void copy_async(void* to, const void* from, int bytes) {
  pending[group::current].push_back({to, from, bytes});
}
void commit_copies() {
  committed[group::current].push_back(std::move(pending[group::current]));
  pending[group::current].clear();
}
void wait_copies_but(int last) {
  auto& groups = committed[group::current];
  for (; int(groups.size()) > last; groups.pop_front())
    for (auto& copy : groups.front()) {
      std::memset(copy.to, 0, copy.size);
      std::memcpy(copy.to, copy.from, copy.bytes);
      unsigned piece = shared_address(copy.to) / 16;
      hidden[piece] = true;
      unshown[group::current].push_back(piece);
    }
}

void load(unsigned (&r)[4], const void* row, bool transposed) {
  group::self().pointer = row;
  group::warp_barrier();
  int major = group::lane() / 4, minor = group::lane() % 4 * 2;
  for (int i = 0; i < 4; i++) {
    uint16_t pair[2];
    for (int e = 0; e < 2; e++) {
      int from = transposed ? minor + e : major, at = transposed ? major : minor + e;
      pair[e] = static_cast<const uint16_t*>(group::peer(i * 8 + from).pointer)[at];
    }
    std::memcpy(&r[i], pair, 4);
  }
  group::warp_barrier();
}

unsigned transpose_matrix(unsigned x) {
  group::self().shown[0] = x;
  group::warp_barrier();
  int major = group::lane() / 4, minor = group::lane() % 4 * 2;
  uint16_t pair[2];
  for (int e = 0; e < 2; e++) {
    unsigned from = group::peer((minor + e) * 4 + major / 2).shown[0];
    pair[e] = uint16_t(from >> major % 2 * 16);
  }
  group::warp_barrier();
  unsigned y;
  std::memcpy(&y, pair, 4);
  return y;
}

bool any_lane(bool x) {
  group::self().shown[0] = x;
  group::warp_barrier();
  bool any = false;
  for (int i = 0; i < group::kLanes; i++) any = any || group::peer(i).shown[0];
  group::warp_barrier();
  return any;
}

template void multiply(float (&)[4], const unsigned (&)[4], unsigned, unsigned,
                       const __nv_bfloat16*);
template void multiply(float (&)[4], const unsigned (&)[4], unsigned, unsigned, const __half*);

namespace emulated {

std::deque<Products> committed_products[1024];
Products pending_products[1024];
std::map<float*, std::vector<float>> accumulators[1024];
bool may_multiply[1024];

void forget_products() {
  for (auto& products : committed_products) products.clear();
  for (auto& products : pending_products) products.clear();
  for (auto& values : accumulators) values.clear();
  for (bool& may : may_multiply) may = false;
}

void show_to_products() {
  for (unsigned piece : unshown[group::current]) hidden[piece] = false;
  unshown[group::current].clear();
}

void begin_products() { may_multiply[group::current] = true; }

void commit_products() {
  committed_products[group::current].push_back(std::move(pending_products[group::current]));
  pending_products[group::current].clear();
}

static bool in_use(const float* d) {
  for (auto& products : committed_products[group::current])
    for (auto& product : products)
      if (product.d == d) return true;
  for (auto& product : pending_products[group::current])
    if (product.d == d) return true;
  return false;
}

void wait_products_but(int last) {
  may_multiply[group::current] = false;
  auto& groups = committed_products[group::current];
  while (int(groups.size()) > last) {
    Products done = std::move(groups.front());
    groups.pop_front();
    for (size_t n = 0; n < done.size(); n++) {
      PendingProduct& product = done[n];
      auto& values = accumulators[group::current][product.d];
      bool sound = true;
      for (auto& [offset, bytes] : product.read) sound = sound && piece_at(offset) == bytes;
      for (size_t i = 0; i < values.size(); i++) {
        float found = sound ? product.found[i] : std::nanf("");
        values[i] = product.add ? values[i] + found : found;
      }
      bool more = in_use(product.d);
      for (size_t m = n + 1; m < done.size(); m++) more = more || done[m].d == product.d;
      if (more) continue;
      std::copy(values.begin(), values.end(), product.d);
      accumulators[group::current].erase(product.d);
    }
  }
}

}  // namespace emulated

}  // namespace kernels

// A block that waits for others, while they run: all that is its own.
struct Waiting {
  Index place;
  std::vector<group::Thread> threads;
  std::vector<unsigned char> shared;
  std::vector<std::deque<kernels::Copies>> committed;
  std::vector<kernels::Copies> pending;

  // Of the block that runs; to set it aside, and to have it back.
  void exchange(int size) {
    std::swap(place, blockIdx);
    std::swap(threads, group::threads);
    std::swap_ranges(shared.begin(), shared.end(), kernels::shared);
    for (int i = 0; i < size; i++) {
      std::swap(committed[i], kernels::committed[i]);
      std::swap(pending[i], kernels::pending[i]);
    }
  }
};

void launch(Index grid, Index block, std::function<void()> kernel) {
  gridDim = {grid.x / block.x, grid.y / block.y, grid.z / block.z};
  blockDim = block;
  std::deque<Waiting> waiting;
  // The last first: a block that needs what others make shows whether it waits for them.
  for (int y = gridDim.y - 1; y >= 0; y--)
    for (int x = gridDim.x - 1; x >= 0; x--) {
      blockIdx = {x, y, 0};
      // Not a number in every format: what is read before it is written shows.
      std::memset(kernels::shared, 0xff, sizeof kernels::shared);
      kernels::forget_copies();
      kernels::forget_products();
      group::begin(block.x, kernel);
      group::go_on_until_stuck();
      if (group::has_ended()) continue;
      Waiting own{{}, {}, std::vector<unsigned char>(sizeof kernels::shared)};
      own.committed.resize(block.x);
      own.pending.resize(block.x);
      waiting.push_back(std::move(own));
      waiting.back().exchange(block.x);
    }
  for (size_t idle = 0; !waiting.empty();) {
    Waiting own = std::move(waiting.back());
    waiting.pop_back();
    own.exchange(block.x);
    idle = group::go_on_until_stuck() ? 0 : idle + 1;
    if (!group::has_ended()) {
      if (idle > waiting.size()) group::give_up();
      own.exchange(block.x);
      waiting.push_front(std::move(own));
    }
  }
}
