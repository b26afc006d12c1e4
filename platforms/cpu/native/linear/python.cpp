// Python functions of packing and GEMM, which take addresses.

#include "../python.h"

#include "batched.h"

namespace {

// Arguments: format, scale type, O, I, group; addresses of weight, scales, zeros and bias; elements
// between the scales of two outputs.
constexpr Py_ssize_t kDescription = 10;

interposer_plain described(const int64_t* values) {
  interposer_plain plain = {};
  plain.format = static_cast<int32_t>(values[0]);
  plain.scale_type = static_cast<int32_t>(values[1]);
  plain.outputs = values[2];
  plain.inputs = values[3];
  plain.group = values[4];
  plain.weight = address<const void>(values[5]);
  plain.scales = address<const void>(values[6]);
  plain.zeros = address<const uint8_t>(values[7]);
  plain.bias = address<const float>(values[8]);
  plain.scale_stride = values[9];
  return plain;
}

PyObject* packed_bytes(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[kDescription];
  if (!interposer_numbers(arguments, given, kDescription, values)) return nullptr;
  const interposer_plain plain = described(values);
  return PyLong_FromLongLong(interposer_packed_bytes(&plain));
}

// Arguments: a description, and the destination address.
PyObject* pack(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[kDescription + 1];
  if (!interposer_numbers(arguments, given, kDescription + 1, values)) return nullptr;
  const interposer_plain plain = described(values);
  Py_BEGIN_ALLOW_THREADS;
  interposer_pack(&plain, address<void>(values[kDescription]));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// Arguments: addresses of packed weight and x; type of x, rows, row stride; address of the scales
// of x; address, type and row stride of the result; stride of the scales.
PyObject* linear(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[10];
  if (!interposer_numbers(arguments, given, 10, values)) return nullptr;
  interposer_product product = {};
  product.weight = address<const interposer_packed>(values[0]);
  product.x = address<const void>(values[1]);
  product.x_type = static_cast<int32_t>(values[2]);
  product.rows = values[3];
  product.x_stride = values[4];
  product.x_scales = address<const float>(values[5]);
  product.out = address<void>(values[6]);
  product.out_type = static_cast<int32_t>(values[7]);
  product.out_stride = values[8];
  product.x_scale_stride = values[9];
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_linear(&product);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native product failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Arguments: addresses of packed weights, of x and of the scales of int8 x or 0, type of x; address
// and type of the contiguous result; heads, rows, outputs of a head; head stride and row stride of
// x.
PyObject* multiply_batch(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[11];
  if (!interposer_numbers(arguments, given, 11, values)) return nullptr;
  interposer_batch batch = {};
  batch.weights = address<const interposer_packed>(values[0]);
  batch.x = address<const void>(values[1]);
  batch.x_scales = address<const float>(values[2]);
  batch.x_type = static_cast<int32_t>(values[3]);
  batch.out = address<void>(values[4]);
  batch.out_type = static_cast<int32_t>(values[5]);
  batch.heads = values[6];
  batch.rows = values[7];
  batch.outputs = values[8];
  batch.head_stride = values[9];
  batch.row_stride = values[10];
  batch.out_row_stride = batch.outputs;
  batch.out_head_stride = batch.rows * batch.out_row_stride;
  return interposer_done("the native products", interposer_multiply_batch, batch);
}

// Arguments: addresses of a packed weight and of int64 row numbers, their count, address and type
// of the result.
PyObject* rows(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[5];
  if (!interposer_numbers(arguments, given, 5, values)) return nullptr;
  interposer_lookup lookup = {};
  lookup.weight = address<const interposer_packed>(values[0]);
  lookup.rows = address<const int64_t>(values[1]);
  lookup.count = values[2];
  lookup.out = address<void>(values[3]);
  lookup.out_type = static_cast<int32_t>(values[4]);
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_rows(&lookup);
  Py_END_ALLOW_THREADS;
  if (failure == kNoSuchRow) {
    PyErr_SetString(PyExc_IndexError, "a row is asked for that the table does not have");
    return nullptr;
  }
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native lookup failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef interposer_linear_methods[] = {
    INTERPOSER_METHOD(packed_bytes),
    INTERPOSER_METHOD(pack),
    INTERPOSER_METHOD(linear),
    INTERPOSER_METHOD(multiply_batch),
    INTERPOSER_METHOD(rows),
    {nullptr, nullptr, 0, nullptr},
};
