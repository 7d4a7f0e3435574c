// SPDX-License-Identifier: BSD-3-Clause

// The planner of the generic engine: cuts the rows of fused_linear_ce into chunks within a memory budget.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace liger {

// Rows of a cuBLAS tile: chunks of whole tiles leave no partial tile in the three GEMMs.
inline constexpr int64_t kTileRows = 128;
// From this chunk size on the GEMMs hide the memory traffic of the weight and its gradient
// (docs/lab/cross_entropy.md).
inline constexpr int64_t kFullSpeedRows = 2048;

struct ChunkPlan {
  int64_t chunk_rows;         // rows per chunk; the last one may have fewer
  int64_t chunks;             // ceil(rows / chunk_rows); 0 without rows
  int64_t logits_bytes;       // the logits of one chunk; their gradient overwrites them
  int64_t accumulator_bytes;  // float32 weight gradient over chunks; 0 if one GEMM suffices or none is needed
};

struct ChunkProblem {
  int64_t rows, hidden, vocab;
  int64_t element_size;  // bytes of one logit (the dtype of input)
  bool need_grad_weight;
  bool exact_accumulation;  // the weight gradient is summed in float32 (only matters for 2-byte dtypes)
  int64_t memory_budget;    // bytes for the logits of one chunk
};

// The stride of rows of logits in bytes: a multiple of 16, for vectorised access and tensor cores.
int64_t logits_row_bytes(int64_t vocab, int64_t element_size);

// Throws std::runtime_error on negative sizes or a budget that is not positive.
void check_chunk_problem(const ChunkProblem& problem);
// Throws what check_chunk_problem() throws.
ChunkPlan plan_chunks(const ChunkProblem& problem);

enum class LogitsIn : int64_t { kOwnMemory, kGradWeight, kGradInput };

struct Chunk {
  int64_t first, rows;
  int64_t offset;  // elements from the start of the memory of logits
};

// Which memory holds the logits of each chunk.
//
// kGradWeight: the memory of the final weight gradient, while it is accumulated in float32 elsewhere.
// kGradInput, for chunks below kFullSpeedRows: one allocation that starts with grad_input. Rows of grad_input
// that are not written yet hold logits as well, so the first chunks are larger (twice as large if logits and
// grad_input have the same size) and no chunk is smaller than planned. The allocation lives as long as
// grad_input: until the backward of the previous layer.
struct ChunkLayout {
  ChunkPlan plan;
  LogitsIn logits_in;
  int64_t stride;         // elements between rows of logits
  int64_t elements;       // size of the allocation of the logits, with kGradInput including grad_input
  int64_t prefetch_rows;  // rows of the first chunk that are computed before the host knows the number of
                          // valid rows; 0: no prefetch, the batch is too short
  int64_t rows;           // computed rows: all rows, or the valid rows if skipping the others pays
  std::vector<Chunk> chunks;
};

// valid_rows: number of rows that are not ignored; the caller can compact them. leading_rows: number of rows
// before the first ignored row. With both equal to problem.rows, the chunks cover all rows. Neither changes
// logits_in, elements, prefetch_rows or the offset of the first chunk, so the prefetch can start before they
// are known.
ChunkLayout lay_out_chunks(const ChunkProblem& problem, bool need_grad_input, int64_t valid_rows,
                           int64_t leading_rows);

// LIGER_MEMORY_BUDGET (bytes; suffix K, M, G: powers of 1024), else 512 MiB. Throws std::runtime_error if
// malformed.
int64_t default_memory_budget();

// False under LIGER_WGMMA=0: the generic engine computes everything. Throws std::runtime_error for other
// values than 0 and 1.
bool wgmma_engine_allowed();

}  // namespace liger
