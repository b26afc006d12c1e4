// Operators of the device.
//
// The device computes as the CPU does, on the bytes behind its memory: an operator becomes a task
// of the current stream, and the call returns before the task runs. Operators that are not in the
// lists below are computed by torch's CPU fallback, which copies all arguments.

#include "operators.h"

#include "generator.h"
#include "memory.h"
#include "stream.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace example {
namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// Allocation and views.

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "Only strided tensors are supported");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "Only strided tensors are supported");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_tensor(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    const size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
    if (self.numel() != 0 && self.storage().nbytes() < bytes) {
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
    }
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

// Copies.

// Tell whether the call can return before the stream has read or written the host tensor.
bool may_return(const at::Tensor& host, bool non_blocking) {
  return non_blocking && is_pinned(host.storage().data());
}

void copy_between_devices(const at::Tensor& self, const at::Tensor& source) {
  const auto from = current_stream(source.device().index());
  const auto to = current_stream(self.device().index());
  wait_for(from, mark(to));
  queue_of(from).submit(
      [to = host_view(self), from = host_view(source)]() mutable { to.copy_(from); });
  wait_for(to, mark(from));
}

at::Tensor& copy_tensor(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) {
    return self;
  }
  const auto expanded = source.expand_as(self);
  if (on_device(self) && on_device(source)) {
    copy_between_devices(self, expanded);
    return self;
  }
  const at::Tensor& device_tensor = on_device(self) ? self : source;
  const at::Tensor& host = on_device(self) ? source : self;
  const auto stream = current_stream(device_tensor.device().index());
  if (may_return(host, non_blocking)) {
    use_pinned(host.storage().data(), stream);
  }
  // The task holds views without ownership of the host's memory, which must stay until it is done.
  const auto viewed = [](const at::Tensor& tensor) {
    if (on_device(tensor)) {
      return host_view(tensor);
    }
    auto view = at::from_blob(
        const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
        tensor.options().requires_grad(false));
    view._set_conj(tensor.is_conj());
    view._set_neg(tensor.is_neg());
    return view;
  };
  queue_of(stream).submit(
      [to = viewed(self), from = viewed(expanded)]() mutable { to.copy_(from); });
  if (!may_return(host, non_blocking)) {
    queue_of(stream).synchronize();
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  auto written = target;
  return copy_tensor(written, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// The CPU fallback.

std::atomic<bool> fallback_is_allowed{true};
std::mutex calls_mutex;
std::map<std::string, int64_t> calls;

void cpu_fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      fallback_is_allowed, "The example device has no operator ", name,
      ", and its CPU fallback is switched off");
  {
    const std::lock_guard lock(calls_mutex);
    ++calls[name];
  }
  at::native::cpu_fallback(op, stack);
}

// Operators as tasks.

// Apply a function to each tensor of an argument, and return the argument with the results.
template <typename Function>
IValue map_tensors(const IValue& value, Function function) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(function(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(
          tensor.has_value() && tensor->defined() ? std::make_optional(function(*tensor))
                                                  : std::nullopt);
    }
    return mapped;
  }
  return value;
}

at::Tensor without_memory(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

// Return the CPU tensor that a task computes with.
at::Tensor operand(const at::Tensor& tensor, const std::string& name, c10::Device device) {
  if (on_device(tensor)) {
    TORCH_CHECK(
        tensor.device() == device, name, " got tensors of ", device, " and ", tensor.device());
    return host_view(tensor);
  }
  TORCH_CHECK(
      tensor.device().is_cpu() && tensor.dim() == 0, name, " got a tensor of ", device,
      " and a tensor of ", tensor.device(), " with ", tensor.dim(), " dimensions");
  // The caller may change the number before the task runs.
  return tensor.clone();
}

c10::Device device_of_arguments(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& value : arguments) {
    map_tensors(value, [&](const at::Tensor& tensor) {
      if (!device && on_device(tensor)) {
        device = tensor.device();
      }
      return tensor;
    });
  }
  return device.value_or(c10::Device(kDevice, current_device()));
}

