#include "memory.h"

#include "stream.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace example {
namespace {

constexpr size_t kDeviceBytes = size_t(1) << 30;
constexpr size_t kAlignment = 512;
// Any stream can take a free block with this id.
constexpr c10::StreamId kNoStream = -1;

char* reserve(int protection) {
  void* start = mmap(
      nullptr, kDeviceBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "The memory of an example device cannot be reserved");
  return static_cast<char*>(start);
}

struct Block {
  size_t bytes;
  bool used;
  // Whose later tasks may use the block after it was freed.
  c10::StreamId stream;
  // Streams that recordStream() named in addition.
  std::set<c10::StreamId> others;
};

// The memory of one device: blocks by offset, without gaps.
struct Memory {
  std::mutex mutex;
  char* device = reserve(PROT_NONE);
  char* host = reserve(PROT_READ | PROT_WRITE);
  std::map<size_t, Block> blocks{{0, {kDeviceBytes, false, kNoStream, {}}}};
  // Freed blocks that other streams still use, by offset.
  std::map<size_t, std::vector<std::shared_ptr<Point>>> pending;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

// Never destroyed: tensors may be freed while the process ends.
std::vector<std::unique_ptr<Memory>>& memories() {
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Memory>>();
    for (int device = 0; device < device_count(); ++device) {
      made->push_back(std::make_unique<Memory>());
    }
    return made;
  }();
  return *all;
}

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

using Position = std::map<size_t, Block>::iterator;

bool mergeable(const Block& first, const Block& second) {
  return !first.used && !second.used && first.stream == second.stream;
}

void merge_neighbours(Memory& memory, Position position) {
  const auto next = std::next(position);
  if (next != memory.blocks.end() && mergeable(position->second, next->second)) {
    position->second.bytes += next->second.bytes;
    memory.blocks.erase(next);
  }
  if (position != memory.blocks.begin()) {
    const auto previous = std::prev(position);
    if (mergeable(previous->second, position->second)) {
      previous->second.bytes += position->second.bytes;
      memory.blocks.erase(position);
    }
  }
}

void release(Memory& memory, Position position) {
  position->second.used = false;
  position->second.others.clear();
  merge_neighbours(memory, position);
}

void release_reached(Memory& memory) {
  for (auto entry = memory.pending.begin(); entry != memory.pending.end();) {
    auto& points = entry->second;
    if (std::all_of(points.begin(), points.end(), [](auto& point) { return point->reached(); })) {
      release(memory, memory.blocks.find(entry->first));
      entry = memory.pending.erase(entry);
    } else {
      ++entry;
    }
  }
}

// Return the first free block that fits, or the end.
Position find_free(Memory& memory, size_t bytes, c10::StreamId stream) {
  return std::find_if(memory.blocks.begin(), memory.blocks.end(), [&](const auto& entry) {
    const Block& block = entry.second;
    return !block.used && block.bytes >= bytes &&
        (block.stream == stream || block.stream == kNoStream);
  });
}

// Give the free blocks of all streams back; no task of the device may be left.
void share_free_blocks(Memory& memory) {
  release_reached(memory);
  for (auto& [offset, block] : memory.blocks) {
    if (!block.used) {
      block.stream = kNoStream;
    }
  }
  for (auto position = memory.blocks.begin(); position != memory.blocks.end();) {
    const auto next = std::next(position);
    if (next != memory.blocks.end() && mergeable(position->second, next->second)) {
      position->second.bytes += next->second.bytes;
      memory.blocks.erase(next);
    } else {
      position = next;
    }
  }
}

size_t cached_bytes(const Memory& memory) {
  size_t bytes = 0;
  for (const auto& [offset, block] : memory.blocks) {
    bytes += !block.used && block.stream != kNoStream ? block.bytes : 0;
  }
  return bytes;
}

void free_device_memory(void* pointer) {
  const auto index = device_of(pointer);
  Memory& memory = *memories()[index];
  const std::lock_guard lock(memory.mutex);
  const size_t offset = static_cast<char*>(pointer) - memory.device;
  const auto position = memory.blocks.find(offset);
  Block& block = position->second;
  memory.stats.allocated_bytes[kAggregate].decrease(block.bytes);
  memory.stats.allocation[kAggregate].decrease(1);
  if (block.others.empty() || in_bad_fork()) {
    release(memory, position);
    return;
  }
  auto& points = memory.pending[offset];
  for (const auto id : block.others) {
    const c10::Device device(c10::DeviceType::PrivateUse1, index);
    points.push_back(mark(c10::Stream(c10::Stream::UNSAFE, device, id)));
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    const c10::Device device(c10::DeviceType::PrivateUse1, index);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_device_memory, device};
    }
    const auto stream = current_stream(index);
    Memory& memory = *memories()[index];
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::unique_lock lock(memory.mutex);
    release_reached(memory);
    auto position = find_free(memory, rounded, stream.id());
    if (position == memory.blocks.end()) {
      lock.unlock();
      synchronize_device(index);
      lock.lock();
      share_free_blocks(memory);
      position = find_free(memory, rounded, stream.id());
    }
    if (position == memory.blocks.end()) {
      ++memory.stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "example:", int(index), " has no free block of ", rounded,
          " bytes; ", memory.stats.allocated_bytes[kAggregate].current, " of its ", kDeviceBytes,
          " bytes are in use");
    }
    Block& block = position->second;
    if (block.bytes > rounded) {
      const Block rest{block.bytes - rounded, false, block.stream, {}};
      memory.blocks.emplace(position->first + rounded, rest);
      block.bytes = rounded;
    }
    block.used = true;
    block.stream = stream.id();
    memory.stats.allocated_bytes[kAggregate].increase(rounded);
    memory.stats.allocation[kAggregate].increase(1);
    const auto reserved = memory.stats.allocated_bytes[kAggregate].current + cached_bytes(memory);
    auto& reserved_stat = memory.stats.reserved_bytes[kAggregate];
    reserved_stat.current = reserved;
    reserved_stat.peak = std::max<int64_t>(reserved_stat.peak, reserved);
    char* pointer = memory.device + position->first;
    char* bytes_of_block = memory.host + position->first;
    lock.unlock();
    // Fresh memory is NaN as any floating-point number and -1 as any integer, so that a program
    // that reads it before it is written has an effect that tests see.
    queue_of(stream).submit([=] { std::memset(bytes_of_block, 0xff, rounded); });
    return {pointer, pointer, &free_device_memory, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const auto index = device_of(to);
    queue_of(current_stream(index)).submit([=] {
      std::memcpy(device_to_host(to), device_to_host(from), bytes);
    });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      synchronize_device(index);
      Memory& memory = *memories()[index];
      const std::lock_guard lock(memory.mutex);
      share_free_blocks(memory);
      memory.stats.reserved_bytes[kAggregate].current =
          memory.stats.allocated_bytes[kAggregate].current;
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    const auto index = device_of(pointer.get());
    if (index < 0) {
      return;
    }
    Memory& memory = *memories()[index];
    const std::lock_guard lock(memory.mutex);
    const size_t offset = static_cast<char*>(pointer.get()) - memory.device;
    Block& block = std::prev(memory.blocks.upper_bound(offset))->second;
    if (block.stream != stream.id()) {
      block.others.insert(stream.id());
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Memory& memory = *memories().at(index);
    const std::lock_guard lock(memory.mutex);
    return memory.stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each_stat(index, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    each_stat(index, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Memory& memory = *memories().at(index);
    const std::lock_guard lock(memory.mutex);
    const size_t used = memory.stats.allocated_bytes[kAggregate].current + cached_bytes(memory);
    return {kDeviceBytes - used, kDeviceBytes};
  }

 private:
  template <typename Action>
  void each_stat(c10::DeviceIndex index, Action action) {
    Memory& memory = *memories().at(index);
    const std::lock_guard lock(memory.mutex);
    action(memory.stats.allocated_bytes[kAggregate]);
    action(memory.stats.reserved_bytes[kAggregate]);
    action(memory.stats.allocation[kAggregate]);
  }
};

struct PinnedBlock {
  size_t bytes;
  std::set<std::pair<c10::DeviceIndex, c10::StreamId>> streams;
};

std::mutex pinned_mutex;

// Never destroyed, see memories().
std::map<const char*, PinnedBlock>& pinned_blocks() {
  static auto* all = new std::map<const char*, PinnedBlock>();
  return *all;
}

// Return the block that a pointer is in, or the end. The caller has the lock.
auto find_pinned(const void* pointer) {
  auto& blocks = pinned_blocks();
  auto next = blocks.upper_bound(static_cast<const char*>(pointer));
  if (next == blocks.begin()) {
    return blocks.end();
  }
  const auto block = std::prev(next);
  const bool inside = static_cast<const char*>(pointer) < block->first + block->second.bytes;
  return inside ? block : blocks.end();
}

void free_pinned_memory(void* pointer) {
  std::vector<c10::Stream> users;
  {
    const std::lock_guard lock(pinned_mutex);
    const auto position = pinned_blocks().find(static_cast<const char*>(pointer));
    for (const auto& [index, id] : position->second.streams) {
      const c10::Device device(c10::DeviceType::PrivateUse1, index);
      users.emplace_back(c10::Stream::UNSAFE, device, id);
    }
    pinned_blocks().erase(position);
  }
  if (in_bad_fork()) {
    return;
  }
  // The last stream to be done with its present tasks frees the memory.
  const std::shared_ptr<void> memory(pointer, [](void* last) { c10::free_cpu(last); });
  for (const auto& stream : users) {
    queue_of(stream).submit([memory] {});
  }
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_pinned_memory, c10::Device(c10::kCPU)};
    }
    void* pointer = c10::alloc_cpu(bytes);
    const std::lock_guard lock(pinned_mutex);
    pinned_blocks()[static_cast<const char*>(pointer)] = {bytes, {}};
    return {pointer, pointer, &free_pinned_memory, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_memory; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::DeviceAllocator* device_allocator() {
  static Allocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

c10::DeviceIndex device_of(const void* pointer) noexcept {
  for (size_t index = 0; index < memories().size(); ++index) {
    const char* start = memories()[index]->device;
    if (pointer >= start && pointer < start + kDeviceBytes) {
      return static_cast<c10::DeviceIndex>(index);
    }
  }
  return -1;
}

void* device_to_host(const void* pointer) {
  if (pointer == nullptr) {
    return nullptr;
  }
  const auto index = device_of(pointer);
  TORCH_CHECK(index >= 0, pointer, " is no address of an example device");
  const Memory& memory = *memories()[index];
  return memory.host + (static_cast<const char*>(pointer) - memory.device);
}

bool is_pinned(const void* pointer) noexcept {
  const std::lock_guard lock(pinned_mutex);
  return find_pinned(pointer) != pinned_blocks().end();
}

void use_pinned(const void* pointer, c10::Stream stream) {
  const std::lock_guard lock(pinned_mutex);
  const auto block = find_pinned(pointer);
  if (block != pinned_blocks().end()) {
    block->second.streams.emplace(stream.device_index(), stream.id());
  }
}

at::Tensor host_view(const at::Tensor& tensor) {
  void* start = tensor.storage().data_ptr().get();
  const auto offset = tensor.storage_offset() * tensor.element_size();
  void* first = start ? static_cast<char*>(device_to_host(start)) + offset : nullptr;
  auto view = at::from_blob(
      first, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

c10::Allocator* registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, device_allocator());
  return device_allocator();
}();

}  // namespace example
