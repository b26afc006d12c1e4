// Python functions of attention to keys in rows, which take addresses.

#include "../python.h"

#include <cstring>

#include "dense.h"

namespace {

double number(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

PyObject* attend(const interposer_dense_call& call) {
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_dense_attention(&call);
  Py_END_ALLOW_THREADS;
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "native attention failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Arguments: type, N, K, D, E; scale and softcap as float64 bits, window, causal; B, addresses of
// query starts and key starts; addresses of query, key and value, their token strides; addresses of
// the result, of its logarithms (lse), sinks and slopes, or 0.
PyObject* ragged_attention(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[22];
  if (!interposer_numbers(arguments, given, 22, values)) return nullptr;
  interposer_dense_call call = {};
  call.type = call.stored_type = static_cast<int32_t>(values[0]);
  call.num_heads = static_cast<int32_t>(values[1]);
  call.num_kv_heads = static_cast<int32_t>(values[2]);
  call.head_size = static_cast<int32_t>(values[3]);
  call.value_size = static_cast<int32_t>(values[4]);
  call.scale = number(values[5]);
  call.softcap = number(values[6]);
  call.window_tokens = values[7];
  call.causal = static_cast<int32_t>(values[8]);
  call.num_sequences = values[9];
  call.query_starts = address<const int64_t>(values[10]);
  call.key_starts = address<const int64_t>(values[11]);
  const int64_t size = 4 / elements_per_word(call.type);
  call.query = address<const void>(values[12]);
  call.keys = {address<const char>(values[13]), call.head_size * size, 0, values[16] * size};
  call.values = {address<const char>(values[14]), call.value_size * size, 0, values[17] * size};
  call.query_stride = values[15];
  call.out = address<void>(values[18]);
  call.lse = address<float>(values[19]);
  call.sinks = address<const float>(values[20]);
  call.slopes = address<const float>(values[21]);
  return attend(call);
}

// Arguments: types of query and cache, N, C + R, C, S, scale as float64 bits; B, addresses of query
// starts, lengths and pages, row stride of pages; addresses of query and cache, token stride of the
// query, page and token strides of the cache; addresses of the result, and of the cache's scale, or
// 0.
PyObject* latent_attention(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[19];
  if (!interposer_numbers(arguments, given, 19, values)) return nullptr;
  interposer_dense_call call = {};
  call.type = static_cast<int32_t>(values[0]);
  call.stored_type = static_cast<int32_t>(values[1]);
  call.num_heads = static_cast<int32_t>(values[2]);
  call.num_kv_heads = 1;
  call.head_size = static_cast<int32_t>(values[3]);
  call.value_size = static_cast<int32_t>(values[4]);
  call.page_tokens = static_cast<int32_t>(values[5]);
  call.scale = number(values[6]);
  call.causal = 1;
  call.num_sequences = values[7];
  call.query_starts = address<const int64_t>(values[8]);
  call.seq_lens = address<const int64_t>(values[9]);
  call.page_table = address<const int64_t>(values[10]);
  call.table_stride = values[11];
  call.query = address<const void>(values[12]);
  call.query_stride = values[14];
  const int64_t size = 4 / elements_per_word(call.stored_type);
  call.keys = {address<const char>(values[13]), 0, values[15] * size, values[16] * size};
  call.values = call.keys;
  call.out = address<void>(values[17]);
  call.key_scales = call.value_scales = address<const float>(values[18]);
  return attend(call);
}

// Arguments: types of query and cache, N, K, D, S, scale and softcap as float64 bits, window; B,
// addresses of query starts, lengths and pages, row stride of pages; T, address of slots; addresses
// of query, key and value, their token strides; addresses of cached keys and values, their head,
// page and token strides in bytes; addresses of the result, of float32 sinks, and of scales of keys
// followed by those of values, or 0; stride of the scales.
PyObject* page_attention(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[31];
  if (!interposer_numbers(arguments, given, 31, values)) return nullptr;
  interposer_dense_call call = {};
  call.type = static_cast<int32_t>(values[0]);
  call.stored_type = static_cast<int32_t>(values[1]);
  call.num_heads = static_cast<int32_t>(values[2]);
  call.num_kv_heads = static_cast<int32_t>(values[3]);
  call.head_size = call.value_size = static_cast<int32_t>(values[4]);
  call.page_tokens = static_cast<int32_t>(values[5]);
  call.scale = number(values[6]);
  call.softcap = number(values[7]);
  call.window_tokens = values[8];
  call.causal = 1;
  call.num_sequences = values[9];
  call.query_starts = address<const int64_t>(values[10]);
  call.seq_lens = address<const int64_t>(values[11]);
  call.page_table = address<const int64_t>(values[12]);
  call.table_stride = values[13];
  interposer_dense_store store = {};
  store.num_tokens = values[14];
  store.slots = address<const int64_t>(values[15]);
  call.query = address<const void>(values[16]);
  store.key = address<const void>(values[17]);
  store.value = address<const void>(values[18]);
  call.query_stride = values[19];
  store.key_stride = values[20];
  store.value_stride = values[21];
  call.keys = {address<const char>(values[22]), values[24], values[25], values[26]};
  call.values = {address<const char>(values[23]), values[24], values[25], values[26]};
  call.out = address<void>(values[27]);
  call.sinks = address<const float>(values[28]);
  call.key_scales = address<const float>(values[29]);
  if (call.key_scales) call.value_scales = call.key_scales + (values[30] ? call.num_kv_heads : 1);
  call.scale_stride = values[30];
  interposer_dense_write(&call, &store);
  return attend(call);
}

}  // namespace

PyMethodDef interposer_dense_methods[] = {
    INTERPOSER_METHOD(ragged_attention),
    INTERPOSER_METHOD(latent_attention),
    INTERPOSER_METHOD(page_attention),
    {nullptr, nullptr, 0, nullptr},
};
