// SPDX-License-Identifier: BSD-3-Clause

// What csrc/experts/sm90 uses of csrc/lm_head/sm90/gemm, on the emulated machine.
#pragma once

#include "experts/sm90/ptx.cuh"
#include "lm_head/sm90/element.cuh"
#include "lm_head/sm90/sizes.h"

// A matrix per panel, in boxes of 64 columns.
struct CUtensorMap {
  const uint16_t* memory;
  int64_t columns, rows, panels, box_rows;
};

namespace liger::sm90 {

inline constexpr int kBox = 64, kBoxBytes = kBox * kBox * 2, kThreads = ::kThreads, kAlignmentBytes = 1024;
inline constexpr int kPingpongHalves = kTileM / kBox, kSecondColumns = 8;
template <int kColumns>
using Sums = float[kColumns / 2];
struct Corner {
  int column, row, panel;
};
enum class CacheHint { kNormal };

template <int kCount>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  void next() {
    if (++stage == kCount) stage = 0, phase ^= 1;
  }
};
inline unsigned char* aligned_ring(unsigned char* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return reinterpret_cast<unsigned char*>((address + 1023) & ~uintptr_t{1023});
}
inline void prefetch_map(const CUtensorMap*) {}
inline void barrier_init(uint64_t* barrier, int arrivals) {
  machine->mbarriers[{blockIdx.x % kBlocks, shared_address(barrier)}] = {arrivals, arrivals, 0, 0};
}
inline uint32_t cluster_address(const void* shared, uint32_t rank) {
  return shared_address(shared) | rank << 30;
}
inline void cluster_barrier_arrive(uint32_t barrier) {
  arrive(static_cast<int>(barrier >> 30), barrier);
}

// Elements out of bounds are zeros. The 128-byte swizzle permutes the 16-byte vectors of eight rows.
inline void load_box_into(int rank, uint32_t to, const CUtensorMap* map, Corner at, uint32_t barrier) {
  block->boxes.push_back([=] {
    unsigned char* const memory = memory_at(rank, to);
    for (int r = 0; r < map->box_rows; ++r) {
      for (int c = 0; c < kBox; ++c) {
        const bool inside = at.row + r < map->rows && at.column + c < map->columns && at.panel < map->panels;
        const uint16_t value =
            inside ? map->memory[(at.panel * map->rows + at.row + r) * map->columns + at.column + c] : 0;
        const auto address = reinterpret_cast<uintptr_t>(memory + r * 128 + c * 2);
        std::memcpy(reinterpret_cast<void*>(address ^ (address >> 7 & 7) << 4), &value, 2);
      }
    }
    Mbarrier& b = mbarrier_at(rank, barrier);
    b.bytes -= map->box_rows * kBox * 2;
    settle(b);
  });
}
inline void load_box(void* to, const CUtensorMap* map, Corner at, uint64_t* barrier, CacheHint) {
  load_box_into(blockIdx.x % kBlocks, shared_address(to), map, at, shared_address(barrier));
}
inline void load_box_to_cluster(void* to, const CUtensorMap* map, Corner at, uint64_t* barrier, CacheHint) {
  for (int rank = 0; rank < kBlocks; ++rank)
    load_box_into(rank, shared_address(to), map, at, shared_address(barrier));
}

// The operand of a warpgroup: here the address of its stage 0.
inline uint32_t descriptor_low(const void* shared) {
  return shared_address(shared);
}
// Element i of the rows or columns of an operand, k of the summed dimension, in boxes with the swizzle.
inline float element_at(uint32_t operand, bool mn_major, int i, int k) {
  const unsigned char* memory = memory_at(blockIdx.x % kBlocks, operand);
  memory += mn_major ? i / kBox * kBoxBytes + k * 128 + i % kBox * 2 : i * 128 + k * 2;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  uint16_t bits;
  std::memcpy(&bits, reinterpret_cast<const void*>(address ^ (address >> 7 & 7) << 4), 2);
  return lm_head::low_of<__nv_bfloat16>(bits);
}
template <class Epilogue, class Stage, bool, int kUsed, int kCount>
void issue_k_block(Sums<Epilogue::kColumns> (&sums)[kCount], Sums<kSecondColumns>&, uint32_t a, uint32_t b,
                   int stage, bool) {
  a += static_cast<uint32_t>(stage * Stage::kBytes), b += static_cast<uint32_t>(stage * Stage::kBytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  self().products.push_back([=, &sums] {
    constexpr int kColumns = Epilogue::kColumns;
    static thread_local float rows[2][kTileK], columns[2][kTileK];
    for (int half = 0; half < kUsed; ++half) {
      for (int h = 0; h < 2; ++h)
        for (int k = 0; k < kTileK; ++k)
          rows[h][k] = element_at(a, Epilogue::kAMn, half * kBox + warp * 16 + lane / 4 + 8 * h, k);
      for (int j = 0; j < kColumns / 8; ++j) {
        for (int i = 0; i < 2; ++i)
          for (int k = 0; k < kTileK; ++k)
            columns[i][k] = element_at(b, Epilogue::kBMn, 8 * j + 2 * (lane % 4) + i, k);
        for (int h = 0; h < 2; ++h)
          for (int i = 0; i < 2; ++i)
            for (int k = 0; k < kTileK; ++k) sums[half][4 * j + 2 * h + i] += rows[h][k] * columns[i][k];
      }
    }
  });
}
template <size_t kPending>
void wgmma_wait() {
  auto& products = self().products;
  while (products.size() > kPending) {
    products.front()();
    products.erase(products.begin());
  }
}
template <int kColumns>
void pin(Sums<kColumns>&) {}
template <int kColumns>
void clear(Sums<kColumns>& sums) {
  std::fill(sums, sums + kColumns / 2, 0.0f);
}

}  // namespace liger::sm90
