#include "linear_ce/sm90/tile_mass.cuh"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <optional>

#include "device/integers.h"
#include "device/reduce.cuh"
#include "host/torch.h"

namespace liger::linear_ce {
namespace {

constexpr const char* kOp = "count_tile_mass";
constexpr int kThreads = 256;

// Process-wide, since the backward of a call may run in another thread.
constexpr int kMaxDevices = 128;
std::atomic<TileMassCounts*> counts_of_device[kMaxDevices];

// A block counts the tiles of 128 rows. A row below a threshold has sum < threshold * total: the product with a power
// of two is exact. grid: tiles of rows.
__global__ void __launch_bounds__(kThreads) count_tile_mass(const TileMass p) {
  // A copy: device code cannot read an array in host memory.
  constexpr float kThresholds[] = {kTileMassThresholds[0], kTileMassThresholds[1], kTileMassThresholds[2]};
  __shared__ float totals[sm90::kTileM];
  __shared__ int target_tiles[sm90::kTileM];
  __shared__ TileMassCounts block;
  const int row0 = blockIdx.x * sm90::kTileM, rows = min(p.chunk() - row0, sm90::kTileM);
  if (rows <= 0) return;
  if (threadIdx.x == 0) block = {};
  const float* const sums = p.sums + int64_t{row0} * p.columns;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
    float total = 0.0f;
    for (int i = lane; i < p.columns; i += 32) total += sums[int64_t{row} * p.columns + i];
    total = warp_reduce<Sum>(total);
    if (lane != 0) continue;
    // A row with NaN or infinity is below no threshold.
    totals[row] = isfinite(total) ? total : 0.0f;
    const int64_t target = p.targets[p.index[row0 + row]];
    target_tiles[row] =
        target >= 0 && target < p.vocab ? static_cast<int>(target / sm90::kPingpongColumns) : -1;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < p.columns; column += kThreads) {
    bool below[kTileMassThresholdCount], has_target = false;
#pragma unroll
    for (bool& b : below) b = true;
    for (int row = 0; row < rows; ++row) {
      const float sum = sums[int64_t{row} * p.columns + column], total = totals[row];
      has_target |= target_tiles[row] == column;
#pragma unroll
      for (int i = 0; i < kTileMassThresholdCount; ++i) below[i] &= sum < kThresholds[i] * total;
    }
    atomicAdd(&block.tiles, 1ull);
    if (!has_target) atomicAdd(&block.tiles_without_target, 1ull);
#pragma unroll
    for (int i = 0; i < kTileMassThresholdCount; ++i) {
      if (!below[i]) continue;
      atomicAdd(&block.below[i], 1ull);
      if (!has_target) atomicAdd(&block.below_without_target[i], 1ull);
    }
  }
  __syncthreads();
  constexpr int kNumbers = sizeof(TileMassCounts) / sizeof(unsigned long long);
  if (threadIdx.x < kNumbers) {
    const auto* const from = reinterpret_cast<const unsigned long long*>(&block);
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counts) + threadIdx.x, from[threadIdx.x]);
  }
}

// The memory must remain valid while counting is on, and as long as a graph that was captured meanwhile is replayed.
void set_counts(int64_t device, std::optional<Tensor> counts) {
  require(device >= 0 && device < kMaxDevices, kOp, ": device index ", device, " is out of range");
  constexpr int64_t kNumbers = sizeof(TileMassCounts) / sizeof(int64_t);
  if (counts) {
    require(counts->is_cuda() && counts->get_device_index() == device &&
                counts->scalar_type() == ScalarType::Long && counts->is_contiguous() &&
                counts->numel() == kNumbers,
            kOp, ": counts is ", dtype_name(counts->scalar_type()), " of shape ", shape_text(*counts), " on ",
            device_text(*counts), ", expected ", kNumbers, " contiguous int64 on device ", device);
  }
  counts_of_device[device] = counts ? static_cast<TileMassCounts*>(counts->mutable_data_ptr()) : nullptr;
}

}  // namespace

TileMassCounts* tile_mass_counts(int device) {
  return counts_of_device[device].load(std::memory_order_relaxed);
}

void launch_count_tile_mass(const TileMass& mass, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(ceil_div(mass.chunk.rows, sm90::kTileM));
  count_tile_mass<<<tiles, kThreads, 0, stream>>>(mass);
  check_launch(kOp);
}

// clang-format off: a schema is one line, whatever its length.
STABLE_TORCH_LIBRARY_FRAGMENT(liger_sm90, m) {
  // Switches the counter of a device on, or off with None. counts: the memory of TileMassCounts, which later calls of
  // other ops write.
  m.def("count_tile_mass(int device, Tensor? counts) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(liger_sm90, CompositeExplicitAutograd, m) {
  m.impl("count_tile_mass", TORCH_BOX(&set_counts));
}

}  // namespace liger::linear_ce
