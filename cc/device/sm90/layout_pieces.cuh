// Weights that come as codes, in shared memory. 64 codes that are neighbours along either axis of the operand are one
// 128-byte row of the tile that is multiplied (layout.cuh). A thread widens a piece, half of a row, to four chunks of
// 16 bytes; four warps take all pieces of 64 rows in one pass.
//
// Neither loads nor stores of eight neighbouring threads meet in a bank: tests/native/schedule_check.cc follows every
// piece on the CPU.
#pragma once

#include <cstdint>

#include "cc/device/sm90/layout.cuh"

namespace grouped::sm90 {

constexpr int kWideningThreads = 128;
constexpr int kPieceCodes = 32, kPieceChunks = 4;
constexpr int kPassRows = 64;
constexpr int kPassBytes = kPassRows * 128;  // of what is multiplied

// Of a thread's piece in a pass: its row, and its first code.
GROUPED_HOST_DEVICE inline int piece_row(int thread) { return thread / 2; }
GROUPED_HOST_DEVICE inline int piece_code(int thread) { return thread % 2 * kPieceCodes; }
// Byte offset of its first chunk; chunk c is at that place ^ 16 c.
GROUPED_HOST_DEVICE inline uint32_t piece_chunk(int thread) {
  return piece_row(thread) * 128 + ((thread % 2 * kPieceChunks) ^ (piece_row(thread) % 8)) * 16;
}

// Bytes of codes of a row, one code or two per byte, under a swizzle as wide as they are.
constexpr int coded_row_bytes(bool nibbles) { return nibbles ? 32 : 64; }
// Byte offset of the 16-byte chunk `chunk`, 0 or 1, of a row of 4-bit codes.
GROUPED_HOST_DEVICE inline uint32_t nibbles_at(int row, int chunk) { return row * 32 + (chunk ^ (row / 4 % 2)) * 16; }
// Byte offset of a piece's first 16 bytes of codes. Codes of eight bits have 16 more, at that place ^ 16.
GROUPED_HOST_DEVICE inline uint32_t piece_codes(bool nibbles, int thread) {
  return nibbles ? nibbles_at(piece_row(thread), thread % 2) : narrow_slot_of(piece_row(thread), thread % 2 * 2);
}

}  // namespace grouped::sm90
