// Multi-LoRA kernels: every row uses the matrices of its adapter.
#pragma once

#include <cstdint>

extern "C" {

// y[t] = scale * a[ids[t]] x[t]; zeros if the id is negative. Rows of a are stored in blocks of at
// most kLoraRanks rows, in which chunks of kLoraInputs inputs of each row alternate, so that a
// block is read sequentially.
struct interposer_lora_shrink {
  const void* x;       // [T, inputs]
  const void* a;       // [adapters, blocks, chunks of inputs, rows, at most kLoraInputs]
  const int64_t* ids;  // [T]
  float* y;            // [T, rank], contiguous
  int32_t type;        // of x and a
  float scale;
  int64_t tokens, rank, inputs;
  int64_t x_stride;  // elements between tokens
};

// y[t] += x[t] b[ids[t]]; unchanged if the id is negative. Outputs of b are stored in panels, which
// are read sequentially; the last one can be narrower. In bfloat16, the ranks of a panel are
// interleaved in pairs: the two numbers of an output are adjacent. An odd last rank is stored
// alone.
struct interposer_lora_expand {
  const float* x;      // [T, rank]
  const void* b;       // [adapters, panels, rank, at most kLoraPanel]
  const int64_t* ids;  // [T]
  void* y;             // [T, outputs]
  int32_t type;        // of b
  int32_t y_type;      // type of b, or kFloat32
  int64_t tokens, rank, outputs;
  int64_t x_stride, y_stride;  // elements between tokens
};

// LoRA of a range of output columns of a layer.
struct interposer_low_rank_part {
  const void* b;  // as in interposer_lora_expand
  int64_t outputs, offset;
};

// LoRA of a layer, in 64-bit words. The ranks of all parts are consecutive in a.
struct interposer_low_rank {
  const void* a;  // as in interposer_lora_shrink, with count * rank rows
  int64_t type, rank, inputs, count;
  interposer_low_rank_part parts[1];  // `count` of them
};

// y += LoRA of x, for one layer in a fused block.
struct interposer_low_rank_call {
  const interposer_low_rank* low_rank;
  const int64_t* ids;  // [rows]
  const void* x;       // [rows, inputs], type of a
  void* y;             // [rows, outputs of the layer]
  int32_t y_type;
  int64_t rows, x_stride, y_stride;  // elements
};

// Each returns 0, or kNoKernels if the processor supports none of the levels.
int32_t interposer_add_low_rank(const interposer_low_rank_call* call);
int32_t interposer_lora_shrink_rows(const interposer_lora_shrink* call);
int32_t interposer_lora_expand_rows(const interposer_lora_expand* call);
}

// Sizes of tasks: blocks of tokens, divided further into blocks of ranks or of outputs, so that few
// tokens occupy all threads.
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
