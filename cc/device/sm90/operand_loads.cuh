// Operand tiles on their way to shared memory, as layout.cuh says. Both CTAs of a pair run the same loads; what they
// share is loaded by halves and multicast.
#pragma once

#include "cc/device/sm90/layout.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

constexpr uint16_t kBothCtas = 3;

// The operand of kMost * 64 rows: boxes of 64 x 64, of which `at` is the first and the others are 64 further each along
// kRowsDim. Those behind the first `boxes` have no valid row and are left out. Boxes of a shared (across) tile are
// loaded by the CTAs in turn.
template <int kRowsDim, int kMost = 2>
__device__ inline void load_lhs(const CUtensorMap* map, ptx::Coords at, int boxes, bool across, uint32_t rank,
                                uint32_t to, uint32_t barrier) {
  if (across) {
    if (int(rank) >= boxes) return;
    at.c[kRowsDim] += 64 * rank;
    ptx::tensor_load_multicast(to + kBlockBytes * rank, map, at, barrier, kBothCtas);
#pragma unroll
    for (int box = 2; box < kMost; box += 2) {
      if (box + int(rank) >= boxes) return;
      at.c[kRowsDim] += 2 * 64;
      ptx::tensor_load_multicast(to + kBlockBytes * (box + rank), map, at, barrier, kBothCtas);
    }
    return;
  }
  ptx::tensor_load(to, map, at, barrier);
#pragma unroll
  for (int box = 1; box < kMost; ++box) {
    if (box >= boxes) return;
    at.c[kRowsDim] += 64;
    ptx::tensor_load(to + kBlockBytes * box, map, at, barrier);
  }
}

// The kCols-column operand in two parts: K-major by columns (box 64 k x kCols/2), MN-major by k (boxes 64 n x 32 k).
// A tile that the pair shares (not across) is loaded one part per CTA.
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

// A weight tile in two parts that are apart in memory, for results that need a column of each: boxes of 32 columns, of
// either part by turns. Boxes that the pair shares are loaded one part per CTA.
template <Major kMajor>
struct PairedTile {
  static_assert(kMajor != Major::mn);
  static constexpr uint32_t kBoxBytes = 32 * 128;
  static constexpr uint32_t kBoxCols = kMajor == Major::k ? 64 : 32, kBoxRows = kMajor == Major::k ? 32 : 64;

  // `at` is the first element of part 0 in the map `first`. Part 1 is `part` columns further in the map `second`, the
  // boxes of a part `step` columns apart.
  static __device__ void load(const CUtensorMap* first, const CUtensorMap* second, ptx::Coords at, int part, int step,
                              int boxes, bool across, uint32_t rank, uint32_t to, uint32_t barrier) {
    if (across) {
      load_part<false>(first, at, step, boxes, to, barrier);
      at.c[kColsDim] += part;
      load_part<false>(second, at, step, boxes, to + kBoxBytes, barrier);
    } else {
      at.c[kColsDim] += part * int(rank);
      load_part<true>(rank != 0 ? second : first, at, step, boxes, to + kBoxBytes * rank, barrier);
    }
  }

 private:
  static constexpr int kColsDim = kMajor == Major::k ? 1 : 0;

  template <bool kShared>
  static __device__ void load_part(const CUtensorMap* map, ptx::Coords at, int step, int boxes, uint32_t to,
                                   uint32_t barrier) {
    for (int i = 0; i < boxes; ++i) {
      if constexpr (kShared) {
        ptx::tensor_load_multicast(to, map, at, barrier, kBothCtas);
      } else {
        ptx::tensor_load(to, map, at, barrier);
      }
      at.c[kColsDim] += step;
      to += 2 * kBoxBytes;
    }
  }
};

}  // namespace grouped::sm90
