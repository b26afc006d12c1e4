// 2x2 blocks of two rows of x and two lanes, by ARM's matrix instructions. Included once for every
// level.
//
// An operand is two rows of eight bytes. Two consecutive rows of words are interleaved lane by lane
// to operands. x is stored as operands: eight bytes of a first row, eight of a second row. The two
// are rows of queries or weights, or both planes of one row. If a first row has no second row, its
// partner's sums are ignored.
//
// BFMMLA equals two consecutive BFDOT, so that a row of floats gets the same bits as from vectors,
// and SMMLA is exact. Source: Arm Architecture Reference Manual, BFMMLA (vector).
#pragma once

#include <type_traits>

#include "block.h"
#include "formats.h"

namespace {

// Row counts that kernels are compiled for, descending.
template <int... M>
struct RowCounts {};

// Matrix-instruction kernel of a format; specialized for the formats that support it.
template <class F>
struct Matrices {
  static constexpr bool kKnown = false;
};

#if defined(INTERPOSER_MATRICES)

template <>
struct Matrices<BFloat16OnPairs> {
  static constexpr bool kKnown = true;
  typedef RowCounts<8, 7, 6, 5, 4, 3, 2, 1> Rows;
  typedef float32x4_t Sum;

  static INTERPOSER_INLINE Sum multiply(Sum sum, uint8x16_t x, uint32x4_t words) {
    return multiply_bfloat16(sum, x, words);
  }
};

template <>
struct Matrices<Int8OnCodes> {
  static constexpr bool kKnown = true;
  typedef RowCounts<4, 3, 2, 1> Rows;
  typedef int32x4_t Sum;

  static INTERPOSER_INLINE Sum multiply(Sum sum, uint8x16_t x, uint32x4_t words) {
    return vmmlaq_s32(sum, vreinterpretq_s8_u8(x), vreinterpretq_s8_u32(words));
  }
};

// `Q` quarters of sixteen lanes; more than four belong to several groups of lanes.
template <int Q>
struct Quarters {
  static constexpr int kGroups = Q > 4 ? Q / 4 : 1, kOfGroup = Q / kGroups;
  static constexpr int kLanesOfGroup = kOfGroup * kQuarter;
  typedef const char* Addresses[kGroups];
};

// Common part of all sums. `x` multiplies two rows of words at a time, `resume` starts from results
// times factors, `add` continues for a number of row pairs, and `each` calls `write` with every
// existing row, a quarter, and four numbers.
//
// P pairs of rows, or of planes of one row, by Q quarters.
template <class F, int P, int Q>
struct Squares : Quarters<Q> {
  using typename Quarters<Q>::Addresses;
  typedef typename Matrices<F>::Sum Sum;
  static constexpr int kXBytes = kOperandBytes;

  Sum sums[P][Q][2] = {};  // 2x2 block: two lanes of the first row, then of the second

  INTERPOSER_INLINE void resume(const float* result, int64_t head_size, int rows,
                                const float* factors) {
    for (int p = 0; p < P; ++p) {
      for (int q = 0; q < Q; ++q) {
        for (int i = 0; i < 2 && 2 * p + i < rows; ++i) {
          const int m = 2 * p + i;
          const float32x4_t before = load<float32x4_t>(result + m * head_size + q * kQuarter);
          sums[p][q][i] = (Sum)(before * vdupq_n_f32(factors[m]));
        }
        exchange(sums[p][q][0], sums[p][q][1]);
      }
    }
  }

  template <bool kFetched>
  INTERPOSER_INLINE void add(const Addresses& words, int64_t row_bytes, int64_t count,
                             const char* x, int64_t x_stride, const Addresses& ahead,
                             int64_t ahead_bytes) {
// If unrolled, early loads would take registers from the sums.
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; ++i) {
      uint8x16_t rows[P];
      for (int p = 0; p < P; ++p) {
        rows[p] = load<uint8x16_t>(x + p * (2 / F::kPlanes) * x_stride + i * kXBytes);
      }
      for (int q = 0; q < Q; ++q) {
        const int group = q / this->kOfGroup, quarter = q % this->kOfGroup;
        const char* from = words[group] + 2 * i * row_bytes + quarter * kQuarter * 4;
        if (kFetched && quarter == 0) fetch_two(ahead[group] + 2 * i * ahead_bytes, ahead_bytes);
        const LanePairs pairs(from, row_bytes);
        for (int p = 0; p < P; ++p) {
          sums[p][q][0] = Matrices<F>::multiply(sums[p][q][0], rows[p], pairs.low);
          sums[p][q][1] = Matrices<F>::multiply(sums[p][q][1], rows[p], pairs.high);
        }
      }
    }
  }

