// Sampling kernels, compiled once per level with the level's flags.

#include <cmath>

#include "lanes.h"
#include "noise.h"
#include "routing.h"
#include "sampling.h"
#include "truncation.h"

namespace {

template <int32_t kType>
INTERPOSER_INLINE Logits<kType> part_of(const interposer_sample& sample, int64_t row, int64_t first,
                                        int64_t last) {
  return {element<kType>(sample.logits, row * sample.stride), first, last};
}

// Output counts of tokens; lanes after `count` are zero.
template <class Count>
INTERPOSER_INLINE Floats floats_of_counts(const Count* counts, int count) {
  alignas(64) Count found[kLanes] = {};
  std::memcpy(found, counts, size_t(count) * sizeof(Count));
  Floats floats;
  for (int lane = 0; lane < kLanes; ++lane) floats[lane] = float(found[lane]);
  return floats;
}

template <int32_t kType>
struct Kernels {
  static Peak survey(const interposer_sample& sample, int64_t row, int64_t first, int64_t last) {
    const Logits<kType> logits = part_of<kType>(sample, row, first, last);
    const auto itself = [](Floats x) INTERPOSER_LAMBDA { return x; };
    const float highest = highest_of(logits.joined(splat(kNothing), itself, larger));
    if (highest == kNothing || sample.logprobs == nullptr) return {highest, 0};
    const auto power = [&](Floats x) INTERPOSER_LAMBDA { return raised(x - highest); };
    return {highest, sum_of(logits.joined(splat(0.0f), power, plus))};
  }

  static int64_t place(const interposer_sample& sample, int64_t row, int64_t first, int64_t last,
                       float value) {
    const Floats wanted = splat(value);
    const bool is_nan = value != value;
    int64_t found = -1;
    part_of<kType>(sample, row, first, last)
        .each([&](Floats x, int64_t i, int lanes) INTERPOSER_LAMBDA {
          if (found >= 0) return;
          // The value is the maximum, so >= means equal.
          uint32_t bits = is_nan ? ~at_least(x, splat(kNothing)) : at_least(x, wanted);
          bits &= (1u << lanes) - 1;
          if (bits) found = i + __builtin_ctz(bits);
        });
    return found;
  }

  static Draw prepare(const interposer_sample& sample, int64_t row, Winner likeliest,
                      void* memory) {
    Draw draw = {};
    draw.peak = likeliest.value;
    draw.temperature = sample.temperature[row];
    draw.key = key_of(sample.seeds[row], sample.steps[row]);
    draw.start = {gumbel_of(hash_of(draw.key, likeliest.index)), likeliest.index};
    const Logits<kType> logits = part_of<kType>(sample, row, 0, sample.width);
    const int64_t top_k = sample.top_k ? sample.top_k[row] : 0;
    const float top_p = sample.top_p ? sample.top_p[row] : 1;
    draw.threshold = truncated(logits, top_k, top_p, draw, static_cast<uint32_t*>(memory));
    if (sample.min_p) {
      const float least = logf(sample.min_p[row]);
      draw.threshold = least > draw.threshold ? least : draw.threshold;
    }
    draw.cutoff = above(draw, draw.threshold);
    return draw;
  }

  static void draw(const interposer_sample& sample, int64_t row, int64_t first, int64_t last,
                   const Draw& draw, Winner& best) {
    const float inverse = 1 / draw.temperature;
    const float factor = inverse < __FLT_MAX__ ? inverse : __FLT_MAX__;
    const auto bound_of = [&] {
      const float reach = above(draw, best.value - kMostNoise);
      return reach > draw.cutoff ? reach : draw.cutoff;
    };
    float bound = bound_of();
    part_of<kType>(sample, row, first, last)
        .each([&](Floats x, int64_t i, int lanes) INTERPOSER_LAMBDA {
          uint32_t bits = at_least(x, splat(bound));
          if (bits == 0) return;
          // -log(-log1p(-u)) is at most -log(u), so that only a u of at most exp(scaled - best) can
          // win; plus a thousandth for rounding.
          const Floats most = raised((x - draw.peak) * factor - best.value) * 1.001f;
          bits &= at_least(most, uniform_below(draw.key, i)) & ((1u << lanes) - 1);
          for (; bits; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            const float scaled = (x[lane] - draw.peak) / draw.temperature;
            if (!(scaled >= draw.threshold)) continue;
            const float value = scaled + gumbel_of(hash_of(draw.key, i + lane));
            if (value > best.value || (value == best.value && i + lane < best.index)) {
              best = {value, i + lane};
              bound = bound_of();
            }
          }
        });
  }

