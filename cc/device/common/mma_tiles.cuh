// Products of ragged rows and contractions over them by `mma.sync`, for operands of 1, 2 or 4 bytes in shared memory.
//
//   128 threads, 2 blocks per SM, which draw tiles from a counter:
//     copy k+2 --cp.async--> ring[3] of (lhs 8 KiB, rhs 8 KiB) --ldmatrix--> 64x64 per warp, mma.sync --> epilogue
//     or k+3             --> ring[4] of (lhs 8 KiB, rhs 4 KiB)           --> 64x32 per warp if stages are summed apart
//     the next tile's early stages are copied while the last is stored through the stage behind them
//     48 KiB of shared memory; at most 255 registers: 128 sums, or 64 and 64 of a stage, 2 x 32 or 2 x 24 fragments,
//     the rest addresses
//
// 48 KiB and no more: two blocks then fit the 100 KiB of sm_86 and sm_89.
//
// Tensor cores truncate what they add to a sum (and keep few bits of one of 8-bit products), an error that grows with
// every instruction. Where it would count, the sum of a stage is finished apart and added in float32; a warp then owns
// 32 columns instead of 64, because both sums need registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cc/device/common/drain.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/mma_operands.cuh"
#include "cc/device/common/portable_tiles.cuh"

namespace grouped {
namespace device {

constexpr int kMmaBlocks = 2;  // an SM

template <class Shape>
using Sums = float[kMmaRows / kMmaSlab][Shape::kWarpCols / 8][4];

template <class Shape>
__device__ void clear(Sums<Shape>& sums) {
#pragma unroll
  for (auto& slab : sums) {
#pragma unroll
    for (auto& block : slab) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }
}

// multiply(sums, a, b0, b1) for every slab of rows and block of columns.
template <class Shape, class F>
__device__ void multiply_all(const Fragments<Shape>& f, Sums<Shape>& sums, const F& multiply) {
#pragma unroll
  for (int i = 0; i < kMmaRows / kMmaSlab; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::kWarpCols / 8; ++j) multiply(sums[i][j], f.a[i], f.column(j, 0), f.column(j, 1));
  }
}

// Both operands of one tile on their way into the ring, stage after stage.
template <class Shape, bool kLhsKMajor, bool kRhsKMajor>
class Copies {
 public:
  Copies() = default;

  __device__ Copies(const Problem& p, const Place& at)
      : lhs_(lhs_at(p, at), p.lhs_type, p.lhs_stride * bytes_of(p.lhs_type), at.rows, 0),
        rhs_(rhs_at(p, at), p.rhs_type, p.rhs_stride * bytes_of(p.rhs_type), at.cols, p.rhs_jump),
        depth_left_(at.depth) {}

  // Stages behind the end are filled with zeros, which are not multiplied.
  template <bool kVectors>
  __device__ void copy_stage(uint32_t stage, const Problem& p, DType lhs_type, DType rhs_type) {
    rhs_.move(depth_left_ == p.jump_depth ? p.rhs_jump : 0);
    lhs_.template copy<kVectors>(stage, depth_left_, lhs_type, p.lhs_stride * bytes_of(lhs_type));
    rhs_.template copy<kVectors>(stage + Shape::kLhsBytes, depth_left_, rhs_type, p.rhs_stride * bytes_of(rhs_type));
    commit_copies();
    depth_left_ -= Shape::kDepth;
  }

  __device__ void copy_early(uint32_t ring, const Problem& p) {
#pragma unroll 1
    for (int i = 0; i < Shape::kStagesAhead; ++i) {
      copy_stage<false>(ring + i * Shape::kStageBytes, p, p.lhs_type, p.rhs_type);
    }
  }

  __device__ bool vectors() const { return lhs_.vectors() && rhs_.vectors(); }
  __device__ int depth_left() const { return depth_left_; }

 private:
  Copier<Shape, kLhsKMajor, kTileRows> lhs_;
  Copier<Shape, kRhsKMajor, Shape::kCols> rhs_;
  int depth_left_;  // to copy
};

// The products of both halves of a stage, where they are summed at once.
template <class Op, bool kApart = Op::Shape::kApart>
class StageSums {
 public:
  using Shape = typename Op::Shape;
  __device__ explicit StageSums(Sums<Shape>& sums) : sums_(sums) {}
  __device__ void first(const Fragments<Shape>& f) { Op::template multiply<false>(f, sums_); }
  __device__ void second(const Fragments<Shape>& f) { Op::template multiply<false>(f, sums_); }

