// The launches of the row kernels of cross_entropy and fused_linear_ce.
#include <algorithm>
#include <climits>

#include "common/dispatch.h"
#include "common/integers.h"
#include "cross_entropy.h"
#include "kernels/cross_entropy_persistent.cuh"

namespace liger {
namespace {

// What a block of rows_resident keeps for itself, rounded up.
constexpr int kOwnSharedMemory = 1 << 10;

// The longest row, in bytes, of which a multiprocessor keeps two: while the block of one computes, the other
// loads and stores. Each block takes 1 KB of a multiprocessor beside what it can use.
int longest_of_two(int shared_memory_optin) {
  return (shared_memory_optin + 1024) / 2 - 1024 - kOwnSharedMemory;
}

// The same value in every call: another thread may launch this kernel for another vocabulary in between.
void allow_shared_memory(const char* op, const void* kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             op);
}

// Four vectors in flight per thread.
unsigned threads_for(int64_t row_vectors, int most) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(row_vectors, 4 * 32) * 32, 32, most));
}

// False where no cluster of this device holds a row.
template <typename T, bool kExtras>
bool launch_persistent(const char* op, const ce::Problem& p, int64_t row_vectors,
                       const DeviceAttributes& device, cudaStream_t stream) {
  using Shape = ce::Persistent<kExtras>;
  const ce::PersistentPlan plan = Shape::plan(row_vectors, kExtras, device.shared_memory_per_block_optin);
  if (plan.pieces == 0) return false;
  const auto kernel = ce::rows_persistent<T, kExtras, Shape>;
  allow_shared_memory(op, reinterpret_cast<const void*>(kernel), device.shared_memory_per_block_optin);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::shared_bytes(plan.pieces, plan.blocks, kExtras);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(plan.blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;

  int held = device.multiprocessors;
  if (plan.blocks > 1) {
    // Clusters lie in groups of multiprocessors, which they may not fill.
    check_cuda(cudaOccupancyMaxActiveClusters(&held, kernel, &config), op);
    if (held == 0) return false;
  }
  config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(p.rows, held) * plan.blocks);
  check_cuda(cudaLaunchKernelEx(&config, kernel, p, plan), op);
  return true;
}

template <typename T, bool kExtras>
void launch_rows_as(const char* op, const ce::Problem& p, int device, cudaStream_t stream) {
  const DeviceAttributes& attributes = device_attributes(device);
  const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
  const bool one_read = p.gradient != nullptr && attributes.capability >= 90;
  const int most = longest_of_two(attributes.shared_memory_per_block_optin);
  const bool resident = one_read && row_vectors * 16 <= most;
  if (one_read && !resident && launch_persistent<T, kExtras>(op, p, row_vectors, attributes, stream)) return;

  require(p.rows <= INT_MAX, op, ": ", p.rows, " rows are more than one launch can take");
  const auto rows = static_cast<unsigned>(p.rows);
  if (resident) {
    const auto kernel = ce::rows_resident<T, kExtras>;
    allow_shared_memory(op, reinterpret_cast<const void*>(kernel), most);
    // As many threads as the registers of three blocks allow.
    const unsigned threads = threads_for(row_vectors, kExtras ? 320 : ce::kMaxThreads);
    kernel<<<rows, threads, static_cast<size_t>(row_vectors) * 16, stream>>>(p);
  } else {
    ce::rows_streamed<T, kExtras><<<rows, threads_for(row_vectors, ce::kMaxThreads), 0, stream>>>(p);
  }
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
