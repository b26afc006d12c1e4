// Groups tokens by expert, and distributes experts and blocks of outputs over threads.

#include "experts.h"

#include <atomic>
#include <cstring>

#include "../levels.h"
#include "../pool.h"
#include "../vectors.h"

namespace of_experts {
INTERPOSER_FAMILY(ExpertsKernels, experts, INTERPOSER_BFLOAT16_LEVELS)
}
namespace of_linear {
INTERPOSER_FAMILY(LinearKernels, linear, INTERPOSER_LEVELS)
}

namespace {

// Up to these numbers of slots and elements, the calling thread works alone.
constexpr int64_t kFewSlots = 8, kFewElements = 1 << 15;
// Rows of an expert that are multiplied by a block at a time, so that they stay in a cache.
constexpr int64_t kSegmentRows = 128;
// Reading a block takes about as long as multiplying it by this number of rows.
constexpr int64_t kRowsOfReading = 16;
// Largest size of intermediate results; larger batches are processed in chunks of tokens.
constexpr int64_t kMostBytes = 128 << 20;

// Rows of one expert.
struct Group {
  interposer_product gate, up, down;  // `rows` of a matmul decides how rows are prepared
  int64_t first, count;               // range of slots in order of experts
  int64_t x_bytes, h_bytes;           // bytes of a prepared row, 0 if rows are read in place
  char *x, *h;                        // prepared rows
};

struct Segment {
  const Group* group;
  int64_t first, count;  // rows of the group
};

struct Job {
  const interposer_mixture_call* call;
  const ExpertsKernels* kernels;
  const LinearKernels* linear;
  int64_t hidden, inner, first_token, tokens;

  Group* groups;
  Segment* segments;
  int64_t num_groups, num_segments, num_rows;
  int32_t* tokens_of;  // [rows], token of each row
  int32_t* places;     // [tokens, K], row of each slot, or -1
  char* h;             // [rows, I] in the type of x
  float* returned;     // [rows, H]
  std::atomic<bool> failed;
};

// Bump allocator over a buffer; without a buffer, it only counts bytes.
class Parts {
 public:
  // Null: only count the bytes.
  explicit Parts(char* memory) : start_(reinterpret_cast<uintptr_t>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    const uintptr_t taken = start_ + uintptr_t(used_);
    used_ += round_up(count * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(taken);
  }

  int64_t used() const { return used_; }

 private:
  uintptr_t start_;
  int64_t used_ = 0;
};

const interposer_packed* gate_of(const interposer_mixture& mixture, int64_t expert) {
  const char* first = reinterpret_cast<const char*>(&mixture) + sizeof mixture;
  return reinterpret_cast<const interposer_packed*>(first + expert * mixture.expert_bytes);
}

const interposer_packed* behind(const interposer_packed* packed) {
  return at<interposer_packed>(packed, packed->bytes);
}

// Checks the first expert; all experts have its sizes and format.
bool is_sound(const interposer_mixture& mixture) {
  const interposer_packed* gate = gate_of(mixture, 0);
  const interposer_packed* up = behind(gate);
  if (gate->magic != kMagic || up->magic != kMagic) return false;
  const interposer_packed* down = behind(up);
  return down->magic == kMagic && down->inputs == gate->outputs && up->outputs == gate->outputs &&
         down->outputs == gate->inputs && up->inputs == gate->inputs;
}

// Each task, of `blocks` per segment, belongs to one thread. Tasks of a segment are consecutive, so
// that weights are read sequentially.
template <class Work>
void share_out(const Job& job, int64_t blocks, int thread, int threads, Work work) {
  int64_t total = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    total += (kRowsOfReading + job.segments[i].count) * blocks;
  }
  const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
  int64_t start = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    const int64_t cost = kRowsOfReading + job.segments[i].count;
    const auto first_from = [&](int64_t bound) {
      const int64_t block = bound > start ? (bound - start + cost - 1) / cost : 0;
      return block < blocks ? block : blocks;
    };
    const int64_t first = first_from(begin), last = first_from(end);
    if (first < last) work(job.segments[i], first, last);
    start += cost * blocks;
  }
}

