// How a weight [O, I] lies in memory once it was packed, and what multiplies by it.
//
// Outputs are taken 64 at a time, a block. Step s of a block holds one 32-bit word for each of
// its outputs: 1, 2, 4 or 8 neighbouring inputs, by the format. So one row of words is what one
// vector instruction multiplies by the same few inputs, for sixteen outputs at once, and a block
// is read from its beginning to its end. Words are numbers, not bytes: they are written in the
// order of the machine that reads them.
#pragma once

#include <cstdint>

constexpr int kBlock = 64;

enum Format : int32_t {
  kWeightFloat32 = 0,   // one number
  kWeightBFloat16 = 1,  // two, the first in the low half
  kWeightInt8 = 2,      // four codes from 0 to 255, the first in the lowest byte
  kWeightInt4 = 3,      // eight codes from 0 to 15 in the order 0 2 4 6 1 3 5 7, from the lowest
  kWeightE2M1 = 4,      // eight codes of four bits in the same order
  kWeightE4M3 = 5,      // four codes of eight bits, the first in the lowest byte
};

extern "C" {

// Begins the memory of a packed weight. Offsets are bytes from here, multiples of 64; 0 is none.
struct interposer_packed {
  uint32_t magic;
  int32_t format;
  int32_t scale_type;  // of Type; kE8M0 for exponents
  int32_t unused;
  int64_t outputs, inputs;
  int64_t group;      // inputs per scale; of the whole row where it is `inputs`
  int64_t words_at;   // [blocks][steps][64] uint32
  int64_t scales_at;  // [blocks][groups][64]
  int64_t zeros_at;   // [blocks][groups][64] uint8, what is subtracted from codes
  int64_t bias_at;    // [blocks][64] float32
  int64_t bytes;      // of it all
  int64_t reserved[4];
};

// What is packed: rows without gaps, as checkpoints have them.
struct interposer_plain {
  int32_t format, scale_type;
  int64_t outputs, inputs, group;
  const void* weight;    // [O, I], or [O, I / 2] with the first of two codes in the low half
  const void* scales;    // [O, I / group], or null
  const uint8_t* zeros;  // [O, I / group], or null
  const float* bias;     // [O], or null
  int64_t scale_stride;  // elements from one output's scales to the next; 0 repeats them
};

// One product. Rows of `x` may lie apart.
struct interposer_product {
  const interposer_packed* weight;
  const void* x;
  int32_t x_type;
  int32_t out_type;
  int64_t rows, x_stride;         // elements
  // One per row, one for all where the stride is 0, or one per group of the weight where it is the
  // number of these; null for none.
  const float* x_scales;
  int64_t x_scale_stride;
  void* out;
  int64_t out_stride;             // elements
};

// Products of heads, out[h] = x[h] weights[h]^T. Rows and heads of `x` may lie apart.
struct interposer_batch {
  const interposer_packed* weights;  // one behind the other, all of one format and size
  const void* x;
  void* out;                         // [heads, rows, O] without gaps
  int32_t type;                      // of x and out
  int64_t heads, rows;
  int64_t head_stride, row_stride;   // elements
};

// One lookup. Floats come out as they are; codes less their zero point, times their scale, come out
// rounded once.
struct interposer_lookup {
  const interposer_packed* weight;
  const int64_t* rows;
  int64_t count;
  void* out;  // [count, I] without gaps
  int32_t out_type;
};

// Bytes that packing `plain` takes; 0 where it cannot be packed.
int64_t interposer_packed_bytes(const interposer_plain* plain);

// Pack into `memory`, which is aligned to 64 bytes.
void interposer_pack(const interposer_plain* plain, void* memory);

// Write x weight^T + bias. Returns 0, or what went wrong.
int32_t interposer_linear(const interposer_product* product);

// Write the products of all heads. Returns 0, or what went wrong.
int32_t interposer_multiply_batch(const interposer_batch* batch);

// Write the rows that are asked for, as an embedding looks them up. Returns 0, or what went wrong.
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
      return 2;
    case kWeightInt8:
    case kWeightE4M3:
      return 4;
    default:
      return 8;
  }
}

constexpr int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

inline int64_t num_blocks(int64_t outputs) { return round_up(outputs, kBlock) / kBlock; }

// Eight inputs make a whole number of words in every format.
inline int64_t padded_inputs(int64_t inputs) { return round_up(inputs, 8); }

template <class T>
const T* at(const interposer_packed* packed, int64_t offset) {
  return offset ? reinterpret_cast<const T*>(reinterpret_cast<const char*>(packed) + offset)
                : nullptr;
}

// What the rows of x become before they are multiplied, the same for all outputs.
struct Prepared {
  const void* data;   // of the form that the product wants
  int64_t stride;     // bytes
  // [rows][groups] of int8 codes, or null. Where a weight has no zero points, these are times minus
  // what its codes are raised by.
  const int32_t* sums;
  int64_t num_groups;
};

struct LinearKernels {
  // Bytes per row that `prepare_rows` writes, 0 where x is read as it is; `sums` apart.
  int64_t (*prepared_row_bytes)(const interposer_product&);
  void (*prepare_rows)(const interposer_product&, void* data, int64_t row_bytes, int32_t* sums,
                       int64_t first, int64_t last);
  // Returns false where there was no memory for it.
  bool (*multiply)(const interposer_product&, const Prepared&, int64_t first_block,
                   int64_t last_block, int64_t first_row, int64_t last_row);
};
