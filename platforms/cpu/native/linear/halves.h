// float32 sums in two halves of eight lanes, for processors without 16-lane registers.
//
// There, compilers keep 16-lane sums in memory, with a load and a store at every step, which makes
// a GEMM ten times slower.
#pragma once

#include "formats.h"

namespace {

// Decoder of half a row of words; specialized for the formats that support halves.
template <class F>
struct InHalves {
  static constexpr bool kKnown = false;
};

// Compute the first `sums` of M rows and T tiles over `steps` rows of words. Prefetches `ahead`
// unless it is null.
template <class F, int kFetch, int M, int T, int C>
void multiply_halves(Floats (&sums)[M][T][C], const char* words, const char* const (&x)[M],
                     int64_t steps, const char*& ahead);

#if defined(__AVX2__) && !defined(__AVX512F__)

template <>
struct InHalves<Float32OnFloats> {
  static constexpr bool kKnown = true;

  static INTERPOSER_INLINE __m256 part(__m256i words, int) { return _mm256_castsi256_ps(words); }
};

template <>
struct InHalves<BFloat16OnFloats> {
  static constexpr bool kKnown = true;

  static INTERPOSER_INLINE __m256 part(__m256i words, int index) {
    const __m256i high = _mm256_set1_epi32(int32_t(0xffff0000u));
    return _mm256_castsi256_ps(index ? _mm256_and_si256(words, high) : _mm256_slli_epi32(words, 16));
  }
};

template <class F, int kFetch, int M, int T, int C>
INTERPOSER_INLINE void multiply_halves(Floats (&sums)[M][T][C], const char* words,
                                       const char* const (&x)[M], int64_t steps,
                                       const char*& ahead) {
  __m256 totals[M][2 * T];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int h = 0; h < 2 * T; ++h) totals[m][h] = _mm256_setzero_ps();
  }
  const char* const end = words + steps * kBlock * 4;
  for (int64_t at = 0; words < end; words += kBlock * 4, at += F::kInputs * F::kInputBytes) {
    if (ahead) {
      for (int t = 0; t < T; ++t) __builtin_prefetch(ahead + t * 64, 0, kFetch);
      ahead += T * 64;
    }
    __m256i halves[2 * T];
#pragma GCC unroll 4
    for (int h = 0; h < 2 * T; ++h) {
      halves[h] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + h * 32));
    }
#pragma GCC unroll 2
    for (int p = 0; p < F::kParts; ++p) {
      __m256 parts[2 * T];
#pragma GCC unroll 4
      for (int h = 0; h < 2 * T; ++h) parts[h] = InHalves<F>::part(halves[h], p);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const char* from = x[m] + at + F::place(p) * F::kInputBytes;
        const __m256 input = _mm256_broadcast_ss(reinterpret_cast<const float*>(from));
#pragma GCC unroll 4
        for (int h = 0; h < 2 * T; ++h) {
          totals[m][h] = _mm256_fmadd_ps(parts[h], input, totals[m][h]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int h = 0; h < 2 * T; ++h) {
      char* sum = reinterpret_cast<char*>(&sums[m][h / 2][0]) + h % 2 * 32;
      _mm256_storeu_ps(reinterpret_cast<float*>(sum), totals[m][h]);
    }
  }
}

#endif

}  // namespace
