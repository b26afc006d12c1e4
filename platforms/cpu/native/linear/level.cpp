// GEMM with packed weights, compiled once per level with the level's flags.

#include <cstddef>

#include "../levels.h"
#include "../pool.h"
#include "block.h"
#include "codes.h"
#include "compact.h"
#include "formats.h"
#include "matrices.h"
#include "pieces.h"
#include "steps.h"
#include "tiled.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMostRows = 6;
#else
constexpr int kMostRows = 4;  // as many 64-byte sums as fit in 16 or 32 registers
#endif
// Prefetch distance in bytes.
constexpr int64_t kFetchedAhead = 16 * kBlock * 4;
constexpr int64_t kGroupsAhead = 8;  // prefetch distance of scales

// From this number of rows on, 4-bit weights are decoded once for all rows; 8-bit weights, whose
// decoding has no table lookup, already from the smaller number.
constexpr int64_t kManyRows = 16, kSeveralRows = 8;

// How a block is read: once, prefetched to the cache level `kFetch`, or again for later rows.
template <int kTo>
struct ReadOnce {
  static constexpr bool kOnce = true;
  static constexpr int kFetch = kTo;
};

struct ReadAgain {
  static constexpr bool kOnce = false;
  static constexpr int kFetch = kToFirstLevel;
};

template <class F, int M, int T, class Read>
INTERPOSER_INLINE void multiply_tiles(const interposer_product& product, const Prepared& prepared,
                                      const Block& block, int tile, Rows rows,
                                      const char* ahead) {
  typedef typename F::Sum Sum;
  constexpr int kChains = M == 1 && T <= kMostChained ? 2 : 1;  // independent sums
  constexpr bool kByMatrices = M % 2 == 0 && Matrices<F>::kKnown;
  constexpr bool kIsRaised = kRaised<F> && !kByMatrices;
  // Only quantized weights: bfloat16 is read no faster this way.
  constexpr int kWhole = F::kInteger ? Read::kFetch : kToFirstLevel;
  constexpr int kFetch = T == kTiles ? kWhole : kToSecondLevel;
  const interposer_packed& weight = *product.weight;
  const int64_t groups = num_groups(weight);
  const int64_t group_inputs = groups > 1 ? weight.group : padded_inputs(weight.inputs);
  const int64_t group_steps = group_inputs / F::kInputs;
  const int scale_size = size_of(weight.scale_type);
  const char* words = block.words + tile * kLanes * int64_t(sizeof(uint32_t));
  const char* scales = block.scales ? block.scales + tile * kLanes * scale_size : nullptr;
  const char* zeros = block.zeros ? block.zeros + tile * kLanes : nullptr;
  const char* x[M];
  for (int m = 0; m < M; ++m) {
    x[m] = static_cast<const char*>(prepared.data) + rows[m] * prepared.stride;
  }
  Floats totals[M][T] = {};
  for (int64_t group = 0; group < groups; ++group) {
    if (ahead && scales) {
      for (int t = 0; t < T; ++t) {
        __builtin_prefetch(scales + (kGroupsAhead * kBlock + t * kLanes) * scale_size, 0, kFetch);
      }
    }
    Ints zero[T];
    for (int t = 0; t < T; ++t) zero[t] = zeros_of<F>(zeros ? zeros + t * kLanes : nullptr);
    Sum sums[M][T][kChains];
    begin_sums<F, kIsRaised>(prepared, rows, group, sums);
    if constexpr (kByMatrices) {
      multiply_matrices<F>(sums, words, x, group_steps);
      words += group_steps * kBlock * 4;
      for (int m = 0; m < M; ++m) x[m] += group_inputs * F::kInputBytes;
    } else {
      add_steps<F, kFetch, T>(sums, words, x, group_steps, zero, ahead);
    }
    for (int t = 0; t < T; ++t) {
      const Floats scale = scales ? load_scales(scales + t * kLanes * scale_size, weight.scale_type)
                                  : splat(1.0f);
      for (int m = 0; m < M; ++m) {
        Sum sum = sums[m][t][0];
        if constexpr (kChains == 2) sum += sums[m][t][1];
        totals[m][t] += ended<F, kIsRaised>(product, prepared, rows[m], group, sum, zero[t], scale);
      }
    }
    if (scales) scales += kBlock * scale_size;
    if (zeros) zeros += kBlock;
  }
  write_tiles(product, rows, block.first_output + tile * kLanes, totals);
}

