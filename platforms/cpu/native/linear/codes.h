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

int32_t sum_of_codes(const char* words, int64_t count) {
  Eight sums = {};
  int64_t word = 0;
  for (; word + 8 <= count; word += 8) sums += byte_sums(load<Eight>(words + word * 4));
  sums += __builtin_shuffle(sums, Eight{4, 5, 6, 7, 0, 1, 2, 3});
  sums += __builtin_shuffle(sums, Eight{2, 3, 0, 1, 6, 7, 4, 5});
  int32_t sum = sums[0] + sums[1];
  const int8_t* codes = reinterpret_cast<const int8_t*>(words);
  for (int64_t i = word * 4; i < count * 4; ++i) sum += codes[i];
  return sum;
}

// If all values of a weight are shifted by the same offset, its contribution to the sums is known
// in advance.
int32_t factor_of_sums(const interposer_packed& weight) {
  if (weight.zeros_at) return 1;
  return weight.format == kWeightInt4 ? -Int4OnCodes::kZero : -Int8OnCodes::kZero;
}

// Write one row, padded to a multiple of 64 bytes, and the sums of its groups.
void prepare_codes(const interposer_product& product, char* to, int32_t* sums, int64_t row) {
  static constexpr CodePlaces kOfNibbles = code_places(true), kOfBytes = code_places(false);
  const interposer_packed& weight = *product.weight;
  const int8_t* from = static_cast<const int8_t*>(product.x) + row * product.x_stride;
  const int64_t inputs = weight.inputs, words = padded_inputs(inputs) / 4;
  const bool of_nibbles = weight.format == kWeightInt4;
  const Sixteen places = load<Sixteen>((of_nibbles ? kOfNibbles : kOfBytes).codes);
  int64_t input = 0;
  for (; input + 16 <= inputs; input += 16) {
    store(to + input, __builtin_shuffle(load<Sixteen>(from + input), places));
  }
  if (input < inputs) {
    Sixteen last = {};
    std::memcpy(&last, from + input, size_t(inputs - input));
    store(to + input, __builtin_shuffle(last, places));
  }
  const int64_t num_groups = (inputs + weight.group - 1) / weight.group;
  const int64_t group_words = num_groups > 1 ? weight.group / 4 : words;
  const int32_t factor = factor_of_sums(weight);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = group * group_words, left = words - first;
    const int64_t count = left < group_words ? left : group_words;
    sums[row * num_groups + group] = factor * sum_of_codes(to + first * 4, count);
  }
}

}  // namespace
