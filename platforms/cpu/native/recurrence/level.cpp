// Recurrences, compiled once per level with the level's flags.

#include <cmath>

#include "../elementwise/functions.h"
#include "../pool.h"
#include "../vectors.h"
#include "recurrence.h"

namespace {

template <int32_t kType>
INTERPOSER_INLINE const char* element(const void* from, int64_t index) {
  return static_cast<const char*>(from) + index * size_of(kType);
}

template <int32_t kType>
INTERPOSER_INLINE char* element(void* to, int64_t index) {
  return static_cast<char*>(to) + index * size_of(kType);
}

// Call `take(index, count)` for every sixteen of `width` numbers; the last count can be smaller.
template <class F>
INTERPOSER_INLINE void in_vectors(int64_t width, const F& take) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) take(i, kLanes);
  if (i < width) take(i, int(width - i));
}

template <int32_t kType>
INTERPOSER_INLINE float number(const void* from, int64_t index) {
  if constexpr (kType == kFloat32) return static_cast<const float*>(from)[index];
  if constexpr (kType == kBFloat16) {
    return float_of_bfloat16(static_cast<const uint16_t*>(from)[index]);
  }
  return load_some(element<kFloat16>(from, index), kFloat16, 1)[0];
}

// Convolve sixteen channels of all sequences.
template <int32_t kType, int kTaps>
void convolve_channels(const interposer_convolution& call, int64_t channel, int count) {
  constexpr int kBefore = kTaps - 1;
  const interposer_sequences& sequences = call.sequences;
  Floats weight[kTaps] = {}, bias = {};
  for (int lane = 0; lane < count; ++lane) {
    for (int tap = 0; tap < kTaps; ++tap) {
      weight[tap][lane] = number<kType>(call.weight, (channel + lane) * kTaps + tap);
    }
  }
  if (call.bias) bias = load_some(element<kType>(call.bias, channel), kType, count);
  for (int64_t sequence = 0; sequence < sequences.count; ++sequence) {
    const int64_t first = sequences.starts[sequence], last = sequences.starts[sequence + 1];
    if (first == last) continue;
    char* out = element<kType>(call.out, first * call.channels + channel);
    if (sequences.slots[sequence] < 0) {
      for (int64_t token = first; token < last; ++token) {
        store_some(out, Floats{}, kType, count);
        out += call.channels * size_of(kType);
      }
      continue;
    }
    char* window = element<kType>(
        call.windows, sequences.slots[sequence] * call.window_stride + channel * kBefore);
    Floats before[kBefore] = {};
    if (sequences.cached[sequence] > 0) {
      for (int lane = 0; lane < count; ++lane) {
        for (int i = 0; i < kBefore; ++i) {
          before[i][lane] = number<kType>(window, lane * kBefore + i);
        }
      }
    }
    const char* x = element<kType>(call.x, first * call.x_stride + channel);
    for (int64_t token = first; token < last; ++token) {
      const Floats own = load_some(x, kType, count);
      Floats sum = bias;
      for (int i = 0; i < kBefore; ++i) sum += weight[i] * before[i];
      sum += weight[kBefore] * own;
      for (int i = 0; i + 1 < kBefore; ++i) before[i] = before[i + 1];
      before[kBefore - 1] = own;
      if (call.silu) sum = sigmoid_weighted(sum, sum);
      store_some(out, sum, kType, count);
      x += call.x_stride * size_of(kType);
      out += call.channels * size_of(kType);
    }
    for (int i = 0; i < kBefore; ++i) {
      alignas(64) char stored[64];
      store_floats(stored, before[i], kType);  // exact: loaded from this type
      for (int lane = 0; lane < count; ++lane) {
        std::memcpy(window + (lane * kBefore + i) * size_of(kType),
                    stored + lane * size_of(kType), size_of(kType));
      }
    }
  }
}

template <int32_t kType>
void convolve_type(const interposer_convolution& call, int64_t channel, int count) {
  switch (call.taps) {
    case 2:
      return convolve_channels<kType, 2>(call, channel, count);
    case 3:
      return convolve_channels<kType, 3>(call, channel, count);
    case 4:
      return convolve_channels<kType, 4>(call, channel, count);
    case 5:
      return convolve_channels<kType, 5>(call, channel, count);
    case 6:
      return convolve_channels<kType, 6>(call, channel, count);
    case 7:
      return convolve_channels<kType, 7>(call, channel, count);
    default:
      return convolve_channels<kType, 8>(call, channel, count);
  }
}

