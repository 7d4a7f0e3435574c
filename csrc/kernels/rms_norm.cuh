// RMSNorm forward, with or without the residual addition: every element is read once and written once.
#pragma once

#include "common/rows.cuh"
#include "kernels/row_tile.cuh"

namespace liger {

struct Casting {
  bool round_rstd;    // "none": rstd is kept in the dtype of x
  bool round_scaled;  // "none", "llama": x * rstd is rounded before it meets the weight
};

struct RmsNorm {
  const void *x, *residual, *weight;  // residual and weight may be null
  void *y, *new_residual;
  float* rstd;
  Rows x_rows, residual_rows, y_rows, new_residual_rows;
  int64_t rows, hidden;
  float eps, offset;
  bool float_weight;
  Casting casting;
};

// offset + weight at N columns; 1 without a weight.
template <typename T, int N>
__device__ __forceinline__ void load_weight(const void* weight, bool is_float, float offset, int64_t column,
                                            float (&out)[N]) {
  if (weight == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 1.0f;
    return;
  }
  if (is_float) {
    load_floats<N>(static_cast<const float*>(weight) + column, out);
  } else {
    load_floats<N>(static_cast<const T*>(weight) + column, out);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] += offset;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> scale_vector(const Vec<T, N>& x, const float (&w)[N], float rstd,
                                                  bool round_scaled) {
  float value[N];
  unpack(x, value);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float scaled = value[i] * rstd;
    value[i] = (round_scaled ? round_to<T>(scaled) : scaled) * w[i];
  }
  return pack<T, N>(value);
}

// x + residual, rounded as a tensor of dtype T would keep it: the statistics are those of what is stored.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> add_vectors(const Vec<T, N>& x, const Vec<T, N>& y) {
  float a[N], b[N];
  unpack(x, a);
  unpack(y, b);
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] += b[i];
  return pack<T, N>(a);
}

template <typename T, int N>
__device__ __forceinline__ float sum_squares(const Vec<T, N>& x) {
  float value[N], sum = 0.0f;
  unpack(x, value);
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(value[i], value[i], sum);
  return sum;
}

template <typename T>
__device__ __forceinline__ float reciprocal_rms(const RmsNorm& p, float sum) {
  const float rstd = rsqrtf(sum / static_cast<float>(p.hidden) + p.eps);
  return p.casting.round_rstd ? round_to<T>(rstd) : rstd;
}

template <typename T, int N, int V>
__global__ void __launch_bounds__(kMaxRowThreads, V <= 2 ? 2 : 1)
    rms_norm_kernel(const RmsNorm p, int lanes, int stages) {
  using Vector = Vec<T, N>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[RowSum<1>::kScratch];
  Vector* ring = reinterpret_cast<Vector*>(shared) + threadIdx.x;
  const int streams = p.residual ? 2 : 1;
  const int groups = blockDim.x / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int vectors = static_cast<int>(p.hidden / N);
  const int64_t step = int64_t{gridDim.x} * groups;

  const auto slot = [&](int stage, int stream, int j) -> Vector& {
    return ring[((stage * streams + stream) * V + j) * blockDim.x];
  };
  const auto fetch = [&](int stage, int64_t row) {
    if (row < p.rows) {
      const T* x = static_cast<const T*>(p.x) + p.x_rows.offset(row);
      const T* residual =
          streams == 2 ? static_cast<const T*>(p.residual) + p.residual_rows.offset(row) : nullptr;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int vector = lane + j * lanes;
        if (vector < vectors) {
          copy_async(&slot(stage, 0, j), x + vector * N);
          if (streams == 2) copy_async(&slot(stage, 1, j), residual + vector * N);
        }
      }
    }
    commit_async();
  };

  int64_t row = int64_t{blockIdx.x} * groups + group;
  for (int stage = 0; stage < stages; ++stage) fetch(stage, row + stage * step);
  float w[V][N];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int vector = lane + j * lanes;
    if (vector < vectors) load_weight<T, N>(p.weight, p.float_weight, p.offset, int64_t{vector} * N, w[j]);
  }
  RowSum<1> row_sum(scratch, lanes);

  int stage = 0;
  // All threads of a block take the same number of steps, rows or not: they meet in row_sum.
  for (; row - group < p.rows; row += step) {
    const bool active = row < p.rows;
    wait_async(stages - 1);
    Vector x[V];
    float sum[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = lane + j * lanes;
      if (active && vector < vectors) {
        x[j] = slot(stage, 0, j);
        if (streams == 2) {
          x[j] = add_vectors(x[j], slot(stage, 1, j));
          store(static_cast<T*>(p.new_residual) + p.new_residual_rows.offset(row) + vector * N, x[j]);
        }
        sum[0] += sum_squares(x[j]);
      }
    }
    fetch(stage, row + stages * step);
    stage = stage + 1 == stages ? 0 : stage + 1;
    row_sum(sum);
    const float rstd = reciprocal_rms<T>(p, sum[0]);
    if (!active) continue;
    if (lane == 0) p.rstd[row] = rstd;
    T* y = static_cast<T*>(p.y) + p.y_rows.offset(row);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = lane + j * lanes;
      if (vector < vectors) store(y + vector * N, scale_vector(x[j], w[j], rstd, p.casting.round_scaled));
    }
  }
}

