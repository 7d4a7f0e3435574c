// RMSNorm backward: grad_x and grad_weight in one pass over x and grad_y.
//
// With w = offset + weight and c = mean(grad_y * w * x * rstd): grad_x = rstd * (grad_y * w - x * rstd * c),
// and grad_weight = sum over rows of grad_y * (x * rstd). x * rstd is never materialised: it is recomputed
// from x and rstd.
//
// Grid: persistent blocks, at most one per SM, which load rows through a shared-memory ring
// (norm/row_ring.cuh). The sum over rows is split over the blocks: each accumulates its partial grad_weight
// in float registers over all its rows, and a second kernel adds the partial sums in a fixed order
// (norm/sum_partials.cuh), so the result is deterministic. Rows too wide for a block take one block per row
// for grad_x, and a kernel of its own for grad_weight.
//
// With N = kVec<T> every row and the weight are aligned to 16 bytes and `hidden` is a multiple of N; N = 1
// has no requirement.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/backward_plan.cuh"
#include "norm/rms_norm.cuh"
#include "norm/row_ring.cuh"
#include "norm/sum_partials.cuh"

namespace liger {

template <typename RowOffsets>
struct RmsNormBackwardParams {
  const void *grad_y, *grad_residual, *x, *weight;  // grad_residual (added to grad_x) and weight may be null
  const float* rstd;
  void* grad_x;    // null: not needed
  float* partial;  // partial sums of grad_weight, (blocks, hidden); null: not needed
  RowOffsets grad_y_rows, grad_residual_rows, x_rows, grad_x_rows;
  int64_t rows, hidden;
  float offset;
  bool float_weight, round_scaled;
};
using RmsNormBackward = RmsNormBackwardParams<Rows>;

// As in the forward, the fast path has fewer kernel parameters, and its flags are compile-time constants.
using FastRmsNormBackward = RmsNormBackwardParams<OneStride>;

inline bool has_fast_path(const RmsNormBackward& p) {
  return p.weight && !p.float_weight && p.round_scaled &&
         !(p.grad_y_rows.nested || p.grad_residual_rows.nested || p.x_rows.nested || p.grad_x_rows.nested);
}
inline FastRmsNormBackward fast_params(const RmsNormBackward& p) {
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

// Adds the contribution of one row to grad_weight.
template <typename T, int N>
__device__ __forceinline__ void accumulate_weight_grad(const float (&x)[N], const float (&g)[N], float rstd,
                                                       bool round_scaled, float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float scaled = x[i] * rstd;
    sum[i] = fmaf(g[i], round_scaled ? round_to<T>(scaled) : scaled, sum[i]);
  }
}

// grad_x = rstd * (g * w) - x * shift with shift = rstd^2 * c, plus grad_residual if there is one. The caller
// multiplies shift from left to right: rstd^3 alone may overflow.
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

// kFastPath: at compile time, one stride per tensor, a weight of the dtype of x, and x * rstd rounded to T.
template <typename T, int N, int V, int R, bool Residual, bool kFastPath>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    rms_norm_backward_kernel(const std::conditional_t<kFastPath, FastRmsNormBackward, RmsNormBackward> p,
                             int lanes, int stages) {
  using Vector = Vec<T, N>;
  constexpr int kStreams = Residual ? 3 : 2;
  // True: a row is copied from the ring to registers, so that its slots are refilled before the reduction.
  // False (wide rows): it is read from the ring twice.
  constexpr bool kInRegisters = V * N <= 16;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[RowSum<R>::kScratch];
  const ThreadCoord coord(lanes, static_cast<int>(p.hidden / N));
  const int groups = coord.groups, lane = coord.lane, vectors = coord.vectors;
  const RowRing<T, N, V, R, kStreams> ring(shared);
  const int64_t step = int64_t{gridDim.x} * groups * R;

  const auto load_stage = [&](int stage, int64_t first) {
    ring.load_stage(coord, stage, first, p.rows, [&](int stream, int64_t row) {
      if (stream == 0) return static_cast<const T*>(p.x) + p.x_rows.offset(row);
      if (stream == 1) return static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row);
      return static_cast<const T*>(p.grad_residual) + p.grad_residual_rows.offset(row);
    });
  };

