// What the launches of the divergence kernels share.
#pragma once

#include <string>

#include "common/torch.h"
#include "kernels/divergence.cuh"

namespace liger {

// Calls body(Rule{}) with the rule of that name, which was checked.
template <typename Body>
void dispatch_divergence(const std::string& name, Body&& body) {
  if (name == "forward_kl") {
    body(divergence::ForwardKl{});
  } else if (name == "reverse_kl") {
    body(divergence::ReverseKl{});
  } else if (name == "jsd") {
    body(divergence::Jsd{});
  } else {
    body(divergence::Tvd{});
  }
}

// Whether rows at these strides are all as far from a 16-byte boundary as those of the student.
template <typename T>
bool aligned_with_student(const divergence::Problem& p, const void* other, int64_t stride) {
  const auto position = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  return position(p.student) == position(other) &&
         (p.student_stride - stride) % static_cast<int64_t>(kVec<T>) == 0;
}

// Loss and gradient in one read of the rows. False, without a launch, where the device, the rows or the
// options do not allow it.
bool launch_divergence_persistent(const char* op, const std::string& divergence,
                                  const divergence::Problem& problem, const divergence::Results& results,
                                  ScalarType dtype, int device, cudaStream_t stream);

}  // namespace liger
