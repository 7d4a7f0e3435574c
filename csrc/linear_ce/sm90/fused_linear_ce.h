// fused_linear_ce through our own products of compute capability 9.0: linear_ce/sm90/epilogues.cuh.
#pragma once

#include "cross_entropy/cross_entropy.h"
#include "linear_ce/sm90/planner.h"

namespace liger {

struct FusedLinearCe {
  const Tensor& input;   // (rows, hidden)
  const Tensor& weight;  // (vocab, hidden)
  const std::optional<Tensor>& bias;
  const CrossEntropyOptions& options;
  const CrossEntropyResults& results;
  const Tensor& used_denominator;
  bool need_grad_input, need_grad_weight;
  bool exact_accumulation;
  int64_t memory_budget;
  int device;
  cudaStream_t stream;
};

struct FusedLinearCeGradients {
  Tensor input, weight;  // of size 0 where not needed
};

// How this engine would do it, or nothing where it cannot: it takes bfloat16 and the plain rule, with class
// and token weights and z-loss, entropies and most probable classes, on compute capability 9.0.
std::optional<Sm90Plan> plan_sm90(const FusedLinearCe& call);
FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call, const Sm90Plan& plan);

}  // namespace liger
