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
// A k-block leaves a piece about 380 clocks: from global memory it reads nothing, but copies to shared memory what later
// pieces need, partial sums two pieces at a time (64 bytes of a row), two pairs ahead, and the input rows of one-hot terms
// two pieces ahead.
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
  // The shared memory of a warp: slots with the partial sums of two pieces, 512 bytes each, and 16 exponents each; slots
  // with the input rows of the one-hot terms, 32 bytes each; the one-hot terms of its rows.
  static constexpr int kPieceBytes = 32 * sizeof(uint4), kSlotBytes = 2 * kPieceBytes + 2 * 16, kSlots = 2;
  static constexpr int kInputAt = kSlots * kSlotBytes, kOneHotAt = kInputAt + kSlots * kPieceBytes;
  static constexpr int kWarpSharedBytes = kOneHotAt + 16 * sizeof(OneHot);
  struct Pending {
    int m0, n0;  // m0: of this warp
    int pieces;  // with rows and columns of the result; only with kPartialTiles
    // In units of 16 bytes, which fit in 32 bits: of `out`, this lane's in the first piece; of `scale_exponents`, those of
    // this warp's rows in the first piece.
    uint32_t vector, exponents;
    bool one_hot;   // whether a row of this warp has a one-hot term
    bool is_empty;  // no k-block
  };

  // The same for all warps of a block: they issue wgmmas together.
  __device__ __forceinline__ bool begin(Pending& p, const Tile& tile, int row, int lane,
                                        const sm90::EpilogueSmem& smem) const {
    p.m0 = tile.m0 + row, p.n0 = tile.n0, p.is_empty = tile.k_blocks == 0;
    p.vector = (static_cast<uint32_t>(p.m0) + lane / 2) * (hidden / 8u) + tile.n0 / 8u + lane % 2;
    p.exponents = tile.m0 / sm90::kTileM * static_cast<uint32_t>(scale_stride / 16) +
                  (tile.n0 / kColumns * (kPieces * sm90::kTileM) + row) / 16;
    p.pieces = p.m0 < vocab ? (hidden - tile.n0) / kPieceColumns : 0;
    if (tile.m0 >= vocab) return false;
    __syncwarp();  // all lanes have read the shared memory of the tile before
    if (lane < 16) {
      OneHot* const term = reinterpret_cast<OneHot*>(smem.memory + kOneHotAt) + lane;
      if (p.m0 + lane < vocab) {
        sm90::copy_async_8(term, one_hot + p.m0 + lane);
      } else {
        *term = {0.0f, -1};
      }
    }
    if (!first) {
#pragma unroll
      for (int pair = 0; pair < kSlots; ++pair) load_pair(pair, p, lane, smem);
    }
    return true;
  }
  // During the last k-block of the tile.
  __device__ __forceinline__ void prepare(Pending& p, int lane, const sm90::EpilogueSmem& smem) const {
    sm90::copy_async_wait();
    __syncwarp();
    p.one_hot = __any_sync(0xffffffffu, shared_int(smem, kOneHotAt + lane % 16 * 8 + 4) >= 0);
    if (p.one_hot) {
      // The rows without a term remain zero.
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot)
        *reinterpret_cast<uint4*>(smem.memory + kInputAt + slot * kPieceBytes + lane * 16) = {};
      __syncwarp();
    }
