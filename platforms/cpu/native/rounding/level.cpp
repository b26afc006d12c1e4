// Quantization of weight groups, compiled once per level with the level's flags.

#include <limits>

#include "../elementwise/functions.h"
#include "../pool.h"
#include "../vectors.h"
#include "rounding.h"

namespace {

// Vectors of register size: compilers compare larger vectors number by number.
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <class N, int kBytes>
struct Vector {
  typedef N Type __attribute__((vector_size(kBytes)));
};

template <class V>
INTERPOSER_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

template <class V>
INTERPOSER_INLINE V smaller(V a, V b) {
  return a < b ? a : b;
}

// Largest lane.
template <class N, int kBytes>
INTERPOSER_INLINE N largest(typename Vector<N, kBytes>::Type lanes) {
  if constexpr (kBytes > 16) {
    typedef typename Vector<N, kBytes / 2>::Type Half;
    Half halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    return largest<N, kBytes / 2>(larger(halves[0], halves[1]));
  } else {
    typedef typename Vector<N, 16>::Type Lanes;
#if defined(__AVX2__)
    if constexpr (sizeof(N) == 2) {  // one instruction finds the minimum of eight; none is negative
      const __m128i least = _mm_minpos_epu16((__m128i)~lanes);
      return N(~_mm_cvtsi128_si32(least));
    }
#endif
    constexpr int kCount = 16 / int(sizeof(N));
    for (int distance = kCount / 2; distance; distance /= 2) {
      Lanes places;
      for (int i = 0; i < kCount; ++i) places[i] = N(i ^ distance);
      lanes = larger(lanes, Lanes(__builtin_shuffle(lanes, places)));
    }
    return lanes[0];
  }
}

// Magnitudes of the lowest and the highest of some numbers, per lane; 0 if that end is on the other
// side of 0. Magnitudes are compared as bits of the number type, which have the same order;
// infinities and NaN come last.
template <class N>
struct Ends {
  typename Vector<N, kRegister>::Type low, high;
};

template <class N>
INTERPOSER_INLINE Ends<N> ends_of(const char* x, int64_t count) {
  typedef typename Vector<N, kRegister>::Type Lanes;
  constexpr int64_t kCount = kRegister / int(sizeof(N));
  constexpr N kSign = std::numeric_limits<N>::min();
  Lanes low = {}, high = {};
  int64_t i = 0;
  for (; i + kCount <= count; i += kCount) {
    const Lanes bits = load<Lanes>(x + i * int64_t(sizeof(N)));
    high = larger(high, bits);
    low = larger(low, Lanes(bits ^ kSign));
  }
  if (i < count) {
    alignas(kRegister) char some[kRegister] = {};
    std::memcpy(some, x + i * int64_t(sizeof(N)), size_t(count - i) * sizeof(N));
    const Lanes bits = load<Lanes>(some);  // zeros change neither extreme
    high = larger(high, bits);
    low = larger(low, Lanes(bits ^ kSign));
  }
  return {low, high};
}

template <int32_t kType>
INTERPOSER_INLINE float number_of(int32_t bits) {
  if constexpr (kType == kFloat32) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  } else if constexpr (kType == kBFloat16) {
    return float_of_bfloat16(uint16_t(bits));
  } else {
    Halves halves = {};
    halves[0] = uint16_t(bits);
    return floats_of_float16(halves)[0];
  }
}

// Round a scale to its stored type. A scale that is too small for the type must not turn nonzero
// numbers into zeros.
INTERPOSER_INLINE float stored(float scale, int32_t type) {
  if (scale == 0) return 1;
  if (type == kBFloat16) {
    return float_of_bfloat16(bfloat16_of_float(scale < 0x1p-133f ? 0x1p-133f : scale));
  }
  if (type == kFloat16) {
    return floats_of_float16(float16_of_floats(splat(scale < 0x1p-24f ? 0x1p-24f : scale)))[0];
  }
  return scale;
}

typedef Vector<float, kRegister>::Type Numbers;
typedef Vector<int32_t, kRegister>::Type Integers;
constexpr int kWidth = kRegister / 4;

INTERPOSER_INLINE Numbers between(Numbers x, float least, float most) {
  return smaller(larger(x, Numbers{} + least), Numbers{} + most);
}

template <int32_t kType>
INTERPOSER_INLINE Numbers load_numbers(const char* from) {
  if constexpr (kType == kFloat32) return load<Numbers>(from);
#if defined(__AVX512F__)
  return load_floats(from, kType);
#elif defined(__AVX2__)
  const __m128i halves = load<__m128i>(from);
  if constexpr (kType == kFloat16) return (Numbers)_mm256_cvtph_ps(halves);
  return (Numbers)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  typedef Vector<uint16_t, 2 * kWidth>::Type Narrow;
  typedef Vector<uint32_t, kRegister>::Type Wide;
  const Narrow halves = load<Narrow>(from);
#if defined(__aarch64__)
  if constexpr (kType == kFloat16) return vcvt_f32_f16((float16x4_t)halves);
#endif
  const Wide wide = __builtin_convertvector(halves, Wide);
  if constexpr (kType == kBFloat16) return (Numbers)(wide << 16);
  // As in `floats_of_float16`.
  const Wide magnitude = (wide & 0x7fff) << 13;
  const Wide special = (Wide)((wide & 0x7fff) > 0x7bff);
  const Wide scaled = (Wide)((Numbers)magnitude * 0x1p112f);
  const Wide bits = (scaled & ~special) | ((magnitude | 0x7f800000) & special);
  return (Numbers)(bits | (wide & 0x8000) << 16);
#endif
}

// Write the lowest bytes of some lanes; the values fit in a byte.
INTERPOSER_INLINE void store_bytes(uint8_t* to, Integers codes, int count) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)codes);
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)codes);
  const __m128i pairs = _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)codes, 1));
  const __m128i bytes = _mm_packs_epi16(pairs, pairs);
