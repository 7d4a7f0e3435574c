// SPDX-License-Identifier: BSD-3-Clause

// The backward of a linear layer over classes from a row-major dlogits, by the wgmma GEMMs of
// fused_linear_ce: the weight gradient is accumulated over chunks in its own memory. Losses that compute
// dlogits themselves use it.
//
// Internal ops: the caller allocates all memory as linear_backward_plan() says.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "lm_head/sm90/chunk/chunk.h"
#include "lm_head/sm90/epilogues/grad_input.cuh"
#include "lm_head/sm90/epilogues/grad_weight.cuh"
#include "lm_head/sm90/gemm/launch.cuh"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = "linear_backward";

// Makes all rows valid, with scale 1.
__global__ void __launch_bounds__(kRowThreads) fill_row_scales(int rows, int* count, float* scale) {
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row == 0) *count = rows;
  if (row < rows) scale[row] = 1.0f;
}

// A chunk that has dlogits as a row-major matrix.
struct LinearBackward {
  Tensor grad_logits;    // (rows, vocab)
  Tensor input, weight;  // (rows, hidden), (vocab, hidden); dense() has returned all three
  int64_t k_splits;      // of the input gradient
  bool first, last;      // chunk that the weight gradient accumulates
  int device;
  cudaStream_t stream;
};

int64_t linear_backward_bytes(int64_t rows, int64_t hidden, int64_t vocab, int64_t k_splits) {
  return Workspace::bytes_for({int64_t{sizeof(int)}, rows * int64_t{sizeof(float)},
                               std::max(rows, vocab) * int64_t{sizeof(OneHot)},
                               sm90::split_k_sums(rows, hidden, k_splits) * int64_t{sizeof(float)},
                               sm90::split_k_semaphores(rows, hidden, k_splits) * int64_t{sizeof(int)}});
}

// scale_exponents: block scales of the weight gradient, vocab * hidden / 256 bytes if there are several
// chunks. grad_input may be the memory of the input. A null gradient is not computed.
void run_chunk(const LinearBackward& chunk, __nv_bfloat16* grad_weight, unsigned char* scale_exponents,
               __nv_bfloat16* grad_input, const Tensor& workspace) {
  const int64_t rows = chunk.grad_logits.size(0), vocab = chunk.grad_logits.size(1),
                hidden = chunk.input.size(1);
  Workspace memory(workspace, 0);
  int* const count = memory.allocate<int>(1);
  float* const scale = memory.allocate<float>(rows);
  // No row and no class has a one-hot term: all indices are -1.
  OneHot* const none = memory.allocate<OneHot>(std::max(rows, vocab));
  float* const partial = memory.allocate<float>(sm90::split_k_sums(rows, hidden, chunk.k_splits));
  int* const semaphores = memory.allocate<int>(sm90::split_k_semaphores(rows, hidden, chunk.k_splits));
  check_cuda(cudaMemsetAsync(none, 0xff, std::max(rows, vocab) * sizeof(OneHot), chunk.stream), kOp);
  const unsigned blocks = static_cast<unsigned>(ceil_div(rows, int64_t{kRowThreads}));
  fill_row_scales<<<blocks, kRowThreads, 0, chunk.stream>>>(static_cast<int>(rows), count, scale);
  check_launch(kOp);

  const CUtensorMap grad_logits = matrix_map(chunk.grad_logits);
  const ChunkRows all{count, 0, static_cast<int>(rows)};
  if (grad_weight != nullptr) {
    const OfMatrix<GradWeightEpilogue<__nv_bfloat16, false, sm90::kTileN>> epilogue{
        {.chunk = all,
         .vocab = static_cast<int>(vocab),
         .hidden = static_cast<int>(hidden),
         .rows_in_first = 0,
         .one_hot = none,
         .input = static_cast<const __nv_bfloat16*>(chunk.input.const_data_ptr()),
         .input_stride = chunk.input.stride(0),
         .out = grad_weight,
         .scale_exponents = scale_exponents,
         .scale_stride = sm90::kPanel * hidden / sm90::kTileN,
         .first = chunk.first,
         .last = chunk.last,
         .panel_read_counts = nullptr,
         .panel_offset = 0,
         .group = rows * hidden * 2 > kInputBytesInL2 ? kGroupM : static_cast<int>(hidden / sm90::kTileN),
         .last_vectors = {}}};
    launch_gemm({{grad_logits, grad_logits}, matrix_map(chunk.input)}, epilogue, chunk.device, chunk.stream);
  }
  if (grad_input != nullptr) {
    const OfMatrix<GradInputEpilogue<__nv_bfloat16, false, sm90::kTileN>> epilogue{
        {{.chunk = all,
          .vocab = static_cast<int>(vocab),
          .hidden = static_cast<int>(hidden),
          .rows_in_first = 0,
          .k_splits = static_cast<int>(chunk.k_splits),
          .scale = scale,
          .one_hot = none,
          .weight = static_cast<const __nv_bfloat16*>(chunk.weight.const_data_ptr()),
          .weight_stride = chunk.weight.stride(0),
          .out = grad_input,
          .partial = partial,
          .semaphores = semaphores}}};
    launch_grad_input({{grad_logits, grad_logits}, matrix_map(chunk.weight)}, epilogue, chunk.device,
                      chunk.stream);
  }
}

