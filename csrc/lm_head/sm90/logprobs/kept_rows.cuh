// SPDX-License-Identifier: BSD-3-Clause

// Row kernels of fused_linear_logprobs. Upstream gradients arrive after the forward, so the forward keeps a
// few numbers per row; the backward computes the gradient of the logits from them and from the exponentials.
//
// With E the exponentials of a row and Z their sum, p = E / Z. For logits z (divided by the temperature),
// with u and w the negative gradients with respect to log-probability and entropy H, over the temperature:
//
//   dz[v] = u * p[v] - u * [v == target] + w * p[v] * (log p[v] + H)
//
// Without w this is a scale per row and a one-hot term, as in fused_linear_ce, and the GEMMs read E. With w
// the GEMMs read E * (u + w * (log p + H)) instead, which entropy_gradient() writes.
//
// float16 stores E times a power of two per row. Z is the sum of the stored exponentials, so the formulas
// hold for them.
#pragma once

#include "cross_entropy/rule.cuh"
#include "lm_head/sm90/rows/float16_range.cuh"

namespace liger::lm_head {

inline constexpr int kKeptRowThreads = kRowThreads;

// Data of a valid row, in the order of the index of valid rows.
struct alignas(16) KeptRow {
  float sum;      // of the exponentials as they are stored; NaN if the target is outside [0, vocab)
  float logprob;  // of the target
  float entropy;  // NaN without metrics
  // 1: `sum` is subtracted from the exponential at the target, which then includes the one-hot term; else 0.
  float one_hot_included;
};
static_assert(sizeof(KeptRow) == sm90::kKeptNumbers * sizeof(float));

// Computes kept rows from sums of exponentials. For the first row of each class the epilogues of both
// gradients add the one-hot term in float32. For further rows of a class this kernel adds it to the
// exponential. That needs no upstream gradient: relative to the scale of the row, the term is `sum`. In
// float16, rows dominated by their target also get the one-hot term here. grid: rows of the chunk.
struct KeepRows {
  ChunkRows chunk;
  const int* index;  // of the valid rows of the chunk
  ce::Targets targets;
  int vocab;
  const float* target_logit;
  const int* overflow;     // per row tile
  const float* reference;  // of rows in tiles with overflow; other rows use the target logit
  const float* sums;
  int columns;                  // of sums
  const float* entropy_sums;    // null without metrics
  const OneHot* class_one_hot;  // with the first row of each class; null without a weight gradient
  Panels exponentials;
  KeptRow* out;
  RangeRows range;  // with kSmallRange
};

template <typename T>
__global__ void __launch_bounds__(kKeptRowThreads) keep_rows(const KeepRows p) {
  __shared__ float scratch[32];
  const int row = blockIdx.x;
  if (row >= p.chunk()) return;
  float sum = 0.0f, entropy_sum = 0.0f;
  for (int i = threadIdx.x; i < p.columns; i += kKeptRowThreads) sum += p.sums[int64_t{row} * p.columns + i];
  sum = block_reduce<Sum>(sum, scratch);
  if (p.entropy_sums != nullptr) {
    for (int i = threadIdx.x; i < p.columns; i += kKeptRowThreads)
      entropy_sum += p.entropy_sums[int64_t{row} * p.columns + i];
    entropy_sum = block_reduce<Sum>(entropy_sum, scratch);
  }
  if (!kSmallRange<T> && threadIdx.x != 0) return;
  const int source = p.index[row];
  const int64_t target = p.targets[source];
  const bool valid = target >= 0 && target < p.vocab;
  const float z_target = p.target_logit[row];
  float computed = z_target;
  if constexpr (kSmallRange<T>) computed = p.range.reference[row];
  const float reference = p.overflow[row / sm90::kTileM] ? p.reference[row] : computed;
  const float log_of_sum = logf(sum);
  KeptRow kept = {valid ? sum : NAN, z_target - reference - log_of_sum, NAN, 0.0f};
  if (p.entropy_sums != nullptr) kept.entropy = log_of_sum - entropy_sum / kLog2e / sum;
  bool included = valid && p.class_one_hot != nullptr && p.class_one_hot[target].index != source;
  float one = 1.0f;  // an exponential of 1 is stored as `one`
  if constexpr (kSmallRange<T>) {
    included = included || (valid && is_mostly_target(ce::exp_from(z_target, reference), sum));
    const int shift = row_shift(p.range.shift[row], included ? sum : 0.0f, kOffset<T>);
    if (shift > 0) {
      shift_tiles<T>(p.range, p.exponentials, p.vocab, row, shift);
      __syncthreads();
    }
    if (threadIdx.x != 0) return;
    one = pow2(kOffset<T> - shift);
    kept.sum *= one;
  }
  if (included) {
    kept.one_hot_included = 1.0f;
    *reinterpret_cast<T*>(p.exponentials.at(row, target)) =
        from_float<T>((ce::exp_from(z_target, reference) - sum) * one);
  }
  p.out[row] = kept;
}

// entropy_gradient() replaces an exponential E by E * (constant + slope * log2(E)), and the target's
// exponential by `target`.
struct EntropyTerm {
  float constant, slope, target;
};

// An upper bound of |u * p + w * p * (log p + H)| over the classes other than the target. Their probabilities
// are at most 1 - exp(logprob). |p * (log p + H)| is largest there or at p = e^(-1 - H).
__device__ __forceinline__ float largest_beside_target(float u, float w, const KeptRow& kept) {
  // Error of a probability near 1: the target logit is summed in another order, so it differs by up to 1e-5
  // of the largest logit.
  constexpr float kError = 0x1p-6f;
  const float max_p = fminf(kError - fminf(expm1f(kept.logprob), 0.0f), 1.0f);
  const float at_end = max_p * fabsf(logf(max_p) + kept.entropy), p_of_maximum = expf(-1.0f - kept.entropy);
  return fabsf(u) * max_p + fabsf(w) * (max_p > p_of_maximum ? fmaxf(at_end, p_of_maximum) : at_end);
}

// Computes scales and one-hot terms of the rows, and the scaled rows for the weight gradient, from the
// upstream gradients. Rows beyond the count become zeros, because 0 * x could be NaN otherwise. float16:
// scale_rows() scales the rows, and entropy_gradient() multiplies its results by a power of two per row.
// grid: rows of the chunk.
template <typename T>
struct RowGradients {
  ChunkRows chunk;
  const int* index;
  ce::Targets targets;
  int vocab;
  const KeptRow* kept;         // of the chunk
  const float* grad_logprobs;  // of the batch
  const float* grad_entropy;   // of the batch; may be null
  float inverse_temperature;
  const T* input;
  int64_t input_stride;
  int hidden;
  T* out;  // (chunk.rows, hidden); null without a weight gradient
  float* scale;
  OneHot* one_hot;
  OneHot* class_one_hot;       // initially without terms; null without a weight gradient
  EntropyTerm* entropy_terms;  // null without grad_entropy
  RangeRows range;             // with kSmallRange; the caller sets largest_scaled to 0
};

template <typename T>
__global__ void __launch_bounds__(kKeptRowThreads) row_gradients(const RowGradients<T> p) {
  const int row = blockIdx.x;
  uint4* const out = p.out == nullptr ? nullptr : reinterpret_cast<uint4*>(p.out + int64_t{row} * p.hidden);
  if (row >= p.chunk()) {
    if (out != nullptr) {
      for (int i = threadIdx.x; i < p.hidden / 8; i += kKeptRowThreads) out[i] = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const int source = p.index[row];
  const KeptRow kept = p.kept[row];
  const float u = -p.grad_logprobs[source] * p.inverse_temperature;
  float scale = u / kept.sum;
  EntropyTerm term = {0.0f, 0.0f, 0.0f};
  if (p.grad_entropy != nullptr) {
    const float w = -p.grad_entropy[source] * p.inverse_temperature;
    term.constant = fmaf(w, kept.entropy - logf(kept.sum), u);
    term.slope = w / kLog2e;
    const float at_target = expf(kept.logprob) * fmaf(w, kept.entropy + kept.logprob, u);
    term.target = kept.sum * (at_target - kept.one_hot_included * u);
    scale = 1.0f / kept.sum;
    if constexpr (kSmallRange<T>) {
      const float beside = largest_beside_target(u, w, kept) * kept.sum;
      const int unit = unit_exponent(fmaxf(beside, fabsf(term.target)));
      term.constant *= pow2(unit), term.slope *= pow2(unit), term.target *= pow2(unit);
      scale *= pow2(-unit);
    }
  }
  if (threadIdx.x == 0) {
    p.scale[row] = scale;
    OneHot one_hot = {0.0f, -1};
    const int64_t target = p.targets[source];
    if (target >= 0 && target < p.vocab && kept.one_hot_included == 0.0f && u != 0.0f) {
      one_hot = {u, static_cast<int>(target)};
      if (p.class_one_hot != nullptr) p.class_one_hot[target] = {u, source};
    }
    p.one_hot[row] = one_hot;
    if (p.entropy_terms != nullptr) p.entropy_terms[row] = term;
  }
  if (out == nullptr) return;
  const uint4* const x = reinterpret_cast<const uint4*>(p.input + source * p.input_stride);
  float largest = 0.0f;
  for (int i = threadIdx.x; i < p.hidden / 8; i += kKeptRowThreads) {
    uint4 v = x[i];
    if constexpr (kSmallRange<T>) {
      largest = fmaxf(largest, largest_of<T>(v));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t& word = (&v.x)[j];
        word = pack_pair<T>(low_of<T>(word) * scale, high_of<T>(word) * scale);
      }
    }
    out[i] = v;
  }
  if constexpr (kSmallRange<T>) {
    __shared__ float scratch[32];
    largest = block_reduce<Max>(largest, scratch);
    if (threadIdx.x == 0) atomicMax(p.range.largest_scaled, __float_as_uint(fabsf(scale) * largest));
  }
}

// Turns exponentials into the matrix that the GEMMs read if entropies have a gradient. The logarithm of the
// rounded exponential has an error of at most 2^-8 (float16: 2^-11 unless it is subnormal), one rounding of
// the result. Rows beyond the count, which the GEMM of the weight gradient multiplies by zeros, become zeros.
// grid: tiles of rows, times panels.
struct EntropyGradient {
  ChunkRows chunk;
  Panels from;
  int first;  // row of `from` at the start of the chunk, a multiple of kTileM
  Panels to;  // may be `from`
  int tiles;  // of rows
  const EntropyTerm* terms;
};

template <typename T>
__global__ void __launch_bounds__(kKeptRowThreads) entropy_gradient(const EntropyGradient p) {
  constexpr int kVectors = sm90::kPanel / 8;
  // A smaller exponential is subnormal in float32 or belongs to a column beyond the vocabulary; p * log(p) is
  // 0.
  constexpr float kMinNormal = 0x1p-126f;
  const int row0 = static_cast<int>(blockIdx.x % p.tiles) * sm90::kTileM;
  const int column = static_cast<int>(blockIdx.x / p.tiles) * sm90::kPanel;
  const int count = p.chunk(), rows = min(round_up(count, sm90::kTileK) - row0, sm90::kTileM);
  if (rows <= 0) return;
  const uint4* const from = reinterpret_cast<const uint4*>(p.from.row_at(p.first + row0, column));
  uint4* const to = reinterpret_cast<uint4*>(p.to.row_at(row0, column));
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * kVectors; i += kKeptRowThreads) {
    const int row = row0 + i / kVectors;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < count) {
      v = from[i];
      const float constant = p.terms[row].constant, slope = p.terms[row].slope;
      const auto replaced = [&](float e) {
        return e < kMinNormal ? 0.0f : e * fmaf(slope, __log2f(e), constant);
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t& word = (&v.x)[j];
        word = pack_pair<T>(replaced(low_of<T>(word)), replaced(high_of<T>(word)));
      }
    }
    to[i] = v;
  }
}

// Writes the elements at the targets, after entropy_gradient(). grid: rows of the chunk / kKeptRowThreads.
template <typename T>
__global__ void __launch_bounds__(kKeptRowThreads)
    put_targets(const ChunkRows chunk, const int* index, const ce::Targets targets, int vocab,
                const Panels to, const EntropyTerm* terms) {
  const int row = blockIdx.x * kKeptRowThreads + threadIdx.x;
  if (row >= chunk()) return;
  const int64_t target = targets[index[row]];
  if (target >= 0 && target < vocab)
    *reinterpret_cast<T*>(to.at(row, target)) = from_float<T>(terms[row].target);
}

}  // namespace liger::lm_head