  template <class Write>
  INTERPOSER_INLINE void each(int rows, const Planes* planes, Write write) {
    for (int p = 0; p < P; ++p) {
      for (int q = 0; q < Q; ++q) {
        exchange(sums[p][q][0], sums[p][q][1]);
        if constexpr (F::kCodes) {
          const float32x4_t high = vcvtq_f32_s32(sums[p][q][0]);
          const float32x4_t low = vcvtq_f32_s32(sums[p][q][1]);
          write(p, q, (high * vdupq_n_f32(256.0f) + low) * vdupq_n_f32(planes[p].unit));
        } else {
          write(2 * p, q, sums[p][q][0]);
          if (2 * p + 1 < rows) write(2 * p + 1, q, sums[p][q][1]);
        }
      }
    }
  }
};

// One row of bfloat16, which would waste half of every matrix operand: for four numbers of sixteen
// lanes, this takes 17 instructions, and matrices take 25.
template <int Q>
struct Strip : Quarters<Q> {
  using typename Quarters<Q>::Addresses;
  static constexpr int kXBytes = kOperandRowBytes;

  float32x4_t sums[Q] = {};

  INTERPOSER_INLINE void resume(const float* result, int64_t, int, const float* factors) {
    for (int q = 0; q < Q; ++q) {
      sums[q] = load<float32x4_t>(result + q * kQuarter) * vdupq_n_f32(factors[0]);
    }
  }

  template <bool kFetched>
  INTERPOSER_INLINE void add(const Addresses& words, int64_t row_bytes, int64_t count,
                             const char* x, int64_t, const Addresses& ahead, int64_t ahead_bytes) {
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; ++i) {
      const bfloat16x4_t four = vreinterpret_bf16_u8(load<uint8x8_t>(x + i * kXBytes));
      for (int q = 0; q < Q; ++q) {
        const int group = q / this->kOfGroup, quarter = q % this->kOfGroup;
        const char* from = words[group] + 2 * i * row_bytes + quarter * kQuarter * 4;
        if (kFetched && quarter == 0) fetch_two(ahead[group] + 2 * i * ahead_bytes, ahead_bytes);
        sums[q] = vbfdotq_lane_f32(sums[q], load<bfloat16x8_t>(from), four, 0);
        sums[q] = vbfdotq_lane_f32(sums[q], load<bfloat16x8_t>(from + row_bytes), four, 1);
      }
    }
  }

  template <class Write>
  INTERPOSER_INLINE void each(int, const Planes*, Write write) {
    for (int q = 0; q < Q; ++q) write(0, q, sums[q]);
  }
};

// Sums of R rows; R is even or 1 in formats without planes. Their number fits in registers and is
// large enough that no sum waits for the previous multiplication.
template <class F, int R, int Q>
using SumsOf =
    std::conditional_t<R * F::kPlanes == 1, Strip<Q>, Squares<F, R * F::kPlanes / 2, Q>>;

constexpr int quarters_of(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }

// Kernel for M rows.
template <class F>
constexpr int rows_of(int rows) {
  return F::kPlanes == 1 && rows > 1 ? rows + rows % 2 : rows;
}

template <class F, class Sums>
INTERPOSER_INLINE void score_quarters(const Block& block, const Tiles& tiles, int64_t tile,
                                      int64_t row, int rows) {
  const int64_t x_stride = block.head_size * F::kInputBytes;
  const int64_t count = x_stride / F::kPlanes / kOperandRowBytes;
  typename Sums::Addresses words, ahead;
  for (int g = 0; g < Sums::kGroups; ++g) {
    words[g] = tiles.keys[tile + g];
    ahead[g] = key_ahead(tiles, tile + Sums::kGroups + g);
  }
  const char* x = block.x + row * x_stride;
  const auto score = [&](auto first, int lane) {
    Sums sums;
    sums.template add<first>(words, kLanes * 4, count, x, x_stride, ahead, kLanes * 4);
    sums.each(rows, block.planes + row, [&](int m, int q, float32x4_t values) {
      store(block.scores + m * kKeys + tile * kTile + lane + q * kQuarter, values);
    });
    for (int g = 0; g < Sums::kGroups; ++g) words[g] += Sums::kLanesOfGroup * 4;
  };
  score(std::true_type(), 0);
  if constexpr (Sums::kLanesOfGroup < kLanes) score(std::false_type(), Sums::kLanesOfGroup);
}

