// LoRA kernels, compiled once per level with the level's flags.

#include "../elementwise/functions.h"
#include "lora.h"

namespace {

// Tokens of one adapter per pass: as many as registers have sums for.
#if defined(__AVX512F__)
constexpr int kMostTokens = 4;
#else
constexpr int kMostTokens = 2;
#endif
// Vectors of outputs, enough that sums do not wait for each other.
constexpr int kVectors = kLoraPanel / kLanes;

INTERPOSER_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <int32_t kType>
INTERPOSER_INLINE const char* element(const void* from, int64_t index) {
  return static_cast<const char*>(from) + index * size_of(kType);
}

template <int kTokens>
struct Count {
  static constexpr int value = kTokens;
};

// Call `take(tokens, Count)` for tokens of a block that have the same adapter, at any position: a
// batch has its requests in any order.
template <class F>
INTERPOSER_INLINE void by_adapter(const int64_t* ids, int64_t first, int64_t last, const F& take) {
  const int count = int(last - first);
  uint64_t waiting = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
  while (waiting) {
    const int64_t adapter = ids[first + __builtin_ctzll(waiting)];
    int64_t tokens[kMostTokens];
    int found = 0;
    for (uint64_t left = waiting; left && found < kMostTokens; left &= left - 1) {
      const int place = __builtin_ctzll(left);
      if (ids[first + place] != adapter) continue;
      tokens[found++] = first + place;
      waiting &= ~(uint64_t(1) << place);
    }
    if (found == kMostTokens) {
      take(tokens, Count<kMostTokens>());
      continue;
    }
    int taken = 0;
    for (; taken + 2 <= found; taken += 2) take(tokens + taken, Count<2>());
    if (taken < found) take(tokens + taken, Count<1>());
  }
}

// Blocks of one adapter before the next adapter's turn, which starts a new read stream: as many as
// stay in the second-level cache for further tokens.
constexpr int64_t kOutputBlocks = 8, kRankNumbers = 1 << 15;
INTERPOSER_INLINE int64_t blocks_in_turn(const interposer_lora_shrink& call) {
  const int64_t count = kRankNumbers / (kLoraRanks * (call.inputs + 1));
  return count < 1 ? 1 : count;
}

// Prefetch distance in bytes.
constexpr int64_t kAhead = 2048;

template <int kBytes>
INTERPOSER_INLINE void ask_ahead(const char* stream) {
  for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(stream + kAhead + line, 0, 3);
}

// `kTokens` tokens by `kRows` rows, from row `row` on, of a block of a with `width` rows.
template <int32_t kType, int kTokens, int kRows>
INTERPOSER_INLINE void shrink_tile(const interposer_lora_shrink& call, const int64_t* tokens,
                                   const char* block, int64_t width, int64_t row,
                                   float* (&y)[kTokens]) {
  const int64_t inputs = call.inputs;
  const char* x[kTokens];
  for (int t = 0; t < kTokens; ++t) x[t] = element<kType>(call.x, tokens[t] * call.x_stride);
  Floats sums[kTokens][kRows] = {};
  // `count` inputs from i on; rows are `step` apart.
  const auto take = [&](int64_t i, const char* a, int64_t step, int count) INTERPOSER_LAMBDA {
    Floats given[kTokens];
    for (int t = 0; t < kTokens; ++t) given[t] = load_some(element<kType>(x[t], i), kType, count);
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = load_some(element<kType>(a, r * step), kType, count);
      for (int t = 0; t < kTokens; ++t) sums[t][r] += given[t] * weight;
    }
  };
  int64_t i = 0;
  for (; i + kLoraInputs <= inputs; i += kLoraInputs) {
    const char* a = element<kType>(block, i * width + row * kLoraInputs);
    ask_ahead<kRows * kLoraInputs * size_of(kType)>(a);
#if defined(__AVX512BF16__)
    // bfloat16 pairs are multiplied and added without widening.
    if constexpr (kType == kBFloat16) {
      __m512bh given[kTokens];
      for (int t = 0; t < kTokens; ++t) given[t] = load<__m512bh>(element<kType>(x[t], i));
      for (int r = 0; r < kRows; ++r) {
        const __m512bh weight = load<__m512bh>(element<kType>(a, r * kLoraInputs));
        for (int t = 0; t < kTokens; ++t) {
          sums[t][r] = (Floats)_mm512_dpbf16_ps((__m512)sums[t][r], given[t], weight);
        }
      }
      continue;
    }
#endif
    for (int part = 0; part < kLoraInputs; part += kLanes) {
      take(i + part, element<kType>(a, part), kLoraInputs, kLanes);
    }
  }
  const int64_t left = inputs - i;
  const char* a = element<kType>(block, i * width + row * left);
  for (int64_t part = 0; part < left; part += kLanes) {
    take(i + part, element<kType>(a, part), left, int(least(left - part, kLanes)));
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kRows; ++r) y[t][row + r] = call.scale * sum_of_lanes(sums[t][r]);
  }
}

