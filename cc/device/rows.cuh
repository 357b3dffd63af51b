// What products over grouped rows share: their operands, the order of their tiles, and their tail.
#pragma once

#include "cc/device/pipeline.cuh"

namespace grouped::sm90 {

struct RowsParams {
  CUtensorMap lhs, rhs;
  const int32_t* sizes;
  unsigned long long* counter;  // of drawn items; 0 at the start
  const int64_t* rhs_table;     // addresses of the weights; null where they are packed
  int64_t rhs_base;             // address that `rhs` starts at
  int64_t rows;
  int32_t groups, cols, length;  // cols: of what the tiles cover
  bool clear_tail;
};

// Draws the pair's items and pushes this CTA's tile of each, `tile_cols` columns wide.
template <class Push>
__device__ inline void schedule_rows(const RowsParams& p, int tile_cols, uint32_t rank, uint32_t mail, Push push) {
  const int col_tiles = (p.cols + tile_cols - 1) / tile_cols;
  RowScan scan(p.sizes, p.groups, p.rows, col_tiles);
  Mailbox pair(rank, mail);
  int64_t next = blockIdx.x / 2;
  while (true) {
    const RowScan::Found found = scan.find(pair.share(next));
    if (pair.leader() && threadIdx.x % 32 == 0) next = int64_t(atomicAdd(p.counter, 1ull)) + gridDim.x / 2;
    Work work{};
    if (found.tile) {
      const Tile tile = pair_at(found.item, (found.rows + kTileRows - 1) / kTileRows, col_tiles, rank);
      work.kind = Work::kTile;
      work.length = p.length;
      work.row0 = tile.row * kTileRows;
      work.col0 = tile.col * tile_cols;
      work.valid_rows = found.rows - work.row0;
      work.across = tile.across;
      work.group = found.group;
      work.rows = found.rows;
      work.end = found.end;
      work.slice2 = found.group;
      if (p.rhs_table != nullptr) {
        const Slice slice = slice_of(uint64_t(p.rhs_table[found.group]) - uint64_t(p.rhs_base));
        work.slice2 = slice.near;
        work.slice3 = slice.far;
      }
    } else {
      const int64_t first = found.end + int64_t(found.item) * kTailRows;
      if (!p.clear_tail || first >= p.rows) break;
      work.kind = Work::kTail;
      work.end = int32_t(first);
    }
    push(work);
  }
  push(Work{});
}

// Coordinates of a row of a tile in a ragged map, `row` counted from the tile's first.
__device__ inline ptx::Coords ragged_at(const Work& work, int col, int row) {
  return {{col, kRagged - work.rows + work.row0 + row, kRagged, work.end}};
}

// Zeros in `width` bytes of each of the kTailRows rows from work.end on, which are `pitch` bytes apart: half of the
// rows a CTA, by its consumer warps, a warp a row.
__device__ inline void clear_rows(const RowsParams& p, const Work& work, uint32_t rank, int thread, uint8_t* result,
                                  int64_t width, int64_t pitch) {
  const int64_t first = work.end + rank * (kTailRows / 2);
  int64_t end = first + kTailRows / 2;
  if (end > p.rows) end = p.rows;
  for (int64_t row = first + thread / 32; row < end; row += kConsumerWarps) {
    for (int64_t at = 16 * (thread % 32); at < width; at += 16 * 32) {
      *reinterpret_cast<int4*>(result + row * pitch + at) = int4{0, 0, 0, 0};
    }
  }
}

}  // namespace grouped::sm90
