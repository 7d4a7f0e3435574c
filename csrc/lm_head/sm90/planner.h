// SPDX-License-Identifier: BSD-3-Clause

// The planner of the wgmma engine: cuts the rows of fused_linear_ce and the losses into chunks.
// README.md draws where the buffers are.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace liger {

struct LinearCeProblem {
  int64_t rows, hidden, vocab;
  bool need_grad_input, need_grad_weight;
  bool exact_accumulation;  // the weight gradient must be as exact as one float32 sum
  int64_t memory_budget;    // bytes for exponentials, in addition to the gradients
  int64_t clusters;         // two-block clusters that are active on the device at a time
  int64_t group_rows = 1;   // every chunk is a multiple of it
};

struct PlannedChunk {
  int64_t first, rows;
  int64_t k_splits;  // split-K of the input gradient
};

// Until the weight gradient is written, its memory holds the exponentials of the first rows_in_grad_weight
// rows of the first chunk, which is larger for that reason. All other exponentials are in the panel
// workspace, one panel per 128 classes; from the second chunk on, a panel starts with the block scales of the
// weight gradient.
struct LinearCePlan {
  std::vector<PlannedChunk> chunks;
  int64_t rows_in_grad_weight;    // of the first chunk
  int64_t workspace_panel_bytes;  // of the panel workspace, per panel
  int64_t scale_bytes;            // block scales at the start of a panel
  int64_t panel_offset;  // panels between a panel of the weight gradient and its own exponentials, which are
                         // read before it is written; both buffers are longer by as many panels

  // The plan as a list of numbers: Python passes it from one op to the next
  // (python/liger/_core/head/sm90_plan.py).
  std::vector<int64_t> encode() const;
  static LinearCePlan decode(const std::vector<int64_t>& numbers);
};

// Returns nullopt if the generic engine must run or is faster: hidden sizes that are not a multiple of
// kHiddenUnit, few rows, groups that exceed the budget.
std::optional<LinearCePlan> plan_chunks_sm90(const LinearCeProblem& problem);

// True if the engine takes these sizes in one chunk.
bool takes_sm90(const LinearCeProblem& problem);
// A plan with all rows in one chunk: the panel workspace keeps all exponentials from the forward to the
// backward of fused_linear_logprobs. The caller compares their bytes with the budget.
std::optional<LinearCePlan> plan_one_chunk_sm90(const LinearCeProblem& problem);

// The plan of losses that have dlogits as a row-major matrix (losses/linear_backward.cu). Logits are computed
// for a slice of a chunk at a time.
struct LinearBackwardPlan {
  int64_t first_rows;      // of the first chunk; at least chunk_rows
  int64_t first_k_splits;  // of the first chunk
  int64_t chunk_rows;      // of the other chunks
  int64_t slice_rows;      // rows that have auxiliary logits at a time
  int64_t k_splits;        // of the other chunks
  int64_t scale_bytes;     // block scales of the weight gradient; 0 with one chunk
};

// aux_rows: 16-bit rows of auxiliary logits per row of dlogits; two for each float32 logits GEMM, 0 if
// dlogits overwrites the logits. aux_in_grad_weight: the auxiliary logits of the first chunk use the memory
// of the weight gradient, hidden / aux_rows rows at a time, which leaves the budget to its dlogits. Returns
// nullopt where plan_chunks_sm90() does, for hidden sizes that are not a multiple of 256, vocabularies that
// are not a multiple of 128, or if the budget has no room for a slice of 256 rows.
std::optional<LinearBackwardPlan> plan_linear_backward_sm90(const LinearCeProblem& problem, int64_t aux_rows,
                                                            bool aux_in_grad_weight);

}  // namespace liger
