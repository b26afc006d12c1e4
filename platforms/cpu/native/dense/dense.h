// Attention to keys stored as rows: of sequences without a cache, of pages of any size, and of
// latent vectors (MLA), which are keys and values at once.
#pragma once

#include <cstdint>

#include "../attention/attention.h"

extern "C" {

// Strides in bytes of keys or values: `token` between rows, `head` between heads, `page` between
// pages.
struct interposer_dense_rows {
  const char* data;
  int64_t head, page, token;
};

// One call. The last query of a sequence has the position of its last key.
struct interposer_dense_call {
  int32_t type;         // Type of queries and result
  int32_t stored_type;  // CacheType of keys and values
  int32_t num_heads, num_kv_heads, head_size, value_size;
  double scale, softcap;  // no cap where it is 0
  int64_t window_tokens;  // 0: no window; tokens on either side
  int32_t causal;
  int32_t page_tokens;  // 0: keys of a sequence are consecutive
  int64_t num_sequences;
  const int64_t* query_starts;  // [B + 1]
  const int64_t* key_starts;    // [B + 1], or null with pages
  const int64_t* seq_lens;      // [B] numbers of keys, with pages
  const int64_t* page_table;    // [B, pages]
  int64_t table_stride;         // elements
  const void* query;
  int64_t query_stride;  // elements between tokens; heads are adjacent
  interposer_dense_rows keys, values;  // at equal addresses, values are the start of keys
  void* out;                           // [T, N, E], contiguous
  float* lse;                          // [T, N], or null
  const float *sinks, *slopes;         // [N], or null
  const float *key_scales, *value_scales;  // scales of stored elements, or null
  int64_t scale_stride;                    // 0: one scale for all heads
};

// Keys and values to store in pages: [T, K, D] and [T, K, E].
struct interposer_dense_store {
  int64_t num_tokens;
  const int64_t* slots;  // [T] page * page_tokens + offset
  const void *key, *value;
  int64_t key_stride, value_stride;  // elements between tokens; heads are adjacent
};

// Store rows in the pages of `call`, divided by its scales. Returns an error code as the next
// function does.
int32_t interposer_dense_write(const interposer_dense_call* call,
                               const interposer_dense_store* store);

// Returns 0 or an AttentionFailure.
int32_t interposer_dense_attention(const interposer_dense_call* call);
}

inline int64_t dense_keys(const interposer_dense_call& call, int64_t sequence) {
  return call.key_starts ? call.key_starts[sequence + 1] - call.key_starts[sequence]
                         : call.seq_lens[sequence];
}

struct DenseKernels {
  // Size of the scratch memory of `attend` for blocks of at most `most_rows`.
  int64_t (*scratch_bytes)(const interposer_dense_call&, int64_t most_rows);
  void (*attend)(const interposer_dense_call&, int64_t most_rows, const AttentionItem&,
                 const AttentionPartials&, char* scratch);
  void (*store)(const interposer_dense_call&, const interposer_dense_store&, int64_t token);
};
