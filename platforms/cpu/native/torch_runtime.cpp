#include "torch_runtime.h"

#include <dlfcn.h>

#include <initializer_list>

#include "pool.h"
#include "vectors.h"

extern const TorchOp interposer_attention_ops[];
extern const TorchOp interposer_dense_ops[];
extern const TorchOp interposer_elementwise_ops[];
extern const TorchOp interposer_experts_ops[];
extern const TorchOp interposer_linear_ops[];
extern const TorchOp interposer_lora_ops[];
extern const TorchOp interposer_recurrence_ops[];
extern const TorchOp interposer_rounding_ops[];
extern const TorchOp interposer_sampling_ops[];

namespace {

// The stable C interface of torch 2.10 and later: torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h.
typedef struct OpaqueLibrary* Library;
constexpr uint64_t kVersion = 0x020a000000000000;

struct Torch {
  int32_t (*library_fragment)(const char*, const char*, uint32_t, Library*);
  int32_t (*library_impl)(const char*, const char*, const char*, uint32_t, Library*);
  int32_t (*define)(Library, const char*);
  int32_t (*implement)(Library, const char*, void (*)(TorchValue*, uint64_t, uint64_t), uint64_t);
  int32_t (*delete_tensor)(OpaqueTensor*);
  int32_t (*data_ptr)(OpaqueTensor*, void**);
  int32_t (*dtype)(OpaqueTensor*, int32_t*);
  int32_t (*numel)(OpaqueTensor*, int64_t*);
  int32_t (*size)(OpaqueTensor*, int64_t, int64_t*);
  int32_t (*stride)(OpaqueTensor*, int64_t, int64_t*);
  int32_t (*float32)();
  int32_t (*bfloat16)();
  int32_t (*float16)();
  int32_t (*int8)();
};

Torch torch = {};
void* library = nullptr;
const char* missing = "interposer_attach was not called";

template <class F>
void find(F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr && missing == nullptr) missing = name;
}

}  // namespace

TorchTensor::TorchTensor(TorchValue value) : tensor_(reinterpret_cast<OpaqueTensor*>(value)) {
  torch.data_ptr(tensor_, &data_);
}

TorchTensor::~TorchTensor() { torch.delete_tensor(tensor_); }

int32_t TorchTensor::type() const {
  int32_t dtype = -1;
  torch.dtype(tensor_, &dtype);
  if (dtype == torch.float32()) return kFloat32;
  if (dtype == torch.bfloat16()) return kBFloat16;
  if (dtype == torch.float16()) return kFloat16;
  return dtype == torch.int8() ? kInt8 : kNone;
}

int64_t TorchTensor::size(int64_t axis) const {
  int64_t value = 0;
  torch.size(tensor_, axis, &value);
  return value;
}

int64_t TorchTensor::stride(int64_t axis) const {
  int64_t value = 0;
  torch.stride(tensor_, axis, &value);
  return value;
}

int64_t TorchTensor::count() const {
  int64_t value = 0;
  torch.numel(tensor_, &value);
  return value;
}

extern "C" {

const char* interposer_attach(const char* path) {
  if (library == nullptr) library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  missing = nullptr;
  if (library == nullptr) return missing = "its library loaded";
  // dlsym on the handle also searches the library's dependencies, so this finds the OpenMP runtime
  // that torch uses.
  interposer_set_pool(dlsym(library, "GOMP_parallel"), dlsym(library, "omp_get_thread_num"),
                      dlsym(library, "omp_get_num_threads"), dlsym(library, "omp_get_max_threads"));
  find(torch.library_fragment, "aoti_torch_library_init_fragment");
  find(torch.library_impl, "aoti_torch_library_init_impl");
  find(torch.define, "aoti_torch_library_def");
  find(torch.implement, "torch_library_impl");
  find(torch.delete_tensor, "aoti_torch_delete_tensor_object");
  find(torch.data_ptr, "aoti_torch_get_data_ptr");
  find(torch.dtype, "aoti_torch_get_dtype");
  find(torch.numel, "aoti_torch_get_numel");
  find(torch.size, "aoti_torch_get_size");
  find(torch.stride, "aoti_torch_get_stride");
  find(torch.float32, "aoti_torch_dtype_float32");
  find(torch.bfloat16, "aoti_torch_dtype_bfloat16");
  find(torch.float16, "aoti_torch_dtype_float16");
  find(torch.int8, "aoti_torch_dtype_int8");
  return missing;
}

const char* interposer_register_ops() {
  static bool done = false;
  if (missing || done) return missing;
  // Never deleted: deleting a library unregisters its ops.
  Library definitions = nullptr, implementations = nullptr;
  if (torch.library_fragment("interposer_cpu", __FILE__, __LINE__, &definitions) ||
      torch.library_impl("interposer_cpu", "CPU", __FILE__, __LINE__, &implementations)) {
    return "a library for ops";
  }
  for (const TorchOp* family : {interposer_linear_ops, interposer_elementwise_ops,
                                interposer_attention_ops, interposer_dense_ops,
                                interposer_experts_ops, interposer_lora_ops,
                                interposer_recurrence_ops, interposer_rounding_ops,
                                interposer_sampling_ops}) {
    for (const TorchOp* op = family; op->name; ++op) {
      if (torch.define(definitions, op->schema) ||
          torch.implement(implementations, op->name, op->run, kVersion)) {
        return op->name;
      }
    }
  }
  done = true;
  return nullptr;
}
}
