#include "stream.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

namespace example {
namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
// torch has no call that destroys a stream, so further streams share the threads of these.
constexpr int kMaxStreams = 32;

std::atomic<bool> bad_fork{false};
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::vector<c10::StreamId> streams_of_thread;

// Never destroyed: threads of streams use it until the process ends.
struct Streams {
  std::mutex mutex;
  std::vector<std::vector<std::unique_ptr<Queue>>> queues;
  std::vector<uint64_t> handed_out;

  Streams() : queues(device_count()), handed_out(device_count(), 0) {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      add(device);
    }
    pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
  }

  Queue& add(c10::DeviceIndex device) {
    auto& own = queues[device];
    const auto id = static_cast<c10::StreamId>(own.size());
    const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
    return *own.emplace_back(std::make_unique<Queue>(stream));
  }
};

Streams& streams() {
  static auto* instance = new Streams();
  return *instance;
}

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "There is no device example:", int(device), ", this process has ", int(device_count()),
      ". The environment variable EXAMPLE_DEVICES sets the number");
}

std::vector<c10::StreamId>& current_ids() {
  streams_of_thread.resize(device_count(), 0);
  return streams_of_thread;
}

}  // namespace

c10::DeviceIndex device_count() noexcept {
  static const c10::DeviceIndex count = [] {
    const char* text = std::getenv("EXAMPLE_DEVICES");
    const int number = text ? std::atoi(text) : 2;
    return static_cast<c10::DeviceIndex>(std::min(std::max(number, 0), kMaxDevices));
  }();
  return count;
}

c10::DeviceIndex current_device() noexcept { return device_of_thread; }

void set_device(c10::DeviceIndex device) {
  check_device(device);
  device_of_thread = device;
}

bool in_bad_fork() noexcept { return bad_fork; }

void Queue::submit(std::function<void()> task) {
  TORCH_CHECK(
      !in_bad_fork(),
      "This process is a fork of a process that has used the example device. Start processes "
      "with the method 'spawn'");
  const std::lock_guard lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();
  }
  tasks_.push_back(std::move(task));
  ++submitted_;
  changed_.notify_all();
}

void Queue::work() {
  // Tasks write tensors that were made in inference mode, and others, and record no gradients.
  const c10::InferenceMode inference;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::string error;
    try {
      task();
    } catch (const c10::Error& raised) {
      error = raised.what_without_backtrace();
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    task = nullptr;
    lock.lock();
    if (error_.empty()) {
      error_ = std::move(error);
    }
    ++completed_;
    changed_.notify_all();
  }
}

void Queue::synchronize() {
  std::unique_lock lock(mutex_);
  const uint64_t last = submitted_;
  changed_.wait(lock, [this, last] { return completed_ >= last; });
  const std::string error = std::exchange(error_, {});
  TORCH_CHECK(
      error.empty(), "An operator failed on stream ", stream_.id(), " of example:",
      int(stream_.device_index()), " some time before this call: ", error);
}

bool Queue::idle() {
  const std::lock_guard lock(mutex_);
  return completed_ == submitted_;
}

Queue& queue_of(c10::Stream stream) {
  auto& all = streams();
  const std::lock_guard lock(all.mutex);
  return *all.queues.at(stream.device_index()).at(stream.id());
}

c10::Stream default_stream(c10::DeviceIndex device) {
  check_device(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), 0);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  check_device(device);
  auto& all = streams();
  const std::lock_guard lock(all.mutex);
  auto& own = all.queues[device];
  if (own.size() < kMaxStreams) {
    return all.add(device).stream();
  }
  return own[1 + all.handed_out[device]++ % (kMaxStreams - 1)]->stream();
}

c10::Stream current_stream(c10::DeviceIndex device) {
  check_device(device);
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(kDevice, device), current_ids()[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto previous = current_stream(stream.device_index());
  current_ids()[stream.device_index()] = stream.id();
  return previous;
}

void synchronize_device(c10::DeviceIndex device) {
  check_device(device);
  auto& all = streams();
  std::vector<Queue*> queues;
  {
    const std::lock_guard lock(all.mutex);
    for (auto& queue : all.queues[device]) {
      queues.push_back(queue.get());
    }
  }
  for (auto* queue : queues) {
    queue->synchronize();
  }
}

void Point::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Point::reached() {
  const std::lock_guard lock(mutex_);
  return reached_;
}

std::chrono::steady_clock::time_point Point::time() {
  const std::lock_guard lock(mutex_);
  return time_;
}

std::shared_ptr<Point> mark(c10::Stream stream) {
  auto point = std::make_shared<Point>();
  queue_of(stream).submit([point] { point->reach(); });
  return point;
}

void wait_for(c10::Stream stream, std::shared_ptr<Point> point) {
  queue_of(stream).submit([point = std::move(point)] { point->wait(); });
}

}  // namespace example
