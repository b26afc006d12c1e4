// Attention of one query block over paged keys (flash attention), compiled once for each level.
//
// Scores are query rows times tiles of keys. Running maxima and sums, in base 2, go from one block
// of keys to the next. Weights times values is the same kind of multiplication.
//
// Dimensions: rows are tokens times the heads of a group, D head size.

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "attention.h"
#include "block.h"
#include "formats.h"
#include "grouped.h"
#include "matrices.h"
#include "products.h"
#include "softmax.h"
#include "tiled.h"
#include "widened.h"

namespace {

#if defined(__AVX512F__)
// Tiles of scores per pass; `rows` counts planes.
constexpr int score_tiles(int rows) { return rows > 6 ? 2 : 4; }
constexpr int value_tiles(int rows) { return rows > 6 ? 2 : rows > 2 ? 4 : 8; }
#else
constexpr int score_tiles(int rows) { return rows > 4 ? 1 : 4 / rows; }
constexpr int value_tiles(int rows) { return rows > 4 ? 1 : 4 / rows; }
#endif

// Row counts that kernels are compiled for.
template <class F>
constexpr auto row_counts() {
  if constexpr (Matrices<F>::kKnown) {
    return typename Matrices<F>::Rows();
  } else if constexpr (kMostRows == 6) {
    return RowCounts<6, 4, 2, 1>();
  } else if constexpr (F::kPlanes == 1) {
    return RowCounts<4, 2, 1>();
  } else {
    return RowCounts<2, 1>();
  }
}

template <int Most, int... Rest>
constexpr int most_of(RowCounts<Most, Rest...>) {
  return Most;
}

// Divide rows into compiled row counts, and call `act` with each count, as a constant, and its
// first row.
template <int... M, class Act>
INTERPOSER_INLINE void take_rows(RowCounts<M...>, int64_t row, int64_t rows, Act act) {
  const auto take = [&](auto count) {
    for (; row + count <= rows; row += count) act(count, row);
  };
  (take(std::integral_constant<int, M>()), ...);
}

template <class F, int M, int T>
void score_group(const Block& block, const Tiles& tiles, int64_t tile, int64_t row) {
  const int64_t x_stride = block.head_size * F::kInputBytes;
  typename F::Sum sums[M * F::kPlanes][T] = {};
  const char *words[T], *ahead[T];
  for (int t = 0; t < T; ++t) {
    words[t] = tiles.keys[tile + t];
    // Same distance as for values, so that nothing between keys and values is skipped.
    ahead[t] = key_ahead(tiles, tile + t + (tiles.ahead > T ? tiles.ahead : T));
  }
  add_products<F, M * F::kPlanes, T>(sums, words, kLanes * 4, block.head_size / F::kInputs,
                                     block.x + row * x_stride, x_stride, block.head_size, ahead,
                                     kLanes * 4);
  for (int m = 0; m < M; ++m) {
    for (int t = 0; t < T; ++t) {
      store(block.scores + m * kKeys + (tile + t) * kTile,
            joined<F, M * F::kPlanes, T>(sums, m, t, block.planes + row));
    }
  }
}

template <class F, int M>
void score_rows(const Block& block, const Tiles& tiles, int64_t tile, int64_t end, int64_t row) {
  constexpr int T = score_tiles(M * F::kPlanes);
  for (; tile + T <= end; tile += T) score_group<F, M, T>(block, tiles, tile, row);
  if constexpr (T > 2) {
    for (; tile + 2 <= end; tile += 2) score_group<F, M, 2>(block, tiles, tile, row);
  }
  if constexpr (T > 1) {
    for (; tile < end; ++tile) score_group<F, M, 1>(block, tiles, tile, row);
  }
}

// Complete rows of value words, and one more row whose later elements are unwritten.
struct Reach {
  int64_t tiles, steps, rest;  // rest: valid elements in words of the last row
};

template <class F>
Reach reach_of(const Tiles& tiles, int64_t end_key) {
  const int64_t tokens = end_key - tiles.first_key;
  const int64_t left = tokens % kTile;
  // For integers, a weight of zero cancels any unwritten memory.
  if (F::kCodes) return {(tokens + kTile - 1) / kTile, 0, 0};
  return {tokens / kTile, left / F::kInputs, left % F::kInputs};
}

template <class F, int M, int T>
void weigh_group(const Block& block, const Tiles& tiles, const Reach& reach, int64_t column,
                 int64_t row, const float* factors) {
  const int64_t D = block.head_size, row_bytes = D * 4, x_stride = kKeys * 4;
  constexpr int64_t kSteps = kTile / F::kInputs, kTileX = kTile * F::kInputBytes;
  constexpr int R = M * F::kPlanes;
  const char* x = reinterpret_cast<const char*>(block.scores);
  float* result = block.result + row * D + column;
  typename F::Sum sums[R][T] = {};
  if (factors) {
    for (int m = 0; m < M; ++m) {
      const Floats factor = splat(factors[m]);
      for (int t = 0; t < T; ++t) {
        sums[m][t] = load<Floats>(result + m * D + t * kLanes) * factor;
      }
    }
  }
  const char *words[T], *ahead[T];
  for (int64_t tile = 0; tile < reach.tiles; ++tile) {
    for (int t = 0; t < T; ++t) {
      words[t] = tiles.keys[tile] + tiles.value_distance + (column + t * kLanes) * 4;
    }
    const Ahead then = values_ahead(tiles, tile, D, {column, T * kLanes}, kSteps);
    ahead[0] = then.at;
    for (int t = 1; t < T; ++t) ahead[t] = ahead[0] + t * kLanes * 4;
    add_products<F, R, T>(sums, words, row_bytes, kSteps, x + tile * kTileX, x_stride, kTile, ahead,
                          then.row_bytes);
  }
  if (reach.steps || reach.rest) {
    x += reach.tiles * kTileX;
    for (int t = 0; t < T; ++t) {
      words[t] = tiles.keys[reach.tiles] + tiles.value_distance + (column + t * kLanes) * 4;
    }
    add_products<F, R, T>(sums, words, row_bytes, reach.steps, x, x_stride, kTile, words,
                          row_bytes);
    if (reach.rest) {
      for (int t = 0; t < T; ++t) words[t] = block.words + (column + t * kLanes) * 4;
      x += reach.steps * kStepBytes<F>;
      add_products<F, R, T>(sums, words, row_bytes, 1, x, x_stride, kTile, words, 0);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int t = 0; t < T; ++t) store(result + m * D + t * kLanes, sums[m][t]);
  }
}

// Groups of columns alternate every few tiles, so that values are read in memory order. The sums of
// the other groups are stored meanwhile.
#if defined(__AVX512F__)
constexpr int kTurns = 2;
#else
constexpr int kTurns = 1;
#endif

// Add weighted values of `count` tiles to results of M rows, in G * T vectors of columns.
template <class F, int M, int T, int G>
void weigh_codes(const Block& block, const Tiles& tiles, int64_t count, int64_t first_column,
                 int64_t row, const float* factors) {
  const int64_t D = block.head_size;
  constexpr int64_t kSteps = kTile / F::kInputs, kTileX = kTile * F::kInputBytes;
  constexpr int R = M * F::kPlanes;
  const char* x = reinterpret_cast<const char*>(block.scores);
  const int64_t some = G > 1 ? kMostAhead : count;
  typename F::Sum held[G][R][T] = {};
  for (int64_t begin = 0; begin < count; begin += some) {
    const int64_t end = begin + some < count ? begin + some : count;
    for (int turn = 0; turn < G; ++turn) {
      const Columns columns = {first_column + turn * T * kLanes, T * kLanes, turn, G};
      typename F::Sum sums[R][T];
      copy(held[turn], sums);
      for (int64_t tile = begin; tile < end; ++tile) {
        const Ahead then = values_ahead(tiles, tile, D, columns, kSteps);
        const char *words[T], *ahead[T];
        for (int t = 0; t < T; ++t) {
          words[t] =
              tiles.keys[tile] + tiles.value_distance + (columns.first + t * kLanes) * 4;
          ahead[t] = then.at + t * kLanes * 4;
        }
        add_products<F, R, T>(sums, words, D * 4, kSteps, x + tile * kTileX, kKeys * 4, kTile,
                              ahead, then.row_bytes);
      }
      copy(sums, held[turn]);
    }
  }
  for (int turn = 0; turn < G; ++turn) {
    for (int m = 0; m < M; ++m) {
      for (int t = 0; t < T; ++t) {
        float* to = block.result + (row + m) * D + first_column + (turn * T + t) * kLanes;
        Floats sum = joined<F, R, T>(held[turn], m, t, block.weight_planes);
        if (factors) sum += load<Floats>(to) * splat(factors[m]);
        store(to, sum);
      }
    }
  }
}

template <class F, int M>
void weigh_rows(const Block& block, const Tiles& tiles, int64_t end_key, int64_t row,
                const float* factors) {
  constexpr int T = value_tiles(M * F::kPlanes);
  const Reach reach = reach_of<F>(tiles, end_key);
  if (reach.rest) {
    // Unwritten memory can contain NaN, which a weight of zero does not cancel.
    uint32_t mask = 0;
    constexpr int kBits = 32 / F::kInputs;
    for (int e = 0; e < reach.rest; ++e) {
      mask |= uint32_t((uint64_t(1) << kBits) - 1) << element_shift(F::kInputs, e);
    }
    const char* from =
        tiles.keys[reach.tiles] + tiles.value_distance + reach.steps * block.head_size * 4;
    for (int64_t i = 0; i < block.head_size; i += kLanes) {
      store(block.words + i * 4, load<Words>(from + i * 4) & mask);
    }
  }
  int64_t column = 0;
  const auto weigh = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if constexpr (F::kCodes && kTurns > 1) {
      constexpr int64_t kAll = kTurns * kVectors * kLanes;
      for (; column + kAll <= block.head_size; column += kAll) {
        weigh_codes<F, M, kVectors, kTurns>(block, tiles, reach.tiles, column, row, factors);
      }
    }
    for (; column + kVectors * kLanes <= block.head_size; column += kVectors * kLanes) {
      if constexpr (F::kCodes) {
        weigh_codes<F, M, kVectors, 1>(block, tiles, reach.tiles, column, row, factors);
      } else {
        weigh_group<F, M, kVectors>(block, tiles, reach, column, row, factors);
      }
    }
  };
  weigh(std::integral_constant<int, T>());
  if constexpr (T > 4) weigh(std::integral_constant<int, 4>());
  if constexpr (T > 2) weigh(std::integral_constant<int, 2>());
  if constexpr (T > 1) weigh(std::integral_constant<int, 1>());
}

