// GEMM of compact weights: bfloat16 in 12 bits, without loss. Included once for every level.
//
// The exponents of trained weights are far from uniform: sixteen of them cover all but a few numbers
// in ten thousand. So a number is one byte of sign and mantissa, and four bits that select one of
// sixteen exponents. A number with another exponent is an escape: it is listed with all its bits.
//
// A step of a block, 128 numbers, takes 192 bytes: 64 bytes of codes, then the signs and mantissas of
// outputs 0 to 31, then those of outputs 32 to 63. The low four bits of the codes belong to the first
// half. Two table lookups give the bytes of the numbers, and interleaving them gives the words of two
// tiles. The sums are those of a bfloat16 weight, to the bit.
#pragma once

#include "block.h"
#include "formats.h"
#include "steps.h"

namespace {

constexpr int64_t kCompactStep = step_bytes(kWeightCompact);
// Prefetch distance in bytes.
constexpr int64_t kCompactAhead = 4096;

// Tables of both bytes of a number: the bits that its exponent contributes.
#if defined(__AVX512BW__)

struct ExponentTables {
  __m512i low, high;

  explicit ExponentTables(const uint8_t* exponents) {
    const __m128i bytes = load<__m128i>(exponents);
    const __m128i odd = _mm_and_si128(bytes, _mm_set1_epi8(1));
    low = _mm512_broadcast_i32x4(_mm_slli_epi16(odd, 7));
    high = _mm512_broadcast_i32x4(_mm_and_si128(_mm_srli_epi16(bytes, 1), _mm_set1_epi8(0x7f)));
  }
};

// Decode the words of two tiles of a step.
template <int kHalf>
INTERPOSER_INLINE void decode_half(const char* step, const ExponentTables& tables, Words* tiles) {
  const __m512i mantissa = _mm512_set1_epi8(0x7f);
  const __m512i both = load<__m512i>(step), rest = load<__m512i>(step + kBlock * (1 + kHalf));
  const __m512i codes = _mm512_and_si512(kHalf ? _mm512_srli_epi16(both, 4) : both,
                                         _mm512_set1_epi8(15));
  // (rest & mantissa) | exponent, and (rest & ~mantissa) | exponent.
  const __m512i low =
      _mm512_ternarylogic_epi32(rest, mantissa, _mm512_shuffle_epi8(tables.low, codes), 0xea);
  const __m512i high =
      _mm512_ternarylogic_epi32(rest, mantissa, _mm512_shuffle_epi8(tables.high, codes), 0xba);
  tiles[0] = (Words)_mm512_unpacklo_epi8(low, high);
  tiles[1] = (Words)_mm512_unpackhi_epi8(low, high);
}

#elif defined(__AVX2__)

struct ExponentTables {
  __m256i low, high;

  explicit ExponentTables(const uint8_t* exponents) {
    const __m128i bytes = load<__m128i>(exponents);
    const __m128i odd = _mm_and_si128(bytes, _mm_set1_epi8(1));
    low = _mm256_broadcastsi128_si256(_mm_slli_epi16(odd, 7));
    high = _mm256_broadcastsi128_si256(
        _mm_and_si128(_mm_srli_epi16(bytes, 1), _mm_set1_epi8(0x7f)));
  }
};

template <int kHalf>
INTERPOSER_INLINE void decode_half(const char* step, const ExponentTables& tables, Words* tiles) {
  const __m256i mantissa = _mm256_set1_epi8(0x7f);
  __m256i first[2], second[2];
  for (int part = 0; part < 2; ++part) {
    const __m256i both = load<__m256i>(step + 32 * part);
    const __m256i rest = load<__m256i>(step + kBlock * (1 + kHalf) + 32 * part);
    const __m256i codes = _mm256_and_si256(kHalf ? _mm256_srli_epi16(both, 4) : both,
                                           _mm256_set1_epi8(15));
    const __m256i low = _mm256_or_si256(_mm256_and_si256(rest, mantissa),
                                        _mm256_shuffle_epi8(tables.low, codes));
    const __m256i high = _mm256_or_si256(_mm256_andnot_si256(mantissa, rest),
                                         _mm256_shuffle_epi8(tables.high, codes));
    first[part] = _mm256_unpacklo_epi8(low, high);
    second[part] = _mm256_unpackhi_epi8(low, high);
  }
  tiles[0] = {(Words::Register)first[0], (Words::Register)first[1]};
  tiles[1] = {(Words::Register)second[0], (Words::Register)second[1]};
}

#else

struct ExponentTables {
  const uint8_t* exponents;