bool convolve(const interposer_convolution& call, int64_t first, int64_t last) {
  for (int64_t part = first; part < last; ++part) {
    const int64_t channel = part * kLanes, rest = call.channels - channel;
    const int count = int(rest < kLanes ? rest : kLanes);
    if (call.type == kFloat32) convolve_type<kFloat32>(call, channel, count);
    if (call.type == kBFloat16) convolve_type<kBFloat16>(call, channel, count);
    if (call.type == kFloat16) convolve_type<kFloat16>(call, channel, count);
  }
  return true;
}

// Initial state of a head and sequence, in place; zeros if no token precedes.
float* begun(float* states, int64_t stride, int64_t head, int64_t size, int64_t slot,
             int64_t cached) {
  float* state = states + slot * stride + head * size;
  if (cached <= 0) std::memset(state, 0, size_t(size) * sizeof(float));
  return state;
}

template <int32_t kType>
INTERPOSER_INLINE void widen(const void* from, int64_t start, int64_t count, float* to) {
  in_vectors(count, [&](int64_t i, int some) INTERPOSER_LAMBDA {
    store_some(to + i, load_some(element<kType>(from, start + i), kType, some), kFloat32, some);
  });
}

template <int32_t kType>
void scan_head(const interposer_scan& call, int64_t head, float* b, float* c) {
  const interposer_sequences& sequences = call.sequences;
  const int64_t width = call.state, group = head / (call.heads / call.groups);
  const float skip = call.skip ? call.skip[head] : 0.0f;
  for (int64_t sequence = 0; sequence < sequences.count; ++sequence) {
    const int64_t first = sequences.starts[sequence], last = sequences.starts[sequence + 1];
    if (first == last) continue;
    const int64_t slot = sequences.slots[sequence];
    float* state = nullptr;
    if (slot >= 0) {
      state = begun(call.states, call.state_stride, head, call.size * width, slot,
                    sequences.cached[sequence]);
    }
    for (int64_t token = first; token < last; ++token) {
      char* out = element<kType>(call.out, (token * call.heads + head) * call.size);
      if (slot < 0) {
        std::memset(out, 0, size_t(call.size) * size_of(kType));
        continue;
      }
      widen<kType>(call.b, token * call.b_stride + group * width, width, b);
      widen<kType>(call.c, token * call.c_stride + group * width, width, c);
      const float step = call.steps[token * call.step_stride + head];
      const float kept = std::exp(step * call.decay[head]);
      const char* x = element<kType>(call.x, token * call.x_stride + head * call.size);
      in_vectors(call.size, [&](int64_t row, int count) INTERPOSER_LAMBDA {
        const Floats inputs = load_some(element<kType>(x, row), kType, count);
        alignas(64) float sums[kLanes] = {};
        for (int lane = 0; lane < count; ++lane) {
          float* held = state + (row + lane) * width;
          const float added = step * inputs[lane];
          Floats sum = {};
          in_vectors(width, [&](int64_t i, int some) INTERPOSER_LAMBDA {
            const Floats next = kept * load_some(held + i, kFloat32, some) +
                                added * load_some(b + i, kFloat32, some);
            store_some(held + i, next, kFloat32, some);
            sum += next * load_some(c + i, kFloat32, some);
          });
          sums[lane] = sum_of_lanes(sum);
        }
        Floats result = load<Floats>(sums);
        if (call.skip) result += skip * inputs;
        store_some(element<kType>(out, row), result, kType, count);
      });
    }
  }
}

bool scan(const interposer_scan& call, int64_t first, int64_t last) {
  const int64_t bytes = call.state * int64_t(sizeof(float));
  float* b = static_cast<float*>(interposer_scratch(kForRows, bytes));
  float* c = static_cast<float*>(interposer_scratch(kForWeights, bytes));
  if (b == nullptr || c == nullptr) return false;
  for (int64_t head = first; head < last; ++head) {
    if (call.type == kFloat32) scan_head<kFloat32>(call, head, b, c);
    if (call.type == kBFloat16) scan_head<kBFloat16>(call, head, b, c);
    if (call.type == kFloat16) scan_head<kFloat16>(call, head, b, c);
  }
  return true;
}

// Update some columns of a state by one token. Columns form `kVectors` vectors; the last one can
// have only `count` columns.
template <int kVectors>
INTERPOSER_INLINE void answer(float* state, int64_t stride, int64_t rows, int count, float kept,
                              float beta, float scale, const float* key, const float* query,
                              const Floats* value, Floats* result) {
  const auto some = [&](int vector) INTERPOSER_LAMBDA {
    return vector + 1 < kVectors ? kLanes : count;
  };
  Floats held[kVectors] = {}, read[kVectors] = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      held[v] += load_some(state + row * stride + v * kLanes, kFloat32, some(v)) * key[row];
    }
  }
  for (int v = 0; v < kVectors; ++v) held[v] = beta * (value[v] - kept * held[v]);
  for (int64_t row = 0; row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* place = state + row * stride + v * kLanes;
      const Floats next = kept * load_some(place, kFloat32, some(v)) + key[row] * held[v];
      store_some(place, next, kFloat32, some(v));
      read[v] += next * query[row];
    }
  }
  for (int v = 0; v < kVectors; ++v) result[v] = scale * read[v];
}

