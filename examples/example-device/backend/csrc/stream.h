// Streams and events: a stream is a thread that runs tasks one after the other.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace example {

// Devices of this process: the environment variable EXAMPLE_DEVICES, or 2.
c10::DeviceIndex device_count() noexcept;

// Device and stream of the calling thread.
c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex device);

// True in a fork of a process: the threads of the streams exist only in the parent.
bool in_bad_fork() noexcept;

class Queue {
 public:
  explicit Queue(c10::Stream stream) : stream_(stream) {}

  c10::Stream stream() const { return stream_; }

  // Append a task. A task that throws sets the error that the next synchronize() raises.
  void submit(std::function<void()> task);

  // Wait for all tasks that were submitted before; raise the error of a task, once.
  void synchronize();

  // Tell whether all tasks are done.
  bool idle();

 private:
  void work();

  const c10::Stream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  std::string error_;
  bool started_ = false;
};

Queue& queue_of(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
// Returns the stream that was current before.
c10::Stream exchange_stream(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);

// The point of a stream that an event marks. Recording an event again replaces its point, while
// streams that already wait for the previous point keep waiting for that.
class Point {
 public:
  void reach();
  void wait();
  bool reached();
  std::chrono::steady_clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_;
};

// Return the point behind all tasks that the stream has now.
std::shared_ptr<Point> mark(c10::Stream stream);
// Let a stream wait for a point before its next tasks.
void wait_for(c10::Stream stream, std::shared_ptr<Point> point);

}  // namespace example
