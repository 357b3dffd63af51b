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

}  // namespace grouped::sm90
