// Plans steps, selects the level's kernels, and distributes blocks of queries and keys over
// threads.

#include "attention.h"

#include <new>

#include "../levels.h"
#include "../pool.h"
#include "../vectors.h"

INTERPOSER_FAMILY(AttentionKernels, attention, INTERPOSER_LEVELS)

namespace {

// Rows of a query block: queries and results fit in a core's cache next to the keys.
constexpr int64_t kBlockRows = 96;
// Keys per part (split-K). Parts begin at fixed positions, so that a sequence gets the same bits
// with any number of threads and in any batch.
constexpr int64_t kPartKeys = 512;
// Tokens stored per task: whole tiles, because tokens share words.
constexpr int64_t kWriteTokens = 4 * kTile;

constexpr int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Counts items, and also writes them if memory is given.
struct Planner {
  const interposer_attention_step& step;
  AttentionItem* items;
  AttentionWrite* writes;
  interposer_attention_plan totals = {};

  int64_t first_seen(int64_t position) const {
    return step.window_tokens ? larger(position - step.window_tokens + 1, 0) : 0;
  }

  void add_block(int64_t sequence, int64_t first, int64_t count, int64_t before, bool split) {
    const int64_t group = step.num_heads / step.num_kv_heads;
    const int64_t begin = first_seen(before + first), end = before + first + count;
    const int64_t first_part = split ? begin / kPartKeys : 0;
    const int64_t parts = split ? (end - 1) / kPartKeys - first_part + 1 : 1;
    totals.most_rows = larger(totals.most_rows, count * group);
    if (parts > 1) totals.most_split_rows = larger(totals.most_split_rows, count * group);
    for (int64_t head = 0; head < step.num_kv_heads; ++head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t at = (first_part + part) * kPartKeys;
        AttentionItem item = {};
        item.sequence = int32_t(sequence), item.head = int32_t(head);
        item.first_token = int32_t(first), item.num_tokens = int32_t(count);
        item.first_key = int32_t(part ? at : begin);
        item.end_key = int32_t(part + 1 < parts ? at + kPartKeys : end);
        item.part = int32_t(part), item.num_parts = int32_t(parts);
        item.first_partial = int32_t(totals.num_partials);
        item.split = int32_t(totals.num_splits);
        if (items) items[totals.num_items] = item;
        ++totals.num_items;
      }
      if (parts > 1) totals.num_partials += parts, ++totals.num_splits;
    }
  }

  void add_writes(int64_t sequence, int64_t num_tokens, int64_t before) {
    for (int64_t token = 0; token < num_tokens;) {
      const int64_t end = (before + token) / kWriteTokens * kWriteTokens + kWriteTokens - before;
      const int64_t count = smaller(end, num_tokens) - token;
      if (writes) {
        writes[totals.num_writes] = {int32_t(sequence), int32_t(token), int32_t(count), 0};
      }
      ++totals.num_writes;
      token += count;
    }
  }

  void run() {
    const int64_t group = step.num_heads / step.num_kv_heads;
    const int64_t block = larger(kBlockRows / group, 1);
    // Blocks with many keys first, so that the last ones to start are short.
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int64_t num_tokens = step.query_starts[sequence + 1] - step.query_starts[sequence];
        const int64_t before = step.seq_lens[sequence] - num_tokens;
        if (num_tokens == 0 || (num_tokens > block) != (pass == 0)) continue;
        if (pass == 1) {
          add_block(sequence, 0, num_tokens, before, true);
          continue;
        }
        add_writes(sequence, num_tokens, before);
        for (int64_t first = (num_tokens - 1) / block * block; first >= 0; first -= block) {
          add_block(sequence, first, smaller(block, num_tokens - first), before, false);
        }
      }
    }
  }
};

struct Job {
  const interposer_attention_call* call;
  const AttentionKernels* kernels;
  AttentionPartials partials;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
};

template <class T>
const T* list_at(const interposer_attention_plan& plan, int64_t offset) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(&plan) + offset);
}

