// Sums of rows of x times rows of words. Included once for every level.
#pragma once

#include "block.h"
#include "formats.h"

namespace {

// Bytes by which x advances per word.
template <class F>
constexpr int kStepBytes = F::kInputs * F::kInputBytes / F::kPlanes;

// Address of a row of x, or of one of its planes.
template <class F>
INTERPOSER_INLINE int64_t row_at(int row, int64_t x_stride, int64_t plane_bytes) {
  return row / F::kPlanes * x_stride + row % F::kPlanes * plane_bytes;
}

// Convert the sums of a row, with all planes, to float.
template <class F, int R, int T>
INTERPOSER_INLINE Floats joined(const typename F::Sum (&sums)[R][T], int m, int t,
                                const Planes* planes) {
  if constexpr (F::kCodes) {
    const Planes& of = planes[m];
    const Ints high = sums[2 * m][t] - splat(of.excess[0]);
    const Ints low = sums[2 * m + 1][t] - splat(of.excess[1]);
    return (converted<Floats>(high) * splat(256.0f) +
            converted<Floats>(low)) *
           splat(of.unit);
  } else {
    return sums[m][t];
  }
}

// `M` counts planes of rows.
template <class F, int M, int T>
INTERPOSER_INLINE void add_products(typename F::Sum (&sums)[M][T], const char* const (&words)[T],
                                    int64_t row_bytes, int64_t steps, const char* x,
                                    int64_t x_stride, int64_t plane_bytes,
                                    const char* const (&ahead)[T], int64_t ahead_bytes) {
  for (int64_t step = 0; step < steps; ++step) {
    for (int t = 0; t < T; ++t) {
      typename F::Part parts[F::kParts];
      __builtin_prefetch(ahead[t] + step * ahead_bytes, 0, kSecondLevel);
      F::decode(load<Words>(words[t] + step * row_bytes), parts);
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < F::kParts; ++p) {
          F::add(sums[m][t], parts[p],
                 x + row_at<F>(m, x_stride, plane_bytes) + F::place(p) * F::kInputBytes);
        }
      }
    }
    x += kStepBytes<F>;
  }
}

}  // namespace
