#include "levels.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)

// Level that a processor can lack although it has a higher one.
constexpr int32_t kBeside = kAVX2VNNI;

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

// Leaf 7 of CPUID by subleaf; zeros if the subleaf does not exist.
Registers extended_features(unsigned subleaf) {
  Registers found, first;
  if (!__get_cpuid_count(7, 0, &first.a, &first.b, &first.c, &first.d)) return {};
  if (subleaf > first.a) return {};  // number of the highest subleaf
  __get_cpuid_count(7, subleaf, &found.a, &found.b, &found.c, &found.d);
  return found;
}

bool has_avx_vnni() { return extended_features(1).a >> 4 & 1; }

#if defined(INTERPOSER_EMULATED_TILES)

bool has_tiles() { return true; }

#elif defined(__linux__)

// Linux enables the AMX registers for a process on request. It refuses if a signal stack is too
// small to save them, or if Linux is older than 5.16. Source:
// https://docs.kernel.org/arch/x86/xstate.html
bool has_tiles() {
  constexpr unsigned kBF16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAllOfThem = kBF16 | kTile | kInt8;
  constexpr unsigned kShapesAndData = 3u << 17;  // state components that the system saves
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if ((extended_features(0).d & kAllOfThem) != kAllOfThem) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kShapesAndData) != kShapesAndData) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool has_tiles() { return false; }

#endif

// The compiler's runtime also checks XGETBV: registers that the system does not save are not
// reported.
bool has(int32_t level) {
  __builtin_cpu_init();
  switch (level) {
    case kAVX2VNNI:
      return has_avx_vnni();
    case kAMX:
      return has_tiles();
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

constexpr int32_t kBeside = kNoLevel;

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

constexpr int32_t kBeside = kNoLevel;

// Facility numbers: 129 vectors, 135 vector enhancements 1, 148 vector enhancements 2. Some
// emulators omit the last one from the auxiliary vector.
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

constexpr int32_t kBeside = kNoLevel;

bool has(int32_t) { return false; }

#endif

#define INTERPOSER_NUMBER(unused, name, level) level,

// Levels in this build, ascending, with an end marker.
constexpr int32_t kAll[] = {INTERPOSER_LEVELS(INTERPOSER_NUMBER, ) kNoLevel};
constexpr int kCount = sizeof kAll / sizeof kAll[0] - 1;

struct Found {
  int32_t levels[kCount + 1] = {};
  int count = 0;

  Found() {
    for (int i = 0; i < kCount; ++i) {
      if (has(kAll[i])) {
        levels[count++] = kAll[i];
      } else if (kAll[i] != kBeside) {
        break;
      }
    }
  }

  int32_t best() const { return count ? levels[count - 1] : int32_t(kNoLevel); }
};

const Found& found() {
  static const Found once;
  return once;
}

std::atomic<int32_t> forced{kNoLevel};

bool is_of_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

std::atomic<int32_t> past_caches{-1};

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

bool interposer_reads_past_caches() {
  static const bool of_amd = is_of_amd();
  const int32_t whether = past_caches.load(std::memory_order_relaxed);
  return whether < 0 ? of_amd : whether != 0;
}

void interposer_force_reads_past_caches(int32_t whether) { past_caches = whether; }
}
