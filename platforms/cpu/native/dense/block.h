// A block of query rows over a range of keys: both matmuls, with the softmax between them. Included
// once for every level.
//
// Query rows are across lanes, sixteen rows per tile, so that keys are used in row order: each word
// of a key times a row of words of queries. The weights have the same layout, [keys][rows].
#pragma once

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "matrices.h"
#include "rows.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMostTiles = 4;  // tiles summed at a time for a key
constexpr int keys_of(int tiles) { return tiles == 1 ? 8 : 6; }
constexpr int kMostRows = 6;
#else
constexpr int kMostTiles = 1;  // a tile takes two or four registers of 16 or 32
constexpr int keys_of(int) { return 6; }
constexpr int kMostRows = 4;
#endif

// Prefetched to the second-level cache, which allows more outstanding requests than the first
// level.
constexpr int kSecondLevel = 2;

// Rows whose scores are in memory at a time.
constexpr int64_t kGroupRows = 4 * kLanes;

// Keys per iteration: the same number of bytes in either format.
template <class F>
constexpr int64_t kKeys = F::kPairs ? 144 : 72;
// Scores are computed for this many extra keys, and ignored.
constexpr int64_t kMoreKeys = 8;

struct Scoring {
  float scale;     // scale of scores, including the factor to base 2
  float cap;       // softcap in base 2, or 0
  float uncapped;  // scale of scores before tanh
};

// Working memory of a block.
struct Block {
  int64_t rows, padded_rows;  // padded_rows: rounded up to full tiles
  int64_t key_words, columns;
  char* queries;   // [tiles][key_words][16]
  char* keys;      // [kKeys + kMoreKeys][key_words]
  char* values;    // [kKeys / kInputs][columns]
  char* room;      // buffer for two rows of values
  float* scores;   // [kKeys + kMoreKeys][kGroupRows], and weights [kKeys / kInputs][kGroupRows]
  float* result;   // [padded rows][columns]
  float* maximum;  // [padded rows], like the following ones
  float* sum;
  float* factor;
  float* slope;       // in base 2
  int32_t* position;  // position of the query
  int32_t* first;     // first visible key
  int32_t* end;       // end of the visible keys (exclusive)

  // Returns the size in bytes. The number of words of a row is a multiple of `multiple`.
  template <class F>
  int64_t lay(char* scratch, int64_t most_rows, const interposer_dense_call& call,
              int64_t multiple = 1) {
    const int64_t padded = rounded_up(most_rows, kLanes);
    key_words = rounded_up((call.head_size + F::kInputs - 1) / F::kInputs, multiple);
    columns = rounded_up(call.value_size, kLanes);
    char* at = scratch;
    auto take = [&](auto*& pointer, int64_t words) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at += rounded_up(words, kLanes) * 4;
    };
    take(queries, padded * key_words);
    take(keys, (kKeys<F> + kMoreKeys) * key_words);
    take(values, kKeys<F> / F::kInputs * columns);
    take(room, 2 * columns);
    take(scores, (kKeys<F> + kMoreKeys) * kGroupRows);
    take(result, padded * columns);
    for (float** one : {&maximum, &sum, &factor, &slope}) take(*one, padded);
    for (int32_t** one : {&position, &first, &end}) take(*one, padded);
    return at - scratch;
  }
};

// Next rows, prefetched while the current ones are multiplied. They are assumed to be consecutive;
// at the end of a page, the prefetch is useless but harmless.
struct Ahead {
  const Source* rows;  // null if the rows are not consecutive
  int64_t begin, end;  // positions
  int64_t row_bytes;
};

template <class F, int M, int T>
void score_keys(const Block& block, int64_t tile, int64_t key, float* scores,
                const Ahead& ahead) {
  const int64_t x_stride = block.key_words * 4, tile_stride = block.key_words * kLanes * 4;
  const char* words = block.queries + tile * tile_stride;
  const char* x = block.keys + key * x_stride;
  const bool is_fetched = ahead.rows && ahead.begin + key < ahead.end;
  const char* next = is_fetched ? ahead.rows->row(ahead.begin + key) : x;
  const int64_t next_step = is_fetched ? M * ahead.row_bytes / block.key_words : 0;
  Floats sums[M][T] = {};
  int64_t step = 0;
#if defined(INTERPOSER_MATRICES)
  if constexpr (F::kPairs) {
    step = add_squares<M>(sums, words, kLanes * 4, block.key_words, [&](int m, int64_t at) {
      __builtin_prefetch(next + (at + m / 2) * next_step, 0, kSecondLevel);
      const char* from = x + m * x_stride + at * 4;
      return vcombine_u8(load<uint8x8_t>(from), load<uint8x8_t>(from + x_stride));
    });
  }
#endif
  for (; step < block.key_words; ++step) {
    __builtin_prefetch(next + step * next_step, 0, kSecondLevel);
    for (int t = 0; t < T; ++t) {
      typename F::Part part[1];
      F::decode(load<Words>(words + t * tile_stride + step * kLanes * 4), part);
      for (int m = 0; m < M; ++m) F::add(sums[m][t], part[0], x + m * x_stride + step * 4);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int t = 0; t < T; ++t) store(scores + (key + m) * kGroupRows + t * kLanes, sums[m][t]);
  }
}

