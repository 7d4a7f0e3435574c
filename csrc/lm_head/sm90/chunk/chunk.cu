// SPDX-License-Identifier: BSD-3-Clause
#include "lm_head/sm90/chunk/chunk.h"

#include <algorithm>
#include <climits>

#include "lm_head/planner.h"
#include "lm_head/sm90/chunk/select_kernel.h"
#include "lm_head/sm90/epilogues/grad_input.cuh"
#include "lm_head/sm90/epilogues/grad_weight.cuh"
#include "lm_head/sm90/gemm/launch.cuh"
#include "lm_head/sm90/rows/apply_rule.cuh"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = kGemmOp;

// Writes the results of rows with an ignored target.
__global__ void __launch_bounds__(valid_rows::kRowThreads)
    write_ignored_rows(const ce::Problem problem, const int32_t* position) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * valid_rows::kRowThreads + threadIdx.x;
  if (row < problem.rows && position[row] < 0) ce::write_ignored(problem, row);
}

// The scales of the rows as operand B of the tensor cores, (kScaleColumns, stride): the first column has the
// scale in bfloat16, the second its rounding error; the other columns, and rows beyond the last, are zeros.
constexpr int kScaleColumns = sm90::kSecondColumns;
// TMA requires strides that are multiples of 16 bytes.
int64_t split_scale_stride(int64_t rows) {
  return round_up(rows, int64_t{sm90::kTileK});
}
__global__ void __launch_bounds__(kRowThreads)
    split_scales(const ChunkRows chunk, const float* scale, __nv_bfloat16* split, int stride) {
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row >= stride) return;
  const float exact = row < chunk() ? scale[row] : 0.0f;
  const __nv_bfloat16 rounded = __float2bfloat16_rn(exact);
#pragma unroll
  for (int column = 0; column < kScaleColumns; ++column) split[column * stride + row] = __nv_bfloat16{};
  split[row] = rounded;
  // inf - inf is NaN, so an infinite scale has no remainder.
  const float rest = exact - __bfloat162float(rounded);
  split[stride + row] = __float2bfloat16_rn(isfinite(rest) ? rest : 0.0f);
}

// Divides by the number of 16-byte vectors of a row in the last column tile of GradWeightEpilogue.
FastDivide last_vectors(int64_t hidden, int64_t columns) {
  const int64_t last = hidden - (ceil_div(hidden, columns) - 1) * columns;
  return FastDivide(static_cast<uint32_t>(last / 8));
}

// True if kernels for sm_90a are loaded on the device, it can run them, and LIGER_WGMMA does not forbid it.
// Sets problem.clusters.
bool runs_on(LinearCeProblem& problem, int device) {
  if (!device_attributes(device).code.sm90a || problem.rows > INT_MAX / 2 || !has_tensor_maps() ||
      !wgmma_engine_allowed()) {
    return false;
  }
  // Kernel attributes belong to the current device, which no tensor of the caller need have set.
  const DeviceGuard guard(device);
  problem.clusters = resident_clusters<GradInputEpilogue<__nv_bfloat16, false, sm90::kTileN>>(device);
  return true;
}

// Calls visit(pointer, count) for every buffer of a chunk: sizes and allocations follow from this one list.
template <typename Visit>
void for_each_buffer(ChunkBuffers& b, const Batch& batch, const PlannedChunk& chunk, bool separate_rows,
                     const Visit& visit) {
  const int64_t rows = padded_rows(chunk.rows), sums = chunk.rows * batch.sums_per_row();
  if (separate_rows) visit(b.input, chunk.rows * batch.hidden());
  visit(b.target_logit, rows);
  visit(b.scale, rows);
  visit(b.tile_sums, sums);
  visit(b.overflow, rows / sm90::kTileM);
  visit(b.one_hot, chunk.rows);
  if (chunk.k_splits > 1) {
    visit(b.partial, sm90::split_k_sums(chunk.rows, batch.hidden(), chunk.k_splits));
    visit(b.semaphores, sm90::split_k_semaphores(chunk.rows, batch.hidden(), chunk.k_splits));
  }
  if (batch.with_metrics) {
    visit(b.metrics.entropy_sums, batch.with_squares ? 2 * sums : sums);
    visit(b.metrics.best_keys, chunk.rows);
  }
  if (batch.terms.smoothing()) {
    visit(b.weighted_sum, chunk.rows);
    visit(b.smoothing, chunk.rows);
  }
  if (batch.bias_in_grad_weight()) visit(b.split_scale, kScaleColumns * split_scale_stride(chunk.rows));
  if (batch.is_float16()) {
    visit(b.range.reference, rows);
    visit(b.range.largest, chunk.rows);
    visit(b.range.shift, chunk.rows);
    visit(b.range.tile_shifts, sums);
    visit(b.range.largest_scaled, int64_t{1});
  }
}

}  // namespace

