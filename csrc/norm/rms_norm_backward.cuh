// RMSNorm backward: grad_x and grad_weight from one reading of x and grad_y.
//
// With w = offset + weight and c = mean(grad_y * w * x * rstd): grad_x = rstd * (grad_y * w - x * rstd * c),
// and grad_weight = sum over rows of grad_y * (x * rstd). Blocks are persistent and keep their part of
// grad_weight in float registers over all their rows; the parts meet in a second kernel in a fixed order, so
// that the bits never vary.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/backward_plan.cuh"
#include "norm/rms_norm.cuh"
#include "norm/row_ring.cuh"
#include "norm/sum_partials.cuh"

namespace liger {

template <typename RowsOf>
struct RmsNormBackwardOf {
  const void *grad_y, *grad_residual, *x, *weight;  // grad_residual (added to grad_x) and weight may be null
  const float* rstd;
  void* grad_x;    // null where it is not needed
  float* partial;  // (blocks, hidden) parts of grad_weight; null where it is not needed
  RowsOf grad_y_rows, grad_residual_rows, x_rows, grad_x_rows;
  int64_t rows, hidden;
  float offset;
  bool float_weight, round_scaled;
};
using RmsNormBackward = RmsNormBackwardOf<Rows>;

// As in the forward, the usual case has few arguments, and its flags are known when compiled.
using UsualRmsNormBackward = RmsNormBackwardOf<OneStride>;

inline bool is_usual(const RmsNormBackward& p) {
  return p.weight && !p.float_weight && p.round_scaled &&
         !(p.grad_y_rows.nested || p.grad_residual_rows.nested || p.x_rows.nested || p.grad_x_rows.nested);
}
inline UsualRmsNormBackward usual(const RmsNormBackward& p) {
  return {p.grad_y,
          p.grad_residual,
          p.x,
          p.weight,
          p.rstd,
          p.grad_x,
          p.partial,
          {p.grad_y_rows.stride},
          {p.grad_residual_rows.stride},
          {p.x_rows.stride},
          {p.grad_x_rows.stride},
          p.rows,
          p.hidden,
          p.offset,
          p.float_weight,
          p.round_scaled};
}

// The share of a row in grad_weight.
template <typename T, int N>
__device__ __forceinline__ void accumulate_weight_grad(const float (&x)[N], const float (&g)[N], float rstd,
                                                       bool round_scaled, float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float scaled = x[i] * rstd;
    sum[i] = fmaf(g[i], round_scaled ? round_to<T>(scaled) : scaled, sum[i]);
  }
}

// rstd * (g * w) - x * shift, with shift = rstd^2 * c (multiplied from the left: rstd^3 alone may overflow),
// and the gradient that arrives at new_residual where there is one.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> grad_vector(const Vec<T, N>& x, const Vec<T, N>& g, const float (&w)[N],
                                                 const Vec<T, N>& residual, bool has_residual, float rstd,
                                                 float shift) {
  float xs[N], gs[N];
  unpack(x, xs);
  unpack(g, gs);
#pragma unroll
  for (int i = 0; i < N; ++i) gs[i] = fmaf(-shift, xs[i], rstd * (gs[i] * w[i]));
  if (has_residual) {
    unpack(residual, xs);
#pragma unroll
    for (int i = 0; i < N; ++i) gs[i] += xs[i];
  }
  return pack<T, N>(gs);
}

