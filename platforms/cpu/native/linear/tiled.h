// GEMM of many rows by AMX tiles. Included once for every level.
//
// A row of words of sixteen outputs is one row of a weight tile, so that tiles are loaded directly
// from packed weights. A tile of x has the same inputs of up to sixteen rows. Groups of inputs have
// separate scales, so that their sums leave the tiles group by group.
//
// Tile registers 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. Four tiles of sums would need
// 64 vectors: with scales per group, one tile is computed at a time, and its sixteen vectors of
// totals stay in registers.
#pragma once

#include <type_traits>

#include "../tiles.h"
#include "block.h"
#include "formats.h"

namespace {

typedef int8_t SignedBytes __attribute__((vector_size(64)));


#if defined(INTERPOSER_TILES)

// Fewest rows of words for which a tile pays.
constexpr int64_t kFewestTiledSteps = 8;
constexpr int kSumBytes = kTileRows * 64;
// Prefetch distance in bytes.
constexpr int64_t kFetchedBeforeTiles = 16 * 1024;

// AMX kernel of a format; specialized for the formats that support it.
template <class F>
struct Tiled {
  static constexpr bool kKnown = false;
};

template <>
struct Tiled<BFloat16OnPairs> {
  static constexpr bool kKnown = true;
  static constexpr int64_t kFewestRows = 6, kFewestRowsOfGroups = 6;

  template <int sums, int x, int weights>
  static INTERPOSER_INLINE void multiply() {
    multiply_bfloat16_tiles<sums, x, weights>();
  }
};

template <>
struct Tiled<Int8OnCodes> {
  static constexpr bool kKnown = true;
  static constexpr int64_t kFewestRows = 9, kFewestRowsOfGroups = 16;

  template <int sums, int x, int weights>
  static INTERPOSER_INLINE void multiply() {
    multiply_signed_unsigned_tiles<sums, x, weights>();
  }
};
template <>
struct Tiled<Symmetric<Int8OnCodes>> : Tiled<Int8OnCodes> {};

// Values minus their zero points, so that no sums of x are needed to correct the result.
struct CentredOnCodes : Int8OnCodes {};

template <>
struct Tiled<CentredOnCodes> : Tiled<Int8OnCodes> {
  template <int sums, int x, int weights>
  static INTERPOSER_INLINE void multiply() {
    multiply_signed_tiles<sums, x, weights>();
  }
};

// Location of the words of a block's tiles; rows of a tile are `row_bytes` apart.
struct TiledWords {
  const char* words;
  int64_t row_bytes, tile_bytes;
};

inline TiledWords words_of(const Block& block) { return {block.words, kBlock * 4, kLanes * 4}; }

// Unpack words of eight nibbles, or of four values with zero 128, to words of four signed bytes in
// the order of x. Tiles are consecutive, `tile_bytes` each: rows 256 bytes apart would use only a
// quarter of the first-level cache's sets.
template <class F>
void spread_codes(const interposer_packed& weight, const Block& block, char* to,
                  int64_t tile_bytes) {
  const int64_t groups = num_groups(weight);
  const int64_t group_inputs = groups > 1 ? weight.group : padded_inputs(weight.inputs);
  const char* words = block.words;
  for (int64_t group = 0; group < groups; ++group) {
    SignedBytes zero[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      const char* zeros = block.zeros ? block.zeros + group * kBlock + t * kLanes : nullptr;
      zero[t] = (SignedBytes)((Words)zeros_of<F>(zeros) * 0x01010101u);
    }
    for (int64_t step = 0; step < group_inputs / F::kInputs; ++step) {
      for (int t = 0; t < kTiles; ++t) {
        Words parts[F::kParts];
        decode<F>(load<Words>(words + t * 64), Ints{}, parts);
        for (int part = 0; part < F::kParts; ++part) {
          store(to + t * tile_bytes + part * 64, (SignedBytes)parts[part] - zero[t]);
        }
      }
      words += kBlock * 4;
      to += F::kParts * 64;
    }
  }
}

// Expand the scales of a block's groups to float32 [tiles][groups][16].
inline void spread_scales(const interposer_packed& weight, const Block& block, float* to) {
  const int64_t groups = num_groups(weight);
  const int size = size_of(weight.scale_type);
  for (int t = 0; t < kTiles; ++t) {
    for (int64_t group = 0; group < groups; ++group, to += kLanes) {
      const char* from = block.scales + (group * kBlock + t * kLanes) * size;
      store(to, load_scales(from, weight.scale_type));
    }
  }
}

// Rows of words per group and per tile; every tile has the same number.
template <class F>
struct GroupSteps {
  int64_t all, of_tile;  // 0 if tiles would be too small

