// The launches of divergences whose rows stay in shared memory.
#include "common/cluster_launch.h"
#include "common/dispatch.h"
#include "common/integers.h"
#include "divergence.h"
#include "kernels/divergence_persistent.cuh"

namespace liger {
namespace {

// Bytes of a row of both tensors from which on it pays that they stay.
constexpr int64_t kPersistent = 16 << 10;
// Where the jsd of 151936 classes fits into nine blocks, two of them on a multiprocessor.
constexpr int kLargeCluster = 10;

template <typename T, typename Rule, typename Shape>
bool launch(const char* op, const divergence::Problem& p, const divergence::Results& r, int64_t row_vectors,
            int most_blocks, const DeviceAttributes& device, cudaStream_t stream) {
  const EvenPlan plan = Shape::plan(row_vectors, most_blocks, device.shared_memory_per_block_optin);
  return plan.pieces > 0 && launch_persistent<Shape>(op, divergence::rows_persistent<T, Rule, Shape>, plan,
                                                     p.rows, device, stream, p, r);
}

}  // namespace

bool launch_divergence_persistent(const char* op, const std::string& divergence, const divergence::Problem& p,
                                  const divergence::Results& r, ScalarType dtype, int device_index,
                                  cudaStream_t stream) {
  const DeviceAttributes& device = device_attributes(device_index);
  if (device.capability < 90 || p.log_probs) return false;
  bool launched = false;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
    if (2 * row_vectors * 16 < kPersistent || !aligned_with_student<T>(p, p.teacher, p.teacher_stride))
      return;
    dispatch_divergence(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      constexpr int kKept = divergence::kept_vectors<T, Rule>();
      // So many blocks on a multiprocessor, each with a row of its own, or a part of one.
      using Three = EvenShape<256, 2, divergence::PairStats, kKept, 3>;
      using Two = EvenShape<256, 4, divergence::PairStats, kKept, 2>;
      using One = EvenShape<512, 2, divergence::PairStats, kKept, 1>;
      launched = launch<T, Rule, Three>(op, p, r, row_vectors, 2, device, stream) ||
                 launch<T, Rule, Two>(op, p, r, row_vectors, kKept > 2 ? kLargeCluster : kPortableCluster,
                                      device, stream) ||
                 launch<T, Rule, One>(op, p, r, row_vectors, kPortableCluster, device, stream);
    });
  });
  return launched;
}

}  // namespace liger