int64_t ChunkBuffers::bytes(const Batch& batch, const PlannedChunk& chunk, bool separate_rows) {
  ChunkBuffers buffers{};
  int64_t bytes = Workspace::bytes_for({});
  for_each_buffer(buffers, batch, chunk, separate_rows, [&](auto* buffer, int64_t count) {
    bytes += Workspace::block_bytes(count * static_cast<int64_t>(sizeof(*buffer)));
  });
  return bytes;
}

ChunkBuffers ChunkBuffers::allocate(const Batch& batch, const PlannedChunk& chunk, Element16* rows,
                                    Workspace& workspace) {
  ChunkBuffers buffers{};
  buffers.input = rows;
  for_each_buffer(buffers, batch, chunk, rows == nullptr,
                  [&]<typename T>(T*& buffer, int64_t count) { buffer = workspace.allocate<T>(count); });
  return buffers;
}

int64_t panel_workspace_bytes(const Batch& batch, const LinearCePlan& plan) {
  return batch.need_gradient() ? (batch.panels() + plan.panel_offset) * plan.workspace_panel_bytes : 0;
}

Tensor dense(const Tensor& tensor) {
  const bool usable = tensor.stride(1) == 1 && tensor.stride(0) >= tensor.size(1) &&
                      tensor.stride(0) % 8 == 0 && is_aligned16(tensor.const_data_ptr());
  if (usable) return tensor;
  const Tensor copy = as_contiguous(tensor);
  return is_aligned16(copy.const_data_ptr()) ? copy : torch::stable::clone(copy);
}

void index_valid_rows(Batch& batch, int32_t* memory) {
  const int64_t rows = batch.rows();
  batch.row_index = {memory, memory + rows, memory + 2 * rows};
  valid_rows::launch_index_valid_rows(batch.problem.targets, rows, batch.row_index, nullptr, batch.stream);
  check_launch(kOp);
  write_ignored_rows<<<valid_rows::blocks_of(rows), valid_rows::kRowThreads, 0, batch.stream>>>(
      batch.problem, batch.row_index.position);
  check_launch(kOp);
}

void scatter_rows(const Batch& batch, const int32_t* position, int64_t rows, Element16* grad_input) {
  // The kernel moves 16-bit elements of either type.
  valid_rows::launch_expand_rows(elements_of<__nv_bfloat16>(grad_input), batch.hidden(), position, rows,
                                 batch.hidden(), batch.stream);
  check_launch(kOp);
}

std::optional<LinearCePlan> plan_on_device(LinearCeProblem problem, int device) {
  if (!runs_on(problem, device)) return std::nullopt;
  return plan_chunks_sm90(problem);
}

int64_t clusters_on_device(int device) {
  LinearCeProblem problem{};
  return runs_on(problem, device) ? problem.clusters : 0;
}

bool takes_on_device(LinearCeProblem problem, int device) {
  return runs_on(problem, device) && takes_sm90(problem);
}

std::optional<LinearCePlan> plan_one_chunk_on_device(LinearCeProblem problem, int device) {
  if (!runs_on(problem, device)) return std::nullopt;
  return plan_one_chunk_sm90(problem);
}

std::optional<LinearBackwardPlan> plan_linear_backward_on_device(LinearCeProblem problem, int64_t aux_rows,
                                                                 bool aux_in_grad_weight, int device) {
  if (!runs_on(problem, device)) return std::nullopt;
  return plan_linear_backward_sm90(problem, aux_rows, aux_in_grad_weight);
}

