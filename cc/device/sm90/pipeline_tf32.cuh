// The pipeline of the fp32 products on tf32 tensor cores, in the shell of shell.cuh: single CTAs, 256 rows per tile.
// wgmma reads tf32 from shared memory K-major only and wants it rounded or split, so the operands take two ways:
//
//   warpgroup 1           rhs: wait full -> a thread reads its column's 32 k, rounds or splits them, writes them
//   K-major
//                         in place, the low parts behind -> ready
//   warpgroups 2, 3       lhs: wait ready -> each 64 rows x 8 k to registers, rounded or split there, while wgmma
//                         m64nBNk8 of the step before runs -> empty
//
//   full[s]    1 arrival with the bytes of a block           loader -> splitters, consumers
//   ready[s]   4 arrivals, the splitting warps               splitters -> consumers
//   empty[s]   8 arrivals, the consumer warps                consumers -> loader
//   work       kWorkDepth items; full 1, empty 1 + 4 + 8     scheduler -> all
//
// A tile's 64-row units go to the two consumer warpgroups in turn, so half a tile still uses both.
//
//   mode     BN    a stage                        ring   slots           accumulators   registers, 128 + 128 + 256
//   tf32     128   32 KiB lhs, 16 rhs             4      8 x 2 x 2 KiB   128            48 / 64 / 200
//   tf32x3    96   32 KiB lhs, 12 high, 12 low    3      8 x 2 x 2 KiB   96 + 48        48 / 64 / 200
//
// Three products, small ones first, are three instructions for 8 k: [low, high] x [high', low'] for each 4 k, then
// high x high' for all 8. So operands that change places meet in the same instruction and give the same bits. Tensor
// cores truncate what they add, an error that grows with every instruction; so tf32x3 sums each block apart and adds
// the 32 k to the accumulators by ordinary fp32 additions. In tf32 the operands' own rounding is larger.
#pragma once

#include "cc/device/common/tf32.cuh"
#include "cc/device/sm90/layout_tf32.cuh"
#include "cc/device/sm90/shell.cuh"

namespace grouped::sm90 {

using device::as_tf32;
using device::split_tf32;
using device::Tf32Parts;

constexpr int kUnitRows = 64;  // of one wgmma
constexpr int kTf32Units = 4;  // of a tile
constexpr int kTf32Rows = kTf32Units * kUnitRows;
constexpr int kTf32Threads = 512;
constexpr int kSplitterWarps = 4;  // a thread for each of 128 columns at most

template <int kTerms>
struct Tf32Stage {
  static constexpr int kCols = kTerms == 1 ? 128 : 96;
  static constexpr int kUnitBytes = kUnitRows * 128, kLhsBytes = kTf32Units * kUnitBytes, kRhsBytes = kCols * 128;
  static constexpr int kBytes = kLhsBytes + (kTerms == 1 ? 1 : 2) * kRhsBytes, kCount = 192 * 1024 / kBytes;
};

template <int kTerms_>
struct Tf32Shape : Tf32Stage<kTerms_>, ShellShape<Tf32Stage<kTerms_>::kBytes, Tf32Stage<kTerms_>::kCount, 2> {
  using Base = ShellShape<Tf32Stage<kTerms_>::kBytes, Tf32Stage<kTerms_>::kCount, 2>;
  static constexpr int kTerms = kTerms_;  // products per element: 1, or 3 where operands are split
  static constexpr int kReady = (Base::kSharedBytes - Base::kBarriersAt) / 8;
  static constexpr int kSharedBytes = Base::kSharedBytes + 8 * Base::kStages;
  static_assert(kSharedBytes <= kSharedLimit);

