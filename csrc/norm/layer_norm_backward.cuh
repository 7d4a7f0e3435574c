// LayerNorm backward: grad_x, grad_weight and grad_bias from one reading of x and grad_y.
//
// With xhat = (x - mean) * rstd, a = mean(grad_y * w) and c = mean(grad_y * w * xhat):
// grad_x = rstd * (grad_y * w - a - xhat * c), grad_weight = sum over rows of grad_y * xhat, and grad_bias =
// sum over rows of grad_y. Blocks, ring and parts are those of the RMSNorm backward; both sums of a row are
// exchanged at once.
#pragma once

#include <type_traits>

#include "device/rows.cuh"
#include "norm/backward_plan.cuh"
#include "norm/parameters.cuh"
#include "norm/row_ring.cuh"

namespace liger {

template <typename RowsOf>
struct LayerNormBackwardOf {
  const void *grad_y, *x, *weight;  // weight may be null
  const float *mean, *rstd;
  void* grad_x;                    // null where it is not needed
  float *grad_weight, *grad_bias;  // the first of their parts, part_stride apart; null where not needed
  RowsOf grad_y_rows, x_rows, grad_x_rows;
  int64_t rows, hidden, part_stride;
  bool float_weight;
};
using LayerNormBackward = LayerNormBackwardOf<Rows>;

// As in the forward, the usual case has few arguments, and its flags are known when compiled.
using UsualLayerNormBackward = LayerNormBackwardOf<OneStride>;

inline bool is_usual(const LayerNormBackward& p) {
  return p.weight && !p.float_weight && !(p.grad_y_rows.nested || p.x_rows.nested || p.grad_x_rows.nested);
}
inline UsualLayerNormBackward usual(const LayerNormBackward& p) {
  return {p.grad_y,
          p.x,
          p.weight,
          p.mean,
          p.rstd,
          p.grad_x,
          p.grad_weight,
          p.grad_bias,
          {p.grad_y_rows.stride},
          {p.x_rows.stride},
          {p.grad_x_rows.stride},
          p.rows,
          p.hidden,
          p.part_stride,
          p.float_weight};
}

// What a row of a norm by mean and variance needs for its gradient: grad_x = rstd * (grad_y * w - base) -
// shift * (x - mean), with shift = c * rstd^2 and base = a. Rows of one element, and rows whose elements are
// all alike and have the same grad_y * w, get 0 exactly.
struct alignas(16) RowGradient {
  float mean, rstd, shift, base;

  // From sum(grad_y * w) and sum(grad_y * w * xhat).
  __device__ __forceinline__ RowGradient(float mean, float rstd, float sum, float dot, float inverse_count)
      : mean(mean), rstd(rstd), shift(dot * inverse_count * rstd * rstd), base(sum * inverse_count) {}

  // kExactProducts: grad_y * w has no more digits than a float, being that of half types.
  template <bool kExactProducts = false, typename T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N>& x, const Vec<T, N>& g,
                                                  const float (&w)[N]) const {
    float xs[N], gs[N];
    unpack(x, xs);
    unpack(g, gs);
    // The rounding of shift * mean is far below what half types had to leave out of x.
    const float constant = shift * mean;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float across =
          kExactProducts ? fmaf(gs[i], w[i], -base) : __fsub_rn(__fmul_rn(gs[i], w[i]), base);
      const float along = sizeof(T) == 2 ? fmaf(-shift, xs[i], constant) : -shift * (xs[i] - mean);
      gs[i] = fmaf(rstd, across, along);
    }
    return pack<T, N>(gs);
  }
};

// The weight of a thread's V vectors: as floats where there are registers for them, else as it is stored, in
// this thread's slots of shared memory, or looked up each time.
template <typename T, int N, int V, bool Usual>
struct HeldWeight {
  static constexpr bool kFloats = V * N <= 16, kShared = Usual && !kFloats;
  static constexpr int kSharedPerThread = kShared ? V * sizeof(Vec<T, N>) : 0;
  Vec<T, N> raw[Usual && kFloats ? V : 1];
  float w[kFloats ? V : 1][N];
  Vec<T, N>* slots;

  __device__ __forceinline__ explicit HeldWeight(void* shared)
      : slots(static_cast<Vec<T, N>*>(shared) + threadIdx.x) {}

