// Where fp32 elements are in shared memory on their way to tf32 tensor cores. Raw blocks of 32 k are as the copy engine
// writes them, with 128-byte swizzle: K-major, row r of the tile is one row of 32 k; MN-major, 4 KiB for each 32 rows r
// of the tile, in which row k has 32 r. The rhs is finished K-major without swizzle: 8 columns x 4 k, a piece, are 128
// bytes, pieces follow one another along k, then come the next 8 columns. A warp's 32 columns fill the same 4 KiB.
// Arithmetic alone: tests/native/schedule_check.cc follows every element on the CPU.
#pragma once

#include <cstdint>

#include "cc/device/sm90/layout.cuh"

namespace grouped::sm90 {

constexpr int kTf32K = 32;     // contracted elements of a block: 128 bytes
constexpr int kTf32Steps = 4;  // of one wgmma each, 8 k
constexpr int kBoxWidth = 32;  // elements of 128 bytes
constexpr int kBoxBytes = kTf32K * 128;
constexpr uint32_t kPieceBytes = 128, kOctetBytes = 1024;

// Raw elements: 16 bytes of row r from k = 4 chunk on; one element.
GROUPED_HOST_DEVICE inline uint32_t raw_k_major(uint32_t r, uint32_t chunk) {
  return r * 128 + ((chunk ^ (r & 7)) << 4);
}
GROUPED_HOST_DEVICE inline uint32_t raw_mn_major(uint32_t r, uint32_t k) {
  const uint32_t lane = r % 32;
  return r / 32 * kBoxBytes + (lane & 3) * 4 + k * 128 + (((lane >> 2) ^ (k & 7)) << 4);
}

// The k of element i of piece q: neighbours, or, for two MN-major operands, whose fragments would meet in the same
// banks, every second of eight.
GROUPED_HOST_DEVICE constexpr int k_of_piece(bool spread, int q, int i) {
  return spread ? 8 * (q / 2) + q % 2 + 2 * i : 4 * q + i;
}
// The first piece of a column of the finished rhs; piece q is q * kPieceBytes on.
GROUPED_HOST_DEVICE inline uint32_t finished_column(uint32_t column) {
  return column / 8 * kOctetBytes + (column & 7) * 16;
}
// Finished rhs for 8 k: the second four k are `distance` bytes behind the first.
GROUPED_HOST_DEVICE inline uint64_t plain_descriptor(uint32_t address, uint32_t distance) {
  return uint64_t(address >> 4) | uint64_t(distance >> 4) << 16 | uint64_t(kOctetBytes >> 4) << 32;
}

// Where a lane reads its fragment of 8 k, in the raw 8 KiB of 64 lhs rows: the row of a matrix that it addresses for
// ldmatrix x4 where K-major, else element i. Element i is of row l/4 + 8 (i % 2) of the warp's 16 and the l%4-th of
// piece 2 step + i / 2. `base` is the lane's own, found once.
GROUPED_HOST_DEVICE inline uint32_t lhs_base(Major major, uint32_t warp, uint32_t lane) {
  if (major == Major::k) return raw_k_major(16 * warp + (lane & 15), lane >> 4);
  return raw_mn_major(16 * warp + (lane >> 2), 2 * (lane & 3));
}
GROUPED_HOST_DEVICE inline uint32_t lhs_matrices(uint32_t base, uint32_t step) { return base ^ (step << 5); }
GROUPED_HOST_DEVICE inline uint32_t lhs_element(uint32_t base, uint32_t step, uint32_t i) {
  return step * 1024 + i / 2 * 128 + (base ^ (i % 2 << 5) ^ (i / 2 << 4));  // eight rows on are two chunks
}

}  // namespace grouped::sm90
