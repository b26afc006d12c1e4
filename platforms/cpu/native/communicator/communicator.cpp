// Collectives, as sequences of steps.

#include "communicator.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "../elementwise/elementwise.h"
#include "../levels.h"
#include "../pool.h"
#include "segment.h"

INTERPOSER_FAMILY(CommunicatorKernels, communicator, INTERPOSER_FLOAT_LEVELS)

struct interposer_communicator {
  segment::Segment segment;
};

namespace {

using segment::Segment;

enum Collective : uint64_t { kAllReduce = 1, kAllGather, kReduceScatter, kAllToAll, kBroadcast };

// Up to this number of received bytes, every rank sums all rows: a second step would take longer.
constexpr int64_t kOneStep = 64 << 10;

// Up to this number of bytes, the calling thread alone is faster than waking others.
constexpr int64_t kFewBytes = 256 << 10;

// Parts of sums begin at cache lines.
constexpr int64_t kLine = 64;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Signature of a call, which must be equal on all ranks: collective, type or source, and sizes.
uint64_t call_word(Collective collective, int32_t type, uint64_t sizes) {
  return collective | uint64_t(type) << 8 | sizes << 24;
}

uint64_t mixed(uint64_t sizes, int64_t one) {
  return (sizes ^ uint64_t(one)) * 0x100000001b3u;
}

uint64_t mixed(const int64_t* sizes, int count) {
  uint64_t all = 0xcbf29ce484222325u;
  for (int i = 0; i < count; ++i) all = mixed(all, sizes[i]);
  return all;
}

// A byte range processed by several threads.
template <class F>
struct Job {
  const F* run;
  int64_t bytes;
};

template <class F>
void run_some(void* argument, int thread, int threads) {
  const Job<F>& job = *static_cast<Job<F>*>(argument);
  const int64_t lines = divided_up(job.bytes, kLine);
  const int64_t first = lines * thread / threads * kLine;
  const int64_t last = least(lines * (thread + 1) / threads * kLine, job.bytes);
  if (first < last) (*job.run)(first, last);
}

// Call `run(first, last)` on parts that cover all bytes.
template <class F>
void shared_out(int64_t bytes, const F& run) {
  if (bytes <= 0) return;
  const int threads = bytes <= kFewBytes ? 1 : interposer_num_threads();
  if (threads <= 1) return run(int64_t(0), bytes);
  Job<F> job = {&run, bytes};
  interposer_parallel(run_some<F>, &job, threads);
}

void copy(void* to, const void* from, int64_t bytes) {
  shared_out(bytes, [=](int64_t first, int64_t last) {
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                size_t(last - first));
  });
}

// Sum the inputs of all ranks from `offset` on; this rank's input is in `own`.
void sum_inputs(const Segment& ranks, const CommunicatorKernels* kernels, int32_t type,
                const char* own, int64_t offset, char* out, char* second, int64_t bytes) {
  shared_out(bytes, [=, &ranks](int64_t first, int64_t last) {
    const void* parts[kMostRanks];
    for (int rank = 0; rank < ranks.size_; ++rank) {
      parts[rank] = (rank == ranks.rank_ ? own : ranks.input(rank) + offset) + first;
    }
    kernels->sum(type, parts, ranks.size_, out + first, second ? second + first : nullptr,
                 (last - first) / size_of_summed(type));
  });
}

// One-step all-reduce: every rank sums everything.
int32_t reduce_at_once(Segment& ranks, const CommunicatorKernels* kernels, char* x, int32_t type,
                       int64_t bytes, uint64_t call) {
  for (int64_t at = 0; at < bytes; at += segment::kInput) {
    const int64_t some = least(bytes - at, segment::kInput);
    copy(ranks.input(ranks.rank_), x + at, some);
    if (const int32_t lost = ranks.pass(call)) return lost;
    sum_inputs(ranks, kernels, type, x + at, 0, x + at, nullptr, some);
    ranks.finish();
  }
  return kNothingLost;
}

