// Products by packed weights, called as native_linear.py calls them.

#include "../linear/packed.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  if (dtype == "int8") return kInt8;
  if (dtype == "uint8") return kE8M0;
  throw std::runtime_error("kernels do not take " + dtype);
}

std::vector<float> floats_of(const Array& array) {
  std::vector<float> values;
  for (int64_t row = 0; row < array.rows(); ++row) {
    for (int64_t column = 0; column < array.columns(); ++column) {
      const int64_t index = row * array.row_stride() + column;
      values.push_back(float(number_at(array.memory.data(), array.dtype, index)));
    }
  }
  return values;
}

// The weight and what belongs to it, packed.
class Packed {
 public:
  Packed(int32_t format, const Array& weight, const Array* scales, const Array* zeros,
         const Array* bias, bool raised = false) {
    interposer_plain plain = {};
    const int64_t codes = format == kWeightInt4 || format == kWeightE2M1 ? 2 : 1;
    plain.format = format;
    plain.scale_type = kNone;
    plain.outputs = weight.shape[0];
    plain.inputs = weight.shape[1] * codes;
    plain.weight = weight.data<void>();
    if (scales) {
      // One scale for each output may come without a dimension of groups.
      const int64_t groups = scales->shape.size() == 2 ? scales->shape[1] : 1;
      plain.scale_type = type_of(scales->dtype);
      plain.scales = scales->data<void>();
      plain.group = plain.inputs / groups;
      plain.scale_stride = scales->shape[0] > 1 || plain.outputs == 1 ? groups : 0;
      narrow(plain, *scales);
    }
    std::vector<uint8_t> lifted;
    if (zeros) {
      const uint8_t* given = zeros->data<uint8_t>();
      lifted.assign(given, given + zeros->memory.bytes());
      for (uint8_t& zero : lifted) zero ^= raised ? 0x80 : 0;
      plain.zeros = lifted.data();
    }
    const std::vector<float> offsets = bias ? floats_of(*bias) : std::vector<float>();
    plain.bias = bias ? offsets.data() : nullptr;

    const int64_t bytes = interposer_packed_bytes(&plain);
    if (bytes == 0) throw std::runtime_error("the weight cannot be packed");
    memory_.reset(std::aligned_alloc(64, size_t(round_up(bytes, 64))));
    std::memset(memory_.get(), 0xff, size_t(round_up(bytes, 64)));
    interposer_pack(&plain, memory_.get());
  }

  const interposer_packed* get() const {
    return static_cast<const interposer_packed*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  // Scales in sixteen bits where these hold the same numbers.
  void narrow(interposer_plain& plain, const Array& scales) {
    if (plain.scale_type != kFloat32) return;
    for (size_t i = 0; i < scales.memory.bytes() / 4; ++i) {
      uint32_t bits;
      std::memcpy(&bits, scales.data<char>() + 4 * i, 4);
      if (bits & 0xffff) return;
      narrow_.push_back(uint16_t(bits >> 16));
    }
    plain.scale_type = kBFloat16;
    plain.scales = narrow_.data();
  }

  std::vector<uint16_t> narrow_;
  std::unique_ptr<void, Free> memory_;
};

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
  const std::vector<float> of_rows = scales ? floats_of(*scales) : std::vector<float>();
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

// x in bfloat16, which holds every number of eight bits.
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

// The scales of a block stand for each of its rows.
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
    {"w4a16_embedding", w4a16_embedding},
    {"w4a16_linear", w4a16_linear},
    {"w4a8_linear", w4a8_linear},
    {"w8a16_embedding", w8a16_embedding},
    {"w8a16_linear", w8a16_linear},
};

}  // namespace
