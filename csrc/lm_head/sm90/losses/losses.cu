// SPDX-License-Identifier: BSD-3-Clause

// The wgmma engine in two steps, for liger.losses: first the log-probabilities of the targets of a chunk
// (with entropies and argmax as metrics), then, given the loss's gradient, the gradients of the linear layer.
//
// Internal ops: they write to tensors that the caller has allocated as plan() says. The caller runs the
// second step of a chunk before the first step of the next chunk.
//
// A chunk takes the same groups from each part of the batch: one range of rows, or two ranges for pairs (the
// chosen sequences are the first half of the batch, the rejected sequences the second). The kernels read the
// rows through the index of valid rows. With two ranges the input gradients are contiguous, chunk after
// chunk, until permute_rows(): a GEMM needs contiguous rows, and the gathered rows use that memory first.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cross_entropy/cross_entropy.h"
#include "lm_head/sm90/chunk/chunk.h"

namespace liger {
namespace {

using lm_head::Element16;

constexpr const char* kOp = "fused_linear_loss";

// Bytes of the workspace of one chunk: index of valid rows, one-hot terms per class, read counts, and
// buffers.
int64_t step_workspace_bytes(const lm_head::Batch& batch, const PlannedChunk& chunk) {
  return Workspace::bytes_for({(chunk.rows + 1) * int64_t{sizeof(int32_t)},
                               lm_head::class_one_hot_bytes(batch), batch.panels() * int64_t{sizeof(int)},
                               lm_head::ChunkBuffers::bytes(batch, chunk, false)});
}

// LinearCePlan::encode(); then for each chunk whether its gathered rows need memory apart from their
// gradient, and the bytes of its workspace. Empty if the engine cannot take the problem.
using EncodedPlan = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;

EncodedPlan plan(const Tensor& input, const Tensor& weight, int64_t group_rows, bool exact_accumulation,
                 int64_t memory_budget, bool with_metrics, bool need_grad_input, bool need_grad_weight) {
  if (input.scalar_type() != ScalarType::BFloat16 && input.scalar_type() != ScalarType::Half) return {};
  const DeviceGuard guard(input.get_device_index());
  const lm_head::Batch batch =
      lm_head::batch_of(input, weight, need_grad_input, need_grad_weight, with_metrics, 1.0);
  const std::optional<LinearCePlan> plan =
      lm_head::plan_on_device({batch.rows(), batch.hidden(), batch.vocab(), need_grad_input, need_grad_weight,
                               exact_accumulation, memory_budget, 0, group_rows},
                              batch.device);
  if (!plan) return {};
  std::vector<int64_t> separate_rows, workspace_bytes;
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    separate_rows.push_back(lm_head::Chunk::separate_rows(batch, *plan, i));
    workspace_bytes.push_back(step_workspace_bytes(batch, plan->chunks[i]));
  }
  return {plan->encode(), std::move(separate_rows), std::move(workspace_bytes)};
}

// (rows,) for the whole batch; entropy and argmax are empty without metrics. Ignored rows are not written.
struct RowResults {
  const Tensor &logprobs, &entropy, &argmax;
};

// State of both steps of a chunk. dense() has returned input and weight; target is contiguous.
class Step {
 public:
  Step(const Tensor& input, const Tensor& weight, const Tensor& target, int64_t ignore_index,
       double temperature, bool with_metrics, const std::vector<int64_t>& plan, int64_t index, int64_t ranges,
       const Tensor& position, const Tensor& grad_weight, const Tensor& panel_workspace, const Tensor& rows,
       const Tensor& workspace, const Tensor& grad_input)
      : batch_(lm_head::batch_of(input, weight, grad_input.numel() > 0, grad_weight.numel() > 0, with_metrics,
                                 temperature)),
        plan_(LinearCePlan::decode(plan)),
        ranges_(ranges) {
    require(ranges == 1 || ranges == 2, kOp, ": a chunk of ", ranges, " ranges, expected 1 or 2");
    ce::Problem& problem = batch_.problem;
    problem.rows = batch_.rows();
    problem.vocab = static_cast<int>(batch_.vocab());
    problem.targets = {target.const_data_ptr(), target.scalar_type() == ScalarType::Int, ignore_index};
    const PlannedChunk& planned = plan_.chunks.at(index);
    first_ = planned.first;
    rows_ = planned.rows;
    // The row index covers this chunk alone, so its rows start at 0.
    const PlannedChunk chunk{0, planned.rows, planned.k_splits};
    Workspace memory(workspace, 0);
    int32_t* const row_index = memory.allocate<int32_t>(rows_ + 1);
    batch_.row_index = {row_index, static_cast<int32_t*>(position.mutable_data_ptr()), row_index + rows_};
    const lm_head::GradWeightBuffers buffers{static_cast<Element16*>(grad_weight.mutable_data_ptr()),
                                             static_cast<unsigned char*>(panel_workspace.mutable_data_ptr()),
                                             memory.allocate<lm_head::OneHot>(batch_.panels() * sm90::kPanel),
                                             memory.allocate<int>(batch_.panels())};
    const lm_head::ChunkBuffers chunk_buffers = lm_head::ChunkBuffers::allocate(
        batch_, chunk, static_cast<Element16*>(rows.mutable_data_ptr()), memory);
    chunk_.emplace(batch_, plan_, index, chunk, chunk_buffers, buffers,
                   static_cast<Element16*>(grad_input.mutable_data_ptr()));
  }
  Step(const Step&) = delete;  // the chunk refers to the batch and the plan

