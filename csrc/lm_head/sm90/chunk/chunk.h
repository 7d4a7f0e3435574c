// SPDX-License-Identifier: BSD-3-Clause

// One chunk of rows on the wgmma engine: which kernels run, on which buffers. The caller allocates the
// buffers: fused_linear_ce, the losses (losses/losses.cu), or linear_backward. README.md draws the memory
// map.
#pragma once

#include <array>

#include "host/torch.h"
#include "lm_head/sm90/chunk/workspace.h"
#include "lm_head/sm90/epilogues/exponentials.cuh"
#include "lm_head/sm90/planner.h"
#include "lm_head/valid_rows.cuh"

namespace liger::lm_head {

// The memory of a tensor; null if it is empty.
template <typename T>
T* memory_of(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// Terms of bias, softcap and label smoothing. Pointers are null if the call has no such term. Vectors are
// float32, padded with zeros to whole tiles.
struct LogitTerms {
  LogitTransform transform;
  float* grad_bias_sum;  // (vocab), sum over the chunks so far
  Element16* grad_bias;  // (vocab), written by the last chunk
  // Label smoothing (logit_terms.cuh) also has:
  const float *class_sum, *bias_sum;  // class_weight @ weight, class_weight @ transform.bias
  float* row_sum;                     // coefficients @ input, for one chunk
  float* partial;                     // row_sum_elements(hidden)

  bool smoothing() const { return class_sum != nullptr; }
};

// The rows that are cut into chunks: a batch, or some of its rows. dense() has returned the tensors.
struct Batch {
  Tensor input, weight;  // (rows, hidden), (vocab, hidden)
  bool need_grad_input, need_grad_weight;
  bool with_metrics;  // entropies, argmax or sums of squared exponentials are requested
  float inverse_temperature;
  ce::Problem problem;             // for these rows, without logits
  valid_rows::RowIndex row_index;  // of these rows
  int device;
  cudaStream_t stream;
  LogitTerms terms{};
  // Sums of squared exponentials are requested. Not supported with a bias or softcap.
  bool with_squares = false;

  bool is_float16() const { return input.scalar_type() == ScalarType::Half; }
  int64_t rows() const { return input.size(0); }
  int64_t hidden() const { return input.size(1); }
  int64_t vocab() const { return weight.size(0); }
  int64_t panels() const { return sm90::panels(vocab()); }
  // Number of tiles in a row of logits.
  int64_t sums_per_row() const { return sm90::logits_tiles(vocab()); }
  bool need_grad_bias() const { return terms.grad_bias != nullptr; }
  // The GEMM of the weight gradient also computes the gradient of the bias.
  bool bias_in_grad_weight() const { return need_grad_bias() && need_grad_weight && !is_float16(); }
  bool need_gradient() const { return need_grad_input || need_grad_weight || need_grad_bias(); }
  // One-hot terms per class are needed.
  bool need_class_one_hot() const { return need_grad_weight || need_grad_bias(); }
};

// A batch without a problem, on the current stream.
inline Batch batch_of(const Tensor& input, const Tensor& weight, bool need_grad_input, bool need_grad_weight,
                      bool with_metrics, double temperature) {
  return {.input = input,
          .weight = weight,
          .need_grad_input = need_grad_input,
          .need_grad_weight = need_grad_weight,
          .with_metrics = with_metrics,
          .inverse_temperature = static_cast<float>(1.0 / temperature),
          .problem = {},
          .row_index = {},
          .device = input.get_device_index(),
          .stream = current_stream(input)};
}

// The buffers of one chunk, except its exponentials.
struct ChunkBuffers {
  Element16*
      input;  // (rows, hidden): the gathered rows; in the memory of their gradient or in a separate buffer
  float* target_logit;
  float* scale;
  float* tile_sums;
  int* overflow;
  OneHot* one_hot;
  float* partial;                   // split-K sums of the input gradient; null without splits
  int* semaphores;                  // one per tile of the input gradient; null without splits
  RowMetrics metrics;               // null without metrics
  float *weighted_sum, *smoothing;  // per row with label smoothing: weighted sum of the logits, coefficient
  __nv_bfloat16* split_scale;       // written by split_scales() if bias_in_grad_weight()
  RangeRows range;                  // null with bfloat16

  // separate_rows: the buffers include the gathered rows.
  static int64_t bytes(const Batch& batch, const PlannedChunk& chunk, bool separate_rows);
  // rows: the memory of the gathered rows; null if the buffers include them.
  static ChunkBuffers allocate(const Batch& batch, const PlannedChunk& chunk, Element16* rows,
                               Workspace& workspace);
};

// The weight gradient, which accumulates over all chunks, and the buffers per class.
struct GradWeightBuffers {
  Element16* gradient;  // (vocab, hidden), rounded up to panels of 128 rows; then plan.panel_offset panels
  unsigned char* panel_workspace;  // plan.workspace_panel_bytes for each panel of 128 classes and for each of
                                   // panel_offset panels
  OneHot* class_one_hot;           // per class, rounded up to panels, for the current chunk
  int* panel_read_counts;          // per panel, for the chunk with exponentials in the gradient's memory
};
inline int64_t class_one_hot_bytes(const Batch& batch) {
  return batch.panels() * sm90::kPanel * int64_t{sizeof(OneHot)};
}
int64_t panel_workspace_bytes(const Batch& batch, const LinearCePlan& plan);

struct FirstRowOfClass;
template <typename T>
struct Rule;
template <typename T>
struct GradInput;
template <typename T>
struct GradBias;

// Rows of GEMM 1, rounded up to pairs of tiles.
inline int64_t padded_rows(int64_t rows) {
  return round_up(rows, int64_t{sm90::kCluster} * sm90::kTileM);
}

class Chunk {
 public:
  Chunk(const Batch& batch, const LinearCePlan& plan, size_t index, const PlannedChunk& chunk,
        const ChunkBuffers& buffers, const GradWeightBuffers& grad_weight, Element16* grad_input);

  // True if the gathered rows must not use the memory of the input gradient: it is written before the weight
  // gradient, which reads them and overwrites the exponentials.
  static bool separate_rows(const Batch& batch, const LinearCePlan& plan, size_t index) {
    return !batch.need_grad_input || (index == 0 && plan.rows_in_grad_weight > 0);
  }

  // Gathers the rows, then computes exponentials and their sums.
  void exponentials() const;
  // The two parts of exponentials(), without the one-hot terms of classes.
  void gather() const;
  void exponentials_of_gathered() const;
  // Computes the results that the problem has pointers for. With `gradient`, also computes the scales of the
  // rows and multiplies the gathered rows by them for the weight gradient; call it with `gradient` once.
  void apply_rule(bool gradient) const;
  // The GEMMs of the input and the weight gradient.
  void gradients() const;
  // The GEMM of the weight gradient alone.
  void grad_weight() const;
  // The memory of the exponentials.
  const Panels& panels() const { return panels_; }

 protected:
  ChunkRows rows() const;
  std::array<CUtensorMap, 2> panel_maps(int box_rows) const;
  sm90::Maps maps_of(const CUtensorMap& b) const;
  FirstRowOfClass first_row_of_class() const;
  void clear_class_one_hot() const;
  // Parameters of kernels. T: the element type.
  template <typename T>
  Rule<T> rule(bool gradient) const;
  template <typename T>
  GradInput<T> grad_input_of() const;

  const Batch& batch_;
  const LinearCePlan& plan_;
  const PlannedChunk chunk_;
  const ChunkBuffers buffers_;
  const GradWeightBuffers grad_weight_;

 private:
  template <typename T>
  void gather_rows() const;
  template <class Epilogue>
  void logits_gemm() const;
  template <typename T>
  void apply_rule_of(bool gradient) const;
  void grad_input() const;
  template <typename T, bool kPartialTiles, int kTileColumns>
  void grad_input_gemm() const;
  template <typename T, bool kPartialTiles, int kTileColumns, bool kBias = false>
  void grad_weight_gemm() const;
  template <typename T>
  GradBias<T> grad_bias_of() const;
  template <typename T>
  void add_to_grad_bias() const;
  // Calls f(std::type_identity<T>, kPartialTiles, kTileColumns) with the constants of a kernel of these
  // widths.
  template <const auto& kWidths, typename F>
  void with_gradient_kernels(const F& f) const;

  Element16* const grad_input_;  // of the chunk
  const bool is_first_, is_last_, uses_grad_weight_memory_, separate_rows_;
  Panels panels_;
};

// Gathered rows up to this size stay in L2 (50 MB, half of it near each half of the SMs) while the
// exponentials are streamed through it.
inline constexpr int64_t kInputBytesInL2 = 24 << 20;

// Returns the tensor, or a copy that TMA can read.
Tensor dense(const Tensor& tensor);
// Fills the index of valid rows of the batch, and writes the results of ignored rows. memory:
// row_index_bytes() bytes.
void index_valid_rows(Batch& batch, int32_t* memory);
inline int64_t row_index_bytes(int64_t rows) {
  return (2 * rows + 1) * int64_t{sizeof(int32_t)};
}
// Moves the compacted gradients of valid rows to their rows, in place; ignored rows become zeros.
void scatter_rows(const Batch& batch, const int32_t* position, int64_t rows, Element16* grad_input);

// Number of two-block clusters that run at a time on this device; 0 if the engine cannot run.
int64_t clusters_on_device(int device);
// True if the engine takes these sizes in one chunk on this device.
bool takes_on_device(LinearCeProblem problem, int device);
// The plans for this device; nullopt if the engine cannot run on it or takes other sizes.
std::optional<LinearCePlan> plan_on_device(LinearCeProblem problem, int device);
std::optional<LinearCePlan> plan_one_chunk_on_device(LinearCeProblem problem, int device);
std::optional<LinearBackwardPlan> plan_linear_backward_on_device(LinearCeProblem problem, int64_t aux_rows,
                                                                 bool aux_in_grad_weight, int device);

}  // namespace liger::lm_head
