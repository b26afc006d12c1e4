// Selects the level's kernels, and distributes rows over threads if that pays.

#include "elementwise.h"

#include "../levels.h"
#include "../linear/packed.h"
#include "../pool.h"
#include "../vectors.h"

INTERPOSER_FAMILY(ElementwiseKernels, elementwise, INTERPOSER_BFLOAT16_LEVELS)

namespace {

// Up to this number of elements, the calling thread alone is faster than waking others.
constexpr int64_t kFewElements = 1 << 15;

template <class Work>
struct Job {
  const Work* work;
  void (*run)(const Work&, int64_t first, int64_t last);
  int64_t count;
};

template <class Work>
void run_some(void* argument, int thread, int threads) {
  const Job<Work>& job = *static_cast<Job<Work>*>(argument);
  job.run(*job.work, job.count * thread / threads, job.count * (thread + 1) / threads);
}

template <class Work>
int32_t shared_out(const Work* work, void (*ElementwiseKernels::*kernel)(const Work&, int64_t,
                                                                         int64_t),
                   int64_t count) {
  const ElementwiseKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  const interposer_rows_of& rows = work->rows;
  const int64_t elements = rows.outer * rows.inner * rows.width;
  if (elements <= kFewElements) {
    (chosen->*kernel)(*work, 0, count);
    return kDone;
  }
  Job<Work> job = {work, chosen->*kernel, count};
  const int64_t most = interposer_num_threads();
  interposer_parallel(run_some<Work>, &job, int(most < count ? most : count));
  return kDone;
}

}  // namespace

extern "C" {

int32_t interposer_normalise(const interposer_norm* norm) {
  return shared_out(norm, &ElementwiseKernels::normalise, norm->rows.outer * norm->rows.inner);
}

int32_t interposer_gate(const interposer_gated* gated) {
  return shared_out(gated, &ElementwiseKernels::gate, gated->rows.outer * gated->rows.inner);
}

int32_t interposer_turn_heads(const interposer_heads* heads) {
  return shared_out(heads, &ElementwiseKernels::turn_heads, heads->rows.outer);
}

int32_t interposer_code(const interposer_coded* coded) {
  return shared_out(coded, &ElementwiseKernels::code, coded->rows.outer * coded->rows.inner);
}
}
