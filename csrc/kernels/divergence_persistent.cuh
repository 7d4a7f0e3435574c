// Two rows of logits -> their divergence and its gradient in one read and one write of memory (sm_90 and
// later), by blocks that stay on the device, as in cross_entropy_persistent.cuh: a warp has a part of the row
// of the student and the same part of that of the teacher in every piece of shared memory, and has those of
// the next row come to their place when it has stored their gradient. Two or three blocks on a
// multiprocessor, each with a row of its own, compute while the others wait for memory or for each other.
#pragma once

#include "kernels/cross_entropy_rows.cuh"
#include "kernels/divergence_passes.cuh"
#include "kernels/persistent_rows.cuh"

namespace liger::divergence {

// Vectors of shared memory for one of each row.
template <typename T, typename Rule>
constexpr int kept_vectors() {
  return std::is_same_v<Rule, Jsd> && sizeof(T) == 2 ? 3 : 2;
}

// grid: clusters of plan.blocks blocks, at most as many clusters as rows. Shape: PersistentShape. The rows of
// student and teacher are equally far from a 16-byte boundary.
template <typename T, typename Rule, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    rows_persistent(const Problem p, const Results r, const PersistentPlan plan) {
#if __CUDA_ARCH__ >= 900
  using P = Passes<Rule>;
  using Parts = KeptParts<T, Shape>;
  constexpr int N = kVec<T>, kTensor = Parts::kTensor;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % plan.blocks;
  const int64_t row_step = gridDim.x / plan.blocks;
  Parts parts(memory, plan);

  const auto teacher_of = [&](int64_t row) { return row_at<T>(p.teacher, p.teacher_stride, row); };
  // By one lane.
  const auto load_part = [&](const Slice<T>& s, const T* teacher, int k) {
    const T* const rows[] = {s.row, teacher};
    parts.load_part(s, rows, k);
  };
  Vec<T, 1> student_edge = {}, teacher_edge = {};
  float weight = 0.0f;
  const auto load_rest = [&](const Slice<T>& s, int64_t row) {
    weight = r.weights[row];
    const int column = s.edge_column(rank, p.vocab);
    if (column >= 0) student_edge.v[0] = s.row[column], teacher_edge.v[0] = teacher_of(row)[column];
  };
  const auto load_all = [&](const Slice<T>& s, int64_t row) {
    if (lane == 0) {
      for (int k = 0; k < plan.pieces; ++k) load_part(s, teacher_of(row), k);
    }
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

  if (plan.blocks > 1) cluster_arrive_relaxed();
  int64_t row = blockIdx.x / plan.blocks;
  int64_t y_now = target_of(row), y_next = target_of(row + row_step);
  Slice<T> now = slice_of(row, y_now);
  if (now.live) load_all(now, row);
  __syncwarp();
  if (plan.blocks > 1) cluster_wait();  // every block has started: its shared memory may be written

  for (; row < p.rows; row += row_step) {
    const int64_t row_next = row + row_step;
    const Slice<T> next = slice_of(row_next, y_next);
    const int64_t y_after = target_of(row_next + row_step);
    T* const out = static_cast<T*>(r.gradient) + row * r.gradient_stride;
    if (now.live) {
      Running<P::kCross> running;
      for (int k = 0; k < plan.pieces; ++k) {
        parts.wait(k);
        parts.over_piece(now, k, [&](auto count, const T* part, int) {
          Vec<T, N> student[count], teacher[count];
#pragma unroll
          for (int u = 0; u < count; ++u) {
            student[u] = load<T, N>(part + u * 32 * N);
            teacher[u] = load<T, N>(part + u * 32 * N + kTensor);
          }
          running.add(student, teacher, p.exp2_scale);
        });
      }
      parts.next_row();
      const int at_edge = now.edge_column(rank, p.vocab);
      if (at_edge >= 0) running.add({student_edge}, {teacher_edge}, p.exp2_scale);
      merge_row<P::kCross>(running.stats, parts.slots, rank, plan.blocks, p.exp2_scale);
      parts.swap_slots();
      Normaliser of_student, of_teacher;
      const Known known(running.stats, p, &of_student, &of_teacher);

      float edge_s[1], edge_t[1];
      unpack(student_edge, edge_s);
      unpack(teacher_edge, edge_t);
      Sums sums = {0.0f, 0.0f};
      if constexpr (P::kTerms) {
        for (int k = 0; k < plan.pieces; ++k) {
          parts.over_piece(now, k, [&](auto count, T* part, int) {
#pragma unroll
            for (int u = 0; u < count; ++u, part += 32 * N) {
              float s[N], t[N];
              unpack(load<T, N>(part), s);
              unpack(load<T, N>(part + kTensor), t);
              P::terms(s, t, known, p.beta, sums);
              if constexpr (P::kKeeps) {
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                  store_shared(part + (1 + i / 4) * kTensor, t[i], t[i + 1], t[i + 2], t[i + 3]);
                }
              }
            }
          });
        }
        if (at_edge >= 0) P::terms(edge_s, edge_t, known, p.beta, sums);
        merge_row(sums, reinterpret_cast<Sums*>(parts.slots), rank, plan.blocks);
        parts.swap_slots();
      }

      Outcome outcome = P::outcome(known, sums, p.beta, weight * p.inverse_temperature);
      if (rank == 0 && threadIdx.x == 0) {
        write_results(p, r, row, weight * outcome.loss, of_student, of_teacher, outcome.slope);
      }
      const float at_target = weight * p.cross_entropy;
      P::add(outcome, at_target * known.student_factor);
      const int target = at_target == 0.0f ? -1 : static_cast<int>(y_now);
      if (at_edge >= 0) {
        P::gradient(edge_s, edge_t, known, outcome);
        if (at_edge == target) edge_s[0] -= at_target;
        out[at_edge] = from_float<T>(edge_s[0]);
      }
      if (next.live) load_rest(next, row_next);
      const bool aligned = ce::aligned_alike(now.row, out);
      const T* const teacher_next = teacher_of(row_next);
      for (int k = 0; k < plan.pieces; ++k) {
        parts.over_piece(now, k, [&](auto count, const T* part, int column) {
#pragma unroll
          for (int u = 0; u < count; ++u, part += 32 * N, column += 32 * N) {
            float s[N], t[N];
            unpack(load<T, N>(part), s);
            if constexpr (P::kKeeps) {
#pragma unroll
              for (int i = 0; i < N; i += 4) {
                const auto kept =
                    load<float, 4>(reinterpret_cast<const float*>(part + (1 + i / 4) * kTensor));
#pragma unroll
                for (int j = 0; j < 4; ++j) t[i + j] = kept.v[j];
              }
            } else {
              unpack(load<T, N>(part + kTensor), t);
            }
            P::gradient(s, t, known, outcome);
            // A negative difference is a large one.
            if (static_cast<unsigned>(target - column) < static_cast<unsigned>(N)) {
#pragma unroll
              for (int i = 0; i < N; ++i) s[i] -= column + i == target ? at_target : 0.0f;
            }
            const Vec<T, N> d = pack<T>(s);
            aligned ? store_streaming(out + column, d) : ce::store_elements(out + column, d);
          }
        });
        // What was kept was written by other means than the copies that come to its place.
        if constexpr (P::kKeeps) async_fence();
        __syncwarp();  // all lanes have read the part
        if (lane == 0 && next.live) load_part(next, teacher_next, k);
      }
    } else {
      if (next.live) load_all(next, row_next);
      ce::write_zeros<T, true>(out, p.vocab, rank, plan.blocks);
      if (rank == 0 && threadIdx.x == 0) {
        const Normaliser none{0.0f, 0.0f, 0.0f};
        write_results(p, r, row, 0.0f * r.weights[row], none, none, 0.0f);
      }
    }
    now = next;
    y_now = y_next;
    y_next = y_after;
  }
#endif
}

}  // namespace liger::divergence
