// Weight quantization as a torch op, for compiled models. Rows of the weight can have gaps; all
// other tensors are contiguous.

#include "../torch_runtime.h"
#include "../vectors.h"
#include "rounding.h"

namespace {

// Quantized values [O, I] or [O, I / 2], scales and zeros [O, I / G], weight [O, I]. Zeros are used
// only if `asymmetric`.
void round_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor codes(stack[0]), scales(stack[1]), zeros(stack[2]), weight(stack[3]);
  interposer_rounded rounded = {};
  rounded.weight = weight.data<const void>();
  rounded.codes = codes.data<void>();
  rounded.scales = scales.data<float>();
  rounded.zeros = stack[7] ? zeros.data<uint8_t>() : nullptr;
  rounded.type = weight.type();
  rounded.group = static_cast<int64_t>(stack[4]);
  rounded.scale_type = static_cast<int32_t>(stack[5]);
  rounded.bits = static_cast<int32_t>(stack[6]);
  rounded.outputs = weight.size(0);
  rounded.inputs = weight.size(1);
  rounded.stride = weight.stride(0);
  interposer_round(&rounded);
}

}  // namespace

extern const TorchOp interposer_rounding_ops[];
const TorchOp interposer_rounding_ops[] = {
    {"round_out(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) zeros, Tensor weight, int group, "
     "int scale_type, int bits, int asymmetric) -> ()",
     "round_out", round_out},
    {nullptr, nullptr, nullptr},
};
