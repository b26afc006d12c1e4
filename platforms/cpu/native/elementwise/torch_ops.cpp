// Kernels of independent rows as torch ops, for compiled models. Rows of x can have gaps; all other
// tensors are contiguous.

#include <cstring>

#include "../torch_runtime.h"
#include "../vectors.h"
#include "elementwise.h"

namespace {

// Bits of `parts`: without its bit, an optional tensor is absent, and any other tensor is passed in
// its place.
constexpr uint64_t kWeighted = 1, kBiased = 2, kCentred = 4, kTurned = 8, kNeighbours = 16;

float fraction(TorchValue value) {
  double number;
  std::memcpy(&number, &value, sizeof number);
  return static_cast<float>(number);
}

interposer_rows_of rows_of(const TorchTensor& x, int64_t width) {
  return {x.size(0), 1, width, x.stride(0), width};
}

// x [T, H], weight [H], bias [H].
void normalise_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]), weight(stack[2]), bias(stack[3]);
  interposer_norm norm = {};
  norm.x = x.data<const void>();
  norm.weight = stack[4] & kWeighted ? weight.data<const void>() : nullptr;
  norm.bias = stack[4] & kBiased ? bias.data<const void>() : nullptr;
  norm.centred = stack[4] & kCentred ? 1 : 0;
  norm.out = out.data<void>();
  norm.type = x.type();
  norm.rows = rows_of(x, x.size(1));
  norm.eps = fraction(stack[5]);
  norm.shift = fraction(stack[6]);
  interposer_normalise(&norm);
}

// x and residual [T, H], contiguous, weight [H].
void add_rms_norm_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), total(stack[1]), x(stack[2]), residual(stack[3]);
  const TorchTensor weight(stack[4]);
  interposer_norm norm = {};
  norm.x = x.data<const void>();
  norm.residual = residual.data<const void>();
  norm.weight = weight.data<const void>();
  norm.out = out.data<void>();
  norm.total = total.data<void>();
  norm.type = x.type();
  norm.residual_type = residual.type();
  norm.rows = rows_of(x, x.size(1));
  norm.eps = fraction(stack[5]);
  norm.shift = fraction(stack[6]);
  interposer_normalise(&norm);
}

// x [T, 2 I] with gates in the first half, or x [T, I] with gates alone; out [T, I].
void gate_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]);
  const int64_t width = out.size(1);
  interposer_gated gated = {};
  gated.type = gated.out_type = x.type();
  gated.gate = x.data<const void>();
  gated.up = x.size(1) == width ? nullptr : x.data<const char>() + width * size_of(gated.type);
  gated.out = out.data<void>();
  gated.activation = static_cast<int32_t>(stack[2]);
  gated.rows = rows_of(x, width);
  interposer_gate(&gated);
}

// x [T, N, D], weight [D], cosines and sines [T, R / 2].
void turn_heads_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), x(stack[1]), weight(stack[2]), cos(stack[3]), sin(stack[4]);
  const int64_t count = x.size(1), width = x.size(2);
  interposer_heads heads = {};
  heads.x = x.data<const void>();
  heads.weight = stack[5] & kWeighted ? weight.data<const void>() : nullptr;
  if (stack[5] & kTurned) {
    heads.cos = cos.data<const float>();
    heads.sin = sin.data<const float>();
    heads.half = cos.size(1);
    heads.neighbours = (stack[5] & kNeighbours) != 0;
  }
  heads.out = out.data<void>();
  heads.type = x.type();
  heads.rows = {x.size(0), count, width, count * width, width};
  heads.out_stride = count * width;
  heads.eps = fraction(stack[6]);
  interposer_turn_heads(&heads);
}

// x [T, H] with a scale for each `width` elements of a row, written to scales.
void code_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor codes(stack[0]), scales(stack[1]), x(stack[2]);
  interposer_coded coded = {};
  coded.x = x.data<const void>();
  coded.codes = codes.data<void>();
  coded.scales = scales.data<float>();
  coded.type = x.type();
  coded.code_type = static_cast<int32_t>(stack[3]);
  const int64_t width = static_cast<int64_t>(stack[4]);
  coded.rows = {x.size(0), width ? x.size(1) / width : 0, width, x.stride(0), width};
  coded.powers = static_cast<int32_t>(stack[5]);
  coded.limit = fraction(stack[6]);
  interposer_code(&coded);
}

// x [T, H], scale [1].
void code_by_scale_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor codes(stack[0]), x(stack[1]), scale(stack[2]);
  interposer_coded coded = {};
  coded.x = x.data<const void>();
  coded.codes = codes.data<void>();
  coded.given = scale.data<const float>();
  coded.type = x.type();
  coded.code_type = static_cast<int32_t>(stack[3]);
  coded.rows = rows_of(x, x.size(1));
  interposer_code(&coded);
}

}  // namespace

extern const TorchOp interposer_elementwise_ops[];
const TorchOp interposer_elementwise_ops[] = {
    {"normalise_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor bias, int parts, float eps, "
     "float shift) -> ()",
     "normalise_out", normalise_out},
    {"add_rms_norm_out(Tensor(a!) out, Tensor(b!) total, Tensor x, Tensor residual, "
     "Tensor weight, float eps, float shift) -> ()",
     "add_rms_norm_out", add_rms_norm_out},
    {"gate_out(Tensor(a!) out, Tensor x, int activation) -> ()", "gate_out", gate_out},
    {"turn_heads_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor cos, Tensor sin, int parts, "
     "float eps) -> ()",
     "turn_heads_out", turn_heads_out},
    {"code_out(Tensor(a!) codes, Tensor(b!) scales, Tensor x, int code_type, int width, "
     "int powers, float limit) -> ()",
     "code_out", code_out},
    {"code_by_scale_out(Tensor(a!) codes, Tensor x, Tensor scale, int code_type) -> ()",
     "code_by_scale_out", code_by_scale_out},
    {nullptr, nullptr, nullptr},
};
