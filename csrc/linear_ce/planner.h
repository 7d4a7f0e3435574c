// How fused_linear_ce cuts its rows into chunks, given a memory budget.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// Throws std::runtime_error on negative sizes or a budget that is not positive.
ChunkPlan plan_chunks(const ChunkProblem& problem);

enum class LogitsIn : int64_t { kOwnMemory, kGradWeight, kGradInput };

struct Chunk {
  int64_t first, rows;
  int64_t offset;  // elements from the start of the memory of logits to the chunk's
};

// Where the logits of a batch lie, chunk by chunk.
//
// kGradWeight: while the weight gradient is summed in float32 elsewhere, its own memory holds the logits.
// kGradInput, for chunks too small for the speed of the products: one allocation starts with grad_input, so
// that the rows of grad_input which are not written yet hold logits too. Chunks begin twice as large where
// the two are of one size, and never are smaller than planned. The memory lives as long as grad_input: no
// longer than until the backward of what made the input, and it is no larger than what the op held anyway.
struct ChunkLayout {
  ChunkPlan plan;
  LogitsIn place;
  int64_t stride;     // elements from one row of logits to the next
  int64_t elements;   // of the allocation that holds the logits, in kGradInput that of grad_input included
  int64_t head_rows;  // of the first chunk, multiplied before the number of valid rows is waited for; 0: not
                      // wanted, the batch is over too soon
  int64_t rows;       // computed: all, or the valid ones if leaving out the others pays
  std::vector<Chunk> chunks;
};

// valid_rows: those that are not ignored, which the caller can bring side by side; leading_rows: those before
// the first ignored one. With both equal to problem.rows the chunks are those of all rows. The place, the
// size of the allocation, the head and the offset of the first chunk do not depend on either, so that work on
// the head can begin before they are known.
ChunkLayout lay_out_chunks(const ChunkProblem& problem, bool need_grad_input, int64_t valid_rows,
                           int64_t leading_rows);

// LIGER_MEMORY_BUDGET (bytes, or with a suffix K, M, G: powers of 1024), else 512 MiB. Throws
// std::runtime_error.
int64_t default_memory_budget();

}  // namespace liger
