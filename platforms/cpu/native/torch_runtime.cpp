#include "torch_runtime.h"

#include <dlfcn.h>

#include <cstdint>

#include "linear/packed.h"
#include "pool.h"
#include "vectors.h"

namespace {

// The stable C interface of torch 2.10 and later: torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h.
typedef struct OpaqueTensor* Tensor;
typedef struct OpaqueLibrary* Library;
typedef uint64_t Value;
typedef void (*Boxed)(Value* stack, uint64_t num_inputs, uint64_t num_outputs);
constexpr uint64_t kVersion = 0x020a000000000000;

struct Torch {
  int32_t (*library_fragment)(const char*, const char*, uint32_t, Library*);
  int32_t (*library_impl_of)(const char*, const char*, const char*, uint32_t, Library*);
  int32_t (*define)(Library, const char*);
  int32_t (*implement)(Library, const char*, Boxed, uint64_t);
  int32_t (*delete_tensor)(Tensor);
  int32_t (*data_ptr)(Tensor, void**);
  int32_t (*dtype)(Tensor, int32_t*);
  int32_t (*dim)(Tensor, int64_t*);
  int32_t (*size)(Tensor, int64_t, int64_t*);
  int32_t (*stride)(Tensor, int64_t, int64_t*);
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

struct View {
  Tensor tensor;
  void* data = nullptr;
  int32_t type = kNone;

  explicit View(Value value) : tensor(reinterpret_cast<Tensor>(value)) {
    int32_t dtype = -1;
    torch.data_ptr(tensor, &data);
    torch.dtype(tensor, &dtype);
    type = dtype == torch.float32()    ? kFloat32
           : dtype == torch.bfloat16() ? kBFloat16
           : dtype == torch.float16()  ? kFloat16
           : dtype == torch.int8()     ? kInt8
                                       : kNone;
  }
  View(const View&) = delete;
  ~View() { torch.delete_tensor(tensor); }

  int64_t size(int64_t axis) const {
    int64_t value = 0;
    torch.size(tensor, axis, &value);
    return value;
  }
  int64_t stride(int64_t axis) const {
    int64_t value = 0;
    torch.stride(tensor, axis, &value);
    return value;
  }
};

// linear_out(Tensor(a!) out, Tensor x, Tensor packed, Tensor x_scale) -> (); x [T, I], out [T, O].
void linear_out(Value* stack, uint64_t, uint64_t) {
  const View out(stack[0]), x(stack[1]), packed(stack[2]), scale(stack[3]);
  interposer_product product = {};
  product.weight = static_cast<const interposer_packed*>(packed.data);
  product.x = x.data;
  product.x_type = x.type;
  product.out = out.data;
  product.out_type = out.type;
  product.rows = x.size(0);
  product.x_stride = x.stride(0);
  product.out_stride = out.stride(0);
  product.x_scales = static_cast<const float*>(scale.data);
  product.x_scale_stride = x.type == kInt8 && scale.size(0) > 1 ? 1 : 0;
  interposer_linear(&product);
}

}  // namespace

extern "C" {

const char* interposer_attach(const char* path) {
  if (library == nullptr) library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  missing = nullptr;
  if (library == nullptr) return missing = "torch's library is not loaded";
  // A handle also finds what its library depends on, so this is the runtime that torch uses.
  interposer_set_pool(dlsym(library, "GOMP_parallel"), dlsym(library, "omp_get_thread_num"),
                      dlsym(library, "omp_get_num_threads"), dlsym(library, "omp_get_max_threads"));
  find(torch.library_fragment, "aoti_torch_library_init_fragment");
  find(torch.library_impl_of, "aoti_torch_library_init_impl");
  find(torch.define, "aoti_torch_library_def");
  find(torch.implement, "torch_library_impl");
  find(torch.delete_tensor, "aoti_torch_delete_tensor_object");
  find(torch.data_ptr, "aoti_torch_get_data_ptr");
  find(torch.dtype, "aoti_torch_get_dtype");
  find(torch.dim, "aoti_torch_get_dim");
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
  Library definitions = nullptr, implementations = nullptr;
  const char* schema = "linear_out(Tensor(a!) out, Tensor x, Tensor packed, Tensor x_scale) -> ()";
  // The libraries live as long as the process: deleting one takes its ops back.
  if (torch.library_fragment("interposer_cpu", __FILE__, __LINE__, &definitions) ||
      torch.define(definitions, schema)) {
    return "torch refused the definition of an op";
  }
  if (torch.library_impl_of("interposer_cpu", "CPU", __FILE__, __LINE__, &implementations) ||
      torch.implement(implementations, "linear_out", linear_out, kVersion)) {
    return "torch refused the implementation of an op";
  }
  done = true;
  return nullptr;
}
}
