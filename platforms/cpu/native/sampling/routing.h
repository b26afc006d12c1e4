// Top-k experts of rows. Included once for every level.
#pragma once

#include <climits>

#include "lanes.h"
#include "sampling.h"

namespace {

// Sort keys in the order of the numbers; NaN is last, and both zeros are equal.
INTERPOSER_INLINE Ints keys_of(Floats values) {
  const Ints bits = (Ints)(values + 0.0f);
  const Ints keys = bits ^ ((bits >> 31) & 0x7fffffff);
  const Ints is_nan = (Ints)less(splat(uint32_t(0x7f800000)), (Words)bits & 0x7fffffffu);
  return (keys & ~is_nan) | (is_nan & INT_MAX);
}

constexpr int32_t kTaken = INT_MIN;           // below the key of any number
constexpr int32_t kRuledOut = ~0x7f800000;    // the key of minus infinity

// Index of the largest key, the first one if several are equal; the key is then marked as taken.
// `padded` is a multiple of sixteen; padding keys are kTaken.
INTERPOSER_INLINE int64_t take_best(int32_t* keys, int64_t padded) {
  int32_t best = kTaken;
  for (int64_t i = 0; i < padded; ++i) best = keys[i] > best ? keys[i] : best;
  int64_t index = 0;
  while (keys[index] != best) ++index;
  keys[index] = kTaken;
  return index;
}

constexpr int64_t padded_to_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Score of a group: its best expert, or with a bias the sum of its two best.
INTERPOSER_INLINE float strength_of(const float* compared, int64_t size, bool biased) {
  float best = kNothing, second = kNothing;
  for (int64_t i = 0; i < size; ++i) {
    const float value = compared[i];
    second = value > best ? best : value > second ? value : second;
    best = value > best ? value : best;
  }
  return biased ? best + second : best;
}

// Excludes the experts of all but the best groups.
void choose_groups(const interposer_routes& routes, const float* compared, int32_t* keys,
                   int32_t* of_groups, bool* is_chosen) {
  const int64_t size = routes.width / routes.groups, padded = padded_to_lanes(routes.groups);
  for (int64_t group = 0; group < padded; ++group) {
    of_groups[group] = kTaken;
    if (group >= routes.groups) continue;
    const float strength = strength_of(compared + group * size, size, routes.bias != nullptr);
    of_groups[group] = keys_of(splat(strength))[0];
    is_chosen[group] = false;
  }
  for (int64_t i = 0; i < routes.top_groups; ++i) is_chosen[take_best(of_groups, padded)] = true;
  for (int64_t group = 0; group < routes.groups; ++group) {
    if (is_chosen[group]) continue;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) keys[i] = kRuledOut;
  }
}

template <int32_t kType>
void route_rows(const interposer_routes& routes, int64_t first, int64_t last, void* memory) {
  const int64_t width = routes.width, padded = padded_to_lanes(width);
  float* scores = static_cast<float*>(memory);
  float* compared = scores + padded;
  int32_t* keys = reinterpret_cast<int32_t*>(compared + padded);
  int32_t* of_groups = keys + padded;
  bool* is_chosen = reinterpret_cast<bool*>(of_groups + padded_to_lanes(routes.groups));
  for (int64_t row = first; row < last; ++row) {
    const Logits<kType> logits = {element<kType>(routes.logits, row * routes.stride), 0, width};
    logits.each([&](Floats x, int64_t i, int) INTERPOSER_LAMBDA { store(compared + i, x); });
    if (routes.scoring == kSoftmax) {
      Floats peaks = splat(kNothing), sums = {};
      for (int64_t i = 0; i < padded; i += kLanes) peaks = larger(load<Floats>(compared + i), peaks);
      const float peak = highest_of(peaks);
      for (int64_t i = 0; i < padded; i += kLanes) {
        Floats powers = exponential(load<Floats>(compared + i) - peak);
        for (int lane = int(width - i); lane < kLanes; ++lane) powers[lane] = 0;
        sums += powers;
        store(scores + i, powers);
      }
      const float sum = sum_of(sums);
      for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load<Floats>(scores + i) / sum);
    } else {
      for (int64_t i = 0; i < padded; i += kLanes) {
        store(scores + i, 1.0f / (1.0f + exponential(-load<Floats>(compared + i))));
      }
    }
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int count = width - i < kLanes ? int(width - i) : kLanes;
      Floats values = load<Floats>(compared + i);
      if (routes.bias) {
        values = load<Floats>(scores + i) + load_some(routes.bias + i, kFloat32, count);
        store(compared + i, values);
      }
      Ints found = keys_of(values);
      for (int lane = count; lane < kLanes; ++lane) found[lane] = kTaken;
      store(keys + i, found);
    }
    if (routes.top_groups < routes.groups) {
      choose_groups(routes, compared, keys, of_groups, is_chosen);
    }
    float* weights = routes.weights + row * routes.top;
    int32_t* ids = routes.ids + row * routes.top;
    float sum = 0;
    for (int64_t i = 0; i < routes.top; ++i) {
      ids[i] = int32_t(take_best(keys, padded));
      weights[i] = scores[ids[i]];
      sum += weights[i];
    }
    const float whole = routes.renormalised ? sum + 1e-20f : 1.0f;
    for (int64_t i = 0; i < routes.top; ++i) weights[i] = weights[i] / whole * routes.scale;
  }
}

}  // namespace
