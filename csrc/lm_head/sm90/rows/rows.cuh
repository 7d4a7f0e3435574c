// Kernels on the rows of a chunk between its GEMMs.
#pragma once

#include "device/vec.cuh"
#include "lm_head/sm90/epilogues/exponentials.cuh"
#include "lm_head/sm90/epilogues/grad_input.cuh"
#include "lm_head/sm90/rows/float16_range.cuh"

namespace liger::lm_head {

// For each class the first row of the chunk with that target. The epilogue of dW adds its one-hot term in
// float32; the terms of further rows of the class go into their exponentials, which bounds the work of
// the epilogue however frequent a class is. Null without a weight gradient.
struct FirstRowOfClass {
  unsigned long long* memory;  // (vocab) OneHot; initially all bits set
  __device__ __forceinline__ void claim(int64_t target, int row) const {
    if (memory != nullptr) atomicMin(memory + target, static_cast<unsigned long long>(row) << 32);
  }
  __device__ __forceinline__ bool is_first(int row, int64_t target) const {
    return memory == nullptr || reinterpret_cast<const OneHot*>(memory + target)->index == row;
  }
  __device__ __forceinline__ void set(int64_t target, float amount) const {
    if (memory != nullptr) reinterpret_cast<OneHot*>(memory + target)->amount = amount;
  }
};

// Gathers the valid rows of the chunk and computes the logit of the target of each. Rows beyond the count
// become zeros, so that 0 * x never is NaN. grid: rows of the chunk, rounded up to pairs of tiles; one row
// per block.
template <typename T>
struct Gather {
  ChunkRows chunk;
  const int* index;  // of the valid rows of the chunk
  ce::Targets targets;
  const T *input, *weight;
  int64_t input_stride, weight_stride;
  int vocab, hidden;
  float inverse_temperature;
  T* out;               // (chunk.rows, hidden)
  float* target_logit;  // over the temperature, one per block
  int* overflow;
  FirstRowOfClass first_row;
  LogitTransform transform;
  // With label smoothing: class_weight @ weight, class_weight @ bias (null without one), and the sum of the
  // weighted logits of each row of the chunk.
  const float *class_sum, *bias_sum;
  float* weighted_sum;
  RangeRows range;  // with kSmallRange
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) gather(const Gather<T> p) {
  __shared__ float scratch[32];
  const int row = blockIdx.x, count = p.chunk();
  if (row % sm90::kTileM == 0 && threadIdx.x == 0) p.overflow[row / sm90::kTileM] = 0;
  uint4* const out = reinterpret_cast<uint4*>(p.out + int64_t{row} * p.hidden);
  if (row >= count) {
    if (row < p.chunk.rows) {
      for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) out[i] = make_uint4(0, 0, 0, 0);
    }
    // Its logits are those of zeros; with a bias they may be large, so the reference makes all exponentials 0.
    if (threadIdx.x == 0) p.target_logit[row] = p.transform.bias != nullptr ? INFINITY : 0.0f;
    if constexpr (kSmallRange<T>) {
      if (threadIdx.x == 0) p.range.reference[row] = p.target_logit[row];
      if (threadIdx.x == 0 && row < p.chunk.rows) p.range.shift[row] = 0;
    }
    return;
  }
  const int source = p.index[row];
  const int64_t target = p.targets[source];
  const bool valid = target >= 0 && target < p.vocab;
  const uint4* const x = reinterpret_cast<const uint4*>(p.input + source * p.input_stride);
  const uint4* const w = reinterpret_cast<const uint4*>(p.weight + (valid ? target : 0) * p.weight_stride);
  float sum = 0.0f, weighted_sum = 0.0f, largest = 0.0f;
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) {
    const uint4 a = x[i], b = w[i];
    out[i] = a;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t u = (&a.x)[j], v = (&b.x)[j];
      sum = fmaf(low_of<T>(u), low_of<T>(v), sum);
      sum = fmaf(high_of<T>(u), high_of<T>(v), sum);
      if constexpr (kSmallRange<T>)
        largest = fmaxf(largest, fmaxf(fabsf(low_of<T>(u)), fabsf(high_of<T>(u))));
      if (p.class_sum != nullptr) {
        const float2 s = reinterpret_cast<const float2*>(p.class_sum + 8 * i)[j];
        weighted_sum = fmaf(low_of<T>(u), s.x, weighted_sum);
        weighted_sum = fmaf(high_of<T>(u), s.y, weighted_sum);
      }
    }
  }
  sum = block_reduce<Sum>(sum, scratch);
  if (p.class_sum != nullptr) {
    weighted_sum = block_reduce<Sum>(weighted_sum, scratch);
    if (threadIdx.x == 0) p.weighted_sum[row] = weighted_sum + (p.bias_sum != nullptr ? *p.bias_sum : 0.0f);
  }
  float sample = 0.0f;
  if constexpr (kSmallRange<T>) {
    largest = block_reduce<Max>(largest, scratch);
    sample = largest_sample<T>({p.weight, p.weight_stride, p.vocab, p.hidden}, x, p.transform,
                               p.inverse_temperature, scratch);
  }
  if (threadIdx.x == 0) {
    if (valid && p.transform.bias != nullptr) sum += p.transform.bias[target];
    p.target_logit[row] = valid ? p.transform.cap(sum) * p.inverse_temperature : 0.0f;
    if constexpr (kSmallRange<T>) {
      p.range.reference[row] = valid ? fmaxf(sample, p.target_logit[row]) : sample;
      p.range.largest[row] = largest;
      p.range.shift[row] = 0;
    }
    if (valid) p.first_row.claim(target, source);
  }
}

