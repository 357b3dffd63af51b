// Sums over the lanes of a warp, the threads of a block, and over groups of rows by one block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace grouped {
namespace device {

// Inclusive prefix sum over the lanes of a warp.
template <class T>
__device__ inline T warp_prefix_sum(T value) {
  for (int d = 1; d < 32; d *= 2) {
    const T below = __shfl_up_sync(~0u, value, d);
    if (threadIdx.x % 32 >= d) value += below;
  }
  return value;
}

// Exclusive prefix sum over a block of kWarps warps; *total is the sum of all. `warps` is scratch of 33 entries.
template <int kWarps>
__device__ inline int64_t exclusive_sum(int64_t value, int64_t* warps, int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t sum = warp_prefix_sum(value);
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const int64_t mine = lane < kWarps ? warps[lane] : 0;
    const int64_t prefix = warp_prefix_sum(mine);
    warps[lane] = prefix - mine;
    if (lane == 31) warps[32] = prefix;
  }
  __syncthreads();
  const int64_t before = warps[warp] + sum - value;
  *total = warps[32];
  __syncthreads();  // the scratch is free again
  return before;
}

// What lies before a group, or in all: rows as the sizes say, and kCounts numbers of parts of the groups' rows.
template <int kCounts>
struct GroupTotals {
  int64_t rows = 0, parts[kCounts > 0 ? kCounts : 1] = {};
};

// One block of kThreads, group by group: use(g, first, end, before) with the rows of a group, none past row `limit`,
// and what lies before it; count(rows, parts) sets how many parts a group's rows have. Gives the totals. Sums are 64
// bits wide: 65535 sizes of 31 bits cannot overflow, so clamping after the sum is enough (GRP-4).
template <int kThreads, int kCounts, class Size, class Count, class Use>
__device__ inline GroupTotals<kCounts> scan_in_block(int groups, int64_t limit, Size size_of, Count count, Use use) {
  __shared__ int64_t warps[33];
  GroupTotals<kCounts> before;
  for (int first = 0; first < groups; first += kThreads) {
    const int g = first + threadIdx.x;
    const int64_t size = g < groups ? max(size_of(g), int64_t{0}) : 0;
    GroupTotals<kCounts> mine, own;
    int64_t total;
    mine.rows = before.rows + exclusive_sum<kThreads / 32>(size, warps, &total);
    before.rows += total;
    const int64_t start = min(mine.rows, limit), end = min(mine.rows + size, limit);
    count(end - start, own.parts);
#pragma unroll
    for (int i = 0; i < kCounts; ++i) {
      mine.parts[i] = before.parts[i] + exclusive_sum<kThreads / 32>(own.parts[i], warps, &total);
      before.parts[i] += total;
    }
    if (g < groups) use(g, start, end, mine);
  }
  return before;
}

}  // namespace device
}  // namespace grouped
