// Where groups and tiles are: one scan of group_sizes per call, in device memory, and how a block finds its tile in it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/api/check.h"
#include "cc/device/common/group_walk.cuh"
#include "cc/device/common/launch.h"

namespace grouped {

constexpr size_t kDeviceAlign = 256;
constexpr int kScanThreads = 1024;

constexpr size_t align_up(size_t bytes) { return (bytes + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign; }

// The scan's result. Group g owns rows offsets[g] ... offsets[g+1] - 1 and, with tiles of R rows that never straddle
// groups, the row tiles tiles[g] ... tiles[g+1] - 1. The tail counts as group `count`: its tiles are those to be
// zeroed, none where the caller's buffer keeps it.
struct GroupScan {
  int64_t* offsets;  // [count + 1]; the last is the number of rows that belong to a group
  int64_t* tiles;    // [count + 2]; the last is the number of all row tiles
  int64_t* drawn;    // how many tiles blocks have drawn beyond their first; the scan clears it
  int count;

  static size_t bytes(int64_t count) { return align_up(sizeof(int64_t) * (2 * static_cast<size_t>(count) + 4)); }
  static GroupScan at(void* workspace, int64_t count) {
    int64_t* offsets = static_cast<int64_t*>(workspace);
    return {offsets, offsets + count + 1, offsets + 2 * count + 3, static_cast<int>(count)};
  }
};

// Most row tiles that any sizes can give, tail included: each non-empty group wastes less than a tile.
inline int64_t most_row_tiles(int64_t rows, int64_t count, int64_t tile_rows) {
  const int64_t parts = count + 1 < rows ? count + 1 : rows;
  return (rows + (tile_rows - 1) * parts) / tile_rows;
}

namespace device {

static __global__ void __launch_bounds__(kScanThreads)
    scan_groups(const int32_t* sizes, int64_t rows, int tile_rows, bool tail_tiles, GroupScan scan) {
  const auto tiles_of = [&](int64_t count) { return (count + tile_rows - 1) / tile_rows; };
  __shared__ int64_t scratch[33];
  const GroupTotals<> all = walk_groups<kScanThreads>(
      scan.count, rows, scratch, [&](int g) { return sizes[g]; }, tiles_of,
      [&](int g, int64_t first, int64_t, int64_t tiles) {
        scan.offsets[g] = first;
        scan.tiles[g] = tiles;
      });
  if (threadIdx.x == 0) {
    *scan.drawn = 0;
    scan.offsets[scan.count] = all.rows;
    scan.tiles[scan.count] = all.parts;
    scan.tiles[scan.count + 1] = all.parts + (tail_tiles ? tiles_of(rows - all.rows) : 0);
  }
}

// The largest i < count with starts[i] <= value; starts[0] <= value. Called by a whole warp, which probes 32 places at
// once: a dependent load each for 32, 1024, 32768 groups.
template <class Index>
__device__ inline int find_last(const Index* starts, int count, Index value) {
  int first = 0;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int probe = threadIdx.x % 32 * step;
    const bool below = probe < count && starts[first + probe] <= value;
    const int last = (__popc(__ballot_sync(~0u, below)) - 1) * step;
    first += last;
    count = min(step, count - last);
  }
  return first;
}

// Tiles of one matrix in bands of kBand tile rows, the row running fastest: neighbours in time share both operands in
// the L2 cache.
constexpr int kBand = 16;

__host__ __device__ inline void place_in_bands(int64_t index, int64_t row_tiles, int64_t col_tiles, int64_t* row,
                                               int64_t* col) {
  const int64_t band = index / (kBand * col_tiles);
  const int64_t left = row_tiles - band * kBand;
  const int64_t height = left < kBand ? left : kBand;
  const int64_t inside = index - band * kBand * col_tiles;
  *row = band * kBand + inside % height;
  *col = inside / height;
}

}  // namespace device

inline void launch_scan(const int32_t* sizes, int64_t rows, int tile_rows, bool tail_tiles, const GroupScan& scan,
                        cudaStream_t stream) {
  device::scan_groups<<<1, kScanThreads, 0, stream>>>(sizes, rows, tile_rows, tail_tiles, scan);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace grouped
