// Python function of the search for NaN and infinity, which takes addresses.

#include "../python.h"

#include "finite.h"

namespace {

// Arguments: address of the numbers, destination of a copy or 0, bytes; masks for each number in a
// 64-bit word: bits that are all set if not finite, the lowest of them, and the sign. The masks are
// passed as signed integers.
PyObject* are_finite(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[6];
  if (!interposer_numbers(arguments, given, 6, values)) return nullptr;
  interposer_numbers_searched searched = {};
  searched.numbers = address<const void>(values[0]);
  searched.copy = address<void>(values[1]);
  searched.bytes = values[2];
  searched.bits = static_cast<uint64_t>(values[3]);
  searched.lowest = static_cast<uint64_t>(values[4]);
  searched.sign = static_cast<uint64_t>(values[5]);
  bool finite;
  Py_BEGIN_ALLOW_THREADS;
  finite = interposer_are_finite(&searched);
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(finite);
}

}  // namespace

PyMethodDef interposer_weights_methods[] = {
    INTERPOSER_METHOD(are_finite),
    {nullptr, nullptr, 0, nullptr},
};
