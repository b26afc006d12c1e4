// Selects the level's kernels, and distributes outputs over threads.

#include "rounding.h"

#include <atomic>

#include "../levels.h"
#include "../linear/packed.h"
#include "../pool.h"

INTERPOSER_FAMILY(RoundingKernels, rounding, INTERPOSER_FLOAT_LEVELS)

namespace {

// Up to this number of weights, the calling thread alone is faster than waking others.
constexpr int64_t kFewNumbers = 1 << 15;

struct Job {
  const interposer_rounded* rounded;
  const RoundingKernels* kernels;
  std::atomic<bool> failed;
};

void round_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const int64_t outputs = job.rounded->outputs;
  const int64_t first = outputs * thread / threads, last = outputs * (thread + 1) / threads;
  if (!job.kernels->round(*job.rounded, first, last)) job.failed = true;
}

}  // namespace

extern "C" int32_t interposer_round(const interposer_rounded* rounded) {
  const RoundingKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  Job job = {rounded, chosen, {false}};
  const bool few = rounded->outputs * rounded->inputs <= kFewNumbers;
  interposer_parallel(round_some, &job, few ? 1 : interposer_num_threads());
  return job.failed ? kNoMemory : kDone;
}
