// GEMM of rows whose sums do not fit in registers for all tiles of a block at once, with weights read
// from memory. Included once for every level.
//
// A block is divided into pieces that stay in the first-level cache while all tiles and rows use
// them. Prefetches follow the order of memory, spread evenly over the passes of the first rows.
// Passes over a whole block would read words that were prefetched long ago or only just now. Words
// are prefetched to the second level: many of those in the first are evicted before their pass.
#pragma once

#include "compact.h"
#include "steps.h"

namespace {

// Eight kilobytes of words in the first-level cache.
constexpr int64_t kPieceSteps = 32;
// During the first of two passes, reading gets half a piece closer to the prefetch position.
constexpr int64_t kStepsAhead = 48;
// Rows that use a piece before the next piece is read. Their sums take eight kilobytes.
constexpr int kSharingRows = 32;

// A block times up to kSharingRows rows, M rows and T tiles at a time.
template <class F, int M, int T>
struct Pieces {
  typedef typename F::Sum Sum;
  static constexpr int kPasses = kTiles / T;
  static constexpr int kChunks = (kSharingRows + M - 1) / M;

  const interposer_product& product;
  const Prepared& prepared;
  const Block& block;
  int64_t first_row, end_row;
  int64_t groups, group_steps;
  int num_passes;
  // What waits for the next piece: the sums of all inputs, or the totals of complete groups.
  Sum sums[kChunks][kPasses][M][T][1];
  Floats totals[kChunks][kPasses][M][T];

  Pieces(const interposer_product& product, const Prepared& prepared, const Block& block,
         int64_t first_row, int64_t end_row)
      : product(product), prepared(prepared), block(block), first_row(first_row),
        end_row(end_row), groups(num_groups(*product.weight)) {
    const int64_t inputs = padded_inputs(product.weight->inputs);
    group_steps = (groups > 1 ? product.weight->group : inputs) / F::kInputs;
    const int64_t outputs = product.weight->outputs - block.first_output;
    num_passes = outputs < kBlock ? int((outputs + T * kLanes - 1) / (T * kLanes)) : kPasses;
  }

  int num_chunks() const { return int((end_row - first_row + M - 1) / M); }
  Rows rows(int chunk) const { return {first_row + chunk * M, end_row - 1}; }

  const char* zeros(int pass, int t, int64_t group) const {
    if (!block.zeros) return nullptr;
    return block.zeros + group * kBlock + (pass * T + t) * kLanes;
  }

  Floats scale(int pass, int t, int64_t group) const {
    if (!block.scales) return splat(1.0f);
    const int32_t type = product.weight->scale_type;
    const int64_t place = group * kBlock + (pass * T + t) * kLanes;
    return load_scales(block.scales + place * size_of(type), type);
  }

  INTERPOSER_INLINE Floats ended(Rows rows, int m, int64_t group, Sum sum, Ints zero,
                                 Floats scale) const {
    return ::ended<F, kRaised<F>>(product, prepared, rows[m], group, sum, zero, scale);
  }

  template <int kLines>
  INTERPOSER_INLINE void add_groups(int chunk, int pass, const char* words, const char* (&x)[M],
                                    int64_t group, int64_t end, const char*& ahead) {
    Floats kept[M][T];  // copies stay in registers
    copy(totals[chunk][pass], kept);
    for (; group < end; ++group) {
      Ints zero[T];
      for (int t = 0; t < T; ++t) zero[t] = zeros_of<F>(zeros(pass, t, group));
      Sum current[M][T][1];
      begin_sums<F, kRaised<F>>(prepared, rows(chunk), group, current);
      add_steps<F, kToSecondLevel, kLines>(current, words, x, group_steps, zero, ahead);
      for (int t = 0; t < T; ++t) {
        const Floats scale = this->scale(pass, t, group);
        for (int m = 0; m < M; ++m) {
          kept[m][t] += ended(rows(chunk), m, group, current[m][t][0], zero[t], scale);
        }
      }
    }
    copy(kept, totals[chunk][pass]);
  }