// Usual: one stride per tensor, a weight of the dtype of x, and x * rstd rounded before it meets the weight.
template <typename T, int N, int V, int R, bool Residual, bool Usual>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    rms_norm_backward_kernel(const std::conditional_t<Usual, UsualRmsNormBackward, RmsNormBackward> p,
                             int lanes, int stages) {
  using Vector = Vec<T, N>;
  constexpr int kStreams = Residual ? 3 : 2;
  // Whether a row waits for its sum in registers, so that its slots can be refilled before; wide ones are
  // read twice.
  constexpr bool kHold = V * N <= 16;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[RowSum<R>::kScratch];
  const RowPlace place(lanes, static_cast<int>(p.hidden / N));
  const int groups = place.groups, lane = place.lane, vectors = place.vectors;
  const RowRing<T, N, V, R, kStreams> ring(shared);
  const int64_t step = int64_t{gridDim.x} * groups * R;

  const auto fetch = [&](int stage, int64_t first) {
    ring.fetch(place, stage, first, p.rows, [&](int stream, int64_t row) {
      if (stream == 0) return static_cast<const T*>(p.x) + p.x_rows.offset(row);
      if (stream == 1) return static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row);
      return static_cast<const T*>(p.grad_residual) + p.grad_residual_rows.offset(row);
    });
  };

  int64_t first = int64_t{blockIdx.x} * groups * R + place.group;
  RowScalars<R> rstds(p.rstd);
  const int span = rstds.span(place);
  rstds.fetch(place, first, step, p.rows);
  // The weight too is asked for before the rows.
  Vector raw_weight[Usual ? V : 1];
  if constexpr (Usual) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = lane + j * lanes;
      if (vector < vectors) raw_weight[j] = load<T, N>(static_cast<const T*>(p.weight) + vector * N);
    }
  }
  for (int stage = 0; stage < stages; ++stage) fetch(stage, first + stage * step);
  float w[V][N], weight_grad[V][N];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int vector = lane + j * lanes;
    if (vector < vectors) {
      if constexpr (Usual) {
        unpack(raw_weight[j], w[j]);
#pragma unroll
        for (int i = 0; i < N; ++i) w[j][i] += p.offset;
      } else {
        load_weight<T, N>(p.weight, p.float_weight, p.offset, int64_t{vector} * N, w[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) weight_grad[j][i] = 0.0f;
  }
  RowSum<R> row_sum(scratch, lanes);
  const bool need_x = p.grad_x != nullptr, need_weight = p.partial != nullptr;
  const bool round_scaled = Usual || p.round_scaled;
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);

  int stage = 0;
  // All threads of a row take the same number of steps, rows or not: they meet in row_sum.
  for (int i = 0; first - place.group < p.rows; first += step, i = i + 1 == span ? 0 : i + 1) {
    if (i == 0) rstds.advance(place, first, step, p.rows);
    wait_async(stages - 1);
    float rstd[R], dot[R];
    Vector held[kHold ? R : 1][kStreams][kHold ? V : 1];
    const auto value = [&](int r, int stream, int j) -> const Vector& {
      if constexpr (kHold) return held[r][stream][j];
      return ring.slot(stage, r, stream, j);
    };
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rstd[r] = rstds.at(place, r, i);
      // Several short chains instead of a long one, where there are registers for them.
      constexpr int kChains = kHold && N >= 4 ? 4 : 1;
      float dots[kChains] = {};
      const bool active = first + r * groups < p.rows;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (!active || lane + j * lanes >= vectors) continue;
        if constexpr (kHold) {
#pragma unroll
          for (int stream = 0; stream < kStreams; ++stream)
            held[r][stream][j] = ring.slot(stage, r, stream, j);
        }
        float xs[N], gs[N];
        unpack(value(r, 0, j), xs);
        unpack(value(r, 1, j), gs);
#pragma unroll
        for (int k = 0; k < N; ++k) dots[k % kChains] = fmaf(gs[k] * w[j][k], xs[k], dots[k % kChains]);
        if (need_weight) accumulate_weight_grad<T, N>(xs, gs, rstd[r], round_scaled, weight_grad[j]);
      }
      dot[r] =
          kChains == 4 ? (dots[0] + dots[1 % kChains]) + (dots[2 % kChains] + dots[3 % kChains]) : dots[0];
    }
    if constexpr (kHold) fetch(stage, first + stages * step);
    if (need_x) {
      row_sum(dot);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t row = first + r * groups;
        if (row >= p.rows) break;
        const float shift = dot[r] * inverse_hidden * rstd[r] * rstd[r] * rstd[r];
        T* grad_x = static_cast<T*>(p.grad_x) + p.grad_x_rows.offset(row);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int vector = lane + j * lanes;
          if (vector >= vectors) continue;
          store(grad_x + vector * N, grad_vector(value(r, 0, j), value(r, 1, j), w[j],
                                                 value(r, kStreams - 1, j), Residual, rstd[r], shift));
        }
      }
    }
    if constexpr (!kHold) fetch(stage, first + stages * step);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  if (!need_weight) return;
  store_block_sum<N, V>(place, weight_grad, shared, p.hidden, p.partial + int64_t{blockIdx.x} * p.hidden);
}

// grad_x of rows that are too wide to be held; the second reading mostly meets the L2 cache.
template <typename T, int N>
__global__ void __launch_bounds__(kMaxRowThreads) rms_norm_backward_wide_kernel(const RmsNormBackward p) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + p.x_rows.offset(row);
  const T* g = static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row);
  const T* residual = static_cast<const T*>(p.grad_residual) + p.grad_residual_rows.offset(row);
  T* grad_x = static_cast<T*>(p.grad_x) + p.grad_x_rows.offset(row);
  const int64_t begin = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  const float rstd = p.rstd[row];
  float dot = 0.0f;
