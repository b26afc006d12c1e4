// Attention to keys in rows as torch ops, for compiled models. Empty tensors mean absent arguments.

#include <cstring>

#include "../torch_runtime.h"
#include "dense.h"

namespace {

double fraction(TorchValue value) {
  double number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

template <class T>
T* optional(const TorchTensor& tensor) {
  return tensor.count() ? tensor.data<T>() : nullptr;
}

// query [T, N, D], key [U, K, D], value [U, K, E], out [T, N, E], starts [B + 1].
void ragged_attention_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), lse(stack[1]), query(stack[2]), key(stack[3]), value(stack[4]),
      query_starts(stack[5]), key_starts(stack[6]), sinks(stack[7]), slopes(stack[8]);
  interposer_dense_call call = {};
  call.type = call.stored_type = query.type();
  call.num_heads = int32_t(query.size(1)), call.num_kv_heads = int32_t(key.size(1));
  call.head_size = int32_t(query.size(2)), call.value_size = int32_t(value.size(2));
  call.scale = fraction(stack[9]), call.softcap = fraction(stack[10]);
  call.window_tokens = int64_t(stack[11]);
  call.causal = stack[12] ? 1 : 0;
  call.num_sequences = query_starts.count() - 1;
  call.query_starts = query_starts.data<const int64_t>();
  call.key_starts = key_starts.data<const int64_t>();
  call.query = query.data<const void>();
  call.query_stride = query.stride(0);
  const int64_t size = 4 / elements_per_word(call.type);
  call.keys = {key.data<const char>(), call.head_size * size, 0, key.stride(0) * size};
  call.values = {value.data<const char>(), call.value_size * size, 0, value.stride(0) * size};
  call.out = out.data<void>();
  call.lse = optional<float>(lse);
  call.sinks = optional<const float>(sinks);
  call.slopes = optional<const float>(slopes);
  interposer_dense_attention(&call);
}

// query [T, N, C + R], cache [P, S, C + R] with its CacheType as a number, out [T, N, C].
void latent_attention_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), query(stack[1]), cache(stack[2]), page_table(stack[3]),
      query_starts(stack[4]), seq_lens(stack[5]), cache_scale(stack[6]);
  interposer_dense_call call = {};
  call.type = query.type();
  call.stored_type = int32_t(stack[7]);
  call.num_heads = int32_t(query.size(1)), call.num_kv_heads = 1;
  call.head_size = int32_t(query.size(2)), call.value_size = int32_t(out.size(2));
  call.page_tokens = int32_t(cache.size(1));
  call.scale = fraction(stack[8]);
  call.causal = 1;
  call.num_sequences = seq_lens.count();
  call.query_starts = query_starts.data<const int64_t>();
  call.seq_lens = seq_lens.data<const int64_t>();
  call.page_table = page_table.data<const int64_t>();
  call.table_stride = page_table.stride(0);
  call.query = query.data<const void>();
  call.query_stride = query.stride(0);
  const int64_t size = 4 / elements_per_word(call.stored_type);
  call.keys = {cache.data<const char>(), 0, cache.stride(0) * size, cache.stride(1) * size};
  call.values = call.keys;
  call.out = out.data<void>();
  call.key_scales = call.value_scales = optional<const float>(cache_scale);
  interposer_dense_attention(&call);
}

// query [T, N, D], key and value [T, K, D], cache [K, P, 2, S, D] with its CacheType as a number,
// out [T, N, D], scales [2, 1] or [2, K].
void page_attention_out(TorchValue* stack, uint64_t, uint64_t) {
  const TorchTensor out(stack[0]), cache(stack[1]), query(stack[2]), key(stack[3]), value(stack[4]),
      page_table(stack[5]), query_starts(stack[6]), seq_lens(stack[7]), slots(stack[8]),
      sinks(stack[9]), scales(stack[10]);
  interposer_dense_call call = {};
  call.type = query.type();
  call.stored_type = int32_t(stack[11]);
  call.num_heads = int32_t(query.size(1)), call.num_kv_heads = int32_t(key.size(1));
  call.head_size = call.value_size = int32_t(query.size(2));
  call.page_tokens = int32_t(cache.size(3));
  call.scale = fraction(stack[12]), call.softcap = fraction(stack[13]);
  call.window_tokens = int64_t(stack[14]);
  call.causal = 1;
  call.num_sequences = seq_lens.count();
  call.query_starts = query_starts.data<const int64_t>();
  call.seq_lens = seq_lens.data<const int64_t>();
  call.page_table = page_table.data<const int64_t>();
  call.table_stride = page_table.stride(0);
  call.query = query.data<const void>();
  call.query_stride = query.stride(0);
  const int64_t size = 4 / elements_per_word(call.stored_type);
  const char* data = cache.data<const char>();
  call.keys = {data, cache.stride(0) * size, cache.stride(1) * size, cache.stride(3) * size};
  call.values = call.keys;
  call.values.data = data + cache.stride(2) * size;
  call.out = out.data<void>();
  call.sinks = optional<const float>(sinks);
  call.key_scales = optional<const float>(scales);
  if (call.key_scales) {
    call.scale_stride = scales.size(1) > 1 ? 1 : 0;
    call.value_scales = call.key_scales + scales.size(1);
  }
  const interposer_dense_store store = {
      slots.count(),  slots.data<const int64_t>(), key.data<const void>(),
      value.data<const void>(), key.stride(0),     value.stride(0)};
  interposer_dense_write(&call, &store);
  interposer_dense_attention(&call);
}

}  // namespace

extern const TorchOp interposer_dense_ops[];
const TorchOp interposer_dense_ops[] = {
    {"ragged_attention_out(Tensor(a!) out, Tensor(b!) lse, Tensor query, Tensor key, Tensor value, "
     "Tensor query_starts, Tensor key_starts, Tensor sinks, Tensor slopes, float scale, "
     "float softcap, int window_tokens, bool causal) -> ()",
     "ragged_attention_out", ragged_attention_out},
    {"latent_attention_out(Tensor(a!) out, Tensor query, Tensor cache, Tensor page_table, "
     "Tensor query_starts, Tensor seq_lens, Tensor cache_scale, int cache_type, float scale) -> ()",
     "latent_attention_out", latent_attention_out},
    {"page_attention_out(Tensor(a!) out, Tensor(b!) cache, Tensor query, Tensor key, Tensor value, "
     "Tensor page_table, Tensor query_starts, Tensor seq_lens, Tensor slots, Tensor sinks, "
     "Tensor scales, int cache_type, float scale, float softcap, int window_tokens) -> ()",
     "page_attention_out", page_attention_out},
    {nullptr, nullptr, nullptr},
};
