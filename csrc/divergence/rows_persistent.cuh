// Two rows of logits -> their divergence and its gradient in one read and one write of memory (sm_90 and
// later), by blocks that stay on the device, as in cross_entropy_persistent.cuh: a warp has a part of the row
// of the student and the same part of that of the teacher in every piece of shared memory, and has those of
// the next row come to their place when it has stored their gradient. Two or three blocks on a
// SM, each with a row of its own, compute while the others wait for memory or for each other.
#pragma once

#include "cross_entropy/rows.cuh"
#include "device/persistent_rows.cuh"
#include "divergence/passes.cuh"

namespace liger::divergence {

// Vectors of shared memory for one of each row.
template <typename T, typename Rule>
constexpr int kept_vectors() {
  return std::is_same_v<Rule, Jsd> && sizeof(T) == 2 ? 3 : 2;
}

#if __CUDA_ARCH__ >= 900
// Floats of one vector of logits, in that place of shared memory and, where they take two, in the next one.
// step: elements from place to place.
template <typename T, int N>
__device__ __forceinline__ void keep(T* place, int step, const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) store_shared(place + i / 4 * step, x[i], x[i + 1], x[i + 2], x[i + 3]);
}
template <typename T, int N>
__device__ __forceinline__ void load_kept(const T* place, int step, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const auto four = load<float, 4>(reinterpret_cast<const float*>(place + i / 4 * step));
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] = four.v[j];
  }
}

// A vector of the gradient, of which no later block reads anything; it stays one access.
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

