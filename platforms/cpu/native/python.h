// What the families of kernels share to be called from Python with numbers.
// Python's limited API makes one file serve all versions from 3.11 on.
#pragma once

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <cstdint>

// Read `count` arguments as numbers; addresses are some. Returns false with an exception set.
bool interposer_numbers(PyObject* const* arguments, Py_ssize_t given, Py_ssize_t count,
                        int64_t* values);

template <class T>
T* address(int64_t number) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(number));
}

#define INTERPOSER_METHOD(name) \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}
