// The MoE layer of a decoder block: router, routed experts and shared expert in one call.
#pragma once

#include "../experts/experts.h"
#include "../sampling/sampling.h"
#include "blocks.h"

extern "C" {

// Weights and constants of an MoE layer, in 64-bit words; filled by moe_half.py. The experts are a
// `mixture` or `layers`.
struct interposer_moe_weights {
  const interposer_packed* router;  // [E, hidden], without quantization of the inputs
  const float* bias;                // [E] of interposer_routes, or null
  int64_t scoring, renormalised, groups, top_groups, top;  // of interposer_routes
  double scale;
  const interposer_mixture* mixture;
  const int64_t* layers;         // [E, 2], as in interposer_expert_layers_call
  interposer_coding codings[2];  // of `layers`
  int64_t activation;            // of interposer_mixture_call or interposer_expert_layers_call
  interposer_factor gate_up, down;  // of the shared expert; without weights if there is none
  int64_t shared_activation;
  interposer_factor gate;  // [1, hidden], of the shared expert; without a weight if there is none
};

// out = experts(x) + sigmoid(gate(x)) * shared(x), without the sigmoid or the shared expert if they
// have no weights. Every result is rounded to the type of x.
struct interposer_moe_call {
  const interposer_moe_weights* weights;
  const void* x;  // [rows, hidden], contiguous
  void* out;      // [rows, hidden], contiguous, not x
  int32_t type;   // of x and out; not float32 with a gate
  int64_t rows, hidden;
};

// Returns 0 or an error code.
int32_t interposer_moe(const interposer_moe_call* call);
}
