// Attention over a paged cache: the plan of a step, and the call for one layer.
#pragma once

#include <atomic>
#include <cstdint>

#include "cache.h"

// One query block of one kv head over a range of keys. All query heads of the group are rows.
struct AttentionItem {
  int32_t sequence, head;
  int32_t first_token, num_tokens;  // within the sequence's tokens of this step
  int32_t first_key, end_key;       // positions
  int32_t part, num_parts;          // of the keys; 1 if the keys are not split
  int32_t first_partial;            // row in the buffer of partial results
  int32_t split;                    // index of the block among the split blocks
};

// Keys and values of one sequence, stored before any item runs.
struct AttentionWrite {
  int32_t sequence, first_token, num_tokens, unused;
};

extern "C" {

// Description of a step, the same for all layers with the same specification.
struct interposer_attention_step {
  int32_t type;        // Type of queries, keys and values
  int32_t cache_type;  // a CacheType
  int32_t num_heads, num_kv_heads, head_size, page_tokens;
  double scale, softcap;  // 0: no cap
  int64_t window_tokens;  // 0: no window
  int64_t num_sequences;
  const int64_t* query_starts;  // [B + 1]
  const int64_t* seq_lens;      // [B]
  const int64_t* page_table;    // [B, pages]
  int64_t table_stride;         // elements
  const int64_t* slots;         // [T]
};

// Header of a plan. The plan refers to the tensors of the batch, which must stay alive.
struct interposer_attention_plan {
  interposer_attention_step step;
  int64_t num_items, num_writes, num_partials, num_splits;
  int64_t most_rows;        // maximum over all items
  int64_t most_split_rows;  // maximum over the split items
  int64_t items_at, writes_at, bytes;
};

// Call for one layer. Tokens of query, key and value may have gaps; heads are adjacent.
struct interposer_attention_call {
  const interposer_attention_plan* plan;
  const void *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;  // elements between tokens
  char* cache;
  int64_t head_stride, page_stride;  // bytes
  void* out;                         // [T, N, D], contiguous
  const void* sinks;                 // [N], type of the query, or null
  const float *key_scales, *value_scales;  // null if the cache has the query's type
  int64_t scale_stride;                    // 0: one scale for all heads
};

// Write the plan of `step` to `memory` unless that is null. Returns the size of the plan in bytes.
int64_t interposer_plan_attention(const interposer_attention_step* step, void* memory);

// Store the step's keys and values, then attend. Returns 0 or an error code.
int32_t interposer_attention(const interposer_attention_call* call);
}

enum AttentionFailure : int32_t { kAttended = 0, kNoAttention = 1, kNoAttentionMemory = 2 };

// Partial results of split blocks: [rows] maximum, [rows] sum, [rows][D] weighted values.
struct AttentionPartials {
  float* data;
  int64_t stride;  // floats from one part to the next
  std::atomic<int32_t>* unfinished;  // by split block
};

struct AttentionKernels {
  // Size of the scratch memory of `attend`.
  int64_t (*scratch_bytes)(const interposer_attention_plan&);
  void (*store)(const interposer_attention_call&, const AttentionWrite&, int64_t head);
  // Prefetches the first keys of the next item unless that is null.
  void (*attend)(const interposer_attention_call&, const AttentionItem&, const AttentionItem* next,
                 const AttentionPartials&, char* scratch);
};

inline interposer_kv_cache cache_of(const interposer_attention_call& call) {
  const interposer_attention_step& step = call.plan->step;
  return {call.cache,       call.head_stride, call.page_stride,
          step.page_tokens, step.head_size,   step.cache_type};
}