// Compute scores of `rows` rows with the tiles from `tile` to `end` - 1.
template <class F, int R>
void score_matrices(const Block& block, const Tiles& tiles, int64_t tile, int64_t end, int64_t row,
                    int rows) {
  typedef SumsOf<F, R, quarters_of(R * F::kPlanes)> Sums;
  constexpr int T = Sums::kGroups;
  for (; tile + T <= end; tile += T) score_quarters<F, Sums>(block, tiles, tile, row, rows);
  if constexpr (T > 1) {
    for (; tile < end; ++tile) score_quarters<F, SumsOf<F, R, 4>>(block, tiles, tile, row, rows);
  }
}

template <class F, class Sums, bool kFetched>
INTERPOSER_INLINE void weigh_quarters(const Block& block, const Tiles& tiles, int64_t tokens,
                                      int64_t column, int64_t row, int rows,
                                      const float* factors) {
  constexpr int64_t kCount = kTile / F::kInputs / 2, kTileX = kCount * Sums::kXBytes;
  constexpr int64_t kTokens = 2 * F::kInputs, kStride = kKeys * 4;
  const int64_t D = block.head_size, row_bytes = D * 4, columns = Sums::kGroups * kLanes;
  // For integers, a weight of zero cancels any memory after the last token.
  const int64_t whole = (F::kCodes ? tokens + kTile - 1 : tokens) / kTile;
  const int64_t left = F::kCodes ? 0 : tokens % kTile;
  const char* x = reinterpret_cast<const char*>(block.scores);
  float* result = block.result + row * D + column;
  Sums sums;
  if (!F::kCodes && factors) sums.resume(result, D, rows, factors);
  typename Sums::Addresses words, ahead;
  for (int64_t tile = 0; tile < whole; ++tile) {
    const Ahead then = values_ahead(tiles, tile, D, {column, columns}, 2 * kCount);
    for (int g = 0; g < Sums::kGroups; ++g) {
      words[g] = tiles.keys[tile] + tiles.value_distance + (column + g * kLanes) * 4;
      ahead[g] = then.at + g * kLanes * 4;
    }
    sums.template add<kFetched>(words, row_bytes, kCount, x + tile * kTileX, kStride, ahead,
                                then.row_bytes);
  }
  if (left) {
    for (int g = 0; g < Sums::kGroups; ++g) words[g] = block.words + (column + g * kLanes) * 4;
    sums.template add<false>(words, row_bytes, (left + kTokens - 1) / kTokens, x + whole * kTileX,
                             kStride, words, 0);
  }
  sums.each(rows, block.weight_planes, [&](int m, int q, float32x4_t values) {
    float* to = result + m * D + q * kQuarter;
    if (F::kCodes && factors) values += load<float32x4_t>(to) * vdupq_n_f32(factors[m]);
    store(to, values);
  });
}

// Add weighted values of the first `tokens` current keys to results of `rows` rows, which are
// multiplied by `factors` first, or overwritten if `factors` is null.
template <class F, int R>
void weigh_matrices(const Block& block, const Tiles& tiles, int64_t tokens, int64_t row, int rows,
                    const float* factors) {
  constexpr int Q = quarters_of(R * F::kPlanes);
  const int64_t D = block.head_size;
  if (!F::kCodes && tokens % kTile) {
    const char* from = tiles.keys[tokens / kTile] + tiles.value_distance;
    for (int64_t i = 0; i < D * 4; i += kLanes * 4) {
      mask_values(from + i, D * 4, tokens % kTile, block.words + i, D * 4);
    }
  }
  int64_t column = 0;
  const auto weigh = [&](auto quarters, auto fetched) {
    typedef SumsOf<F, R, quarters> Sums;
    weigh_quarters<F, Sums, fetched>(block, tiles, tokens, column, row, rows, factors);
    column += Sums::kGroups * Sums::kLanesOfGroup;
  };
  const std::integral_constant<int, Q> most;
  while (Q == 8 && column + 2 * kLanes <= D) weigh(most, std::true_type());
  while (column < D) {
    if constexpr (Q == 2) {
      weigh(most, std::true_type());
      weigh(most, std::false_type());
    } else {
      weigh(std::integral_constant<int, 4>(), std::true_type());
    }
  }
}

// Write sixteen 16-bit numbers of a row of x as one row of operands.
INTERPOSER_INLINE void store_operand_rows(char* to, Halves numbers) {
  for (int i = 0; i < 4; ++i) {
    store(to + i * kOperandBytes, load<uint8x8_t>((const char*)&numbers + i * kOperandRowBytes));
  }
}

#endif

}  // namespace