// Call an operator on tensors without memory, and return its results: their shapes and strides.
Stack shapes_of_results(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  Stack stack;
  for (const auto& value : arguments) {
    stack.push_back(map_tensors(value, [](const at::Tensor& tensor) {
      return on_device(tensor) ? without_memory(tensor) : tensor;
    }));
  }
  op.callBoxed(&stack);
  return stack;
}

// Let the current stream compute an operator.
//
// The operator runs on tensors without memory first, which gives the shapes of its results. Results
// that are arguments are resized, and others are allocated.
void submit_operator(
    const c10::OperatorHandle& op, Stack* stack, const std::vector<IValue>& given) {
  const auto& schema = op.schema();
  const auto device = device_of_arguments(given);
  const c10::DeviceGuard guard(device);
  const auto name = c10::toString(op.operator_name());
  const auto shapes = shapes_of_results(op, given);

  std::vector<IValue> results;
  // Results that the operator allocates, and their positions.
  std::vector<std::pair<size_t, at::Tensor>> allocated;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    const auto shape = shapes[i].toTensor();
    if (alias == nullptr) {
      auto result = at::empty_strided(
          shape.sizes(), shape.strides(), shape.options().device(device));
      allocated.emplace_back(i, host_view(result));
      results.emplace_back(std::move(result));
      continue;
    }
    for (size_t j = 0; j < schema.arguments().size(); ++j) {
      const auto* of_argument = schema.arguments()[j].alias_info();
      if (of_argument != nullptr && *of_argument == *alias) {
        const auto& target = given[j].toTensor();
        if (target.sizes() != shape.sizes()) {
          resize_tensor(target, shape.sizes(), std::nullopt);
        }
        results.push_back(given[j]);
      }
    }
  }

  Stack operands;
  for (const auto& value : given) {
    operands.push_back(map_tensors(
        value, [&](const at::Tensor& tensor) { return operand(tensor, name, device); }));
  }
  queue_of(current_stream(device.index()))
      .submit([op, operands = std::move(operands), allocated = std::move(allocated)]() mutable {
        op.callBoxed(&operands);
        for (auto& [position, memory] : allocated) {
          memory.copy_(operands[position].toTensor());
        }
      });
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) {
    torch::jit::push(*stack, std::move(result));
  }
}

std::vector<IValue> arguments_of(const c10::OperatorHandle& op, const Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  return arguments.vec();
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  submit_operator(op, stack, arguments_of(op, *stack));
}

// An operator that draws random numbers from its argument of type Generator?.
void run_random(const c10::OperatorHandle& op, Stack* stack) {
  auto arguments = arguments_of(op, *stack);
  const c10::DeviceGuard guard(device_of_arguments(arguments));
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.schema().arguments()[i].name() == "generator") {
      const auto& given = arguments[i];
      const auto generator = given.isNone() ? default_generator(-1) : given.toGenerator();
      arguments[i] = next_draw(generator);
    }
  }
  submit_operator(op, stack, arguments);
}

// An operator that takes indices: on the host too, and as masks, whose number of elements that are
// set is the size of the result. The stream has to compute that number first.
void run_indexed(const c10::OperatorHandle& op, Stack* stack) {
  auto arguments = arguments_of(op, *stack);
  const auto device = device_of_arguments(arguments);
  for (auto& value : arguments) {
    if (value.isOptionalTensorList()) {
      value = map_tensors(value, [&](const at::Tensor& index) {
        const bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
        if (is_mask) {
          return index.to(index.options().device(at::kCPU));
        }
        return index.to(index.options().device(device));
      });
    }
  }
  bool has_masks = false;
  for (const auto& value : arguments) {
    if (value.isOptionalTensorList()) {
      map_tensors(value, [&](const at::Tensor& index) {
        has_masks |= index.device().is_cpu();
        return index;
      });
    }
  }
  if (has_masks) {
    cpu_fallback(op, stack);
    return;
  }
  submit_operator(op, stack, arguments);
}