  int64_t first = int64_t{blockIdx.x} * groups * R + coord.group;
  RowScalars<R> rstds(p.rstd);
  const int lookahead = rstds.lookahead(coord);
  rstds.prefetch(coord, first, step, p.rows);
  // The loads of the weight are issued before those of the rows.
  Vector raw_weight[kFastPath ? V : 1];
  if constexpr (kFastPath) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = lane + j * lanes;
      if (vector < vectors) raw_weight[j] = load<T, N>(static_cast<const T*>(p.weight) + vector * N);
    }
  }
  for (int stage = 0; stage < stages; ++stage) load_stage(stage, first + stage * step);
  float w[V][N], weight_grad[V][N];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int vector = lane + j * lanes;
    if (vector < vectors) {
      if constexpr (kFastPath) {
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
  const bool need_grad_x = p.grad_x != nullptr, need_grad_weight = p.partial != nullptr;
  const bool round_scaled = kFastPath || p.round_scaled;
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);

  int stage = 0;
  // The number of steps is uniform over the block, also for groups without a row left: row_sum synchronises
  // their threads.
  for (int i = 0; first - coord.group < p.rows; first += step, i = i + 1 == lookahead ? 0 : i + 1) {
    if (i == 0) rstds.advance(coord, first, step, p.rows);
    wait_async(stages - 1);
    float rstd[R], dot[R];
    Vector cached[kInRegisters ? R : 1][kStreams][kInRegisters ? V : 1];
    const auto value = [&](int r, int stream, int j) -> const Vector& {
      if constexpr (kInRegisters) return cached[r][stream][j];
      return ring.slot(stage, r, stream, j);
    };
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rstd[r] = rstds.at(coord, r, i);
      // Several short dependency chains instead of a long one, if there are registers for them.
      constexpr int kChains = kInRegisters && N >= 4 ? 4 : 1;
      float dots[kChains] = {};
      const bool active = first + r * groups < p.rows;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (!active || lane + j * lanes >= vectors) continue;
        if constexpr (kInRegisters) {
#pragma unroll
          for (int stream = 0; stream < kStreams; ++stream)
            cached[r][stream][j] = ring.slot(stage, r, stream, j);
        }
        float xs[N], gs[N];
        unpack(value(r, 0, j), xs);
        unpack(value(r, 1, j), gs);
#pragma unroll
        for (int k = 0; k < N; ++k) dots[k % kChains] = fmaf(gs[k] * w[j][k], xs[k], dots[k % kChains]);
        if (need_grad_weight) accumulate_weight_grad<T, N>(xs, gs, rstd[r], round_scaled, weight_grad[j]);
      }
      dot[r] =
          kChains == 4 ? (dots[0] + dots[1 % kChains]) + (dots[2 % kChains] + dots[3 % kChains]) : dots[0];
    }
    if constexpr (kInRegisters) load_stage(stage, first + stages * step);
    if (need_grad_x) {
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
    if constexpr (!kInRegisters) load_stage(stage, first + stages * step);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  if (!need_grad_weight) return;
  store_block_sum<N, V>(coord, weight_grad, shared, p.hidden, p.partial + int64_t{blockIdx.x} * p.hidden);
}

// grad_x of one row per block that does not fit in its registers: the row is read twice, the second time
// mostly from L2.
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

// Partial sums of grad_weight for wide rows. Grid: (columns / (256 * N), partial sums): a thread sums N
// columns of every gridDim.y-th row.
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
    if (has_fast_path(p)) {
      launch(rms_norm_backward_kernel<T, N, V, R, Residual, true>, fast_params(p));
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
void launch_rms_norm_backward_wide(const RmsNormBackward& p, int partials, cudaStream_t stream) {
  if (p.grad_x)
    rms_norm_backward_wide_kernel<T, N><<<static_cast<unsigned>(p.rows), kMaxRowThreads, 0, stream>>>(p);
  if (p.partial) {
    const dim3 grid(static_cast<unsigned>((p.hidden + 256 * N - 1) / (256 * N)), partials);
    rms_norm_weight_grad_kernel<T, N><<<grid, 256, 0, stream>>>(p);
  }
}

// vectorised: every row of every tensor, and the weight, is aligned to 16 bytes, and hidden is a multiple of
// kVec<T>.
template <typename T>
void launch_rms_norm_backward(const RmsNormBackward& p, const BackwardPlan& plan, bool vectorised,
                              cudaStream_t stream) {
  if (plan.rows.width == 0) {
    vectorised ? launch_rms_norm_backward_wide<T, kVec<T>>(p, plan.partials, stream)
               : launch_rms_norm_backward_wide<T, 1>(p, plan.partials, stream);
  } else if (p.grad_residual) {
    launch_rms_norm_backward_rows<T, true>(p, plan.rows, vectorised, stream);
  } else {
    launch_rms_norm_backward_rows<T, false>(p, plan.rows, vectorised, stream);
  }
}

}  // namespace liger
