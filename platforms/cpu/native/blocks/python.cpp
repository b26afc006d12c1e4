// Several kernels in one call, by addresses.

#include "../python.h"

#include "blocks.h"

namespace {

PyObject* done(int32_t failure) {
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native block failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Addresses of the packed weights of gate and up and of down, of x and of the result; type,
// activation, rows, elements between rows of x.
PyObject* mlp(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[8];
  if (!interposer_numbers(arguments, given, 8, values)) return nullptr;
  interposer_mlp_call call = {};
  call.gate_up = address<const interposer_packed>(values[0]);
  call.down = address<const interposer_packed>(values[1]);
  call.x = address<const void>(values[2]);
  call.out = address<void>(values[3]);
  call.type = static_cast<int32_t>(values[4]);
  call.activation = static_cast<int32_t>(values[5]);
  call.rows = values[6];
  call.x_stride = values[7];
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_mlp(&call);
  Py_END_ALLOW_THREADS;
  return done(failure);
}

// Addresses of the packed weight, of x, of the result, of the weights of query and key, of cosines
// and sines; type, heads, kv heads, size, half of the rotated size; rows, elements between rows of
// x; eps.
PyObject* project_heads(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[14];
  if (given != 15) {
    PyErr_Format(PyExc_TypeError, "expected 15 arguments, got %zd", given);
    return nullptr;
  }
  if (!interposer_numbers(arguments, 14, 14, values)) return nullptr;
  const double eps = PyFloat_AsDouble(arguments[14]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  interposer_heads_call call = {};
  call.weight = address<const interposer_packed>(values[0]);
  call.x = address<const void>(values[1]);
  call.out = address<void>(values[2]);
  call.query_weight = address<const void>(values[3]);
  call.key_weight = address<const void>(values[4]);
  call.cos = address<const float>(values[5]);
  call.sin = address<const float>(values[6]);
  call.type = static_cast<int32_t>(values[7]);
  call.heads = values[8];
  call.kv_heads = values[9];
  call.size = values[10];
  call.half = values[11];
  call.rows = values[12];
  call.x_stride = values[13];
  call.eps = static_cast<float>(eps);
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_project_heads(&call);
  Py_END_ALLOW_THREADS;
  return done(failure);
}

}  // namespace

PyMethodDef interposer_block_methods[] = {
    INTERPOSER_METHOD(mlp),
    INTERPOSER_METHOD(project_heads),
    {nullptr, nullptr, 0, nullptr},
};
