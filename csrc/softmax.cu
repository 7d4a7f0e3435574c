#include "kernels/softmax.cuh"

#include <torch/csrc/stable/library.h>

#include "common/dispatch.h"
#include "common/residence.h"
#include "elementwise.h"
#include "kernels/softmax_resident.cuh"

namespace liger {
namespace {

// How the rows of all operands lie.
enum class Alignment { kWhole, kAlike, kAny };  // whole vectors, those but for both ends, single elements

Alignment alignment_of(const Softmax& p, int64_t element_size) {
  const int64_t vector = 16 / element_size;
  Extent extent = p.extent;
  if (use_vectors(extent, element_size, {p.x, p.grad_y, as_input(p.out)})) return Alignment::kWhole;
  for (const InputRows& other : {p.grad_y, as_input(p.out)}) {
    if (other.data == nullptr) continue;
    const intptr_t apart = reinterpret_cast<intptr_t>(p.x.data) - reinterpret_cast<intptr_t>(other.data);
    if (apart % 16 != 0 || (p.extent.rows > 1 && (p.x.stride - other.stride) % vector != 0))
      return Alignment::kAny;
  }
  return Alignment::kAlike;
}

template <typename T>
void launch(const char* op, const Softmax& p, const DeviceAttributes& device, cudaStream_t stream) {
  constexpr int N = kVec<T>;
  constexpr int64_t kShort = kShortItems * kHeldThreads;
  const Alignment alignment = alignment_of(p, sizeof(T));
  if (alignment == Alignment::kWhole && touched_vectors<T, N, false>(p) <= kShort) {
    launch_softmax_short<T, N, false>(p, stream);
    return;
  }
  if (alignment == Alignment::kAlike && touched_vectors<T, N, true>(p) <= kShort) {
    launch_softmax_short<T, N, true>(p, stream);
    return;
  }
  if (alignment != Alignment::kAny && device.capability >= 90) {
    const bool backward = p.grad_y.data != nullptr;
    const Residence r =
        plan_residence(p.extent.columns / N, 1, backward ? 2 : 1, kSoftmaxOwnBytes, 0, device);
    if (r.blocks > 0) {
      launch_resident(op, backward ? softmax_backward_resident_kernel<T> : softmax_resident_kernel<T>, r,
                      p.extent.rows, kSoftmaxOwnBytes, device, stream, p);
      return;
    }
  }
  if (alignment == Alignment::kWhole) {
    launch_softmax_long<T, N>(p, stream);
  } else if (p.extent.columns <= kShort) {
    launch_softmax_short<T, 1, false>(p, stream);
  } else {
    launch_softmax_long<T, 1>(p, stream);
  }
}

// x is y in the backward.
Tensor run(const char* op, const char* name, const Tensor& x, const std::optional<Tensor>& grad_y) {
  check_rowwise(op, name, x, grad_y);
  require_cuda_dtype(op, name, x);
  const DeviceGuard guard(x.get_device_index());
  Tensor out = torch::stable::empty_like(x);
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
