// Instruction sets that kernels were compiled for, and which of them this processor has.
#pragma once

#include <cstdint>

// In ascending order; each holds what those before it on its architecture hold, but for AVX2-VNNI,
// whose instruction those of AVX-512 replace.
enum Level : int32_t {
  kNoLevel = 0,
  kAVX2 = 1,
  kAVX2VNNI = 2,
  kAVX512 = 3,
  kAVX512VNNI = 4,
  kAVX512BF16 = 5,
  kAMX = 6,
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

// Whether words that are read once come fastest past the second level of caches: on processors of AMD.
// Those of Intel take more than twice as long so, and read them fastest through it.
bool interposer_reads_past_caches();

// Answer that with `whether` from now on; below zero, with what the processor is.
void interposer_force_reads_past_caches(int32_t whether);
}

// Levels that compilers of some age do not know.
#if defined(INTERPOSER_WITH_avx2_vnni)
#define INTERPOSER_AVX2_VNNI(X, ...) X(__VA_ARGS__, avx2_vnni, kAVX2VNNI)
#else
#define INTERPOSER_AVX2_VNNI(X, ...)
#endif
#if defined(INTERPOSER_WITH_amx)
#define INTERPOSER_AMX(X, ...) X(__VA_ARGS__, amx, kAMX)
#else
#define INTERPOSER_AMX(X, ...)
#endif

// Levels as X(arguments..., name of their files, number), ascending: every one of this architecture,
// those that bring anything to code on float32, and those that do to code that reads and writes
// bfloat16 too.
#if defined(__x86_64__)
#define INTERPOSER_LEVELS(X, ...)          \
  X(__VA_ARGS__, avx2, kAVX2)              \
  INTERPOSER_AVX2_VNNI(X, __VA_ARGS__)     \
  X(__VA_ARGS__, avx512, kAVX512)          \
  X(__VA_ARGS__, avx512_vnni, kAVX512VNNI) \
  X(__VA_ARGS__, avx512_bf16, kAVX512BF16) \
  INTERPOSER_AMX(X, __VA_ARGS__)
#define INTERPOSER_FLOAT_LEVELS(X, ...) \
  X(__VA_ARGS__, avx2, kAVX2)           \
  X(__VA_ARGS__, avx512, kAVX512)
#define INTERPOSER_BFLOAT16_LEVELS(X, ...) \
  INTERPOSER_FLOAT_LEVELS(X, __VA_ARGS__)  \
  X(__VA_ARGS__, avx512_bf16, kAVX512BF16)
#elif defined(__aarch64__)
#define INTERPOSER_LEVELS(X, ...)   \
  X(__VA_ARGS__, neon, kNEON)       \
  X(__VA_ARGS__, dotprod, kDotProd) \
  X(__VA_ARGS__, bf16_i8mm, kBF16I8MM)
#define INTERPOSER_FLOAT_LEVELS(X, ...) \
  X(__VA_ARGS__, neon, kNEON)
#define INTERPOSER_BFLOAT16_LEVELS(X, ...) \
  X(__VA_ARGS__, neon, kNEON)              \
  X(__VA_ARGS__, bf16_i8mm, kBF16I8MM)
#elif defined(__s390x__)
#define INTERPOSER_LEVELS(X, ...) \
  X(__VA_ARGS__, z14, kZ14)       \
  X(__VA_ARGS__, z15, kZ15)
#define INTERPOSER_FLOAT_LEVELS INTERPOSER_LEVELS
#define INTERPOSER_BFLOAT16_LEVELS INTERPOSER_LEVELS
#else
#define INTERPOSER_LEVELS(X, ...)
#define INTERPOSER_FLOAT_LEVELS INTERPOSER_LEVELS
#define INTERPOSER_BFLOAT16_LEVELS INTERPOSER_LEVELS
#endif

#define INTERPOSER_DECLARE(Kernels, family, name, level) \
  extern "C" const Kernels interposer_##family##_##name;
#define INTERPOSER_TAKE(family, name, level) \
  if (in_use >= level) found = &interposer_##family##_##name;

// Define `kernels`, which returns a family's table of the best of its levels that the one in use
// holds, or null.
#define INTERPOSER_FAMILY(Kernels, family, Levels) \
  Levels(INTERPOSER_DECLARE, Kernels, family)      \
  static const Kernels* kernels() {                \
    const int32_t in_use = interposer_level();     \
    const Kernels* found = nullptr;                \
    Levels(INTERPOSER_TAKE, family)                \
    return found;                                  \
  }
