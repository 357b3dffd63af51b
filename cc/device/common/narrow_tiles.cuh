// Tiles of products with one narrow side, at most 32 wide: how both operands are laid out in shared memory, how a warp
// multiplies them by `mma.sync` m16n8k16, and how its sums leave. A block of the wide operand is 64 lines of 256 bytes.
#pragma once

#include <cstdint>

#include "cc/device/common/elements.cuh"
#include "cc/device/common/mma_sm80.cuh"

namespace grouped {
namespace device {

constexpr int kMostNarrow = 32;  // rows or columns
constexpr int kNarrowThreads = 128, kNarrowWarps = kNarrowThreads / 32;
constexpr int kSlab = 16;                         // rows of one mma
constexpr int kChunk = 8;                         // elements of 16 bytes, and columns that are stored at once
constexpr int kWideLines = 64, kWideChunks = 16;  // of a block, in memory and in shared memory
constexpr int kWideBytes = kWideLines * kWideChunks * 16;

// How the narrow operand is laid out in a product over rows, or that both are contracted over rows.
enum class Form { k_major, n_major, sums };

// Where a chunk is among lines of kChunks of them: swizzled, so that chunks of 8 neighbouring lines are on different
// banks.
template <int kChunks>
__device__ uint32_t chunk_offset(int line, int chunk) {
  constexpr int kShared = kChunks < 8 ? 8 / kChunks : 1;  // lines in 128 bytes
  constexpr int kOrders = kChunks < 8 ? kChunks : 8;
  return (line * kChunks + (chunk ^ line / kShared % kOrders)) * 16;
}

// A tile for kWarps neighbouring warps.
template <class T, int kNarrow_, Form kForm_, int kWarps = kNarrowWarps>
struct NarrowTile {
  static constexpr int kNarrow = kNarrow_;
  static constexpr Form kForm = kForm_;
  static constexpr bool kWideAlong = kForm != Form::sums, kNarrowAlong = kForm == Form::k_major;
  static constexpr int kTile = kWideAlong ? kWideLines : kWideChunks * kChunk;   // rows of mma
  static constexpr int kDepth = kWideAlong ? kWideChunks * kChunk : kWideLines;  // of a block
  static constexpr int kNarrowLines = kNarrowAlong ? kNarrow : kDepth;
  static constexpr int kNarrowChunks = kNarrow * kDepth / kChunk / kNarrowLines;
  static constexpr int kNarrowBytes = kNarrow * kDepth * 2;
  static constexpr int kSlabs = kTile / kSlab / kWarps;  // a warp

  using Sums = float[kSlabs][kNarrow / 8][4];

  // The first row of mma of this warp.
  static __device__ int first_row() { return threadIdx.x / 32 % kWarps * (kSlabs * kSlab); }

  // Sixteen of the depth at `k` of the narrow operand, for 16 of its rows or columns at `n`: the matrices (n, k), (n, k
  // + 8), (n + 8, k), (n + 8, k + 8).
  static __device__ void load_narrow(uint32_t narrow, int n, int k, uint32_t (&b)[4]) {
    const int matrix = threadIdx.x % 32 / 8, line = threadIdx.x % 8, low = matrix % 2, high = matrix / 2;
    load_matrices<!kNarrowAlong>(
        narrow + (kNarrowAlong ? chunk_offset<kNarrowChunks>(n + high * 8 + line, k / kChunk + low)
                               : chunk_offset<kNarrowChunks>(k + low * 8 + line, n / kChunk + high)),
        b);
  }

  // Likewise of the wide operand, for this warp's slabs: (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8).
  static __device__ void load_wide(uint32_t wide, int k, uint32_t (&a)[kSlabs][4]) {
    const int matrix = threadIdx.x % 32 / 8, line = threadIdx.x % 8, low = matrix % 2, high = matrix / 2;
    const int first = first_row();
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int m = first + slab * kSlab;
      load_matrices<!kWideAlong>(wide + (kWideAlong ? chunk_offset<kWideChunks>(m + low * 8 + line, k / kChunk + high)
                                                    : chunk_offset<kWideChunks>(k + high * 8 + line, m / kChunk + low)),
                                 a[slab]);
    }
  }

  static __device__ void add(const uint32_t (&a)[kSlabs][4], const uint32_t (&b)[4], int n, Sums& sums) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      multiply_add<T>(sums[slab][n / 8], a[slab], b[0], b[1]);
      multiply_add<T>(sums[slab][n / 8 + 1], a[slab], b[2], b[3]);
    }
  }

  // Adds a block of both operands to the sums of this warp, 16 of its depth at a time.
  static __device__ void add_block(uint32_t wide, uint32_t narrow, Sums& sums) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kSlabs][4];
      load_wide(wide, k, a);
#pragma unroll
      for (int n = 0; n < kNarrow; n += 16) {
        uint32_t b[4];
        load_narrow(narrow, n, k, b);
        add(a, b, n, sums);
      }
    }
  }

  static __device__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kSlabs * kNarrow / 2; ++i) (&sums[0][0][0])[i] = 0.0f;
  }
};

// The end of a warp's sums, of which lane l has rows l / 4 and l / 4 + 8 of each slab, columns 2 (l % 4) and the next
// of each 8. They pass through shared memory as kRows x kCols of the result, so that they are stored as vectors.
template <class Tile, bool kTransposed>
struct Drain {
  static constexpr int kTall = Tile::kSlabs * kSlab;
  static constexpr int kRows = kTransposed ? Tile::kNarrow : kTall, kCols = kTransposed ? kTall : Tile::kNarrow;
  static constexpr int kFloats = kRows * kCols;

  static __device__ void store(const Finish& f, const typename Tile::Sums& sums, float* staged) {
    const int lane = threadIdx.x % 32, first = Tile::first_row();
#pragma unroll
    for (int i = 0; i < Tile::kSlabs * Tile::kNarrow / 2; ++i) {
      const int slab = i / (Tile::kNarrow / 2), block = i / 4 % (Tile::kNarrow / 8), at = i % 4;
      const int m = slab * kSlab + at / 2 * 8 + lane / 4, n = block * 8 + lane % 4 * 2 + at % 2;
      staged[kTransposed ? n * kCols + m : m * kCols + n] = sums[slab][block][at];
    }
    __syncwarp();
    const int row = kTransposed ? 0 : first, col = kTransposed ? first : 0;
    if (f.vectors) {
      leave<kChunk>(f, staged, row, col, lane);
    } else {
      leave<1>(f, staged, row, col, lane);
    }
  }

 private:
  template <int W>
  static __device__ void leave(const Finish& f, const float* staged, int row, int col, int lane) {
#pragma unroll 1
    for (int at = lane * W; at < kFloats; at += 32 * W) {
      float values[1][W];
#pragma unroll
      for (int i = 0; i < W; ++i) values[0][i] = staged[at + i];
      finish_rows(f, row + at / kCols, 0, col + at % kCols, values);
    }
  }
};

}  // namespace device
}  // namespace grouped
