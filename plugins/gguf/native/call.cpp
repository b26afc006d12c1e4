// The functions that are called from Python: they choose the level, share the rows among threads
// and convert inputs and results.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "level.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using interposer_gguf::kSumSize;
using interposer_gguf::Level;
using interposer_gguf::Product;

// What OpenMP calls a parallel region: the function, its argument, threads, flags.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// By number; the names stand in native.py.
const Level* const kLevels[] = {
    &interposer_gguf::portable::level,
#if defined(__x86_64__)
    &interposer_gguf::avx2::level,
    &interposer_gguf::avx512::level,
    &interposer_gguf::avx512_bf16::level,
#endif
};

enum Type { kFloat32, kBFloat16 };

struct Freed {
  void operator()(float* memory) const { std::free(memory); }
};
using Floats = std::unique_ptr<float, Freed>;

// One more than asked for, as no memory at all may be told by null too.
Floats floats(std::ptrdiff_t count) {
  const auto size = static_cast<std::size_t>(count + 1) * sizeof(float);
  return Floats(static_cast<float*>(std::malloc(size)));
}

float from_bfloat16(std::uint16_t stored) {
  const std::uint32_t bits = static_cast<std::uint32_t>(stored) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// To nearest, ties to even; what is no number stays so.
std::uint16_t to_bfloat16(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(number != number ? 0x7fc0u : rounded);
}

void widen(const void* from, std::ptrdiff_t count, float* to) {
  const auto* stored = static_cast<const std::uint16_t*>(from);
  for (std::ptrdiff_t i = 0; i < count; ++i) to[i] = from_bfloat16(stored[i]);
}

void add_groups(const float* x, std::ptrdiff_t count, float* sums) {
  for (std::ptrdiff_t i = 0; i < count; i += kSumSize) {
    float parts[8] = {};
    for (int k = 0; k < kSumSize; ++k) parts[k % 8] += x[i + k];
    float sum = 0.0f;
    for (float part : parts) sum += part;
    sums[i / kSumSize] = sum;
  }
}

// Rows that threads take step by step, so that one that is late delays the others by a step.
struct Work {
  const Level* level;
  std::ptrdiff_t rows, step;
  std::atomic<std::ptrdiff_t> next;

  template <typename Function>
  void each_step(Function&& function) {
    for (;;) {
      const std::ptrdiff_t begin = next.fetch_add(step, std::memory_order_relaxed);
      if (begin >= rows) return;
      function(begin, std::min(begin + step, rows));
    }
  }
};

struct Multiplication : Work {
  Product product;
};

struct Dequantization : Work {
  int format;
  const std::uint8_t* weight;
  std::ptrdiff_t weight_stride, in_features;
  float* numbers;
};

void multiply(void* work) {
  auto& self = static_cast<Multiplication&>(*static_cast<Work*>(work));
  self.each_step([&](std::ptrdiff_t begin, std::ptrdiff_t end) {
    self.level->multiply(self.product, begin, end);
  });
}

void dequantize(void* work) {
  auto& self = static_cast<Dequantization&>(*static_cast<Work*>(work));
  self.each_step([&](std::ptrdiff_t begin, std::ptrdiff_t end) {
    for (std::ptrdiff_t row = begin; row < end; ++row) {
      self.level->dequantize(self.format, self.weight + row * self.weight_stride, self.in_features,
                             self.numbers + row * self.in_features);
    }
  });
}

// Numbers of a weight per thread below which waking another takes longer than it saves.
constexpr std::ptrdiff_t kLeast = 1 << 16;

void run(void (*function)(void*), Work& work, std::ptrdiff_t row_cost, Parallel parallel,
         int threads) {
  const std::ptrdiff_t worth = std::max<std::ptrdiff_t>(1, work.rows * row_cost / kLeast);
  const auto team = static_cast<unsigned>(std::min<std::ptrdiff_t>(threads, worth));
  work.next.store(0, std::memory_order_relaxed);
  // Even, as two rows are taken at once.
  work.step = std::max<std::ptrdiff_t>(2, work.rows / (16 * std::max(team, 1u)) / 2 * 2);
  if (parallel == nullptr || team < 2) {
    work.step = std::max<std::ptrdiff_t>(1, work.rows);
    return function(&work);
  }
  parallel(function, &work, team, 0);
}

}  // namespace

