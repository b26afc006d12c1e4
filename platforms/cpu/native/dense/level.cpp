// Attention of one query block to keys in rows, compiled once for each level.
//
// Dimensions: rows are tokens times the heads of a group, D size of a query and key, E of a value.

#include "few.h"

namespace {

// Compute the visible keys of the block's rows.
void look(const interposer_dense_call& call, const AttentionItem& item, const Block& block,
          int64_t row, int64_t real) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t start = call.query_starts[item.sequence];
  const int64_t num_tokens = call.query_starts[item.sequence + 1] - start;
  const int64_t token = item.first_token + real / group;
  const int64_t head = item.head * group + real % group;
  const int64_t position = dense_keys(call, item.sequence) - num_tokens + token;
  int64_t first = item.first_key, end = item.end_key;
  if (call.causal && position + 1 < end) end = position + 1;
  if (call.window_tokens) {
    if (position + call.window_tokens < end) end = position + call.window_tokens;
    if (position - call.window_tokens + 1 > first) first = position - call.window_tokens + 1;
  }
  block.position[row] = int32_t(position);
  block.first[row] = int32_t(first < item.end_key ? first : item.end_key);
  block.end[row] = int32_t(end > item.first_key ? end : item.first_key);
  block.slope[row] = call.slopes ? call.slopes[head] * kLog2E : 0.0f;
  block.maximum[row] = kLowest;
  block.sum[row] = 0;
}

const char* query_of(const interposer_dense_call& call, const AttentionItem& item, int64_t row) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t token = call.query_starts[item.sequence] + item.first_token + row / group;
  const int64_t head = item.head * group + row % group;
  return static_cast<const char*>(call.query) +
         (token * call.query_stride + head * call.head_size) * size_of(call.type);
}

// Write the block's queries as words across lanes, and the visible keys of each. Rows that pad the
// last tile copy the last row.
template <class F>
void prepare(const interposer_dense_call& call, const AttentionItem& item, const Block& block) {
  const int64_t tile_words = block.key_words * kLanes;
  for (int64_t row = 0; row < block.padded_rows; ++row) {
    const int64_t real = row < block.rows ? row : block.rows - 1;
    if (row < block.rows) {
      convert_row<F>(query_of(call, item, row), call.type, call.head_size, block.keys);
    }
    char* to = block.queries + (row / kLanes * tile_words + row % kLanes) * 4;
    for (int64_t i = 0; i < block.key_words; ++i) {
      std::memcpy(to + i * kLanes * 4, block.keys + i * 4, 4);
    }
    look(call, item, block, row, real);
  }
  std::memset(block.result, 0, size_t(block.padded_rows * block.columns) * 4);
}

// Reorder keys and values of the positions from `begin` to `end`.
template <class F>
void take_keys(const interposer_dense_call& call, const Source& keys, const Source& values,
               const Block& block, int64_t begin, int64_t end) {
  const bool is_shared = call.keys.data == call.values.data;
  const int64_t key_bytes = block.key_words * 4, E = call.value_size;
  for (int64_t key = begin; key < end; ++key) {
    convert_row<F>(keys.row(key), call.stored_type, call.head_size,
                   block.keys + (key - begin) * key_bytes);
  }
  for (int64_t key = begin; key < end; key += F::kInputs) {
    const char* rows[2] = {};
    for (int i = 0; i < F::kInputs && key + i < end; ++i) {
      if (is_shared) {
        rows[i] = block.keys + (key + i - begin) * key_bytes;
      } else if (call.stored_type == int32_t(kHeld<F>)) {
        rows[i] = values.row(key + i);
      } else {
        char* room = block.room + i * block.columns * 4;
        convert_row<F>(values.row(key + i), call.stored_type, E, room);
        rows[i] = room;
      }
    }
    interleave<F>(rows[0], rows[1], E,
                  block.values + (key - begin) / F::kInputs * block.columns * 4);
  }
}

