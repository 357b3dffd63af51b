// The body of 8-bit products whose partial sums go to fp32 every 128 contracted elements: tensor cores keep about 14
// bits of a sum of 8-bit products and truncate. Persistent and warp-specialised as pipeline.cuh, with the same work
// items, ring and CTA pairs, but both consumer warpgroups take every tile:
//
//   warpgroup 0   warp 0 (one lane)  loads operands: wait empty -> TMA -> full
//                 warp 1             schedules
//                 warp 2             copies the scales of a block, if there are any: wait empty -> cp.async -> full
//   warpgroups 1, 2                  64 rows of the tile each: wait full -> 4 k32 steps of wgmma into a block's sums
//                                    -> empty -> sums += scale * the block's sums
//
//   full[s]    1 arrival (with the bytes of both CTAs' loads), and 32 with scales      loaders -> consumers
//   empty[s]   1 arrival of each consumer warp, in both CTAs                           consumers -> all loaders
//   work       kWorkDepth items; full 1 arrival, empty 1 + 8, and 1 with scales        scheduler -> the others
//
// While one warpgroup adds its block's sums, the other's products keep the tensor cores busy. Results leave through
// slots that hold a whole tile of 16-bit results, so a warpgroup is back at its products before the tile is stored.
//
//   tile        accumulators        ring         slots           scales          registers, 128 + 256 threads
//   128 x 192   96 + 96 a thread    4 x 40 KiB   8 x 3 x 2 KiB   4 x 1.25 KiB    56 / 224
#pragma once

#include "cc/device/sm90/epilogue.cuh"
#include "cc/device/sm90/layout_fp8.cuh"
#include "cc/device/sm90/operands_fp8.cuh"
#include "cc/device/sm90/pipeline.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

template <int kCols_, int kStages_, int kSlots_>
struct PromotingShape : TileShape<kCols_, kStages_, kSlots_> {
  using Base = TileShape<kCols_, kStages_, kSlots_>;
  static constexpr int kScalesAt = Base::kSharedBytes, kScaleBytes = stage_scale_bytes(kCols_);
  static constexpr int kSharedBytes = kScalesAt + kStages_ * kScaleBytes;
  static_assert(kSharedBytes <= kSharedLimit);

  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // of the 168 a thread at launch
};

// How a block's sums are scaled before they are added: not at all, by row and by kPartCols columns, or by row and
// column.
enum class Scaling { none, parts, columns };

// Scales of the two rows and of the columns that a thread holds; those of single columns are read when they are needed.
template <Scaling kScaling, int kCols>
struct BlockScales {
  float rows[2], parts[kCols / kPartCols];
  uint32_t columns;  // shared address

  // Of the stage whose scales are at `at`.
  __device__ BlockScales(uint32_t at, int first_row) : columns(at + stage_column(0)) {
    if constexpr (kScaling != Scaling::none) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows[i] = ptx::load_shared_float(at + stage_row(first_row + threadIdx.x % 32 / 4 + 8 * i));
      }
    }
    if constexpr (kScaling == Scaling::parts) {
#pragma unroll
      for (int i = 0; i < kCols / kPartCols; ++i) parts[i] = ptx::load_shared_float(at + stage_column(i));
    }
  }

  // acc += scale * sums, columns kFirst to kFirst + kCount - 1 of the tile. An addition alone reads one register less,
  // and registers are what the other warpgroup's products leave few of.
  template <int kFirst, int kCount>
  __device__ void promote(float* acc, const float (&sums)[kCount / 2]) const {
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      const int col = kFirst + 8 * j;
      float of_column[2];
      if constexpr (kScaling == Scaling::parts) of_column[0] = of_column[1] = parts[col / kPartCols];
      if constexpr (kScaling == Scaling::columns) {
        ptx::load_shared_v2(columns + 4 * (col + 2 * (threadIdx.x % 4)), of_column[0], of_column[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = acc[kFirst / 2 + 4 * j + i];
        if constexpr (kScaling == Scaling::none) {
          sum = __fadd_rn(sums[4 * j + i], sum);
        } else {
          sum = __fmaf_rn(__fmul_rn(rows[i / 2], of_column[i % 2]), sums[4 * j + i], sum);
        }
      }
    }
  }
};

