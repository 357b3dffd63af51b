// Codes that are contracted across their lines, as fragments of the operand A of wgmma (layout_fp8.cuh): the warps that
// multiply a tile transpose its codes on their way to registers, and nothing is transposed in memory.
#pragma once

#include "cc/device/sm90/layout_fp8.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {

// Of half a block, two steps: what transposed loads bring, or what wgmma reads.
constexpr int kHalfSteps = kBlockSteps / 2;
using HalfBlock = uint32_t[kHalfSteps][4];

class TurnedCodes {
 public:
  // Of 16 of the block's 128 columns, those of one of eight warps.
  __device__ explicit TurnedCodes(int warp)
      : at_(kept(turned_at(warp, threadIdx.x % 32))),
        even_(kept(turned_bytes(threadIdx.x % 32, 0))),
        odd_(kept(turned_bytes(threadIdx.x % 32, 1))) {}

  // The lines of half 0 or 1 of the block at shared address `block`.
  __device__ void load(uint32_t block, int half, HalfBlock& raw) const {
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      ptx::load_transposed_x4(block + at_ + (kHalfSteps * half + i) * kStepCodes * 128, raw[i]);
    }
  }
  __device__ void turn(const HalfBlock& raw, HalfBlock& a) const {
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        a[i][j] = pairs::chosen_bytes(raw[i][j], raw[i][j + 1], even_);
        a[i][j + 1] = pairs::chosen_bytes(raw[i][j], raw[i][j + 1], odd_);
      }
    }
  }

 private:
  // Through a shuffle, which ptxas does not repeat: it would ask for the thread's index again in every block, and wait.
  static __device__ uint32_t kept(uint32_t value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }

  uint32_t at_, even_, odd_;
};

}  // namespace grouped::sm90
