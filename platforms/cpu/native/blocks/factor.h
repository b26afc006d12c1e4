// A matmul in a fused call, with the quantization of its inputs.
#pragma once

#include "../elementwise/elementwise.h"
#include "../pool.h"
#include "../vectors.h"
#include "blocks.h"

namespace {

inline char* moved(void* data, int32_t type, int64_t elements) {
  return static_cast<char*>(data) + elements * size_of(type);
}

inline const char* moved(const void* data, int32_t type, int64_t elements) {
  return static_cast<const char*>(data) + elements * size_of(type);
}

// Compute a matmul with a contiguous result.
inline int32_t multiply(const interposer_factor& factor, const void* x, int32_t type, int64_t rows,
                        int64_t x_stride, void* out, int32_t out_type) {
  const int64_t inputs = factor.weight->inputs;
  interposer_product product = {};
  product.weight = factor.weight;
  product.x = x;
  product.x_type = type;
  product.rows = rows;
  product.x_stride = x_stride;
  product.out = out;
  product.out_type = out_type;
  product.out_stride = factor.weight->outputs;
  if (factor.coding.type != kNone) {
    const int32_t codes = factor.coding.type == kInt8 ? kInt8 : kBFloat16;
    const int64_t group = factor.coding.group ? factor.coding.group : inputs;
    const int64_t groups = inputs / group;
    if (groups * group != inputs) return kMismatch;
    const int64_t bytes = round_up(rows * inputs * size_of(codes), 64);
    char* memory = static_cast<char*>(interposer_scratch(kForCodes, bytes + rows * groups * 4));
    if (memory == nullptr) return kNoMemory;
    interposer_coded coded = {};
    coded.x = x;
    coded.codes = memory;
    coded.scales = reinterpret_cast<float*>(memory + bytes);
    coded.given = factor.scale;
    coded.type = type;
    coded.code_type = codes;
    coded.limit = static_cast<float>(factor.coding.limit);
    coded.powers = static_cast<int32_t>(factor.coding.powers);
    coded.rows = {rows, groups, group, x_stride, group};
    const int32_t failure = interposer_code(&coded);
    if (failure) return failure;
    product.x = memory;
    product.x_type = codes;
    product.x_stride = inputs;
    product.x_scales = factor.scale ? factor.scale : coded.scales;
    product.x_scale_stride = factor.scale ? 0 : groups;
  }
  return interposer_linear(&product);
}

}  // namespace
