#include "blocks.h"

#include <cstring>

#include "../elementwise/elementwise.h"
#include "../linear/batched.h"
#include "../pool.h"
#include "../vectors.h"
#include "factor.h"
#include "moe.h"

namespace {

// Rows per iteration, so that intermediate results stay in a cache.
constexpr int64_t kMostRows = 256;

// Order of projections in `codings`, `scales` and `low_rank`.
enum Place { kHeads, kOutput, kGateUp, kDown };

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

// Compute attention of all heads: from the normalized rows in `first` to `first`, over `second`.
int32_t attend(const interposer_block_call& call, char* first, char* second) {
  const interposer_block& block = *call.block;
  const int32_t type = static_cast<int32_t>(block.type);
  const int64_t width = block.heads * block.size, sides = block.kv_heads * block.size;
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
  heads.x_stride = block.hidden;
  heads.heads = block.heads;
  heads.kv_heads = block.kv_heads;
  heads.size = block.size;
  heads.half = block.half;
  const int32_t failure = project_heads(heads);
  if (failure) return failure;

  interposer_attention_call attention = call.attention;
  attention.query = second;
  attention.key = moved(second, type, width);
  attention.value = moved(second, type, width + sides);
  attention.query_stride = attention.key_stride = attention.value_stride = width + 2 * sides;
  attention.out = first;
  return interposer_attention(&attention) ? kNoMemory : kDone;
}

// Strides of [rows, heads, size], in elements.
struct HeadStrides {
  int64_t row, head;
};

// Multiply each head by its own weight.
int32_t multiply_heads(const interposer_packed* weights, const interposer_coding& coding,
                       int64_t heads, int64_t rows, int64_t outputs, const void* x,
                       HeadStrides x_strides, int32_t type, void* out, HeadStrides out_strides) {
  interposer_batch batch = {};
  batch.weights = weights;
  batch.x = x;
  batch.out = out;
  batch.x_type = batch.out_type = type;
  batch.heads = heads, batch.rows = rows, batch.outputs = outputs;
  batch.head_stride = x_strides.head, batch.row_stride = x_strides.row;
  batch.out_head_stride = out_strides.head, batch.out_row_stride = out_strides.row;
  if (coding.type != kNone) {
    if (coding.type != kInt8 || coding.group) return kMismatch;
    const int64_t inputs = weights->inputs, bytes = round_up(heads * rows * inputs, 64);
    char* memory = static_cast<char*>(interposer_scratch(kForCodes, bytes + heads * rows * 4));
    if (memory == nullptr) return kNoMemory;
    interposer_coded coded = {};
    coded.x = x;
    coded.codes = memory;
    coded.scales = reinterpret_cast<float*>(memory + bytes);
    coded.type = type;
    coded.code_type = kInt8;
    coded.limit = static_cast<float>(coding.limit);
    coded.powers = static_cast<int32_t>(coding.powers);
    coded.rows = {heads, rows, inputs, x_strides.head, x_strides.row};
    const int32_t failure = interposer_code(&coded);
    if (failure) return failure;
    batch.x = memory;
    batch.x_type = kInt8;
    batch.x_scales = coded.scales;
    batch.head_stride = rows * inputs, batch.row_stride = inputs;
  }
  return interposer_multiply_batch(&batch);
}

// Areas of scratch memory, one after another; without memory, only their size is counted.
class Areas {
 public:
  explicit Areas(char* memory) : memory_(memory) {}

