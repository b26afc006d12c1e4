// Runs every case of a file of golden vectors at every level that the processor has.
//
//   kernel_tests [--best LEVEL] [--threads N] [--only OP] FILE
//
// --best: the level that must be selected here, "none" if none may be. Prints one line per level
// and case. The status is 1 if a case failed, 2 if none could run.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "../levels.h"
#include "../pool.h"
#include "golden.h"

namespace {

struct Level {
  int32_t number;
  const char* name;
};

const Level kLevels[] = {
    {kNoLevel, "none"},
    {kAVX2, "avx2"},
    {kAVX2VNNI, "avx2_vnni"},
    {kAVX512, "avx512"},
    {kAVX512VNNI, "avx512_vnni"},
    {kAVX512BF16, "avx512_bf16"},
    {kAMX, "amx"},
    {kNEON, "neon"},
    {kDotProd, "dotprod"},
    {kBF16I8MM, "bf16_i8mm"},
    {kZ14, "z14"},
    {kZ15, "z15"},
};

const char* name_of(int32_t number) {
  for (const Level& level : kLevels) {
    if (level.number == number) return level.name;
  }
  return "unnamed";
}

// Creates threads for each task, with the interface of the OpenMP runtime that torch uses.
int wanted_threads = 1;
thread_local int own_number = 0, own_count = 1;

void in_parallel(void (*run)(void*), void* argument, unsigned count, unsigned) {
  std::vector<std::thread> others;
  for (unsigned number = 1; number < count; ++number) {
    others.emplace_back([=] {
      own_number = int(number), own_count = int(count);
      run(argument);
    });
  }
  own_number = 0, own_count = int(count);
  run(argument);
  own_count = 1;
  for (std::thread& other : others) other.join();
}

int thread_number() { return own_number; }
int thread_count() { return own_count; }
int most_threads() { return wanted_threads; }

std::string fault_of(const Case& golden) {
  const Runner run = runner_of(golden.op);
  if (run == nullptr) return "nothing here runs this op";
  try {
    std::string fault = compare(golden, run(golden));
    // Also run with the prefetch strategy of the other vendor's processors.
    if (fault.empty() && golden.op.find("linear") != std::string::npos) {
      interposer_force_reads_past_caches(!interposer_reads_past_caches());
      fault = compare(golden, run(golden));
      interposer_force_reads_past_caches(-1);
    }
    return fault;
  } catch (const std::exception& error) {
    return error.what();
  }
}

int usage() {
  std::fprintf(stderr, "kernel_tests [--best LEVEL] [--threads N] [--only OP] FILE\n");
  return 2;
}

}  // namespace

int main(int count, char** arguments) {
  std::string path, best, only;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument.compare(0, 2, "--") != 0) {
      path = argument;
    } else if (i + 1 == count) {
      return usage();
    } else if (argument == "--best") {
      best = arguments[++i];
    } else if (argument == "--only") {
      only = arguments[++i];
    } else if (argument == "--threads") {
      wanted_threads = std::atoi(arguments[++i]);
    } else {
      return usage();
    }
  }
  if (path.empty()) return usage();

  const std::string picked = name_of(interposer_level());
  std::printf("picked %s\n", picked.c_str());
  if (!best.empty() && picked != best) {
    std::printf("FAILED: %s should have been picked\n", best.c_str());
    return 1;
  }
  interposer_set_pool(reinterpret_cast<void*>(in_parallel), reinterpret_cast<void*>(thread_number),
                      reinterpret_cast<void*>(thread_count),
                      reinterpret_cast<void*>(most_threads));
  std::vector<Case> cases;
  try {
    cases = read_golden(path);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  int ran = 0, failed = 0;
  for (const int32_t* level = interposer_levels(); *level; ++level) {
    interposer_force_level(*level);
    for (const Case& golden : cases) {
      if (!only.empty() && golden.op != only) continue;
      const std::string fault = fault_of(golden);
      std::printf("%s %s %s: %s%s\n", fault.empty() ? "ok" : "FAILED", name_of(*level),
                  golden.op.c_str(), golden.label.c_str(),
                  fault.empty() ? "" : ("\n    " + fault).c_str());
      ++ran, failed += !fault.empty();
    }
  }
  std::printf("%d ran, %d failed\n", ran, failed);
  if (failed) return 1;
  return ran || picked == best ? 0 : 2;
}
