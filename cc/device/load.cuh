// Operand tiles on their way to shared memory, and the wgmma descriptors that read them there. Every tile is made of
// blocks of 128-byte rows under the 128-byte swizzle:
//   K-major   row n of the tile is one 128-byte row of 64 k; blocks of 64 rows, 8 KiB apart
//   MN-major  row k is one 128-byte row of 64 n; blocks of 64 columns n, each 64 k deep, 8 KiB apart
// Both CTAs of a pair run the same loads; what they share is loaded by halves and multicast.
#pragma once

#include "cc/device/ptx.cuh"
#include "cc/device/schedule.cuh"

namespace grouped::sm90 {

enum class Major { k, mn };

constexpr int kBlockBytes = 64 * 128;
constexpr uint16_t kBothCtas = 3;

// In a cluster a shared address names its CTA above bit 23, which must not reach the other fields.
__device__ inline uint64_t descriptor(uint32_t address, Major major) {
  const uint64_t leading = major == Major::mn ? kBlockBytes >> 4 : 1, stride = 1024 >> 4,
                 swizzle128 = uint64_t(1) << 62;
  return uint64_t((address & 0x3ffff) >> 4) | leading << 16 | stride << 32 | swizzle128;
}
// What a step of 16 along k adds to a descriptor.
GROUPED_HOST_DEVICE constexpr uint32_t descriptor_step(Major major) {
  return (major == Major::mn ? 16 * 128 : 16 * 2) >> 4;
}

// The 128-row operand: two boxes of 64 x 64, `at` is the first and the second lies 64 further along kRowsDim. With
// `halves` = 1 the second has no valid row and is left out. A shared (across) tile is loaded one box a CTA.
template <int kRowsDim>
__device__ inline void load_lhs(const CUtensorMap* map, ptx::Coords at, int halves, bool across, uint32_t rank,
                                uint32_t to, uint32_t barrier) {
  if (across) {
    if (int(rank) >= halves) return;
    at.c[kRowsDim] += 64 * rank;
    ptx::tensor_load_multicast(to + kBlockBytes * rank, map, at, barrier, kBothCtas);
    return;
  }
  ptx::tensor_load(to, map, at, barrier);
  if (halves < 2) return;
  at.c[kRowsDim] += 64;
  ptx::tensor_load(to + kBlockBytes, map, at, barrier);
}

// The kCols-column operand in two parts: K-major by columns (box 64 k x kCols/2), MN-major by k (boxes 64 n x 32 k).
// A tile that the pair shares (not across) is loaded one part a CTA.
template <Major kMajor, int kCols>
struct RhsTile {
  static constexpr uint32_t kBytes = kCols * 128;
  static constexpr uint32_t kBoxCols = 64, kBoxRows = kMajor == Major::k ? kCols / 2 : 32;

  static __device__ void load(const CUtensorMap* map, ptx::Coords at, bool across, uint32_t rank, uint32_t to,
                              uint32_t barrier) {
    if (across) {
      load_part<false>(map, at, 0, to, barrier);
      load_part<false>(map, at, 1, to, barrier);
    } else {
      load_part<true>(map, at, rank, to, barrier);
    }
  }

 private:
  template <bool kShared>
  static __device__ void load_part(const CUtensorMap* map, ptx::Coords at, int part, uint32_t to, uint32_t barrier) {
    at.c[1] += kBoxRows * part;
    to += kBoxRows * 128 * part;
    constexpr int kBoxes = kMajor == Major::k ? 1 : kCols / 64;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if constexpr (kShared) {
        ptx::tensor_load_multicast(to, map, at, barrier, kBothCtas);
      } else {
        ptx::tensor_load(to, map, at, barrier);
      }
      at.c[0] += 64;
      to += kBlockBytes;
    }
  }
};

}  // namespace grouped::sm90
