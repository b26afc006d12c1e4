// Embedding lookups: unpacks rows of a packed weight, one word from each row of words.
//
// The time is memory latency, one cache line per word, which no instruction level changes. So this
// file is compiled once for all levels.

#include "../pool.h"
#include "../vectors.h"
#include "packed.h"

namespace {

// Up to this number of elements, the calling thread alone is faster than waking others.
constexpr int64_t kFewElements = 1 << 15;
// Numbers decoded per chunk: whole words and whole vectors.
constexpr int64_t kChunk = 64;

float scale_at(const char* scales, int64_t index, int32_t type) {
  return load_some(scales + index * size_of(type), type, 1)[0];
}

// Words, scales and zero points of one row; consecutive entries are 64 elements apart.
struct Row {
  const uint32_t* words;
  const char* scales;
  const uint8_t* zeros;
};

Row row_of(const interposer_packed& weight, int64_t row) {
  const int64_t block = row / kBlock, lane = row % kBlock;
  const int64_t steps = padded_inputs(weight.inputs) / inputs_per_word(weight.format);
  const int64_t groups = (weight.inputs + weight.group - 1) / weight.group;
  Row found = {at<uint32_t>(&weight, weight.words_at) + block * steps * kBlock + lane,
               at<char>(&weight, weight.scales_at), at<uint8_t>(&weight, weight.zeros_at)};
  if (found.scales) found.scales += (block * groups * kBlock + lane) * size_of(weight.scale_type);
  if (found.zeros) found.zeros += block * groups * kBlock + lane;
  return found;
}

void copy_float32(const interposer_packed& weight, const Row& row, char* out) {
  for (int64_t input = 0; input < weight.inputs; ++input) {
    store(out + 4 * input, row.words[input * kBlock]);
  }
}

void copy_bfloat16(const interposer_packed& weight, const Row& row, char* out) {
  int64_t input = 0;
  for (; input + 2 <= weight.inputs; input += 2) {
    const uint32_t word = row.words[input / 2 * kBlock];
    store(out + 2 * input, uint16_t(word));
    store(out + 2 * input + 2, uint16_t(word >> 16));
  }
  if (input < weight.inputs) store(out + 2 * input, uint16_t(row.words[input / 2 * kBlock]));
}

// A compact row: bytes at fixed places of every step, then the row's escapes.
void copy_compact(const interposer_packed& weight, int64_t row, char* out) {
  const int64_t block = row / kBlock, output = row % kBlock, steps = weight.inputs / 2;
  const uint8_t* exponents = at<uint8_t>(&weight, weight.exponents_at);
  const uint8_t* step =
      at<uint8_t>(&weight, weight.words_at) + block * steps * step_bytes(kWeightCompact);
  const int half = compact_half(int(output)), place = compact_byte(int(output), 0);
  for (int64_t i = 0; i < steps; ++i, step += step_bytes(kWeightCompact)) {
    for (int input = 0; input < 2; ++input) {
      const int code = step[place + input] >> 4 * half & 15;
      const uint8_t rest = step[kBlock * (1 + half) + place + input];
      store(out + 4 * i + 2 * input, compact_number(exponents[code], rest));
    }
  }
  const int64_t pieces = num_compact_pieces(weight.inputs);
  const uint32_t* starts = at<uint32_t>(&weight, weight.starts_at) + block * pieces;
  const uint32_t* escapes = at<uint32_t>(&weight, weight.escapes_at);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    for (uint32_t i = starts[piece]; i < starts[piece + 1]; ++i) {
      const int64_t number = escapes[i] >> 16;
      if (number % 128 / 2 != output) continue;
      const int64_t input = (piece * kCompactSteps + number / 128) * 2 + number % 2;
      store(out + 2 * input, uint16_t(escapes[i]));
    }
  }
}

struct Int8 {
  static constexpr int kInputs = 4, kZero = 128;
  static int code(uint32_t word, int input) { return int(word >> 8 * input & 255); }
};

// Of eight inputs, the even ones are in the four lower nibbles.
struct Int4 {
  static constexpr int kInputs = 8, kZero = 8;
  static int code(uint32_t word, int input) {
    return int(word >> (input % 2 * 16 + input / 2 * 4) & 15);
  }
};

// A word has one group: groups consist of whole words, or there is only one.
template <class F>
void dequantise(const interposer_packed& weight, const Row& row, char* out, int32_t type) {
  int64_t group = -1, group_end = 0;
  float scale = 1.0f;
  int zero = F::kZero;
  for (int64_t first = 0; first < weight.inputs; first += kChunk) {
    float numbers[kChunk];
    const int64_t count = weight.inputs - first < kChunk ? weight.inputs - first : kChunk;
    for (int64_t i = 0; i < count; i += F::kInputs) {
      if (first + i >= group_end) {
        ++group;
        group_end += weight.group;
        scale = scale_at(row.scales, group * kBlock, weight.scale_type);
        if (row.zeros) zero = row.zeros[group * kBlock];
      }
      const uint32_t word = row.words[(first + i) / F::kInputs * kBlock];
      for (int k = 0; k < F::kInputs; ++k) numbers[i + k] = float(F::code(word, k) - zero) * scale;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      const int some = int(count - i < kLanes ? count - i : kLanes);
      store_some(out + (first + i) * size_of(type), load<Floats>(numbers + i), type, some);
    }
  }
}

void write_some(void* argument, int thread, int threads) {
  const interposer_lookup& lookup = *static_cast<const interposer_lookup*>(argument);
  const interposer_packed& weight = *lookup.weight;
  const int64_t bytes = weight.inputs * size_of(lookup.out_type);
  const int64_t end = lookup.count * (thread + 1) / threads;
  for (int64_t i = lookup.count * thread / threads; i < end; ++i) {
    const Row row = row_of(weight, lookup.rows[i]);
    char* out = static_cast<char*>(lookup.out) + i * bytes;
    switch (weight.format) {
      case kWeightFloat32:
        copy_float32(weight, row, out);
        break;
      case kWeightBFloat16:
        copy_bfloat16(weight, row, out);
        break;
      case kWeightCompact:
        copy_compact(weight, lookup.rows[i], out);
        break;
      case kWeightInt8:
        dequantise<Int8>(weight, row, out, lookup.out_type);
        break;
      default:
        dequantise<Int4>(weight, row, out, lookup.out_type);
    }
  }
}

bool is_written(const interposer_packed& weight, int32_t type) {
  switch (weight.format) {
    case kWeightFloat32:
      return type == kFloat32;
    case kWeightBFloat16:
    case kWeightCompact:
      return type == kBFloat16;
    case kWeightInt8:
    case kWeightInt4:
      return weight.scales_at && (type == kFloat32 || type == kBFloat16 || type == kFloat16);
    default:
      return false;
  }
}

}  // namespace

extern "C" int32_t interposer_rows(const interposer_lookup* lookup) {
  const interposer_packed& weight = *lookup->weight;
  if (weight.magic != kMagic) return kNotPacked;
  if (!is_written(weight, lookup->out_type)) return kMismatch;
  for (int64_t i = 0; i < lookup->count; ++i) {
    if (lookup->rows[i] < 0 || lookup->rows[i] >= weight.outputs) return kNoSuchRow;
  }
  const bool few = lookup->count * weight.inputs < kFewElements;
  interposer_parallel(write_some, const_cast<interposer_lookup*>(lookup),
                      few ? 1 : interposer_num_threads());
  return kDone;
}
