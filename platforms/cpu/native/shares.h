// Tasks that threads share out, each of which takes long enough to be handed over.
#pragma once

#include <atomic>
#include <cstdint>

namespace {

// As many equal shares as there are threads. Each thread takes its own from the front, as they follow
// each other in memory. Whoever is done takes from the back of another's share, so that nobody waits
// long for a thread whose core, or whose way to memory, is slower.
class Shares {
 public:
  static constexpr int kMost = 64;  // threads

  // Call `run(task)` for tasks of 0 to before `count`, until none is left.
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

  // Returns the place within a share of `size`, or -1 where nothing is left of it.
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

  // How many tasks were taken from the front, and times kBack how many from the back. Each on a line
  // of its own: mostly one thread writes there.
  struct alignas(64) Share {
    std::atomic<uint64_t> taken{0};
  };
  Share shares_[kMost];
};

}  // namespace
