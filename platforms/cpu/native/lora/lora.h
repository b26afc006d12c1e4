// Adapters of low rank: both products, each row by the matrices of its own adapter.
#pragma once

#include <cstdint>

extern "C" {

// y[t] = scale * a[ids[t]] x[t], zeros where the id is negative. Rows of a lie in blocks of at most
// kLoraRanks, in which kLoraInputs inputs of each row follow each other, so that a block is read from
// front to end.
struct interposer_lora_shrink {
  const void* x;       // [T, inputs]
  const void* a;       // [adapters, blocks, chunks of inputs, rows, at most kLoraInputs]
  const int64_t* ids;  // [T]
  float* y;            // [T, rank] without gaps
  int32_t type;        // of x and a
  float scale;
  int64_t tokens, rank, inputs;
  int64_t x_stride;  // elements between tokens
};

// y[t] += x[t] b[ids[t]], nothing where the id is negative. Outputs of b lie in panels, which are read
// from front to end; the last one may be narrower. Of bfloat16, a panel has pairs of ranks: the two
// numbers of an output stand beside each other, and a last rank without another one by itself.
struct interposer_lora_expand {
  const float* x;      // [T, rank]
  const void* b;       // [adapters, panels, rank, at most kLoraPanel]
  const int64_t* ids;  // [T]
  void* y;             // [T, outputs]
  int32_t type;        // of b
  int32_t y_type;      // the same, or kFloat32
  int64_t tokens, rank, outputs;
  int64_t x_stride, y_stride;  // elements between tokens
};

// What adapters add to some columns of the outputs of a layer.
struct interposer_low_rank_part {
  const void* b;  // of interposer_lora_expand
  int64_t outputs, offset;
};

// What adapters add to the outputs of a layer, in words of 64 bits. Ranks of all parts stand behind
// each other in a.
struct interposer_low_rank {
  const void* a;  // of interposer_lora_shrink, for count * rank rows
  int64_t type, rank, inputs, count;
  interposer_low_rank_part parts[1];  // `count` of them
};

// y += what adapters add for x, of a layer's inputs and outputs in a block.
struct interposer_low_rank_call {
  const interposer_low_rank* low_rank;
  const int64_t* ids;  // [rows]
  const void* x;       // [rows, inputs], of the type of a
  void* y;             // [rows, outputs of the layer]
  int32_t y_type;
  int64_t rows, x_stride, y_stride;  // elements
};

// Each returns 0, or kNoKernels where the processor has none of the levels.
int32_t interposer_add_low_rank(const interposer_low_rank_call* call);
int32_t interposer_lora_shrink_rows(const interposer_lora_shrink* call);
int32_t interposer_lora_expand_rows(const interposer_lora_expand* call);
}

// Parts that a call is shared out by: blocks of tokens, and of each of them blocks of ranks or of
// outputs, so that few tokens keep all threads at work.
constexpr int64_t kLoraTokens = 64, kLoraRanks = 4, kLoraInputs = 32, kLoraPanel = 64;
constexpr int64_t kLoraOutputs = 4 * kLoraPanel;
inline int64_t blocks_of(const interposer_lora_shrink& call) {
  return (call.rank + kLoraRanks - 1) / kLoraRanks;
}
inline int64_t blocks_of(const interposer_lora_expand& call) {
  return (call.outputs + kLoraOutputs - 1) / kLoraOutputs;
}
template <class Call>
int64_t parts_of(const Call& call) {
  return (call.tokens + kLoraTokens - 1) / kLoraTokens * blocks_of(call);
}

struct LoraKernels {
  void (*shrink)(const interposer_lora_shrink&, int64_t first, int64_t last);
  void (*expand)(const interposer_lora_expand&, int64_t first, int64_t last);
};
