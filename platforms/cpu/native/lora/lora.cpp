// Selects the level's kernels, and distributes tokens and outputs over threads if that pays.

#include "lora.h"

#include "../levels.h"
#include "../linear/packed.h"
#include "../vectors.h"
#include "../pool.h"

INTERPOSER_FAMILY(LoraKernels, lora, INTERPOSER_BFLOAT16_LEVELS)

namespace {

// Up to this number of multiplications, the calling thread alone is faster than waking others.
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

constexpr int64_t kMostParts = 8;

// Expansion of all parts in one call per thread.
struct Expansions {
  Job<interposer_lora_expand> jobs[kMostParts];
  interposer_lora_expand calls[kMostParts];
  int64_t count;
};

void expand_some(void* argument, int thread, int threads) {
  Expansions& all = *static_cast<Expansions*>(argument);
  for (int64_t i = 0; i < all.count; ++i) {
    run_some<interposer_lora_expand>(&all.jobs[i], thread, threads);
  }
}

}  // namespace

extern "C" {

int32_t interposer_lora_shrink_rows(const interposer_lora_shrink* call) {
  return shared_out(call, &LoraKernels::shrink, call->inputs);
}

int32_t interposer_lora_expand_rows(const interposer_lora_expand* call) {
  return shared_out(call, &LoraKernels::expand, call->outputs);
}

int32_t interposer_add_low_rank(const interposer_low_rank_call* call) {
  const LoraKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  const interposer_low_rank& low = *call->low_rank;
  const int32_t type = static_cast<int32_t>(low.type);
  const int64_t ranks = low.rank * low.count;
  if (low.count > kMostParts) return kMismatch;
  float* shrunk =
      static_cast<float*>(interposer_scratch(kForAdapters, call->rows * ranks * int64_t(4)));
  if (shrunk == nullptr) return kNoMemory;
  interposer_lora_shrink first = {};
  first.x = call->x;
  first.a = low.a;
  first.ids = call->ids;
  first.y = shrunk;
  first.type = type;
  first.scale = 1;
  first.tokens = call->rows, first.rank = ranks, first.inputs = low.inputs;
  first.x_stride = call->x_stride;
  const int32_t failure = interposer_lora_shrink_rows(&first);
  if (failure) return failure;

  Expansions all = {};
  all.count = low.count;
  int64_t outputs = 0;
  for (int64_t i = 0; i < low.count; ++i) {
    const interposer_low_rank_part& part = low.parts[i];
    interposer_lora_expand& second = all.calls[i];
    second.x = shrunk + i * low.rank;
    second.b = part.b;
    second.ids = call->ids;
    second.y = static_cast<char*>(call->y) + part.offset * size_of(call->y_type);
    second.type = type;
    second.y_type = call->y_type;
    second.tokens = call->rows, second.rank = low.rank, second.outputs = part.outputs;
    second.x_stride = ranks, second.y_stride = call->y_stride;
    all.jobs[i] = {&second, chosen->expand};
    outputs += part.outputs;
  }
  const bool few = call->rows * low.rank * outputs <= kFewProducts;
  interposer_parallel(expand_some, &all, few ? 1 : interposer_num_threads());
  return kDone;
}
}