  void logprobs(const RowResults& results) {
    ce::Problem& problem = batch_.problem;
    problem.logprobs = static_cast<float*>(results.logprobs.mutable_data_ptr());
    if (batch_.with_metrics) {
      problem.entropy = static_cast<float*>(results.entropy.mutable_data_ptr());
      problem.predicted = static_cast<int64_t*>(results.argmax.mutable_data_ptr());
    }
    // With one range each chunk scatters its own gradients, so positions count from 0 in each chunk.
    const valid_rows::RowRanges ranges{first_ / ranges_, rows_ / ranges_, (batch_.rows() - rows_) / ranges_,
                                       ranges_ > 1 ? static_cast<int>(first_) : 0};
    valid_rows::launch_index_valid_rows(problem.targets, rows_, batch_.row_index, nullptr, batch_.stream,
                                        ranges);
    check_launch(kOp);
    chunk_->exponentials();
    chunk_->apply_rule(false);
  }

  // neg_grad_logprobs: (rows,) for the whole batch.
  void gradients(const Tensor& neg_grad_logprobs, const Tensor& grad_input) {
    batch_.problem.token_weight = static_cast<const float*>(neg_grad_logprobs.const_data_ptr());
    chunk_->apply_rule(true);
    chunk_->gradients();
    if (batch_.need_grad_input && ranges_ == 1) {
      lm_head::scatter_rows(batch_, batch_.row_index.position + first_, rows_,
                            static_cast<Element16*>(grad_input.mutable_data_ptr()));
    }
  }

