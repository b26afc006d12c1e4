#include <cstring>
#include <initializer_list>
#include <optional>

#include "../pool.h"
#include "../vectors.h"
#include "packed.h"

namespace {

// Order of eight inputs in the nibbles of a word, from the lowest. So the low nibbles of its bytes
// are inputs 0 4 1 5 and the high nibbles 2 6 3 7, and its two halves have adjacent inputs at every
// position.
constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

struct Packing {
  const interposer_plain* plain;
  interposer_packed* packed;
};

uint32_t nibble(const uint8_t* row, int64_t input, int64_t inputs) {
  if (input >= inputs) return 0;
  return input % 2 ? row[input / 2] >> 4 : row[input / 2] & 15;
}

uint32_t word_at(const interposer_plain& plain, int32_t format, int64_t output, int64_t step) {
  const int64_t inputs = plain.inputs;
  uint32_t word = 0;
  switch (format) {
    case kWeightFloat32:
      if (step < inputs) {
        std::memcpy(&word, static_cast<const float*>(plain.weight) + output * inputs + step, 4);
      }
      return word;
    case kWeightBFloat16: {
      const uint16_t* row = static_cast<const uint16_t*>(plain.weight) + output * inputs;
      for (int i = 0; i < 2; ++i) {
        if (2 * step + i < inputs) word |= uint32_t(row[2 * step + i]) << 16 * i;
      }
      return word;
    }
    case kWeightInt8:
    case kWeightE4M3: {
      const uint8_t* row = static_cast<const uint8_t*>(plain.weight) + output * inputs;
      const uint8_t flip = format == kWeightInt8 ? 0x80 : 0;
      for (int i = 0; i < 4; ++i) {
        if (4 * step + i < inputs) word |= uint32_t(row[4 * step + i] ^ flip) << 8 * i;
      }
      return word;
    }
    default: {
      const uint8_t* row = static_cast<const uint8_t*>(plain.weight) + output * ((inputs + 1) / 2);
      for (int i = 0; i < 8; ++i) {
        word |= nibble(row, 8 * step + kOrder[i], inputs) << 4 * i;
      }
      return word;
    }
  }
}

// Four adjacent words of a row.
typedef uint32_t Four __attribute__((vector_size(16)));

// Reorder nibbles from input order to kOrder.
INTERPOSER_INLINE Four ordered(Four nibbles) {
  Four first = nibbles & 0x0f0f0f0f, second = nibbles >> 4 & 0x0f0f0f0f;
  first = (first | first >> 4) & 0x00ff00ff;
  second = (second | second >> 4) & 0x00ff00ff;
  return ((first | first >> 8) & 0xffff) | (second | second >> 8) << 16;
}

// Words of four steps, from `row`, the bytes of one output.
template <int32_t format>
INTERPOSER_INLINE Four words_of(const char* row) {
  Four words = load<Four>(row);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  // The first element in memory belongs in the lowest part of a word.
  if (format != kWeightFloat32) words = words << 16 | words >> 16;
  if (inputs_per_word(format) >= 4) words = (words & 0x00ff00ff) << 8 | (words >> 8 & 0x00ff00ff);
#endif
  if (format == kWeightInt8) return words ^ 0x80808080;
  return inputs_per_word(format) == 8 ? ordered(words) : words;
}

// Write four words of packed memory past the caches, which a whole model does not fit into: a plain
// store would first read the line that it replaces. `fence` ends a series of such stores.
INTERPOSER_INLINE void stream(uint32_t* to, Four words) {
#if defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)words);
#else
  store(to, words);
#endif
}

// Write four words that are read again at once, or that are not.
template <bool kStreams>
INTERPOSER_INLINE void put(uint32_t* to, Four words) {
  if constexpr (kStreams) {
    stream(to, words);
  } else {
    store(to, words);
  }
}

INTERPOSER_INLINE void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Four steps of four outputs with rows `pitch` bytes apart.
template <int32_t format, bool kStreams>
INTERPOSER_INLINE void turn(const char* rows, int64_t pitch, uint32_t* words) {
  const Four a = words_of<format>(rows), b = words_of<format>(rows + pitch);
  const Four c = words_of<format>(rows + 2 * pitch), d = words_of<format>(rows + 3 * pitch);
  const Four low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
  const Four ac_low = __builtin_shuffle(a, c, low), ac_high = __builtin_shuffle(a, c, high);
  const Four bd_low = __builtin_shuffle(b, d, low), bd_high = __builtin_shuffle(b, d, high);
  put<kStreams>(words, __builtin_shuffle(ac_low, bd_low, low));
  put<kStreams>(words + kBlock, __builtin_shuffle(ac_low, bd_low, high));
  put<kStreams>(words + 2 * kBlock, __builtin_shuffle(ac_high, bd_high, low));
  put<kStreams>(words + 3 * kBlock, __builtin_shuffle(ac_high, bd_high, high));
}

// Outputs whose words of one step are a cache line.
constexpr int64_t kLineOutputs = 16;
// Bytes of a row that are fetched ahead: the processor does not follow 64 rows by itself.
constexpr int64_t kAheadBytes = 128;

// Words of the steps from `from` to `steps` - 1 of a block with `count` outputs, at most 64.
template <int32_t format, bool kStreams>
void pack_steps(const interposer_plain& plain, int64_t first, int64_t count, int64_t from,
                int64_t steps, uint32_t* words) {
  constexpr int kInputs = inputs_per_word(format);
  words -= from * kBlock;
  // Words that do not cross the end of a row.
  const int64_t whole = plain.inputs / kInputs;
  const int64_t pitch = kInputs == 8 ? (plain.inputs + 1) / 2 : plain.inputs * 4 / kInputs;
  const char* rows = static_cast<const char*>(plain.weight) + first * pitch;
  // Sixteen steps at a time, a cache line of each row. Lines of packed words are written completely
  // and at once, because the processor combines streamed words of few lines.
  for (int64_t begin = from; begin < steps; begin += 16) {
    const int64_t end = begin + 16 < steps ? begin + 16 : steps;
    for (int64_t line = 0; line < kBlock; line += kLineOutputs) {
      const int64_t filled = count - line < kLineOutputs ? count - line : kLineOutputs;
      const int64_t turned = filled > 0 ? filled / 4 * 4 : 0;  // outputs in whole turns
      for (int64_t i = 0; i < turned; ++i) {
        __builtin_prefetch(rows + (line + i) * pitch + begin * 4 + kAheadBytes, 0, 2);
      }
      int64_t step = begin;
      for (; step + 4 <= end && step + 4 <= whole; step += 4) {
        for (int64_t output = line; output < line + turned; output += 4) {
          turn<format, kStreams>(rows + output * pitch + step * 4, pitch, words + step * kBlock + output);
        }
      }
      for (int64_t output = line; output < line + kLineOutputs; ++output) {
        for (int64_t rest = output < line + turned ? step : begin; rest < end; ++rest) {
          words[rest * kBlock + output] =
              output < count ? word_at(plain, format, first + output, rest) : 0;
        }
      }
    }
  }
  if constexpr (kStreams) fence();
}

template <int32_t format>
void pack_words(const interposer_plain& plain, int64_t first, int64_t count, uint32_t* words) {
  const int64_t steps = padded_inputs(plain.inputs) / inputs_per_word(format);
  pack_steps<format, true>(plain, first, count, 0, steps, words);
}

void pack_words(const interposer_plain& plain, int64_t first, int64_t count, uint32_t* words) {
  switch (plain.format) {
    case kWeightFloat32:
      return pack_words<kWeightFloat32>(plain, first, count, words);
    case kWeightBFloat16:
      return pack_words<kWeightBFloat16>(plain, first, count, words);
    case kWeightInt8:
      return pack_words<kWeightInt8>(plain, first, count, words);
    case kWeightE4M3:
      return pack_words<kWeightE4M3>(plain, first, count, words);
    default:  // both 4-bit formats
      return pack_words<kWeightInt4>(plain, first, count, words);
  }
}

// Whether a weight of this output and group is NaN. Of the formats with at most 8 bits, only e4m3fn
// has NaN.
bool holds_nan(const interposer_plain& plain, int64_t output, int64_t group) {
  if (plain.format != kWeightE4M3) return false;
  const int64_t begin = group * plain.group, left = plain.inputs - begin;
  const int64_t count = left < plain.group ? left : plain.group;
  const auto* codes = static_cast<const uint8_t*>(plain.weight) + output * plain.inputs + begin;
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= (codes[i] & 0x7f) == 0x7f;
  return found;
}

void pack_block(const interposer_plain& plain, interposer_packed* packed, int64_t block) {
  const int64_t first = block * kBlock;
  const int64_t count = plain.outputs - first < kBlock ? plain.outputs - first : kBlock;
  const int64_t steps = padded_inputs(plain.inputs) / inputs_per_word(plain.format);
  const int64_t groups = plain.group ? (plain.inputs + plain.group - 1) / plain.group : 0;
  char* memory = reinterpret_cast<char*>(packed);

  if (plain.format != kWeightCompact) {
    auto* words = reinterpret_cast<uint32_t*>(memory + packed->words_at) + block * steps * kBlock;
    pack_words(plain, first, count, words);
  }
  if (packed->scales_at) {
    const int size = size_of(plain.scale_type);
    char* scales = memory + packed->scales_at + block * groups * kBlock * size;
    std::memset(scales, 0, size_t(groups * kBlock * size));
    for (int64_t output = 0; output < count; ++output) {
      const char* row =
          static_cast<const char*>(plain.scales) + (first + output) * plain.scale_stride * size;
      for (int64_t group = 0; group < groups; ++group) {
        char* scale = scales + (group * kBlock + output) * size;
        std::memcpy(scale, row + group * size, size_t(size));
        // Kernels decode NaN as a number, which is cheaper. Setting the scale to NaN, in any scale
        // type, makes all results of the group NaN, as they must be.
        if (holds_nan(plain, first + output, group)) std::memset(scale, 0xff, size_t(size));
      }
    }
  }
  if (packed->zeros_at) {
    uint8_t* zeros = reinterpret_cast<uint8_t*>(memory + packed->zeros_at) + block * groups * kBlock;
    std::memset(zeros, 0, size_t(groups * kBlock));
    for (int64_t output = 0; output < count; ++output) {
      for (int64_t group = 0; group < groups; ++group) {
        zeros[group * kBlock + output] = plain.zeros[(first + output) * groups + group];
      }
    }
  }
  if (packed->bias_at) {
    float* bias = reinterpret_cast<float*>(memory + packed->bias_at) + first;
    for (int64_t output = 0; output < kBlock; ++output) {
      bias[output] = output < count ? plain.bias[first + output] : 0.0f;
    }
  }
}

void pack_some(void* argument, int thread, int threads) {
  const Packing& packing = *static_cast<Packing*>(argument);
  const int64_t blocks = num_blocks(packing.plain->outputs);
  for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; ++block) {
    pack_block(*packing.plain, packing.packed, block);
  }
}

