// The memory that ranks share: who came to which step, what each calls, and their slots.
#pragma once

#include <atomic>
#include <cstdint>

#include "communicator.h"

namespace segment {

// What a rank may write in one step. Two slots of each rank stay in a core's own caches.
constexpr int64_t kInput = 256 << 10;
// Behind that, the part of a sum that the rank computed in the step before.
constexpr int64_t kResult = kInput / 2 + 4096;
constexpr int64_t kSlot = kInput + kResult;

// Of one rank, which alone writes it, except for the count of those who sleep until it comes. Two
// lines, as processors fetch pairs of them.
struct alignas(128) Member {
  std::atomic<uint32_t> arrived;  // at how many steps, modulo 2^32; others sleep on it
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> left;
  std::atomic<int64_t> process, started;  // the latter in ticks since the system started
  std::atomic<uint64_t> calls[2];  // what is called, of even and odd steps
};

struct alignas(128) Header {
  uint64_t token;  // written with the file
  std::atomic<uint64_t> failure;  // the first one, as `packed` makes it; 0 for none
};

constexpr int64_t kSlots = 16384;  // where they begin
static_assert(sizeof(Header) + kMostRanks * sizeof(Member) <= kSlots, "more members than room");

// One rank's view of it.
class Segment {
 public:
  Segment(char* memory, int rank, int size, double timeout_seconds);
  ~Segment();

  // Note which of the others can be seen, once all have joined: of no other one is it told that its
  // process ended.
  void watch();

  // Begin a call. Returns 0, or why none can be begun.
  int32_t begin() const;
  char* input(int rank) const { return slot(rank, step_); }
  char* result(int rank) const { return slot(rank, step_) + kInput; }
  // Of the step after the one that is being read.
  char* next_result() const { return slot(rank_, step_ + 1) + kInput; }

  // Say that this rank has written its slots of the step, wait for the others, and compare what they
  // call. What is read until the next `pass` belongs to this step.
  int32_t pass(uint64_t call);
  // The step that was passed is read.
  void finish() { ++step_; }

  // Say that the ranks whose bits are set call what does not fit to what this one calls.
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
