// The epilogue of the weight gradient in pieces, for gemm_kernel_overlapped.
#pragma once

#include "device/reduce.cuh"
#include "linear_ce/sm90/gemm_overlapped.cuh"
#include "linear_ce/sm90/grad_weight.cuh"

namespace liger::linear_ce {

// A piece is 16 columns of the 16 rows of a warp. Between chunks its partial sums are in the memory of the results of the
// same columns: lane l has 16 bytes, half l % 2 of row l / 2. So a piece reads and writes no memory of other pieces. Each
// of its rows has a power-of-two scale of its own.
//
// Partial sums are copied to shared memory two pieces at a time, 64 bytes of a row, up to kSlots pairs ahead.
//
// scale_exponents: per tile of rows, tile of columns and piece, one byte for each of 128 rows.
template <typename T, bool kPartialTiles>
struct OverlappedGradWeightEpilogue : GradWeightEpilogue<T, kPartialTiles, sm90::kOverlappedColumns> {
  using Base = GradWeightEpilogue<T, kPartialTiles, sm90::kOverlappedColumns>;
  using Base::kColumns, Base::kHintSums, Base::vocab, Base::hidden, Base::one_hot, Base::out, Base::first,
      Base::last, Base::panel_read_counts, Base::input, Base::input_stride, Base::scale_exponents,
      Base::scale_stride, Base::largest_scaled, Base::smoothing;
  static constexpr int kPieces = sm90::kOverlappedPieces, kPieceColumns = kColumns / kPieces;
  static_assert(kPieceColumns == 16 && kPieces % 2 == 0);
  // Of a warp: slots with the partial sums of two pieces, 512 bytes each, and 16 exponents each; the one-hot terms.
  static constexpr int kPieceBytes = 32 * sizeof(uint4), kSlotBytes = 2 * kPieceBytes + 2 * 16, kSlots = 2;
  static constexpr int kWarpSharedBytes = kSlots * kSlotBytes + 16 * sizeof(OneHot);
  struct Pending {
    int m0, n0, k_blocks;  // m0: of this warp
    int pieces;            // with rows and columns of the result; only with kPartialTiles
    // In units of 16 bytes, which fit in 32 bits: of `out`, this lane's in the first piece; of `scale_exponents`, those of
    // this warp's rows in the first piece.
    uint32_t vector, exponents;
    bool one_hot;  // whether a row of this warp has a one-hot term
  };

  // The same for all warps of a block: they issue wgmmas together.
  __device__ __forceinline__ bool begin(Pending& p, const Tile& tile, int row, int lane,
                                        const sm90::EpilogueSmem& smem) const {
    p.m0 = tile.m0 + row, p.n0 = tile.n0, p.k_blocks = tile.k_blocks;
    p.vector = (static_cast<uint32_t>(p.m0) + lane / 2) * (hidden / 8u) + tile.n0 / 8u + lane % 2;
    p.exponents = tile.m0 / sm90::kTileM * static_cast<uint32_t>(scale_stride / 16) +
                  (tile.n0 / kColumns * (kPieces * sm90::kTileM) + row) / 16;
    p.pieces = p.m0 < vocab ? (hidden - tile.n0) / kPieceColumns : 0;
    if (tile.m0 >= vocab) return false;
    __syncwarp();  // all lanes have read the shared memory of the tile before
    OneHot term{0.0f, -1};
    if (lane < 16 && p.m0 + lane < vocab) term = one_hot[p.m0 + lane];
    if (lane < 16) one_hot_of(smem, lane) = term;
    p.one_hot = __any_sync(0xffffffffu, term.index >= 0);
    if (!first) {
#pragma unroll
      for (int pair = 0; pair < kSlots; ++pair) load_pair(pair, p, lane, smem);
    }
    __syncwarp();
    return true;
  }

  __device__ __forceinline__ bool ends_at_once(float (&)[sm90::kSums], const Pending& p, int, int) const {
    if (panel_read_counts != nullptr) Base::count_panel_read(p.m0 / sm90::kTileM);
    return false;
  }

