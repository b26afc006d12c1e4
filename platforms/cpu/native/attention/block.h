// Working memory of a query block, and the location of its keys and values. Included once for every
// level.
#pragma once

#include "../operands.h"
#include "../tiles.h"
#include "../vectors.h"
#include "cache.h"
#include "softmax.h"

namespace {

// Query rows that vectors sum at a time.
#if defined(__AVX512F__)
constexpr int kMostRows = 6;
#else
constexpr int kMostRows = 4;  // as many 64-byte sums as fit in 16 or 32 registers
#endif

// Rows whose scores are in memory at a time.
#if defined(INTERPOSER_TILES)
constexpr int kScoreRows = kTileRows;
#elif defined(INTERPOSER_MATRICES)
constexpr int kScoreRows = 8;
#else
constexpr int kScoreRows = kMostRows;
#endif

// Rows of words of values that are masked at a time.
#if defined(INTERPOSER_MATRICES)
constexpr int kMaskedRows = kTile / 2;
#else
constexpr int kMaskedRows = 1;
#endif

// Keys per iteration.
constexpr int64_t kKeys = 512;
constexpr int64_t kMostTiles = kKeys / kTile;

// Prefetched to the second-level cache, which allows more outstanding requests than the first
// level: a third faster if keys come from memory.
constexpr int kSecondLevel = 2;
// Prefetch distance: latency times bandwidth of memory, with some reserve.
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kMostAhead = 8;  // tiles

// Scale of the planes of a row of x, and in each plane the excess that the offset of stored values
// causes.
struct Planes {
  float unit;
  int32_t excess[2];
};

// Working memory of a block. `scores` has the scores of the current few rows, later their weights.
struct Block {
  int64_t rows, head_size;
  char* x;         // [rows][D] in the order of the format
  float* result;   // [rows][D]
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* scores;   // [kScoreRows][kKeys]
  char* words;     // [kMaskedRows][D]
  Planes* planes;  // [rows], planes of x
  Planes* weight_planes;  // [kScoreRows]
  char* widened;   // with many rows: keys and values as bfloat16

  Block(char* scratch, int64_t most_rows, int64_t rows, int64_t head_size)
      : rows(rows), head_size(head_size) {
    const int64_t padded = rounded_up(most_rows, kLanes);
    x = scratch;
    result = reinterpret_cast<float*>(x + most_rows * head_size * 4);
    maximum = result + most_rows * head_size;
    sum = maximum + padded;
    scores = sum + padded;
    words = reinterpret_cast<char*>(scores + kScoreRows * kKeys);
    planes = reinterpret_cast<Planes*>(words + kMaskedRows * head_size * 4);
    weight_planes = planes + padded;
    widened = scratch + rounded_up(bytes(most_rows, head_size), 64);
  }

  static int64_t bytes(int64_t most_rows, int64_t head_size) {
    const int64_t padded = rounded_up(most_rows, kLanes);
    return 4 * (2 * most_rows * head_size + 2 * padded + kScoreRows * kKeys +
                kMaskedRows * head_size) +
           (padded + kScoreRows) * int64_t(sizeof(Planes));
  }
};

// Addresses of the tiles of the current keys and of the next keys, for prefetching.
struct Tiles {
  const char* keys[kMostTiles + kMostAhead];
  int64_t count;
  int64_t first_key;       // position
  int64_t value_distance;  // bytes
  int64_t bytes;           // size of a tile
  int64_t ahead;           // prefetch distance in tiles of values
};

// Addresses to prefetch while a tile is multiplied, one cache line per row of words.
struct Ahead {
  const char* at;
  int64_t row_bytes;
};

// Prefetch address for the keys in `tile`, or for the values that follow the last keys.
INTERPOSER_INLINE const char* key_ahead(const Tiles& tiles, int64_t tile) {
  return tile < tiles.count ? tiles.keys[tile]
                            : tiles.keys[tile - tiles.count] + tiles.value_distance;
}

// Columns of values that registers sum at a time: `width` columns from `first`. Groups of columns
// can alternate every few tiles; this is group number `turn`.
struct Columns {
  int64_t first, width;
  int64_t turn = 0, turns = 1;
};

// Prefetch address for the data after `tile` of values, while `columns` are multiplied.
INTERPOSER_INLINE Ahead values_ahead(const Tiles& tiles, int64_t tile, int64_t head_size,
                                     const Columns& columns, int64_t rows) {
  const int64_t next = tile + tiles.ahead, line = columns.width * 4;
  if (next < tiles.count) {
    return {tiles.keys[next] + tiles.value_distance + columns.first * 4, head_size * 4};
  }
  const int64_t then = columns.first + columns.turns * columns.width;
  if (then - columns.turn * columns.width < head_size) {
    // The next columns.
    return {tiles.keys[next - tiles.count] + tiles.value_distance + then * 4, head_size * 4};
  }
  // The next keys, one cache line after the other.
  const int64_t at = ((next - tiles.count) * columns.turns + columns.turn) * rows * line;
  return {tiles.keys[tiles.count + at / tiles.bytes] + at % tiles.bytes, line};
}

// Prefetch two cache lines that are `bytes` apart.
INTERPOSER_INLINE void fetch_two(const char* at, int64_t bytes) {
  __builtin_prefetch(at, 0, kSecondLevel);
  __builtin_prefetch(at + bytes, 0, kSecondLevel);
}

// Copy sixteen dimensions of the last, partly filled tile of values, [8][D] 16-bit words, with
// zeros for missing tokens: unwritten memory can contain NaN, which a weight of zero would not
// cancel.
INTERPOSER_INLINE void mask_values(const char* from, int64_t row_bytes, int64_t tokens, char* to,
                                   int64_t to_bytes) {
  for (int row = 0; row < kTile / 2; ++row) {
    const int64_t left = tokens - 2 * row;
    const uint32_t mask = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0;
    const Words words = left > 0 ? load<Words>(from + row * row_bytes) & mask : Words{};
    store(to + row * to_bytes, words);
  }
}

}  // namespace
