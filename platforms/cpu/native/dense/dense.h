// Attention to keys that lie in rows: of sequences without a cache, of pages of any size, and of
// latent vectors, which are keys and values at once.
#pragma once

#include <cstdint>

#include "../attention/attention.h"

extern "C" {

// Where rows of keys or of values lie: `token` bytes apart, those of each head `head` bytes, and
// those of each page `page` bytes.
struct interposer_dense_rows {
  const char* data;
  int64_t head, page, token;
};

// One call. The last query of a sequence stands where its last key does.
struct interposer_dense_call {
  int32_t type;         // of queries and of the result: of Type
  int32_t stored_type;  // of keys and values: of CacheType
  int32_t num_heads, num_kv_heads, head_size, value_size;
  double scale, softcap;  // no cap where it is 0
  int64_t window_tokens;  // none where it is 0; on either side
  int32_t causal;
  int32_t page_tokens;  // 0: keys of a sequence follow each other
  int64_t num_sequences;
  const int64_t* query_starts;  // [B + 1]
  const int64_t* key_starts;    // [B + 1], or null where there are pages
  const int64_t* seq_lens;      // [B] keys of each, of pages
  const int64_t* page_table;    // [B, pages]
  int64_t table_stride;         // elements
  const void* query;
  int64_t query_stride;  // elements between tokens; heads follow each other
  interposer_dense_rows keys, values;  // values at the address of keys are their first elements
  void* out;                           // [T, N, E] without gaps
  float* lse;                          // [T, N], or null
  const float *sinks, *slopes;         // [N], or null
  const float *key_scales, *value_scales;  // what stored elements are multiplied by, or null
  int64_t scale_stride;                    // 0 where one is for all heads
};

// Keys and values that are to be stored in pages: [T, K, D] and [T, K, E].
struct interposer_dense_store {
  int64_t num_tokens;
  const int64_t* slots;  // [T] page * page_tokens + offset
  const void *key, *value;
  int64_t key_stride, value_stride;  // elements between tokens; heads follow each other
};

// Store rows where the pages of `call` are, divided by its scales. Returns as the next does.
int32_t interposer_dense_write(const interposer_dense_call* call,
                               const interposer_dense_store* store);

// Returns 0, or what went wrong: of AttentionFailure.
int32_t interposer_dense_attention(const interposer_dense_call* call);
}

inline int64_t dense_keys(const interposer_dense_call& call, int64_t sequence) {
  return call.key_starts ? call.key_starts[sequence + 1] - call.key_starts[sequence]
                         : call.seq_lens[sequence];
}

struct DenseKernels {
  // Bytes that `attend` wants for itself where blocks have at most `most_rows`.
  int64_t (*scratch_bytes)(const interposer_dense_call&, int64_t most_rows);
  void (*attend)(const interposer_dense_call&, int64_t most_rows, const AttentionItem&,
                 const AttentionPartials&, char* scratch);
  void (*store)(const interposer_dense_call&, const interposer_dense_store&, int64_t token);
};
