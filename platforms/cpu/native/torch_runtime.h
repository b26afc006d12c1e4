// What this library asks of the torch that is loaded: its threads, and the registration of ops.
// Nothing is linked: the functions are looked up in torch's own library, which names its OpenMP
// runtime, so that one binary serves many versions and brings no second runtime.
#pragma once

#include <cstdint>

// Arguments and results of an op, as torch's stable interface passes them.
typedef uint64_t TorchValue;

struct TorchOp {
  const char* schema;  // of results that are written to arguments: it returns nothing
  const char* name;
  void (*run)(TorchValue* stack, uint64_t num_inputs, uint64_t num_outputs);
};

// A tensor argument of an op. It is given back when this ends, so there is one for each.
class TorchTensor {
 public:
  explicit TorchTensor(TorchValue value);
  TorchTensor(const TorchTensor&) = delete;
  ~TorchTensor();

  int32_t type() const;  // of Type, kNone for others
  int64_t size(int64_t axis) const;
  int64_t stride(int64_t axis) const;
  int64_t count() const;

  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }

 private:
  struct OpaqueTensor* tensor_;
  void* data_ = nullptr;
};

extern "C" {
// Find torch in `library`, the path of the loaded libtorch_cpu. Returns null, or what is missing.
const char* interposer_attach(const char* library);

// Register the ops of all families for CPU tensors, once. Returns null, or what failed.
const char* interposer_register_ops();
}
