// Sums over ranks, compiled once per level with the level's flags.

#include "../vectors.h"
#include "communicator.h"

namespace {

// 16-bit and 32-bit floats are summed in float32; other types are summed as they are.
template <int32_t kType>
struct Rounded {
  typedef Floats Lanes;
  static constexpr int kCount = kLanes;
  static INTERPOSER_INLINE Floats read(const char* from) { return load_floats(from, kType); }
  static INTERPOSER_INLINE void write(char* to, Floats sum) { store_floats(to, sum, kType); }
};

template <class N>
struct Exact {
  typedef N Lanes __attribute__((vector_size(64)));
  static constexpr int kCount = 64 / int(sizeof(N));
  static INTERPOSER_INLINE Lanes read(const char* from) { return load<Lanes>(from); }
  static INTERPOSER_INLINE void write(char* to, Lanes sum) { store(to, sum); }
};

// Four vectors from `offset` on, to reduce the overhead of the loop over parts.
template <class Numbers, int kVectors>
INTERPOSER_INLINE void sum_some(const void* const* parts, int count, char* out, char* copy,
                                int64_t offset, int64_t bytes) {
  typename Numbers::Lanes sums[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    sums[i] = Numbers::read(static_cast<const char*>(parts[0]) + offset + i * bytes);
  }
  for (int part = 1; part < count; ++part) {
    const char* from = static_cast<const char*>(parts[part]) + offset;
    for (int i = 0; i < kVectors; ++i) sums[i] += Numbers::read(from + i * bytes);
  }
  for (int i = 0; i < kVectors; ++i) Numbers::write(out + offset + i * bytes, sums[i]);
  if (copy == nullptr) return;
  for (int i = 0; i < kVectors; ++i) Numbers::write(copy + offset + i * bytes, sums[i]);
}

template <class Numbers>
void sum_rows(const void* const* parts, int count, void* out, void* copy, int64_t elements,
              int element_bytes) {
  constexpr int kVectors = 4;
  char* to = static_cast<char*>(out);
  char* second = static_cast<char*>(copy);
  const int64_t bytes = int64_t(Numbers::kCount) * element_bytes, all = elements * element_bytes;
  int64_t offset = 0;
  for (; offset + kVectors * bytes <= all; offset += kVectors * bytes) {
    sum_some<Numbers, kVectors>(parts, count, to, second, offset, bytes);
  }
  for (; offset + bytes <= all; offset += bytes) {
    sum_some<Numbers, 1>(parts, count, to, second, offset, bytes);
  }
  if (offset == all) return;
  const size_t rest = size_t(all - offset);
  alignas(64) char some[64] = {};
  typename Numbers::Lanes sum = {};
  for (int part = 0; part < count; ++part) {
    std::memcpy(some, static_cast<const char*>(parts[part]) + offset, rest);
    // Start with the first part, not with zero, so that the sum of negative zeros stays negative.
    sum = part ? sum + Numbers::read(some) : Numbers::read(some);
  }
  Numbers::write(some, sum);
  std::memcpy(to + offset, some, rest);
  if (second) std::memcpy(second + offset, some, rest);
}

void sum(int32_t type, const void* const* parts, int count, void* out, void* copy,
         int64_t elements) {
  switch (type) {
    case kSumFloat32:
      return sum_rows<Exact<float>>(parts, count, out, copy, elements, 4);
    case kSumBFloat16:
      return sum_rows<Rounded<kBFloat16>>(parts, count, out, copy, elements, 2);
    case kSumFloat16:
      return sum_rows<Rounded<kFloat16>>(parts, count, out, copy, elements, 2);
    case kSumFloat64:
      return sum_rows<Exact<double>>(parts, count, out, copy, elements, 8);
    case kSumInt32:
      return sum_rows<Exact<uint32_t>>(parts, count, out, copy, elements, 4);
    default:
      return sum_rows<Exact<uint64_t>>(parts, count, out, copy, elements, 8);
  }
}

}  // namespace

extern "C" const CommunicatorKernels INTERPOSER_OF_LEVEL(interposer_communicator);
extern "C" const CommunicatorKernels INTERPOSER_OF_LEVEL(interposer_communicator) = {sum};
