// Kernels of independent rows, compiled once per level with the level's flags.

#include <cmath>
#include <cstring>

#include "../vectors.h"
#include "elementwise.h"
#include "functions.h"

namespace {

template <int32_t type>
INTERPOSER_INLINE const char* element(const void* from, int64_t index) {
  return static_cast<const char*>(from) + index * size_of(type);
}

template <int32_t type>
INTERPOSER_INLINE char* element(void* to, int64_t index) {
  return static_cast<char*>(to) + index * size_of(type);
}

INTERPOSER_INLINE int64_t start_of(const interposer_rows_of& rows, int64_t row) {
  // A division takes as long as sixteen numbers.
  if (rows.inner == 1) return row * rows.outer_stride;
  return row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
}

// Call `take(index, count)` for every sixteen elements of a row; the last count can be smaller.
template <class F>
INTERPOSER_INLINE void in_vectors(int64_t width, const F& take) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) take(i, kLanes);
  if (i < width) take(i, int(width - i));
}

// Sum `term(index, count)` in four independent chains.
template <class F>
INTERPOSER_INLINE float summed(int64_t width, const F& term) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int chain = 0; chain < 4; ++chain) sums[chain] += term(i + chain * kLanes, kLanes);
  }
  for (; i + kLanes <= width; i += kLanes) sums[0] += term(i, kLanes);
  if (i < width) sums[1] += term(i, int(width - i));
  const Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return sum_of_lanes(sum);
}

// Rows of one type; the residual has the type `kAdding`, kNone without a residual.
template <int32_t kType, int32_t kAdding>
void normalise_rows(const interposer_norm& norm, int64_t first, int64_t last) {
  const int64_t width = norm.rows.width;
  for (int64_t row = first; row < last; ++row) {
    const char* x = element<kType>(norm.x, start_of(norm.rows, row));
    char* out = element<kType>(norm.out, row * width);
    [[maybe_unused]] const char* residual = nullptr;
    [[maybe_unused]] char* total = nullptr;
    if constexpr (kAdding != kNone) {
      residual = element<kAdding>(norm.residual, row * width);
      total = element<kAdding>(norm.total, row * width);
      in_vectors(width, [&](int64_t i, int count) {
        const Floats sum = load_some(element<kType>(x, i), kType, count) +
                           load_some(element<kAdding>(residual, i), kAdding, count);
        store_some(element<kAdding>(total, i), sum, kAdding, count);
      });
    }
    const auto value = [&](int64_t i, int count) INTERPOSER_LAMBDA {
      if constexpr (kAdding != kNone) {
        return load_some(element<kAdding>(total, i), kAdding, count);
      } else {
        return load_some(element<kType>(x, i), kType, count);
      }
    };
    float mean = 0;
    if (norm.centred) mean = summed(width, value) / float(width);
    const float squares = summed(width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
      Floats apart = value(i, count);
      if (norm.centred) {
        apart -= mean;
        // Lanes after the end of the row are not elements.
        for (int lane = count; lane < kLanes; ++lane) apart[lane] = 0;
      }
      return apart * apart;
    });
    const float scale = 1.0f / std::sqrt(squares / float(width) + norm.eps);
    in_vectors(width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
      Floats result = (value(i, count) - mean) * scale;
      if (norm.weight) {
        result *= load_some(element<kType>(norm.weight, i), kType, count) + norm.shift;
      }
      if (norm.bias) result += load_some(element<kType>(norm.bias, i), kType, count);
      store_some(element<kType>(out, i), result, kType, count);
    });
  }
}

template <int32_t kType>
void normalise_type(const interposer_norm& norm, int64_t first, int64_t last) {
  if (norm.residual == nullptr) return normalise_rows<kType, kNone>(norm, first, last);
  if (norm.residual_type == kType) return normalise_rows<kType, kType>(norm, first, last);
  return normalise_rows<kType, kFloat32>(norm, first, last);
}

void normalise(const interposer_norm& norm, int64_t first, int64_t last) {
  if (norm.type == kFloat32) return normalise_type<kFloat32>(norm, first, last);
  if (norm.type == kBFloat16) return normalise_type<kBFloat16>(norm, first, last);
  return normalise_type<kFloat16>(norm, first, last);
}

template <int32_t kType, int32_t kOut, Floats activate(Floats)>
void gate_rows(const interposer_gated& gated, int64_t first, int64_t last) {
  const int64_t width = gated.rows.width;
  for (int64_t row = first; row < last; ++row) {
    const int64_t start = start_of(gated.rows, row);
    const char* gate = element<kType>(gated.gate, start);
    const char* up = gated.up ? element<kType>(gated.up, start) : nullptr;
    char* out = element<kOut>(gated.out, row * width);
    in_vectors(width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
      Floats result = activate(load_some(element<kType>(gate, i), kType, count));
      if (up) result *= load_some(element<kType>(up, i), kType, count);
      store_some(element<kOut>(out, i), result, kOut, count);
    });
  }
}

INTERPOSER_INLINE Floats silu(Floats x) { return sigmoid_weighted(x, x); }