// Dynamic scheduling: the result of an item does not depend on its thread.
void store_some(void* argument, int, int) {
  Job& job = *static_cast<Job*>(argument);
  const interposer_attention_plan& plan = *job.call->plan;
  const AttentionWrite* writes = list_at<AttentionWrite>(plan, plan.writes_at);
  const int64_t heads = plan.step.num_kv_heads;
  for (;;) {
    const int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= plan.num_writes * heads) return;
    job.kernels->store(*job.call, writes[task / heads], task % heads);
  }
}

void attend_some(void* argument, int, int) {
  Job& job = *static_cast<Job*>(argument);
  const interposer_attention_plan& plan = *job.call->plan;
  const AttentionItem* items = list_at<AttentionItem>(plan, plan.items_at);
  char* scratch =
      static_cast<char*>(interposer_scratch(kForRows, job.kernels->scratch_bytes(plan)));
  if (scratch == nullptr) {
    job.failed = true;
    return;
  }
  const auto take = [&]() -> const AttentionItem* {
    const int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    return task < plan.num_items ? items + task : nullptr;
  };
  for (const AttentionItem* item = take(); item;) {
    const AttentionItem* next = take();
    job.kernels->attend(*job.call, *item, next, job.partials, scratch);
    item = next;
  }
}

}  // namespace

extern "C" {

int64_t interposer_plan_attention(const interposer_attention_step* step, void* memory) {
  Planner counted{*step, nullptr, nullptr};
  counted.run();
  interposer_attention_plan plan = counted.totals;
  plan.step = *step;
  plan.items_at = round_up(sizeof plan, 64);
  plan.writes_at = plan.items_at + round_up(plan.num_items * int64_t(sizeof(AttentionItem)), 64);
  plan.bytes = plan.writes_at + round_up(plan.num_writes * int64_t(sizeof(AttentionWrite)), 64);
  if (memory == nullptr) return plan.bytes;
  std::memcpy(memory, &plan, sizeof plan);
  char* bytes = static_cast<char*>(memory);
  Planner written{*step, reinterpret_cast<AttentionItem*>(bytes + plan.items_at),
                  reinterpret_cast<AttentionWrite*>(bytes + plan.writes_at)};
  written.run();
  return plan.bytes;
}

int32_t interposer_attention(const interposer_attention_call* call) {
  const interposer_attention_plan& plan = *call->plan;
  const AttentionKernels* chosen = kernels();
  if (chosen == nullptr) return kNoAttention;
  if (plan.num_items == 0) return kAttended;
  Job job{call, chosen, {}};
  if (plan.num_splits) {
    job.partials.stride = round_up(plan.most_split_rows * (plan.step.head_size + 2), 16);
    const int64_t bytes = plan.num_partials * job.partials.stride * 4;
    const int64_t counts = plan.num_splits * int64_t(sizeof(std::atomic<int32_t>));
    char* memory = static_cast<char*>(interposer_scratch(kForResults, bytes + counts));
    if (memory == nullptr) return kNoAttentionMemory;
    job.partials.data = reinterpret_cast<float*>(memory);
    job.partials.unfinished = reinterpret_cast<std::atomic<int32_t>*>(memory + bytes);
    const AttentionItem* items = list_at<AttentionItem>(plan, plan.items_at);
    for (int64_t i = 0; i < plan.num_items; ++i) {
      if (items[i].num_parts > 1 && items[i].part == 0) {
        new (&job.partials.unfinished[items[i].split]) std::atomic<int32_t>(items[i].num_parts);
      }
    }
  }
  const int64_t threads = interposer_num_threads();
  if (plan.num_writes) {
    const int64_t tasks = plan.num_writes * plan.step.num_kv_heads;
    interposer_parallel(store_some, &job, int(smaller(threads, tasks)));
    job.next = 0;
  }
  interposer_parallel(attend_some, &job, int(smaller(threads, plan.num_items)));
  return job.failed ? kNoAttentionMemory : kAttended;
}
}
