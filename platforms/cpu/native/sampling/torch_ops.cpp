// Sampling, penalties and routing as torch ops, for compiled models. Rows of logits, prompt mask
// and counts can have gaps; all other tensors are contiguous.

#include <cstring>

#include "../torch_runtime.h"
#include "../vectors.h"
#include "sampling.h"

namespace {

// Bits of `parts`: without its bit, an optional tensor is absent, and any other tensor is passed in
// its place.
constexpr uint64_t kTemperature = 1, kTopK = 2, kTopP = 4, kMinP = 8, kLogprobs = 16;
constexpr uint64_t kLongCounts = 1, kBiased = 1, kSigmoids = 2, kRenormalised = 4;

template <class T>
T* given(TorchValue parts, uint64_t part, const TorchTensor& tensor) {
  return parts & part ? tensor.data<T>() : nullptr;
}

// logits [B, V], all others [B].
void sample_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor tokens(stack[0]), logprobs(stack[1]), logits(stack[2]), temperature(stack[3]);
  const TorchTensor top_k(stack[4]), top_p(stack[5]), min_p(stack[6]), seeds(stack[7]);
  const TorchTensor steps(stack[8]);
  const TorchValue parts = stack[9];
  interposer_sample sample = {};
  sample.logits = logits.data<const void>();
  sample.type = logits.type();
  sample.rows = logits.size(0);
  sample.width = logits.size(1);
  sample.stride = logits.stride(0);
  sample.temperature = given<const float>(parts, kTemperature, temperature);
  sample.top_k = given<const int64_t>(parts, kTopK, top_k);
  sample.top_p = given<const float>(parts, kTopP, top_p);
  sample.min_p = given<const float>(parts, kMinP, min_p);
  sample.seeds = seeds.data<const int64_t>();
  sample.steps = steps.data<const int64_t>();
  sample.tokens = tokens.data<int64_t>();
  sample.logprobs = given<float>(parts, kLogprobs, logprobs);
  interposer_sample_tokens(&sample);
}

// logits, prompt mask and counts [B, V], penalties [B].
void penalise_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), logits(stack[1]), prompt(stack[2]), counts(stack[3]);
  const TorchTensor repetition(stack[4]), presence(stack[5]), frequency(stack[6]);
  interposer_penalties penalties = {};
  penalties.logits = logits.data<const void>();
  penalties.type = logits.type();
  penalties.count_bytes = stack[7] & kLongCounts ? 8 : 4;
  penalties.rows = logits.size(0);
  penalties.width = logits.size(1);
  penalties.logit_stride = logits.stride(0);
  penalties.prompt_stride = prompt.stride(0);
  penalties.count_stride = counts.stride(0);
  penalties.prompt = prompt.data<const uint8_t>();
  penalties.counts = counts.data<const void>();
  penalties.repetition = repetition.data<const float>();
  penalties.presence = presence.data<const float>();
  penalties.frequency = frequency.data<const float>();
  penalties.out = out.data<float>();
  interposer_penalise(&penalties);
}

// weights and ids [T, K], logits [T, E], bias [E].
void route_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor weights(stack[0]), ids(stack[1]), logits(stack[2]), bias(stack[3]);
  interposer_routes routes = {};
  routes.logits = logits.data<const void>();
  routes.type = logits.type();
  routes.scoring = stack[6] & kSigmoids ? kSigmoid : kSoftmax;
  routes.renormalised = stack[6] & kRenormalised ? 1 : 0;
  routes.rows = logits.size(0);
  routes.width = logits.size(1);
  routes.stride = logits.stride(0);
  routes.bias = given<const float>(stack[6], kBiased, bias);
  routes.groups = static_cast<int64_t>(stack[4]);
  routes.top_groups = static_cast<int64_t>(stack[5]);
  routes.top = weights.size(1);
  routes.weights = weights.data<float>();
  routes.ids = ids.data<int32_t>();
  double scale;
  std::memcpy(&scale, &stack[7], sizeof scale);
  routes.scale = static_cast<float>(scale);
  interposer_route(&routes);
}

}  // namespace

extern const TorchOp interposer_sampling_ops[];
const TorchOp interposer_sampling_ops[] = {
    {"sample_out(Tensor(a!) tokens, Tensor(b!) logprobs, Tensor logits, Tensor temperature, "
     "Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor steps, int parts) -> ()",
     "sample_out", sample_out},
    {"penalise_out(Tensor(a!) out, Tensor logits, Tensor prompt, Tensor counts, "
     "Tensor repetition, Tensor presence, Tensor frequency, int parts) -> ()",
     "penalise_out", penalise_out},
    {"route_out(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor bias, int groups, "
     "int top_groups, int parts, float scale) -> ()",
     "route_out", route_out},
    {nullptr, nullptr, nullptr},
};
