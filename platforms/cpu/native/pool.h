// The threads that share out work: those of torch's own OpenMP runtime, once it was named.
#pragma once

#include <cstdint>

extern "C" {
typedef void (*interposer_task)(void* argument, int thread, int threads);

// Use the OpenMP runtime whose functions these are; null pointers mean to work alone.
void interposer_set_pool(void* parallel, void* thread_num, void* num_threads, void* max_threads);

// How many threads a task gets: what torch.set_num_threads said last.
int interposer_num_threads();

// Call `task` once on each of at most `threads` threads, and wait for all of them.
void interposer_parallel(interposer_task task, void* argument, int threads);

// Call `program` once, on this thread, and keep the others at hand meanwhile: what it shares out by
// `interposer_parallel` goes to them without waking them, so it pays for a row of short tasks.
void interposer_together(void (*program)(void* argument), void* argument);

// Memory of this thread that holds until it asks for `purpose` again; aligned to 64 bytes. Null if
// there is none.
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
  kPurposes
};
void* interposer_scratch(Purpose purpose, int64_t bytes);
}
