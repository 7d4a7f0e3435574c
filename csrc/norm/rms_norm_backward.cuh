// SPDX-License-Identifier: BSD-3-Clause

// RMSNorm backward: grad_x and grad_weight in one pass over x and grad_y.
//
// With w = offset + weight and c = mean(grad_y * w * x * rstd): grad_x = rstd * (grad_y * w - x * rstd * c),
// and grad_weight = sum over rows of grad_y * (x * rstd). x * rstd is never materialised: it is recomputed
// from x and rstd. With a gate (norm/gate.cuh) it also writes grad_gate: a gate after the norm multiplies
// grad_y before these formulas; a gate before the norm multiplies x and its gradient.
//
// Grid: persistent blocks, at most one per SM, which load rows through a shared-memory ring
// (norm/row_ring.cuh); with a gate each block works on one group of columns. The sum over rows is split over
// the blocks: each accumulates its partial grad_weight in float registers over all its rows, and a second
// kernel adds the partial sums in a fixed order (norm/sum_partials.cuh), so the result is deterministic. A
// single block writes grad_weight itself. Rows too wide for a block take one block per row for grad_x and a
// separate kernel for grad_weight.
//
// With N = kVec<T> every row and the weight are aligned to 16 bytes and `hidden` is a multiple of N; N = 1
// has no requirement.
#pragma once

#include <type_traits>

#include "norm/rms_norm_backward_params.cuh"
#include "norm/rms_norm_backward_wide.cuh"
#include "norm/row_ring.cuh"

