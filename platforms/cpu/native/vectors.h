// Vectors of sixteen numbers on every processor.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
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

// Whether a vector is a `Lanes` of registers.
template <class V>
constexpr bool kInRegisters = false;

typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

#if defined(__AVX2__) && !defined(__AVX512F__)

// Sixteen numbers in two registers. The compiler would divide a larger vector, but keep its parts in
// memory: a GEMM or attention then loads and stores every sum at every step.
template <class T>
struct Lanes {
  typedef T Register __attribute__((vector_size(32)));

  Register low, high;

  // The same bits as another type.
  template <class U>
  INTERPOSER_INLINE explicit operator Lanes<U>() const {
    return {(typename Lanes<U>::Register)low, (typename Lanes<U>::Register)high};
  }
  INTERPOSER_INLINE T operator[](int lane) const { return lane < 8 ? low[lane] : high[lane - 8]; }
  INTERPOSER_INLINE T& operator[](int lane) { return reinterpret_cast<T*>(this)[lane]; }
  INTERPOSER_INLINE Lanes operator-() const { return {-low, -high}; }
  INTERPOSER_INLINE Lanes operator~() const { return {~low, ~high}; }

#define INTERPOSER_OPERATION(op)                                                \
  friend INTERPOSER_INLINE Lanes operator op(Lanes a, Lanes b) {                \
    return {a.low op b.low, a.high op b.high};                                  \
  }                                                                             \
  friend INTERPOSER_INLINE Lanes operator op(Lanes a, T b) {                    \
    return {a.low op b, a.high op b};                                           \
  }                                                                             \
  friend INTERPOSER_INLINE Lanes operator op(T a, Lanes b) {                    \
    return {a op b.low, a op b.high};                                           \
  }                                                                             \
  INTERPOSER_INLINE Lanes& operator op##=(Lanes b) { return *this = *this op b; } \
  INTERPOSER_INLINE Lanes& operator op##=(T b) { return *this = *this op b; }
  INTERPOSER_OPERATION(+)
  INTERPOSER_OPERATION(-)
  INTERPOSER_OPERATION(*)
  INTERPOSER_OPERATION(/)
  INTERPOSER_OPERATION(&)
  INTERPOSER_OPERATION(|)
  INTERPOSER_OPERATION(^)
  INTERPOSER_OPERATION(<<)
  INTERPOSER_OPERATION(>>)
#undef INTERPOSER_OPERATION

#define INTERPOSER_COMPARISON(op)                                                 \
  friend INTERPOSER_INLINE Lanes<int32_t> operator op(Lanes a, Lanes b) {         \
    return {a.low op b.low, a.high op b.high};                                    \
  }
  INTERPOSER_COMPARISON(<)
  INTERPOSER_COMPARISON(<=)
  INTERPOSER_COMPARISON(>)
  INTERPOSER_COMPARISON(>=)
  INTERPOSER_COMPARISON(==)
  INTERPOSER_COMPARISON(!=)
#undef INTERPOSER_COMPARISON
};

template <class T>
constexpr bool kInRegisters<Lanes<T>> = true;

typedef Lanes<float> Floats;
typedef Lanes<int32_t> Ints;
typedef Lanes<uint32_t> Words;

template <class To, class T>
INTERPOSER_INLINE To converted(Lanes<T> from) {
  if constexpr (std::is_same_v<To, Halves> || std::is_same_v<To, Bytes>) {
    // Saturation changes nothing after the mask.
    const __m256i mask = _mm256_set1_epi32(std::is_same_v<To, Halves> ? 0xffff : 0xff);
    const __m256i pairs = _mm256_packus_epi32(_mm256_and_si256((__m256i)from.low, mask),
                                              _mm256_and_si256((__m256i)from.high, mask));
    const __m256i halves = _mm256_permute4x64_epi64(pairs, 0xd8);
    if constexpr (std::is_same_v<To, Halves>) {
      return (Halves)halves;
    } else {
      return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(halves),
                                     _mm256_extracti128_si256(halves, 1));
    }
  } else {
    return {__builtin_convertvector(from.low, typename To::Register),
            __builtin_convertvector(from.high, typename To::Register)};
  }
}

template <class To>
INTERPOSER_INLINE To converted(Halves from) {
  const __m256i all = (__m256i)from;
  const Ints wide = {(Ints::Register)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)),
                     (Ints::Register)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1))};
  return (To)wide;
}

