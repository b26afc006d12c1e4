// Sixteen floats and thirty-two bytes, in the registers that the level has.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace interposer_gguf {
namespace LEVEL {

// Compilers of the GNU kind map operations on such types to the registers of any architecture.
typedef std::uint8_t Bytes __attribute__((vector_size(32)));
typedef std::uint8_t HalfBytes __attribute__((vector_size(16)));
typedef std::uint16_t Words __attribute__((vector_size(32)));

#if defined(__AVX512F__)

struct Vector {
  __m512 all;
};

INLINE Vector zero() { return {_mm512_setzero_ps()}; }
INLINE Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
INLINE void store(float* to, Vector v) { _mm512_storeu_ps(to, v.all); }
INLINE Vector broadcast(float number) { return {_mm512_set1_ps(number)}; }
INLINE Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.all, b.all)}; }
INLINE Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.all, b.all)}; }
INLINE Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
// Eight times the one, then eight times the other.
INLINE Vector halves(float first, float last) {
  return {_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(first), _mm512_set1_ps(last))};
}
INLINE float sum(Vector v) { return _mm512_reduce_add_ps(v.all); }
INLINE Vector from_unsigned(HalfBytes b) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(b)))};
}
INLINE Vector from_signed(HalfBytes b) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(b)))};
}

#elif defined(__AVX2__)

struct Vector {
  __m256 low, high;
};

