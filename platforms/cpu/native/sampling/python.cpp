// Python functions of sampling, penalties and routing, which take addresses.

#include "../python.h"

#include "sampling.h"

namespace {

// From this number of elements on, release the GIL: releasing it costs time itself.
constexpr int64_t kMany = 1 << 14;

template <class Work>
PyObject* done(int32_t (*function)(const Work*), const Work& work) {
  int32_t failure;
  if (work.rows * work.width >= kMany) {
    Py_BEGIN_ALLOW_THREADS;
    failure = function(&work);
    Py_END_ALLOW_THREADS;
  } else {
    failure = function(&work);
  }
  if (failure) {
    PyErr_Format(PyExc_RuntimeError, "the native kernel failed with code %d", int(failure));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Arguments: address and type of logits; rows, width, row stride; addresses of temperature, top_k,
// top_p, min_p, seeds, steps, tokens and logprobs, 0 if absent.
PyObject* sample_tokens(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[13];
  if (!interposer_numbers(arguments, given, 13, values)) return nullptr;
  interposer_sample sample = {};
  sample.logits = address<const void>(values[0]);
  sample.type = static_cast<int32_t>(values[1]);
  sample.rows = values[2];
  sample.width = values[3];
  sample.stride = values[4];
  sample.temperature = address<const float>(values[5]);
  sample.top_k = address<const int64_t>(values[6]);
  sample.top_p = address<const float>(values[7]);
  sample.min_p = address<const float>(values[8]);
  sample.seeds = address<const int64_t>(values[9]);
  sample.steps = address<const int64_t>(values[10]);
  sample.tokens = address<int64_t>(values[11]);
  sample.logprobs = address<float>(values[12]);
  return done(interposer_sample_tokens, sample);
}

// Arguments: address and type of logits; bytes of a count; rows, width; row strides of logits,
// prompt mask and counts; addresses of prompt mask, counts, repetition, presence, frequency and
// result.
PyObject* penalise(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[14];
  if (!interposer_numbers(arguments, given, 14, values)) return nullptr;
  interposer_penalties penalties = {};
  penalties.logits = address<const void>(values[0]);
  penalties.type = static_cast<int32_t>(values[1]);
  penalties.count_bytes = static_cast<int32_t>(values[2]);
  penalties.rows = values[3];
  penalties.width = values[4];
  penalties.logit_stride = values[5];
  penalties.prompt_stride = values[6];
  penalties.count_stride = values[7];
  penalties.prompt = address<const uint8_t>(values[8]);
  penalties.counts = address<const void>(values[9]);
  penalties.repetition = address<const float>(values[10]);
  penalties.presence = address<const float>(values[11]);
  penalties.frequency = address<const float>(values[12]);
  penalties.out = address<float>(values[13]);
  return done(interposer_penalise, penalties);
}

// Arguments: address and type of logits; scoring, whether weights are divided by their sum; rows,
// width, row stride; address of the bias or 0; groups, top groups, top k; addresses of weights and
// ids; scale.
PyObject* route(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  int64_t values[13];
  if (given != 14) {
    PyErr_Format(PyExc_TypeError, "expected 14 arguments, got %zd", given);
    return nullptr;
  }
  if (!interposer_numbers(arguments, 13, 13, values)) return nullptr;
  const double scale = PyFloat_AsDouble(arguments[13]);
  if (scale == -1.0 && PyErr_Occurred()) return nullptr;
  interposer_routes routes = {};
  routes.logits = address<const void>(values[0]);
  routes.type = static_cast<int32_t>(values[1]);
  routes.scoring = static_cast<int32_t>(values[2]);
  routes.renormalised = static_cast<int32_t>(values[3]);
  routes.rows = values[4];
  routes.width = values[5];
  routes.stride = values[6];
  routes.bias = address<const float>(values[7]);
  routes.groups = values[8];
  routes.top_groups = values[9];
  routes.top = values[10];
  routes.weights = address<float>(values[11]);
  routes.ids = address<int32_t>(values[12]);
  routes.scale = static_cast<float>(scale);
  return done(interposer_route, routes);
}

}  // namespace

PyMethodDef interposer_sampling_methods[] = {
    INTERPOSER_METHOD(sample_tokens),
    INTERPOSER_METHOD(penalise),
    INTERPOSER_METHOD(route),
    {nullptr, nullptr, 0, nullptr},
};
