#include "rope/rope.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "host/dispatch.h"
#include "host/torch.h"

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

// The stride of a dimension of size 1 is not used and may have any value.
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

// q_out and k_out may be q and k: a thread reads all of its entries before it writes them, and no other
// thread accesses them.
void rotate(const char* op, const Tensor& q, const Tensor& k, Tensor cos, Tensor sin, const Tensor& q_out,
            const Tensor& k_out, bool interleaved, bool backward) {
  if (q.numel() == 0 && k.numel() == 0) return;

  Rope p{};
  p.q = operand(q, q_out);
  p.k = operand(k, k_out);
  p.batch = q.size(0);
  p.tokens = q.size(2);
  p.head_dim = static_cast<int>(q.size(3));
  p.rotary = static_cast<int>(cos.size(-1));
  p.backward = backward;
  const int64_t vector = 16 / static_cast<int64_t>(q.element_size());
  bool vectorised = p.rotary % (2 * vector) == 0 && p.head_dim % vector == 0 && aligned(p.q, q, vector) &&
                    aligned(p.k, k, vector);
  const auto tables_aligned = [&] { return aligned(table(cos), cos) && aligned(table(sin), sin); };
  // The kernels read cos and sin in float32, or as aligned vectors of the dtype of q.
  if (cos.scalar_type() != ScalarType::Float &&
      !(vectorised && cos.scalar_type() == q.scalar_type() && tables_aligned())) {
    cos = torch::stable::to(cos, ScalarType::Float);
    sin = torch::stable::to(sin, ScalarType::Float);
  }
  vectorised = vectorised && tables_aligned();
  p.cos = table(cos);
  p.sin = table(sin);
  const cudaStream_t stream = current_stream(q);
  dispatch_dtype(q.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!vectorised) {
      launch_rope<T, float, 1>(p, interleaved, stream);
    } else if (cos.scalar_type() == ScalarType::Float) {
      launch_rope<T, float, kVec<T>>(p, interleaved, stream);
    } else {
      launch_rope<T, T, kVec<T>>(p, interleaved, stream);
    }
  });
  check_launch(op);
}

void check(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
           bool interleaved) {
  check_rope(q, k, cos, sin, interleaved);
  require_cuda_dtype(op, "q", q);
  require_cuda_dtype(op, "cos", cos);
}

std::tuple<Tensor, Tensor> out_of_place(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos,
                                        const Tensor& sin, bool interleaved, bool backward) {
  check(op, q, k, cos, sin, interleaved);
  const OpGuard guard(op, q.get_device_index());
  Tensor q_out = new_like(q), k_out = new_like(k);
  rotate(op, q, k, cos, sin, q_out, k_out, interleaved, backward);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                bool interleaved) {
  return out_of_place("rope", q, k, cos, sin, interleaved, false);
}

std::tuple<Tensor, Tensor> rope_backward(const Tensor& grad_q_out, const Tensor& grad_k_out,
                                         const Tensor& cos, const Tensor& sin, bool interleaved) {
  return out_of_place("rope_backward", grad_q_out, grad_k_out, cos, sin, interleaved, true);
}

void rope_(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check("rope_", q, k, cos, sin, interleaved);
  check_written("rope_", {{"q", q}, {"k", k}}, {{"cos", cos}, {"sin", sin}});
  const OpGuard guard("rope_", q.get_device_index());
  rotate("rope_", q, k, cos, sin, q, k, interleaved, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_backward", TORCH_BOX(&rope_backward));
  m.impl("rope_", TORCH_BOX(&rope_));
}

}  // namespace liger
