// Weights to integers of eight or four bits, each group of inputs with a scale of its own.
//
// Formulas, in float32 and rounded as they stand: low and high are the ends of a group's numbers,
// both of which 0 lies between. With b bits, n = 2^b - 1 and m = 2^(b - 1):
//
//   symmetric   scale = 2 max(-low, high) / n,  code = clamp(round(w / scale), -m, m - 1)
//   asymmetric  scale = (high - low) / n,       zero = clamp(round(-m - low / scale), -m, m - 1),
//               code = clamp(round(w / scale + zero), -m, m - 1)
//
// Scales are rounded to `scale_type` before they are divided by, and 1 where they are 0. Of four
// bits, codes and zeros are raised by m. A group that holds an infinity or a NaN gets a scale that
// is one too, and any codes.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_rounded {
  const void* weight;  // [O, I]
  void* codes;         // without gaps: [O, I] int8, or [O, I / 2] with the first in the low half
  float* scales;       // [O, I / group]
  uint8_t* zeros;      // [O, I / group], or null where codes are symmetric
  int32_t type;        // of the weight
  int32_t scale_type;
  int32_t bits;  // 8, or 4 of an even number of inputs
  int64_t outputs, inputs;
  int64_t stride;  // elements between outputs of the weight
  int64_t group;   // divides the inputs
};

// Returns 0, kNoKernels where the processor has none of the levels, or kNoMemory.
int32_t interposer_round(const interposer_rounded* rounded);
}

struct RoundingKernels {
  // Outputs from `first` to `last`. Returns false where there was no memory for it.
  bool (*round)(const interposer_rounded&, int64_t first, int64_t last);
};