  static constexpr int kProducerRegisters = 48, kSplitterRegisters = 64, kConsumerRegisters = 200;  // of 128
};

__device__ inline int tf32_blocks(const Work& work) { return (work.length + kTf32K - 1) / kTf32K; }
__device__ inline int tf32_units(const Work& work) {
  const int units = (work.valid_rows + kUnitRows - 1) / kUnitRows;
  return units < kTf32Units ? units : kTf32Units;
}

// Loads `boxes` MN-major boxes of 32 x 32 that are side by side.
__device__ inline void load_boxes(const CUtensorMap* map, ptx::Coords at, int boxes, uint32_t to, uint32_t barrier) {
  for (int i = 0; i < boxes; ++i) {
    ptx::tensor_load(to, map, at, barrier);
    at.c[0] += kBoxWidth;
    to += kBoxBytes;
  }
}

// One thread's column of the rhs, transposed and rounded or split, from and to `block`, low parts `low_distance`
// behind.
template <Major kMajor, bool kSpread, int kTerms>
__device__ inline void split_column(uint32_t block, uint32_t low_distance) {
  const uint32_t column = threadIdx.x % 128;
  uint32_t raw[kTf32K];
  if constexpr (kMajor == Major::k) {
#pragma unroll
    for (uint32_t c = 0; c < 8; ++c) {
      ptx::load_shared_v4(block + raw_k_major(column, c), *reinterpret_cast<uint32_t (*)[4]>(&raw[4 * c]));
    }
  } else {
#pragma unroll
    for (uint32_t k = 0; k < kTf32K; ++k) raw[k] = ptx::load_shared_word(block + raw_mn_major(column, k));
  }
  __syncwarp();  // every lane has read before one writes
  const uint32_t to = block + finished_column(column);
#pragma unroll
  for (int q = 0; q < kTf32K / 4; ++q) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = raw[k_of_piece(kSpread, q, i)];
      if constexpr (kTerms == 1) {
        high[i] = as_tf32(bits);
      } else {
        const Tf32Parts parts = split_tf32(bits);
        high[i] = parts.high;
        low[i] = parts.low;
      }
    }
    ptx::store_shared_v4(to + q * kPieceBytes, high);
    if constexpr (kTerms != 1) ptx::store_shared_v4(to + q * kPieceBytes + low_distance, low);
  }
}

// What a lane holds of 64 lhs rows x 8 k: rows l/4 and l/4 + 8 of its warp's 16, at the l%4-th k of the first four k,
// then of the second four.
template <int kTerms>
struct Tf32Fragment {
  uint32_t high[4], low[kTerms == 1 ? 1 : 4];
};

template <Major kMajor>
__device__ inline void load_raw(uint32_t unit, uint32_t base, int step, uint32_t (&raw)[4]) {
  if constexpr (kMajor == Major::k) {
    ptx::load_matrix_x4(unit + lhs_matrices(base, step), raw);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = ptx::load_shared_word(unit + lhs_element(base, step, i));
  }
}

template <int kTerms>
__device__ inline void split_fragment(const uint32_t (&raw)[4], Tf32Fragment<kTerms>& f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kTerms == 1) {
      f.high[i] = as_tf32(raw[i]);
    } else {
      const Tf32Parts parts = split_tf32(raw[i]);
      f.high[i] = parts.high;
      f.low[i] = parts.low;
    }
  }
}

// `first`: the sum begins here (tf32x3 alone).
template <class Shape>
__device__ inline void multiply_fragment(float (&acc)[Shape::kCols / 2], const Tf32Fragment<Shape::kTerms>& f,
                                         uint64_t pair, uint64_t parts, bool first) {
  constexpr int kCols = Shape::kCols;
  if constexpr (Shape::kTerms != 1) {
    if (first) {
      ptx::wgmma_tf32_first(acc, f.low[0], f.low[1], f.high[0], f.high[1], parts);
    } else {
      ptx::wgmma_tf32<kCols>(acc, f.low[0], f.low[1], f.high[0], f.high[1], parts);
    }
    ptx::wgmma_tf32<kCols>(acc, f.low[2], f.low[3], f.high[2], f.high[3], parts + (kPieceBytes >> 4));
  }
  ptx::wgmma_tf32<kCols>(acc, f.high[0], f.high[1], f.high[2], f.high[3], pair);
}

