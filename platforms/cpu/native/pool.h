// Thread pool: the threads of torch's own OpenMP runtime, after the runtime was set.
#pragma once

#include <cstdint>

extern "C" {
typedef void (*interposer_task)(void* argument, int thread, int threads);

// Use the OpenMP runtime with these functions; with null pointers, run everything on one thread.
void interposer_set_pool(void* parallel, void* thread_num, void* num_threads, void* max_threads);

// Number of threads per task: the last value of torch.set_num_threads.
int interposer_num_threads();

// Call `task` once on each of at most `threads` threads, and wait for all of them.
void interposer_parallel(interposer_task task, void* argument, int threads);

// Call `program` once on this thread while the other threads keep polling for work. Calls of
// `interposer_parallel` inside `program` start without waking threads, which pays for a sequence of
// short tasks.
void interposer_together(void (*program)(void* argument), void* argument);

// Scratch memory of this thread, aligned to 64 bytes, valid until the thread's next request for the
// same `purpose`. Null if out of memory.
enum Purpose {
  kForRows,
  kForWeights,
  kForResults,
  kForBlocks,
  kForSlots,
  kForTiles,
  kForCodes,
  kForLayers,
  kForParts,
  kForCandidates,
  kForAdapters,
  kForExperts,
  kForMixtures,
  kPurposes
};
void* interposer_scratch(Purpose purpose, int64_t bytes);
}
