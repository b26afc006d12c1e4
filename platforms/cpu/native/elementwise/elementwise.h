// Norms, gated activations, rotary embeddings and quantization: ops that compute rows
// independently.
//
// Rows have two dimensions, outer and inner, each with a stride in elements, so that heads can be
// read in place from the result of a fused projection. Results are contiguous, except for those of
// heads. A result can overwrite x.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_rows_of {
  int64_t outer, inner, width;
  int64_t outer_stride, inner_stride;  // elements
};

// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + shift) + bias; the mean is taken as 0
// unless `centred`. With a residual, x + residual replaces x and is also written to `total`.
struct interposer_norm {
  const void* x;
  const void* weight;  // [width], or null for ones
  const void* bias;    // [width], or null
  void* out;
  int32_t type;  // type of x, weight, bias and y
  int32_t centred;
  interposer_rows_of rows;
  const void* residual;  // contiguous, or null
  void* total;           // type of the residual
  int32_t residual_type;
  float eps, shift;
};

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kQuickGelu = 3 };

// activation(gate) * up, or activation(gate).
struct interposer_gated {
  const void* gate;
  const void* up;  // or null
  void* out;
  int32_t type, out_type;  // out_type: the same type or float32
  int32_t activation;
  interposer_rows_of rows;  // rows of gate and up; width of the result
};

// Heads [outer, inner, width]: each head is normalized if there is a weight, then its first 2 *
// half elements are rotated if there are tables.
struct interposer_heads {
  const void* x;
  const void* weight;  // [width], type of x, or null
  const float* cos;    // [outer, half], or null
  const float* sin;
  void* out;
  int32_t type;
  float eps;
  int64_t half;
  interposer_rows_of rows;
  int64_t out_stride;  // elements between outer rows of the result; heads are adjacent
  bool neighbours;     // rotate neighbouring elements (interleaved), not elements of both halves
};

// How a scale is derived from max|x| / largest quantized value.
enum interposer_powers : int32_t {
  kAnyScale = 0,
  kPowersAbove = 1,     // rounded up to a power of two
  kSharedExponents = 2  // 2^(floor(log2(max|x|)) - floor(log2(largest value))), as in MX formats
};

// codes = round(x / scale), to nearest, ties to even, saturating. The scale is static, or max|x| /
// largest quantized value of a row: 1 if that is 0, optionally a power of two or limited. Shared
// exponents are between -127 (also for zeros) and 127.
struct interposer_coded {
  const void* x;
  void* codes;         // contiguous
  float* scales;       // one per row, contiguous; not written with a static scale
  const float* given;  // static scale for all rows, or null
  int32_t type;
  int32_t code_type;  // kInt8, kE4M3, or kBFloat16 for e4m3fn values stored as bfloat16
  int32_t powers;  // an interposer_powers
  float limit;  // largest scale; 0 for no limit
  interposer_rows_of rows;
};

// Each returns 0, or kNoKernels if the processor supports none of the levels.
int32_t interposer_normalise(const interposer_norm* norm);
int32_t interposer_gate(const interposer_gated* gated);
int32_t interposer_turn_heads(const interposer_heads* heads);
int32_t interposer_code(const interposer_coded* coded);
}

// Compute rows `first` to `last` of the outer times inner rows; for heads, of the outer rows.
struct ElementwiseKernels {
  void (*normalise)(const interposer_norm&, int64_t first, int64_t last);
  void (*gate)(const interposer_gated&, int64_t first, int64_t last);
  void (*turn_heads)(const interposer_heads&, int64_t first, int64_t last);
  void (*code)(const interposer_coded&, int64_t first, int64_t last);
};
