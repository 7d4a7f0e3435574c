// SPDX-License-Identifier: BSD-3-Clause
#include "softmax/softmax.cuh"

#include <torch/csrc/stable/library.h>

#include "host/launch/dispatch.h"
#include "host/launch/elementwise.h"
#include "host/launch/smem_row.h"
#include "softmax/smem.cuh"

namespace liger {
namespace {

// The common alignment of the rows of all operands. kVectors: rows consist of whole 16-byte vectors. kPeel:
// rows start equally far from a 16-byte boundary, so only elements at both ends are outside common vectors.
// kElements: operands share no vectors.
enum class Alignment { kVectors, kPeel, kElements };

Alignment common_alignment(const Softmax& p, int64_t element_size) {
  const int64_t vector = 16 / element_size;
  Extent extent = p.extent;
  if (use_vectors(extent, element_size, {p.x, p.grad_y, as_input(p.out)})) return Alignment::kVectors;
  for (const InputRows& other : {p.grad_y, as_input(p.out)}) {
    if (other.data == nullptr) continue;
    const intptr_t distance = reinterpret_cast<intptr_t>(p.x.data) - reinterpret_cast<intptr_t>(other.data);
    if (distance % 16 != 0 || (p.extent.rows > 1 && (p.x.stride - other.stride) % vector != 0))
      return Alignment::kElements;
  }
  return Alignment::kPeel;
}

// Launches softmax_smem_kernel; returns false if no cluster size holds a row.
template <typename T, typename Rule>
bool launch_smem(const char* op, const Softmax& p, const DeviceAttributes& device, cudaStream_t stream) {
  constexpr int kTensors = Rule::kTensors, kLaneVectors = 4 / kTensors;
  using Stats = typename Rule::Stats;
  SmemRowLaunch<Softmax> launch(op, p.extent.columns / kVec<T>, device);
  const auto add = [&](auto shape, Grid grid) {
    using Shape = decltype(shape);
    if (launch.blocks() == 0) launch.template add_candidate<Shape>(softmax_smem_kernel<T, Rule, Shape>, grid);
  };
  add(SmemRowShape<256, kLaneVectors, Stats, kTensors, 3>{}, Grid::kClusterPerRow);
  add(SmemRowShape<256, kLaneVectors, Stats, kTensors, 2>{}, Grid::kClusterPerRow);
  add(SmemRowShape<512, kLaneVectors, Stats, kTensors, 1>{}, Grid::kPersistent);
  return launch.run(p.extent.rows, stream, p);
}

template <typename T>
void launch(const char* op, const Softmax& p, const DeviceAttributes& device, cudaStream_t stream) {
  constexpr int N = kVec<T>;
  constexpr int64_t kMaxShortVectors = kShortVectors * kRegisterThreads;
  // Longer rows in registers leave too few blocks per SM; from sm_90 on shared memory is faster for them.
  const int64_t max_short_vectors = device.code.architecture >= 90 ? kMaxShortVectors / 2 : kMaxShortVectors;
  const Alignment alignment = common_alignment(p, sizeof(T));
  if (alignment == Alignment::kVectors && max_row_vectors<T, N, false>(p) <= max_short_vectors) {
    launch_softmax_short<T, N, false>(p, stream);
    return;
  }
  if (alignment == Alignment::kPeel && max_row_vectors<T, N, true>(p) <= max_short_vectors) {
    launch_softmax_short<T, N, true>(p, stream);
    return;
  }
  if (alignment != Alignment::kElements && device.code.architecture >= 90) {
    const bool launched = p.grad_y.data == nullptr
                              ? launch_smem<T, SoftmaxForward<T>>(op, p, device, stream)
                              : launch_smem<T, SoftmaxBackward<T>>(op, p, device, stream);
    if (launched) return;
  }
  if (alignment == Alignment::kVectors) {
    launch_softmax_long<T, N>(p, stream);
  } else if (p.extent.columns <= kMaxShortVectors) {
    launch_softmax_short<T, 1, false>(p, stream);
  } else {
    launch_softmax_long<T, 1>(p, stream);
  }
}

// Without grad_y runs the forward; with grad_y the backward, where x is y.
Tensor run(const char* op, const char* name, const Tensor& x, const std::optional<Tensor>& grad_y) {
  check_arguments(op, {{name, x}, {"grad_y", grad_y}});
  require_cuda_dtype(op, name, x);
  const OpGuard guard(op, x.get_device_index());
  Tensor out = new_like(x);
  if (x.numel() == 0) return out;
  const RowInput x_rows = row_input(x, true);
  std::optional<RowInput> grad_rows;
  if (grad_y) grad_rows = row_input(*grad_y, true);
  RowOutput out_rows = row_output(out, true);
  Softmax p{};
  p.x = part(x_rows), p.out = part(out_rows);
  if (grad_rows) p.grad_y = part(*grad_rows);
  p.extent = rows_and_columns(x, x.size(-1));
  const DeviceAttributes& device = device_attributes(x.get_device_index());
  dispatch_dtype(x.scalar_type(),
                 [&](auto tag) { launch<typename decltype(tag)::type>(op, p, device, current_stream(x)); });
  check_launch(op);
  out_rows.finish();
  return out;
}

Tensor softmax(const Tensor& x) {
  return run("softmax", "x", x, std::nullopt);
}

Tensor softmax_backward(const Tensor& grad_y, const Tensor& y) {
  return run("softmax_backward", "y", y, grad_y);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
}

}  // namespace liger
