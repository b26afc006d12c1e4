#include "blocks.h"

#include <cstring>

#include "../elementwise/elementwise.h"
#include "../pool.h"
#include "../vectors.h"

namespace {

// Rows per iteration, so that intermediate results stay in a cache.
constexpr int64_t kMostRows = 256;

// Order of projections in `codings`, `scales` and `low_rank`.
enum Place { kHeads, kOutput, kGateUp, kDown };

char* moved(void* data, int32_t type, int64_t elements) {
  return static_cast<char*>(data) + elements * size_of(type);
}

const char* moved(const void* data, int32_t type, int64_t elements) {
  return static_cast<const char*>(data) + elements * size_of(type);
}

// Compute a matmul with a contiguous result.
int32_t multiply(const interposer_factor& factor, const void* x, int32_t type, int64_t rows,
                 int64_t x_stride, void* out, int32_t out_type) {
  const int64_t inputs = factor.weight->inputs;
  interposer_product product = {};
  product.weight = factor.weight;
  product.x = x;
  product.x_type = type;
  product.rows = rows;
  product.x_stride = x_stride;
  product.out = out;
  product.out_type = out_type;
  product.out_stride = factor.weight->outputs;
  if (factor.coding.type != kNone) {
    const int32_t codes = factor.coding.type == kInt8 ? kInt8 : kBFloat16;
    const int64_t group = factor.coding.group ? factor.coding.group : inputs;
    const int64_t groups = inputs / group;
    if (groups * group != inputs) return kMismatch;
    const int64_t bytes = round_up(rows * inputs * size_of(codes), 64);
    char* memory = static_cast<char*>(interposer_scratch(kForCodes, bytes + rows * groups * 4));
    if (memory == nullptr) return kNoMemory;
    interposer_coded coded = {};
    coded.x = x;
    coded.codes = memory;
    coded.scales = reinterpret_cast<float*>(memory + bytes);
    coded.given = factor.scale;
    coded.type = type;
    coded.code_type = codes;
    coded.limit = static_cast<float>(factor.coding.limit);
    coded.powers = static_cast<int32_t>(factor.coding.powers);
    coded.rows = {rows, groups, group, x_stride, group};
    const int32_t failure = interposer_code(&coded);
    if (failure) return failure;
    product.x = memory;
    product.x_type = codes;
    product.x_stride = inputs;
    product.x_scales = factor.scale ? factor.scale : coded.scales;
    product.x_scale_stride = factor.scale ? 0 : groups;
  }
  return interposer_linear(&product);
}

// Compute a matmul and add the LoRA of the rows.
int32_t multiply(const interposer_factor& factor, const interposer_addition& added, int64_t first,
                 const void* x, int32_t type, int64_t rows, int64_t x_stride, void* out,
                 int32_t out_type) {
  const int32_t failure = multiply(factor, x, type, rows, x_stride, out, out_type);
  if (failure || added.low_rank == nullptr) return failure;
  if (added.low_rank->inputs != factor.weight->inputs) return kMismatch;
  interposer_low_rank_call call = {};
  call.low_rank = added.low_rank;
  call.ids = added.ids + first;
  call.x = x;
  call.y = out;
  call.y_type = out_type;
  call.rows = rows, call.x_stride = x_stride, call.y_stride = factor.weight->outputs;
  return interposer_add_low_rank(&call);
}

int32_t turn(const interposer_heads_call& call, int64_t first, int64_t count, const void* weight) {
  const int64_t width = (call.heads + 2 * call.kv_heads) * call.size;
  interposer_heads heads = {};
  heads.x = heads.out = moved(call.out, call.type, first * call.size);
  heads.weight = weight;
  heads.cos = call.cos;
  heads.sin = call.sin;
  heads.type = call.type;
  heads.eps = call.eps;
  heads.half = call.half;
  heads.rows = {call.rows, count, call.size, width, call.size};
  heads.out_stride = width;
  return interposer_turn_heads(&heads);
}

int32_t project_heads(const interposer_heads_call& call) {
  const int64_t width = (call.heads + 2 * call.kv_heads) * call.size;
  if (call.weight.weight->outputs != width) return kMismatch;
  const int32_t failure =
      multiply(call.weight, call.added, 0, call.x, call.type, call.rows, call.x_stride, call.out,
               call.type);
  if (failure) return failure;
  if (call.cos == nullptr && call.query_weight == nullptr) return kDone;
  const int32_t turned = turn(call, 0, call.heads, call.query_weight);
  return turned ? turned : turn(call, call.heads, call.kv_heads, call.key_weight);
}

int32_t mlp(const interposer_mlp_call& call) {
  const int64_t width = call.gate_up.weight->outputs, inner = width / 2;
  if (call.down.weight->inputs != inner) return kMismatch;
  if (call.rows == 0) return kDone;
  const int64_t most = call.rows < kMostRows ? call.rows : kMostRows;
  const int64_t between = round_up(most * width * 4, 64);
  char* memory = static_cast<char*>(
      interposer_scratch(kForBlocks, between + most * inner * size_of(call.type)));
  if (memory == nullptr) return kNoMemory;
  for (int64_t first = 0; first < call.rows; first += most) {
    const int64_t rows = call.rows - first < most ? call.rows - first : most;
    int32_t failure = multiply(call.gate_up, call.added[0], first,
                               moved(call.x, call.type, first * call.x_stride), call.type, rows,
                               call.x_stride, memory, kFloat32);
    if (failure) return failure;

    interposer_gated gated = {};
    gated.gate = memory;
    gated.up = memory + inner * 4;
    gated.out = memory + between;
    gated.type = kFloat32;
    gated.out_type = call.type;
    gated.activation = call.activation;
    gated.rows = {rows, 1, inner, width, width};
    failure = interposer_gate(&gated);
    if (failure) return failure;

    failure = multiply(call.down, call.added[1], first, memory + between, call.type, rows, inner,
                       moved(call.out, call.out_type, first * call.down.weight->outputs),
                       call.out_type);
    if (failure) return failure;
  }
  return kDone;
}

int32_t lost(int32_t code) { return code ? kLost + code : int32_t(kDone); }

// Normalize rows of the residual, after adding x if `total` is given. If x is a summand of this
// rank, x is first summed over the ranks in place.
int32_t normalise(const interposer_block_call& call, const void* weight, double eps, const void* x,
                  bool is_summand, const float* residual, float* total, void* out, int64_t rows) {
  const interposer_block& block = *call.block;
  interposer_norm norm = {};
  norm.x = x;
  norm.weight = weight;
  norm.out = out;
  norm.type = static_cast<int32_t>(block.type);
  norm.rows = {rows, 1, block.hidden, block.hidden, block.hidden};
  if (total) {
    norm.residual = residual;
    norm.total = total;
    norm.residual_type = kFloat32;
  }
  norm.eps = static_cast<float>(eps);
  if (!is_summand) return interposer_normalise(&norm);
  // Not const in fact: the memory was written by another block or by this one.
  return lost(interposer_all_reduce_norm(call.ranks, const_cast<void*>(x), &norm));
}

void gather(const void* from, const int64_t* rows, int64_t count, int64_t bytes, void* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(to) + i * bytes,
                static_cast<const char*>(from) + rows[i] * bytes, static_cast<size_t>(bytes));
  }
}