template <int32_t kType, int kTokens>
void shrink_tokens(const interposer_lora_shrink& call, const int64_t* tokens, int64_t row,
                   int64_t end) {
  const char* block = element<kType>(call.a, (call.ids[tokens[0]] * call.rank + row) * call.inputs);
  float* y[kTokens];
  for (int t = 0; t < kTokens; ++t) y[t] = call.y + tokens[t] * call.rank + row;
  const int64_t width = end - row;
  if (width == kLoraRanks) {
    return shrink_tile<kType, kTokens, kLoraRanks>(call, tokens, block, width, 0, y);
  }
  for (int64_t r = 0; r < width; ++r) {
    shrink_tile<kType, kTokens, 1>(call, tokens, block, width, r, y);
  }
}

template <int32_t kType>
void shrink_type(const interposer_lora_shrink& call, int64_t first, int64_t last) {
  for (int64_t part = first, count; part < last; part += count) {
    const int64_t block = part % blocks_of(call), row = block * kLoraRanks;
    count = least(blocks_in_turn(call), least(blocks_of(call) - block, last - part));
    const int64_t end = least(row + count * kLoraRanks, call.rank);
    const int64_t token = part / blocks_of(call) * kLoraTokens;
    by_adapter(call.ids, token, least(token + kLoraTokens, call.tokens),
               [&](const int64_t* tokens, auto alike) INTERPOSER_LAMBDA {
                 if (call.ids[tokens[0]] >= 0) {
                   for (int64_t r = row; r < end; r += kLoraRanks) {
                     shrink_tokens<kType, decltype(alike)::value>(call, tokens, r,
                                                                  least(r + kLoraRanks, end));
                   }
                   return;
                 }
                 for (int t = 0; t < alike.value; ++t) {
                   float* y = call.y + tokens[t] * call.rank;
                   for (int64_t r = row; r < end; ++r) y[r] = 0;
                 }
               });
  }
}

void shrink(const interposer_lora_shrink& call, int64_t first, int64_t last) {
  if (call.type == kFloat32) return shrink_type<kFloat32>(call, first, last);
  if (call.type == kBFloat16) return shrink_type<kBFloat16>(call, first, last);
  return shrink_type<kFloat16>(call, first, last);
}

// Load sixteen pairs of 16-bit numbers, or the first `count`.
INTERPOSER_INLINE Words load_pairs(const char* from, int count) {
  if (count >= kLanes) return load<Words>(from);
  Words pairs = {};
  std::memcpy(&pairs, from, size_t(count) * 4);
  return pairs;
}

// Multiply by pairs of bfloat16 ranks, interleaved in rows of b with `width` outputs.
template <int kTokens, int kVectors>
INTERPOSER_INLINE void add_pairs(const interposer_lora_expand& call, const int64_t* tokens,
                                 const char* b, int64_t width, int count,
                                 Floats (&sums)[kTokens][kVectors]) {
#if defined(__AVX512BF16__)
  // A float32 is split into a sum of two bfloat16, exact to sixteen bits.
  constexpr int64_t kRanks = 64;
  Halves high[kTokens][kRanks / kLanes], low[kTokens][kRanks / kLanes];
#endif
  for (int64_t r = 0; r + 2 <= call.rank; r += 2) {
#if defined(__AVX512BF16__)
    const int64_t pair = r % kRanks / 2;
    if (pair == 0) {
      for (int64_t part = 0; part < least(kRanks, call.rank - r); part += kLanes) {
        for (int t = 0; t < kTokens; ++t) {
          const float* x = call.x + tokens[t] * call.x_stride + r + part;
          const Floats wide = load_some(x, kFloat32, int(least(call.rank - r - part, kLanes)));
          high[t][part / kLanes] = bfloat16_of_floats(wide);
          const Floats rest = wide - floats_of_bfloat16(high[t][part / kLanes]);
          low[t][part / kLanes] = bfloat16_of_floats(rest);
        }
      }
    }
#endif
    const char* row = b + r * width * 2;
    ask_ahead<kVectors * kLanes * 4>(row);
    for (int v = 0; v < kVectors; ++v) {
      const Words weights = load_pairs(row + v * kLanes * 4, count);
      for (int t = 0; t < kTokens; ++t) {
#if defined(__AVX512BF16__)
        const auto times = [&](const Halves* halves) INTERPOSER_LAMBDA {
          int32_t both;
          std::memcpy(&both, reinterpret_cast<const char*>(halves) + pair * 4, 4);
          sums[t][v] = (Floats)_mm512_dpbf16_ps(
              (__m512)sums[t][v], (__m512bh)_mm512_set1_epi32(both), (__m512bh)weights);
        };
        times(high[t]);
        times(low[t]);
#else
        const float* x = call.x + tokens[t] * call.x_stride + r;
        // The half of a word that is first in memory belongs to the first rank.
        constexpr int kHigh = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 0 : 1;
        sums[t][v] += as_floats(weights << 16) * x[1 - kHigh];
        sums[t][v] += as_floats(weights & 0xffff0000u) * x[kHigh];
#endif
      }
    }
  }
}

