// Sampling, penalties and routing, called as their Python modules call them.

#include "../sampling/sampling.h"

#include <stdexcept>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  throw std::runtime_error("kernels do not take " + dtype);
}

template <class T>
const T* data_of(const Case& golden, const char* name) {
  const Array* array = golden.find(name);
  return array ? array->data<T>() : nullptr;
}

void check(int32_t failure) {
  if (failure) throw std::runtime_error("the kernel failed with code " + std::to_string(failure));
}

std::vector<Result> drawn(const Case& golden, bool rated) {
  const Array& logits = golden.array("logits");
  Rows tokens("int64", 1, logits.rows()), logprobs("float32", 1, logits.rows());
  interposer_sample sample = {};
  sample.logits = logits.data<void>();
  sample.type = type_of(logits.dtype);
  sample.rows = logits.rows();
  sample.width = logits.columns();
  sample.stride = logits.row_stride();
  sample.temperature = data_of<float>(golden, "temperature");
  sample.top_k = data_of<int64_t>(golden, "top_k");
  sample.top_p = data_of<float>(golden, "top_p");
  sample.min_p = data_of<float>(golden, "min_p");
  sample.seeds = data_of<int64_t>(golden, "seeds");
  sample.steps = data_of<int64_t>(golden, "steps");
  sample.tokens = static_cast<int64_t*>(tokens.data());
  sample.logprobs = rated ? static_cast<float*>(logprobs.data()) : nullptr;
  check(interposer_sample_tokens(&sample));
  if (rated) return {tokens.result(), logprobs.result()};
  return {tokens.result()};
}

std::vector<Result> sample_tokens(const Case& golden) { return drawn(golden, true); }

std::vector<Result> gumbel_argmax(const Case& golden) { return drawn(golden, false); }

std::vector<Result> apply_penalties(const Case& golden) {
  const Array &logits = golden.array("logits"), &prompt = golden.array("prompt_mask");
  const Array& counts = golden.array("output_counts");
  Rows out("float32", logits.rows(), logits.columns(), 0);
  interposer_penalties penalties = {};
  penalties.logits = logits.data<void>();
  penalties.type = type_of(logits.dtype);
  penalties.count_bytes = int32_t(bytes_of(counts.dtype));
  penalties.rows = logits.rows();
  penalties.width = logits.columns();
  penalties.logit_stride = logits.row_stride();
  penalties.prompt_stride = prompt.row_stride();
  penalties.count_stride = counts.row_stride();
  penalties.prompt = prompt.data<uint8_t>();
  penalties.counts = counts.data<void>();
  penalties.repetition = data_of<float>(golden, "repetition");
  penalties.presence = data_of<float>(golden, "presence");
  penalties.frequency = data_of<float>(golden, "frequency");
  penalties.out = static_cast<float*>(out.data());
  check(interposer_penalise(&penalties));
  return {out.result()};
}

std::vector<Result> routed(const Case& golden, int64_t groups, int64_t top_groups, int32_t scoring,
                           double scale) {
  const Array& logits = golden.array("logits");
  const Array* bias = golden.find("bias");
  std::vector<float> added;
  for (int64_t i = 0; bias && i < bias->columns(); ++i) {
    added.push_back(float(number_at(bias->memory.data(), bias->dtype, i * bias->strides[0])));
  }
  const int64_t top = int64_t(golden.number("top_k"));
  Rows weights("float32", logits.rows(), top, 0), ids("int32", logits.rows(), top, 0);
  interposer_routes routes = {};
  routes.logits = logits.data<void>();
  routes.type = type_of(logits.dtype);
  routes.scoring = scoring;
  routes.renormalised = golden.number("renormalize") != 0;
  routes.rows = logits.rows();
  routes.width = logits.columns();
  routes.stride = logits.row_stride();
  routes.bias = bias ? added.data() : nullptr;
  routes.groups = groups;
  routes.top_groups = top_groups;
  routes.top = top;
  routes.scale = float(scale);
  routes.weights = static_cast<float*>(weights.data());
  routes.ids = static_cast<int32_t*>(ids.data());
  check(interposer_route(&routes));
  return {weights.result(), ids.result()};
}

std::vector<Result> topk_softmax(const Case& golden) { return routed(golden, 1, 1, kSoftmax, 1); }

std::vector<Result> topk_sigmoid(const Case& golden) {
  return routed(golden, 1, 1, kSigmoid, golden.number("scale"));
}

std::vector<Result> grouped_topk(const Case& golden) {
  const int32_t scoring = golden.text("scoring") == "sigmoid" ? kSigmoid : kSoftmax;
  return routed(golden, int64_t(golden.number("num_groups")),
                int64_t(golden.number("top_groups")), scoring, golden.number("scale"));
}

const Registration registrations[] = {
    {"apply_penalties", apply_penalties}, {"gumbel_argmax", gumbel_argmax},
    {"sample_tokens", sample_tokens},     {"grouped_topk", grouped_topk},
    {"topk_sigmoid", topk_sigmoid},       {"topk_softmax", topk_softmax},
};

}  // namespace
