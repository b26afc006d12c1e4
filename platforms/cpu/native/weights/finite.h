// Search for NaN and infinity in weights of any float type.
//
// In every format here, a number is NaN or infinite if certain bits are all set: the exponent, or
// in e4m3fn, which has no infinity, the whole magnitude. Adding the lowest of these bits to the
// masked bits carries into the cleared sign bit if and only if all of them are set. So one loop of
// `and`, `add` and `or` on 64-bit words serves every format. Memory is slower than this loop, so
// that numbers that are copied anyway are checked at no cost.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_numbers_searched {
  const void* numbers;  // contiguous
  void* copy;           // destination of a copy, or null
  int64_t bytes;
  uint64_t bits;    // bits that are all set if not finite, for each number in a 64-bit word
  uint64_t lowest;  // lowest of these bits
  uint64_t sign;    // sign bit of each number
};

// Copies the numbers if requested, and returns whether all are finite.
bool interposer_are_finite(const interposer_numbers_searched* searched);
}