template <class F, int T>
void score_tiles(const Block& block, int64_t tile, int64_t from, int64_t to, float* scores,
                 const Ahead& ahead) {
  constexpr int M = keys_of(T);
  for (int64_t key = from; key < to; key += M) {
    score_keys<F, M, T>(block, tile, key, scores, ahead);
  }
}

// Compute scores of some tiles with the keys from `from` to `to`.
template <class F>
void score(const Block& block, int64_t tile, int64_t tiles, int64_t from, int64_t to,
           const Ahead& ahead) {
  for (int64_t done = 0; done < tiles;) {
    float* scores = block.scores + done * kLanes;
    const int64_t left = tiles - done, at = tile + done;
    if constexpr (kMostTiles > 1) {
      if (left >= 4) {
        score_tiles<F, 4>(block, at, from, to, scores, ahead), done += 4;
        continue;
      }
      if (left >= 2) {
        score_tiles<F, 2>(block, at, from, to, scores, ahead), done += 2;
        continue;
      }
    }
    score_tiles<F, 1>(block, at, from, to, scores, ahead), ++done;
  }
}

// One word per lane: the weight of one key, or the rounded weights of two keys.
template <class F>
INTERPOSER_INLINE Words weight_words(Floats first, Floats second) {
  if constexpr (!F::kPairs) {
    return (Words)first;
  } else {
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Words)_mm512_permutexvar_epi16(order, both);
#else
    return converted<Words>(bfloat16_of_floats(first)) |
           converted<Words>(bfloat16_of_floats(second)) << 16;
#endif
  }
}

// Convert the scores of tile `number` of a group to weights; invisible keys get zero. Key positions
// start at `begin`. Stores the factor by which earlier results of the rows must be multiplied.
template <class F>
void soften(const Block& block, const Scoring& scoring, bool is_biased, int64_t tile,
            int64_t number, int64_t begin, int64_t from, int64_t to) {
  float* scores = block.scores + number * kLanes;
  const int64_t row = tile * kLanes;
  const Ints first = load<Ints>(block.first + row) - splat(int32_t(begin));
  const Ints end = load<Ints>(block.end + row) - splat(int32_t(begin));
  bool is_masked = false;
  for (int lane = 0; lane < kLanes; ++lane) is_masked |= first[lane] > from || end[lane] < to;
  const Floats slope = load<Floats>(block.slope + row);
  const Floats position = converted<Floats>(load<Ints>(block.position + row) - splat(int32_t(begin)));
  Floats maximum = load<Floats>(block.maximum + row);
  const Floats before = maximum;
  if (scoring.cap == 0 && !is_biased && !is_masked) {
    for (int64_t key = from; key < to; ++key) {
      const Floats score = load<Floats>(scores + key * kGroupRows) * splat(scoring.scale);
      store(scores + key * kGroupRows, score);
      maximum = larger(score, maximum);
    }
  } else {
    for (int64_t key = from; key < to; ++key) {
      Floats score = load<Floats>(scores + key * kGroupRows);
      if (scoring.cap == 0) {
        score = score * splat(scoring.scale);
      } else {
        score = tanh_of(score * splat(scoring.uncapped)) * splat(scoring.cap);
      }
      if (is_biased) {
        const Floats away = position - splat(float(key));
        score -= slope * (Floats)((Ints)away & 0x7fffffff);
      }
      const Ints at = splat(int32_t(key));
      score = chosen((at >= first) & (at < end), score, splat(-INFINITY));
      store(scores + key * kGroupRows, score);
      maximum = larger(score, maximum);
    }
  }
  const Floats factor = exp2_of(before - maximum);
  Floats sum = load<Floats>(block.sum + row) * factor;
  for (int64_t key = from; key < to; key += F::kInputs) {
    const Floats one = exp2_of(load<Floats>(scores + key * kGroupRows) - maximum);
    Floats other = {};
    if (F::kPairs && key + 1 < to) {
      other = exp2_of(load<Floats>(scores + (key + 1) * kGroupRows) - maximum);
    }
    const Words words = weight_words<F>(one, other);
    // No score is overwritten before it is read: there are as many rows of weights as of scores, or
    // half as many.
    store(scores + key / F::kInputs * kGroupRows, words);
    sum += one + other;  // not rounded, as the logarithm of the sum is also a result
  }
  store(block.maximum + row, maximum);
  store(block.sum + row, sum);
  store(block.factor + row, factor);
}

