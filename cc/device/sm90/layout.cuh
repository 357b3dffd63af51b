// Where elements are in shared memory, and the wgmma descriptors that find them there. Every tile is made of blocks
// whose rows are as long as their swizzle is wide:
//   k     row n of the tile is one 128-byte row of 64 k; blocks of 64 rows, 8 KiB apart
//   mn    row k is one 128-byte row of 64 n; blocks of 64 columns n, each 64 k deep, 8 KiB apart
//   mn32  row k is one 64-byte row of 32 n; blocks of 32 columns n, each 64 k deep, 4 KiB apart
// Arithmetic alone: tests/native/schedule_check.cc follows every element on the CPU.
#pragma once

#include <cstdint>

#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

enum class Major { k, mn, mn32 };

constexpr int kBlockBytes = 64 * 128;

// In a cluster a shared address names its CTA above bit 23, which must not reach the other fields.
GROUPED_HOST_DEVICE inline uint64_t descriptor(uint32_t address, Major major) {
  const bool narrow = major == Major::mn32;
  const uint64_t leading = major == Major::k ? 1 : (narrow ? kBlockBytes / 2 : kBlockBytes) >> 4;
  const uint64_t stride = (narrow ? 512 : 1024) >> 4, swizzle = uint64_t(narrow ? 2 : 1) << 62;  // of 64, 128 bytes
  return uint64_t((address & 0x3ffff) >> 4) | leading << 16 | stride << 32 | swizzle;
}
// What a step of 16 along k adds to a descriptor.
GROUPED_HOST_DEVICE constexpr uint32_t descriptor_step(Major major) {
  return (major == Major::k ? 16 * 2 : major == Major::mn ? 16 * 128 : 16 * 64) >> 4;
}

// A slot holds 16 rows of 128 bytes on their way to global memory. Byte offsets inside it:
constexpr int kSlotBytes = 16 * 128;
// The row that `lane` addresses for stmatrix and ldmatrix x4: 8-column blocks j and j + 1 of 16-bit elements, rows 0 to
// 7 and 8 to 15 of each.
GROUPED_HOST_DEVICE inline uint32_t slot_of_matrix(uint32_t lane, uint32_t j) {
  return ((lane & 7) + (lane & 8)) * 128 + ((j + (lane >> 4)) ^ (lane & 7)) * 16;
}
// The pair of 32-bit elements that `lane` holds of 8-column block j, in row lane / 4; row lane / 4 + 8 is 8 * 128 on.
GROUPED_HOST_DEVICE inline uint32_t slot_of_pair(uint32_t lane, uint32_t j) {
  const uint32_t row = lane / 4, chunk = (2 * j + (lane & 2) / 2) ^ (row & 7);
  return row * 128 + chunk * 16 + (lane & 1) * 8;
}

// A narrow slot holds 16 rows of 64 bytes, four chunks of 16 each.
constexpr int kNarrowSlotBytes = 16 * 64;
GROUPED_HOST_DEVICE inline uint32_t narrow_slot_of(uint32_t row, uint32_t chunk) {
  return row * 64 + (chunk ^ (row / 2 % 4)) * 16;
}

}  // namespace grouped::sm90