// Visible positions of a row: from `first` to `end` - 1.
struct Seen {
  int64_t first, end;
};

struct Scoring {
  float scale;    // scale of scores, including the factor to base 2
  float cap;      // softcap in base 2, or 0
  float uncapped; // scale of scores before tanh
};

INTERPOSER_INLINE Floats scored(const Scoring& scoring, Floats product) {
  if (scoring.cap == 0) return product * splat(scoring.scale);
  return tanh_of(product * splat(scoring.uncapped)) * splat(scoring.cap);
}

#if defined(INTERPOSER_CODES)
// Bytes of both planes of sixteen integers, in the order of elements in words. Processors with
// byte-multiply instructions are little-endian.
struct PlaneBytes {
  Bytes high, low;
  Ints high_numbers, low_numbers;

  explicit INTERPOSER_INLINE PlaneBytes(Ints numbers) {
    high_numbers = (numbers + splat(int32_t(128))) >> 8;
    low_numbers = numbers - (high_numbers << 8);
    const Bytes order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    high = __builtin_shuffle(low_bytes(high_numbers), order);
    low = __builtin_shuffle(low_bytes(low_numbers), order);
  }
};

// Write the planes of sixteen numbers of a row of x, from number `at` on; a plane has
// `plane_bytes`.
INTERPOSER_INLINE void store_planes(PlaneBytes bytes, char* to, int64_t at, int64_t plane_bytes) {
#if defined(INTERPOSER_MATRICES)
  (void)plane_bytes;
  auto first = load<uint8x16_t>(&bytes.high), second = load<uint8x16_t>(&bytes.low);
  exchange(first, second);
  store(to + 2 * at, first);
  store(to + 2 * at + kOperandBytes, second);
#else
  store(to + at, bytes.high);
  store(to + plane_bytes + at, bytes.low);
#endif
}

