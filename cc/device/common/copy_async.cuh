// Copies to shared memory that a thread starts and waits for later (cp.async), since sm_80.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace grouped {
namespace device {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kSize bytes, 4, 8 or 16, of which the last kind goes past the L1.
template <int kSize>
__device__ inline void copy_async(uint32_t to, const void* from) {
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(to), "l"(from), "n"(kSize) : "memory");
  }
}
// The first `bytes` of them; the others become zeros and are not read.
template <int kSize>
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(kSize), "r"(bytes)
                 : "memory");
  }
}

// Ends a group of copies of this thread.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most the last kPending groups of this thread's copies are under way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}
// Until all are there, whatever group they are of.
__device__ inline void wait_all_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

}  // namespace device
}  // namespace grouped
