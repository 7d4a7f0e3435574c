// Chooses and launches the row kernel of cross_entropy and fused_linear_ce: streamed, shared-memory or
// persistent rows.
#include <algorithm>
#include <climits>

#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/rows_persistent.cuh"
#include "device/integers.h"
#include "host/cluster_launch.h"
#include "host/dispatch.h"
#include "host/persistent_launch.h"

namespace liger {
namespace {

// How rows_smem splits a row over a cluster. blocks == 0: no cluster size holds the row.
struct ClusterRowPlan {
  int blocks, slice_vectors, threads;
};

// Upper bound of the static shared memory of rows_smem.
constexpr int kStaticSharedMemory = 4 << 10;
// Bytes of a row from which on rows_persistent is faster (docs/performance/cross_entropy.md).
constexpr int64_t kMinPersistentBytes = 128 << 10;

// Candidates in order of preference. Three blocks per SM: one computes while the others load and store. Two
// blocks with a whole row each come before clusters, because the blocks of a cluster wait for each other. The
// driver reserves 1 KB of shared memory per resident block.
ClusterRowPlan plan_cluster_rows(int64_t row_vectors, int shared_memory_optin, int max_threads) {
  struct Candidate {
    int blocks_per_sm, max_blocks;
  };
  for (const Candidate candidate : {Candidate{3, 1}, Candidate{2, 1}, Candidate{3, ce::kMaxCluster},
                                    Candidate{2, ce::kMaxCluster}, Candidate{1, ce::kMaxCluster}}) {
    const int available = (shared_memory_optin + 1024) / candidate.blocks_per_sm - 1024 - kStaticSharedMemory;
    for (int blocks = 1; blocks <= candidate.max_blocks; ++blocks) {
      const int64_t slice = ceil_div(row_vectors, blocks);
      if (slice * 16 > available) continue;
      // About four vectors per thread.
      const int64_t threads = std::clamp<int64_t>(ceil_div(slice, 4 * 32) * 32, 32, max_threads);
      return {blocks, static_cast<int>(slice), static_cast<int>(threads)};
    }
  }
  return {0, 0, 0};
}

// Returns false if no cluster size holds a row.
template <typename T>
bool launch_persistent(const char* op, const ce::Problem& p, int64_t row_vectors,
                       const DeviceAttributes& device, cudaStream_t stream) {
  using Shape = PersistentShape<512, 4, ce::Stats<false>, 1, 1>;
  PersistentLaunch<ce::Problem> launch(op, row_vectors, device);
  launch.template add_candidate<Shape>(ce::rows_persistent<T, Shape>);
  return launch.run(p.rows, stream, p);
}

template <typename T, bool kExtras>
void launch_smem(const char* op, const ce::Problem& p, const ClusterRowPlan& r, cudaStream_t stream) {
  require(p.rows * r.blocks <= INT_MAX, op, ": ", p.rows, " rows are more than one launch can take");
  const auto kernel = ce::rows_smem<T, kExtras>;
  check_cuda(allow_shared_memory(reinterpret_cast<const void*>(kernel), Carveout::kShared), op);
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config = cluster_config(r.blocks, r.threads, r.slice_vectors * 16, stream, cluster);
  config.gridDim.x = static_cast<unsigned>(p.rows * r.blocks);
  check_cuda(cudaLaunchKernelEx(&config, kernel, p, r.slice_vectors, r.blocks), op);
}

template <typename T, bool kExtras>
void launch_rows_as(const char* op, const ce::Problem& p, int device, cudaStream_t stream) {
  const DeviceAttributes& attributes = device_attributes(device);
  const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
  if (p.gradient != nullptr && attributes.code.architecture >= 90) {
    if constexpr (!kExtras) {
      if (row_vectors * 16 >= kMinPersistentBytes &&
          launch_persistent<T>(op, p, row_vectors, attributes, stream)) {
        return;
      }
    }
    // The block size limit leaves registers for three blocks per SM.
    const ClusterRowPlan r = plan_cluster_rows(row_vectors, attributes.shared_memory_per_block_optin,
                                               kExtras ? 320 : ce::kMaxThreads);
    if (r.blocks > 0) {
      launch_smem<T, kExtras>(op, p, r, stream);
      return;
    }
  }
  require(p.rows <= INT_MAX, op, ": ", p.rows, " rows are more than one launch can take");
  // Four vectors in flight per thread.
  const int64_t threads = std::clamp<int64_t>(ceil_div(row_vectors, 4 * 32) * 32, 32, ce::kMaxThreads);
  ce::rows_streamed<T, kExtras>
      <<<static_cast<unsigned>(p.rows), static_cast<unsigned>(threads), 0, stream>>>(p);
  check_launch(op);
}

}  // namespace

void launch_rows(const char* op, ce::Problem problem, ScalarType dtype, bool write_gradient, int device,
                 cudaStream_t stream) {
  if (problem.rows == 0) return;
  if (!write_gradient) {
    problem.gradient = nullptr;
  } else if (problem.gradient == nullptr) {
    problem.gradient = const_cast<void*>(problem.logits);
    problem.gradient_stride = problem.row_stride;
  }
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.extras == 0) {
      launch_rows_as<T, false>(op, problem, device, stream);
    } else {
      launch_rows_as<T, true>(op, problem, device, stream);
    }
  });
}

}  // namespace liger
