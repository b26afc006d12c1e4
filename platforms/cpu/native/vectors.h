// Vectors of sixteen numbers on every processor: the compiler splits them into registers.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Name of a per-level symbol.
#define INTERPOSER_PASTE(name, level) name##_##level
#define INTERPOSER_PASTE_VALUES(name, level) INTERPOSER_PASTE(name, level)
#define INTERPOSER_OF_LEVEL(name) INTERPOSER_PASTE_VALUES(name, INTERPOSER_LEVEL)

#define INTERPOSER_INLINE inline __attribute__((always_inline))

// Number formats in the C interface.
enum Type : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kE8M0 = 4,
  kE4M3 = 5,
  kNone = -1,
};

namespace {  // per level: the linker must not merge code of different flags

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int8_t SignedBytes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <class V>
INTERPOSER_INLINE V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
INTERPOSER_INLINE void store(void* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

#define INTERPOSER_SPLAT(s) {s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}
INTERPOSER_INLINE Floats splat(float s) { return Floats INTERPOSER_SPLAT(s); }
INTERPOSER_INLINE Ints splat(int32_t s) { return Ints INTERPOSER_SPLAT(s); }
INTERPOSER_INLINE Words splat(uint32_t s) { return Words INTERPOSER_SPLAT(s); }

INTERPOSER_INLINE Floats as_floats(Words bits) { return (Floats)bits; }

// All bits set in lanes where `a` < `b`; both are below 2^31. Without 16-lane vectors, compilers
// emit scalar comparisons, but vector subtractions; hence the subtraction.
INTERPOSER_INLINE Words less(Words a, Words b) { return -((a - b) >> 31); }

INTERPOSER_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

INTERPOSER_INLINE float float_of_bfloat16(uint16_t half) {
  return float_of_bits(uint32_t(half) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
INTERPOSER_INLINE uint16_t bfloat16_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INTERPOSER_INLINE Floats floats_of_bfloat16(Halves halves) {
#if defined(__AVX512F__)
  // Without this intrinsic, compilers convert each half of the vector and join the halves again.
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#else
  return as_floats(__builtin_convertvector(halves, Words) << 16);
#endif
}

INTERPOSER_INLINE Halves bfloat16_of_floats(Floats values) {
#if defined(__AVX512BF16__)
  // The instruction treats subnormals as zero, an error below the smallest normal number.
  return (Halves)_mm512_cvtneps_pbh((__m512)values);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  Halves halves;
  for (int part = 0; part < 4; ++part) {
    float32x4_t four = load<float32x4_t>((const char*)&values + 16 * part);
    store((char*)&halves + 8 * part, vcvt_bf16_f32(four));
  }
  return halves;
#else
  Words bits = (Words)values;
  Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  Words nan = bits >> 16 | 0x40;
  Words is_nan = less(splat(uint32_t(0x7f800000)), bits & 0x7fffffff);
  return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), Halves);
#endif
}

// Lowest byte of each lane. GCC would split 16-lane vectors lane by lane before a shuffle.
INTERPOSER_INLINE Bytes low_bytes(Ints numbers) {
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xffff;  // the unmasked form: warning about undefined values
  return (Bytes)_mm512_maskz_cvtepi32_epi8(kAll, (__m512i)numbers);
#else
  return __builtin_convertvector(numbers, Bytes);
#endif
}

INTERPOSER_INLINE Floats floats_of_float16(Halves halves) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
  Floats values;
  for (int part = 0; part < 2; ++part) {
    __m128i eight = load<__m128i>((const char*)&halves + 16 * part);
    store((char*)&values + 32 * part, _mm256_cvtph_ps(eight));
  }
  return values;
#elif defined(__aarch64__)
  Floats values;
  for (int part = 0; part < 4; ++part) {
    float16x4_t four = load<float16x4_t>((const char*)&halves + 8 * part);
    store((char*)&values + 16 * part, vcvt_f32_f16(four));
  }
  return values;
#else
  // Shift exponent and mantissa into place, then correct the bias by a multiplication, which is
  // exact for subnormals too. Infinities and NaN keep the largest exponent.
  Words wide = __builtin_convertvector(halves, Words);
  Words magnitude = (wide & 0x7fff) << 13;
  Floats scaled = as_floats(magnitude) * splat(0x1p112f);
  Words special = less(splat(uint32_t(0x7bff)), wide & 0x7fff);
  Words bits = ((Words)scaled & ~special) | ((magnitude | 0x7f800000) & special);
  return as_floats(bits | (wide & 0x8000) << 16);
#endif
}

INTERPOSER_INLINE Halves float16_of_floats(Floats values) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  Halves halves;
  for (int part = 0; part < 2; ++part) {
    __m256 eight = load<__m256>((const char*)&values + 32 * part);
    store((char*)&halves + 16 * part, _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
  }
  return halves;
#elif defined(__aarch64__)
  Halves halves;
  for (int part = 0; part < 4; ++part) {
    float32x4_t four = load<float32x4_t>((const char*)&values + 16 * part);
    store((char*)&halves + 8 * part, vcvt_f16_f32(four));
  }
  return halves;
#else
  Words bits = (Words)values;
  Words sign = bits >> 16 & 0x8000;
  Words magnitude = bits & 0x7fffffff;
  // Normal numbers: rebias, then round away thirteen bits, to nearest even.
  Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14: adding 0.5 leaves the rounded mantissa of a subnormal in the lowest bits.
  Words small = (Words)(as_floats(magnitude) + splat(0.5f)) - 0x3f000000;
  Words is_small = less(magnitude, splat(uint32_t(0x38800000)));
  Words is_large = less(splat(uint32_t(0x477fefff)), magnitude);
  Words is_nan = less(splat(uint32_t(0x7f800000)), magnitude);
  Words result = (small & is_small) | (normal & ~is_small);
  result = (result & ~is_large) | (splat(uint32_t(0x7c00)) & is_large) | (0x200 & is_nan);
  return __builtin_convertvector(result | sign, Halves);
#endif
}

INTERPOSER_INLINE Floats load_floats(const void* from, int32_t type) {
  if (type == kFloat32) return load<Floats>(from);
  Halves halves = load<Halves>(from);
  return type == kBFloat16 ? floats_of_bfloat16(halves) : floats_of_float16(halves);
}

INTERPOSER_INLINE void store_floats(void* to, Floats values, int32_t type) {
  if (type == kFloat32) {
    store(to, values);
  } else {
    store(to, type == kBFloat16 ? bfloat16_of_floats(values) : float16_of_floats(values));
  }
}

constexpr int size_of(int32_t type) {
  return type == kFloat32 ? 4 : type == kInt8 || type == kE8M0 || type == kE4M3 ? 1 : 2;
}

// Load or store the first `count` lanes, at most sixteen. Other lanes load as zero and are not
// stored.
INTERPOSER_INLINE Floats load_some(const void* from, int32_t type, int count) {
  if (count >= kLanes) return load_floats(from, type);
  alignas(64) unsigned char bytes[64] = {};
  std::memcpy(bytes, from, size_t(count) * size_of(type));
  return load_floats(bytes, type);
}

INTERPOSER_INLINE void store_some(void* to, Floats values, int32_t type, int count) {
  if (count >= kLanes) return store_floats(to, values, type);
  alignas(64) unsigned char bytes[64];
  store_floats(bytes, values, type);
  std::memcpy(to, bytes, size_t(count) * size_of(type));
}

}  // namespace
