// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <vector>

#include "host/checks/checks.h"

namespace liger {
namespace {

// One dimension: its stride, its size in one tensor, and its size in another tensor with the same stride.
struct Step {
  int64_t stride, size, other_size;
};

// The number of elements from the lowest to the highest address, gaps included.
int64_t memory_extent(const Tensor& tensor) {
  int64_t span = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) span += (tensor.size(d) - 1) * tensor.stride(d);
  return span;
}

// False if every stride is at least the extent of all dimensions with smaller strides, in which case no two
// elements share an address.
bool overlaps_itself(const Tensor& tensor) {
  std::vector<Step> steps;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) steps.push_back({tensor.stride(d), tensor.size(d), 0});
  }
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.stride < b.stride; });
  int64_t span = 1;
  for (const Step& step : steps) {
    if (step.stride < span) return true;
    span += step.stride * (step.size - 1);
  }
  return false;
}

// True if two tensors interleave without overlap, as slices of a larger one do: the halves of its last
// dimension, for example. `low` begins `distance` elements before `high`.
bool interleave(const Tensor& low, const Tensor& high, int64_t distance) {
  if (low.dim() != high.dim()) return false;
  std::vector<Step> steps;
  for (int64_t d = 0; d < low.dim(); ++d) {
    const bool moves = low.size(d) > 1, other_moves = high.size(d) > 1;
    if (moves && other_moves && low.stride(d) != high.stride(d)) return false;
    if (moves || other_moves)
      steps.push_back({moves ? low.stride(d) : high.stride(d), low.size(d), high.size(d)});
  }
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.stride < b.stride; });
  // The dimensions with strides up to `distance` must end before `high` begins; every larger stride must be
  // at least the extent of both tensors.
  int64_t span = 1, other_span = 1;
  size_t i = 0;
  for (; i < steps.size() && steps[i].stride <= distance; ++i) {
    span += steps[i].stride * (steps[i].size - 1);
    other_span += steps[i].stride * (steps[i].other_size - 1);
  }
  if (span > distance) return false;
  span = distance + other_span;
  for (; i < steps.size(); ++i) {
    if (steps[i].stride < span) return false;
    span += steps[i].stride * (std::max(steps[i].size, steps[i].other_size) - 1);
  }
  return true;
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + memory_extent(t) * t.element_size(); };
  const Tensor& low = begin(a) <= begin(b) ? a : b;
  const Tensor& high = begin(a) <= begin(b) ? b : a;
  if (end(low) <= begin(high)) return false;
  const uintptr_t bytes = begin(high) - begin(low), element = low.element_size();
  return element != high.element_size() || bytes % element != 0 ||
         !interleave(low, high, static_cast<int64_t>(bytes / element));
}

std::string strides_text(const Tensor& tensor) {
  std::ostringstream text;
  for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.stride(d);
  return text.str();
}

}  // namespace

void check_written(const std::string& op, const std::vector<std::string>& names,
                   const std::vector<Tensor>& tensors, int64_t written) {
  require(names.size() == tensors.size() && written >= 0 && written <= static_cast<int64_t>(names.size()), op,
          ": check_written got ", names.size(), " names of ", tensors.size(), " tensors, ", written,
          " written");
  for (size_t i = 0; i < static_cast<size_t>(written); ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.numel() == 0) continue;
    require(!overlaps_itself(tensor), op, ": ", names[i], " of shape ", shape_text(tensor), " has strides (",
            strides_text(tensor), "), expected elements that share no memory, since it is written");
    for (size_t j = i + 1; j < tensors.size(); ++j) {
      if (tensors[j].numel() == 0) continue;
      require(!overlap(tensor, tensors[j]), op, ": ", names[j], " shares memory with ", names[i],
              ", expected one apart from it, since ", names[i], " is written");
    }
  }
}

void check_written(const std::string& op, std::initializer_list<NamedTensor> written,
                   std::initializer_list<NamedTensor> read) {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  const auto add = [&](std::initializer_list<NamedTensor> arguments) {
    for (const auto& [name, tensor] : arguments) {
      if (!tensor) continue;
      names.emplace_back(name);
      tensors.push_back(*tensor);
    }
    return static_cast<int64_t>(tensors.size());
  };
  const int64_t count = add(written);
  add(read);
  check_written(op, names, tensors, count);
}

}  // namespace liger
