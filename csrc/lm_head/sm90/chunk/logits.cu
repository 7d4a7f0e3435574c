// SPDX-License-Identifier: BSD-3-Clause

// The steps of a chunk up to its exponentials: gathered rows, the logits GEMM, tiles that overflowed.
#include <algorithm>
#include <array>
#include <type_traits>

#include "lm_head/sm90/chunk/chunk.h"
#include "lm_head/sm90/chunk/select_kernel.h"
#include "lm_head/sm90/epilogues/exponentials.cuh"
#include "lm_head/sm90/gemm/launch.cuh"
#include "lm_head/sm90/rows/gather.cuh"

namespace liger::lm_head {
namespace {

constexpr const char* kOp = kGemmOp;

}  // namespace

void Chunk::exponentials() const {
  const NvtxRange range("exponentials");
  clear_class_one_hot();
  gather();
  exponentials_of_gathered();
}

void Chunk::gather() const {
  batch_.is_float16() ? gather_rows<__half>() : gather_rows<__nv_bfloat16>();
}

void Chunk::exponentials_of_gathered() const {
  const LogitTransform& transform = batch_.terms.transform;
  with_flags(
      [&](auto float16, auto metrics, auto bias, auto softcap) {
        using T = std::conditional_t<float16.value, __half, __nv_bfloat16>;
        constexpr LogitsWork kWork{.metrics = metrics.value, .bias = bias.value, .softcap = softcap.value};
        if constexpr (metrics.value && !kWork.transform()) {
          constexpr LogitsWork kSquares{.metrics = true, .squares = true};
          if (batch_.with_squares) return logits_gemm<ExpEpilogue<T, kSquares>>();
        }
        logits_gemm<ExpEpilogue<T, kWork>>();
      },
      batch_.is_float16(), batch_.with_metrics, transform.bias != nullptr, transform.softcap != 0.0f);
}

template <typename T>
void Chunk::gather_rows() const {
  const Gather<T> rows_of_chunk{.chunk = rows(),
                                .index = batch_.row_index.index + chunk_.first,
                                .targets = batch_.problem.targets,
                                .input = static_cast<const T*>(batch_.input.const_data_ptr()),
                                .weight = static_cast<const T*>(batch_.weight.const_data_ptr()),
                                .input_stride = batch_.input.stride(0),
                                .weight_stride = batch_.weight.stride(0),
                                .vocab = static_cast<int>(batch_.vocab()),
                                .hidden = static_cast<int>(batch_.hidden()),
                                .inverse_temperature = batch_.inverse_temperature,
                                .out = elements_of<T>(buffers_.input),
                                .target_logit = buffers_.target_logit,
                                .overflow = buffers_.overflow,
                                .first_row = first_row_of_class(),
                                .transform = batch_.terms.transform,
                                .class_sum = batch_.terms.class_sum,
                                .bias_sum = batch_.terms.bias_sum,
                                .weighted_sum = buffers_.weighted_sum,
                                .range = buffers_.range};
  if constexpr (kSmallRange<T>) {
    check_cuda(
        cudaMemsetAsync(buffers_.range.tile_shifts, 0, chunk_.rows * batch_.sums_per_row(), batch_.stream),
        kOp);
    check_cuda(cudaMemsetAsync(buffers_.range.largest_scaled, 0, sizeof(*buffers_.range.largest_scaled),
                               batch_.stream),
               kOp);
  }
  lm_head::gather<<<static_cast<unsigned>(padded_rows(chunk_.rows)), kRowThreads, 0, batch_.stream>>>(
      rows_of_chunk);
  check_launch(kOp);
}

template <class Epilogue>
void Chunk::logits_gemm() const {
  using T = typename Epilogue::Element;
  const int hidden = static_cast<int>(batch_.hidden()), vocab = static_cast<int>(batch_.vocab());
  if (batch_.with_metrics) {
    check_cuda(cudaMemsetAsync(buffers_.metrics.best_keys, 0,
                               chunk_.rows * sizeof(*buffers_.metrics.best_keys), batch_.stream),
               kOp);
  }
  const CUtensorMap input = matrix_map(buffers_.input, chunk_.rows, hidden, hidden);
  // Without gradients no panel exists and nothing is stored.
  const auto panels = batch_.need_gradient() ? panel_maps(sm90::kResultBoxRows) : std::array{input, input};
  const sm90::PingpongMaps maps{{{input, input}, matrix_map(batch_.weight, sm90::PingpongStage::kBoxRowsB)},
                                {panels[0], panels[1]}};
  Epilogue epilogue;
  epilogue.chunk = rows();
  epilogue.vocab = vocab;
  epilogue.hidden = hidden;
  epilogue.factor = kLog2e * batch_.inverse_temperature;
  epilogue.reference = kSmallRange<T> ? buffers_.range.reference : buffers_.target_logit;
  epilogue.tile_sums = buffers_.tile_sums;
  epilogue.out = panels_;
  epilogue.write = batch_.need_gradient();
  epilogue.overflow = buffers_.overflow;
  epilogue.phase = Phase::kAll;
  epilogue.metrics = buffers_.metrics;
  epilogue.transform = batch_.terms.transform;
  epilogue.range = buffers_.range;
  launch_gemm(maps, epilogue, batch_.device, batch_.stream);
  epilogue.phase = Phase::kMaxima;
  launch_gemm(maps, epilogue, batch_.device, batch_.stream);
  const Recompute overflow{.chunk = rows(),
                           .overflow = buffers_.overflow,
                           .maxima = buffers_.tile_sums,
                           .columns = static_cast<int>(batch_.sums_per_row()),
                           .inverse_temperature = batch_.inverse_temperature,
                           .reference = buffers_.scale,
                           .transform = batch_.terms.transform,
                           .range = buffers_.range};
  recompute_reference<T><<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, batch_.stream>>>(overflow);
  check_launch(kOp);
  epilogue.phase = Phase::kRecompute;
  epilogue.reference = buffers_.scale;
  launch_gemm(maps, epilogue, batch_.device, batch_.stream);
}

}  // namespace liger::lm_head