template <int32_t kType, int kVectors>
void delta_columns(const interposer_delta& call, int64_t head, int64_t column, int count,
                   float* query, float* key) {
  const interposer_sequences& sequences = call.sequences;
  const int64_t rows = call.key_size, stride = call.value_size;
  const int64_t source = head / (call.value_heads / call.heads);
  const int width = (kVectors - 1) * kLanes + count;
  for (int64_t sequence = 0; sequence < sequences.count; ++sequence) {
    const int64_t first = sequences.starts[sequence], last = sequences.starts[sequence + 1];
    if (first == last) continue;
    const int64_t slot = sequences.slots[sequence];
    float* state = nullptr;
    if (slot >= 0) {
      state = call.states + slot * call.state_stride + head * rows * stride + column;
      if (sequences.cached[sequence] <= 0) {
        for (int64_t row = 0; row < rows; ++row) {
          std::memset(state + row * stride, 0, size_t(width) * sizeof(float));
        }
      }
    }
    for (int64_t token = first; token < last; ++token) {
      char* out = element<kType>(call.out, (token * call.value_heads + head) * stride + column);
      if (slot < 0) {
        std::memset(out, 0, size_t(width) * size_of(kType));
        continue;
      }
      widen<kType>(call.query, token * call.query_stride + source * rows, rows, query);
      widen<kType>(call.key, token * call.key_stride + source * rows, rows, key);
      const void* from = element<kType>(call.value, token * call.value_stride + head * stride);
      Floats value[kVectors], result[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int some = v + 1 < kVectors ? kLanes : count;
        value[v] = load_some(element<kType>(from, column + v * kLanes), kType, some);
      }
      const float kept = std::exp(call.decay[token * call.decay_stride + head]);
      const float beta = call.beta[token * call.beta_stride + head];
      if (count == kLanes) {
        answer<kVectors>(state, stride, rows, kLanes, kept, beta, call.scale, key, query, value,
                         result);
      } else {
        answer<kVectors>(state, stride, rows, count, kept, beta, call.scale, key, query, value,
                         result);
      }
      for (int v = 0; v < kVectors; ++v) {
        const int some = v + 1 < kVectors ? kLanes : count;
        store_some(element<kType>(out, v * kLanes), result[v], kType, some);
      }
    }
  }
}

template <int32_t kType>
void delta_type(const interposer_delta& call, int64_t part, float* query, float* key) {
  const int64_t blocks = blocks_of(call), head = part / blocks;
  const int64_t column = part % blocks * kDeltaColumns, rest = call.value_size - column;
  const int width = int(rest < kDeltaColumns ? rest : kDeltaColumns);
  const int vectors = (width + kLanes - 1) / kLanes, count = width - (vectors - 1) * kLanes;
  switch (vectors) {
    case 1:
      return delta_columns<kType, 1>(call, head, column, count, query, key);
    case 2:
      return delta_columns<kType, 2>(call, head, column, count, query, key);
    case 3:
      return delta_columns<kType, 3>(call, head, column, count, query, key);
    default:
      return delta_columns<kType, 4>(call, head, column, count, query, key);
  }
}

bool delta(const interposer_delta& call, int64_t first, int64_t last) {
  const int64_t bytes = call.key_size * int64_t(sizeof(float));
  float* query = static_cast<float*>(interposer_scratch(kForRows, bytes));
  float* key = static_cast<float*>(interposer_scratch(kForWeights, bytes));
  if (query == nullptr || key == nullptr) return false;
  for (int64_t part = first; part < last; ++part) {
    if (call.type == kFloat32) delta_type<kFloat32>(call, part, query, key);
    if (call.type == kBFloat16) delta_type<kBFloat16>(call, part, query, key);
    if (call.type == kFloat16) delta_type<kFloat16>(call, part, query, key);
  }
  return true;
}

}  // namespace

extern "C" const RecurrenceKernels INTERPOSER_OF_LEVEL(interposer_recurrence);
extern "C" const RecurrenceKernels INTERPOSER_OF_LEVEL(interposer_recurrence) = {convolve, scan,
                                                                                 delta};
