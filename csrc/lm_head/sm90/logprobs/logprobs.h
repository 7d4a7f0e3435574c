// The gradients of log-probabilities and entropies from kept rows (kept_rows.cuh): launches that logprobs.cu and
// shards/logprobs.cu share.
#pragma once

#include "lm_head/sm90/chunk/chunk.h"

namespace liger::lm_head {

struct KeptRow;
struct EntropyTerm;

// The rows of one chunk, whose exponentials are computed.
struct KeptChunk {
  const Batch& batch;
  const PlannedChunk& planned;
  ce::Targets targets;  // classes of the weight of the batch, or others without a one-hot term
  KeptRow* kept;
  EntropyTerm* entropy_terms;  // null without gradients of entropies
  OneHot* class_one_hot;
  const ChunkBuffers& buffers;

  // Scales, one-hot terms, and the scaled rows for the weight gradient. Gradients: (rows of the batch,), float32.
  void row_gradients(const Tensor& grad_logprobs, const std::optional<Tensor>& grad_entropy) const;
  // Then with gradients of entropies: the matrix that the GEMMs read, in `to`. from: the exponentials of the batch, or
  // of this chunk with `first` 0.
  void entropy_gradient(const Panels& from, int64_t first, const Panels& to) const;

  ChunkRows rows() const {
    return {batch.row_index.count, static_cast<int>(planned.first), static_cast<int>(planned.rows)};
  }
  const int32_t* index() const { return batch.row_index.index + planned.first; }
};

// Gradients of the results of a call: (rows,) float32, as the kernels read it.
void check_row_gradient(const char* op, const char* name, const Tensor& gradient, int64_t rows);

}  // namespace liger::lm_head
