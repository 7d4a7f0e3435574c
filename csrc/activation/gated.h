// SPDX-License-Identifier: BSD-3-Clause

// Host code of the gated products, activation(gate) * up, shared by all activations. "packed" takes gate and
// up as the two halves of the last dimension of one tensor.
#pragma once

#include <tuple>

#include "activation/gated.cuh"
#include "host/launch/dispatch.h"
#include "host/launch/elementwise.h"

namespace liger {

// Launches the kernels of one activation. The columns of p.extent are 16-byte vectors or elements.
using GatedLaunch = void (*)(const Gated& p, ScalarType dtype, bool vectorised, cudaStream_t stream);

template <typename Activation>
void launch_gated(const Gated& p, ScalarType dtype, bool vectorised, cudaStream_t stream) {
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    vectorised ? launch_gated<Activation, T, kVec<T>>(p, stream) : launch_gated<Activation, T, 1>(p, stream);
  });
}

// One op: its name in error messages, and the launcher of its activation.
struct GatedOp {
  const char* name;
  GatedLaunch launch;
};

Tensor gated(GatedOp op, const Tensor& gate, const Tensor& up);
std::tuple<Tensor, Tensor, Tensor> gated_backward(GatedOp op, const Tensor& grad_out, const Tensor& gate,
                                                  const Tensor& up, bool emit_product);
// In place: the gradients overwrite gate and up.
void gated_backward_(GatedOp op, const Tensor& grad_out, const Tensor& gate, const Tensor& up);
// In place, and the product overwrites grad_out.
void gated_backward_product_(GatedOp op, const Tensor& grad_out, const Tensor& gate, const Tensor& up);
Tensor gated_packed(GatedOp op, const Tensor& gate_up);
std::tuple<Tensor, Tensor> gated_packed_backward(GatedOp op, const Tensor& grad_out, const Tensor& gate_up,
                                                 bool emit_product);
void gated_packed_backward_(GatedOp op, const Tensor& grad_out, const Tensor& gate_up);

}  // namespace liger