  template <typename P>
  __device__ __forceinline__ void fetch(const P& p, const RowPlace& place) {
    if constexpr (Usual) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = place.lane + j * place.lanes;
        if (vector >= place.vectors) continue;
        const T* const from = static_cast<const T*>(p.weight) + vector * N;
        if constexpr (kShared) {
          copy_async(&slots[j * blockDim.x], from);  // with the first rows
        } else {
          raw[j] = load<T, N>(from);
        }
      }
    }
  }

  template <typename P>
  __device__ __forceinline__ void arrive(const P& p, const RowPlace& place) {
    if constexpr (kFloats) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = place.lane + j * place.lanes;
        if (vector >= place.vectors) continue;
        if constexpr (Usual) {
          unpack(raw[j], w[j]);
        } else {
          load_parameter<T, N>(p.weight, p.float_weight, 0.0f, 1.0f, int64_t{vector} * N, w[j]);
        }
      }
    }
  }

  template <typename P>
  __device__ __forceinline__ void get(const P& p, const RowPlace& place, int j, float (&out)[N]) const {
    if constexpr (kFloats) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = w[j][i];
    } else if constexpr (kShared) {
      unpack(slots[j * blockDim.x], out);
    } else {
      const int64_t column = int64_t{place.lane + j * place.lanes} * N;
      load_parameter<T, N>(p.weight, p.float_weight, 0.0f, 1.0f, column, out);
    }
  }
};

// Threads per block. Four vectors and the sums of two gradients over them take half of the registers that 512
// threads would have, unless the weight, too, is left in shared memory.
template <typename T, int V, bool Usual>
inline constexpr int kLayerNormThreads = V == 4 && !(Usual && sizeof(T) == 2) ? 384 : kMaxRowThreads;

// Usual: one stride per tensor and a weight of the dtype of x.
template <typename T, int N, int V, int R, bool Usual>
__global__ void __launch_bounds__(kLayerNormThreads<T, V, Usual>, 1)
    layer_norm_backward_kernel(const std::conditional_t<Usual, UsualLayerNormBackward, LayerNormBackward> p,
                               int lanes, int stages) {
  using Vector = Vec<T, N>;
  constexpr int kStreams = 2;
  // Whether a row waits for its sums in registers, so that its slots can be refilled before; wide ones are
  // read twice.
  constexpr bool kHold = V * N <= 16;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[RowSum<2 * R>::kScratch];
  const RowPlace place(lanes, static_cast<int>(p.hidden / N));
  const RowRing<T, N, V, R, kStreams> ring(shared);
  const int64_t step = int64_t{gridDim.x} * place.groups * R;
  const auto fetch = [&](int stage, int64_t first) {
    ring.fetch(place, stage, first, p.rows, [&](int stream, int64_t row) {
      return stream == 0 ? static_cast<const T*>(p.x) + p.x_rows.offset(row)
                         : static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row);
    });
  };

  int64_t first = int64_t{blockIdx.x} * place.groups * R + place.group;
  RowScalars<R> means(p.mean), rstds(p.rstd);
  const int span = rstds.span(place);
  means.fetch(place, first, step, p.rows);
  rstds.fetch(place, first, step, p.rows);
  // The weight too is asked for before the rows.
  HeldWeight<T, N, V, Usual> weight(ring.end(stages));
  weight.fetch(p, place);
  for (int stage = 0; stage < stages; ++stage) fetch(stage, first + stage * step);
  weight.arrive(p, place);
  float weight_grad[V][N], bias_grad[V][N];
#pragma unroll
  for (int j = 0; j < V; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) weight_grad[j][i] = bias_grad[j][i] = 0.0f;
  }
  RowSum<2 * R> row_sum(scratch, lanes);
  const bool need_x = p.grad_x != nullptr;
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);

  int stage = 0;
  // All threads of a row take the same number of steps, rows or not: they meet in row_sum.
  for (int i = 0; first - place.group < p.rows; first += step, i = i + 1 == span ? 0 : i + 1) {
    if (i == 0) {
      means.advance(place, first, step, p.rows);
      rstds.advance(place, first, step, p.rows);
    }
    wait_async(stages - 1);
    float mean[R], rstd[R], sums[2 * R];
    Vector held[kHold ? R : 1][kStreams][kHold ? V : 1];
    const auto value = [&](int r, int stream, int j) -> const Vector& {
      if constexpr (kHold) return held[r][stream][j];
      return ring.slot(stage, r, stream, j);
    };
#pragma unroll
    for (int r = 0; r < R; ++r) {
      mean[r] = means.at(place, r, i);
      rstd[r] = rstds.at(place, r, i);
      // Several short chains instead of a long one, where there are registers for them.
      constexpr int kChains = kHold && N >= 4 ? 2 : 1;
      float plain[kChains] = {}, dots[kChains] = {};
      const bool active = first + r * place.groups < p.rows;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (!active || place.lane + j * lanes >= place.vectors) continue;
        if constexpr (kHold) {
#pragma unroll
          for (int stream = 0; stream < kStreams; ++stream)
            held[r][stream][j] = ring.slot(stage, r, stream, j);
        }
        float xs[N], gs[N], w[N];
        unpack(value(r, 0, j), xs);
        unpack(value(r, 1, j), gs);
        weight.get(p, place, j, w);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          // rstd is left out as long as it can be: one step less, and no less exact.
          const float apart = gs[k] * (xs[k] - mean[r]);
          plain[k % kChains] = fmaf(gs[k], w[k], plain[k % kChains]);
          dots[k % kChains] = fmaf(apart, w[k], dots[k % kChains]);
          weight_grad[j][k] = fmaf(apart, rstd[r], weight_grad[j][k]);
          bias_grad[j][k] += gs[k];
        }
      }
      sums[2 * r] = kChains == 2 ? plain[0] + plain[kChains - 1] : plain[0];
      sums[2 * r + 1] = (kChains == 2 ? dots[0] + dots[kChains - 1] : dots[0]) * rstd[r];
    }
    if constexpr (kHold) fetch(stage, first + stages * step);
    if (need_x) {
      row_sum(sums);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t row = first + r * place.groups;
        if (row >= p.rows) break;
        const RowGradient gradient(mean[r], rstd[r], sums[2 * r], sums[2 * r + 1], inverse_hidden);
        T* grad_x = static_cast<T*>(p.grad_x) + p.grad_x_rows.offset(row);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int vector = place.lane + j * lanes;
          if (vector >= place.vectors) continue;
          float w[N];
          weight.get(p, place, j, w);
          constexpr bool kExactProducts = Usual && sizeof(T) == 2;
          store(grad_x + vector * N,
                gradient.template operator()<kExactProducts>(value(r, 0, j), value(r, 1, j), w));
        }
      }
    }
    if constexpr (!kHold) fetch(stage, first + stages * step);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const int64_t part = int64_t{blockIdx.x} * p.part_stride;
  if (p.grad_weight) store_block_sum<N, V>(place, weight_grad, shared, p.hidden, p.grad_weight + part);
  if (p.grad_bias) store_block_sum<N, V>(place, bias_grad, shared, p.hidden, p.grad_bias + part);
}