Prepared rows_of(const char* data, int64_t prepared_bytes, int64_t plain_bytes, int64_t first) {
  Prepared prepared = {};
  prepared.stride = prepared_bytes ? prepared_bytes : plain_bytes;
  prepared.data = data + first * prepared.stride;
  prepared.num_groups = 1;  // of int8 sums; floats have none
  return prepared;
}

void prepare_one(const LinearKernels& linear, interposer_product product, const void* row,
                 char* to, int64_t prepared_bytes, int64_t index) {
  product.x = row;
  product.x_stride = 0;
  linear.prepare_rows(product, to, prepared_bytes, nullptr, index, index + 1);
}

// Visit rows `first` to `last` with their groups.
template <class Work>
void each_row(const Job& job, int64_t first, int64_t last, Work work) {
  for (int64_t i = 0; i < job.num_groups; ++i) {
    const Group& group = job.groups[i];
    const int64_t begin = first > group.first ? first : group.first;
    const int64_t end = last < group.first + group.count ? last : group.first + group.count;
    for (int64_t row = begin; row < end; ++row) work(group, row);
  }
}

void gather_some(void* argument, int thread, int threads) {
  const Job& job = *static_cast<Job*>(argument);
  const interposer_mixture_call& call = *job.call;
  const int64_t plain_bytes = job.hidden * size_of(call.type);
  const auto gather = [&](const Group& group, int64_t row) {
    const char* from =
        static_cast<const char*>(call.x) + job.tokens_of[row] * call.x_stride * size_of(call.type);
    if (group.x_bytes) {
      prepare_one(*job.linear, group.gate, from, group.x, group.x_bytes, row - group.first);
    } else {
      std::memcpy(group.x + (row - group.first) * plain_bytes, from, size_t(plain_bytes));
    }
  };
  each_row(job, job.num_rows * thread / threads, job.num_rows * (thread + 1) / threads, gather);
}

// Offset `memory` so that outputs of a block are written to its start.
float* before(float* memory, int64_t block) {
  const uintptr_t skipped = static_cast<uintptr_t>(block * kBlock) * sizeof(float);
  return reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(memory) - skipped);
}

void gate_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const int32_t type = job.call->type;
  float* memory =
      static_cast<float*>(interposer_scratch(kForTiles, 2 * kSegmentRows * kBlock * 4));
  if (memory == nullptr) {
    job.failed = true;
    return;
  }
  float* const acted_on = memory + kSegmentRows * kBlock;
  const auto multiply = [&](const Segment& segment, int64_t first, int64_t last) {
    const Group& group = *segment.group;
    const Prepared x =
        rows_of(group.x, group.x_bytes, job.hidden * size_of(type), segment.first);
    interposer_product gate = group.gate, up = group.up;
    // As many blocks as fit in memory: with few rows, weights are read in long streams.
    const int64_t most = kSegmentRows / segment.count;
    for (int64_t block = first; block < last; block += most) {
      const int64_t count = last - block < most ? last - block : most;
      gate.out = before(memory, block);
      up.out = before(acted_on, block);
      gate.out_stride = up.out_stride = count * kBlock;
      if (!job.linear->multiply(gate, x, block, block + count, 0, segment.count) ||
          !job.linear->multiply(up, x, block, block + count, 0, segment.count)) {
        job.failed = true;
        return;
      }
      const int64_t row = group.first + segment.first, rest = job.inner - block * kBlock;
      GatedTile tile = {};
      tile.gate = memory;
      tile.up = acted_on;
      tile.out = job.h + (row * job.inner + block * kBlock) * size_of(type);
      tile.out_type = type;
      tile.activation = job.call->activation;
      tile.rows = segment.count;
      tile.columns = rest < count * kBlock ? rest : count * kBlock;
      tile.stride = count * kBlock;
      tile.out_stride = job.inner;
      job.kernels->activate(tile);
    }
  };
  share_out(job, num_blocks(job.inner), thread, threads, multiply);
}

