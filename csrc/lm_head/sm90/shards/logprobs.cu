// SPDX-License-Identifier: BSD-3-Clause

// fused_linear_logprobs of a sharded vocabulary on the wgmma engine, in steps
// (python/liger/distributed/vocab/sm90_logprobs.py). The forward:
//
//   shard_logprobs_begin  once: gathers the valid rows and computes the logits of the targets of this shard
//     all-reduce          of the logits of the targets
//   shard_exponentials    a chunk: exponentials, and the numbers of write_sums() for each row
//     all-gather of these numbers
//   shard_logprobs        results; with kept exponentials also the kept rows
//
// The backward knows the sum of each row over all classes, so the ranks exchange no sums:
//
//   shard_logprobs_begin, all-reduce
//   shard_logprob_gradients  a chunk: exponentials unless they are kept, scales, and the input gradient in
//   float32
//     all-reduce             of the input gradient
//   shard_grad_weight, and once shard_finish, as for the loss
//
// Internal ops like the ops of shards/fused_linear_ce.cu: the caller checks options and allocates memory.
#include <torch/csrc/stable/library.h>

#include <climits>

#include "lm_head/sm90/logprobs/logprobs.h"
#include "lm_head/sm90/shards/kept_rows.cuh"
#include "lm_head/sm90/shards/step.h"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = "fused_linear_logprobs";

ce::Targets targets_of(const Tensor& target, int64_t ignore_index) {
  return {target.const_data_ptr(), target.scalar_type() == ScalarType::Int, ignore_index};
}

// stats: (2, rows of the batch), references and sums of exponentials of all classes.
WholeRows whole_rows(const Tensor& stats) {
  return {memory_of<float>(stats), stats.size(1)};
}

void set_problem(ce::Problem& problem, const Tensor& target, int64_t ignore_index, int64_t vocab_size,
                 const Tensor& logprobs, const Tensor& stats, const Tensor& entropy, const Tensor& argmax) {
  require(vocab_size < INT_MAX, kOp, ": ", vocab_size, " classes, expected fewer than 2^31 - 1");
  problem.vocab = static_cast<int>(vocab_size);
  problem.targets = targets_of(target, ignore_index);
  problem.logprobs = memory_of<float>(logprobs);
  problem.row_max = memory_of<float>(stats);
  problem.row_sum = problem.row_max == nullptr ? nullptr : problem.row_max + target.size(0);
  problem.entropy = memory_of<float>(entropy);
  problem.predicted = memory_of<int64_t>(argmax);
}

// Called after ShardChunk::exponentials(). target_logit: for the rows of the chunk.
void keep_rows(const ShardStep& step, const ce::Targets& targets, int64_t vocab_size,
               const float* target_logit, const Tensor& stats, const Tensor& entropy, KeptRow* kept) {
  const Batch& batch = step.batch;
  const ShardChunk chunk = step.chunk();
  const KeepShardRows arguments{
      .chunk = chunk.rows(),
      .index = batch.row_index.index + step.planned.first,
      .targets = targets,
      .vocab = static_cast<int>(vocab_size),
      .local = step.state.local,
      .target_logit = target_logit,
      .whole = whole_rows(stats),
      .entropy = memory_of<float>(entropy),
      .reference = step.buffers.target_logit,
      .overflow = step.buffers.overflow,
      .recomputed = step.buffers.scale,
      .class_one_hot = batch.need_grad_weight ? step.grad_weight.class_one_hot : nullptr,
      .exponentials = chunk.panels(),
      .panels = static_cast<int>(batch.panels()),
      .out = kept};
  keep_shard_rows<__nv_bfloat16>
      <<<static_cast<unsigned>(step.planned.rows), kRowThreads, 0, batch.stream>>>(arguments);
  check_launch(kOp);
}

// --- the ops -----------------------------------------------------------------------------------------------

// target is contiguous. Results that are not needed are empty.
void shard_logprobs_begin(const Tensor& input, const Tensor& weight, const Tensor& target,
                          int64_t ignore_index, double temperature, int64_t vocab_start, int64_t vocab_size,
                          const Tensor& state, const Tensor& target_logit, const Tensor& rows,
                          const Tensor& logprobs, const Tensor& stats, const Tensor& entropy,
                          const Tensor& argmax) {
  const OpGuard guard("fused_linear_logprobs shard begin", input.get_device_index());
  Batch batch = shard_batch(input, weight, false, false, std::nullopt, temperature);
  set_problem(batch.problem, target, ignore_index, vocab_size, logprobs, stats, entropy, argmax);
  gather_shard(batch, ShardState(state, batch.rows()), vocab_start, target_logit, rows);
}

// sums: (ranks, numbers of shard_exponentials, rows of the chunk). kept_rows: (rows of the batch,
// 4), if the exponentials are kept in the panel workspace.
void shard_logprobs(const Tensor& target, int64_t ignore_index, int64_t vocab_size, const Tensor& sums,
                    const Tensor& input, const Tensor& weight, std::vector<int64_t> plan, int64_t index,
                    const Tensor& state, const Tensor& target_logit, const Tensor& rows,
                    const Tensor& grad_weight, const Tensor& panel_workspace, const Tensor& workspace,
                    const Tensor& logprobs, const Tensor& stats, const Tensor& entropy, const Tensor& argmax,
                    const Tensor& kept_rows) {
  const bool keep = kept_rows.numel() > 0, with_metrics = entropy.numel() > 0 || argmax.numel() > 0;
  ShardStep step(kOp, {input, weight, std::nullopt, false, plan, index, state, target_logit, rows,
                       grad_weight, panel_workspace, workspace, 1.0, with_metrics, keep});
  set_problem(step.batch.problem, target, ignore_index, vocab_size, logprobs, stats, entropy, argmax);
  step.chunk().apply_rule(step.state, sums, 0, false);
  if (!keep) return;
  keep_rows(step, step.batch.problem.targets, vocab_size, step.buffers.target_logit, stats, entropy,
            memory_of<KeptRow>(kept_rows) + step.planned.first);
}

