// SPDX-License-Identifier: BSD-3-Clause
#include "rope/qk_norm_rope_backward.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "host/launch/dispatch.h"
#include "host/launch/shared_memory.h"
#include "host/torch.h"
#include "norm/host.cuh"
#include "rope/host.h"
#include "rope/qk_norm_rope_generic.cuh"

namespace liger {
namespace {

using OptionalTensor = std::optional<Tensor>;

HeadWeight head_weight(const OptionalTensor& weight) {
  return {data(weight), weight && weight->scalar_type() == ScalarType::Float};
}

// True if the vectorised kernels can use the strides of x. The stride of a dimension of size 1 does not
// count: it is multiplied by 0.
bool has_32bit_strides(const Tensor& x) {
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    if (x.size(i) > 1 && x.stride(i) >> 32 != 0) return false;
  }
  return true;
}

// Arguments of both forward and backward, except q and k.
struct Call {
  Tensor cos, sin;
  OptionalTensor q_weight, k_weight;
  QkNormRope p{};
  bool vectorised;  // before set_tables(): according to sizes and weights alone

  Call(const Tensor& q, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos,
       const Tensor& sin, double eps, double offset, const std::string& casting_mode)
      : cos(cos), sin(sin), q_weight(dense_parameter(q_weight)), k_weight(dense_parameter(k_weight)) {
    p.q_weight = head_weight(this->q_weight);
    p.k_weight = head_weight(this->k_weight);
    p.batch = q.size(0);
    p.tokens = q.size(2);
    p.head_dim = static_cast<int>(q.size(3));
    p.rotary = static_cast<int>(cos.size(-1));
    p.eps = static_cast<float>(eps);
    p.offset = static_cast<float>(offset);
    p.inverse_head_dim = static_cast<float>(1.0 / p.head_dim);
    p.round_rstd = casting_mode == "none";
    p.round_scaled = casting_mode != "gemma";
    vectorised = has_32bit_strides(cos) && has_32bit_strides(sin) && is_aligned16(p.q_weight.data) &&
                 is_aligned16(p.k_weight.data) && can_vectorise_heads(q, p.rotary) &&
                 items_per_head(p, vector_of(q)) <= 32;
  }

  // Completes `vectorised`, and converts the tables if the kernels cannot read them.
  void set_tables(const Tensor& q, bool tensors_vectorised) {
    vectorised = prepare_tables(q, vectorised && tensors_vectorised, cos, sin);
    p.cos = rope_table(cos);
    p.sin = rope_table(sin);
  }
};

NormedHeads normed_heads(const Tensor& x, const Tensor* grad_out, const Tensor* out) {
  NormedHeads heads{};
  heads.x = x.const_data_ptr();
  heads.x_strides = rope_strides(x);
  heads.heads = static_cast<int>(x.size(1));
  if (grad_out) {
    heads.grad_out = grad_out->const_data_ptr();
    heads.grad_out_strides = rope_strides(*grad_out);
  }
  if (out) {
    heads.out = out->mutable_data_ptr();
    heads.out_strides = rope_strides(*out);
  }
  return heads;
}

template <Rounding kRounding>
using RoundingTag = std::integral_constant<Rounding, kRounding>;

// Calls launch with the dtype of the tables, the pairs and the rounding as template arguments of the
// vectorised kernels.
template <typename T, typename Launch>
void dispatch_vectorised(const Call& call, bool interleaved, const Launch& launch) {
  const QkNormRope& p = call.p;
  const auto is_half = [](const HeadWeight& weight) { return weight.data != nullptr && !weight.is_float; };
  const bool half_weights = is_half(p.q_weight) && is_half(p.k_weight);
  const auto with_rounding = [&](auto table, auto pairs) {
    if constexpr (sizeof(T) == 2) {
      if (half_weights && !p.round_scaled) {
        launch(table, pairs, RoundingTag<Rounding::kOutputHalf>{});
        return;
      }
      if (half_weights && p.offset == 0.0f) {
        launch(table, pairs, RoundingTag<Rounding::kScaledHalf>{});
        return;
      }
    }
    if (p.round_scaled) {
      launch(table, pairs, RoundingTag<Rounding::kScaled>{});
    } else {
      launch(table, pairs, RoundingTag<Rounding::kOutput>{});
    }
  };
  const auto with_pairs = [&](auto table) {
    interleaved ? with_rounding(table, std::true_type{}) : with_rounding(table, std::false_type{});
  };
  call.cos.scalar_type() == ScalarType::Float ? with_pairs(TypeTag<float>{}) : with_pairs(TypeTag<T>{});
}

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                        const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
                                        double eps, double offset, const std::string& casting_mode,
                                        bool interleaved) {
  constexpr const char* op = "qk_norm_rope";
  check_qk_norm_rope(op, q, k, q_weight, k_weight, cos, sin, casting_mode, eps, offset);
  require_cuda_dtype(op, "q", q);
  const OpGuard guard(op, q.get_device_index());
  Tensor q_out = new_like(q), k_out = new_like(k);
  if (q.numel() == 0 && k.numel() == 0) return {q_out, k_out};

  Call call(q, q_weight, k_weight, cos, sin, eps, offset, casting_mode);
  QkNormRope& p = call.p;
  p.q = rope_operand(q, q_out);
  p.k = rope_operand(k, k_out);
  const int64_t n = vector_of(q);
  bool vectorised = is_aligned(p.q, q, n) && is_aligned(p.k, k, n);
  vectorised = vectorised && has_32bit_strides(q) && has_32bit_strides(k) && has_32bit_strides(q_out) &&
               has_32bit_strides(k_out);
  call.set_tables(q, vectorised);
  const cudaStream_t stream = current_stream(q);
  dispatch_dtype(q.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.vectorised) {
      dispatch_vectorised<T>(call, interleaved, [&](auto table, auto pairs, auto rounding) {
        const auto kernel =
            qk_norm_rope_kernel<T, typename decltype(table)::type, pairs.value, rounding.value>;
        launch_in_parts(p, HeadChunks(p, kVec<T>), [&](const auto& part, const auto& items, dim3 grid) {
          kernel<<<grid, kRopeThreads, 0, stream>>>(part, items);
        });
      });
      return;
    }
    const auto kernel =
        interleaved ? qk_norm_rope_generic_kernel<T, true> : qk_norm_rope_generic_kernel<T, false>;
    for (const GenericHeads& heads : {GenericHeads{normed_heads(q, nullptr, &q_out), p.q_weight},
                                      GenericHeads{normed_heads(k, nullptr, &k_out), p.k_weight}}) {
      const int64_t rows = p.batch * p.tokens * heads.tensor.heads;
      const int64_t blocks = (rows + kGenericWarps - 1) / kGenericWarps;
      if (rows > 0) kernel<<<static_cast<unsigned>(blocks), kGenericThreads, 0, stream>>>(p, heads);
    }
  });
  check_launch(op);
  return {q_out, k_out};
}

