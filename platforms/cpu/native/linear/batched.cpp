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
  const int size = size_of(batch.type);
  const interposer_packed& first = *batch.weights;
  interposer_product product = {};
  product.weight = at<interposer_packed>(&first, head * first.bytes);
  if (head == 0) product.weight = &first;
  product.x = static_cast<const char*>(batch.x) + head * batch.head_stride * size;
  product.x_type = product.out_type = batch.type;
  product.rows = batch.rows;
  product.x_stride = batch.row_stride;
  product.out = static_cast<char*>(batch.out) + head * batch.rows * first.outputs * size;
  product.out_stride = first.outputs;
  return product;
}

// A head is a short GEMM, computed by one thread.
void multiply_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const interposer_batch& batch = *job.batch;
  const int64_t last = batch.heads * (thread + 1) / threads;
  for (int64_t head = batch.heads * thread / threads; head < last; ++head) {
    const interposer_product product = product_of(batch, head);
    Prepared prepared = {product.x, product.x_stride * size_of(product.x_type), nullptr, 1};
    const int64_t row_bytes = job.kernels->prepared_row_bytes(product);
    if (row_bytes) {
      void* data = interposer_scratch(kForRows, product.rows * row_bytes);
      if (data == nullptr) {
        job.failed = true;
        return;
      }
      job.kernels->prepare_rows(product, data, row_bytes, nullptr, 0, product.rows);
      prepared.data = data;
      prepared.stride = row_bytes;
    }
    const int64_t blocks = num_blocks(product.weight->outputs);
    if (!job.kernels->multiply(product, prepared, 0, blocks, 0, product.rows)) job.failed = true;
  }
}

}  // namespace

extern "C" int32_t interposer_multiply_batch(const interposer_batch* batch) {
  if (batch->weights->magic != kMagic) return kNotPacked;
  Job job{batch, of_batches::kernels()};
  if (job.kernels == nullptr) return kNoKernels;
  if (batch->rows == 0) return kDone;
  interposer_parallel(multiply_some, &job, interposer_num_threads());
  return job.failed ? kNoMemory : kDone;
}