// For tiles with overflow: row maxima of the logits before the softcap -> a reference from which no sum
// overflows. Rows beyond the count get that of gather(). grid: rows of the chunk.
struct Recompute {
  ChunkRows chunk;
  const int* overflow;
  const float* maxima;
  int columns;  // of maxima
  float inverse_temperature;
  float* reference;  // over the temperature; not written for other tiles
  LogitTransform transform;
  RangeRows range;  // with kSmallRange: the shifts are computed again
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) recompute_reference(const Recompute p) {
  __shared__ float scratch[32];
  const int row = blockIdx.x;
  if (!p.overflow[row / sm90::kTileM]) return;
  if constexpr (kSmallRange<T>) {
    if (threadIdx.x == 0) p.range.shift[row] = 0;
    for (int i = threadIdx.x; i < p.columns; i += kRowThreads)
      p.range.tile_shifts[int64_t{row} * p.columns + i] = 0;
  }
  if (row >= p.chunk()) {
    if (threadIdx.x == 0) p.reference[row] = p.transform.bias != nullptr ? INFINITY : 0.0f;
    return;
  }
  float max = -INFINITY;
  for (int i = threadIdx.x; i < p.columns; i += kRowThreads)
    max = fmaxf(max, p.maxima[int64_t{row} * p.columns + i]);
  max = block_reduce<Max>(max, scratch);
  if (threadIdx.x == 0) p.reference[row] = ce::reference_of(p.transform.cap(max) * p.inverse_temperature);
}

// Row sums -> loss, metrics, scale, one-hot term and coefficient of label smoothing; scales the gathered row
// in place if the weight gradient needs it (float16: scale_rows() does). grid: rows of the chunk.
template <typename T>
struct Rule {
  using Element = T;
  static constexpr bool kShard = false;
  ce::Problem problem;  // of the whole batch, without logits
  ChunkRows chunk;
  const int* index;
  const float* target_logit;
  const float* sums;
  int columns;  // of sums
  const int* overflow;
  Panels exponentials;
  bool gradient;  // false: results only
  T* input;       // null without a weight gradient
  int hidden;
  float* scale;  // in: the reference of rows of tiles with overflow; out: the scale
  FirstRowOfClass first_row;
  OneHot* one_hot;
  RowMetrics metrics;  // null without metrics
  LogitTransform transform;
  const float* weighted_sum;  // of the rows of the chunk, with label smoothing
  float* smoothing;           // coefficients of the rows, with label smoothing
  RangeRows range;            // with kSmallRange
};