// Multiplies 64 rows of a tile, the warp's from `first_row` on, by its first kCols columns: a block by kParts of these,
// of which one multiplies while another is added. A sum stops at the step of 32 codes that holds its last one; `length`
// counts elements of 16 bits. Leaves all blocks released. `scales` are those of stage 0. `started` is called while the
// first block multiplies.
constexpr int kParts = 2;
template <class Product, Scaling kScaling, int kCols, class Started>
__device__ inline void multiply_promoting(float* acc, Ring<Product::Shape::kStages>& ring, int length, int first_row,
                                          uint64_t lhs, uint64_t rhs, uint32_t barriers, uint32_t scales,
                                          Started started) {
  using Shape = typename Product::Shape;
  using Pair = typename Product::Element;
  constexpr int kPart = kCols / kParts, kSteps = kBlockK / 16;
  const int lane = threadIdx.x % 32;
  int left = length;
  const auto block = [&](auto steps) {
    ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
    const uint64_t stage = uint64_t(ring.slot * (Shape::kStageBytes >> 4));
    float sums[kParts][kPart / 2];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t columns = rhs + stage + part * (kPart * 128 >> 4);
      ptx::wgmma_fence();
      ptx::wgmma_fp8_part<Pair, kPart, true>(sums[part], lhs + stage, columns);
#pragma unroll
      for (int k = 1; k < decltype(steps)::value; ++k) {
        const uint32_t step = k * descriptor_step(Major::k);
        ptx::wgmma_fp8_part<Pair, kPart, false>(sums[part], lhs + stage + step, columns + step);
      }
      ptx::wgmma_commit();
    }
    if (left == length) started();
    const BlockScales<kScaling, kCols> of_block(scales + ring.slot * Shape::kScaleBytes, first_row);
    if constexpr (kParts == 2) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_done(sums[0]);
      of_block.template promote<0, kPart>(acc, sums[0]);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(sums[kParts - 1]);
    const auto release = [&] {
      if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + ring.slot), lane);
    };
    if constexpr (kScaling == Scaling::parts) __syncwarp();  // every lane has read its scales
    if constexpr (kScaling != Scaling::columns) release();
    of_block.template promote<kCols - kPart, kPart>(acc, sums[kParts - 1]);
    if constexpr (kScaling == Scaling::columns) {
      __syncwarp();  // likewise
      release();
    }
    ring.advance();
    left -= kBlockK;
  };
  // Nothing is in flight at the loop's end: ptxas serialises products whose sums are read in another turn.
