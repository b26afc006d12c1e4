// Instruction sets that kernels were compiled for, and which of them this processor has.
#pragma once

#include <cstdint>

// In ascending order; each holds what those before it on its architecture hold.
enum Level : int32_t {
  kNoLevel = 0,
  kAVX2 = 1,
  kAVX512 = 2,
  kAVX512VNNI = 3,
  kAVX512BF16 = 4,
  kNEON = 16,
  kDotProd = 17,
  kBF16I8MM = 18,
  kZ14 = 32,
  kZ15 = 33,
};

extern "C" {
// The best level that processor and operating system support; kNoLevel if none.
int32_t interposer_best_level();

// The level in use: the best, unless another one was forced.
int32_t interposer_level();

// Use `level` from now on. Returns 0 and changes nothing if the processor lacks it.
int32_t interposer_force_level(int32_t level);

// The levels that the processor supports, ascending, ended by kNoLevel.
const int32_t* interposer_levels();
}
