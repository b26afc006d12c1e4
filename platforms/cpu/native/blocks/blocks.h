// Several kernels in one call, whose results in between stay in memory that is reused. For one
// token a call, and memory for its result, cost about as much as the kernel itself.
#pragma once

#include <cstdint>

#include "../attention/attention.h"
#include "../communicator/communicator.h"
#include "../linear/packed.h"
#include "../lora/lora.h"

// Of what a block calls, above the codes of its own failures: one of interposer_lost.
constexpr int32_t kLost = 256;

// Products of which each rank has a summand, as bits.
enum interposer_summand : int64_t { kOutputSummand = 1, kDownSummand = 2 };

extern "C" {

// What rows become before they are multiplied, if anything: codes of interposer_coded, those of 8-bit
// floats as bfloat16. In words of 64 bits.
struct interposer_coding {
  int64_t type;    // kInt8 or kE4M3; kNone leaves rows as they are
  double limit;    // of the scales of rows; 0 for none
  int64_t group;   // inputs that share a scale; 0 for all of a row
  int64_t powers;  // of interposer_powers
};

// A weight, and what rows become before they are multiplied by it.
struct interposer_factor {
  const interposer_packed* weight;
  interposer_coding coding;
  const float* scale;  // one for all rows; null where each has its own
};

// What adapters add to the result of a product; nothing where low_rank is null.
struct interposer_addition {
  const interposer_low_rank* low_rank;
  const int64_t* ids;  // of the rows
};

// out = down(activation(gate) * up), where [gate, up] = gate_up(x). What lies between is float32.
struct interposer_mlp_call {
  interposer_factor gate_up, down;
  interposer_addition added[2];  // to the results of both
  const void* x;  // [rows, inputs of gate_up]
  void* out;      // [rows, outputs of down], without gaps
  int32_t type, out_type;
  int32_t activation;
  int64_t rows, x_stride;  // elements
};

// out = [query, key, value] of x, heads of query and key normalised where there are weights, then
// rotated where there are tables.
struct interposer_heads_call {
  interposer_factor weight;
  interposer_addition added;
  const void* x;  // [rows, inputs of weight]
  void* out;      // [rows, heads + 2 kv_heads, size], without gaps
  const void *query_weight, *key_weight;  // [size], or null
  const float *cos, *sin;                 // [rows, half], or null
  int32_t type;  // of x, out and the weights of heads
  float eps;
  int64_t rows, x_stride;  // elements
  int64_t heads, kv_heads, size, half;
};

// What stays the same of a decoder block, in words of 64 bits.
struct interposer_block {
  int64_t type;  // of everything but the residual stream, which is float32
  int64_t activation;
  int64_t hidden, heads, kv_heads, size, half;
  interposer_coding codings[4];  // for the products to heads, of attention, to gate and up, and down
  double input_eps, head_eps, post_eps;
  int64_t summands;  // of interposer_summand
};

// A decoder block on a residual stream:
//
//   stream = x + residual, or the residual alone, which x was widened to then
//   total = stream + output(attention(heads(norm(stream)))), of `chosen` rows where there are some
//   out = mlp(norm(total)), or norm(total) where there is no gate_up
//
// What is a summand is added up over the ranks before it is added to the stream.
struct interposer_block_call {
  const interposer_block* block;
  const interposer_packed *heads, *output, *gate_up, *down;
  const float* scales[4];  // of interposer_factor, in the order of codings
  const interposer_low_rank* low_rank[4];  // what is added to each product, or null
  const int64_t *ids, *chosen_ids;  // of the adapters of all rows, and of the chosen ones
  const void *input_weight, *query_weight, *key_weight, *post_weight;  // of the norms
  const float *cos, *sin;  // [rows, half]
  interposer_attention_call attention;  // without query, key, value and out
  const void* x;          // [rows, hidden]
  const float* residual;  // [rows, hidden]
  bool adds;
  int64_t rows;
  const int64_t* chosen;  // [num_chosen] rows
  int64_t num_chosen;     // negative for all rows in their order
  void* out;     // [rows or num_chosen, hidden]
  float* total;  // of the same rows
  interposer_communicator* ranks;  // null where they have left, or there are no summands
};

// Each returns 0, or what went wrong: kLost and more where a rank is lost.
int32_t interposer_mlp(const interposer_mlp_call* call);
int32_t interposer_project_heads(const interposer_heads_call* call);
int32_t interposer_decoder_block(const interposer_block_call* call);

// Blocks that follow each other, each of which reads what the one before it wrote. All but the last
// leave their last sum to the norm of the next one.
int32_t interposer_decoder_blocks(const interposer_block_call* calls, int64_t count);
}
