// Decoding and multiplication of every packed weight format. Included once for every level.
//
// A format decodes a row of packed words into kParts vectors, one at a time, and adds each part
// times the matching inputs to sums of sixteen outputs. A step is one row of words; its inputs are
// kStep bytes of a row of x after `prepare`.
#pragma once

#include "../vectors.h"
#include "packed.h"

namespace {

INTERPOSER_INLINE uint32_t load_word(const char* from) { return load<uint32_t>(from); }
INTERPOSER_INLINE float load_float(const char* from) { return load<float>(from); }

#if defined(__AVX512F__)
// Look up one of sixteen entries by the low four bits of each lane.
INTERPOSER_INLINE Floats looked_up(Floats table, Words indices) {
  return (Floats)_mm512_permutexvar_ps((__m512i)indices, (__m512)table);
}
#endif

constexpr int kNibbleOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

struct OnFloats {  // inputs in float32
  typedef Floats Part;
  typedef Floats Sum;
  static constexpr bool kInteger = false;
  static constexpr bool kSymmetric = false;
  static constexpr int kInputBytes = 4, kNarrowSteps = 0;

  static INTERPOSER_INLINE void add(Sum& sum, Part part, const char* x) {
    sum += part * splat(load_float(x));
  }
};

struct Float32OnFloats : OnFloats {
  static constexpr int kParts = 1, kInputs = 1, kZero = 0;

  static INTERPOSER_INLINE Part part(Words words, Ints, int) {
    return as_floats(words);
  }
  static constexpr int place(int part) { return part; }
};

struct BFloat16OnFloats : OnFloats {
  static constexpr int kParts = 2, kInputs = 2, kZero = 0;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    return as_floats(index ? words & 0xffff0000u : words << 16);
  }
  static constexpr int place(int part) { return part; }
};

struct Int8OnFloats : OnFloats {
  static constexpr int kParts = 4, kInputs = 4, kZero = 128;

  static INTERPOSER_INLINE Part part(Words words, Ints zero, int index) {
    return converted<Floats>((Ints)(words >> 8 * index & 255) - zero);
  }
  static constexpr int place(int part) { return part; }
};

struct Int4OnFloats : OnFloats {
  static constexpr int kParts = 8, kInputs = 8, kZero = 8;

  static INTERPOSER_INLINE Part part(Words words, Ints zero, int index) {
#if defined(__AVX512F__)
    const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return looked_up(table, words >> 4 * index) - converted<Floats>(zero);
#else
    return converted<Floats>((Ints)(words >> 4 * index & 15) - zero);
#endif
  }
  static constexpr int place(int part) { return kNibbleOrder[part]; }
};

// Values without zero points. A table with the shift already subtracted saves one subtraction per
// value.
#if defined(__AVX512F__)
struct CentredInt4OnFloats : Int4OnFloats {
  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    const Floats table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return looked_up(table, words >> 4 * index);
  }
};
#else
typedef Int4OnFloats CentredInt4OnFloats;
#endif

struct E2M1OnFloats : OnFloats {
  static constexpr int kParts = 8, kInputs = 8, kZero = 0;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
#if defined(__AVX512F__)
    const Floats table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return looked_up(table, words >> 4 * index);
#elif defined(__AVX2__)
    // Only the three lowest bits of an index count.
    const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const Ints code = (Ints)(words >> 4 * index);
    const Floats size = {
        (Floats::Register)_mm256_permutevar8x32_ps(sizes, (__m256i)code.low),
        (Floats::Register)_mm256_permutevar8x32_ps(sizes, (__m256i)code.high)};
    return as_floats((Words)size | (words << (28 - 4 * index) & 0x80000000u));
#else
    // Two exponent bits and one mantissa bit, moved to those of a float32. The multiplication
    // corrects the bias, also of the one subnormal.
    const Words code = words >> 4 * index;
    return as_floats((code & 7) << 22 | (code & 8) << 28) * splat(0x1p126f);
#endif
  }
  static constexpr int place(int part) { return kNibbleOrder[part]; }
};

struct E4M3OnFloats : OnFloats {
  static constexpr int kParts = 4, kInputs = 4, kZero = 0;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    const Words code = words >> 8 * index;
    return as_floats((code & 0x7f) << 20 | (code & 0x80) << 24) * splat(0x1p120f);
  }
  static constexpr int place(int part) { return part; }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define INTERPOSER_PAIRS 1

