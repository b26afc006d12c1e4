// Inner loop: a few rows of x times the words of some tiles of a block. Included once for every
// level.
#pragma once

#include "block.h"
#include "formats.h"
#include "matrices.h"

namespace {

#if defined(__AVX512F__)
constexpr int kRegisterTiles = 4;
#else
constexpr int kRegisterTiles = 1;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
#define INTERPOSER_FEW_REGISTERS 1  // sixteen, each of half a tile
constexpr int kMostChained = 2;     // tiles of one row that have two sums each
#else
constexpr int kMostChained = kTiles;
#endif

// Arguments of __builtin_prefetch: the cache that is read into.
constexpr int kToFirstLevel = 3, kToSecondLevel = 2;
constexpr int kPastOthers = 0;  // non-temporal: the first level only

// Whether sums start at minus the shift of all values, which costs nothing.
template <class F>
constexpr bool kRaised = F::kInteger && F::kSymmetric;

// Initialize the sums of a group.
template <class F, bool kIsRaised, int M, int T, int C>
INTERPOSER_INLINE void begin_sums(const Prepared& prepared, Rows rows, int64_t group,
                                  typename F::Sum (&sums)[M][T][C]) {
  for (int m = 0; m < M; ++m) {
    typename F::Sum first = {};
    if constexpr (kIsRaised) first = splat(prepared.sums[rows[m] * prepared.num_groups + group]);
    for (int t = 0; t < T; ++t) {
      sums[m][t][0] = first;
      for (int chain = 1; chain < C; ++chain) sums[m][t][chain] = typename F::Sum{};
    }
  }
}

// Convert the sum of a row's inputs in one group to float.
template <class F, bool kIsRaised>
INTERPOSER_INLINE Floats ended(const interposer_product& product, const Prepared& prepared,
                               int64_t row, int64_t group, typename F::Sum sum, Ints zero,
                               Floats scale) {
  if constexpr (kIsRaised) {
    return converted<Floats>(sum) * scale;
  } else {
    return scaled<F>(product, prepared, row, group, sum, zero, scale);
  }
}

// Add `steps` rows of words times x to the first `sums` of M rows and T tiles. Advances `words` and
// `x`. Prefetches kLines cache lines per step from `ahead` on unless it is null.
template <class F, int kFetch, int kLines, int M, int T, int C>
INTERPOSER_INLINE void add_products(typename F::Sum (&sums)[M][T][C], const char*& words,
                                    const char* (&x)[M], int64_t steps, const Ints (&zero)[T],
                                    const char*& ahead) {
  // With many rows, sums fill the registers. Then one decoded part is kept next to them for all
  // tiles, so that every number of x is read once.
  constexpr bool kByParts = M > 2 && (kRegisterTiles > 1 || F::kParts > 2);
  for (int64_t step = 0; step < steps; ++step) {
    if constexpr (kByParts) {
      Words codes[T];
      for (int t = 0; t < T; ++t) {
        if (ahead && t < kLines) __builtin_prefetch(ahead + t * 64, 0, kFetch);
        codes[t] = load<Words>(words + t * 64);
      }
#pragma GCC unroll 8
      for (int p = 0; p < F::kParts; ++p) {
        typename F::Part parts[T];
        for (int t = 0; t < T; ++t) parts[t] = F::part(codes[t], zero[t], p);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const char* from = x[m] + F::place(p) * F::kInputBytes;
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) F::add(sums[m][t][0], parts[t], from);
        }
      }
    } else {
      for (int t = 0; t < T; ++t) {
        if (ahead && t < kLines) __builtin_prefetch(ahead + t * 64, 0, kFetch);
        typename F::Part parts[F::kParts];
        decode<F>(load<Words>(words + t * 64), zero[t], parts);
        for (int m = 0; m < M; ++m) {
          for (int p = 0; p < F::kParts; ++p) {
            F::add(sums[m][t][p % C], parts[p], x[m] + F::place(p) * F::kInputBytes);
          }
        }
      }
    }
    words += kBlock * 4;
    if (ahead) ahead += kLines * 64;
    for (int m = 0; m < M; ++m) x[m] += F::kInputs * F::kInputBytes;
  }
}

// The same for all formats: sums of 16 bits are added to `sums` before they can overflow.
template <class F, int kFetch, int kLines, int M, int T, int C>
INTERPOSER_INLINE void add_steps(typename F::Sum (&sums)[M][T][C], const char*& words,
                                 const char* (&x)[M], int64_t steps, const Ints (&zero)[T],
                                 const char*& ahead) {
  if constexpr (F::kNarrowSteps == 0) {
    add_products<F, kFetch, kLines>(sums, words, x, steps, zero, ahead);
  } else {
    for (int64_t left = steps; left > 0; left -= F::kNarrowSteps) {
      typename F::Sum narrow[M][T][C] = {};
      if (left >= F::kNarrowSteps) {
        add_products<F, kFetch, kLines>(narrow, words, x, F::kNarrowSteps, zero, ahead);
      } else {
        add_products<F, kFetch, kLines>(narrow, words, x, left, zero, ahead);
      }
      for (int m = 0; m < M; ++m) {
        for (int t = 0; t < T; ++t) {
          for (int chain = 0; chain < C; ++chain) F::widen(sums[m][t][chain], narrow[m][t][chain]);
        }
      }
    }
  }
}

}  // namespace
