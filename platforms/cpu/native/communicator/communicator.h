// Collectives of ranks (processes) on one host through shared memory.
//
// A call is a sequence of steps. In a step, a rank writes its slot, announces it, waits for all
// other ranks, and reads their slots. Every rank has two slots, for even and odd steps: a rank at
// step s + 1 has read everything of step s, so that one wait per step suffices.
//
// Sums are computed in rank order, in float32 (float64 for float64), and rounded once. So every
// rank gets the same bits, for all sizes and arrival orders.
#pragma once

#include <cstdint>

// Types that can be summed: those of Type in ../vectors.h, and some more.
enum interposer_summed : int32_t {
  kSumFloat32 = 0,
  kSumBFloat16 = 1,
  kSumFloat16 = 2,
  kSumFloat64 = 8,
  kSumInt32 = 9,  // integers wrap around
  kSumInt64 = 10,
};

// Reasons why a call fails. All but the last two are recorded in the shared memory, so that every
// later call of every rank fails too.
enum interposer_lost : int32_t {
  kNothingLost = 0,
  kRankLate = 1,         // did not arrive in time
  kRankDead = 2,         // its process ended
  kRankDiffers = 3,      // called another collective
  kRankInterrupted = 4,  // a signal ended its call
  kRankLeft = 5,         // closed its communicator
  kClosedHere = 6,       // this rank closed its communicator
  kNoSums = 7,           // the processor supports none of the levels
};

constexpr int kMostRanks = 32;

struct interposer_communicator;  // of one rank

extern "C" {
// Size in bytes of the shared memory of `size` ranks.
int64_t interposer_shared_bytes(int size);

// Join the ranks that share the file `fd`, which is mapped and can be closed afterwards. The file
// has interposer_shared_bytes bytes, all zero except for `token` at its start: a random number that
// identifies the file. Returns null and sets errno on failure.
interposer_communicator* interposer_join(int fd, int rank, int size, uint64_t token,
                                         double timeout_seconds);

// Call after all ranks have joined.
void interposer_all_joined(interposer_communicator*);

// Leave: ranks that wait for this rank are notified at once.
void interposer_leave(interposer_communicator*);

// A failure recorded in shared memory: its kind, the rank that reported it, and a bit for each rank
// that it concerns.
struct interposer_failure {
  int32_t kind, teller;
  uint32_t about;
};
interposer_failure interposer_failure_of(const interposer_communicator*);

// Callback that can end a wait; called now and then during long waits. Returns true to give up.
typedef bool (*interposer_interrupt)(void* argument);
void interposer_set_interrupt(interposer_interrupt, void* argument);  // per thread; null: none

// Each returns 0 or an interposer_lost. All data are contiguous. Can be called inside
// interposer_together, by the thread that runs the program, for example between two matmuls of a
// block.

// Sum x [count] over the ranks in place.
int32_t interposer_all_reduce(interposer_communicator*, void* x, int32_t type, int64_t count);

struct interposer_norm;
// Sum x over the ranks, then compute `norm`, whose input is x.
int32_t interposer_all_reduce_norm(interposer_communicator*, void* x, const interposer_norm* norm);

// Concatenate the parts of all ranks in rank order; x is the part of this rank, bytes[rank].
int32_t interposer_all_gather(interposer_communicator*, const void* x, void* out,
                              const int64_t* bytes);

// Sum x over the ranks, and write counts[rank] numbers, the part of this rank, to out.
int32_t interposer_reduce_scatter(interposer_communicator*, const void* x, void* out, int32_t type,
                                  const int64_t* counts);

// Write the parts that other ranks send to this rank to out, in rank order.
int32_t interposer_all_to_all(interposer_communicator*, const void* x, void* out,
                              const int64_t* sent, const int64_t* received);

// Overwrite x with the x of rank `source`.
int32_t interposer_broadcast(interposer_communicator*, void* x, int64_t bytes, int source);
}

struct CommunicatorKernels {
  // out = sum of `count` parts, in order. Also written to `copy` unless that is null. `out` can be
  // one of the parts.
  void (*sum)(int32_t type, const void* const* parts, int count, void* out, void* copy,
              int64_t elements);
};

constexpr int size_of_summed(int32_t type) {
  return type == kSumFloat64 || type == kSumInt64 ? 8 : type == kSumFloat32 || type == kSumInt32 ? 4 : 2;
}
