// Attention over a paged cache, called as native_attention.py calls it.

#include "../attention/attention.h"

#include <cstring>
#include <stdexcept>
#include <vector>

#include "../vectors.h"
#include "golden.h"

namespace {

constexpr int64_t kPageTokens = 32;

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kCacheFloat32;
  if (dtype == "bfloat16") return kCacheBFloat16;
  if (dtype == "float16") return kCacheFloat16;
  if (dtype == "float8_e4m3fn") return kCacheE4M3;
  if (dtype == "float8_e5m2") return kCacheE5M2;
  if (dtype == "int8") return kCacheInt8;
  throw std::runtime_error("kernels do not take " + dtype);
}

void put_number(std::vector<char>& to, int64_t index, float value, int32_t type) {
  if (type == kCacheFloat32) {
    std::memcpy(to.data() + index * 4, &value, 4);
  } else {
    const Halves halves = type == kCacheBFloat16 ? bfloat16_of_floats(splat(value))
                                                 : float16_of_floats(splat(value));
    std::memcpy(to.data() + index * 2, &halves, 2);
  }
}

double optional_number(const Case& golden, const std::string& name) {
  const auto found = golden.numbers.find(name);
  return found == golden.numbers.end() ? 0 : found->second;
}

// One scale for all heads or one per head; 1 without a scale.
std::vector<float> scales_of(const Array* given) {
  if (given == nullptr) return {1.0f};
  std::vector<float> scales;
  for (int64_t i = 0; i < given->shape[0]; ++i) {
    scales.push_back(float(number_at(given->memory.data(), given->dtype, i)));
  }
  return scales;
}

// Pages of the cases can have any size. Here the cached tokens move to pages of the kernel's size,
// in reverse order, and the kernel stores the tokens of the step.
std::vector<Result> paged_attention(const Case& golden) {
  const Array &query = golden.array("query"), &keys = golden.array("key_cache"),
              &values = golden.array("value_cache"), &table = golden.array("page_table");
  const int64_t T = query.shape[0], N = query.shape[1], D = query.shape[2];
  const int64_t S = keys.shape[1], K = keys.shape[2], B = golden.array("seq_lens").shape[0];
  const int64_t* starts = golden.array("query_starts").data<int64_t>();
  const int64_t* lengths = golden.array("seq_lens").data<int64_t>();
  const int32_t type = type_of(query.dtype), stored = type_of(keys.dtype);
  const bool is_rounded = type != stored;
  const std::vector<float> key_scales = scales_of(golden.find("key_scale"));
  const std::vector<float> value_scales = scales_of(golden.find("value_scale"));

  int64_t most = 1, pages = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t count = (lengths[b] + kPageTokens - 1) / kPageTokens;
    most = count > most ? count : most;
    pages += count;
  }
  const int64_t size = 4 / elements_per_word(stored), page_bytes = 2 * kPageTokens * D * size;
  std::vector<char> memory(size_t(K * pages * page_bytes), char(0xff));  // filled with NaN
  interposer_kv_cache cache = {memory.data(), pages * page_bytes, page_bytes, kPageTokens,
                               int32_t(D),    stored};
  std::vector<int64_t> own_table(size_t(B * most), 0), slots(size_t(T), 0);
  const int64_t x_size = 4 / elements_per_word(type);
  std::vector<char> key(size_t(T * K * D * x_size)), value(key.size());
  int64_t next = pages;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t before = lengths[b] - (starts[b + 1] - starts[b]);
    for (int64_t at = 0; at < lengths[b]; ++at) {
      int64_t& page = own_table[size_t(b * most + at / kPageTokens)];
      if (at % kPageTokens == 0) page = --next;
      const int64_t slot = page * kPageTokens + at % kPageTokens;
      const int64_t given = table.data<int64_t>()[b * table.shape[1] + at / S] * S + at % S;
      if (at >= before) slots[size_t(starts[b] + at - before)] = slot;
      for (int64_t head = 0; head < K; ++head) {
        const int64_t row = (given * K + head) * D;
        if (at < before) {
          put_token(cache, head, slot, keys.data<char>() + row * size,
                    values.data<char>() + row * size);
          continue;
        }
        const int64_t to = ((starts[b] + at - before) * K + head) * D;
        const float key_scale = is_rounded ? key_scales[size_t(head) % key_scales.size()] : 1;
        const float value_scale = is_rounded ? value_scales[size_t(head) % value_scales.size()] : 1;
        for (int64_t i = 0; i < D; ++i) {
          const double one = number_at(keys.memory.data(), keys.dtype, row + i);
          const double other = number_at(values.memory.data(), values.dtype, row + i);
          put_number(key, to + i, float(one) * key_scale, type);
          put_number(value, to + i, float(other) * value_scale, type);
        }
      }
    }
  }

  interposer_attention_step step = {};
  step.type = type;
  step.cache_type = stored;
  step.num_heads = int32_t(N), step.num_kv_heads = int32_t(K);
  step.head_size = int32_t(D), step.page_tokens = kPageTokens;
  step.scale = golden.number("scale");
  step.softcap = optional_number(golden, "softcap");
  step.window_tokens = int64_t(optional_number(golden, "window_tokens"));
  step.num_sequences = B;
  step.query_starts = starts;
  step.seq_lens = lengths;
  step.page_table = own_table.data();
  step.table_stride = most;
  step.slots = slots.data();
  std::vector<int64_t> plan(size_t(interposer_plan_attention(&step, nullptr) / 8));
  interposer_plan_attention(&step, plan.data());

  Rows out(query.dtype, T, N * D, 0);
  const Array* sinks = golden.find("sinks");
  interposer_attention_call call = {};
  call.plan = reinterpret_cast<const interposer_attention_plan*>(plan.data());
  call.query = query.data<void>();
  call.key = key.data();
  call.value = value.data();
  call.query_stride = N * D;
  call.key_stride = call.value_stride = K * D;
  call.cache = memory.data();
  call.head_stride = cache.head_stride;
  call.page_stride = cache.page_stride;
  call.out = out.data();
  call.sinks = sinks ? sinks->data<void>() : nullptr;
  if (is_rounded) {
    call.key_scales = key_scales.data();
    call.value_scales = value_scales.data();
    call.scale_stride = key_scales.size() > 1 ? 1 : 0;
  }
  if (const int32_t failure = interposer_attention(&call)) {
    throw std::runtime_error("the kernel failed with code " + std::to_string(failure));
  }
  return {out.result()};
}

const Registration registered("paged_attention", paged_attention);

}  // namespace
