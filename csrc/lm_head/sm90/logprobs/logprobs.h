// SPDX-License-Identifier: BSD-3-Clause

// The gradients of log-probabilities and entropies from kept rows (kept_rows.cuh): launches for logprobs.cu
// and shards/logprobs.cu.
#pragma once

#include "lm_head/sm90/chunk/chunk.h"

namespace liger::lm_head {

struct KeptRow;
struct EntropyTerm;

// The rows of one chunk with computed exponentials.
struct KeptChunk {
  const Batch& batch;
  const PlannedChunk& planned;
  ce::Targets targets;  // classes of the batch's weight; other targets have no one-hot term
  KeptRow* kept;
  EntropyTerm* entropy_terms;  // null without gradients of entropies
  OneHot* class_one_hot;
  const ChunkBuffers& buffers;

  // Computes scales, one-hot terms, and the scaled rows for the weight gradient. Upstream gradients: (rows of
  // the batch,), float32.
  void row_gradients(const Tensor& grad_logprobs, const std::optional<Tensor>& grad_entropy) const;
  // With gradients of entropies, computes next the matrix that the GEMMs read, in `to`. from: the
  // exponentials of the batch, or of this chunk with first = 0.
  void entropy_gradient(const Panels& from, int64_t first, const Panels& to) const;

  ChunkRows rows() const {
    return {batch.row_index.count, static_cast<int>(planned.first), static_cast<int>(planned.rows)};
  }
  const int32_t* index() const { return batch.row_index.index + planned.first; }
};

// Checks the upstream gradient of a result: (rows,), float32, contiguous.
void check_row_gradient(const char* op, const char* name, const Tensor& gradient, int64_t rows);

}  // namespace liger::lm_head
