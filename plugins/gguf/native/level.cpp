// Products with rows of blocks. Compiled once for each level, with its options and its name.
//
// Every number of a weight is unpacked into registers and multiplied there; nothing of it is
// written to memory.
#include <cstring>

#include "formats.h"
#include "level.h"

namespace interposer_gguf {
namespace LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 2, kMostTokens = 8;
#else
// Of sixteen registers, more would not stay in them.
constexpr int kRowsAtOnce = 1, kMostTokens = 4;
#endif

constexpr int kPart = 32;  // numbers whose codes are unpacked at once

// What depends on the format alone.
template <typename Format>
struct Sizes {
  static constexpr int kParts = Format::kNumbers / kPart;
  static constexpr int kGroups = Format::kNumbers / Format::kGroup;
  static constexpr int kScales = Format::kHasOffsets ? 2 * kGroups : kGroups;
};

template <typename Format>
INLINE Part scales_of_part(const float* scale, int part) {
  if (Format::kGroup == kPart) {
    const Vector both = broadcast(scale[part]);
    return {both, both};
  }
  return {broadcast(scale[2 * part]), broadcast(scale[2 * part + 1])};
}

// Scales are broadcast from memory, which takes a load; from a register it takes the unit that
// unpacks codes, which has enough to do. Compilers would keep them in one. One or two are fewer
// than what writing them costs.
template <int kSize>
INLINE void keep_in_memory(float (&scale)[kSize]) {
  if (kSize > 2) asm("" : "+m"(scale));
}

// Sums of the parts of a block, added up one by one.
template <int kParts>
struct Sums {
  typedef float Eight __attribute__((vector_size(32)));
  Eight all = {};

  INLINE void add_products(const float* a, const float* b) {
    Eight one, other;
    std::memcpy(&one, a, sizeof one);
    std::memcpy(&other, b, sizeof other);
    all += one * other;
  }
  INLINE float total() const {
    return ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
  }
};
template <>
struct Sums<1> {
  float all = 0.0f;

  INLINE void add_products(const float* a, const float* b) { all += *a * *b; }
  INLINE float total() const { return all; }
};

#if defined(__AVX512BF16__)

// The bfloat16 that a whole number below 256 is, as it has no more than eight bits.
constexpr std::uint16_t whole_as_bfloat16(int number) {
  if (number == 0) return 0;
  const int size = number < 0 ? -number : number;
  int exponent = 0;
  while (size >> (exponent + 1)) ++exponent;
  const int bits = (127 + exponent) << 7 | ((size << 7 >> exponent) & 127);
  return static_cast<std::uint16_t>(number < 0 ? bits | 0x8000 : bits);
}

// What stored codes are as bfloat16: all five bits or four and any fifth, or six.
template <typename Format>
struct Table {
  alignas(64) std::uint16_t numbers[64];

  constexpr Table() : numbers() {
    const int count = Format::kLess == 8 ? 16 : 64;
    for (int i = 0; i < 64; ++i) {
      numbers[i] = whole_as_bfloat16(i % count - Format::kLess);
    }
  }
};

// Products of a bfloat16 with each code of a part, in pairs.
template <typename Format>
INLINE Vector multiply_pairs(Bytes stored, const std::uint16_t* x) {
  static constexpr Table<Format> table;
  const __m512i places = _mm512_cvtepu8_epi16(reinterpret_cast<__m256i>(stored));
  const __m512i low = _mm512_load_si512(table.numbers);
  const __m512i codes =
      Format::kLess == 32
          ? _mm512_permutex2var_epi16(low, places, _mm512_load_si512(table.numbers + 32))
          : _mm512_permutexvar_epi16(places, low);
  return {_mm512_dpbf16_ps(_mm512_setzero_ps(), reinterpret_cast<__m512bh>(codes),
                           reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)))};
}

template <typename Format>
constexpr bool kTakesBFloat16 = Format::kLess != kSigned;

#else

template <typename Format>
constexpr bool kTakesBFloat16 = false;

#endif

// Products of rows with one token: codes times inputs are added up by group, then scaled; an
// offset is multiplied by the sum of its group's inputs.
template <typename Format, bool kBFloat16>
__attribute__((noinline)) void multiply_one(const Product& product, std::ptrdiff_t begin,
                                            std::ptrdiff_t end) {
  using S = Sizes<Format>;
  for (std::ptrdiff_t row = begin; row < end; ++row) {
    const std::uint8_t* block = product.weight + row * product.weight_stride;
    const float* sums = product.sums;
    Vector total[2] = {zero(), zero()};
    Sums<S::kParts> apart;
    for (std::ptrdiff_t place = 0; place < product.in_features; place += Format::kNumbers) {
      float scale[S::kScales];
      Format::scales(block, scale);
      keep_in_memory(scale);
#pragma GCC unroll 8
      for (int part = 0; part < S::kParts; ++part) {
#if defined(__AVX512BF16__)
        if constexpr (kBFloat16) {
          const Vector pairs = multiply_pairs<Format>(Format::stored(block, part),
                                                      product.short_x + place + part * kPart);
          const Vector scales = Format::kGroup == kPart
                                    ? broadcast(scale[part])
                                    : halves(scale[2 * part], scale[2 * part + 1]);
          total[part % 2] = fma(pairs, scales, total[part % 2]);
          continue;
        }
#endif
        const float* x = product.x + place + part * kPart;
        const Part code = codes<Format>(block, part), scales = scales_of_part<Format>(scale, part);
        const Vector first = code.first * load(x);
        if (Format::kGroup == kPart) {
          total[part % 2] =
              fma(fma(code.last, load(x + 16), first), scales.first, total[part % 2]);
        } else {
          total[0] = fma(first, scales.first, total[0]);
          total[1] = fma(code.last * load(x + 16), scales.last, total[1]);
        }
      }
      if (Format::kHasOffsets) {
        apart.add_products(scale + S::kGroups, sums);
        sums += S::kParts;
      }
      block += Format::kBytes;
    }
    float result = sum(total[0] + total[1]);
    if (Format::kHasOffsets) result += apart.total();
    product.result[row] = result;
  }
}