// Write results: weighted values divided by the sum of weights, including the sink.
void finish(const interposer_dense_call& call, const AttentionItem& item, const Block& block) {
  const int64_t group = call.num_heads / call.num_kv_heads, E = call.value_size;
  const int64_t start = call.query_starts[item.sequence] + item.first_token;
  const float scale = call.value_scales ? call.value_scales[item.head * call.scale_stride] : 1.0f;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t head = item.head * group + row % group;
    const int64_t at = (start + row / group) * call.num_heads + head;
    float sum = block.sum[row], factor = scale, maximum = block.maximum[row];
    if (call.sinks) {
      const float sink = call.sinks[head] * kLog2E;
      const float highest = sink > maximum ? sink : maximum;
      factor *= exp2_of(maximum - highest);
      sum = sum * exp2_of(maximum - highest) + exp2_of(sink - highest);
      maximum = highest;
    }
    if (call.lse) {
      call.lse[at] = sum == 0 ? -INFINITY : (maximum + __builtin_log2f(sum)) / kLog2E;
    }
    // Without visible keys, there are no values and no weights.
    const Floats weight = splat(sum == 0 ? 0.0f : factor / sum);
    char* to = static_cast<char*>(call.out) + at * E * size_of(call.type);
    const float* result = block.result + row * block.columns;
    for (int64_t i = 0; i < E; i += kLanes) {
      store_some(to + i * size_of(call.type), load<Floats>(result + i) * weight, call.type,
                 lanes_left(E - i));
    }
  }
}

// Merge the parts of a block (split-K) in order, and write the result.
void merge(const interposer_dense_call& call, const AttentionItem& item,
           const AttentionPartials& partials, const Block& block) {
  const int64_t rows = block.rows;
  const float* parts = partials.data + item.first_partial * partials.stride;
  for (int64_t row = 0; row < rows; ++row) {
    float maximum = kLowest, sum = 0;
    for (int part = 0; part < item.num_parts; ++part) {
      const float found = parts[part * partials.stride + row];
      maximum = found > maximum ? found : maximum;
    }
    for (int part = 0; part < item.num_parts; ++part) {
      const float* from = parts + part * partials.stride;
      const float factor = exp2_of(from[row] - maximum);
      sum += from[rows + row] * factor;
      const float* values = from + 2 * rows + row * block.columns;
      float* to = block.result + row * block.columns;
      for (int64_t i = 0; i < block.columns; i += kLanes) {
        const Floats term = load<Floats>(values + i) * splat(factor);
        store(to + i, part ? load<Floats>(to + i) + term : term);
      }
    }
    block.maximum[row] = maximum;
    block.sum[row] = sum;
  }
  finish(call, item, block);
}

// Write the results of a block, or store them until all of its parts are done.
void conclude(const interposer_dense_call& call, const AttentionItem& item,
              const AttentionPartials& partials, const Block& block) {
  if (item.num_parts == 1) return finish(call, item, block);
  float* part = partials.data + (item.first_partial + item.part) * partials.stride;
  std::memcpy(part, block.maximum, size_t(block.rows) * 4);
  std::memcpy(part + block.rows, block.sum, size_t(block.rows) * 4);
  std::memcpy(part + 2 * block.rows, block.result, size_t(block.rows * block.columns) * 4);
  // The thread that finishes the last part merges the parts.
  if (partials.unfinished[item.split].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    merge(call, item, partials, block);
  }
}

Scoring scoring_of(const interposer_dense_call& call, const AttentionItem& item) {
  Scoring scoring = {float(call.scale * kLog2E), 0, 0};
  if (call.key_scales) scoring.scale *= call.key_scales[item.head * call.scale_stride];
  if (call.softcap != 0) {
    scoring.cap = float(call.softcap * kLog2E);
    scoring.uncapped = scoring.scale / scoring.cap;
  }
  return scoring;
}

