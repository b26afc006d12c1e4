// Functions of a softmax in base 2. Included once for every level.
#pragma once

#include "../vectors.h"

namespace {

constexpr float kLog2E = 1.44269504f;
// Below any score, but near enough that differences stay finite.
constexpr float kLowest = -1e30f;

#if defined(__AVX512F__)
constexpr __mmask16 kAllLanes = 0xffff;  // unmasked forms: warnings about undefined values
#endif

// Maximum; `b` if either is NaN.
INTERPOSER_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_max_ps(kAllLanes, (__m512)a, (__m512)b);
#else
  return chosen(a > b, a, b);
#endif
}

// 2^x for x <= 0, relative error below 2e-7 for normal results; 0 far below.
INTERPOSER_INLINE Floats exp2_of(Floats x) {
#if defined(__AVX512F__)
  // So low that the result is 0, but finite, so that the distance to the nearest integer is a
  // number.
  const Floats reached = larger(splat(-160.0f), x);
  const Floats whole = (Floats)_mm512_maskz_roundscale_ps(kAllLanes, (__m512)reached,
                                                          _MM_FROUND_TO_NEAREST_INT);
  const Floats f = reached - whole;
#else
  const Floats magic = splat(12582912.0f);  // adding it rounds to an integer
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
#endif
  Floats power = splat(0.001326472731307149f);
  power = power * f + splat(0.009671512991189957f);
  power = power * f + splat(0.05550733581185341f);
  power = power * f + splat(0.24022242426872253f);
  power = power * f + splat(0.6931470036506653f);
  power = power * f + splat(1.0f);
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(kAllLanes, (__m512)power, (__m512)whole);
#else
  const Floats result = (Floats)((Words)power + ((Words)shifted << 23));  // may wrap if unused
  return chosen(x < splat(-126.0f), splat(0.0f), result);
#endif
}

INTERPOSER_INLINE float exp2_of(float x) { return exp2_of(splat(x))[0]; }

INTERPOSER_INLINE Floats tanh_of(Floats x) {
  const Floats magnitude = (Floats)((Ints)x & 0x7fffffff);
  const Floats e = exp2_of(magnitude * splat(-2 * kLog2E));
  const Floats result = (splat(1.0f) - e) / (splat(1.0f) + e);
  return (Floats)((Ints)result | ((Ints)x & splat(int32_t(0x80000000))));
}

INTERPOSER_INLINE float sum_of(Floats values) {
  float sums[kLanes];
  store(sums, values);
  for (int width = kLanes / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

INTERPOSER_INLINE float largest_of(Floats values) {
  float found[kLanes];
  store(found, values);
  for (int width = kLanes / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) {
      found[i] = found[i] > found[i + width] ? found[i] : found[i + width];
    }
  }
  return found[0];
}

constexpr int64_t rounded_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

}  // namespace