Chunk::Chunk(const Batch& batch, const LinearCePlan& plan, size_t index, const PlannedChunk& chunk,
             const ChunkBuffers& buffers, const GradWeightBuffers& grad_weight, Element16* grad_input)
    : batch_(batch),
      plan_(plan),
      chunk_(chunk),
      buffers_(buffers),
      grad_weight_(grad_weight),
      grad_input_(grad_input),
      is_first_(index == 0),
      is_last_(index + 1 == plan.chunks.size()),
      uses_grad_weight_memory_(is_first_ && plan.rows_in_grad_weight > 0),
      separate_rows_(separate_rows(batch, plan, index)),
      panels_{} {
  const int64_t panel_shift = uses_grad_weight_memory_ ? plan.panel_offset : 0;  // panels
  Element16* const in_workspace =
      reinterpret_cast<Element16*>(grad_weight.panel_workspace + panel_shift * plan.workspace_panel_bytes +
                                   (uses_grad_weight_memory_ ? 0 : plan.scale_bytes));
  const int64_t workspace_stride = plan.workspace_panel_bytes / 2;
  panels_.memory[0] = uses_grad_weight_memory_
                          ? grad_weight.gradient + panel_shift * sm90::kPanel * batch.hidden()
                          : in_workspace;
  panels_.stride[0] = uses_grad_weight_memory_ ? sm90::kPanel * batch.hidden() : workspace_stride;
  panels_.memory[1] = in_workspace;
  panels_.stride[1] = workspace_stride;
  panels_.rows_in_first = static_cast<int>(
      round_up(uses_grad_weight_memory_ ? plan.rows_in_grad_weight : chunk.rows, sm90::kTileM));
}

ChunkRows Chunk::rows() const {
  return {batch_.row_index.count, static_cast<int>(chunk_.first), static_cast<int>(chunk_.rows)};
}

std::array<CUtensorMap, 2> Chunk::panel_maps(int box_rows) const {
  const int64_t in_first = std::min<int64_t>(chunk_.rows, panels_.rows_in_first);
  const auto map = [&](int place, int64_t rows) {
    // TMA must not swizzle: the panels are stored swizzled.
    return map_of(panels_.memory[place], sm90::kPanel, rows, batch_.panels(), sm90::kPanel,
                  panels_.stride[place], CU_TENSOR_MAP_SWIZZLE_NONE, box_rows);
  };
  const CUtensorMap first = map(0, in_first);
  return {first, in_first < chunk_.rows ? map(1, chunk_.rows - in_first) : first};
}

sm90::Maps Chunk::maps_of(const CUtensorMap& b) const {
  const std::array<CUtensorMap, 2> panels = panel_maps(sm90::kBox);
  return {{panels[0], panels[1]}, b};
}

FirstRowOfClass Chunk::first_row_of_class() const {
  return {batch_.need_class_one_hot() ? reinterpret_cast<unsigned long long*>(grad_weight_.class_one_hot)
                                      : nullptr};
}

void Chunk::clear_class_one_hot() const {
  if (!batch_.need_class_one_hot()) return;
  check_cuda(cudaMemsetAsync(grad_weight_.class_one_hot, 0xff, class_one_hot_bytes(batch_), batch_.stream),
             kOp);
}

void Chunk::apply_rule(bool gradient) const {
  const NvtxRange range("apply_rule");
  batch_.is_float16() ? apply_rule_of<__half>(gradient) : apply_rule_of<__nv_bfloat16>(gradient);
}

template <typename T>
Rule<T> Chunk::rule(bool gradient) const {
  const bool metrics = batch_.problem.entropy != nullptr || batch_.problem.predicted != nullptr;
  return {.problem = batch_.problem,
          .chunk = rows(),
          .index = batch_.row_index.index + chunk_.first,
          .target_logit = buffers_.target_logit,
          .sums = buffers_.tile_sums,
          .columns = static_cast<int>(batch_.sums_per_row()),
          .overflow = buffers_.overflow,
          .exponentials = panels_,
          .gradient = gradient && batch_.need_gradient(),
          .input = batch_.need_grad_weight ? elements_of<T>(buffers_.input) : nullptr,
          .hidden = static_cast<int>(batch_.hidden()),
          .scale = buffers_.scale,
          .first_row = first_row_of_class(),
          .one_hot = buffers_.one_hot,
          .metrics = metrics ? buffers_.metrics : RowMetrics{},
          .transform = batch_.terms.transform,
          .weighted_sum = buffers_.weighted_sum,
          .smoothing = buffers_.smoothing,
          .range = buffers_.range};
}
template Rule<__nv_bfloat16> Chunk::rule(bool gradient) const;