constexpr int kMostThreads = 64;

// How often each exponent occurs in a bfloat16 weight.
struct Histogram {
  const interposer_plain* plain;
  int64_t counts[kMostThreads][256] = {};

  explicit Histogram(const interposer_plain& plain) : plain(&plain) {
    const int threads = interposer_num_threads();
    interposer_parallel(count_some, this, threads < kMostThreads ? threads : kMostThreads);
    for (int thread = 1; thread < kMostThreads; ++thread) {
      for (int i = 0; i < 256; ++i) counts[0][i] += counts[thread][i];
    }
  }

  static void count_some(void* argument, int thread, int threads) {
    Histogram& histogram = *static_cast<Histogram*>(argument);
    const auto* numbers = static_cast<const uint16_t*>(histogram.plain->weight);
    const int64_t all = histogram.plain->outputs * histogram.plain->inputs;
    const int64_t last = all * (thread + 1) / threads;
    // Equal exponents often follow each other: two counters do not wait for each other's store.
    int64_t counts[2][256] = {};
    for (int64_t i = all * thread / threads; i < last; ++i) ++counts[i & 1][numbers[i] >> 7 & 255];
    for (int i = 0; i < 256; ++i) histogram.counts[thread][i] = counts[0][i] + counts[1][i];
  }
};

