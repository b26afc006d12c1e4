// Memory layout of keys and values in a paged cache, and storing of one token.
//
// A page has, for one kv head, all keys followed by all values. Both are stored in tiles of 16
// tokens, as 32-bit words:
//
//   keys    [tiles][D / E][16]   a word is E neighbouring dimensions of one token
//   values  [tiles][16 / E][D]   a word is one dimension of E neighbouring tokens
//
// where E elements make a word: 1 in float32, 2 in 16-bit types, 4 in 8-bit types. 4-bit values are
// stored in groups, see grouped.h. So a row of key words times E dimensions of a query contributes
// to the scores of 16 tokens, and a row of value words times E weights contributes to 16 dimensions
// of the result: no vector is ever summed across its lanes. `element_shift` gives the bit position
// of an element in a word; words are integers in the byte order of the machine.
//
// Heads and pages are as far apart as the strides say.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int kTile = 16;  // tokens

enum CacheType : int32_t {
  kCacheFloat32 = 0,
  kCacheBFloat16 = 1,
  kCacheFloat16 = 2,
  kCacheE4M3 = 3,
  kCacheE5M2 = 4,
  kCacheInt8 = 5,
  kCacheUInt4 = 6,  // groups with a scale (step) and a minimum (base)
};

// 4-bit values per step and base.
constexpr int kGroup = 32;

struct interposer_kv_cache {
  char* data;
  int64_t head_stride, page_stride;  // bytes
  int32_t page_tokens;               // a multiple of 16
  int32_t head_size;                 // a multiple of 16
  int32_t type;                      // of CacheType
};

namespace {  // a copy for each level

constexpr int elements_per_word(int32_t type) {
  return type == kCacheFloat32                              ? 1
         : type == kCacheBFloat16 || type == kCacheFloat16 ? 2
         : type == kCacheUInt4                             ? 8
                                                           : 4;
}

// Lowest bit of element `index` of a word. Of four bytes, every second one forms a pair of halves;
// of eight nibbles, the last four are the upper halves of the bytes of the first four.
constexpr int element_shift(int elements, int index) {
  return elements == 8   ? ((index & 1) << 4 | (index & 2) << 2) + (index & 4)
         : elements == 4 ? (index & 1) << 4 | (index & 2) << 2
                         : index * 16;
}

inline int64_t tile_bytes(const interposer_kv_cache& cache) {
  const int64_t words = int64_t(cache.head_size) * kTile * 4 / elements_per_word(cache.type);
  // One word per token and group.
  return cache.type == kCacheUInt4 ? words + cache.head_size / kGroup * kTile * 4 : words;
}

// Start of the tile of keys at `offset` of `page`; the tile of values is `value_distance` further.
inline char* tile_at(const interposer_kv_cache& cache, int64_t head, int64_t page, int64_t offset) {
  return cache.data + head * cache.head_stride + page * cache.page_stride +
         offset / kTile * tile_bytes(cache);
}

inline int64_t value_distance(const interposer_kv_cache& cache) {
  return cache.page_tokens / kTile * tile_bytes(cache);
}

template <int E>
struct ElementOf;
template <>
struct ElementOf<1> {
  typedef uint32_t Bits;
};
template <>
struct ElementOf<2> {
  typedef uint16_t Bits;
};
template <>
struct ElementOf<4> {
  typedef uint8_t Bits;
};

template <int E>
void put_elements(const interposer_kv_cache& cache, int64_t head, int64_t slot, const void* key,
                  const void* value) {
  typedef typename ElementOf<E>::Bits Bits;
  const int64_t offset = slot % cache.page_tokens;
  char* keys = tile_at(cache, head, slot / cache.page_tokens, offset);
  char* values = keys + value_distance(cache);
  const int token = int(offset % kTile), size = cache.head_size;
  const Bits* from = static_cast<const Bits*>(key);
  for (int i = 0; i < size / E; ++i) {
    uint32_t word = 0;
    for (int e = 0; e < E; ++e) word |= uint32_t(from[i * E + e]) << element_shift(E, e);
    std::memcpy(keys + (i * kTile + token) * 4, &word, 4);
  }
  // Read-modify-write of words shared with other tokens: only one thread may write a tile.
  const uint32_t mask = uint32_t(Bits(~Bits(0))) << element_shift(E, token % E);
  const Bits* row = static_cast<const Bits*>(value);
  char* words = values + token / E * int64_t(size) * 4;
  for (int i = 0; i < size; ++i) {
    uint32_t word;
    std::memcpy(&word, words + i * 4, 4);
    word = (word & ~mask) | uint32_t(row[i]) << element_shift(E, token % E);
    std::memcpy(words + i * 4, &word, 4);
  }
}

// Store one head's key and value of one token, `head_size` elements each, in the cache's type. All
// tokens of a tile must be stored by one thread.
inline void put_token(const interposer_kv_cache& cache, int64_t head, int64_t slot, const void* key,
                      const void* value) {
  switch (elements_per_word(cache.type)) {
    case 1:
      return put_elements<1>(cache, head, slot, key, value);
    case 2:
      return put_elements<2>(cache, head, slot, key, value);
    default:
      return put_elements<4>(cache, head, slot, key, value);
  }
}

// Round to an 8-bit type, to nearest, ties to even, saturating. NaN becomes the lowest integer.
inline uint8_t rounded_to_8_bits(float value, int32_t type) {
  if (type == kCacheInt8) {
    const float below = value < 127.0f ? value : value >= 127.0f ? 127.0f : -128.0f;
    // After adding 1.5 * 2^23, the lowest bits are the rounded integer.
    const float shifted = (below > -128.0f ? below : -128.0f) + 12582912.0f;
    uint32_t code;
    std::memcpy(&code, &shifted, 4);
    return uint8_t(code);
  }
  const int mantissa = type == kCacheE4M3 ? 3 : 2, bias = type == kCacheE4M3 ? 7 : 15;
  const float largest = type == kCacheE4M3 ? 448.0f : 57344.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint8_t(sign | 0x7f);
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  if (magnitude > largest) magnitude = largest;
  const float smallest_normal = type == kCacheE4M3 ? 0x1p-6f : 0x1p-14f;
  if (magnitude < smallest_normal) {
    // Adding 2^23 times the smallest subnormal leaves the multiple of it in the lowest bits.
    const float multiple = magnitude * (type == kCacheE4M3 ? 0x1p9f : 0x1p16f) + 0x1p23f;
    std::memcpy(&bits, &multiple, 4);
    return uint8_t(sign | (bits & 0x7f));
  }
  std::memcpy(&bits, &magnitude, 4);
  const int lost = 23 - mantissa;
  bits += (1u << (lost - 1)) - 1 + (bits >> lost & 1);
  return uint8_t(sign | ((bits >> lost) - (uint32_t(127 - bias) << mantissa)));
}

}  // namespace
