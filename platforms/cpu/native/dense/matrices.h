// Multiplication by ARM's matrix instructions, with x in place. Included once for every level.
//
// As in attention/matrices.h, sums have the same bits as with vectors.
#pragma once

#include "../operands.h"

#if defined(INTERPOSER_MATRICES)

namespace {

// Continue sums [M][16], M even, for all pairs of `steps` rows of words. `operand(m, step)` returns
// the numbers of rows m and m + 1 of x for two steps. Returns the number of steps done.
template <int M, class Operand>
INTERPOSER_INLINE int64_t add_squares(Floats (&sums)[M][1], const char* words, int64_t row_bytes,
                                      int64_t steps, Operand operand) {
  constexpr int P = M / 2, Q = kLanes / kQuarter;
  float32x4_t squares[P][Q][2];
  const auto at = [&](int m, int q) { return (char*)&sums[m][0] + q * kQuarter * 4; };
  for (int p = 0; p < P; ++p) {
    for (int q = 0; q < Q; ++q) {
      for (int i = 0; i < 2; ++i) squares[p][q][i] = load<float32x4_t>(at(2 * p + i, q));
      exchange(squares[p][q][0], squares[p][q][1]);
    }
  }
  const int64_t end = steps / 2 * 2;
#pragma GCC unroll 1
  for (int64_t step = 0; step < end; step += 2) {
    uint8x16_t x[P];
    for (int p = 0; p < P; ++p) x[p] = operand(2 * p, step);
    for (int q = 0; q < Q; ++q) {
      const LanePairs pairs(words + step * row_bytes + q * kQuarter * 4, row_bytes);
      for (int p = 0; p < P; ++p) {
        squares[p][q][0] = multiply_bfloat16(squares[p][q][0], x[p], pairs.low);
        squares[p][q][1] = multiply_bfloat16(squares[p][q][1], x[p], pairs.high);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    for (int q = 0; q < Q; ++q) {
      exchange(squares[p][q][0], squares[p][q][1]);
      for (int i = 0; i < 2; ++i) store(at(2 * p + i, q), squares[p][q][i]);
    }
  }
  return end;
}

}  // namespace

#endif