void prepare_some(void* argument, int thread, int threads) {
  const Job& job = *static_cast<Job*>(argument);
  const auto prepare = [&](const Group& group, int64_t row) {
    if (group.h_bytes == 0) return;
    const char* from = job.h + row * job.inner * size_of(job.call->type);
    prepare_one(*job.linear, group.down, from, group.h, group.h_bytes, row - group.first);
  };
  each_row(job, job.num_rows * thread / threads, job.num_rows * (thread + 1) / threads, prepare);
}

void down_some(void* argument, int thread, int threads) {
  Job& job = *static_cast<Job*>(argument);
  const auto multiply = [&](const Segment& segment, int64_t first, int64_t last) {
    const Group& group = *segment.group;
    const int64_t plain_bytes = job.inner * size_of(job.call->type);
    const Prepared h = rows_of(group.h, group.h_bytes, plain_bytes, segment.first);
    interposer_product down = group.down;
    down.out = job.returned + (group.first + segment.first) * job.hidden;
    if (!job.linear->multiply(down, h, first, last, 0, segment.count)) job.failed = true;
  };
  share_out(job, num_blocks(job.hidden), thread, threads, multiply);
}

void add_up_some(void* argument, int thread, int threads) {
  const Job& job = *static_cast<Job*>(argument);
  const Returned returned = returned_to(*job.call, job.first_token, job.hidden,
                                        size_of(job.call->type), job.returned, job.places);
  job.kernels->add_up(returned, job.tokens * thread / threads, job.tokens * (thread + 1) / threads);
}

interposer_product product_by(const interposer_packed* weight, int32_t type, int64_t rows,
                              int64_t out_stride) {
  interposer_product product = {};
  product.weight = weight;
  product.x_type = type;
  product.out_type = kFloat32;
  product.rows = rows;
  product.x_stride = weight->inputs;
  product.out_stride = out_stride;
  return product;
}

// Approximate bytes per slot with many slots.
int64_t slot_bytes(const Job& job) {
  const interposer_mixture_call& call = *job.call;
  const interposer_packed* gate = gate_of(*call.mixture, 0);
  const interposer_product first = product_by(gate, call.type, call.tokens, 0);
  const interposer_product second =
      product_by(behind(behind(gate)), call.type, call.tokens, job.hidden);
  const int64_t plain = (job.hidden + job.inner) * size_of(call.type) + job.hidden * 4;
  return plain + job.linear->prepared_row_bytes(first) + job.linear->prepared_row_bytes(second);
}

// Compute the groups, and the row of each slot. Returns false for an expert id out of range.
bool group_slots(Job& job, int64_t* starts) {
  const interposer_mixture_call& call = *job.call;
  const int64_t experts = call.mixture->experts;
  const auto expert_of = [&](int64_t token, int64_t k) {
    return int64_t(call.expert_ids[(job.first_token + token) * call.id_stride + k]);
  };
  std::memset(starts, 0, size_t(experts) * sizeof *starts);
  for (int64_t token = 0; token < job.tokens; ++token) {
    for (int64_t k = 0; k < call.top_k; ++k) {
      const int64_t expert = expert_of(token, k);
      if (expert >= experts) return false;
      if (expert >= 0) ++starts[expert];
    }
  }
  job.num_groups = job.num_segments = job.num_rows = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t count = starts[expert];
    starts[expert] = job.num_rows;
    if (count == 0) continue;
    Group& group = job.groups[job.num_groups++];
    const interposer_packed* gate = gate_of(*call.mixture, expert);
    const interposer_packed* up = behind(gate);
    group = {};
    group.gate = product_by(gate, call.type, count, 0);
    group.up = product_by(up, call.type, count, 0);
    group.down = product_by(behind(up), call.type, count, job.hidden);
    group.first = job.num_rows;
    group.count = count;
    group.x_bytes = job.linear->prepared_row_bytes(group.gate);
    group.h_bytes = job.linear->prepared_row_bytes(group.down);
    for (int64_t row = 0; row < count; row += kSegmentRows) {
      const int64_t rest = count - row;
      job.segments[job.num_segments++] = {&group, row, rest < kSegmentRows ? rest : kSegmentRows};
    }
    job.num_rows += count;
  }
  for (int64_t token = 0; token < job.tokens; ++token) {
    for (int64_t k = 0; k < call.top_k; ++k) {
      const int64_t expert = expert_of(token, k);
      int32_t& place = job.places[token * call.top_k + k];
      place = expert < 0 ? -1 : int32_t(starts[expert]++);
      if (expert >= 0) job.tokens_of[place] = int32_t(token + job.first_token);
    }
  }
  return true;
}

