// The steps of a chunk up to its exponentials: gathered rows, the logits GEMM, tiles that overflowed.
#include <algorithm>
#include <array>
#include <iterator>
#include <type_traits>
#include <utility>

#include "linear_ce/sm90/chunk.h"
#include "linear_ce/sm90/exponentials_pingpong.cuh"
#include "linear_ce/sm90/gemm_launch.cuh"
#include "linear_ce/sm90/rows.cuh"
#include "linear_ce/sm90/step.h"

namespace liger::linear_ce {
namespace {

constexpr const char* kOp = kGemmOp;

template <sm90::LogitsWork kWork, bool kPartialTiles>
using LogitsEpilogue = std::conditional_t<sm90::kPingpong, PingpongExpEpilogue<kWork, kPartialTiles>,
                                          OverlappedExpEpilogue<kWork, kPartialTiles>>;

}  // namespace

void Chunk::exponentials() const {
  const NvtxRange range("exponentials");
  clear_class_one_hot();
  gather();
  exponentials_of_gathered();
}

void Chunk::gather() const {
  batch_.is_float16() ? gather_rows<__half>() : gather_rows<Bf16>();
}

void Chunk::exponentials_of_gathered() const {
  if (batch_.overlaps_epilogue()) return overlapped_logits_gemm();
  with_flags(
      [&](auto float16, auto metrics, auto partial_panel, auto transform) {
        using T = std::conditional_t<float16.value, __half, Bf16>;
        // A kernel with the transform handles partial tiles too, as one of float16 with metrics does.
        constexpr bool kPartialTiles =
            partial_panel.value || transform.value || (float16.value && metrics.value);
        if constexpr (metrics.value && !transform.value) {
          if (batch_.with_squares) return logits_gemm<ExpEpilogue<T, true, kPartialTiles, false, true>>();
        }
        logits_gemm<ExpEpilogue<T, metrics.value, kPartialTiles, transform.value>>();
      },
      batch_.is_float16(), batch_.with_metrics, sm90::has_partial_panel(batch_.vocab()),
      batch_.terms.transform.any());
}

void Chunk::overlapped_logits_gemm() const {
  const bool partial_panel = sm90::has_partial_panel(batch_.vocab());
  const auto run = [&]<size_t i>() {
    constexpr sm90::LogitsWork kWork = sm90::kPieceColumns[i].work;
    if (batch_.logits_work() != kWork) return;
    // A kernel with the transform handles both, as that of ExpEpilogue does.
    if constexpr (!kWork.transform()) {
      if (!partial_panel) return logits_gemm<LogitsEpilogue<kWork, false>>();
    }
    logits_gemm<LogitsEpilogue<kWork, true>>();
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (run.template operator()<i>(), ...);
  }(std::make_index_sequence<std::size(sm90::kPieceColumns)>{});
}

template <typename T>
void Chunk::gather_rows() const {
  const Gather<T> rows_of_chunk{rows(),
                                batch_.row_index.index + chunk_.first,
                                batch_.problem.targets,
                                static_cast<const T*>(batch_.input.const_data_ptr()),
                                static_cast<const T*>(batch_.weight.const_data_ptr()),
                                batch_.input.stride(0),
                                batch_.weight.stride(0),
                                static_cast<int>(batch_.vocab()),
                                static_cast<int>(batch_.hidden()),
                                batch_.inverse_temperature,
                                elements_of<T>(buffers_.input),
                                buffers_.target_logit,
                                buffers_.overflow,
                                first_row_of_class(),
                                batch_.terms.transform,
                                batch_.terms.class_sum,
                                batch_.terms.bias_sum,
                                buffers_.weighted_sum,
                                buffers_.range};
  if constexpr (kSmallRange<T>) {
    check_cuda(cudaMemsetAsync(buffers_.range.panel_shifts, 0, chunk_.rows * batch_.panels(), batch_.stream),
               kOp);
    check_cuda(cudaMemsetAsync(buffers_.range.largest_scaled, 0, sizeof(*buffers_.range.largest_scaled),
                               batch_.stream),
               kOp);
  }
  linear_ce::gather<<<static_cast<unsigned>(padded_rows(chunk_.rows)), kRowThreads, 0, batch_.stream>>>(
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
  typename GemmOf<Epilogue>::Maps maps;
  if constexpr (std::is_same_v<decltype(maps), sm90::OverlappedMaps>) {
    maps.operands = {{input, input}, matrix_map(batch_.weight, sm90::kOverlappedBoxRows)};
    // Without gradients there are no panels, and nothing is stored.
    const auto panels = batch_.need_gradient() ? panel_maps(sm90::kResultBoxRows) : std::array{input, input};
    std::copy(panels.begin(), panels.end(), maps.results);
  } else {
    maps = {{input, input}, matrix_map(batch_.weight)};
  }
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
  const Recompute overflow{rows(),
                           buffers_.overflow,
                           buffers_.tile_sums,
                           static_cast<int>(batch_.sums_per_row()),
                           batch_.inverse_temperature,
                           buffers_.scale,
                           batch_.terms.transform,
                           buffers_.range,
                           static_cast<int>(batch_.panels())};
  recompute_reference<T><<<static_cast<unsigned>(chunk_.rows), kRowThreads, 0, batch_.stream>>>(overflow);
  check_launch(kOp);
  epilogue.phase = Phase::kRecompute;
  epilogue.reference = buffers_.scale;
  launch_gemm(maps, epilogue, batch_.device, batch_.stream);
}

}  // namespace liger::linear_ce