interposer_factor factor_of(const interposer_block_call& call, const interposer_packed* weight,
                            Place place) {
  return {weight, call.block->codings[place], call.scales[place]};
}

// Compute a block. `sums`: x is a summand, reduced first. `leaves`: the output stays a summand for
// the next block.
int32_t decoder_block(const interposer_block_call& call, bool sums, bool leaves) {
  const interposer_block& block = *call.block;
  const int32_t type = static_cast<int32_t>(block.type);
  const int64_t size = size_of(type), hidden = block.hidden, width = block.heads * block.size;
  const int64_t merged = width + 2 * block.kv_heads * block.size;
  const interposer_factor output = factor_of(call, call.output, kOutput);
  if (call.heads->inputs != hidden || call.output->inputs != width ||
      call.output->outputs != hidden) {
    return kMismatch;
  }
  if (call.gate_up && (call.gate_up->inputs != hidden || call.down->outputs != hidden)) {
    return kMismatch;
  }
  const bool some = call.num_chosen >= 0;
  // Double buffers: a step reads from one half and writes to the other. After them comes the
  // residual of all rows if only some rows are chosen.
  const int64_t first_bytes = round_up(call.rows * (hidden > width ? hidden : width) * size, 64);
  const int64_t second_bytes = round_up(call.rows * (merged > hidden ? merged : hidden) * size, 64);
  const int64_t stream_bytes = some && call.adds ? call.rows * hidden * 4 : 0;
  char* first =
      static_cast<char*>(interposer_scratch(kForLayers, first_bytes + second_bytes + stream_bytes));
  if (first == nullptr) return kNoMemory;
  char* second = first + first_bytes;

  const float* stream = call.residual;
  float* sum = nullptr;
  if (call.adds) {
    sum = some ? reinterpret_cast<float*>(second + second_bytes) : call.total;
    stream = sum;
  }
  int32_t failure = normalise(call, call.input_weight, block.input_eps, call.x, sums, call.residual,
                              sum, first, call.rows);
  if (failure) return failure;

  interposer_heads_call heads = {};
  heads.weight = factor_of(call, call.heads, kHeads);
  heads.added = {call.low_rank[kHeads], call.ids};
  heads.x = first;
  heads.out = second;
  heads.query_weight = call.query_weight;
  heads.key_weight = call.key_weight;
  heads.cos = call.cos;
  heads.sin = call.sin;
  heads.type = type;
  heads.eps = static_cast<float>(block.head_eps);
  heads.rows = call.rows;
  heads.x_stride = hidden;
  heads.heads = block.heads;
  heads.kv_heads = block.kv_heads;
  heads.size = block.size;
  heads.half = block.half;
  failure = project_heads(heads);
  if (failure) return failure;

  interposer_attention_call attention = call.attention;
  attention.query = second;
  attention.key = moved(second, type, width);
  attention.value = moved(second, type, width + block.kv_heads * block.size);
  attention.query_stride = attention.key_stride = attention.value_stride = merged;
  attention.out = first;
  failure = interposer_attention(&attention);
  if (failure) return kNoMemory;

  int64_t rows = call.rows;
  char *mixed = first, *projected = second;
  if (some) {
    rows = call.num_chosen;
    gather(first, call.chosen, rows, width * size, second);
    gather(stream, call.chosen, rows, hidden * 4, call.total);
    stream = call.total;
    mixed = second, projected = first;
  }
  const int64_t* ids = some ? call.chosen_ids : call.ids;
  failure = multiply(output, {call.low_rank[kOutput], ids}, 0, mixed, type, rows, width, projected,
                     type);
  if (failure) return failure;

  void* normalised = call.gate_up ? mixed : call.out;
  failure = normalise(call, call.post_weight, block.post_eps, projected,
                      block.summands & kOutputSummand, stream, call.total, normalised, rows);
  if (failure || call.gate_up == nullptr) return failure;

  interposer_mlp_call last = {};
  last.gate_up = factor_of(call, call.gate_up, kGateUp);
  last.down = factor_of(call, call.down, kDown);
  last.added[0] = {call.low_rank[kGateUp], ids};
  last.added[1] = {call.low_rank[kDown], ids};
  last.x = normalised;
  last.out = call.out;
  last.type = last.out_type = type;
  last.activation = static_cast<int32_t>(block.activation);
  last.rows = rows;
  last.x_stride = hidden;
  failure = mlp(last);
  if (failure || leaves || !(block.summands & kDownSummand)) return failure;
  return lost(interposer_all_reduce(call.ranks, call.out, type, rows * hidden));
}

