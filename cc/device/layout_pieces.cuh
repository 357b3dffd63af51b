// Weights that come as codes, in shared memory: a piece is the codes of 16 bytes, which a thread widens to 16-byte chunks
// of the tile that is multiplied (layout.cuh). 64 neighbouring codes are one 128-byte row of that tile, whichever of its
// axes they lie along. Four warps take all pieces of 64 or 32 such rows at a time, a pass.
//
// Neither loads nor stores of eight neighbouring threads meet in a bank: tests/native/schedule_check.cc follows every
// piece on the CPU.
#pragma once

#include <cstdint>

#include "cc/device/layout.cuh"

namespace grouped::sm90 {

constexpr int kWideningThreads = 128;

// Of 4 bits a code, else of 8.
template <bool kNibbles>
struct Pieces {
  static constexpr int kCodes = kNibbles ? 32 : 16;         // of a piece
  static constexpr int kChunks = kCodes / 8;                // that it becomes
  static constexpr int kOfRow = 64 / kCodes;                // pieces of a row
  static constexpr int kRowBytes = 16 * kOfRow;             // of a row of codes
  static constexpr int kRows = kWideningThreads / kOfRow;   // of a pass
  static constexpr int kPassBytes = kWideningThreads * 16;  // of codes
  static constexpr int kPasses(int cols) { return cols / kRows; }

  // Of a thread's piece in a pass: its row, counted from the pass's first, and the first of its codes in the row.
  GROUPED_HOST_DEVICE static int row(int thread) { return thread / kOfRow; }
  GROUPED_HOST_DEVICE static int code(int thread) { return thread % kOfRow * kCodes; }
  // Byte offsets inside a pass: of the codes, under a swizzle where they have 64 bytes a row, and of the first chunk;
  // chunk c is at that place ^ 16 c.
  GROUPED_HOST_DEVICE static uint32_t from(int thread) {
    return kNibbles ? 16 * thread : narrow_slot_of(row(thread), thread % kOfRow);
  }
  GROUPED_HOST_DEVICE static uint32_t to(int thread) {
    return row(thread) * 128 + ((thread % kOfRow * kChunks) ^ (row(thread) % 8)) * 16;
  }
  static constexpr uint32_t kPassChunkBytes = kRows * 128;
};

}  // namespace grouped::sm90
