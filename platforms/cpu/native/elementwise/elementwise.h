// Norms, gated activations, rotations and codes: what takes rows one by one.
//
// Rows stand in two dimensions, outer and inner, each with a distance in elements, so that the
// heads of queries can be taken out of one projection as they lie. Results have no gaps, but for
// those of heads. A result may take the place of x.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_rows_of {
  int64_t outer, inner, width;
  int64_t outer_stride, inner_stride;  // elements
};

// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + shift) + bias; the mean counts as 0
// unless `centred`. With a residual x + residual takes the place of x, and is written besides.
struct interposer_norm {
  const void* x;
  const void* weight;  // [width], or null for ones
  const void* bias;    // [width], or null
  void* out;
  int32_t type;  // of all of them
  int32_t centred;
  interposer_rows_of rows;
  const void* residual;  // without gaps, or null
  void* total;           // of the residual's type
  int32_t residual_type;
  float eps, shift;
};

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// activation(gate) * up.
struct interposer_gated {
  const void* gate;
  const void* up;
  void* out;
  int32_t type, out_type;  // that of the result, or float32
  int32_t activation;
  interposer_rows_of rows;  // of gate and up; width is that of the result
};

// Heads [outer, inner, width], each normalised by itself where there is a weight, then rotated
// where there are tables: its first 2 * half elements.
struct interposer_heads {
  const void* x;
  const void* weight;  // [width] of the type of x, or null
  const float* cos;    // [outer, half], or null
  const float* sin;
  void* out;
  int32_t type;
  float eps;
  int64_t half;
  interposer_rows_of rows;
  int64_t out_stride;  // elements between outer rows of the result, whose heads have no gaps
  bool neighbours;     // are turned together, not an element of each half
};

// What scales of codes are besides max|x| / largest code.
enum interposer_powers : int32_t {
  kAnyScale = 0,
  kPowersAbove = 1,     // rounded up to a power of two
  kSharedExponents = 2  // 2^(floor(log2(max|x|)) - that of the largest code), as MX formats have it
};

// codes = round(x / scale) to the nearest code, ties to even, saturating. The scale is given, or
// max|x| / largest code of a row: 1 where that is 0, a power of two or limited if so wanted. Shared
// exponents are at least -127, also of zeros, and at most 127.
struct interposer_coded {
  const void* x;
  void* codes;         // without gaps
  float* scales;       // of each row, without gaps; not written where one is given
  const float* given;  // one scale for all rows, or null
  int32_t type;
  int32_t code_type;  // kInt8 or kE4M3; kBFloat16 for numbers of e4m3fn that it holds
  int32_t powers;  // of interposer_powers
  float limit;  // the largest scale; 0 for none
  interposer_rows_of rows;
};

// Each returns 0, or kNoKernels where the processor has none of the levels.
int32_t interposer_normalise(const interposer_norm* norm);
int32_t interposer_gate(const interposer_gated* gated);
int32_t interposer_turn_heads(const interposer_heads* heads);
int32_t interposer_code(const interposer_coded* coded);
}

// Rows from `first` to `last`, of outer times inner; of heads, of outer.
struct ElementwiseKernels {
  void (*normalise)(const interposer_norm&, int64_t first, int64_t last);
  void (*gate)(const interposer_gated&, int64_t first, int64_t last);
  void (*turn_heads)(const interposer_heads&, int64_t first, int64_t last);
  void (*code)(const interposer_coded&, int64_t first, int64_t last);
};
