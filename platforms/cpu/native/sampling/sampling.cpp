// Selects the level's kernels, and distributes rows and parts of rows over threads if that pays.

#include "sampling.h"

#include <atomic>
#include <cmath>

#include "../levels.h"
#include "../linear/packed.h"
#include "../pool.h"

INTERPOSER_FAMILY(SamplingKernels, sampling, INTERPOSER_FLOAT_LEVELS)

namespace {

// Up to this number of elements, the calling thread alone is faster than waking others.
constexpr int64_t kFewElements = 1 << 15;

template <class Work>
struct Job {
  const Work& work;  // called with the first and the last piece
  int64_t pieces;
};

template <class Work>
void run_some(void* argument, int thread, int threads) {
  const Job<Work>& job = *static_cast<Job<Work>*>(argument);
  job.work(job.pieces * thread / threads, job.pieces * (thread + 1) / threads);
}

template <class Work>
void shared_out(int64_t elements, int64_t pieces, const Work& work) {
  if (elements <= kFewElements || pieces <= 1) return work(0, pieces);
  Job<Work> job = {work, pieces};
  const int64_t most = interposer_num_threads();
  interposer_parallel(run_some<Work>, &job, int(most < pieces ? most : pieces));
}

constexpr int64_t parts_of(int64_t width) { return (width + kPart - 1) / kPart; }

// Calls `take(row, first, last)` for parts of rows.
template <class Take>
void in_parts(int64_t width, int64_t from, int64_t to, const Take& take) {
  const int64_t parts = parts_of(width);
  for (int64_t part = from; part < to; ++part) {
    const int64_t first = part % parts * kPart, rest = width - first;
    take(part / parts, part, first, first + (rest < kPart ? rest : kPart));
  }
}

struct Row {
  Winner likeliest;
  double log_sum;  // log of the sum of exp(logit - peak)
  bool is_random;
  Draw draw;
};

// Largest logit of a row from the peaks of its parts; the first NaN if there is one.
Winner summit(const SamplingKernels& kernels, const interposer_sample& sample, int64_t row,
              const Peak* peaks, double& log_sum) {
  const int64_t parts = parts_of(sample.width);
  int64_t best = 0;
  for (int64_t part = 1; part < parts; ++part) {
    if (peaks[part].value > peaks[best].value) best = part;
  }
  const float highest = peaks[best].value;
  double sum = 0;
  for (int64_t part = 0; part < parts; ++part) {
    sum += peaks[part].sum * std::exp(double(peaks[part].value) - highest);
  }
  log_sum = std::log(sum);
  int64_t index = -1;
  if (std::isnan(sum)) index = kernels.place(sample, row, 0, sample.width, NAN);
  if (index >= 0) return {NAN, index};
  const int64_t first = best * kPart, rest = sample.width - first;
  index = kernels.place(sample, row, first, first + (rest < kPart ? rest : kPart), highest);
  return {highest, index < 0 ? 0 : index};
}

}  // namespace

extern "C" {

int32_t interposer_sample_tokens(const interposer_sample* given) {
  const SamplingKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  const interposer_sample& sample = *given;
  if (sample.rows == 0) return kDone;
  const int64_t parts = parts_of(sample.width), pieces = sample.rows * parts;
  const int64_t elements = sample.rows * sample.width;
  const int64_t bytes = sample.rows * int64_t(sizeof(Row)) +
                        pieces * int64_t(sizeof(Winner) + sizeof(Peak));
  Row* rows = static_cast<Row*>(interposer_scratch(kForParts, bytes));
  if (rows == nullptr) return kNoMemory;
  Winner* winners = reinterpret_cast<Winner*>(rows + sample.rows);
  Peak* peaks = reinterpret_cast<Peak*>(winners + pieces);

  shared_out(elements, pieces, [&](int64_t from, int64_t to) {
    in_parts(sample.width, from, to, [&](int64_t row, int64_t part, int64_t first, int64_t last) {
      peaks[part] = chosen->survey(sample, row, first, last);
    });
  });
  bool any_random = false;
  for (int64_t row = 0; row < sample.rows; ++row) {
    Row& own = rows[row];
    own.likeliest = summit(*chosen, sample, row, peaks + row * parts, own.log_sum);
    const bool is_finite = std::fabs(own.likeliest.value) <= __FLT_MAX__;
    own.is_random = sample.temperature && sample.temperature[row] > 0 && is_finite;
    any_random |= own.is_random;
    sample.tokens[row] = own.likeliest.index;
    // Minus the logarithm, or NaN if the peak is not finite.
    const double above = own.likeliest.value - own.likeliest.value;
    if (sample.logprobs) sample.logprobs[row] = float(above - own.log_sum);
  }
  if (!any_random) return kDone;

  std::atomic<bool> failed{false};
  shared_out(elements, sample.rows, [&](int64_t from, int64_t to) {
    void* memory = interposer_scratch(kForCandidates, prepare_bytes(sample.width));
    if (memory == nullptr) failed = true;
    for (int64_t row = from; row < to && memory; ++row) {
      if (!rows[row].is_random) continue;
      rows[row].draw = chosen->prepare(sample, row, rows[row].likeliest, memory);
    }
  });
  if (failed) return kNoMemory;
  shared_out(elements, pieces, [&](int64_t from, int64_t to) {
    Winner best = {};
    int64_t of = -1;
    in_parts(sample.width, from, to, [&](int64_t row, int64_t part, int64_t first, int64_t last) {
      if (!rows[row].is_random) return;
      // The thread's best token so far excludes more of the following ones.
      if (of != row) best = rows[row].draw.start;
      of = row;
      chosen->draw(sample, row, first, last, rows[row].draw, best);
      winners[part] = best;
    });
  });
  for (int64_t row = 0; row < sample.rows; ++row) {
    if (!rows[row].is_random) continue;
    Winner best = rows[row].draw.start;
    for (const Winner* winner = winners + row * parts; winner < winners + (row + 1) * parts;
         ++winner) {
      const bool is_first = winner->value == best.value && winner->index < best.index;
      if (winner->value > best.value || is_first) best = *winner;
    }
    sample.tokens[row] = best.index;
    if (sample.logprobs) {
      const double above = double(chosen->logit(sample, row, best.index)) - rows[row].draw.peak;
      sample.logprobs[row] = float(above - rows[row].log_sum);
    }
  }
  return kDone;
}

int32_t interposer_penalise(const interposer_penalties* given) {
  const SamplingKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  const interposer_penalties& penalties = *given;
  const int64_t pieces = penalties.rows * parts_of(penalties.width);
  shared_out(penalties.rows * penalties.width, pieces, [&](int64_t from, int64_t to) {
    in_parts(penalties.width, from, to, [&](int64_t row, int64_t, int64_t first, int64_t last) {
      chosen->penalise(penalties, row, first, last);
    });
  });
  return kDone;
}

int32_t interposer_route(const interposer_routes* given) {
  const SamplingKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  const interposer_routes& routes = *given;
  std::atomic<bool> failed{false};
  shared_out(routes.rows * routes.width, routes.rows, [&](int64_t from, int64_t to) {
    void* memory = interposer_scratch(kForCandidates, route_bytes(routes.width));
    if (memory == nullptr) {
      failed = true;
    } else {
      chosen->route(routes, from, to, memory);
    }
  });
  return failed ? kNoMemory : kDone;
}
}
