// SPDX-License-Identifier: BSD-3-Clause

// Launches the kernels of divergences with rows in shared memory.
#include "device/integers.h"
#include "divergence/divergence.h"
#include "divergence/rows_smem.cuh"
#include "host/launch/smem_row.h"

namespace liger {
namespace {

// Bytes of a row of student and teacher together from which on shared memory is faster.
constexpr int64_t kMinSmemBytes = 16 << 10;

}  // namespace

bool launch_divergence_smem(const char* op, const std::string& divergence, const divergence::Problem& p,
                            const divergence::Results& r, ScalarType dtype, ScalarType gradient_dtype,
                            int device_index, cudaStream_t stream) {
  const DeviceAttributes& device = device_attributes(device_index);
  if (device.code.architecture < 90 || p.log_probs) return false;
  bool launched = false;
  dispatch_gradient(dtype, gradient_dtype, [&](auto tag, auto gradient_tag) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(gradient_tag)::type;
    const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
    if (2 * row_vectors * 16 < kMinSmemBytes || !aligned_with_student<T>(p, p.teacher, p.teacher_stride))
      return;
    dispatch_divergence(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      constexpr int kCopies = divergence::smem_copies<T, Rule>();
      // Blocks per SM. Each has its own pair of rows, or a slice of both.
      using ThreeBlocks = SmemRowShape<256, 2, divergence::PairStats, kCopies, 3>;
      using TwoBlocks = SmemRowShape<256, 4, divergence::PairStats, kCopies, 2>;
      using OneBlock = SmemRowShape<512, 4, divergence::PairStats, kCopies, 1>;
      SmemRowLaunch<divergence::Problem, divergence::Results> launch(op, row_vectors, device);
      launch.template add_candidate<ThreeBlocks>(divergence::rows_smem<T, G, Rule, ThreeBlocks>,
                                                 Grid::kPersistent);
      launch.template add_candidate<TwoBlocks>(divergence::rows_smem<T, G, Rule, TwoBlocks>,
                                               Grid::kPersistent);
      launch.template add_candidate<OneBlock>(divergence::rows_smem<T, G, Rule, OneBlock>, Grid::kPersistent);
      launched = launch.run(p.rows, stream, p, r);
    });
  });
  return launched;
}

}  // namespace liger