// Round to integers, ties to even; magnitudes below 2^22.
INTERPOSER_INLINE Ints rounded(Floats value) {
  return (Ints)(value + splat(12582912.0f)) - splat(int32_t(0x4b400000));
}

INTERPOSER_INLINE int32_t sum_of(Ints values) {
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += values[lane];
  return sum;
}

// Sums of a row's numbers and of their planes.
struct PlaneSums {
  Ints high = {}, low = {};

  INTERPOSER_INLINE void add(const PlaneBytes& bytes) {
    high += bytes.high_numbers;
    low += bytes.low_numbers;
  }
  // Returns the sum of the row's numbers.
  int32_t finish(float unit, Planes& to) const {
    const int32_t sums[2] = {sum_of(high), sum_of(low)};
    to = {unit, {sums[0] * Int8OnCodes::kOffset, sums[1] * Int8OnCodes::kOffset}};
    return 256 * sums[0] + sums[1];
  }
};

// Convert the scores [kKeys] of row `row + m` to planes of weights, in multiples of the largest
// weight in this range of keys, so that no weight is lost because of other keys. The softmax sum is
// over rounded weights. With 512 keys, all but one with weights of half a unit, rounding errors are
// at most 2^-7 of the result: two roundings of bfloat16.
inline float soften_codes(const Block& block, int64_t row, int m, float highest, Floats scale,
                          int64_t begin, int64_t last, int64_t count) {
  const float* scores = block.scores + m * kKeys;
  char* planes = reinterpret_cast<char*>(block.scores + m * kKeys);
  const float before = block.maximum[row + m], now = highest > before ? highest : before;
  PlaneSums sums;
  for (int64_t tile = 0; tile < count; ++tile) {
    Ints weight = {};
    if (tile >= begin && tile < last) {
      const Floats exact = exp2_of(load<Floats>(scores + tile * kTile) * scale - splat(highest));
      weight = rounded(exact * splat(float(Int8OnCodes::kLargest)));
    }
    const PlaneBytes bytes(weight);
    store_planes(bytes, planes + tile * 2 * kTile, 0, kTile);
    sums.add(bytes);
  }
  // A query with NaN has no unit either.
  const float unit = exp2_of(highest - now) / float(Int8OnCodes::kLargest) +
                     0.0f * block.planes[row + m].unit;
  const int32_t sum = sums.finish(unit, block.weight_planes[m]);
  const float factor = exp2_of(before - now);
  block.maximum[row + m] = now;
  block.sum[row + m] = block.sum[row + m] * factor + float(sum) * unit;
  return factor;
}

