// SPDX-License-Identifier: BSD-3-Clause

// Host code that cross_entropy and fused_linear_ce share: options as device pointers, results, and the
// launches before, on and after the rows.
#pragma once

#include <climits>
#include <string>

#include "cross_entropy/tile.cuh"
#include "device/integers.h"
#include "host/torch.h"

namespace liger {

// The options of a call as the ops receive them.
struct CrossEntropyArguments {
  const Tensor& target;
  const std::optional<Tensor>& ce_weight;
  const std::optional<Tensor>& token_weight;
  const std::optional<Tensor>& denominator;
  int64_t ignore_index;
  double label_smoothing, lse_square_scale;
  std::optional<double> softcap;
  const std::string& reduction;

  // Throws if they do not fit logits (N, V) on a CUDA device.
  void check(const char* op, const Tensor& logits) const;
};

// The options of a call as kernel parameters. It owns the converted tensors.
struct CrossEntropyOptions {
  Tensor target;
  std::optional<Tensor> class_weight, token_weight, weight_sum;
  ce::Problem problem{};  // vocab, targets and options are set; logits and results are not

  CrossEntropyOptions(const CrossEntropyArguments& arguments, int64_t vocab);
  // The problem of the rows from `row` on.
  ce::Problem at_row(int64_t row) const;
};

// Writes the denominator of the loss (scalar, float32) if a tensor for it is given, and the sum of the class
// weights if options.weight_sum exists. Checks the targets first under LIGER_CHECK_TARGETS=1.
void prepare_cross_entropy(const char* op, CrossEntropyOptions& options,
                           const std::optional<Tensor>& given_denominator, bool mean,
                           const std::optional<Tensor>& denominator);

// The optional outputs that a call requests.
struct CrossEntropyOutputs {
  bool z_loss, token_accuracy, argmax, logprobs, entropy;
};

// Per-row results of a whole call, and the scalars that are reduced from them.
struct CrossEntropyResults {
  Tensor row_loss, row_z_loss, predicted, logprobs, entropy;
  Tensor loss, z_loss, token_accuracy, argmax;  // as the ops return them

  CrossEntropyResults(const Tensor& like, int64_t rows, bool per_row, const CrossEntropyOutputs& outputs);
  // Results per row for some of the rows, with the same outputs.
  CrossEntropyResults for_rows(const Tensor& like, int64_t rows) const {
    return {like, rows, true, outputs_};
  }
  // Sets the result pointers of a problem that starts at this row, and the extras that they need.
  void attach(ce::Problem& problem, int64_t first_row) const;
  // Reduces the per-row results. Called after the launches of all rows.
  void reduce(const char* op, const CrossEntropyOptions& options, const Tensor& denominator) const;

 private:
  bool per_row_;
  CrossEntropyOutputs outputs_;
};

// Loss and metrics of problem.rows rows. With write_gradient it also computes the gradient, which overwrites
// the logits if problem.gradient is null.
void launch_rows(const char* op, ce::Problem problem, ScalarType dtype, bool write_gradient, int device,
                 cudaStream_t stream);

// Completes an in-place gradient. If row_input() had to copy the logits, the kernels wrote the gradient to
// that copy (rows.tensor), which this copies back.
void write_back(const Tensor& logits, const RowInput& rows);

// Blocks per row of the elementwise backward kernels.
template <typename T>
unsigned backward_tiles(const char* op, const ce::Problem& p) {
  const int64_t tiles = ceil_div(p.vocab, int64_t{ce::kBackwardThreads} * ce::kBackwardVectors * kVec<T>);
  require(p.rows * tiles <= INT_MAX, op, ": ", p.rows, " rows are more than one launch can take");
  return static_cast<unsigned>(tiles);
}

// True if the logits and the gradient of every row are equally far from a 16-byte boundary.
template <typename T>
bool rows_same_alignment(const ce::Problem& p, const void* out, int64_t out_stride) {
  const auto position = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  return position(p.logits) == position(out) &&
         (p.row_stride - out_stride) % static_cast<int64_t>(kVec<T>) == 0;
}

}  // namespace liger
