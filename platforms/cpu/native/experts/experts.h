// Mixtures of experts: both products of every chosen expert, the activation between them and the
// weighted sum, in one call.
//
// T tokens, K chosen experts, E experts, H hidden size, I intermediate size. A slot is one choice
// of one token: slot t K + k is the k-th expert of token t.
#pragma once

#include <cstdint>

#include "../blocks/blocks.h"
#include "../linear/packed.h"

// Of gates g and what they act on, u.
enum ExpertActivation : int32_t {
  kExpertSilu = 0,       // g sigmoid(g) u
  kExpertGelu = 1,       // g Phi(g) u
  kExpertSwigluOAI = 2,  // g sigmoid(1.702 g) (u + 1), g at most 7 and u from -7 to 7
};

extern "C" {

// Begins the memory of packed experts. Each expert is three packed weights that follow each other:
// gate [I, H], up [I, H] and down [H, I], of the same formats and sizes for all of them.
struct interposer_mixture {
  uint32_t magic;
  int32_t unused;
  int64_t experts, expert_bytes;
  int64_t reserved[5];
};

// out = sum over k of weights[k] * down(h_k), h_k = activation(gate(x), up(x)) of expert k, rounded
// to the type of x. The id -1 contributes nothing.
struct interposer_mixture_call {
  const interposer_mixture* mixture;
  const void* x;              // [T, H]
  void* out;                  // [T, H], without gaps
  const float* weights;       // [T, K]
  const int32_t* expert_ids;  // [T, K], from -1 to E - 1
  int32_t type;               // of x and out
  int32_t activation;
  int64_t tokens, top_k;
  int64_t x_stride, weight_stride, id_stride;  // elements between tokens
};

// out = sum over k of weights[k] * down(activation(gate) * up), [gate, up] = gate_up(x) of expert k,
// whose activation is one of blocks.h. The id -1 contributes nothing.
struct interposer_expert_layers_call {
  const int64_t* layers;  // [E, 2] addresses of packed weights: gate_up [2 I, H], down [H, I]
  interposer_coding codings[2];  // of what each of both multiplies
  const void* x;              // [T, H]
  void* out;                  // [T, H], without gaps
  const float* weights;       // [T, K]
  const int32_t* expert_ids;  // [T, K], from -1 to E - 1
  int32_t type;               // of x and out
  int32_t activation;
  int64_t experts, tokens, top_k;
  int64_t x_stride, weight_stride, id_stride;  // elements between tokens
};

// Write the beginning of the memory; the weights follow it, packed by interposer_pack.
void interposer_begin_mixture(int64_t experts, int64_t expert_bytes, void* memory);

// Returns 0, or what went wrong.
int32_t interposer_experts(const interposer_mixture_call* call);
int32_t interposer_expert_layers(const interposer_expert_layers_call* call);
}

constexpr uint32_t kMixtureMagic = 0x69706d31;

// Some columns of rows of gates and what they act on.
struct GatedTile {
  const float *gate, *up;
  void* out;
  int32_t out_type, activation;
  int64_t rows, columns, stride, out_stride;  // elements
};

// What the experts of some tokens returned, to be added up.
struct Returned {
  const float* rows;      // [slots, H] in another order
  const int32_t* places;  // [T, K], the row of each slot, or -1
  const float* weights;
  void* out;
  int32_t type;
  int64_t top_k, hidden, weight_stride;
};

// Those of the tokens of a call from `first_token` on; `Call` is one of both above.
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
