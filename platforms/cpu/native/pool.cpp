#include "pool.h"

#include <cstdlib>

namespace {

// libgomp's entry, which compilers call for a parallel region; LLVM's runtime has it too.
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

int interposer_num_threads() { return parallel ? max_threads() : 1; }

void interposer_parallel(interposer_task task, void* argument, int threads) {
  if (parallel == nullptr || threads <= 1) return task(argument, 0, 1);
  Job job{task, argument};
  parallel(run, &job, static_cast<unsigned>(threads), 0);
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
