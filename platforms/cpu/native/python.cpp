// The door for eager calls: functions of numbers, which addresses of tensors are too.
// Python's limited API makes one file serve all versions from 3.11 on.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>

#include "door.h"

// Read `count` arguments as numbers. Returns 0 with an exception where they are not.
static int numbers(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t count, int64_t *values) {
  if (given != count) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count, given);
    return 0;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    values[i] = PyLong_AsLongLong(arguments[i]);
    if (values[i] == -1 && PyErr_Occurred()) return 0;
  }
  return 1;
}

static PyObject *attach(PyObject *self, PyObject *path) {
  (void)self;
  PyObject *encoded = nullptr;
  if (!PyUnicode_FSConverter(path, &encoded)) return NULL;
  const char *missing = interposer_attach(PyBytes_AsString(encoded));
  if (missing == NULL) missing = interposer_register_ops();
  Py_DECREF(encoded);
  return PyUnicode_FromString(missing ? missing : "");
}

static PyObject *levels(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  PyObject *list = PyList_New(0);
  if (list == NULL) return NULL;
  for (const int32_t *level = interposer_levels(); *level; ++level) {
    PyObject *number = PyLong_FromLong(*level);
    if (number == NULL || PyList_Append(list, number)) {
      Py_XDECREF(number);
      Py_DECREF(list);
      return NULL;
    }
    Py_DECREF(number);
  }
  return list;
}

static PyObject *level(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  return PyLong_FromLong(interposer_level());
}

static PyObject *force_level(PyObject *self, PyObject *number) {
  (void)self;
  long wanted = PyLong_AsLong(number);
  if (wanted == -1 && PyErr_Occurred()) return NULL;
  return PyBool_FromLong(interposer_force_level((int32_t)wanted));
}

// What `pack` and `packed_bytes` describe: format, scale type, O, I, group, addresses of weight,
// scales, zeros and bias, elements between the scales of two outputs.
static void describe(const int64_t *values, struct interposer_plain *plain) {
  plain->format = (int32_t)values[0];
  plain->scale_type = (int32_t)values[1];
  plain->outputs = values[2];
  plain->inputs = values[3];
  plain->group = values[4];
  plain->weight = (const void *)(intptr_t)values[5];
  plain->scales = (const void *)(intptr_t)values[6];
  plain->zeros = (const uint8_t *)(intptr_t)values[7];
  plain->bias = (const float *)(intptr_t)values[8];
  plain->scale_stride = values[9];
}

static PyObject *packed_bytes(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
  (void)self;
  int64_t values[10];
  struct interposer_plain plain;
  if (!numbers(arguments, given, 10, values)) return NULL;
  describe(values, &plain);
  return PyLong_FromLongLong(interposer_packed_bytes(&plain));
}

static PyObject *pack(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
  (void)self;
  int64_t values[11];
  struct interposer_plain plain;
  if (!numbers(arguments, given, 11, values)) return NULL;
  describe(values, &plain);
  Py_BEGIN_ALLOW_THREADS;
  interposer_pack(&plain, (void *)(intptr_t)values[10]);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// Addresses of the packed weight and of x, type of x, rows, elements between rows of x; addresses
// of the scales of x and of the result, type of the result, elements between its rows, between
// scales.
static PyObject *linear(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
  (void)self;
  int64_t values[10];
  int32_t failure;
  struct interposer_product product;
  if (!numbers(arguments, given, 10, values)) return NULL;
  product.weight = (const struct interposer_packed *)(intptr_t)values[0];
  product.x = (const void *)(intptr_t)values[1];
  product.x_type = (int32_t)values[2];
  product.rows = values[3];
  product.x_stride = values[4];
  product.x_scales = (const float *)(intptr_t)values[5];
  product.out = (void *)(intptr_t)values[6];
  product.out_type = (int32_t)values[7];
  product.out_stride = values[8];
  product.x_scale_stride = values[9];
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_linear(&product);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native product failed with code %d", (int)failure);
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *rows(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
  (void)self;
  int64_t values[4];
  if (!numbers(arguments, given, 4, values)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  interposer_rows((const struct interposer_packed *)(intptr_t)values[0],
                  (const int64_t *)(intptr_t)values[1], values[2], (void *)(intptr_t)values[3]);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    {"attach", attach, METH_O, NULL},
    {"levels", levels, METH_NOARGS, NULL},
    {"level", level, METH_NOARGS, NULL},
    {"force_level", force_level, METH_O, NULL},
    FAST(packed_bytes),
    FAST(pack),
    FAST(linear),
    FAST(rows),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods,
                                    NULL,                  NULL,      NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
