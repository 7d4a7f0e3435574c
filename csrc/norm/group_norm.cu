#include "norm/group_norm.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "host/dispatch.h"
#include "host/persistent_launch.h"
#include "host/torch.h"
#include "norm/group_norm_persistent.cuh"
#include "norm/group_norm_resident.cuh"
#include "norm/host.cuh"
#include "norm/resident_plan.h"

namespace liger {
namespace {

// The sizes of x (samples, channels, ...).
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

// Whether 16-byte accesses serve contiguous tensors at these places.
bool vectorised(const Sizes& sizes, const Tensor& x, std::initializer_list<const void*> places) {
  bool possible = sizes.spatial % static_cast<int64_t>(16 / x.element_size()) == 0;
  for (const void* place : places) possible = possible && is_aligned16(place);
  return possible;
}

// A result to be written by kernels that know contiguous tensors only.
RowOutput contiguous_output(const Tensor& result) {
  Tensor written = result.is_contiguous() ? result : torch::stable::new_empty(result, result.sizes());
  return {result, std::move(written), {}};
}

// Whether a forward kept in registers, of up to four vectors per thread, is as fast as one in shared memory.
bool short_row(int64_t vectors) {
  return vectors <= 4 * kForwardThreads<4>;
}

// False for rows that no cluster keeps. Two blocks on an SM, each with a row of its own or a part
// of one, are worth more than fewer blocks for a row.
template <typename T>
bool launch_persistent(const char* op, const GroupNorm& p, const DeviceAttributes& device,
                       cudaStream_t stream) {
  using Two = PersistentShape<256, 4, PartMoments, 1, 2>;
  using One = PersistentShape<512, 4, PartMoments, 1, 1>;
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    PersistentLaunch<GroupNorm> launch(op, p.hidden / kVec<T>, device);
    launch.template add_candidate<Shape>(group_norm_persistent_kernel<T, Shape>);
    return launch.run(p.rows, stream, p);
  };
  return launch(Two{}) || launch(One{});
}

// The same for the backward. Nothing where groups or their channels do not fit its kernel.
template <typename T>
PersistentLaunch<GroupNormBackward> choose_backward_launch(const char* op, const Sizes& sizes,
                                                           bool whole_vectors,
                                                           const DeviceAttributes& device) {
  PersistentLaunch<GroupNormBackward> launch(op, sizes.row() / kVec<T>, device);
  if (!whole_vectors || device.code.architecture < 90 || sizes.channels_per_group() > kMostChannels ||
      sizes.spatial / kVec<T> < kFewestOfChannel) {
    return launch;
  }
  using Two = GroupBackwardShape<256, 2>;
  using One = GroupBackwardShape<512, 1>;
  launch.template add_candidate<Two>(group_norm_backward_persistent_kernel<T, Two>, 1, 1);
  if (launch.blocks() == 0) {
    launch.template add_candidate<One>(group_norm_backward_persistent_kernel<T, One>);
  }
  return launch;
}

// Rows of whole vectors in shared memory, with the upstream gradient, or blocks == 0.
Residence residence_of(const Sizes& sizes, int vector, int unit, bool whole_vectors,
                       const DeviceAttributes& device) {
  if (!whole_vectors || unit == 0 || device.code.architecture < 90) return {};
  return plan_residence(sizes.row() / vector, unit, 2, sizeof(float2), sizeof(float2), device);
}

template <typename Kernel, typename... Arguments>
void launch_resident(const char* op, Kernel kernel, const Residence& r, int64_t rows,
                     const DeviceAttributes& device, cudaStream_t stream, const Arguments&... arguments) {
  if (r.stay) {
    require(
        launch_persistent_clusters(op, kernel, r, r.threads, r.shared, rows, device, stream, arguments...),
        op, ": no cluster of ", r.blocks, " blocks fits this device");
    return;
  }
  // Blocks that come and go overlap each other's phases by themselves.
  check_cuda(allow_shared_memory(reinterpret_cast<const void*>(kernel), Carveout::kShared), op);
  kernel<<<static_cast<unsigned>(rows), static_cast<unsigned>(r.threads), static_cast<size_t>(r.shared),
           stream>>>(arguments..., r);
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& x, int64_t num_groups,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  constexpr const char* op = "group_norm";
  check_group_norm(op, x, num_groups, weight, bias, eps);
  require_cuda_dtype(op, "x", x);
  const DeviceGuard guard(x.get_device_index());
  const Sizes sizes = sizes_of(x, num_groups);
  RowOutput y = contiguous_output(new_like(x));
  Tensor mean = empty({sizes.samples, num_groups}, ScalarType::Float, x);
  Tensor rstd = empty({sizes.samples, num_groups}, ScalarType::Float, x);
  if (x.numel() == 0) {
    // The mean of no values is NaN, and so is its rstd.
    if (rstd.numel() > 0) {
      torch::stable::fill_(mean, std::numeric_limits<double>::quiet_NaN());
      torch::stable::fill_(rstd, std::numeric_limits<double>::quiet_NaN());
    }
    return {y.result, mean, rstd};
  }

  const Tensor input = torch::stable::contiguous(x);
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
  const bool whole_vectors = vectorised(sizes, x, {p.x, p.y});
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t n = whole_vectors ? kVec<T> : 1;
    p.affine.vectors = ChannelDivide(sizes.spatial / n, p.hidden / n);
    const DeviceAttributes& device = device_attributes(x.get_device_index());
    const bool kept = whole_vectors && device.code.architecture >= 90 && !short_row(p.hidden / n);
    if (kept && launch_persistent<T>(op, p, device, current_stream(x))) return;
    const int chunks = moment_norm_chunks<T>(p.hidden, whole_vectors);
    const Tensor parts = empty({p.rows * chunks, 2}, ScalarType::Float, x);
    p.parts = static_cast<Moments*>(parts.mutable_data_ptr());
    launch_group_norm<T>(p, whole_vectors, chunks, current_stream(x));
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
  check_group_norm(op, x, num_groups, weight, bias);
  require_cuda_dtype(op, "x", x);
  require_like(op, "grad_y", grad_y, "x", x);
  const Sizes sizes = sizes_of(x, num_groups);
  require_row_statistic(op, "mean", mean, x, sizes.rows());
  require_row_statistic(op, "rstd", rstd, x, sizes.rows());
  need_grad_weight = need_grad_weight && weight;
  need_grad_bias = need_grad_bias && bias;
  const DeviceGuard guard(x.get_device_index());
  RowOutput grad_x = contiguous_output(need_grad_x ? new_like(x) : no_tensor(x.scalar_type(), x));
  Tensor grad_weight = parameter_grad(weight, need_grad_weight, x);
  Tensor grad_bias = parameter_grad(bias, need_grad_bias, x);
  const std::tuple<Tensor, Tensor, Tensor> grads{grad_x.result, grad_weight, grad_bias};
  if (x.numel() == 0) {
    if (need_grad_weight) torch::stable::zero_(grad_weight);
    if (need_grad_bias) torch::stable::zero_(grad_bias);
    return grads;
  }
  if (!need_grad_x && !need_grad_weight && !need_grad_bias) return grads;

  const Tensor input = torch::stable::contiguous(x), upstream = torch::stable::contiguous(grad_y);
  const std::optional<Tensor> scale = dense_parameter(weight);
  const Tensor row_mean = torch::stable::contiguous(mean), row_scale = torch::stable::contiguous(rstd);
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
  const bool whole_vectors = vectorised(sizes, x, {p.x, p.grad_y, need_grad_x ? p.grad_x : nullptr});
  const cudaStream_t stream = current_stream(x);
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ChannelUnits units = whole_vectors ? channel_units(sizes.spatial / kVec<T>) : ChannelUnits{};
    const DeviceAttributes& device = device_attributes(x.get_device_index());
    const bool keep = whole_vectors && need_grad_x;
    const PersistentLaunch<GroupNormBackward> kept = choose_backward_launch<T>(op, sizes, keep, device);
    const Residence residence =
        kept.blocks() > 0 ? Residence{} : residence_of(sizes, kVec<T>, units.vectors, keep, device);
    // The samples are the parts, or of each sample the blocks of a group.
    const int64_t blocks = std::max(kept.blocks(), residence.blocks);
    const int64_t parts = sizes.samples * std::max<int64_t>(blocks, 1);
    const Tensor sums = empty({parts, 2, sizes.channels}, ScalarType::Float, x);
    const Tensor gradients =
        empty({blocks > 0 ? 0 : sizes.rows(), sizeof(RowGradient) / sizeof(float)}, ScalarType::Float, x);
    p.sums = static_cast<float*>(sums.mutable_data_ptr());
    p.gradients = static_cast<RowGradient*>(gradients.mutable_data_ptr());
    if (blocks > 0) p.by_channel = ChannelDivide(sizes.spatial / kVec<T>, sizes.row() / kVec<T>);
    if (kept.blocks() > 0) {
      require(kept.run(sizes.rows(), stream, p), op, ": no cluster of ", kept.blocks(),
              " blocks fits this device");
    } else if (residence.blocks > 0) {
      launch_resident(op, group_norm_backward_resident_kernel<T>, residence, sizes.rows(), device, stream, p,
                      units);
    } else {
      launch_group_norm_backward<T>(p, whole_vectors, stream);
    }
    check_launch(op);
    // Both gradients are there, whichever was asked for.
    if (!need_grad_weight && !need_grad_bias) return;
    const Tensor of_weight = need_grad_weight ? grad_weight : new_like(grad_bias);
    const Tensor of_bias = need_grad_bias ? grad_bias : new_like(grad_weight);
    sum_parts<T>(p.sums, static_cast<int>(parts), of_weight, &of_bias, false, stream);
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