// Multiplies a tile's units of this warpgroup, kHalves times 64 rows: unit u of a block is 8 k of one half. While it
// multiplies, the next one is split and the one after that read, also across blocks, so that either warpgroup alone can
// keep the tensor cores busy. Leaves the sums complete and all blocks released.
template <class Product, int kHalves>
__device__ inline void multiply_tf32(float (&acc)[2][Product::Shape::kCols / 2], Ring<Product::Shape::kStages>& ring,
                                     int blocks, uint32_t first_unit, uint32_t shared, uint32_t barriers) {
  using Shape = typename Product::Shape;
  constexpr int kUnits = kTf32Steps * kHalves, kSums = Shape::kCols / 2;
  constexpr bool kApart = Shape::kTerms != 1;  // a block's sum is finished before it is added
  const uint32_t base = lhs_base(Product::kLhsMajor, threadIdx.x / 32 % 4, threadIdx.x % 32);
  const uint64_t pair = plain_descriptor(shared + Shape::kLhsBytes, kPieceBytes);
  const uint64_t parts = plain_descriptor(shared + Shape::kLhsBytes, Shape::kRhsBytes);
  const auto arrival = [&] {
    ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
    ptx::barrier_wait(barriers + 8 * (Shape::kReady + ring.slot), ring.parity);
    return shared + ring.slot * Shape::kStageBytes + first_unit * Shape::kUnitBytes;
  };
  const auto release = [&](uint32_t slot) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barriers + 8 * (Shape::kEmpty + slot));
  };
  const auto read = [&](uint32_t lhs, int u, uint32_t (&raw)[4]) {
    load_raw<Product::kLhsMajor>(lhs + u / kTf32Steps * 2 * Shape::kUnitBytes, base, u % kTf32Steps, raw);
  };
  uint32_t raw[2][4];
  Tf32Fragment<Shape::kTerms> fragments[2];
  uint32_t lhs = arrival(), before = 0;
  read(lhs, 0, raw[0]);
  read(lhs, 1, raw[1]);
  split_fragment<Shape::kTerms>(raw[0], fragments[0]);
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    const uint32_t slot = ring.slot;
    int more = b + 1 < blocks;
    asm volatile("" : "+r"(more));  // else the last block is compiled apart, and its wgmmas are serialised
    const uint64_t stage = slot * (Shape::kStageBytes >> 4);
    float sum[kSums];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int half = u / kTf32Steps, step = u % kTf32Steps;
      const uint64_t at = stage + step * (2 * kPieceBytes >> 4);
      ptx::wgmma_fence();
      multiply_fragment<Shape>(kApart ? sum : acc[half], fragments[u % 2], pair + at, parts + at, step == 0);
      ptx::wgmma_commit();
      if (u + 2 == kUnits) {  // behind the last block there is none: that one is read again, for nothing
        ring.advance(more);
        lhs = arrival();
      }
      read(lhs, (u + 2) % kUnits, raw[u % 2]);
      ptx::wgmma_wait<1>();
      if (!kApart && u == 0 && b != 0) release(before);
      split_fragment<Shape::kTerms>(raw[(u + 1) % 2], fragments[(u + 1) % 2]);
      if constexpr (kApart) {
        if (step != kTf32Steps - 1) continue;
        ptx::wgmma_wait<0>();
        if (u + 1 == kUnits) release(slot);
#pragma unroll
        for (int i = 0; i < kSums; ++i) acc[half][i] += sum[i];
      }
    }
    before = slot;
  }
  ring.advance();
  if constexpr (!kApart) {
    ptx::wgmma_wait<0>();
    release(before);
  }
}

// The same barrier traffic without rows.
template <class Shape>
__device__ inline void pass_tf32(Ring<Shape::kStages>& ring, int blocks, uint32_t barriers) {
  for (int b = 0; b < blocks; ++b) {
    ptx::barrier_wait(barriers + 8 * (Shape::kReady + ring.slot), ring.parity);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barriers + 8 * (Shape::kEmpty + ring.slot));
    ring.advance();
  }
}

