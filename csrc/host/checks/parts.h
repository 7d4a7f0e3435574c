// SPDX-License-Identifier: BSD-3-Clause

// Elementary checks for the checks of the ops.
#pragma once

#include "host/checks/checks.h"

namespace liger {

// Numbers that kernels take: float32 numbers, and divisors whose reciprocal does not overflow.
bool in_float32(double value);
bool is_positive_float32(double value);
// Text for a message: the reason why a finite number of another type is out of range; else empty.
std::string float32_range(double value);

void check_floating(const std::string& op, const char* name, const Tensor& tensor);
void check_same_device(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other);
void check_same_dtype(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                      const Tensor& other);
void check_same_shape(const std::string& op, const char* name, const Tensor& tensor, const char* other_name,
                      const Tensor& other);
void check_vector(const std::string& op, const char* name, const Tensor& tensor, int64_t length,
                  const char* of);

}  // namespace liger