  char* next(int64_t bytes) {
    char* area = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(bytes, 64);
    return area;
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Intermediate results of latent attention.
struct LatentRows {
  char *compressed, *query, *rotated, *vector, *latent, *absorbed, *mixed, *chosen;
  int64_t bytes;

  LatentRows(const interposer_block_call& call, char* memory) {
    const interposer_latent& sizes = *call.latent->latent;
    const interposer_packed* compress = call.latent->query_latent;
    const int64_t heads = call.block->heads, size = size_of(int32_t(call.block->type));
    const int64_t each = call.rows * size, all = each * heads;
    Areas areas(memory);
    compressed = areas.next(compress ? each * compress->outputs : 0);
    query = areas.next(all * (sizes.plain + sizes.rotary));
    rotated = areas.next(all * sizes.rotary);
    vector = areas.next(each * (sizes.latent + sizes.rotary));
    latent = areas.next(each * sizes.latent);
    absorbed = areas.next(all * (sizes.latent + sizes.rotary));
    mixed = areas.next(all * sizes.latent);
    chosen = areas.next(call.num_chosen > 0 ? call.num_chosen * heads * sizes.latent * size : 0);
    bytes = areas.used();
  }
};

int32_t normalise_latent(const interposer_block_call& call, const void* x, const void* weight,
                         int64_t width, int64_t stride, void* out) {
  interposer_norm norm = {};
  norm.x = x;
  norm.weight = weight;
  norm.out = out;
  norm.type = static_cast<int32_t>(call.block->type);
  norm.rows = {call.rows, 1, width, stride, stride};
  norm.eps = static_cast<float>(call.block->head_eps);
  return interposer_normalise(&norm);
}

int32_t rotate(const interposer_block_call& call, const void* x, void* out, int64_t count,
               HeadStrides strides, int64_t out_stride) {
  interposer_heads heads = {};
  heads.x = x;
  heads.out = out;
  heads.cos = call.cos;
  heads.sin = call.sin;
  heads.type = static_cast<int32_t>(call.block->type);
  heads.half = call.block->half;
  heads.rows = {call.rows, count, call.latent->latent->rotary, strides.row, strides.head};
  heads.out_stride = out_stride;
  heads.neighbours = call.latent->latent->neighbours != 0;
  return interposer_turn_heads(&heads);
}

bool fits(const interposer_packed& weight, int64_t inputs, int64_t outputs) {
  return weight.inputs == inputs && weight.outputs == outputs;
}

bool fits(const interposer_block_call& call) {
  const interposer_latent_call& here = *call.latent;
  const interposer_latent& sizes = *here.latent;
  const int64_t hidden = call.block->hidden, heads = call.block->heads;
  const interposer_packed* compress = here.query_latent;
  return (compress == nullptr || compress->inputs == hidden) &&
         fits(*call.heads, compress ? compress->outputs : hidden,
              heads * (sizes.plain + sizes.rotary)) &&
         fits(*here.vector, hidden, sizes.latent + sizes.rotary) &&
         here.keys->inputs == sizes.plain && here.values->inputs == sizes.latent &&
         (here.keys->outputs == sizes.latent || here.keys->outputs == heads * sizes.latent) &&
         (here.values->outputs == sizes.value || here.values->outputs == heads * sizes.value) &&
         call.block->size == sizes.value;
}

// Compute latent attention of the normalized rows in `first`: the heads' values of the rows with an
// output, [rows, N, V], in `second`.
int32_t attend_latent(const interposer_block_call& call, const LatentRows& rows, const char* first,
                      char* second) {
  const interposer_latent_call& here = *call.latent;
  const interposer_latent& sizes = *here.latent;
  const int32_t type = static_cast<int32_t>(call.block->type);
  const int64_t heads = call.block->heads, hidden = call.block->hidden, size = size_of(type);
  const int64_t query_size = sizes.plain + sizes.rotary, vector_size = sizes.latent + sizes.rotary;

  const char* query_input = first;
  int64_t input_size = hidden;
  int32_t failure = kDone;
  if (here.query_latent) {
    input_size = here.query_latent->outputs;
    failure = multiply({here.query_latent, sizes.codings[0], here.scales[0]},
                       {here.low_rank[0], call.ids}, 0, first, type, call.rows, hidden,
                       rows.compressed, type);
    if (failure) return failure;
    failure = normalise_latent(call, rows.compressed, call.query_weight, input_size, input_size,
                               rows.compressed);
    if (failure) return failure;
    query_input = rows.compressed;
  }
  failure = multiply(factor_of(call, call.heads, kHeads), {call.low_rank[kHeads], call.ids}, 0,
                     query_input, type, call.rows, input_size, rows.query, type);
  if (failure) return failure;
  failure = multiply({here.vector, sizes.codings[1], here.scales[1]}, {here.low_rank[1], call.ids},
                     0, first, type, call.rows, hidden, rows.vector, type);
  if (failure) return failure;

  char* key = moved(rows.vector, type, sizes.latent);
  failure = rotate(call, moved(rows.query, type, sizes.plain), rows.rotated, heads,
                   {heads * query_size, query_size}, heads * sizes.rotary);
  if (failure) return failure;
  failure = rotate(call, key, key, 1, {vector_size, vector_size}, vector_size);
  if (failure) return failure;
  failure = normalise_latent(call, rows.vector, call.key_weight, sizes.latent, vector_size,
                             rows.latent);
  if (failure) return failure;
  const auto copy = [&](void* to, const void* from, int64_t elements) {
    std::memcpy(to, from, static_cast<size_t>(elements * size));
  };
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t page = here.slots[row] / sizes.page_tokens;
    const int64_t offset = here.slots[row] % sizes.page_tokens;
    char* slot = moved(here.cache, type, page * here.page_stride + offset * here.token_stride);
    copy(slot, moved(rows.latent, type, row * sizes.latent), sizes.latent);
    copy(moved(slot, type, sizes.latent), moved(key, type, row * vector_size), sizes.rotary);
    for (int64_t head = row * heads; head < (row + 1) * heads; ++head) {
      copy(moved(rows.absorbed, type, head * vector_size + sizes.latent),
           moved(rows.rotated, type, head * sizes.rotary), sizes.rotary);
    }
  }
  failure = multiply_heads(here.keys, sizes.codings[2], heads, call.rows, sizes.latent, rows.query,
                           {heads * query_size, query_size}, type, rows.absorbed,
                           {heads * vector_size, vector_size});
  if (failure) return failure;

  interposer_dense_call attention = {};
  attention.type = attention.stored_type = type;
  attention.num_heads = static_cast<int32_t>(heads);
  attention.num_kv_heads = 1;
  attention.head_size = static_cast<int32_t>(vector_size);
  attention.value_size = static_cast<int32_t>(sizes.latent);
  attention.page_tokens = static_cast<int32_t>(sizes.page_tokens);
  attention.scale = sizes.scale;
  attention.causal = 1;
  attention.num_sequences = here.num_sequences;
  attention.query_starts = here.query_starts;
  attention.seq_lens = here.seq_lens;
  attention.page_table = here.page_table;
  attention.table_stride = here.table_stride;
  attention.query = rows.absorbed;
  attention.query_stride = heads * vector_size;
  attention.keys = {here.cache, 0, here.page_stride * size, here.token_stride * size};
  attention.values = attention.keys;
  attention.out = rows.mixed;
  if (interposer_dense_attention(&attention)) return kNoMemory;

  int64_t count = call.rows;
  const char* mixed = rows.mixed;
  if (call.num_chosen >= 0) {
    count = call.num_chosen;
    gather(mixed, call.chosen, count, heads * sizes.latent * size, rows.chosen);
    mixed = rows.chosen;
  }
  return multiply_heads(here.values, sizes.codings[3], heads, count, sizes.value, mixed,
                        {heads * sizes.latent, sizes.latent}, type, second,
                        {heads * sizes.value, sizes.value});
}

// Compute a block. `sums`: x is a summand, reduced first. `leaves`: the output stays a summand for
// the next block.
int32_t decoder_block(const interposer_block_call& call, bool sums, bool leaves) {
  const interposer_block& block = *call.block;
  const int32_t type = static_cast<int32_t>(block.type);
  const int64_t size = size_of(type), hidden = block.hidden, width = block.heads * block.size;
  const int64_t merged = width + 2 * block.kv_heads * block.size;
  const interposer_factor output = factor_of(call, call.output, kOutput);
  if (call.output->inputs != width || call.output->outputs != hidden) return kMismatch;
  if (call.latent ? !fits(call) : call.heads->inputs != hidden) return kMismatch;
  if (call.gate_up && (call.gate_up->inputs != hidden || call.down->outputs != hidden)) {
    return kMismatch;
  }
  const bool some = call.num_chosen >= 0;
  // Double buffers: a step reads from one half and writes to the other. After them come the
  // residual of all rows if only some rows are chosen, and the rows of latent attention.
  const int64_t first_bytes = round_up(call.rows * (hidden > width ? hidden : width) * size, 64);
  const int64_t second_bytes = round_up(call.rows * (merged > hidden ? merged : hidden) * size, 64);
  const int64_t stream_bytes = some && call.adds ? round_up(call.rows * hidden * 4, 64) : 0;
  const int64_t latent_bytes = call.latent ? LatentRows(call, nullptr).bytes : 0;
  char* first = static_cast<char*>(
      interposer_scratch(kForLayers, first_bytes + second_bytes + stream_bytes + latent_bytes));
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

  int64_t rows = call.rows;
  char *mixed = first, *projected = second;
  if (call.latent) {
    const LatentRows latent(call, second + second_bytes + stream_bytes);
    failure = attend_latent(call, latent, first, second);
    mixed = second, projected = first;
  } else {
    failure = attend(call, first, second);
  }
  if (failure) return failure;
  if (some) {
    rows = call.num_chosen;
    gather(stream, call.chosen, rows, hidden * 4, call.total);
    stream = call.total;
    if (!call.latent) {
      gather(first, call.chosen, rows, width * size, second);
      mixed = second, projected = first;
    }
  }
  const int64_t* ids = some ? call.chosen_ids : call.ids;
  failure = multiply(output, {call.low_rank[kOutput], ids}, 0, mixed, type, rows, width, projected,
                     type);
  if (failure) return failure;

  void* normalised = call.gate_up || call.moe ? mixed : call.out;
  failure = normalise(call, call.post_weight, block.post_eps, projected,
                      block.summands & kOutputSummand, stream, call.total, normalised, rows);
  if (failure) return failure;
  if (call.moe) {
    const interposer_moe_call last = {call.moe, normalised, call.out, type, rows, hidden};
    return interposer_moe(&last);
  }
  if (call.gate_up == nullptr) return kDone;

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
