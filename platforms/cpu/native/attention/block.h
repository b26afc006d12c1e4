// What a block of queries works on, and where its keys and values are. Included once for every level.
#pragma once

#include "../operands.h"
#include "../tiles.h"
#include "../vectors.h"
#include "cache.h"
#include "softmax.h"

namespace {

// Rows of queries whose products vectors sum at a time.
#if defined(__AVX512F__)
constexpr int kMostRows = 6;
#else
constexpr int kMostRows = 4;  // as many sums of 64 bytes as sixteen or 32 registers hold
#endif

// Rows whose scores are at hand.
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

// Keys that are taken at a time.
constexpr int64_t kKeys = 512;
constexpr int64_t kMostTiles = kKeys / kTile;

// Fetched ahead to the second level, which has room for more that is under way than the first: a
// third faster where keys come from memory.
constexpr int kSecondLevel = 2;
// How far ahead: what memory sends while it is asked for more, with some to spare.
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kMostAhead = 8;  // tiles

// What the planes of a row of x stand for: so much for each unit. What codes that are multiplied with
// an offset have too much, in each plane.
struct Planes {
  float unit;
  int32_t excess[2];
};

// What a block works on. Scores are those of the few rows at hand, and later their weights.
struct Block {
  int64_t rows, head_size;
  char* x;         // [rows][D] as the format wants it
  float* result;   // [rows][D]
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* scores;   // [kScoreRows][kKeys]
  char* words;     // [kMaskedRows][D]
  Planes* planes;  // [rows], of x
  Planes* weight_planes;  // [kScoreRows]
  char* widened;   // where there are many rows, keys and values as bfloat16

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

// Where the tiles of the keys at hand are, and those that are taken next, to fetch ahead.
struct Tiles {
  const char* keys[kMostTiles + kMostAhead];
  int64_t count;
  int64_t first_key;       // position
  int64_t value_distance;  // bytes
  int64_t bytes;           // of a tile
  int64_t ahead;           // tiles of values
};

// What is fetched while a tile is multiplied, a line for each of its rows of words.
struct Ahead {
  const char* at;
  int64_t row_bytes;
};

// Of the keys in `tile`, or of the values that follow the last ones.
INTERPOSER_INLINE const char* key_ahead(const Tiles& tiles, int64_t tile) {
  return tile < tiles.count ? tiles.keys[tile]
                            : tiles.keys[tile - tiles.count] + tiles.value_distance;
}

// Columns of values whose sums registers hold at a time: `width` from `first` on. Groups of columns
// may take turns, a few tiles each; this is the `turn`th of so many.
struct Columns {
  int64_t first, width;
  int64_t turn = 0, turns = 1;
};

// Of what follows `tile` of values, of which `columns` are multiplied, in so many rows of words of
// `head_size`.
INTERPOSER_INLINE Ahead values_ahead(const Tiles& tiles, int64_t tile, int64_t head_size,
                                     const Columns& columns, int64_t rows) {
  const int64_t next = tile + tiles.ahead, line = columns.width * 4;
  if (next < tiles.count) {
    return {tiles.keys[next] + tiles.value_distance + columns.first * 4, head_size * 4};
  }
  const int64_t then = columns.first + columns.turns * columns.width;
  if (then - columns.turn * columns.width < head_size) {
    // The columns that are taken next.
    return {tiles.keys[next - tiles.count] + tiles.value_distance + then * 4, head_size * 4};
  }
  // The keys that are taken next, one line after the other.
  const int64_t at = ((next - tiles.count) * columns.turns + columns.turn) * rows * line;
  return {tiles.keys[tiles.count + at / tiles.bytes] + at % tiles.bytes, line};
}

// Fetch two lines that lie `bytes` apart.
INTERPOSER_INLINE void fetch_two(const char* at, int64_t bytes) {
  __builtin_prefetch(at, 0, kSecondLevel);
  __builtin_prefetch(at + bytes, 0, kSecondLevel);
}

// Of a last tile of values [8][D] of 16-bit words, sixteen dimensions of the tokens that may be read;
// zeros in place of the others, to which nothing was written that a weight of zero silences.
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
