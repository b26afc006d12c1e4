// Weight quantization to 8-bit or 4-bit integers, with one scale per group of inputs.
//
// Formulas, in float32, rounded at every operation: low and high are the minimum and maximum of a
// group and 0. With b bits, n = 2^b - 1 and m = 2^(b - 1):
//
//   symmetric   scale = 2 max(-low, high) / n,  code = clamp(round(w / scale), -m, m - 1)
//   asymmetric  scale = (high - low) / n,       zero = clamp(round(-m - low / scale), -m, m - 1),
//               code = clamp(round(w / scale + zero), -m, m - 1)
//
// Scales are rounded to `scale_type` before they are used as divisors, and are 1 if they would be
// 0. With 4 bits, stored values and zeros are shifted by m. A group with an infinity or NaN gets a
// scale that is infinite or NaN, and arbitrary values.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_rounded {
  const void* weight;  // [O, I]
  void* codes;         // contiguous [O, I] int8, or [O, I / 2] with the first value in the low half
  float* scales;       // [O, I / group]
  uint8_t* zeros;      // [O, I / group], or null for symmetric quantization
  int32_t type;        // of the weight
  int32_t scale_type;
  int32_t bits;  // 8, or 4 with an even number of inputs
  int64_t outputs, inputs;
  int64_t stride;  // elements between outputs of the weight
  int64_t group;   // divides the inputs
};

// Returns 0, kNoKernels if the processor supports none of the levels, or kNoMemory.
int32_t interposer_round(const interposer_rounded* rounded);
}

struct RoundingKernels {
  // Quantize outputs `first` to `last`. Returns false if out of memory.
  bool (*round)(const interposer_rounded&, int64_t first, int64_t last);
};
