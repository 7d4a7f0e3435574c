// SPDX-License-Identifier: BSD-3-Clause

// fused_linear_ce of a sharded vocabulary on the wgmma engine, in steps: each rank has the weight of a shard
// of the classes, and torch.distributed communicates between the steps
// (python/liger/distributed/vocab/sm90.py).
//
//   shard_begin         once: gathers the valid rows and computes the logits of the targets of this shard
//     all-reduce        of the logits of the targets, which all ranks use as references
//   shard_exponentials  a chunk: exponentials, and (reference, sum) of each row
//     all-gather of these pairs
//   shard_rule          losses, scales, and the input gradient of the shard in float32
//     all-reduce        of the input gradient
//   shard_grad_weight   adds to the weight gradient of the shard
//   shard_finish        once: moves the input gradients of valid rows to their rows
//
// Internal ops: the caller has checked the options and allocates all memory. `rows` are the gathered rows of
// the whole batch, in the memory of the input gradient: the gradient of a chunk is rounded into it after its
// rows have been read for the last time.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cross_entropy/cross_entropy.h"
#include "lm_head/sm90/shards/step.h"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = "fused_linear_ce";
// Op name for the checks of options and denominators.
constexpr const char* kPreparedAs = "fused_linear_ce";

// --- the ops -----------------------------------------------------------------------------------------------

// Number of clusters that run at a time on the device of a tensor, 0 if the engine cannot run there.
int64_t shard_clusters(const Tensor& input) {
  const DeviceGuard guard(input.get_device_index());
  return clusters_on_device(input.get_device_index());
}

// Bytes of the state, and of the workspace of the chunks.
std::tuple<int64_t, int64_t> shard_memory(const Tensor& input, const Tensor& weight,
                                          std::vector<int64_t> plan, bool need_grad_input,
                                          bool need_grad_weight, bool with_metrics) {
  const Batch batch =
      shard_batch(input, weight, need_grad_input, need_grad_weight, std::nullopt, 1.0, with_metrics);
  int64_t max_bytes = 0;
  for (const PlannedChunk& chunk : LinearCePlan::decode(plan).chunks)
    max_bytes = std::max(max_bytes, ShardStep::workspace_bytes(batch, chunk));
  return {ShardState::bytes(batch.rows()), max_bytes};
}

void shard_begin(const Tensor& input, const Tensor& weight, const Tensor& target,
                 const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& denominator,
                 int64_t ignore_index, std::optional<double> softcap, bool mean, int64_t vocab_start,
                 int64_t vocab_size, const Tensor& state, const Tensor& target_logit, const Tensor& rows,
                 const Tensor& used_denominator, const Tensor& loss, const Tensor& z_loss,
                 const Tensor& logprobs) {
  const OpGuard guard("fused_linear_ce shard begin", input.get_device_index());
  const std::string reduction = mean ? "mean" : "sum";
  CrossEntropyOptions options(
      {target, ce_weight, std::nullopt, denominator, ignore_index, 0.0, 0.0, softcap, reduction}, vocab_size);
  prepare_cross_entropy(kPreparedAs, options, denominator, mean, used_denominator);
  Batch batch = shard_batch(input, weight, false, false, softcap, 1.0);
  batch.problem = options.problem;
  batch.problem.loss = memory_of<float>(loss);
  batch.problem.z_loss = memory_of<float>(z_loss);
  batch.problem.logprobs = memory_of<float>(logprobs);
  gather_shard(batch, ShardState(state, batch.rows()), vocab_start, target_logit, rows);
}

// sums: (kRankNumbers, rows of the chunk), or with metrics (kRankNumbersWithMetrics, rows of the chunk).
void shard_exponentials(const Tensor& input, const Tensor& weight, std::optional<double> softcap,
                        double temperature, int64_t vocab_start, bool keep, bool need_grad_input,
                        std::vector<int64_t> plan, int64_t index, const Tensor& state,
                        const Tensor& target_logit, const Tensor& rows, const Tensor& grad_weight,
                        const Tensor& panel_workspace, const Tensor& workspace, const Tensor& sums) {
  const bool with_metrics = sums.size(0) == kRankNumbersWithMetrics;
  const ShardStep step("shard exponentials",
                       {input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows,
                        grad_weight, panel_workspace, workspace, temperature, with_metrics, keep});
  require((with_metrics || sums.size(0) == kRankNumbers) && sums.size(1) == step.planned.rows, kOp,
          ": the sums have shape ", shape_text(sums), ", expected (", kRankNumbers, " or ",
          kRankNumbersWithMetrics, ", ", step.planned.rows, ")");
  const ShardChunk chunk = step.chunk();
  chunk.exponentials(step.state);
  chunk.write_sums(vocab_start, memory_of<float>(sums));
}