// stats and entropy come from the forward; entropy may be empty without grad_entropy. With kept exponentials
// kept_rows comes from shard_logprobs, and the exponentials are in the panel workspace without grad_entropy,
// in `kept` with it.
void shard_logprob_gradients(const Tensor& grad_logprobs, const std::optional<Tensor>& grad_entropy,
                             const Tensor& target, int64_t vocab_size, double temperature,
                             const Tensor& stats, const Tensor& entropy, const Tensor& kept,
                             const Tensor& kept_rows, const Tensor& input, const Tensor& weight,
                             bool need_grad_input, std::vector<int64_t> plan, int64_t index,
                             const Tensor& state, const Tensor& target_logit, const Tensor& rows,
                             const Tensor& grad_weight, const Tensor& panel_workspace,
                             const Tensor& workspace, const Tensor& grad_input_sum) {
  ShardStep step(kOp, {input, weight, std::nullopt, need_grad_input, plan, index, state, target_logit, rows,
                       grad_weight, panel_workspace, workspace, temperature});
  const Batch& batch = step.batch;
  const int64_t all_rows = batch.rows(), first = step.planned.first;
  check_row_gradient(kOp, "the gradient of the log-probabilities", grad_logprobs, all_rows);
  require(stats.dim() == 2 && stats.size(0) == 2 && stats.size(1) == all_rows && stats.is_contiguous() &&
              stats.scalar_type() == ScalarType::Float,
          kOp, ": stats has shape ", shape_text(stats), ", expected (2, ", all_rows, ") float32");
  if (grad_entropy) {
    check_row_gradient(kOp, "the gradient of the entropies", *grad_entropy, all_rows);
    check_row_gradient(kOp, "entropy", entropy, all_rows);
  }
  const bool keeps = kept_rows.numel() > 0;
  KeptRow* const rows_of_chunk = keeps ? memory_of<KeptRow>(kept_rows) + first : step.kept_rows;
  if (keeps) {
    step.chunk().clear_class_one_hot();
  } else {
    const float* const logits = step.buffers.target_logit;
    step.buffers.target_logit = step.references;
    const ShardChunk chunk = step.chunk();
    references_of_whole_rows<<<static_cast<unsigned>(ceil_div(step.planned.rows, int64_t{kRowThreads})),
                               kRowThreads, 0, batch.stream>>>(chunk.rows(), batch.row_index.index + first,
                                                               logits, whole_rows(stats), step.references);
    check_launch(kOp);
    chunk.exponentials(step.state);
    keep_rows(step, targets_of(target, 0), vocab_size, logits, stats, entropy, rows_of_chunk);
  }
  const ShardChunk chunk = step.chunk();
  // The kernels know the classes of this shard.
  const KeptChunk gradients{batch,
                            step.planned,
                            {step.state.local, true, 0},
                            rows_of_chunk,
                            grad_entropy ? step.entropy_terms : nullptr,
                            step.grad_weight.class_one_hot,
                            step.buffers};
  gradients.row_gradients(grad_logprobs, grad_entropy);
  if (grad_entropy) {
    Element16* const memory = memory_of<Element16>(kept);
    const int64_t padded = round_up(all_rows, int64_t{sm90::kTileM}), stride = padded * sm90::kPanel;
    const Panels of_batch{{memory, memory}, {stride, stride}, static_cast<int>(padded)};
    gradients.entropy_gradient(keeps ? of_batch : chunk.panels(), keeps ? first : 0, chunk.panels());
  }
  if (need_grad_input) chunk.grad_input(memory_of<float>(grad_input_sum));
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("shard_logprobs_begin(Tensor input, Tensor weight, Tensor target, int ignore_index, float temperature, int vocab_start, int vocab_size, Tensor(a!) state, Tensor(b!) target_logit, Tensor(c!) rows, Tensor(d!) logprobs, Tensor(e!) stats, Tensor(f!) entropy, Tensor(g!) argmax) -> ()");
  m.def("shard_logprobs(Tensor target, int ignore_index, int vocab_size, Tensor sums, Tensor input, Tensor weight, int[] plan, int index, Tensor state, Tensor target_logit, Tensor rows, Tensor grad_weight, Tensor(a!) panel_workspace, Tensor(b!) workspace, Tensor(c!) logprobs, Tensor(d!) stats, Tensor(e!) entropy, Tensor(f!) argmax, Tensor(g!) kept_rows) -> ()");
  m.def("shard_logprob_gradients(Tensor grad_logprobs, Tensor? grad_entropy, Tensor target, int vocab_size, float temperature, Tensor stats, Tensor entropy, Tensor kept, Tensor kept_rows, Tensor input, Tensor weight, bool need_grad_input, int[] plan, int index, Tensor state, Tensor target_logit, Tensor(a!) rows, Tensor(b!) grad_weight, Tensor(c!) panel_workspace, Tensor(d!) workspace, Tensor(e!) grad_input_sum) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("shard_logprobs_begin", TORCH_BOX(&shard_logprobs_begin));
  m.impl("shard_logprobs", TORCH_BOX(&shard_logprobs));
  m.impl("shard_logprob_gradients", TORCH_BOX(&shard_logprob_gradients));
}

}  // namespace liger::lm_head