// Multiply by all tiles of a block, T at a time. `from_memory`: this is the first read of the
// block. Later rows find the block in a cache, where prefetching costs 1 to 3 % of the time.
// Prefetches follow the order of memory, spread evenly over all passes, although a pass reads only
// a part of every row of words: so the prefetch is as far ahead of the first pass as of the last
// one.
template <class F, int M, int T, class Read>
INTERPOSER_INLINE void multiply_by_tiles(const interposer_product& product,
                                         const Prepared& prepared, const Block& block, Rows rows,
                                         bool from_memory) {
  constexpr int64_t kPasses = kTiles / T;
  const int64_t bytes = padded_inputs(product.weight->inputs) / F::kInputs * kBlock * 4;
  const char* ahead = block.words + bytes / kPasses * (kPasses - 1) + kFetchedAhead;
  for (int tile = 0; tile < kTiles; tile += T) {
    if (block.first_output + tile * kLanes >= product.weight->outputs) break;
    multiply_tiles<F, M, T, Read>(product, prepared, block, tile, rows, from_memory ? ahead : nullptr);
    ahead += bytes / kPasses;
  }
}

template <class F, int M, class Read>
void multiply_rows(const interposer_product& product, const Prepared& prepared, const Block& block,
                   Rows rows, bool from_memory) {
  // With group sums in addition to totals, half of the tiles fill the registers. Integer sums are
  // converted early enough for four rows of all tiles, the best shape for memory bandwidth.
  constexpr bool kMany = M > (F::kInteger ? 4 : 2);
  constexpr bool kHalf = M > kMostRows || (kMany && F::kInputs > 2);
  constexpr int T = kRegisterTiles == 1 ? (M == 1 ? 2 : 1) : kHalf ? 2 : 4;
  if constexpr (T == 4 && kMany) {
    if (num_groups(*product.weight) > 1) {
      return multiply_by_tiles<F, M, 2, Read>(product, prepared, block, rows, from_memory);
    }
  }
  multiply_by_tiles<F, M, T, Read>(product, prepared, block, rows, from_memory);
}

// All last rows at once, so that memory latency overlaps with all multiplications.
constexpr int kLastRows = kRegisterTiles > 1 ? 8 : kMostRows;

template <class F, class Read>
void multiply_last(const interposer_product& product, const Prepared& prepared, const Block& block,
                   Rows rows, int64_t count, bool from_memory) {
  switch (count) {
    case 1:
      return multiply_rows<F, 1, Read>(product, prepared, block, rows, from_memory);
    case 2:
      return multiply_rows<F, 2, Read>(product, prepared, block, rows, from_memory);
    case 3:
    case 4:
      return multiply_rows<F, 4, Read>(product, prepared, block, rows, from_memory);
    case 5:
    case 6:
      if constexpr (kLastRows > 4) {
        multiply_rows<F, 6, Read>(product, prepared, block, rows, from_memory);
      }
      return;
    case 7:
    case 8:
      if constexpr (kLastRows > 4) {
        multiply_rows<F, 8, Read>(product, prepared, block, rows, from_memory);
      }
      return;
  }
}

#if defined(INTERPOSER_FEW_REGISTERS)

