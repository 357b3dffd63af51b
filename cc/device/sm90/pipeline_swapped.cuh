// The pipeline of products whose weights come as 4-bit codes, in the shell of shell.cuh: CTA pairs, 256 rows by 128
// columns per tile, operands swapped (layout_swapped.cuh).
//
//   loader                rows, of which a pair shares a tile, and codes, each CTA its own. Where the last column of
//   tiles
//                         is odd, a pair takes two tiles of rows there and shares nothing
//   warps 2, 3            scales, loaded two blocks before, become factors
//   warpgroups 1, 2       64 columns of every tile each. A unit of 32 k is two wgmmas of 64 columns x 256 rows x 16;
//                         while they and those of the other warpgroup run, the fragments of the next unit are made
//
//   full[s]    3 arrivals: rows and weights, factors of each half     loader, warps 2 and 3 -> consumers
//   empty[s]   1 arrival of each consumer warp, of both CTAs          consumers -> both loaders, warps 2 and 3
//   work       empty 1 + 10 arrivals                                  scheduler -> loader, warps 2 and 3, consumers
//
// Warpgroups take no turns: two warps per scheduler make fragments at the same time and hide each other's latency.
// While one warpgroup stores, the other runs ahead by what the ring holds. Registers of a consuming thread: 128 sums,
// 16 of two units' fragments, 24 words of a block's codes and factors (across lines 16). Shared memory of a block, 1024
// cycles of the tensor cores, of which each moves 128 bytes: rows written 32 KiB and read by wgmma 64 KiB; codes
// written 4 KiB and read 4 (across lines 8) KiB, factors 2 + 2 KiB: about 870 cycles.
#pragma once

#include "cc/device/sm90/ptx_register.cuh"
#include "cc/device/sm90/swapped_codes.cuh"

namespace grouped::sm90 {

// Rows in boxes of 128, codes in boxes as the product has them. One lane loads, each stage in less time than it is
// multiplied in, so what a tile's blocks share is computed once.
constexpr int kSwappedRowsBox = 128, kRowsBoxBytes = 2 * kBlockBytes;

template <class Product>
struct SwappedLoads {
  using Params = typename Product::Params;
  using Shape = typename Product::Shape;
  int blocks;
  uint32_t bytes;  // of rows and codes
  bool columns;    // else the tile is the empty half of an `across` pair
  bool across;
  int first, end;  // boxes that this CTA loads
  ptx::Coords at;  // of the first one, but for k
  typename Product::CodesAt codes;

