// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <initializer_list>
#include <utility>

#include "device/integers.h"
#include "host/checks/checks.h"

namespace liger {

// Bump allocator over the memory of a tensor, from first_byte on. Every block is aligned to 1024 bytes.
class Workspace {
 public:
  Workspace(Tensor memory, int64_t first_byte)
      : memory_(std::move(memory)),
        buffers_(static_cast<char*>(memory_.mutable_data_ptr()) + first_byte),
        left_(memory_.numel() * static_cast<int64_t>(memory_.element_size()) - first_byte) {
    const int64_t skipped = -reinterpret_cast<intptr_t>(buffers_) & (kAlignment - 1);
    buffers_ += skipped;
    left_ -= skipped;
  }

  // Bytes that suffice for blocks of these sizes at any alignment of the memory.
  static int64_t bytes_for(std::initializer_list<int64_t> blocks) {
    int64_t size = kAlignment;
    for (const int64_t bytes : blocks) size += block_bytes(bytes);
    return size;
  }
  // Bytes of one more block.
  static int64_t block_bytes(int64_t bytes) { return round_up(bytes, kAlignment); }

  template <typename T>
  T* allocate(int64_t count) {
    const int64_t bytes = block_bytes(count * static_cast<int64_t>(sizeof(T)));
    require(bytes <= left_, "workspace of ", left_, " bytes is too small for ", bytes);
    char* const block = buffers_;
    buffers_ += bytes;
    left_ -= bytes;
    return reinterpret_cast<T*>(block);
  }

 private:
  static constexpr int64_t kAlignment = 1024;
  Tensor memory_;
  char* buffers_;
  int64_t left_;
};

}  // namespace liger