// The highest level that this processor and its operating system have.
EXPORT int interposer_gguf_highest_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))) {
    return 0;
  }
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
    return 1;
  }
  return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
  return 0;
#endif
}

// Writes x weight^T + bias to result [T, O]; returns 0, or 1 where memory is short.
EXPORT int interposer_gguf_linear(int level, int format, int type, const void* x,
                                  std::ptrdiff_t x_stride, std::ptrdiff_t tokens,
                                  const std::uint8_t* weight, std::ptrdiff_t weight_stride,
                                  std::ptrdiff_t out_features, std::ptrdiff_t in_features,
                                  const void* bias, void* result, Parallel parallel,
                                  int threads) {
  Multiplication work;
  Floats wide, sums, products;
  auto* inputs = static_cast<const float*>(x);
  auto* outputs = static_cast<float*>(result);
  if (type == kBFloat16) {
    wide = floats(tokens * in_features);
    products = floats(tokens * out_features);
    if (wide == nullptr || products == nullptr) return 1;
    for (std::ptrdiff_t token = 0; token < tokens; ++token) {
      widen(static_cast<const std::uint16_t*>(x) + token * x_stride, in_features,
            wide.get() + token * in_features);
    }
    inputs = wide.get();
    outputs = products.get();
    x_stride = in_features;
  }
  if (tokens == 1) {
    sums = floats(in_features / kSumSize);
    if (sums == nullptr) return 1;
    add_groups(inputs, in_features, sums.get());
  }
  work.level = kLevels[level];
  work.rows = out_features;
  work.product.format = format;
  work.product.x = inputs;
  work.product.x_stride = x_stride;
  work.product.short_x =
      type == kBFloat16 && tokens == 1 ? static_cast<const std::uint16_t*>(x) : nullptr;
  work.product.sums = sums.get();
  work.product.tokens = tokens;
  work.product.weight = weight;
  work.product.weight_stride = weight_stride;
  work.product.in_features = in_features;
  work.product.result = outputs;
  work.product.result_stride = out_features;
  run(multiply, work, in_features * tokens, parallel, threads);
  if (type == kFloat32) {
    auto* added = static_cast<const float*>(bias);
    for (std::ptrdiff_t token = 0; added != nullptr && token < tokens; ++token) {
      for (std::ptrdiff_t row = 0; row < out_features; ++row) {
        outputs[token * out_features + row] += added[row];
      }
    }
    return 0;
  }
  auto* rounded = static_cast<std::uint16_t*>(result);
  auto* added = static_cast<const std::uint16_t*>(bias);
  for (std::ptrdiff_t token = 0; token < tokens; ++token) {
    for (std::ptrdiff_t row = 0; row < out_features; ++row) {
      float number = outputs[token * out_features + row];
      if (added != nullptr) number += from_bfloat16(added[row]);
      rounded[token * out_features + row] = to_bfloat16(number);
    }
  }
  return 0;
}

// Writes the numbers [rows, I] of rows of blocks.
EXPORT void interposer_gguf_dequantize(int level, int format, const std::uint8_t* weight,
                                       std::ptrdiff_t weight_stride, std::ptrdiff_t rows,
                                       std::ptrdiff_t in_features, float* numbers,
                                       Parallel parallel, int threads) {
  Dequantization work;
  work.level = kLevels[level];
  work.rows = rows;
  work.format = format;
  work.weight = weight;
  work.weight_stride = weight_stride;
  work.in_features = in_features;
  work.numbers = numbers;
  run(dequantize, work, in_features, parallel, threads);
}
