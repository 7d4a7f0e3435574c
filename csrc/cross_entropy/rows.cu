// SPDX-License-Identifier: BSD-3-Clause

// Chooses and launches the row kernel of cross_entropy and fused_linear_ce: rows streamed or in shared
// memory.
#include <algorithm>
#include <climits>

#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/rows_smem.cuh"
#include "device/integers.h"
#include "host/launch/dispatch.h"
#include "host/launch/smem_row.h"

namespace liger {
namespace {

// rows_smem is faster for rows of at least this many bytes. For shorter rows the second read of rows_streamed
// hits the caches (docs/lab/cross_entropy.md).
template <bool kExtras>
constexpr int64_t kMinSmemBytes = (kExtras ? 32 : 16) << 10;

// Returns false if no cluster size holds a row.
template <typename T, bool kExtras>
bool launch_smem(const char* op, const ce::Problem& p, int64_t row_vectors, const DeviceAttributes& device,
                 cudaStream_t stream) {
  using Stats = ce::Stats<kExtras>;
  SmemRowLaunch<ce::Problem> launch(op, row_vectors, device);
  const auto add = [&](auto shape, Grid grid) {
    using Shape = decltype(shape);
    if (launch.blocks() == 0) launch.template add_candidate<Shape>(ce::rows_smem<T, kExtras, Shape>, grid);
  };
  if constexpr (kExtras) {
    // Fewer vectors per lane leave registers for more threads: extras are bound by arithmetic.
    add(SmemRowShape<256, 2, Stats, 1, 3>{}, Grid::kClusterPerRow);
  } else {
    add(SmemRowShape<128, 4, Stats, 1, 4>{}, Grid::kClusterPerRow);
    add(SmemRowShape<512, 4, Stats, 1, 1>{}, Grid::kPersistent);
  }
  return launch.run(p.rows, stream, p);
}

template <typename T, bool kExtras>
void launch_rows_as(const char* op, const ce::Problem& p, int device, cudaStream_t stream) {
  const DeviceAttributes& attributes = device_attributes(device);
  const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
  // The arithmetic of a softcap hides the second read, and rows_streamed has more threads per SM.
  const bool smem = p.gradient != nullptr && (p.extras & ce::kSoftcap) == 0 &&
                    attributes.code.architecture >= 90 && row_vectors * 16 >= kMinSmemBytes<kExtras>;
  if (smem && launch_smem<T, kExtras>(op, p, row_vectors, attributes, stream)) return;
  require(p.rows <= INT_MAX, op, ": ", p.rows, " rows are more than one launch can take");
  // Every thread has four vectors in flight.
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
