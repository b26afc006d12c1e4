// Sampling of tokens from logits, and routing of tokens to experts.
//
// Rows are independent. Long rows are divided into parts of a fixed size, whose results are
// combined in order, so that results depend neither on the number of threads nor on other rows.
#pragma once

#include <cstdint>

extern "C" {

// One token per row: the largest logit if the temperature is 0, otherwise a sample from the softmax
// after top-k, top-p and min-p. The lowest index wins ties.
struct interposer_sample {
  const void* logits;
  int32_t type;
  int64_t rows, width, stride;  // elements; stride is between rows
  const float* temperature;     // [rows]; null: all 0, and no field below is read
  const int64_t* top_k;         // [rows] each, or null if unused
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;  // [rows]
  const int64_t* steps;
  int64_t* tokens;  // [rows]
  float* logprobs;  // [rows], or null: logprobs take most of the time if no row is random
};

// out = y - presence * [count > 0] - frequency * count. y is the logit; for a token in the prompt
// or the output, a positive logit is first divided by `repetition`, a negative one multiplied.
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
  float* out;  // contiguous
};

enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

// The `top` experts of each row by score plus bias, or by logit without a bias, from the
// `top_groups` best groups. Their weights are the scores without bias.
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

// Each returns 0, kNoKernels if the processor supports none of the levels, or kNoMemory.
int32_t interposer_sample_tokens(const interposer_sample* sample);
int32_t interposer_penalise(const interposer_penalties* penalties);
int32_t interposer_route(const interposer_routes* routes);
}

// Elements per part of a row.
constexpr int64_t kPart = 4096;

// Largest logit of a part, and the sum of exp(logit - largest).
struct Peak {
  float value, sum;
};

struct Winner {
  float value;
  int64_t index;
};

// Parameters for sampling a row. Scaled logits are (logit - peak) / temperature.
struct Draw {
  float peak, temperature;
  float threshold;  // smallest scaled logit that is kept
  float cutoff;     // logits below the cutoff cannot reach the threshold
  uint64_t key;     // key of the noise
  Winner start;     // most likely token
};

// Scratch bytes of `prepare` and `route` for rows of `width`.
constexpr int64_t prepare_bytes(int64_t width) { return (width + 1024) * 4; }
constexpr int64_t route_bytes(int64_t width) { return (width + 16) * 12 + 64; }

struct SamplingKernels {
  // Peak of elements `first` to `last` of a row.
  Peak (*survey)(const interposer_sample&, int64_t row, int64_t first, int64_t last);
  // Index of the first element equal to `value` (NaN equals NaN); -1 if there is none.
  int64_t (*place)(const interposer_sample&, int64_t row, int64_t first, int64_t last, float value);
  // Parameters for sampling a row with positive temperature; `likeliest` is its peak.
  Draw (*prepare)(const interposer_sample&, int64_t row, Winner likeliest, void* memory);
  // Replace `best` by a better element of the range, if any.
  void (*draw)(const interposer_sample&, int64_t row, int64_t first, int64_t last, const Draw&,
               Winner& best);
  float (*logit)(const interposer_sample&, int64_t row, int64_t index);
  void (*penalise)(const interposer_penalties&, int64_t row, int64_t first, int64_t last);
  void (*route)(const interposer_routes&, int64_t first, int64_t last, void* memory);
};
