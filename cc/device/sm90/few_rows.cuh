// Few rows per group: blocks of 8 rows of one group in the order in which tensor cores read them, where groups and
// their tiles start, and the items that tiles are worked through by.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/api/tensor.h"
#include "cc/device/common/early_launch.cuh"
#include "cc/device/common/group_walk.cuh"
#include "cc/device/sm90/layout_codes.cuh"
#include "cc/device/sm90/ptx.cuh"

namespace grouped::sm90 {

constexpr int kMostGroups = 1024;
constexpr int kTableEntries = kMostGroups + 8;  // groups + 1 are used
constexpr int kTableBytes = 3 * kTableEntries * 4;

struct FewRowsParams {
  CUtensorMap codes;
  CUtensorMap scale_boxes;  // of scales in lines
  const int32_t* sizes;
  const uint8_t* lhs;
  uint8_t* arranged;  // [slabs of k, blocks, 2 KiB]
  const uint8_t* scales;
  const float* factors;  // [groups], or null
  const uint8_t* bias;
  const int64_t* bias_table;
  const float* row_scale;
  uint8_t* result;
  int64_t rows;
  int most_blocks;
  int groups, cols, depth;
  int arrange_slabs;                               // slabs of blocks that one block of arrange_rows moves
  int slabs;                                       // of k, filled up to whole stages with zeros
  int scale_lines, scale_line_bytes, scale_outer;  // [groups, lines, bytes]; so many columns share a line
  int scale_alignment;                             // of lines, in bytes: 8, 4 or 1
  int tile_cols;                                   // weight rows, columns of the result
  DType result_type, bias_type;
  bool scale_bias, clear_tail;
};

// --- arrange ---

constexpr int kArrangeBlocks = 16;    // of the grid that a multiprocessor has room for
constexpr int kArrangeThreads = 128;  // pieces of 8 k of one block and slab
constexpr int kArrangeTogether = 3;   // slabs of blocks that a thread has registers for
constexpr int kArrangeSlabs = 32;     // that one block of the grid moves at most

// A warp's walk over groups: use(g, first row, end, blocks and tiles before it). Gives the totals. Tiles have at most
// kTileBlocks blocks.
template <int kTileBlocks, class Use>
__device__ device::GroupTotals<> walk_blocks(const FewRowsParams& p, Use use) {
  const auto parts_of = [](int64_t rows) {
    const int blocks = (static_cast<int>(rows) + kBlockRows - 1) / kBlockRows;
    return device::two_counts(blocks, (blocks + kTileBlocks - 1) / kTileBlocks);
  };
  constexpr int kEach = 4;
  const auto size_of = [&](int g) { return int64_t{p.sizes[g]}; };
  return device::walk_groups<32, kEach>(p.groups, p.rows, nullptr, size_of, parts_of, use);
}

// 8 neighbours as the four pairs of their codes.
template <bool kNibbles>
__device__ uint4 in_pairs(uint4 x) {
  if constexpr (kNibbles) {  // 0 4, 1 5, 2 6, 3 7
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
  } else {  // 0 2, 1 3, 4 6, 5 7
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
                      __byte_perm(x.z, x.w, 0x7632));
  }
}

// A run of slabs of blocks, all of them at once where the rows are few. Thread (part, row, q) moves the 8 k of a row
// from 32 q + 8 part on, which lane q of a quad multiplies. The product's blocks, which may start meanwhile, find room
// beside one block of 32 registers per thread. kWideCache is how the product's multiprocessors are divided; it makes a
// kernel of its own here, because a kernel asks for its division once.
template <bool kNibbles, bool kWideCache>
__global__ void __launch_bounds__(kArrangeThreads, kArrangeBlocks)
    arrange_rows(const __grid_constant__ FewRowsParams p) {
  device::let_next_launch_begin();
  struct Rows {
    int first, end;
  };
  __shared__ Rows found[kArrangeSlabs + 1];  // from a block's first one on to the group's end
  __shared__ int found_slabs;
  const int slabs = p.slabs, begin = static_cast<int>(blockIdx.x) * p.arrange_slabs;
  const int first = begin / slabs;
  if (threadIdx.x < 32) {
    const int behind = (begin + p.arrange_slabs + slabs - 1) / slabs;
    const device::GroupTotals<> all = walk_blocks<1>(p, [&](int, int64_t first_row, int64_t end_row, int64_t before) {
      const int first_block = device::first_count(before);
      for (int block = max(first, first_block); block < behind; ++block) {
        const int row = static_cast<int>(first_row) + (block - first_block) * kBlockRows;
        if (row >= end_row) break;
        found[block - first] = Rows{row, static_cast<int>(end_row)};
      }
    });
    if (threadIdx.x == 0) found_slabs = device::first_count(all.parts) * slabs;
  }
  __syncthreads();
  const int count = min(found_slabs - begin, p.arrange_slabs);
  const int part = threadIdx.x / 32, row = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  struct Walk {
    const Rows* block;
    int slab;
  };
  const Walk start = {found, begin - first * slabs};
  const auto step = [&](Walk& at) {
    if (++at.slab == slabs) at.slab = 0, ++at.block;
  };
  const auto source = [&](const Walk& at) -> const uint4* {  // or null: zeros
    const int from = at.block->first + row, k = at.slab * kSlabK + 32 * q + 8 * part;
    const bool exists = from < at.block->end && k < p.depth;
    return exists ? reinterpret_cast<const uint4*>(p.lhs + (int64_t{from} * p.depth + k) * 2) : nullptr;
  };
  Walk at = start;
  if (count > kArrangeTogether) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, step(at)) {  // one trip to memory for all
      if (const uint4* x = source(at)) ptx::prefetch(x);
    }
    at = start;
  }