  static float logit(const interposer_sample& sample, int64_t row, int64_t index) {
    return part_of<kType>(sample, row, 0, sample.width).one(index);
  }

  static void penalise(const interposer_penalties& penalties, int64_t row, int64_t first,
                       int64_t last) {
    if (penalties.count_bytes == 4) return penalise_by<int32_t>(penalties, row, first, last);
    penalise_by<int64_t>(penalties, row, first, last);
  }

 private:
  // A bound such that every logit whose scaled logit is at least `scaled` reaches it, and few
  // others.
  static float above(const Draw& draw, float scaled) {
    const double distance = double(scaled) * draw.temperature;
    const double slack = 1e-6 * (std::fabs(distance) + std::fabs(double(draw.peak)));
    return distance > -__FLT_MAX__ ? float(draw.peak + distance - slack) : kNothing;
  }

  template <class Count>
  static void penalise_by(const interposer_penalties& penalties, int64_t row, int64_t first,
                          int64_t last) {
    const Logits<kType> logits = {element<kType>(penalties.logits, row * penalties.logit_stride),
                                  first, last};
    const uint8_t* prompt = penalties.prompt + row * penalties.prompt_stride;
    const Count* counts = static_cast<const Count*>(penalties.counts) + row * penalties.count_stride;
    float* out = penalties.out + row * penalties.width;
    const float repetition = penalties.repetition[row], presence = penalties.presence[row];
    const float frequency = penalties.frequency[row];
    logits.each([&](Floats y, int64_t i, int lanes) INTERPOSER_LAMBDA {
      Bytes in_prompt = {};
      std::memcpy(&in_prompt, prompt + i, size_t(lanes));
      const Floats count = floats_of_counts(counts + i, lanes);
      const Words generated = less(Words{}, (Words)count);
      const Words used = less(Words{}, converted<Words>(in_prompt)) | generated;
      const Words negative = (Words)((Ints)y >> 31);
      const Floats repeated = chosen(negative, y * repetition, y / repetition);
      y = chosen(used, repeated, y);
      y = y - presence * chosen(generated, splat(1.0f), Floats{});
      store_some(out + i, y - frequency * count, kFloat32, lanes);
    });
  }
};

void penalise(const interposer_penalties& penalties, int64_t row, int64_t first, int64_t last) {
  if (penalties.type == kFloat32) return Kernels<kFloat32>::penalise(penalties, row, first, last);
  if (penalties.type == kBFloat16) return Kernels<kBFloat16>::penalise(penalties, row, first, last);
  return Kernels<kFloat16>::penalise(penalties, row, first, last);
}

void route(const interposer_routes& routes, int64_t first, int64_t last, void* memory) {
  if (routes.type == kFloat32) return route_rows<kFloat32>(routes, first, last, memory);
  if (routes.type == kBFloat16) return route_rows<kBFloat16>(routes, first, last, memory);
  return route_rows<kFloat16>(routes, first, last, memory);
}

// Dispatch by the type of logits.
#define INTERPOSER_OF_TYPE(name, result, parameters, arguments)                   \
  result name parameters {                                                        \
    if (sample.type == kFloat32) return Kernels<kFloat32>::name arguments;        \
    if (sample.type == kBFloat16) return Kernels<kBFloat16>::name arguments;      \
    return Kernels<kFloat16>::name arguments;                                     \
  }

INTERPOSER_OF_TYPE(survey, Peak,
                   (const interposer_sample& sample, int64_t row, int64_t first, int64_t last),
                   (sample, row, first, last))
INTERPOSER_OF_TYPE(place, int64_t,
                   (const interposer_sample& sample, int64_t row, int64_t first, int64_t last,
                    float value),
                   (sample, row, first, last, value))
INTERPOSER_OF_TYPE(prepare, Draw,
                   (const interposer_sample& sample, int64_t row, Winner likeliest, void* memory),
                   (sample, row, likeliest, memory))
INTERPOSER_OF_TYPE(draw, void,
                   (const interposer_sample& sample, int64_t row, int64_t first, int64_t last,
                    const Draw& how, Winner& best),
                   (sample, row, first, last, how, best))
INTERPOSER_OF_TYPE(logit, float, (const interposer_sample& sample, int64_t row, int64_t index),
                   (sample, row, index))

}  // namespace

extern "C" const SamplingKernels INTERPOSER_OF_LEVEL(interposer_sampling);
extern "C" const SamplingKernels INTERPOSER_OF_LEVEL(interposer_sampling) = {
    survey, place, prepare, draw, logit, penalise, route};