#else
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  const Bytes order = {3, 7, 11, 15, 3, 7, 11, 15, 3, 7, 11, 15, 3, 7, 11, 15};
#else
  const Bytes order = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
#endif
  const Bytes bytes = __builtin_shuffle((Bytes)codes, order);
#endif
  std::memcpy(to, &bytes, count == kWidth ? size_t(kWidth) : size_t(count));
}

struct Grid {
  float scale, zero;  // the zero is signed
  float least, most;  // range of signed quantized values
  int32_t raised;     // offset of stored values
};

template <bool kAsymmetric>
INTERPOSER_INLINE Integers codes_of(Numbers x, const Grid& grid) {
  Numbers quotient = x / grid.scale;
  if constexpr (kAsymmetric) quotient += grid.zero;
  const Numbers shifted = between(quotient, grid.least, grid.most) + kRound;
  return (Integers)shifted - 0x4b400000 + grid.raised;
}

template <int32_t kType, bool kAsymmetric>
INTERPOSER_INLINE void code_group(const char* x, int64_t count, const Grid& grid, uint8_t* codes) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Numbers some = load_numbers<kType>(x + i * size_of(kType));
    store_bytes(codes + i, codes_of<kAsymmetric>(some, grid), kWidth);
  }
  if (i < count) {
    alignas(kRegister) char rest[kRegister] = {};
    std::memcpy(rest, x + i * size_of(kType), size_t(count - i) * size_of(kType));
    const Numbers some = load_numbers<kType>(rest);
    store_bytes(codes + i, codes_of<kAsymmetric>(some, grid), int(count - i));
  }
}

// Pack two 4-bit values per byte, the first in the low half.
INTERPOSER_INLINE void write_pairs(const uint8_t* codes, int64_t count, uint8_t* pairs) {
  typedef Vector<uint16_t, kRegister>::Type Both;
  int64_t i = 0;
  for (; i + kRegister <= count; i += kRegister) {
    const Both both = load<Both>(codes + i);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    const Both joined = (both >> 8 | both << 4) & 255;
#else
    const Both joined = (both | both >> 4) & 255;
#endif
#if defined(__AVX512BW__)
    store(pairs + i / 2, _mm512_cvtepi16_epi8((__m512i)joined));
#elif defined(__AVX2__)
    const __m128i low = _mm256_castsi256_si128((__m256i)joined);
    const __m128i high = _mm256_extracti128_si256((__m256i)joined, 1);
    store(pairs + i / 2, _mm_packus_epi16(low, high));
#else
    typedef Vector<uint8_t, kRegister / 2>::Type Narrow;
    store(pairs + i / 2, __builtin_convertvector(joined, Narrow));
#endif
  }
  for (; i < count; i += 2) pairs[i / 2] = uint8_t(codes[i] | codes[i + 1] << 4);
}

template <int32_t kType, class N>
bool round_type(const interposer_rounded& rounded, int64_t first, int64_t last) {
  const int64_t inputs = rounded.inputs, group = rounded.group, groups = inputs / group;
  const float steps = float((1 << rounded.bits) - 1), middle = float(1 << (rounded.bits - 1));
  const bool paired = rounded.bits == 4;
  uint8_t* row_codes = nullptr;
  if (paired) {
    row_codes = static_cast<uint8_t*>(interposer_scratch(kForCodes, inputs));
    if (row_codes == nullptr) return false;
  }
  Grid grid = {1, 0, -middle, middle - 1, paired ? int32_t(middle) : 0};
  for (int64_t output = first; output < last; ++output) {
    const char* x = static_cast<const char*>(rounded.weight) +
                    output * rounded.stride * int64_t(sizeof(N));
    uint8_t* codes = static_cast<uint8_t*>(rounded.codes);
    uint8_t* own = paired ? row_codes : codes + output * inputs;
    for (int64_t index = 0; index < groups; ++index) {
      const char* numbers = x + index * group * int64_t(sizeof(N));
      const Ends<N> ends = ends_of<N>(numbers, group);
      const int64_t place = output * groups + index;
      if (rounded.zeros) {
        const float low = -number_of<kType>(largest<N, kRegister>(ends.low));
        const float high = number_of<kType>(largest<N, kRegister>(ends.high));
        grid.scale = stored((high - low) / steps, rounded.scale_type);
        const float zero = smaller(larger(-middle - low / grid.scale, grid.least), grid.most);
        grid.zero = zero + kRound - kRound;
        rounded.zeros[place] = uint8_t(int32_t(grid.zero) + grid.raised);
        code_group<kType, true>(numbers, group, grid, own + index * group);
      } else {
        const float peak = number_of<kType>(largest<N, kRegister>(larger(ends.low, ends.high)));
        grid.scale = stored(peak * 2 / steps, rounded.scale_type);
        code_group<kType, false>(numbers, group, grid, own + index * group);
      }
      rounded.scales[place] = grid.scale;
    }
    if (paired) write_pairs(row_codes, inputs, codes + output * (inputs / 2));
  }
  return true;
}

bool round_outputs(const interposer_rounded& rounded, int64_t first, int64_t last) {
  if (rounded.type == kFloat32) return round_type<kFloat32, int32_t>(rounded, first, last);
  if (rounded.type == kBFloat16) return round_type<kBFloat16, int16_t>(rounded, first, last);
  return round_type<kFloat16, int16_t>(rounded, first, last);
}

}  // namespace

extern "C" const RoundingKernels INTERPOSER_OF_LEVEL(interposer_rounding);
extern "C" const RoundingKernels INTERPOSER_OF_LEVEL(interposer_rounding) = {round_outputs};
