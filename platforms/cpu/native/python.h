// Helpers of the Python functions of all kernel families. Python passes numbers only, addresses
// included. One binary serves all versions from 3.11 on, by Python's limited API.
#pragma once

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <cstdint>

// Read `count` arguments as integers; addresses are integers too. Returns false with an exception
// set.
bool interposer_numbers(PyObject* const* arguments, Py_ssize_t given, Py_ssize_t count,
                        int64_t* values);

template <class T>
T* address(int64_t number) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(number));
}

// Run a kernel without the GIL. Returns None, or null with an exception that names the failing
// function.
template <class Call>
PyObject* interposer_done(const char* who, int32_t (*run)(const Call*), const Call& call) {
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = run(&call);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "%s failed with code %d", who, int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

#define INTERPOSER_METHOD(name) \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}
