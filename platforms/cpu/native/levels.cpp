#include "levels.h"

#include <atomic>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)

constexpr int32_t kAll[] = {kAVX2, kAVX512, kAVX512VNNI, kAVX512BF16};

// The compiler's runtime asks XGETBV besides, so what the system does not save is not reported.
bool has(int32_t level) {
  __builtin_cpu_init();
  switch (level) {
    case kAVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    case kAVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512cd");
    case kAVX512VNNI:
      return __builtin_cpu_supports("avx512vnni");
    default:
      return __builtin_cpu_supports("avx512bf16");
  }
}

#elif defined(__aarch64__)

constexpr int32_t kAll[] = {kNEON, kDotProd, kBF16I8MM};

bool has(int32_t level) {
#if defined(__linux__)
  constexpr unsigned long kHwcapDotProd = 1ul << 20, kHwcap2I8MM = 1ul << 13,
                          kHwcap2BF16 = 1ul << 14;
  unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if (level == kDotProd) return first & kHwcapDotProd;
  if (level == kBF16I8MM) return (second & kHwcap2I8MM) && (second & kHwcap2BF16);
#else
  if (level != kNEON) return false;
#endif
  return true;
}

#elif defined(__s390x__)

constexpr int32_t kAll[] = {kZ14, kZ15};

// Facilities are asked for by number: 129 vectors, 135 enhancements 1, 148 enhancements 2. The
// auxiliary vector of some emulators leaves the last one out.
bool has(int32_t level) {
  unsigned long facilities[4] = {};
  register unsigned long count asm("0") = 3;
  asm volatile("stfle %0" : "=Q"(facilities), "+d"(count) : : "cc", "memory");
  auto bit = [&](int number) {
    return facilities[number / 64] >> (63 - number % 64) & 1;
  };
  return level == kZ14 ? bit(129) && bit(135) : bit(148);
}

#else

constexpr int32_t kAll[] = {kNoLevel};

bool has(int32_t) { return false; }

#endif

constexpr int kCount = sizeof kAll / sizeof kAll[0];

struct Found {
  int32_t levels[kCount + 1] = {};
  int count = 0;

  Found() {
    for (int32_t level : kAll) {
      if (!has(level)) break;
      levels[count++] = level;
    }
  }

  int32_t best() const { return count ? levels[count - 1] : int32_t(kNoLevel); }
};

const Found& found() {
  static const Found once;
  return once;
}

std::atomic<int32_t> forced{kNoLevel};

}  // namespace

extern "C" {

int32_t interposer_best_level() { return found().best(); }

int32_t interposer_level() {
  int32_t level = forced.load(std::memory_order_relaxed);
  return level == kNoLevel ? found().best() : level;
}

int32_t interposer_force_level(int32_t level) {
  if (level == kNoLevel) {
    forced = kNoLevel;
    return 1;
  }
  for (int i = 0; i < found().count; ++i) {
    if (found().levels[i] == level) {
      forced = level;
      return 1;
    }
  }
  return 0;
}

const int32_t* interposer_levels() { return found().levels; }
}