// How the blocks of a tile are loaded: up to four units of 64 rows, and the columns.
template <class Product>
struct Tf32Loads {
  using Shape = typename Product::Shape;
  int units, blocks;
  uint32_t bytes;

  __device__ Tf32Loads(const typename Product::Params&, const Work& work)
      : units(tf32_units(work)), blocks(tf32_blocks(work)), bytes(units * Shape::kUnitBytes + Shape::kRhsBytes) {}
  __device__ uint32_t bytes_of(int) const { return bytes; }
  __device__ void load(const typename Product::Params& p, const Work& work, int block, uint32_t, uint32_t stage,
                       uint32_t full) const {
    Product::load(p, work, block * kTf32K, units, stage, full);
  }
};

template <class Product>
struct Tf32Pipeline {
  using Params = typename Product::Params;
  using Shape = typename Product::Shape;
  using Loads = Tf32Loads<Product>;
  static constexpr bool kPairs = false;

  static __device__ RingArrivals rings(const Params&) { return {1, kConsumerWarps, kSplitterWarps + kConsumerWarps}; }
  static __device__ void init(const Shell<Shape> shell) {
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::barrier_init(shell.barriers + 8 * (Shape::kReady + s), kSplitterWarps);
    }
  }
  static __device__ void fill(uint8_t*) {}
  template <class Push>
  static __device__ void schedule(const Params& p, const Shell<Shape> shell, Push push) {
    Product::schedule(p, shell.shared + Shape::kSpareAt, push);
  }
  static __device__ void help(const Params&, const Shell<Shape>, int) {}

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    if (warp < 4 + kSplitterWarps) {
      split(shell, warp);
    } else {
      consume(p, shell, warp);
    }
  }

 private:
  static __device__ __forceinline__ void split(const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_down<Shape::kSplitterRegisters>();
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind != Work::kTile) continue;
      const int blocks = tf32_blocks(work);
      for (int b = 0; b < blocks; ++b) {
        const uint32_t block = shell.stage(ring.slot) + Shape::kLhsBytes;
        ptx::barrier_wait(shell.full(ring.slot), ring.parity);
        if (warp - 4 < Shape::kCols / 32) {
          split_column<Product::kRhsMajor, Product::kLhsMajor == Major::mn, Shape::kTerms>(block, Shape::kRhsBytes);
        }
        ptx::fence_async();
        __syncwarp();
        if (shell.lane == 0) ptx::barrier_arrive(shell.barriers + 8 * (Shape::kReady + ring.slot));
        ring.advance();
      }
    }
  }

  static __device__ __forceinline__ void consume(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int at_warp = warp - 4 - kSplitterWarps, consumer = at_warp / 4;
    const int first_row = kUnitRows * consumer + 16 * (warp % 4);  // this warp's, the second half two units below
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    auto slots = shell.slots(at_warp);
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, threadIdx.x - 32 * (4 + kSplitterWarps));
        continue;
      }
      const int valid_cols = p.cols - work.col0, blocks = tf32_blocks(work);
      const int halves = (tf32_units(work) + 1 - consumer) / 2;
      if (halves == 0) {
        pass_tf32<Shape>(ring, blocks, shell.barriers);
        continue;
      }
      auto held = Product::begin(p, work, first_row, valid_cols, slots);
      float acc[2][Shape::kCols / 2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < Shape::kCols / 2; ++i) acc[h][i] = 0;
      if (halves == 1) {
        multiply_tf32<Product, 1>(acc, ring, blocks, consumer, shell.shared, shell.barriers);
      } else {
        multiply_tf32<Product, 2>(acc, ring, blocks, consumer, shell.shared, shell.barriers);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + 2 * kUnitRows * h;
        if (row < work.valid_rows) Product::store(p, work, row, valid_cols, acc[h], slots, held);
      }
    }
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __launch_bounds__(kTf32Threads, 1)
    grouped_product_tf32_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, Tf32Pipeline>(p);
}

}  // namespace grouped::sm90
