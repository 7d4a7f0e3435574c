// SPDX-License-Identifier: BSD-3-Clause

// Tensors as operands of the kernels of device/elementwise.cuh.
#pragma once

#include "device/elementwise.cuh"
#include "host/torch.h"

namespace liger {

// The same rows without the first `column` columns.
inline InputRows part(const RowInput& rows, int64_t column = 0) {
  return {static_cast<const char*>(rows.data()) + column * rows.tensor.element_size(), rows.rows.stride};
}
inline OutputRows part(const RowOutput& rows, int64_t column = 0) {
  return {static_cast<char*>(rows.data()) + column * rows.written.element_size(), rows.rows.stride};
}

inline InputRows as_input(const OutputRows& rows) {
  return {rows.data, rows.stride};
}

// True if both tensors are dense with the same strides, so that they are one long row each.
inline bool one_long_row(const Tensor& tensor, const Tensor& other) {
  return is_dense(tensor) && same_strides(tensor, other);
}

// The extent of a non-empty tensor (..., columns).
inline Extent rows_and_columns(const Tensor& tensor, int64_t columns) {
  return {tensor.numel() / tensor.size(-1), columns};
}

}  // namespace liger