constexpr int kNoCode = 255;

// The codes of the sixteen most frequent exponents. Of equally frequent ones, the largest get codes.
struct ExponentCodes {
  uint8_t exponents[16], codes[256];
  int64_t escapes;  // numbers without a code

  explicit ExponentCodes(const interposer_plain& plain) {
    const Histogram histogram(plain);
    const int64_t(&counts)[256] = histogram.counts[0];
    std::memset(codes, kNoCode, sizeof codes);
    escapes = plain.outputs * plain.inputs;
    for (int code = 0; code < 16; ++code) {
      int best = -1;
      for (int i = 255; i >= 0; --i) {
        if (codes[i] == kNoCode && (best < 0 || counts[i] > counts[best])) best = i;
      }
      exponents[code] = uint8_t(best);
      codes[best] = uint8_t(code);
      escapes -= counts[best];
    }
  }
};

// Encode a block, and count the escapes of its pieces in the places of the pieces' ends.
struct Compacting {
  const interposer_plain* plain;
  interposer_packed* packed;
  const ExponentCodes* codes;

  char* memory() const { return reinterpret_cast<char*>(packed); }
  uint32_t* starts(int64_t block) const {
    auto* starts = reinterpret_cast<uint32_t*>(memory() + packed->starts_at);
    return starts + block * num_compact_pieces(plain->inputs);
  }

