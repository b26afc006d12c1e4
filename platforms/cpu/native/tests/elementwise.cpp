// Norms, gated activations, rotary embeddings and quantization, called as their Python modules call
// them.

#include "../elementwise/elementwise.h"

#include <cmath>
#include <stdexcept>

#include "../vectors.h"
#include "golden.h"

namespace {

int32_t type_of(const std::string& dtype) {
  if (dtype == "float32") return kFloat32;
  if (dtype == "bfloat16") return kBFloat16;
  if (dtype == "float16") return kFloat16;
  throw std::runtime_error("kernels do not take " + dtype);
}

const void* data_of(const Array* array) { return array ? array->data<void>() : nullptr; }

void check(int32_t failure) {
  if (failure) throw std::runtime_error("the kernel failed with code " + std::to_string(failure));
}

interposer_rows_of rows_of(const Array& x) {
  return {x.rows(), 1, x.columns(), x.row_stride(), 0};
}

std::vector<Result> normalised(const Case& golden, float shift, bool centred) {
  const Array& x = golden.array("x");
  const Array* residual = golden.find("residual");
  // Results are contiguous.
  Rows out(x.dtype, x.rows(), x.columns(), 0);
  Rows total(residual ? residual->dtype : x.dtype, residual ? x.rows() : 0, x.columns(), 0);
  interposer_norm norm = {};
  norm.x = x.data<void>();
  norm.weight = data_of(golden.find("weight"));
  norm.bias = data_of(golden.find("bias"));
  norm.out = out.data();
  norm.type = type_of(x.dtype);
  norm.centred = centred;
  norm.rows = rows_of(x);
  norm.eps = float(golden.number("eps"));
  norm.shift = shift;
  if (residual) {
    norm.residual = residual->data<void>();
    norm.residual_type = type_of(residual->dtype);
    norm.total = total.data();
  }
  check(interposer_normalise(&norm));
  if (residual) return {out.result(), total.result()};
  return {out.result()};
}

std::vector<Result> rms_norm(const Case& golden) { return normalised(golden, 0, false); }

std::vector<Result> gemma_rms_norm(const Case& golden) { return normalised(golden, 1, false); }

std::vector<Result> layer_norm(const Case& golden) { return normalised(golden, 0, true); }

std::vector<Result> gated(const Case& golden, int32_t activation, bool has_up = true) {
  const Array& x = golden.array("x");
  const int64_t width = has_up ? x.columns() / 2 : x.columns();
  Rows out(x.dtype, x.rows(), width, 0);
  interposer_gated gated = {};
  gated.type = gated.out_type = type_of(x.dtype);
  gated.gate = x.data<void>();
  gated.up = has_up ? x.data<char>() + width * size_of(gated.type) : nullptr;
  gated.out = out.data();
  gated.activation = activation;
  gated.rows = rows_of(x);
  gated.rows.width = width;
  check(interposer_gate(&gated));
  return {out.result()};
}

std::vector<Result> silu_and_mul(const Case& golden) { return gated(golden, kSilu); }

int32_t form_of_gelu(const Case& golden) {
  return golden.text("approximate") == "tanh" ? kGeluTanh : kGelu;
}

std::vector<Result> gelu_and_mul(const Case& golden) {
  return gated(golden, form_of_gelu(golden));
}

std::vector<Result> gelu(const Case& golden) { return gated(golden, form_of_gelu(golden), false); }

std::vector<Result> quick_gelu(const Case& golden) { return gated(golden, kQuickGelu, false); }

Result turned(const Case& golden, const char* name, const char* weight) {
  const Array& x = golden.array(name);
  const Array *cos = golden.find("cos"), *sin = golden.find("sin");
  const int64_t outer = x.shape[0], inner = x.shape[1], width = x.columns();
  Rows out(x.dtype, outer * inner, width, 0);
  interposer_heads heads = {};
  heads.x = x.data<void>();
  heads.type = type_of(x.dtype);
  heads.weight = data_of(golden.find(weight));
  if (cos) {
    heads.cos = cos->data<float>();
    heads.sin = sin->data<float>();
    heads.half = cos->columns();
  } else {
    heads.eps = float(golden.number("eps"));
  }
  heads.out = out.data();
  heads.rows = {outer, inner, width, inner * width, width};
  heads.out_stride = inner * width;
  check(interposer_turn_heads(&heads));
  return out.result();
}

std::vector<Result> heads(const Case& golden) {
  std::vector<Result> results;
  results.push_back(turned(golden, "query", "query_weight"));
  results.push_back(turned(golden, "key", "key_weight"));
  return results;
}

double optional_number(const Case& golden, const std::string& name) {
  const auto found = golden.numbers.find(name);
  return found == golden.numbers.end() ? 0 : found->second;
}

std::vector<Result> quantised(const Case& golden, const std::string& dtype, double block_size = 0) {
  const Array& x = golden.array("x");
  const int64_t rows = x.rows(), columns = x.columns();
  const double size = block_size > 0 ? block_size : optional_number(golden, "block_size");
  const int64_t width = size > 0 ? int64_t(size) : columns, blocks = width ? columns / width : 1;
  const Array* given = golden.find("scale");
  Rows codes(dtype, rows, columns, 0), scales("float32", given ? 0 : rows, blocks, 0);
  interposer_coded coded = {};
  coded.x = x.data<void>();
  coded.codes = codes.data();
  coded.scales = static_cast<float*>(scales.data());
  coded.given = given ? given->data<float>() : nullptr;
  coded.type = type_of(x.dtype);
  coded.code_type = dtype == "int8" ? kInt8 : kE4M3;
  coded.rows = {rows, blocks, width, x.row_stride(), width};
  coded.powers = block_size > 0 ? kSharedExponents
                 : optional_number(golden, "power_of_two_scales") != 0 ? kPowersAbove
                                                                       : kAnyScale;
  coded.limit = float(optional_number(golden, "scale_limit"));
  check(interposer_code(&coded));
  std::vector<Result> results;
  results.push_back(codes.result());
  if (coded.code_type == kE4M3) {
    // The same numbers in bfloat16, which the matmul reads.
    Rows wide("bfloat16", rows, columns, 0);
    coded.codes = wide.data();
    coded.code_type = kBFloat16;
    check(interposer_code(&coded));
    const std::vector<double> numbers = wide.result().values;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const double code = results[0].values[i];
      if (numbers[i] != code && !(numbers[i] != numbers[i] && code != code)) {
        throw std::runtime_error("number " + std::to_string(i) + " is another in bfloat16");
      }
    }
  }
  if (given == nullptr) results.push_back(scales.result());
  return results;
}

