// Functions of numbers, sixteen lanes at a time. Included once for every level.
#pragma once

#include "../vectors.h"

// Lambdas are called once per sixteen numbers; if not inlined, the call costs more than the work.
#define INTERPOSER_LAMBDA __attribute__((always_inline))

namespace {

INTERPOSER_INLINE Floats magnitude(Floats x) { return as_floats((Words)x & 0x7fffffffu); }

// Clamp x to [-limit, limit]; NaN stays NaN.
INTERPOSER_INLINE Floats limited(Floats x, float limit) {
  const Words size = (Words)magnitude(x), bound = (Words)splat(limit);
  // Magnitudes are ordered like their bits, with NaN last.
  const Words beyond = less(bound, size) & ~less(splat(uint32_t(0x7f800000)), size);
  return chosen(beyond, as_floats(((Words)x & 0x80000000u) | bound), x);
}

// Multiply by 2^n, n from -252 to 254, as two factors that each have a valid exponent.
INTERPOSER_INLINE Floats scaled(Floats x, Ints n) {
  const Ints half = n >> 1;
  return x * (Floats)((half + 127) << 23) * (Floats)((n - half + 127) << 23);
}

// After adding 1.5 * 2^23, a float32 has no bits left for fractions.
constexpr float kRound = 12582912.0f;

// exp(x), accurate to two units in the last place, also for subnormal or infinite results.
INTERPOSER_INLINE Floats exponential(Floats x) {
  x = limited(x, 104.0f);
  const Floats rounded = x * 1.44269504f + kRound;
  const Ints n = (Ints)rounded - 0x4b400000;
  const Floats count = rounded - kRound;
  // ln 2 in two parts; the first times `count` is exact.
  const Floats r = x - count * 0.693359375f + count * 2.12194440e-4f;
  Floats sum = splat(1.0f / 5040);
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return scaled(sum, n);
}

// x * sigmoid(slope); the sigmoid of minus infinity is 0.
INTERPOSER_INLINE Floats sigmoid_weighted(Floats x, Floats slope) {
  return x / (1.0f + exponential(-slope));
}

// Normal cumulative distribution function Phi(x). The complementary error function of z is
// exp(-z^2) t p(t) with t = 1 / (1 + 0.4 z); the polynomial p was fitted to 2e-7 at Chebyshev
// nodes.
INTERPOSER_INLINE Floats probability_below(Floats x) {
  const Floats z = magnitude(x) * 0.70710678f;
  const Floats t = 1.0f / (1.0f + 0.4f * z);
  Floats sum = splat(0.049550384283065796f);
  sum = sum * t - 0.1801198124885559f;
  sum = sum * t + 0.16468313336372375f;
  sum = sum * t - 0.0019938757177442312f;
  sum = sum * t + 0.13979604840278625f;
  sum = sum * t + 0.16894148290157318f;
  sum = sum * t + 0.2077951282262802f;
  sum = sum * t + 0.22567173838615417f;
  sum = sum * t + 0.22567585110664368f;
  const Floats tail = 0.5f * sum * t * exponential(-z * z);
  const Words negative = (Words)((Ints)x >> 31);
  return chosen(negative, tail, 1.0f - tail);
}

INTERPOSER_INLINE Floats gelu(Floats x) { return x * probability_below(x); }

// x / 2 * (1 + tanh(u)) equals x * sigmoid(2 u).
INTERPOSER_INLINE Floats gelu_tanh(Floats x) {
  return sigmoid_weighted(x, 1.5957691216f * (x + 0.044715f * x * x * x));
}

// Round to e4m3fn, ties to even; x is at most its largest number, 448, or NaN.
INTERPOSER_INLINE Floats nearest_e4m3(Floats x) {
  const Words sign = (Words)x & 0x80000000u, size = (Words)magnitude(x);
  const Words normal = (size + 0x7ffffu + (size >> 20 & 1)) & 0xfff00000u;
  // Below 2^-6, e4m3fn numbers are 2^-9 apart, like float32 from 2^14 on.
  const Words small = (Words)((as_floats(size) + 16384.0f) - 16384.0f);
  const Words is_small = less(size, splat(uint32_t(0x3c800000)));
  const Words is_nan = less(splat(uint32_t(0x7f800000)), size);
  const Words nearest = (small & is_small) | (normal & ~is_small);
  return as_floats((nearest & ~is_nan) | (0x7fc00000u & is_nan) | sign);
}

// Bits of numbers that are representable in e4m3fn.
INTERPOSER_INLINE Words codes_of_e4m3(Floats x) {
  const Words sign = (Words)x >> 24 & 0x80u, size = (Words)magnitude(x);
  const Words normal = (size >> 20) - (120 << 3);
  const Words small = (Words)(as_floats(size) + 16384.0f) - 0x46800000u;
  const Words is_small = less(size, splat(uint32_t(0x3c800000)));
  const Words is_nan = less(splat(uint32_t(0x7f800000)), size);
  const Words code = (small & is_small) | (normal & ~is_small);
  return (code & ~is_nan) | (0x7fu & is_nan) | sign;
}

INTERPOSER_INLINE float sum_of(Floats lanes) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

// Largest lane of magnitudes, compared by their bits; NaN is larger than all.
INTERPOSER_INLINE float largest_of(Floats lanes) {
  const Words bits = (Words)lanes;
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = bits[i] > largest ? bits[i] : largest;
  return float_of_bits(largest);
}

}  // namespace
