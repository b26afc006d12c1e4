// Compiled once for all levels: memory and caches are slower than the instructions of any level.

#include "finite.h"

#include <atomic>
#include <cstring>

#include "../pool.h"

namespace {

typedef uint64_t Words __attribute__((vector_size(16)));

constexpr int64_t kWords = int64_t(sizeof(Words));
// Up to this number of bytes, the calling thread alone is faster than waking others.
constexpr int64_t kFewBytes = 1 << 18;
// Threads get whole pieces of this size, so that no piece begins within a number.
constexpr int64_t kPiece = 4096;

struct Search {
  const interposer_numbers_searched* searched;
  std::atomic<bool> found;
};

Words load_words(const char* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

template <bool kCopies>
bool holds_other(const interposer_numbers_searched& searched, int64_t begin, int64_t end) {
  const char* bytes = static_cast<const char*>(searched.numbers);
  char* copy = static_cast<char*>(searched.copy);
  const Words bits = Words{} + searched.bits, lowest = Words{} + searched.lowest;
  // Four independent sums.
  Words sums[4] = {};
  int64_t at = begin;
  for (; at + 4 * kWords <= end; at += 4 * kWords) {
    for (int i = 0; i < 4; ++i) {
      const Words words = load_words(bytes + at + i * kWords);
      if (kCopies) std::memcpy(copy + at + i * kWords, &words, sizeof words);
      sums[i] |= (words & bits) + lowest;
    }
  }
  uint64_t lanes[kWords / 8], all = 0;
  const Words joined = sums[0] | sums[1] | sums[2] | sums[3];
  std::memcpy(lanes, &joined, sizeof joined);
  for (uint64_t lane : lanes) all |= lane;
  for (; at < end; at += 8) {
    uint64_t word = 0;  // zeros are finite
    const size_t count = size_t(end - at < 8 ? end - at : 8);
    std::memcpy(&word, bytes + at, count);
    if (kCopies) std::memcpy(copy + at, &word, count);
    all |= (word & searched.bits) + searched.lowest;
  }
  return all & searched.sign;
}

void search_some(void* argument, int thread, int threads) {
  Search& search = *static_cast<Search*>(argument);
  const int64_t bytes = search.searched->bytes, pieces = (bytes + kPiece - 1) / kPiece;
  const int64_t begin = pieces * thread / threads * kPiece;
  const int64_t end = pieces * (thread + 1) / threads * kPiece;
  const auto holds = search.searched->copy ? holds_other<true> : holds_other<false>;
  if (holds(*search.searched, begin, end < bytes ? end : bytes)) search.found = true;
}

}  // namespace

extern "C" bool interposer_are_finite(const interposer_numbers_searched* searched) {
  Search search = {searched, {false}};
  interposer_parallel(search_some, &search, searched->bytes <= kFewBytes ? 1 : interposer_num_threads());
  return !search.found;
}
