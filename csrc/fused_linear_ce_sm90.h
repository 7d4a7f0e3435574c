// fused_linear_ce through our own products of compute capability 9.0: kernels/fused_linear_ce_sm90.cuh.
#pragma once

#include "cross_entropy.h"

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

// What the products and their epilogues can do: bfloat16, hidden sizes that are multiples of 256,
// vocabularies of 128; the plain rule with class and token weights and z-loss. Too few rows are left to the
// generic engine, which is faster there.
bool fits_sm90(const FusedLinearCe& call);
FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call);

}  // namespace liger
