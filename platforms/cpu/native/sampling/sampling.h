// From logits to tokens, and from a router's logits to experts.
//
// Rows are independent. Long ones are taken in parts of a fixed size, whose results are put
// together in order, so that no number depends on how many threads there are or on other rows.
#pragma once

#include <cstdint>

extern "C" {

// One token for each row: its largest logit where the temperature is 0, otherwise a draw from the
// softmax of what top-k, top-p and min-p leave. The lowest index wins ties.
struct interposer_sample {
  const void* logits;
  int32_t type;
  int64_t rows, width, stride;  // elements; stride is between rows
  const float* temperature;     // [rows]; null for 0 everywhere, and then nothing below is read
  const int64_t* top_k;         // [rows] each, or null where it is not used
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;  // [rows]
  const int64_t* steps;
  int64_t* tokens;  // [rows]
  float* logprobs;  // [rows], or null: they take most of the time where no row is random
};

// out = y - presence * [count > 0] - frequency * count, where y is the logit, which is first
// divided by the repetition if it is positive, and multiplied otherwise, of a token that is in the
// prompt or was generated.
struct interposer_penalties {
  const void* logits;
  int32_t type;
  int32_t count_bytes;  // 4 or 8
  int64_t rows, width;
  int64_t logit_stride, prompt_stride, count_stride;  // elements
  const uint8_t* prompt;                              // 0 or 1
  const void* counts;
  const float* repetition;  // [rows] each
  const float* presence;
  const float* frequency;
  float* out;  // without gaps
};

enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

// The `top` experts of each row that are best by score plus bias, or by logit without a bias, out
// of the `top_groups` best groups; weighted by their scores alone.
struct interposer_routes {
  const void* logits;
  int32_t type, scoring, renormalised;
  int64_t rows, width, stride;  // elements
  const float* bias;            // [width], or null
  int64_t groups, top_groups, top;
  float scale;
  float* weights;  // [rows, top]
  int32_t* ids;    // [rows, top]
};

// Each returns 0, kNoKernels where the processor has none of the levels, or kNoMemory.
int32_t interposer_sample_tokens(const interposer_sample* sample);
int32_t interposer_penalise(const interposer_penalties* penalties);
int32_t interposer_route(const interposer_routes* routes);
}

// Elements of a part of a row.
constexpr int64_t kPart = 4096;

// The largest logit of a part, and the sum of exp(logit - largest).
struct Peak {
  float value, sum;
};

struct Winner {
  float value;
  int64_t index;
};

// How a row is drawn. Scaled logits are (logit - peak) / temperature.
struct Draw {
  float peak, temperature;
  float threshold;  // the least scaled logit that is kept
  float cutoff;     // no logit below this one reaches the threshold
  uint64_t key;     // of the noise
  Winner start;     // the likeliest token
};

// Bytes of memory that `prepare` and `route` need for rows of `width`.
constexpr int64_t prepare_bytes(int64_t width) { return (width + 1024) * 4; }
constexpr int64_t route_bytes(int64_t width) { return (width + 16) * 12 + 64; }

struct SamplingKernels {
  // The peak of elements `first` to `last` of a row.
  Peak (*survey)(const interposer_sample&, int64_t row, int64_t first, int64_t last);
  // The first of these that is `value`, or is NaN where `value` is; -1 where none is.
  int64_t (*place)(const interposer_sample&, int64_t row, int64_t first, int64_t last, float value);
  // How a row of positive temperature is drawn; `likeliest` is its peak.
  Draw (*prepare)(const interposer_sample&, int64_t row, Winner likeliest, void* memory);
  // Puts in the place of `best` what is better among these.
  void (*draw)(const interposer_sample&, int64_t row, int64_t first, int64_t last, const Draw&,
               Winner& best);
  float (*logit)(const interposer_sample&, int64_t row, int64_t index);
  void (*penalise)(const interposer_penalties&, int64_t row, int64_t first, int64_t last);
  void (*route)(const interposer_routes&, int64_t first, int64_t last, void* memory);
};
