// Python function of weight quantization, which takes addresses.

#include "../python.h"

#include "rounding.h"

namespace {

// Arguments: addresses of weight, quantized values, scales, and zeros or 0; type of the weight,
// type of scales, bits of a value; outputs, inputs, row stride of the weight, inputs per group.
PyObject* round_weight(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[11];
  if (!interposer_numbers(arguments, given, 11, values)) return nullptr;
  interposer_rounded rounded = {};
  rounded.weight = address<const void>(values[0]);
  rounded.codes = address<void>(values[1]);
  rounded.scales = address<float>(values[2]);
  rounded.zeros = address<uint8_t>(values[3]);
  rounded.type = static_cast<int32_t>(values[4]);
  rounded.scale_type = static_cast<int32_t>(values[5]);
  rounded.bits = static_cast<int32_t>(values[6]);
  rounded.outputs = values[7];
  rounded.inputs = values[8];
  rounded.stride = values[9];
  rounded.group = values[10];
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_round(&rounded);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "rounding a weight failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef interposer_rounding_methods[] = {
    INTERPOSER_METHOD(round_weight),
    {nullptr, nullptr, 0, nullptr},
};
