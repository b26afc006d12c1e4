// Shared memory of the ranks: arrival at steps, signatures of calls, and slots.
#pragma once

#include <atomic>
#include <cstdint>

#include "communicator.h"

namespace segment {

// Bytes that a rank can write in one step. Two slots of a rank fit in a core's caches.
constexpr int64_t kInput = 256 << 10;
// After the input: the part of a sum that the rank computed in the previous step.
constexpr int64_t kResult = kInput / 2 + 4096;
constexpr int64_t kSlot = kInput + kResult;

// State of one rank. Only that rank writes it, except for the count of sleepers. Two cache lines,
// because processors prefetch pairs of lines.
struct alignas(128) Member {
  std::atomic<uint32_t> arrived;  // number of steps, modulo 2^32; other ranks sleep on it
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> left;
  std::atomic<int64_t> process, started;  // started: in ticks since boot
  std::atomic<uint64_t> calls[2];  // signatures of the calls at even and odd steps
};

struct alignas(128) Header {
  uint64_t token;  // written by rank 0 when it creates the file
  std::atomic<uint64_t> failure;  // the first failure, encoded by `packed`; 0 for none
};

constexpr int64_t kSlots = 16384;  // offset of the slots
static_assert(sizeof(Header) + kMostRanks * sizeof(Member) <= kSlots, "more members than room");

// One rank's view of the shared memory.
class Segment {
 public:
  Segment(char* memory, int rank, int size, double timeout_seconds);
  ~Segment();

  // After all ranks have joined, note whose processes are visible: an invisible process is never
  // reported as ended.
  void watch();

  // Begin a call. Returns 0, or the reason why no call can begin.
  int32_t begin() const;
  char* input(int rank) const { return slot(rank, step_); }
  char* result(int rank) const { return slot(rank, step_) + kInput; }
  // Slot of the step after the one that is being read.
  char* next_result() const { return slot(rank_, step_ + 1) + kInput; }

  // Announce that this rank has written its slot, wait for the other ranks, and compare signatures.
  // Data that are read until the next `pass` belong to this step.
  int32_t pass(uint64_t call);
  // All data of the passed step have been read.
  void finish() { ++step_; }

  // Report that the ranks in `others` make a call that does not match this rank's call.
  int32_t disagree(uint32_t others) { return fail(kRankDiffers, others); }

  interposer_failure failure() const;

  const int rank_, size_;

 private:
  char* slot(int rank, uint32_t step) const {
    return memory_ + kSlots + (int64_t(rank) * 2 + step % 2) * kSlot;
  }
  Member& member(int rank) const {
    return reinterpret_cast<Member*>(memory_ + sizeof(Header))[rank];
  }
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  bool came(int rank) const {
    const uint32_t at = member(rank).arrived.load(std::memory_order_acquire);
    return int32_t(at - step_) >= 0;
  }
  int32_t wait_for(int rank);
  int32_t fail(int32_t kind, uint32_t about);
  uint32_t late() const;
  uint32_t dead(uint32_t among) const;
  int32_t kind() const;

  char* memory_;
  uint32_t step_ = 1;
  uint32_t seen_ = 0;  // a bit for each rank
  int64_t timeout_, spin_;  // nanoseconds
};

}  // namespace segment
