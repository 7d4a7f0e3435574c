// The epilogue of the logits GEMM in pieces, for gemm_kernel_overlapped: bfloat16 only. tile.h lists where it is used.
#pragma once

#include <algorithm>

#include "linear_ce/sm90/exponentials.cuh"
#include "linear_ce/sm90/gemm_overlapped.cuh"

namespace liger::linear_ce {

// A piece is 16 columns, as many as one stmatrix writes, or 8 where the work per logit is long: next to two sets of
// accumulators about 40 registers are left, and the tensor cores wait for pieces of more than about 380 clocks. A k-block
// takes 768 clocks, and 16 columns take 128 of the special function unit for each of two warps, with a softcap 384.
//
// Panels have 128 columns and tiles 192, so exponentials are stored in boxes of 64 columns, half a row of a panel. Rows
// and panels beyond the chunk are clipped by TMA.
template <sm90::LogitsWork kWork, bool kPartialTiles, int kColumnsPerPiece = sm90::piece_columns(kWork)>
struct OverlappedExpEpilogue : ExpEpilogue<__nv_bfloat16, kWork.metrics, kPartialTiles, kWork.transform(),
                                           kWork.squares, sm90::kOverlappedColumns> {
  using T = __nv_bfloat16;
  using Base = ExpEpilogue<T, kWork.metrics, kPartialTiles, kWork.transform(), kWork.squares,
                           sm90::kOverlappedColumns>;
  using Base::kColumns, Base::chunk, Base::vocab, Base::out, Base::write, Base::overflow, Base::phase,
      Base::transform;
  static constexpr int kPieceColumns = kColumnsPerPiece, kPieces = kColumns / kPieceColumns;
  static constexpr bool kShortPieces = kPieceColumns == 8;
  static_assert(!kWork.float16 && (kPieceColumns == 8 || kPieceColumns == 16));
  // Behind the box is the bias of the tile.
  static constexpr int kSmemBytes = sm90::kResultBoxBytes + (kWork.bias ? kColumns * int{sizeof(float)} : 0);
  struct Pending {
    Tile tile;
    float from[2], sum[2];
    float entropy[2], squares[2], best[2];  // with metrics
    int best_column[2];
  };

  __device__ __forceinline__ bool begin(Pending& p, const Tile& tile, int row, int lane,
                                        const sm90::EpilogueSmem& smem) const {
    p.tile = tile;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p.from[h] = Base::reference_of(tile.m0 + row + lane / 4 + 8 * h);
      p.sum[h] = p.entropy[h] = p.squares[h] = 0.0f;
      p.best[h] = -INFINITY;
      p.best_column[h] = 0;
    }
    if constexpr (kWork.bias) load_bias(tile, lane, smem);
    return tile.m0 < chunk() && (phase == Phase::kAll || overflow[tile.m0 / sm90::kTileM]);
  }

  __device__ __forceinline__ bool ends_at_once(float (&z)[sm90::kSums], const Pending& p, int row, int lane,
                                               const sm90::EpilogueSmem& smem) const {
    if (phase != Phase::kMaxima) return false;
    if constexpr (kWork.bias) wait_for_bias();
    float logits[sm90::kSums];
#pragma unroll
    for (int first = 0; first < kColumns; first += kPieceColumns)
      copy_logits<kPartialTiles>(z, logits, first, p.tile, lane, smem);
    Base::write_maxima(logits, p.tile, row, lane);
    return true;
  }

