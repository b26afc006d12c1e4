// Collectives of the processes ("ranks") of one host, through memory that they share.
//
// A call is a row of steps. In each, a rank writes to its slot, says so, waits until all have said
// so, and reads the slots of the others. Slots are there twice, for even and odd steps: who is at
// step s + 1 has read all of step s, so that one wait a step is enough.
//
// Sums are taken in the order of the ranks, from the first on, in float32 (float64 of that), and
// rounded once. So every rank gets the same bits, whatever the sizes and whoever comes last.
#pragma once

#include <cstdint>

// Numbers that are summed: those of Type in ../vectors.h, and some more.
enum interposer_summed : int32_t {
  kSumFloat32 = 0,
  kSumBFloat16 = 1,
  kSumFloat16 = 2,
  kSumFloat64 = 8,
  kSumInt32 = 9,  // integers wrap around
  kSumInt64 = 10,
};

// Why a call fails. All but the last two are kept in the shared memory, and so every later call of
// every rank fails too.
enum interposer_lost : int32_t {
  kNothingLost = 0,
  kRankLate = 1,         // did not come in time
  kRankDead = 2,         // its process ended
  kRankDiffers = 3,      // calls something else
  kRankInterrupted = 4,  // a signal ended its call
  kRankLeft = 5,         // closed what it shares
  kClosedHere = 6,       // this rank closed what it shares
  kNoSums = 7,           // the processor has none of the levels
};

constexpr int kMostRanks = 32;

struct interposer_communicator;  // of one rank

extern "C" {
// Bytes that `size` ranks share.
int64_t interposer_shared_bytes(int size);

// Join the ranks that share the file `fd`, which is mapped and may be closed then. It has that many
// bytes, all zero but for `token` at its beginning: any number that tells another file apart. Returns
// null and sets errno.
interposer_communicator* interposer_join(int fd, int rank, int size, uint64_t token,
                                         double timeout_seconds);

// To be called once all have joined.
void interposer_all_joined(interposer_communicator*);

// Leave: others that wait for this rank are told at once.
void interposer_leave(interposer_communicator*);

// A failure that all share: its kind, who found it, and a bit for each rank that it is about.
struct interposer_failure {
  int32_t kind, teller;
  uint32_t about;
};
interposer_failure interposer_failure_of(const interposer_communicator*);

// What ends a wait besides; called now and then by who waits for long. Returns true to give up.
typedef bool (*interposer_interrupt)(void* argument);
void interposer_set_interrupt(interposer_interrupt, void* argument);  // of this thread; null for none

// Each returns 0 or one of interposer_lost. Nothing has gaps. They may be called inside
// interposer_together, by the thread that runs the program, such as between two products of a block.

// x [count] becomes its sum over the ranks.
int32_t interposer_all_reduce(interposer_communicator*, void* x, int32_t type, int64_t count);

struct interposer_norm;
// x becomes its sum, then `norm`, whose x that is, is computed here.
int32_t interposer_all_reduce_norm(interposer_communicator*, void* x, const interposer_norm* norm);

// out gets the parts of all ranks in their order; x is that of this rank, bytes[rank].
int32_t interposer_all_gather(interposer_communicator*, const void* x, void* out,
                              const int64_t* bytes);

// out gets the part of this rank, counts[rank] numbers, of the sum of x [sum of counts].
int32_t interposer_reduce_scatter(interposer_communicator*, const void* x, void* out, int32_t type,
                                  const int64_t* counts);

// out gets the parts that the ranks have for this one, in their order.
int32_t interposer_all_to_all(interposer_communicator*, const void* x, void* out,
                              const int64_t* sent, const int64_t* received);

// x becomes that of the rank `source`.
int32_t interposer_broadcast(interposer_communicator*, void* x, int64_t bytes, int source);
}

struct CommunicatorKernels {
  // out = the sum of `count` parts, in their order. It is written to `copy` too, unless that is null.
  // `out` may be one of the parts.
  void (*sum)(int32_t type, const void* const* parts, int count, void* out, void* copy,
              int64_t elements);
};

constexpr int size_of_summed(int32_t type) {
  return type == kSumFloat64 || type == kSumInt64 ? 8 : type == kSumFloat32 || type == kSumInt32 ? 4 : 2;
}