// Compute `tokens` tokens from `first_token` on.
int32_t run(Job& job) {
  const interposer_mixture_call& call = *job.call;
  const int64_t slots = job.tokens * call.top_k, experts = call.mixture->experts;
  const int64_t most_groups = slots < experts ? slots : experts;
  const int64_t most_segments = most_groups + slots / kSegmentRows;
  const int size = size_of(call.type);
  int64_t* starts = nullptr;
  const auto lay_out = [&](char* memory) {
    Parts parts(memory);
    starts = parts.take<int64_t>(experts);
    job.groups = parts.take<Group>(most_groups);
    job.segments = parts.take<Segment>(most_segments);
    job.places = parts.take<int32_t>(slots);
    job.tokens_of = parts.take<int32_t>(slots);
    return parts.used();
  };
  char* memory = static_cast<char*>(interposer_scratch(kForSlots, lay_out(nullptr)));
  if (memory == nullptr) return kNoMemory;
  lay_out(memory);
  if (!group_slots(job, starts)) return kMismatch;

  bool prepares = false;
  const auto lay_out_rows = [&](char* rows) {
    Parts parts(rows);
    job.returned = parts.take<float>(job.num_rows * job.hidden);
    job.h = parts.take<char>(job.num_rows * job.inner * size);
    for (int64_t i = 0; i < job.num_groups; ++i) {
      Group& group = job.groups[i];
      group.x = parts.take<char>(group.count * (group.x_bytes ? group.x_bytes : job.hidden * size));
      group.h = group.h_bytes ? parts.take<char>(group.count * group.h_bytes)
                              : job.h + group.first * job.inner * size;
      prepares |= group.h_bytes != 0;
    }
    return parts.used();
  };
  char* rows = static_cast<char*>(interposer_scratch(kForBlocks, lay_out_rows(nullptr) + 64));
  if (rows == nullptr) return kNoMemory;
  lay_out_rows(rows);

  const int threads = interposer_num_threads();
  const int few = job.num_rows <= kFewSlots ? 1 : threads;
  interposer_parallel(gather_some, &job, few);
  interposer_parallel(gate_some, &job, threads);
  if (prepares) interposer_parallel(prepare_some, &job, few);
  interposer_parallel(down_some, &job, threads);
  interposer_parallel(add_up_some, &job, slots * job.hidden <= kFewElements ? 1 : threads);
  return job.failed ? kNoMemory : kDone;
}

}  // namespace

extern "C" {

void interposer_begin_mixture(int64_t experts, int64_t expert_bytes, void* memory) {
  interposer_mixture mixture = {};
  mixture.magic = kMixtureMagic;
  mixture.experts = experts;
  mixture.expert_bytes = expert_bytes;
  std::memcpy(memory, &mixture, sizeof mixture);
}

int32_t interposer_experts(const interposer_mixture_call* call) {
  const interposer_mixture& mixture = *call->mixture;
  if (mixture.magic != kMixtureMagic || !is_sound(mixture)) return kNotPacked;
  Job job = {};
  job.call = call;
  job.kernels = of_experts::kernels();
  job.linear = of_linear::kernels();
  if (job.kernels == nullptr || job.linear == nullptr) return kNoKernels;
  job.hidden = gate_of(mixture, 0)->inputs;
  job.inner = gate_of(mixture, 0)->outputs;
  const int64_t most = kMostBytes / (slot_bytes(job) * call->top_k) + 1;
  for (int64_t first = 0; first < call->tokens; first += most) {
    job.first_token = first;
    job.tokens = call->tokens - first < most ? call->tokens - first : most;
    const int32_t failure = run(job);
    if (failure) return failure;
  }
  return kDone;
}
}