// Convert a query [D] to planes; its largest number uses the full integer range.
inline void prepare_codes(const char* from, int32_t type, int64_t head_size, char* to,
                          Planes& planes) {
  Floats largest = {}, wrong = {};
  for (int64_t i = 0; i < head_size; i += kLanes) {
    const Floats x = load_floats(from + i * size_of(type), type);
    largest = larger((Floats)((Ints)x & 0x7fffffff), largest);
    wrong += x * splat(0.0f);
  }
  const float peak = largest_of(largest), limit = float(Int8OnCodes::kLargest);
  const Floats factor = splat(peak > 1e-30f ? limit / peak : 0.0f);
  PlaneSums sums;
  for (int64_t i = 0; i < head_size; i += kLanes) {
    const PlaneBytes bytes(rounded(load_floats(from + i * size_of(type), type) * factor));
    store_planes(bytes, to, i, head_size);
    sums.add(bytes);
  }
  sums.finish(peak / limit + sum_of(wrong), planes);
}
#endif

// Convert the scores of row `row + m`, the `m`th of `M` current rows, to weights; weights of
// invisible keys are 0, up to `count` tiles. Returns the factor by which the row's earlier result
// must be multiplied.
template <class F, int M>
float soften(const Block& block, const Scoring& scoring, int64_t row, int m, Seen seen,
             int64_t count) {
  float* scores = block.scores + m * kKeys;
  char* weights = reinterpret_cast<char*>(scores);
  const Ints lanes = lane_numbers();
  Floats maximum = splat(kLowest);
  // Without softcap, scores stay unscaled; the scale is applied in the exponent.
  const bool later = scoring.cap == 0 && scoring.scale > 0;
  const int64_t begin = seen.first / kTile, last = seen.end > 0 ? (seen.end - 1) / kTile + 1 : 0;
  for (int64_t tile = begin; tile < last; ++tile) {
    Floats score = load<Floats>(scores + tile * kTile);
    if (!later) score = scored(scoring, score);
    if (tile * kTile < seen.first || (tile + 1) * kTile > seen.end) {
      const Ints at = lanes + splat(int32_t(tile * kTile));
      const Ints visible =
          (at >= splat(int32_t(seen.first))) & (at < splat(int32_t(seen.end)));
      score = chosen(visible, score, splat(-INFINITY));
      if (later) store(scores + tile * kTile, score);
    }
    if (!later) store(scores + tile * kTile, score);
    maximum = larger(maximum, score);
  }
#if defined(INTERPOSER_CODES)
  if constexpr (F::kCodes) {
    const Floats scale = splat(later ? scoring.scale : 1.0f);
    return soften_codes(block, row, m, largest_of(maximum * scale), scale, begin, last, count);
  }
#endif
  const Floats scale = splat(later ? scoring.scale : 1.0f);
  const float before = block.maximum[row + m], highest = largest_of(maximum * scale);
  const float now = highest > before ? highest : before;
  Floats sum = {};
  const auto weight_of = [&](int64_t tile) {
    if (tile < begin || tile >= last) return Floats{};
    return exp2_of(load<Floats>(scores + tile * kTile) * scale - splat(now));
  };
#if defined(__AVX512BF16__)
  if constexpr (F::kPairs) {
    // Two tiles at a time; the sum is over rounded weights.
    const __m512bh ones = (__m512bh)splat(0x3f803f80u);
    for (int64_t tile = 0; tile < count; tile += 2) {
      const Floats first = weight_of(tile), second = weight_of(tile + 1);
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
      store(weights + tile * kTile * 2, both);
      sum = (Floats)_mm512_dpbf16_ps((__m512)sum, both, ones);
    }
    count = 0;
  }
#endif
  for (int64_t tile = 0; tile < count; ++tile) {
    Floats weight = weight_of(tile);
    if constexpr (F::kPairs) {
      const Halves rounded = bfloat16_of_floats(weight);
#if defined(INTERPOSER_MATRICES)
      if constexpr (Matrices<F>::kKnown && M > 1) {
        // Weights of a second row overwrite the first row's scores, which are no longer needed.
        char* pair = reinterpret_cast<char*>(block.scores + m / 2 * 2 * kKeys);
        store_operand_rows(pair + tile * kTile * 4 + m % 2 * kOperandRowBytes, rounded);
      } else
#endif
        store(weights + tile * kTile * 2, rounded);
      weight = floats_of_bfloat16(rounded);
    } else {
      store(weights + tile * kTile * 4, weight);
    }
    sum += weight;
  }
  const float factor = exp2_of(before - now);
  block.maximum[row + m] = now;
  block.sum[row + m] = block.sum[row + m] * factor + sum_of(sum);
  return factor;
}

