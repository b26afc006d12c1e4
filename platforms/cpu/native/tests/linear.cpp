// GEMM with packed weights, called as native_linear.py calls it.

#include "packed.h"

#include <cmath>

namespace {

std::vector<Result> product(const Case& golden, const Packed& packed, const std::string& out_dtype,
                            const Array& x) {
  Rows out(out_dtype, x.rows(), packed.get()->outputs);
  const bool by_group = golden.find("x_scales") != nullptr;
  const Array* scales = golden.find(by_group ? "x_scales" : "x_scale");
  interposer_product product = {};
  product.weight = packed.get();
  product.x = x.data<void>();
  product.x_type = type_of(x.dtype);
  product.out_type = type_of(out_dtype);
  product.rows = x.rows();
  product.x_stride = x.row_stride();
  product.out = out.data();
  product.out_stride = out.stride();
  std::vector<float> of_rows = scales ? floats_of(*scales) : std::vector<float>();
  if (scales && scales->dtype == "uint8") {
    for (float& scale : of_rows) scale = std::ldexp(1.0f, int(scale) - 127);
  }
  product.x_scales = scales ? of_rows.data() : nullptr;
  product.x_scale_stride = of_rows.size() > 1 ? by_group ? scales->columns() : 1 : 0;
  if (const int32_t failure = interposer_linear(&product)) {
    throw std::runtime_error("the product failed with code " + std::to_string(failure));
  }
  return {out.result()};
}

std::vector<Result> linear(const Case& golden) {
  const Array &x = golden.array("x"), &weight = golden.array("weight");
  const int32_t format = weight.dtype == "float32" ? kWeightFloat32 : kWeightBFloat16;
  const Packed packed(format, weight, nullptr, nullptr, golden.find("bias"));
  return product(golden, packed, x.dtype, x);
}

std::vector<Result> w4a16_linear(const Case& golden) {
  const Array& x = golden.array("x");
  const Packed packed(kWeightInt4, golden.array("weight"), golden.find("scale"),
                      golden.find("zero_points"), golden.find("bias"));
  return product(golden, packed, x.dtype, x);
}

std::vector<Result> w8a16_linear(const Case& golden) {
  const Array& x = golden.array("x");
  const Packed packed(kWeightInt8, golden.array("weight"), golden.find("scale"),
                      golden.find("zero_points"), golden.find("bias"), true);
  return product(golden, packed, x.dtype, x);
}

std::vector<Result> mxfp4_linear(const Case& golden) {
  const Array& x = golden.array("x");
  const Packed packed(kWeightE2M1, golden.array("weight"), golden.find("weight_scales"), nullptr,
                      golden.find("bias"));
  return product(golden, packed, x.dtype, x);
}

std::vector<Result> int8_linear(const Case& golden) {
  const Packed packed(kWeightInt8, golden.array("weight"), golden.find("weight_scale"), nullptr,
                      golden.find("bias"));
  return product(golden, packed, golden.text("out_dtype"), golden.array("x"));
}

std::vector<Result> w4a8_linear(const Case& golden) {
  const Packed packed(kWeightInt4, golden.array("weight"), golden.find("weight_scales"),
                      golden.find("weight_zero_points"), golden.find("bias"));
  return product(golden, packed, golden.text("out_dtype"), golden.array("x"));
}

// x in bfloat16, which represents every 8-bit float.
std::vector<Result> widened(const Case& golden, const Packed& packed) {
  const Array& given = golden.array("x");
  const std::vector<float> values = floats_of(given);
  Array x;
  x.dtype = "bfloat16";
  x.shape = given.shape;
  for (size_t i = 0; i < x.shape.size(); ++i) x.strides.push_back(given.columns());
  x.memory = Memory(2, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = bfloat16_of_float(values[i]);
    std::memcpy(x.memory.data() + 2 * i, &half, 2);
  }
  return product(golden, packed, golden.text("out_dtype"), x);
}

std::vector<Result> fp8_linear(const Case& golden) {
  const Packed packed(kWeightE4M3, golden.array("weight"), golden.find("weight_scale"), nullptr,
                      golden.find("bias"));
  return widened(golden, packed);
}

std::vector<Result> mxfp8_linear(const Case& golden) {
  const Packed packed(kWeightE4M3, golden.array("weight"), golden.find("weight_scales"), nullptr,
                      golden.find("bias"));
  return widened(golden, packed);
}

// Repeat the scales of a block for each of its rows.
std::vector<Result> fp8_block_linear(const Case& golden) {
  const Array &weight = golden.array("weight"), &given = golden.array("weight_scales");
  const std::vector<float> blocks = floats_of(given);
  const int64_t rows = int64_t(golden.number("block_rows")), groups = given.columns();
  Array scales;
  scales.dtype = "float32";
  scales.shape = {weight.shape[0], groups};
  scales.strides = {groups, 1};
  scales.memory = Memory(4, size_t(weight.shape[0] * groups));
  for (int64_t output = 0; output < weight.shape[0]; ++output) {
    std::memcpy(scales.memory.data() + output * groups * 4, blocks.data() + output / rows * groups,
                size_t(groups) * 4);
  }
  return widened(golden, Packed(kWeightE4M3, weight, &scales, nullptr, golden.find("bias")));
}

std::vector<Result> lookup(const Case& golden, const Packed& packed, const std::string& out_dtype) {
  const Array& ids = golden.array("token_ids");
  const int64_t count = ids.shape[0], width = packed.get()->inputs;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) {
    rows.push_back(int64_t(number_at(ids.memory.data(), ids.dtype, i * ids.strides[0])));
  }
  Rows out(out_dtype, 1, count * width);
  interposer_lookup asked = {};
  asked.weight = packed.get();
  asked.rows = rows.data();
  asked.count = count;
  asked.out = out.data();
  asked.out_type = type_of(out_dtype);
  if (const int32_t failure = interposer_rows(&asked)) {
    throw std::runtime_error("the lookup failed with code " + std::to_string(failure));
  }
  return {out.result()};
}

std::vector<Result> embedding(const Case& golden) {
  const Array& weight = golden.array("weight");
  const int32_t format = weight.dtype == "float32" ? kWeightFloat32 : kWeightBFloat16;
  const Packed packed(format, weight, nullptr, nullptr, nullptr);
  return lookup(golden, packed, weight.dtype);
}

std::vector<Result> w4a16_embedding(const Case& golden) {
  const Packed packed(kWeightInt4, golden.array("weight"), golden.find("scale"),
                      golden.find("zero_points"), nullptr);
  return lookup(golden, packed, golden.text("out_dtype"));
}

std::vector<Result> w8a16_embedding(const Case& golden) {
  const Packed packed(kWeightInt8, golden.array("weight"), golden.find("scale"),
                      golden.find("zero_points"), nullptr, true);
  return lookup(golden, packed, golden.text("out_dtype"));
}

const Registration registrations[] = {
    {"embedding", embedding},
    {"fp8_block_linear", fp8_block_linear},
    {"fp8_linear", fp8_linear},
    {"int8_linear", int8_linear},
    {"linear", linear},
    {"mxfp4_linear", mxfp4_linear},
    {"mxfp8_linear", mxfp8_linear},
    {"w4a16_embedding", w4a16_embedding},
    {"w4a16_linear", w4a16_linear},
    {"w4a8_linear", w4a8_linear},
    {"w8a16_embedding", w8a16_embedding},
    {"w8a16_linear", w8a16_linear},
};

}  // namespace
