// Chooses the level's kernels, and shares out tokens and outputs among threads where that pays.

#include "lora.h"

#include "../levels.h"
#include "../linear/packed.h"
#include "../pool.h"

INTERPOSER_FAMILY(LoraKernels, lora, INTERPOSER_BFLOAT16_LEVELS)

namespace {

// Products up to which the calling thread alone is faster than waking another.
constexpr int64_t kFewProducts = 1 << 17;

template <class Call>
struct Job {
  const Call* call;
  void (*run)(const Call&, int64_t first, int64_t last);
};

template <class Call>
void run_some(void* argument, int thread, int threads) {
  const Job<Call>& job = *static_cast<Job<Call>*>(argument);
  const int64_t parts = parts_of(*job.call);
  job.run(*job.call, parts * thread / threads, parts * (thread + 1) / threads);
}

template <class Call>
int32_t shared_out(const Call* call, void (*LoraKernels::*kernel)(const Call&, int64_t, int64_t),
                   int64_t width) {
  const LoraKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  Job<Call> job = {call, chosen->*kernel};
  const int64_t most = interposer_num_threads(), parts = parts_of(*call);
  const bool few = call->tokens * call->rank * width <= kFewProducts;
  interposer_parallel(run_some<Call>, &job, few ? 1 : int(most < parts ? most : parts));
  return kDone;
}

}  // namespace

extern "C" {

int32_t interposer_lora_shrink_rows(const interposer_lora_shrink* call) {
  return shared_out(call, &LoraKernels::shrink, call->inputs);
}

int32_t interposer_lora_expand_rows(const interposer_lora_expand* call) {
  return shared_out(call, &LoraKernels::expand, call->outputs);
}
}
