// The launches of the row kernels of cross_entropy and fused_linear_ce.
#include <algorithm>
#include <climits>

#include "common/dispatch.h"
#include "common/integers.h"
#include "cross_entropy.h"
#include "kernels/cross_entropy_rows.cuh"

namespace liger {
namespace {

// How a row is spread over shared memory, or blocks == 0 where it is not.
struct Residence {
  int blocks, slice_vectors, threads;
};

// What a block of rows_resident keeps for itself, rounded up.
constexpr int kOwnSharedMemory = 4 << 10;

// Three blocks on a multiprocessor, so that one computes while the others load and store; fewer only where
// the row is too long for that, or where two keep whole rows: blocks of a cluster wait for each other. Each
// block takes 1 KB of a multiprocessor beside what it can use.
Residence residence(int64_t row_vectors, int shared_memory_optin, int max_threads) {
  struct Choice {
    int resident, most_blocks;
  };
  for (const Choice choice : {Choice{3, 1}, Choice{2, 1}, Choice{3, ce::kMaxCluster},
                              Choice{2, ce::kMaxCluster}, Choice{1, ce::kMaxCluster}}) {
    const int available = (shared_memory_optin + 1024) / choice.resident - 1024 - kOwnSharedMemory;
    for (int blocks = 1; blocks <= choice.most_blocks; ++blocks) {
      const int64_t slice = ceil_div(row_vectors, blocks);
      if (slice * 16 > available) continue;
      const int64_t threads = std::clamp<int64_t>(ceil_div(slice, 4 * 32) * 32, 32, max_threads);
      return {blocks, static_cast<int>(slice), static_cast<int>(threads)};
    }
  }
  return {0, 0, 0};
}

template <typename T, bool kExtras>
void launch_rows_as(const char* op, const ce::Problem& p, int device, cudaStream_t stream) {
  const DeviceAttributes& attributes = device_attributes(device);
  const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
  Residence r = {0, 0, 0};
  if (p.gradient != nullptr && attributes.capability >= 90) {
    // As many threads as the registers of three blocks allow.
    r = residence(row_vectors, attributes.shared_memory_per_block_optin, kExtras ? 320 : ce::kMaxThreads);
  }
  require(p.rows * std::max(r.blocks, 1) <= INT_MAX, op, ": ", p.rows,
          " rows are more than one launch can take");
  if (r.blocks == 0) {
    // Four vectors in flight per thread.
    const int64_t threads = std::clamp<int64_t>(ceil_div(row_vectors, 4 * 32) * 32, 32, ce::kMaxThreads);
    ce::rows_streamed<T, kExtras>
        <<<static_cast<unsigned>(p.rows), static_cast<unsigned>(threads), 0, stream>>>(p);
    check_launch(op);
    return;
  }

  const auto kernel = ce::rows_resident<T, kExtras>;
  // The same values in every call: another thread may launch this kernel for another vocabulary in between.
  const int most = attributes.shared_memory_per_block_optin - kOwnSharedMemory;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), op);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             op);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.rows * r.blocks));
  config.blockDim = dim3(static_cast<unsigned>(r.threads));
  config.dynamicSmemBytes = static_cast<size_t>(r.slice_vectors) * 16;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(r.blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, p, r.slice_vectors, r.blocks), op);
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
