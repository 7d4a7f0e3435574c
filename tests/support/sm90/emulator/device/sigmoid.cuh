// SPDX-License-Identifier: BSD-3-Clause

// csrc/device/sigmoid.cuh on a CPU.
#pragma once

#include "machine.h"

namespace liger {

template <typename T>
float exponential(float x) {
  return std::exp(x);
}
template <typename T>
float reciprocal(float x) {
  return 1.0f / x;
}
template <typename T>
float sigmoid(float x) {
  return reciprocal<T>(1.0f + exponential<T>(-x));
}

}  // namespace liger
