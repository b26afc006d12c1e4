#include <cstring>
#include <initializer_list>

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

uint32_t word_at(const interposer_plain& plain, int64_t output, int64_t step) {
  const int64_t inputs = plain.inputs;
  uint32_t word = 0;
  switch (plain.format) {
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
      const uint8_t flip = plain.format == kWeightInt8 ? 0x80 : 0;
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

INTERPOSER_INLINE void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Four steps of four outputs with rows `pitch` bytes apart.
template <int32_t format>
INTERPOSER_INLINE void turn(const char* rows, int64_t pitch, uint32_t* words) {
  const Four a = words_of<format>(rows), b = words_of<format>(rows + pitch);
  const Four c = words_of<format>(rows + 2 * pitch), d = words_of<format>(rows + 3 * pitch);
  const Four low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
  const Four ac_low = __builtin_shuffle(a, c, low), ac_high = __builtin_shuffle(a, c, high);
  const Four bd_low = __builtin_shuffle(b, d, low), bd_high = __builtin_shuffle(b, d, high);
  stream(words, __builtin_shuffle(ac_low, bd_low, low));
  stream(words + kBlock, __builtin_shuffle(ac_low, bd_low, high));
  stream(words + 2 * kBlock, __builtin_shuffle(ac_high, bd_high, low));
  stream(words + 3 * kBlock, __builtin_shuffle(ac_high, bd_high, high));
}

// Outputs whose words of one step are a cache line.
constexpr int64_t kLineOutputs = 16;
// Bytes of a row that are fetched ahead: the processor does not follow 64 rows by itself.
constexpr int64_t kAheadBytes = 128;

// Words of a block, and its number of outputs, at most 64.
template <int32_t format>
void pack_words(const interposer_plain& plain, int64_t first, int64_t count, uint32_t* words) {
  constexpr int kInputs = inputs_per_word(format);
  const int64_t steps = padded_inputs(plain.inputs) / kInputs;
  // Words that do not cross the end of a row.
  const int64_t whole = plain.inputs / kInputs;
  const int64_t pitch = kInputs == 8 ? (plain.inputs + 1) / 2 : plain.inputs * 4 / kInputs;
  const char* rows = static_cast<const char*>(plain.weight) + first * pitch;
  // Sixteen steps at a time, a cache line of each row. Lines of packed words are written completely
  // and at once, because the processor combines streamed words of few lines.
  for (int64_t begin = 0; begin < steps; begin += 16) {
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
          turn<format>(rows + output * pitch + step * 4, pitch, words + step * kBlock + output);
        }
      }
      for (int64_t output = line; output < line + kLineOutputs; ++output) {
        for (int64_t rest = output < line + turned ? step : begin; rest < end; ++rest) {
          words[rest * kBlock + output] = output < count ? word_at(plain, first + output, rest) : 0;
        }
      }
    }
  }
  fence();
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

  uint32_t* words = reinterpret_cast<uint32_t*>(memory + packed->words_at) + block * steps * kBlock;
  pack_words(plain, first, count, words);
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

interposer_packed header(const interposer_plain& plain) {
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
  return sound ? header(*plain).bytes : 0;
}

void interposer_pack(const interposer_plain* plain, void* memory) {
  const interposer_packed packed = header(*plain);
  // Padding is zeroed, so that equal weights have equal bytes.
  for (int64_t end : {packed.words_at, packed.zeros_at, packed.bias_at, packed.bytes}) {
    if (end) std::memset(static_cast<char*>(memory) + end - 64, 0, 64);
  }
  std::memset(memory, 0, size_t(packed.words_at));
  std::memcpy(memory, &packed, sizeof packed);
  Packing packing{plain, static_cast<interposer_packed*>(memory)};
  interposer_parallel(pack_some, &packing, interposer_num_threads());
}
}