#pragma unroll 2
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N], xs[N], gs[N];
    load_weight<T, N>(p.weight, p.float_weight, p.offset, column, w);
    unpack(load<T, N>(x + column), xs);
    unpack(load<T, N>(g + column), gs);
#pragma unroll
    for (int i = 0; i < N; ++i) dot = fmaf(gs[i] * w[i], xs[i], dot);
  }
  dot = block_reduce<Sum>(dot, scratch);
  const float shift = dot / static_cast<float>(p.hidden) * rstd * rstd * rstd;
#pragma unroll 2
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N];
    load_weight<T, N>(p.weight, p.float_weight, p.offset, column, w);
    Vec<T, N> extra{};
    if (p.grad_residual) extra = load<T, N>(residual + column);
    store_whole(grad_x + column, grad_vector(load<T, N>(x + column), load<T, N>(g + column), w, extra,
                                             p.grad_residual != nullptr, rstd, shift));
  }
}

// Parts of grad_weight of wide rows: a thread owns N columns, a block every gridDim.y-th row of them.
template <typename T, int N>
__global__ void __launch_bounds__(256) rms_norm_weight_grad_kernel(const RmsNormBackward p) {
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (column >= p.hidden) return;
  float sum[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float xs[N], gs[N];
    unpack(load<T, N>(static_cast<const T*>(p.x) + p.x_rows.offset(row) + column), xs);
    unpack(load<T, N>(static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row) + column), gs);
    accumulate_weight_grad<T, N>(xs, gs, p.rstd[row], p.round_scaled, sum);
  }
  store_floats<N>(p.partial + blockIdx.y * p.hidden + column, sum);
}

template <typename T, int N, int V, int R, bool Residual>
void launch_rms_norm_backward_tile(const RmsNormBackward& p, const RowPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto kernel, const auto& arguments) {
    allow_shared(kernel, plan.shared);
    kernel<<<plan.blocks, plan.threads, plan.shared, stream>>>(arguments, plan.lanes, plan.stages);
  };
  if constexpr (N > 1) {
    if (is_usual(p)) {
      launch(rms_norm_backward_kernel<T, N, V, R, Residual, true>, usual(p));
      return;
    }
  }
  launch(rms_norm_backward_kernel<T, N, V, R, Residual, false>, p);
}

template <typename T, bool Residual>
void launch_rms_norm_backward_rows(const RmsNormBackward& p, const RowPlan& plan, bool vectorised,
                                   cudaStream_t stream) {
  if (!vectorised) {
    launch_rms_norm_backward_tile<T, 1, 8, 1, Residual>(p, plan, stream);
  } else if (plan.width == 1) {
    launch_rms_norm_backward_tile<T, kVec<T>, 1, 2, Residual>(p, plan, stream);
  } else if (plan.width == 2) {
    launch_rms_norm_backward_tile<T, kVec<T>, 2, 1, Residual>(p, plan, stream);
  } else {
    launch_rms_norm_backward_tile<T, kVec<T>, 4, 1, Residual>(p, plan, stream);
  }
}

template <typename T, int N>
void launch_rms_norm_backward_wide(const RmsNormBackward& p, int parts, cudaStream_t stream) {
  if (p.grad_x)
    rms_norm_backward_wide_kernel<T, N><<<static_cast<unsigned>(p.rows), kMaxRowThreads, 0, stream>>>(p);
  if (p.partial) {
    const dim3 grid(static_cast<unsigned>((p.hidden + 256 * N - 1) / (256 * N)), parts);
    rms_norm_weight_grad_kernel<T, N><<<grid, 256, 0, stream>>>(p);
  }
}

// vectorised: every row of every tensor starts at a multiple of 16 bytes and holds whole vectors.
template <typename T>
void launch_rms_norm_backward(const RmsNormBackward& p, const BackwardPlan& plan, bool vectorised,
                              cudaStream_t stream) {
  if (plan.rows.width == 0) {
    vectorised ? launch_rms_norm_backward_wide<T, kVec<T>>(p, plan.parts, stream)
               : launch_rms_norm_backward_wide<T, 1>(p, plan.parts, stream);
  } else if (p.grad_residual) {
    launch_rms_norm_backward_rows<T, true>(p, plan.rows, vectorised, stream);
  } else {
    launch_rms_norm_backward_rows<T, false>(p, plan.rows, vectorised, stream);
  }
}

}  // namespace liger