// Inputs in bfloat16, two per word.
struct OnPairs {
  typedef Words Part;
  typedef Floats Sum;
  static constexpr bool kInteger = false;
  static constexpr bool kSymmetric = false;
  static constexpr int kInputBytes = 2, kNarrowSteps = 0;

  static INTERPOSER_INLINE void add(Sum& sum, Part part, const char* x) {
#if defined(__AVX512BF16__)
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)part,
                                   (__m512bh)_mm512_set1_epi32(int(load_word(x))));
#else
    const bfloat16x8_t pair = vreinterpretq_bf16_u32(vdupq_n_u32(load_word(x)));
    for (int i = 0; i < 4; ++i) {
      float32x4_t four = load<float32x4_t>((const char*)&sum + 16 * i);
      bfloat16x8_t eight = load<bfloat16x8_t>((const char*)&part + 16 * i);
      store((char*)&sum + 16 * i, vbfdotq_f32(four, eight, pair));
    }
#endif
  }
};

struct BFloat16OnPairs : OnPairs {
  static constexpr int kParts = 1, kInputs = 2, kZero = 0;

  static INTERPOSER_INLINE Part part(Words words, Ints, int) {
    return words;
  }
  static constexpr int place(int part) { return 2 * part; }
};
#endif

#if defined(__AVX512BF16__)
// Table of 16-bit entries, looked up by the low five bits of each half lane.
struct Table {
  uint16_t entries[32];
};

// bfloat16 of the integers 0 to 15, then of -16 to -1.
constexpr Table kSigned = {{0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                            0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                            0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80}};
// The represented values of four bits, stored twice because the fifth index bit belongs to the next
// value.
constexpr Table kCentred = {{0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                             0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                             0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                             0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0}};
constexpr Table kE2M1 = {{0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                          0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                          0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                          0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0}};

template <const Table& table>
struct NibblesOnPairs : OnPairs {
  static constexpr int kParts = 4, kInputs = 8, kZero = 8;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    const __m512i entries = load<__m512i>(table.entries);
    const __m512i codes = _mm512_srli_epi16((__m512i)words, unsigned(4 * index));
    return (Words)_mm512_permutexvar_epi16(codes, entries);
  }
  static constexpr int place(int part) { return 2 * part; }
};

typedef NibblesOnPairs<kCentred> Int4OnPairs;
typedef NibblesOnPairs<kE2M1> E2M1OnPairs;

struct ShiftedInt4OnPairs : OnPairs {
  static constexpr int kParts = 4, kInputs = 8, kZero = 8;

  static INTERPOSER_INLINE Part part(Words words, Ints zero, int index) {
    const __m512i entries = load<__m512i>(kSigned.entries);
    const __m512i both = (__m512i)((Words)zero << 16 | (Words)zero);
    const __m512i shifted = _mm512_srli_epi16((__m512i)words, unsigned(4 * index));
    const __m512i codes = _mm512_sub_epi16((__m512i)((Words)shifted & 0x000f000fu), both);
    return (Words)_mm512_permutexvar_epi16(codes, entries);
  }
  static constexpr int place(int part) { return 2 * part; }
};
#endif

// Inputs in int8, four per word in the order of the format.
struct OnCodes {
  typedef Words Part;  // unsigned bytes
  typedef Ints Sum;
  static constexpr bool kInteger = true;
  static constexpr bool kSymmetric = false;
  static constexpr int kInputBytes = 1, kNarrowSteps = 0;

  static INTERPOSER_INLINE void add(Sum& sum, Part part, const char* x) {
    const uint32_t four = load_word(x);
#if defined(__AVX512VNNI__)
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)part, _mm512_set1_epi32(int(four)));
#elif defined(__AVX512BW__)
    const __m512i codes = _mm512_set1_epi32(int(four));
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8);
    sum += (Ints)_mm512_madd_epi16((__m512i)(part & 0x00ff00ffu), even);
    sum += (Ints)_mm512_madd_epi16((__m512i)(part >> 8 & 0x00ff00ffu), _mm512_srai_epi16(codes, 8));
