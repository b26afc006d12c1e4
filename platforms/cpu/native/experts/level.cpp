// Activation and weighted sum of experts, compiled once for each level.

#include "../elementwise/functions.h"
#include "experts.h"

namespace {

constexpr float kAlpha = 1.702f, kLimit = 7.0f;

INTERPOSER_INLINE Floats silu_of(Floats gate, Floats up) { return sigmoid_weighted(gate, gate) * up; }

INTERPOSER_INLINE Floats gelu_of(Floats gate, Floats up) { return gelu(gate) * up; }

INTERPOSER_INLINE Floats swiglu_oai_of(Floats gate, Floats up) {
  const Words negative = (Words)((Ints)gate >> 31);
  gate = chosen(negative, gate, limited(gate, kLimit));
  return sigmoid_weighted(gate, kAlpha * gate) * (limited(up, kLimit) + 1.0f);
}

template <int32_t kType, Floats activation(Floats, Floats)>
void activate_rows(const GatedTile& tile) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* gate = tile.gate + row * tile.stride;
    const float* up = tile.up + row * tile.stride;
    char* out = static_cast<char*>(tile.out) + row * tile.out_stride * size_of(kType);
    for (int64_t i = 0; i < tile.columns; i += kLanes) {
      const int64_t rest = tile.columns - i;
      const int count = int(rest < kLanes ? rest : kLanes);
      const Floats result = activation(load_some(gate + i, kFloat32, count),
                                       load_some(up + i, kFloat32, count));
      store_some(out + i * size_of(kType), result, kType, count);
    }
  }
}

template <int32_t kType>
void activate_type(const GatedTile& tile) {
  switch (tile.activation) {
    case kExpertSilu:
      return activate_rows<kType, silu_of>(tile);
    case kExpertGelu:
      return activate_rows<kType, gelu_of>(tile);
    default:
      return activate_rows<kType, swiglu_oai_of>(tile);
  }
}

void activate(const GatedTile& tile) {
  if (tile.out_type == kFloat32) return activate_type<kFloat32>(tile);
  if (tile.out_type == kBFloat16) return activate_type<kBFloat16>(tile);
  return activate_type<kFloat16>(tile);
}

void add_up(const Returned& returned, int64_t first_token, int64_t last_token) {
  const int64_t hidden = returned.hidden;
  for (int64_t token = first_token; token < last_token; ++token) {
    const int32_t* places = returned.places + token * returned.top_k;
    const float* weights = returned.weights + token * returned.weight_stride;
    char* out = static_cast<char*>(returned.out) + token * hidden * size_of(returned.type);
    for (int64_t i = 0; i < hidden; i += kLanes) {
      const int count = int(hidden - i < kLanes ? hidden - i : kLanes);
      Floats sum = {};
      for (int64_t k = 0; k < returned.top_k; ++k) {
        if (places[k] < 0) continue;
        sum += load_some(returned.rows + places[k] * hidden + i, kFloat32, count) * weights[k];
      }
      store_some(out + i * size_of(returned.type), sum, returned.type, count);
    }
  }
}

}  // namespace

extern "C" const ExpertsKernels INTERPOSER_OF_LEVEL(interposer_experts);
extern "C" const ExpertsKernels INTERPOSER_OF_LEVEL(interposer_experts) = {activate, add_up};