template <class F>
void attend_few(const interposer_dense_call& call, const AttentionItem& item,
                const AttentionPartials& partials, char* scratch) {
  Block block = {};
  block.rows = item.num_tokens * (call.num_heads / call.num_kv_heads);
  block.padded_rows = kLanes;
  block.lay<F>(scratch, block.rows, call, kLanes);
  const int64_t row_bytes = block.key_words * 4, D = call.head_size, E = call.value_size;
  std::memset(block.queries, 0, size_t(block.rows * row_bytes));
  for (int64_t row = 0; row < block.rows; ++row) {
    convert_row<F>(query_of(call, item, row), call.type, D, block.queries + row * row_bytes);
    look(call, item, block, row, row);
  }
  std::memset(block.result, 0, size_t(block.rows * block.columns) * 4);
  const bool is_held = call.stored_type == int32_t(kHeld<F>);
  // Keys are read in full vectors.
  const bool are_direct = is_held && D % (kLanes * F::kInputs) == 0;
  if (!are_direct) std::memset(block.keys, 0, size_t(kKeys<F> * row_bytes));
  const bool is_shared = call.keys.data == call.values.data;
  const Scoring scoring = scoring_of(call, item);
  const Source keys(call, call.keys, item), values(call, call.values, item);
  const int64_t stored_bytes = bytes_of_stored(call.stored_type);
  const char *key_rows[kKeys<F>], *value_rows[kKeys<F>], *next_rows[kKeys<F>];
  const int64_t length = item.end_key - item.first_key;
  keys.locate(item.first_key, length < kKeys<F> ? length : kKeys<F>, next_rows);
  for (int64_t begin = item.first_key; begin < item.end_key; begin += kKeys<F>) {
    const int64_t left = item.end_key - begin;
    const int64_t count = left < kKeys<F> ? left : kKeys<F>;
    const int64_t rest = left - count, num_next = rest < kKeys<F> ? rest : kKeys<F>;
    std::memcpy(key_rows, next_rows, size_t(count) * sizeof *key_rows);
    if (!is_shared) values.locate(begin, count, value_rows);
    if (num_next > 0) keys.locate(begin + count, num_next, next_rows);
    if (!are_direct) {
      for (int64_t key = 0; key < count; ++key) {
        if (!is_shared) fetch(value_rows[key], E * stored_bytes);
        char* to = block.keys + key * row_bytes;
        convert_row<F>(key_rows[key], call.stored_type, D, to);
        key_rows[key] = to;
      }
    }
    score_few<F>(block, key_rows, are_direct && !is_shared ? value_rows : nullptr, count);
    for (int64_t row = 0; row < block.rows; ++row) {
      soften_few<F>(block, scoring, call.slopes != nullptr, row, begin, count);
    }
    for (int64_t key = 0; key < count; key += F::kInputs) {
      const char* rows[2] = {};
      for (int i = 0; i < F::kInputs && key + i < count; ++i) {
        if (key + i < num_next) fetch(next_rows[key + i], D * stored_bytes);
        if (is_shared || is_held) {
          rows[i] = is_shared ? key_rows[key + i] : value_rows[key + i];
        } else {
          char* room = block.room + i * block.columns * 4;
          convert_row<F>(value_rows[key + i], call.stored_type, E, room);
          rows[i] = room;
        }
      }
      interleave<F>(rows[0], rows[1], E, block.values + key / F::kInputs * block.columns * 4);
    }
    weigh_few<F>(block, (count + F::kInputs - 1) / F::kInputs);
  }
  conclude(call, item, partials, block);
}

template <class F>
void attend_block(const interposer_dense_call& call, int64_t most_rows, const AttentionItem& item,
                  const AttentionPartials& partials, char* scratch) {
  Block block = {};
  block.rows = item.num_tokens * (call.num_heads / call.num_kv_heads);
  if (block.rows <= kFewRows) return attend_few<F>(call, item, partials, scratch);
  block.padded_rows = rounded_up(block.rows, kLanes);
  block.lay<F>(scratch, most_rows, call);
  prepare<F>(call, item, block);
  const Scoring scoring = scoring_of(call, item);
  const Source keys(call, call.keys, item), values(call, call.values, item);
  const int64_t row_bytes = call.head_size * bytes_of_stored(call.stored_type);
  Ahead ahead = {keys.token == row_bytes ? &keys : nullptr, 0, item.end_key, row_bytes};
  for (int64_t begin = item.first_key; begin < item.end_key; begin += kKeys<F>) {
    const int64_t left = item.end_key - begin;
    const int64_t count = left < kKeys<F> ? left : kKeys<F>;
    take_keys<F>(call, keys, values, block, begin, begin + count);
    ahead.begin = begin + count;
    for (int64_t row = 0; row < block.rows; row += kGroupRows) {
      const int64_t rows = block.rows - row < kGroupRows ? block.rows - row : kGroupRows;
      // Visible keys move on with the row.
      const int64_t first = block.first[row] - begin, end = block.end[row + rows - 1] - begin;
      const int64_t from = first > 0 ? first / F::kInputs * F::kInputs : 0;
      const int64_t to = end < count ? end : count;
      if (from >= to) continue;
      const int64_t tile = row / kLanes, tiles = (rows + kLanes - 1) / kLanes;
      score<F>(block, tile, tiles, from, to, ahead);
      for (int64_t i = 0; i < tiles; ++i) {
        soften<F>(block, scoring, call.slopes != nullptr, tile + i, i, begin, from, to);
      }
      weigh<F>(block, row, rows, from, to);
    }
  }
  conclude(call, item, partials, block);
}

