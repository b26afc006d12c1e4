// GEMM and lookups as torch ops, for compiled models.

#include <stdexcept>
#include <string>

#include "../torch_runtime.h"
#include "../vectors.h"
#include "batched.h"

namespace {

// x [T, I], out [T, O].
void linear_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]), packed(stack[2]), scale(stack[3]);
  interposer_product product = {};
  product.weight = packed.data<const interposer_packed>();
  product.x = x.data<const void>();
  product.x_type = x.type();
  product.out = out.data<void>();
  product.out_type = out.type();
  product.rows = x.size(0);
  product.x_stride = x.stride(0);
  product.out_stride = out.stride(0);
  product.x_scales = scale.type() == kFloat32 ? scale.data<const float>() : nullptr;
  // One scale for all rows, or one or several per row.
  const bool one = product.x_scales == nullptr || scale.count() <= 1 || product.rows == 0;
  product.x_scale_stride = one ? 0 : scale.count() / product.rows;
  const int32_t failure = interposer_linear(&product);
  if (failure) {
    throw std::runtime_error("the native product failed with code " + std::to_string(failure));
  }
}

// x [N, T, I], out [N, T, O], contiguous. `scales` [N, T, 1] of int8 x; the packed weight stands for
// none.
void multiply_batch_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]), packed(stack[2]), scales(stack[3]);
  interposer_batch batch = {};
  batch.weights = packed.data<const interposer_packed>();
  batch.x = x.data<const void>();
  batch.out = out.data<void>();
  batch.x_type = x.type();
  batch.out_type = out.type();
  batch.x_scales = x.type() == kInt8 ? scales.data<const float>() : nullptr;
  batch.outputs = out.size(2);
  batch.heads = x.size(0);
  batch.rows = x.size(1);
  batch.head_stride = x.stride(0);
  batch.row_stride = x.stride(1);
  batch.out_row_stride = batch.outputs;
  batch.out_head_stride = batch.rows * batch.out_row_stride;
  const int32_t failure = interposer_multiply_batch(&batch);
  if (failure) {
    throw std::runtime_error("the native products failed with code " + std::to_string(failure));
  }
}

// out [T, H], token_ids [T], contiguous.
void lookup_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), token_ids(stack[1]), packed(stack[2]);
  interposer_lookup lookup = {};
  lookup.weight = packed.data<const interposer_packed>();
  lookup.rows = token_ids.data<const int64_t>();
  lookup.count = token_ids.count();
  lookup.out = out.data<void>();
  lookup.out_type = out.type();
  const int32_t failure = interposer_rows(&lookup);
  if (failure) {
    throw std::runtime_error("the native lookup failed with code " + std::to_string(failure));
  }
}

}  // namespace

extern const TorchOp interposer_linear_ops[];
const TorchOp interposer_linear_ops[] = {
    {"linear_out(Tensor(a!) out, Tensor x, Tensor packed, Tensor x_scale) -> ()", "linear_out",
     linear_out},
    {"multiply_batch_out(Tensor(a!) out, Tensor x, Tensor packed, Tensor scales) -> ()",
     "multiply_batch_out", multiply_batch_out},
    {"lookup_out(Tensor(a!) out, Tensor token_ids, Tensor packed) -> ()", "lookup_out",
     lookup_out},
    {nullptr, nullptr, nullptr},
};