template <typename T>
void Chunk::apply_rule_of(bool gradient) const {
  const Rule<T> rule = this->rule<T>(gradient);
  const bool metrics = rule.metrics.best_keys != nullptr;
  const auto blocks = static_cast<unsigned>(chunk_.rows);
  const auto kernel =
      metrics || batch_.terms.smoothing() ? lm_head::apply_rule<T, true> : lm_head::apply_rule<T, false>;
  kernel<<<blocks, kRowThreads, 0, batch_.stream>>>(rule);
  check_launch(kOp);
  if constexpr (kSmallRange<T>) {
    if (!rule.gradient || rule.input == nullptr) return;
    scale_rows<<<blocks, kRowThreads, 0, batch_.stream>>>(rows(), rule.input, rule.hidden, rule.scale,
                                                          buffers_.range.largest_scaled);
    check_launch(kOp);
  }
}

void Chunk::gradients() const {
  const NvtxRange range("gradients");
  if (batch_.need_grad_bias() && !batch_.bias_in_grad_weight())
    batch_.is_float16() ? add_to_grad_bias<__half>() : add_to_grad_bias<__nv_bfloat16>();
  if (separate_rows_) grad_input();
  grad_weight();
  if (!separate_rows_) grad_input();
}

void Chunk::grad_input() const {
  if (!batch_.need_grad_input) return;
  const NvtxRange range("grad_input");
  with_gradient_kernels<sm90::kGradInputWidths>([&](auto element, auto partial_tiles, auto columns) {
    using T = typename decltype(element)::type;
    grad_input_gemm<T, partial_tiles.value, columns.value>();
  });
}

void Chunk::grad_weight() const {
  if (!batch_.need_grad_weight) return;
  const NvtxRange range("grad_weight");
  if (batch_.bias_in_grad_weight()) {
    return with_tile_columns<sm90::kGradWeightWidths>(
        batch_.hidden(), [&](auto columns) { grad_weight_gemm<__nv_bfloat16, true, columns.value, true>(); });
  }
  with_gradient_kernels<sm90::kGradWeightWidths>([&](auto element, auto partial_tiles, auto columns) {
    using T = typename decltype(element)::type;
    grad_weight_gemm<T, partial_tiles.value, columns.value>();
  });
}

template <const auto& kWidths, typename F>
void Chunk::with_gradient_kernels(const F& f) const {
  with_gradient_tiles<kWidths>(batch_.hidden(), batch_.vocab(), [&](auto partial_tiles, auto columns) {
    batch_.is_float16() ? f(std::type_identity<__half>{}, partial_tiles, columns)
                        : f(std::type_identity<__nv_bfloat16>{}, partial_tiles, columns);
  });
}

template <typename T>
GradInput<T> Chunk::grad_input_of() const {
  return {.chunk = rows(),
          .vocab = static_cast<int>(batch_.vocab()),
          .hidden = static_cast<int>(batch_.hidden()),
          .rows_in_first = panels_.rows_in_first,
          .k_splits = static_cast<int>(chunk_.k_splits),
          .scale = buffers_.scale,
          .one_hot = buffers_.one_hot,
          .weight = static_cast<const T*>(batch_.weight.const_data_ptr()),
          .weight_stride = batch_.weight.stride(0),
          .out = elements_of<T>(grad_input_),
          .partial = buffers_.partial,
          .semaphores = buffers_.semaphores,
          .smoothing = RankOneTerm{batch_.terms.class_sum, buffers_.smoothing}};
}
template GradInput<__nv_bfloat16> Chunk::grad_input_of() const;

