// SPDX-License-Identifier: BSD-3-Clause

// LayerNorm backward: grad_x, grad_weight and grad_bias in one pass over x and grad_y.
//
// With xhat = (x - mean) * rstd, a = mean(grad_y * w) and c = mean(grad_y * w * xhat):
// grad_x = rstd * (grad_y * w - a - xhat * c), grad_weight = sum over rows of grad_y * xhat, and grad_bias =
// sum over rows of grad_y. xhat is never materialised: it is recomputed from x, mean and rstd.
//
// The RMSNorm backward (norm/rms_norm_backward.cuh) has the same grid, shared-memory ring, split over rows,
// sums of a single block and alignment. One reduction per row computes both sums.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/backward_plan.cuh"
#include "norm/parameters.cuh"
#include "norm/row_ring.cuh"

namespace liger {

template <typename RowOffsets>
struct LayerNormBackwardParams {
  const void *grad_y, *x, *weight;  // weight may be null
  const float *mean, *rstd;
  void* grad_x;             // null: not needed
  ParameterGrads<2> grads;  // of the weight and the bias
  RowOffsets grad_y_rows, x_rows, grad_x_rows;
  int64_t rows, hidden;
  bool float_weight;
};
using LayerNormBackward = LayerNormBackwardParams<Rows>;

// As in the forward, the fast path has fewer kernel parameters, and its flags are compile-time constants.
using FastLayerNormBackward = LayerNormBackwardParams<OneStride>;

inline bool has_fast_path(const LayerNormBackward& p) {
  return p.weight && !p.float_weight && !(p.grad_y_rows.nested || p.x_rows.nested || p.grad_x_rows.nested);
}
inline FastLayerNormBackward fast_params(const LayerNormBackward& p) {
  return {p.grad_y,
          p.x,
          p.weight,
          p.mean,
          p.rstd,
          p.grad_x,
          p.grads,
          {p.grad_y_rows.stride},
          {p.x_rows.stride},
          {p.grad_x_rows.stride},
          p.rows,
          p.hidden,
          p.float_weight};
}

// The gradient of LayerNorm and GroupNorm for one row: grad_x = rstd * (grad_y * w - base) - shift * (x -
// mean) with shift = c * rstd^2 and base = a. It is exactly 0 for a row of one element, and for a row whose
// elements are all equal and have equal grad_y * w.
struct alignas(16) RowGradient {
  float mean, rstd, shift, base;

  // From sum(grad_y * w) and sum(grad_y * w * xhat).
  __device__ __forceinline__ RowGradient(float mean, float rstd, float sum, float dot, float inverse_count)
      : mean(mean), rstd(rstd), shift(dot * inverse_count * rstd * rstd), base(sum * inverse_count) {}

  // kExactProducts: both factors of grad_y * w have a half type, so the product is exact in float.
  template <bool kExactProducts = false, typename T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N>& x, const Vec<T, N>& g,
                                                  const float (&w)[N]) const {
    float xs[N], gs[N];
    unpack(x, xs);
    unpack(g, gs);
    // The rounding error of shift * mean is far below the rounding of x to a half type.
    const float constant = shift * mean;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float centred =
          kExactProducts ? fmaf(gs[i], w[i], -base) : __fsub_rn(__fmul_rn(gs[i], w[i]), base);
      const float projected = sizeof(T) == 2 ? fmaf(-shift, xs[i], constant) : -shift * (xs[i] - mean);
      gs[i] = fmaf(rstd, centred, projected);
    }
    return pack<T, N>(gs);
  }
};

// The weight of a thread's V vectors: as floats in registers if they fit (kInRegisters), else unconverted in
// this thread's slots of shared memory (kInShared), else loaded from global memory at each use.
template <typename T, int N, int V, bool kFastPath>
struct WeightFragment {
  static constexpr bool kInRegisters = V * N <= 16, kInShared = kFastPath && !kInRegisters;
  static constexpr int kSharedPerThread = kInShared ? V * sizeof(Vec<T, N>) : 0;
  Vec<T, N> raw[kFastPath && kInRegisters ? V : 1];
  float w[kInRegisters ? V : 1][N];
  Vec<T, N>* slots;

