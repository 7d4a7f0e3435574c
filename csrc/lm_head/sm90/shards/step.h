// What the ops of this folder share: one step of a chunk where the classes are sharded over ranks.
// A rank has the weight of some classes, its shard; every rank has the same rows.
#pragma once

#include "lm_head/sm90/chunk/chunk.h"

namespace liger::lm_head {

struct KeptRow;
struct EntropyTerm;

using sm90::kRankNumbers;
using sm90::kRankNumbersWithMetrics;

// What the steps of all chunks read.
struct ShardState {
  int32_t* row_index;  // of valid rows, as index_valid_rows() takes its memory
  int32_t* local;      // the targets of the shard, of all rows
  int* no_overflow;    // written by gather_shard(), and not used

  ShardState(const Tensor& memory, int64_t rows);
  static int64_t bytes(int64_t rows);
  valid_rows::RowIndex index(int64_t rows) const {
    return {row_index, row_index + rows, row_index + 2 * rows};
  }
};

Batch shard_batch(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
                  std::optional<double> softcap, double temperature, bool with_metrics = false);

// Indexes and gathers the valid rows of the whole batch, with the logits of their targets: 0 for a target of another
// shard, so the all-reduce adds zeros to one number. Writes the results of ignored rows. batch.problem is that of all
// classes; target_logit and rows have the memory for all rows.
void gather_shard(Batch& batch, const ShardState& state, int64_t vocab_start, const Tensor& target_logit,
                  const Tensor& rows);

// The steps of a chunk.
class ShardChunk : public Chunk {
 public:
  using Chunk::Chunk;
  using Chunk::clear_class_one_hot, Chunk::rows;

  // Of the rows of gather_shard().
  void exponentials(const ShardState& state) const;
  // What the ranks exchange of each row after exponentials(): (kRankNumbers or kRankNumbersWithMetrics, rows).
  void write_sums(int64_t vocab_start, float* sums) const;
  // Chunk::apply_rule() from the sums of all ranks, (ranks, numbers, rows of the chunk). rank: this one, whose gradient
  // is computed.
  void apply_rule(const ShardState& state, const Tensor& sums, int64_t rank, bool gradient) const;
  // sum: (rows of the chunk, hidden).
  void grad_input(float* sum) const;

 private:
  const int* chunk_index() const { return batch_.row_index.index + chunk_.first; }
};

// Arguments that all steps of a chunk take. input and weight are as dense() returns them; target_logit has
// padded_rows() of all rows; a weight gradient that is not needed is empty.
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

  // Of the batch and the buffers as they are now.
  ShardChunk chunk() const { return {batch, plan, index, planned, buffers, grad_weight, nullptr}; }

  const OpGuard guard;
  Batch batch;
  const ShardState state;
  const LinearCePlan plan;
  const size_t index;
  const PlannedChunk planned;
  GradWeightBuffers grad_weight;
  ChunkBuffers buffers;  // target_logit: that of all rows, from this chunk on
  // Memory of the backward of log-probabilities, for the rows of the chunk.
  float* references;
  KeptRow* kept_rows;
  EntropyTerm* entropy_terms;
};

}  // namespace liger::lm_head