  template <int kLines>
  INTERPOSER_INLINE void add_inputs(int chunk, int pass, const char* words, const char* (&x)[M],
                                    int64_t steps, const char*& ahead) {
    Ints zero[T];
    for (int t = 0; t < T; ++t) zero[t] = zeros_of<F>(zeros(pass, t, 0));
    Sum current[M][T][1];  // copies stay in registers
    copy(sums[chunk][pass], current);
    add_steps<F, kToSecondLevel, kLines>(current, words, x, steps, zero, ahead);
    copy(current, sums[chunk][pass]);
  }

  void begin() {
    for (int chunk = 0; chunk < num_chunks(); ++chunk) {
      for (int pass = 0; pass < num_passes; ++pass) {
        if (groups > 1) {
          for (int m = 0; m < M; ++m) {
            for (int t = 0; t < T; ++t) totals[chunk][pass][m][t] = splat(0.0f);
          }
        } else {
          begin_sums<F, kRaised<F>>(prepared, rows(chunk), 0, sums[chunk][pass]);
        }
      }
    }
  }

  // Prefetch kLines cache lines per step, in as many passes as a piece has lines for. They are
  // spread evenly over all passes, so that memory is read while any of the rows are multiplied.
  template <int kLines>
  void multiply() {
    const int64_t steps = groups * group_steps;
    const int64_t piece_groups = group_steps < kPieceSteps ? kPieceSteps / group_steps : 1;
    const int64_t piece_steps = groups > 1 ? piece_groups * group_steps : kPieceSteps;
    alignas(64) char decoded[kPieceSteps * kBlock * 4];
    const char* ahead = block.compact ? nullptr : block.words + kStepsAhead * kBlock * 4;
    const char* none = nullptr;
    const int fetching = kTiles / kLines, all = num_chunks() * kPasses;
    for (int64_t first = 0; first < steps; first += piece_steps) {
      const int64_t count = steps - first < piece_steps ? steps - first : piece_steps;
      const char* piece = block.words + first * kBlock * 4;
      if (block.compact) {
        decode_compact(*product.weight, block.first_output / kBlock, first, first + count, decoded);
        piece = decoded;
      }
      for (int chunk = 0; chunk < num_chunks(); ++chunk) {
        for (int pass = 0; pass < num_passes; ++pass) {
          const char* words = piece + pass * T * kLanes * 4;
          const char* x[M];
          for (int m = 0; m < M; ++m) {
            x[m] = static_cast<const char*>(prepared.data) + rows(chunk)[m] * prepared.stride +
                   first * F::kInputs * F::kInputBytes;
          }
          const bool is_fetching = (chunk * kPasses + pass) * fetching % all < fetching;
          const char*& fetched = is_fetching ? ahead : none;
          if (groups > 1) {
            const int64_t group = first / group_steps, end = group + count / group_steps;
            add_groups<kLines>(chunk, pass, words, x, group, end, fetched);
          } else {
            add_inputs<kLines>(chunk, pass, words, x, count, fetched);
          }
        }
      }
    }
  }

  void end() {
    for (int chunk = 0; chunk < num_chunks(); ++chunk) {
      for (int pass = 0; pass < num_passes; ++pass) {
        Floats(&results)[M][T] = totals[chunk][pass];
        for (int t = 0; t < T && groups == 1; ++t) {
          const Floats scale = this->scale(pass, t, 0);
          const Ints zero = zeros_of<F>(zeros(pass, t, 0));
          for (int m = 0; m < M; ++m) {
            results[m][t] = ended(rows(chunk), m, 0, sums[chunk][pass][m][t][0], zero, scale);
          }
        }
        write_tiles(product, rows(chunk), block.first_output + pass * T * kLanes, results);
      }
    }
  }
};

template <class F, int M, int T>
void multiply_by_pieces(const interposer_product& product, const Prepared& prepared,
                        const Block& block, int64_t first_row, int64_t end_row) {
  Pieces<F, M, T> pieces(product, prepared, block, first_row, end_row);
  pieces.begin();
  if (pieces.num_chunks() == 1) {
    pieces.template multiply<T>();
  } else {
    pieces.template multiply<1>();
  }
  pieces.end();
}

}  // namespace
