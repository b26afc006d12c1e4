// How the words of each cache are multiplied. Included once for every level.
//
// A format decodes a row of words into kParts vectors, and adds each part times the elements of x
// that belong to it, at `place`, to sums of sixteen lanes. A word holds kInputs elements.
#pragma once

#include "../vectors.h"
#include "cache.h"

namespace {

struct OnFloats {  // x as float32
  typedef Floats Part;
  static constexpr bool kPairs = false;
  static constexpr int kInputBytes = 4;

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
    parts[0] = floats_of_float16(__builtin_convertvector(words, Halves));
    parts[1] = floats_of_float16(__builtin_convertvector(words >> 16, Halves));
  }
  static constexpr int place(int part) { return part; }
};

// Floats of 8 bits. Exponent and mantissa are shifted to those of a float32, and the product
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

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define INTERPOSER_PAIRS 1

struct OnPairs {  // x as bfloat16, two at a time
  typedef Words Part;
  static constexpr bool kPairs = true;
  static constexpr int kInputBytes = 2;

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
// bfloat16 holds every 8-bit float. What a code without its sign stands for:
template <int Mantissa>
struct Float8Table {
  alignas(64) uint16_t bits[128];

  constexpr Float8Table() : bits() {
    constexpr int kBias = Mantissa == 3 ? 7 : 15, kOne = 1 << Mantissa;
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> Mantissa, fraction = code & (kOne - 1);
      if (exponent == 0) {
        exponent = 1;
        while (fraction && fraction < kOne) fraction *= 2, --exponent;
        fraction -= fraction ? kOne : 0;
        if (code == 0) exponent = kBias - 127;
      }
      bits[code] = uint16_t((exponent - kBias + 127) << 7 | fraction << (7 - Mantissa));
    }
    // Those that are no numbers, and two that are infinite in the wider exponent.
    if (Mantissa == 3) bits[127] = 0x7fc0;
    for (int i = 0; Mantissa == 2 && i < 4; ++i) bits[124 + i] = i ? 0x7fc0 : 0x7f80;
  }
};

template <int Mantissa>
struct Float8OnPairs : OnPairs {
  static constexpr int kParts = 2, kInputs = 4;
  static constexpr Float8Table<Mantissa> kTable = {};

  // Of the codes in the lower bytes of halves. Six bits choose from 64 entries, the seventh between
  // two such tables.
  static INTERPOSER_INLINE __m512i magnitude(__m512i code) {
    __m512i table[4];
    for (int i = 0; i < 4; ++i) table[i] = _mm512_load_si512(kTable.bits + 32 * i);
    const __m512i small = _mm512_permutex2var_epi16(table[0], code, table[1]);
    const __m512i large = _mm512_permutex2var_epi16(table[2], code, table[3]);
    const __mmask32 is_large = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    return _mm512_mask_mov_epi16(small, is_large, large);
  }

  static INTERPOSER_INLINE Words with_sign(__m512i magnitude, __m512i sign) {
    constexpr int kFirstOrBoth = 0xf8;  // magnitude | (sign & 0x8000)
    const __m512i bit = _mm512_set1_epi16(-0x8000);
    return (Words)_mm512_ternarylogic_epi32(magnitude, sign, bit, kFirstOrBoth);
  }

  static INTERPOSER_INLINE Words decoded(__m512i code) {
    return with_sign(magnitude(code), _mm512_slli_epi16(code, 8));
  }

  static INTERPOSER_INLINE void decode(Words words, Part (&parts)[kParts]) {
    parts[0] = decoded((__m512i)words);
    parts[1] = with_sign(magnitude(_mm512_srli_epi16((__m512i)words, 8)), (__m512i)words);
  }
  static constexpr int place(int part) { return 2 * part; }
};

typedef Float8OnPairs<3> E4M3OnPairs;
typedef Float8OnPairs<2> E5M2OnPairs;
#endif

}  // namespace