  explicit ExponentTables(const uint8_t* exponents) : exponents(exponents) {}
};

template <int kHalf>
INTERPOSER_INLINE void decode_half(const char* step, const ExponentTables& tables, Words* tiles) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(step);
  for (int tile = 0; tile < 2; ++tile) {
    uint32_t words[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      words[lane] = 0;
      for (int input = 0; input < 2; ++input) {
        const int place = compact_byte(tile * kLanes + lane, input);
        const uint8_t exponent = tables.exponents[bytes[place] >> 4 * kHalf & 15];
        const uint8_t rest = bytes[kBlock * (1 + kHalf) + place];
        words[lane] |= uint32_t(compact_number(exponent, rest)) << 16 * input;
      }
    }
    tiles[tile] = load<Words>(words);
  }
}

#endif

INTERPOSER_INLINE void fetch_ahead(const char* step) {
  for (int64_t line = 0; line < kCompactStep; line += 64) {
    __builtin_prefetch(step + kCompactAhead + line, 0, 3);
  }
}

struct Escapes {
  const uint32_t *first, *last;
};

// The escapes of a piece of a block.
INTERPOSER_INLINE Escapes escapes_of(const interposer_packed& weight, int64_t block, int64_t piece) {
  const uint32_t* starts = at<uint32_t>(&weight, weight.starts_at) +
                           block * num_compact_pieces(weight.inputs) + piece;
  const uint32_t* all = at<uint32_t>(&weight, weight.escapes_at);
  return {all + starts[0], all + starts[1]};
}

// Decode a piece to words of bfloat16, with its escapes.
inline void decode_piece(const char* step, int64_t steps, const ExponentTables& tables,
                         Escapes escapes, char* words) {
  for (int64_t i = 0; i < steps; ++i) {
    fetch_ahead(step + i * kCompactStep);
    Words tiles[kTiles];
    decode_half<0>(step + i * kCompactStep, tables, tiles);
    decode_half<1>(step + i * kCompactStep, tables, tiles + 2);
    for (int t = 0; t < kTiles; ++t) store(words + (i * kTiles + t) * 64, tiles[t]);
  }
  for (const uint32_t* escape = escapes.first; escape < escapes.last; ++escape) {
    char* word = words + (*escape >> 17) * 4;
    const int shift = *escape >> 16 & 1 ? 16 : 0;
    store(word, (load<uint32_t>(word) & ~(0xffffu << shift)) | (*escape & 0xffff) << shift);
  }
}

// Decode the steps from `first` to `end` - 1 of a block; `first` is a multiple of kCompactSteps.
inline void decode_compact(const interposer_packed& weight, int64_t index, int64_t first,
                           int64_t end, char* words) {
  const ExponentTables tables(at<uint8_t>(&weight, weight.exponents_at));
  const char* step = block_of(weight, index).words + first * kCompactStep;
  for (; first < end; first += kCompactSteps) {
    const int64_t count = end - first < kCompactSteps ? end - first : kCompactSteps;
    decode_piece(step, count, tables, escapes_of(weight, index, first / kCompactSteps), words);
    step += count * kCompactStep;
    words += count * kBlock * 4;
  }
}

// M rows times a block, T tiles at a time, piece by piece. A piece without escapes is decoded in
// registers, another one in memory.
template <class F, int M, int T>
struct CompactPieces {
  static constexpr int kPasses = kTiles / T;
  // As for bfloat16 weights, one row has a sum for each of the inputs of a word, if registers are many.
  static constexpr int kChains = M == 1 && kTiles <= kMostChained ? F::kParts : 1;
  typedef Floats Sums[M][T][kChains];

  template <int kPass>
  static INTERPOSER_INLINE void decode_pass(const char* step, const ExponentTables& tables,
                                            Words (&tiles)[T]) {
    if constexpr (T == kTiles) {
      decode_half<0>(step, tables, tiles);
      decode_half<1>(step, tables, tiles + 2);
    } else {
      decode_half<kPass>(step, tables, tiles);
    }
  }

