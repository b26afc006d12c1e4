// Steps, waiting, and reports of missing ranks.

#include "segment.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace segment {
namespace {

// A rank at the same step arrives within microseconds. After spinning, yield the processor, and
// finally sleep: waking a sleeper takes tens of microseconds.
constexpr int64_t kSpin = 20'000, kYield = 500'000, kSleep = 100'000'000;  // nanoseconds
constexpr int kLooks = 32;                                                 // polls per clock read

thread_local interposer_interrupt interrupt = nullptr;
thread_local void* interrupt_argument = nullptr;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)

// Not a private futex: other processes wait on it.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t nanoseconds) {
  const timespec limit = {time_t(nanoseconds / 1'000'000'000), long(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Start time of a process; -1 if the process does not exist or is a zombie.
int64_t started(int64_t process) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(process));
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return -1;
  const size_t count = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[count] = 0;
  // The process name before the fields can contain anything, even parentheses.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == 0 || at[2] == 'Z' || at[2] == 'X') return -1;
  ++at;
  for (int field = 3; field < 22 && at; ++field) at = std::strchr(at + 1, ' ');
  return at ? std::atoll(at + 1) : -1;
}

#else

void sleep_on(std::atomic<uint32_t>&, uint32_t, int64_t) { usleep(200); }
void wake(std::atomic<uint32_t>&) {}
int64_t started(int64_t process) { return kill(pid_t(process), 0) == 0 || errno == EPERM ? 0 : -1; }

#endif

uint64_t packed(int32_t kind, int teller, uint32_t about) {
  return uint64_t(about) << 32 | uint64_t(teller) << 8 | uint64_t(kind);
}

}  // namespace

Segment::Segment(char* memory, int rank, int size, double timeout_seconds)
    : rank_(rank), size_(size), memory_(memory), timeout_(int64_t(timeout_seconds * 1e9)) {
  // With fewer processors than ranks, a spinning rank would block the ranks that it waits for.
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  spin_ = size <= processors ? kSpin : 0;
  member(rank).process = getpid();
  member(rank).started = started(getpid());
}

Segment::~Segment() {
  member(rank_).left = 1;
  wake(member(rank_).arrived);
  munmap(memory_, size_t(interposer_shared_bytes(size_)));
}

int32_t Segment::kind() const {
  return int32_t(header().failure.load(std::memory_order_acquire) & 255);
}

int32_t Segment::begin() const { return kind(); }

interposer_failure Segment::failure() const {
  const uint64_t found = header().failure.load(std::memory_order_acquire);
  return {int32_t(found & 255), int32_t(found >> 8 & 255), uint32_t(found >> 32)};
}

// Record the first failure, and wake all sleepers.
int32_t Segment::fail(int32_t kind, uint32_t about) {
  uint64_t none = 0;
  header().failure.compare_exchange_strong(none, packed(kind, rank_, about));
  for (int rank = 0; rank < size_; ++rank) wake(member(rank).arrived);
  return this->kind();
}

uint32_t Segment::late() const {
  uint32_t found = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !came(rank)) found |= 1u << rank;
  }
  return found;
}

// Ranks among `among` whose process has ended.
uint32_t Segment::dead(uint32_t among) const {
  uint32_t found = 0;
  const Member& own = member(rank_);
  for (int rank = 0; rank < size_; ++rank) {
    const Member& other = member(rank);
    if (!(among >> rank & 1)) continue;
    const int64_t process = other.process.load(), began = other.started.load();
    // A thread of this process. Some emulators report another start time of the process per thread.
    if (process == own.process.load() && began == own.started.load()) continue;
    if (started(process) != began) found |= 1u << rank;
  }
  return found;
}

// Systems can hide processes of other users or containers.
void Segment::watch() { seen_ = ~dead(~0u); }

int32_t Segment::wait_for(int rank) {
  const int64_t began = now();
  int64_t passed = 0;
  while (passed < kYield) {
    for (int look = 0; look < kLooks; ++look) {
      if (came(rank)) return kNothingLost;
      pause();
      if (passed >= spin_) {
        sched_yield();
        break;
      }
    }
    passed = now() - began;
  }
  Member& other = member(rank);
  for (;;) {
    if (came(rank)) return kNothingLost;
    if (const int32_t kind = this->kind()) return kind;
    if (interrupt && interrupt(interrupt_argument)) return fail(kRankInterrupted, 1u << rank_);
    const uint32_t missing = late();
    uint32_t left = 0;
    for (int who = 0; who < size_; ++who) {
      if ((missing >> who & 1) && member(who).left.load()) left |= 1u << who;
    }
    if (left & ~late()) continue;  // arrived, and left afterwards
    if (left) return fail(kRankLeft, left);
    const uint32_t gone = dead(missing & seen_) & late();
    if (gone) return fail(kRankDead, gone);
    passed = now() - began;
    if (passed >= timeout_) {
      const uint32_t lost = late();
      if (lost == 0) continue;
      return fail(kRankLate, lost);
    }
    const int64_t rest = timeout_ - passed;
    other.sleepers.fetch_add(1);
    const uint32_t at = other.arrived.load();
    if (int32_t(at - step_) < 0) sleep_on(other.arrived, at, rest < kSleep ? rest : kSleep);
    other.sleepers.fetch_sub(1);
  }
}

int32_t Segment::pass(uint64_t call) {
  Member& own = member(rank_);
  own.calls[step_ % 2].store(call, std::memory_order_relaxed);
  // Sequentially consistent, as in the sleeper: one of the two sees the other's write.
  own.arrived.store(step_);
  if (own.sleepers.load()) wake(own.arrived);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_ || came(rank)) continue;
    if (const int32_t lost = wait_for(rank)) return lost;
  }
  uint32_t others = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (member(rank).calls[step_ % 2].load(std::memory_order_relaxed) != call) others |= 1u << rank;
  }
  return others ? disagree(others) : int32_t(kNothingLost);
}

}  // namespace segment

extern "C" {

int64_t interposer_shared_bytes(int size) {
  return segment::kSlots + int64_t(size) * 2 * segment::kSlot;
}

void interposer_set_interrupt(interposer_interrupt function, void* argument) {
  segment::interrupt = function;
  segment::interrupt_argument = argument;
}
}
