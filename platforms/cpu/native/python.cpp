// The module `_native`: library state, and the functions of every kernel family.

#include "python.h"

#include <initializer_list>

#include "levels.h"
#include "torch_runtime.h"

extern PyMethodDef interposer_attention_methods[];
extern PyMethodDef interposer_block_methods[];
extern PyMethodDef interposer_communicator_methods[];
extern PyMethodDef interposer_dense_methods[];
extern PyMethodDef interposer_elementwise_methods[];
extern PyMethodDef interposer_experts_methods[];
extern PyMethodDef interposer_linear_methods[];
extern PyMethodDef interposer_lora_methods[];
extern PyMethodDef interposer_recurrence_methods[];
extern PyMethodDef interposer_rounding_methods[];
extern PyMethodDef interposer_sampling_methods[];
extern PyMethodDef interposer_weights_methods[];

bool interposer_numbers(PyObject* const* arguments, Py_ssize_t given, Py_ssize_t count,
                        int64_t* values) {
  if (given != count) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count, given);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    values[i] = PyLong_AsLongLong(arguments[i]);
    if (values[i] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

namespace {

PyObject* attach(PyObject*, PyObject* path) {
  PyObject* encoded = nullptr;
  if (!PyUnicode_FSConverter(path, &encoded)) return nullptr;
  const char* missing = interposer_attach(PyBytes_AsString(encoded));
  if (missing == nullptr) missing = interposer_register_ops();
  Py_DECREF(encoded);
  return PyUnicode_FromString(missing ? missing : "");
}

PyObject* levels(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  for (const int32_t* level = interposer_levels(); *level; ++level) {
    PyObject* number = PyLong_FromLong(*level);
    const bool failed = number == nullptr || PyList_Append(list, number);
    Py_XDECREF(number);
    if (failed) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

PyObject* level(PyObject*, PyObject*) { return PyLong_FromLong(interposer_level()); }

PyObject* force_level(PyObject*, PyObject* number) {
  const long wanted = PyLong_AsLong(number);
  if (wanted == -1 && PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(interposer_force_level(static_cast<int32_t>(wanted)));
}

PyMethodDef methods[] = {
    {"attach", attach, METH_O, nullptr},
    {"levels", levels, METH_NOARGS, nullptr},
    {"level", level, METH_NOARGS, nullptr},
    {"force_level", force_level, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods,
                      nullptr,               nullptr,   nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* made = PyModule_Create(&module);
  for (PyMethodDef* family : {interposer_linear_methods, interposer_elementwise_methods,
                              interposer_attention_methods, interposer_block_methods,
                              interposer_dense_methods, interposer_experts_methods,
                              interposer_lora_methods, interposer_recurrence_methods,
                              interposer_rounding_methods, interposer_sampling_methods,
                              interposer_communicator_methods, interposer_weights_methods}) {
    if (made && PyModule_AddFunctions(made, family)) Py_CLEAR(made);
  }
  return made;
}