namespace liger {

// Floats of a thread in its own two slots of the ring: N floats take as many bytes as two vectors of a half
// type, or one of float32.
template <typename T, int N>
__device__ __forceinline__ void store_in_slots(const float (&x)[N], Vec<T, N>& first, Vec<T, N>& second) {
  static_assert(sizeof(Vec<T, N>) == 16 && (N == 4 || N == 8));
#pragma unroll
  for (int i = 0; i < N; i += 4)
    *reinterpret_cast<float4*>(i == 0 ? &first : &second) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}
template <typename T, int N>
__device__ __forceinline__ void load_from_slots(const Vec<T, N>& first, const Vec<T, N>& second,
                                                float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(i == 0 ? &first : &second);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// kFastPath: at compile time, one stride per tensor, a weight of the dtype of x, and x * rstd rounded to T.
template <typename T, int N, int V, int R, Extra kExtra, bool kFastPath>
__global__ void __launch_bounds__(kMaxRowThreads, 1) rms_norm_backward_kernel(
    const std::conditional_t<kFastPath, FastRmsNormBackwardOf<kExtra>, RmsNormBackwardOf<kExtra>> p,
    int lanes, int stages) {
  using Vector = Vec<T, N>;
  constexpr int kStreams = kExtra == Extra::kNone ? 2 : 3;
  // True: a row is copied from the ring to registers, and its slots are refilled before the reduction. False
  // (wide rows): a row is read from the ring twice.
  constexpr bool kInRegisters = V * N <= 16;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[RowSum<R>::kScratch];
  const BlockColumns columns = columns_of_block<kExtra>(p);
  const ThreadCoord coord(lanes, static_cast<int>(p.hidden / N));
  const int groups = coord.groups, lane = coord.lane, vectors = coord.vectors;
  const RowRing<T, N, V, R, kStreams> ring(shared);
  const int64_t step = int64_t{columns.blocks} * groups * R;

  const auto load_stage = [&](int stage, int64_t first) {
    ring.load_stage(coord, stage, first, p.rows, [&](int stream, int64_t row) {
      if (stream == 0) return static_cast<const T*>(p.x) + columns.first + p.x_rows.offset(row);
      if (stream == 1) return static_cast<const T*>(p.grad_y) + columns.first + p.grad_y_rows.offset(row);
      return static_cast<const T*>(p.extra) + columns.first + p.extra_rows.offset(row);
    });
  };

  int64_t first = int64_t{columns.block} * groups * R + coord.group;
  RowScalars<R> rstds(p.rstd + columns.group, columns.groups);
  const int lookahead = rstds.lookahead(coord);
  rstds.prefetch(coord, first, step, p.rows);
  // The loads of the weight are issued before the loads of the rows.
  Vector raw_weight[kFastPath ? V : 1];
  if constexpr (kFastPath) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int vector = lane + j * lanes;
      if (vector < vectors)
        raw_weight[j] = load<T, N>(static_cast<const T*>(p.weight) + columns.first + vector * N);
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
        load_weight<T, N>(p.weight, p.float_weight, p.offset, columns.first + vector * N, w[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) weight_grad[j][i] = 0.0f;
  }
  RowSum<R> row_sum(scratch, lanes);
  bool need_grad_input = p.grad_x != nullptr;
  if constexpr (kExtra == Extra::kGateFirst) need_grad_input = need_grad_input || p.grad_gate != nullptr;
  const bool need_grad_weight = p.grads.data[0] != nullptr;
  const bool round_scaled = kFastPath || p.round_scaled;
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);

  int stage = 0;
  // All groups run the same number of steps, even without a row left, because row_sum synchronises their
  // threads.
  for (int i = 0; first - coord.group < p.rows; first += step, i = i + 1 == lookahead ? 0 : i + 1) {
    if (i == 0) rstds.advance(coord, first, step, p.rows);
    wait_async(stages - 1);
    float rstd[R], dot[R];
    Vector cached[kInRegisters ? R : 1][kStreams][kInRegisters ? V : 1];
    // Values of the activation for the second pass. A gate after the norm keeps the upstream gradient times
    // the gate, in registers or in the slots of grad_y and the gate. A gate before the norm keeps the
    // sigmoids of the gate in registers, or recomputes them.
    constexpr bool kGateLast = kExtra == Extra::kGateLast;
    float kept[kInRegisters && is_gate(kExtra) ? R : 1][V][N];
    const auto value = [&](int r, int stream, int j) -> const Vector& {
      if constexpr (kInRegisters) return cached[r][stream][j];
      return ring.slot(stage, r, stream, j);
    };
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = first + r * groups;
      rstd[r] = rstds.at(coord, r, i);
      // Several short dependency chains replace a long chain if registers suffice.
      constexpr int kChains = kInRegisters && N >= 4 ? 4 : 1;
      float dots[kChains] = {};
      const bool active = row < p.rows;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (!active || lane + j * lanes >= vectors) continue;
        if constexpr (kInRegisters) {
#pragma unroll
          for (int stream = 0; stream < kStreams; ++stream)
            cached[r][stream][j] = ring.slot(stage, r, stream, j);
        }
        float xs[N], gs[N];
        unpack(value(r, 1, j), gs);
        if constexpr (kExtra == Extra::kGateFirst) {
          float s[N];
          sigmoids(value(r, 2, j), s);
          gated_inputs(casting_of_path<kFastPath>(p.gate), value(r, 0, j), value(r, 2, j), s, xs);
          if constexpr (kInRegisters) {
#pragma unroll
            for (int k = 0; k < N; ++k) kept[r][j][k] = s[k];
          }
        } else {
          unpack(value(r, 0, j), xs);
        }
        if constexpr (kGateLast) {
          const Vector grad_gate = grad_of_last_gate(casting_of_path<kFastPath>(p.gate), xs, value(r, 2, j),
                                                     w[j], rstd[r], round_scaled, gs);
          if (p.grad_gate) {
            T* to = static_cast<T*>(p.grad_gate) + columns.first + p.grad_gate_rows.offset(row);
            store(to + (lane + j * lanes) * N, grad_gate);
          }
          if constexpr (kInRegisters) {
#pragma unroll
            for (int k = 0; k < N; ++k) kept[r][j][k] = gs[k];
          } else {
            store_in_slots(gs, ring.slot(stage, r, 1, j), ring.slot(stage, r, 2, j));
          }
        }
#pragma unroll
        for (int k = 0; k < N; ++k) dots[k % kChains] = fmaf(gs[k] * w[j][k], xs[k], dots[k % kChains]);
        if (need_grad_weight) accumulate_weight_grad<T, N>(xs, gs, rstd[r], round_scaled, weight_grad[j]);
      }
      dot[r] =
          kChains == 4 ? (dots[0] + dots[1 % kChains]) + (dots[2 % kChains] + dots[3 % kChains]) : dots[0];
    }
    if constexpr (kInRegisters) load_stage(stage, first + stages * step);
    if (need_grad_input) {
      row_sum(dot);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t row = first + r * groups;
        if (row >= p.rows) break;
        const float shift = dot[r] * inverse_hidden * rstd[r] * rstd[r] * rstd[r];
        T* grad_x = static_cast<T*>(p.grad_x) + columns.first + p.grad_x_rows.offset(row);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int vector = lane + j * lanes;
          if (vector >= vectors) continue;
          if constexpr (kGateLast) {
            float xs[N], gs[N];
            unpack(value(r, 0, j), xs);
            if constexpr (kInRegisters) {
#pragma unroll
              for (int k = 0; k < N; ++k) gs[k] = kept[r][j][k];
            } else {
              load_from_slots(ring.slot(stage, r, 1, j), ring.slot(stage, r, 2, j), gs);
            }
            grad_of_norm(xs, gs, w[j], rstd[r], shift);
            store(grad_x + vector * N, pack<T, N>(gs));
          } else if constexpr (kExtra == Extra::kGateFirst) {
            const Gate gate = casting_of_path<kFastPath>(p.gate);
            float s[N], inputs[N], gs[N];
            Vector of_x, of_gate;
            if constexpr (kInRegisters) {
#pragma unroll
              for (int k = 0; k < N; ++k) s[k] = kept[r][j][k];
            } else {
              sigmoids(value(r, 2, j), s);
            }
            gated_inputs(gate, value(r, 0, j), value(r, 2, j), s, inputs);
            unpack(value(r, 1, j), gs);
            grad_of_norm(inputs, gs, w[j], rstd[r], shift);
            grad_of_first_gate(gate, value(r, 0, j), value(r, 2, j), s, gs, of_x, of_gate);
            if (p.grad_x) store(grad_x + vector * N, of_x);
            if (p.grad_gate) {
              T* to = static_cast<T*>(p.grad_gate) + columns.first + p.grad_gate_rows.offset(row);
              store(to + vector * N, of_gate);
            }
          } else {
            store(grad_x + vector * N,
                  grad_vector(value(r, 0, j), value(r, 1, j), w[j], value(r, kStreams - 1, j),
                              kExtra == Extra::kResidual, rstd[r], shift));
          }
        }
      }
    }
    if constexpr (!kInRegisters) load_stage(stage, first + stages * step);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  store_block_sum<T>(coord, weight_grad, shared, p.hidden, p.grads, 0,
                     int64_t{columns.block} * p.grads.stride + columns.first);
}