 private:
  Sums<Shape>& sums_;
};

// The same where a stage is summed apart.
template <class Op>
class StageSums<Op, true> {
 public:
  using Shape = typename Op::Shape;
  __device__ explicit StageSums(Sums<Shape>& sums) : sums_(sums) {}
  __device__ void first(const Fragments<Shape>& f) { Op::template multiply<true>(f, stage_); }
  __device__ void second(const Fragments<Shape>& f) {
    Op::template multiply<false>(f, stage_);
#pragma unroll
    for (int i = 0; i < kMmaRows / kMmaSlab; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kWarpCols / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[i][j][e] = __fadd_rn(sums_[i][j][e], stage_[i][j][e]);
      }
    }
  }

 private:
  Sums<Shape>& sums_;
  Sums<Shape> stage_;
};

// The whole contraction of a tile whose early stages are on their way. The loop has no branch where kVectors holds:
// that lets loads run between products.
template <class Op, bool kVectors, bool kLhsKMajor, bool kRhsKMajor>
__device__ __forceinline__ void contract(const Problem& p, Copies<typename Op::Shape, kLhsKMajor, kRhsKMajor>* copies,
                                         uint32_t ring, Sums<typename Op::Shape>& sums) {
  using Shape = typename Op::Shape;
  const uint32_t last_stage = ring + (Shape::kStages - 1) * Shape::kStageBytes;
  const DType lhs_type = Op::lhs_type(p), rhs_type = Op::rhs_type(p);
  const FragmentLoader<Shape, kLhsKMajor, kRhsKMajor> fragments;
  Fragments<Shape> even, odd;
  StageSums<Op> add(sums);
  wait_copies<Shape::kStagesAhead - 1>();
  __syncthreads();
  uint32_t use = ring;
  fragments.load(use, 0, &even);
  fragments.load(use, 1, &odd);
  copies->template copy_stage<kVectors>(last_stage, p, lhs_type, rhs_type);
  add.first(even);
#pragma unroll 1
  while (copies->depth_left() > -Shape::kStagesAhead * Shape::kDepth) {
    wait_copies<Shape::kStagesAhead - 1>();
    __syncthreads();
    const uint32_t free = use;  // its last read is before the barrier
    use = use == last_stage ? ring : use + Shape::kStageBytes;
    fragments.load(use, 0, &even);
    add.second(odd);
    fragments.load(use, 1, &odd);
    copies->template copy_stage<kVectors>(free, p, lhs_type, rhs_type);
    add.first(even);
  }
  add.second(odd);
  wait_copies<0>();
}

// Sums of lane l: rows l/4 and l/4 + 8 of each slab, columns 2 (l%4) and the next of each 8; with kTurned, of the even
// and the odd ones of 16. They pass through shared memory slab by slab, so that neighbouring lanes store neighbours.
template <class Shape, bool kInterleaved>
__device__ void drain_sums(const Finish& f, const Sums<Shape>& sums, float* staged, int warp_row, int warp_col) {
  constexpr int kCols = Shape::kWarpCols;
  int lane;  // read again for every tile: what follows from it must not occupy registers in the loop
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll 1
  for (int slab = 0; slab < kMmaRows / kMmaSlab; ++slab) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMmaRows / kMmaSlab; ++i) {
      if (i != slab) continue;  // sums are registers: no index at run time
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        const float (&s)[4] = sums[i][j];
        if constexpr (kInterleaved) {
          if (j % 2 != 0) continue;
          float* at = staged + staged_at(lane / 4, j * 8 + lane % 4 * 4, kCols);
          const float (&odd)[4] = sums[i][j | 1];
          *reinterpret_cast<float4*>(at) = make_float4(s[0], odd[0], s[1], odd[1]);
          *reinterpret_cast<float4*>(at + 8 * kCols) = make_float4(s[2], odd[2], s[3], odd[3]);
        } else {
          float* at = staged + staged_at(lane / 4, j * 8 + lane % 4 * 2, kCols);
          *reinterpret_cast<float2*>(at) = make_float2(s[0], s[1]);
          *reinterpret_cast<float2*>(at + 8 * kCols) = make_float2(s[2], s[3]);
        }
      }
    }
    __syncwarp();
    drain<kMmaSlab, kCols, kCols, 32, 2>(f, staged, warp_row + slab * kMmaSlab, warp_col, lane);
  }
}

