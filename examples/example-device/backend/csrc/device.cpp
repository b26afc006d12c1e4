// What torch asks a backend about: the device guard, and the hooks of the accelerator.

#include "generator.h"
#include "memory.h"
#include "stream.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace example {
namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// An event of torch points to this.
struct Event {
  std::shared_ptr<Point> point;
};

Event* as_event(void* event) { return static_cast<Event*>(event); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;

  GuardImpl() = default;
  explicit GuardImpl(c10::DeviceType type) { TORCH_INTERNAL_ASSERT(type == kDevice); }

  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, current_device()}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      set_device(device.index());
    }
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream)
      const override {
    device_allocator()->recordStream(pointer, stream);
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    as_event(*event)->point = mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(stream, as_event(event)->point);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || as_event(event)->point->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      as_event(event)->point->wait();
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before their times are compared");
    synchronizeEvent(first);
    synchronizeEvent(second);
    const std::chrono::duration<double, std::milli> difference =
        as_event(second)->point->time() - as_event(first)->point->time();
    return difference.count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete as_event(event);
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = current_device();
    set_device(device);
    return previous;
  }
  // A negative index leaves the device as it is.
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const auto index = device_of(pointer);
    return index < 0 ? c10::Device(c10::kCPU) : c10::Device(kDevice, index);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto memory = device_allocator()->allocate(bytes);
    if (const auto kept = std::min(storage.nbytes(), bytes)) {
      device_allocator()->copy_data(memory.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace example