// The fields of LinearBackwardPlan, then the workspace bytes of the first chunk and of other chunks. All zero
// if the engine cannot take the problem.
using PlanNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

PlanNumbers linear_backward_plan(const Tensor& input, const Tensor& weight, int64_t aux_rows,
                                 int64_t group_rows, int64_t memory_budget, bool need_grad_input,
                                 bool need_grad_weight, bool aux_in_grad_weight) {
  if (input.scalar_type() != ScalarType::BFloat16) return {};
  const DeviceGuard guard(input.get_device_index());
  const int64_t hidden = input.size(1), vocab = weight.size(0);
  const std::optional<LinearBackwardPlan> plan = plan_linear_backward_on_device(
      {input.size(0), hidden, vocab, need_grad_input, need_grad_weight, true, memory_budget, 0, group_rows},
      aux_rows, aux_in_grad_weight, input.get_device_index());
  if (!plan) return {};
  const auto workspace_bytes = [&](int64_t rows, int64_t k_splits) {
    return linear_backward_bytes(rows, hidden, vocab, k_splits);
  };
  return {plan->first_rows,
          plan->first_k_splits,
          plan->chunk_rows,
          plan->slice_rows,
          plan->k_splits,
          plan->scale_bytes,
          workspace_bytes(plan->first_rows, plan->first_k_splits),
          workspace_bytes(plan->chunk_rows, plan->k_splits)};
}

// Computes one chunk. grad_logits (rows, vocab), input and grad_input (rows, hidden). A result that is not
// needed is empty.
void linear_backward(const Tensor& grad_logits, const Tensor& input, const Tensor& weight, int64_t k_splits,
                     bool first, bool last, const Tensor& grad_weight, const Tensor& scale_exponents,
                     const Tensor& workspace, const Tensor& grad_input) {
  require(grad_logits.stride(1) == 1 && grad_logits.stride(0) % 8 == 0, kOp,
          ": TMA cannot read rows of grad_logits with stride ", grad_logits.stride(0),
          ", expected a multiple of 8");
  const OpGuard guard("linear_backward", input.get_device_index());
  run_chunk({grad_logits, dense(input), dense(weight), k_splits, first, last, input.get_device_index(),
             current_stream(input)},
            memory_of<__nv_bfloat16>(grad_weight),
            static_cast<unsigned char*>(scale_exponents.mutable_data_ptr()),
            memory_of<__nv_bfloat16>(grad_input), workspace);
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("linear_backward_plan(Tensor input, Tensor weight, int aux_rows, int group_rows, int memory_budget, bool need_grad_input, bool need_grad_weight, bool aux_in_grad_weight) -> (int first_rows, int first_k_splits, int chunk_rows, int slice_rows, int k_splits, int scale_bytes, int first_workspace_bytes, int workspace_bytes)");
  m.def("linear_backward(Tensor grad_logits, Tensor input, Tensor weight, int k_splits, bool first, bool last, Tensor(a!) grad_weight, Tensor(b!) scale_exponents, Tensor(c!) workspace, Tensor(d!) grad_input) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("linear_backward_plan", TORCH_BOX(&linear_backward_plan));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}

}  // namespace liger::lm_head