// Words of weights, and the byte distances between rows and between keys.
struct Weights {
  const char* data;
  int64_t row, step;
};

// Weights from `from` on.
template <class F, int M, int T>
void weigh_rows(const Block& block, int64_t row, Weights weights, int64_t column, int64_t from,
                int64_t to) {
  const int64_t row_bytes = block.columns * 4;
  const char* words = block.values + from * row_bytes + column * 4;
  const char* x = weights.data;
  float* result = block.result + row * block.columns + column;
  Floats sums[M][T];
  for (int m = 0; m < M; ++m) {
    const Floats factor = splat(block.factor[row + m]);
    for (int t = 0; t < T; ++t) {
      sums[m][t] = load<Floats>(result + m * block.columns + t * kLanes) * factor;
    }
  }
#if defined(INTERPOSER_MATRICES)
  if constexpr (F::kPairs && M % 2 == 0) {
    // Weights of one key for all rows are adjacent, so weights of two keys are interleaved too.
    const int64_t done = add_squares<M>(sums, words, row_bytes, to - from, [&](int m, int64_t at) {
      const char* pair = x + m * weights.row + at * weights.step;
      uint32x2_t first, second;
      if (weights.row == 4) {
        first = load<uint32x2_t>(pair), second = load<uint32x2_t>(pair + weights.step);
      } else {
        // With few rows, the weights of one row are adjacent.
        return vcombine_u8(load<uint8x8_t>(pair), load<uint8x8_t>(pair + weights.row));
      }
      return vreinterpretq_u8_u32(vcombine_u32(vzip1_u32(first, second), vzip2_u32(first, second)));
    });
    from += done, words += done * row_bytes, x += done * weights.step;
  }
#endif
  for (int64_t step = from; step < to; ++step) {
    for (int t = 0; t < T; ++t) {
      typename F::Part part[1];
      F::decode(load<Words>(words + t * kLanes * 4), part);
      for (int m = 0; m < M; ++m) F::add(sums[m][t], part[0], x + m * weights.row);
    }
    words += row_bytes;
    x += weights.step;
  }
  for (int m = 0; m < M; ++m) {
    for (int t = 0; t < T; ++t) store(result + m * block.columns + t * kLanes, sums[m][t]);
  }
}

template <class F, int T>
void weigh_columns(const Block& block, int64_t row, int64_t rows, int64_t column, int64_t from,
                   int64_t to) {
  const char* data = reinterpret_cast<const char*>(block.scores + from * kGroupRows);
  const auto of = [&](int64_t number) { return Weights{data + number * 4, 4, kGroupRows * 4}; };
  int64_t done = 0;
  for (; done + kMostRows <= rows; done += kMostRows) {
    weigh_rows<F, kMostRows, T>(block, row + done, of(done), column, from, to);
  }
  if constexpr (kMostRows > 4) {
    if (done + 4 <= rows) {
      weigh_rows<F, 4, T>(block, row + done, of(done), column, from, to), done += 4;
    }
  }
  // An odd last row is paired with a padding row.
  for (; done < rows; done += 2) {
    weigh_rows<F, 2, T>(block, row + done, of(done), column, from, to);
  }
}

// Add weights times values for the `rows` rows of a group that begins at `row`.
template <class F>
void weigh(const Block& block, int64_t row, int64_t rows, int64_t from, int64_t to) {
  const int64_t first = from / F::kInputs, last = (to + F::kInputs - 1) / F::kInputs;
  int64_t column = 0;
  if constexpr (kMostTiles > 1) {
    for (; column + 4 * kLanes <= block.columns; column += 4 * kLanes) {
      weigh_columns<F, 4>(block, row, rows, column, first, last);
    }
  }
  for (; column < block.columns; column += kLanes) {
    weigh_columns<F, 1>(block, row, rows, column, first, last);
  }
}

}  // namespace
