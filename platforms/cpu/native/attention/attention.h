// Attention over a paged cache: what a step is planned as, and what one layer is called with.
#pragma once

#include <atomic>
#include <cstdint>

#include "cache.h"

// One query block of one kv head over some of its keys. All heads of the group are rows.
struct AttentionItem {
  int32_t sequence, head;
  int32_t first_token, num_tokens;  // of the sequence's tokens of this step
  int32_t first_key, end_key;       // positions
  int32_t part, num_parts;          // of the keys; one part is the whole
  int32_t first_partial;            // where the parts' results are put together
  int32_t split;                    // number of the block among those that are split
};

// Keys and values of one sequence that are stored before any item runs.
struct AttentionWrite {
  int32_t sequence, first_token, num_tokens, unused;
};

extern "C" {

// What is asked of a step, the same for all layers of one specification.
struct interposer_attention_step {
  int32_t type;        // of queries, keys and values: of Type
  int32_t cache_type;  // of CacheType
  int32_t num_heads, num_kv_heads, head_size, page_tokens;
  double scale, softcap;  // no cap where it is 0
  int64_t window_tokens;  // none where it is 0
  int64_t num_sequences;
  const int64_t* query_starts;  // [B + 1]
  const int64_t* seq_lens;      // [B]
  const int64_t* page_table;    // [B, pages]
  int64_t table_stride;         // elements
  const int64_t* slots;         // [T]
};

// Begins the memory of a plan. The tensors of the batch stay where they are meanwhile.
struct interposer_attention_plan {
  interposer_attention_step step;
  int64_t num_items, num_writes, num_partials, num_splits;
  int64_t most_rows;        // of any item
  int64_t most_split_rows;  // of any item that is split
  int64_t items_at, writes_at, bytes;
};

// Pointers of one layer. Tokens of query, key and value may lie apart; their heads do not.
struct interposer_attention_call {
  const interposer_attention_plan* plan;
  const void *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;  // elements between tokens
  char* cache;
  int64_t head_stride, page_stride;  // bytes
  void* out;                         // [T, N, D] without gaps
  const void* sinks;                 // [N] of the query's type, or null
  const float *key_scales, *value_scales;  // null where the cache is of the query's type
  int64_t scale_stride;                    // 0 where one is for all heads
};

// Write the plan of `step` to `memory` if that is not null. Returns the bytes that it takes.
int64_t interposer_plan_attention(const interposer_attention_step* step, void* memory);

// Store the step's keys and values, then attend. Returns 0, or what went wrong.
int32_t interposer_attention(const interposer_attention_call* call);
}

enum AttentionFailure : int32_t { kAttended = 0, kNoAttention = 1, kNoAttentionMemory = 2 };

// What `attend` leaves for parts of a block: [rows] maximum, [rows] sum, [rows][D] weighted values.
struct AttentionPartials {
  float* data;
  int64_t stride;  // floats from one part to the next
  std::atomic<int32_t>* unfinished;  // by split
};

struct AttentionKernels {
  // Bytes that `attend` wants for itself.
  int64_t (*scratch_bytes)(const interposer_attention_plan&);
  void (*store)(const interposer_attention_call&, const AttentionWrite&, int64_t head);
  // The item after this one, or null, has its first keys fetched ahead.
  void (*attend)(const interposer_attention_call&, const AttentionItem&, const AttentionItem* next,
                 const AttentionPartials&, char* scratch);
};

inline interposer_kv_cache cache_of(const interposer_attention_call& call) {
  const interposer_attention_step& step = call.plan->step;
  return {call.cache,       call.head_stride, call.page_stride,
          step.page_tokens, step.head_size,   step.cache_type};
}