// Multiply rows by a block. One row takes the block in the order of memory; several take it in
// pieces, divided into equal chunks of two, three or four rows.
template <class F, int kFetch>
void multiply_shares(const interposer_product& product, const Prepared& prepared,
                     const Block& block, int64_t row, int64_t end) {
  // Sums of 16 bits take registers beside those of 32.
  constexpr int kMost = F::kNarrowSteps ? 3 : 4, kShared = kSharingRows / kMost * kMost;
  for (; end - row > kShared; row += kShared) {
    multiply_by_pieces<F, kMost, 1>(product, prepared, block, row, row + kShared);
  }
  const int64_t count = end - row, chunks = (count + kMost - 1) / kMost;
  switch ((count + chunks - 1) / chunks) {
    case 1:
      // Without a second chain, sums of all tiles fit, so that memory is read in order.
      return multiply_by_tiles<F, 1, kTiles, ReadOnce<kFetch>>(product, prepared, block, row, true);
    case 2:
      return multiply_by_pieces<F, 2, 2>(product, prepared, block, row, end);
    case 3:
      return multiply_by_pieces<F, 3, 1>(product, prepared, block, row, end);
    default:
      return multiply_by_pieces<F, kMost, 1>(product, prepared, block, row, end);
  }
}

#endif

#if defined(__AVX512F__)

// Rows whose sums fit in registers for all tiles of a block.
constexpr int64_t kMostWhole = 4;

// Multiply rows by a block in pieces, divided into equal chunks of five to eight rows.
template <class F>
void multiply_chunks(const interposer_product& product, const Prepared& prepared,
                     const Block& block, int64_t row, int64_t end) {
  const int64_t count = end - row, chunks = (count + 7) / 8;
  switch ((count + chunks - 1) / chunks) {
    case 5:
      return multiply_by_pieces<F, 5, 2>(product, prepared, block, row, end);
    case 6:
      return multiply_by_pieces<F, 6, 2>(product, prepared, block, row, end);
    case 7:
      return multiply_by_pieces<F, 7, 2>(product, prepared, block, row, end);
    default:
      return multiply_by_pieces<F, 8, 2>(product, prepared, block, row, end);
  }
}

#endif

template <class F>
void multiply_block(const interposer_product& product, const Prepared& prepared, const Block& block,
                    int64_t row, int64_t end) {
#if defined(INTERPOSER_FEW_REGISTERS)
  if constexpr (F::kInteger || F::kParts == 1) {
    if (interposer_reads_past_caches()) {
      return multiply_shares<F, kPastOthers>(product, prepared, block, row, end);
    }
    return multiply_shares<F, kToSecondLevel>(product, prepared, block, row, end);
  } else {
    return multiply_shares<F, kToFirstLevel>(product, prepared, block, row, end);
  }
#else
#if defined(__AVX512F__)
  // Formats that are multiplied as stored. Others are limited by arithmetic, not by memory.
  if constexpr (F::kParts == 1) {
    const int64_t count = end - row;
    if (count > kMostWhole && count <= kSharingRows && num_groups(*product.weight) == 1) {
      return multiply_chunks<F>(product, prepared, block, row, end);
    }
  }
#endif
  bool first = true;
  // Integer sums leave registers for more rows, and more rows per pass read the weights less often.
  constexpr int kChunk = F::kInteger ? kLastRows : kMostRows;
  for (; end - row > kLastRows; row += kChunk, first = false) {
    multiply_rows<F, kChunk, ReadAgain>(product, prepared, block, row, first);
  }
  const Rows rows = {row, end - 1};
#if defined(__x86_64__)
  // Other formats are prefetched to the same cache either way.
  if constexpr (F::kInteger || F::kParts == 1) {
    if (interposer_reads_past_caches()) {
      return multiply_last<F, ReadOnce<kPastOthers>>(product, prepared, block, rows, end - row, first);
    }
    return multiply_last<F, ReadOnce<kToSecondLevel>>(product, prepared, block, rows, end - row, first);
  }
#endif
  multiply_last<F, ReadOnce<kToFirstLevel>>(product, prepared, block, rows, end - row, first);
#endif
}

template <class F>
bool multiply_span(const interposer_product& product, const Prepared& prepared, Span span) {
  TileRegisters tiles;
  for (int64_t index = span.first_block; index < span.last_block; ++index) {
    const Block block = block_of(*product.weight, index);
    if (multiply_tiled<F>(tiles, product, prepared, block, span)) continue;
    multiply_block<F>(product, prepared, block, span.first_row, span.last_row);
  }
  return true;
}

