// GEMM of more rows than registers can sum for all tiles of a block at once, with weights read from
// memory. Included once for every level.
//
// A block is divided into pieces that stay in the first-level cache between passes. Prefetches
// follow the order of memory, spread evenly over the passes. Passes over a whole block would read
// words that were prefetched long ago or only just now.
#pragma once

#include "steps.h"

namespace {

// Eight kilobytes of words, followed by another twelve of prefetched words.
constexpr int64_t kPieceSteps = 32;
// During the first of two passes, reading gets half a piece closer to the prefetch position.
constexpr int64_t kStepsAhead = 48;

// Multiply by all tiles of a block, T at a time; the inputs of the weight have one scale.
template <class F, int M, int T, int kFetch>
void multiply_by_pieces(const interposer_product& product, const Prepared& prepared,
                        const Block& block, Rows rows) {
  typedef typename F::Sum Sum;
  constexpr int kPasses = kTiles / T;
  const interposer_packed& weight = *product.weight;
  const int64_t steps = padded_inputs(weight.inputs) / F::kInputs;
  const char* x[M];
  for (int m = 0; m < M; ++m) {
    x[m] = static_cast<const char*>(prepared.data) + rows[m] * prepared.stride;
  }
  Ints zeros[kPasses][T];
  Sum carried[kPasses][M][T][1];  // from one piece to the next
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int t = 0; t < T; ++t) {
      const int place = (pass * T + t) * kLanes;
      zeros[pass][t] = zeros_of<F>(block.zeros ? block.zeros + place : nullptr);
    }
    begin_sums<F, kRaised<F>>(prepared, rows, 0, carried[pass]);
  }
  const char* ahead = block.words + kStepsAhead * kBlock * 4;
  for (int64_t first = 0; first < steps; first += kPieceSteps) {
    const int64_t count = steps - first < kPieceSteps ? steps - first : kPieceSteps;
    for (int pass = 0; pass < kPasses; ++pass) {
      const char* words = block.words + (first * kBlock + pass * T * kLanes) * 4;
      const char* from[M];
      for (int m = 0; m < M; ++m) from[m] = x[m] + first * F::kInputs * F::kInputBytes;
      Sum sums[M][T][1];  // copies stay in registers
      std::memcpy(sums, carried[pass], sizeof sums);
      add_steps<F, kFetch>(sums, words, from, count, zeros[pass], ahead);
      std::memcpy(carried[pass], sums, sizeof sums);
    }
  }
  const int scale_size = size_of(weight.scale_type);
  for (int pass = 0; pass < kPasses; ++pass) {
    const int64_t output = block.first_output + pass * T * kLanes;
    if (output >= weight.outputs) break;
    Floats totals[M][T];
    for (int t = 0; t < T; ++t) {
      const char* scales = block.scales + (pass * T + t) * kLanes * scale_size;
      const Floats scale = block.scales ? load_scales(scales, weight.scale_type) : splat(1.0f);
      for (int m = 0; m < M; ++m) {
        totals[m][t] = ended<F, kRaised<F>>(product, prepared, rows[m], 0, carried[pass][m][t][0],
                                            zeros[pass][t], scale);
      }
    }
    write_tiles(product, rows, output, totals);
  }
}

}  // namespace
