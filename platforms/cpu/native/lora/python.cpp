// Python functions of LoRA, which take addresses.

#include "../python.h"

#include <cstring>

#include "lora.h"

namespace {

// Arguments: addresses of x, a, ids and result; type; tokens, rank, inputs; token stride of x;
// scale as float64 bits.
PyObject* lora_shrink(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[10];
  if (!interposer_numbers(arguments, given, 10, values)) return nullptr;
  interposer_lora_shrink call = {};
  call.x = address<const void>(values[0]);
  call.a = address<const void>(values[1]);
  call.ids = address<const int64_t>(values[2]);
  call.y = address<float>(values[3]);
  call.type = static_cast<int32_t>(values[4]);
  call.tokens = values[5];
  call.rank = values[6];
  call.inputs = values[7];
  call.x_stride = values[8];
  double scale;
  std::memcpy(&scale, &values[9], sizeof scale);
  call.scale = static_cast<float>(scale);
  return interposer_done("native adapters", interposer_lora_shrink_rows, call);
}

// Arguments: addresses of x, b, ids and y; type; tokens, rank, outputs; token strides of x and y.
PyObject* lora_expand(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[10];
  if (!interposer_numbers(arguments, given, 10, values)) return nullptr;
  interposer_lora_expand call = {};
  call.x = address<const float>(values[0]);
  call.b = address<const void>(values[1]);
  call.ids = address<const int64_t>(values[2]);
  call.y = address<void>(values[3]);
  call.type = call.y_type = static_cast<int32_t>(values[4]);
  call.tokens = values[5];
  call.rank = values[6];
  call.outputs = values[7];
  call.x_stride = values[8];
  call.y_stride = values[9];
  return interposer_done("native adapters", interposer_lora_expand_rows, call);
}

}  // namespace

PyMethodDef interposer_lora_methods[] = {
    INTERPOSER_METHOD(lora_shrink),
    INTERPOSER_METHOD(lora_expand),
    {nullptr, nullptr, 0, nullptr},
};
