// Weights of 4-bit codes as the operand A of wgmma, which may come from registers: 64 columns of a tile are the 64 rows
// of A, and the rows of the tile, up to 256, are the columns of B (operands swapped). Which column a row of A
// represents is free; it is chosen so that a lane finds its codes in few loads and its results are contiguous.
//
// "Lines" are the stored rows of codes, of which a group has [lines, line]. A lane (l/4 = g, l%4 = t) owns rows g and
// g + 8 of its warp's 16 of A. Arithmetic alone: tests/native/schedule_check.cc follows every code on the CPU.
#pragma once

#include <cstdint>

#include "cc/device/sm90/layout_pieces.cuh"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {

constexpr int kSwappedRows = 256;
constexpr int kSwappedCols = 64;  // of a warpgroup; a tile has two of them
constexpr int kSwappedSteps = kBlockK / 16;

// Where codes are contracted along their lines, which of a tile's 128 columns the rows of A of one of eight warps
// represent: neighbours; rows 0 to 7 for columns of the first 64 and rows 8 to 15 for the same ones of the second 64;
// or even and odd ones.
enum class ColumnOrder { neighbours, halves, alternating };
GROUPED_HOST_DEVICE constexpr int swapped_column(ColumnOrder order, int warp, int row) {
  return order == ColumnOrder::neighbours ? warp * 16 + row
         : order == ColumnOrder::halves   ? row / 8 * kSwappedCols + warp * 8 + row % 8
                                          : 2 * (warp * 8 + row % 8) + row / 8;
}
// Where they are contracted across lines, four neighbouring columns are two bytes, of which one warp of a pair takes
// the first and the other one the second. The lower code of a byte belongs to row g and the higher one to row g + 8.
GROUPED_HOST_DEVICE constexpr int swapped_column_of_bytes(int warp, int row) {
  return warp / 2 * 32 + row % 8 * 4 + warp % 2 * 2 + row / 8;
}

// ---- codes contracted along lines: a lane needs byte t of each of four words, which are two steps ----

// The codes at k 2t and 2t + 1, and 8 on, of both steps, as pairs.
GROUPED_HOST_DEVICE inline void pairs_of_line(const uint32_t (&words)[4], int t, uint32_t (&to)[4]) {
  const uint32_t select = uint32_t(t) * 0x11 + 0x40;
  const uint32_t first = pairs::chosen_bytes(words[0], words[1], select);
  const uint32_t second = pairs::chosen_bytes(words[2], words[3], select);
  pairs::from_nibbles(pairs::chosen_bytes(first, second, 0x5410), to);
}

// ---- codes contracted across lines: two lines meet in a pair ----

// Byte offset of the row that `lane` addresses of four transposed 8 x 8 matrices of 16 bits, those of 32 lines, in
// boxes of 64 codes by 64 lines. A lane then has, of each, two bytes of line 2t and two of line 2t + 1.
GROUPED_HOST_DEVICE inline uint32_t swapped_bytes_at(int warp, int lane) {
  return warp / 4 * (kBlockK * 32) + nibbles_at(lane, warp / 2 % 2);
}
// The pairs of rows g and g + 8 of A.
GROUPED_HOST_DEVICE inline void pairs_of_bytes(uint32_t lines, int warp, uint32_t (&to)[2]) {
  const uint32_t bytes = pairs::chosen_bytes(lines, 0, warp % 2 ? 0x4341 : 0x4240);
  to[0] = (bytes & 0x000f000fu) * 0x1040 & 0x81c081c0u;
  to[1] = (bytes & 0x00f000f0u) * 0x0104 & 0x81c081c0u;
}

// ---- factors, which codes are multiplied with, as pairs of bfloat16, one for 16 codes ----

constexpr int kFactorCodes = 16, kFactorBytes = 2048;  // of a block
// Word of the factor of codes 16 i and on of a line's 64.
GROUPED_HOST_DEVICE constexpr int factor_of_line(int line, int i) { return line * (kBlockK / kFactorCodes) + i; }
// Half word of the factor of line `line` and of columns 16 i and on; blocks of 32 use even i alone. The factors that
// one lane reads are 32 contiguous bytes.
GROUPED_HOST_DEVICE constexpr int factor_across(int line, int i) {
  return ((i * 4 + line % 8 / 2) * 8 + line / 8) * 2 + line % 2;
}

}  // namespace grouped::sm90
