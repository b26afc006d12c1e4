// Interface to the loaded torch: its thread pool, and registration of ops. The library does not
// link to torch. Functions are looked up in the loaded libtorch and in the OpenMP runtime that it
// depends on, so that one binary serves many torch versions and brings no second OpenMP runtime.
#pragma once

#include <cstdint>

// Argument or result of an op, as torch's stable ABI passes it.
typedef uint64_t TorchValue;

struct TorchOp {
  const char* schema;  // results are written to arguments; the op returns nothing
  const char* name;
  void (*run)(TorchValue* stack, uint64_t num_inputs, uint64_t num_outputs);
};

// Owner of a tensor argument of an op; the destructor releases the tensor, so create exactly one
// per argument.
class TorchTensor {
 public:
  explicit TorchTensor(TorchValue value);
  TorchTensor(const TorchTensor&) = delete;
  ~TorchTensor();

  int32_t type() const;  // a Type, kNone for dtypes without one
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
// Look up torch's functions in `library`, the path of the loaded libtorch_cpu. Returns null, or the
// name of a missing function.
const char* interposer_attach(const char* library);

// Register the ops of all kernel families for CPU tensors; call once. Returns null, or the step
// that failed.
const char* interposer_register_ops();
}