#pragma unroll 1
  while (left > kBlockK - 16) block(std::integral_constant<int, kSteps>{});
  if (left > 32) {
    block(std::integral_constant<int, 3>{});
  } else if (left > 16) {
    block(std::integral_constant<int, 2>{});
  } else if (left > 0) {
    block(std::integral_constant<int, 1>{});
  }
}

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_product_fp8_sm90(const __grid_constant__ typename Product::Params p) {
  using Shape = typename Product::Shape;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory), barriers = shared + Shape::kBarriersAt;
  const uint32_t rank = ptx::cluster_rank();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Work* items = reinterpret_cast<Work*>(memory + Shape::kWorkAt);

  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kFull + s), p.scaled ? 1 + 32 : 1);
      ptx::barrier_init(barriers + 8 * (Shape::kEmpty + s), 2 * kConsumerWarps);
    }
    for (int s = 0; s < kWorkDepth; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kWorkFull + s), 1);
      ptx::barrier_init(barriers + 8 * (Shape::kWorkEmpty + s), (p.scaled ? 2 : 1) + kConsumerWarps);
    }
    for (int s = 0; s < 2 * kMailDepth; ++s) ptx::barrier_init(barriers + 8 * (Shape::kMail + s), 1);
    for (int s = 0; s < kConsumerWarps * Shape::kSlots; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kSlotFull + s), 1);
    }
    ptx::barrier_init_fence();
  }
  // An operand without scales of its own has ones; those of the other are copied over and over.
  for (int i = threadIdx.x; i < Shape::kStages * Shape::kScaleBytes / 4; i += kThreads) {
    reinterpret_cast<float*>(memory + Shape::kScalesAt)[i] = 1;
  }
  __syncwarp();
  ptx::cluster_barrier();

  if (warp < 4) {
    ptx::set_max_registers_down<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        WorkReader<Shape, false> reader(barriers, items);
        Ring<Shape::kStages> ring;
        while (true) {
          const Work work = reader.get();
          reader.release();
          if (work.kind == Work::kDone) break;
          if (work.kind != Work::kTile) continue;
          const int halves = work.valid_rows > 64 ? 2 : 1;
          const bool columns = work.col0 < p.cols;  // else the tile is the empty half of an `across` pair
          const uint32_t bytes = halves * kBlockBytes + (columns ? Product::Rhs::kBytes : 0);
          for (int kb = 0; kb < work.k_blocks(); ++kb) {
            const uint32_t full = barriers + 8 * (Shape::kFull + ring.slot);
            const uint32_t stage = shared + ring.slot * Shape::kStageBytes;
            ptx::barrier_wait(barriers + 8 * (Shape::kEmpty + ring.slot), ring.parity ^ 1);
            ptx::barrier_arrive_expect(full, bytes);
            Product::load(p, work, kb * kBlockK, halves, columns, rank, stage, full);
            ring.advance();
          }
        }
      }
    } else if (warp == 1) {
      WorkWriter<Shape> writer(barriers, items);
      Product::schedule(p, rank, barriers + 8 * Shape::kMail, shared + Shape::kSpareAt,
                        [&](const Work& work) { writer.push(work); });
    } else if (warp == 2 && p.scaled) {
      WorkReader<Shape, true> reader(barriers, items);
      Ring<Shape::kStages> ring;
      for (;; reader.release()) {
        const Work& work = reader.get();
        if (work.kind == Work::kDone) break;
        if (work.kind != Work::kTile) continue;
        const int blocks = work.k_blocks();
        typename Product::ScaleCopies copies(p, work);
        for (int kb = 0; kb < blocks; ++kb) {
          ptx::barrier_wait(barriers + 8 * (Shape::kEmpty + ring.slot), ring.parity ^ 1);
          copies.start(kb, shared + Shape::kScalesAt + ring.slot * Shape::kScaleBytes);
          ptx::barrier_arrive_copies(barriers + 8 * (Shape::kFull + ring.slot));
          ring.advance();
        }
      }
    }
    __syncwarp();
  } else {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1, first_row = 64 * consumer + 16 * (warp % 4);
    WorkReader<Shape, true> reader(barriers, items);
    Ring<Shape::kStages> ring;
    typename Shape::WarpSlots slots{shared + Shape::kSlotsAt + (warp - 4) * Shape::WarpSlots::kBytes,
                                    barriers + 8 * (Shape::kSlotFull + (warp - 4) * Shape::kSlots)};
    const uint64_t lhs = descriptor(shared + consumer * kBlockBytes, Major::k);
    const uint64_t rhs = descriptor(shared + 2 * kBlockBytes, Major::k);
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, rank, threadIdx.x - 128);
        continue;
      }
      const int valid_cols = p.cols - work.col0, blocks = work.k_blocks();
      if (valid_cols <= 0 || 64 * consumer >= work.valid_rows) {  // nothing to multiply
        for (int b = 0; b < blocks; ++b) {
          ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
          __syncwarp();
          if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + ring.slot), lane);
          ring.advance();
        }
        continue;
      }
      auto held = Product::begin(p, work, first_row, valid_cols, slots);
      float acc[Shape::kCols / 2];
#pragma unroll
      for (int i = 0; i < Shape::kCols / 2; ++i) acc[i] = 0;
      Product::with_scaling(p, [&](auto scaling) {
        fp8_tile_cols<Shape::kCols>(valid_cols, [&](auto cols) {
          multiply_promoting<Product, decltype(scaling)::value, decltype(cols)::value>(
              acc, ring, work.length, first_row, lhs, rhs, barriers, shared + Shape::kScalesAt,
              [&] { held.start(slots); });
        });
      });
      if (first_row < work.valid_rows) Product::store(p, work, first_row, valid_cols, acc, slots, held);
    }
    if (lane == 0) ptx::store_wait_read<0>();
    __syncwarp();
  }
  // A peer may still arrive on our barriers: leave together.
  ptx::cluster_barrier();
}

}  // namespace grouped::sm90