int32_t single_block(const interposer_block_call& call) {
  return decoder_block(call, false, false);
}

struct Row {
  const interposer_block_call* calls;
  int64_t count;
};

int32_t decoder_blocks(const Row& row) {
  bool sums = false;
  for (int64_t i = 0; i < row.count; ++i) {
    const interposer_block_call& call = row.calls[i];
    if (call.rows == 0) continue;
    const bool is_read = i + 1 < row.count && call.gate_up && call.num_chosen < 0;
    const bool leaves = is_read && call.block->summands & kDownSummand;
    const int32_t failure = decoder_block(call, sums, leaves);
    if (failure) return failure;
    sums = leaves;
  }
  return kDone;
}

template <class Call>
struct Program {
  const Call& call;
  int32_t (*compute)(const Call&);
  int32_t failure;

  static void run(void* argument) {
    Program& program = *static_cast<Program*>(argument);
    program.failure = program.compute(program.call);
  }
};

template <class Call>
int32_t together(const Call& call, int32_t (*compute)(const Call&)) {
  Program<Call> program = {call, compute, kDone};
  interposer_together(Program<Call>::run, &program);
  return program.failure;
}

}  // namespace

extern "C" {

int32_t interposer_mlp(const interposer_mlp_call* call) { return together(*call, mlp); }

int32_t interposer_project_heads(const interposer_heads_call* call) {
  return together(*call, project_heads);
}

int32_t interposer_decoder_block(const interposer_block_call* call) {
  if (call->rows == 0) return kDone;
  return together(*call, single_block);
}

int32_t interposer_decoder_blocks(const interposer_block_call* calls, int64_t count) {
  return together(Row{calls, count}, decoder_blocks);
}
}
