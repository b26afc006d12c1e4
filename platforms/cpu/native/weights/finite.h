// A search of weights for NaN and infinities, in numbers of any type.
//
// Every format here holds them where some bits of the magnitude are all set: the exponent, or in
// e4m3fn, which has no infinity, the whole magnitude. To those bits, the lowest of them is added: the
// sum reaches the sign bit, which was cleared, if and only if all of them were set. So one loop of
// `and`, `add` and `or` serves every format, in words of 64 bits. Memory is slower than these, so that
// numbers which are copied anyway are searched at no cost.
#pragma once

#include <cstdint>

extern "C" {

struct interposer_numbers_searched {
  const void* numbers;  // without gaps
  void* copy;           // where they are copied to, or null
  int64_t bytes;
  uint64_t bits;    // those that are all set, in each number of a word of 64 bits
  uint64_t lowest;  // the lowest of these
  uint64_t sign;    // the sign of each number
};

// Copies the numbers, and returns whether all of them are finite.
bool interposer_are_finite(const interposer_numbers_searched* searched);
}