INTERPOSER_INLINE Floats quick_gelu(Floats x) { return sigmoid_weighted(x, 1.702f * x); }

template <int32_t kType, int32_t kOut>
void gate_type(const interposer_gated& gated, int64_t first, int64_t last) {
  switch (gated.activation) {
    case kSilu:
      return gate_rows<kType, kOut, silu>(gated, first, last);
    case kGelu:
      return gate_rows<kType, kOut, gelu>(gated, first, last);
    case kQuickGelu:
      return gate_rows<kType, kOut, quick_gelu>(gated, first, last);
    default:
      return gate_rows<kType, kOut, gelu_tanh>(gated, first, last);
  }
}

void gate(const interposer_gated& gated, int64_t first, int64_t last) {
  if (gated.type == kFloat32) {
    if (gated.out_type == kFloat32) return gate_type<kFloat32, kFloat32>(gated, first, last);
    if (gated.out_type == kBFloat16) return gate_type<kFloat32, kBFloat16>(gated, first, last);
    return gate_type<kFloat32, kFloat16>(gated, first, last);
  }
  if (gated.type == kBFloat16) return gate_type<kBFloat16, kBFloat16>(gated, first, last);
  return gate_type<kFloat16, kFloat16>(gated, first, last);
}

// Cosines or sines of pairs, repeated for both neighbours, with the sign for each.
INTERPOSER_INLINE Floats for_neighbours(const float* halves, float even, float odd) {
  Floats result;
  for (int lane = 0; lane < kLanes; lane += 2) {
    result[lane] = even * halves[lane / 2];
    result[lane + 1] = odd * halves[lane / 2];
  }
  return result;
}

INTERPOSER_INLINE Floats exchanged(Floats pairs) {
  Floats result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = pairs[lane ^ 1];
  return result;
}

template <int32_t kType>
void turn_type(const interposer_heads& heads, int64_t first, int64_t last) {
  const int64_t width = heads.rows.width, half = heads.cos ? heads.half : 0;
  for (int64_t row = first; row < last; ++row) {
    const float* cos = heads.cos + (heads.cos ? row * half : 0);
    const float* sin = heads.sin + (heads.cos ? row * half : 0);
    for (int64_t head = 0; head < heads.rows.inner; ++head) {
      const char* x = element<kType>(
          heads.x, row * heads.rows.outer_stride + head * heads.rows.inner_stride);
      char* out = element<kType>(heads.out, row * heads.out_stride + head * width);
      float scale = 1;
      if (heads.weight) {
        const float squares = summed(width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
          const Floats value = load_some(element<kType>(x, i), kType, count);
          return value * value;
        });
        scale = 1.0f / std::sqrt(squares / float(width) + heads.eps);
      }
      const auto value = [&](int64_t i, int count) INTERPOSER_LAMBDA {
        const Floats plain = load_some(element<kType>(x, i), kType, count);
        if (heads.weight == nullptr) return plain;
        return plain * scale * load_some(element<kType>(heads.weight, i), kType, count);
      };
      if (heads.neighbours) {
        in_vectors(2 * half, [&](int64_t i, int count) INTERPOSER_LAMBDA {
          const Floats pairs = value(i, count);
          float c[kLanes] = {}, s[kLanes] = {};
          std::memcpy(c, cos + i / 2, size_t(count / 2) * sizeof *c);
          std::memcpy(s, sin + i / 2, size_t(count / 2) * sizeof *s);
          const Floats turned = pairs * for_neighbours(c, 1, 1) +
                                exchanged(pairs) * for_neighbours(s, -1, 1);
          store_some(element<kType>(out, i), turned, kType, count);
        });
      }
      in_vectors(heads.neighbours ? 0 : half, [&](int64_t i, int count) INTERPOSER_LAMBDA {
        const Floats a = value(i, count), b = value(half + i, count);
        const Floats c = load_some(cos + i, kFloat32, count);
        const Floats s = load_some(sin + i, kFloat32, count);
        store_some(element<kType>(out, i), a * c - b * s, kType, count);
        store_some(element<kType>(out, half + i), b * c + a * s, kType, count);
      });
      in_vectors(width - 2 * half, [&](int64_t i, int count) INTERPOSER_LAMBDA {
        store_some(element<kType>(out, 2 * half + i), value(2 * half + i, count), kType, count);
      });
    }
  }
}

void turn_heads(const interposer_heads& heads, int64_t first, int64_t last) {
  if (heads.type == kFloat32) return turn_type<kFloat32>(heads, first, last);
  if (heads.type == kBFloat16) return turn_type<kBFloat16>(heads, first, last);
  return turn_type<kFloat16>(heads, first, last);
}

constexpr float largest_code(int32_t type) { return type == kInt8 ? 127.0f : 448.0f; }

// Round to integers; numbers are small enough for the addition.
INTERPOSER_INLINE Ints rounded(Floats x) { return (Ints)(x + kRound) - 0x4b400000; }

