// The pipeline of 8-bit products whose partial sums go to fp32 every 128 contracted elements: tensor cores keep about
// 14 bits of a sum of 8-bit products and truncate. In the shell of shell.cuh, with the work items, stages and CTA pairs
// of pipeline.cuh, but all consumer warpgroups, two or three, take every tile:
//
//   warp 2                copies the scales of a block, if there are any: wait empty -> cp.async -> full
//   warpgroups 1 to 3     64 rows of the tile each: wait full -> 4 k32 steps of wgmma into a block's sums -> empty
//                         -> sums += scale * the block's sums
//
//   full[s]    1 arrival (with the bytes of both CTAs' loads), and 32 with scales      loaders -> consumers
//   empty[s]   1 arrival of each consumer warp, in both CTAs                           consumers -> all loaders
//   work       kWorkDepth items; full 1 arrival, empty 1 + 8 or 12, and 1 with scales  scheduler -> the others
//
// While one warpgroup adds its block's sums, the others' products keep the tensor cores busy. Two warpgroups multiply a
// block in two parts and add one of them meanwhile; three need not. Results leave through slots that hold a whole tile
// of 16-bit results, so a warpgroup is back at its products before the tile is stored. With kStoresMeanwhile it rounds
// a tile and hands it to the slots while the first block of its next tile multiplies, as sums and accumulators have
// registers of their own. The work item of a tile keeps its place in the ring until then.
//
//   tile        accumulators          ring         slots            scales          registers
//   128 x 192   96 + 96 per thread    4 x 40 KiB   8 x 3 x 2 KiB    4 x 1.25 KiB    56 / 224, 128 + 256 threads
//   192 x 128   64 + 64 per thread    4 x 40 KiB   12 x 2 x 2 KiB   4 x 1.25 KiB    56 / 152, 128 + 384 threads
#pragma once

#include "cc/device/sm90/layout_fp8.cuh"
#include "cc/device/sm90/operands_fp8.cuh"
#include "cc/device/sm90/pipeline.cuh"
#include "cc/device/sm90/ptx_fp8.cuh"

namespace grouped::sm90 {

template <int kRows_, int kCols_, int kStages_, int kSlots_>
struct PromotingShape : ShellShape<(kRows_ + kCols_) * 128, kStages_, kSlots_, kSlotBytes, kRows_ / 16> {
  using Base = ShellShape<(kRows_ + kCols_) * 128, kStages_, kSlots_, kSlotBytes, kRows_ / 16>;
  static constexpr int kRows = kRows_, kCols = kCols_, kRowBoxes = kRows_ / 64, kThreads = 128 + 2 * kRows_;
  static constexpr int kParts = kRowBoxes == 2 ? 2 : 1;  // in which a block's columns are multiplied
  static constexpr int kScalesAt = Base::kSharedBytes, kScaleBytes = stage_scale_bytes(kRows_, kCols_);
  static constexpr int kSharedBytes = kScalesAt + kStages_ * kScaleBytes;
  static_assert(kSharedBytes <= kSharedLimit && (kRowBoxes == 2 || kRowBoxes == 3));

  // Of the 168 or 128 of a thread at launch.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = kRowBoxes == 2 ? 224 : 152;
};

// How a block's sums are scaled before they are added: not at all, by row and by kPartCols columns, or by row and
// column.
enum class Scaling { none, parts, columns };

// Scales of the two rows of a thread, times those of parts of columns; those of single columns are read when they are
// needed.
template <class Shape, Scaling kScaling, int kCols>
struct BlockScales {
  float rows[2], factors[2][kCols / kPartCols];
  uint32_t columns;  // shared address