// `Ops` names the shape and chooses, at run time and outside the loop, the operation for the types of a call. Between
// tiles, what a block knows is in shared memory, for the loop needs every register.
template <class Ops, bool kLhsKMajor, bool kRhsKMajor>
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks) multiply_mma(const __grid_constant__ Problem p) {
  using Shape = typename Ops::Shape;
  extern __shared__ __align__(256) char ring[];  // exclusive-or reaches 128 bytes
  __shared__ int64_t next;                       // tile
  __shared__ Place summed;                       // tile whose sums are to be stored
  __shared__ bool has_sums;                      // there is one
  const uint32_t stages = shared_address(ring);
  const int warp = threadIdx.x / 32;
  float* staged =
      reinterpret_cast<float*>(ring + Shape::kStagesAhead * Shape::kStageBytes) + warp * Shape::kStagedFloats;
  Sums<Shape> sums;
  if (threadIdx.x == 0) {
    next = blockIdx.x;
    has_sums = false;
  }
  for (;;) {
    __syncthreads();  // the ring is free
    Place at;
    const Found found = find_tile<Shape::kCols>(p, next, &at);
    const bool sums_follow = found == Found::tile && at.depth > 0;
    Copies<Shape, kLhsKMajor, kRhsKMajor> copies;
    if (sums_follow) {
      copies = Copies<Shape, kLhsKMajor, kRhsKMajor>(p, at);
      copies.copy_early(stages, p);
    }
    int64_t drawn = 0;
    if (threadIdx.x == 0) drawn = atomicAdd(reinterpret_cast<unsigned long long*>(p.scan.drawn), 1ull);
    if (has_sums) {
      drain_sums<Shape, kTurned<Shape, kRhsKMajor>>(finish_at(p, summed), sums, staged, warp / kMmaWarpsARow * kMmaRows,
                                                    warp % kMmaWarpsARow * Shape::kWarpCols);
    }
    if (found == Found::end) return;
    if (found == Found::tile && at.depth == 0) write_zeros<Shape::kCols>(finish_at(p, at), kMmaThreads);
    __syncthreads();  // the stages of staged sums are free
    if (threadIdx.x == 0) {
      next = gridDim.x + drawn;
      summed = at;
      has_sums = sums_follow;
    }
    if (!sums_follow) continue;
    clear<Shape>(sums);
    Ops::choose(p, [&](auto op) {
      if (copies.vectors()) {
        contract<decltype(op), true>(p, &copies, stages, sums);
      } else {
        contract<decltype(op), false>(p, &copies, stages, sums);
      }
    });
  }
}

// ---- the host's side ----

template <class Ops, bool kLhsKMajor, bool kRhsKMajor>
void launch_tiles(const Problem& p, int64_t tiles, cudaStream_t stream) {
  constexpr int kBytes = Ops::Shape::kRingBytes;
  allow_shared_memory<multiply_mma<Ops, kLhsKMajor, kRhsKMajor>>(kBytes);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles, kMmaBlocks * multiprocessors()));
  multiply_mma<Ops, kLhsKMajor, kRhsKMajor><<<blocks, kMmaThreads, kBytes, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ContractionOps: for contractions over rows.
template <class Ops, class ContractionOps = Ops>
void launch_mma(const GroupedMatmul& call, const Context& context) {
  using Shape = typename Ops::Shape;
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const Problem p = problem_of(call, context, kTileRows, Shape::kCols);
  const int64_t tiles = scan_tiles(call, p, kTileRows, stream);
  if (tiles == 0) return;
  if constexpr (Shape::kBytes > 1) {
    if (p.contract_rows) return launch_tiles<ContractionOps, false, false>(p, tiles, stream);
  }
  if (!p.rhs_k_major) return launch_tiles<Ops, true, false>(p, tiles, stream);
  launch_tiles<Ops, true, true>(p, tiles, stream);
}

}  // namespace device
}  // namespace grouped
