// Batched GEMM: every head multiplies its own rows by its own weight.
#pragma once

#include "packed.h"

extern "C" {

// out[h] = x[h] weight[h]^T. Rows and heads of `x` and `out` may have gaps.
struct interposer_batch {
  // One packed weight per head, one after another, of equal formats and sizes; or one packed weight
  // for all heads, whose outputs are those of the first head, then of the second, and so on. A head
  // then has a multiple of 64 outputs.
  const interposer_packed* weights;
  const void* x;
  void* out;
  int32_t x_type, out_type;
  const float* x_scales;                    // [heads, rows] of int8 x, or null
  int64_t heads, rows, outputs;             // outputs of a head
  int64_t head_stride, row_stride;          // of x, in elements
  int64_t out_head_stride, out_row_stride;  // elements
};

// Compute the batched GEMM. Returns 0 or an error code.
int32_t interposer_multiply_batch(const interposer_batch* batch);
}