// x / scale, correctly rounded, faster than a division: with `inverse` = 1 / scale rounded, the
// first correction leaves less than a unit in the last place, the second none (Markstein's theorem;
// the corrections use FMA, and tiny quotients, which may be inexact, round to 0 anyway).
INTERPOSER_INLINE Floats divided(Floats x, float scale, float inverse) {
  Floats quotient = x * inverse;
  quotient = quotient + (x - quotient * scale) * inverse;
  return quotient + (x - quotient * scale) * inverse;
}

template <int32_t kCode>
INTERPOSER_INLINE void store_codes(char* to, Floats quotient, int count) {
  if constexpr (kCode == kInt8) {
    // With a subnormal scale, a quotient can exceed 127. 128 is not a valid value.
    const Ints whole = rounded(limited(quotient, 128.0f));
    const Ints excess = (whole >> 7) & ~(whole >> 31);
    const Bytes sixteen = converted<Bytes>(whole - excess);
    std::memcpy(to, &sixteen, size_t(count));
  } else {
    const Floats nearest = nearest_e4m3(limited(quotient, largest_code(kCode)));
    if constexpr (kCode == kE4M3) {
      const Bytes sixteen = converted<Bytes>(codes_of_e4m3(nearest));
      std::memcpy(to, &sixteen, size_t(count));
    } else {
      const Halves sixteen = converted<Halves>((Words)nearest >> 16);
      std::memcpy(to, &sixteen, size_t(count) * 2);
    }
  }
}

// Scale that maps the largest magnitude of a row to the largest quantized value.
template <int32_t kType, int32_t kCode>
INTERPOSER_INLINE float fitting_scale(const interposer_coded& coded, const char* x) {
  Floats peaks = {};  // compared as integers, so that NaN is larger than all others
  in_vectors(coded.rows.width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
    const Floats value = magnitude(load_some(element<kType>(x, i), kType, count));
    peaks = chosen((Ints)value > (Ints)peaks, value, peaks);
  });
  const float peak = largest_of(peaks);
  if (coded.powers == kSharedExponents) {
    int exponent, largest;
    __builtin_frexpf(largest_code(kCode), &largest);
    __builtin_frexpf(peak, &exponent);
    exponent -= largest;
    if (!(peak > 0) || exponent < -127) exponent = -127;
    return __builtin_ldexpf(1.0f, exponent < 127 ? exponent : 127);
  }
  float scale = peak > 0 ? peak / largest_code(kCode) : 1.0f;
  if (coded.powers) {
    int exponent;
    const float fraction = __builtin_frexpf(scale, &exponent);  // 0.5 for a power of two
    scale = __builtin_ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
  }
  return coded.limit > 0 && scale > coded.limit ? coded.limit : scale;
}

template <int32_t kType, int32_t kCode>
void code_rows(const interposer_coded& coded, int64_t first, int64_t last) {
  const int64_t width = coded.rows.width;
  for (int64_t row = first; row < last; ++row) {
    const char* x = element<kType>(coded.x, start_of(coded.rows, row));
    char* codes = element<kCode>(coded.codes, row * width);
    float scale;
    if (coded.given) {
      scale = *coded.given;
    } else {
      scale = coded.scales[row] = fitting_scale<kType, kCode>(coded, x);
    }
    // Conditions under which no step of `divided` overflows or underflows, and no quotient exceeds
    // 127. A zero can lose its sign, which integers do not have.
    const bool fits = kCode == kInt8 && !coded.given && scale != coded.limit;
    if (fits && scale >= 0x1p-100f && scale <= 0x1p100f) {
      const float inverse = 1.0f / scale;
      in_vectors(width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
        const Floats value = load_some(element<kType>(x, i), kType, count);
        const Ints whole = rounded(divided(value, scale, inverse));
        const Bytes sixteen = converted<Bytes>(whole);
        std::memcpy(codes + i, &sixteen, size_t(count));
      });
      continue;
    }
    in_vectors(width, [&](int64_t i, int count) INTERPOSER_LAMBDA {
      const Floats quotient = load_some(element<kType>(x, i), kType, count) / scale;
      store_codes<kCode>(codes + i * size_of(kCode), quotient, count);
    });
  }
}

template <int32_t kType>
void code_type(const interposer_coded& coded, int64_t first, int64_t last) {
  if (coded.code_type == kInt8) return code_rows<kType, kInt8>(coded, first, last);
  if (coded.code_type == kE4M3) return code_rows<kType, kE4M3>(coded, first, last);
  return code_rows<kType, kBFloat16>(coded, first, last);
}

void code(const interposer_coded& coded, int64_t first, int64_t last) {
  if (coded.type == kFloat32) return code_type<kFloat32>(coded, first, last);
  if (coded.type == kBFloat16) return code_type<kBFloat16>(coded, first, last);
  return code_type<kFloat16>(coded, first, last);
}

}  // namespace

extern "C" const ElementwiseKernels INTERPOSER_OF_LEVEL(interposer_elementwise);
extern "C" const ElementwiseKernels INTERPOSER_OF_LEVEL(interposer_elementwise) = {
    normalise, gate, turn_heads, code};
