// Python functions of collectives, which take addresses. Each returns 0 or an interposer_lost.

#include "python.h"

#include <cerrno>
#include <cstring>

#include "../elementwise/elementwise.h"
#include "communicator.h"

namespace {

template <class Run>
PyObject* done(const Run& run) {
  int32_t lost;
  {
    Released released;
    lost = run();
  }
  // A signal handler can raise an exception.
  return PyErr_Occurred() ? nullptr : PyLong_FromLong(lost);
}

interposer_communicator* communicator(int64_t number) {
  return address<interposer_communicator>(number);
}

// Read the first `fixed` numbers, then `times` numbers per rank, at most `most`.
constexpr Py_ssize_t kFixed = 8;
bool numbers_of_ranks(PyObject* const* arguments, Py_ssize_t given, Py_ssize_t fixed, int times,
                      int64_t* values) {
  if (given < fixed + times || (given - fixed) % times || given > fixed + times * kMostRanks) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments and %d of each rank, got %zd", fixed,
                 times, given);
    return false;
  }
  return interposer_numbers(arguments, given, given, values);
}

PyObject* shared_bytes(PyObject*, PyObject* size) {
  const long number = PyLong_AsLong(size);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(interposer_shared_bytes(int(number)));
}

// Arguments: file, rank, number of ranks, token, milliseconds. Returns an address.
PyObject* join_ranks(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[5];
  if (!interposer_numbers(arguments, given, 5, values)) return nullptr;
  interposer_communicator* made =
      interposer_join(int(values[0]), int(values[1]), int(values[2]), uint64_t(values[3]),
                      double(values[4]) / 1000);
  if (made == nullptr) return PyErr_SetFromErrno(PyExc_OSError);
  return PyLong_FromVoidPtr(made);
}

PyObject* ranks_joined(PyObject*, PyObject* number) {
  void* pointer = PyLong_AsVoidPtr(number);
  if (pointer == nullptr) return nullptr;
  interposer_all_joined(static_cast<interposer_communicator*>(pointer));
  Py_RETURN_NONE;
}

PyObject* leave_ranks(PyObject*, PyObject* number) {
  void* pointer = PyLong_AsVoidPtr(number);
  if (pointer == nullptr) return nullptr;
  interposer_leave(static_cast<interposer_communicator*>(pointer));
  Py_RETURN_NONE;
}

// Returns an interposer_lost, the rank that reported it, and a bit for each rank that it concerns.
PyObject* rank_failure(PyObject*, PyObject* number) {
  void* pointer = PyLong_AsVoidPtr(number);
  if (pointer == nullptr) return nullptr;
  const interposer_failure found =
      interposer_failure_of(static_cast<interposer_communicator*>(pointer));
  return Py_BuildValue("iiI", int(found.kind), int(found.teller), unsigned(found.about));
}

// Arguments: x, type, number of elements.
PyObject* all_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[4];
  if (!interposer_numbers(arguments, given, 4, values)) return nullptr;
  return done([&] {
    return interposer_all_reduce(communicator(values[0]), address<void>(values[1]),
                                 int32_t(values[2]), values[3]);
  });
}

// Arguments: x, residual, weight, result and sum; type, type of the residual, elements, width; eps.
// All contiguous.
PyObject* all_reduce_add_rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[10];
  if (given != 11) {
    PyErr_Format(PyExc_TypeError, "expected 11 arguments, got %zd", given);
    return nullptr;
  }
  if (!interposer_numbers(arguments, 10, 10, values)) return nullptr;
  const double eps = PyFloat_AsDouble(arguments[10]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  interposer_norm norm = {};
  norm.x = address<const void>(values[1]);
  norm.residual = address<const void>(values[2]);
  norm.weight = address<const void>(values[3]);
  norm.out = address<void>(values[4]);
  norm.total = address<void>(values[5]);
  norm.type = int32_t(values[6]);
  norm.residual_type = int32_t(values[7]);
  const int64_t width = values[9];
  norm.rows = {width ? values[8] / width : 0, 1, width, width, width};
  norm.eps = float(eps);
  return done([&] {
    return interposer_all_reduce_norm(communicator(values[0]), address<void>(values[1]), &norm);
  });
}

// Arguments: x, result; bytes of each rank.
PyObject* all_gather(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[kFixed + kMostRanks];
  if (!numbers_of_ranks(arguments, given, 3, 1, values)) return nullptr;
  return done([&] {
    return interposer_all_gather(communicator(values[0]), address<const void>(values[1]),
                                 address<void>(values[2]), values + 3);
  });
}

// Arguments: x, result, type; elements of each rank.
PyObject* reduce_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[kFixed + kMostRanks];
  if (!numbers_of_ranks(arguments, given, 4, 1, values)) return nullptr;
  return done([&] {
    return interposer_reduce_scatter(communicator(values[0]), address<const void>(values[1]),
                                     address<void>(values[2]), int32_t(values[3]), values + 4);
  });
}

// Arguments: x, result; bytes sent to each rank, then bytes received from each rank.
PyObject* all_to_all(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[kFixed + 2 * kMostRanks];
  if (!numbers_of_ranks(arguments, given, 3, 2, values)) return nullptr;
  return done([&] {
    return interposer_all_to_all(communicator(values[0]), address<const void>(values[1]),
                                 address<void>(values[2]), values + 3,
                                 values + 3 + (given - 3) / 2);
  });
}

// Arguments: x, bytes, source.
PyObject* broadcast(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[4];
  if (!interposer_numbers(arguments, given, 4, values)) return nullptr;
  return done([&] {
    return interposer_broadcast(communicator(values[0]), address<void>(values[1]), values[2],
                                int(values[3]));
  });
}

}  // namespace

PyMethodDef interposer_communicator_methods[] = {
    {"shared_bytes", shared_bytes, METH_O, nullptr},
    {"ranks_joined", ranks_joined, METH_O, nullptr},
    {"leave_ranks", leave_ranks, METH_O, nullptr},
    {"rank_failure", rank_failure, METH_O, nullptr},
    INTERPOSER_METHOD(join_ranks),
    INTERPOSER_METHOD(all_reduce),
    INTERPOSER_METHOD(all_reduce_add_rms_norm),
    INTERPOSER_METHOD(all_gather),
    INTERPOSER_METHOD(reduce_scatter),
    INTERPOSER_METHOD(all_to_all),
    INTERPOSER_METHOD(broadcast),
    {nullptr, nullptr, 0, nullptr},
};
