#include "moe.h"

#include <cmath>

#include "factor.h"

namespace {

// Up to this number of elements, the calling thread alone is faster than waking others.
constexpr int64_t kFewElements = 1 << 15;

// Intermediate results, in one buffer.
struct Routed {
  float *logits, *weights;  // [rows, E], [rows, K]
  int32_t* ids;             // [rows, K]
  char *shared, *gates;     // [rows, hidden], [rows], in the type of x

  // Returns the bytes of the buffer; null: only count them.
  int64_t lay_out(const interposer_moe_call& call, char* memory) {
    const interposer_moe_weights& moe = *call.weights;
    const int64_t size = size_of(call.type), slots = call.rows * moe.top;
    int64_t used = 0;
    const auto take = [&](int64_t bytes) {
      char* area = memory ? memory + used : nullptr;
      used += round_up(bytes, 64);
      return area;
    };
    logits = reinterpret_cast<float*>(take(call.rows * moe.router->outputs * 4));
    weights = reinterpret_cast<float*>(take(slots * 4));
    ids = reinterpret_cast<int32_t*>(take(slots * 4));
    shared = take(moe.gate_up.weight ? call.rows * call.hidden * size : 0);
    gates = take(moe.gate.weight ? call.rows * size : 0);
    return used;
  }
};

int32_t route(const interposer_moe_call& call, const Routed& routed) {
  const interposer_moe_weights& moe = *call.weights;
  const int64_t experts = moe.router->outputs;
  const int32_t failure = multiply({moe.router, {kNone, 0, 0, 0}, nullptr}, call.x, call.type,
                                   call.rows, call.hidden, routed.logits, kFloat32);
  if (failure) return failure;
  interposer_routes routes = {};
  routes.logits = routed.logits;
  routes.type = kFloat32;
  routes.scoring = static_cast<int32_t>(moe.scoring);
  routes.renormalised = static_cast<int32_t>(moe.renormalised);
  routes.rows = call.rows;
  routes.width = routes.stride = experts;
  routes.bias = moe.bias;
  routes.groups = moe.groups;
  routes.top_groups = moe.top_groups;
  routes.top = moe.top;
  routes.scale = static_cast<float>(moe.scale);
  routes.weights = routed.weights;
  routes.ids = routed.ids;
  return interposer_route(&routes);
}

// Set the fields that both kinds of experts have.
template <class Call>
void set(Call& experts, const interposer_moe_call& call, const Routed& routed) {
  experts.x = call.x;
  experts.out = call.out;
  experts.weights = routed.weights;
  experts.expert_ids = routed.ids;
  experts.type = call.type;
  experts.activation = static_cast<int32_t>(call.weights->activation);
  experts.tokens = call.rows;
  experts.top_k = experts.weight_stride = experts.id_stride = call.weights->top;
  experts.x_stride = call.hidden;
}

int32_t compute_experts(const interposer_moe_call& call, const Routed& routed) {
  const interposer_moe_weights& moe = *call.weights;
  if (moe.mixture) {
    interposer_mixture_call experts = {};
    experts.mixture = moe.mixture;
    set(experts, call, routed);
    return interposer_experts(&experts);
  }
  interposer_expert_layers_call experts = {};
  experts.layers = moe.layers;
  experts.codings[0] = moe.codings[0];
  experts.codings[1] = moe.codings[1];
  experts.experts = moe.router->outputs;
  set(experts, call, routed);
  return interposer_expert_layers(&experts);
}

int32_t compute_shared(const interposer_moe_call& call, const Routed& routed) {
  const interposer_moe_weights& moe = *call.weights;
  interposer_mlp_call shared = {};
  shared.gate_up = moe.gate_up;
  shared.down = moe.down;
  shared.x = call.x;
  shared.out = routed.shared;
  shared.type = shared.out_type = call.type;
  shared.activation = static_cast<int32_t>(moe.shared_activation);
  shared.rows = call.rows;
  shared.x_stride = call.hidden;
  const int32_t failure = interposer_mlp(&shared);
  if (failure || moe.gate.weight == nullptr) return failure;
  return multiply(moe.gate, call.x, call.type, call.rows, call.hidden, routed.gates, call.type);
}

// Sigmoid of a number of 16 bits, rounded to its type.
float sigmoid_of(const char* logit, int32_t type) {
  char rounded[4];
  const float power = std::exp(-load_some(logit, type, 1)[0]);
  store_some(rounded, splat(1.0f / (1.0f + power)), type, 1);
  return load_some(rounded, type, 1)[0];
}

struct Sum {
  const interposer_moe_call& call;
  const Routed& routed;

  // Add some rows of the shared expert to the rows of the routed experts.
  static void add_some(void* argument, int thread, int threads) {
    const Sum& sum = *static_cast<const Sum*>(argument);
    const interposer_moe_call& call = sum.call;
    const int64_t size = size_of(call.type), last = call.rows * (thread + 1) / threads;
    for (int64_t row = call.rows * thread / threads; row < last; ++row) {
      const char* shared = sum.routed.shared + row * call.hidden * size;
      char* out = static_cast<char*>(call.out) + row * call.hidden * size;
      const bool gated = call.weights->gate.weight != nullptr;
      const float gate = gated ? sigmoid_of(sum.routed.gates + row * size, call.type) : 1.0f;
      for (int64_t i = 0; i < call.hidden; i += kLanes) {
        const int count = int(call.hidden - i < kLanes ? call.hidden - i : kLanes);
        // A result of its own: the product is rounded before it is added.
        alignas(64) char product[kLanes * 4];
        store_some(product, load_some(shared + i * size, call.type, count) * gate, call.type,
                   kLanes);
        const Floats added = load_some(out + i * size, call.type, count) +
                             load_some(product, call.type, kLanes);
        store_some(out + i * size, added, call.type, count);
      }
    }
  }
};

int32_t compute(const interposer_moe_call& call) {
  const interposer_moe_weights& moe = *call.weights;
  if (moe.router->inputs != call.hidden || moe.top > moe.router->outputs) return kMismatch;
  if (moe.gate_up.weight && (moe.gate_up.weight->inputs != call.hidden ||
                             moe.down.weight->outputs != call.hidden)) {
    return kMismatch;
  }
  if (moe.gate.weight && (moe.gate.weight->inputs != call.hidden || moe.gate.weight->outputs != 1 ||
                          call.type == kFloat32)) {
    return kMismatch;
  }
  if (call.rows == 0) return kDone;
  Routed routed = {};
  char* memory =
      static_cast<char*>(interposer_scratch(kForMixtures, routed.lay_out(call, nullptr)));
  if (memory == nullptr) return kNoMemory;
  routed.lay_out(call, memory);
  int32_t failure = route(call, routed);
  if (failure == kDone) failure = compute_experts(call, routed);
  if (failure || moe.gate_up.weight == nullptr) return failure;
  failure = compute_shared(call, routed);
  if (failure) return failure;
  Sum sum = {call, routed};
  const bool few = call.rows * call.hidden <= kFewElements;
  interposer_parallel(Sum::add_some, &sum, few ? 1 : interposer_num_threads());
  return kDone;
}

}  // namespace

extern "C" int32_t interposer_moe(const interposer_moe_call* call) { return compute(*call); }