  // Of the stage whose scales are at `at`.
  __device__ BlockScales(uint32_t at, int first_row) : columns(at + stage_column(Shape::kRows, 0)) {
    if constexpr (kScaling != Scaling::none) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows[i] = ptx::load_shared_float(at + stage_row(first_row + threadIdx.x % 32 / 4 + 8 * i));
      }
    }
    if constexpr (kScaling == Scaling::parts) {
#pragma unroll
      for (int part = 0; part < kCols / kPartCols; ++part) {
        const float scale = ptx::load_shared_float(at + stage_column(Shape::kRows, part));
#pragma unroll
        for (int i = 0; i < 2; ++i) factors[i][part] = __fmul_rn(rows[i], scale);
      }
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
      if constexpr (kScaling == Scaling::columns) {
        ptx::load_shared_v2(columns + 4 * (col + 2 * (threadIdx.x % 4)), of_column[0], of_column[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = acc[kFirst / 2 + 4 * j + i];
        if constexpr (kScaling == Scaling::none) {
          sum = __fadd_rn(sums[4 * j + i], sum);
        } else if constexpr (kScaling == Scaling::parts) {
          sum = __fmaf_rn(factors[i / 2][col / kPartCols], sums[4 * j + i], sum);
        } else {
          sum = __fmaf_rn(__fmul_rn(rows[i / 2], of_column[i % 2]), sums[4 * j + i], sum);
        }
      }
    }
  }
};

// What is done while the first block of a tile multiplies: nothing.
struct NothingMeanwhile {
  static constexpr bool wanted = false;
  __device__ void operator()() const {}
};
// Or what `body` does.
template <class Body>
struct Meanwhile : Body {
  bool wanted;
  __device__ Meanwhile(bool wanted, Body body) : Body(body), wanted(wanted) {}
};

// Multiplies 64 rows of a tile, the warp's from `first_row` on, by its first kCols columns: a block in one part, or in
// two, of which one multiplies while the other is added. A sum stops at the step of 32 codes that holds its last one;
// `length` counts elements of 16 bits. Leaves all blocks released. `scales` are those of stage 0. `meanwhile`, if it
// is wanted, is called while the first block multiplies, which is whole then, and leaves zeros in `acc`; else zeros are
// there already.
template <class Product, Scaling kScaling, int kCols, class Meanwhile_>
__device__ inline void multiply_promoting(float* acc, Ring<Product::Shape::kStages>& ring, int length, int first_row,
                                          uint64_t lhs, uint64_t rhs, uint32_t barriers, uint32_t scales,
                                          Meanwhile_ meanwhile) {
  using Shape = typename Product::Shape;
  using Pair = typename Product::Element;
  using Scales = BlockScales<Shape, kScaling, kCols>;
  constexpr int kParts = Shape::kParts, kPart = kCols / kParts, kSteps = kBlockK / 16;
  using Sums = float[kParts][kPart / 2];
  const int lane = threadIdx.x % 32;
  int left = length;
  const auto start = [&](auto steps, Sums& sums) {
    const uint64_t stage = uint64_t(ring.slot * (Shape::kStageBytes >> 4));
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
  };
  const auto finish = [&](const Scales& of_block, Sums& sums) {
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
  const auto wait = [&] { ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity); };
  const auto scales_of_block = [&] { return Scales(scales + ring.slot * Shape::kScaleBytes, first_row); };
  const auto block = [&](auto steps) {
    wait();
    // In front of the products: behind them shared memory answers late.
    const Scales of_block = scales_of_block();
    Sums sums;
    start(steps, sums);
    finish(of_block, sums);
  };
  if (meanwhile.wanted) {
    wait();
    Sums sums;
    start(std::integral_constant<int, kSteps>{}, sums);
    meanwhile();  // which needs the registers of the scales
    finish(scales_of_block(), sums);
  }
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
struct Promoting : PairedPipeline<Product> {
  using typename PairedPipeline<Product>::Params;
  using typename PairedPipeline<Product>::Shape;

  static __device__ RingArrivals rings(const Params& p) {
    return {p.scaled ? 1u + 32 : 1u, 2 * Shape::kWarps, (p.scaled ? 1u : 0u) + Shape::kWarps};
  }
  static __device__ void init(const Shell<Shape>) {}
  // An operand without scales of its own has ones; those of the other are copied over and over.
  static __device__ void fill(uint8_t* memory) {
    for (int i = threadIdx.x; i < Shape::kStages * Shape::kScaleBytes / 4; i += Shape::kThreads) {
      reinterpret_cast<float*>(memory + Shape::kScalesAt)[i] = 1;
    }
  }

  static __device__ __forceinline__ void help(const Params& p, const Shell<Shape> shell, int warp) {
    if (warp != 2 || !p.scaled) return;
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind != Work::kTile) continue;
      const int blocks = work.k_blocks();
      typename Product::ScaleCopies copies(p, work);
      for (int kb = 0; kb < blocks; ++kb) {
        ptx::barrier_wait(shell.empty(ring.slot), ring.parity ^ 1);
        copies.start(kb, shell.shared + Shape::kScalesAt + ring.slot * Shape::kScaleBytes);
        ptx::barrier_arrive_copies(shell.full(ring.slot));
        ring.advance();
      }
    }
  }

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1, first_row = 64 * consumer + 16 * (warp % 4);
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    auto slots = shell.slots(warp - 4);
    const uint64_t lhs = descriptor(shell.shared + consumer * kBlockBytes, Major::k);
    const uint64_t rhs = descriptor(shell.shared + Shape::kRowBoxes * kBlockBytes, Major::k);
    float acc[Shape::kCols / 2];
    bool unstored = false;  // `acc` holds the tile of the item before
    const auto store = [&](const Work& work, auto& held) {
      if (first_row < work.valid_rows) Product::store(p, work, first_row, p.cols - work.col0, acc, slots, held);
    };
    const auto store_before = [&] {
      if (!unstored) return;
      const Work& work = reader.before();
      // The tile's epilogue once more, which started long ago: it has no registers while the tile multiplies.
      auto held = Product::begin(p, work, first_row, p.cols - work.col0, slots);
      store(work, held);
      reader.release_before();
      unstored = false;
    };
    while (true) {
      const Work& work = reader.get();
      const int valid_cols = p.cols - work.col0;
      const bool multiplies = work.kind == Work::kTile && valid_cols > 0 && 64 * consumer < work.valid_rows;
      const bool whole = multiplies && takes_whole_tile<Shape::kCols>(valid_cols) && work.length > kBlockK - 16;
      if (!whole) store_before();
      if (work.kind == Work::kDone) break;
      if (!multiplies) {
        if (work.kind == Work::kTail) {
          Product::clear_tail(p, work, shell.rank, threadIdx.x - 128);
        } else {
          for (int b = work.k_blocks(); b > 0; --b) skip_block<Shape>(ring, shell.barriers);
        }
        reader.release();
        continue;
      }
      auto held = Product::begin(p, work, first_row, valid_cols, slots);
      const auto begin = [&] {
#pragma unroll
        for (float& sum : acc) sum = 0;
        held.start(slots);
      };
      if (!whole) begin();
      Product::with_scaling(p, [&](auto scaling) {
        const auto multiply = [&](auto cols, auto meanwhile) {
          multiply_promoting<Product, decltype(scaling)::value, decltype(cols)::value>(
              acc, ring, work.length, first_row, lhs, rhs, shell.barriers, shell.shared + Shape::kScalesAt, meanwhile);
        };
        fp8_tile_cols<Shape::kCols>(valid_cols, [&](auto cols) {
          if constexpr (decltype(cols)::value == Shape::kCols) {
            multiply(cols, Meanwhile(whole, [&] { store_before(), begin(); }));
          } else {
            multiply(cols, NothingMeanwhile{});
          }
        });
      });
      if constexpr (Product::kStoresMeanwhile) {
        unstored = true;
        reader.hold();
      } else {
        store(work, held);
        reader.release();
      }
    }
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::Shape::kThreads, 1)
    grouped_product_fp8_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, Promoting>(p);
}

}  // namespace grouped::sm90
