// Several kernels in one call, whose results in between stay in memory that is reused. For one
// token a call, and memory for its result, cost about as much as the kernel itself.
#pragma once

#include <cstdint>

#include "../linear/packed.h"

extern "C" {

// out = down(activation(gate) * up), where [gate, up] = gate_up(x). What lies between is float32.
struct interposer_mlp_call {
  const interposer_packed *gate_up, *down;
  const void* x;  // [rows, inputs of gate_up]
  void* out;      // [rows, outputs of down], without gaps
  int32_t type;   // of both
  int32_t activation;
  int64_t rows, x_stride;  // elements
};

// out = [query, key, value] of x, heads of query and key normalised where there are weights, then
// rotated where there are tables.
struct interposer_heads_call {
  const interposer_packed* weight;
  const void* x;  // [rows, inputs of weight]
  void* out;      // [rows, heads + 2 kv_heads, size], without gaps
  const void *query_weight, *key_weight;  // [size], or null
  const float *cos, *sin;                 // [rows, half], or null
  int32_t type;  // of x, out and the weights of heads
  float eps;
  int64_t rows, x_stride;  // elements
  int64_t heads, kv_heads, size, half;
};

// Each returns 0, or what went wrong.
int32_t interposer_mlp(const interposer_mlp_call* call);
int32_t interposer_project_heads(const interposer_heads_call* call);
}
