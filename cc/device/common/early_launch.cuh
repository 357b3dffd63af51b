// What a kernel says that begins beside the launch before it (launch_early), or lets the next one begin. Chips before
// Hopper have no such launches, and on them these are nothing.
#pragma once

namespace grouped::device {

// Lets the launch behind, if it was launched so, begin once every block of this one has come here or ended.
__device__ inline void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the launch before has ended, and all that it wrote is there.
__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace grouped::device
