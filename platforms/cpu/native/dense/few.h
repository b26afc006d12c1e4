// A block of few query rows, as in decoding. Included once for every level.
//
// Rows across lanes would waste most lanes. Here the elements of a vector are across lanes, and
// keys are used in place if stored in the computed format; in the softmax, keys are across lanes.
#pragma once

#include "block.h"

namespace {

constexpr int64_t kFewRows = 8;
// Scores or weights of one row.
template <class F>
constexpr int64_t kFewStride = (kKeys<F> + kLanes - 1) / kLanes * kLanes;

// Prefetch a next row while the current one is multiplied.
INTERPOSER_INLINE void fetch(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, kSecondLevel);
}

template <class F>
INTERPOSER_INLINE void add_products(Floats& sum, Words a, Words b) {
  if constexpr (!F::kPairs) {
    sum += as_floats(a) * as_floats(b);
  } else {
#if defined(__AVX512BF16__)
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    for (int i = 0; i < 4; ++i) {
      const float32x4_t four = load<float32x4_t>((const char*)&sum + 16 * i);
      store((char*)&sum + 16 * i, vbfdotq_f32(four, load<bfloat16x8_t>((const char*)&a + 16 * i),
                                              load<bfloat16x8_t>((const char*)&b + 16 * i)));
    }
#endif
  }
}

typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t QuarterInts __attribute__((vector_size(16)));

INTERPOSER_INLINE Quarter quarters_of(const Floats& lanes) {
  const char* from = (const char*)&lanes;
  return (load<Quarter>(from) + load<Quarter>(from + 16)) +
         (load<Quarter>(from + 32) + load<Quarter>(from + 48));
}

// Sum each of sixteen vectors over its lanes; lane i is the sum of vector i.
INTERPOSER_INLINE Floats sums_of(const Floats* vectors) {
  const QuarterInts even = {0, 4, 2, 6}, odd = {1, 5, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
  Floats sums;
  for (int i = 0; i < 4; ++i) {
    const Quarter a = quarters_of(vectors[4 * i]), b = quarters_of(vectors[4 * i + 1]);
    const Quarter c = quarters_of(vectors[4 * i + 2]), d = quarters_of(vectors[4 * i + 3]);
    const Quarter ab = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    const Quarter cd = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
    store((char*)&sums + 16 * i, __builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high));
  }
  return sums;
}

// Compute scores of R rows from `row` on. Prefetches `next`, if any, in the size of keys.
template <class F, int R>
void score_few_rows(const Block& block, int64_t row, const char* const* keys,
                    const char* const* next, int64_t count) {
  constexpr int K = 4;
  const int64_t row_bytes = block.key_words * 4;
  const char* queries = block.queries + row * row_bytes;
  for (int64_t key = 0; key < count; key += kLanes) {
    Floats products[R][kLanes];
    for (int first = 0; first < kLanes; first += K) {
      const char* x[K];
      for (int k = 0; k < K; ++k) {
        const int64_t wanted = key + first + k, at = wanted < count ? wanted : count - 1;
        x[k] = keys[at];
        if (next) fetch(next[at], row_bytes);
      }
      Floats sums[K][R] = {};
      for (int64_t at = 0; at < row_bytes; at += 64) {
        Words query[R];
        for (int r = 0; r < R; ++r) query[r] = load<Words>(queries + r * row_bytes + at);
        for (int k = 0; k < K; ++k) {
          const Words words = load<Words>(x[k] + at);
          for (int r = 0; r < R; ++r) add_products<F>(sums[k][r], query[r], words);
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int k = 0; k < K; ++k) products[r][first + k] = sums[k][r];
      }
    }
    for (int r = 0; r < R; ++r) {
      store(block.scores + (row + r) * kFewStride<F> + key, sums_of(products[r]));
    }
  }
}

template <class F>
void score_few(const Block& block, const char* const* keys, const char* const* next,
               int64_t count) {
  int64_t row = 0;
  for (; row + 4 <= block.rows; row += 4, next = nullptr) {
    score_few_rows<F, 4>(block, row, keys, next, count);
  }
  for (; row + 2 <= block.rows; row += 2, next = nullptr) {
    score_few_rows<F, 2>(block, row, keys, next, count);
  }
  if (row < block.rows) score_few_rows<F, 1>(block, row, keys, next, count);
}

// `soften` for one row.
template <class F>
void soften_few(const Block& block, const Scoring& scoring, bool is_biased, int64_t row,
                int64_t begin, int64_t count) {
  float* scores = block.scores + row * kFewStride<F>;
  const int64_t first = block.first[row] - begin;
  const int64_t end = block.end[row] - begin < count ? block.end[row] - begin : count;
  const Ints lanes = lane_numbers();
  const float before = block.maximum[row];
  Floats most = splat(before);
  for (int64_t key = 0; key < count; key += kLanes) {
    Floats score = load<Floats>(scores + key);
    if (scoring.cap == 0) {
      score = score * splat(scoring.scale);
    } else {
      score = tanh_of(score * splat(scoring.uncapped)) * splat(scoring.cap);
    }
    const Ints at = splat(int32_t(key)) + lanes;
    if (is_biased) {
      const Floats away =
          converted<Floats>(splat(int32_t(block.position[row] - begin)) - at);
      score -= splat(block.slope[row]) * (Floats)((Ints)away & 0x7fffffff);
    }
    if (key < first || key + kLanes > end) {
      const Ints seen = (at >= splat(int32_t(first))) & (at < splat(int32_t(end)));
      score = chosen(seen, score, splat(-INFINITY));
    }
    store(scores + key, score);
    most = larger(score, most);
  }
  const float maximum = largest_of(most);
  const float factor = exp2_of(before - maximum);
  Floats sum = {};
  for (int64_t key = 0; key < count; key += kLanes) {
    const Floats weight = exp2_of(load<Floats>(scores + key) - splat(maximum));
    sum += weight;  // not rounded, as the logarithm of the sum is a result too
    // No score is overwritten before it is read.
    if constexpr (F::kPairs) {
      store(reinterpret_cast<char*>(scores) + key * 2, bfloat16_of_floats(weight));
    } else {
      store(scores + key, weight);
    }
  }
  block.maximum[row] = maximum;
  block.sum[row] = block.sum[row] * factor + sum_of(sum);
  block.factor[row] = factor;
}

template <class F, int T>
void weigh_few_columns(const Block& block, int64_t column, int64_t steps) {
  constexpr int64_t kRowBytes = kFewStride<F> * 4;
  const char* weights = reinterpret_cast<const char*>(block.scores);
  int64_t row = 0;
  for (; row + 4 <= block.rows; row += 4) {
    weigh_rows<F, 4, T>(block, row, {weights + row * kRowBytes, kRowBytes, 4}, column, 0, steps);
  }
  for (; row + 2 <= block.rows; row += 2) {
    weigh_rows<F, 2, T>(block, row, {weights + row * kRowBytes, kRowBytes, 4}, column, 0, steps);
  }
  if (row < block.rows) {
    weigh_rows<F, 1, T>(block, row, {weights + row * kRowBytes, kRowBytes, 4}, column, 0, steps);
  }
}

// Add weights times values for `steps` rows of words.
template <class F>
void weigh_few(const Block& block, int64_t steps) {
  int64_t column = 0;
  if constexpr (kMostTiles > 1) {
    for (; column + 4 * kLanes <= block.columns; column += 4 * kLanes) {
      weigh_few_columns<F, 4>(block, column, steps);
    }
  }
  for (; column < block.columns; column += kLanes) weigh_few_columns<F, 1>(block, column, steps);
}

}  // namespace
