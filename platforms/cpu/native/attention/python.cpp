// Python functions of plans and attention, which take addresses.

#include "../python.h"

#include <cstring>

#include "attention.h"

namespace {

double number(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// Arguments: types of x and of the cache, N, K, D, S, scale and softcap as float64 bits, window; B,
// addresses of query starts, lengths and pages, row stride of pages, address of slots; destination,
// or 0. Returns the size of the plan in bytes.
PyObject* plan_attention(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[16];
  if (!interposer_numbers(arguments, given, 16, values)) return nullptr;
  interposer_attention_step step = {};
  step.type = static_cast<int32_t>(values[0]);
  step.cache_type = static_cast<int32_t>(values[1]);
  step.num_heads = static_cast<int32_t>(values[2]);
  step.num_kv_heads = static_cast<int32_t>(values[3]);
  step.head_size = static_cast<int32_t>(values[4]);
  step.page_tokens = static_cast<int32_t>(values[5]);
  step.scale = number(values[6]);
  step.softcap = number(values[7]);
  step.window_tokens = values[8];
  step.num_sequences = values[9];
  step.query_starts = address<const int64_t>(values[10]);
  step.seq_lens = address<const int64_t>(values[11]);
  step.page_table = address<const int64_t>(values[12]);
  step.table_stride = values[13];
  step.slots = address<const int64_t>(values[14]);
  return PyLong_FromLongLong(interposer_plan_attention(&step, address<void>(values[15])));
}

// Arguments: addresses of the plan, of query, key and value; their token strides; address of the
// cache, its head and page strides in bytes; addresses of the result, of sinks, and of scales of
// keys and values, or 0; stride of the scales.
PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[15];
  if (!interposer_numbers(arguments, given, 15, values)) return nullptr;
  interposer_attention_call call = {};
  call.plan = address<const interposer_attention_plan>(values[0]);
  call.query = address<const void>(values[1]);
  call.key = address<const void>(values[2]);
  call.value = address<const void>(values[3]);
  call.query_stride = values[4];
  call.key_stride = values[5];
  call.value_stride = values[6];
  call.cache = address<char>(values[7]);
  call.head_stride = values[8];
  call.page_stride = values[9];
  call.out = address<void>(values[10]);
  call.sinks = address<const void>(values[11]);
  call.key_scales = address<const float>(values[12]);
  call.value_scales = address<const float>(values[13]);
  call.scale_stride = values[14];
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_attention(&call);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "native attention failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef interposer_attention_methods[] = {
    INTERPOSER_METHOD(plan_attention),
    INTERPOSER_METHOD(attention),
    {nullptr, nullptr, 0, nullptr},
};
