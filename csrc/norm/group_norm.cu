// SPDX-License-Identifier: BSD-3-Clause
#include "norm/group_norm.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "host/launch/dispatch.h"
#include "host/launch/smem_row.h"
#include "host/torch.h"
#include "norm/group_norm_smem.cuh"
#include "norm/host.cuh"

namespace liger {
namespace {

// The sizes of x (samples, channels, spatial...). A row is one group of one sample.
struct Sizes {
  int64_t samples, channels, spatial, groups;
  int64_t rows() const { return samples * groups; }
  int64_t channels_per_group() const { return channels / groups; }
  int64_t row() const { return channels_per_group() * spatial; }
};

Sizes sizes_of(const Tensor& x, int64_t groups) {
  int64_t spatial = 1;
  for (int64_t d = 2; d < x.dim(); ++d) spatial *= x.size(d);
  return {x.size(0), x.size(1), spatial, groups};
}

// True if 16-byte accesses to contiguous tensors at these addresses are possible.
bool can_vectorise(const Sizes& sizes, const Tensor& x, std::initializer_list<const void*> pointers) {
  bool possible = sizes.spatial % static_cast<int64_t>(16 / x.element_size()) == 0;
  for (const void* pointer : pointers) possible = possible && is_aligned16(pointer);
  return possible;
}

// A result for kernels that can write only contiguous tensors.
RowOutput contiguous_output(const Tensor& result) {
  Tensor written = result.is_contiguous() ? result : torch::stable::new_empty(result, result.sizes());
  return {result, std::move(written), {}};
}

// True for rows of up to four vectors per thread: the register-resident forward is as fast as the one that
// stages rows in shared memory.
bool fits_in_registers(int64_t vectors) {
  return vectors <= 4 * kForwardThreads<4>;
}

// Launches the forward with rows in shared memory; returns false if no cluster size holds a row. Two blocks
// per SM are faster than a smaller cluster at one block per SM.
template <typename T>
bool launch_forward_smem(const char* op, const GroupNorm& p, const DeviceAttributes& device,
                         cudaStream_t stream) {
  SmemRowLaunch<GroupNorm> launch(op, p.hidden / kVec<T>, device);
  const auto add = [&](auto shape) {
    using Shape = decltype(shape);
    if (launch.blocks() == 0)
      launch.template add_candidate<Shape>(group_norm_smem_kernel<T, Shape>, Grid::kPersistent);
  };
  add(SmemRowShape<256, 4, PartialMoments, 1, 2>{});
  add(SmemRowShape<512, 4, PartialMoments, 1, 1>{});
  return launch.run(p.rows, stream, p);
}

// The launch of the backward with rows in shared memory, without a candidate (blocks() == 0) if no cluster
// size holds a row.
template <typename T>
SmemRowLaunch<GroupNormBackward> choose_backward_launch(const char* op, const Sizes& sizes, bool vectorised,
                                                        const DeviceAttributes& device) {
  const int64_t channel_vectors = std::max<int64_t>(sizes.spatial / kVec<T>, 1);
  SmemRowLaunch<GroupNormBackward> launch(op, sizes.row() / kVec<T>, device,
                                          backward_part_bytes(channel_vectors));
  if (!vectorised || device.code.architecture < 90) return launch;
  const auto add = [&](auto shape, int max_blocks) {
    using Shape = decltype(shape);
    if (launch.blocks() == 0)
      launch.template add_candidate<Shape>(group_norm_backward_smem_kernel<T, Shape>, Grid::kPersistent, 1,
                                           max_blocks);
  };
  add(GroupNormBackwardShape<256, 2>{}, 1);
  add(GroupNormBackwardShape<512, 1>{}, kPortableCluster);
  return launch;
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& x, int64_t num_groups,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  constexpr const char* op = "group_norm";
  check_arguments(op,
                  {{"x", x}, {"num_groups", num_groups}, {"weight", weight}, {"bias", bias}, {"eps", eps}});
  require_cuda_dtype(op, "x", x);
  const OpGuard guard(op, x.get_device_index());
  const Sizes sizes = sizes_of(x, num_groups);
  RowOutput y = contiguous_output(new_like(x));
  Tensor mean = empty({sizes.samples, num_groups}, ScalarType::Float, x);
  Tensor rstd = empty({sizes.samples, num_groups}, ScalarType::Float, x);
  if (x.numel() == 0) {
    fill_empty_row_statistic(mean);
    fill_empty_row_statistic(rstd);
    return {y.result, mean, rstd};
  }

  const Tensor input = as_contiguous(x);
  const std::optional<Tensor> scale = dense_parameter(weight), added = dense_parameter(bias);
  GroupNorm p{};
  p.x = input.const_data_ptr();
  p.y = y.data();
  p.mean = static_cast<float*>(mean.mutable_data_ptr());
  p.rstd = static_cast<float*>(rstd.mutable_data_ptr());
  p.x_rows = p.y_rows = {sizes.row()};
  p.rows = sizes.rows();
  p.hidden = sizes.row();
  p.eps = static_cast<float>(eps);
  p.inverse_hidden = 1.0f / static_cast<float>(p.hidden);
  p.affine.weight = data(scale);
  p.affine.bias = data(added);
  p.affine.is_float = float_parameters(weight, bias);
  p.affine.channels_per_group = sizes.channels_per_group();
  p.affine.groups = ChannelDivide(num_groups, p.rows);
  const bool vectorised = can_vectorise(sizes, x, {p.x, p.y});
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t n = vectorised ? kVec<T> : 1;
    p.affine.vectors = ChannelDivide(sizes.spatial / n, p.hidden / n);
    const DeviceAttributes& device = device_attributes(x.get_device_index());
    const bool in_smem = vectorised && device.code.architecture >= 90 && !fits_in_registers(p.hidden / n);
    if (in_smem && launch_forward_smem<T>(op, p, device, current_stream(x))) return;
    const int chunks = moment_norm_chunks<T>(p.hidden, vectorised);
    std::optional<Tensor> chunk_moments;
    if (chunks > 0) {
      chunk_moments = empty({p.rows * chunks, 2}, ScalarType::Float, x);
      p.chunk_moments = static_cast<Moments*>(chunk_moments->mutable_data_ptr());
    }
    launch_group_norm<T>(p, vectorised, chunks, current_stream(x));
  });
  check_launch(op);
  y.finish();
  return {y.result, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad_y, const Tensor& x,
                                                       int64_t num_groups,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias, const Tensor& mean,
                                                       const Tensor& rstd, bool need_grad_x,
                                                       bool need_grad_weight, bool need_grad_bias) {
  constexpr const char* op = "group_norm_backward";
  check_arguments(op, {{"x", x},
                       {"grad_y", grad_y},
                       {"num_groups", num_groups},
                       {"weight", weight},
                       {"bias", bias},
                       {"mean", mean},
                       {"rstd", rstd}});
  require_cuda_dtype(op, "x", x);
  const Sizes sizes = sizes_of(x, num_groups);
  need_grad_weight = need_grad_weight && weight;
  need_grad_bias = need_grad_bias && bias;
  const OpGuard guard(op, x.get_device_index());
  RowOutput grad_x = contiguous_output(need_grad_x ? new_like(x) : no_tensor(x.scalar_type(), x));
  Tensor grad_weight = parameter_grad(weight, need_grad_weight, x);
  Tensor grad_bias = parameter_grad(bias, need_grad_bias, x);
  const std::tuple<Tensor, Tensor, Tensor> grads{grad_x.result, grad_weight, grad_bias};
  if (x.numel() == 0 || !(need_grad_x || need_grad_weight || need_grad_bias)) return grads;

  const Tensor input = as_contiguous(x), upstream = as_contiguous(grad_y);
  const std::optional<Tensor> scale = dense_parameter(weight);
  const Tensor row_mean = as_contiguous(mean), row_scale = as_contiguous(rstd);
  GroupNormBackward p{};
  p.grad_y = upstream.const_data_ptr();
  p.x = input.const_data_ptr();
  p.weight = data(scale);
  p.mean = static_cast<const float*>(row_mean.const_data_ptr());
  p.rstd = static_cast<const float*>(row_scale.const_data_ptr());
  p.grad_x = need_grad_x ? grad_x.data() : nullptr;
  p.samples = sizes.samples;
  p.channels = sizes.channels;
  p.spatial = sizes.spatial;
  p.channels_per_group = sizes.channels_per_group();
  p.by_group = ChannelDivide(p.channels_per_group, p.samples * p.channels);
  p.by_sample = ChannelDivide(p.channels, p.samples * p.channels);
  p.float_weight = float_parameters(weight, std::nullopt);
  const bool vectorised = can_vectorise(sizes, x, {p.x, p.grad_y, need_grad_x ? p.grad_x : nullptr});
  const cudaStream_t stream = current_stream(x);
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const DeviceAttributes& device = device_attributes(x.get_device_index());
    const SmemRowLaunch<GroupNormBackward> smem =
        choose_backward_launch<T>(op, sizes, vectorised && need_grad_x, device);
    // There is a partial sum per sample, or per block of a group if rows are staged in shared memory.
    const int64_t blocks = smem.blocks(), partials = sizes.samples * std::max<int64_t>(blocks, 1);
    const Tensor sums = empty({partials, 2, sizes.channels}, ScalarType::Float, x);
    p.sums = static_cast<float*>(sums.mutable_data_ptr());
    if (blocks > 0) {
      p.by_channel = ChannelDivide(sizes.spatial / kVec<T>, sizes.row() / kVec<T>);
      smem.run(sizes.rows(), stream, p);
    } else {
      const Tensor gradients =
          empty({sizes.rows(), sizeof(RowGradient) / sizeof(float)}, ScalarType::Float, x);
      p.gradients = static_cast<RowGradient*>(gradients.mutable_data_ptr());
      launch_group_norm_backward<T>(p, vectorised, stream);
    }
    check_launch(op);
    if (!need_grad_weight && !need_grad_bias) return;
    // p.sums has both gradients even if only one is needed.
    const ParameterGrads<2> both{{p.sums, p.sums + sizes.channels}, 2 * sizes.channels, true};
    sum_partials<T>(both, static_cast<int>(partials), parameter_grads(grad_weight, grad_bias), sizes.channels,
                    false, stream);
  });
  check_launch(op);
  grad_x.finish();
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  m.impl("group_norm", TORCH_BOX(&group_norm));
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward));
}

}  // namespace liger