#if defined(INTERPOSER_PAIRS)
bool is_paired(const interposer_dense_call& call) {
  return call.type == kBFloat16 && call.stored_type != kCacheFloat32 &&
         call.stored_type != kCacheFloat16;
}
#endif

void attend(const interposer_dense_call& call, int64_t most_rows, const AttentionItem& item,
            const AttentionPartials& partials, char* scratch) {
#if defined(INTERPOSER_PAIRS)
  if (is_paired(call)) {
    return attend_block<BFloat16OnPairs>(call, most_rows, item, partials, scratch);
  }
#endif
  attend_block<Float32OnFloats>(call, most_rows, item, partials, scratch);
}

// Blocks of few rows have padding after the words of a row.
template <class F>
int64_t bytes_of_blocks(const interposer_dense_call& call, int64_t most_rows) {
  Block block = {};
  const int64_t few = block.lay<F>(nullptr, kFewRows, call, kLanes);
  const int64_t many = block.lay<F>(nullptr, most_rows, call);
  return few > many ? few : many;
}

int64_t scratch_bytes(const interposer_dense_call& call, int64_t most_rows) {
#if defined(INTERPOSER_PAIRS)
  if (is_paired(call)) return bytes_of_blocks<BFloat16OnPairs>(call, most_rows);
#endif
  return bytes_of_blocks<Float32OnFloats>(call, most_rows);
}

// Store one row, converted if necessary: copied in the stored type, or rounded to 8 bits.
void store_row(const interposer_dense_call& call, const char* from, int64_t count, float scale,
               char* to) {
  const int64_t size = size_of(call.type);
  if (call.stored_type == call.type) {
    std::memcpy(to, from, size_t(count * size));
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = lanes_left(count - i);
    float values[kLanes];
    store(values, load_some(from + i * size, call.type, n) / splat(scale));
    for (int lane = 0; lane < n; ++lane) {
      to[i + lane] = char(rounded_to_8_bits(values[lane], call.stored_type));
    }
  }
}

void store_token(const interposer_dense_call& call, const interposer_dense_store& store,
                 int64_t token) {
  const int64_t slot = store.slots[token], size = size_of(call.type);
  const int64_t page = slot / call.page_tokens, offset = slot % call.page_tokens;
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    auto put = [&](const interposer_dense_rows& rows, const void* given, int64_t stride,
                   int64_t count, const float* scales) {
      const char* from = static_cast<const char*>(given) + (token * stride + head * count) * size;
      char* to = const_cast<char*>(rows.data) + head * rows.head + page * rows.page +
                 offset * rows.token;
      store_row(call, from, count, scales ? scales[head * call.scale_stride] : 1.0f, to);
    };
    put(call.keys, store.key, store.key_stride, call.head_size, call.key_scales);
    put(call.values, store.value, store.value_stride, call.value_size, call.value_scales);
  }
}

}  // namespace

extern "C" const DenseKernels INTERPOSER_OF_LEVEL(interposer_dense);
extern "C" const DenseKernels INTERPOSER_OF_LEVEL(interposer_dense) = {scratch_bytes, attend,
                                                                         store_token};
