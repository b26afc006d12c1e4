// Decoding and multiplication of every cache format. Included once for every level.
//
// A format decodes a row of words into kParts vectors, and adds each part times the matching
// elements of x, at `place`, to sums of sixteen lanes. A word has kInputs elements, for which x
// advances by kStepBytes. Each row of x has kPlanes planes, whose sums are combined later.
#pragma once

#include "../vectors.h"
#include "cache.h"

namespace {

struct OnFloats {  // x in float32
  typedef Floats Part;
  typedef Floats Sum;
  static constexpr bool kPairs = false, kCodes = false, kGrouped = false;
  static constexpr int kInputBytes = 4, kPlanes = 1;

  static INTERPOSER_INLINE void add(Floats& sum, Part part, const char* x) {
    sum += part * splat(load<float>(x));
  }
};

struct Float32OnFloats : OnFloats {
  static constexpr int kParts = 1, kInputs = 1;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    parts[0] = as_floats(words);
  }
  static constexpr int place(int part) { return part; }
};

struct BFloat16OnFloats : OnFloats {
  static constexpr int kParts = 2, kInputs = 2;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    parts[0] = as_floats(words << 16);
    parts[1] = as_floats(words & 0xffff0000u);
  }
  static constexpr int place(int part) { return part; }
};

struct Float16OnFloats : OnFloats {
  static constexpr int kParts = 2, kInputs = 2;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    parts[0] = floats_of_float16(converted<Halves>(words));
    parts[1] = floats_of_float16(converted<Halves>(words >> 16));
  }
  static constexpr int place(int part) { return part; }
};

// 8-bit floats. Exponent and mantissa are shifted to those of a float32; the multiplication
// corrects the bias, of subnormals too.
template <int Mantissa>
struct Float8OnFloats : OnFloats {
  static constexpr int kParts = 4, kInputs = 4;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    const Floats unbias = splat(Mantissa == 3 ? 0x1p120f : 0x1p112f);
    for (int i = 0; i < kParts; ++i) {
      const Words code = words >> 8 * i;
      const Words bits = (code & 0x7f) << (23 - Mantissa) | (code & 0x80) << 24;
      parts[i] = as_floats(bits) * unbias;
    }
  }
  static constexpr int place(int part) { return part == 1 ? 2 : part == 2 ? 1 : part; }
};

typedef Float8OnFloats<3> E4M3OnFloats;
typedef Float8OnFloats<2> E5M2OnFloats;

struct Int8OnFloats : OnFloats {
  static constexpr int kParts = 4, kInputs = 4;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    for (int i = 0; i < kParts; ++i) {
      parts[i] = converted<Floats>((Ints)(words << (24 - 8 * i)) >> 24);
    }
  }
  static constexpr int place(int part) { return part == 1 ? 2 : part == 2 ? 1 : part; }
};

// 4-bit values; their groups are combined elsewhere.
struct UInt4OnFloats : OnFloats {
  static constexpr bool kGrouped = true;
  static constexpr int kParts = 8, kInputs = 8;
  static constexpr float kExcess = 0;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    for (int i = 0; i < kParts; ++i) {
      parts[i] = converted<Floats>((Ints)(words >> element_shift(8, i) & 15));
    }
  }
  static constexpr int place(int part) { return part; }
};

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define INTERPOSER_CODES 1

// x as 16-bit integers 256 a + b, with a and b from -128 to 127, times 8-bit integers: one plane of
// x has a, the next b. So x is exact to 2^-16 of its largest number, and stored values are not
// widened. They are multiplied with kOffset added, which is subtracted again by sums of x.
struct Int8OnCodes {
  typedef Words Part;
  typedef Ints Sum;
  static constexpr bool kPairs = false, kCodes = true, kGrouped = false;
  static constexpr int kInputBytes = 2, kPlanes = 2;
  static constexpr int kParts = 1, kInputs = 4;
#if defined(__x86_64__)
  static constexpr int kOffset = 128;  // the instructions multiply unsigned by signed bytes
#else
  static constexpr int kOffset = 0;
#endif
  static constexpr int32_t kLargest = 127 * 256 + 127;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    parts[0] = kOffset ? words ^ 0x80808080u : words;
  }

  static INTERPOSER_INLINE void add(Ints& sum, Part part, const char* x) {
#if defined(__AVX512VNNI__)
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)part,
                                    _mm512_set1_epi32(load<int32_t>(x)));
#elif defined(__AVXVNNI__)
    add_byte_products(sum, part, load<uint32_t>(x));
#else
    const int8x16_t four = vreinterpretq_s8_u32(vdupq_n_u32(load<uint32_t>(x)));
    for (int i = 0; i < 4; ++i) {
      const int32x4_t sums = load<int32x4_t>((const char*)&sum + 16 * i);
      const int8x16_t codes = load<int8x16_t>((const char*)&part + 16 * i);
      store((char*)&sum + 16 * i, vdotq_s32(sums, codes, four));
    }
#endif
  }
  static constexpr int place(int) { return 0; }
};

// 4-bit values times the same planes: unsigned, so that no offset is needed.
struct UInt4OnCodes {
  typedef Words Part;
  typedef Ints Sum;
  static constexpr bool kPairs = false, kCodes = false, kGrouped = true;
  static constexpr int kInputBytes = 2, kPlanes = 2;
  static constexpr int kParts = 2, kInputs = 8;
  static constexpr float kExcess = 0;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    parts[0] = words & 0x0f0f0f0fu;
    parts[1] = words >> 4 & 0x0f0f0f0fu;
  }
  static INTERPOSER_INLINE void add(Ints& sum, Part part, const char* x) {
    Int8OnCodes::add(sum, part, x);
  }
  static constexpr int place(int part) { return 2 * part; }
};
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define INTERPOSER_PAIRS 1