  template <int kPiece>
  __device__ __forceinline__ void piece(float (&sums)[sm90::kSums], Pending& p, int row, int lane,
                                        const sm90::EpilogueSmem& smem, const CUtensorMap (&)[2]) const {
    constexpr int kPair = kPiece / 2, kInPair = kPiece % 2;
    // Keeps the compiler from computing the addresses of several pieces at once, for which it would spill.
    asm volatile("" : "+r"(p.vector), "+r"(p.exponents), "+r"(p.m0), "+r"(p.n0));
    if (kPiece == 0 && panel_read_counts != nullptr) Base::wait_for_panel_reads(p.m0 / sm90::kTileM);
    if (kInPair == 0 && !first) {
      sm90::copy_async_wait_groups<kSlots - 1>();
      __syncwarp();
    }
    if (has(p, kPiece)) {
      unsigned char* const slot = smem.memory + kPair % kSlots * kSlotBytes;
      unsigned char* const staged = slot + kInPair * kPieceBytes;
      // A copy: the compiler would serialise the wgmmas of the other accumulators if these changed.
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = p.k_blocks > 0 ? sums[8 * kPiece + i] : 0.0f;
      if constexpr (kSmallRange<T>) {
        const float unit = pow2(-unit_exponent(__uint_as_float(*largest_scaled)));
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= unit;
      }
      if (!first) {
        const unsigned char* const exponents = slot + 2 * kPieceBytes + kInPair * 16 + lane / 4;
        add(v, *reinterpret_cast<const uint4*>(staged + lane * 16), power_of_two(exponents[0]),
            power_of_two(exponents[8]));
      }
      if (p.one_hot) subtract_one_hots(v, p.n0 + kPiece * kPieceColumns, lane, smem);
      if (smoothing.vector != nullptr) subtract_smoothing(v, p.m0, p.n0 + kPiece * kPieceColumns, lane);
      uint4* const memory = reinterpret_cast<uint4*>(out) + (p.vector + kPiece * (kPieceColumns / 8));
      if (!last) {
        unsigned char* const exponents = exponents_of(p, kPiece) + lane / 4;
        sm90::store_with_hint(memory, scaled(v, exponents, lane), kHintSums);
      } else {
        __syncwarp();  // all lanes have read their partial sums
        sm90::store_matrices(staged + lane % 16 * 32 + lane / 16 * 16, pack_pair<T>(v[0], v[1]),
                             pack_pair<T>(v[2], v[3]), pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7]));
        __syncwarp();
        const uint4 result = *reinterpret_cast<const uint4*>(staged + lane * 16);
        if (!kPartialTiles || p.m0 + lane / 2 < vocab) *memory = result;
      }
    }
    if (kInPair == 1 && !first) {
      __syncwarp();  // all lanes have read the slot
      load_pair(kPair + kSlots, p, lane, smem);
    }
  }

 private:
  static __device__ __forceinline__ bool has(const Pending& p, int piece) {
    return !kPartialTiles || piece < p.pieces;
  }
  // The exponents of the 16 rows of this warp.
  __device__ __forceinline__ unsigned char* exponents_of(const Pending& p, int piece) const {
    return scale_exponents + int64_t{p.exponents + piece * (sm90::kTileM / 16)} * 16;
  }
  static __device__ __forceinline__ OneHot& one_hot_of(const sm90::EpilogueSmem& smem, int row) {
    return reinterpret_cast<OneHot*>(smem.memory + kSlots * kSlotBytes)[row];
  }

  // Starts the copies of two pieces; a group of copies, even without any.
  __device__ __forceinline__ void load_pair(int pair, const Pending& p, int lane,
                                            const sm90::EpilogueSmem& smem) const {
    if (pair < kPieces / 2) {
      unsigned char* const slot = smem.memory + pair % kSlots * kSlotBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = 2 * pair + i;
        if (!has(p, piece)) continue;
        sm90::copy_async(slot + i * kPieceBytes + lane * 16,
                         reinterpret_cast<const uint4*>(out) + (p.vector + piece * (kPieceColumns / 8)),
                         kHintSums);
        if (lane == i) sm90::copy_async(slot + 2 * kPieceBytes + i * 16, exponents_of(p, piece), kHintSums);
      }
    }
    sm90::copy_async_commit();
  }

  __device__ __forceinline__ void subtract_one_hots(float (&v)[8], int column, int lane,
                                                    const sm90::EpilogueSmem& smem) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const OneHot term = one_hot_of(smem, lane / 4 + 8 * h);
      if (term.index < 0) continue;
      const T* const from = input + term.index * input_stride + column;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(from) + lane % 4 + 4 * j);
        float &low = v[4 * j + 2 * h], &high = v[4 * j + 2 * h + 1];
        low = fmaf(-term.amount, low_of<T>(word), low);
        high = fmaf(-term.amount, high_of<T>(word), high);
      }
    }
  }

  __device__ __forceinline__ void subtract_smoothing(float (&v)[8], int m0, int column, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m0 + lane / 4 + 8 * h;
      const float amount = !kPartialTiles || row < vocab ? smoothing.amount_of(row) : 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 f = __ldg(reinterpret_cast<const float2*>(smoothing.vector + column) + lane % 4 + 4 * j);
        float &low = v[4 * j + 2 * h], &high = v[4 * j + 2 * h + 1];
        low = fmaf(-amount, f.x, low), high = fmaf(-amount, f.y, high);
      }
    }
  }

  // v += partial, whose words alternate between the two rows.
  static __device__ __forceinline__ void add(float (&v)[8], uint4 partial, float scale_0, float scale_1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(reinterpret_cast<const __half2&>((&partial.x)[i]));
      const float scale = i % 2 == 0 ? scale_0 : scale_1;
      v[2 * i] = fmaf(f.x, scale, v[2 * i]);
      v[2 * i + 1] = fmaf(f.y, scale, v[2 * i + 1]);
    }
  }

  // Rounds with a scale per row that makes its largest element 2^14 to 2^15; writes the exponents of both scales.
  static __device__ __forceinline__ uint4 scaled(const float (&v)[8], unsigned char* exponents, int lane) {
    float inverse_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest =
          fmaxf(fmaxf(fabsf(v[2 * h]), fabsf(v[2 * h + 1])), fmaxf(fabsf(v[4 + 2 * h]), fabsf(v[5 + 2 * h])));
      const int exponent = __float_as_uint(warp_reduce<Max, 4>(largest)) >> 23;
      // A smaller scale would make the inverse infinite, as a larger one would the scale of the largest float.
      const int biased = min(max(exponent - 14, 127 - 15 - 63), 127 + 113);
      inverse_scale[h] = power_of_two(254 - biased);
      if (lane % 4 == 0) exponents[8 * h] = static_cast<unsigned char>(biased);
    }
    uint4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair =
          __floats2half2_rn(v[2 * i] * inverse_scale[i % 2], v[2 * i + 1] * inverse_scale[i % 2]);
      (&words.x)[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return words;
  }
};

}  // namespace liger::linear_ce