template <class F>
void prepare(const interposer_attention_call& call, const AttentionItem& item, const Block& block) {
  const interposer_attention_step& step = call.plan->step;
  const int64_t group = step.num_heads / step.num_kv_heads, D = block.head_size;
  const int64_t size = size_of(step.type);
  const int64_t start = step.query_starts[item.sequence] + item.first_token;
  for (int64_t row = 0; row < block.rows; ++row) {
    const char* from = static_cast<const char*>(call.query) +
                       ((start + row / group) * call.query_stride +
                        (item.head * group + row % group) * D) *
                           size;
    char* to = block.x + row * D * F::kInputBytes;
    if constexpr (F::kGrouped) {
      prepare_grouped<F>(from, step.type, GroupedX{D}, block, row);
      continue;
    }
#if defined(INTERPOSER_CODES)
    if constexpr (F::kCodes) {
      prepare_codes(from, step.type, D, to, block.planes[row]);
      continue;
    }
#endif
#if defined(INTERPOSER_MATRICES)
    if constexpr (F::kPairs) {
      // Row counts as in `attend_block`: a single row is not half of a pair.
      constexpr int kMost = most_of(row_counts<F>());
      if (row % kMost || row + 1 < block.rows) {
        char* pair = block.x + row / 2 * 4 * D + row % 2 * kOperandRowBytes;
        for (int64_t i = 0; i < D; i += kLanes) {
          store_operand_rows(pair + 4 * i, load<Halves>(from + 2 * i));
        }
        continue;
      }
    }
#endif
    if constexpr (F::kPairs) {
      std::memcpy(to, from, size_t(2 * D));
    } else {
      for (int64_t i = 0; i < D; i += kLanes) {
        store(to + i * 4, load_floats(from + i * size, step.type));
      }
    }
  }
}

// Write results: weighted values divided by the sum of weights, including the sink.
void finish(const interposer_attention_call& call, const AttentionItem& item, const Block& block) {
  const interposer_attention_step& step = call.plan->step;
  const int64_t group = step.num_heads / step.num_kv_heads, D = block.head_size;
  const int64_t size = size_of(step.type);
  const int64_t start = step.query_starts[item.sequence] + item.first_token;
  const float scale = call.value_scales ? call.value_scales[item.head * call.scale_stride] : 1.0f;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t head = item.head * group + row % group;
    float sum = block.sum[row], factor = scale;
    if (call.sinks) {
      const char* from = static_cast<const char*>(call.sinks) + head * size;
      const float sink = load_some(from, step.type, 1)[0] * kLog2E;
      const float maximum = block.maximum[row];
      const float highest = sink > maximum ? sink : maximum;
      factor *= exp2_of(maximum - highest);
      sum = sum * exp2_of(maximum - highest) + exp2_of(sink - highest);
    }
    const Floats weight = splat(factor / sum);
    char* to = static_cast<char*>(call.out) +
               ((start + row / group) * step.num_heads + head) * D * size;
    for (int64_t i = 0; i < D; i += kLanes) {
      store_floats(to + i * size, load<Floats>(block.result + row * D + i) * weight, step.type);
    }
  }
}

