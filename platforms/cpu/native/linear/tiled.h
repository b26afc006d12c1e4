// Products of many rows, by tiles. Included once for every level.
//
// A row of words of sixteen outputs is a row of what a tile holds of weights, so tiles are loaded
// from packed weights as they lie; of x, they take as many inputs of up to sixteen rows. Groups of
// inputs have a scale of their own, so their sums leave the tiles one after another.
//
// Registers 0 to 3 are sums, 4 and 5 hold rows of x, 6 and 7 weights.
#pragma once

#include "../tiles.h"
#include "block.h"
#include "formats.h"

namespace {

#if defined(INTERPOSER_TILES)

// From so many rows on, tiles are used; fewer read weights once with vectors.
constexpr int64_t kFewestTiledRows = 16;
// Rows of words that are worth a tile.
constexpr int64_t kFewestTiledSteps = 8;

// How a format is multiplied so; not at all unless it says otherwise.
template <class F>
struct Tiled {
  static constexpr bool kKnown = false;
};

template <>
struct Tiled<BFloat16OnPairs> {
  static constexpr bool kKnown = true;

  template <int sums, int x, int weights>
  static INTERPOSER_INLINE void multiply() {
    multiply_bfloat16_tiles<sums, x, weights>();
  }
};

template <>
struct Tiled<Int8OnCodes> {
  static constexpr bool kKnown = true;

  template <int sums, int x, int weights>
  static INTERPOSER_INLINE void multiply() {
    multiply_signed_unsigned_tiles<sums, x, weights>();
  }
};

// Codes of four bits that were made bytes.
struct NibblesOnCodes : Int8OnCodes {
  static constexpr int kZero = 8;
};
template <>
struct Tiled<NibblesOnCodes> : Tiled<Int8OnCodes> {};
template <class F>
struct Tiled<Symmetric<F>> : Tiled<F> {};

// Write words of four bytes in place of each of eight nibbles, in the order that x has.
inline void spread_nibbles(const char* words, int64_t steps, char* to) {
  for (int64_t step = 0; step < steps; ++step) {
    for (int t = 0; t < kTiles; ++t) {
      Words parts[Int4OnCodes::kParts];
      Int4OnCodes::decode(load<Words>(words + t * 64), Ints{}, parts);
      store(to + t * 64, parts[0]);
      store(to + kBlock * 4 + t * 64, parts[1]);
    }
    words += kBlock * 4;
    to += 2 * kBlock * 4;
  }
}

// Rows of words of a group, of which every tile takes the same number.
template <class F>
struct GroupSteps {
  int64_t all, of_tile;  // 0 where tiles would be too small

  explicit GroupSteps(const interposer_packed& weight) : of_tile(0) {
    const int64_t inputs = num_groups(weight) > 1 ? weight.group : padded_inputs(weight.inputs);
    all = inputs % F::kInputs ? 0 : inputs / F::kInputs;
    for (int64_t steps = kFewestTiledSteps; steps <= kTileRows && steps <= all; ++steps) {
      if (all % steps == 0) of_tile = steps;
    }
  }
};

template <class F>
bool takes_tiles(const interposer_packed& weight, Span span) {
  return Tiled<F>::kKnown && span.last_row - span.first_row >= kFewestTiledRows &&
         GroupSteps<F>(weight).of_tile > 0;
}

// R tiles of rows: sixteen in the first, `rest` in the last.
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

// Add what `steps` rows of words are multiplied by to sums, which are of one group.
template <class F, int R>
void add_tile_products(const char* words, const char* x, int64_t x_stride,
                       const GroupSteps<F>& steps) {
  typedef Tiled<F> Way;
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t step = 0; step < steps.all; step += steps.of_tile) {
    load_tile<4>(x, x_stride);
    load_tile<6>(words, kBlock * 4);
    Way::template multiply<0, 4, 6>();
    load_tile<7>(words + 64, kBlock * 4);
    Way::template multiply<1, 4, 7>();
    if constexpr (R == 1) {
      load_tile<6>(words + 128, kBlock * 4);
      Way::template multiply<2, 4, 6>();
      load_tile<7>(words + 192, kBlock * 4);
      Way::template multiply<3, 4, 7>();
    } else {
      load_tile<5>(x + kTileRows * x_stride, x_stride);
      Way::template multiply<2, 5, 6>();
      Way::template multiply<3, 5, 7>();
    }
    words += steps.of_tile * kBlock * 4;
    x += 4 * steps.of_tile;
  }
}

