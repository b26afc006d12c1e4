// MoE layers in one call: both projections of all chosen experts, the activation between them, and
// the weighted sum.
//
// T tokens, K experts per token, E experts, H hidden size, I intermediate size. Slot t K + k is the
// k-th expert of token t.
#pragma once

#include <cstdint>

#include "../blocks/blocks.h"
#include "../linear/packed.h"

// Activations of gate g and up u.
enum ExpertActivation : int32_t {
  kExpertSilu = 0,       // g sigmoid(g) u
  kExpertGelu = 1,       // g Phi(g) u
  kExpertSwigluOAI = 2,  // g sigmoid(1.702 g) (u + 1), with g clamped to at most 7 and u to [-7, 7]
};

extern "C" {

// Header of packed experts. An expert is three consecutive packed weights: gate [I, H], up [I, H]
// and down [H, I], with the same formats and sizes for all experts.
struct interposer_mixture {
  uint32_t magic;
  int32_t unused;
  int64_t experts, expert_bytes;
  int64_t reserved[5];
};

// out = sum over k of weights[k] * down(h_k), h_k = activation(gate(x), up(x)) of expert k, rounded
// to the type of x. Slots with id -1 are skipped.
struct interposer_mixture_call {
  const interposer_mixture* mixture;
  const void* x;              // [T, H]
  void* out;                  // [T, H], contiguous
  const float* weights;       // [T, K]
  const int32_t* expert_ids;  // [T, K], from -1 to E - 1
  int32_t type;               // of x and out
  int32_t activation;
  int64_t tokens, top_k;
  int64_t x_stride, weight_stride, id_stride;  // elements between tokens
};

// out = sum over k of weights[k] * down(activation(gate) * up), [gate, up] = gate_up(x) of expert
// k, with an activation of blocks.h. Slots with id -1 are skipped.
struct interposer_expert_layers_call {
  const int64_t* layers;  // [E, 2] addresses of packed weights: gate_up [2 I, H], down [H, I]
  interposer_coding codings[2];  // input quantization of both projections
  const void* x;              // [T, H]
  void* out;                  // [T, H], contiguous
  const float* weights;       // [T, K]
  const int32_t* expert_ids;  // [T, K], from -1 to E - 1
  int32_t type;               // of x and out
  int32_t activation;
  int64_t experts, tokens, top_k;
  int64_t x_stride, weight_stride, id_stride;  // elements between tokens
};

// Write the header; the weights follow, packed by interposer_pack.
void interposer_begin_mixture(int64_t experts, int64_t expert_bytes, void* memory);

// Returns 0 or an error code.
int32_t interposer_experts(const interposer_mixture_call* call);
int32_t interposer_expert_layers(const interposer_expert_layers_call* call);
}

constexpr uint32_t kMixtureMagic = 0x69706d31;

// Some columns of gate and up rows.
struct GatedTile {
  const float *gate, *up;
  void* out;
  int32_t out_type, activation;
  int64_t rows, columns, stride, out_stride;  // elements
};

// Results of experts, to be summed per token.
struct Returned {
  const float* rows;      // [slots, H] in order of experts
  const int32_t* places;  // [T, K], row of each slot, or -1
  const float* weights;
  void* out;
  int32_t type;
  int64_t top_k, hidden, weight_stride;
};

// Results of the tokens from `first_token` on; `Call` is one of the two call structs.
template <class Call>
Returned returned_to(const Call& call, int64_t first_token, int64_t hidden, int size,
                     const float* rows, const int32_t* places) {
  Returned returned = {};
  returned.rows = rows;
  returned.places = places;
  returned.weights = call.weights + first_token * call.weight_stride;
  returned.out = static_cast<char*>(call.out) + first_token * hidden * size;
  returned.type = call.type;
  returned.top_k = call.top_k;
  returned.hidden = hidden;
  returned.weight_stride = call.weight_stride;
  return returned;
}

struct ExpertsKernels {
  void (*activate)(const GatedTile&);
  void (*add_up)(const Returned&, int64_t first_token, int64_t last_token);
};