// `kTokens` tokens by `kVectors` vectors of outputs from output `first` of a panel on; a single
// vector can be partly filled.
template <int32_t kType, int32_t kOut, int kTokens, int kVectors>
INTERPOSER_INLINE void expand_tile(const interposer_lora_expand& call, const int64_t* tokens,
                                   const char* panel, int64_t width, int64_t first, int64_t output,
                                   int count) {
  Floats sums[kTokens][kVectors] = {};
  int64_t r = 0;
  if constexpr (kType == kBFloat16) {
    add_pairs<kTokens, kVectors>(call, tokens, panel + first * 4, width, count, sums);
    r = call.rank / 2 * 2;
  }
  const char* b = element<kType>(panel, first);
  for (; r < call.rank; ++r) {
    const char* row = element<kType>(b, r * width);
    ask_ahead<kVectors * kLanes * size_of(kType)>(row);
    for (int v = 0; v < kVectors; ++v) {
      const Floats weight = load_some(element<kType>(row, v * kLanes), kType, count);
      for (int t = 0; t < kTokens; ++t) sums[t][v] += weight * call.x[tokens[t] * call.x_stride + r];
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    char* y = static_cast<char*>(call.y) +
              (tokens[t] * call.y_stride + output) * int64_t(size_of(kOut));
    for (int v = 0; v < kVectors; ++v, y += kLanes * size_of(kOut)) {
      store_some(y, load_some(y, kOut, count) + sums[t][v], kOut, count);
    }
  }
}

template <int32_t kType, int32_t kOut, int kTokens>
void expand_panel(const interposer_lora_expand& call, const int64_t* tokens, const char* b,
                  int64_t output) {
  const int64_t width = least(call.outputs - output, kLoraPanel);
  if (width == kLoraPanel) {
    return expand_tile<kType, kOut, kTokens, kVectors>(call, tokens, b, kLoraPanel, 0, output,
                                                         kLanes);
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    expand_tile<kType, kOut, kTokens, 1>(call, tokens, b, width, i, output + i,
                                         int(least(width - i, kLanes)));
  }
}

template <int32_t kType, int32_t kOut>
void expand_type(const interposer_lora_expand& call, int64_t first, int64_t last) {
  for (int64_t part = first, count; part < last; part += count) {
    const int64_t block = part % blocks_of(call), begin = block * kLoraOutputs;
    count = least(kOutputBlocks, least(blocks_of(call) - block, last - part));
    const int64_t end = least(begin + count * kLoraOutputs, call.outputs);
    const int64_t token = part / blocks_of(call) * kLoraTokens;
    by_adapter(call.ids, token, least(token + kLoraTokens, call.tokens),
               [&](const int64_t* tokens, auto alike) INTERPOSER_LAMBDA {
                 const int64_t adapter = call.ids[tokens[0]];
                 if (adapter < 0) return;
                 for (int64_t output = begin; output < end; output += kLoraPanel) {
                   const int64_t panel = (adapter * call.outputs + output) * call.rank;
                   expand_panel<kType, kOut, decltype(alike)::value>(
                       call, tokens, element<kType>(call.b, panel), output);
                 }
               });
  }
}

void expand(const interposer_lora_expand& call, int64_t first, int64_t last) {
  const bool wide = call.y_type == kFloat32;
  if (call.type == kFloat32) return expand_type<kFloat32, kFloat32>(call, first, last);
  if (call.type == kBFloat16) {
    if (wide) return expand_type<kBFloat16, kFloat32>(call, first, last);
    return expand_type<kBFloat16, kBFloat16>(call, first, last);
  }
  if (wide) return expand_type<kFloat16, kFloat32>(call, first, last);
  return expand_type<kFloat16, kFloat16>(call, first, last);
}

}  // namespace

extern "C" const LoraKernels INTERPOSER_OF_LEVEL(interposer_lora);
extern "C" const LoraKernels INTERPOSER_OF_LEVEL(interposer_lora) = {shrink, expand};
