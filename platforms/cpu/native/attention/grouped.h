// 4-bit keys and values in groups of 32, each with a step and a base. Included once for every
// level.
//
// A number is base + step * q, with q from 0 to 15. 32 adjacent dimensions of a token form a group.
// Tiles of keys and of values consist of groups of 320 bytes:
//
//   keys    [4][16]  words of 8 neighbouring dimensions of one token
//   values  [2][32]  words of one dimension of 8 neighbouring tokens
//   both    [16]     of each token the step, as bfloat16, above the base
//
// The base is rounded down and the step up, so that no quantized value must be clamped: the error
// of a number is at most half a step.
#pragma once

#include <type_traits>

#include "block.h"
#include "formats.h"
#include "products.h"

namespace {

constexpr int64_t kWordsBytes = kGroup * kTile / 2, kGroupBytes = kWordsBytes + kTile * 4;
// Tiles of values whose weights are computed at a time.
constexpr int64_t kTilesAtOnce = kMostAhead;
constexpr int64_t kTokensAtOnce = kTilesAtOnce * kTile;

INTERPOSER_INLINE Floats steps_of(Words words) { return as_floats(words & 0xffff0000u); }
INTERPOSER_INLINE Floats bases_of(Words words) { return as_floats(words << 16); }

inline float smallest_of(Floats values) { return -largest_of(-values); }

// Quantize a group. Returns its step and base as one word.
inline uint32_t round_group(const float* from, Ints (&codes)[2]) {
  const Floats first = load<Floats>(from), second = load<Floats>(from + kLanes);
  // Infinity or NaN in the group makes the base NaN.
  const Floats wrong = first * splat(0.0f) + second * splat(0.0f);
  const float low = smallest_of(larger(-first, -second) * splat(-1.0f)) + sum_of(wrong);
  const float high = largest_of(larger(first, second));
  uint32_t bits;
  std::memcpy(&bits, &low, 4);
  const uint32_t base_bits = (bits + (bits >> 31 ? 0xffffu : 0)) & 0xffff0000u;
  const float base = float_of_bits(base_bits), exact = (high - base) / 15.0f;
  std::memcpy(&bits, &exact, 4);
  const uint32_t step_bits = (bits + 0xffffu) & 0xffff0000u;
  const float step = float_of_bits(step_bits);
  for (int i = 0; i < 2; ++i) {
    const Floats quotient = ((i ? second : first) - splat(base)) / splat(step);
    const Floats positive = step > 0 ? larger(quotient, Floats{}) : Floats{};
    const Floats limited = chosen(positive < splat(15.0f), positive, splat(15.0f));
    codes[i] = (Ints)(limited + splat(12582912.0f)) & 15;
  }
  return step_bits | base_bits >> 16;
}

// Quantize and store one head's key and value of one token, [D] each. All tokens of a tile must be
// stored by one thread.
inline void put_groups(const interposer_kv_cache& cache, int64_t head, int64_t slot,
                       const float* key, const float* value) {
  const int64_t offset = slot % cache.page_tokens, token = offset % kTile;
  char* keys = tile_at(cache, head, slot / cache.page_tokens, offset);
  char* values = keys + value_distance(cache);
  const int shift = element_shift(8, int(token % 8));
  for (int64_t at = 0; at < cache.head_size; at += kGroup) {
    Ints codes[2];
    uint32_t word = round_group(key + at, codes);
    std::memcpy(keys + kWordsBytes + token * 4, &word, 4);
    int32_t numbers[kGroup];
    std::memcpy(numbers, codes, sizeof numbers);
    for (int i = 0; i < kGroup / 8; ++i) {
      word = 0;
      for (int e = 0; e < 8; ++e) word |= uint32_t(numbers[8 * i + e]) << element_shift(8, e);
      std::memcpy(keys + (i * kTile + token) * 4, &word, 4);
    }
    word = round_group(value + at, codes);
    std::memcpy(values + kWordsBytes + token * 4, &word, 4);
    for (int i = 0; i < 2; ++i) {
      char* to = values + token / 8 * kGroup * 4 + i * kLanes * 4;
      const Words kept = load<Words>(to) & splat(~(15u << shift));
      store(to, kept | (Words)codes[i] << shift);
    }
    keys += kGroupBytes, values += kGroupBytes;
  }
}

// Layout of x. Rows are as wide as floats; in narrower formats, the sums of groups follow the
// values.
struct GroupedX {
  int64_t head_size;

