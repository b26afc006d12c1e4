// Instruction levels that kernels are compiled for, and the levels that this processor supports.
#pragma once

#include <cstdint>

// Ascending. A level includes all lower levels of its architecture, except that AVX-512 replaces
// AVX2-VNNI.
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
// Highest level that processor and operating system support; kNoLevel if none.
int32_t interposer_best_level();

// Level in use: the highest one unless another level was forced.
int32_t interposer_level();

// Use `level` from now on. Returns 0 and changes nothing if the processor lacks the level.
int32_t interposer_force_level(int32_t level);

// Levels that the processor supports, ascending, terminated by kNoLevel.
const int32_t* interposer_levels();

// Whether packed weights are read fastest with non-temporal prefetch: true on AMD. On Intel,
// non-temporal prefetch takes more than twice as long as prefetch to the second-level cache.
bool interposer_reads_past_caches();

// Override interposer_reads_past_caches; a negative value restores detection of the processor.
void interposer_force_reads_past_caches(int32_t whether);
}

// Levels that old compilers do not support.
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

// Levels as X(arguments..., name of their files, number), ascending. Three lists: all levels of
// this architecture, those that speed up float32 code, and those that speed up code for float32 or
// bfloat16.
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

// Define `kernels`, which returns a family's kernel table for the highest of its levels that does
// not exceed the level in use, or null.
#define INTERPOSER_FAMILY(Kernels, family, Levels) \
  Levels(INTERPOSER_DECLARE, Kernels, family)      \
  static const Kernels* kernels() {                \
    const int32_t in_use = interposer_level();     \
    const Kernels* found = nullptr;                \
    Levels(INTERPOSER_TAKE, family)                \
    return found;                                  \
  }