  explicit GroupSteps(const interposer_packed& weight) : of_tile(0) {
    const int64_t inputs = num_groups(weight) > 1 ? weight.group : padded_inputs(weight.inputs);
    all = inputs % F::kInputs ? 0 : inputs / F::kInputs;
    for (int64_t steps = kFewestTiledSteps; steps <= kTileRows && steps <= all; ++steps) {
      if (all % steps == 0) of_tile = steps;
    }
  }
};

// With fewer rows, vector kernels read the weights once and are at least as fast.
template <class F>
bool takes_tiles(const interposer_product& product, Span span) {
  if constexpr (Tiled<F>::kKnown) {
    const interposer_packed& weight = *product.weight;
    const int64_t rows = span.last_row - span.first_row;
    const int64_t fewest = num_groups(weight) > 1 ? Tiled<F>::kFewestRowsOfGroups
                                                  : Tiled<F>::kFewestRows;
    return rows >= fewest && (rows >= kTileRows || !has_scales_of_groups(product)) &&
           GroupSteps<F>(weight).of_tile > 0;
  }
  return false;
}

// R tiles of rows: sixteen rows each, `rest` in the last one.
template <int R>
TileShapes shapes_of(int64_t rest, int64_t steps) {
  TileShapes shapes;
  auto set = [&](int tile, int64_t rows, int64_t words) {
    shapes.rows[tile] = uint8_t(rows);
    shapes.row_bytes[tile] = uint16_t(4 * words);
  };
  for (int tile = 0; tile < 4; ++tile) set(tile, R == 1 || tile >= 2 ? rest : kTileRows, kLanes);
  set(4, R == 1 ? rest : kTileRows, steps);
  set(5, rest, steps);
  set(6, steps, kLanes);
  set(7, steps, kLanes);
  return shapes;
}

// Compute 16 R rows by 4 / R tile columns over `steps` rows of words.
template <class F, int R>
void tile_products(const TiledWords& of, int tile, const char* x, int64_t x_stride,
                   const GroupSteps<F>& steps, bool from_memory, char* sums) {
  typedef Tiled<F> Way;
  const char* words = of.words + tile * of.tile_bytes;
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t step = 0; step < steps.all; step += steps.of_tile) {
    if (from_memory) {
      for (int64_t line = 0; line < 4 * steps.of_tile; ++line) {
        __builtin_prefetch(words + kFetchedBeforeTiles + line * 64, 0, 2);
      }
    }
    load_tile<4>(x, x_stride);
    load_tile_once<6>(words, of.row_bytes);
    Way::template multiply<0, 4, 6>();
    load_tile_once<7>(words + of.tile_bytes, of.row_bytes);
    Way::template multiply<1, 4, 7>();
    if constexpr (R == 1) {
      load_tile_once<6>(words + 2 * of.tile_bytes, of.row_bytes);
      Way::template multiply<2, 4, 6>();
      load_tile_once<7>(words + 3 * of.tile_bytes, of.row_bytes);
      Way::template multiply<3, 4, 7>();
    } else {
      load_tile<5>(x + kTileRows * x_stride, x_stride);
      Way::template multiply<2, 5, 6>();
      Way::template multiply<3, 5, 7>();
    }
    words += steps.of_tile * of.row_bytes;
    x += 4 * steps.of_tile;
  }
  store_tile<0>(sums, 64);
  store_tile<1>(sums + kSumBytes, 64);
  store_tile<2>(sums + 2 * kSumBytes, 64);
  store_tile<3>(sums + 3 * kSumBytes, 64);
}

// Parameters of sixteen outputs whose inputs have one scale.
struct Column {
  Ints zero;
  Floats scale;
};

template <class F>
Column column_of(const interposer_packed& weight, const Block& block, int tile) {
  const int64_t place = tile * kLanes;
  const int scale_size = size_of(weight.scale_type);
  return {zeros_of<F>(block.zeros ? block.zeros + place : nullptr),
          block.scales ? load_scales(block.scales + place * scale_size, weight.scale_type)
                       : splat(1.0f)};
}

