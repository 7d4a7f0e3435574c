// SPDX-License-Identifier: BSD-3-Clause
#include "rope/rope.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "host/launch/dispatch.h"
#include "host/torch.h"
#include "rope/host.h"

namespace liger {
namespace {

// q_out and k_out may be q and k: a thread reads all of its entries before it writes them, and no other
// thread accesses them.
void rotate(const char* op, const Tensor& q, const Tensor& k, Tensor cos, Tensor sin, const Tensor& q_out,
            const Tensor& k_out, bool interleaved, bool backward) {
  if (q.numel() == 0 && k.numel() == 0) return;

  Rope p{};
  p.q = rope_operand(q, q_out);
  p.k = rope_operand(k, k_out);
  p.batch = q.size(0);
  p.tokens = q.size(2);
  p.head_dim = static_cast<int>(q.size(3));
  p.rotary = static_cast<int>(cos.size(-1));
  p.backward = backward;
  const int64_t n = vector_of(q);
  const bool vectorised = prepare_tables(
      q, can_vectorise_heads(q, p.rotary) && is_aligned(p.q, q, n) && is_aligned(p.k, k, n), cos, sin);
  p.cos = rope_table(cos);
  p.sin = rope_table(sin);
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