  __device__ __forceinline__ explicit WeightFragment(void* shared)
      : slots(static_cast<Vec<T, N>*>(shared) + threadIdx.x) {}

  template <typename P>
  __device__ __forceinline__ void prefetch(const P& p, const ThreadCoord& coord) {
    if constexpr (kFastPath) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = coord.lane + j * coord.lanes;
        if (vector >= coord.vectors) continue;
        const T* const from = static_cast<const T*>(p.weight) + vector * N;
        if constexpr (kInShared) {
          copy_async(&slots[j * blockDim.x], from);  // committed with the first rows
        } else {
          raw[j] = load<T, N>(from);
        }
      }
    }
  }

  template <typename P>
  __device__ __forceinline__ void convert(const P& p, const ThreadCoord& coord) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = coord.lane + j * coord.lanes;
        if (vector >= coord.vectors) continue;
        if constexpr (kFastPath) {
          unpack(raw[j], w[j]);
        } else {
          load_parameter<T, N>(p.weight, p.float_weight, 0.0f, 1.0f, int64_t{vector} * N, w[j]);
        }
      }
    }
  }

  template <typename P>
  __device__ __forceinline__ void get(const P& p, const ThreadCoord& coord, int j, float (&out)[N]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = w[j][i];
    } else if constexpr (kInShared) {
      unpack(slots[j * blockDim.x], out);
    } else {
      const int64_t column = int64_t{coord.lane + j * coord.lanes} * N;
      load_parameter<T, N>(p.weight, p.float_weight, 0.0f, 1.0f, column, out);
    }
  }
};

// Block size. At four vectors the sums of two parameter gradients take up to half of the registers per thread
// of a block of 512; only the kernel that has its weight in shared memory can afford that.
template <typename T, int V, bool kFastPath>
inline constexpr int kLayerNormThreads = V == 4 && !(kFastPath && sizeof(T) == 2) ? 384 : kMaxRowThreads;

// kFastPath: at compile time, one stride per tensor and a weight of the dtype of x.
template <typename T, int N, int V, int R, bool kFastPath>
__global__ void __launch_bounds__(kLayerNormThreads<T, V, kFastPath>, 1) layer_norm_backward_kernel(
    const std::conditional_t<kFastPath, FastLayerNormBackward, LayerNormBackward> p, int lanes, int stages) {
  using Vector = Vec<T, N>;
  constexpr int kStreams = 2;
  // True: a row is copied from the ring to registers, so that its slots are refilled before the reduction.
  // False (wide rows): it is read from the ring twice.
  constexpr bool kInRegisters = V * N <= 16;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[RowSum<2 * R>::kScratch];
  const ThreadCoord coord(lanes, static_cast<int>(p.hidden / N));
  const RowRing<T, N, V, R, kStreams> ring(shared);
  const int64_t step = int64_t{gridDim.x} * coord.groups * R;
  const auto load_stage = [&](int stage, int64_t first) {
    ring.load_stage(coord, stage, first, p.rows, [&](int stream, int64_t row) {
      return stream == 0 ? static_cast<const T*>(p.x) + p.x_rows.offset(row)
                         : static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row);
    });
  };

  int64_t first = int64_t{blockIdx.x} * coord.groups * R + coord.group;
  RowScalars<R> means(p.mean), rstds(p.rstd);
  const int lookahead = rstds.lookahead(coord);
  means.prefetch(coord, first, step, p.rows);
  rstds.prefetch(coord, first, step, p.rows);
  // The loads of the weight are issued before the loads of the rows.
  WeightFragment<T, N, V, kFastPath> weight(ring.end(stages));
  weight.prefetch(p, coord);
  for (int stage = 0; stage < stages; ++stage) load_stage(stage, first + stage * step);
  weight.convert(p, coord);
  float weight_grad[V][N], bias_grad[V][N];
