#include "blocks.h"

#include "../elementwise/elementwise.h"
#include "../pool.h"
#include "../vectors.h"

namespace {

// Rows taken at a time, so that what lies between two products stays in a cache.
constexpr int64_t kMostRows = 256;

char* moved(void* data, int32_t type, int64_t elements) {
  return static_cast<char*>(data) + elements * size_of(type);
}

const char* moved(const void* data, int32_t type, int64_t elements) {
  return static_cast<const char*>(data) + elements * size_of(type);
}

int32_t turn(const interposer_heads_call& call, int64_t first, int64_t count, const void* weight) {
  const int64_t width = (call.heads + 2 * call.kv_heads) * call.size;
  interposer_heads heads = {};
  heads.x = heads.out = moved(call.out, call.type, first * call.size);
  heads.weight = weight;
  heads.cos = call.cos;
  heads.sin = call.sin;
  heads.type = call.type;
  heads.eps = call.eps;
  heads.half = call.half;
  heads.rows = {call.rows, count, call.size, width, call.size};
  heads.out_stride = width;
  return interposer_turn_heads(&heads);
}

}  // namespace

extern "C" {

int32_t interposer_mlp(const interposer_mlp_call* call) {
  const int64_t width = call->gate_up->outputs, inner = width / 2;
  if (call->down->inputs != inner) return kMismatch;
  if (call->rows == 0) return kDone;
  const int64_t most = call->rows < kMostRows ? call->rows : kMostRows;
  const int64_t between = round_up(most * width * 4, 64);
  char* memory = static_cast<char*>(
      interposer_scratch(kForBlocks, between + most * inner * size_of(call->type)));
  if (memory == nullptr) return kNoMemory;
  for (int64_t first = 0; first < call->rows; first += most) {
    const int64_t rows = call->rows - first < most ? call->rows - first : most;
    interposer_product up = {};
    up.weight = call->gate_up;
    up.x = moved(call->x, call->type, first * call->x_stride);
    up.x_type = call->type;
    up.rows = rows;
    up.x_stride = call->x_stride;
    up.out = memory;
    up.out_type = kFloat32;
    up.out_stride = width;
    int32_t failure = interposer_linear(&up);
    if (failure) return failure;

    interposer_gated gated = {};
    gated.gate = memory;
    gated.up = memory + inner * 4;
    gated.out = memory + between;
    gated.type = kFloat32;
    gated.out_type = call->type;
    gated.activation = call->activation;
    gated.rows = {rows, 1, inner, width, width};
    failure = interposer_gate(&gated);
    if (failure) return failure;

    interposer_product down = {};
    down.weight = call->down;
    down.x = memory + between;
    down.x_type = call->type;
    down.rows = rows;
    down.x_stride = inner;
    down.out = moved(call->out, call->type, first * call->down->outputs);
    down.out_type = call->type;
    down.out_stride = call->down->outputs;
    failure = interposer_linear(&down);
    if (failure) return failure;
  }
  return kDone;
}

int32_t interposer_project_heads(const interposer_heads_call* call) {
  const int64_t width = (call->heads + 2 * call->kv_heads) * call->size;
  if (call->weight->outputs != width) return kMismatch;
  interposer_product product = {};
  product.weight = call->weight;
  product.x = call->x;
  product.x_type = product.out_type = call->type;
  product.rows = call->rows;
  product.x_stride = call->x_stride;
  product.out = call->out;
  product.out_stride = width;
  const int32_t failure = interposer_linear(&product);
  if (failure) return failure;
  if (call->cos == nullptr && call->query_weight == nullptr) return kDone;
  const int32_t turned = turn(*call, 0, call->heads, call->query_weight);
  return turned ? turned : turn(*call, call->heads, call->kv_heads, call->key_weight);
}
}
