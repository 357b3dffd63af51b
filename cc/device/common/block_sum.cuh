// Prefix sums over the lanes of a warp and over the threads of a block.
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

}  // namespace device
}  // namespace grouped
