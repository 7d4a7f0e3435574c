// SPDX-License-Identifier: BSD-3-Clause

// The rows of the slots of grouped_experts, sorted by expert.
//
// An internal op: python/liger/ops/grouped_experts/counting_sort.py checks the arguments and allocates all
// memory.
#include "experts/routing.cuh"

#include <torch/csrc/stable/library.h>

#include "device/integers.h"
#include "experts/host.h"
#include "host/launch/dispatch.h"

namespace liger::experts {
namespace {

// counts: (chunks, E + 1), memory of the op. weights and row_weights: both or neither.
void sort(const Tensor& top_k_index, const std::optional<Tensor>& weights, int64_t chunk,
          const Tensor& counts, const Tensor& ends, const Tensor& order, const Tensor& tokens,
          const Tensor& experts, const Tensor& inverse, const std::optional<Tensor>& row_weights) {
  const OpGuard guard("experts_sort", top_k_index.get_device_index());
  const int chunks = static_cast<int>(counts.size(0));
  const Slots slots{.indices = top_k_index.const_data_ptr(),
                    .wide = top_k_index.scalar_type() == ScalarType::Long,
                    .count = static_cast<int>(top_k_index.numel()),
                    .choices = static_cast<int>(top_k_index.size(1)),
                    .experts = static_cast<int>(ends.size(0)),
                    .chunk = static_cast<int>(chunk)};
  require(slots.experts <= kMaxRoutedExperts && chunk % kRouteThreads == 0 &&
              chunks == ceil_div(int64_t{slots.count}, chunk) && counts.size(1) == slots.experts + 1,
          kOp, ": ", slots.experts, " experts in chunks of ", chunk, " slots");
  const SortedSlots out{.ends = data_of<int>(ends),
                        .order = data_of<long long>(order),
                        .tokens = data_of<long long>(tokens),
                        .experts = data_of<long long>(experts),
                        .inverse = data_of<long long>(inverse),
                        .weights = row_weights ? data_of<float>(*row_weights) : nullptr};
  const cudaStream_t stream = current_stream(top_k_index);
  count_slots<<<chunks, kRouteThreads, 0, stream>>>(slots, data_of<int>(counts));
  check_launch(kOp);
  dispatch_dtype(weights ? weights->scalar_type() : ScalarType::Float, [&](auto tag) {
    using W = typename decltype(tag)::type;
    sort_slots<<<chunks, kRouteThreads, 0, stream>>>(slots, data_of<W>(weights), data_of<int>(counts), chunks,
                                                     out);
  });
  check_launch(kOp);
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY(liger_experts, m) {
  m.def("sort(Tensor top_k_index, Tensor? weights, int chunk, Tensor(a!) counts, Tensor(b!) ends, Tensor(c!) order, Tensor(d!) tokens, Tensor(e!) experts, Tensor(f!) inverse, Tensor(g!)? row_weights) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_experts, CUDA, m) {
  m.impl("sort", TORCH_BOX(&sort));
}

}  // namespace liger::experts
