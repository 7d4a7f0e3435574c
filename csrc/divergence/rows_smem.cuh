// SPDX-License-Identifier: BSD-3-Clause

// Two rows of logits -> their divergence and its gradient with one read and one write of global memory, by
// persistent blocks or clusters (sm_90 and later). The pipeline is the same as in
// cross_entropy/rows_smem.cuh: each warp has the same part of the student's and the teacher's row in every
// stage, and starts the copies of the next two rows as soon as it has stored the gradient of that part. If
// two or three blocks fit on an SM, one computes while others wait for memory or for their cluster.
// Probabilities are never written to global memory.
#pragma once

#include "cross_entropy/rows.cuh"
#include "device/smem_rows.cuh"
#include "divergence/passes.cuh"

namespace liger::divergence {

// Copies in shared memory (SmemRowShape::kCopies): student, teacher and, for the float32 values that Jsd
// computes from half types, one more.
template <typename T, typename Rule>
constexpr int smem_copies() {
  return std::is_same_v<Rule, Jsd> && sizeof(T) == 2 ? 3 : 2;
}

#if __CUDA_ARCH__ >= 900
// Stores the floats of one vector of logits at its address in shared memory. The floats of a half type need
// two vectors and continue `step` elements further, in the next copy.
template <typename T, int N>
__device__ __forceinline__ void store_smem_floats(T* smem, int step, const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) store_shared(smem + i / 4 * step, x[i], x[i + 1], x[i + 2], x[i + 3]);
}
template <typename T, int N>
__device__ __forceinline__ void load_smem_floats(const T* smem, int step, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const auto four = load<float, 4>(reinterpret_cast<const float*>(smem + i / 4 * step));
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] = four.v[j];
  }
}

// Stores a vector of the gradient in one access, with a streaming hint because no later block reads it.
template <typename G, int N>
__device__ __forceinline__ void store_gradient(G* p, const float (&x)[N]) {
  const Vec<G, N> d = pack<G>(x);
  if constexpr (sizeof(d) == 16) {
    store_streaming(p, d);
  } else {
    static_assert(sizeof(d) == 8);
    __stcs(reinterpret_cast<int2*>(p), *reinterpret_cast<const int2*>(&d));
  }
}