// Products of kRowsAtOnce rows with some tokens: each number is scaled once for all tokens. Rows
// and tokens that are not there are those before again, and not written.
template <typename Format, int kTokens>
void multiply_some(const Product& product, std::ptrdiff_t row, std::ptrdiff_t rows,
                   std::ptrdiff_t token, std::ptrdiff_t tokens) {
  using S = Sizes<Format>;
  constexpr int kRows = kRowsAtOnce;
  const std::uint8_t* weight[kRows];
  const float* inputs[kTokens];
  Vector total[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    weight[r] = product.weight + (row + (r < rows ? r : 0)) * product.weight_stride;
    for (int t = 0; t < kTokens; ++t) total[r][t] = zero();
  }
  for (int t = 0; t < kTokens; ++t) {
    inputs[t] = product.x + (token + (t < tokens ? t : 0)) * product.x_stride;
  }
  std::ptrdiff_t offset = 0;
  for (std::ptrdiff_t place = 0; place < product.in_features; place += Format::kNumbers) {
    float scale[kRows][S::kScales];
    for (int r = 0; r < kRows; ++r) {
      Format::scales(weight[r] + offset, scale[r]);
      keep_in_memory(scale[r]);
    }
#pragma GCC unroll 8
    for (int part = 0; part < S::kParts; ++part) {
      Part numbers[kRows];
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const Part code = codes<Format>(weight[r] + offset, part);
        const Part scales = scales_of_part<Format>(scale[r], part);
        if (Format::kHasOffsets) {
          const Vector less = broadcast(scale[r][S::kGroups + part]);
          numbers[r] = {fma(code.first, scales.first, less), fma(code.last, scales.last, less)};
        } else {
          numbers[r] = {code.first * scales.first, code.last * scales.last};
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const float* from = inputs[t] + place + part * kPart;
        const Vector one = load(from), other = load(from + 16);
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
          total[r][t] = fma(numbers[r].first, one, total[r][t]);
          total[r][t] = fma(numbers[r].last, other, total[r][t]);
        }
      }
    }
    offset += Format::kBytes;
  }
  for (int r = 0; r < kRows && r < rows; ++r) {
    for (int t = 0; t < kTokens && t < tokens; ++t) {
      product.result[(token + t) * product.result_stride + row + r] = sum(total[r][t]);
    }
  }
}

template <typename Format>
void multiply_all(const Product& product, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (product.tokens == 1) {
    if (kTakesBFloat16<Format> && product.short_x != nullptr) {
      return multiply_one<Format, kTakesBFloat16<Format>>(product, begin, end);
    }
    return multiply_one<Format, false>(product, begin, end);
  }
  for (std::ptrdiff_t row = begin; row < end; row += kRowsAtOnce) {
    std::ptrdiff_t token = 0;
    while (token < product.tokens) {
      const std::ptrdiff_t tokens = product.tokens - token;
      if (tokens <= 2) {
        multiply_some<Format, 2>(product, row, end - row, token, tokens);
        token += 2;
      } else if (tokens <= 4 || kMostTokens == 4) {
        multiply_some<Format, 4>(product, row, end - row, token, tokens);
        token += 4;
      } else {
        multiply_some<Format, kMostTokens>(product, row, end - row, token, tokens);
        token += kMostTokens;
      }
    }
  }
}

template <typename Format>
void dequantize_row(const std::uint8_t* block, std::ptrdiff_t in_features, float* numbers) {
  using S = Sizes<Format>;
  const float* end = numbers + in_features;
  for (; numbers < end; numbers += Format::kNumbers, block += Format::kBytes) {
    float scale[S::kScales];
    Format::scales(block, scale);
#pragma GCC unroll 8
    for (int part = 0; part < S::kParts; ++part) {
      const Part code = codes<Format>(block, part), scales = scales_of_part<Format>(scale, part);
      const Vector less = Format::kHasOffsets ? broadcast(scale[S::kGroups + part]) : zero();
      store(numbers + part * kPart, fma(code.first, scales.first, less));
      store(numbers + part * kPart + 16, fma(code.last, scales.last, less));
    }
  }
}

void multiply(const Product& product, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(product.format, [&](auto format) {
    multiply_all<decltype(format)>(product, begin, end);
  });
}

void dequantize(int format, const std::uint8_t* row, std::ptrdiff_t in_features, float* numbers) {
  with_format(format, [&](auto found) {
    dequantize_row<decltype(found)>(row, in_features, numbers);
  });
}

}  // namespace

extern const Level level = {multiply, dequantize};

}  // namespace LEVEL
}  // namespace interposer_gguf
