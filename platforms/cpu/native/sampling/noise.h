// Gumbel noise as a function of seed, step and token only, equal to interposer_ops.noise. Included
// once for every level.
#pragma once

#include <cmath>

#include "lanes.h"

namespace {

typedef uint64_t Longs __attribute__((vector_size(64)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
constexpr uint64_t kFactors[2] = {0xBF58476D1CE4E5B9u, 0x94D049BB133111EBu};

// Largest possible noise, rounded up: -log(-log1p(-2^-40)).
constexpr float kMostNoise = 27.75f;

template <class V>
INTERPOSER_INLINE V mixed(V x) {
  x = (x ^ x >> 30) * kFactors[0];
  x = (x ^ x >> 27) * kFactors[1];
  return x ^ x >> 31;
}

INTERPOSER_INLINE uint64_t key_of(int64_t seed, int64_t step) {
  return mixed(mixed(uint64_t(seed)) + (uint64_t(step) + 1) * kGamma);
}

INTERPOSER_INLINE uint64_t hash_of(uint64_t key, int64_t token) {
  return mixed(key + (uint64_t(token) + 1) * kGamma);
}

INTERPOSER_INLINE float gumbel_of(uint64_t hash) {
  constexpr float kMost = 1 - 0x1p-24f;
  const float uniform = float(int64_t(hash >> 24 | 1)) * 0x1p-40f;
  return -logf(-log1pf(-(uniform < kMost ? uniform : kMost)));
}

// Uniform random numbers of sixteen tokens from `first` on, rounded down to multiples of 2^-24.
INTERPOSER_INLINE Floats uniform_below(uint64_t key, int64_t first) {
  const Longs steps = {0,          kGamma,     2 * kGamma, 3 * kGamma,
                       4 * kGamma, 5 * kGamma, 6 * kGamma, 7 * kGamma};
  const uint64_t start = key + (uint64_t(first) + 1) * kGamma;
  Ints whole;
  for (int part = 0; part < 2; ++part) {
    const Longs hashes = mixed(steps + (start + 8 * part * kGamma));
    store((char*)&whole + 32 * part, __builtin_convertvector(hashes >> 40, EightWords));
  }
  return converted<Floats>(whole) * 0x1p-24f;
}

}  // namespace
