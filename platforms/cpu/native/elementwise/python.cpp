// Python functions of kernels of independent rows, which take addresses.

#include "../python.h"

#include "elementwise.h"

namespace {

// From this number of elements on, release the GIL: releasing it costs time itself.
constexpr int64_t kMany = 1 << 14;

// Read `count` integers, followed by `floats` floating-point numbers.
bool numbers(PyObject* const* arguments, Py_ssize_t given, Py_ssize_t count, int64_t* values,
             Py_ssize_t floats, float* fractions) {
  if (given != count + floats) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count + floats, given);
    return false;
  }
  if (!interposer_numbers(arguments, count, count, values)) return false;
  for (Py_ssize_t i = 0; i < floats; ++i) {
    const double value = PyFloat_AsDouble(arguments[count + i]);
    if (value == -1.0 && PyErr_Occurred()) return false;
    fractions[i] = static_cast<float>(value);
  }
  return true;
}

template <class Work>
PyObject* done(int32_t (*function)(const Work*), const Work& work) {
  int32_t failure;
  if (work.rows.outer * work.rows.inner * work.rows.width >= kMany) {
    Py_BEGIN_ALLOW_THREADS;
    failure = function(&work);
    Py_END_ALLOW_THREADS;
  } else {
    failure = function(&work);
  }
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native kernel failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

interposer_rows_of dense(int64_t elements, int64_t width) {
  return {width ? elements / width : 0, 1, width, width, width};
}

// Arguments: addresses of x, weight and result; type, elements, width; eps. All contiguous.
PyObject* rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[6];
  float eps;
  if (!numbers(arguments, given, 6, values, 1, &eps)) return nullptr;
  interposer_norm norm = {};
  norm.x = address<const void>(values[0]);
  norm.weight = address<const void>(values[1]);
  norm.out = address<void>(values[2]);
  norm.type = static_cast<int32_t>(values[3]);
  norm.rows = dense(values[4], values[5]);
  norm.eps = eps;
  return done(interposer_normalise, norm);
}

// Arguments: addresses of x, residual, weight, result and sum; type, type of the residual,
// elements, width; eps, shift of the weight. All contiguous.
PyObject* add_rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[9];
  float fractions[2];
  if (!numbers(arguments, given, 9, values, 2, fractions)) return nullptr;
  interposer_norm norm = {};
  norm.x = address<const void>(values[0]);
  norm.residual = address<const void>(values[1]);
  norm.weight = address<const void>(values[2]);
  norm.out = address<void>(values[3]);
  norm.total = address<void>(values[4]);
  norm.type = static_cast<int32_t>(values[5]);
  norm.residual_type = static_cast<int32_t>(values[6]);
  norm.rows = dense(values[7], values[8]);
  norm.eps = fractions[0];
  norm.shift = fractions[1];
  return done(interposer_normalise, norm);
}

// Arguments: addresses of x, weight, bias and result; type, whether rows are centred; outer, inner,
// width, outer stride, inner stride; eps, shift of the weight.
PyObject* normalise(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[11];
  float fractions[2];
  if (!numbers(arguments, given, 11, values, 2, fractions)) return nullptr;
  interposer_norm norm = {};
  norm.x = address<const void>(values[0]);
  norm.weight = address<const void>(values[1]);
  norm.bias = address<const void>(values[2]);
  norm.out = address<void>(values[3]);
  norm.type = static_cast<int32_t>(values[4]);
  norm.centred = static_cast<int32_t>(values[5]);
  norm.rows = {values[6], values[7], values[8], values[9], values[10]};
  norm.eps = fractions[0];
  norm.shift = fractions[1];
  return done(interposer_normalise, norm);
}

// Arguments: addresses of gate, up (or 0) and result; type, activation; rows, width, row stride.
PyObject* gate(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[8];
  if (!interposer_numbers(arguments, given, 8, values)) return nullptr;
  interposer_gated gated = {};
  gated.gate = address<const void>(values[0]);
  gated.up = address<const void>(values[1]);
  gated.out = address<void>(values[2]);
  gated.type = gated.out_type = static_cast<int32_t>(values[3]);
  gated.activation = static_cast<int32_t>(values[4]);
  gated.rows = {values[5], 1, values[6], values[7], 0};
  return done(interposer_gate, gated);
}

// Arguments: addresses of x, weight, cosines, sines and result; type; outer, inner, width, outer
// stride, inner stride; half of the rotated size, whether neighbours are rotated; eps.
PyObject* turn_heads(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[13];
  float eps;
  if (!numbers(arguments, given, 13, values, 1, &eps)) return nullptr;
  interposer_heads heads = {};
  heads.x = address<const void>(values[0]);
  heads.weight = address<const void>(values[1]);
  heads.cos = address<const float>(values[2]);
  heads.sin = address<const float>(values[3]);
  heads.out = address<void>(values[4]);
  heads.type = static_cast<int32_t>(values[5]);
  heads.rows = {values[6], values[7], values[8], values[9], values[10]};
  heads.half = values[11];
  heads.neighbours = values[12] != 0;
  heads.out_stride = heads.rows.inner * heads.rows.width;
  heads.eps = eps;
  return done(interposer_turn_heads, heads);
}

// Arguments: addresses of x, quantized values, scales and static scale, one of the last two 0;
// types of x and of quantized values; outer, inner, width, outer stride, inner stride; kind of
// power-of-two scales; largest scale.
PyObject* code(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[12];
  float limit;
  if (!numbers(arguments, given, 12, values, 1, &limit)) return nullptr;
  interposer_coded coded = {};
  coded.x = address<const void>(values[0]);
  coded.codes = address<void>(values[1]);
  coded.scales = address<float>(values[2]);
  coded.given = address<const float>(values[3]);
  coded.type = static_cast<int32_t>(values[4]);
  coded.code_type = static_cast<int32_t>(values[5]);
  coded.rows = {values[6], values[7], values[8], values[9], values[10]};
  coded.powers = static_cast<int32_t>(values[11]);
  coded.limit = limit;
  return done(interposer_code, coded);
}

}  // namespace

PyMethodDef interposer_elementwise_methods[] = {
    INTERPOSER_METHOD(rms_norm),   INTERPOSER_METHOD(add_rms_norm),
    INTERPOSER_METHOD(normalise),  INTERPOSER_METHOD(gate),
    INTERPOSER_METHOD(turn_heads), INTERPOSER_METHOD(code),
    {nullptr, nullptr, 0, nullptr},
};