  // Call `take(step, output, input, number)` for each number of a piece of a block.
  template <class Take>
  void each_piece(int64_t block, int64_t piece, const Take& take) const {
    const int64_t first = block * kBlock, left = plain->outputs - first;
    const int64_t step = piece * kCompactSteps, steps = plain->inputs / 2;
    const int64_t end = steps < step + kCompactSteps ? steps : step + kCompactSteps;
    uint32_t words[kCompactSteps * kBlock];
    pack_steps<kWeightBFloat16, false>(*plain, first, left < kBlock ? left : kBlock, step, end, words);
    const int outputs = int(left < kBlock ? left : kBlock);
    for (int64_t i = 0; i < end - step; ++i) {
      for (int output = 0; output < outputs; ++output) {
        const uint32_t word = words[i * kBlock + output];
        take(i, output, 0, uint16_t(word));
        take(i, output, 1, uint16_t(word >> 16));
      }
    }
  }

  void encode(int64_t block) const {
    const int64_t steps = plain->inputs / 2, pieces = num_compact_pieces(plain->inputs);
    auto* to = reinterpret_cast<uint8_t*>(memory() + packed->words_at) +
               block * steps * step_bytes(kWeightCompact);
    std::memset(to, 0, size_t(steps * step_bytes(kWeightCompact)));
    for (int64_t piece = 0; piece < pieces; ++piece) {
      uint32_t escapes = 0;
      each_piece(block, piece, [&](int64_t i, int output, int input, uint16_t number) {
        uint8_t* step = to + (piece * kCompactSteps + i) * step_bytes(kWeightCompact);
        const int half = compact_half(output), place = compact_byte(output, input);
        const uint8_t code = codes->codes[number >> 7 & 255];
        escapes += code == kNoCode;
        step[place] |= uint8_t((code & 15) << 4 * half);
        step[kBlock * (1 + half) + place] = uint8_t((number >> 8 & 0x80) | (number & 0x7f));
      });
      starts(block)[piece + 1] = escapes;
    }
  }

  void list(int64_t block) const {
    auto* escapes = reinterpret_cast<uint32_t*>(memory() + packed->escapes_at);
    for (int64_t piece = 0; piece < num_compact_pieces(plain->inputs); ++piece) {
      uint32_t at = starts(block)[piece];
      if (at == starts(block)[piece + 1]) continue;
      each_piece(block, piece, [&](int64_t i, int output, int input, uint16_t number) {
        if (codes->codes[number >> 7 & 255] != kNoCode) return;
        escapes[at++] = uint32_t(i * 2 * kBlock + output * 2 + input) << 16 | number;
      });
    }
  }

  template <void (Compacting::*kDo)(int64_t) const>
  static void some(void* argument, int thread, int threads) {
    const Compacting& compacting = *static_cast<const Compacting*>(argument);
    const int64_t blocks = num_blocks(compacting.plain->outputs);
    const int64_t last = blocks * (thread + 1) / threads;
    for (int64_t block = blocks * thread / threads; block < last; ++block) {
      (compacting.*kDo)(block);
    }
  }

