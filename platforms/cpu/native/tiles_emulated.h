// AMX instructions emulated as loops, for tests on processors without AMX.
//
// An undefined instruction aborts the program. All kinds of multiplication are emulated, including
// those that no kernel uses.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: "Operation" of
// TILELOADD, TDPBF16PS and TDPBSSD.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {
namespace emulated_tiles {

constexpr int kNumTiles = 8, kRows = 16, kRowBytes = 64;

struct Registers {
  bool configured = false;
  int rows[kNumTiles] = {}, row_bytes[kNumTiles] = {};
  alignas(64) char data[kNumTiles][kRows][kRowBytes] = {};
};

inline Registers& registers() {
  static thread_local Registers own;
  return own;
}

inline void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "undefined instruction of tiles: %s\n", what);
  std::abort();
}

inline void release() { registers() = Registers(); }

inline void configure(int palette, const uint16_t* row_bytes, const uint8_t* rows) {
  release();
  expect(palette == 1, "the palette is not 1");
  Registers& all = registers();
  for (int tile = 0; tile < kNumTiles; ++tile) {
    expect(row_bytes[tile] <= kRowBytes && rows[tile] <= kRows, "a tile is too large");
    expect((row_bytes[tile] == 0) == (rows[tile] == 0), "a tile has rows or bytes alone");
    all.rows[tile] = rows[tile];
    all.row_bytes[tile] = row_bytes[tile];
  }
  all.configured = true;
}

inline void expect_tile(int tile) {
  const Registers& all = registers();
  expect(all.configured, "no shapes were loaded");
  expect(tile >= 0 && tile < kNumTiles && all.rows[tile] > 0, "the tile has no shape");
}

inline void zero(int tile) {
  expect_tile(tile);
  std::memset(registers().data[tile], 0, sizeof registers().data[tile]);
}

inline void load(int tile, const char* from, int64_t stride) {
  zero(tile);
  Registers& all = registers();
  for (int row = 0; row < all.rows[tile]; ++row) {
    std::memcpy(all.data[tile][row], from + row * stride, size_t(all.row_bytes[tile]));
  }
}

inline void store(int tile, char* to, int64_t stride) {
  expect_tile(tile);
  const Registers& all = registers();
  for (int row = 0; row < all.rows[tile]; ++row) {
    std::memcpy(to + row * stride, all.data[tile][row], size_t(all.row_bytes[tile]));
  }
}

inline void expect_product(int sums, int a, int b) {
  expect_tile(sums), expect_tile(a), expect_tile(b);
  const Registers& all = registers();
  expect(sums != a && sums != b && a != b, "tiles are not distinct");
  for (int tile : {sums, a, b}) expect(all.row_bytes[tile] % 4 == 0, "a row is no whole words");
  expect(all.rows[sums] == all.rows[a], "sums and a have different rows");
  expect(all.row_bytes[sums] == all.row_bytes[b], "sums and b have different columns");
  expect(all.row_bytes[a] / 4 == all.rows[b], "a's columns are not b's rows");
}

template <class T>
T element(int tile, int row, int index) {
  T value;
  std::memcpy(&value, registers().data[tile][row] + index * int(sizeof value), sizeof value);
  return value;
}

template <class T>
void set_element(int tile, int row, int index, T value) {
  std::memcpy(registers().data[tile][row] + index * int(sizeof value), &value, sizeof value);
}

// The float instructions read subnormal inputs as zero and flush subnormal results to zero.
inline float without_subnormals(float value) {
  return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value;
}

inline float bfloat16_element(int tile, int row, int index) {
  const uint32_t bits = uint32_t(element<uint16_t>(tile, row, index)) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return without_subnormals(value);
}

// The first and the second elements of all pairs have separate sums, which begin at zero. Every
// multiply-add rounds once, to nearest, ties to even.
inline void multiply_bfloat16(int sums, int a, int b) {
  expect_product(sums, a, b);
  const Registers& all = registers();
  for (int row = 0; row < all.rows[sums]; ++row) {
    for (int column = 0; column < all.row_bytes[sums] / 4; ++column) {
      float halves[2] = {0, 0};
      for (int k = 0; k < all.rows[b]; ++k) {
        for (int half = 0; half < 2; ++half) {
          halves[half] = without_subnormals(
              __builtin_fmaf(bfloat16_element(a, row, 2 * k + half),
                             bfloat16_element(b, k, 2 * column + half), halves[half]));
        }
      }
      const float both = without_subnormals(halves[0] + halves[1]);
      const float before = without_subnormals(element<float>(sums, row, column));
      set_element(sums, row, column, without_subnormals(before + both));
    }
  }
}

// Sums wrap around. A is the element type of a, B of b.
template <class A, class B>
void multiply_codes(int sums, int a, int b) {
  expect_product(sums, a, b);
  const Registers& all = registers();
  for (int row = 0; row < all.rows[sums]; ++row) {
    for (int column = 0; column < all.row_bytes[sums] / 4; ++column) {
      uint32_t sum = element<uint32_t>(sums, row, column);
      for (int k = 0; k < all.rows[b]; ++k) {
        for (int i = 0; i < 4; ++i) {
          sum += uint32_t(int32_t(element<A>(a, row, 4 * k + i)) *
                          int32_t(element<B>(b, k, 4 * column + i)));
        }
      }
      set_element(sums, row, column, sum);
    }
  }
}

}  // namespace emulated_tiles
}  // namespace