// sums: (ranks, 2, rows of the chunk). Without gradients only the results are written.
void shard_rule(const Tensor& target, const std::optional<Tensor>& ce_weight,
                const std::optional<Tensor>& token_weight, const Tensor& used_denominator,
                int64_t ignore_index, double lse_square_scale, int64_t vocab_size, const Tensor& sums,
                int64_t rank, const Tensor& input, const Tensor& weight, std::optional<double> softcap,
                bool need_grad_input, std::vector<int64_t> plan, int64_t index, const Tensor& state,
                const Tensor& target_logit, const Tensor& rows, const Tensor& grad_weight,
                const Tensor& panel_workspace, const Tensor& workspace, const Tensor& grad_input_sum,
                const Tensor& loss, const Tensor& z_loss, const Tensor& logprobs) {
  ShardStep step(kOp, {input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows,
                       grad_weight, panel_workspace, workspace});
  const std::optional<Tensor> denominator = used_denominator;
  const std::string reduction = "sum";
  const CrossEntropyOptions options(
      {target, ce_weight, token_weight, denominator, ignore_index, 0.0, lse_square_scale, softcap, reduction},
      vocab_size);
  ce::Problem& problem = step.batch.problem;
  problem = options.problem;
  problem.rows = step.batch.rows();
  problem.denominator = static_cast<const float*>(used_denominator.const_data_ptr());
  problem.loss = memory_of<float>(loss);
  problem.z_loss = memory_of<float>(z_loss);
  problem.logprobs = memory_of<float>(logprobs);
  const ShardChunk chunk = step.chunk();
  chunk.apply_rule(step.state, sums, rank, true);
  if (need_grad_input) chunk.grad_input(memory_of<float>(grad_input_sum));
}

void shard_grad_weight(const Tensor& input, const Tensor& weight, std::optional<double> softcap,
                       bool need_grad_input, std::vector<int64_t> plan, int64_t index, const Tensor& state,
                       const Tensor& target_logit, const Tensor& rows, const Tensor& grad_weight,
                       const Tensor& panel_workspace, const Tensor& workspace) {
  const ShardStep step("shard grad_weight", {input, weight, softcap, need_grad_input, plan, index, state,
                                             target_logit, rows, grad_weight, panel_workspace, workspace});
  step.chunk().grad_weight();
}

void shard_finish(const Tensor& state, const Tensor& grad_input) {
  const OpGuard guard("shard finish", grad_input.get_device_index());
  const Batch batch = shard_batch(grad_input, grad_input, true, false, std::nullopt, 1.0);
  const int64_t rows = batch.rows();
  scatter_rows(batch, ShardState(state, rows).index(rows).position, rows, memory_of<Element16>(grad_input));
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("shard_clusters(Tensor input) -> int");
  m.def("shard_memory(Tensor input, Tensor weight, int[] plan, bool need_grad_input, bool need_grad_weight, bool with_metrics) -> (int state_bytes, int workspace_bytes)");
  m.def("shard_begin(Tensor input, Tensor weight, Tensor target, Tensor? ce_weight, Tensor? denominator, int ignore_index, float? softcap, bool mean, int vocab_start, int vocab_size, Tensor(a!) state, Tensor(b!) target_logit, Tensor(c!) rows, Tensor(d!) used_denominator, Tensor(e!) loss, Tensor(f!) z_loss, Tensor(g!) logprobs) -> ()");
  m.def("shard_exponentials(Tensor input, Tensor weight, float? softcap, float temperature, int vocab_start, bool keep, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor rows, Tensor(a!) grad_weight, Tensor(b!) panel_workspace, Tensor(c!) workspace, Tensor(d!) sums) -> ()");
  m.def("shard_rule(Tensor target, Tensor? ce_weight, Tensor? token_weight, Tensor used_denominator, int ignore_index, float lse_square_scale, int vocab_size, Tensor sums, int rank, Tensor input, Tensor weight, float? softcap, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor(a!) rows, Tensor(b!) grad_weight, Tensor(c!) panel_workspace, Tensor(d!) workspace, Tensor(e!) grad_input_sum, Tensor(f!) loss, Tensor(g!) z_loss, Tensor(h!) logprobs) -> ()");
  m.def("shard_grad_weight(Tensor input, Tensor weight, float? softcap, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor rows, Tensor(a!) grad_weight, Tensor(b!) panel_workspace, Tensor(c!) workspace) -> ()");
  m.def("shard_finish(Tensor state, Tensor(a!) grad_input) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("shard_clusters", TORCH_BOX(&shard_clusters));
  m.impl("shard_memory", TORCH_BOX(&shard_memory));
  m.impl("shard_begin", TORCH_BOX(&shard_begin));
  m.impl("shard_exponentials", TORCH_BOX(&shard_exponentials));
  m.impl("shard_rule", TORCH_BOX(&shard_rule));
  m.impl("shard_grad_weight", TORCH_BOX(&shard_grad_weight));
  m.impl("shard_finish", TORCH_BOX(&shard_finish));
}

}  // namespace liger::lm_head
