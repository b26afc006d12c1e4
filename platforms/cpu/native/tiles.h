// AMX tiles: eight registers of at most 16 rows of 64 bytes, and the instructions that multiply
// them.
//
// An instance of `TileRegisters` owns the registers of one thread: it sets their shapes when these
// change, and releases the registers in its destructor, so that later code never finds them
// configured. Tile contents do not survive `shape`. With INTERPOSER_EMULATED_TILES, the registers
// are memory and the instructions are loops, for processors without AMX.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG and
// TDPBF16PS.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(INTERPOSER_EMULATED_TILES)
#include "tiles_emulated.h"
#define INTERPOSER_TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define INTERPOSER_TILES 1
#endif

#if defined(INTERPOSER_TILES)

namespace {  // a copy for each level

constexpr int kTileRows = 16;

// Tile configuration, palette 1: bytes per row and number of rows of each register.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "this is read by the processor");

#if !defined(INTERPOSER_EMULATED_TILES)

// Register numbers are constants in the instructions. The compiler's intrinsics do not declare the
// memory that they read, so that a preceding store could be delayed past the load; hence inline
// assembly.
inline void load_tile_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int tile>
inline __attribute__((always_inline)) void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

template <int tile>
inline __attribute__((always_inline)) void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

// The same with a non-temporal hint: the data are not needed again soon and stay out of the
// first-level cache.
template <int tile>
inline __attribute__((always_inline)) void load_tile_once(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline __attribute__((always_inline)) void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// sums += a * b for bfloat16 pairs, accumulated in float32.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void multiply_bfloat16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

// sums += a * b for int8, four per word, accumulated in int32. The function's name states the signs
// of a, then of b.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void multiply_signed_unsigned_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

// The same for signed a and b.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void multiply_signed_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

#else

inline void load_tile_shapes(const TileShapes& shapes) {
  emulated_tiles::configure(shapes.palette, shapes.row_bytes, shapes.rows);
}
inline void release_tiles() { emulated_tiles::release(); }

template <int tile>
inline void zero_tile() {
  emulated_tiles::zero(tile);
}

template <int tile>
inline void load_tile(const void* from, int64_t stride) {
  emulated_tiles::load(tile, static_cast<const char*>(from), stride);
}

template <int tile>
inline void load_tile_once(const void* from, int64_t stride) {
  load_tile<tile>(from, stride);
}

template <int tile>
inline void store_tile(void* to, int64_t stride) {
  emulated_tiles::store(tile, static_cast<char*>(to), stride);
}

template <int sums, int a, int b>
inline void multiply_bfloat16_tiles() {
  emulated_tiles::multiply_bfloat16(sums, a, b);
}

template <int sums, int a, int b>
inline void multiply_signed_unsigned_tiles() {
  emulated_tiles::multiply_codes<int8_t, uint8_t>(sums, a, b);
}

template <int sums, int a, int b>
inline void multiply_signed_tiles() {
  emulated_tiles::multiply_codes<int8_t, int8_t>(sums, a, b);
}

#endif

class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (shaped_) release_tiles();
  }

  void shape(const TileShapes& shapes) {
    if (shaped_ && std::memcmp(&shapes, &shapes_, sizeof shapes) == 0) return;
    shapes_ = shapes;
    load_tile_shapes(shapes_);
    shaped_ = true;
  }

 private:
  TileShapes shapes_;
  bool shaped_ = false;
};

}  // namespace

#else

namespace {
class TileRegisters {};
}  // namespace

#endif