template <typename T, bool kPartialTiles, int kTileColumns>
void Chunk::grad_input_gemm() const {
  const GradInputEpilogue<T, kPartialTiles, kTileColumns> epilogue{grad_input_of<T>()};
  const CUtensorMap weight = matrix_map(batch_.weight, sm90::StageOf<decltype(epilogue)>::kBoxRowsB);
  launch_grad_input(maps_of(weight), epilogue, batch_.device, batch_.stream);
}

template <typename T, bool kPartialTiles, int kTileColumns, bool kBias>
void Chunk::grad_weight_gemm() const {
  const int64_t hidden = batch_.hidden();
  if (uses_grad_weight_memory_) {
    const size_t counters = batch_.panels() * sizeof(int);
    check_cuda(cudaMemsetAsync(grad_weight_.panel_read_counts, 0, counters, batch_.stream), kOp);
  }
  if (batch_.terms.smoothing()) {
    launch_row_sums(
        RowSums<T>{static_cast<const T*>(batch_.input.const_data_ptr()), batch_.input.stride(0), chunk_.rows,
                   batch_.row_index.count, chunk_.first, batch_.row_index.index + chunk_.first,
                   buffers_.smoothing, hidden, batch_.terms.partial, batch_.terms.row_sum},
        batch_.stream);
  }
  const bool grouped = !uses_grad_weight_memory_ && chunk_.rows * hidden * 2 > kInputBytesInL2;
  GradWeightEpilogue<T, kPartialTiles, kTileColumns, kBias> epilogue{
      .chunk = rows(),
      .vocab = static_cast<int>(batch_.vocab()),
      .hidden = static_cast<int>(hidden),
      .rows_in_first = panels_.rows_in_first,
      .one_hot = grad_weight_.class_one_hot,
      .input = static_cast<const T*>(batch_.input.const_data_ptr()),
      .input_stride = batch_.input.stride(0),
      .out = elements_of<T>(grad_weight_.gradient),
      .scale_exponents = grad_weight_.panel_workspace,
      .scale_stride = plan_.workspace_panel_bytes,
      .first = is_first_,
      .last = is_last_,
      .panel_read_counts = uses_grad_weight_memory_ ? grad_weight_.panel_read_counts : nullptr,
      .panel_offset = static_cast<int>(plan_.panel_offset),
      .group = grouped ? kGroupM : static_cast<int>(ceil_div(hidden, int64_t{kTileColumns})),
      .last_vectors = last_vectors(hidden, kTileColumns),
      .smoothing = RankOneTerm{batch_.terms.row_sum, batch_.problem.class_weight},
      .largest_scaled = buffers_.range.largest_scaled};
  const CUtensorMap input =
      matrix_map(buffers_.input, chunk_.rows, hidden, hidden, sm90::StageOf<decltype(epilogue)>::kBoxRowsB);
  if constexpr (kBias) {
    const int stride = static_cast<int>(split_scale_stride(chunk_.rows));
    const unsigned blocks = static_cast<unsigned>(ceil_div(stride, kRowThreads));
    split_scales<<<blocks, kRowThreads, 0, batch_.stream>>>(rows(), buffers_.scale, buffers_.split_scale,
                                                            stride);
    check_launch(kOp);
    epilogue.bias = grad_bias_of<T>();
    epilogue.second_b = matrix_map(buffers_.split_scale, kScaleColumns, stride, stride, kScaleColumns);
  }
  launch_gemm(maps_of(input), epilogue, batch_.device, batch_.stream, uses_grad_weight_memory_);
}

template <typename T>
GradBias<T> Chunk::grad_bias_of() const {
  return {.chunk = rows(),
          .vocab = static_cast<int>(batch_.vocab()),
          .scale = buffers_.scale,
          .one_hot = grad_weight_.class_one_hot,
          .smoothing = buffers_.smoothing,
          .class_weight = batch_.problem.class_weight,
          .first = is_first_,
          .last = is_last_,
          .total = batch_.terms.grad_bias_sum,
          .out = elements_of<T>(batch_.terms.grad_bias)};
}

template <typename T>
void Chunk::add_to_grad_bias() const {
  add_grad_bias<T>
      <<<static_cast<unsigned>(batch_.panels()), kRowThreads, 0, batch_.stream>>>(grad_bias_of<T>(), panels_);
  check_launch(kOp);
}

}  // namespace liger::lm_head
