// Divides calls into blocks of queries and parts of keys, and distributes them over threads.

#include "dense.h"

#include <new>

#include "../levels.h"
#include "../pool.h"
#include "../vectors.h"

INTERPOSER_FAMILY(DenseKernels, dense, INTERPOSER_BFLOAT16_LEVELS)

namespace {

// Rows per block: keys are reordered once for all of them.
constexpr int64_t kBlockRows = 128;
// Keys per part (split-K), and the number of tokens from which the keys of a sequence are split.
// Parts depend only on the sequence, so that it gets the same bits with any number of threads and
// in any batch.
constexpr int64_t kPartKeys = 512;
constexpr int64_t kSplitTokens = 16;

constexpr int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Counts items, and also writes them if memory is given.
struct Planner {
  const interposer_dense_call& call;
  AttentionItem* items;
  int64_t num_items = 0, num_partials = 0, num_splits = 0, most_rows = 0, most_split_rows = 0;

  void add_block(int64_t sequence, int64_t first, int64_t count, bool split) {
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t num_keys = dense_keys(call, sequence);
    const int64_t num_tokens = call.query_starts[sequence + 1] - call.query_starts[sequence];
    const int64_t oldest = num_keys - num_tokens + first, newest = oldest + count - 1;
    int64_t begin = 0, end = num_keys;
    if (call.causal) end = smaller(end, newest + 1);
    if (call.window_tokens) {
      begin = larger(begin, oldest - call.window_tokens + 1);
      end = smaller(end, newest + call.window_tokens);
    }
    end = larger(end, 0), begin = smaller(begin, end);
    const int64_t first_part = split ? begin / kPartKeys : 0;
    const int64_t parts = split && end > begin ? (end - 1) / kPartKeys - first_part + 1 : 1;
    most_rows = larger(most_rows, count * group);
    if (parts > 1) most_split_rows = larger(most_split_rows, count * group);
    for (int64_t head = 0; head < call.num_kv_heads; ++head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t at = (first_part + part) * kPartKeys;
        AttentionItem item = {};
        item.sequence = int32_t(sequence), item.head = int32_t(head);
        item.first_token = int32_t(first), item.num_tokens = int32_t(count);
        item.first_key = int32_t(part ? at : begin);
        item.end_key = int32_t(part + 1 < parts ? at + kPartKeys : end);
        item.part = int32_t(part), item.num_parts = int32_t(parts);
        item.first_partial = int32_t(num_partials), item.split = int32_t(num_splits);
        if (items) items[num_items] = item;
        ++num_items;
      }
      if (parts > 1) num_partials += parts, ++num_splits;
    }
  }

  void run() {
    const int64_t block = larger(kBlockRows * call.num_kv_heads / call.num_heads, 1);
    for (int64_t sequence = 0; sequence < call.num_sequences; ++sequence) {
      const int64_t tokens = call.query_starts[sequence + 1] - call.query_starts[sequence];
      // Blocks with most visible keys first, so that the last ones to start are short.
      for (int64_t first = (tokens - 1) / block * block; tokens && first >= 0; first -= block) {
        add_block(sequence, first, smaller(block, tokens - first), tokens <= kSplitTokens);
      }
    }
  }
};

struct Job {
  const interposer_dense_call* call;
  const DenseKernels* kernels;
  const Planner* plan;
  AttentionPartials partials;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
};

// Dynamic scheduling: the result of an item does not depend on its thread.
void attend_some(void* argument, int, int) {
  Job& job = *static_cast<Job*>(argument);
  const int64_t most = job.plan->most_rows;
  char* scratch = static_cast<char*>(
      interposer_scratch(kForRows, job.kernels->scratch_bytes(*job.call, most)));
  if (scratch == nullptr) {
    job.failed = true;
    return;
  }
  for (;;) {
    const int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.plan->num_items) return;
    job.kernels->attend(*job.call, most, job.plan->items[task], job.partials, scratch);
  }
}

struct StoreJob {
  const interposer_dense_call* call;
  const interposer_dense_store* store;
  const DenseKernels* kernels;
  std::atomic<int64_t> next{0};
};

void store_some(void* argument, int, int) {
  StoreJob& job = *static_cast<StoreJob*>(argument);
  for (;;) {
    const int64_t token = job.next.fetch_add(1, std::memory_order_relaxed);
    if (token >= job.store->num_tokens) return;
    job.kernels->store(*job.call, *job.store, token);
  }
}

}  // namespace

extern "C" int32_t interposer_dense_write(const interposer_dense_call* call,
                                          const interposer_dense_store* store) {
  const DenseKernels* chosen = kernels();
  if (chosen == nullptr) return kNoAttention;
  // Tokens for which waking another thread pays.
  constexpr int64_t kThreadTokens = 16;
  StoreJob job{call, store, chosen};
  const int64_t wanted = larger(store->num_tokens / kThreadTokens, 1);
  interposer_parallel(store_some, &job, int(smaller(interposer_num_threads(), wanted)));
  return kAttended;
}

extern "C" int32_t interposer_dense_attention(const interposer_dense_call* call) {
  const DenseKernels* chosen = kernels();
  if (chosen == nullptr) return kNoAttention;
  Planner counted{*call, nullptr};
  counted.run();
  if (counted.num_items == 0) return kAttended;
  const int64_t item_bytes = round_up(counted.num_items * int64_t(sizeof(AttentionItem)), 64);
  const int64_t stride = round_up(
      counted.most_split_rows * (round_up(call->value_size, kLanes) + 2), kLanes);
  const int64_t part_bytes = counted.num_partials * stride * 4;
  const int64_t counts = counted.num_splits * int64_t(sizeof(std::atomic<int32_t>));
  char* memory =
      static_cast<char*>(interposer_scratch(kForResults, item_bytes + part_bytes + counts));
  if (memory == nullptr) return kNoAttentionMemory;
  Planner plan{*call, reinterpret_cast<AttentionItem*>(memory)};
  plan.run();
  Job job{call, chosen, &plan, {}};
  job.partials.data = reinterpret_cast<float*>(memory + item_bytes);
  job.partials.stride = stride;
  job.partials.unfinished =
      reinterpret_cast<std::atomic<int32_t>*>(memory + item_bytes + part_bytes);
  for (int64_t i = 0; i < plan.num_items; ++i) {
    const AttentionItem& item = plan.items[i];
    if (item.num_parts > 1 && item.part == 0) {
      new (&job.partials.unfinished[item.split]) std::atomic<int32_t>(item.num_parts);
    }
  }
  interposer_parallel(attend_some, &job, int(smaller(interposer_num_threads(), plan.num_items)));
  return job.failed ? kNoAttentionMemory : kAttended;
}
