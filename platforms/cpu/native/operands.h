// Operands of ARM's matrix instructions, two rows of eight bytes. Included once for every level.
#pragma once

#include "vectors.h"

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define INTERPOSER_MATRICES 1

namespace {

constexpr int kOperandBytes = 16, kOperandRowBytes = 8;
constexpr int kQuarter = 4;  // lanes

// Convert two rows of four numbers to the pair of their first halves and the pair of their second
// halves, or back.
template <class V>
INTERPOSER_INLINE void exchange(V& a, V& b) {
  const float64x2_t first = (float64x2_t)a, second = (float64x2_t)b;
  a = (V)vzip1q_f64(first, second);
  b = (V)vzip2q_f64(first, second);
}

// Interleave two consecutive rows of packed words lane by lane: two lanes make one operand.
struct LanePairs {
  uint32x4_t low, high;

  INTERPOSER_INLINE LanePairs(const char* words, int64_t row_bytes) {
    const uint32x4_t first = load<uint32x4_t>(words), second = load<uint32x4_t>(words + row_bytes);
    low = vzip1q_u32(first, second);
    high = vzip2q_u32(first, second);
  }
};

INTERPOSER_INLINE float32x4_t multiply_bfloat16(float32x4_t sum, uint8x16_t x, uint32x4_t words) {
  return vbfmmlaq_f32(sum, vreinterpretq_bf16_u8(x), vreinterpretq_bf16_u32(words));
}

}  // namespace

#endif