// grad_x of rows that are too wide to be held; the second reading mostly meets the L2 cache.
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

// Parts of the gradients of the parameters of wide rows: a thread owns N columns, a block every gridDim.y-th
// row of them.
template <typename T, int N>
__global__ void __launch_bounds__(256) layer_norm_parameter_grads_kernel(const LayerNormBackward p) {
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (column >= p.hidden) return;
  float of_weight[N] = {}, of_bias[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float xs[N], gs[N];
    unpack(load<T, N>(static_cast<const T*>(p.x) + p.x_rows.offset(row) + column), xs);
    unpack(load<T, N>(static_cast<const T*>(p.grad_y) + p.grad_y_rows.offset(row) + column), gs);
    const float mean = p.mean[row], rstd = p.rstd[row];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      of_weight[i] = fmaf(gs[i], (xs[i] - mean) * rstd, of_weight[i]);
      of_bias[i] += gs[i];
    }
  }
  const int64_t part = blockIdx.y * p.part_stride + column;
  if (p.grad_weight) store_floats<N>(p.grad_weight + part, of_weight);
  if (p.grad_bias) store_floats<N>(p.grad_bias + part, of_bias);
}

template <typename T, int N, int V, int R>
void launch_layer_norm_backward_tile(const LayerNormBackward& p, const RowPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto kernel, const auto& arguments, int shared) {
    allow_shared(kernel, shared);
    kernel<<<plan.blocks, plan.threads, shared, stream>>>(arguments, plan.lanes, plan.stages);
  };
  if constexpr (N > 1) {
    if (is_usual(p)) {
      const int of_weight = plan.threads * HeldWeight<T, N, V, true>::kSharedPerThread;
      launch(layer_norm_backward_kernel<T, N, V, R, true>, usual(p), plan.shared + of_weight);
      return;
    }
  }
  launch(layer_norm_backward_kernel<T, N, V, R, false>, p, plan.shared);
}

template <typename T, int N>
void launch_layer_norm_backward_wide(const LayerNormBackward& p, int parts, cudaStream_t stream) {
  if (p.grad_x)
    layer_norm_backward_wide_kernel<T, N><<<static_cast<unsigned>(p.rows), kMaxRowThreads, 0, stream>>>(p);
  if (p.grad_weight || p.grad_bias) {
    const dim3 grid(static_cast<unsigned>((p.hidden + 256 * N - 1) / (256 * N)), parts);
    layer_norm_parameter_grads_kernel<T, N><<<grid, 256, 0, stream>>>(p);
  }
}

// vectorised: every row of every tensor starts at a multiple of 16 bytes and holds whole vectors.
template <typename T>
void launch_layer_norm_backward(const LayerNormBackward& p, const BackwardPlan& plan, bool vectorised,
                                cudaStream_t stream) {
  if (plan.rows.width == 0) {
    vectorised ? launch_layer_norm_backward_wide<T, kVec<T>>(p, plan.parts, stream)
               : launch_layer_norm_backward_wide<T, 1>(p, plan.parts, stream);
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
