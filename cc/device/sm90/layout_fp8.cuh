// Codes of 8 bits in the units of 16-bit elements, and where a stage's scales are. Everything that counts in k blocks,
// items and descriptors works in bytes or in 16-bit elements; of 8-bit codes two are one element, so a block of kBlockK
// elements is one of 128 codes, which share a scale. Arithmetic alone: tests/native/schedule_check.cc follows it.
#pragma once

#include <cstdint>

#include "cc/device/sm90/layout.cuh"

namespace grouped::sm90 {

constexpr int kCodesPerElement = 2;
constexpr int kBlockCodes = kCodesPerElement * kBlockK;  // of one stage, and of one scale
constexpr int kPartCols = 64;                            // columns of a tile that never straddle blocks of 128

// A stage's scales, 4 bytes each: one per row of the tile, then one per column, or one for each kPartCols of them.
GROUPED_HOST_DEVICE constexpr int stage_scale_bytes(int rows, int cols) { return 4 * (rows + cols); }
GROUPED_HOST_DEVICE constexpr uint32_t stage_row(uint32_t row) { return 4 * row; }
GROUPED_HOST_DEVICE constexpr uint32_t stage_column(int rows, uint32_t column) { return 4 * (rows + column); }

// Elements that so many codes reach into: a sum's length.
GROUPED_HOST_DEVICE constexpr int32_t elements_of_codes(int32_t codes) {
  return (codes + kCodesPerElement - 1) / kCodesPerElement;
}
// Positions in rows padded to segments of kBlockCodes (numerics 2.4) that `rows` rows take.
GROUPED_HOST_DEVICE constexpr int64_t segment_codes(int64_t rows) {
  return (rows + kBlockCodes - 1) / kBlockCodes * kBlockCodes;
}

// ---- codes contracted across their lines, as the operand A of wgmma, which reads 8-bit elements K-major only ----
//
// A block is 128 lines of 128 codes in swizzled rows of 128 bytes. A transposed load of 16-bit matrices gives a lane
// (l/4 = g, l%4 = t) codes 2g and 2g + 1 of two lines; of two such words one permutation makes what a register of A
// wants, four lines of one column. Rows g and g + 8 of a warp's 16 rows of A so are columns 2g and 2g + 1 of its 16.

constexpr int kStepCodes = 32;                         // contracted by one wgmma
constexpr int kBlockSteps = kBlockCodes / kStepCodes;  // of a block

// Byte offset in a step of the row that `lane` addresses of four matrices, those of lines 0 to 15 (two) and of 16 to
// 31, for one of eight warps. Lanes of t >= 2 get their second pair of lines first: no two rows of a matrix meet in a
// bank.
GROUPED_HOST_DEVICE constexpr uint32_t turned_at(int warp, int lane) {
  const int matrix = lane / 8, t = lane % 8 / 2;
  const int line = matrix / 2 * 16 + 4 * t + 2 * (matrix % 2 ^ t / 2) + lane % 2;
  return line * 128 + (warp ^ line % 8) * 16;
}
// What pairs::chosen_bytes selects for row g + 8 `odd` out of the words of two matrices.
GROUPED_HOST_DEVICE constexpr uint32_t turned_bytes(int lane, int odd) {
  return (lane % 4 < 2 ? 0x6420 : 0x2064) + 0x1111 * odd;
}
// Byte offset, in a piece of 16 rows x 128 bytes, of the `bytes` that a lane has of a result's row: two columns, those
// of row 8 b + 2t + e and of warp `warp` of those that share the piece.
GROUPED_HOST_DEVICE constexpr uint32_t turned_result_at(int warp, int lane, int b, int e, int bytes) {
  const int row = 8 * b + 2 * (lane % 4) + e, at = 8 * bytes * warp + bytes * (lane / 4);
  return row * 128 + (at / 16 ^ row % 8) * 16 + at % 16;
}

}  // namespace grouped::sm90
