// Fused decoder blocks, called as native_decoder_block.py calls them.

#include "../blocks/blocks.h"

#include "../elementwise/elementwise.h"
#include "packed.h"

namespace {

constexpr int64_t kPageTokens = 32;

int32_t format_of(const std::string& form) {
  if (form == "float32") return kWeightFloat32;
  if (form == "bfloat16") return kWeightBFloat16;
  if (form == "int8") return kWeightInt8;
  if (form == "int4") return kWeightInt4;
  if (form == "e2m1") return kWeightE2M1;
  if (form == "e4m3") return kWeightE4M3;
  throw std::runtime_error("weights are never packed as " + form);
}

Packed packed(const Case& golden, const std::string& name) {
  return Packed(format_of(golden.text("format")), golden.array(name),
                golden.find(name + "_scales"), nullptr, golden.find(name + "_bias"));
}

const void* data_of(const Array* array) { return array ? array->data<void>() : nullptr; }

// Cached tokens are in pages in reverse order; tokens of the step get the following slots.
class Past {
 public:
  Past(const Case& golden, int32_t type, interposer_attention_step& step) {
    const Array &before = golden.array("before"), &starts = golden.array("query_starts");
    const Array &keys = golden.array("past_key"), &values = golden.array("past_value");
    const int64_t B = before.shape[0], K = step.num_kv_heads, D = step.head_size;
    const int64_t* first = starts.data<int64_t>();
    int64_t most = 1, pages = 0;
    for (int64_t b = 0; b < B; ++b) {
      lengths_.push_back(before.data<int64_t>()[b] + first[b + 1] - first[b]);
      const int64_t count = (lengths_.back() + kPageTokens - 1) / kPageTokens;
      most = count > most ? count : most;
      pages += count;
    }
    const int64_t page_bytes = 2 * kPageTokens * D * size_of(type);
    memory_.assign(size_t(K * pages * page_bytes), char(0xff));  // filled with NaN
    // For unquantized caches, the numbers of CacheType and Type are equal.
    cache_ = {memory_.data(), pages * page_bytes, page_bytes, kPageTokens, int32_t(D), type};
    table_.assign(size_t(B * most), 0);
    slots_.assign(size_t(first[B]), 0);
    int64_t next = pages, past = 0;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t at = 0; at < lengths_[size_t(b)]; ++at) {
        int64_t& page = table_[size_t(b * most + at / kPageTokens)];
        if (at % kPageTokens == 0) page = --next;
        const int64_t slot = page * kPageTokens + at % kPageTokens;
        const int64_t own = at - before.data<int64_t>()[b];
        if (own >= 0) {
          slots_[size_t(first[b] + own)] = slot;
          continue;
        }
        for (int64_t head = 0; head < K; ++head) {
          const int64_t row = (past * K + head) * D * size_of(type);
          put_token(cache_, head, slot, keys.data<char>() + row, values.data<char>() + row);
        }
        ++past;
      }
    }
    step.num_sequences = B;
    step.query_starts = first;
    step.seq_lens = lengths_.data();
    step.page_table = table_.data();
    step.table_stride = most;
    step.slots = slots_.data();
  }

  const interposer_kv_cache& cache() const { return cache_; }

 private:
  std::vector<char> memory_;
  std::vector<int64_t> lengths_, table_, slots_;
  interposer_kv_cache cache_;
};

std::vector<Result> decoder_block(const Case& golden) {
  const Array &x = golden.array("x"), &cos = golden.array("cos");
  const int32_t type = type_of(x.dtype);
  const Packed heads = packed(golden, "heads"), output = packed(golden, "output");
  const Packed gate_up = packed(golden, "gate_up"), down = packed(golden, "down");

  interposer_attention_step step = {};
  step.type = step.cache_type = type;
  step.num_heads = int32_t(golden.number("num_heads"));
  step.num_kv_heads = int32_t(golden.number("num_kv_heads"));
  step.head_size = int32_t(golden.number("head_size"));
  step.page_tokens = kPageTokens;
  step.scale = golden.number("scale");
  const Past past(golden, type, step);
  std::vector<int64_t> plan(size_t(interposer_plan_attention(&step, nullptr) / 8));
  interposer_plan_attention(&step, plan.data());

  interposer_block block = {};
  block.type = type;
  block.activation = kSilu;
  block.hidden = x.columns();
  block.heads = step.num_heads;
  block.kv_heads = step.num_kv_heads;
  block.size = step.head_size;
  block.half = cos.columns();
  block.input_eps = block.head_eps = block.post_eps = golden.number("eps");
  const std::string& codes = golden.text("codes");
  const int64_t code_type = codes == "none" ? kNone : codes == "int8" ? kInt8 : kE4M3;
  for (interposer_coding& coding : block.codings) {
    coding = {code_type, 0, int64_t(golden.number("group")), int64_t(golden.number("powers"))};
  }

  const Array *chosen = golden.find("chosen"), *scale = golden.find("input_scale");
  const int64_t rows = chosen ? chosen->shape[0] : x.rows();
  Rows out(x.dtype, rows, x.columns(), 0), total("float32", rows, x.columns(), 0);
  interposer_block_call call = {};
  call.block = &block;
  call.heads = heads.get();
  call.output = output.get();
  call.gate_up = gate_up.get();
  call.down = down.get();
  for (const float*& given : call.scales) given = scale ? scale->data<float>() : nullptr;
  call.input_weight = golden.array("input_norm").data<void>();
  call.query_weight = data_of(golden.find("query_norm"));
  call.key_weight = data_of(golden.find("key_norm"));
  call.post_weight = golden.array("post_norm").data<void>();
  call.cos = cos.data<float>();
  call.sin = golden.array("sin").data<float>();
  call.attention.plan = reinterpret_cast<const interposer_attention_plan*>(plan.data());
  call.attention.cache = past.cache().data;
  call.attention.head_stride = past.cache().head_stride;
  call.attention.page_stride = past.cache().page_stride;
  call.x = x.data<void>();
  call.residual = golden.array("residual").data<float>();
  call.adds = true;
  call.rows = x.rows();
  call.chosen = chosen ? chosen->data<int64_t>() : nullptr;
  call.num_chosen = chosen ? rows : -1;
  call.out = out.data();
  call.total = static_cast<float*>(total.data());
  if (const int32_t failure = interposer_decoder_block(&call)) {
    throw std::runtime_error("the block failed with code " + std::to_string(failure));
  }
  return {out.result(), total.result()};
}

const Registration registered("decoder_block", decoder_block);

}  // namespace