// Of is the type of the elements, or ShardOf<it> (shards/rows.cuh). kExtras: with metrics or label smoothing.
template <typename Of, bool kExtras>
__global__ void __launch_bounds__(kRowThreads) apply_rule(const Rule<Of> p) {
  using T = typename Rule<Of>::Element;
  constexpr bool kShard = Rule<Of>::kShard;  // the sums of all ranks replace those of the tiles
  __shared__ float scratch[32];
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  const float z_target = p.target_logit[row];
  float computed = z_target;
  if constexpr (kSmallRange<T>) computed = p.range.reference[row];
  const float reference = p.overflow[row / sm90::kTileM] ? p.scale[row] : computed;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.columns; i += kRowThreads) sum += p.sums[int64_t{row} * p.columns + i];
  sum = block_reduce<Sum>(sum, scratch);
  ce::Stats<kExtras> stats = ce::empty_stats<kExtras>();
  stats.max = reference;
  stats.sum = sum;
  if constexpr (kExtras) {
    if (p.metrics.entropy_sums != nullptr) {
      float entropy_sum = 0.0f;
      for (int i = threadIdx.x; i < p.columns; i += kRowThreads)
        entropy_sum += p.metrics.entropy_sums[int64_t{row} * p.columns + i];
      stats.entropy_sum = block_reduce<Sum>(entropy_sum, scratch) / kLog2e;
      stats.best_column = column_of_key(p.metrics.best_keys[row]);
    }
    if (p.weighted_sum != nullptr)
      stats.weighted_sum = fmaf(-ce::class_weight_sum(p.problem), reference, p.weighted_sum[row]);
  }
  if constexpr (kShard) p.merge(row, stats);
  ce::Row r = {p.index[row], -1, NAN, 1.0f, NAN};
  if (p.problem.token_weight != nullptr) r.token_weight = p.problem.token_weight[r.index];
  const int64_t target = p.problem.targets[r.index];
  if (target >= 0 && target < p.problem.vocab) {
    r.target = static_cast<int>(target);
    r.class_weight = p.problem.class_weight != nullptr ? p.problem.class_weight[target] : 1.0f;
    r.z_target = z_target;
  }
  if (threadIdx.x == 0) ce::write_results(p.problem, r, stats);
  if (!p.gradient) return;

  const float upstream =
      p.problem.denominator != nullptr ? r.token_weight / *p.problem.denominator : r.token_weight;
  ce::GradientCoefficients g = ce::gradient_coefficients(p.problem, r, upstream, stats.max, stats.sum);
  if constexpr (kShard) p.restrict_to_shard(row, r, stats, g);
  // The one-hot term relative to the scale of the row; none if that is 0, by underflow or a z-loss.
  const float relative_target = g.coef_exp != 0.0f ? g.coef_target / g.coef_exp : 0.0f;
  // An exponential of 1 is stored as `one`.
  float one = 1.0f, scale = g.coef_exp;
  bool is_element = false;
  if constexpr (kSmallRange<T>) {
    if (r.target >= 0 && g.coef_target != 0.0f)
      is_element =
          !p.first_row.is_first(r.index, r.target) ||
          (relative_target != 0.0f && is_mostly_target(ce::exp_from(z_target, stats.max), relative_target));
    const int shift = row_shift(p.range.shift[row], is_element ? relative_target : 0.0f, kOffset<T>);
    if (shift > 0) {
      shift_tiles<T>(p.range, p.exponentials, p.problem.vocab, row, shift);
      __syncthreads();
    }
    one = pow2(kOffset<T> - shift);
    scale *= pow2(shift - kOffset<T>);
  }
  if (threadIdx.x == 0) {
    p.scale[row] = scale;
    if constexpr (kSmallRange<T>) {
      if (p.input != nullptr)
        atomicMax(p.range.largest_scaled, __float_as_uint(fabsf(scale) * p.range.largest[row]));
    }
    if (p.smoothing != nullptr) p.smoothing[row] = g.coef_class;
    OneHot one_hot = {0.0f, -1};
    if (r.target >= 0 && g.coef_target != 0.0f) {
      const float derivative = p.transform.derivative(z_target);
      if (kSmallRange<T> ? !is_element : p.first_row.is_first(r.index, r.target)) {
        one_hot = {g.coef_target * derivative, r.target};
        p.first_row.set(r.target, one_hot.amount);
      } else {
        const float exact = ce::exp_from(z_target, stats.max);
        *reinterpret_cast<T*>(p.exponentials.at(row, r.target)) =
            from_float<T>((exact - relative_target) * derivative * one);
      }
    }
    p.one_hot[row] = one_hot;
  }
  if (kSmallRange<T> || p.input == nullptr) return;
  uint4* const x = reinterpret_cast<uint4*>(p.input + int64_t{row} * p.hidden);
  for (int i = threadIdx.x; i < p.hidden / 8; i += kRowThreads) x[i] = scaled_elements<T>(x[i], g.coef_exp);
}

}  // namespace liger::lm_head
