// Selects the level's kernels, and distributes heads and channels over threads if that pays.

#include "recurrence.h"

#include <atomic>

#include "../levels.h"
#include "../linear/packed.h"
#include "../pool.h"

INTERPOSER_FAMILY(RecurrenceKernels, recurrence, INTERPOSER_BFLOAT16_LEVELS)

namespace {

// Up to this number of processed state elements, the calling thread alone is faster than waking
// others.
constexpr int64_t kFewNumbers = 1 << 15;

template <class Call>
struct Job {
  const Call* call;
  bool (*run)(const Call&, int64_t first, int64_t last);
  std::atomic<bool> failed;
};

template <class Call>
void run_some(void* argument, int thread, int threads) {
  Job<Call>& job = *static_cast<Job<Call>*>(argument);
  const int64_t parts = parts_of(*job.call);
  if (!job.run(*job.call, parts * thread / threads, parts * (thread + 1) / threads)) {
    job.failed = true;
  }
}

template <class Call>
int32_t shared_out(const Call* call,
                   bool (*RecurrenceKernels::*kernel)(const Call&, int64_t, int64_t),
                   int64_t numbers) {
  const RecurrenceKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  const int64_t tokens = call->sequences.starts[call->sequences.count];
  Job<Call> job = {call, chosen->*kernel, {false}};
  const int64_t most = interposer_num_threads(), parts = parts_of(*call);
  const bool few = tokens * numbers <= kFewNumbers;
  interposer_parallel(run_some<Call>, &job, few ? 1 : int(most < parts ? most : parts));
  return job.failed ? kNoMemory : kDone;
}

}  // namespace

extern "C" {

int32_t interposer_convolve(const interposer_convolution* call) {
  return shared_out(call, &RecurrenceKernels::convolve, call->channels);
}

int32_t interposer_scan_states(const interposer_scan* call) {
  const int64_t numbers = call->heads * call->size * call->state;
  return shared_out(call, &RecurrenceKernels::scan, numbers);
}

int32_t interposer_apply_delta(const interposer_delta* call) {
  const int64_t numbers = call->value_heads * call->key_size * call->value_size;
  return shared_out(call, &RecurrenceKernels::delta, numbers);
}
}
