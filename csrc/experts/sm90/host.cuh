// SPDX-License-Identifier: BSD-3-Clause

// Host code of the grouped GEMMs: TMA descriptors, launches, arguments.
#pragma once

#include <climits>
#include <limits>
#include <optional>
#include <string>

#include "activation/activations.cuh"
#include "experts/host.h"
#include "experts/sm90/epilogues.cuh"
#include "host/launch/dispatch.h"
#include "lm_head/sm90/gemm/launch.cuh"

namespace liger::lm_head {

template <class Epilogue>
  requires requires { Epilogue::kGather; }
struct GemmOf<Epilogue> {
  static constexpr const char* kOp = experts::kOp;
  static constexpr auto kKernel = experts::grouped_gemm_kernel<Epilogue>;
  static constexpr int kSharedBytes = experts::kGroupedSharedBytes<Epilogue>;
  using Maps = experts::GroupedMaps;
};

}  // namespace liger::lm_head

namespace liger::experts {

// Calls body(TypeTag<__half | __nv_bfloat16>{}).
template <typename Body>
void dispatch_half(ScalarType dtype, const Body& body) {
  dtype == ScalarType::Half ? body(TypeTag<__half>{}) : body(TypeTag<__nv_bfloat16>{});
}

// Calls body(std::bool_constant<whether there are indices>{}).
template <typename Body>
void dispatch_gathers(const std::optional<Tensor>& indices, const Body& body) {
  indices ? body(std::true_type{}) : body(std::false_type{});
}

// A matrix per expert, (experts, rows, columns), or one matrix; in boxes of box_rows x kBox.
inline CUtensorMap map_of(const Tensor& matrices, int box_rows) {
  const int64_t rows = matrices.size(-2), columns = matrices.size(-1);
  const int64_t count = matrices.dim() == 3 ? matrices.size(0) : 1;
  return tensor_map(kOp, matrices.const_data_ptr(), {columns, rows, count}, {columns, rows * columns},
                    {kBox, box_rows, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
}

// indices: nullopt for rows that are gathered already.
template <typename T>
GatheredRows<T> gathered(const Tensor& rows, const std::optional<Tensor>& indices) {
  return {static_cast<const T*>(rows.const_data_ptr()),
          static_cast<int>(rows.size(1)),
          {data_of<void>(indices), indices && indices->scalar_type() == ScalarType::Long}};
}

inline Groups groups_of(const Tensor& ends, int64_t column_tiles, int64_t depth, int column_step = kColumns,
                        int half_offset = kHalfColumns) {
  return {.ends = static_cast<const int*>(ends.const_data_ptr()),
          .experts = static_cast<int>(ends.size(0)),
          .column_tiles = static_cast<int>(column_tiles),
          .k_blocks = static_cast<int>(ceil_div(depth, int64_t{kTileK})),
          .row_tiles = 0,
          .column_step = column_step,
          .half_offset = half_offset};
}

inline Gate gate_of(const std::string& activation, double alpha, std::optional<double> limit) {
  Gate gate{1.0f, 0.0f, 0.0f, limit ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity()};
  if (activation == "gelu_tanh") gate.linear = GeluTanh::kLinear, gate.cubic = GeluTanh::kCubic;
  if (activation == "gpt_oss") gate.linear = static_cast<float>(alpha), gate.offset = 1.0f;
  return gate;
}

// What the kernels require of operands that they read with 16 bytes at a time or by TMA.
inline void require_dense(const char* name, const Tensor& tensor) {
  require(tensor.is_contiguous() && tensor.size(-1) % 8 == 0 &&
              reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0,
          kOp, ": ", name, " has the shape ", shape_text(tensor),
          ", expected contiguous rows of a multiple of 8 elements, aligned to 16 bytes");
}

}  // namespace liger::experts
