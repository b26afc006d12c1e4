// The tiles of AMX: eight registers of at most 16 rows of 64 bytes, and what multiplies them.
//
// An instance of `TileRegisters` is what one thread has of them: it sets their shapes where these change,
// and gives the registers back at its end, so that nobody else finds them in a state of theirs.
// Nothing may keep numbers in tiles across `shape`. With INTERPOSER_EMULATED_TILES the registers
// are memory and the instructions are loops, for processors that have none.
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

// What the registers are set to: of palette 1, the bytes of a row and the rows of each.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "this is read by the processor");

#if !defined(INTERPOSER_EMULATED_TILES)

// The registers are constants of the instructions. The compiler's own names for these say nothing
// of the memory that they read, so that what was written there might not be in it yet.
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

// The same of what is not wanted again soon: the first cache keeps other things.
template <int tile>
inline __attribute__((always_inline)) void load_tile_once(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline __attribute__((always_inline)) void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// Add a's rows times b's columns to `sums`: of bfloat16, two in a word, to float32.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void multiply_bfloat16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

// The same of codes, four in a word, to int32. The first is of a, the second of b.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void multiply_signed_unsigned_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

// The same where both are signed.
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
