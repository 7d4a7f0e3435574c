// SPDX-License-Identifier: BSD-3-Clause

// csrc/device/async.cuh on a CPU.
#pragma once

#include "device/vec.cuh"
#include "machine.h"

namespace liger {

template <typename T, int N>
void copy_async(Vec<T, N>* shared, const T* global) {
  self().copies.back().push_back([=] { std::memcpy(shared, global, sizeof(Vec<T, N>)); });
}
inline void commit_async() {
  commit_copies();
}
inline void wait_async(int pending) {
  wait_for_copies(pending);
}
inline void sync_threads(int barrier, int threads) {
  meet(block->named[barrier], threads, true);
}

}  // namespace liger