#pragma unroll 1
  for (int left = count; left > 0; left -= kArrangeTogether) {
    uint4 x[kArrangeTogether];
    int to[kArrangeTogether];
#pragma unroll
    for (int j = 0; j < kArrangeTogether; ++j) {
      x[j] = make_uint4(0, 0, 0, 0);
      if (j >= left) continue;
      if (const uint4* from = source(at)) x[j] = *from;
      to[j] = at.slab * p.most_blocks + first + static_cast<int>(at.block - found);
      step(at);
    }
#pragma unroll
    for (int j = 0; j < kArrangeTogether; ++j) {
      if (j >= left) continue;
      const uint4 y = in_pairs<kNibbles>(x[j]);
      const uint32_t pairs[4] = {y.x, y.y, y.z, y.w};
      uint8_t* there = p.arranged + int64_t{to[j]} * kRowBlockBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(there + row_pair(part, row, q, i)) = pairs[i];
    }
  }
}

// --- items ---

// First row, first block, first row tile of each group, and the totals behind the last, by one warp.
template <int kTileBlocks>
__device__ void make_tables(const FewRowsParams& p, int32_t* tables) {
  const auto put = [&](int g, int64_t row, int64_t before) {
    tables[g] = static_cast<int32_t>(row);
    tables[kTableEntries + g] = device::first_count(before);
    tables[2 * kTableEntries + g] = device::second_count(before);
  };
  const auto use = [&](int g, int64_t first, int64_t, int64_t before) { put(g, first, before); };
  const device::GroupTotals<> all = walk_blocks<kTileBlocks>(p, use);
  if (threadIdx.x % 32 == 0) put(p.groups, all.rows, all.parts);
}

struct Item {
  uint32_t tag;  // twice the group, and 1 more in the last item of this block of the grid
  int first_row, rows, col;
  int first_block;  // threads that multiply do not ask for it
  __device__ int group() const { return static_cast<int>(tag >> 1); }
  __device__ bool last() const { return (tag & 1) != 0; }
  __device__ int blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
};

// The item `index`, of which a block of the grid takes every gridDim.x-th: of one group, row tiles of the same columns
// next to each other, so that codes are read from memory once. A group's tiles have as many blocks as each other, but
// the last. Tables are in shared memory.
__device__ inline bool find_item(const FewRowsParams& p, const int32_t* tables, int index, Item* item) {
  const int32_t* rows = tables;
  const int32_t* blocks = rows + kTableEntries;
  const int32_t* tiles = blocks + kTableEntries;
  const int col_tiles = (p.cols + p.tile_cols - 1) / p.tile_cols, items = tiles[p.groups] * col_tiles;
  if (index >= items) return false;
  int low = 0, high = p.groups;  // the last group whose first item is not behind
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles[middle] * col_tiles <= index ? low : high) = middle;
  }
  const int row_tiles = tiles[low + 1] - tiles[low];
  const int each = (blocks[low + 1] - blocks[low] + row_tiles - 1) / row_tiles;
  const int inside = index - tiles[low] * col_tiles;
  const int first = inside % row_tiles * each;
  item->tag = 2 * low + (index + static_cast<int>(gridDim.x) >= items);
  item->first_row = rows[low] + first * kBlockRows;
  item->rows = min(rows[low + 1] - item->first_row, each * kBlockRows);
  item->first_block = blocks[low] + first;
  item->col = inside / row_tiles * p.tile_cols;
  return true;
}

}  // namespace grouped::sm90