  void run() {
    const int threads = interposer_num_threads();
    std::memcpy(memory() + packed->exponents_at, codes->exponents, 16);
    starts(0)[0] = 0;
    interposer_parallel(some<&Compacting::encode>, this, threads);
    const int64_t all = num_blocks(plain->outputs) * num_compact_pieces(plain->inputs);
    for (int64_t piece = 0; piece < all; ++piece) starts(0)[piece + 1] += starts(0)[piece];
    interposer_parallel(some<&Compacting::list>, this, threads);
  }
};

// A compact weight must save this part of the memory of bfloat16, at least.
constexpr int64_t kSavedPart = 8;

// The header of a compact weight of this number of escapes; `bytes` is 0 if it saves too little.
void lay_out_compact(const interposer_plain& plain, int64_t escapes, interposer_packed& packed) {
  const int64_t rows = num_blocks(plain.outputs) * kBlock;
  const int64_t full = packed.words_at + rows * plain.inputs * 2;
  int64_t end = packed.words_at + rows * plain.inputs * 3 / 2;
  packed.exponents_at = end;
  end += 64;
  packed.starts_at = end;
  const int64_t pieces = num_blocks(plain.outputs) * num_compact_pieces(plain.inputs);
  end = round_up(end + (pieces + 1) * 4, 64);
  packed.escapes_at = end;
  end = round_up(end + escapes * 4, 64);
  if (plain.bias) {
    packed.bias_at = end;
    end += rows * 4;
  }
  packed.bytes = end <= full - full / kSavedPart ? end : 0;
}

interposer_packed header(const interposer_plain& plain, int64_t escapes = 0) {
  interposer_packed packed = {};
  packed.magic = kMagic;
  packed.format = plain.format;
  packed.scale_type = plain.scales ? plain.scale_type : kNone;
  packed.outputs = plain.outputs;
  packed.inputs = plain.inputs;
  packed.group = plain.group ? plain.group : plain.inputs;
  const int64_t rows = num_blocks(plain.outputs) * kBlock;
  const int64_t groups = plain.group ? (plain.inputs + plain.group - 1) / plain.group : 0;
  int64_t end = round_up(sizeof packed, 64);
  packed.words_at = end;
  if (plain.format == kWeightCompact) {
    lay_out_compact(plain, escapes, packed);
    return packed;
  }
  end += rows * padded_inputs(plain.inputs) / inputs_per_word(plain.format) * 4;
  if (plain.scales) {
    packed.scales_at = end;
    end = round_up(end + rows * groups * size_of(plain.scale_type), 64);
  }
  if (plain.zeros) {
    packed.zeros_at = end;
    end = round_up(end + rows * groups, 64);
  }
  if (plain.bias) {
    packed.bias_at = end;
    end += rows * 4;  // a multiple of 64, like the size of words
  }
  packed.bytes = end;
  return packed;
}

}  // namespace

extern "C" {

int64_t interposer_packed_bytes(const interposer_plain* plain) {
  const bool sound = plain->outputs > 0 && plain->inputs > 0 && plain->group >= 0;
  if (!sound) return 0;
  if (plain->format != kWeightCompact) return header(*plain).bytes;
  // Only whole words: a padded input times any number must be zero.
  if (plain->inputs % 8 || plain->scales || plain->zeros) return 0;
  return header(*plain, ExponentCodes(*plain).escapes).bytes;
}

void interposer_pack(const interposer_plain* plain, void* memory) {
  const bool compact = plain->format == kWeightCompact;
  std::optional<ExponentCodes> codes;
  if (compact) codes.emplace(*plain);
  const interposer_packed packed = header(*plain, compact ? codes->escapes : 0);
  // Padding is zeroed, so that equal weights have equal bytes.
  for (int64_t end : {packed.words_at, packed.zeros_at, packed.bias_at, packed.bytes,
                      packed.exponents_at, packed.starts_at, packed.escapes_at}) {
    if (end) std::memset(static_cast<char*>(memory) + end - 64, 0, 64);
  }
  std::memset(memory, 0, size_t(packed.words_at));
  std::memcpy(memory, &packed, sizeof packed);
  auto* to = static_cast<interposer_packed*>(memory);
  if (compact) Compacting{plain, to, &*codes}.run();
  Packing packing{plain, to};
  interposer_parallel(pack_some, &packing, interposer_num_threads());
}
}