#pragma unroll
  for (int j = 0; j < V; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) weight_grad[j][i] = bias_grad[j][i] = 0.0f;
  }
  RowSum<2 * R> row_sum(scratch, lanes);
  const bool need_grad_x = p.grad_x != nullptr;
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);

  int stage = 0;
  // The number of steps is uniform over the block, also for groups without a row left: row_sum synchronises
  // their threads.
  for (int i = 0; first - coord.group < p.rows; first += step, i = i + 1 == lookahead ? 0 : i + 1) {
    if (i == 0) {
      means.advance(coord, first, step, p.rows);
      rstds.advance(coord, first, step, p.rows);
    }
    wait_async(stages - 1);
    float mean[R], rstd[R], sums[2 * R];
    Vector cached[kInRegisters ? R : 1][kStreams][kInRegisters ? V : 1];
    const auto value = [&](int r, int stream, int j) -> const Vector& {
      if constexpr (kInRegisters) return cached[r][stream][j];
      return ring.slot(stage, r, stream, j);
    };
#pragma unroll
    for (int r = 0; r < R; ++r) {
      mean[r] = means.at(coord, r, i);
      rstd[r] = rstds.at(coord, r, i);
      // Several short dependency chains instead of a long one, if there are registers for them.
      constexpr int kChains = kInRegisters && N >= 4 ? 2 : 1;
      float plain[kChains] = {}, dots[kChains] = {};
      const bool active = first + r * coord.groups < p.rows;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (!active || coord.lane + j * lanes >= coord.vectors) continue;
        if constexpr (kInRegisters) {
#pragma unroll
          for (int stream = 0; stream < kStreams; ++stream)
            cached[r][stream][j] = ring.slot(stage, r, stream, j);
        }
        float xs[N], gs[N], w[N];
        unpack(value(r, 0, j), xs);
        unpack(value(r, 1, j), gs);
        weight.get(p, coord, j, w);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          // The dot product is multiplied by rstd once, after the sum: one operation less, and as exact.
          const float product = gs[k] * (xs[k] - mean[r]);
          plain[k % kChains] = fmaf(gs[k], w[k], plain[k % kChains]);
          dots[k % kChains] = fmaf(product, w[k], dots[k % kChains]);
          weight_grad[j][k] = fmaf(product, rstd[r], weight_grad[j][k]);
          bias_grad[j][k] += gs[k];
        }
      }
      sums[2 * r] = kChains == 2 ? plain[0] + plain[kChains - 1] : plain[0];
      sums[2 * r + 1] = (kChains == 2 ? dots[0] + dots[kChains - 1] : dots[0]) * rstd[r];
    }
    if constexpr (kInRegisters) load_stage(stage, first + stages * step);
    if (need_grad_x) {
      row_sum(sums);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t row = first + r * coord.groups;
        if (row >= p.rows) break;
        const RowGradient gradient(mean[r], rstd[r], sums[2 * r], sums[2 * r + 1], inverse_hidden);
        T* grad_x = static_cast<T*>(p.grad_x) + p.grad_x_rows.offset(row);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int vector = coord.lane + j * lanes;
          if (vector >= coord.vectors) continue;
          float w[N];
          weight.get(p, coord, j, w);
          constexpr bool kExactProducts = kFastPath && sizeof(T) == 2;
          store(grad_x + vector * N,
                gradient.template operator()<kExactProducts>(value(r, 0, j), value(r, 1, j), w));
        }
      }
    }
    if constexpr (!kInRegisters) load_stage(stage, first + stages * step);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const int64_t offset = int64_t{blockIdx.x} * p.grads.stride;
  store_block_sum<T>(coord, weight_grad, shared, p.hidden, p.grads, 0, offset);
  store_block_sum<T>(coord, bias_grad, shared, p.hidden, p.grads, 1, offset);
}

// grad_x of one row per block that does not fit in its registers: the row is read twice, the second time
// mostly from L2.
template <typename T, int N>
__global__ void __launch_bounds__(kMaxRowThreads) layer_norm_backward_wide_kernel(const LayerNormBackward p) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + p.x_rows.offset(row);
  const T* g = static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row);
  T* grad_x = static_cast<T*>(p.grad_x) + p.grad_x_rows.offset(row);
  const int64_t begin = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  const float mean = p.mean[row], rstd = p.rstd[row];
  float sum = 0.0f, dot = 0.0f;
