// SPDX-License-Identifier: BSD-3-Clause

// One step of a chunk with the classes sharded over ranks; the ops of this folder use it.
// A rank has the weight of some classes, its shard; every rank has the same rows.
#pragma once

#include "lm_head/sm90/chunk/chunk.h"

namespace liger::lm_head {

struct KeptRow;
struct EntropyTerm;

using sm90::kRankNumbers;
using sm90::kRankNumbersWithMetrics;

// Data that the steps of all chunks read.
struct ShardState {
  int32_t* row_index;  // index of valid rows, memory for index_valid_rows()
  int32_t* local;      // the targets of the shard, for all rows
  int* no_overflow;    // gather_shard() writes it, nothing reads it

  ShardState(const Tensor& memory, int64_t rows);
  static int64_t bytes(int64_t rows);
  valid_rows::RowIndex index(int64_t rows) const {
    return {row_index, row_index + rows, row_index + 2 * rows};
  }
};

Batch shard_batch(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
                  std::optional<double> softcap, double temperature, bool with_metrics = false);

// Indexes and gathers the valid rows of the whole batch and computes the logits of their targets: 0 for a
// target of another shard, so the all-reduce adds only zeros to the logit. Writes the results of ignored
// rows. batch.problem describes all classes; target_logit and rows have memory for all rows.
void gather_shard(Batch& batch, const ShardState& state, int64_t vocab_start, const Tensor& target_logit,
                  const Tensor& rows);

// The steps of a chunk.
class ShardChunk : public Chunk {
 public:
  using Chunk::Chunk;
  using Chunk::clear_class_one_hot, Chunk::rows;

  // Computes the exponentials of the rows that gather_shard() has gathered.
  void exponentials(const ShardState& state) const;
  // Writes the numbers that the ranks exchange after exponentials(), (kRankNumbers or
  // kRankNumbersWithMetrics, rows).
  void write_sums(int64_t vocab_start, float* sums) const;
  // Chunk::apply_rule() from the sums of all ranks, (ranks, numbers, rows of the chunk). rank: this process.
  void apply_rule(const ShardState& state, const Tensor& sums, int64_t rank, bool gradient) const;
  // sum: (rows of the chunk, hidden).
  void grad_input(float* sum) const;

 private:
  const int* chunk_index() const { return batch_.row_index.index + chunk_.first; }
};

// Arguments that all steps of a chunk take. dense() has returned input and weight; target_logit has
// padded_rows() elements for all rows; a weight gradient that is not needed is empty.
struct StepArguments {
  const Tensor &input, &weight;
  std::optional<double> softcap;
  bool need_grad_input;
  const std::vector<int64_t>& plan;
  int64_t index;
  const Tensor &state, &target_logit, &rows, &grad_weight, &panel_workspace, &workspace;
  double temperature = 1.0;
  bool with_metrics = false;
  bool keep = false;  // the exponentials are kept for both gradients
};

// One step of a chunk.
struct ShardStep {
  ShardStep(const char* op, const StepArguments& arguments);
  ShardStep(const ShardStep&) = delete;  // a chunk refers to the batch and the plan

  static int64_t workspace_bytes(const Batch& batch, const PlannedChunk& chunk);

  // A Chunk view of the current batch and buffers.
  ShardChunk chunk() const { return {batch, plan, index, planned, buffers, grad_weight, nullptr}; }

  const OpGuard guard;
  Batch batch;
  const ShardState state;
  const LinearCePlan plan;
  const size_t index;
  const PlannedChunk planned;
  GradWeightBuffers grad_weight;
  ChunkBuffers buffers;  // target_logit points into the logits of all rows, at this chunk
  // Memory for the backward of log-probabilities, per row of the chunk.
  float* references;
  KeptRow* kept_rows;
  EntropyTerm* entropy_terms;
};

}  // namespace liger::lm_head
