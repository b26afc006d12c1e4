// Threshold of a row's scaled logits for top-k and top-p, without sorting the vocabulary. Included
// once for every level.
#pragma once

#include <cmath>

#include "lanes.h"
#include "sampling.h"

namespace {

// Sort codes, ascending for descending numbers; both zeros are equal.
INTERPOSER_INLINE uint32_t code_of(float value) {
  const float canonical = value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &canonical, 4);
  return bits & 0x80000000u ? bits : 0x7fffffffu - bits;
}

INTERPOSER_INLINE float value_of(uint32_t code) {
  const uint32_t bits = code & 0x80000000u ? code : 0x7fffffffu - code;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Smallest of `count` numbers for which `keeps(sum of weights of larger numbers)` holds, or the
// largest number if it holds for none; `all` is the result for the sum of all. Radix selection:
// codes are binned by eight bits, then the codes of one bin by the next eight. Reorders the codes.
template <class Weigh, class Keeps>
uint32_t least_kept(uint32_t* codes, int64_t count, const Weigh& weigh, const Keeps& keeps,
                    bool& all) {
  struct Bin {
    int64_t weight, count;
  };
  int64_t before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    Bin bins[256] = {};
    for (int64_t i = 0; i < count; ++i) {
      Bin& bin = bins[codes[i] >> shift & 255];
      bin.weight += weigh(codes[i]);
      ++bin.count;
    }
    int chosen = -1;
    int64_t sum = before;
    for (int number = 0; number < 256; ++number) {
      if (bins[number].count == 0) continue;
      if (chosen >= 0 && !keeps(sum)) break;
      chosen = number, before = sum;
      sum += bins[number].weight;
    }
    if (shift == 24) all = keeps(sum);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (int(codes[i] >> shift & 255) == chosen) codes[left++] = codes[i];
    }
    count = left;
  }
  return codes[0];
}

// Returns the code at which the `number` largest numbers end.
INTERPOSER_INLINE uint32_t code_at(uint32_t* codes, int64_t count, int64_t number) {
  bool all;
  return least_kept(
      codes, count, [](uint32_t) { return 1; },
      [=](int64_t larger_ones) { return larger_ones < number; }, all);
}

// A bound that at least `number` logits reach, and few more; overwrites `memory`.
template <int32_t kType>
float reached_by(const Logits<kType>& logits, int64_t number, uint32_t* memory) {
  const int64_t vectors = logits.last / kLanes;
  // Maxima of groups; there are `number` / 4 groups or more.
  const int64_t groups = number / 4 < 16 ? 16 : (number + 3) / 4;
  if (groups * 4 > vectors) return kNothing;
  for (int64_t group = 0; group < groups; ++group) {
    const Logits<kType> own = {logits.row, vectors * group / groups * kLanes,
                               vectors * (group + 1) / groups * kLanes};
    const Floats most =
        own.joined(splat(kNothing), [](Floats x) INTERPOSER_LAMBDA { return x; }, larger);
    for (int lane = 0; lane < kLanes; ++lane) memory[group * kLanes + lane] = code_of(most[lane]);
  }
  return value_of(code_at(memory, groups * kLanes, number));
}

// Writes the codes of scaled logits that are at least the `number`th largest, and maybe of some
// smaller ones. Returns their count.
template <int32_t kType>
int64_t gathered(const Logits<kType>& logits, int64_t number, const Draw& draw, uint32_t* memory) {
  const float reached = reached_by(logits, number, memory);
  // Margin larger than the rounding errors of scaling.
  const Floats bound = splat(reached - (draw.peak - reached) * 0x1p-20f);
  int64_t count = 0;
  logits.each([&](Floats x, int64_t, int lanes) INTERPOSER_LAMBDA {
    uint32_t bits = at_least(x, bound) & ((1u << lanes) - 1);
    for (; bits; bits &= bits - 1) {
      const float logit = x[__builtin_ctz(bits)];
      memory[count++] = code_of((logit - draw.peak) / draw.temperature);
    }
  });
  return count;
}

// Probabilities as integers, so that sums do not depend on the order.
constexpr float kUnits = 0x1p52f;

struct Mass {
  float whole;  // sum of all candidates of top-p

  INTERPOSER_INLINE int64_t operator()(uint32_t code) const {
    return int64_t(expf(value_of(code)) / whole * kUnits);
  }
};

// Threshold of scaled logits for top-k and top-p; -inf if all are kept.
template <int32_t kType>
float truncated(const Logits<kType>& logits, int64_t top_k, float top_p, const Draw& draw,
                uint32_t* memory) {
  const bool by_number = top_k > 0 && top_k < logits.last, by_mass = top_p < 1;
  const auto keeps = [=](int64_t likelier) { return float(likelier) / kUnits < top_p; };
  bool all;
  if (by_number) {
    int64_t count = gathered(logits, top_k, draw, memory);
    const uint32_t last = code_at(memory, count, top_k);
    if (!by_mass) return value_of(last);
    // The codes were reordered and partly overwritten.
    const int64_t found = gathered(logits, top_k, draw, memory);
    double whole = 0;
    count = 0;
    for (int64_t i = 0; i < found; ++i) {
      if (memory[i] > last) continue;
      memory[count++] = memory[i];
      whole += expf(value_of(memory[i]));
    }
    return value_of(least_kept(memory, count, Mass{float(whole)}, keeps, all));
  }
  if (!by_mass) return kNothing;
  const float inverse = 1 / draw.temperature;
  const float factor = inverse < __FLT_MAX__ ? inverse : __FLT_MAX__;
  const Floats sums = logits.joined(
      splat(0.0f),
      [&](Floats x) INTERPOSER_LAMBDA { return raised((x - draw.peak) * factor); }, plus);
  // Usually few tokens have most of the probability mass.
  for (int64_t number = 256;; number *= 8) {
    const int64_t count = gathered(logits, number, draw, memory);
    const bool is_whole = count == logits.last;
    const uint32_t least = least_kept(memory, count, Mass{sum_of(sums)}, keeps, all);
    if (is_whole || !all) return value_of(least);
  }
}

}  // namespace