#pragma unroll 2
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N], xs[N], gs[N];
    load_parameter<T, N>(p.weight, p.float_weight, 0.0f, 1.0f, column, w);
    unpack(load<T, N>(x + column), xs);
    unpack(load<T, N>(g + column), gs);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float weighted = gs[i] * w[i];
      sum += weighted;
      dot = fmaf(weighted, (xs[i] - mean) * rstd, dot);
    }
  }
  sum = block_reduce<Sum>(sum, scratch);
  dot = block_reduce<Sum>(dot, scratch);
  const RowGradient gradient(mean, rstd, sum, dot, 1.0f / static_cast<float>(p.hidden));
#pragma unroll 2
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N];
    load_parameter<T, N>(p.weight, p.float_weight, 0.0f, 1.0f, column, w);
    store_whole(grad_x + column, gradient(load<T, N>(x + column), load<T, N>(g + column), w));
  }
}

// Partial sums of the parameter gradients for wide rows. Grid: (columns / (256 * N), partial sums): a thread
// sums N columns of every gridDim.y-th row.
template <typename T, int N>
__global__ void __launch_bounds__(256) layer_norm_parameter_grads_kernel(const LayerNormBackward p) {
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (column >= p.hidden) return;
  float weight_sums[N] = {}, bias_sums[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float xs[N], gs[N];
    unpack(load<T, N>(static_cast<const T*>(p.x) + p.x_rows.offset(row) + column), xs);
    unpack(load<T, N>(static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row) + column), gs);
    const float mean = p.mean[row], rstd = p.rstd[row];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      weight_sums[i] = fmaf(gs[i], (xs[i] - mean) * rstd, weight_sums[i]);
      bias_sums[i] += gs[i];
    }
  }
  const int64_t offset = blockIdx.y * p.grads.stride + column;
  if (p.grads.data[0]) p.grads.template store<T>(0, offset, weight_sums);
  if (p.grads.data[1]) p.grads.template store<T>(1, offset, bias_sums);
}

template <typename T, int N, int V, int R>
void launch_layer_norm_backward_tile(const LayerNormBackward& p, const RowPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto kernel, const auto& arguments, int shared) {
    allow_shared(kernel, shared);
    kernel<<<plan.blocks, plan.threads, shared, stream>>>(arguments, plan.lanes, plan.stages);
  };
  if constexpr (N > 1) {
    if (has_fast_path(p)) {
      const int weight_sums = plan.threads * WeightFragment<T, N, V, true>::kSharedPerThread;
      launch(layer_norm_backward_kernel<T, N, V, R, true>, fast_params(p), plan.shared + weight_sums);
      return;
    }
  }
  launch(layer_norm_backward_kernel<T, N, V, R, false>, p, plan.shared);
}

template <typename T, int N>
void launch_layer_norm_backward_wide(const LayerNormBackward& p, int partials, cudaStream_t stream) {
  if (p.grad_x)
    layer_norm_backward_wide_kernel<T, N><<<static_cast<unsigned>(p.rows), kMaxRowThreads, 0, stream>>>(p);
  if (p.grads.data[0] || p.grads.data[1]) {
    const dim3 grid(static_cast<unsigned>((p.hidden + 256 * N - 1) / (256 * N)), partials);
    layer_norm_parameter_grads_kernel<T, N><<<grid, 256, 0, stream>>>(p);
  }
}

// vectorised: every row of every tensor, and the weight, is aligned to 16 bytes, and hidden is a multiple of
// kVec<T>.
template <typename T>
void launch_layer_norm_backward(const LayerNormBackward& p, const BackwardPlan& plan, bool vectorised,
                                cudaStream_t stream) {
  if (plan.rows.width == 0) {
    vectorised ? launch_layer_norm_backward_wide<T, kVec<T>>(p, plan.partials, stream)
               : launch_layer_norm_backward_wide<T, 1>(p, plan.partials, stream);
  } else if (!vectorised) {
    launch_layer_norm_backward_tile<T, 1, 8, 1>(p, plan.rows, stream);
  } else if (plan.rows.width == 1) {
    launch_layer_norm_backward_tile<T, kVec<T>, 1, 2>(p, plan.rows, stream);
  } else if (plan.rows.width == 2) {
    launch_layer_norm_backward_tile<T, kVec<T>, 2, 1>(p, plan.rows, stream);
  } else {
    launch_layer_norm_backward_tile<T, kVec<T>, 4, 1>(p, plan.rows, stream);
  }
}

}  // namespace liger
