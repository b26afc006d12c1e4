// Attention to keys in rows, called as native_dense.py and native_rows_attention.py call it.

#include "../dense/dense.h"

#include <stdexcept>
#include <vector>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kCacheFloat32;
  if (dtype == "bfloat16") return kCacheBFloat16;
  if (dtype == "float16") return kCacheFloat16;
  if (dtype == "float8_e4m3fn") return kCacheE4M3;
  if (dtype == "float8_e5m2") return kCacheE5M2;
  throw std::runtime_error("kernels do not take " + dtype);
}

double optional_number(const Case& golden, const std::string& name) {
  const auto found = golden.numbers.find(name);
  return found == golden.numbers.end() ? 0 : found->second;
}

std::vector<float> floats_of(const Array* given) {
  std::vector<float> floats;
  for (int64_t i = 0; given && i < given->shape[0]; ++i) {
    floats.push_back(float(number_at(given->memory.data(), given->dtype, i)));
  }
  return floats;
}

const float* data_or_null(const std::vector<float>& floats) {
  return floats.empty() ? nullptr : floats.data();
}

void run(const interposer_dense_call& call) {
  if (const int32_t failure = interposer_dense_attention(&call)) {
    throw std::runtime_error("the kernel failed with code " + std::to_string(failure));
  }
}

std::vector<Result> ragged(const Case& golden, bool with_lse) {
  const Array &query = golden.array("query"), &key = golden.array("key"),
              &value = golden.array("value"), &starts = golden.array("query_starts");
  const int64_t T = query.shape[0], N = query.shape[1], E = value.shape[2];
  const std::vector<float> sinks = floats_of(golden.find("sinks"));
  const std::vector<float> slopes = floats_of(golden.find("alibi_slopes"));
  interposer_dense_call call = {};
  call.type = call.stored_type = type_of(query.dtype);
  call.num_heads = int32_t(N), call.num_kv_heads = int32_t(key.shape[1]);
  call.head_size = int32_t(query.shape[2]), call.value_size = int32_t(E);
  call.scale = golden.number("scale"), call.softcap = optional_number(golden, "softcap");
  call.window_tokens = int64_t(optional_number(golden, "window_tokens"));
  call.causal = golden.number("causal") != 0;
  call.num_sequences = starts.shape[0] - 1;
  call.query_starts = starts.data<int64_t>();
  call.key_starts = golden.array("key_starts").data<int64_t>();
  call.query = query.data<void>();
  call.query_stride = N * call.head_size;
  const int64_t size = 4 / elements_per_word(call.type);
  const int64_t key_row = call.head_size * size, value_row = E * size;
  call.keys = {key.data<char>(), key_row, 0, call.num_kv_heads * key_row};
  call.values = {value.data<char>(), value_row, 0, call.num_kv_heads * value_row};
  Rows out(query.dtype, T, N * E, 0), lse("float32", T, N, 0);
  call.out = out.data();
  call.lse = with_lse ? static_cast<float*>(lse.data()) : nullptr;
  call.sinks = data_or_null(sinks);
  call.slopes = data_or_null(slopes);
  run(call);
  if (with_lse) return {out.result(), lse.result()};
  return {out.result()};
}

std::vector<Result> ragged_attention(const Case& golden) { return ragged(golden, false); }

std::vector<Result> ragged_attention_with_lse(const Case& golden) { return ragged(golden, true); }

std::vector<Result> latent_attention_decode(const Case& golden) {
  const Array &query = golden.array("query"), &cache = golden.array("cache"),
              &table = golden.array("page_table"), &lengths = golden.array("seq_lens");
  const int64_t T = query.shape[0], N = query.shape[1];
  const std::vector<float> scale = floats_of(golden.find("cache_scale"));
  interposer_dense_call call = {};
  call.type = type_of(query.dtype), call.stored_type = type_of(cache.dtype);
  call.num_heads = int32_t(N), call.num_kv_heads = 1;
  call.head_size = int32_t(query.shape[2]);
  call.value_size = int32_t(golden.number("latent_size"));
  call.page_tokens = int32_t(cache.shape[1]);
  call.scale = golden.number("scale");
  call.causal = 1;
  call.num_sequences = lengths.shape[0];
  call.query_starts = golden.array("query_starts").data<int64_t>();
  call.seq_lens = lengths.data<int64_t>();
  call.page_table = table.data<int64_t>();
  call.table_stride = table.shape[1];
  call.query = query.data<void>();
  call.query_stride = N * call.head_size;
  const int64_t row = call.head_size * 4 / elements_per_word(call.stored_type);
  call.keys = {cache.data<char>(), 0, call.page_tokens * row, row};
  call.values = call.keys;
  Rows out(query.dtype, T, N * call.value_size, 0);
  call.out = out.data();
  call.key_scales = call.value_scales = data_or_null(scale);
  run(call);
  return {out.result()};
}

const Registration registrations[] = {
    {"ragged_attention", ragged_attention},
    {"ragged_attention_with_lse", ragged_attention_with_lse},
    {"latent_attention_decode", latent_attention_decode},
};

}  // namespace