// Unpack a block to bfloat16, which represents all its quantized values exactly.
template <class F>
void widen(const interposer_packed& weight, const Block& block, char* to,
           int64_t row_bytes = kBlock * 4, int64_t tile_bytes = 64) {
  const int64_t groups = num_groups(weight);
  const int64_t group_inputs = groups > 1 ? weight.group : padded_inputs(weight.inputs);
  const char* words = block.words;
  for (int64_t group = 0; group < groups; ++group) {
    Ints zero[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      zero[t] = zeros_of<F>(block.zeros ? block.zeros + group * kBlock + t * kLanes : nullptr);
    }
    for (int64_t step = 0; step < group_inputs / F::kInputs; ++step) {
      for (int t = 0; t < kTiles; ++t) {
        typename F::Part parts[F::kParts];
        decode<F>(load<Words>(words + t * 64), zero[t], parts);
        Words halves[F::kInputs];
        for (int p = 0; p < F::kParts; ++p) halves[F::place(p)] = (Words)parts[p] >> 16;
        for (int i = 0; i < F::kInputs; i += 2) {
          store(to + i / 2 * row_bytes + t * tile_bytes, halves[i] | halves[i + 1] << 16);
        }
      }
      words += kBlock * 4;
      to += F::kInputs / 2 * row_bytes;
    }
  }
}

// Returns false if out of memory for the unpacked words of one block.
template <class Codes, class Wide>
bool multiply_widened(const interposer_product& product, const Prepared& prepared, Span span) {
  const interposer_packed& weight = *product.weight;
#if defined(INTERPOSER_TILES)
  if (takes_tiles<Wide>(product, span)) {
    auto spread = [](const interposer_packed& weight, const Block& block, char* to,
                     int64_t tile_bytes) { widen<Codes>(weight, block, to, 64, tile_bytes); };
    if constexpr (Tiled<Wide>::kKnown) {
      return multiply_spread<Wide>(product, prepared, span, spread);
    }
  }
#endif
  const int64_t bytes = padded_inputs(weight.inputs) / 2 * kBlock * 4;
  char* memory = static_cast<char*>(interposer_scratch(kForWeights, bytes));
  if (memory == nullptr) return false;
  for (int64_t index = span.first_block; index < span.last_block; ++index) {
    Block block = block_of(weight, index);
    widen<Codes>(weight, block, memory);
    block.words = memory;
    multiply_block<Wide>(product, prepared, block, span.first_row, span.last_row);
  }
  return true;
}

// Up to these numbers of rows, words of a compact weight are decoded in registers, or pieces of a
// block are decoded for all rows. More rows share decoded blocks. Without dot products of bfloat16,
// decoding in registers pays for one row only.
template <class F>
constexpr int64_t kDirectRows = F::kParts == 1 ? 8 : 1;
#if defined(__AVX2__)
template <class F>
constexpr int64_t kPieceRows = kSharingRows;
#else
template <class F>
constexpr int64_t kPieceRows = kDirectRows<F>;
#endif

// Multiply rows by a block of a compact weight that is decoded in registers or by pieces.
template <class F>
void multiply_encoded(const interposer_product& product, const Prepared& prepared, int64_t index,
                      int64_t row, int64_t end) {
  if (end - row <= kDirectRows<F>) {
    return multiply_compact_block<F>(product, prepared, index, row, end);
  }
  if constexpr (kPieceRows<F> > kDirectRows<F>) {
    const Block block = block_of(*product.weight, index);
    if constexpr (kRegisterTiles == 1) {
      return multiply_by_pieces<F, 4, 1>(product, prepared, block, row, end);
    } else {
      const int64_t repeated = (kMostRows - (end - row) % kMostRows) % kMostRows;
      if (repeated < 2) {
        return multiply_by_pieces<F, kMostRows, kTiles>(product, prepared, block, row, end);
      }
      return multiply_by_pieces<F, 4, kTiles>(product, prepared, block, row, end);
    }
  }
}