template <class To>
INTERPOSER_INLINE To converted(Bytes from) {
  const __m128i all = (__m128i)from;
  const Ints wide = {(Ints::Register)_mm256_cvtepu8_epi32(all),
                     (Ints::Register)_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
  return (To)wide;
}

#else

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <class To, class From>
INTERPOSER_INLINE To converted(From from) {
  return __builtin_convertvector(from, To);
}

#endif

template <class V>
INTERPOSER_INLINE V load(const void* from) {
  if constexpr (kInRegisters<V>) {
    // As a whole, it would be copied by halves of registers, which the processor reads only after
    // both are written.
    return {load<typename V::Register>(from),
            load<typename V::Register>(static_cast<const char*>(from) + 32)};
  } else {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
}

template <class V>
INTERPOSER_INLINE void store(void* to, V value) {
  if constexpr (kInRegisters<V>) {
    store(to, value.low);
    store(static_cast<char*>(to) + 32, value.high);
  } else {
    std::memcpy(to, &value, sizeof value);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)

INTERPOSER_INLINE Floats splat(float s) {
  const Floats::Register eight = (Floats::Register)_mm256_set1_ps(s);
  return {eight, eight};
}
INTERPOSER_INLINE Ints splat(int32_t s) {
  const Ints::Register eight = (Ints::Register)_mm256_set1_epi32(s);
  return {eight, eight};
}
INTERPOSER_INLINE Words splat(uint32_t s) { return (Words)splat(int32_t(s)); }

// `yes` in the lanes where all bits of the mask are set, and `no` in the others.
INTERPOSER_INLINE Floats chosen(Ints mask, Floats yes, Floats no) {
  const Floats picks = (Floats)mask;
  return {(Floats::Register)_mm256_blendv_ps((__m256)no.low, (__m256)yes.low, (__m256)picks.low),
          (Floats::Register)_mm256_blendv_ps((__m256)no.high, (__m256)yes.high, (__m256)picks.high)};
}

// Lane by lane would take as long as the additions of a whole head.
INTERPOSER_INLINE float sum_of_lanes(Floats values) {
  const __m256 eight = (__m256)(values.low + values.high);
  float four[4];
  _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
  return (four[0] + four[1]) + (four[2] + four[3]);
}

#else

#define INTERPOSER_SPLAT(s) {s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}
INTERPOSER_INLINE Floats splat(float s) { return Floats INTERPOSER_SPLAT(s); }
INTERPOSER_INLINE Ints splat(int32_t s) { return Ints INTERPOSER_SPLAT(s); }
INTERPOSER_INLINE Words splat(uint32_t s) { return Words INTERPOSER_SPLAT(s); }

// `yes` in the lanes where all bits of the mask are set, and `no` in the others.
INTERPOSER_INLINE Floats chosen(Ints mask, Floats yes, Floats no) {
  return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}

// Lane by lane would take as long as the additions of a whole head.
INTERPOSER_INLINE float sum_of_lanes(Floats sum) {
  sum += __builtin_shuffle(sum, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  sum += __builtin_shuffle(sum, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

#endif

#if defined(__AVXVNNI__)

// Add the products of four unsigned bytes of each word and four signed bytes, the same for all
// words.
INTERPOSER_INLINE void add_byte_products(Ints& sums, Words bytes, uint32_t four) {
  const __m256i codes = _mm256_set1_epi32(int(four));
  sums.low = (Ints::Register)_mm256_dpbusd_avx_epi32((__m256i)sums.low, (__m256i)bytes.low, codes);
  sums.high =
      (Ints::Register)_mm256_dpbusd_avx_epi32((__m256i)sums.high, (__m256i)bytes.high, codes);
}

#endif

// Copy arrays of vectors, which std::memcpy would copy by parts of registers.
template <class V, int M>
INTERPOSER_INLINE void copy(const V (&from)[M], V (&to)[M]) {
  if constexpr (std::is_array_v<V>) {
    for (int m = 0; m < M; ++m) copy(from[m], to[m]);
  } else {
    for (int m = 0; m < M; ++m) store(&to[m], load<V>(&from[m]));
  }
}

// The numbers of the lanes.
INTERPOSER_INLINE Ints lane_numbers() {
  constexpr int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<Ints>(numbers);
}

INTERPOSER_INLINE Floats chosen(Words mask, Floats yes, Floats no) {
  return chosen((Ints)mask, yes, no);
}

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
  return as_floats(converted<Words>(halves) << 16);
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
  return converted<Halves>((rounded & ~is_nan) | (nan & is_nan));
#endif
}

// Lowest byte of each lane. GCC would split 16-lane vectors lane by lane before a shuffle.
INTERPOSER_INLINE Bytes low_bytes(Ints numbers) {
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xffff;  // the unmasked form: warning about undefined values
  return (Bytes)_mm512_maskz_cvtepi32_epi8(kAll, (__m512i)numbers);
#else
  return converted<Bytes>(numbers);
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
  Words wide = converted<Words>(halves);
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
  return converted<Halves>(result | sign);
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
