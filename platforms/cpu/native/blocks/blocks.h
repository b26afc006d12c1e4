// Several kernels in one call, with intermediate results in reused memory. For one token, a call
// and the allocation of its result cost about as much as the kernel itself.
#pragma once

#include <cstdint>

#include "../attention/attention.h"
#include "../communicator/communicator.h"
#include "../dense/dense.h"
#include "../linear/packed.h"
#include "../lora/lora.h"

// Error codes from here on are kLost plus an interposer_lost.
constexpr int32_t kLost = 256;

// Bits of the matmuls whose results are summands of an all-reduce.
enum interposer_summand : int64_t { kOutputSummand = 1, kDownSummand = 2 };

extern "C" {

struct interposer_moe_weights;

// Quantization of rows before a matmul, as in interposer_coded; 8-bit floats are stored as
// bfloat16. All fields are 64-bit words.
struct interposer_coding {
  int64_t type;    // kInt8 or kE4M3; kNone: no quantization
  double limit;    // largest scale of a row; 0 for no limit
  int64_t group;   // inputs per scale; 0 for a whole row
  int64_t powers;  // an interposer_powers
};

// A weight, and the quantization of its inputs.
struct interposer_factor {
  const interposer_packed* weight;
  interposer_coding coding;
  const float* scale;  // static scale for all rows; null for a scale per row
};

// LoRA of a matmul; none if low_rank is null.
struct interposer_addition {
  const interposer_low_rank* low_rank;
  const int64_t* ids;  // adapter of each row
};

// out = down(activation(gate) * up), where [gate, up] = gate_up(x). Intermediate results are
// float32.
struct interposer_mlp_call {
  interposer_factor gate_up, down;
  interposer_addition added[2];  // LoRA of both matmuls
  const void* x;  // [rows, inputs of gate_up]
  void* out;      // [rows, outputs of down], contiguous
  int32_t type, out_type;
  int32_t activation;
  int64_t rows, x_stride;  // elements
};

// out = [query, key, value] of x. Heads of query and key are normalized if there are weights, then
// rotated if there are tables.
struct interposer_heads_call {
  interposer_factor weight;
  interposer_addition added;
  const void* x;  // [rows, inputs of weight]
  void* out;      // [rows, heads + 2 kv_heads, size], contiguous
  const void *query_weight, *key_weight;  // [size], or null
  const float *cos, *sin;                 // [rows, half], or null
  int32_t type;  // of x, out and the norm weights
  float eps;
  int64_t rows, x_stride;  // elements
  int64_t heads, kv_heads, size, half;
};

// Constant parameters of a decoder block, in 64-bit words; filled by decoder_block.py.
struct interposer_block {
  int64_t type;  // of everything except the residual, which is float32
  int64_t activation;
  int64_t hidden, heads, kv_heads, size, half;
  interposer_coding codings[4];  // qkv, attention output, gate_up, down
  double input_eps, head_eps, post_eps;
  int64_t summands;  // bits of interposer_summand
};

// Constant parameters of latent attention (MLA), in 64-bit words; filled by latent_block.py.
struct interposer_latent {
  int64_t plain, rotary, latent, value;  // sizes D, R, C, V
  int64_t neighbours;                    // rotate neighbouring elements
  int64_t page_tokens;
  double scale;
  interposer_coding codings[4];  // query_latent, vector, absorbed queries, values
};

// Weights, sequences and cache of latent attention in one block, in 64-bit words; filled by
// latent_block.py.
struct interposer_latent_call {
  const interposer_latent* latent;
  const interposer_packed* query_latent;  // of compressed queries, or null
  const interposer_packed* vector;        // [C + R, hidden]
  const interposer_packed *keys, *values;  // [C, D] and [V, C] of all heads, as in batched.h
  const float* scales[2];                  // static input scales of query_latent and vector
  const interposer_low_rank* low_rank[2];  // LoRA of the same, or null
  int64_t num_sequences;
  const int64_t *query_starts, *seq_lens, *page_table;
  int64_t table_stride;
  const int64_t* slots;  // [rows]
  char* cache;           // [P, S, C + R]
  int64_t page_stride, token_stride;  // elements
};

// A decoder block with a residual:
//
//   stream = x + residual, or the residual alone, which is then x in float32
//   total = stream + output(attention(heads(norm(stream)))), of the `chosen` rows if given
//   out = mlp(norm(total)), or moe(norm(total)), or norm(total) without gate_up and moe
//
// Summands are summed over the ranks before they are added to the residual.
//
// With latent attention, `heads` is the projection of queries, `query_weight` the norm of compressed
// queries and `key_weight` the norm of latent vectors:
//
//   query = heads(norm(query_latent(x))), or heads(x); [latent, key] = vector(x)
//   attention of [keys(query), rotated query] to the cached [norm(latent), rotated key]
//   values(attention) is the input of `output`
struct interposer_block_call {
  const interposer_block* block;
  const interposer_packed *heads, *output, *gate_up, *down;
  const float* scales[4];  // static input scales, in the order of codings
  const interposer_low_rank* low_rank[4];  // LoRA of each matmul, or null
  const int64_t *ids, *chosen_ids;  // adapters of all rows, and of the chosen rows
  const void *input_weight, *query_weight, *key_weight, *post_weight;  // of the norms
  const float *cos, *sin;  // [rows, half]
  interposer_attention_call attention;  // query, key, value and out are filled in by the call
  const void* x;          // [rows, hidden]
  const float* residual;  // [rows, hidden]
  bool adds;
  int64_t rows;
  const int64_t* chosen;  // [num_chosen] rows
  int64_t num_chosen;     // negative: all rows in order
  void* out;     // [rows or num_chosen, hidden]
  float* total;  // of the same rows
  interposer_communicator* ranks;  // null after close, or without summands
  const interposer_latent_call* latent;  // null for attention of other kinds
  const interposer_moe_weights* moe;     // of an MoE layer, as in moe.h, or null
};

// Each returns 0 or an error code: kLost or more if a rank was lost.
int32_t interposer_mlp(const interposer_mlp_call* call);
int32_t interposer_project_heads(const interposer_heads_call* call);
int32_t interposer_decoder_block(const interposer_block_call* call);

// Consecutive blocks; each reads the results of the previous one. The last all-reduce of a block is
// fused with the first norm of the next block.
int32_t interposer_decoder_blocks(const interposer_block_call* calls, int64_t count);
}
