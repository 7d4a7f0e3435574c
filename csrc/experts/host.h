// SPDX-License-Identifier: BSD-3-Clause

// What the host code of the ops of grouped_experts shares.
#pragma once

#include <optional>

#include "host/torch.h"

namespace liger::experts {

inline constexpr const char* kOp = "grouped_experts";

template <typename T>
T* data_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.mutable_data_ptr());
}
template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

}  // namespace liger::experts