struct OnPairs {  // x in bfloat16, two per word
  typedef Words Part;
  typedef Floats Sum;
  static constexpr bool kPairs = true, kCodes = false, kGrouped = false;
  static constexpr int kInputBytes = 2, kPlanes = 1;

  static INTERPOSER_INLINE void add(Floats& sum, Part part, const char* x) {
#if defined(__AVX512BF16__)
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)part,
                                   (__m512bh)_mm512_set1_epi32(load<int32_t>(x)));
#else
    const bfloat16x8_t pair = vreinterpretq_bf16_u32(vdupq_n_u32(load<uint32_t>(x)));
    for (int i = 0; i < 4; ++i) {
      const float32x4_t four = load<float32x4_t>((const char*)&sum + 16 * i);
      const bfloat16x8_t eight = load<bfloat16x8_t>((const char*)&part + 16 * i);
      store((char*)&sum + 16 * i, vbfdotq_f32(four, eight, pair));
    }
#endif
  }
};

struct BFloat16OnPairs : OnPairs {
  static constexpr int kParts = 1, kInputs = 2;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) { parts[0] = words; }
  static constexpr int place(int part) { return part; }
};
#endif

#if defined(__AVX512BF16__)
// bfloat16 represents every 8-bit float. A value shifted with its sign has a too small exponent, to
// which the difference is added; the few subnormals come from a table.
template <int Mantissa>
struct Float8OnPairs : OnPairs {
  static constexpr int kParts = 2, kInputs = 4;
  static constexpr int kShift = Mantissa + 1, kBias = (Mantissa == 3 ? 120 : 112) << 7;
  static constexpr int kExponent = Mantissa == 3 ? 0x0780 : 0x0f80;
  static constexpr int kFraction = Mantissa == 3 ? 0x0070 : 0x0060;

  // Decode values in the upper bytes of halves; `lower` has them in the lower bytes.
  static INTERPOSER_INLINE Words decoded(__m512i upper, __m512i lower) {
    // Multiples of 2^-9 or of 2^-16.
    constexpr uint16_t kOne = (Mantissa == 3 ? 118 : 111) << 7;
    const __m512i subnormals = _mm512_castsi128_si512(
        _mm_setr_epi16(0, short(kOne), short(kOne + 0x80), short(kOne + 0xc0), short(kOne + 0x100),
                       short(kOne + 0x120), short(kOne + 0x140), short(kOne + 0x160)));
    const __m512i sign = _mm512_set1_epi16(-0x8000);
    const __m512i kept = _mm512_set1_epi16(short(0x8000 | kExponent | kFraction));
    const __m512i code = _mm512_and_si512(_mm512_srai_epi16(upper, kShift), kept);
    const __mmask32 small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(kExponent));
    const __m512i normal = _mm512_add_epi16(code, _mm512_set1_epi16(kBias));
    const __m512i bits = _mm512_mask_permutexvar_epi16(normal, small, lower, subnormals);
    constexpr int kFirstOrBoth = 0xf8;  // bits | (upper & sign)
    return (Words)_mm512_ternarylogic_epi32(bits, upper, sign, kFirstOrBoth);
  }

  // Decode values in the lower bytes of halves; the upper bytes are ignored.
  static INTERPOSER_INLINE Words decoded(__m512i lower) {
    return decoded(_mm512_slli_epi16(lower, 8), lower);
  }

  // Decode values in the upper bytes of halves if none is subnormal.
  static INTERPOSER_INLINE Words decoded_normal(__m512i upper) {
    const __m512i kept = _mm512_set1_epi16(short(0x8000 | kExponent | kFraction));
    const __m512i code = _mm512_and_si512(_mm512_srai_epi16(upper, kShift), kept);
    return (Words)_mm512_add_epi16(code, _mm512_set1_epi16(kBias));
  }

  // Scales are chosen so that few values are subnormal. The short path, for 64 normal values, takes
  // half the time, and the branch is predicted well.
  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    const __m512i codes = (__m512i)words;
    constexpr int kExponents = kExponent >> (8 - kShift);
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(kExponents)) == 0, 1)) {
      parts[0] = decoded_normal(_mm512_slli_epi16(codes, 8));
      parts[1] = decoded_normal(codes);
    } else {
      parts[0] = decoded(codes);
      parts[1] = decoded(codes, _mm512_srli_epi16(codes, 8));
    }
  }
  static constexpr int place(int part) { return 2 * part; }
};

// A nibble in the mantissa of 128 is 128 + value; the bases subtract the excess.
struct UInt4OnPairs {
  typedef Words Part;
  typedef Floats Sum;
  static constexpr bool kPairs = false, kCodes = false, kGrouped = true;
  static constexpr int kInputBytes = 2, kPlanes = 1;
  static constexpr int kParts = 4, kInputs = 8;
  static constexpr float kExcess = 128.0f;

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    constexpr int kAndThenOr = 0xea;
    for (int i = 0; i < kParts; ++i) {
      parts[i] = (Words)_mm512_ternarylogic_epi32(
          (__m512i)(words >> element_shift(8, place(i))), (__m512i)splat(0x000f000fu),
          (__m512i)splat(0x43004300u), kAndThenOr);
    }
  }
  static INTERPOSER_INLINE void add(Floats& sum, Part part, const char* x) {
    OnPairs::add(sum, part, x);
  }
  static constexpr int place(int part) { return 2 * part; }
};

typedef Float8OnPairs<3> E4M3OnPairs;
typedef Float8OnPairs<2> E5M2OnPairs;
#endif

}  // namespace