// Two-step all-reduce: every rank sums one part of every chunk, and reads the other ranks' parts in
// the next step.
int32_t reduce_in_parts(Segment& ranks, const CommunicatorKernels* kernels, char* x, int32_t type,
                        int64_t bytes, uint64_t call) {
  const int own = ranks.rank_, size = ranks.size_;
  const int64_t lines = kLine * size, most = segment::kInput / lines * lines;
  const int64_t chunk = divided_up(divided_up(bytes, divided_up(bytes, most)), lines) * lines;
  const int64_t part = chunk / size;
  // Bytes of the message in the part of `rank`.
  const auto in_part = [=](int64_t index, int rank) {
    const int64_t rest = bytes - index * chunk - rank * part;
    return rest < 0 ? int64_t(0) : least(rest, part);
  };
  for (int64_t index = 0; index * chunk < bytes + chunk; ++index) {
    const bool more = index * chunk < bytes;
    char* here = x + index * chunk;
    for (int rank = 0; more && rank < size; ++rank) {
      if (rank == own) continue;
      const int64_t some = in_part(index, rank);
      if (some) copy(ranks.input(own) + rank * part, here + rank * part, some);
    }
    if (const int32_t lost = ranks.pass(call)) return lost;
    for (int next = 1; index && next < size; ++next) {
      const int rank = (own + next) % size;  // ranks read from different ranks at the same time
      const int64_t some = in_part(index - 1, rank);
      if (some) copy(here - chunk + rank * part, ranks.result(rank), some);
    }
    const int64_t some = more ? in_part(index, own) : 0;
    if (some) {
      char* mine = here + own * part;
      sum_inputs(ranks, kernels, type, mine, own * part, mine, ranks.next_result(), some);
    }
    ranks.finish();
  }
  return kNothingLost;
}

}  // namespace

extern "C" {

interposer_communicator* interposer_join(int fd, int rank, int size, uint64_t token,
                                         double timeout_seconds) {
  const int64_t bytes = interposer_shared_bytes(size);
  struct stat status;
  if (fstat(fd, &status)) return nullptr;
  if (status.st_size != bytes) {
    errno = ESTALE;
    return nullptr;
  }
  void* memory = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  if (static_cast<segment::Header*>(memory)->token != token) {
    munmap(memory, size_t(bytes));
    errno = ESTALE;
    return nullptr;
  }
  return new (std::nothrow)
      interposer_communicator{{static_cast<char*>(memory), rank, size, timeout_seconds}};
}

void interposer_all_joined(interposer_communicator* communicator) { communicator->segment.watch(); }

void interposer_leave(interposer_communicator* communicator) { delete communicator; }

interposer_failure interposer_failure_of(const interposer_communicator* communicator) {
  return communicator->segment.failure();
}

int32_t interposer_all_reduce(interposer_communicator* communicator, void* x, int32_t type,
                              int64_t count) {
  if (communicator == nullptr) return kClosedHere;
  const CommunicatorKernels* chosen = kernels();
  if (chosen == nullptr) return kNoSums;
  Segment& ranks = communicator->segment;
  if (const int32_t lost = ranks.begin()) return lost;
  const int64_t bytes = count * size_of_summed(type);
  if (ranks.size_ == 1 || bytes == 0) return kNothingLost;
  const uint64_t call = call_word(kAllReduce, type, uint64_t(bytes));
  const bool short_one = bytes * (ranks.size_ - 1) <= kOneStep;
  return (short_one ? reduce_at_once : reduce_in_parts)(ranks, chosen, static_cast<char*>(x), type,
                                                        bytes, call);
}

int32_t interposer_all_reduce_norm(interposer_communicator* communicator, void* x,
                                   const interposer_norm* norm) {
  const int64_t count = norm->rows.outer * norm->rows.width;
  const int32_t lost = interposer_all_reduce(communicator, x, norm->type, count);
  return lost ? lost : interposer_normalise(norm) ? int32_t(kNoSums) : int32_t(kNothingLost);
}

int32_t interposer_all_gather(interposer_communicator* communicator, const void* x, void* out,
                              const int64_t* bytes) {
  if (communicator == nullptr) return kClosedHere;
  Segment& ranks = communicator->segment;
  if (const int32_t lost = ranks.begin()) return lost;
  const char* from = static_cast<const char*>(x);
  const uint64_t call = call_word(kAllGather, 0, mixed(bytes, ranks.size_));
  int64_t longest = 0;
  for (int rank = 0; rank < ranks.size_; ++rank) {
    if (bytes[rank] > longest) longest = bytes[rank];
  }
  for (int64_t at = 0; at < longest; at += segment::kInput) {
    const auto some = [=](int rank) { return least(bytes[rank] - at, segment::kInput); };
    if (ranks.size_ > 1) {
      copy(ranks.input(ranks.rank_), from + at, some(ranks.rank_));
      if (const int32_t lost = ranks.pass(call)) return lost;
    }
    char* to = static_cast<char*>(out);
    for (int rank = 0; rank < ranks.size_; ++rank) {
      copy(to + at, rank == ranks.rank_ ? from + at : ranks.input(rank), some(rank));
      to += bytes[rank];
    }
    ranks.finish();
  }
  return kNothingLost;
}

int32_t interposer_reduce_scatter(interposer_communicator* communicator, const void* x, void* out,
                                  int32_t type, const int64_t* counts) {
  if (communicator == nullptr) return kClosedHere;
  const CommunicatorKernels* chosen = kernels();
  if (chosen == nullptr) return kNoSums;
  Segment& ranks = communicator->segment;
  if (const int32_t lost = ranks.begin()) return lost;
  const int own = ranks.rank_, size = ranks.size_, bytes_each = size_of_summed(type);
  const uint64_t call = call_word(kReduceScatter, type, mixed(counts, size));
  const int64_t part = segment::kInput / size / kLine * kLine;
  int64_t longest = 0, start = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (rank < own) start += counts[rank] * bytes_each;
    if (counts[rank] * bytes_each > longest) longest = counts[rank] * bytes_each;
  }
  const char* from = static_cast<const char*>(x);
  for (int64_t at = 0; at < longest; at += part) {
    const auto some = [=](int rank) { return least(counts[rank] * bytes_each - at, part); };
    const char* rows = from;
    for (int rank = 0; rank < size; ++rank) {
      if (rank != own) copy(ranks.input(own) + rank * part, rows + at, some(rank));
      rows += counts[rank] * bytes_each;
    }
    if (size > 1) {
      if (const int32_t lost = ranks.pass(call)) return lost;
    }
    sum_inputs(ranks, chosen, type, from + start + at, own * part, static_cast<char*>(out) + at,
               nullptr, some(own));
    ranks.finish();
  }
  return kNothingLost;
}

