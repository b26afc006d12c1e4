// Conversion of keys and values to bfloat16, for blocks of so many rows that converting once pays.
// Included once for every level.
#pragma once

#include "block.h"
#include "formats.h"
#include "grouped.h"

namespace {

// Fewest rows for which conversion pays.
constexpr int64_t kWidenedRows = 12;

// Size of the converted keys and values of one iteration.
constexpr int64_t widened_bytes(int64_t head_size) { return kKeys * head_size * 4 + 64; }

#if defined(INTERPOSER_PAIRS)

INTERPOSER_INLINE Words upper_halves(Floats values) {
  return ((Words)values + 0x7fffu + ((Words)values >> 16 & 1)) & 0xffff0000u;
}

INTERPOSER_INLINE Words pair_of(Floats first, Floats second) {
  return upper_halves(first) >> 16 | upper_halves(second);
}

// Convert words of four 8-bit elements, all of which bfloat16 represents: the first two, and the
// last two.
INTERPOSER_INLINE void widen_words(Words words, int32_t type, Words& first, Words& second) {
#if defined(__AVX512BF16__)
  if (type != kCacheInt8) {
    Words parts[2];
    if (type == kCacheE4M3) {
      E4M3OnPairs::decode(words, parts);
    } else {
      E5M2OnPairs::decode(words, parts);
    }
    first = parts[0], second = parts[1];
    return;
  }
#endif
  Floats parts[4];
  if (type == kCacheInt8) {
    Int8OnFloats::decode(words, parts);
  } else if (type == kCacheE4M3) {
    E4M3OnFloats::decode(words, parts);
  } else {
    E5M2OnFloats::decode(words, parts);
  }
  // Parts are in byte order.
  first = (Words)parts[0] >> 16 | (Words)parts[2];
  second = (Words)parts[1] >> 16 | (Words)parts[3];
}

// Convert rows of words of a tile: each becomes two rows, `row_words` vectors apart.
inline void widen_8_bits(const char* from, int32_t type, int64_t rows, int64_t row_words, char* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < row_words; ++i) {
      Words first, second;
      widen_words(load<Words>(from + (row * row_words + i) * 64), type, first, second);
      store(to + (2 * row * row_words + i) * 64, first);
      store(to + ((2 * row + 1) * row_words + i) * 64, second);
    }
  }
}

INTERPOSER_INLINE Floats numbers_of(Words words, int element, Floats step, Floats base) {
  const Ints codes = (Ints)(words >> element_shift(8, element) & 15);
  return converted<Floats>(codes) * step + base;
}

inline void widen_grouped_keys(const char* from, int64_t head_size, char* to) {
  for (int64_t group = 0; group < head_size / kGroup; ++group, from += kGroupBytes) {
    const Words both = load<Words>(from + kWordsBytes);
    const Floats step = steps_of(both), base = bases_of(both);
    for (int i = 0; i < kGroup / 8; ++i) {
      const Words words = load<Words>(from + i * 64);
      for (int e = 0; e < 8; e += 2, to += 64) {
        store(to, pair_of(numbers_of(words, e, step, base), numbers_of(words, e + 1, step, base)));
      }
    }
  }
}

inline void widen_grouped_values(const char* from, int64_t head_size, char* to) {
  for (int64_t group = 0; group < head_size / kGroup; ++group, from += kGroupBytes) {
    for (int token = 0; token < kTile; token += 2) {
      Floats step[2], base[2];
      for (int i = 0; i < 2; ++i) {
        const Words both = splat(load<uint32_t>(from + kWordsBytes + (token + i) * 4));
        step[i] = steps_of(both), base[i] = bases_of(both);
      }
      for (int half = 0; half < 2; ++half) {
        const Words words = load<Words>(from + token / 8 * kGroup * 4 + half * 64);
        const int e = token % 8;
        store(to + token / 2 * head_size * 4 + (group * kGroup + half * kLanes) * 4,
              pair_of(numbers_of(words, e, step[0], base[0]),
                      numbers_of(words, e + 1, step[1], base[1])));
      }
    }
  }
}

// Convert the current tiles, keys then values of each, and make `tiles` refer to the copies.
inline void widen_tiles(const interposer_kv_cache& cache, const Block& block, Tiles& tiles) {
  const int64_t D = block.head_size, bytes = D * kTile * 2;
  char* to = block.widened;
  for (int64_t tile = 0; tile < tiles.count; ++tile, to += 2 * bytes) {
    const char *keys = tiles.keys[tile], *values = keys + tiles.value_distance;
    // Prefetch the next tiles, as without conversion.
    for (int64_t at = 0; at < tile_bytes(cache); at += 64) {
      __builtin_prefetch(tiles.keys[tile + 1] + at, 0, kSecondLevel);
      __builtin_prefetch(tiles.keys[tile + 1] + tiles.value_distance + at, 0, kSecondLevel);
    }
    if (cache.type == kCacheUInt4) {
      widen_grouped_keys(keys, D, to);
      widen_grouped_values(values, D, to + bytes);
    } else {
      widen_8_bits(keys, cache.type, D / 4, 1, to);
      widen_8_bits(values, cache.type, kTile / 4, D / kLanes, to + bytes);
    }
    tiles.keys[tile] = to;
  }
  for (int64_t i = 0; i < kMostAhead; ++i) tiles.keys[tiles.count + i] = block.widened;
  tiles.value_distance = bytes;
  tiles.bytes = bytes;
}

#endif

}  // namespace
