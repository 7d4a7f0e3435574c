// SPDX-License-Identifier: BSD-3-Clause

// csrc/experts/sm90/ptx.cuh on the emulated machine.
#pragma once

#include "device/async.cuh"
#include "machine.h"

namespace liger {

inline uint32_t shared_address(const void* p) {
  return shared_offset(p);
}
inline void cluster_arrive() {
  self().arrived_at = machine->cluster.generation;
  meet(machine->cluster, kBlocks * kThreads, false);
}
inline void cluster_wait() {
  yield_until([] { return machine->cluster.generation != self().arrived_at; });
}
inline void async_fence() {}
inline void mbarrier_init_fence() {}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Mbarrier& b = mbarrier_at(blockIdx.x % kBlocks, barrier);
  // The phase of that parity has completed if the current one has the other parity.
  yield_until([&] { return b.phase != parity; });
}
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(shared_address(barrier), parity);
}
inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  arrive(blockIdx.x % kBlocks, shared_address(barrier), bytes);
}

}  // namespace liger

namespace liger::experts {

inline void give_registers() {}
inline void take_registers() {}
inline void copy_or_zero(uint32_t destination, const void* source, bool valid) {
  const int rank = blockIdx.x % kBlocks;
  self().copies.back().push_back([=] {
    unsigned char* const to = memory_at(rank, destination);
    valid ? static_cast<void>(std::memcpy(to, source, 16)) : static_cast<void>(std::memset(to, 0, 16));
  });
}
inline void copies_arrive(uint64_t* barrier) {
  const int rank = blockIdx.x % kBlocks;
  block->boxes.push_back([copies = std::move(self().copies.back()), rank, at = shared_address(barrier)] {
    for (const auto& copy : copies) copy();
    arrive(rank, at);
  });
  self().copies.back().clear();
}
inline void load_shared(uint32_t from, uint32_t& word) {
  std::memcpy(&word, memory_at(blockIdx.x % kBlocks, from), 4);
}
inline void load_shared(uint32_t from, uint32_t& first, uint32_t& second) {
  load_shared(from, first), load_shared(from + 4, second);
}
inline float min_or_nan(float a, float b) {
  return a != a || b != b ? std::numeric_limits<float>::quiet_NaN() : std::min(a, b);
}
inline void store_vector(void* to, const uint32_t (&words)[4]) {
  std::memcpy(to, words, 16);
}
inline void arrive_threads(int barrier, int threads) {
  meet(block->named[barrier], threads, false);
}
inline void set_sum(float& sum, float value) {
  sum = value;
}
inline uint32_t transpose_matrix(uint32_t word) {
  const int lane = threadIdx.x % 32;
  uint32_t* const words = block->warps[threadIdx.x / 32].values;
  words[lane] = word;
  warp_barrier();
  uint32_t found = 0;
  for (int i = 0; i < 2; ++i) {
    // Element (lane / 4, 2 (lane % 4) + i) of the transpose.
    const int row = 2 * (lane % 4) + i, column = lane / 4;
    found |= (words[row * 4 + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * i;
  }
  warp_barrier();
  return found;
}

}  // namespace liger::experts
