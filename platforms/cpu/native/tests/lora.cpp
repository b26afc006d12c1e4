// LoRA, called as its Python module calls it.

#include "../lora/lora.h"

#include <cstring>
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

void check(int32_t failure) {
  if (failure) throw std::runtime_error("it failed with code " + std::to_string(failure));
}

std::vector<Result> lora_shrink(const Case& golden) {
  const Array &x = golden.array("x"), &a = golden.array("lora_a");
  const int64_t adapters = a.shape[0], rank = a.shape[1], inputs = a.shape[2];
  const int64_t bytes = int64_t(bytes_of(a.dtype));
  Memory blocks(size_t(bytes), size_t(adapters * rank * inputs));
  for (int64_t i = 0; i < adapters * rank * inputs; ++i) {
    const int64_t input = i % inputs, row = i / inputs % rank;
    const int64_t first = row / kLoraRanks * kLoraRanks, chunk = input / kLoraInputs * kLoraInputs;
    const int64_t rows = rank - first < kLoraRanks ? rank - first : kLoraRanks;
    const int64_t width = inputs - chunk < kLoraInputs ? inputs - chunk : kLoraInputs;
    const int64_t to = (i / (inputs * rank) * rank + first) * inputs + chunk * rows +
                       (row - first) * width + input - chunk;
    std::memcpy(blocks.data() + to * bytes, a.memory.data() + i * bytes, size_t(bytes));
  }
  Rows out("float32", x.shape[0], rank, 0);
  interposer_lora_shrink call = {};
  call.x = x.data<void>();
  call.a = blocks.data();
  call.ids = golden.array("adapter_ids").data<int64_t>();
  call.y = static_cast<float*>(out.data());
  call.type = type_of(x.dtype);
  call.scale = float(golden.number("scale"));
  call.tokens = x.shape[0], call.rank = rank, call.inputs = inputs;
  call.x_stride = x.row_stride();
  if (x.shape[0]) check(interposer_lora_shrink_rows(&call));
  return {out.result()};
}

std::vector<Result> lora_expand(const Case& golden) {
  const Array &x = golden.array("shrunk"), &b = golden.array("lora_b"), &y = golden.array("y");
  const int64_t bytes = int64_t(bytes_of(y.dtype));
  const int64_t adapters = b.shape[0], outputs = b.shape[1], rank = b.shape[2];
  Memory turned(size_t(bytes), size_t(adapters * outputs * rank));
  for (int64_t i = 0; i < adapters * outputs * rank; ++i) {
    const int64_t output = i / rank % outputs, first = output / kLoraPanel * kLoraPanel;
    const int64_t width = outputs - first < kLoraPanel ? outputs - first : kLoraPanel;
    const int64_t r = i % rank, to = (i / (outputs * rank) * outputs + first) * rank;
    const bool pairs = y.dtype == "bfloat16" && (r ^ 1) < rank;
    const int64_t within = pairs ? r / 2 * 2 * width + (output - first) * 2 + r % 2
                                 : r * width + output - first;
    std::memcpy(turned.data() + (to + within) * bytes, b.memory.data() + i * bytes, size_t(bytes));
  }
  Rows out(y.dtype, y.shape[0], y.shape[1]);
  char* rows = static_cast<char*>(out.data());
  for (int64_t row = 0; row < y.shape[0]; ++row) {
    std::memcpy(rows + row * out.stride() * bytes, y.memory.data() + row * y.row_stride() * bytes,
                size_t(y.shape[1] * bytes));
  }
  interposer_lora_expand call = {};
  call.x = x.data<float>();
  call.b = turned.data();
  call.ids = golden.array("adapter_ids").data<int64_t>();
  call.y = rows + int64_t(golden.number("offset")) * bytes;
  call.type = call.y_type = type_of(y.dtype);
  call.tokens = y.shape[0], call.rank = rank, call.outputs = outputs;
  call.x_stride = x.row_stride(), call.y_stride = out.stride();
  if (y.shape[0]) check(interposer_lora_expand_rows(&call));
  return {out.result()};
}

const Registration registrations[] = {
    {"lora_shrink", lora_shrink},
    {"lora_expand", lora_expand},
};

}  // namespace
