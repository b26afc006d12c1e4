// LoRA as torch ops, for compiled models. Rows of x and y can have gaps; all other tensors are
// contiguous.

#include <cstring>

#include "../torch_runtime.h"
#include "lora.h"

namespace {

// x [T, I], a [A, R, I], ids [T]; out [T, R] float32.
void lora_shrink_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]), a(stack[2]), ids(stack[3]);
  interposer_lora_shrink call = {};
  call.x = x.data<const void>(), call.a = a.data<const void>();
  call.ids = ids.data<const int64_t>();
  call.y = out.data<float>();
  call.type = x.type();
  call.tokens = x.size(0), call.rank = a.size(1), call.inputs = a.size(2);
  call.x_stride = x.stride(0);
  double scale;
  std::memcpy(&scale, &stack[4], sizeof scale);
  call.scale = static_cast<float>(scale);
  if (out.count()) interposer_lora_shrink_rows(&call);
}

// x [T, R] float32, b [A, R, O] reordered by prepare_expand, ids [T]; y [T, O].
void lora_expand_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor y(stack[0]), x(stack[1]), b(stack[2]), ids(stack[3]);
  interposer_lora_expand call = {};
  call.x = x.data<const float>(), call.b = b.data<const void>();
  call.ids = ids.data<const int64_t>();
  call.y = y.data<void>();
  call.type = call.y_type = y.type();
  call.tokens = y.size(0), call.rank = b.size(1), call.outputs = b.size(2);
  call.x_stride = x.stride(0), call.y_stride = y.stride(0);
  if (y.count()) interposer_lora_expand_rows(&call);
}

}  // namespace

extern const TorchOp interposer_lora_ops[];
const TorchOp interposer_lora_ops[] = {
    {"lora_shrink_out(Tensor(a!) out, Tensor x, Tensor lora_a, Tensor ids, float scale) -> ()",
     "lora_shrink_out", lora_shrink_out},
    {"lora_expand_out(Tensor(a!) y, Tensor shrunk, Tensor lora_b, Tensor ids) -> ()",
     "lora_expand_out", lora_expand_out},
    {nullptr, nullptr, nullptr},
};