// `rows` rows, at most 16 R, by 4 / R tiles of outputs.
template <class F, int R>
void multiply_tiled_rows(const interposer_product& product, const Prepared& prepared,
                         const Block& block, const GroupSteps<F>& steps, int tile, int64_t row,
                         int64_t rows) {
  constexpr int T = 4 / R, kRowBytes = 64 * T;
  const interposer_packed& weight = *product.weight;
  const int64_t groups = num_groups(weight);
  const int scale_size = size_of(weight.scale_type);
  alignas(64) char sums[R * kTileRows * kRowBytes];
  alignas(64) char totals[R * kTileRows * kRowBytes];
  const char* words = block.words + tile * 64;
  const char* x = static_cast<const char*>(prepared.data) + row * prepared.stride;
  for (int64_t group = 0; group < groups; ++group) {
    add_tile_products<F, R>(words, x, prepared.stride, steps);
    store_tile<0>(sums, kRowBytes);
    store_tile<1>(sums + 64, kRowBytes);
    char* others = R == 1 ? sums + 128 : sums + kTileRows * kRowBytes;
    store_tile<2>(others, kRowBytes);
    store_tile<3>(others + 64, kRowBytes);
    for (int t = 0; t < T; ++t) {
      const int64_t column = group * kBlock + (tile + t) * kLanes;
      const Ints zero = zeros_of<F>(block.zeros ? block.zeros + column : nullptr);
      const Floats scale = block.scales
                               ? load_scales(block.scales + column * scale_size, weight.scale_type)
                               : splat(1.0f);
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t place = m * kRowBytes + t * 64;
        const auto sum = load<typename F::Sum>(sums + place);
        Floats total = scaled<F>(product, prepared, row + m, group, sum, zero, scale);
        if (group) total += load<Floats>(totals + place);
        store(totals + place, total);
      }
    }
    words += steps.all * kBlock * 4;
    x += 4 * steps.all;
  }
  for (int t = 0; t < T; ++t) {
    const int64_t output = block.first_output + (tile + t) * kLanes;
    if (output >= weight.outputs) break;
    for (int64_t m = 0; m < rows; ++m) {
      write_outputs(product, row + m, output, load<Floats>(totals + m * kRowBytes + t * 64));
    }
  }
}

#endif

// Multiply a block by the rows of `span`, if tiles are right for that. Returns whether they are.
template <class F>
bool multiply_tiled([[maybe_unused]] TileRegisters& tiles,
                    [[maybe_unused]] const interposer_product& product,
                    [[maybe_unused]] const Prepared& prepared, [[maybe_unused]] const Block& block,
                    [[maybe_unused]] Span span) {
#if defined(INTERPOSER_TILES)
  if constexpr (Tiled<F>::kKnown) {
    if (!takes_tiles<F>(*product.weight, span)) return false;
    const GroupSteps<F> steps(*product.weight);
    for (int64_t row = span.first_row; row < span.last_row; row += 2 * kTileRows) {
      const int64_t left = span.last_row - row;
      if (left <= kTileRows) {
        tiles.shape(shapes_of<1>(left, steps.of_tile));
        multiply_tiled_rows<F, 1>(product, prepared, block, steps, 0, row, left);
        break;
      }
      const int64_t rows = left < 2 * kTileRows ? left : 2 * kTileRows;
      tiles.shape(shapes_of<2>(rows - kTileRows, steps.of_tile));
      for (int tile = 0; tile < kTiles; tile += 2) {
        if (block.first_output + tile * kLanes >= product.weight->outputs) break;
        multiply_tiled_rows<F, 2>(product, prepared, block, steps, tile, row, rows);
      }
    }
    return true;
  }
#endif
  return false;
}

}  // namespace
