// Memory layout of a packed weight [O, I], and the functions that multiply by it.
//
// Outputs are packed in blocks of 64. Step s of a block has one 32-bit word for each of its
// outputs, with 1, 2, 4 or 8 adjacent inputs, depending on the format. So one vector instruction
// multiplies one row of words, sixteen outputs, by the same few inputs, and a block is read
// sequentially. Words are integers, stored in the byte order of the machine.
#pragma once

#include <cstdint>

constexpr int kBlock = 64;

enum Format : int32_t {
  kWeightFloat32 = 0,   // one number
  kWeightBFloat16 = 1,  // two, the first in the low half
  kWeightInt8 = 2,      // four values from 0 to 255, the first in the lowest byte
  kWeightInt4 = 3,      // eight values from 0 to 15 in the order 0 2 4 6 1 3 5 7, lowest bits first
  kWeightE2M1 = 4,      // eight 4-bit floats in the same order
  kWeightE4M3 = 5,      // four 8-bit floats, the first in the lowest byte
  kWeightCompact = 6,   // two bfloat16, compressed without loss: see compact.h
};

extern "C" {

// Header of a packed weight. Offsets are bytes from the header, multiples of 64; 0 means absent.
struct interposer_packed {
  uint32_t magic;
  int32_t format;
  int32_t scale_type;  // a Type; kE8M0 for exponents
  int32_t unused;
  int64_t outputs, inputs;
  int64_t group;      // inputs per scale; equals `inputs` for one scale per row
  int64_t words_at;   // [blocks][steps][64] uint32
  int64_t scales_at;  // [blocks][groups][64]
  int64_t zeros_at;   // [blocks][groups][64] uint8, subtracted from quantized values
  int64_t bias_at;    // [blocks][64] float32
  int64_t bytes;      // total size
  // Of a compact weight:
  int64_t exponents_at;  // [16] uint8, the exponents that a code of four bits selects
  int64_t starts_at;     // [blocks * pieces + 1] uint32, first escape of each piece
  int64_t escapes_at;    // [starts[blocks * pieces]] uint32
  int64_t reserved;
};

// Weight before packing: contiguous rows, as in checkpoints.
struct interposer_plain {
  int32_t format, scale_type;
  int64_t outputs, inputs, group;
  const void* weight;    // [O, I], or [O, I / 2] with the first of two values in the low half
  const void* scales;    // [O, I / group], or null
  const uint8_t* zeros;  // [O, I / group], or null
  const float* bias;     // [O], or null
  int64_t scale_stride;  // elements from one output's scales to the next; 0 repeats them
};

// One GEMM. Rows of `x` may have gaps.
struct interposer_product {
  const interposer_packed* weight;
  const void* x;
  int32_t x_type;
  int32_t out_type;
  int64_t rows, x_stride;         // elements
  // Scales of x, or null: one for all rows if the stride is 0, one per row, or one per group if the
  // stride is the number of groups of the weight.
  const float* x_scales;
  int64_t x_scale_stride;
  void* out;
  int64_t out_stride;             // elements
};

// One embedding lookup. Float weights are returned as they are; quantized values are returned as
// (value - zero point) * scale, rounded once.
struct interposer_lookup {
  const interposer_packed* weight;
  const int64_t* rows;
  int64_t count;
  void* out;  // [count, I], contiguous
  int32_t out_type;
};

// Size of the packed weight in bytes; 0 if `plain` cannot be packed. In the format `kWeightCompact`,
// this reads the weight, a bfloat16 matrix, and returns 0 if too many exponents would have no code.
int64_t interposer_packed_bytes(const interposer_plain* plain);

// Pack into `memory`, which is aligned to 64 bytes.
void interposer_pack(const interposer_plain* plain, void* memory);

// Compute out = x weight^T + bias. Returns 0 or an error code.
int32_t interposer_linear(const interposer_product* product);

// Unpack the requested rows, as an embedding lookup does. Returns 0 or an error code.
int32_t interposer_rows(const interposer_lookup* lookup);
}

enum Failure : int32_t {
  kDone = 0,
  kNoKernels = 1,
  kNoMemory = 2,
  kNotPacked = 3,
  kMismatch = 4,
  kNoSuchRow = 5,
};

constexpr uint32_t kMagic = 0x69703031;

constexpr int inputs_per_word(int32_t format) {
  switch (format) {
    case kWeightFloat32:
      return 1;
    case kWeightBFloat16:
    case kWeightCompact:
      return 2;
    case kWeightInt8:
    case kWeightE4M3:
      return 4;
    default:
      return 8;
  }
}

// Bytes of a step of a block.
constexpr int64_t step_bytes(int32_t format) {
  return format == kWeightCompact ? 3 * kBlock : 4 * kBlock;
}

// A compact weight lists escapes, the numbers whose exponents have no code, by pieces of a block.
// An escape is the place of a number in its piece, step * 128 + output * 2 + input, in the high
// half, and its sixteen bits in the low half.
constexpr int64_t kCompactSteps = 8;  // per piece

constexpr int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// Where a step of a compact block has a number: the half of the step, and the byte in that half. Two
// interleaved registers of bytes are then the words of two tiles, see compact.h.
constexpr int compact_half(int output) { return output / 32; }
constexpr int compact_byte(int output, int input) {
  return output % 16 / 4 * 16 + output / 16 % 2 * 8 + output % 4 * 2 + input;
}

// A bfloat16 of its exponent and the byte of its sign and mantissa.
constexpr uint16_t compact_number(uint8_t exponent, uint8_t rest) {
  return uint16_t((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

inline int64_t num_compact_pieces(int64_t inputs) {
  return (inputs / 2 + kCompactSteps - 1) / kCompactSteps;
}

inline int64_t num_blocks(int64_t outputs) { return round_up(outputs, kBlock) / kBlock; }

// Eight inputs fill whole words in every format.
inline int64_t padded_inputs(int64_t inputs) { return round_up(inputs, 8); }

template <class T>
const T* at(const interposer_packed* packed, int64_t offset) {
  return offset ? reinterpret_cast<const T*>(reinterpret_cast<const char*>(packed) + offset)
                : nullptr;
}

// Rows of x after preparation, shared by all outputs.
struct Prepared {
  const void* data;   // in the form that the GEMM kernel reads
  int64_t stride;     // bytes
  // Sums of int8 inputs, [rows][groups], or null. For a weight without zero points, the sums are
  // multiplied by minus the shift of its values.
  const int32_t* sums;
  int64_t num_groups;
};

struct LinearKernels {
  // Bytes per row that `prepare_rows` writes, without `sums`; 0 if x is read in place.
  int64_t (*prepared_row_bytes)(const interposer_product&);
  void (*prepare_rows)(const interposer_product&, void* data, int64_t row_bytes, int32_t* sums,
                       int64_t first, int64_t last);
  // Returns false if out of memory.
  bool (*multiply)(const interposer_product&, const Prepared&, int64_t first_block,
                   int64_t last_block, int64_t first_row, int64_t last_row);
};
