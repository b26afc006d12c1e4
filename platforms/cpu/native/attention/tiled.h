// Sixteen rows of queries or weights at a time, by AMX tiles. Included once for every level.
//
// A tile of keys has a row of words for every two dimensions, of sixteen tokens; a tile of values
// has a row for every two tokens. Both are loaded to tile registers as stored. Two consecutive
// tiles of values fill a register; one alone fills half of it.
//
// Registers 0 to 3 are sums. 4 and 5 are x, 6 and 7 the cache: 4 and 6 with full tiles, 5 and 7
// with half tiles.
#pragma once

#include <type_traits>

#include "../tiles.h"
#include "block.h"
#include "formats.h"

namespace {

// Whether the format supports sixteen rows at a time.
template <class F>
constexpr bool kTiled = false;

#if defined(INTERPOSER_TILES)

template <>
constexpr bool kTiled<BFloat16OnPairs> = true;

constexpr int kHalfWords = 8, kWholeWords = 16;

inline TileShapes attention_shapes() {
  TileShapes shapes;
  auto set = [&](int tile, int rows, int words) {
    shapes.rows[tile] = uint8_t(rows);
    shapes.row_bytes[tile] = uint16_t(4 * words);
  };
  for (int tile = 0; tile < 4; ++tile) set(tile, kTileRows, kLanes);
  set(4, kTileRows, kWholeWords);
  set(5, kTileRows, kHalfWords);
  set(6, kWholeWords, kLanes);
  set(7, kHalfWords, kLanes);
  return shapes;
}

// Registers for half or full tiles.
template <int Words>
constexpr int kOfX = Words == kWholeWords ? 4 : 5;
template <int Words>
constexpr int kOfCache = Words == kWholeWords ? 6 : 7;

// Call `act` with the constants 0 to T - 1.
template <int T, class Act>
INTERPOSER_INLINE void for_each_sum(Act act) {
  act(std::integral_constant<int, 0>());
  if constexpr (T == 4) {
    act(std::integral_constant<int, 1>());
    act(std::integral_constant<int, 2>());
    act(std::integral_constant<int, 3>());
  }
}

template <int T, int Words>
void score_tiled_group(const char* x, int64_t head_size, const char* const* keys, float* scores,
                       int64_t score_bytes) {
  for_each_sum<T>([](auto t) { zero_tile<t>(); });
  for (int64_t word = 0; word < head_size / 2; word += Words) {
    load_tile<kOfX<Words>>(x + word * 4, head_size * 2);
    for_each_sum<T>([&](auto t) {
      load_tile<kOfCache<Words>>(keys[t] + word * kLanes * 4, kLanes * 4);
      multiply_bfloat16_tiles<t, kOfX<Words>, kOfCache<Words>>();
    });
  }
  for_each_sum<T>([&](auto t) { store_tile<t>(scores + t * kTile, score_bytes); });
}

template <int Words>
void score_tiled(const char* x, int64_t head_size, const char* const* keys, int64_t tile,
                 int64_t end, float* scores, int64_t score_bytes) {
  for (; tile + 4 <= end; tile += 4) {
    score_tiled_group<4, Words>(x, head_size, keys + tile, scores + tile * kTile, score_bytes);
  }
  for (; tile < end; ++tile) {
    score_tiled_group<1, Words>(x, head_size, keys + tile, scores + tile * kTile, score_bytes);
  }
}

// Compute scores of sixteen rows of x [16][D] with the tiles of keys from `tile` to `end` - 1.
inline void score_sixteen(const char* x, int64_t head_size, const char* const* keys, int64_t tile,
                          int64_t end, float* scores, int64_t score_bytes) {
  if (head_size / 2 % kWholeWords == 0) {
    score_tiled<kWholeWords>(x, head_size, keys, tile, end, scores, score_bytes);
  } else {
    score_tiled<kHalfWords>(x, head_size, keys, tile, end, scores, score_bytes);
  }
}

// Weights of sixteen rows, `weight_bytes` apart, and the address of the values of their tokens.
struct TiledWeights {
  const char* weights;
  int64_t weight_bytes;
  const char* const* keys;
  int64_t value_distance;
  int64_t tiles, rest;  // full tiles, and readable tokens of the tile after them
};

template <int T>
void weigh_tiled_columns(const TiledWeights& of, int64_t head_size, bool first, float* result) {
  const int64_t row_bytes = head_size * 4, tile_bytes = kHalfWords * row_bytes;
  for_each_sum<T>([&](auto t) {
    if (first) {
      zero_tile<t>();
    } else {
      load_tile<t>(result + t * kLanes, row_bytes);
    }
  });
  auto add = [&](auto words, int64_t tile, const char* values, int64_t value_bytes, int64_t step) {
    constexpr int W = decltype(words)::value;
    load_tile<kOfX<W>>(of.weights + tile * kTile * 2, of.weight_bytes);
    for_each_sum<T>([&](auto t) {
      load_tile<kOfCache<W>>(values + t * step, value_bytes);
      multiply_bfloat16_tiles<t, kOfX<W>, kOfCache<W>>();
    });
  };
  const std::integral_constant<int, kWholeWords> whole;
  const std::integral_constant<int, kHalfWords> half;
  for (int64_t tile = 0; tile < of.tiles;) {
    const char* values = of.keys[tile] + of.value_distance;
    if (tile + 1 < of.tiles && of.keys[tile + 1] == of.keys[tile] + tile_bytes) {
      add(whole, tile, values, row_bytes, kLanes * 4);
      tile += 2;
    } else {
      add(half, tile, values, row_bytes, kLanes * 4);
      tile += 1;
    }
  }
  if (of.rest) {
    alignas(64) char masked[T * kHalfWords * kLanes * 4];
    constexpr int64_t kMaskedBytes = kHalfWords * kLanes * 4;
    for (int t = 0; t < T; ++t) {
      mask_values(of.keys[of.tiles] + of.value_distance + t * kLanes * 4, row_bytes, of.rest,
                  masked + t * kMaskedBytes, kLanes * 4);
    }
    add(half, of.tiles, masked, kLanes * 4, kMaskedBytes);
  }
  for_each_sum<T>([&](auto t) { store_tile<t>(result + t * kLanes, row_bytes); });
}

// Multiply sixteen rows of results [16][D] by `factors`, or overwrite them if `factors` is null,
// and add weighted values.
inline void weigh_sixteen(TiledWeights of, int64_t head_size, const float* factors,
                          float* result) {
  for (int row = 0; factors && row < kTileRows; ++row) {
    for (int64_t i = 0; i < head_size; i += kLanes) {
      float* to = result + row * head_size + i;
      store(to, load<Floats>(to) * splat(factors[row]));
    }
  }
  int64_t column = 0;
  auto weigh = [&](auto sums) {
    constexpr int T = decltype(sums)::value;
    for (; column + T * kLanes <= head_size; column += T * kLanes) {
      weigh_tiled_columns<T>(of, head_size, factors == nullptr, result + column);
      of.value_distance += T * kLanes * 4;
    }
  };
  weigh(std::integral_constant<int, 4>());
  weigh(std::integral_constant<int, 1>());
}

#endif

}  // namespace