int32_t interposer_all_to_all(interposer_communicator* communicator, const void* x, void* out,
                              const int64_t* sent, const int64_t* received) {
  if (communicator == nullptr) return kClosedHere;
  Segment& ranks = communicator->segment;
  if (const int32_t lost = ranks.begin()) return lost;
  const int own = ranks.rank_, size = ranks.size_;
  const char* from = static_cast<const char*>(x);
  const uint64_t call = call_word(kAllToAll, 0, 0);
  // A table of sizes precedes the first parts, because a rank knows only its own sizes and
  // therefore not the number of steps.
  constexpr int64_t kTable = kMostRanks * int64_t(sizeof(int64_t));
  const int64_t part = (segment::kInput - kTable) / size / kLine * kLine;
  int64_t longest = 1;
  for (int64_t at = 0; at < longest; at += part) {
    const auto some = [=](int64_t all) { return least(all - at, part); };
    char* slot = ranks.input(own);
    if (at == 0) std::memcpy(slot, sent, size_t(size) * sizeof(int64_t));
    const char* rows = from;
    const char* mine = nullptr;
    for (int rank = 0; rank < size; ++rank) {
      if (rank == own) {
        mine = rows + at;
      } else {
        copy(slot + kTable + rank * part, rows + at, some(sent[rank]));
      }
      rows += sent[rank];
    }
    if (size > 1) {
      if (const int32_t lost = ranks.pass(call)) return lost;
    }
    if (at == 0) {
      uint32_t others = 0;
      for (int rank = 0; rank < size; ++rank) {
        int64_t row[kMostRanks];
        std::memcpy(row, rank == own ? slot : ranks.input(rank), size_t(size) * sizeof(int64_t));
        for (int to = 0; to < size; ++to) {
          if (row[to] > longest) longest = row[to];
        }
        if (row[own] != received[rank]) others |= 1u << rank;
      }
      if (others) return ranks.disagree(others);
    }
    char* to = static_cast<char*>(out);
    for (int rank = 0; rank < size; ++rank) {
      const char* read = rank == own ? mine : ranks.input(rank) + kTable + own * part;
      copy(to + at, read, some(received[rank]));
      to += received[rank];
    }
    ranks.finish();
  }
  return kNothingLost;
}

int32_t interposer_broadcast(interposer_communicator* communicator, void* x, int64_t bytes,
                             int source) {
  if (communicator == nullptr) return kClosedHere;
  Segment& ranks = communicator->segment;
  if (const int32_t lost = ranks.begin()) return lost;
  if (ranks.size_ == 1) return kNothingLost;
  const uint64_t call = call_word(kBroadcast, source, uint64_t(bytes));
  char* all = static_cast<char*>(x);
  for (int64_t at = 0; at < bytes; at += segment::kInput) {
    const int64_t some = least(bytes - at, segment::kInput);
    if (ranks.rank_ == source) copy(ranks.input(source), all + at, some);
    if (const int32_t lost = ranks.pass(call)) return lost;
    if (ranks.rank_ != source) copy(all + at, ranks.input(source), some);
    ranks.finish();
  }
  return kNothingLost;
}
}
