// Chooses the level's kernels, and shares out rows among threads where that pays.

#include "elementwise.h"

#include "../levels.h"
#include "../linear/packed.h"
#include "../pool.h"
#include "../vectors.h"

#define INTERPOSER_DECLARE(level) extern "C" const ElementwiseKernels interposer_elementwise_##level

#if defined(__x86_64__)
INTERPOSER_DECLARE(avx2);
INTERPOSER_DECLARE(avx512);
INTERPOSER_DECLARE(avx512_vnni);
INTERPOSER_DECLARE(avx512_bf16);
#elif defined(__aarch64__)
INTERPOSER_DECLARE(neon);
INTERPOSER_DECLARE(dotprod);
INTERPOSER_DECLARE(bf16_i8mm);
#elif defined(__s390x__)
INTERPOSER_DECLARE(z14);
INTERPOSER_DECLARE(z15);
#endif

namespace {

const ElementwiseKernels* kernels() {
  switch (interposer_level()) {
#if defined(__x86_64__)
    case kAVX2:
      return &interposer_elementwise_avx2;
    case kAVX512:
      return &interposer_elementwise_avx512;
    case kAVX512VNNI:
      return &interposer_elementwise_avx512_vnni;
    case kAVX512BF16:
      return &interposer_elementwise_avx512_bf16;
#elif defined(__aarch64__)
    case kNEON:
      return &interposer_elementwise_neon;
    case kDotProd:
      return &interposer_elementwise_dotprod;
    case kBF16I8MM:
      return &interposer_elementwise_bf16_i8mm;
#elif defined(__s390x__)
    case kZ14:
      return &interposer_elementwise_z14;
    case kZ15:
      return &interposer_elementwise_z15;
#endif
    default:
      return nullptr;
  }
}

// Elements up to which the calling thread alone is faster than waking another.
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
