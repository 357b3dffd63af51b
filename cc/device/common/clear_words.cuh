// Counters and magnitudes that a launch wants to be zero, cleared by a kernel that goes before it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cc/api/check.h"
#include "cc/device/common/early_launch.cuh"
#include "cc/device/common/launch.h"

namespace grouped {

constexpr unsigned kClearThreads = 256;
constexpr int kBlockOfProduct = 227 * 1024;  // bytes of shared memory

static __global__ void __launch_bounds__(kClearThreads) clear_words_at(uint32_t* words, uint32_t count) {
  device::let_next_launch_begin();
  device::wait_for_launch_before();
  for (uint32_t i = threadIdx.x; i < count; i += kClearThreads) words[i] = 0;
}

// A few of them, by one block. A memset would stand alone on the stream; with `early` (sm_90) this kernel begins while
// the one before it ends, and lets the one behind begin: on the same multiprocessor, too, if that is divided already as
// the blocks of a product want it.
inline void clear_words(void* words, size_t count, cudaStream_t stream, bool early) {
  uint32_t* const to = static_cast<uint32_t*>(words);
  const uint32_t all = static_cast<uint32_t>(count);
  if (early) {
    prefer_shared_memory<clear_words_at>(kBlockOfProduct);
    return launch_early(clear_words_at, 1, kClearThreads, 0, stream, to, all);
  }
  clear_words_at<<<1, kClearThreads, 0, stream>>>(to, all);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace grouped