INLINE Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vector load(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
INLINE void store(float* to, Vector v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
INLINE Vector broadcast(float number) { return {_mm256_set1_ps(number), _mm256_set1_ps(number)}; }
INLINE Vector operator*(Vector a, Vector b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
INLINE Vector operator+(Vector a, Vector b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
INLINE Vector fma(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Vector halves(float first, float last) {
  return {_mm256_set1_ps(first), _mm256_set1_ps(last)};
}
INLINE float sum(Vector v) {
  __m256 eight = _mm256_add_ps(v.low, v.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE Vector from_unsigned(HalfBytes b) {
  __m128i bytes = reinterpret_cast<__m128i>(b);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
}
INLINE Vector from_signed(HalfBytes b) {
  __m128i bytes = reinterpret_cast<__m128i>(b);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
}

#else

typedef float Four __attribute__((vector_size(16)));

struct Vector {
  Four part[4];
};

INLINE Vector broadcast(float number) {
  Four four = {number, number, number, number};
  return {{four, four, four, four}};
}
INLINE Vector zero() { return broadcast(0.0f); }
INLINE Vector load(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
INLINE void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }
INLINE Vector operator*(Vector a, Vector b) {
  return {{a.part[0] * b.part[0], a.part[1] * b.part[1], a.part[2] * b.part[2],
           a.part[3] * b.part[3]}};
}
INLINE Vector operator+(Vector a, Vector b) {
  return {{a.part[0] + b.part[0], a.part[1] + b.part[1], a.part[2] + b.part[2],
           a.part[3] + b.part[3]}};
}
INLINE Vector fma(Vector a, Vector b, Vector c) {
  return {{a.part[0] * b.part[0] + c.part[0], a.part[1] * b.part[1] + c.part[1],
           a.part[2] * b.part[2] + c.part[2], a.part[3] * b.part[3] + c.part[3]}};
}
INLINE Vector halves(float first, float last) {
  const Vector one = broadcast(first), other = broadcast(last);
  return {{one.part[0], one.part[0], other.part[0], other.part[0]}};
}
INLINE float sum(Vector v) {
  Four four = (v.part[0] + v.part[1]) + (v.part[2] + v.part[3]);
  return (four[0] + four[1]) + (four[2] + four[3]);
}
INLINE Vector from_unsigned(HalfBytes b) {
  std::uint8_t codes[16];
  std::memcpy(codes, &b, sizeof codes);
  float numbers[16];
  for (int i = 0; i < 16; ++i) numbers[i] = static_cast<float>(codes[i]);
  return load(numbers);
}
// Without a sign there are more instructions for it.
INLINE Vector from_signed(HalfBytes b) { return from_unsigned(b ^ 128) + broadcast(-128.0f); }

#endif

template <typename Any>
INLINE Any load_bytes(const std::uint8_t* from) {
  Any result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

#if defined(__AVX2__)

INLINE HalfBytes first_half(Bytes b) {
  return reinterpret_cast<HalfBytes>(_mm256_castsi256_si128(reinterpret_cast<__m256i>(b)));
}
INLINE HalfBytes last_half(Bytes b) {
  return reinterpret_cast<HalfBytes>(_mm256_extracti128_si256(reinterpret_cast<__m256i>(b), 1));
}
INLINE Bytes joined(HalfBytes first, HalfBytes last) {
  return reinterpret_cast<Bytes>(
      _mm256_set_m128i(reinterpret_cast<__m128i>(last), reinterpret_cast<__m128i>(first)));
}

#else

INLINE HalfBytes first_half(Bytes b) {
  HalfBytes both[2];
  std::memcpy(both, &b, sizeof both);
  return both[0];
}
INLINE HalfBytes last_half(Bytes b) {
  HalfBytes both[2];
  std::memcpy(both, &b, sizeof both);
  return both[1];
}
INLINE Bytes joined(HalfBytes first, HalfBytes last) {
  const HalfBytes both[2] = {first, last};
  Bytes result;
  std::memcpy(&result, both, sizeof result);
  return result;
}

#endif

// The bits of each byte that the mask has, after all were moved to lower or to higher places.
// Vector units shift words rather than bytes: the mask takes away what comes from the byte beside.
template <int kDown>
INLINE Bytes bits(Bytes b, std::uint8_t mask) {
  const Words words = reinterpret_cast<Words>(b);
  return reinterpret_cast<Bytes>(kDown < 0 ? words << -kDown : words >> kDown) & mask;
}

// The float16 in two bytes, the lower first.
INLINE float half(const std::uint8_t* from) {
  const std::uint32_t bits = from[0] | static_cast<std::uint32_t>(from[1]) << 8;
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<unsigned short>(bits));
#else
  // Exponent and fraction at the places of a float32, whose exponents are 112 more; multiplying
  // by 2^112 gets denormal numbers right too. The highest exponent means infinity or no number.
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  std::uint32_t wide = (bits & 0x7fffu) << 13;
  if ((bits & 0x7c00u) == 0x7c00u) {
    wide |= 0x7f800000u;
  } else {
    float scaled;
    std::memcpy(&scaled, &wide, sizeof scaled);
    scaled *= 0x1p112f;
    std::memcpy(&wide, &scaled, sizeof wide);
  }
  wide |= sign;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
#endif
}

// 16 where the bit of the place is set, the lowest of the first byte first, and 0 elsewhere.
INLINE Bytes sixteens(const std::uint8_t* from) {
#if defined(__AVX2__)
  std::uint32_t all;
  std::memcpy(&all, from, sizeof all);  // these processors are little-endian
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return reinterpret_cast<Bytes>(_mm256_maskz_set1_epi8(all, 16));
#else
  const __m256i bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                           0x0303030303030303);
  const __m256i places = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(all)), bytes);
  const __m256i found = _mm256_cmpeq_epi8(_mm256_and_si256(spread, places), places);
  return reinterpret_cast<Bytes>(_mm256_and_si256(found, _mm256_set1_epi8(16)));
#endif
#else
  typedef std::uint64_t HalfLongs __attribute__((vector_size(16)));
  const HalfBytes places = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const std::uint64_t ones = 0x0101010101010101u;
  HalfBytes half[2];
  for (int i = 0; i < 2; ++i) {
    const HalfLongs spread = {from[2 * i] * ones, from[2 * i + 1] * ones};
    const auto found = (reinterpret_cast<HalfBytes>(spread) & places) == places;
    half[i] = reinterpret_cast<HalfBytes>(found) & 16;
  }
  return joined(half[0], half[1]);
#endif
}

}  // namespace LEVEL
}  // namespace interposer_gguf
