// MoE layers as a torch op, for compiled models.

#include <stdexcept>
#include <string>

#include "../torch_runtime.h"
#include "experts.h"

namespace {

// x and out [T, H], weights [T, K] float32, ids [T, K] int32; out is contiguous.
void experts_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]), mixture(stack[2]), weights(stack[3]), ids(stack[4]);
  interposer_mixture_call call = {};
  call.mixture = mixture.data<const interposer_mixture>();
  call.x = x.data<const void>();
  call.out = out.data<void>();
  call.weights = weights.data<const float>();
  call.expert_ids = ids.data<const int32_t>();
  call.type = x.type();
  call.activation = static_cast<int32_t>(stack[5]);
  call.tokens = x.size(0);
  call.top_k = ids.size(1);
  call.x_stride = x.stride(0);
  call.weight_stride = weights.stride(0);
  call.id_stride = ids.stride(0);
  const int32_t failure = interposer_experts(&call);
  if (failure) {
    throw std::runtime_error("the native experts failed with code " + std::to_string(failure));
  }
}

}  // namespace

extern const TorchOp interposer_experts_ops[];
const TorchOp interposer_experts_ops[] = {
    {"experts_out(Tensor(a!) out, Tensor x, Tensor packed, Tensor weights, Tensor expert_ids, "
     "int activation) -> ()",
     "experts_out", experts_out},
    {nullptr, nullptr, nullptr},
};
