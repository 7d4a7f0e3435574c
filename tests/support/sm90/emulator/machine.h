// SPDX-License-Identifier: BSD-3-Clause

// Clusters of two blocks on a CPU, or single blocks: kernels of csrc run unchanged on it. Every thread of a
// block is a fiber, and a block is a thread of the host; one block runs at a time. Asynchronous work takes
// effect late: wgmma and groups of cp.async when they are waited for, TMA and copies that signal after some
// time. A wait that cannot end stops the program.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __shared__ thread_local
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define LIGER_SM90A 1

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __fdividef(float x, float y) {
  return x / y;
}
inline void __trap() {
  std::abort();
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}

struct Index {
  int x, y;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
// Addresses of a block are offsets from `base`.
inline thread_local unsigned char base;
inline constexpr int kThreads = 384, kBlocks = 2;  // of a cluster

// --- fibers
// -------------------------------------------------------------------------------------------------

// The first switch to a fiber is setcontext, all others are longjmp, which makes no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  const std::function<bool()>* ready = nullptr;  // what it waits for
  int arrived_at = 0;                            // generation of the cluster barrier
  std::vector<std::vector<std::function<void()>>> copies{1};
  std::vector<std::function<void()>> products;
};
struct Warp {
  uint32_t values[32];
  uint64_t shuffled[32];
  int arrived = 0, generation = 0;
};
struct Named {
  int arrived = 0, generation = 0;
};
struct Block {
  unsigned char* base;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Named named[16];
  int count = 0;  // of __syncthreads_count
  jmp_buf scheduler;
  std::vector<std::function<void()>> boxes;

  explicit Block(int threads) : fibers(static_cast<size_t>(threads)), warps((threads + 31) / 32) {}
};
struct Mbarrier {
  int pending, count;
  int64_t bytes;
  uint32_t phase;
};
struct Machine {
  Block* blocks[kBlocks];
  std::map<std::pair<int, uint32_t>, Mbarrier> mbarriers;
  Named cluster;
  std::mutex mutex;
  std::condition_variable turn;
  int running = 0, finished = 0;
  int64_t progress = 0;
  std::mt19937 random{1};
  bool backwards = false;  // the order in which the threads of a block run
};
inline Machine* machine;
inline thread_local Block* block;

inline Fiber& self() {
  return block->fibers[threadIdx.x];
}
inline void yield_until(const std::function<bool()>& ready) {
  if (!ready()) {
    self().ready = &ready;
    if (_setjmp(self().place) == 0) _longjmp(block->scheduler, 1);
    self().ready = nullptr;
  }
  ++machine->progress;
}
inline uint32_t shared_offset(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - &base) & 0x3fffffff;
}
// A signed offset of 30 bits.
inline int64_t signed_offset(uint32_t address) {
  const int64_t offset = address & 0x3fffffff;
  return offset < (1 << 29) ? offset : offset - (1 << 30);
}
inline unsigned char* memory_at(int rank, uint32_t address) {
  return machine->blocks[rank]->base + signed_offset(address);
}

inline void meet(Named& barrier, int count, bool waits) {
  const int generation = barrier.generation;
  if (++barrier.arrived == count) barrier.arrived = 0, ++barrier.generation;
  ++machine->progress;
  if (waits) yield_until([&] { return barrier.generation != generation; });
}
inline void warp_barrier() {
  Warp& warp = block->warps[threadIdx.x / 32];
  const int generation = warp.generation;
  if (++warp.arrived == 32) warp.arrived = 0, ++warp.generation;
  yield_until([&] { return warp.generation != generation; });
}
inline void __syncwarp() {
  warp_barrier();
}
inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}
inline void atomicAdd(int* to, int value) {
  *to += value;
}
template <typename T>
T shuffle(T value, int from) {
  Warp& warp = block->warps[threadIdx.x / 32];
  std::memcpy(&warp.shuffled[threadIdx.x % 32], &value, sizeof(T));
  warp_barrier();
  T found;
  std::memcpy(&found, &warp.shuffled[from], sizeof(T));
  warp_barrier();
  return found;
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return shuffle(value, threadIdx.x % 32 ^ mask);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int delta) {
  const int lane = threadIdx.x % 32;
  return shuffle(value, lane < delta ? lane : lane - delta);
}
template <typename T>
T __shfl_sync(uint32_t, T value, int from, int width = 32) {
  return shuffle(value, threadIdx.x % 32 / width * width + from % width);
}
inline uint32_t __match_any_sync(uint32_t, int value) {
  Warp& warp = block->warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = static_cast<uint32_t>(value);
  warp_barrier();
  uint32_t equal = 0;
  for (int lane = 0; lane < 32; ++lane)
    equal |= uint32_t{warp.values[lane] == static_cast<uint32_t>(value)} << lane;
  warp_barrier();
  return equal;
}
inline int __reduce_min_sync(uint32_t, int value) {
  for (int mask = 1; mask < 32; mask *= 2) value = min(value, __shfl_xor_sync(0, value, mask));
  return value;
}
inline void __syncthreads() {
  meet(block->named[0], blockDim.x, true);
}
inline int __syncthreads_count(bool counts) {
  block->count += counts;
  __syncthreads();
  const int found = block->count;
  __syncthreads();
  block->count = 0;
  __syncthreads();
  return found;
}