// What the gradient of a vector is made of.
template <Keeps kKeeps, typename T, int N>
__device__ __forceinline__ void load_pair(const T* place, int step, float (&s)[N], float (&t)[N]) {
  if constexpr (kKeeps == Keeps::kForStudent) {
    load_kept(place, step, s);
  } else {
    unpack(load<T, N>(place), s);
    if constexpr (kKeeps == Keeps::kForTeacher) {
      load_kept(place + step, step, t);
    } else {
      unpack(load<T, N>(place + step), t);
    }
  }
}
#endif

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: PersistentShape. The rows of
// student and teacher, of T, are equally far from a 16-byte boundary. The gradient, of G, may be written over
// the student's logits where that is T too: all of a row has been read when its first element is written. Of
// another type it must lie elsewhere.
template <typename T, typename G, typename Rule, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    rows_persistent(const Problem p, const Results r, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  using P = Passes<Rule>;
  constexpr int N = kVec<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  // Of the student, then of the teacher, then what is kept beside them.
  WarpSlices<T, Shape> slices(memory, plan);
  typename Shape::ClusterReduce cluster_reduce(memory + Shape::slices_bytes(plan), rank, plan.blocks,
                                               slices.warp);
  const int lane = slices.lane, step = slices.copy_stride();

  const auto teacher_of = [&](int64_t row) { return row_at<T>(p.teacher, p.teacher_stride, row); };
  Vec<T, 1> student_edge = {}, teacher_edge = {};
  float weight = 0.0f, at_label = 0.0f;
  const auto load_rest = [&](const Slice<T>& s, int64_t row) {
    weight = r.weights[row];
    // Before a gradient takes its place.
    if (r.hard != nullptr && rank == 0 && threadIdx.x == 0) at_label = target_logit<T>(p, row, false);
    const int column = s.edge_column(rank, p.vocab);
    if (column >= 0) student_edge.v[0] = s.row[column], teacher_edge.v[0] = teacher_of(row)[column];
  };
  const auto load_all = [&](const Slice<T>& s, int64_t row) {
    slices.load_row(s, {s.row, teacher_of(row)});
    load_rest(s, row);
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
      Running<P::kCross> running;
      slices.first_pass(now, [&](auto count, const T* part, int) {
        Vec<T, N> student[count], teacher[count];
#pragma unroll
        for (int u = 0; u < count; ++u) {
          student[u] = load<T, N>(part + u * 32 * N);
          teacher[u] = load<T, N>(part + u * 32 * N + step);
        }
        running.add(student, teacher, p.exp2_scale);
      });
      const int at_edge = now.edge_column(rank, p.vocab);
      if (at_edge >= 0) running.add({student_edge}, {teacher_edge}, p.exp2_scale);
      merge_warp<P::kCross>(running.stats, p.exp2_scale);
      Normaliser of_student = {}, of_teacher = {};  // where they are written
      const Known known =
          cluster_reduce.template reduce<5>(running.stats, [&](const PairStats* of_warps, int count) {
            return Known(merge_slots<P::kCross>(of_warps, count, p.exp2_scale), p, &of_student, &of_teacher);
          });

      float edge_s[1], edge_t[1];
      unpack(student_edge, edge_s);
      unpack(teacher_edge, edge_t);
      Sums sums = {0.0f, 0.0f};
      if constexpr (P::kTerms) {
        slices.pass(now, [&](auto count, T* part, int) {
#pragma unroll
          for (int u = 0; u < count; ++u, part += 32 * N) {
            float s[N], t[N];
            unpack(load<T, N>(part), s);
            unpack(load<T, N>(part + step), t);
            P::terms(s, t, known, p.beta, sums);
            if constexpr (P::kKeeps == Keeps::kForStudent) keep(part, step, s);
            if constexpr (P::kKeeps == Keeps::kForTeacher) keep(part + step, step, t);
          }
        });
        // The copies that come to the place of what was kept write by other means; reads are waited for.
        if constexpr (P::kKeeps != Keeps::kNothing) async_fence();
        if (at_edge >= 0) P::terms(edge_s, edge_t, known, p.beta, sums);
        sums = cluster_reduce.template reduce<2>(
            merge_warp(sums), [](const Sums* of_warps, int count) { return merge_slots(of_warps, count); });
      }

      Outcome outcome = P::outcome(known, sums, p.beta, weight * p.inverse_temperature);
      if (rank == 0 && threadIdx.x == 0) {
        write_results(p, r, row, weight * outcome.loss, of_student, of_teacher, outcome.slope);
        if (r.hard != nullptr) r.hard[row] = hard_loss(p, weight, of_student, at_label);
      }
      const bool labelled = is_class(p, y_now);
      const float at_target = p.cross_entropy == 0.0f ? 0.0f : labelled ? weight * p.cross_entropy : NAN;
      P::add(outcome, at_target * known.student_factor);
      const int target = at_target != 0.0f && labelled ? static_cast<int>(y_now) : -1;
      if (at_edge >= 0) {
        P::gradient(edge_s, edge_t, known, outcome);
        if (at_edge == target) edge_s[0] -= at_target;
        out[at_edge] = from_float<G>(edge_s[0]);
      }
      if (next.valid) load_rest(next, row_next);
      const bool out_aligned = reinterpret_cast<uintptr_t>(out + now.aligned.head) % sizeof(Vec<G, N>) == 0;
      const T* const rows_next[] = {next.row, teacher_of(row_next)};
      slices.last_pass(now, next, rows_next, [&](auto count, const T* part, int column) {
        // Of the whole warp; a negative difference is a large one.
        const bool plain = out_aligned && static_cast<unsigned>(target - column + lane * N) >=
                                              static_cast<unsigned>(count * 32 * N);
        if (plain) {
          constexpr int kBatch = count < 2 ? 1 : 2;  // gradients that are made side by side
#pragma unroll
          for (int u = 0; u < count; u += kBatch) {
            float s[kBatch][N], t[kBatch][N];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) load_pair<P::kKeeps>(part + (u + i) * 32 * N, step, s[i], t[i]);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              P::gradient(s[i], t[i], known, outcome);
              store_gradient(out + column + (u + i) * 32 * N, s[i]);
            }
          }
        } else {
#pragma unroll 1
          for (int u = 0; u < count; ++u, part += 32 * N, column += 32 * N) {
            float s[N], t[N];
            load_pair<P::kKeeps>(part, step, s, t);
            P::gradient(s, t, known, outcome);
#pragma unroll
            for (int i = 0; i < N; ++i) s[i] -= column + i == target ? at_target : 0.0f;
            out_aligned ? store_gradient(out + column, s) : ce::store_elements(out + column, pack<G>(s));
          }
        }
      });
    } else {
      if (next.valid) load_all(next, row_next);
      ce::write_zeros<G, true>(out, p.vocab, rank, plan.blocks);
      if (rank == 0 && threadIdx.x == 0) {
        const Normaliser none{0.0f, 0.0f, 0.0f};
        write_results(p, r, row, 0.0f * r.weights[row], none, none, 0.0f);
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
