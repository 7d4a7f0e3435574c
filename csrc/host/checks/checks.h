// SPDX-License-Identifier: BSD-3-Clause

// Argument checks shared by every backend, which all raise the same messages: the CUDA ops call them
// directly, the Triton and torch backends through the liger::check_* ops. They read metadata only, never
// data.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace liger {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The shape of a tensor in a message. It is formatted where it is printed, since most calls have no error.
struct ShapeText {
  const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, const ShapeText& shape);
inline ShapeText shape_text(const Tensor& tensor) {
  return {tensor};
}

// Throws std::runtime_error, which becomes a RuntimeError with the same message in Python; STD_TORCH_CHECK
// would add file and line.
template <typename... Parts>
inline void require(bool condition, const Parts&... parts) {
  if (__builtin_expect(!condition, 0)) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }
}

std::string dtype_name(ScalarType dtype);
bool is_real_floating(ScalarType dtype);  // float16, bfloat16, float32, float64
bool same_device(const Tensor& a, const Tensor& b);
std::string device_text(const Tensor& tensor);

void check_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved);
void check_qk_norm_rope(const std::string& op, const Tensor& q, const Tensor& k,
                        const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                        const Tensor& cos, const Tensor& sin, const std::string& casting_mode,
                        double eps = 0.0, double offset = 0.0);
void check_tiled_mlp(const Tensor& x, const Tensor& gate_weight, const std::optional<Tensor>& up_weight,
                     const Tensor& down_weight, const std::optional<Tensor>& gate_bias,
                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                     const std::string& activation, std::optional<int64_t> num_shards,
                     std::optional<int64_t> memory_budget);
void check_cross_entropy(const std::string& op, const Tensor& logits, const Tensor& target,
                         const std::optional<Tensor>& ce_weight, const std::optional<Tensor>& token_weight,
                         const std::optional<Tensor>& denominator, double label_smoothing,
                         std::optional<double> softcap, const std::string& reduction);
void check_fused_linear_ce(const Tensor& input, const Tensor& weight, const Tensor& target,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& ce_weight,
                           const std::optional<Tensor>& token_weight,
                           const std::optional<Tensor>& denominator, double label_smoothing,
                           std::optional<double> softcap, const std::string& reduction,
                           std::optional<ScalarType> accum_dtype, std::optional<int64_t> memory_budget,
                           const std::string& op = "fused_linear_ce",
                           std::optional<ScalarType> logits_dtype = std::nullopt);
void check_divergence(const std::string& op, const Tensor& student, const Tensor& teacher,
                      const std::optional<Tensor>& target, const std::optional<Tensor>& row_weight,
                      const std::string& divergence, double beta, double temperature, bool log_probs);
// Checks `gradient`, to which an op writes the gradient of a divergence and a cross entropy. It may have a
// half type if the student is float32.
void check_divergence_gradient(const std::string& op, const Tensor& student,
                               const std::optional<Tensor>& target, double temperature, double cross_entropy,
                               const Tensor& gradient);
void check_fused_linear_divergence(const Tensor& input, const Tensor& weight, const Tensor& teacher,
                                   const std::optional<Tensor>& teacher_weight,
                                   const std::optional<Tensor>& teacher_indices,
                                   const std::optional<Tensor>& target, const std::optional<Tensor>& bias,
                                   const std::optional<Tensor>& teacher_bias,
                                   const std::optional<Tensor>& row_weight, const std::string& divergence,
                                   double beta, double temperature, double soft, double hard,
                                   std::optional<ScalarType> accum_dtype,
                                   std::optional<int64_t> memory_budget);
// For an op that writes the first `written` tensors: no element of these may share memory with another
// element, of the same tensor or of another tensor. All tensors are on one device.
void check_written(const std::string& op, const std::vector<std::string>& names,
                   const std::vector<Tensor>& tensors, int64_t written);
using NamedTensor = std::pair<const char*, std::optional<Tensor>>;
void check_written(const std::string& op, std::initializer_list<NamedTensor> written,
                   std::initializer_list<NamedTensor> read);

}  // namespace liger