// Loads the inputs of Passes::gradient() for one vector: logits or values of terms().
template <Overwrite kOverwrite, typename T, int N>
__device__ __forceinline__ void load_pair(const T* smem, int step, float (&s)[N], float (&t)[N]) {
  if constexpr (kOverwrite == Overwrite::kStudent) {
    load_smem_floats(smem, step, s);
  } else {
    unpack(load<T, N>(smem), s);
    if constexpr (kOverwrite == Overwrite::kTeacher) {
      load_smem_floats(smem + step, step, t);
    } else {
      unpack(load<T, N>(smem + step), t);
    }
  }
}
#endif

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: SmemRowShape. The rows of
// student and teacher, of dtype T, must be equally far from a 16-byte boundary. The gradient, of dtype G, may
// overwrite the student's logits if G is T, because the first element is written after the whole row has been
// read. If G is not T, it must not overlap the logits.
template <typename T, typename G, typename Rule, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    rows_smem(const Problem p, const Results r, const SmemRowPlan plan) {
#if __CUDA_ARCH__ >= 900
  using P = Passes<Rule>;
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  // Copies: student, teacher and, if there are three, the second half of the floats of terms().
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);
  const int step = slices.copy_stride();

  const auto teacher_of = [&](int64_t row) { return row_at<T>(p.teacher, p.teacher_stride, row); };
  Vec<T, 1> student_edge = {}, teacher_edge = {};
  float weight = 0.0f, target_logit_value = 0.0f;
  const auto load_registers = [&](const Slice<T>& s, int64_t row) {
    weight = r.weights[row];
    // Reads the logit now, because the gradient may overwrite it later.
    if (r.hard != nullptr && rank == 0 && threadIdx.x == 0)
      target_logit_value = target_logit<T>(p, row, false);
    const int column = s.edge_column(rank, p.vocab);
    if (column >= 0) student_edge.v[0] = s.row[column], teacher_edge.v[0] = teacher_of(row)[column];
  };
  const auto load_all = [&](const Slice<T>& s, int64_t row) {
    slices.load_row(s, {s.row, teacher_of(row)});
    load_registers(s, row);
  };
  const auto slice_of = [&](int64_t row, int64_t y) {
    return Slice<T>(row_at<T>(p.student, p.student_stride, row), p.vocab, plan, rank,
                    y != p.targets.ignore_index);
  };
  const auto target_of = [&](int64_t row) {
    if (row >= p.rows) return p.targets.ignore_index;
    return p.targets.data == nullptr ? ~p.targets.ignore_index : p.targets[row];
  };

  cluster_reduce.arrive_peers();
  int64_t row = blockIdx.x / plan.blocks;
  int64_t y_now = target_of(row), y_next = target_of(row + row_step);
  Slice<T> now = slice_of(row, y_now);
  if (now.valid) load_all(now, row);
  cluster_reduce.wait_peers();

  for (; row < p.rows; row += row_step) {
    const int64_t row_next = row + row_step;
    const Slice<T> next = slice_of(row_next, y_next);
    const int64_t y_after = target_of(row_next + row_step);
    G* const out = static_cast<G*>(r.gradient) + row * r.gradient_stride;
    if (now.valid) {
      OnlineStats<P::kCross> online;
      slices.first_pass(now, [&](auto count, const T* part, int) {
        Vec<T, N> student[count], teacher[count];
#pragma unroll
        for (int u = 0; u < count; ++u) {
          student[u] = load<T, N>(part + u * 32 * N);
          teacher[u] = load<T, N>(part + u * 32 * N + step);
        }
        online.add(student, teacher, p.exp2_scale);
      });
      const int edge_column = now.edge_column(rank, p.vocab);
      if (edge_column >= 0) online.add({student_edge}, {teacher_edge}, p.exp2_scale);
      merge_warp<P::kCross>(online.stats, p.exp2_scale);
      LogSoftmax log_q = {}, log_p = {};  // set in the first warp, which writes the results
      const RowConstants constants =
          cluster_reduce.template reduce<5>(online.stats, [&](const PairStats* partials, int count) {
            return RowConstants(merge_slots<P::kCross>(partials, count, p.exp2_scale), p, &log_q, &log_p);
          });

      float edge_s[1], edge_t[1];
      unpack(student_edge, edge_s);
      unpack(teacher_edge, edge_t);
      TermSums sums = {0.0f, 0.0f};
      if constexpr (P::kTerms) {
        slices.pass(now, [&](auto count, T* part, int) {
#pragma unroll
          for (int u = 0; u < count; ++u, part += 32 * N) {
            float s[N], t[N];
            unpack(load<T, N>(part), s);
            unpack(load<T, N>(part + step), t);
            P::terms(s, t, constants, p.beta, sums);
            if constexpr (P::kOverwrite == Overwrite::kStudent) store_smem_floats(part, step, s);
            if constexpr (P::kOverwrite == Overwrite::kTeacher) store_smem_floats(part + step, step, t);
          }
        });
        // Orders the stores of terms() before the bulk copies of the next rows to the same memory (async
        // proxy). Loads need no fence: they are complete when the copies start.
        if constexpr (P::kOverwrite != Overwrite::kNothing) async_fence();
        if (edge_column >= 0) P::terms(edge_s, edge_t, constants, p.beta, sums);
        sums = cluster_reduce.template reduce<2>(merge_warp(sums), [](const TermSums* partials, int count) {
          return merge_slots(partials, count);
        });
      }

      RowResult result = P::result(constants, sums, p.beta, weight * p.inverse_temperature);
      if (rank == 0 && threadIdx.x == 0) {
        write_results(p, r, row, weight * result.loss, log_q, log_p, result.slope);
        if (r.hard != nullptr) r.hard[row] = hard_loss(p, weight, log_q, target_logit_value);
      }
      const bool has_target = is_class(p, y_now);
      const float coef_target = p.cross_entropy == 0.0f ? 0.0f : has_target ? weight * p.cross_entropy : NAN;
      P::add_exponentials(result, coef_target * constants.student_factor);
      const int target = coef_target != 0.0f && has_target ? static_cast<int>(y_now) : -1;
      if (edge_column >= 0) {
        P::gradient(edge_s, edge_t, constants, result);
        if (edge_column == target) edge_s[0] -= coef_target;
        out[edge_column] = from_float<G>(edge_s[0]);
      }
      if (next.valid) load_registers(next, row_next);
      const bool out_aligned = reinterpret_cast<uintptr_t>(out + now.aligned.head) % sizeof(Vec<G, N>) == 0;
      const T* const rows_next[] = {next.row, teacher_of(row_next)};
      slices.last_pass(now, next, rows_next, [&](auto count, const T* part, int column) {
        const bool fast_path = out_aligned && !slices.has_column(target, count, column);
        if (fast_path) {
          constexpr int kBatch = count < 2 ? 1 : 2;  // gradients computed at the same time
#pragma unroll
          for (int u = 0; u < count; u += kBatch) {
            float s[kBatch][N], t[kBatch][N];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
              load_pair<P::kOverwrite>(part + (u + i) * 32 * N, step, s[i], t[i]);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              P::gradient(s[i], t[i], constants, result);
              store_gradient(out + column + (u + i) * 32 * N, s[i]);
            }
          }
        } else {
#pragma unroll 1
          for (int u = 0; u < count; ++u, part += 32 * N, column += 32 * N) {
            float s[N], t[N];
            load_pair<P::kOverwrite>(part, step, s, t);
            P::gradient(s, t, constants, result);
#pragma unroll
            for (int i = 0; i < N; ++i) s[i] -= column + i == target ? coef_target : 0.0f;
            out_aligned ? store_gradient(out + column, s) : ce::store_elements(out + column, pack<G>(s));
          }
        }
      });
    } else {
      if (next.valid) load_all(next, row_next);
      ce::write_zeros<G, true>(out, p.vocab, rank, plan.blocks);
      if (rank == 0 && threadIdx.x == 0) {
        const LogSoftmax zeros{0.0f, 0.0f, 0.0f};
        write_results(p, r, row, 0.0f * r.weights[row], zeros, zeros, 0.0f);
        if (r.hard != nullptr) r.hard[row] = 0.0f * r.weights[row];
      }
    }
    now = next;
    y_now = y_next;
    y_next = y_after;
  }
#endif
}

}  // namespace liger::divergence