  __device__ SwappedLoads(const Params& p, const Work& work)
      : blocks(work.k_blocks()), columns(work.col0 < p.cols), across(work.across), codes(p, work) {
    const int boxes = work.valid_rows > kSwappedRowsBox ? 2 : 1, rank = int(ptx::cluster_rank());
    bytes = boxes * kRowsBoxBytes + (columns ? Shape::kCodesBytes : 0);
    first = across ? rank : 0;
    end = across && rank < boxes ? rank + 1 : boxes;
    at = ragged_at(work, 0, first * kSwappedRowsBox);
  }
  __device__ uint32_t bytes_of(int) const { return bytes; }
  __device__ void load(const Params& p, const Work& work, int block, uint32_t rank, uint32_t stage,
                       uint32_t full) const {
    const int k = block * kBlockK;
    const bool low = k >= p.low.first;
    // In front of every copy: the peer's may arrive before ours are started. Bytes of codes are counted already.
    if (low && columns) ptx::barrier_expect(full, Product::rhs_bytes(p.cols - work.col0) - Shape::kCodesBytes);
    const CUtensorMap* rows = low ? &p.low.lhs : &p.lhs;
    ptx::Coords from = at;
    from.c[0] = low ? k - p.low.first : k;
    for (int i = first; i < end; ++i, from.c[1] += kSwappedRowsBox) {
      if (across) {
        ptx::tensor_load_multicast(stage + i * kRowsBoxBytes, rows, from, full, kBothCtas);
      } else {
        ptx::tensor_load(stage + i * kRowsBoxBytes, rows, from, full);
      }
    }
    if (!columns) return;
    if (!low) {
      codes.load(p, k, stage + Shape::kCodesAt, full);
    } else {
      Product::load_rhs(p, work, FromLow(p.low, work, k), rank, stage + Shape::kCodesAt, full);
    }
  }
};

// Multiplies a warpgroup's columns of one tile, its first kRows rows. Leaves the sums complete and all blocks released.
template <class Product, int kRows>
__device__ inline void multiply_swapped(const typename Product::Params& p, const Shell<typename Product::Shape>& shell,
                                        const Work& work, int warp, float (&acc)[kSwappedRows / 2],
                                        Ring<Product::Shape::kStages>& ring) {
  using Shape = typename Product::Shape;
  using Blocks = SwappedBlocks<Shape, Product::kRhsMajor, Product::kOrder>;
  const bool nvfp4 = p.coded.codes == pairs::Codes::nvfp4;
  const Blocks lane(warp, nvfp4);
  const uint64_t rows = descriptor(shell.shared, Major::k);
  int left = work.k_blocks();
  const int low_blocks = left - Product::coded_blocks(p, left);
  constexpr bool kBothHalves = Product::kOrder == ColumnOrder::halves;
  uint32_t second[2] = {}, before = ring.slot;
  Fragments a[2];
  typename Blocks::Words words;
  const auto load = [&](uint32_t full, uint32_t stage) {
    const uint32_t used = full + (Shape::kSecondUsedAt - Shape::kBarriersAt - 8 * Shape::kFull);
    if constexpr (kBothHalves) {
      ptx::load_words_v2(used, second[0], second[1]);
    } else {
      second[0] = ptx::load_shared_word(used + warp / 4 * 4);
    }
    lane.load(stage, words);
  };
  const auto widen = [&](int unit, uint32_t stage) {
    lane.widen(words, unit, a[unit]);
    const auto multiply = [&] {
#pragma unroll
      for (int i = 0; i < 4 * kUnitSteps; ++i) {
        uint32_t& pair = a[unit][i / 4][i % 4];
        pair = pairs::times(pair, Blocks::factor(words, kUnitSteps * unit + i / 4, i % 4));
      }
    };
    multiply();
    if ((second[0] | second[1]) != 0) {
      lane.load_factors(stage + Shape::kSecondAt, words);
      multiply();
      if (unit == 0) lane.load_factors(stage + Shape::kFactorsAt, words);
    }
  };
  const auto issue = [&](const uint32_t (&of_step)[4], uint32_t slot, int step) {
    ptx::wgmma_register<kRows, false>(
        reinterpret_cast<float (&)[kRows / 2]>(acc), of_step,
        rows + uint64_t(slot * (Shape::kStageBytes >> 4)) + step * descriptor_step(Major::k));
  };
  const auto issue_unit = [&](uint32_t slot, int unit) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kUnitSteps; ++i) issue(a[unit][i], slot, kUnitSteps * unit + i);
    ptx::wgmma_commit();
  };
  const auto release = [&](uint32_t slot) {
    __syncwarp();  // every lane has read the stage's codes and factors
    if (shell.lane < 2) ptx::barrier_arrive_peer(shell.empty(slot), shell.lane);
  };

  uint32_t stage = shell.stage(ring.slot);
  ptx::barrier_wait(shell.full(ring.slot), ring.parity);
  load(shell.full(ring.slot), stage);
  widen(0, stage);
  while (true) {
    const uint32_t slot = ring.slot;
    ring.advance();
    const uint32_t next_full = shell.full(ring.slot), next_stage = shell.stage(ring.slot);  // long before their use
    const bool more = --left != low_blocks;
    issue_unit(slot, 0);
    ptx::wgmma_wait<1>();
    if (before != slot) release(before);
    before = slot;
    widen(1, stage);
    if (more) {
      ptx::barrier_wait(next_full, ring.parity);
      load(next_full, next_stage);
    }
    issue_unit(slot, 1);
    if (!more) break;
    ptx::wgmma_wait<1>();
    stage = next_stage;
    widen(0, stage);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_done(acc);
  release(before);
  if (nvfp4) device::scale_sums(acc, float(1 << pairs::kE4M3Shift));
#pragma unroll 1
  for (int depth = work.length - p.low.first; left > 0; --left, depth -= kBlockK) {
    ptx::barrier_wait(shell.full(ring.slot), ring.parity);
#pragma unroll 1
    for (int step = 0; step < kSwappedSteps && 16 * step < depth; ++step) {
      lane.load_low(shell.stage(ring.slot), step, a[0][0]);
      ptx::wgmma_fence();
      issue(a[0][0], ring.slot, step);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    }
    release(ring.slot);
    ring.advance();
  }
}

template <class Product>
struct SwappedPipeline : PairedPipeline<Product> {
  using typename PairedPipeline<Product>::Params;
  using typename PairedPipeline<Product>::Shape;
  using Loads = SwappedLoads<Product>;

  static __device__ RingArrivals rings(const Params&) { return {3, 2 * kConsumerWarps, kConsumerWarps + 2}; }
  static __device__ void init(const Shell<Shape>) {}
  static __device__ void fill(uint8_t*) {}

  static __device__ __forceinline__ void help(const Params& p, const Shell<Shape> shell, int warp) {
    if (p.coded.codes == pairs::Codes::nvfp4) {
      make_factors<pairs::Codes::nvfp4, Product>(p, shell, warp - 2);
    } else {
      make_factors<pairs::Codes::mxfp4, Product>(p, shell, warp - 2);
    }
  }

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1;
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    auto slots = Product::slots(shell, warp - 4);
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, shell.rank, threadIdx.x - 128);
        continue;
      }
      if (Product::columns_left(p, work, consumer) <= 0) {  // others wait for this warpgroup
        for (int b = 0; b < work.k_blocks(); ++b) skip_block<Shape>(ring, shell.barriers);
        continue;
      }
      float acc[kSwappedRows / 2];
#pragma unroll
      for (float& sum : acc) sum = 0;
      const auto multiply = [&](auto rows) {
        multiply_swapped<Product, decltype(rows)::value>(p, shell, work, warp - 4, acc, ring);
      };
      if (work.valid_rows > 192) {
        multiply(std::integral_constant<int, 256>{});
      } else if (work.valid_rows > 128) {
        multiply(std::integral_constant<int, 192>{});
      } else if (work.valid_rows > 64) {
        multiply(std::integral_constant<int, 128>{});
      } else {
        multiply(std::integral_constant<int, 64>{});
      }
      Product::store_swapped(p, work, warp - 4, acc, slots);
    }
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    swapped_product_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, SwappedPipeline>(p);
}

}  // namespace grouped::sm90