std::vector<Result> to_int8(const Case& golden) { return quantised(golden, "int8"); }

std::vector<Result> to_fp8(const Case& golden) { return quantised(golden, "float8_e4m3fn"); }

// Scales are stored as exponents plus 127.
std::vector<Result> to_mxfp8(const Case& golden) {
  std::vector<Result> results = quantised(golden, "float8_e4m3fn", 32);
  results[1].dtype = "uint8";
  for (double& scale : results[1].values) scale = std::ilogb(scale) + 127;
  return results;
}

const Registration registrations[] = {
    {"rms_norm", rms_norm},
    {"fused_add_rms_norm", rms_norm},
    {"gemma_rms_norm", gemma_rms_norm},
    {"fused_add_gemma_rms_norm", gemma_rms_norm},
    {"layer_norm", layer_norm},
    {"silu_and_mul", silu_and_mul},
    {"gelu_and_mul", gelu_and_mul},
    {"gelu", gelu},
    {"quick_gelu", quick_gelu},
    {"rotary_embedding", heads},
    {"qk_norm", heads},
    {"quantize_fp8_blocks", to_fp8},
    {"quantize_fp8_per_token", to_fp8},
    {"quantize_fp8_static", to_fp8},
    {"quantize_int8_per_token", to_int8},
    {"quantize_mxfp8", to_mxfp8},
    {"quantize_int8_static", to_int8},
};

}  // namespace