  template <int kPass>
  static INTERPOSER_INLINE void add_piece(const char* step, int64_t steps,
                                          const ExponentTables& tables, const char* (&x)[M],
                                          Sums& all) {
    Sums sums;  // copies stay in registers
    copy(all, sums);
    for (int64_t i = 0; i < steps; ++i, step += kCompactStep) {
      if constexpr (kPass == 0) fetch_ahead(step);
      Words tiles[T];
      decode_pass<kPass>(step, tables, tiles);
      for (int t = 0; t < T; ++t) {
        typename F::Part parts[F::kParts];
        decode<F>(tiles[t], Ints{}, parts);
        for (int m = 0; m < M; ++m) {
          for (int p = 0; p < F::kParts; ++p) {
            F::add(sums[m][t][p % kChains], parts[p], x[m] + F::place(p) * F::kInputBytes);
          }
        }
      }
      for (int m = 0; m < M; ++m) x[m] += F::kInputs * F::kInputBytes;
    }
    copy(sums, all);
  }

  // `words`: the decoded piece, or null.
  template <int kPass>
  static INTERPOSER_INLINE void add_pass(const Prepared& prepared, Rows rows, int64_t first,
                                         int64_t steps, const char* step, const char* words,
                                         const ExponentTables& tables, Sums& all) {
    const char* x[M];
    for (int m = 0; m < M; ++m) {
      x[m] = static_cast<const char*>(prepared.data) + rows[m] * prepared.stride +
             first * F::kInputs * F::kInputBytes;
    }
    if (words == nullptr) return add_piece<kPass>(step, steps, tables, x, all);
    Sums sums;
    copy(all, sums);
    const Ints zero[T] = {};
    const char *from = words + kPass * T * 64, *none = nullptr;
    add_products<F, 3, T>(sums, from, x, steps, zero, none);
    copy(sums, all);
  }

  static void multiply(const interposer_product& product, const Prepared& prepared, int64_t index,
                       Rows rows) {
    const interposer_packed& weight = *product.weight;
    const ExponentTables tables(at<uint8_t>(&weight, weight.exponents_at));
    const char* step = block_of(weight, index).words;
    const int64_t all_steps = weight.inputs / 2;
    alignas(64) char memory[kCompactSteps * kBlock * 4];
    Sums sums[kPasses] = {};
    for (int64_t first = 0; first < all_steps; first += kCompactSteps) {
      const int64_t steps = all_steps - first < kCompactSteps ? all_steps - first : kCompactSteps;
      const Escapes escapes = escapes_of(weight, index, first / kCompactSteps);
      const char* words = nullptr;
      if (__builtin_expect(escapes.first != escapes.last, 0)) {
        decode_piece(step, steps, tables, escapes, memory);
        words = memory;
      }
      add_pass<0>(prepared, rows, first, steps, step, words, tables, sums[0]);
      if constexpr (kPasses == 2) {
        add_pass<1>(prepared, rows, first, steps, step, words, tables, sums[1]);
      }
      step += steps * kCompactStep;
    }
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t output = index * kBlock + pass * T * kLanes;
      if (output >= weight.outputs) break;
      Floats totals[M][T];
      for (int m = 0; m < M; ++m) {
        for (int t = 0; t < T; ++t) {
          totals[m][t] = sums[pass][m][t][0];
          if constexpr (kChains == 2) totals[m][t] += sums[pass][m][t][1];
        }
      }
      write_tiles(product, rows, output, totals);
    }
  }
};

// Up to eight rows times a block; with inputs in float32 only one row.
template <class F>
void multiply_compact_block(const interposer_product& product, const Prepared& prepared,
                            int64_t index, int64_t row, int64_t end) {
  const Rows rows = {row, end - 1};
  if constexpr (F::kParts == 1) {
    switch (end - row) {
      case 1:
        break;
      case 2:
        return CompactPieces<F, 2, kTiles>::multiply(product, prepared, index, rows);
      case 3:
      case 4:
        return CompactPieces<F, 4, kTiles>::multiply(product, prepared, index, rows);
      case 5:
      case 6:
        return CompactPieces<F, 6, 2>::multiply(product, prepared, index, rows);
      default:
        return CompactPieces<F, 8, 2>::multiply(product, prepared, index, rows);
    }
  }
  CompactPieces<F, 1, kTiles>::multiply(product, prepared, index, rows);
}

}  // namespace