  int64_t stride() const { return 4 * head_size; }
  char* row(const Block& block, int64_t row) const { return block.x + row * stride(); }
  float* sums(const Block& block, int64_t row_of_x) const {
    return reinterpret_cast<float*>(row(block, row_of_x) + 2 * head_size);
  }
};

#if defined(INTERPOSER_CODES)
// Write both planes of sixteen integers; a plane has `plane_bytes`.
INTERPOSER_INLINE void put_planes(Ints numbers, char* to, int64_t plane_bytes) {
  const Ints high = (numbers + splat(int32_t(128))) >> 8, low = numbers - (high << 8);
  const Bytes order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  store(to, __builtin_shuffle(low_bytes(high), order));
  store(to + plane_bytes, __builtin_shuffle(low_bytes(low), order));
}

// Round to integers, ties to even; magnitudes below 2^22.
INTERPOSER_INLINE Ints whole_numbers(Floats value) {
  return (Ints)(value + splat(12582912.0f)) - splat(int32_t(0x4b400000));
}

constexpr float kMostUnits = float(Int8OnCodes::kLargest);
#endif

// Write a query [D] in the layout of the format.
template <class F>
void prepare_grouped(const char* from, int32_t type, const GroupedX& x, const Block& block,
                     int64_t row) {
  char* to = x.row(block, row);
  const int64_t D = x.head_size, size = size_of(type);
  if constexpr (F::kInputBytes == 2 && F::kPlanes == 1) {
    std::memcpy(to, from, size_t(2 * D));
    for (int64_t at = 0; at < D; at += kGroup) {
      x.sums(block, row)[at / kGroup] = sum_of(load_floats(from + at * size, type) +
                                               load_floats(from + (at + kLanes) * size, type));
    }
  } else if constexpr (F::kPlanes == 1) {
    for (int64_t i = 0; i < D; i += kLanes) store(to + i * 4, load_floats(from + i * size, type));
  } else {
#if defined(INTERPOSER_CODES)
    Floats largest = {}, wrong = {};
    for (int64_t i = 0; i < D; i += kLanes) {
      const Floats numbers = load_floats(from + i * size, type);
      largest = larger((Floats)((Ints)numbers & 0x7fffffff), largest);
      wrong += numbers * splat(0.0f);
    }
    const float peak = largest_of(largest);
    const Floats factor = splat(peak > 1e-30f ? kMostUnits / peak : 0.0f);
    block.planes[row].unit = peak / kMostUnits + sum_of(wrong);
    for (int64_t at = 0; at < D; at += kGroup) {
      Floats sum = {};
      for (int64_t i = at; i < at + kGroup; i += kLanes) {
        const Ints units = whole_numbers(load_floats(from + i * size, type) * factor);
        put_planes(units, to + i, D);
        sum += converted<Floats>(units);
      }
      x.sums(block, row)[at / kGroup] = sum_of(sum);
    }
#endif
  }
}

// Convert the sums of a row and group to float, with the scale of the planes if there are any.
template <class F, int R, int T>
INTERPOSER_INLINE Floats of_planes(const typename F::Sum (&sums)[R][T], int m, int t) {
  if constexpr (F::kPlanes == 1) {
    return sums[m][t];
  } else {
    return converted<Floats>((sums[2 * m][t] << 8) + sums[2 * m + 1][t]);
  }
}

template <class F, int M, int T>
void score_groups_of(const Block& block, const Tiles& tiles, int64_t tile, int64_t row,
                     const float* x_sums) {
  constexpr int R = M * F::kPlanes;
  constexpr int64_t kXBytes = F::kInputBytes / F::kPlanes;  // of one number in one plane
  const GroupedX x = {block.head_size};
  const int64_t D = block.head_size;
  Floats totals[M][T] = {};
  for (int64_t group = 0; group < D / kGroup; ++group) {
    const int64_t at = group * kGroupBytes;
    typename F::Sum sums[R][T] = {};
    const char *words[T], *ahead[T];
    for (int t = 0; t < T; ++t) {
      words[t] = tiles.keys[tile + t] + at;
      ahead[t] = key_ahead(tiles, tile + t + kMostAhead) + at;
      __builtin_prefetch(ahead[t] + kWordsBytes, 0, kSecondLevel);
    }
    const char* from = x.row(block, row) + group * kGroup * kXBytes;
    add_products<F, R, T>(sums, words, kLanes * 4, kGroup / F::kInputs, from, x.stride(), D, ahead,
                          kLanes * 4);
    for (int t = 0; t < T; ++t) {
      const Words pairs = load<Words>(words[t] + kWordsBytes);
      const Floats steps = steps_of(pairs);
      const Floats bases = bases_of(pairs) - steps * splat(F::kExcess);
      for (int m = 0; m < M; ++m) {
        totals[m][t] += steps * of_planes<F, R, T>(sums, m, t);
        totals[m][t] += bases * splat(x_sums[m * D / kGroup + group]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    const float unit = F::kPlanes == 1 ? 1.0f : block.planes[row + m].unit;
    for (int t = 0; t < T; ++t) {
      store(block.scores + m * kKeys + (tile + t) * kTile, totals[m][t] * splat(unit));
    }
  }
}

// Compute scores of M rows with the tiles from `tile` to `end` - 1.
template <class F, int M>
void score_groups(const Block& block, const Tiles& tiles, int64_t tile, int64_t end, int64_t row) {
  constexpr int R = M * F::kPlanes;
  constexpr int T = kMostRows < 6 ? 1 : R == 1 ? 8 : R <= 4 ? 4 : R <= 8 ? 2 : 1;
  const GroupedX x = {block.head_size};
  const int64_t groups = block.head_size / kGroup;
  // Sums of x per group, which multiply the bases, [M] per group.
  float* sums = reinterpret_cast<float*>(block.words);
  for (int64_t i = 0; i < M * groups; ++i) {
    const char* from = x.row(block, row + i / groups) + i % groups * kGroup * 4;
    sums[i] = F::kInputBytes == 2 ? x.sums(block, row + i / groups)[i % groups]
                              : sum_of(load<Floats>(from) + load<Floats>(from + kLanes * 4));
  }
  for (; tile + T <= end; tile += T) score_groups_of<F, M, T>(block, tiles, tile, row, sums);
  if constexpr (T > 4) {
    for (; tile + 4 <= end; tile += 4) score_groups_of<F, M, 4>(block, tiles, tile, row, sums);
  }
  if constexpr (T > 1) {
    for (; tile < end; ++tile) score_groups_of<F, M, 1>(block, tiles, tile, row, sums);
  }
}

// Weights times steps, which multiply the quantized values, and the weighted sum of bases.
struct GroupWeights {
  float unit, bias;
};

// Write weights of one row and `count` tiles, times the steps of a group of values. Values with
// weight 0 may be unwritten memory.
template <class F>
INTERPOSER_INLINE GroupWeights weights_of_group(const float* weights, const Tiles& tiles,
                                                int64_t tile, int64_t count, int64_t at, char* to) {
  Floats scaled[kTilesAtOnce], largest = {}, bias = {};
  for (int64_t i = 0; i < count; ++i) {
    const Words pairs = load<Words>(tiles.keys[tile + i] + tiles.value_distance + at + kWordsBytes);
    const Floats weight = load<Floats>(weights + i * kTile);
    const Ints seen = weight > Floats{};
    scaled[i] = weight * (Floats)((Ints)steps_of(pairs) & seen);
    bias += weight * (Floats)((Ints)bases_of(pairs) & seen);
    if constexpr (F::kPlanes == 2) largest = larger(scaled[i], largest);
  }
  if constexpr (F::kPlanes == 1) {
    for (int64_t i = 0; i < count; ++i) store(to + i * kTile * 4, scaled[i]);
    return {1.0f, sum_of(bias)};
  } else {
#if defined(INTERPOSER_CODES)
    const float peak = largest_of(largest);
    const Floats factor = splat(peak > 1e-30f ? kMostUnits / peak : 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      put_planes(whole_numbers(scaled[i] * factor), to + i * kTile, kTokensAtOnce);
    }
    return {peak / kMostUnits, sum_of(bias)};
#endif
  }
}

// Add sums of a group to results, which are multiplied by factors first, or overwritten if there
// are none.
template <int M, int T>
INTERPOSER_INLINE void add_to_results(const Block& block, int64_t row, int64_t group,
                                      const float* factors, bool counts,
                                      const Floats (&sums)[M][T]) {
  for (int m = 0; m < M; ++m) {
    for (int t = 0; t < T; ++t) {
      float* to = block.result + (row + m) * block.head_size + group * kGroup + t * kLanes;
      Floats sum = sums[m][t];
      if (counts) sum += load<Floats>(to);
      if (factors) sum += load<Floats>(to) * splat(factors[m]);
      store(to, sum);
    }
  }
}

// Address to prefetch: the data after the group at `at` of a tile of values.
INTERPOSER_INLINE const char* values_behind(const Tiles& tiles, int64_t tile, int64_t at) {
  const int64_t next = tile + kTilesAtOnce;
  if (next < tiles.count) return tiles.keys[next] + tiles.value_distance + at;
  return tiles.keys[tiles.count + tile % kTilesAtOnce] + at;
}

#if defined(__AVX512BF16__)
// Add weighted values of a group, of up to kTilesAtOnce tiles, to `sums` of M rows and 32
// dimensions. Weights times steps are rounded to bfloat16. The offset of the values is subtracted
// with the sum of these rounded weights.
template <int M>
INTERPOSER_INLINE void weigh_pairs(const Block& block, const Tiles& tiles, int64_t tile,
                                   int64_t count, int64_t at, Floats (&sums)[M][2]) {
  alignas(64) char x[M][kTokensAtOnce * 2];
  const __m512bh ones = (__m512bh)splat(0x3f803f80u);
  Floats bias[M] = {}, total[M] = {};
  for (int64_t i = 0; i < count; i += 2) {
    Floats steps[2], bases[2];
    for (int k = 0; k < 2; ++k) {
      const int64_t one = i + k < count ? tile + i + k : tile + i;
      const Words both = load<Words>(tiles.keys[one] + tiles.value_distance + at + kWordsBytes);
      steps[k] = steps_of(both), bases[k] = bases_of(both);
    }
    for (int m = 0; m < M; ++m) {
      Floats scaled[2];
      for (int k = 0; k < 2; ++k) {
        const float* weights = block.scores + m * kKeys + (tile + i + k) * kTile;
        const Floats weight = i + k < count ? load<Floats>(weights) : Floats{};
        const __mmask16 seen = _mm512_cmp_ps_mask((__m512)weight, (__m512)Floats{}, _CMP_GT_OQ);
        scaled[k] = (Floats)_mm512_maskz_mul_ps(seen, (__m512)weight, (__m512)steps[k]);
        bias[m] = (Floats)_mm512_mask3_fmadd_ps((__m512)weight, (__m512)bases[k], (__m512)bias[m],
                                                seen);
      }
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)scaled[1], (__m512)scaled[0]);
      store(x[m] + i * kTile * 2, both);
      total[m] = (Floats)_mm512_dpbf16_ps((__m512)total[m], both, ones);
    }
  }
  // As many sums as fit in registers, so that none waits for the previous multiplication.
  constexpr int kSums = M <= 2 ? 4 : M <= 4 ? 2 : 1;
  Floats sums_of[M][2][kSums] = {};
  for (int64_t i = 0; i < count; ++i) {
    const char* from = tiles.keys[tile + i] + tiles.value_distance + at;
    const char* then = values_behind(tiles, tile + i, at);
    for (int line = 0; line < 5; ++line) __builtin_prefetch(then + line * 64, 0, kSecondLevel);
    for (int eight = 0; eight < 2; ++eight) {
      for (int half = 0; half < 2; ++half) {
        Words parts[4];
        UInt4OnPairs::decode(load<Words>(from + eight * kGroup * 4 + half * kLanes * 4), parts);
        for (int pair = 0; pair < 4; ++pair) {
          for (int m = 0; m < M; ++m) {
            OnPairs::add(sums_of[m][half][pair % kSums], parts[pair],
                         x[m] + i * kTile * 2 + (eight * 4 + pair) * 4);
          }
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    const Floats rest = splat(sum_of(bias[m] - total[m] * splat(UInt4OnPairs::kExcess)));
    for (int half = 0; half < 2; ++half) {
      sums[m][half] = rest;
      for (int i = 0; i < kSums; ++i) sums[m][half] += sums_of[m][half][i];
    }
  }
}
#endif

// Add weighted values of the current `count` tiles to results of M rows, which are multiplied by
// `factors` first, or overwritten if `factors` is null.
template <class F, int M>
void weigh_groups(const Block& block, const Tiles& tiles, int64_t count, int64_t row,
                  const float* factors) {
  constexpr int R = M * F::kPlanes, T = kGroup / kLanes;
  constexpr int64_t kXBytes = F::kInputBytes / F::kPlanes, kXStride = 4 * kTokensAtOnce;
  alignas(64) char x[M * kXStride];
  const int64_t D = block.head_size;
  for (int64_t tile = 0; tile < count; tile += kTilesAtOnce) {
    const int64_t some = count - tile < kTilesAtOnce ? count - tile : kTilesAtOnce;
    for (int64_t group = 0; group < D / kGroup; ++group) {
      const int64_t at = group * kGroupBytes;
      Floats weighted[M][T];
#if defined(__AVX512BF16__)
      if constexpr (std::is_same_v<F, UInt4OnPairs>) {
        weigh_pairs<M>(block, tiles, tile, some, at, weighted);
        add_to_results<M, T>(block, row, group, tile ? nullptr : factors, tile > 0, weighted);
        continue;
      }
#endif
      GroupWeights of[M];
      for (int m = 0; m < M; ++m) {
        const float* weights = block.scores + m * kKeys + tile * kTile;
        of[m] = weights_of_group<F>(weights, tiles, tile, some, at, x + m * kXStride);
      }
      typename F::Sum sums[R][T] = {};
      for (int64_t i = 0; i < some; ++i) {
        const char* from = tiles.keys[tile + i] + tiles.value_distance + at;
        const char* then = values_behind(tiles, tile + i, at);
        const char *words[T], *ahead[T];
        for (int t = 0; t < T; ++t) {
          words[t] = from + t * kLanes * 4;
          ahead[t] = then + t * kLanes * 4;
        }
        __builtin_prefetch(then + kWordsBytes, 0, kSecondLevel);
        add_products<F, R, T>(sums, words, kGroup * 4, kTile / F::kInputs, x + i * kTile * kXBytes,
                              kXStride, kTokensAtOnce, ahead, kGroup * 4);
      }
      for (int m = 0; m < M; ++m) {
        for (int t = 0; t < T; ++t) {
          weighted[m][t] =
              of_planes<F, R, T>(sums, m, t) * splat(of[m].unit) + splat(of[m].bias);
        }
      }
      add_to_results<M, T>(block, row, group, tile ? nullptr : factors, tile > 0, weighted);
    }
  }
}

}  // namespace