// Merge the parts of a block (split-K) in order, and write the result.
void merge(const interposer_attention_call& call, const AttentionItem& item,
           const AttentionPartials& partials, const Block& block) {
  const int64_t rows = block.rows, D = block.head_size;
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
      const float* values = from + 2 * rows + row * D;
      for (int64_t i = 0; i < D; i += kLanes) {
        float* to = block.result + row * D + i;
        const Floats term = load<Floats>(values + i) * splat(factor);
        store(to, part ? load<Floats>(to) + term : term);
      }
    }
    block.maximum[row] = maximum;
    block.sum[row] = sum;
  }
  finish(call, item, block);
}

void round_row(const char* from, const interposer_attention_step& step, float scale, int64_t size,
               char* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    float values[kLanes];
    store(values, load_floats(from + i * size_of(step.type), step.type) / splat(scale));
    for (int lane = 0; lane < kLanes; ++lane) {
      to[i + lane] = char(rounded_to_8_bits(values[lane], step.cache_type));
    }
  }
}

// Store tokens of one sequence and one head; token numbers are within this step.
void store_tokens(const interposer_attention_call& call, int64_t sequence, int64_t first,
                  int64_t end, int64_t head, char* room) {
  const interposer_attention_step& step = call.plan->step;
  const interposer_kv_cache cache = cache_of(call);
  const int64_t D = step.head_size, size = size_of(step.type);
  for (int64_t token = first; token < end; ++token) {
    const int64_t index = step.query_starts[sequence] + token;
    const char* key =
        static_cast<const char*>(call.key) + (index * call.key_stride + head * D) * size;
    const char* value =
        static_cast<const char*>(call.value) + (index * call.value_stride + head * D) * size;
    if (step.cache_type == kCacheUInt4) {
      float* numbers = reinterpret_cast<float*>(room);
      for (int64_t i = 0; i < D; i += kLanes) {
        store(numbers + i, load_floats(key + i * size, step.type));
        store(numbers + D + i, load_floats(value + i * size, step.type));
      }
      put_groups(cache, head, step.slots[index], numbers, numbers + D);
    } else if (call.key_scales) {
      round_row(key, step, call.key_scales[head * call.scale_stride], D, room);
      round_row(value, step, call.value_scales[head * call.scale_stride], D, room + D);
      put_token(cache, head, step.slots[index], room, room + D);
    } else {
      put_token(cache, head, step.slots[index], key, value);
    }
  }
}

template <class F, int M>
void attend_rows(const Block& block, const Tiles& tiles, const Scoring& scoring, const Seen* seen,
                 int64_t row, bool first) {
  // The last row has the latest visible key, the first row the earliest.
  const int64_t end = seen[M - 1].end;
  if (end <= 0) {
    // Nothing to add: the results stay unchanged.
    if (!first) return;
    for (int m = 0; m < M; ++m) {
      float* result = block.result + (row + m) * block.head_size;
      for (int64_t i = 0; i < block.head_size; i += kLanes) store(result + i, Floats{});
    }
    return;
  }
  const int64_t count = (end - 1) / kTile + 1;
#if defined(INTERPOSER_TILES)
  if constexpr (M == kTileRows) {
    const int64_t D = block.head_size;
    score_sixteen(block.x + row * D * F::kInputBytes, D, tiles.keys, seen[0].first / kTile, count,
                  block.scores, kKeys * 4);
  } else
#elif defined(INTERPOSER_MATRICES)
  if constexpr (Matrices<F>::kKnown) {
    score_matrices<F, rows_of<F>(M)>(block, tiles, seen[0].first / kTile, count, row, M);
  } else
#endif
  if constexpr (F::kGrouped) {
    score_groups<F, M>(block, tiles, seen[0].first / kTile, count, row);
  } else {
    score_rows<F, M>(block, tiles, seen[0].first / kTile, count, row);
  }
  float factors[M];
  for (int m = 0; m < M; ++m) factors[m] = soften<F, M>(block, scoring, row, m, seen[m], count);
#if defined(INTERPOSER_TILES)
  if constexpr (M == kTileRows) {
    const TiledWeights weights = {reinterpret_cast<const char*>(block.scores), kKeys * 4,
                                  tiles.keys, tiles.value_distance, end / kTile, end % kTile};
    return weigh_sixteen(weights, block.head_size, first ? nullptr : factors,
                         block.result + row * block.head_size);
  } else
#elif defined(INTERPOSER_MATRICES)
  if constexpr (Matrices<F>::kKnown) {
    weigh_matrices<F, rows_of<F>(M)>(block, tiles, end, row, M, first ? nullptr : factors);
  } else
#endif
  if constexpr (F::kGrouped) {
    weigh_groups<F, M>(block, tiles, count, row, first ? nullptr : factors);
  } else {
    weigh_rows<F, M>(block, tiles, tiles.first_key + end, row, first ? nullptr : factors);
  }
}