// For weights with one scale per output: `rows` rows, at most 16 R, by 4 / R tiles of outputs.
template <class F, int R>
void multiply_tiled_rows(const interposer_product& product, const Prepared& prepared,
                         const Block& block, const TiledWords& words, const GroupSteps<F>& steps,
                         int tile, int64_t row, int64_t rows, bool from_memory) {
  constexpr int T = 4 / R, M = 4;
  alignas(64) char sums[4 * kSumBytes];
  const char* x = static_cast<const char*>(prepared.data) + row * prepared.stride;
  tile_products<F, R>(words, tile, x, prepared.stride, steps, from_memory, sums);
  for (int t = 0; t < T; t += 2) {
    const int64_t output = block.first_output + (tile + t) * kLanes;
    if (output >= product.weight->outputs) break;
    const Column columns[2] = {column_of<F>(*product.weight, block, tile + t),
                               column_of<F>(*product.weight, block, tile + t + 1)};
    auto write = [&](auto count, int64_t m) {
      constexpr int kCount = decltype(count)::value;
      const char* from = sums + (m / kTileRows * T + t) * kSumBytes + m % kTileRows * 64;
      Floats results[kCount][2];
      for (int i = 0; i < kCount; ++i) {
        for (int j = 0; j < 2; ++j) {
          const auto sum = load<typename F::Sum>(from + j * kSumBytes + i * 64);
          if constexpr (std::is_same<F, CentredOnCodes>::value) {
            results[i][j] = converted<Floats>(sum) * columns[j].scale;
          } else {
            results[i][j] = scaled<F>(product, prepared, row + m + i, 0, sum, columns[j].zero,
                                      columns[j].scale);
          }
        }
      }
      write_tiles(product, row + m, output, results);
    };
    int64_t m = 0;
    for (; m + M <= rows; m += M) write(std::integral_constant<int, M>(), m);
    for (; m < rows; ++m) write(std::integral_constant<int, 1>(), m);
  }
}

// Multiply the rows of words of one group into the tile `sums`, 0 or 1.
template <class F, int sums>
INTERPOSER_INLINE void multiply_group(const char* words, const char* x, int64_t x_stride,
                                      const GroupSteps<F>& steps) {
  zero_tile<sums>();
  for (int64_t step = 0; step < steps.all; step += steps.of_tile) {
    load_tile<4 + sums>(x + 4 * step, x_stride);
    load_tile<6 + sums>(words + step * 64, 64);
    Tiled<F>::template multiply<sums, 4 + sums, 6 + sums>();
  }
}

// For weights with groups: at most sixteen rows by one tile of outputs, with totals in registers.
// One group is multiplied in one tile while the sums of the previous group leave the other tile,
// which saves a third of the time.
template <class F, bool kScaledX>
void multiply_tiled_groups(const interposer_product& product, const Prepared& prepared,
                           const char* words, const float* scales, const GroupSteps<F>& steps,
                           int64_t output, int64_t row, int64_t rows) {
  alignas(64) char sums[2 * kSumBytes];
  if (rows < kTileRows) std::memset(sums, 0, sizeof sums);  // for missing rows
  const int64_t groups = num_groups(*product.weight);
  const char* x = static_cast<const char*>(prepared.data) + row * prepared.stride;
  const float* x_scales = product.x_scales + row * product.x_scale_stride;
  Floats totals[kTileRows] = {};
  for (int64_t group = 0; group <= groups; ++group) {
    if (group == groups) {
      if (group % 2) {
        store_tile<0>(sums, 64);
      } else {
        store_tile<1>(sums + kSumBytes, 64);
      }
    } else if (group % 2) {
      multiply_group<F, 1>(words, x, prepared.stride, steps);
      store_tile<0>(sums, 64);
    } else {
      multiply_group<F, 0>(words, x, prepared.stride, steps);
      if (group) store_tile<1>(sums + kSumBytes, 64);
    }
    words += steps.all * 64;
    x += 4 * steps.all;
    if (group == 0) continue;
    const char* from = sums + (group - 1) % 2 * kSumBytes;
    const Floats scale = load<Floats>(scales + (group - 1) * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) {
      const auto sum = load<typename F::Sum>(from + m * 64);
      Floats factor = scale;
      if constexpr (kScaledX) factor *= splat(x_scales[m * product.x_scale_stride + group - 1]);
      if constexpr (F::kInteger) {
        totals[m] += converted<Floats>(sum) * factor;
      } else {
        totals[m] += sum * factor;
      }
    }
  }
  Floats results[kTileRows][1];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) results[m][0] = totals[m];
  if (rows == kTileRows) return write_tiles(product, row, output, results);
  for (int m = 0; m < rows; ++m) write_outputs(product, row + m, output, results[m][0]);
}

