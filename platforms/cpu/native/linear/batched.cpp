// Batched GEMM: one packed weight per head.

#include <atomic>

#include "../levels.h"
#include "../pool.h"
#include "../vectors.h"
#include "packed.h"

namespace of_batches {
INTERPOSER_FAMILY(LinearKernels, linear, INTERPOSER_LEVELS)
}

namespace {

struct Job {
  const interposer_batch* batch;
  const LinearKernels* kernels;
  std::atomic<bool> failed{false};
};

interposer_product product_of(const interposer_batch& batch, int64_t head) {
  const int size = size_of(batch.out_type);
  const interposer_packed& first = *batch.weights;
  interposer_product product = {};
  product.weight = at<interposer_packed>(&first, head * first.bytes);
  if (head == 0) product.weight = &first;
  product.x = static_cast<const char*>(batch.x) + head * batch.head_stride * size_of(batch.x_type);
  product.x_type = batch.x_type;
  product.out_type = batch.out_type;
  if (batch.x_scales) {
    product.x_scales = batch.x_scales + head * batch.rows;
    product.x_scale_stride = 1;
  }
  product.rows = batch.rows;
  product.x_stride = batch.row_stride;
  product.out = static_cast<char*>(batch.out) + head * batch.out_head_stride * size;
  product.out_stride = batch.out_row_stride;
  return product;
}

// A head is a short GEMM, computed by one thread.
void multiply_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const interposer_batch& batch = *job.batch;
  const int64_t last = batch.heads * (thread + 1) / threads;
  for (int64_t head = batch.heads * thread / threads; head < last; ++head) {
    const interposer_product product = product_of(batch, head);
    const int64_t groups = (product.weight->inputs + product.weight->group - 1) /
                           product.weight->group;
    Prepared prepared = {product.x, product.x_stride * size_of(product.x_type), nullptr, groups};
    const int64_t row_bytes = job.kernels->prepared_row_bytes(product);
    if (row_bytes) {
      const int64_t data_bytes = round_up(product.rows * row_bytes, 64);
      const int64_t sum_bytes = product.x_type == kInt8 ? product.rows * groups * 4 : 0;
      char* data = static_cast<char*>(interposer_scratch(kForRows, data_bytes + sum_bytes));
      if (data == nullptr) {
        job.failed = true;
        return;
      }
      int32_t* sums = sum_bytes ? reinterpret_cast<int32_t*>(data + data_bytes) : nullptr;
      job.kernels->prepare_rows(product, data, row_bytes, sums, 0, product.rows);
      prepared.data = data;
      prepared.stride = row_bytes;
      prepared.sums = sums;
    }
    const int64_t blocks = num_blocks(product.weight->outputs);
    if (!job.kernels->multiply(product, prepared, 0, blocks, 0, product.rows)) job.failed = true;
  }
}

}  // namespace

extern "C" int32_t interposer_multiply_batch(const interposer_batch* batch) {
  const interposer_packed& first = *batch->weights;
  if (first.magic != kMagic) return kNotPacked;
  const bool codes = batch->x_type == kInt8;
  if (codes && first.format != kWeightInt8 && first.format != kWeightInt4) return kMismatch;
  Job job{batch, of_batches::kernels()};
  if (job.kernels == nullptr) return kNoKernels;
  if (batch->rows == 0) return kDone;
  interposer_parallel(multiply_some, &job, interposer_num_threads());
  return job.failed ? kNoMemory : kDone;
}
