#include "kernels/rope.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/dispatch.h"
#include "common/torch.h"

namespace liger {
namespace {

RopeStrides strides_of(const Tensor& x) {
  return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

RopeTensor operand(const Tensor& in, const Tensor& out) {
  return {in.const_data_ptr(), out.mutable_data_ptr(), strides_of(in), strides_of(out),
          static_cast<int>(in.size(1))};
}

RopeTable table(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  const bool batched = x.dim() == 3 && x.size(0) > 1;
  return {x.const_data_ptr(), batched ? x.stride(0) : 0, x.stride(last - 1), x.stride(last)};
}

TableType table_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return TableType::kHalf;
    case ScalarType::BFloat16:
      return TableType::kBFloat16;
    default:
      return TableType::kFloat;
  }
}

// A stride over a single entry is never taken and may be anything.
bool aligned(const void* data, const RopeStrides& strides, const Tensor& x, int64_t n) {
  return is_aligned16(data) && (x.size(0) == 1 || strides.batch % n == 0) &&
         (x.size(1) == 1 || strides.head % n == 0) && (x.size(2) == 1 || strides.token % n == 0) &&
         (x.size(3) == 1 || strides.entry == 1);
}
bool aligned(const RopeTensor& x, const Tensor& like, int64_t n) {
  return x.heads == 0 || (aligned(x.in, x.in_strides, like, n) && aligned(x.out, x.out_strides, like, n));
}
bool aligned(const RopeTable& x, const Tensor& like) {
  const int64_t n = 16 / static_cast<int64_t>(like.element_size());
  return is_aligned16(x.data) && x.batch % n == 0 && x.token % n == 0 && (like.size(-1) == 1 || x.entry == 1);
}

std::tuple<Tensor, Tensor> rotate(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos,
                                  const Tensor& sin, bool interleaved, bool backward) {
  check_rope(q, k, cos, sin, interleaved);
  require_cuda_dtype(op, "q", q);
  require_cuda_dtype(op, "cos", cos);
  const DeviceGuard guard(q.get_device_index());
  Tensor q_out = torch::stable::empty_like(q), k_out = torch::stable::empty_like(k);
  if (q.numel() == 0 && k.numel() == 0) return {q_out, k_out};

  Rope p{};
  p.q = operand(q, q_out);
  p.k = operand(k, k_out);
  p.cos = table(cos);
  p.sin = table(sin);
  p.table_type = table_type(cos.scalar_type());
  p.batch = q.size(0);
  p.tokens = q.size(2);
  p.head_dim = static_cast<int>(q.size(3));
  p.rotary = static_cast<int>(cos.size(-1));
  p.backward = backward;
  dispatch_dtype(q.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kN = kVec<T>;
    const bool vectorised = p.rotary % (2 * kN) == 0 && p.head_dim % kN == 0 && aligned(p.q, q, kN) &&
                            aligned(p.k, k, kN) && aligned(p.cos, cos) && aligned(p.sin, sin);
    vectorised ? launch_rope<T, kN>(p, interleaved, current_stream(q))
               : launch_rope<T, 1>(p, interleaved, current_stream(q));
  });
  check_launch(op);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                bool interleaved) {
  return rotate("rope", q, k, cos, sin, interleaved, false);
}

std::tuple<Tensor, Tensor> rope_backward(const Tensor& grad_q_out, const Tensor& grad_k_out,
                                         const Tensor& cos, const Tensor& sin, bool interleaved) {
  return rotate("rope_backward", grad_q_out, grad_k_out, cos, sin, interleaved, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_backward", TORCH_BOX(&rope_backward));
}

}  // namespace liger
