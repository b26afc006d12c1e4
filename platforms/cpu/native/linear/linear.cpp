// Selects the level's kernels, and distributes blocks of outputs and rows over threads.

#include <atomic>

#include "../levels.h"
#include "../pool.h"
#include "../shares.h"
#include "../vectors.h"
#include "packed.h"

INTERPOSER_FAMILY(LinearKernels, linear, INTERPOSER_LEVELS)

namespace {

// Up to this number of rows, the calling thread prepares them alone: waking threads takes longer.
constexpr int64_t kFewRows = 8;
// Rows per task if there are too few blocks for all threads.
constexpr int64_t kRowShare = 48;
// From this number of rows on, computing a block takes longer than reading it, so that tasks are
// claimed dynamically. With fewer rows, a thread reads consecutive blocks.
constexpr int64_t kManyRows = 32;

struct Job {
  const interposer_product* product = nullptr;
  const LinearKernels* kernels = nullptr;
  Prepared prepared = {};
  char* data = nullptr;
  int64_t row_bytes = 0;
  int32_t* sums = nullptr;
  std::atomic<bool> failed{false};
  std::atomic<int64_t> next{0};
  Shares shares;
};

void prepare_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const int64_t rows = job.product->rows;
  job.kernels->prepare_rows(*job.product, job.data, job.row_bytes, job.sums, rows * thread / threads,
                            rows * (thread + 1) / threads);
}

// Whole blocks per thread, unless that would leave threads idle for long.
struct Tasks {
  int64_t blocks, shares;

  Tasks(const interposer_product& product, int threads)
      : blocks(num_blocks(product.weight->outputs)), shares(1) {
    while (blocks * shares < 4 * threads && product.rows / (shares + 1) >= kRowShare) ++shares;
  }

  int64_t count() const { return blocks * shares; }

  // Run the tasks from `task` to `end` - 1.
  void run(Job& job, int64_t task, int64_t end) const {
    const int64_t rows = job.product->rows;
    while (task < end) {
      const int64_t share = task / blocks, block = task % blocks;
      const int64_t count = blocks - block < end - task ? blocks - block : end - task;
      if (!job.kernels->multiply(*job.product, job.prepared, block, block + count,
                                 rows * share / shares, rows * (share + 1) / shares)) {
        job.failed = true;
      }
      task += count;
    }
  }
};

void multiply_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const Tasks tasks(*job.product, threads);
  const bool few = job.product->rows < kManyRows;
  if (threads == 1 || (few && threads > Shares::kMost)) {
    return tasks.run(job, tasks.count() * thread / threads, tasks.count() * (thread + 1) / threads);
  }
  if (few) {
    return job.shares.work(tasks.count(), thread, threads,
                           [&](int64_t task) { tasks.run(job, task, task + 1); });
  }
  for (;;) {
    const int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks.count()) return;
    tasks.run(job, task, task + 1);
  }
}

}  // namespace

extern "C" int32_t interposer_linear(const interposer_product* product) {
  const interposer_packed& weight = *product->weight;
  if (weight.magic != kMagic) return kNotPacked;
  const bool codes = product->x_type == kInt8;
  if (codes && weight.format != kWeightInt8 && weight.format != kWeightInt4) return kMismatch;
  const int64_t groups = (weight.inputs + weight.group - 1) / weight.group;
  // Integer sums can cover whole rows.
  const bool by_group = product->x_scale_stride > 1;
  if (by_group && (codes || product->x_scale_stride != groups)) return kMismatch;
  const LinearKernels* chosen = kernels();
  if (chosen == nullptr) return kNoKernels;
  if (product->rows == 0) return kDone;

  Job job;
  job.product = product;
  job.kernels = chosen;
  job.row_bytes = chosen->prepared_row_bytes(*product);
  job.prepared.data = product->x;
  job.prepared.stride = product->x_stride * size_of(product->x_type);
  job.prepared.num_groups = groups;
  const int threads = interposer_num_threads();
  if (job.row_bytes) {
    const int64_t data_bytes = round_up(product->rows * job.row_bytes, 64);
    const int64_t sum_bytes = codes ? product->rows * job.prepared.num_groups * 4 : 0;
    job.data = static_cast<char*>(interposer_scratch(kForRows, data_bytes + sum_bytes));
    if (job.data == nullptr) return kNoMemory;
    job.sums = reinterpret_cast<int32_t*>(job.data + data_bytes);
    interposer_parallel(prepare_some, &job, product->rows <= kFewRows ? 1 : threads);
    job.prepared.data = job.data;
    job.prepared.stride = job.row_bytes;
    job.prepared.sums = job.sums;
  }
  interposer_parallel(multiply_some, &job, threads);
  return job.failed ? kNoMemory : kDone;
}
