// SPDX-License-Identifier: BSD-3-Clause

// Dispatch and alignment tests for the launches of the divergence kernels.
#pragma once

#include <string>
#include <type_traits>

#include "divergence/divergence.cuh"
#include "host/launch/dispatch.h"
#include "host/torch.h"

namespace liger {

// Calls body(Rule{}) with the rule of that name. The name has been checked before.
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

// True if every row of `other` (of dtype U) is as far, in elements, from a multiple of kVec<T> elements as
// the row of the student (of dtype T). Then vectors of kVec<T> elements are aligned in both.
template <typename T, typename U = T>
bool aligned_with_student(const divergence::Problem& p, const void* other, int64_t stride) {
  constexpr int64_t kElements = kVec<T>;
  const auto position = [](const void* pointer, size_t size) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) / size) % kElements;
  };
  return position(p.student, sizeof(T)) == position(other, sizeof(U)) &&
         (p.student_stride - stride) % kElements == 0;
}

// Calls body(TypeTag<T>{}, TypeTag<G>{}) with the dtypes of the logits and of their gradient, which have been
// checked before: the same, or any of the three for the gradient of float32 logits.
template <typename Body>
void dispatch_gradient(ScalarType logits, ScalarType gradient, Body&& body) {
  dispatch_dtype(logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, float>) {
      dispatch_dtype(gradient, [&](auto gradient_tag) { body(tag, gradient_tag); });
    } else {
      body(tag, tag);
    }
  });
}

// Loss and gradient in one read of the rows. Returns false without a launch if the device, the rows or the
// options do not allow it.
bool launch_divergence_smem(const char* op, const std::string& divergence, const divergence::Problem& problem,
                            const divergence::Results& results, ScalarType dtype, ScalarType gradient_dtype,
                            int device, cudaStream_t stream);

}  // namespace liger
