#pragma once

#include <initializer_list>
#include <utility>

#include "device/integers.h"
#include "host/checks.h"

namespace liger {

// Bump allocator over the memory of a tensor, from first_byte on. Every block is aligned to 1024 bytes.
class Workspace {
 public:
  Workspace(Tensor memory, int64_t first_byte)
      : memory_(std::move(memory)),
        at_(static_cast<char*>(memory_.mutable_data_ptr()) + first_byte),
        left_(memory_.numel() * static_cast<int64_t>(memory_.element_size()) - first_byte) {
    const int64_t skipped = -reinterpret_cast<intptr_t>(at_) & (kAlignment - 1);
    at_ += skipped;
    left_ -= skipped;
  }

  // Bytes that suffice for blocks of these sizes at any alignment of the memory.
  static int64_t bytes_for(std::initializer_list<int64_t> blocks) {
    int64_t size = kAlignment;
    for (const int64_t bytes : blocks) size += round_up(bytes, kAlignment);
    return size;
  }

  template <typename T>
  T* allocate(int64_t count) {
    const int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    require(bytes <= left_, "workspace of ", left_, " bytes is too small for ", bytes);
    char* const block = at_;
    at_ += bytes;
    left_ -= bytes;
    return reinterpret_cast<T*>(block);
  }

 private:
  static constexpr int64_t kAlignment = 1024;
  Tensor memory_;
  char* at_;
  int64_t left_;
};

}  // namespace liger
