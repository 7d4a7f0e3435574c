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

template <typename T, typename Rule, typename Shape>
bool launch(const char* op, const divergence::Problem& p, const divergence::Results& r, const EvenPlan& plan,
            const DeviceAttributes& device, cudaStream_t stream) {
  return launch_persistent<Shape>(op, divergence::rows_persistent<T, Rule, Shape>, plan, p.rows, device,
                                  stream, p, r);
}

// The kernel and plan that leave the fewest multiprocessors without work, since clusters do not fill all
// groups of them. The device and the length of rows alone decide, so that a row has the same bits in any
// batch.
struct Placement {
  bool (*launch)(const char*, const divergence::Problem&, const divergence::Results&, const EvenPlan&,
                 const DeviceAttributes&, cudaStream_t) = nullptr;
  EvenPlan plan{};
  float filled = 0.0f;  // share of the blocks that the multiprocessors have room for

  // With the fewest blocks for a row, or one more. Of equal ones the first considered stays.
  template <typename T, typename Rule, typename Shape>
  void consider(const char* op, int64_t row_vectors, const DeviceAttributes& device) {
    const void* const kernel = reinterpret_cast<const void*>(divergence::rows_persistent<T, Rule, Shape>);
    const int room = device.multiprocessors * Shape::kResident;
    EvenPlan next{};
    for (int i = 0; i < 2; ++i) {
      next =
          Shape::plan(row_vectors, next.blocks + 1, kPortableCluster, device.shared_memory_per_block_optin);
      if (next.pieces == 0) return;
      cudaLaunchAttribute cluster{};
      const cudaLaunchConfig_t config =
          in_clusters(next.blocks, Shape::kThreads, Shape::shared_bytes(next), nullptr, cluster);
      const int held = held_clusters(op, kernel, config, device) * next.blocks;
      const float share = static_cast<float>(held) / static_cast<float>(room);
      if (share > filled) launch = liger::launch<T, Rule, Shape>, plan = next, filled = share;
    }
  }
};

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
      using One = EvenShape<512, 4, divergence::PairStats, kKept, 1>;
      Placement place;
      place.template consider<T, Rule, Three>(op, row_vectors, device);
      place.template consider<T, Rule, Two>(op, row_vectors, device);
      place.template consider<T, Rule, One>(op, row_vectors, device);
      launched = place.launch != nullptr && place.launch(op, p, r, place.plan, device, stream);
    });
  });
  return launched;
}

}  // namespace liger