// Returns false if out of memory for the decoded words of one block.
template <class F>
bool multiply_compact(const interposer_product& product, const Prepared& prepared, Span span) {
  const interposer_packed& weight = *product.weight;
  bool encoded = span.last_row - span.first_row <= kPieceRows<F>;
#if defined(INTERPOSER_TILES)
  encoded = encoded && !takes_tiles<F>(product, span);
#endif
  if (encoded) {
    for (int64_t index = span.first_block; index < span.last_block; ++index) {
      multiply_encoded<F>(product, prepared, index, span.first_row, span.last_row);
    }
    return true;
  }
  const int64_t steps = weight.inputs / 2;
  char* memory = static_cast<char*>(interposer_scratch(kForWeights, steps * kBlock * 4));
  if (memory == nullptr) return false;
  TileRegisters tiles;
  for (int64_t index = span.first_block; index < span.last_block; ++index) {
    decode_compact(weight, index, 0, steps, memory);
    Block block = block_of(weight, index);
    block.words = memory;
    block.compact = false;
    if (multiply_tiled<F>(tiles, product, prepared, block, span)) continue;
    multiply_block<F>(product, prepared, block, span.first_row, span.last_row);
  }
  return true;
}

// Quantized weights times quantized inputs.
template <class Codes>
bool multiply_by_codes(const interposer_product& product, const Prepared& prepared, Span span) {
  const interposer_packed& weight = *product.weight;
#if defined(INTERPOSER_TILES)
  // Minus their zero points, 8-bit values can need nine bits.
  const bool few_bits = weight.format == kWeightInt4;
  if (takes_tiles<CentredOnCodes>(product, span) &&
      (few_bits || (!weight.zeros_at && num_groups(weight) > 1))) {
    return multiply_spread<CentredOnCodes>(product, prepared, span, spread_codes<Codes>);
  }
#endif
  if (weight.zeros_at) return multiply_span<Codes>(product, prepared, span);
  return multiply_span<Symmetric<Codes>>(product, prepared, span);
}

// Whether rows of x are multiplied as bfloat16 pairs. All threads must decide alike, so the
// decision depends on the total number of rows: few rows use integer kernels for formats without a
// pair kernel.
bool reads_pairs(const interposer_product& product) {
#if defined(INTERPOSER_PAIRS)
  if (product.x_type != kBFloat16) return false;
  const int32_t format = product.weight->format;
#if defined(__AVX512BF16__)
  if (format == kWeightInt4 || format == kWeightE2M1) return true;
#endif
  return format == kWeightBFloat16 || format == kWeightCompact ||
         (format != kWeightFloat32 && product.rows >= kSeveralRows);
#else
  (void)product;
  return false;
#endif
}

int64_t prepared_row_bytes(const interposer_product& product) {
  const int64_t inputs = padded_inputs(product.weight->inputs);
  if (product.x_type == kInt8) {
    return round_up(has_wide_codes(*product.weight) ? 2 * inputs : inputs, 64);
  }
  const bool whole = inputs == product.weight->inputs;
  if (reads_pairs(product)) return whole ? 0 : round_up(2 * inputs, 64);
  if (product.x_type == kFloat32 && whole) return 0;
  return 4 * round_up(inputs, kLanes);
}

void prepare_rows(const interposer_product& product, void* data, int64_t row_bytes, int32_t* sums,
                  int64_t first, int64_t last) {
  const int64_t inputs = product.weight->inputs;
  const int size = size_of(product.x_type);
  for (int64_t row = first; row < last; ++row) {
    char* to = static_cast<char*>(data) + row * row_bytes;
    const char* from = static_cast<const char*>(product.x) + row * product.x_stride * size;
    if (product.x_type == kInt8) {
      prepare_codes(product, to, sums, row);
    } else if (reads_pairs(product)) {
      std::memset(to, 0, size_t(row_bytes));
      std::memcpy(to, from, size_t(2 * inputs));
    } else {
      for (int64_t i = 0; i < inputs; i += kLanes) {
        const int count = int(inputs - i < kLanes ? inputs - i : kLanes);
        store(to + 4 * i, load_some(from + i * size, product.x_type, count));
      }
    }
  }
}

