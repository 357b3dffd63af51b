// Few rows a group: blocks of 8 rows of one group in the order in which tensor cores read them, where groups and their
// tiles start, and the items that tiles are worked through by.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/api/tensor.h"
#include "cc/device/layout_codes.cuh"
#include "cc/device/ptx.cuh"

namespace grouped::sm90 {

constexpr int kMostGroups = 1024;
constexpr int kTableEntries = kMostGroups + 8;  // groups + 1 are used
constexpr int kTableBytes = 3 * kTableEntries * 4;

struct FewRowsParams {
  CUtensorMap codes;
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
  int scale_lines, scale_line_bytes, scale_outer;  // [groups, lines, bytes]; so many columns share a line
  int scale_alignment;                             // of lines, in bytes: 8, 4 or 1
  int tile_cols;                                   // weight rows, columns of the result
  DType result_type, bias_type;
  bool scale_bias, clear_tail;
};

GROUPED_HOST_DEVICE inline int slabs_of(const FewRowsParams& p) { return (p.depth + kSlabK - 1) / kSlabK; }

// --- arrange ---

constexpr int kArrangeThreads = 128;  // pieces of 8 k of one block and slab
constexpr int kArrangeSlabs = 32;     // slabs of blocks that one block of the grid moves at most

// An inclusive sum over the lanes of a warp.
__device__ inline int64_t warp_sums(int64_t value) {
  for (int d = 1; d < 32; d *= 2) {
    const int64_t below = __shfl_up_sync(~0u, value, d);
    if (threadIdx.x % 32 >= d) value += below;
  }
  return value;
}

struct Span {
  int first, end;  // rows
};

// Calls use(g, span, first block, first tile, blocks of all groups) for every group and once more with the totals, by
// one warp: a lane has neighbouring groups, so that loads do not wait for sums. Tiles have at most kTileBlocks blocks.
template <int kTileBlocks, class Use>
__device__ void for_groups(const FewRowsParams& p, Use use) {
  const int lane = threadIdx.x % 32, each = (p.groups + 31) / 32;
  const int first = min(lane * each, p.groups), end = min(first + each, p.groups);
  const auto size_of = [&](int g) -> int64_t { return max(p.sizes[g], 0); };
  const auto span_of = [&](int g, int64_t row) {
    return Span{int(min(row, p.rows)), int(min(row + size_of(g), p.rows))};
  };
  const auto blocks_of = [](Span span) { return (span.end - span.first + kBlockRows - 1) / kBlockRows; };
  const auto tiles_of = [](int blocks) { return (blocks + kTileBlocks - 1) / kTileBlocks; };
  int64_t rows = 0;
#pragma unroll 4
  for (int g = first; g < end; ++g) rows += size_of(g);
  const int64_t rows_end = warp_sums(rows);
  int blocks = 0, tiles = 0;
  int64_t row = rows_end - rows;
  for (int g = first; g < end; row += size_of(g), ++g) {
    const int mine = blocks_of(span_of(g, row));
    blocks += mine, tiles += tiles_of(mine);
  }
  const int64_t both_end = warp_sums(int64_t{blocks} << 32 | tiles);
  const int blocks_end = static_cast<int>(both_end >> 32), tiles_end = static_cast<int>(both_end);
  const int all_blocks = __shfl_sync(~0u, blocks_end, 31);
  row = rows_end - rows, blocks = blocks_end - blocks, tiles = tiles_end - tiles;
  for (int g = first; g < end; row += size_of(g), ++g) {
    const Span span = span_of(g, row);
    use(g, span, blocks, tiles, all_blocks);
    blocks += blocks_of(span), tiles += tiles_of(blocks_of(span));
  }
  if (lane == 31) use(p.groups, Span{int(min(rows_end, p.rows)), 0}, blocks_end, tiles_end, all_blocks);
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

// A run of slabs of blocks, one after the other, of which there are few enough for a warp of each multiprocessor: the
// product's blocks are to find room beside. Thread (part, row, q) moves the 8 k of a row from 32 q + 8 part on, which
// lane q of a quad multiplies.
template <bool kNibbles>
__global__ void __launch_bounds__(kArrangeThreads) arrange_rows(const __grid_constant__ FewRowsParams p) {
  ptx::let_next_grid_start();
  __shared__ Span found[kArrangeSlabs + 1];  // the rows from a block's first one on to the group's end
  __shared__ int64_t all;                    // slabs of blocks
  const int slabs = slabs_of(p);
  const auto run = [&](int64_t total, int64_t index) { return total * index / gridDim.x; };
  if (threadIdx.x < 32) {
    for_groups<1>(p, [&](int g, Span span, int first_block, int, int all_blocks) {
      const int64_t total = int64_t{all_blocks} * slabs, end = run(total, blockIdx.x + 1);
      const int first = static_cast<int>(run(total, blockIdx.x) / slabs), behind = static_cast<int>((end - 1) / slabs) + 1;
      if (g == p.groups) {
        all = total;
        return;
      }
      for (int block = max(first, first_block); block < behind; ++block) {
        const int row = span.first + (block - first_block) * kBlockRows;
        if (row >= span.end) break;
        found[block - first] = Span{row, span.end};
      }
    });
  }
  __syncthreads();
  const int64_t begin = run(all, blockIdx.x);
  const int count = static_cast<int>(run(all, blockIdx.x + 1) - begin), first = static_cast<int>(begin / slabs);
  const int part = threadIdx.x / 32, row = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  int slab = static_cast<int>(begin - int64_t{first} * slabs), block = first;
  constexpr int kTogether = 4;  // loads under way
#pragma unroll 1
  for (int i = 0; i < count; i += kTogether) {
    uint4 x[kTogether];
    uint8_t* to[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      to[j] = nullptr;
      x[j] = make_uint4(0, 0, 0, 0);
      if (i + j >= count) continue;
      const Span rows = found[block - first];
      const int k = slab * kSlabK + 32 * q + 8 * part;
      if (rows.first + row < rows.end && k < p.depth) {
        x[j] = *reinterpret_cast<const uint4*>(p.lhs + ((int64_t{rows.first} + row) * p.depth + k) * 2);
      }
      to[j] = p.arranged + (int64_t{slab} * p.most_blocks + block) * kRowBlockBytes;
      if (++slab == slabs) slab = 0, ++block;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (i + j >= count) continue;
      const uint4 y = in_pairs<kNibbles>(x[j]);
      const uint32_t pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) *reinterpret_cast<uint32_t*>(to[j] + row_pair(part, row, q, n)) = pairs[n];
    }
  }
}

// --- items ---

// First row, first block, first row tile of each group, and the totals behind the last, by one warp.
template <int kTileBlocks>
__device__ void make_tables(const FewRowsParams& p, int32_t* tables) {
  for_groups<kTileBlocks>(p, [&](int g, Span span, int first_block, int first_tile, int) {
    tables[g] = span.first;
    tables[kTableEntries + g] = first_block;
    tables[2 * kTableEntries + g] = first_tile;
  });
}

struct Item {
  uint32_t tag;  // twice the group, and 1 more in the last item of this block of the grid
  int first_row, rows, col;
  int first_block;  // those who multiply do not ask for it
  __device__ int group() const { return static_cast<int>(tag >> 1); }
  __device__ bool last() const { return (tag & 1) != 0; }
  __device__ int blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
};

// The item `index`, of which a block of the grid takes every gridDim.x-th: of one group, row tiles of the same columns next to each other, so that codes are read from memory
// once. A group's tiles have as many blocks as each other, but the last. Tables lie in shared memory.
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
