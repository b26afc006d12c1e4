// Python functions of MoE layers, which take addresses.

#include "../python.h"

#include <cstring>

#include "experts.h"

namespace {

// Arguments: number of experts, bytes per expert, destination address.
PyObject* begin_mixture(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[3];
  if (!interposer_numbers(arguments, given, 3, values)) return nullptr;
  interposer_begin_mixture(values[0], values[1], address<void>(values[2]));
  Py_RETURN_NONE;
}

// Arguments: addresses of packed experts, x, result, weights and int32 ids; type, activation,
// tokens, experts per token; token strides of x, weights and ids.
PyObject* experts(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[12];
  if (!interposer_numbers(arguments, given, 12, values)) return nullptr;
  interposer_mixture_call call = {};
  call.mixture = address<const interposer_mixture>(values[0]);
  call.x = address<const void>(values[1]);
  call.out = address<void>(values[2]);
  call.weights = address<const float>(values[3]);
  call.expert_ids = address<const int32_t>(values[4]);
  call.type = static_cast<int32_t>(values[5]);
  call.activation = static_cast<int32_t>(values[6]);
  call.tokens = values[7];
  call.top_k = values[8];
  call.x_stride = values[9];
  call.weight_stride = values[10];
  call.id_stride = values[11];
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_experts(&call);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native experts failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Arguments: address of the table of layers; fields of both codings; addresses of x, result,
// weights and int32 ids; type, activation, experts, tokens, experts per token; token strides of x,
// weights and ids.
PyObject* expert_layers(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t all[21];
  if (!interposer_numbers(arguments, given, 21, all)) return nullptr;
  interposer_expert_layers_call call = {};
  call.layers = address<const int64_t>(all[0]);
  static_assert(sizeof call.codings == 8 * sizeof(int64_t), "it has other words");
  std::memcpy(call.codings, all + 1, sizeof call.codings);
  const int64_t* values = all + 9;
  call.x = address<const void>(values[0]);
  call.out = address<void>(values[1]);
  call.weights = address<const float>(values[2]);
  call.expert_ids = address<const int32_t>(values[3]);
  call.type = static_cast<int32_t>(values[4]);
  call.activation = static_cast<int32_t>(values[5]);
  call.experts = values[6];
  call.tokens = values[7];
  call.top_k = values[8];
  call.x_stride = values[9];
  call.weight_stride = values[10];
  call.id_stride = values[11];
  return interposer_done("the native experts", interposer_expert_layers, call);
}

}  // namespace

PyMethodDef interposer_experts_methods[] = {
    INTERPOSER_METHOD(begin_mixture),
    INTERPOSER_METHOD(experts),
    INTERPOSER_METHOD(expert_layers),
    {nullptr, nullptr, 0, nullptr},
};
