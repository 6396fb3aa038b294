#include "group.h"

namespace group {

std::vector<Thread> threads;
jmp_buf scheduler;
int current;
static std::function<void()> body;

// Zeros that take no memory until they are touched, and then a page: thousands of stacks would be
// gigabytes, and `calloc` writes what has been in use before, as huge pages are written whole.
static char* stack() {
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (memory == MAP_FAILED) std::abort();
#ifdef MADV_NOHUGEPAGE
  madvise(memory, kStack, MADV_NOHUGEPAGE);
#endif
  return static_cast<char*>(memory);
}

void wait(Waits what) {
  self().waits = what;
  if (_setjmp(self().place) == 0) _longjmp(scheduler, 1);
}

static void entry() {
  body();
  self().waits = Waits::done;
  _longjmp(scheduler, 1);
}

static void go_on(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

static void resume(int first, int count) {
  for (int i = first; i < first + count; i++)
    if (threads[i].waits != Waits::done) {
      threads[i].waits = Waits::nobody;
      current = i;
      go_on(threads[i]);
    }
}

static bool all(int first, int count, Waits what) {
  for (int i = first; i < first + count; i++)
    if (threads[i].waits != what) return false;
  return true;
}

void begin(int size, std::function<void()> what) {
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

void give_up() {
  std::fprintf(stderr, "deadlock: not every thread reached the same barrier\n");
  std::abort();
}

bool has_ended() { return all(0, threads.size(), Waits::done); }

bool go_on_until_stuck() {
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

void run(int size, std::function<void()> what) {
  begin(size, std::move(what));
  go_on_until_stuck();
  if (!has_ended()) give_up();
}

void wait_until(std::function<bool()> happened) {
  self().happened = std::move(happened);
  wait(Waits::event);
}

}  // namespace group
