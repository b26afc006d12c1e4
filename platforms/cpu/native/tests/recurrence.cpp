// Recurrences, called as their Python module calls them.

#include "../recurrence/recurrence.h"

#include <cstring>
#include <stdexcept>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  throw std::runtime_error("kernels do not take " + dtype);
}

void check(int32_t failure) {
  if (failure) throw std::runtime_error("it failed with code " + std::to_string(failure));
}

interposer_sequences sequences_of(const Case& golden) {
  const Array& slots = golden.array("slots");
  return {slots.shape[0], golden.array("query_starts").data<int64_t>(), slots.data<int64_t>(),
          golden.array("num_cached").data<int64_t>()};
}

template <class T>
const T* data_or_null(const Array* given) {
  return given ? given->data<T>() : nullptr;
}

// A contiguous, writable copy of a pool: cases are reused for every level.
Rows pool_of(const Array& given) {
  const int64_t rows = given.shape[0];
  int64_t columns = 1;
  for (size_t axis = 1; axis < given.shape.size(); ++axis) columns *= given.shape[axis];
  Rows pool(given.dtype, rows, columns, 0);
  if (rows > 0 && columns > 0) {
    std::memcpy(pool.data(), given.memory.data(), size_t(rows * columns) * bytes_of(given.dtype));
  }
  return pool;
}

std::vector<Result> causal_convolution(const Case& golden) {
  const Array &x = golden.array("x"), &weight = golden.array("weight");
  Rows out(x.dtype, x.shape[0], x.shape[1], 0), windows = pool_of(golden.array("windows"));
  interposer_convolution call = {};
  call.sequences = sequences_of(golden);
  call.x = x.data<void>();
  call.weight = weight.data<void>();
  call.bias = data_or_null<void>(golden.find("bias"));
  call.windows = windows.data();
  call.out = out.data();
  call.type = type_of(x.dtype);
  call.silu = golden.number("silu") != 0;
  call.channels = weight.shape[0], call.taps = weight.shape[1];
  call.x_stride = x.row_stride();
  call.window_stride = windows.stride();
  if (x.shape[0]) check(interposer_convolve(&call));
  return {out.result(), windows.result()};
}

std::vector<Result> state_space_scan(const Case& golden) {
  const Array &x = golden.array("x"), &b = golden.array("b");
  const int64_t T = x.shape[0], N = x.shape[1];
  Rows states = pool_of(golden.array("states"));
  interposer_scan call = {};
  call.sequences = sequences_of(golden);
  call.heads = N, call.size = x.shape[2], call.groups = b.shape[1], call.state = b.shape[2];
  Rows out(x.dtype, T, N * call.size, 0);
  call.x = x.data<void>(), call.b = b.data<void>(), call.c = golden.array("c").data<void>();
  call.steps = golden.array("steps").data<float>();
  call.decay = golden.array("decay").data<float>();
  call.skip = data_or_null<float>(golden.find("skip"));
  call.states = static_cast<float*>(states.data());
  call.out = out.data();
  call.type = type_of(x.dtype);
  call.x_stride = N * call.size, call.step_stride = N;
  call.b_stride = call.c_stride = call.groups * call.state;
  call.state_stride = states.stride();
  if (T) check(interposer_scan_states(&call));
  return {out.result(), states.result()};
}

std::vector<Result> gated_delta_rule(const Case& golden) {
  const Array &key = golden.array("key"), &value = golden.array("value");
  Rows states = pool_of(golden.array("states"));
  interposer_delta call = {};
  call.sequences = sequences_of(golden);
  call.heads = key.shape[1], call.key_size = key.shape[2];
  call.value_heads = value.shape[1], call.value_size = value.shape[2];
  Rows out(value.dtype, value.shape[0], call.value_heads * call.value_size, 0);
  call.query = golden.array("query").data<void>();
  call.key = key.data<void>(), call.value = value.data<void>();
  call.decay = golden.array("decay").data<float>();
  call.beta = golden.array("beta").data<float>();
  call.states = static_cast<float*>(states.data());
  call.out = out.data();
  call.type = type_of(value.dtype);
  call.scale = float(golden.number("scale"));
  call.query_stride = call.key_stride = call.heads * call.key_size;
  call.value_stride = call.value_heads * call.value_size;
  call.decay_stride = call.beta_stride = call.value_heads;
  call.state_stride = states.stride();
  if (value.shape[0]) check(interposer_apply_delta(&call));
  return {out.result(), states.result()};
}

const Registration registrations[] = {
    {"causal_convolution", causal_convolution},
    {"state_space_scan", state_space_scan},
    {"gated_delta_rule", gated_delta_rule},
};

}  // namespace