#pragma unroll
    for (int piece = 0; piece < kSlots; ++piece) {
      load_input(piece, p, lane, smem);
      sm90::copy_async_commit();
    }
  }

  __device__ __forceinline__ bool ends_at_once(float (&sums)[sm90::kSums], const Pending& p, int, int) const {
    if (panel_read_counts != nullptr) Base::count_panel_read(p.m0 / sm90::kTileM);
    return false;
  }

  template <int kPiece>
  __device__ __forceinline__ void piece(float (&sums)[sm90::kSums], Pending& p, int row, int lane,
                                        const sm90::EpilogueSmem& smem, const CUtensorMap (&)[2]) const {
    constexpr int kSlotAt = kPiece / 2 % kSlots * kSlotBytes, kStagedAt = kSlotAt + kPiece % 2 * kPieceBytes,
                  kExponentsAt = kSlotAt + 2 * kPieceBytes + kPiece % 2 * 16;
    // Keeps the compiler from computing the addresses of several pieces at once, for which it would spill.
    asm volatile("" : "+r"(p.vector), "+r"(p.exponents), "+r"(p.m0), "+r"(p.n0));
    if (kPiece == 0 && panel_read_counts != nullptr) Base::wait_for_panel_reads(p.m0 / sm90::kTileM);
    // All but the newest group: each piece commits one.
    sm90::copy_async_wait_groups<1>();
    __syncwarp();
    if (has(p, kPiece)) {
      // A copy: the compiler would serialise the wgmmas of the other accumulators if these changed.
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = p.is_empty ? 0.0f : sums[8 * kPiece + i];
      if constexpr (kSmallRange<T>) {
        const float unit = pow2(-unit_exponent(__uint_as_float(*largest_scaled)));
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= unit;
      }
      if (!first) {
        const int at = kExponentsAt + lane / 4;
        add(v, shared_vector(smem, kStagedAt + lane * 16), power_of_two(shared_byte(smem, at)),
            power_of_two(shared_byte(smem, at + 8)));
      }
      if (p.one_hot) subtract_one_hots(v, kInputAt + kPiece % kSlots * kPieceBytes, lane, smem);
      if (smoothing.vector != nullptr) subtract_smoothing(v, p.m0, p.n0 + kPiece * kPieceColumns, lane);
      uint4* const memory = reinterpret_cast<uint4*>(out) + (p.vector + kPiece * (kPieceColumns / 8));
      if (!last) {
        unsigned char* const exponents = exponents_of(p, kPiece) + lane / 4;
        sm90::store_with_hint(memory, scaled(v, exponents, lane), kHintSums);
      } else {
        __syncwarp();  // all lanes have read their partial sums
        sm90::store_matrices(smem.memory + kStagedAt + lane % 16 * 32 + lane / 16 * 16,
                             pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]), pack_pair<T>(v[4], v[5]),
                             pack_pair<T>(v[6], v[7]));
        __syncwarp();
        const uint4 result = shared_vector(smem, kStagedAt + lane * 16);
        if (!kPartialTiles || p.m0 + lane / 2 < vocab) *memory = result;
      }
    }
    if (kPiece + kSlots < kPieces) {
      __syncwarp();  // all lanes have read what the copies overwrite
      load_input(kPiece + kSlots, p, lane, smem);
      if (kPiece % 2 == 1 && !first) load_pair(kPiece / 2 + kSlots, p, lane, smem);
    }
    sm90::copy_async_commit();
  }

 private:
  static __device__ __forceinline__ bool has(const Pending& p, int piece) {
    return !kPartialTiles || piece < p.pieces;
  }
  // The exponents of the 16 rows of this warp.
  __device__ __forceinline__ unsigned char* exponents_of(const Pending& p, int piece) const {
    return scale_exponents + int64_t{p.exponents + piece * (sm90::kTileM / 16)} * 16;
  }
  // Loads from the shared memory of the warp. (With pointers the compiler would not know that it is shared memory.)
  static __device__ __forceinline__ int shared_int(const sm90::EpilogueSmem& smem, int at) {
    int value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(smem.memory) + at) : "memory");
    return value;
  }
  static __device__ __forceinline__ int shared_byte(const sm90::EpilogueSmem& smem, int at) {
    int value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(shared_address(smem.memory) + at) : "memory");
    return value;
  }
  static __device__ __forceinline__ uint4 shared_vector(const sm90::EpilogueSmem& smem, int at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared_address(smem.memory) + at)
                 : "memory");
    return v;
  }

  // Starts the copies of two pieces.
  __device__ __forceinline__ void load_pair(int pair, const Pending& p, int lane,
                                            const sm90::EpilogueSmem& smem) const {
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
  // Starts the copies of the input rows of the one-hot terms, of the columns of a piece.
  __device__ __forceinline__ void load_input(int piece, const Pending& p, int lane,
                                             const sm90::EpilogueSmem& smem) const {
    if (!p.one_hot || !has(p, piece)) return;
    const int index = shared_int(smem, kOneHotAt + lane / 2 * 8 + 4);
    if (index < 0) return;
    sm90::copy_async(smem.memory + kInputAt + piece % kSlots * kPieceBytes + lane * 16,
                     input + index * input_stride + p.n0 + piece * kPieceColumns + lane % 2 * 8,
                     CacheHint::kNormal);
  }

  __device__ __forceinline__ void subtract_one_hots(float (&v)[8], int rows_at, int lane,
                                                    const sm90::EpilogueSmem& smem) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      const float amount = __int_as_float(shared_int(smem, kOneHotAt + row * 8));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t word = shared_int(smem, rows_at + row * 32 + lane % 4 * 4 + j * 16);
        float &low = v[4 * j + 2 * h], &high = v[4 * j + 2 * h + 1];
        low = fmaf(-amount, low_of<T>(word), low);
        high = fmaf(-amount, high_of<T>(word), high);
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