// Write the addresses of tiles, from the tile of `position`, to entries `first` to `end` - 1. After
// the item's tiles come those of the next item, or the last tile repeated.
void find_tiles(const interposer_attention_call& call, const interposer_kv_cache& cache,
                const AttentionItem& item, int64_t position, int64_t first, int64_t end,
                const AttentionItem* next_item, Tiles& tiles) {
  const interposer_attention_step& step = call.plan->step;
  const int64_t* table = step.page_table + item.sequence * step.table_stride;
  for (; first < end && position < item.end_key; ++first, position += kTile) {
    tiles.keys[first] = tile_at(cache, item.head, table[position / step.page_tokens],
                                position % step.page_tokens);
  }
  if (first == end) return;
  if (next_item) {
    const int64_t begin = next_item->first_key / kTile * kTile;
    return find_tiles(call, cache, *next_item, begin, first, end, nullptr, tiles);
  }
  for (; first < end; ++first) tiles.keys[first] = tiles.keys[first - 1];
}

// `kWidened`: keys and values are converted to bfloat16 first, once for all rows.
template <class F, bool kWidened = false>
void attend_block(const interposer_attention_call& call, const AttentionItem& item,
                  const AttentionItem* next_item, const AttentionPartials& partials,
                  char* scratch) {
  const interposer_attention_step& step = call.plan->step;
  const interposer_kv_cache cache = cache_of(call);
  const int64_t group = step.num_heads / step.num_kv_heads, D = step.head_size;
  const Block block(scratch, call.plan->most_rows, item.num_tokens * group, D);
  const int64_t num_tokens = step.query_starts[item.sequence + 1] - step.query_starts[item.sequence];
  const int64_t before = step.seq_lens[item.sequence] - num_tokens;
  if (item.num_tokens == num_tokens) {  // the only block with these keys stores them
    const int64_t from = item.first_key - before;
    store_tokens(call, item.sequence, from > 0 ? from : 0, item.end_key - before, item.head,
                 scratch);
  }
  prepare<F>(call, item, block);
  for (int64_t row = 0; row < block.rows; ++row) block.maximum[row] = kLowest, block.sum[row] = 0;
  Scoring scoring = {float(step.scale * kLog2E), 0, 0};
  if (call.key_scales) scoring.scale *= call.key_scales[item.head * call.scale_stride];
  if (step.softcap != 0) {
    scoring.cap = float(step.softcap * kLog2E);
    scoring.uncapped = scoring.scale / scoring.cap;
  }
  const int64_t begin = item.first_key / kTile * kTile;
  Tiles tiles;
  const int64_t ahead = kAheadBytes / tile_bytes(cache);
  tiles.ahead = ahead < 1 ? 1 : ahead < kMostAhead ? ahead : kMostAhead;
#if defined(INTERPOSER_TILES)
  TileRegisters registers;
  if (kTiled<F> && block.rows >= kTileRows) registers.shape(attention_shapes());
#endif
  for (int64_t key = begin; key < item.end_key; key += kKeys) {
    const int64_t left = item.end_key - key;
    const int64_t end = key + (left < kKeys ? left : kKeys);
    tiles.first_key = key;
    tiles.count = (end - key + kTile - 1) / kTile;
    tiles.value_distance = value_distance(cache);
    tiles.bytes = tile_bytes(cache);
    find_tiles(call, cache, item, key, 0, tiles.count + kMostAhead, next_item, tiles);
#if defined(INTERPOSER_PAIRS)
    if constexpr (kWidened) widen_tiles(cache, block, tiles);
#endif
    auto attend_group = [&](auto rows, int64_t row) {
      constexpr int M = decltype(rows)::value;
      Seen seen[M];
      for (int m = 0; m < M; ++m) {
        const int64_t position = before + item.first_token + (row + m) / group;
        const int64_t oldest = step.window_tokens ? position - step.window_tokens + 1 : 0;
        const int64_t lowest = oldest > item.first_key ? oldest : item.first_key;
        const int64_t highest = position + 1 < end ? position + 1 : end;
        seen[m] = {lowest > key ? lowest - key : 0, highest - key};
        if (seen[m].first > seen[m].end) seen[m].first = seen[m].end > 0 ? seen[m].end : 0;
      }
      attend_rows<F, M>(block, tiles, scoring, seen, row, key == begin);
    };
    int64_t row = 0;
#if defined(INTERPOSER_TILES)
    if constexpr (kTiled<F>) {
      for (; row + kTileRows <= block.rows; row += kTileRows) {
        attend_group(std::integral_constant<int, kTileRows>(), row);
      }
    }
#endif
    take_rows(row_counts<F>(), row, block.rows, attend_group);
  }
  if (item.num_parts == 1) return finish(call, item, block);
  float* part = partials.data + (item.first_partial + item.part) * partials.stride;
  std::memcpy(part, block.maximum, size_t(block.rows) * 4);
  std::memcpy(part + block.rows, block.sum, size_t(block.rows) * 4);
  std::memcpy(part + 2 * block.rows, block.result, size_t(block.rows * D) * 4);
  // The thread that finishes the last part merges the parts.
  if (partials.unfinished[item.split].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    merge(call, item, partials, block);
  }
}

