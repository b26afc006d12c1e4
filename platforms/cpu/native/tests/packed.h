// A weight of a case with its scales and bias, packed as in native_linear.py.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../linear/packed.h"
#include "../vectors.h"
#include "golden.h"

namespace {

inline int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  if (dtype == "int8") return kInt8;
  if (dtype == "uint8") return kE8M0;
  throw std::runtime_error("kernels do not take " + dtype);
}

inline std::vector<float> floats_of(const Array& array) {
  std::vector<float> values;
  for (int64_t row = 0; row < array.rows(); ++row) {
    for (int64_t column = 0; column < array.columns(); ++column) {
      const int64_t index = row * array.row_stride() + column;
      values.push_back(float(number_at(array.memory.data(), array.dtype, index)));
    }
  }
  return values;
}

// The packed weight.
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
      // Scales with one number per output can lack the group dimension.
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

  // Convert scales to 16 bits if that is exact.
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

}  // namespace
