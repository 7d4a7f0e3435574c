// SPDX-License-Identifier: BSD-3-Clause

// The backward of the experts on compute capability 9.0. The gradient of x is `experts_rows` and
// `experts_sum` of forward.cu.
//
// Internal ops: python/liger/ops/grouped_experts/sm90.py checks the arguments and allocates all memory.
#include <torch/csrc/stable/library.h>

#include "experts/sm90/host.cuh"

namespace liger::experts {
namespace {

template <typename T, bool kInterleaved, bool kIsSilu, bool kGathers>
void launch_grad_product(const Tensor& grad_y, const std::optional<Tensor>& tokens, const Tensor& ends,
                         const Tensor& down_proj, const Gate& gate, const Tensor& weights,
                         const Tensor& gate_up, const Tensor& product, const Tensor& sums) {
  // Transposed matrices, of gpt-oss, are K-major here, and others are not.
  constexpr bool kBMn = !kInterleaved;
  const int64_t intermediate = product.size(1);
  const GradProductEpilogue<T, kBMn, kInterleaved, kIsSilu, kGathers> epilogue{
      .groups = groups_of(ends, ceil_div(intermediate, int64_t{kColumns}), grad_y.size(1)),
      .a = gathered<T>(grad_y, tokens),
      .gate = gate,
      .weights = data_of<float>(weights),
      .gate_up = data_of<T>(gate_up),
      .product = data_of<T>(product),
      .sums_of_rows = data_of<float>(sums),
      .rows = sums.size(1),
      .intermediate = static_cast<int>(intermediate)};
  const CUtensorMap b = map_of(down_proj, kBMn ? kHalfK : kHalfColumns);
  const GroupedMaps maps{kGathers ? b : map_of(grad_y, kBox), b};
  lm_head::launch_gemm(maps, epilogue, grad_y.get_device_index(), current_stream(grad_y));
}

// tokens: nullopt if grad_y has the rows of all slots. sums: (column tiles of the product, rows) float32; the
// sum over tiles is the gradient of the routing weight.
void grad_product(const Tensor& grad_y, const std::optional<Tensor>& tokens, const Tensor& ends,
                  const Tensor& down_proj, const std::string& activation, bool is_interleaved, double alpha,
                  std::optional<double> limit, const Tensor& weights, const Tensor& gate_up,
                  const Tensor& product, const Tensor& sums) {
  const OpGuard guard("experts_grad_product", grad_y.get_device_index());
  require_dense("grad_y", grad_y);
  require_dense("down_proj", down_proj);
  require_dense("gate and up", gate_up);
  require_dense("the product", product);
  const Gate gate = gate_of(activation, alpha, limit);
  dispatch_half(grad_y.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_gathers(tokens, [&](auto gathers) {
      constexpr bool kGathers = gathers.value;
      const auto launch = is_interleaved   ? launch_grad_product<T, true, false, kGathers>
                          : gate.is_silu() ? launch_grad_product<T, false, true, kGathers>
                                           : launch_grad_product<T, false, false, kGathers>;
      launch(grad_y, tokens, ends, down_proj, gate, weights, gate_up, product, sums);
    });
  });
}

// Rows per expert on average from which four warps gather a stage faster than two.
constexpr int64_t kManyRows = 1024;

template <typename T, bool kTransposed, bool kGathers, int kSharing>
void launch_grad_matrix(const Tensor& a, const std::optional<Tensor>& tokens, const Tensor& b,
                        const Tensor& ends, const Tensor& out) {
  const int64_t columns = b.size(1);
  Groups groups = groups_of(ends, ceil_div(columns, int64_t{kColumns}), 0);
  groups.row_tiles = static_cast<int>(ceil_div(a.size(1), int64_t{kRows}));
  const GradMatrixEpilogue<T, kTransposed, kGathers, kSharing> epilogue{
      .groups = groups,
      .a = gathered<T>(a, tokens),
      .b = static_cast<const T*>(b.const_data_ptr()),
      .out = data_of<T>(out),
      .columns = static_cast<int>(columns)};
  const CUtensorMap map = map_of(b, kHalfK);
  lm_head::launch_gemm(GroupedMaps{kGathers ? map : map_of(a, kBox), map}, epilogue, a.get_device_index(),
                       current_stream(a));
}

// a[tokens][rows of e].T @ b[rows of e] for each expert e, or the transpose of it; zeros without rows.
// tokens: nullopt if a has the rows of all slots.
void grad_matrix(const Tensor& a, const std::optional<Tensor>& tokens, const Tensor& b, const Tensor& ends,
                 bool is_transposed, const Tensor& out) {
  const OpGuard guard("experts_grad_matrix", a.get_device_index());
  require_dense("the gathered rows", a);
  require_dense("the rows", b);
  require_dense("the gradient", out);
  dispatch_half(a.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool many = b.size(0) >= kManyRows * ends.size(0);
    const auto launch_as = [&](auto transposed) {
      constexpr bool kTransposed = transposed.value;
      const auto launch = !tokens ? launch_grad_matrix<T, kTransposed, false, 1>
                          : many  ? launch_grad_matrix<T, kTransposed, true, 4>
                                  : launch_grad_matrix<T, kTransposed, true, 2>;
      launch(a, tokens, b, ends, out);
    };
    is_transposed ? launch_as(std::true_type{}) : launch_as(std::false_type{});
  });
}

}  // namespace

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  m.def("experts_grad_product(Tensor grad_y, Tensor? tokens, Tensor ends, Tensor down_proj, str activation, bool is_interleaved, float alpha, float? limit, Tensor weights, Tensor(a!) gate_up, Tensor(b!) product, Tensor(c!) sums) -> ()");
  m.def("experts_grad_matrix(Tensor a, Tensor? tokens, Tensor b, Tensor ends, bool is_transposed, Tensor(a!) out) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CUDA, m) {
  m.impl("experts_grad_product", TORCH_BOX(&grad_product));
  m.impl("experts_grad_matrix", TORCH_BOX(&grad_matrix));
}

}  // namespace liger::experts
