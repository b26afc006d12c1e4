// The block formats: what stands where in their bytes.
//
// Each has kNumbers numbers in kBytes bytes. `scales` writes a scale for every kGroup numbers and,
// where kHasOffsets, as many offsets behind them; `stored` returns the bytes that stand for the 32
// codes of a part, each kLess more than the code. A number is code * scale + offset.
//
// Source: the block layouts of ggml (ggml-common.h) as gguf-py reads them (gguf/quants.py).
#pragma once

#include "vectors.h"

namespace interposer_gguf {
namespace LEVEL {

// Instead of a difference: the bytes are codes with a sign.
constexpr int kSigned = -1;

// Thirty-two numbers.
struct Part {
  Vector first, last;
};

// The codes of a part.
template <typename Format>
INLINE Part codes(const std::uint8_t* block, int part) {
  const Bytes stored = Format::stored(block, part);
  if (Format::kLess == 0) {
    return {from_unsigned(first_half(stored)), from_unsigned(last_half(stored))};
  }
  const Bytes less = Format::kLess == kSigned ? stored : stored - Format::kLess;
  return {from_signed(first_half(less)), from_signed(last_half(less))};
}

// All low nibbles of 16 bytes, then all high ones.
INLINE Bytes nibbles(const std::uint8_t* from) {
  typedef std::uint16_t HalfWords __attribute__((vector_size(16)));
  const HalfBytes octets = load_bytes<HalfBytes>(from);
  return joined(octets, reinterpret_cast<HalfBytes>(reinterpret_cast<HalfWords>(octets) >> 4)) & 15;
}

// The low nibbles of 32 bytes for an even number, the high ones for an odd one.
INLINE Bytes low_or_high(const std::uint8_t* from, int number) {
  const Bytes octets = load_bytes<Bytes>(from);
  return number % 2 == 0 ? bits<0>(octets, 15) : bits<4>(octets, 15);
}

// Blocks of 32 that begin with their scale, and perhaps their offset.
template <int kSize, bool kOffsets>
struct Short {
  static constexpr int kNumbers = 32, kGroup = 32, kBytes = kSize;
  static constexpr bool kHasOffsets = kOffsets;

  static INLINE void scales(const std::uint8_t* block, float* scale) {
    scale[0] = half(block);
    if (kOffsets) scale[1] = half(block + 2);
  }
};

struct Q4_0 : Short<18, false> {
  static constexpr int kLess = 8;

  static INLINE Bytes stored(const std::uint8_t* block, int) { return nibbles(block + 2); }
};

struct Q4_1 : Short<20, true> {
  static constexpr int kLess = 0;

  static INLINE Bytes stored(const std::uint8_t* block, int) { return nibbles(block + 4); }
};

struct Q5_0 : Short<22, false> {
  static constexpr int kLess = 16;

  static INLINE Bytes stored(const std::uint8_t* block, int) { return nibbles(block + 6) | sixteens(block + 2); }
};

struct Q5_1 : Short<24, true> {
  static constexpr int kLess = 0;

  static INLINE Bytes stored(const std::uint8_t* block, int) { return nibbles(block + 8) | sixteens(block + 4); }
};

struct Q8_0 : Short<34, false> {
  static constexpr int kLess = kSigned;

  static INLINE Bytes stored(const std::uint8_t* block, int) {
    return load_bytes<Bytes>(block + 2);
  }
};

// Blocks of 256 in groups of 32: 6-bit factors of a scale and of a minimum, in 12 bytes.
template <int kSize>
struct Long {
  static constexpr int kNumbers = 256, kGroup = 32, kBytes = kSize, kLess = 0;
  static constexpr bool kHasOffsets = true;

  // Scales and offsets stand in one array, and are computed at once. Four bytes hold the factors
  // of the first four groups, four those of their minima, and four the low nibbles of both for the
  // last four, whose upper bits are the spare ones of the first eight. Bits never leave their byte,
  // so the machine's order of bytes does not matter.
  static INLINE void scales(const std::uint8_t* block, float* scale) {
    std::uint32_t first, minima, last;
    std::memcpy(&first, block + 4, 4);
    std::memcpy(&minima, block + 8, 4);
    std::memcpy(&last, block + 12, 4);
    const std::uint32_t factors[4] = {
        first & 0x3f3f3f3fu, (last & 0x0f0f0f0fu) | ((first >> 2) & 0x30303030u),
        minima & 0x3f3f3f3fu, ((last >> 4) & 0x0f0f0f0fu) | ((minima >> 2) & 0x30303030u)};
    HalfBytes octets;
    std::memcpy(&octets, factors, sizeof octets);
    store(scale, from_unsigned(octets) * halves(half(block), -half(block + 2)));
  }
};

struct Q4_K : Long<144> {
  static INLINE Bytes stored(const std::uint8_t* block, int part) {
    return low_or_high(block + 16 + 32 * (part / 2), part);
  }
};

struct Q5_K : Long<176> {
  static INLINE Bytes stored(const std::uint8_t* block, int part) {
    const Bytes fours = low_or_high(block + 48 + 32 * (part / 2), part);
    return fours | bits_to_16(load_bytes<Bytes>(block + 16), part);
  }

  // Moves the bit of that number to the place of 16.
  static INLINE Bytes bits_to_16(Bytes b, int number) {
    switch (number) {
      case 0: return bits<-4>(b, 16);
      case 1: return bits<-3>(b, 16);
      case 2: return bits<-2>(b, 16);
      case 3: return bits<-1>(b, 16);
      case 4: return bits<0>(b, 16);
      case 5: return bits<1>(b, 16);
      case 6: return bits<2>(b, 16);
      default: return bits<3>(b, 16);
    }
  }
};

struct Q6_K {
  static constexpr int kNumbers = 256, kGroup = 16, kBytes = 210, kLess = 32;
  static constexpr bool kHasOffsets = false;

  static INLINE void scales(const std::uint8_t* block, float* scale) {
    store(scale, from_signed(load_bytes<HalfBytes>(block + 192)) * broadcast(half(block + 208)));
  }

  // Each half of a block has 64 bytes of four bits, the low ones first, and 32 bytes of two.
  static INLINE Bytes stored(const std::uint8_t* block, int part) {
    const int place = part % 4;
    const Bytes fours = low_or_high(block + 64 * (part / 4) + 32 * (place % 2), place / 2);
    const Bytes twos = load_bytes<Bytes>(block + 128 + 32 * (part / 4));
    return fours | bits_to_16_and_32(twos, place);
  }

  // Moves the two bits of that number to the places of 16 and 32.
  static INLINE Bytes bits_to_16_and_32(Bytes b, int number) {
    switch (number) {
      case 0: return bits<-4>(b, 48);
      case 1: return bits<-2>(b, 48);
      case 2: return bits<0>(b, 48);
      default: return bits<2>(b, 48);
    }
  }
};

// Calls what is given with the format of that number; false where there is none.
template <typename Function>
INLINE bool with_format(int number, Function&& function) {
  switch (number) {
    case 2: function(Q4_0()); return true;
    case 3: function(Q4_1()); return true;
    case 6: function(Q5_0()); return true;
    case 7: function(Q5_1()); return true;
    case 8: function(Q8_0()); return true;
    case 12: function(Q4_K()); return true;
    case 13: function(Q5_K()); return true;
    case 14: function(Q6_K()); return true;
    default: return false;
  }
}

}  // namespace LEVEL
}  // namespace interposer_gguf
