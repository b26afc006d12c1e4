// One block of a packed weight, and conversion of its integer sums to outputs. Included once for
// every level.
#pragma once

#include "../vectors.h"
#include "packed.h"

namespace {

constexpr int kTiles = kBlock / kLanes;

struct Span {
  int64_t first_block, last_block, first_row, last_row;
};

// Parameters shared by all sums of one block.
struct Block {
  const char* words;  // [steps][64]
  const char* scales;
  const char* zeros;
  int64_t first_output;
  bool compact;  // whether words are those of a compact weight, not decoded yet
};

// Adjacent rows of x. After the last row, the last row is repeated: computing and writing a row
// twice takes less time than reading the weight once more for the remaining rows.
struct Rows {
  INTERPOSER_INLINE Rows(int64_t first, int64_t last = INT64_MAX) : first(first), last(last) {}
  INTERPOSER_INLINE int64_t operator[](int m) const { return first + m < last ? first + m : last; }

  int64_t first, last;
};

int64_t num_groups(const interposer_packed& weight) {
  return weight.scales_at ? (weight.inputs + weight.group - 1) / weight.group : 1;
}

Block block_of(const interposer_packed& weight, int64_t index) {
  const int64_t steps = padded_inputs(weight.inputs) / inputs_per_word(weight.format);
  const int64_t scales = num_groups(weight) * kBlock;
  Block block = {at<char>(&weight, weight.words_at) + index * steps * step_bytes(weight.format),
                 at<char>(&weight, weight.scales_at), at<char>(&weight, weight.zeros_at),
                 index * kBlock, weight.format == kWeightCompact};
  if (block.scales) block.scales += index * scales * size_of(weight.scale_type);
  if (block.zeros) block.zeros += index * scales;
  return block;
}

INTERPOSER_INLINE Floats load_scales(const char* scales, int32_t type) {
  if (type != kE8M0) return load_floats(scales, type);
  const Words exponents = converted<Words>(load<Bytes>(scales));
  // The smallest exponent is subnormal and the largest is NaN; both need their highest mantissa bit
  // set.
  const Words edge = less((exponents + 1) & 255, splat(uint32_t(2)));
  return as_floats(exponents << 23 | (edge & 0x400000));
}

template <class F>
INTERPOSER_INLINE Ints zeros_of(const char* zeros) {
  return zeros ? converted<Ints>(load<Bytes>(zeros)) : splat(int32_t(F::kZero));
}

INTERPOSER_INLINE bool has_scales_of_groups(const interposer_product& product) {
  return product.x_scale_stride > 1;
}

// Convert the sum of one row's inputs in one group to float.
template <class F>
INTERPOSER_INLINE Floats scaled(const interposer_product& product, const Prepared& prepared,
                                int64_t row, int64_t group, typename F::Sum sum, Ints zero,
                                Floats scale) {
  if (has_scales_of_groups(product)) {
    scale *= splat(product.x_scales[row * product.x_scale_stride + group]);
  }
  if constexpr (F::kInteger) {
    const Ints codes = splat(prepared.sums[row * prepared.num_groups + group]);
    const Ints centred = F::kSymmetric ? sum + codes : sum - zero * codes;
    return converted<Floats>(centred) * scale;
  } else {
    return sum * scale;
  }
}

INTERPOSER_INLINE void write_outputs(const interposer_product& product, int64_t row, int64_t output,
                                     Floats result) {
  const interposer_packed& weight = *product.weight;
  const float* bias = at<float>(&weight, weight.bias_at);
  const int64_t count = weight.outputs - output;
  if (product.x_scales && !has_scales_of_groups(product)) {
    result *= splat(product.x_scales[row * product.x_scale_stride]);
  }
  if (bias) result += load<Floats>(bias + output);
  char* out = static_cast<char*>(product.out) +
              (row * product.out_stride + output) * size_of(product.out_type);
  store_some(out, result, product.out_type, int(count < kLanes ? count : kLanes));
}

template <int32_t kType, int M, int T>
INTERPOSER_INLINE void store_tiles(const interposer_product& product, Rows rows, int64_t output,
                                   const Floats (&results)[M][T]) {
  for (int m = 0; m < M; ++m) {
    char* out = static_cast<char*>(product.out) +
                (rows[m] * product.out_stride + output) * size_of(kType);
    for (int t = 0; t < T; ++t) {
      store_floats(out + t * kLanes * size_of(kType), results[m][t], kType);
    }
  }
}

// Write M rows of T tiles. Options that are the same for all of them are tested once: with 1024
// inputs, one test per tile costs 5 % of the GEMM.
template <int M, int T>
INTERPOSER_INLINE void write_tiles(const interposer_product& product, Rows rows, int64_t output,
                                   const Floats (&sums)[M][T]) {
  const interposer_packed& weight = *product.weight;
  if (output + T * kLanes > weight.outputs) {
    Floats results[M][T];
    copy(sums, results);
    for (int t = 0; t < T && output + t * kLanes < weight.outputs; ++t) {
      for (int m = 0; m < M; ++m) {
        write_outputs(product, rows[m], output + t * kLanes, results[m][t]);
      }
    }
    return;
  }
  Floats results[M][T];
  constexpr float kOne = 1;
  const bool by_row = product.x_scales && !has_scales_of_groups(product);
  const float* scales = by_row ? product.x_scales : &kOne;
  const int64_t stride = by_row ? product.x_scale_stride : 0;
  for (int m = 0; m < M; ++m) {
    const Floats scale = splat(scales[rows[m] * stride]);
    for (int t = 0; t < T; ++t) results[m][t] = sums[m][t] * scale;
  }
  if (const float* bias = at<float>(&weight, weight.bias_at)) {
    for (int t = 0; t < T; ++t) {
      const Floats added = load<Floats>(bias + output + t * kLanes);
      for (int m = 0; m < M; ++m) results[m][t] += added;
    }
  }
  switch (product.out_type) {
    case kFloat32:
      return store_tiles<kFloat32>(product, rows, output, results);
    case kBFloat16:
      return store_tiles<kBFloat16>(product, rows, output, results);
    default:
      return store_tiles<kFloat16>(product, rows, output, results);
  }
}

}  // namespace
