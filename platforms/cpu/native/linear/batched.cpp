// Divides a batched GEMM into heads, one thread per head.

#include "batched.h"

#include <atomic>

#include "../levels.h"
#include "../pool.h"
#include "../vectors.h"

namespace of_batches {
INTERPOSER_FAMILY(LinearKernels, linear, INTERPOSER_LEVELS)
}

namespace {

struct Job {
  const interposer_batch* batch;
  const LinearKernels* kernels;
  std::atomic<bool> failed{false};
};

// The GEMM of a head, and the head's blocks of outputs in its weight.
struct Head {
  interposer_product product;
  int64_t first_block, last_block;
};

Head head_of(const interposer_batch& batch, int64_t index) {
  const interposer_packed& first = *batch.weights;
  const bool is_shared = first.outputs != batch.outputs;
  const int64_t blocks = num_blocks(batch.outputs), first_block = is_shared ? index * blocks : 0;
  interposer_product product = {};
  product.weight = &first;
  if (!is_shared && index) product.weight = at<interposer_packed>(&first, index * first.bytes);
  product.x = static_cast<const char*>(batch.x) + index * batch.head_stride * size_of(batch.x_type);
  product.x_type = batch.x_type;
  product.out_type = batch.out_type;
  if (batch.x_scales) {
    product.x_scales = batch.x_scales + index * batch.rows;
    product.x_scale_stride = 1;
  }
  product.rows = batch.rows;
  product.x_stride = batch.row_stride;
  // The kernel adds the offset of a block in the whole weight.
  const int64_t offset = index * batch.out_head_stride - first_block * kBlock;
  product.out = static_cast<char*>(batch.out) + offset * size_of(batch.out_type);
  product.out_stride = batch.out_row_stride;
  return {product, first_block, first_block + blocks};
}

// A head is a short GEMM, computed by one thread.
void multiply_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const interposer_batch& batch = *job.batch;
  const int64_t last = batch.heads * (thread + 1) / threads;
  for (int64_t head = batch.heads * thread / threads; head < last; ++head) {
    const Head here = head_of(batch, head);
    const interposer_product& product = here.product;
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
    if (!job.kernels->multiply(product, prepared, here.first_block, here.last_block, 0,
                               product.rows)) {
      job.failed = true;
    }
  }
}

}  // namespace

extern "C" int32_t interposer_multiply_batch(const interposer_batch* batch) {
  const interposer_packed& first = *batch->weights;
  if (first.magic != kMagic) return kNotPacked;
  const bool codes = batch->x_type == kInt8;
  if (codes && first.format != kWeightInt8 && first.format != kWeightInt4) return kMismatch;
  const bool is_shared = first.outputs != batch->outputs;
  if (is_shared &&
      (batch->outputs % kBlock || first.outputs != batch->heads * batch->outputs)) {
    return kMismatch;
  }
  Job job{batch, of_batches::kernels()};
  if (job.kernels == nullptr) return kNoKernels;
  if (batch->rows == 0) return kDone;
  interposer_parallel(multiply_some, &job, interposer_num_threads());
  return job.failed ? kNoMemory : kDone;
}
