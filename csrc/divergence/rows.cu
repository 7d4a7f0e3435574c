// The launches of divergences whose rows stay in shared memory.
#include "device/integers.h"
#include "divergence/divergence.h"
#include "divergence/rows_persistent.cuh"
#include "host/persistent_launch.h"

namespace liger {
namespace {

// Bytes of a row of both tensors from which on it pays that they stay.
constexpr int64_t kPersistent = 16 << 10;

}  // namespace

bool launch_divergence_persistent(const char* op, const std::string& divergence, const divergence::Problem& p,
                                  const divergence::Results& r, ScalarType dtype, ScalarType gradient_dtype,
                                  int device_index, cudaStream_t stream) {
  const DeviceAttributes& device = device_attributes(device_index);
  if (device.code.architecture < 90 || p.log_probs) return false;
  bool launched = false;
  dispatch_gradient(dtype, gradient_dtype, [&](auto tag, auto of_gradient) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(of_gradient)::type;
    const int64_t row_vectors = ceil_div(p.vocab, kVec<T>);
    if (2 * row_vectors * 16 < kPersistent || !aligned_with_student<T>(p, p.teacher, p.teacher_stride))
      return;
    dispatch_divergence(divergence, [&](auto rule) {
      using Rule = decltype(rule);
      constexpr int kCopies = divergence::kept_vectors<T, Rule>();
      // So many blocks on an SM, each with a row of its own, or a part of one.
      using Three = PersistentShape<256, 2, divergence::PairStats, kCopies, 3>;
      using Two = PersistentShape<256, 4, divergence::PairStats, kCopies, 2>;
      using One = PersistentShape<512, 4, divergence::PairStats, kCopies, 1>;
      PersistentLaunch<divergence::Problem, divergence::Results> launch(op, row_vectors, device);
      launch.template add_candidate<Three>(divergence::rows_persistent<T, G, Rule, Three>);
      launch.template add_candidate<Two>(divergence::rows_persistent<T, G, Rule, Two>);
      launch.template add_candidate<One>(divergence::rows_persistent<T, G, Rule, One>);
      launched = launch.run(p.rows, stream, p, r);
    });
  });
  return launched;
}

}  // namespace liger