template <class F>
void multiply_all_rows(TileRegisters& tiles, const interposer_product& product,
                       const Prepared& prepared, const Block& block, const TiledWords& words,
                       Span span) {
  const GroupSteps<F> steps(*product.weight);
  for (int64_t row = span.first_row; row < span.last_row; row += 2 * kTileRows) {
    const int64_t left = span.last_row - row;
    if (left <= kTileRows) {
      tiles.shape(shapes_of<1>(left, steps.of_tile));
      multiply_tiled_rows<F, 1>(product, prepared, block, words, steps, 0, row, left,
                                row == span.first_row);
      break;
    }
    const int64_t rows = left < 2 * kTileRows ? left : 2 * kTileRows;
    tiles.shape(shapes_of<2>(rows - kTileRows, steps.of_tile));
    for (int tile = 0; tile < kTiles; tile += 2) {
      if (block.first_output + tile * kLanes >= product.weight->outputs) break;
      multiply_tiled_rows<F, 2>(product, prepared, block, words, steps, tile, row, rows,
                                tile == 0 && row == span.first_row);
    }
  }
}

// The last tile of rows overlaps the one before it.
template <class F>
void multiply_all_groups(TileRegisters& tiles, const interposer_product& product,
                         const Prepared& prepared, const Block& block, const TiledWords& words,
                         const float* scales, Span span) {
  const GroupSteps<F> steps(*product.weight);
  const auto multiply = has_scales_of_groups(product) ? multiply_tiled_groups<F, true>
                                                      : multiply_tiled_groups<F, false>;
  const int64_t groups = num_groups(*product.weight);
  const int64_t all = span.last_row - span.first_row, rows = all < kTileRows ? all : kTileRows;
  tiles.shape(shapes_of<1>(rows, steps.of_tile));
  for (int64_t row = span.first_row; row < span.last_row; row += kTileRows) {
    const int64_t first = row + rows <= span.last_row ? row : span.last_row - rows;
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t output = block.first_output + tile * kLanes;
      if (output >= product.weight->outputs) break;
      multiply(product, prepared, words.words + tile * words.tile_bytes,
               scales + tile * groups * kLanes, steps, output, first, rows);
    }
  }
}

// Multiply by blocks that `spread` unpacks tile by tile. Returns false if out of memory.
template <class F, class Spread>
bool multiply_spread(const interposer_product& product, const Prepared& prepared, Span span,
                     const Spread& spread) {
  const interposer_packed& weight = *product.weight;
  const int64_t tile_bytes = padded_inputs(weight.inputs) / F::kInputs * 64;
  const int64_t groups = num_groups(weight), bytes = kTiles * tile_bytes;
  char* memory = static_cast<char*>(interposer_scratch(kForWeights, bytes + groups * kBlock * 4));
  if (memory == nullptr) return false;
  float* scales = reinterpret_cast<float*>(memory + bytes);
  const TiledWords words = {memory, 64, tile_bytes};
  TileRegisters tiles;
  for (int64_t index = span.first_block; index < span.last_block; ++index) {
    const Block block = block_of(weight, index);
    spread(weight, block, memory, tile_bytes);
    if (groups == 1) {
      multiply_all_rows<F>(tiles, product, prepared, block, words, span);
    } else {
      spread_scales(weight, block, scales);
      multiply_all_groups<F>(tiles, product, prepared, block, words, scales, span);
    }
  }
  return true;
}

#endif

// Multiply a block by the rows of `span` if tiles can load its words directly. Returns whether they
// can.
template <class F>
bool multiply_tiled([[maybe_unused]] TileRegisters& tiles,
                    [[maybe_unused]] const interposer_product& product,
                    [[maybe_unused]] const Prepared& prepared, [[maybe_unused]] const Block& block,
                    [[maybe_unused]] Span span) {
#if defined(INTERPOSER_TILES)
  if constexpr (Tiled<F>::kKnown) {
    if (num_groups(*product.weight) > 1 || !takes_tiles<F>(product, span)) return false;
    multiply_all_rows<F>(tiles, product, prepared, block, words_of(block), span);
    return true;
  }
#endif
  return false;
}

}  // namespace
