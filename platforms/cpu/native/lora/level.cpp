// Products of adapters, compiled once for each level with its own flags.

#include "../vectors.h"
#include "lora.h"

namespace {

// Rows of a and vectors of outputs that are taken together, so that sums need not wait for each
// other.
constexpr int kTogether = 4;

template <int32_t kType>
INTERPOSER_INLINE const char* element(const void* from, int64_t index) {
  return static_cast<const char*>(from) + index * size_of(kType);
}

INTERPOSER_INLINE float total_of(Floats sum) {
  sum += __builtin_shuffle(sum, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  sum += __builtin_shuffle(sum, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// How many tokens from `token` on have its adapter, at most two.
INTERPOSER_INLINE int alike(const int64_t* ids, int64_t token, int64_t last) {
  return token + 1 < last && ids[token + 1] == ids[token] ? 2 : 1;
}

// `kTokens` tokens by `kRows` rows of a.
template <int32_t kType, int kTokens, int kRows>
INTERPOSER_INLINE void shrink_tile(const interposer_lora_shrink& call, int64_t token,
                                   const char* a, int64_t row) {
  const int64_t inputs = call.inputs;
  const char* x = element<kType>(call.x, token * call.x_stride);
  Floats sums[kTokens][kRows] = {};
  const auto take = [&](int64_t i, int count) {
    Floats given[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      given[t] = load_some(element<kType>(x, t * call.x_stride + i), kType, count);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = load_some(element<kType>(a, r * inputs + i), kType, count);
      for (int t = 0; t < kTokens; ++t) sums[t][r] += given[t] * weight;
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) take(i, kLanes);
  if (i < inputs) take(i, int(inputs - i));
  for (int t = 0; t < kTokens; ++t) {
    float* y = call.y + (token + t) * call.rank + row;
    for (int r = 0; r < kRows; ++r) y[r] = call.scale * total_of(sums[t][r]);
  }
}

template <int32_t kType, int kTokens>
void shrink_tokens(const interposer_lora_shrink& call, int64_t token) {
  const char* a = element<kType>(call.a, call.ids[token] * call.rank * call.inputs);
  int64_t row = 0;
  for (; row + kTogether <= call.rank; row += kTogether) {
    const char* rows = element<kType>(a, row * call.inputs);
    shrink_tile<kType, kTokens, kTogether>(call, token, rows, row);
  }
  for (; row < call.rank; ++row) {
    shrink_tile<kType, kTokens, 1>(call, token, element<kType>(a, row * call.inputs), row);
  }
}

template <int32_t kType>
void shrink_type(const interposer_lora_shrink& call, int64_t first, int64_t last) {
  for (int64_t token = first; token < last;) {
    const int count = alike(call.ids, token, last);
    if (call.ids[token] < 0) {
      float* y = call.y + token * call.rank;
      for (int64_t i = 0; i < count * call.rank; ++i) y[i] = 0;
    } else if (count == 2) {
      shrink_tokens<kType, 2>(call, token);
    } else {
      shrink_tokens<kType, 1>(call, token);
    }
    token += count;
  }
}

void shrink(const interposer_lora_shrink& call, int64_t first, int64_t last) {
  if (call.type == kFloat32) return shrink_type<kFloat32>(call, first, last);
  if (call.type == kBFloat16) return shrink_type<kBFloat16>(call, first, last);
  return shrink_type<kFloat16>(call, first, last);
}

// `kTokens` tokens by `kVectors` vectors of outputs, of which the last may hold fewer.
template <int32_t kType, int kTokens, int kVectors>
INTERPOSER_INLINE void expand_tile(const interposer_lora_expand& call, int64_t token,
                                   int64_t output, int count) {
  const float* x = call.x + token * call.x_stride;
  const char* b =
      element<kType>(call.b, call.ids[token] * call.rank * call.outputs + output);
  Floats sums[kTokens][kVectors] = {};
  for (int64_t r = 0; r < call.rank; ++r) {
    const char* row = element<kType>(b, r * call.outputs);
    for (int v = 0; v < kVectors; ++v) {
      const Floats weight = load_some(element<kType>(row, v * kLanes), kType, count);
      for (int t = 0; t < kTokens; ++t) sums[t][v] += weight * x[t * call.x_stride + r];
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    char* y = static_cast<char*>(call.y) +
              ((token + t) * call.y_stride + output) * int64_t(size_of(kType));
    for (int v = 0; v < kVectors; ++v, y += kLanes * size_of(kType)) {
      store_some(y, load_some(y, kType, count) + sums[t][v], kType, count);
    }
  }
}

template <int32_t kType, int kTokens>
void expand_tokens(const interposer_lora_expand& call, int64_t token, int64_t first,
                   int64_t last) {
  int64_t output = first;
  for (; output + kTogether * kLanes <= last; output += kTogether * kLanes) {
    expand_tile<kType, kTokens, kTogether>(call, token, output, kLanes);
  }
  for (; output < last; output += kLanes) {
    const int64_t rest = last - output;
    expand_tile<kType, kTokens, 1>(call, token, output, int(rest < kLanes ? rest : kLanes));
  }
}

template <int32_t kType>
void expand_type(const interposer_lora_expand& call, int64_t first, int64_t last) {
  const int64_t begin = first * kLoraOutputs;
  const int64_t end = last * kLoraOutputs < call.outputs ? last * kLoraOutputs : call.outputs;
  for (int64_t token = 0; token < call.tokens;) {
    const int count = alike(call.ids, token, call.tokens);
    if (call.ids[token] >= 0) {
      if (count == 2) {
        expand_tokens<kType, 2>(call, token, begin, end);
      } else {
        expand_tokens<kType, 1>(call, token, begin, end);
      }
    }
    token += count;
  }
}

void expand(const interposer_lora_expand& call, int64_t first, int64_t last) {
  if (call.type == kFloat32) return expand_type<kFloat32>(call, first, last);
  if (call.type == kBFloat16) return expand_type<kBFloat16>(call, first, last);
  return expand_type<kFloat16>(call, first, last);
}

}  // namespace

extern "C" const LoraKernels INTERPOSER_OF_LEVEL(interposer_lora);
extern "C" const LoraKernels INTERPOSER_OF_LEVEL(interposer_lora) = {shrink, expand};
