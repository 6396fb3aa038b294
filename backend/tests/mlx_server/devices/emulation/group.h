// A thread group on a CPU: every thread is a fiber, and a barrier hands over to the next one.
//
// Fibers run in order and switch at barriers alone, so a run is deterministic. A barrier that some
// thread of its group never reaches is a deadlock on a GPU; here it ends the process with a message.
//
// What needs no kernel is in group.cpp, which is compiled once.
#pragma once
#include <csetjmp>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

// The same bits as another type; Metal has it by this name.
template <typename To, typename From>
To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

namespace group {

constexpr int kLanes = 32;
constexpr size_t kStack = 1 << 18;

enum class Waits { nobody, warp, block, event, done };

struct Free {
  void operator()(char* memory) const { munmap(memory, kStack); }
};

// A context only starts a fiber: to switch by contexts asks the system for the signal mask each time.
struct Thread {
  ucontext_t start;
  bool started;
  jmp_buf place;
  std::unique_ptr<char, Free> stack;
  Waits waits;
  // Of a thread that waits for an event: whether it has come.
  std::function<bool()> happened;
  // What this thread shows to the other lanes of its warp.
  unsigned shown[8];
  const void* pointer;
};

extern std::vector<Thread> threads;
extern jmp_buf scheduler;
extern int current;

inline int lane() { return current % kLanes; }
inline Thread& self() { return threads[current]; }
inline Thread& peer(int lane) { return threads[current / kLanes * kLanes + lane]; }

void wait(Waits what);

// Begins a block: `go_on_until_stuck` has it run.
void begin(int size, std::function<void()> what);

// Returns when the block has ended, or waits for what it can't bring about itself. Says whether
// anything happened.
bool go_on_until_stuck();

bool has_ended();
[[noreturn]] void give_up();
void run(int size, std::function<void()> what);

inline void warp_barrier() { wait(Waits::warp); }
inline void block_barrier() { wait(Waits::block); }
void wait_until(std::function<bool()> happened);

// The value that `lane` shows while this thread shows `x`.
template <typename T>
T exchange(T x, int lane) {
  self().shown[0] = as_type<unsigned>(x);
  warp_barrier();
  T y = as_type<T>(peer(lane).shown[0]);
  warp_barrier();
  return y;
}

}  // namespace group

inline float float_of_bfloat16(uint16_t x) { return as_type<float>(uint32_t(x) << 16); }

inline uint16_t bfloat16_of_float(float x) {
  if (std::isnan(x)) return 0x7fc0;
  uint32_t bits = as_type<uint32_t>(x);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_of_float16(uint16_t x) { return float(as_type<_Float16>(x)); }
inline uint16_t float16_of_float(float x) { return as_type<uint16_t>(_Float16(x)); }
