// MoE layers, packed and called as in native_experts.py.

#include "../experts/experts.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  if (dtype == "uint8") return kE8M0;
  throw std::runtime_error("kernels do not take " + dtype);
}

int64_t codes_in_byte(int32_t format) {
  return format == kWeightInt4 || format == kWeightE2M1 ? 2 : 1;
}

// Some outputs of one expert's weight, with a scale per output.
struct Matrix {
  interposer_plain plain = {};
  std::vector<char> weight, scales;
  std::vector<float> bias;

  Matrix(const Case& golden, const std::string& name, int32_t format, int64_t expert, int64_t first,
         int64_t last) {
    const Array& all = golden.array(name);
    const int64_t outputs = all.shape[1], columns = all.shape[2];
    const int64_t size = int64_t(bytes_of(all.dtype));
    const char* start = all.data<char>() + (expert * outputs + first) * columns * size;
    plain.format = format;
    plain.scale_type = kNone;
    plain.outputs = last - first;
    plain.inputs = columns * codes_in_byte(format);
    if (all.dtype == "float8_e5m2") {
      for (int64_t i = 0; i < plain.outputs * columns; ++i) {
        const uint16_t half = bfloat16_of_float(float(number_at(start, all.dtype, i)));
        const char* bytes = reinterpret_cast<const char*>(&half);
        weight.insert(weight.end(), bytes, bytes + 2);
      }
    } else {
      weight.assign(start, start + plain.outputs * columns * size);
    }
    plain.weight = weight.data();
    if (const Array* given = golden.find(name + "_scale")) {
      const int64_t rows = given->shape[1], groups = given->shape[2];
      const int64_t bytes = groups * int64_t(bytes_of(given->dtype));
      for (int64_t output = first; output < last; ++output) {
        const int64_t row = expert * rows + output / (outputs / rows);
        const char* from = given->data<char>() + row * bytes;
        scales.insert(scales.end(), from, from + bytes);
      }
      plain.scale_type = type_of(given->dtype);
      plain.scales = scales.data();
      plain.group = plain.inputs / groups;
      plain.scale_stride = groups;
    }
    if (const Array* given = golden.find(name + "_bias")) {
      for (int64_t output = first; output < last; ++output) {
        const int64_t index = expert * outputs + output;
        bias.push_back(float(number_at(given->data<void>(), given->dtype, index)));
      }
      plain.bias = bias.data();
    }
  }
};

class Mixture {
 public:
  Mixture(const Case& golden, int32_t format) {
    const Array& gate_up = golden.array("gate_up");
    const int64_t experts = gate_up.shape[0], inner = gate_up.shape[1] / 2;
    const int64_t hidden = golden.array("down").shape[1];
    int64_t expert_bytes = 0, used = int64_t(sizeof(interposer_mixture));
    for (int64_t expert = 0; expert < experts; ++expert) {
      const Matrix parts[] = {{golden, "gate_up", format, expert, 0, inner},
                              {golden, "gate_up", format, expert, inner, 2 * inner},
                              {golden, "down", format, expert, 0, hidden}};
      if (expert == 0) {
        for (const Matrix& part : parts) expert_bytes += interposer_packed_bytes(&part.plain);
        const size_t bytes = size_t(used + experts * expert_bytes);
        memory_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
        std::memset(memory_.get(), 0xff, bytes);
        interposer_begin_mixture(experts, expert_bytes, memory_.get());
      }
      for (const Matrix& part : parts) {
        interposer_pack(&part.plain, memory_.get() + used);
        used += interposer_packed_bytes(&part.plain);
      }
    }
  }

  const interposer_mixture* get() const {
    return reinterpret_cast<const interposer_mixture*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
};

int32_t activation_of(const std::string& name) {
  if (name == "silu") return kExpertSilu;
  return name == "gelu" ? kExpertGelu : kExpertSwigluOAI;
}

std::vector<Result> run(const Case& golden, int32_t format) {
  const Mixture mixture(golden, format);
  const Array &x = golden.array("x"), &weights = golden.array("weights");
  const Array& given = golden.array("expert_ids");
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < given.rows() * given.columns(); ++i) {
    ids.push_back(int32_t(number_at(given.data<void>(), given.dtype, i)));
  }
  Rows out(x.dtype, x.rows(), x.columns(), 0);
  interposer_mixture_call call = {};
  call.mixture = mixture.get();
  call.x = x.data<void>();
  call.out = out.data();
  call.weights = weights.data<float>();
  call.expert_ids = ids.data();
  call.type = type_of(x.dtype);
  call.activation = activation_of(golden.text("activation"));
  call.tokens = x.rows();
  call.top_k = given.columns();
  call.x_stride = x.row_stride();
  call.weight_stride = call.id_stride = given.columns();
  if (const int32_t failure = interposer_experts(&call)) {
    throw std::runtime_error("the experts failed with code " + std::to_string(failure));
  }
  return {out.result()};
}

std::vector<Result> fused_experts(const Case& golden) {
  const bool wide = golden.array("gate_up").dtype == "float32";
  return run(golden, wide ? kWeightFloat32 : kWeightBFloat16);
}

std::vector<Result> fused_experts_w4a16(const Case& golden) { return run(golden, kWeightInt4); }

std::vector<Result> fused_experts_mxfp4(const Case& golden) { return run(golden, kWeightE2M1); }

std::vector<Result> fused_experts_fp8(const Case& golden) {
  const bool is_e4m3 = golden.array("gate_up").dtype == "float8_e4m3fn";
  return run(golden, is_e4m3 ? kWeightE4M3 : kWeightBFloat16);
}

const Registration registrations[] = {
    {"fused_experts", fused_experts},
    {"fused_experts_fp8", fused_experts_fp8},
    {"fused_experts_mxfp4", fused_experts_mxfp4},
    {"fused_experts_w4a16", fused_experts_w4a16},
};

}  // namespace