// A row per block that is too wide to be held: its second reading mostly meets the L2 cache.
template <typename T, int N>
__global__ void __launch_bounds__(kMaxRowThreads) rms_norm_wide_kernel(const RmsNorm p) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + p.x_rows.offset(row);
  const T* residual = static_cast<const T*>(p.residual) + p.residual_rows.offset(row);
  T* new_residual = static_cast<T*>(p.new_residual) + p.new_residual_rows.offset(row);
  T* y = static_cast<T*>(p.y) + p.y_rows.offset(row);
  const int64_t begin = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t column = begin; column < p.hidden; column += step) {
    Vec<T, N> value = load<T, N>(x + column);
    if (p.residual) {
      value = add_vectors(value, load<T, N>(residual + column));
      store(new_residual + column, value);
    }
    sum += sum_squares(value);
  }
  const float rstd = reciprocal_rms<T>(p, block_reduce<Sum>(sum, scratch));
  if (threadIdx.x == 0) p.rstd[row] = rstd;
  const T* stored = p.residual ? new_residual : x;
#pragma unroll 4
  for (int64_t column = begin; column < p.hidden; column += step) {
    float w[N];
    load_weight<T, N>(p.weight, p.float_weight, p.offset, column, w);
    store(y + column, scale_vector(load<T, N>(stored + column), w, rstd, p.casting.round_scaled));
  }
}

template <typename T, int N, int V>
void launch_rms_norm_tile(const RmsNorm& p, const RowPlan& plan, cudaStream_t stream) {
  allow_shared(rms_norm_kernel<T, N, V>, plan.shared);
  rms_norm_kernel<T, N, V><<<plan.blocks, plan.threads, plan.shared, stream>>>(p, plan.lanes, plan.stages);
}

// vectorised: every row of every tensor starts at a multiple of 16 bytes and holds whole vectors.
template <typename T>
void launch_rms_norm(const RmsNorm& p, bool vectorised, int multiprocessors, int shared_limit,
                     cudaStream_t stream) {
  const int n = vectorised ? kVec<T> : 1;
  const RowPlan plan = plan_rows(p.rows, p.hidden / n, n * sizeof(T), vectorised, p.residual ? 2 : 1, false,
                                 multiprocessors, shared_limit);
  if (plan.width == 0) {
    const auto kernel = vectorised ? rms_norm_wide_kernel<T, kVec<T>> : rms_norm_wide_kernel<T, 1>;
    kernel<<<static_cast<unsigned>(p.rows), kMaxRowThreads, 0, stream>>>(p);
  } else if (!vectorised) {
    launch_rms_norm_tile<T, 1, 8>(p, plan, stream);
  } else if (plan.width == 1) {
    launch_rms_norm_tile<T, kVec<T>, 1>(p, plan, stream);
  } else if (plan.width == 2) {
    launch_rms_norm_tile<T, kVec<T>, 2>(p, plan, stream);
  } else {
    launch_rms_norm_tile<T, kVec<T>, 4>(p, plan, stream);
  }
}

}  // namespace liger