  template <int kPiece>
  __device__ __forceinline__ void piece(float (&z)[sm90::kSums], Pending& p, int row, int lane,
                                        const sm90::EpilogueSmem& smem, const CUtensorMap (&maps)[2]) const {
    constexpr int kFirst = kPiece * kPieceColumns, kInBox = kFirst % sm90::kBox;
    constexpr bool kBeginsBox = kInBox == 0, kEndsBox = kInBox + kPieceColumns == sm90::kBox;
    const Tile& tile = p.tile;
    const LaneSums sums{p.sum, p.entropy, p.squares, p.best, p.best_column};
    if constexpr (kPiece == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) p.from[h] *= kLog2e;
      if constexpr (kWork.bias) wait_for_bias();
    }
    // Without partial panels a box is inside of the vocabulary or beyond it; with one, its boxes are written to its end.
    // Short pieces always have this branch, and no other one: without it the compiler mixes the instructions of pieces
    // until it spills.
    const int end = kPartialTiles ? round_up(vocab, sm90::kPanel) : vocab;
    if ((kPartialTiles && !kShortPieces) || tile.n0 + kFirst - kInBox < end) {
      float e[sm90::kSums];
      const auto compute = [&](auto partial) __attribute__((always_inline)) {
        copy_logits<partial.value>(z, e, kFirst, tile, lane, smem);
        Base::template exponentials_of<kWork.softcap, partial.value>(e, kFirst, kPieceColumns, p.from, tile,
                                                                     lane, sums);
      };
      if constexpr (kShortPieces) {
        compute(std::bool_constant<kPartialTiles>{});
      } else if constexpr (kPartialTiles) {
        // Without this branch, pieces are one block of instructions, which the compiler mixes until it spills.
        tile.n0 + kFirst + kPieceColumns <= vocab ? compute(std::false_type{}) : compute(std::true_type{});
      } else {
        compute(std::false_type{});
      }
      if (kShortPieces || write) {
        if constexpr (kBeginsBox) wait_for_store(lane);
        // Vectors of 16 bytes of a row are swizzled: vector v of row r is v ^ r % 8.
        const int r = lane % 16, odd = lane / 16;
        if constexpr (kShortPieces) {
          stage_vector<T>(e, kFirst / 2, vector_address<kInBox / 8>(smem, r));
        } else {
          T* const at = reinterpret_cast<T*>(smem.memory) + r * sm90::kBox;
          stage_vectors<T>(e, kFirst / 2, at + (((kInBox / 8 + odd) ^ r) & 7) * 8);
        }
        if constexpr (kEndsBox) store_box(tile, tile.n0 + kFirst - kInBox, row, lane, smem, maps);
      }
    }
    finish_sums(p);
    if constexpr (kPiece == kPieces - 1) {
      if constexpr (kPartialTiles) {
        if (write) clear_rest_of_panel(tile, row, lane, smem, maps);
      }
      Base::write_sums(sums, tile, row, lane);
    }
  }

 private:
  // The logits of a piece, with bias, -inf beyond the vocabulary. A copy, and without branches: the compiler would
  // serialise the wgmmas of the other accumulators if these changed, also at a join of branches.
  template <bool kPartial>
  __device__ __forceinline__ void copy_logits(const float (&z)[sm90::kSums], float (&logits)[sm90::kSums],
                                              int first, const Tile& tile, int lane,
                                              const sm90::EpilogueSmem& smem) const {
    const int left = vocab - tile.n0 - lane % 4 * 2;  // columns from that of this lane on
#pragma unroll
    for (int j = first / 8; j < (first + kPieceColumns) / 8; ++j) {
      float2 bias;
      if constexpr (kWork.bias) bias = bias_of(smem)[4 * j + lane % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = z[4 * j + i];
        if constexpr (kWork.bias) x += i % 2 ? bias.y : bias.x;
        logits[4 * j + i] = !kPartial || 8 * j + i % 2 < left ? x : -INFINITY;
      }
    }
  }
  // Copies the bias of the tile to shared memory, while its mainloop runs: each piece would wait for L2. The vector has
  // zeros up to a multiple of kTileN; the tile may end behind it, in columns that are beyond the vocabulary.
  //
  // No copy has a predicate, so some lanes repeat those of others: ptxas 13.0 encodes the second of two predicated ones
  // with a descriptor in an odd uniform register, an illegal instruction.
  __device__ __forceinline__ void load_bias(const Tile& tile, int lane,
                                            const sm90::EpilogueSmem& smem) const {
    sm90::copy_async_wait();  // for those of a tile whose results are not needed
    const int last = round_up(vocab, sm90::kTileN) - 4;
#pragma unroll
    for (int i = 0; i < kColumns; i += 32 * 4) {
      const int column = i + lane * 4 % std::min(kColumns - i, 32 * 4);
      copy_async(
          reinterpret_cast<Vec<float, 4>*>(smem.memory + sm90::kResultBoxBytes + column * sizeof(float)),
          transform.bias + min(tile.n0 + column, last));
    }
  }
  static __device__ __forceinline__ void wait_for_bias() {
    sm90::copy_async_wait();
    __syncwarp();
  }
  static __device__ __forceinline__ const float2* bias_of(const sm90::EpilogueSmem& smem) {
    return reinterpret_cast<const float2*>(smem.memory + sm90::kResultBoxBytes);
  }
  // Keeps the compiler from moving additions to later pieces, for which it would spill their operands.
  static __device__ __forceinline__ void finish_sums(Pending& p) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      asm volatile("" : "+f"(p.sum[h]));
      if constexpr (kWork.metrics)
        asm volatile("" : "+f"(p.entropy[h]), "+f"(p.best[h]), "+r"(p.best_column[h]));
      if constexpr (kWork.squares) asm volatile("" : "+f"(p.squares[h]));
    }
  }
  // The address of a vector of row r. Not moved out of the loop over tiles, where one register per vector would be kept.
  template <int kVector>
  static __device__ __forceinline__ uint32_t vector_address(const sm90::EpilogueSmem& smem, int r) {
    uint32_t address = shared_address(smem.memory) + r * (sm90::kBox * 2) + r % 8 * 16;
    asm volatile("xor.b32 %0, %0, %1;" : "+r"(address) : "n"(kVector * 16));
    return address;
  }
  // Until the box before has been read from shared memory.
  static __device__ __forceinline__ void wait_for_store(int lane) {
    if (lane == 0) sm90::bulk_store_wait_read();
    __syncwarp();
  }
  __device__ __forceinline__ void store_box(const Tile& tile, int column, int row, int lane,
                                            const sm90::EpilogueSmem& smem,
                                            const CUtensorMap (&maps)[2]) const {
    async_fence();
    __syncwarp();
    if (lane != 0 || (kShortPieces && !write)) return;
    const bool second = tile.m0 >= out.rows_in_first;
    sm90::store_box(
        &maps[second], smem.memory,
        {column % sm90::kPanel, tile.m0 + row - (second ? out.rows_in_first : 0), column / sm90::kPanel});
  }
  // The last panel may end 64 columns behind the last tile.
  __device__ __forceinline__ void clear_rest_of_panel(const Tile& tile, int row, int lane,
                                                      const sm90::EpilogueSmem& smem,
                                                      const CUtensorMap (&maps)[2]) const {
    const int end = tile.n0 + kColumns;
    if (end < vocab || end % sm90::kPanel == 0) return;
    wait_for_store(lane);
#pragma unroll
    for (int i = 0; i < sm90::kResultBoxBytes; i += 32 * 16)
      store_shared(smem.memory + i + lane * 16, 0.0f, 0.0f, 0.0f, 0.0f);
    store_box(tile, end, row, lane, smem, maps);
  }
};

}  // namespace liger::linear_ce
