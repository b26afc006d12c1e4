#include "generator.h"

#include "stream.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/Utils.h>

#include <cstring>
#include <vector>

namespace example {
namespace {

struct State {
  uint64_t seed;
  uint64_t draws;
};

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state = {seed, 0}; }
  uint64_t current_seed() const override { return state.seed; }
  void set_offset(uint64_t offset) override { state.draws = offset; }
  uint64_t get_offset() const override { return state.draws; }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state.seed;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({sizeof(State)}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(bytes.mutable_data_ptr(), &state, sizeof(State));
    return bytes.getIntrusivePtr();
  }

  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(
        bytes.is_contiguous() && bytes.device().is_cpu() && bytes.numel() == sizeof(State) &&
            bytes.dtype() == at::kByte,
        "The state of a generator of the example device is ", sizeof(State),
        " bytes on the CPU, which get_state() returns");
    std::memcpy(&state, bytes.data(), sizeof(State));
  }

  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->state = state;
    return copy;
  }

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  State state{c10::default_rng_seed_val, 0};
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  // Never destroyed: Python may hold the generators while the process ends.
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      made->push_back(new_generator(index));
    }
    return made;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator next_draw(const at::Generator& generator) {
  auto* own = at::check_generator<DeviceGenerator>(generator);
  const std::lock_guard lock(own->mutex_);
  // An odd factor: the draws of one seed have different seeds.
  const uint64_t seed = own->state.seed + own->state.draws++ * 0x9e3779b97f4a7c15u;
  return at::detail::createCPUGenerator(seed);
}

}  // namespace example
