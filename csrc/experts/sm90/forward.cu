// SPDX-License-Identifier: BSD-3-Clause

// The forward of the experts on compute capability 9.0: two grouped GEMMs, and the sum per token.
//
// Internal ops: python/liger/ops/grouped_experts/sm90.py checks the arguments and allocates all memory.
#include <torch/csrc/stable/library.h>

#include "experts/sm90/host.cuh"
#include "experts/sm90/sum.cuh"
#include "lm_head/planner.h"

namespace liger::experts {
namespace {

bool takes(const Tensor& x) {
  return device_attributes(x.get_device_index()).code.sm90a && has_tensor_maps() && wgmma_engine_allowed();
}

template <typename T, bool kInterleaved, bool kIsSilu, bool kGathers>
void launch_gate_up(const Tensor& x, const std::optional<Tensor>& tokens, const Tensor& ends,
                    const Tensor& gate_up_proj, const std::optional<Tensor>& bias, const Gate& gate,
                    const Tensor& gate_up, const Tensor& product) {
  // gpt-oss has interleaved and transposed matrices; otherwise neither.
  constexpr bool kBMn = kInterleaved;
  const int64_t intermediate = product.size(1);
  const GateUpEpilogue<T, kBMn, kInterleaved, kIsSilu, kGathers> epilogue{
      .groups = groups_of(ends, ceil_div(intermediate, int64_t{kHalfColumns}), x.size(1),
                          kInterleaved ? kColumns : kHalfColumns,
                          kInterleaved ? kHalfColumns : static_cast<int>(intermediate)),
      .a = gathered<T>(x, tokens),
      .gate = gate,
      .bias = data_of<T>(bias),
      .gate_up = data_of<T>(gate_up),
      .product = data_of<T>(product),
      .intermediate = static_cast<int>(intermediate)};
  const CUtensorMap b = map_of(gate_up_proj, kBMn ? kHalfK : kHalfColumns);
  const GroupedMaps maps{kGathers ? b : map_of(x, kBox), b};
  lm_head::launch_gemm(maps, epilogue, x.get_device_index(), current_stream(x));
}

// tokens: nullopt if x has the rows of all slots. gate_up: (rows, 2 intermediate), or empty if it is not
// kept.
void gate_up(const Tensor& x, const std::optional<Tensor>& tokens, const Tensor& ends,
             const Tensor& gate_up_proj, const std::optional<Tensor>& bias, const std::string& activation,
             bool is_interleaved, double alpha, std::optional<double> limit, const Tensor& gate_up,
             const Tensor& product) {
  const OpGuard guard("experts_gate_up", x.get_device_index());
  require_dense("x", x);
  require_dense("gate_up_proj", gate_up_proj);
  require_dense("the product", product);
  const Gate gate = gate_of(activation, alpha, limit);
  dispatch_half(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_gathers(tokens, [&](auto gathers) {
      constexpr bool kGathers = gathers.value;
      const auto launch = is_interleaved   ? launch_gate_up<T, true, false, kGathers>
                          : gate.is_silu() ? launch_gate_up<T, false, true, kGathers>
                                           : launch_gate_up<T, false, false, kGathers>;
      launch(x, tokens, ends, gate_up_proj, bias, gate, gate_up, product);
    });
  });
}

template <typename T, bool kBMn>
void launch_rows(const Tensor& rows, const Tensor& ends, const Tensor& matrices,
                 const std::optional<Tensor>& bias, const std::optional<Tensor>& weights, const Tensor& out) {
  const int64_t columns = out.size(1);
  const RowsEpilogue<T, kBMn> epilogue{
      .groups = groups_of(ends, ceil_div(columns, int64_t{kColumns}), rows.size(1)),
      .bias = data_of<T>(bias),
      .weights = data_of<float>(weights),
      .out = data_of<T>(out),
      .columns = static_cast<int>(columns)};
  const GroupedMaps maps{map_of(rows, kBox), map_of(matrices, kBMn ? kHalfK : kHalfColumns)};
  lm_head::launch_gemm(maps, epilogue, rows.get_device_index(), current_stream(rows));
}

// (rows @ matrix of the expert + bias) * weight of the row. matrices: (experts, columns, K), or with
// `k_first` (experts, K, columns).
void rows(const Tensor& rows, const Tensor& ends, const Tensor& matrices, bool k_first,
          const std::optional<Tensor>& bias, const std::optional<Tensor>& weights, const Tensor& out) {
  const OpGuard guard("experts_rows", rows.get_device_index());
  require_dense("the rows", rows);
  require_dense("the matrices", matrices);
  require_dense("the result", out);
  dispatch_half(rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = k_first ? launch_rows<T, true> : launch_rows<T, false>;
    launch(rows, ends, matrices, bias, weights, out);
  });
}

void sum(const Tensor& rows, const Tensor& inverse, const Tensor& out) {
  const OpGuard guard("experts_sum", rows.get_device_index());
  require_dense("the rows", rows);
  const int64_t tokens = inverse.size(0);
  const int vectors = static_cast<int>(rows.size(1) / 8), pad = static_cast<int>(rows.size(0) - 1);
  const RowIndices indices{inverse.const_data_ptr(), inverse.scalar_type() == ScalarType::Long};
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>(ceil_div(vectors, kSumThreads)));
  dispatch_half(rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    sum_choices<<<grid, kSumThreads, 0, current_stream(rows)>>>(static_cast<const T*>(rows.const_data_ptr()),
                                                                indices, static_cast<int>(inverse.size(1)),
                                                                pad, vectors, data_of<T>(out));
  });
  check_launch(kOp);
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  // True if the kernels run on the device of x and LIGER_WGMMA does not forbid it.
  m.def("takes_experts(Tensor x) -> bool");
  m.def("experts_gate_up(Tensor x, Tensor? tokens, Tensor ends, Tensor gate_up_proj, Tensor? bias, str activation, bool is_interleaved, float alpha, float? limit, Tensor(a!) gate_up, Tensor(b!) product) -> ()");
  m.def("experts_rows(Tensor rows, Tensor ends, Tensor matrices, bool k_first, Tensor? bias, Tensor? weights, Tensor(a!) out) -> ()");
  m.def("experts_sum(Tensor rows, Tensor inverse, Tensor(a!) out) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("takes_experts", TORCH_BOX(&takes));
  m.impl("experts_gate_up", TORCH_BOX(&gate_up));
  m.impl("experts_rows", TORCH_BOX(&rows));
  m.impl("experts_sum", TORCH_BOX(&sum));
}

}  // namespace liger::experts
