// The work on one chunk of rows by the products of compute capability 9.0 (linear_ce/sm90/epilogues.cuh).
// What lies where is up to the caller: fused_linear_ce, or a loss that does something of its own between the
// logits and their gradient.
#pragma once

#include "host/torch.h"
#include "linear_ce/sm90/epilogues.cuh"
#include "linear_ce/sm90/planner.h"
#include "linear_ce/sm90/workspace.h"
#include "linear_ce/valid_rows.cuh"

namespace liger::flce90 {

using Bf16 = __nv_bfloat16;

// The rows of a batch, or of some of it, that are cut into chunks. The tensors are as dense() gives them.
struct Batch {
  Tensor input, weight;  // (rows, hidden), (vocab, hidden)
  bool need_grad_input, need_grad_weight;
  bool observed;  // entropies and most probable classes are asked for
  float inverse_temperature;
  ce::Problem problem;    // of these rows; logits are not set
  compact::RowList list;  // of these rows
  int device;
  cudaStream_t stream;

  int64_t rows() const { return input.size(0); }
  int64_t hidden() const { return input.size(1); }
  int64_t vocab() const { return weight.size(0); }
  bool need_gradient() const { return need_grad_input || need_grad_weight; }
};

// Pointers of one chunk.
struct Places {
  Bf16* input;  // its rows side by side: where their gradient goes, or apart
  float* target_logit;
  float* scale;
  float* parts;
  int* repair;
  OneHot* one_hot;
  float* partial;
  Observed observed;  // null where nothing is
};

// How many bytes take_places() takes. The rows need some of them if they are `apart` from their gradient.
int64_t places_bytes(const Batch& batch, const Sm90Chunk& chunk, bool apart);
Places take_places(const Batch& batch, const Sm90Chunk& chunk, Bf16* grad_input, Workspace& workspace);

// The weight gradient of all chunks, and the memory beside it.
struct WeightSum {
  Bf16* gradient;        // (vocab, hidden), then plan.slack panels
  unsigned char* extra;  // plan.panel_bytes for each panel of 128 classes and of slack
  OneHot* owners;        // of the classes, in the chunk at hand
  int* readers;          // per panel, in the chunk whose exponentials lie in the gradient
};
int64_t extra_bytes(const Batch& batch, const Sm90Plan& plan);

struct Owners;

// A chunk and its place among the chunks.
class Chunk {
 public:
  Chunk(const Batch& batch, const Sm90Plan& plan, size_t index, const Sm90Chunk& chunk, const Places& places,
        const WeightSum& sum, Bf16* grad_input);

  // Whether the exponentials of the chunk are gone after its weight gradient: then its rows must not lie
  // where the input gradient goes.
  static bool rows_apart(const Batch& batch, const Sm90Plan& plan, size_t index) {
    return !batch.need_grad_input || (index == 0 && plan.hosted_rows > 0);
  }

  void exponentials() const;
  // Results from the sums of exponentials, those that the problem has pointers for. With gradient also the
  // scales that the products need; then the rows are scaled for the weight gradient, so that this comes once.
  void apply_rule(bool gradient) const;
  void multiply() const;

 private:
  ChunkRows rows() const;
  sm90::Maps maps_of(const CUtensorMap& b) const;
  Owners owners() const;
  template <bool kObserve>
  void multiply_logits() const;
  void multiply_input() const;
  void multiply_weight() const;

  const Batch& batch_;
  const Sm90Plan& plan_;
  const Sm90Chunk chunk_;
  const Places at_;
  const WeightSum sum_;
  Bf16* const grad_input_;  // of the chunk
  const bool is_first_, is_last_, hosted_, apart_;
  Panels panels_;
};

// A chunk whose gradient of the logits lies in rows, and what becomes of it by the same products.
struct GradientRows {
  Tensor gradient;       // (rows, vocab)
  Tensor input, weight;  // (rows, hidden), (vocab, hidden); all three as dense() gives them
  int64_t parts;         // of the classes, in the product of the input gradient
  bool first, last;      // of the chunks that the weight gradient is summed over
  int device;
  cudaStream_t stream;
};
int64_t gradient_rows_bytes(int64_t rows, int64_t hidden, int64_t vocab, int64_t parts);
// units: of the sum, vocab * hidden / 256 bytes where there are several chunks. grad_input may be the input.
// A gradient that is null is not made.
void multiply_rows(const GradientRows& chunk, Bf16* grad_weight, unsigned char* units, Bf16* grad_input,
                   const Tensor& workspace);

// The tensor, or a copy that the copy engine can read.
Tensor dense(const Tensor& tensor);
// Lists the valid rows of the batch and writes the results of the others.
void list_rows(Batch& batch, int32_t* memory);
inline int64_t list_bytes(int64_t rows) {
  return (2 * rows + 1) * int64_t{sizeof(int32_t)};
}
// The gradients of the listed ones among some rows, side by side, go to where they belong.
void spread_rows(const Batch& batch, const int32_t* position, int64_t rows, Bf16* grad_input);

// How the engine would do it, or nothing where it cannot.
std::optional<Sm90Plan> plan_on_device(Sm90Problem problem, int device);
std::optional<Sm90HeadPlan> plan_head_on_device(Sm90Problem problem, int64_t beside, bool hosted, int device);

}  // namespace liger::flce90
