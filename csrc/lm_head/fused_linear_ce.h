// SPDX-License-Identifier: BSD-3-Clause

// One call of fused_linear_ce_forward, for either engine.
#pragma once

#include <optional>

#include "cross_entropy/cross_entropy.h"

namespace liger {

struct FusedLinearCe {
  const Tensor& input;   // (rows, hidden)
  const Tensor& weight;  // (vocab, hidden)
  const std::optional<Tensor>& bias;
  const CrossEntropyOptions& options;
  const CrossEntropyResults& results;
  const Tensor& used_denominator;
  bool need_grad_input, need_grad_weight, need_grad_bias;
  bool exact_accumulation;  // the weight gradient must be as exact as one float32 sum
  int64_t memory_budget;
  int device;
  cudaStream_t stream;

  static constexpr const char* kOp = "fused_linear_ce";
};

// A gradient that is not needed is empty.
struct FusedLinearCeGradients {
  Tensor input, weight, bias;
};

}  // namespace liger