#elif defined(__AVXVNNI__)
    add_byte_products(sum, part, four);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    const int8x16_t codes = vreinterpretq_s8_u32(vdupq_n_u32(four));
    for (int i = 0; i < 4; ++i) {
      int32x4_t sums = load<int32x4_t>((const char*)&sum + 16 * i);
      uint8x16_t bytes = load<uint8x16_t>((const char*)&part + 16 * i);
      store((char*)&sum + 16 * i, vusdotq_s32(sums, bytes, codes));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    // Both operands of this instruction are signed. Flipping the highest bit subtracts 128 from a
    // byte; adding 64 times the inputs twice makes up for it.
    const int8x16_t codes = vreinterpretq_s8_u32(vdupq_n_u32(four));
    const int8x16_t half = vdupq_n_s8(64);
    for (int i = 0; i < 4; ++i) {
      int32x4_t sums = load<int32x4_t>((const char*)&sum + 16 * i);
      int8x16_t bytes = veorq_s8(load<int8x16_t>((const char*)&part + 16 * i), vdupq_n_s8(-128));
      sums = vdotq_s32(vdotq_s32(sums, half, codes), half, codes);
      store((char*)&sum + 16 * i, vdotq_s32(sums, bytes, codes));
    }
#else
    for (int i = 0; i < 4; ++i) {
      sum += (Ints)(part >> 8 * i & 255) * splat(int32_t(int8_t(four >> 8 * i)));
    }
#endif
  }
};

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)

// Inputs in 16 bits, as a byte times a byte, added to its neighbour, can have 17.
struct Int8OnCodes : OnCodes {
  static constexpr int kParts = 2, kInputs = 4, kZero = 128, kInputBytes = 2;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    return (index ? words >> 8 : words) & 0x00ff00ffu;
  }
  static constexpr int place(int part) { return 2 * part; }
  static INTERPOSER_INLINE void add(Sum& sum, Part part, const char* x) {
    const __m256i pair = _mm256_set1_epi32(int(load_word(x)));
    sum.low += (Sum::Register)_mm256_madd_epi16((__m256i)part.low, pair);
    sum.high += (Sum::Register)_mm256_madd_epi16((__m256i)part.high, pair);
  }
};

// Four bits times a byte, added to its neighbour, is at most 3840, so that 16 bits hold eight of
// these.
struct Int4OnCodes : OnCodes {
  static constexpr int kParts = 2, kInputs = 8, kZero = 8, kNarrowSteps = 4;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    return words >> 4 * index & 0x0f0f0f0fu;
  }
  static constexpr int place(int part) { return 4 * part; }
  static INTERPOSER_INLINE void add(Sum& narrow, Part part, const char* x) {
    const __m256i four = _mm256_set1_epi32(int(load_word(x)));
    const __m256i low = _mm256_maddubs_epi16((__m256i)part.low, four);
    const __m256i high = _mm256_maddubs_epi16((__m256i)part.high, four);
    narrow.low = (Sum::Register)_mm256_add_epi16((__m256i)narrow.low, low);
    narrow.high = (Sum::Register)_mm256_add_epi16((__m256i)narrow.high, high);
  }
  static INTERPOSER_INLINE void widen(Sum& sum, Sum narrow) {
    const __m256i ones = _mm256_set1_epi16(1);
    sum.low += (Sum::Register)_mm256_madd_epi16((__m256i)narrow.low, ones);
    sum.high += (Sum::Register)_mm256_madd_epi16((__m256i)narrow.high, ones);
  }
};

#else

struct Int8OnCodes : OnCodes {
  static constexpr int kParts = 1, kInputs = 4, kZero = 128;

  static INTERPOSER_INLINE Part part(Words words, Ints, int) {
    return words;
  }
  static constexpr int place(int part) { return 4 * part; }
};

struct Int4OnCodes : OnCodes {
  static constexpr int kParts = 2, kInputs = 8, kZero = 8;

  static INTERPOSER_INLINE Part part(Words words, Ints, int index) {
    return words >> 4 * index & 0x0f0f0f0fu;
  }
  static constexpr int place(int part) { return 4 * part; }
};

#endif

template <class F>
INTERPOSER_INLINE void decode(Words words, Ints zero, typename F::Part (&parts)[F::kParts]) {
  for (int i = 0; i < F::kParts; ++i) parts[i] = F::part(words, zero, i);
}

// Values that are all shifted by the same offset.
template <class F>
struct Symmetric : F {
  static constexpr bool kSymmetric = true;
};

// Order of eight int8 inputs in memory for `Int4OnCodes`.
constexpr int kCodeOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

}  // namespace