template <typename T, int N, int V, int R, Extra kExtra>
void launch_rms_norm_backward_tile(const RmsNormBackwardOf<kExtra>& p, const RowPlan& plan,
                                   cudaStream_t stream) {
  const auto launch = [&](auto kernel, const auto& arguments) {
    allow_shared(kernel, plan.shared);
    kernel<<<blocks_of_groups<kExtra>(p, plan.blocks), plan.threads, plan.shared, stream>>>(
        arguments, plan.lanes, plan.stages);
  };
  if constexpr (N > 1) {
    if (has_fast_path(p)) {
      launch(rms_norm_backward_kernel<T, N, V, R, kExtra, true>, fast_params(p));
      return;
    }
  }
  launch(rms_norm_backward_kernel<T, N, V, R, kExtra, false>, p);
}

// vectorised: every row of every tensor, and the weight, is aligned to 16 bytes, and hidden is a multiple of
// kVec<T>.
template <typename T, Extra kExtra>
void launch_rms_norm_backward(const RmsNormBackwardOf<kExtra>& p, const BackwardPlan& plan, bool vectorised,
                              cudaStream_t stream) {
  constexpr int N = kVec<T>;
  if (plan.rows.width == 0) {
    vectorised ? launch_rms_norm_backward_wide<T, N, kExtra>(p, plan.partials, stream)
               : launch_rms_norm_backward_wide<T, 1, kExtra>(p, plan.partials, stream);
  } else if (!vectorised) {
    launch_rms_norm_backward_tile<T, 1, 8, 1, kExtra>(p, plan.rows, stream);
  } else if (plan.rows.width == 1) {
    launch_rms_norm_backward_tile<T, N, 1, 2, kExtra>(p, plan.rows, stream);
  } else if (plan.rows.width == 2) {
    launch_rms_norm_backward_tile<T, N, 2, 1, kExtra>(p, plan.rows, stream);
  } else {
    launch_rms_norm_backward_tile<T, N, 4, 1, kExtra>(p, plan.rows, stream);
  }
}

}  // namespace liger
