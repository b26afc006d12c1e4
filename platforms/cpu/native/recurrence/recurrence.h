// Recurrences over ragged batches: causal convolution, state-space scan and gated delta rule.
//
// Sequences are concatenated. Each has a row in a pool of states, which is read, continued and
// written in place. States are float32, except for the inputs that a convolution keeps. A sequence
// without cached tokens starts with zeros; a sequence with a negative slot is padding.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_sequences {
  int64_t count;
  const int64_t* starts;  // [count + 1]
  const int64_t* slots;   // [count]
  const int64_t* cached;  // [count]
};

// out[t] = bias + sum over j of weight[j] x[t - (taps - 1) + j], for each channel, then SiLU.
struct interposer_convolution {
  const void* x;       // [T, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels], or null
  void* windows;       // [rows, channels, taps - 1]
  void* out;           // [T, channels], contiguous
  int32_t type;        // type of x, weight, bias, windows and out
  int32_t silu;
  int64_t channels, taps;           // taps from 2 to 8
  int64_t x_stride, window_stride;  // elements between tokens, between rows
  interposer_sequences sequences;
};

// h = exp(steps decay) h + steps x b^T, out = h c + skip x.
struct interposer_scan {
  const void *x, *b, *c;  // [T, heads, size], [T, groups, state] twice
  const float* steps;     // [T, heads]
  const float* decay;     // [heads]
  const float* skip;      // [heads], or null
  float* states;          // [rows, heads, size, state]
  void* out;              // [T, heads, size], contiguous
  int32_t type;           // of x, b, c and out
  int64_t heads, groups, size, state;
  int64_t x_stride, b_stride, c_stride, step_stride, state_stride;  // elements
  interposer_sequences sequences;
};

// S = exp(decay) S; u = beta (value - S^T key); S = S + key u^T; out = scale S^T query.
struct interposer_delta {
  const void *query, *key, *value;  // [T, heads, key_size] twice, [T, value_heads, value_size]
  const float *decay, *beta;        // [T, value_heads]
  float* states;                    // [rows, value_heads, key_size, value_size]
  void* out;                        // [T, value_heads, value_size], contiguous
  int32_t type;                     // of query, key, value and out
  float scale;
  int64_t heads, value_heads, key_size, value_size;
  int64_t query_stride, key_stride, value_stride, decay_stride, beta_stride;  // elements
  int64_t state_stride;
  interposer_sequences sequences;
};

// Each returns 0, kNoKernels if the processor supports none of the levels, or kNoMemory.
int32_t interposer_convolve(const interposer_convolution* convolution);
int32_t interposer_scan_states(const interposer_scan* scan);
int32_t interposer_apply_delta(const interposer_delta* delta);
}

// Number of tasks: blocks of channels, heads or columns. A task covers all sequences, so that one
// long sequence among short ones still occupies all threads.
inline int64_t parts_of(const interposer_convolution& call) { return (call.channels + 15) / 16; }
inline int64_t parts_of(const interposer_scan& call) { return call.heads; }
// Columns of a value are independent, so that few heads suffice for many threads.
constexpr int64_t kDeltaColumns = 64;
inline int64_t blocks_of(const interposer_delta& call) {
  return (call.value_size + kDeltaColumns - 1) / kDeltaColumns;
}
inline int64_t parts_of(const interposer_delta& call) { return call.value_heads * blocks_of(call); }

struct RecurrenceKernels {
  // Compute tasks `first` to `last`. Each returns false if out of memory.
  bool (*convolve)(const interposer_convolution&, int64_t first, int64_t last);
  bool (*scan)(const interposer_scan&, int64_t first, int64_t last);
  bool (*delta)(const interposer_delta&, int64_t first, int64_t last);
};
