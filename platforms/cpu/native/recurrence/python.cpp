// Python functions of recurrences, which take addresses.

#include "../python.h"

#include <cstring>

#include "recurrence.h"

namespace {

interposer_sequences sequences_of(const int64_t* values) {
  return {values[0], address<const int64_t>(values[1]), address<const int64_t>(values[2]),
          address<const int64_t>(values[3])};
}

// Arguments: sequences, that is their number and the addresses of starts, slots and numbers of
// cached tokens; then addresses of x, weight, bias or 0, windows and result; type, SiLU, channels,
// taps; token stride of x, row stride of windows.
PyObject* convolve(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[15];
  if (!interposer_numbers(arguments, given, 15, values)) return nullptr;
  interposer_convolution call = {};
  call.sequences = sequences_of(values);
  call.x = address<const void>(values[4]);
  call.weight = address<const void>(values[5]);
  call.bias = address<const void>(values[6]);
  call.windows = address<void>(values[7]);
  call.out = address<void>(values[8]);
  call.type = static_cast<int32_t>(values[9]);
  call.silu = static_cast<int32_t>(values[10]);
  call.channels = values[11];
  call.taps = values[12];
  call.x_stride = values[13];
  call.window_stride = values[14];
  return interposer_done("a native recurrence", interposer_convolve, call);
}

// Arguments: sequences as above; addresses of x, b, c, steps, decay, skip or 0, states and result;
// type, heads, groups, head size, state size; token strides of x, b, c and steps; row stride of
// states.
PyObject* scan_states(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[22];
  if (!interposer_numbers(arguments, given, 22, values)) return nullptr;
  interposer_scan call = {};
  call.sequences = sequences_of(values);
  call.x = address<const void>(values[4]);
  call.b = address<const void>(values[5]);
  call.c = address<const void>(values[6]);
  call.steps = address<const float>(values[7]);
  call.decay = address<const float>(values[8]);
  call.skip = address<const float>(values[9]);
  call.states = address<float>(values[10]);
  call.out = address<void>(values[11]);
  call.type = static_cast<int32_t>(values[12]);
  call.heads = values[13];
  call.groups = values[14];
  call.size = values[15];
  call.state = values[16];
  call.x_stride = values[17];
  call.b_stride = values[18];
  call.c_stride = values[19];
  call.step_stride = values[20];
  call.state_stride = values[21];
  return interposer_done("a native recurrence", interposer_scan_states, call);
}

// Arguments: sequences as above; addresses of query, key, value, decay, beta, states and result;
// type, key heads, value heads, key size, value size; token strides of query, key, value, decay and
// beta; row stride of states; scale as float64 bits.
PyObject* apply_delta(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[23];
  if (!interposer_numbers(arguments, given, 23, values)) return nullptr;
  interposer_delta call = {};
  call.sequences = sequences_of(values);
  call.query = address<const void>(values[4]);
  call.key = address<const void>(values[5]);
  call.value = address<const void>(values[6]);
  call.decay = address<const float>(values[7]);
  call.beta = address<const float>(values[8]);
  call.states = address<float>(values[9]);
  call.out = address<void>(values[10]);
  call.type = static_cast<int32_t>(values[11]);
  call.heads = values[12];
  call.value_heads = values[13];
  call.key_size = values[14];
  call.value_size = values[15];
  call.query_stride = values[16];
  call.key_stride = values[17];
  call.value_stride = values[18];
  call.decay_stride = values[19];
  call.beta_stride = values[20];
  call.state_stride = values[21];
  double scale;
  std::memcpy(&scale, &values[22], sizeof scale);
  call.scale = static_cast<float>(scale);
  return interposer_done("a native recurrence", interposer_apply_delta, call);
}

}  // namespace

PyMethodDef interposer_recurrence_methods[] = {
    INTERPOSER_METHOD(convolve),
    INTERPOSER_METHOD(scan_states),
    INTERPOSER_METHOD(apply_delta),
    {nullptr, nullptr, 0, nullptr},
};