// The blocks of the backward, divided between q and k in proportion to their heads.
template <typename T>
QkBackwardPlan plan_backward(const QkNormRopeBackward& p, int sm_count, unsigned (&blocks)[2]) {
  QkBackwardPlan plan{};
  plan.per_head = items_per_head(p, kVec<T>);
  plan.lanes_log2 = lanes_of(plan.per_head);
  const int64_t groups = kQkThreads >> plan.lanes_log2;
  int64_t useful[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t chunks = (p.tensors[i].heads + kRopeHeads - 1) / kRopeHeads;
    const int64_t total = p.batch * p.tokens * chunks;
    plan.rows[i] = {FastDivide(static_cast<uint32_t>(std::max<int64_t>(chunks, 1))),
                    FastDivide(static_cast<uint32_t>(p.tokens)), static_cast<uint32_t>(total)};
    useful[i] = (total + groups - 1) / groups;
  }
  const int64_t all = kQkBlocksPerSm * int64_t{sm_count}, sum = useful[0] + useful[1];
  for (int i = 0; i < 2; ++i) {
    const int64_t share = std::max<int64_t>(1, (all * useful[i] + sum / 2) / sum);
    blocks[i] = static_cast<unsigned>(std::min(useful[i], share));
  }
  plan.q_blocks = blocks[0];
  return plan;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> qk_norm_rope_backward(
    const Tensor& grad_q_out, const Tensor& grad_k_out, const Tensor& q, const Tensor& k,
    const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
    double eps, double offset, const std::string& casting_mode, bool interleaved, bool need_grad_q,
    bool need_grad_k, bool need_grad_q_weight, bool need_grad_k_weight) {
  constexpr const char* op = "qk_norm_rope_backward";
  check_qk_norm_rope(op, q, k, q_weight, k_weight, cos, sin, casting_mode, eps, offset);
  require_cuda_dtype(op, "q", q);
  require_like(op, "grad_q_out", grad_q_out, "q", q);
  require_like(op, "grad_k_out", grad_k_out, "k", k);
  const bool need_weight[2] = {need_grad_q_weight && q_weight, need_grad_k_weight && k_weight};
  const OpGuard guard(op, q.get_device_index());
  Tensor grad_q = need_grad_q ? new_like(q) : no_tensor(q.scalar_type(), q);
  Tensor grad_k = need_grad_k ? new_like(k) : no_tensor(k.scalar_type(), k);
  Tensor grad_weights[2] = {parameter_grad(q_weight, need_weight[0], q),
                            parameter_grad(k_weight, need_weight[1], k)};
  const auto results = [&] { return std::make_tuple(grad_q, grad_k, grad_weights[0], grad_weights[1]); };
  const Tensor* const inputs[2] = {&q, &k};
  if (q.numel() == 0 && k.numel() == 0) return results();

  Call call(q, q_weight, k_weight, cos, sin, eps, offset, casting_mode);
  QkNormRopeBackward p{call.p, {}};
  p.tensors[0] = normed_heads(q, &grad_q_out, need_grad_q ? &grad_q : nullptr);
  p.tensors[1] = normed_heads(k, &grad_k_out, need_grad_k ? &grad_k : nullptr);
  // A tensor without a needed gradient has no work.
  if (!need_grad_q && !need_weight[0]) p.tensors[0].heads = 0;
  if (!need_grad_k && !need_weight[1]) p.tensors[1].heads = 0;
  if (p.tensors[0].heads == 0 && p.tensors[1].heads == 0) return results();
  const int64_t n = vector_of(q);
  const Tensor* const upstream[2] = {&grad_q_out, &grad_k_out};
  bool vectorised = true;
  for (int i = 0; i < 2; ++i) {
    const NormedHeads& heads = p.tensors[i];
    if (heads.heads == 0) continue;
    const int64_t chunks = p.batch * p.tokens * ((heads.heads + kRopeHeads - 1) / kRopeHeads);
    vectorised = vectorised && chunks < (int64_t{1} << 31) - (1 << 24) && has_32bit_strides(*inputs[i]) &&
                 has_32bit_strides(*upstream[i]) && is_aligned(heads.x, heads.x_strides, *inputs[i], n) &&
                 is_aligned(heads.grad_out, heads.grad_out_strides, *inputs[i], n) &&
                 (!heads.out || is_aligned(heads.out, heads.out_strides, *inputs[i], n));
  }
  call.set_tables(q, vectorised);
  p.cos = call.p.cos;
  p.sin = call.p.sin;

  const DeviceAttributes& device = device_attributes(q.get_device_index());
  const cudaStream_t stream = current_stream(q);
  dispatch_dtype(q.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    unsigned blocks[2];
    QkBackwardPlan plan{};
    if (call.vectorised) {
      plan = plan_backward<T>(p, device.sm_count, blocks);
    } else {
      for (int i = 0; i < 2; ++i) {
        const int64_t rows = p.batch * p.tokens * p.tensors[i].heads;
        blocks[i] = static_cast<unsigned>(
            std::min<int64_t>((rows + kGenericWarps - 1) / kGenericWarps, 8 * int64_t{device.sm_count}));
      }
    }
    const int partials_per_block = call.vectorised ? 1 : kGenericWarps;
    Tensor partials[2] = {grad_weights[0], grad_weights[1]};
    for (int i = 0; i < 2; ++i) {
      if (!need_weight[i] || p.tensors[i].heads == 0) continue;
      partials[i] = empty({int64_t{blocks[i]} * partials_per_block, p.head_dim}, ScalarType::Float, q);
      p.tensors[i].partial = static_cast<float*>(partials[i].mutable_data_ptr());
    }
    if (call.vectorised) {
      dispatch_vectorised<T>(call, interleaved, [&](auto table, auto pairs, auto rounding) {
        const auto kernel = qk_norm_rope_backward_kernel < T, typename decltype(table)::type, pairs.value,
                   rounding.value == Rounding::kScaled || rounding.value == Rounding::kScaledHalf > ;
        allow_shared_memory(reinterpret_cast<const void*>(kernel), Carveout::kByDriver);
        kernel<<<blocks[0] + blocks[1], kQkThreads, kQkShared, stream>>>(p, plan);
      });
    } else {
      const auto kernel = interleaved ? qk_norm_rope_backward_generic_kernel<T, true>
                                      : qk_norm_rope_backward_generic_kernel<T, false>;
      const HeadWeight weights[2] = {p.q_weight, p.k_weight};
      for (int i = 0; i < 2; ++i) {
        if (blocks[i] > 0)
          kernel<<<blocks[i], kGenericThreads, 0, stream>>>(p, GenericHeads{p.tensors[i], weights[i]});
      }
    }
    check_launch(op);
    const bool overlap = device.code.architecture >= 90;
    const int count[2] = {static_cast<int>(blocks[0]) * partials_per_block,
                          static_cast<int>(blocks[1]) * partials_per_block};
    const float* const partial[2] = {p.tensors[0].partial, p.tensors[1].partial};
    const bool equal_dtypes = grad_weights[0].scalar_type() == grad_weights[1].scalar_type();
    if (partial[0] && partial[1] && equal_dtypes) {
      const auto launch = [&](auto weight_tag) {
        using W = typename decltype(weight_tag)::type;
        const PartialSums<W, 2> sums{{partial[0], partial[1]},
                                     {count[0], count[1]},
                                     p.head_dim,
                                     {static_cast<W*>(grad_weights[0].mutable_data_ptr()),
                                      static_cast<W*>(grad_weights[1].mutable_data_ptr())}};
        launch_sum_partials(sums, 2, p.head_dim, overlap, stream);
      };
      grad_weights[0].scalar_type() == ScalarType::Float ? launch(TypeTag<float>{}) : launch(TypeTag<T>{});
      return;
    }
    for (int i = 0; i < 2; ++i) {
      if (!partial[i]) continue;
      const ParameterGrads<1> sums{{p.tensors[i].partial}, p.head_dim, true};
      sum_partials<T>(sums, count[i], parameter_grads(grad_weights[i]), p.head_dim, overlap, stream);
    }
  });
  check_launch(op);
  return results();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope));
  m.impl("qk_norm_rope_backward", TORCH_BOX(&qk_norm_rope_backward));
}

}  // namespace liger
