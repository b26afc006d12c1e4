// Sixteen logits at a time. Included once for every level.
#pragma once

#include "../elementwise/functions.h"
#include "../vectors.h"

namespace {

typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

constexpr float kNothing = -__builtin_inff();

template <int32_t kType>
INTERPOSER_INLINE const char* element(const void* from, int64_t index) {
  return static_cast<const char*>(from) + index * size_of(kType);
}

// Maximum per lane; b if either is NaN.
INTERPOSER_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  // The masked form compiles to the same instruction; GCC 12 warns about the header of the unmasked
  // form.
  return (Floats)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX__)
  Floats result;
  for (int part = 0; part < 2; ++part) {
    const __m256 eight = load<__m256>((const char*)&a + 32 * part);
    const __m256 others = load<__m256>((const char*)&b + 32 * part);
    store((char*)&result + 32 * part, _mm256_max_ps(eight, others));
  }
  return result;
#else
  Floats result;
  for (int part = 0; part < 4; ++part) {
    const FourFloats four = load<FourFloats>((const char*)&a + 16 * part);
    const FourFloats others = load<FourFloats>((const char*)&b + 16 * part);
    store((char*)&result + 16 * part, FourFloats(four > others ? four : others));
  }
  return result;
#endif
}

// Bit i is set if lane i of a is >= that of b; clear for NaN.
INTERPOSER_INLINE uint32_t at_least(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX__)
  uint32_t bits = 0;
  for (int part = 0; part < 2; ++part) {
    const __m256 eight = load<__m256>((const char*)&a + 32 * part);
    const __m256 others = load<__m256>((const char*)&b + 32 * part);
    const __m256 mask = _mm256_cmp_ps(eight, others, _CMP_GE_OQ);
    bits |= uint32_t(_mm256_movemask_ps(mask)) << 8 * part;
  }
  return bits;
#else
  FourInts masks[4], any = {};
  for (int part = 0; part < 4; ++part) {
    const FourFloats four = load<FourFloats>((const char*)&a + 16 * part);
    masks[part] = FourInts(four >= load<FourFloats>((const char*)&b + 16 * part));
    any |= masks[part];
  }
  uint64_t halves[2];
  std::memcpy(halves, &any, sizeof halves);
  if ((halves[0] | halves[1]) == 0) return 0;
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= uint32_t(masks[lane / 4][lane % 4] & 1) << lane;
  return bits;
#endif
}

INTERPOSER_INLINE float highest_of(Floats lanes) {
  float found[kLanes];
  store(found, lanes);
  for (int width = kLanes / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) {
      found[i] = found[i] > found[i + width] ? found[i] : found[i + width];
    }
  }
  return found[0];
}

// exp(x) for x up to 88, accurate to two units in the last place; exp(-87), close to zero, for all
// smaller x.
INTERPOSER_INLINE Floats raised(Floats x) {
  x = larger(splat(-87.0f), x);
  const Floats rounded = x * 1.44269504f + kRound;
  const Floats count = rounded - kRound;
  // ln 2 in two parts; the first times `count` is exact.
  const Floats r = x - count * 0.693359375f + count * 2.12194440e-4f;
  Floats sum = splat(1.0f / 720);
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return as_floats((Words)sum + ((Words)rounded << 23));
}

// Elements `first` to `last` of a row of logits.
template <int32_t kType>
struct Logits {
  const char* row;
  int64_t first, last;

  // Calls `take(lanes, index of the first, count)`; lanes after the last element are -inf.
  template <class F>
  INTERPOSER_INLINE void each(const F& take) const {
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) take(load_floats(at(i), kType), i, kLanes);
    if (i < last) take(rest(i), i, int(last - i));
  }

  // The same for results of `term(lanes)`, combined by `join` in four independent chains.
  template <class Term, class Join>
  INTERPOSER_INLINE Floats joined(Floats start, const Term& term, const Join& join) const {
    Floats chains[4] = {start, start, start, start};
    int64_t i = first;
    for (; i + 4 * kLanes <= last; i += 4 * kLanes) {
      for (int chain = 0; chain < 4; ++chain) {
        chains[chain] = join(term(load_floats(at(i + chain * kLanes), kType)), chains[chain]);
      }
    }
    for (; i + kLanes <= last; i += kLanes) {
      chains[0] = join(term(load_floats(at(i), kType)), chains[0]);
    }
    if (i < last) chains[1] = join(term(rest(i)), chains[1]);
    return join(join(chains[0], chains[1]), join(chains[2], chains[3]));
  }

  INTERPOSER_INLINE float one(int64_t index) const {
    return load_some(at(index), kType, 1)[0];
  }

 private:
  INTERPOSER_INLINE const char* at(int64_t index) const { return element<kType>(row, index); }

  INTERPOSER_INLINE Floats rest(int64_t index) const {
    Floats lanes = load_some(at(index), kType, int(last - index));
    for (int lane = int(last - index); lane < kLanes; ++lane) lanes[lane] = kNothing;
    return lanes;
  }
};

INTERPOSER_INLINE Floats plus(Floats a, Floats b) { return a + b; }

}  // namespace
