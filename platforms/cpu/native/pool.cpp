#include "pool.h"

#include <sched.h>

#include <atomic>
#include <cstdlib>

namespace {

// libgomp's entry point for a parallel region, which compilers call. LLVM's OpenMP runtime also has
// it.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*Count)();

Parallel parallel = nullptr;
Count thread_num = nullptr, num_threads = nullptr, max_threads = nullptr;

struct Job {
  interposer_task task;
  void* argument;
};

void run(void* pointer) {
  Job* job = static_cast<Job*>(pointer);
  job->task(job->argument, thread_num(), num_threads());
}

// Number of polls, some microseconds, before a waiting thread yields the processor.
constexpr int kLooks = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class F>
void wait_until(const F& holds) {
  for (int looks = 0; !holds(); ++looks) {
    if (looks < kLooks) {
      pause();
    } else {
      sched_yield();
    }
  }
}

// Threads that wait for jobs from the first thread. Fields written by different threads are on
// different cache lines.
struct Team {
  void (*program)(void*);
  void* argument;
  int threads = 1;
  Job job = {};
  // Number of jobs so far, times kMost, plus the number of threads for the last job.
  alignas(64) std::atomic<uint64_t> posted{0};
  alignas(64) std::atomic<int> unfinished{0};
};

constexpr uint64_t kMost = 1 << 16;
constexpr uint64_t kEnd = kMost - 1;  // in place of a number of threads

// Team of the thread that runs a program; null while that thread runs a task itself.
thread_local Team* own_team = nullptr;

void post(Team& team, uint64_t threads) {
  const uint64_t count = team.posted.load(std::memory_order_relaxed) / kMost + 1;
  team.posted.store(count * kMost + threads, std::memory_order_release);
}

void serve(Team& team, int thread) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t word = seen;
    wait_until([&] { return (word = team.posted.load(std::memory_order_acquire)) != seen; });
    seen = word;
    const int threads = int(word % kMost);
    if (threads == int(kEnd)) return;
    if (thread >= threads) continue;  // the posted job can already be a newer one
    team.job.task(team.job.argument, thread, threads);
    team.unfinished.fetch_sub(1, std::memory_order_release);
  }
}

void run_member(void* pointer) {
  Team& team = *static_cast<Team*>(pointer);
  const int thread = thread_num();
  if (thread) return serve(team, thread);
  team.threads = num_threads();
  own_team = &team;
  team.program(team.argument);
  own_team = nullptr;
  post(team, kEnd);
}

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;

  ~Scratch() { std::free(memory); }
};

thread_local Scratch all_scratch[kPurposes];

}  // namespace

extern "C" {

void interposer_set_pool(void* region, void* number, void* count, void* limit) {
  bool whole = region && number && count && limit;
  parallel = whole ? reinterpret_cast<Parallel>(region) : nullptr;
  thread_num = reinterpret_cast<Count>(number);
  num_threads = reinterpret_cast<Count>(count);
  max_threads = reinterpret_cast<Count>(limit);
}

int interposer_num_threads() {
  if (own_team) return own_team->threads;
  return parallel ? max_threads() : 1;
}

void interposer_parallel(interposer_task task, void* argument, int threads) {
  if (parallel == nullptr || threads <= 1) return task(argument, 0, 1);
  Job job{task, argument};
  Team* team = own_team;
  if (team == nullptr) return parallel(run, &job, static_cast<unsigned>(threads), 0);
  if (threads > team->threads) threads = team->threads;
  if (threads == 1) return task(argument, 0, 1);
  team->job = job;
  team->unfinished.store(threads - 1, std::memory_order_relaxed);
  post(*team, uint64_t(threads));
  own_team = nullptr;  // a nested task must not use threads that are busy with this one
  task(argument, 0, threads);
  own_team = team;
  wait_until([&] { return team->unfinished.load(std::memory_order_acquire) == 0; });
}

void interposer_together(void (*program)(void*), void* argument) {
  const int threads = interposer_num_threads();
  if (threads <= 1 || own_team || threads >= int(kEnd)) return program(argument);
  Team team;
  team.program = program;
  team.argument = argument;
  parallel(run_member, &team, static_cast<unsigned>(threads), 0);
}

void* interposer_scratch(Purpose purpose, int64_t bytes) {
  Scratch& scratch = all_scratch[purpose];
  if (bytes > scratch.bytes) {
    std::free(scratch.memory);
    int64_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.memory = std::aligned_alloc(64, static_cast<size_t>(rounded));
    scratch.bytes = scratch.memory ? rounded : 0;
  }
  return scratch.memory;
}
}