void attend(const interposer_attention_call& call, const AttentionItem& item,
            const AttentionItem* next, const AttentionPartials& partials, char* scratch) {
  const interposer_attention_step& step = call.plan->step;
#if defined(INTERPOSER_PAIRS)
  const int64_t rows = item.num_tokens * (step.num_heads / step.num_kv_heads);
  if (step.type == kBFloat16 && step.cache_type != kCacheBFloat16 && rows >= kWidenedRows) {
    return attend_block<BFloat16OnPairs, true>(call, item, next, partials, scratch);
  }
#endif
#if defined(__AVX512BF16__)
  if (step.type == kBFloat16 && step.cache_type == kCacheUInt4) {
    return attend_block<UInt4OnPairs>(call, item, next, partials, scratch);
  }
#endif
#if defined(INTERPOSER_CODES)
  if (step.type == kBFloat16 && step.cache_type == kCacheUInt4) {
    return attend_block<UInt4OnCodes>(call, item, next, partials, scratch);
  }
  // For bfloat16 queries, the rounding to planes is negligible.
  if (step.type == kBFloat16 && step.cache_type == kCacheInt8) {
    return attend_block<Int8OnCodes>(call, item, next, partials, scratch);
  }
#endif
#if defined(INTERPOSER_PAIRS)
  if (step.type == kBFloat16) {
    if (step.cache_type == kCacheBFloat16) {
      return attend_block<BFloat16OnPairs>(call, item, next, partials, scratch);
    }
#if defined(__AVX512BF16__)
    if (step.cache_type == kCacheE4M3) {
      return attend_block<E4M3OnPairs>(call, item, next, partials, scratch);
    }
    if (step.cache_type == kCacheE5M2) {
      return attend_block<E5M2OnPairs>(call, item, next, partials, scratch);
    }
#endif
  }
#endif
  switch (step.cache_type) {
    case kCacheFloat32:
      return attend_block<Float32OnFloats>(call, item, next, partials, scratch);
    case kCacheBFloat16:
      return attend_block<BFloat16OnFloats>(call, item, next, partials, scratch);
    case kCacheFloat16:
      return attend_block<Float16OnFloats>(call, item, next, partials, scratch);
    case kCacheE4M3:
      return attend_block<E4M3OnFloats>(call, item, next, partials, scratch);
    case kCacheE5M2:
      return attend_block<E5M2OnFloats>(call, item, next, partials, scratch);
    case kCacheInt8:
      return attend_block<Int8OnFloats>(call, item, next, partials, scratch);
    default:
      return attend_block<UInt4OnFloats>(call, item, next, partials, scratch);
  }
}

int64_t scratch_bytes(const interposer_attention_plan& plan) {
  return Block::bytes(plan.most_rows, plan.step.head_size) +
         (plan.most_rows >= kWidenedRows ? widened_bytes(plan.step.head_size) : 0);
}

void store_some_tokens(const interposer_attention_call& call, const AttentionWrite& write,
                       int64_t head) {
  constexpr int64_t kMostHeadSize = 4096;
  char room[2 * kMostHeadSize];
  store_tokens(call, write.sequence, write.first_token, write.first_token + write.num_tokens, head,
               room);
}

}  // namespace

extern "C" const AttentionKernels INTERPOSER_OF_LEVEL(interposer_attention);
extern "C" const AttentionKernels INTERPOSER_OF_LEVEL(interposer_attention) = {
    scratch_bytes, store_some_tokens, attend};