// The operators that the device has. Of a structured operator, whose name ends with "out" here,
// torch derives the functional and the in-place form.
constexpr const char* kOperators[] = {
    // arithmetic
    "add.out", "sub.out", "mul.out", "div.out", "div.out_mode", "floor_divide",
    "remainder.Tensor_out", "fmod.Tensor_out", "neg.out", "abs.out", "reciprocal.out", "sqrt.out",
    "rsqrt.out", "exp.out", "exp2.out", "log.out", "log1p.out", "log2.out", "sin.out", "cos.out",
    "tanh.out", "sigmoid.out", "erf.out", "floor.out", "ceil.out", "round.out", "trunc.out",
    "sign.out", "pow.Tensor_Scalar_out", "pow.Tensor_Tensor_out", "pow.Scalar_out", "maximum.out",
    "minimum.out", "clamp.out", "clamp.Tensor_out", "clamp_min.out", "clamp_max.out",
    "addcmul.out", "addcdiv.out", "lerp.Scalar_out", "lerp.Tensor_out", "silu.out", "gelu.out",
    "leaky_relu.out", "softplus.out", "hardtanh.out", "relu", "relu_",
    // comparisons, logic and bits
    "eq.Tensor_out", "eq.Scalar_out", "ne.Tensor_out", "ne.Scalar_out", "lt.Tensor_out",
    "lt.Scalar_out", "le.Tensor_out", "le.Scalar_out", "gt.Tensor_out", "gt.Scalar_out",
    "ge.Tensor_out", "ge.Scalar_out", "logical_and.out", "logical_or.out", "logical_not.out",
    "logical_xor.out", "bitwise_and.Tensor_out", "bitwise_or.Tensor_out", "bitwise_xor.Tensor_out",
    "bitwise_not.out", "bitwise_left_shift.Tensor_out", "bitwise_right_shift.Tensor_out",
    "__lshift__.Scalar", "__lshift__.Tensor", "__rshift__.Scalar", "__rshift__.Tensor", "isnan",
    "isneginf.out", "isposinf.out", "where.self", "where.self_out", "isin.Tensor_Tensor_out",
    // matrix multiplication
    "mm.out", "addmm.out", "bmm.out", "baddbmm.out",
    // reductions and scans
    "sum.IntList_out", "mean.out", "amax.out", "amin.out", "aminmax.out", "max.dim_max",
    "min.dim_min", "max", "min", "argmax.out", "argmin.out", "any.out", "any.all_out", "all.out",
    "all.all_out", "prod.int_out", "cumsum.out", "cumprod.out", "linalg_vector_norm.out",
    "_softmax.out", "_log_softmax.out", "logsumexp.out", "var.correction", "native_layer_norm",
    // sorting
    "sort.values_stable", "topk.values", "bucketize.Tensor",
    // memory
    "fill_.Scalar", "fill_.Tensor", "zero_", "masked_fill_.Scalar", "masked_fill_.Tensor",
    "arange.start_out", "cat.out", "index_select", "index_select.out", "index_copy.out",
    "index_add.out", "gather.out", "scatter.src_out", "scatter.value_out", "scatter_add.out",
    "tril.out", "triu.out", "flip", "roll",
};

constexpr const char* kIndexedOperators[] = {"index.Tensor_out", "_index_put_impl_"};

constexpr const char* kRandomOperators[] = {
    "uniform_", "normal_", "exponential_", "random_", "random_.from", "random_.to",
    "bernoulli_.float", "multinomial",
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_tensor);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("alias", at::native::alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("is_set_to", at::native::is_set_to);
  library.impl("copy_", copy_tensor);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  for (const char* name : kOperators) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
  for (const char* name : kIndexedOperators) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_indexed>());
  }
  for (const char* name : kRandomOperators) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_random>());
  }
}

// Attention is computed by the operators that torch composes it from.
int64_t choose_attention(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  constexpr int64_t composed = 0;
  return composed;
}

}  // namespace
}  // namespace example

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &example::choose_attention)
}  // namespace at::native

namespace example {

std::map<std::string, int64_t> fallback_calls() {
  const std::lock_guard lock(calls_mutex);
  return calls;
}

void clear_fallback_calls() {
  const std::lock_guard lock(calls_mutex);
  calls.clear();
}

void allow_fallback(bool allowed) { fallback_is_allowed = allowed; }

bool fallback_allowed() { return fallback_is_allowed; }

}  // namespace example
