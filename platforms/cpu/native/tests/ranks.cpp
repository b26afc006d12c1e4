// Collectives with threads as ranks, at every level of the processor: all bits of the results, and
// the errors for missing ranks. The status is 1 if a check failed.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../communicator/communicator.h"
#include "../levels.h"
#include "../vectors.h"

namespace {

typedef std::vector<char> Memory;

int failed = 0, passed = 0;

void check(bool holds, const char* what, int size, int64_t count) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("FAILED: %s of %lld, %d ranks\n", what, (long long)count, size);
}

// Call `run(communicator, rank)` on one thread per rank.
template <class Run>
void with_ranks(int size, double timeout, const Run& run) {
  std::FILE* file = std::tmpfile();
  const int fd = fileno(file);
  const uint64_t token = 7;
  if (ftruncate(fd, interposer_shared_bytes(size)) || pwrite(fd, &token, sizeof token, 0) < 0) {
    std::perror("a file");
    std::exit(1);
  }
  std::vector<interposer_communicator*> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(interposer_join(fd, rank, size, token, timeout));
    if (ranks.back() == nullptr) {
      std::perror("join");
      std::exit(1);
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    interposer_all_joined(ranks[rank]);
    threads.emplace_back([&run, &ranks, rank] { run(ranks[rank], rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (interposer_communicator* rank : ranks) interposer_leave(rank);
  std::fclose(file);
}

template <class N>
void put(Memory& memory, int64_t index, N number) {
  std::memcpy(memory.data() + index * int64_t(sizeof number), &number, sizeof number);
}

template <class N>
N get(const Memory& memory, int64_t index) {
  N number;
  std::memcpy(&number, memory.data() + index * int64_t(sizeof number), sizeof number);
  return number;
}

// Input number of a rank; the sums need rounding. The first ones are negative zeros.
float some(int rank, int64_t index) {
  if (index == 0) return -0.0f;
  const uint32_t mixed = (uint32_t(index) * 2654435761u) ^ (uint32_t(rank + 1) * 40503u * 65537u);
  return (float(mixed >> 8 & 0xffff) - 32768.0f) / (rank % 2 ? 3.0f : 7000.0f);
}

uint16_t half_of(float number) { return float16_of_floats(splat(number))[0]; }
float of_half(uint16_t half) {
  Halves halves = {};
  halves[0] = half;
  return floats_of_float16(halves)[0];
}

Memory inputs(int rank, int32_t type, int64_t count) {
  Memory made(size_t(count * size_of_summed(type)));
  for (int64_t i = 0; i < count; ++i) {
    const float number = some(rank, i);
    switch (type) {
      case kSumFloat32: put(made, i, number); break;
      case kSumBFloat16: put(made, i, bfloat16_of_float(number)); break;
      case kSumFloat16: put(made, i, half_of(number)); break;
      case kSumFloat64: put(made, i, double(number) / 3); break;
      case kSumInt32: put(made, i, int32_t(number) * 65537); break;
      default: put(made, i, int64_t(number) << 40);
    }
  }
  return made;
}

Memory summed(int size, int32_t type, int64_t count) {
  std::vector<Memory> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(inputs(rank, type, count));
  Memory sum = all[0];
  for (int64_t i = 0; i < count; ++i) {
    float wide = 0;
    for (int rank = 0; rank < size; ++rank) {
      const Memory& one = all[size_t(rank)];
      switch (type) {
        case kSumFloat32:
          if (rank) put(sum, i, get<float>(sum, i) + get<float>(one, i));
          break;
        case kSumBFloat16: {
          const float number = float_of_bfloat16(get<uint16_t>(one, i));
          wide = rank ? wide + number : number;
          put(sum, i, bfloat16_of_float(wide));
          break;
        }
        case kSumFloat16: {
          const float number = of_half(get<uint16_t>(one, i));
          wide = rank ? wide + number : number;
          put(sum, i, half_of(wide));
          break;
        }
        case kSumFloat64:
          if (rank) put(sum, i, get<double>(sum, i) + get<double>(one, i));
          break;
        case kSumInt32:
          if (rank) put(sum, i, get<uint32_t>(sum, i) + get<uint32_t>(one, i));
          break;
        default:
          if (rank) put(sum, i, get<uint64_t>(sum, i) + get<uint64_t>(one, i));
      }
    }
  }
  return sum;
}

Memory part_of(const Memory& all, int64_t first, int64_t bytes) {
  return Memory(all.begin() + first, all.begin() + first + bytes);
}

// Distribute `count` items unevenly over ranks; some ranks get none.
std::vector<int64_t> uneven(int size, int64_t count) {
  std::vector<int64_t> sizes(static_cast<size_t>(size));
  int64_t left = count;
  for (int rank = size - 1; rank >= 0; --rank) {
    sizes[size_t(rank)] = rank == 0 ? left : rank % 3 == 2 ? 0 : left / 3;
    left -= sizes[size_t(rank)];
  }
  return sizes;
}

int64_t until(const std::vector<int64_t>& sizes, int rank) {
  int64_t sum = 0;
  for (int i = 0; i < rank; ++i) sum += sizes[size_t(i)];
  return sum;
}

void sums(int size, int32_t type, int64_t count) {
  const Memory expected = summed(size, type, count);
  const std::vector<int64_t> sizes = uneven(size, count);
  std::vector<Memory> all(static_cast<size_t>(size)), parts(static_cast<size_t>(size));
  with_ranks(size, 60, [&](interposer_communicator* ranks, int rank) {
    // Repeated, so that both slots are used.
    for (int time = 0; time < 3; ++time) {
      Memory x = inputs(rank, type, count);
      if (interposer_all_reduce(ranks, x.data(), type, count)) x.assign(1, 0);
      if (time == 0 || x != all[size_t(rank)]) all[size_t(rank)] = x;
    }
    const Memory x = inputs(rank, type, count);
    Memory& own = parts[size_t(rank)];
    own.resize(size_t(sizes[size_t(rank)] * size_of_summed(type)));
    if (interposer_reduce_scatter(ranks, x.data(), own.data(), type, sizes.data())) own = {'?'};
  });
  for (int rank = 0; rank < size; ++rank) {
    check(all[size_t(rank)] == expected, "all_reduce", size, count);
    const int64_t each = size_of_summed(type);
    const Memory part =
        part_of(expected, until(sizes, rank) * each, sizes[size_t(rank)] * each);
    check(parts[size_t(rank)] == part, "reduce_scatter", size, count);
  }
}

// Message of rank `from` to rank `to`.
Memory message(int from, int to, int64_t bytes) {
  Memory made(static_cast<size_t>(bytes));
  for (int64_t i = 0; i < bytes; ++i) made[size_t(i)] = char(i * 7 + i / 251 + from * 31 + to * 57);
  return made;
}

void append(Memory& all, const Memory& more) { all.insert(all.end(), more.begin(), more.end()); }

void copies(int size, int64_t bytes) {
  const std::vector<int64_t> sizes = uneven(size, bytes);
  const auto sent = [=](int from, int to) { return (from + to) % 3 ? bytes / (from + 2) + to : 0; };
  std::vector<char> right(static_cast<size_t>(size) * 3, 0);
  with_ranks(size, 60, [&](interposer_communicator* ranks, int rank) {
    char* found = right.data() + rank * 3;
    Memory gathered(static_cast<size_t>(bytes)), expected;
    for (int from = 0; from < size; ++from) append(expected, message(from, 0, sizes[size_t(from)]));
    const Memory own = message(rank, 0, sizes[size_t(rank)]);
    found[0] = !interposer_all_gather(ranks, own.data(), gathered.data(), sizes.data()) &&
               gathered == expected;
    std::vector<int64_t> to, from;
    Memory out, in;
    for (int other = 0; other < size; ++other) {
      to.push_back(sent(rank, other)), from.push_back(sent(other, rank));
      append(out, message(rank, other, to.back()));
      append(in, message(other, rank, from.back()));
    }
    Memory received(in.size());
    found[1] = !interposer_all_to_all(ranks, out.data(), received.data(), to.data(), from.data()) &&
               received == in;
    found[2] = 1;
    for (int source = 0; source < size; ++source) {
      Memory x = message(rank, 1, bytes);
      found[2] &= !interposer_broadcast(ranks, x.data(), bytes, source) &&
                  x == message(source, 1, bytes);
    }
  });
  const char* names[] = {"all_gather", "all_to_all", "broadcast"};
  for (size_t i = 0; i < right.size(); ++i) check(right[i], names[i % 3], size, bytes);
}

// Errors of two ranks if `second` does not call the all_reduce of four numbers.
template <class Second>
void loses(const char* what, int32_t kind, uint32_t about, const Second& second) {
  int32_t told[2] = {}, later[2] = {};
  interposer_failure shared = {};
  with_ranks(2, 0.2, [&](interposer_communicator* ranks, int rank) {
    float x[8] = {};
    told[rank] = rank ? second(ranks, x) : interposer_all_reduce(ranks, x, kSumFloat32, 4);
    if (rank == 0) shared = interposer_failure_of(ranks);
    if (rank == 1) usleep(400'000);
    later[rank] = interposer_all_reduce(ranks, x, kSumFloat32, 4);
  });
  check(told[0] == kind && later[0] == kind && later[1] == kind, what, 2, told[0]);
  check(shared.kind == kind && (shared.about & about), what, 2, shared.about);
}

}  // namespace

int main() {
  for (const int32_t* level = interposer_levels(); *level; ++level) {
    interposer_force_level(*level);
    for (const int size : {1, 2, 3, 5}) {
      for (const int32_t type : {kSumFloat32, kSumBFloat16, kSumFloat16, kSumFloat64, kSumInt32,
                                 kSumInt64}) {
        for (const int64_t count : {0, 1, 77, 5000, 150'001}) sums(size, type, count);
      }
      for (const int64_t bytes : {0, 3, 5001, 900'001}) copies(size, bytes);
    }
    std::printf("level %d: %d passed\n", int(*level), passed);
  }
  sums(16, kSumBFloat16, 40'001);
  copies(16, 40'001);
  loses("a late rank", kRankLate, 2, [](interposer_communicator*, float*) { return 0; });
  loses("another type", kRankDiffers, 3, [](interposer_communicator* ranks, float* x) {
    return interposer_all_reduce(ranks, x, kSumInt32, 4);
  });
  loses("another count", kRankDiffers, 3, [](interposer_communicator* ranks, float* x) {
    return interposer_all_reduce(ranks, x, kSumFloat32, 8);
  });
  loses("another collective", kRankDiffers, 3, [](interposer_communicator* ranks, float* x) {
    return interposer_broadcast(ranks, x, 16, 0);
  });
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || !*interposer_levels();
}
