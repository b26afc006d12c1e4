// Work stealing for tasks that are long enough to be handed to another thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace {

// One equal share of the tasks per thread. A thread takes tasks from the front of its own share, in
// memory order. A thread that has finished its share steals from the back of another thread's
// share, so that no thread waits long for one on a slower core or with slower access to memory.
class Shares {
 public:
  static constexpr int kMost = 64;  // threads

  // Call `run(task)` for tasks 0 to `count` - 1, until none is left.
  template <class F>
  void work(int64_t count, int thread, int threads, const F& run) {
    for (int behind = 0; behind < threads; ++behind) {
      const int whose = (thread + behind) % threads;
      const int64_t first = count * whose / threads, size = count * (whose + 1) / threads - first;
      for (int64_t at; (at = take(shares_[whose].taken, size, behind == 0)) >= 0;) run(first + at);
    }
  }

 private:
  static constexpr uint64_t kFront = 1, kBack = uint64_t(1) << 32;

  // Returns the index within a share of `size` tasks, or -1 if the share is empty.
  static int64_t take(std::atomic<uint64_t>& taken, int64_t size, bool own) {
    uint64_t counts = taken.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t front = int64_t(counts % kBack), back = int64_t(counts / kBack);
      if (front + back >= size) return -1;
      if (taken.compare_exchange_weak(counts, counts + (own ? kFront : kBack),
                                      std::memory_order_relaxed)) {
        return own ? front : size - 1 - back;
      }
    }
  }

  // Number of tasks taken from the front, plus kBack times the number taken from the back. Each
  // share is on its own cache line, because usually one thread writes it.
  struct alignas(64) Share {
    std::atomic<uint64_t> taken{0};
  };
  Share shares_[kMost];
};

}  // namespace
