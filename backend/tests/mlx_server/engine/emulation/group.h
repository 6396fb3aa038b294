// A thread group on a CPU: every thread is a fiber, and a barrier hands over to the next one.
//
// Fibers run in order and switch at barriers alone, so a run is deterministic. A barrier that some
// thread of its group never reaches is a deadlock on a GPU; here it ends the process with a message.
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

// Zeros that take no memory until they are touched, and then a page: thousands of stacks would be
// gigabytes, and `calloc` writes what has been in use before, as huge pages are written whole.
inline char* stack() {
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (memory == MAP_FAILED) std::abort();
#ifdef MADV_NOHUGEPAGE
  madvise(memory, kStack, MADV_NOHUGEPAGE);
#endif
  return static_cast<char*>(memory);
}

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

inline std::vector<Thread> threads;
inline jmp_buf scheduler;
inline int current;
inline std::function<void()> body;

inline int lane() { return current % kLanes; }
inline Thread& self() { return threads[current]; }
inline Thread& peer(int lane) { return threads[current / kLanes * kLanes + lane]; }

inline void wait(Waits what) {
  self().waits = what;
  if (_setjmp(self().place) == 0) _longjmp(scheduler, 1);
}

inline void entry() {
  body();
  self().waits = Waits::done;
  _longjmp(scheduler, 1);
}

inline void go_on(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline void resume(int first, int count) {
  for (int i = first; i < first + count; i++)
    if (threads[i].waits != Waits::done) {
      threads[i].waits = Waits::nobody;
      current = i;
      go_on(threads[i]);
    }
}

inline bool all(int first, int count, Waits what) {
  for (int i = first; i < first + count; i++)
    if (threads[i].waits != what) return false;
  return true;
}

// Begins a block: `go_on_until_stuck` has it run.
inline void begin(int size, std::function<void()> what) {
  body = std::move(what);
  threads.resize(size);
  for (auto& thread : threads) {
    if (!thread.stack) thread.stack.reset(stack());
    thread.waits = Waits::nobody;
    thread.started = false;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.get();
    thread.start.uc_stack.ss_size = kStack;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, entry, 0);
  }
}

inline void give_up() {
  std::fprintf(stderr, "deadlock: not every thread reached the same barrier\n");
  std::abort();
}

inline bool has_ended() { return all(0, threads.size(), Waits::done); }

// Returns when the block has ended, or waits for what it can't bring about itself. Says whether
// anything happened.
inline bool go_on_until_stuck() {
  int size = threads.size();
  bool ever = !threads[0].started;
  if (ever) resume(0, size);
  for (bool moved = true; moved && !has_ended();) {
    moved = false;
    for (int warp = 0; warp + kLanes <= size; warp += kLanes)
      while (all(warp, kLanes, Waits::warp)) {
        resume(warp, kLanes);
        moved = true;
      }
    for (int i = 0; i < size; i++)
      if (threads[i].waits == Waits::event && threads[i].happened()) {
        resume(i, 1);
        moved = true;
      }
    if (all(0, size, Waits::block)) {
      resume(0, size);
      moved = true;
    }
    ever = ever || moved;
  }
  return ever;
}

inline void run(int size, std::function<void()> what) {
  begin(size, std::move(what));
  go_on_until_stuck();
  if (!has_ended()) give_up();
}

inline void warp_barrier() { wait(Waits::warp); }
inline void block_barrier() { wait(Waits::block); }
inline void wait_until(std::function<bool()> happened) {
  self().happened = std::move(happened);
  wait(Waits::event);
}

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
