// Weight quantization, called as its Python module calls it.

#include "../rounding/rounding.h"

#include <stdexcept>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  throw std::runtime_error("kernels do not take " + dtype);
}

std::vector<Result> rounded_to(const Case& golden, int32_t bits, bool asymmetric) {
  const Array& weight = golden.array("weight");
  const int64_t outputs = weight.rows(), inputs = weight.columns();
  const int64_t group = int64_t(golden.number("group_size"));
  const int64_t columns = bits == 4 ? inputs / 2 : inputs;
  // Results are contiguous.
  Rows codes(bits == 4 ? "uint8" : "int8", outputs, columns, 0);
  Rows scales("float32", outputs, inputs / group, 0);
  Rows zeros("uint8", asymmetric ? outputs : 0, inputs / group, 0);
  interposer_rounded rounded = {};
  rounded.weight = weight.data<void>();
  rounded.codes = codes.data();
  rounded.scales = static_cast<float*>(scales.data());
  rounded.zeros = asymmetric ? static_cast<uint8_t*>(zeros.data()) : nullptr;
  rounded.type = type_of(weight.dtype);
  rounded.scale_type = asymmetric ? kFloat32 : type_of(golden.text("scale_dtype"));
  rounded.bits = bits;
  rounded.outputs = outputs;
  rounded.inputs = inputs;
  rounded.stride = weight.row_stride();
  rounded.group = group;
  const int32_t failure = interposer_round(&rounded);
  if (failure) throw std::runtime_error("it failed with code " + std::to_string(failure));
  if (asymmetric) return {codes.result(), scales.result(), zeros.result()};
  return {codes.result(), scales.result()};
}

std::vector<Result> int8(const Case& golden) { return rounded_to(golden, 8, false); }
std::vector<Result> int4(const Case& golden) { return rounded_to(golden, 4, false); }
std::vector<Result> int4_asymmetric(const Case& golden) { return rounded_to(golden, 4, true); }

const Registration registrations[] = {
    {"quantize_weight_int8", int8},
    {"quantize_weight_int4", int4},
    {"quantize_weight_int4_asymmetric", int4_asymmetric},
};

}  // namespace
