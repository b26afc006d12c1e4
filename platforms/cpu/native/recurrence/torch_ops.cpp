// Recurrences as torch ops, for compiled models. Empty tensors mean absent arguments. Tokens of
// inputs and rows of states can have gaps; all other tensors are contiguous.

#include <cstring>

#include "../torch_runtime.h"
#include "recurrence.h"

namespace {

template <class T>
T* optional(const TorchTensor& tensor) {
  return tensor.count() ? tensor.data<T>() : nullptr;
}

interposer_sequences sequences_of(const TorchTensor& starts, const TorchTensor& slots,
                                  const TorchTensor& cached) {
  return {slots.count(), starts.data<const int64_t>(), slots.data<const int64_t>(),
          cached.data<const int64_t>()};
}

// x [T, C], weight [C, W], bias [C], windows [S, C, W - 1].
void convolve_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), windows(stack[1]), x(stack[2]), weight(stack[3]), bias(stack[4]),
      starts(stack[5]), slots(stack[6]), cached(stack[7]);
  interposer_convolution call = {};
  call.sequences = sequences_of(starts, slots, cached);
  call.x = x.data<const void>();
  call.weight = weight.data<const void>();
  call.bias = optional<const void>(bias);
  call.windows = windows.data<void>();
  call.out = out.data<void>();
  call.type = x.type();
  call.silu = stack[8] ? 1 : 0;
  call.channels = weight.size(0), call.taps = weight.size(1);
  call.x_stride = x.stride(0), call.window_stride = windows.stride(0);
  if (slots.count()) interposer_convolve(&call);
}

// x [T, N, P], steps [T, N], decay [N], b and c [T, G, S], skip [N], states [R, N, P, S].
void scan_states_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), states(stack[1]), x(stack[2]), steps(stack[3]), decay(stack[4]),
      b(stack[5]), c(stack[6]), skip(stack[7]), starts(stack[8]), slots(stack[9]), cached(stack[10]);
  interposer_scan call = {};
  call.sequences = sequences_of(starts, slots, cached);
  call.x = x.data<const void>(), call.b = b.data<const void>(), call.c = c.data<const void>();
  call.steps = steps.data<const float>();
  call.decay = decay.data<const float>();
  call.skip = optional<const float>(skip);
  call.states = states.data<float>();
  call.out = out.data<void>();
  call.type = x.type();
  call.heads = x.size(1), call.groups = b.size(1), call.size = x.size(2), call.state = b.size(2);
  call.x_stride = x.stride(0), call.b_stride = b.stride(0), call.c_stride = c.stride(0);
  call.step_stride = steps.stride(0), call.state_stride = states.stride(0);
  if (slots.count()) interposer_scan_states(&call);
}

// query and key [T, H, K], value [T, V, D], decay and beta [T, V], states [R, V, K, D].
void apply_delta_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), states(stack[1]), query(stack[2]), key(stack[3]),
      value(stack[4]), decay(stack[5]), beta(stack[6]), starts(stack[7]), slots(stack[8]),
      cached(stack[9]);
  interposer_delta call = {};
  call.sequences = sequences_of(starts, slots, cached);
  call.query = query.data<const void>(), call.key = key.data<const void>();
  call.value = value.data<const void>();
  call.decay = decay.data<const float>(), call.beta = beta.data<const float>();
  call.states = states.data<float>();
  call.out = out.data<void>();
  call.type = value.type();
  call.heads = key.size(1), call.value_heads = value.size(1);
  call.key_size = key.size(2), call.value_size = value.size(2);
  call.query_stride = query.stride(0), call.key_stride = key.stride(0);
  call.value_stride = value.stride(0), call.decay_stride = decay.stride(0);
  call.beta_stride = beta.stride(0), call.state_stride = states.stride(0);
  double scale;
  std::memcpy(&scale, &stack[10], sizeof scale);
  call.scale = static_cast<float>(scale);
  if (slots.count()) interposer_apply_delta(&call);
}

}  // namespace

extern const TorchOp interposer_recurrence_ops[];
const TorchOp interposer_recurrence_ops[] = {
    {"convolve_out(Tensor(a!) out, Tensor(b!) windows, Tensor x, Tensor weight, Tensor bias, "
     "Tensor starts, Tensor slots, Tensor cached, bool silu) -> ()",
     "convolve_out", convolve_out},
    {"scan_states_out(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor steps, Tensor decay, "
     "Tensor b, Tensor c, Tensor skip, Tensor starts, Tensor slots, Tensor cached) -> ()",
     "scan_states_out", scan_states_out},
    {"apply_delta_out(Tensor(a!) out, Tensor(b!) states, Tensor query, Tensor key, Tensor value, "
     "Tensor decay, Tensor beta, Tensor starts, Tensor slots, Tensor cached, float scale) -> ()",
     "apply_delta_out", apply_delta_out},
    {nullptr, nullptr, nullptr},
};
