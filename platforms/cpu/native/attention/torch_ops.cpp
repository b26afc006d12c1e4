// Attention as a torch op, for compiled models.

#include "../torch_runtime.h"
#include "../vectors.h"
#include "attention.h"

namespace {

// query [T, N, D], key and value [T, K, D], cache [K, P, 2, S, D], out [T, N, D]. Empty tensors
// mean no sinks or no scales.
void attention_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), cache(stack[1]), query(stack[2]), key(stack[3]), value(stack[4]),
      plan(stack[5]), sinks(stack[6]), key_scales(stack[7]), value_scales(stack[8]);
  interposer_attention_call call = {};
  call.plan = plan.data<const interposer_attention_plan>();
  const int32_t stored = call.plan->step.cache_type;
  // For 4-bit values, the tensor's elements are bytes.
  const int64_t cache_size = stored == kCacheUInt4 ? 1 : 4 / elements_per_word(stored);
  call.query = query.data<const void>();
  call.key = key.data<const void>();
  call.value = value.data<const void>();
  call.query_stride = query.stride(0);
  call.key_stride = key.stride(0);
  call.value_stride = value.stride(0);
  call.cache = cache.data<char>();
  call.head_stride = cache.stride(0) * cache_size;
  call.page_stride = cache.stride(1) * cache_size;
  call.out = out.data<void>();
  call.sinks = sinks.count() ? sinks.data<const void>() : nullptr;
  call.key_scales = key_scales.count() ? key_scales.data<const float>() : nullptr;
  call.value_scales = value_scales.count() ? value_scales.data<const float>() : nullptr;
  call.scale_stride = key_scales.count() > 1 ? 1 : 0;
  interposer_attention(&call);
}

}  // namespace

extern const TorchOp interposer_attention_ops[];
const TorchOp interposer_attention_ops[] = {
    {"attention_out(Tensor(a!) out, Tensor(b!) cache, Tensor query, Tensor key, Tensor value, "
     "Tensor plan, Tensor sinks, Tensor key_scales, Tensor value_scales) -> ()",
     "attention_out", attention_out},
    {nullptr, nullptr, nullptr},
};
