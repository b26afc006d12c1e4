// 2x2 blocks of two rows of x and two outputs, by ARM's matrix instructions.
//
// An operand is two rows of eight bytes. Rows of x have this form already. Operands of weights are
// made by interleaving the words of the same outputs for adjacent inputs.
#pragma once

#include "formats.h"

namespace {

// Matrix-instruction kernel of a format; specialized for the formats that support it.
template <class F>
struct Matrices {
  static constexpr bool kKnown = false;
};

// Compute `sums` of sixteen outputs and M rows, M even, over `steps` rows of words.
template <class F, int M, int C>
void multiply_matrices(typename F::Sum (&sums)[M][1][C], const char* words,
                       const char* const (&x)[M], int64_t steps);

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

INTERPOSER_INLINE uint32x4_t load_four(const char* from) { return load<uint32x4_t>(from); }

struct MatricesOfCodes {
  static constexpr bool kKnown = true;
  typedef int32x4_t Sum;

  static INTERPOSER_INLINE Sum add(Sum sum, uint32x4_t weights, uint8x16_t rows) {
    return vusmmlaq_s32(sum, vreinterpretq_u8_u32(weights), vreinterpretq_s8_u8(rows));
  }
  static INTERPOSER_INLINE Sum of_first_row(Sum a, Sum b) { return vuzp1q_s32(a, b); }
  static INTERPOSER_INLINE Sum of_second_row(Sum a, Sum b) { return vuzp2q_s32(a, b); }
};

template <>
struct Matrices<Int8OnCodes> : MatricesOfCodes {
  static constexpr int kSteps = 2;  // rows of words for eight bytes of x

  static INTERPOSER_INLINE void decode(const char* words, uint32x4_t& first, uint32x4_t& second) {
    first = load_four(words);
    second = load_four(words + kBlock * 4);
  }
};

template <>
struct Matrices<Int4OnCodes> : MatricesOfCodes {
  static constexpr int kSteps = 1;

  static INTERPOSER_INLINE void decode(const char* words, uint32x4_t& first, uint32x4_t& second) {
    const uint32x4_t low = vdupq_n_u32(0x0f0f0f0f), both = load_four(words);
    first = vandq_u32(both, low);
    second = vandq_u32(vshrq_n_u32(both, 4), low);
  }
};

template <class F>
struct Matrices<Symmetric<F>> : Matrices<F> {};

template <>
struct Matrices<BFloat16OnPairs> {
  static constexpr bool kKnown = true;
  static constexpr int kSteps = 2;
  typedef float32x4_t Sum;

  static INTERPOSER_INLINE void decode(const char* words, uint32x4_t& first, uint32x4_t& second) {
    Matrices<Int8OnCodes>::decode(words, first, second);
  }
  static INTERPOSER_INLINE Sum add(Sum sum, uint32x4_t weights, uint8x16_t rows) {
    return vbfmmlaq_f32(sum, vreinterpretq_bf16_u32(weights), vreinterpretq_bf16_u8(rows));
  }
  static INTERPOSER_INLINE Sum of_first_row(Sum a, Sum b) { return vuzp1q_f32(a, b); }
  static INTERPOSER_INLINE Sum of_second_row(Sum a, Sum b) { return vuzp2q_f32(a, b); }
};

template <class F, int M, int C>
INTERPOSER_INLINE void multiply_matrices(typename F::Sum (&sums)[M][1][C], const char* words,
                                         const char* const (&x)[M], int64_t steps) {
  typedef Matrices<F> Way;
  static_assert(M % 2 == 0 && C == 1, "rows are taken by twos");
  // Sums of 2x2 blocks: both rows' sums of the first output, then of the second.
  typename Way::Sum squares[M / 2][8] = {};
  for (int64_t step = 0, at = 0; step < steps; step += Way::kSteps, at += 8) {
    uint8x16_t rows[M / 2];
    for (int p = 0; p < M / 2; ++p) {
      rows[p] = vcombine_u8(load<uint8x8_t>(x[2 * p] + at), load<uint8x8_t>(x[2 * p + 1] + at));
    }
    for (int four = 0; four < 4; ++four) {
      uint32x4_t first, second;
      Way::decode(words + 16 * four, first, second);
      const uint32x4_t low = vzip1q_u32(first, second), high = vzip2q_u32(first, second);
      for (int p = 0; p < M / 2; ++p) {
        squares[p][2 * four] = Way::add(squares[p][2 * four], low, rows[p]);
        squares[p][2 * four + 1] = Way::add(squares[p][2 * four + 1], high, rows[p]);
      }
    }
    words += kBlock * 4 * Way::kSteps;
  }
  for (int p = 0; p < M / 2; ++p) {
    for (int four = 0; four < 4; ++four) {
      const auto a = squares[p][2 * four], b = squares[p][2 * four + 1];
      store((char*)&sums[2 * p][0][0] + 16 * four, Way::of_first_row(a, b));
      store((char*)&sums[2 * p + 1][0][0] + 16 * four, Way::of_second_row(a, b));
    }
  }
}

#endif

}  // namespace
