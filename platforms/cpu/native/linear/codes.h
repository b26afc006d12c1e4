// Rows of int8 inputs in the order that kernels read them, and the sums of their groups. Included
// once for every level.
#pragma once

#include "formats.h"
#include "packed.h"

namespace {

typedef int8_t Sixteen __attribute__((vector_size(16)));
typedef int32_t Eight __attribute__((vector_size(32)));

// For sixteen adjacent values, the source of each byte of four words in memory.
struct CodePlaces {
  int8_t codes[16];
};

constexpr CodePlaces code_places(bool of_nibbles) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  constexpr int kFlip = 3;  // big-endian: the lowest byte of a word is last
#else
  constexpr int kFlip = 0;
#endif
  CodePlaces places = {};
  for (int i = 0; i < 16; ++i) {
    const int byte = i ^ kFlip;
    places.codes[i] = int8_t(of_nibbles ? byte / 8 * 8 + kCodeOrder[byte % 8] : byte);
  }
  return places;
}

// Sum of the four bytes of each word.
INTERPOSER_INLINE Eight byte_sums(Eight words) {
  return (words << 24 >> 24) + (words << 16 >> 24) + (words << 8 >> 24) + (words >> 24);
}

int32_t sum_of_codes(const int8_t* codes, int64_t count) {
  Eight sums = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) sums += byte_sums(load<Eight>(codes + i));
  sums += __builtin_shuffle(sums, Eight{4, 5, 6, 7, 0, 1, 2, 3});
  sums += __builtin_shuffle(sums, Eight{2, 3, 0, 1, 6, 7, 4, 5});
  int32_t sum = sums[0] + sums[1];
  for (; i < count; ++i) sum += codes[i];
  return sum;
}

// If all values of a weight are shifted by the same offset, its contribution to the sums is known
// in advance.
int32_t factor_of_sums(const interposer_packed& weight) {
  if (weight.zeros_at) return 1;
  return weight.format == kWeightInt4 ? -Int4OnCodes::kZero : -Int8OnCodes::kZero;
}

// Whether inputs are widened to 16 bits.
INTERPOSER_INLINE bool has_wide_codes(const interposer_packed& weight) {
  return Int8OnCodes::kInputBytes == 2 && weight.format == kWeightInt8;
}

#if defined(__AVX2__)

// Widen sixteen inputs: for each word of weights, first those of its even bytes.
INTERPOSER_INLINE void store_wide(char* to, Sixteen codes) {
  const __m128i even_first = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_shuffle_epi8((__m128i)codes, even_first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), wide);
}

#else

INTERPOSER_INLINE void store_wide(char*, Sixteen) {}

#endif

// Write one row, padded to a multiple of 64 bytes, and the sums of its groups.
void prepare_codes(const interposer_product& product, char* to, int32_t* sums, int64_t row) {
  static constexpr CodePlaces kOfNibbles = code_places(true), kOfBytes = code_places(false);
  const interposer_packed& weight = *product.weight;
  const int8_t* from = static_cast<const int8_t*>(product.x) + row * product.x_stride;
  const int64_t inputs = weight.inputs;
  const bool of_nibbles = weight.format == kWeightInt4;
  const Sixteen places = load<Sixteen>((of_nibbles ? kOfNibbles : kOfBytes).codes);
  const bool is_wide = has_wide_codes(weight);
  auto put = [&](int64_t input, Sixteen codes) {
    if (is_wide) return store_wide(to + 2 * input, codes);
    store(to + input, __builtin_shuffle(codes, places));
  };
  int64_t input = 0;
  for (; input + 16 <= inputs; input += 16) put(input, load<Sixteen>(from + input));
  if (input < inputs) {
    Sixteen last = {};
    std::memcpy(&last, from + input, size_t(inputs - input));
    put(input, last);
  }
  const int64_t num_groups = (inputs + weight.group - 1) / weight.group;
  const int64_t group_inputs = num_groups > 1 ? weight.group : inputs;
  const int32_t factor = factor_of_sums(weight);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = group * group_inputs, left = inputs - first;
    const int64_t count = left < group_inputs ? left : group_inputs;
    sums[row * num_groups + group] = factor * sum_of_codes(from + first, count);
  }
}

}  // namespace
