// The copying and search of weights, by addresses.

#include "../python.h"

#include "finite.h"

namespace {

// Addresses of the numbers and of their copy, 0 for none, and bytes; of each number in a word of 64
// bits: the bits that are all set where it is not finite, the lowest of them, and the sign. These
// three are given as signed numbers of the same bits.
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