 private:
  lm_head::Batch batch_;
  LinearCePlan plan_;
  const int64_t ranges_;
  int64_t first_ = 0, rows_ = 0;  // rows of this chunk, counted over all chunks
  std::optional<lm_head::Chunk> chunk_;
};

void logprobs(const Tensor& input, const Tensor& weight, const Tensor& target, int64_t ignore_index,
              double temperature, bool with_metrics, std::vector<int64_t> plan, int64_t index, int64_t ranges,
              const Tensor& position, const Tensor& grad_weight, const Tensor& panel_workspace,
              const Tensor& rows, const Tensor& workspace, const Tensor& grad_input, const Tensor& logprobs,
              const Tensor& entropy, const Tensor& argmax) {
  const OpGuard guard("fused_linear_loss logprobs", input.get_device_index());
  Step(input, weight, target, ignore_index, temperature, with_metrics, plan, index, ranges, position,
       grad_weight, panel_workspace, rows, workspace, grad_input)
      .logprobs({logprobs, entropy, argmax});
}

void gradients(const Tensor& neg_grad_logprobs, const Tensor& input, const Tensor& weight,
               const Tensor& target, int64_t ignore_index, double temperature, bool with_metrics,
               std::vector<int64_t> plan, int64_t index, int64_t ranges, const Tensor& position,
               const Tensor& grad_weight, const Tensor& panel_workspace, const Tensor& rows,
               const Tensor& workspace, const Tensor& grad_input) {
  require(neg_grad_logprobs.scalar_type() == ScalarType::Float && neg_grad_logprobs.is_contiguous() &&
              neg_grad_logprobs.numel() == input.size(0),
          kOp, ": the gradient of the log-probabilities has shape ", shape_text(neg_grad_logprobs),
          ", expected one contiguous float32 per row");
  const OpGuard guard("fused_linear_loss gradients", input.get_device_index());
  Step(input, weight, target, ignore_index, temperature, with_metrics, plan, index, ranges, position,
       grad_weight, panel_workspace, rows, workspace, grad_input)
      .gradients(neg_grad_logprobs, grad_input);
}

// rows[i] = rows[position[i]], or zeros if position[i] < 0. Columns pass through `memory`, as many at a time
// as fit.
void permute_rows(const Tensor& position, const Tensor& memory, const Tensor& rows) {
  const OpGuard guard("fused_linear_loss permute_rows", rows.get_device_index());
  const int64_t count = rows.size(0), hidden = rows.size(1);
  constexpr int64_t kVector = kVec<__nv_bfloat16>;
  const int64_t bytes = memory.numel() * static_cast<int64_t>(memory.element_size());
  const int64_t fitting = bytes / (count * int64_t{sizeof(__nv_bfloat16)}) / kVector * kVector;
  require(fitting > 0, kOp, ": ", bytes, " bytes are too few to permute ", count, " rows");
  const int64_t columns = round_up(ceil_div(hidden, ceil_div(hidden, fitting)), kVector);
  const auto* const source = static_cast<const int32_t*>(position.const_data_ptr());
  __nv_bfloat16* const copy = static_cast<__nv_bfloat16*>(memory.mutable_data_ptr());
  const cudaStream_t stream = current_stream(rows);
  for (int64_t first = 0; first < hidden; first += columns) {
    const int64_t width = std::min(columns, hidden - first);
    __nv_bfloat16* const x = static_cast<__nv_bfloat16*>(rows.mutable_data_ptr()) + first;
    valid_rows::launch_copy_rows<__nv_bfloat16>(x, hidden, valid_rows::PermutedRows{nullptr}, count, width,
                                                copy, width, stream);
    valid_rows::launch_copy_rows<__nv_bfloat16>(copy, width, valid_rows::PermutedRows{source}, count, width,
                                                x, hidden, stream);
    check_launch(kOp);
  }
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY(liger_sm90, m) {
  m.def("plan(Tensor input, Tensor weight, int group_rows, bool exact_accumulation, int memory_budget, bool with_metrics, bool need_grad_input, bool need_grad_weight) -> (int[] plan, int[] separate_rows, int[] workspace_bytes)");
  // Returns input or weight, or a copy that the other ops accept.
  m.def("dense(Tensor(a) matrix) -> Tensor(a)");
  // rows and grad_input belong to the chunk, all other tensors to the batch. A result that is not needed is
  // empty.
  m.def("logprobs(Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, bool with_metrics, int[] plan, int index, int ranges, Tensor(a!) position, Tensor(b!) grad_weight, Tensor(c!) panel_workspace, Tensor(d!) rows, Tensor(e!) workspace, Tensor(f!) grad_input, Tensor(g!) logprobs, Tensor(h!) entropy, Tensor(i!) argmax) -> ()");
  m.def("gradients(Tensor neg_grad_logprobs, Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, bool with_metrics, int[] plan, int index, int ranges, Tensor position, Tensor(b!) grad_weight, Tensor(c!) panel_workspace, Tensor(d!) rows, Tensor(e!) workspace, Tensor(f!) grad_input) -> ()");
  m.def("permute_rows(Tensor position, Tensor(a!) memory, Tensor(b!) rows) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("dense", TORCH_BOX(&lm_head::dense));
  m.impl("logprobs", TORCH_BOX(&logprobs));
  m.impl("gradients", TORCH_BOX(&gradients));
  m.impl("permute_rows", TORCH_BOX(&permute_rows));
}

}  // namespace liger
