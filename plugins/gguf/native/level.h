// What every level of the library provides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interposer_gguf {

// Inputs whose sum is kept, for formats with offsets.
constexpr int kSumSize = 32;

// Rows of blocks times rows of inputs.
struct Product {
  int format;      // number of the type in GGUF files
  const float* x;  // [T, I], rows x_stride apart
  std::ptrdiff_t x_stride;
  const std::uint16_t* short_x;  // the same as bfloat16, where they are that and T is 1; or null
  const float* sums;             // [I / 32] sums of neighbouring inputs, where T is 1
  std::ptrdiff_t tokens;
  const std::uint8_t* weight;  // [O, blocks], rows weight_stride bytes apart
  std::ptrdiff_t weight_stride;
  std::ptrdiff_t in_features;
  float* result;  // [T, O], rows result_stride apart
  std::ptrdiff_t result_stride;
};

struct Level {
  // Writes the results of the rows [begin, end).
  void (*multiply)(const Product& product, std::ptrdiff_t begin, std::ptrdiff_t end);
  // Writes the numbers of one row.
  void (*dequantize)(int format, const std::uint8_t* row, std::ptrdiff_t in_features,
                     float* numbers);
};

namespace portable { extern const Level level; }
namespace avx2 { extern const Level level; }
namespace avx512 { extern const Level level; }
namespace avx512_bf16 { extern const Level level; }

}  // namespace interposer_gguf
