// How fused_linear_ce cuts its rows into chunks, given a memory budget.
#pragma once

#include <cstdint>
#include <string>

namespace liger {

// A GEMM tile: a chunk of whole tiles leaves no ragged one in the three GEMMs.
inline constexpr int64_t kTileRows = 128;
// From here on the traffic of the weight and of its gradient hides behind the GEMMs
// (docs/performance/cross_entropy.md).
inline constexpr int64_t kFullSpeedRows = 2048;

struct ChunkPlan {
  int64_t chunk_rows;         // rows of logits alive at a time; every chunk but the last has this many
  int64_t chunks;             // ceil(rows / chunk_rows); 0 when there are no rows
  int64_t logits_bytes;       // the chunk of logits (and, in place, of their gradient)
  int64_t accumulator_bytes;  // float32 weight gradient summed over chunks; 0 when one GEMM suffices or it is
                              // not wanted
};

struct ChunkProblem {
  int64_t rows, hidden, vocab;
  int64_t element_size;  // bytes of one logit (the dtype of input)
  bool need_grad_weight;
  bool exact_accumulation;  // the weight gradient is summed in float32 (only matters for 2-byte dtypes)
  int64_t memory_budget;    // bytes for the logits of one chunk
};

// Bytes from one row of logits to the next: rows start at multiples of 16 bytes, as vectors and matrix units
// want them.
int64_t logits_row_bytes(int64_t vocab, int64_t element_size);

// Throws std::invalid_argument on negative sizes or a budget that is not positive.
ChunkPlan plan_chunks(const ChunkProblem& problem);

// LIGER_MEMORY_BUDGET (bytes, or with a suffix K, M, G: powers of 1024), else 512 MiB. Throws
// std::invalid_argument.
int64_t default_memory_budget();

}  // namespace liger
