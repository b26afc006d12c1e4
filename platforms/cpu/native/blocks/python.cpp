// Python functions of fused calls, which take addresses.

#include "../python.h"

#include <cstring>
#include <vector>

#include "../communicator/python.h"
#include "blocks.h"

namespace {

PyObject* done(int32_t failure) {
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native block failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Call blocks, which can wait for other ranks. Returns 0 or an interposer_lost.
template <class Run>
PyObject* done_by_ranks(const Run& run) {
  int32_t failure;
  {
    Released released;
    failure = run();
  }
  if (PyErr_Occurred()) return nullptr;  // a signal handler raised an exception
  return failure && failure < kLost ? done(failure) : PyLong_FromLong(failure ? failure - kLost : 0);
}

// Read six arguments: addresses of a packed weight and of a static scale or 0, and the fields of a
// coding.
constexpr int kFactor = 6;
interposer_factor factor(const int64_t* values) {
  interposer_factor found = {address<const interposer_packed>(values[0]), {},
                             address<const float>(values[1])};
  static_assert(sizeof found.coding == (kFactor - 2) * sizeof(int64_t), "it has other words");
  std::memcpy(&found.coding, values + 2, sizeof found.coding);
  return found;
}

// Arguments: gate_up and down as in `factor`; addresses of x and result; type, activation, rows,
// row stride of x; LoRA addresses of both matmuls, or 0, and address of the adapter ids.
PyObject* mlp(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t all[2 * kFactor + 9];
  if (!interposer_numbers(arguments, given, 2 * kFactor + 9, all)) return nullptr;
  const int64_t* values = all + 2 * kFactor;
  interposer_mlp_call call = {};
  call.gate_up = factor(all);
  call.down = factor(all + kFactor);
  call.x = address<const void>(values[0]);
  call.out = address<void>(values[1]);
  call.type = call.out_type = static_cast<int32_t>(values[2]);
  call.activation = static_cast<int32_t>(values[3]);
  call.rows = values[4];
  call.x_stride = values[5];
  for (int i = 0; i < 2; ++i) {
    call.added[i] = {address<const interposer_low_rank>(values[6 + i]),
                     address<const int64_t>(values[8])};
  }
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_mlp(&call);
  Py_END_ALLOW_THREADS;
  return done(failure);
}

// Arguments: weight as in `factor`; addresses of x, result, weights of query and key norm, cosines
// and sines; type, heads, kv heads, size, half of the rotated size; rows, row stride of x; LoRA
// address or 0, and address of the adapter ids; eps.
PyObject* project_heads(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  constexpr Py_ssize_t kNumbers = kFactor + 15;
  int64_t all[kNumbers];
  if (given != kNumbers + 1) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", kNumbers + 1, given);
    return nullptr;
  }
  if (!interposer_numbers(arguments, kNumbers, kNumbers, all)) return nullptr;
  const double eps = PyFloat_AsDouble(arguments[kNumbers]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  const int64_t* value = all + kFactor;
  interposer_heads_call call = {};
  call.weight = factor(all);
  call.x = address<const void>(*value++);
  call.out = address<void>(*value++);
  call.query_weight = address<const void>(*value++);
  call.key_weight = address<const void>(*value++);
  call.cos = address<const float>(*value++);
  call.sin = address<const float>(*value++);
  call.type = static_cast<int32_t>(*value++);
  call.heads = *value++;
  call.kv_heads = *value++;
  call.size = *value++;
  call.half = *value++;
  call.rows = *value++;
  call.x_stride = *value++;
  call.added.low_rank = address<const interposer_low_rank>(*value++);
  call.added.ids = address<const int64_t>(*value++);
  call.eps = static_cast<float>(eps);
  int32_t failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = interposer_project_heads(&call);
  Py_END_ALLOW_THREADS;
  return done(failure);
}

// Arguments: addresses of the interposer_block; of the packed weights of qkv, attention output,
// gate_up and down, the last two 0 without an MLP; of their static input scales, or 0; of the
// weights of the input norm, query norm, key norm and second norm; of cosines and sines, the plan
// and the cache; its head and page strides in bytes; addresses of sinks, of scales of keys and
// values, stride of these scales; addresses of x and the residual, whether x is added; rows;
// address and number of the chosen rows, -1 for all; addresses of the result and of the new
// residual; LoRA addresses of the four matmuls, or 0, and addresses of the adapter ids of all rows
// and of the chosen rows; addresses of the communicator, of an interposer_latent_call and of an
// interposer_moe_weights, or 0. Returns 0 or an interposer_lost.
constexpr Py_ssize_t kBlockWords = 40;
interposer_block_call block_call(const int64_t* value) {
  interposer_block_call call = {};
  call.block = address<const interposer_block>(*value++);
  call.heads = address<const interposer_packed>(*value++);
  call.output = address<const interposer_packed>(*value++);
  call.gate_up = address<const interposer_packed>(*value++);
  call.down = address<const interposer_packed>(*value++);
  for (const float*& scale : call.scales) scale = address<const float>(*value++);
  call.input_weight = address<const void>(*value++);
  call.query_weight = address<const void>(*value++);
  call.key_weight = address<const void>(*value++);
  call.post_weight = address<const void>(*value++);
  call.cos = address<const float>(*value++);
  call.sin = address<const float>(*value++);
  call.attention.plan = address<const interposer_attention_plan>(*value++);
  call.attention.cache = address<char>(*value++);
  call.attention.head_stride = *value++;
  call.attention.page_stride = *value++;
  call.attention.sinks = address<const void>(*value++);
  call.attention.key_scales = address<const float>(*value++);
  call.attention.value_scales = address<const float>(*value++);
  call.attention.scale_stride = *value++;
  call.x = address<const void>(*value++);
  call.residual = address<const float>(*value++);
  call.adds = *value++ != 0;
  call.rows = *value++;
  call.chosen = address<const int64_t>(*value++);
  call.num_chosen = *value++;
  call.out = address<void>(*value++);
  call.total = address<float>(*value++);
  for (const interposer_low_rank*& added : call.low_rank) {
    added = address<const interposer_low_rank>(*value++);
  }
  call.ids = address<const int64_t>(*value++);
  call.chosen_ids = address<const int64_t>(*value++);
  call.ranks = address<interposer_communicator>(*value++);
  call.latent = address<const interposer_latent_call>(*value++);
  call.moe = address<const interposer_moe_weights>(*value++);
  return call;
}

PyObject* decoder_block(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[kBlockWords];
  if (!interposer_numbers(arguments, given, kBlockWords, values)) return nullptr;
  const interposer_block_call call = block_call(values);
  return done_by_ranks([&] { return interposer_decoder_block(&call); });
}

// Arguments: address of a table with the arguments of `decoder_block` for each of several
// consecutive blocks, and the number of blocks. Returns 0 or an interposer_lost.
PyObject* decoder_blocks(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[2];
  if (!interposer_numbers(arguments, given, 2, values)) return nullptr;
  const int64_t* words = address<const int64_t>(values[0]);
  std::vector<interposer_block_call> calls;
  for (int64_t i = 0; i < values[1]; ++i) calls.push_back(block_call(words + i * kBlockWords));
  return done_by_ranks([&] { return interposer_decoder_blocks(calls.data(), values[1]); });
}

}  // namespace

PyMethodDef interposer_block_methods[] = {
    INTERPOSER_METHOD(mlp),
    INTERPOSER_METHOD(project_heads),
    INTERPOSER_METHOD(decoder_block),
    INTERPOSER_METHOD(decoder_blocks),
    {nullptr, nullptr, 0, nullptr},
};
