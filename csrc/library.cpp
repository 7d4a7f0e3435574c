// SPDX-License-Identifier: BSD-3-Clause

// Every schema of torch.ops.liger, one line each: here or in declarations.cpp, where checks, fakes and
// formulas of an op follow from its schemas.
//
// Implementations are registered elsewhere: CUDA in csrc/<family>/<op>.cu, Triton in triton_kernels/<op>.py,
// plain torch, fakes and autograd in python/liger/ops/<op>.py, the ops of the planners in
// lm_head/planner_ops.cpp. An output that is not requested is returned as an empty tensor, so every op has
// a fixed number of results.
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "declarations.h"
#include "host/checks/checks.h"
#include "host/checks/declared.h"

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY(liger, m) {
  for (const liger::Declaration& declaration : liger::declarations())
    for (const char* schema : declaration.schemas) m.def(schema);

  // q (B, Hq, T, D), k (B, Hk, T, D), cos and sin (T, R), (1, T, R) or (B, T, R) with R <= D
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor q_out, Tensor k_out)");
  m.def("rope_backward(Tensor grad_q_out, Tensor grad_k_out, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor grad_q, Tensor grad_k)");
  m.def("rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved=False) -> ()");

  // rope of rms_norm over each head; q_weight and k_weight (D,). The backward recomputes the norm
  m.def("qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps=1e-6, float offset=0.0, str casting_mode=\"llama\", bool interleaved=False) -> (Tensor q_out, Tensor k_out)");
  m.def("qk_norm_rope_backward(Tensor grad_q_out, Tensor grad_k_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, float offset, str casting_mode, bool interleaved, bool need_grad_q, bool need_grad_k, bool need_grad_q_weight, bool need_grad_k_weight) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight, Tensor grad_k_weight)");

  // logits (..., V), target (...): the loss alone, composite over cross_entropy_forward
  m.def("cross_entropy(Tensor logits, Tensor target, Tensor? ce_weight=None, Tensor? token_weight=None, Tensor? denominator=None, int ignore_index=-100, float label_smoothing=0.0, float lse_square_scale=0.0, float? softcap=None, str reduction=\"mean\") -> Tensor");
  // logits (N, V), target (N,). The result is the gradient of the summed (or averaged) loss; with reduction
  // "none" the gradient of sum(loss). stats (2, N): the maximum logit m and sum(exp(z - m)); 0 and 1 in
  // ignored rows.
  m.def("cross_entropy_forward(Tensor logits, Tensor target, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, str reduction, bool return_z_loss, bool return_token_accuracy, bool return_argmax, bool return_logprobs, bool return_entropy, bool need_grad) -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor argmax, Tensor logprobs, Tensor entropy, Tensor stats, Tensor used_denominator, Tensor grad_logits)");
  // The same in place: the gradient overwrites the logits
  m.def("cross_entropy_forward_(Tensor(a!) logits, Tensor target, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, str reduction, bool return_z_loss, bool return_token_accuracy, bool return_argmax, bool return_logprobs, bool return_entropy) -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor argmax, Tensor logprobs, Tensor entropy)");
  m.def("cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor target, Tensor stats, Tensor used_denominator, Tensor? ce_weight, Tensor? token_weight, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap) -> Tensor");
  m.def("cross_entropy_backward_(Tensor grad_loss, Tensor(a!) logits, Tensor target, Tensor stats, Tensor used_denominator, Tensor? ce_weight, Tensor? token_weight, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap) -> ()");

  // Row statistics of a vocabulary shard: logits (N, V) of the V classes from vocab_start on; target (N,) is
  // an index into all classes. stats (3 to 5, N): the maximum logit m, sum(exp(z - m)), the logit of the
  // target, or 0 if the shard does not have it, with return_class_sum sum(ce_weight * (z - m)), and with
  // return_square_sum sum(exp(z - m)^2), which makes the statistics not differentiable. Ignored rows have 0,
  // 1, 0, 0, 1.
  m.def("cross_entropy_stats(Tensor logits, Tensor target, Tensor? ce_weight, int vocab_start, int ignore_index, float? softcap, bool return_class_sum, bool return_square_sum=False) -> Tensor");
  // The gradient of logits z (N, V): e * (coef_exp + coef_log * (z[v] - reference)) - coef_target * [v +
  // vocab_start == target] - coef_class * ce_weight[v] with e = exp(z[v] - reference), times the derivative
  // of the softcap; 0 in ignored rows. ce_weight is (V,), all other coefficients are (N,).
  m.def("cross_entropy_stats_backward(Tensor logits, Tensor target, Tensor reference, Tensor coef_exp, Tensor coef_target, Tensor? coef_class, Tensor? ce_weight, int vocab_start, int ignore_index, float? softcap, Tensor? coef_log) -> Tensor");
  m.def("cross_entropy_stats_backward_(Tensor(a!) logits, Tensor target, Tensor reference, Tensor coef_exp, Tensor coef_target, Tensor? coef_class, Tensor? ce_weight, int vocab_start, int ignore_index, float? softcap, Tensor? coef_log) -> ()");

  // input (..., H), weight (V, H), target (...): the loss alone, composite over fused_linear_ce_forward
  m.def("fused_linear_ce(Tensor input, Tensor weight, Tensor target, Tensor? bias=None, Tensor? ce_weight=None, Tensor? token_weight=None, Tensor? denominator=None, int ignore_index=-100, float label_smoothing=0.0, float lse_square_scale=0.0, float? softcap=None, str reduction=\"mean\", ScalarType? accum_dtype=None, int? memory_budget=None) -> Tensor");
  // input (N, H), target (N,). The results are gradients of the summed (or averaged) loss; with reduction
  // "none" gradients of sum(loss), so the gradient of per-token losses is this op with token_weight *
  // grad_loss.
  m.def("fused_linear_ce_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, str reduction, ScalarType? accum_dtype, int? memory_budget, bool return_z_loss, bool return_token_accuracy, bool return_argmax, bool return_logprobs, bool return_entropy, bool need_grad_input, bool need_grad_weight, bool need_grad_bias) -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor argmax, Tensor logprobs, Tensor entropy, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // student and teacher logits (..., V): the divergence of their distributions, the loss alone, composite
  // over divergence_forward
  m.def("kl_div(Tensor student, Tensor teacher, Tensor? target=None, Tensor? token_weight=None, Tensor? denominator=None, bool reverse=False, float temperature=1.0, bool log_probs=False, int ignore_index=-100, str reduction=\"mean\") -> Tensor");
  m.def("jsd(Tensor student, Tensor teacher, Tensor? target=None, Tensor? token_weight=None, Tensor? denominator=None, float beta=0.5, float temperature=1.0, bool log_probs=False, int ignore_index=-100, str reduction=\"mean\") -> Tensor");
  m.def("tvd(Tensor student, Tensor teacher, Tensor? target=None, Tensor? token_weight=None, Tensor? denominator=None, float temperature=1.0, bool log_probs=False, int ignore_index=-100, str reduction=\"mean\") -> Tensor");
  // student and teacher (N, V), target (N,), row_weight (N,) or () for all rows, float32, divergence
  // "forward_kl", "reverse_kl", "jsd" or "tvd". loss: sum(row_weight * loss of the row), or with per_row the
  // terms (N,). stats (5, N): the maximum logit m and log(sum(exp((z - m) / temperature))) of the student,
  // the same of the teacher, and the sum that the softmax backward of the student subtracts; zeros in ignored
  // rows. grad_student: the gradient of the sum.
  m.def("divergence_forward(Tensor student, Tensor teacher, Tensor? target, Tensor? row_weight, str divergence, float beta, float temperature, bool log_probs, int ignore_index, bool per_row, bool need_grad) -> (Tensor loss, Tensor stats, Tensor grad_student)");
  // The same in place: the gradient overwrites the logits of the student
  m.def("divergence_forward_(Tensor(a!) student, Tensor teacher, Tensor? target, Tensor? row_weight, str divergence, float beta, float temperature, bool log_probs, int ignore_index, bool per_row) -> Tensor");
  // loss (N,) = row_weight * divergence of the row; hard_loss (N,) = row_weight * cross_entropy * cross
  // entropy of the target at temperature 1, empty if cross_entropy is 0. Writes the gradient of the sum of
  // both to `gradient`, which may be float16 or bfloat16 if student is float32: it is rounded once
  m.def("divergence_ce_forward_(Tensor student, Tensor teacher, Tensor? target, Tensor? row_weight, str divergence, float beta, float temperature, float cross_entropy, int ignore_index, Tensor(a!) gradient) -> (Tensor loss, Tensor hard_loss)");
  // The gradient of sum(grad_loss * loss of the row) with respect to the student, grad_loss (N,) or ()
  m.def("divergence_backward(Tensor grad_loss, Tensor student, Tensor teacher, Tensor? target, Tensor stats, str divergence, float beta, float temperature, bool log_probs, int ignore_index) -> Tensor");

  // input (..., H) and weight (V, H) of the student; the teacher: teacher_input (..., Ht) with teacher_weight
  // (V, Ht), or teacher_logits (..., V). Composite over fused_linear_divergence_forward
  m.def("fused_linear_kl_div(Tensor input, Tensor weight, Tensor? target=None, Tensor? bias=None, Tensor? teacher_input=None, Tensor? teacher_weight=None, Tensor? teacher_bias=None, Tensor? teacher_logits=None, bool reverse=False, Tensor? token_weight=None, Tensor? denominator=None, int ignore_index=-100, str reduction=\"mean\", ScalarType? accum_dtype=None, int? memory_budget=None, float temperature=1.0) -> Tensor");
  m.def("fused_linear_jsd(Tensor input, Tensor weight, Tensor? target=None, Tensor? bias=None, Tensor? teacher_input=None, Tensor? teacher_weight=None, Tensor? teacher_bias=None, Tensor? teacher_logits=None, float beta=0.5, Tensor? token_weight=None, Tensor? denominator=None, int ignore_index=-100, str reduction=\"mean\", ScalarType? accum_dtype=None, int? memory_budget=None, float temperature=1.0) -> Tensor");
  // input (N, H), row_weight (N,) or (). soft_loss (N,) = row_weight * soft * divergence from the teacher,
  // empty if soft is 0; hard_loss (N,) = row_weight * hard * cross entropy of the target, empty if hard is 0.
  // loss: the sum of both over all rows, or with per_row of each row. divergence: a divergence of
  // divergence_forward, "cosine" (1 minus the cosine similarity of the logits), or for a teacher given as
  // log-probabilities (N, k) of the classes teacher_indices "topk_tail" (all other classes are one class) and
  // "topk" (renormalised). The results are gradients of the sum.
  m.def("fused_linear_divergence_forward(Tensor input, Tensor weight, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_indices, Tensor? target, Tensor? bias, Tensor? teacher_bias, Tensor? row_weight, str divergence, float beta, float temperature, float soft, float hard, int ignore_index, bool per_row, ScalarType? accum_dtype, int? memory_budget, bool need_grad_input, bool need_grad_weight, bool need_grad_bias) -> (Tensor loss, Tensor soft_loss, Tensor hard_loss, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  // input (N, H), target (N,): log-probabilities of the targets under softmax(softcap(input @ weight.T +
  // bias) / temperature); 0 in ignored rows. keep: "nothing", "logits" or "exponentials" of all rows for the
  // backward, which gets the same word, with kept and kept_rows; else both are empty. What a forward without
  // need_grad_weight keeps serves no gradient of the weight. With logits_dtype float32 logits are not rounded
  // to fewer bits, and weight and bias may be float32 with a 16-bit input. Two more results per row are
  // available, without gradient: the log of the sum over classes of the squared probabilities, and the mean
  // over classes of the logits after softcap and temperature; 0 in ignored rows. accum_dtype belongs to the
  // backward
  m.def("fused_linear_logprobs_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, float temperature, int ignore_index, float? softcap, int? memory_budget, bool return_entropy, bool return_argmax, bool return_log_sum_sq_probs=False, bool return_mean_logits=False, str keep=\"nothing\", bool need_grad_weight=False, ScalarType? logits_dtype=None, ScalarType? accum_dtype=None) -> (Tensor logprobs, Tensor entropy, Tensor argmax, Tensor log_sum_sq_probs, Tensor mean_logits, Tensor kept, Tensor kept_rows)");
  m.def("fused_linear_logprobs_backward(Tensor grad_logprobs, Tensor? grad_entropy, Tensor input, Tensor weight, Tensor target, Tensor? bias, float temperature, int ignore_index, float? softcap, ScalarType? accum_dtype, int? memory_budget, bool need_grad_input, bool need_grad_weight, bool need_grad_bias, str keep=\"nothing\", Tensor? kept=None, Tensor? kept_rows=None, ScalarType? logits_dtype=None) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // fused_linear_ce_forward and fused_linear_logprobs_forward of an lm_head with a low-rank term: logits
  // input @ weight.T + bias + down @ lora_b.T with lora_b (V, r) and down = lora_scale * input @ lora_a.T,
  // lora_a (r, H), or down (N, r) itself without lora_a. The factors are rounded to the dtype of the input,
  // or with logits_dtype float32 not at all; their gradients have their own dtypes
  m.def("fused_linear_ce_lora_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? lora_a, Tensor lora_b, Tensor? down, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, float lora_scale, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, str reduction, ScalarType? accum_dtype, int? memory_budget, bool return_z_loss, bool return_token_accuracy, bool return_argmax, bool return_logprobs, bool return_entropy, bool need_grad_input, bool need_grad_weight, bool need_grad_bias, bool need_grad_lora_a, bool need_grad_lora_b, bool need_grad_down) -> (Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor argmax, Tensor logprobs, Tensor entropy, Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_lora_a, Tensor grad_lora_b, Tensor grad_down)");
  m.def("fused_linear_logprobs_lora_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? lora_a, Tensor lora_b, Tensor? down, float lora_scale, float temperature, int ignore_index, float? softcap, int? memory_budget, bool return_entropy, bool return_argmax, bool return_log_sum_sq_probs=False, bool return_mean_logits=False, ScalarType? logits_dtype=None, ScalarType? accum_dtype=None) -> (Tensor logprobs, Tensor entropy, Tensor argmax, Tensor log_sum_sq_probs, Tensor mean_logits)");
  m.def("fused_linear_logprobs_lora_backward(Tensor grad_logprobs, Tensor? grad_entropy, Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? lora_a, Tensor lora_b, Tensor? down, float lora_scale, float temperature, int ignore_index, float? softcap, int? memory_budget, bool need_grad_input, bool need_grad_weight, bool need_grad_bias, bool need_grad_lora_a, bool need_grad_lora_b, bool need_grad_down, ScalarType? logits_dtype=None, ScalarType? accum_dtype=None) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_lora_a, Tensor grad_lora_b, Tensor grad_down)");

  // grad_weight += the gradient of the weight, float32 (float64 for float64 inputs), without a temporary of
  // its size. grad_loss: () or, with reduction "none", (N,)
  m.def("fused_linear_ce_add_grad_weight_(Tensor(a!) grad_weight, Tensor grad_loss, Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, str reduction, int? memory_budget) -> ()");
  m.def("fused_linear_logprobs_add_grad_weight_(Tensor(a!) grad_weight, Tensor grad_logprobs, Tensor? grad_entropy, Tensor input, Tensor weight, Tensor target, Tensor? bias, float temperature, int ignore_index, float? softcap, int? memory_budget, ScalarType? logits_dtype=None) -> ()");

  // x (..., H), gate_weight and up_weight (I, H) or gate_weight (2I, H) alone, down_weight (H, I), activation
  // "silu", "gelu_tanh" or "gelu": y like x, composite over tiled_mlp_forward
  m.def("tiled_mlp(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, str activation=\"silu\", int? num_shards=None, int? memory_budget=None) -> Tensor");
  // kept: saved activations for the backward, gate and up side by side, of the leading tokens that the plan
  // saves (with keep = False of none). If there is one shard and two weights, kept has gate and kept_up has
  // up. A backward that does not retain the graph uses their memory as workspace and frees it.
  m.def("tiled_mlp_forward(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, str activation, int? num_shards, int? memory_budget, bool keep) -> (Tensor y, Tensor kept, Tensor kept_up)");
  m.def("tiled_mlp_backward(Tensor grad_y, Tensor kept, Tensor kept_up, Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias, Tensor? up_bias, str activation, int? num_shards, int? memory_budget, bool need_grad_x, bool need_grad_gate_weight, bool need_grad_up_weight, bool need_grad_down_weight, bool need_grad_gate_bias, bool need_grad_up_bias, bool need_grad_down_bias) -> (Tensor grad_x, Tensor grad_gate_weight, Tensor grad_up_weight, Tensor grad_down_weight, Tensor grad_gate_bias, Tensor grad_up_bias, Tensor grad_down_bias)");

  // x (..., H), top_k_index and top_k_weights (..., K), gate_up_proj (E, 2I, H), down_proj (E, H, I) or both
  // transposed: y like x, composite over grouped_experts_forward
  m.def("grouped_experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, Tensor down_proj, Tensor? gate_up_proj_bias=None, Tensor? down_proj_bias=None, str activation=\"silu\", bool is_transposed=False, bool is_interleaved=False, float alpha=1.702, float? limit=None, bool recompute=False) -> Tensor");
  // kept: gate and up of all slots, sorted by expert, for the backward; with keep = False it is empty, and
  // the backward recomputes it. A backward that does not retain the graph overwrites it.
  m.def("grouped_experts_forward(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, Tensor down_proj, Tensor? gate_up_proj_bias, Tensor? down_proj_bias, str activation, bool is_transposed, bool is_interleaved, float alpha, float? limit, bool keep) -> (Tensor y, Tensor kept)");
  m.def("grouped_experts_backward(Tensor grad_y, Tensor kept, Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, Tensor down_proj, Tensor? gate_up_proj_bias, Tensor? down_proj_bias, str activation, bool is_transposed, bool is_interleaved, float alpha, float? limit, bool need_grad_x, bool need_grad_top_k_weights, bool need_grad_gate_up_proj, bool need_grad_down_proj, bool need_grad_gate_up_proj_bias, bool need_grad_down_proj_bias) -> (Tensor grad_x, Tensor grad_top_k_weights, Tensor grad_gate_up_proj, Tensor grad_down_proj, Tensor grad_gate_up_proj_bias, Tensor grad_down_proj_bias)");

  // x * factor with a device scalar, in float32, rounded once
  m.def("rescale(Tensor x, Tensor factor) -> Tensor");
  m.def("rescale_(Tensor(a!) x, Tensor factor) -> ()");

  // Argument checks for the Python backends, so that every backend raises the same message. check_arguments
  // is for ops of declarations.cpp: their tensors, numbers and texts in the order of the schema
  m.def("check_arguments(str op, Tensor?[] tensors, float?[] numbers, str[] texts) -> ()");
  m.def("check_rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> ()");
  m.def("check_qk_norm_rope(str op, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, str casting_mode, float eps=0.0, float offset=0.0) -> ()");
  m.def("check_tiled_mlp(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, str activation, int? num_shards, int? memory_budget) -> ()");
  m.def("check_cross_entropy(str op, Tensor logits, Tensor target, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, float label_smoothing, float? softcap, str reduction) -> ()");
  m.def("check_fused_linear_ce(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, float label_smoothing, float? softcap, str reduction, ScalarType? accum_dtype, int? memory_budget, str op=\"fused_linear_ce\", ScalarType? logits_dtype=None) -> ()");
  m.def("check_divergence(str op, Tensor student, Tensor teacher, Tensor? target, Tensor? row_weight, str divergence, float beta, float temperature, bool log_probs) -> ()");
  m.def("check_divergence_gradient(str op, Tensor student, Tensor? target, float temperature, float cross_entropy, Tensor gradient) -> ()");
  m.def("check_fused_linear_divergence(Tensor input, Tensor weight, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_indices, Tensor? target, Tensor? bias, Tensor? teacher_bias, Tensor? row_weight, str divergence, float beta, float temperature, float soft, float hard, ScalarType? accum_dtype, int? memory_budget) -> ()");

  m.def("check_written(str op, str[] names, Tensor[] tensors, int written) -> ()");

  // For each entry of declarations.cpp the names of its ops, then after a colon its shapes
  m.def("declarations() -> str[]");
  // "name=value" of version, torch, cuda, cuda_archs, compiler: how the libraries were built
  m.def("build_info() -> str[]");
  // LIGER_MEMORY_BUDGET in bytes; 512 MiB if it is not set
  m.def("default_memory_budget() -> int");
  // How fused_linear_ce splits its rows into chunks: [chunk_rows, chunks, logits_bytes, accumulator_bytes].
  // See csrc/lm_head/planner.h
  m.def("plan_chunks(int rows, int hidden, int vocab, int element_size, bool need_grad_weight, bool exact_accumulation, int? memory_budget=None) -> int[]");
  // The same with the place of every chunk, for the valid_rows rows that are not ignored (None: no row is);
  // see ChunkLayout in csrc/lm_head/planner.h. logits_in is a LogitsIn of this header
  m.def("lay_out_chunks(int rows, int hidden, int vocab, int element_size, bool need_grad_input, bool need_grad_weight, bool exact_accumulation, int? memory_budget=None, int? valid_rows=None, int? leading_rows=None) -> (int logits_in, int stride, int elements, int accumulator_bytes, int prefetch_rows, int[] chunk_rows, int[] chunk_offsets)");
  // "name=value" or "name=value,value" of the constants that code in Python needs: EngineConstants in
  // python/liger/_core/head/sm90_plan.py
  m.def("plan_constants() -> str[]");
  // The plan of the wgmma engine of compute capability 9.0 for a device with so many active two-block
  // clusters (66: 132 SMs), in chunks that are multiples of group_rows; no chunks where the generic engine
  // takes over. See LinearCePlan in csrc/lm_head/sm90/planner.h
  m.def("plan_split_k_sums_sm90(int rows, int hidden, int k_splits) -> int");
  m.def("plan_chunks_sm90(int rows, int hidden, int vocab, bool need_grad_input, bool need_grad_weight, bool exact_accumulation, int? memory_budget=None, int clusters=66, int group_rows=1) -> (int[] chunk_first, int[] chunk_rows, int[] chunk_k_splits, int rows_in_grad_weight, int workspace_panel_bytes, int scale_bytes, int panel_offset)");
  // The same for losses with a separate matrix dlogits; zeros where the generic engine takes over. See
  // LinearBackwardPlan there
  m.def("plan_linear_backward_sm90(int rows, int hidden, int vocab, bool need_grad_input, bool need_grad_weight, int aux_rows, int? memory_budget=None, int clusters=66, int group_rows=1, bool aux_in_grad_weight=False) -> (int first_rows, int first_k_splits, int chunk_rows, int slice_rows, int k_splits, int scale_bytes)");
}
// clang-format on

namespace liger {
namespace {

// check_written is overloaded; TORCH_BOX needs the address of one function.
void check_written_of_python(const std::string& op, const std::vector<std::string>& names,
                             const std::vector<Tensor>& tensors, int64_t written) {
  check_written(op, names, tensors, written);
}

std::vector<std::string> declarations_for_python() {
  std::vector<std::string> lines;
  for (const Declaration& declaration : declarations()) {
    std::string names;
    for (const std::string schema : declaration.schemas) names += schema.substr(0, schema.find('(')) + " ";
    lines.push_back(names + ": " + declaration.shapes);
  }
  return lines;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CompositeExplicitAutograd, m) {
  m.impl("declarations", TORCH_BOX(&declarations_for_python));
  m.impl("check_arguments", TORCH_BOX(&check_arguments_by_type));
  m.impl("check_rope", TORCH_BOX(&check_rope));
  m.impl("check_qk_norm_rope", TORCH_BOX(&check_qk_norm_rope));
  m.impl("check_tiled_mlp", TORCH_BOX(&check_tiled_mlp));
  m.impl("check_cross_entropy", TORCH_BOX(&check_cross_entropy));
  m.impl("check_fused_linear_ce", TORCH_BOX(&check_fused_linear_ce));
  m.impl("check_divergence", TORCH_BOX(&check_divergence));
  m.impl("check_divergence_gradient", TORCH_BOX(&check_divergence_gradient));
  m.impl("check_fused_linear_divergence", TORCH_BOX(&check_fused_linear_divergence));
  m.impl("check_written", TORCH_BOX(&check_written_of_python));
}

}  // namespace liger
