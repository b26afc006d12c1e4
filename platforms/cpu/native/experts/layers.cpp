// Experts one after the other, each as the two linear layers of an MLP in any format.

#include <cstring>

#include "../levels.h"
#include "../pool.h"
#include "../vectors.h"
#include "experts.h"

namespace of_layers {
INTERPOSER_FAMILY(ExpertsKernels, experts, INTERPOSER_BFLOAT16_LEVELS)
}

namespace {

// Largest size of the experts' inputs and results; larger batches are processed in chunks of
// tokens.
constexpr int64_t kMostBytes = 128 << 20;

struct Job {
  const interposer_expert_layers_call* call;
  const ExpertsKernels* kernels;
  int64_t hidden, first_token, tokens, num_rows;
  int32_t* tokens_of;  // [rows], in the order of experts
  int32_t* places;     // [tokens, K], row of each slot, or -1
  char* x;             // [rows, H], type of x
  float* returned;     // [rows, H]
};

const interposer_packed* weight_of(const interposer_expert_layers_call& call, int64_t expert,
                                   int which) {
  return reinterpret_cast<const interposer_packed*>(
      static_cast<uintptr_t>(call.layers[2 * expert + which]));
}

void gather_some(void* argument, int thread, int threads) {
  const Job& job = *static_cast<Job*>(argument);
  const int size = size_of(job.call->type);
  const int64_t last = job.num_rows * (thread + 1) / threads;
  for (int64_t row = job.num_rows * thread / threads; row < last; ++row) {
    const int64_t start = job.tokens_of[row] * job.call->x_stride;
    std::memcpy(job.x + row * job.hidden * size,
                static_cast<const char*>(job.call->x) + start * size, size_t(job.hidden * size));
  }
}

void add_up_some(void* argument, int thread, int threads) {
  const Job& job = *static_cast<Job*>(argument);
  const Returned returned = returned_to(*job.call, job.first_token, job.hidden,
                                        size_of(job.call->type), job.returned, job.places);
  job.kernels->add_up(returned, job.tokens * thread / threads, job.tokens * (thread + 1) / threads);
}

// Compute the end of each expert's rows in `ends`, and the row of each slot. Returns false for an
// expert id out of range.
bool sort(Job& job, int64_t* ends) {
  const interposer_expert_layers_call& call = *job.call;
  const auto expert_of = [&](int64_t token, int64_t k) {
    return int64_t(call.expert_ids[(job.first_token + token) * call.id_stride + k]);
  };
  std::memset(ends, 0, size_t(call.experts) * sizeof *ends);
  for (int64_t token = 0; token < job.tokens; ++token) {
    for (int64_t k = 0; k < call.top_k; ++k) {
      const int64_t expert = expert_of(token, k);
      if (expert >= call.experts) return false;
      if (expert >= 0) ++ends[expert];
    }
  }
  job.num_rows = 0;
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    const int64_t count = ends[expert];
    ends[expert] = job.num_rows;
    job.num_rows += count;
  }
  for (int64_t token = 0; token < job.tokens; ++token) {
    for (int64_t k = 0; k < call.top_k; ++k) {
      const int64_t expert = expert_of(token, k);
      const int32_t place = expert < 0 ? -1 : int32_t(ends[expert]++);
      job.places[token * call.top_k + k] = place;
      if (place >= 0) job.tokens_of[place] = int32_t(token + job.first_token);
    }
  }
  return true;
}

int32_t run(Job& job) {
  const interposer_expert_layers_call& call = *job.call;
  const int size = size_of(call.type);
  const int64_t slots = job.tokens * call.top_k;
  const int64_t end_bytes = round_up(call.experts * 8, 64), slot_bytes = round_up(slots * 4, 64);
  char* memory =
      static_cast<char*>(interposer_scratch(kForSlots, end_bytes + 2 * slot_bytes));
  if (memory == nullptr) return kNoMemory;
  int64_t* ends = reinterpret_cast<int64_t*>(memory);
  job.places = reinterpret_cast<int32_t*>(memory + end_bytes);
  job.tokens_of = reinterpret_cast<int32_t*>(memory + end_bytes + slot_bytes);
  if (!sort(job, ends)) return kMismatch;

  const int64_t returned_bytes = round_up(job.num_rows * job.hidden * 4, 64);
  char* rows = static_cast<char*>(
      interposer_scratch(kForExperts, returned_bytes + job.num_rows * job.hidden * size + 64));
  if (rows == nullptr) return kNoMemory;
  job.returned = reinterpret_cast<float*>(rows);
  job.x = rows + returned_bytes;

  const int threads = job.num_rows > call.top_k ? interposer_num_threads() : 1;
  interposer_parallel(gather_some, &job, threads);
  int64_t first = 0;
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    const int64_t count = ends[expert] - first;
    if (count == 0) continue;
    interposer_mlp_call mlp = {};
    mlp.gate_up = {weight_of(call, expert, 0), call.codings[0], nullptr};
    mlp.down = {weight_of(call, expert, 1), call.codings[1], nullptr};
    if (mlp.gate_up.weight->inputs != job.hidden || mlp.down.weight->outputs != job.hidden) {
      return kMismatch;
    }
    mlp.x = job.x + first * job.hidden * size;
    mlp.out = job.returned + first * job.hidden;
    mlp.type = call.type;
    mlp.out_type = kFloat32;
    mlp.activation = call.activation;
    mlp.rows = count;
    mlp.x_stride = job.hidden;
    const int32_t failure = interposer_mlp(&mlp);
    if (failure) return failure;
    first = ends[expert];
  }
  interposer_parallel(add_up_some, &job, threads);
  return kDone;
}

struct Program {
  const interposer_expert_layers_call* call;
  int32_t failure;
};

void run_program(void* argument) {
  Program& program = *static_cast<Program*>(argument);
  const interposer_expert_layers_call& call = *program.call;
  Job job = {};
  job.call = &call;
  job.kernels = of_layers::kernels();
  if (job.kernels == nullptr) {
    program.failure = kNoKernels;
    return;
  }
  job.hidden = weight_of(call, 0, 0)->inputs;
  const int64_t row_bytes = job.hidden * (4 + size_of(call.type));
  const int64_t most = kMostBytes / (row_bytes * call.top_k) + 1;
  for (int64_t first = 0; first < call.tokens && program.failure == kDone; first += most) {
    job.first_token = first;
    job.tokens = call.tokens - first < most ? call.tokens - first : most;
    program.failure = run(job);
  }
}

}  // namespace

extern "C" int32_t interposer_expert_layers(const interposer_expert_layers_call* call) {
  if (call->experts == 0 || call->top_k == 0) return kMismatch;
  Program program = {call, kDone};
  interposer_together(run_program, &program);
  return program.failure;
}