template <class Codes>
bool multiply_codes(const interposer_product& product, const Prepared& prepared, Span span) {
  if (span.last_row - span.first_row < kManyRows) {
    return multiply_span<Codes>(product, prepared, span);
  }
  return multiply_widened<Codes, BFloat16OnFloats>(product, prepared, span);
}

#if defined(INTERPOSER_PAIRS)
bool multiply_pairs(const interposer_product& product, const Prepared& prepared, Span span) {
  [[maybe_unused]] bool many = span.last_row - span.first_row >= kManyRows;
#if defined(INTERPOSER_TILES)
  many = many || takes_tiles<BFloat16OnPairs>(product, span);
#endif
  switch (product.weight->format) {
    case kWeightBFloat16:
      return multiply_span<BFloat16OnPairs>(product, prepared, span);
    case kWeightCompact:
      return multiply_compact<BFloat16OnPairs>(product, prepared, span);
    case kWeightInt8:
      return multiply_widened<Int8OnFloats, BFloat16OnPairs>(product, prepared, span);
    case kWeightE4M3:
      return multiply_widened<E4M3OnFloats, BFloat16OnPairs>(product, prepared, span);
#if defined(__AVX512BF16__)
    case kWeightE2M1:
      if (many) return multiply_widened<E2M1OnFloats, BFloat16OnPairs>(product, prepared, span);
      return multiply_span<E2M1OnPairs>(product, prepared, span);
    default:
      if (many) return multiply_widened<Int4OnFloats, BFloat16OnPairs>(product, prepared, span);
      if (product.weight->zeros_at) {
        return multiply_span<ShiftedInt4OnPairs>(product, prepared, span);
      }
      return multiply_span<Int4OnPairs>(product, prepared, span);
#else
    case kWeightE2M1:
      return multiply_widened<E2M1OnFloats, BFloat16OnPairs>(product, prepared, span);
    default:
      return multiply_widened<Int4OnFloats, BFloat16OnPairs>(product, prepared, span);
#endif
  }
}
#endif

bool multiply(const interposer_product& product, const Prepared& prepared, int64_t first_block,
              int64_t last_block, int64_t first_row, int64_t last_row) {
  const Span span = {first_block, last_block, first_row, last_row};
  const int32_t format = product.weight->format;
  if (product.x_type == kInt8) {
    if (format == kWeightInt4) return multiply_by_codes<Int4OnCodes>(product, prepared, span);
    return multiply_by_codes<Int8OnCodes>(product, prepared, span);
  }
#if defined(INTERPOSER_PAIRS)
  if (reads_pairs(product)) return multiply_pairs(product, prepared, span);
#endif
  switch (format) {
    case kWeightFloat32:
      return multiply_span<Float32OnFloats>(product, prepared, span);
    case kWeightBFloat16:
      return multiply_span<BFloat16OnFloats>(product, prepared, span);
    case kWeightCompact:
      return multiply_compact<BFloat16OnFloats>(product, prepared, span);
    case kWeightInt8:
      return multiply_codes<Int8OnFloats>(product, prepared, span);
    case kWeightInt4:
      if (product.weight->zeros_at) return multiply_codes<Int4OnFloats>(product, prepared, span);
      return multiply_codes<CentredInt4OnFloats>(product, prepared, span);
    case kWeightE2M1:
      return multiply_codes<E2M1OnFloats>(product, prepared, span);
    default:
      return multiply_codes<E4M3OnFloats>(product, prepared, span);
  }
}

}  // namespace

extern "C" const LinearKernels INTERPOSER_OF_LEVEL(interposer_linear);
extern "C" const LinearKernels INTERPOSER_OF_LEVEL(interposer_linear) = {prepared_row_bytes,
                                                                         prepare_rows, multiply};
