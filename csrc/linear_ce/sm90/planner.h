// How fused_linear_ce cuts its rows into chunks where its own products of compute capability 9.0 run
// (linear_ce/sm90/epilogues.cuh).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace liger {

struct Sm90Problem {
  int64_t rows, hidden, vocab;
  bool need_grad_input, need_grad_weight;
  bool exact_accumulation;  // the weight gradient has to be as exact as one float32 sum
  int64_t memory_budget;    // bytes beside the gradients: exponentials, their sums, and units
  int64_t clusters;         // pairs of blocks that the device runs at a time
  int64_t group_rows = 1;   // chunks are multiples of it
  bool observed = false;    // entropies and most probable classes are asked for
};

struct Sm90Chunk {
  int64_t first, rows;
  int64_t parts;  // that the input gradient's summed dimension is split into
};

// The first chunk is larger: as long as there is no sum yet, its exponentials lie in the memory of the weight
// gradient (hosted_rows of them) and in all of `extra`. Later `extra` holds, panel by panel of 128 columns,
// the units of the sum and the exponentials of a chunk.
struct Sm90Plan {
  std::vector<Sm90Chunk> chunks;
  int64_t hosted_rows;  // of the first chunk
  int64_t panel_bytes;  // of extra
  int64_t units_bytes;  // of a panel of extra: where the exponentials of later chunks begin
  int64_t slack;  // panels by which the first chunk's exponentials lie behind their own place: as much longer
                  // are the memory of the weight gradient and extra
};

// Nothing where the generic engine has to take over, or is faster: hidden sizes that are no multiple of 256,
// vocabularies that are none of 128, few rows,
// groups of more rows than the budget has room for.
std::optional<Sm90Plan> plan_sm90(const Sm90Problem& problem);

// The same for losses that have the gradient of their logits in rows and in memory of their own
// (linear_backward.cu): the products by which a chunk becomes gradients are the same.
struct Sm90HeadPlan {
  int64_t first_rows;   // of the first chunk, as many as of the others or more
  int64_t first_parts;  // as parts
  int64_t chunk_rows;   // of the others
  int64_t part_rows;    // of a chunk, for which logits exist beside the gradient
  int64_t parts;        // that the input gradient's summed dimension is split into
  int64_t units_bytes;  // of the sum over chunks, 0 with one chunk
};

// beside: how many rows of 16 bits a row of a part has beside its gradient, two for each product of float32
// logits; 0 where logits become their gradient where they lie. hosted: as long as there is no sum yet, they
// lie in the memory of the weight gradient, hidden / beside rows at a time, so that the first chunk's
// gradient has the budget for itself. Nothing as above, or where not even a part of kFewestRows fits.
std::optional<Sm90HeadPlan> plan_head_sm90(const Sm90Problem& problem, int64_t beside, bool hosted);

}  // namespace liger