// --- groups of cp.async
// -------------------------------------------------------------------------------------

inline void commit_copies() {
  self().copies.emplace_back();
}
inline void wait_for_copies(size_t pending) {
  auto& groups = self().copies;
  while (groups.size() > pending + 1) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

// --- mbarriers
// ----------------------------------------------------------------------------------------------

inline Mbarrier& mbarrier_at(int rank, uint32_t address) {
  return machine->mbarriers.at({rank, address & 0x3fffffff});
}
inline void settle(Mbarrier& b) {
  ++machine->progress;
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1;
}
inline void arrive(int rank, uint32_t address, int64_t expected = 0) {
  Mbarrier& b = mbarrier_at(rank, address);
  if (b.pending-- <= 0) std::printf("too many arrivals\n"), std::exit(1);
  b.bytes += expected;
  settle(b);
}

// --- one cluster
// --------------------------------------------------------------------------------------------

inline void enter(unsigned low, unsigned high) {
  auto* const kernel = reinterpret_cast<std::function<void()>*>(static_cast<uintptr_t>(high) << 32 |
                                                                static_cast<uintptr_t>(low));
  (*kernel)();
  self().done = true;
  ++machine->progress;
  _longjmp(block->scheduler, 1);
}

// Runs boxes of TMA that are due, then every fiber of this block until it waits.
inline bool sweep() {
  bool alive = false;
  for (size_t i = 0; i < block->boxes.size();) {
    if (machine->random() % 4 != 0) {
      ++i;
      continue;
    }
    const auto box = block->boxes[i];
    block->boxes.erase(block->boxes.begin() + static_cast<long>(i));
    box();
  }
  const int threads = static_cast<int>(block->fibers.size());
  for (int n = 0; n < threads; ++n) {
    const int i = machine->backwards ? threads - 1 - n : n;
    Fiber& fiber = block->fibers[i];
    if (fiber.done) continue;
    alive = true;
    threadIdx.x = i;
    if (fiber.ready != nullptr && !(*fiber.ready)()) continue;
    if (_setjmp(block->scheduler) != 0) continue;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
  return alive || !block->boxes.empty();
}

// Makes the block the one of this thread of the host.
inline void start(Block& own, const std::function<void()>& kernel) {
  own.base = &base;
  block = &own;
  blockDim.x = static_cast<int>(own.fibers.size());
  for (Fiber& fiber : own.fibers) {
    constexpr size_t kStack = 1 << 18;
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.started = fiber.done = false;
    fiber.copies.assign(1, {});
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    const auto address = reinterpret_cast<uintptr_t>(&kernel);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(address),
                static_cast<unsigned>(address >> 32));
  }
}

inline void run_block(int rank, int blocks, int first, const std::function<void()>& kernel) {
  Block own(kThreads);
  blockIdx.x = first + rank, gridDim.x = blocks;
  start(own, kernel);
  std::unique_lock lock(machine->mutex);
  machine->blocks[rank] = &own;
  machine->turn.wait(lock, [&] { return machine->running == rank; });
  if (rank == 0) {
    machine->running = 1;  // so that both blocks exist before either runs
    machine->turn.notify_all();
    machine->turn.wait(lock, [&] { return machine->running == 0; });
  }
  bool alive = true;
  int idle = 0;
  int64_t before = -1;
  while (machine->finished < kBlocks) {
    for (int64_t previous = -1; alive && machine->progress != previous;) {
      previous = machine->progress;
      if (!sweep()) alive = false, ++machine->finished;
    }
    // Neither block has made progress since the last time.
    idle = machine->progress == before && own.boxes.empty() ? idle + 1 : 0;
    before = machine->progress;
    if (alive && idle > 1000) std::printf("block %d waits for ever\n", rank), std::exit(1);
    machine->running = 1 - rank;
    machine->turn.notify_all();
    machine->turn.wait(lock, [&] { return machine->running == rank || machine->finished == kBlocks; });
  }
  machine->turn.notify_all();
}

// Runs the kernel on `clusters` clusters, one after the other: they do not communicate.
inline void run(int clusters, const std::function<void()>& kernel) {
  for (int cluster = 0; cluster < clusters; ++cluster) {
    Machine one;
    machine = &one;
    std::thread second([&] { run_block(1, clusters * kBlocks, cluster * kBlocks, kernel); });
    std::thread first([&] { run_block(0, clusters * kBlocks, cluster * kBlocks, kernel); });
    first.join(), second.join();
  }
}

// Runs the kernel on a grid of single blocks, one after the other.
inline void run(Index grid, int threads, bool backwards, const std::function<void()>& kernel) {
  const auto run_blocks = [&] {
    Machine one;
    machine = &one;
    one.backwards = backwards;
    Block own(threads);
    gridDim = grid;
    for (int i = 0; i < grid.x * grid.y; ++i) {
      blockIdx = {i % grid.x, i / grid.x};
      start(own, kernel);
      for (int64_t previous = -1; sweep(); previous = one.progress)
        if (one.progress == previous) std::printf("block %d waits for ever\n", i), std::exit(1);
    }
  };
  std::thread(run_blocks).join();
}
