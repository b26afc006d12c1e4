// Reorders rows of queries, keys and values for multiplication. Included once for every level.
//
// A word has 32 bits and kInputs elements: one float32, or two bfloat16 if the level multiplies
// bfloat16 pairs.
#pragma once

#include "../attention/formats.h"
#include "../attention/softmax.h"
#include "dense.h"

namespace {

template <class F>
constexpr int32_t kHeld = F::kPairs ? kBFloat16 : kFloat32;

// Load the first `count` of sixteen elements; the other lanes are zero.
INTERPOSER_INLINE Floats load_stored(const char* from, int32_t stored, int count) {
  if (stored < kCacheE4M3) return load_some(from, stored, count);
  Bytes codes = {};
  if (count == kLanes) {
    codes = load<Bytes>(from);
  } else {
    std::memcpy(&codes, from, size_t(count));
  }
  const Words code = converted<Words>(codes);
  if (stored == kCacheInt8) return converted<Floats>((Ints)(code << 24) >> 24);
  const int mantissa = stored == kCacheE4M3 ? 3 : 2;
  const Words bits = (code & 0x7f) << (23 - mantissa) | (code & 0x80) << 24;
  return as_floats(bits) * splat(mantissa == 3 ? 0x1p120f : 0x1p112f);
}

#if defined(__AVX512BF16__)
// Two 8-bit floats per word, as bfloat16.
template <int Mantissa>
INTERPOSER_INLINE Words bfloat16_of_codes(const char* from) {
  return Float8OnPairs<Mantissa>::decoded(_mm512_cvtepu8_epi16(load<__m256i>(from)));
}
#endif

constexpr int64_t bytes_of_stored(int32_t stored) { return 4 / elements_per_word(stored); }

INTERPOSER_INLINE int lanes_left(int64_t count) { return count < kLanes ? int(count) : kLanes; }

// Write `count` elements to full words, padded with zeros.
template <class F>
void convert_row(const char* from, int32_t stored, int64_t count, char* to) {
  if (stored == int32_t(kHeld<F>)) {
    std::memcpy(to, from, size_t(count * F::kInputBytes));
  } else {
    const int64_t size = bytes_of_stored(stored);
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (F::kPairs) {  // of stored floats, exact in bfloat16 only for 8 bits
      for (; stored != kCacheInt8 && i + 2 * kLanes <= count; i += 2 * kLanes) {
        store(to + i * 2, stored == kCacheE4M3 ? bfloat16_of_codes<3>(from + i)
                                               : bfloat16_of_codes<2>(from + i));
      }
    }
#endif
    for (; i < count; i += kLanes) {
      const int n = lanes_left(count - i);
      store_some(to + i * F::kInputBytes, load_stored(from + i * size, stored, n), kHeld<F>, n);
    }
  }
  if (count % F::kInputs) std::memset(to + count * F::kInputBytes, 0, F::kInputBytes);
}

INTERPOSER_INLINE Halves load_halves(const char* from, int count) {
  if (count == kLanes) return load<Halves>(from);
  Halves halves = {};
  std::memcpy(&halves, from, size_t(count) * 2);
  return halves;
}

// Write a row of value words: of one row, or of two interleaved rows; `second` can be null.
template <class F>
void interleave(const char* first, const char* second, int64_t count, char* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = lanes_left(count - i);
    if constexpr (F::kPairs) {
      Words words = converted<Words>(load_halves(first + i * 2, n));
      if (second) {
        words |= converted<Words>(load_halves(second + i * 2, n)) << 16;
      }
      store(to + i * 4, words);
    } else {
      store(to + i * 4, load_some(first + i * 4, kFloat32, n));
    }
  }
}

// Rows of one head of one sequence, by position.
struct Source {
  const char* data;
  int64_t page, token;
  const int64_t* table;  // null if rows are consecutive
  int64_t page_tokens;

  Source(const interposer_dense_call& call, const interposer_dense_rows& rows,
         const AttentionItem& item)
      : data(rows.data + item.head * rows.head), page(rows.page), token(rows.token) {
    page_tokens = call.page_tokens;
    table = page_tokens ? call.page_table + item.sequence * call.table_stride : nullptr;
    if (table == nullptr) data += call.key_starts[item.sequence] * token;
  }

  const char* row(int64_t position) const {
    if (table == nullptr) return data + position * token;
    return data + table[position / page_tokens] * page + position % page_tokens * token;
  }

  // Write the addresses of `count` rows from `position` on; one division per row would take longer.
  void locate(int64_t position, int64_t count, const char** rows) const {
    for (int64_t i = 0; i < count;) {
      const char* from = row(position + i);
      const int64_t left = table ? page_tokens - (position + i) % page_tokens : count;
      for (int64_t end = i + left < count ? i + left : count; i < end; ++i, from += token) {
        rows[i] = from;
      }
    }
  }
};

}  // namespace
