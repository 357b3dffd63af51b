// What a launch may use: the target it was planned for, the caller's stream, workspace, and a pool of threads.
#pragma once

#include <cstddef>

namespace grouped {

enum class Platform { cpu, cuda };

// Where a call runs. `sm` is ten times the compute capability (90 for Hopper) and 0 on the CPU; `families` says that
// instructions of that chip alone (wgmma, setmaxnreg on sm_90a) may be used (archs.h).
struct Target {
  Platform platform = Platform::cpu;
  int sm = 0;
  bool families = false;
};

class Pool;  // cc/api/pool.h

struct Context {
  Target target;
  void* stream = nullptr;     // cudaStream_t; unused on the CPU
  void* workspace = nullptr;  // 256-byte aligned, at least Kernel::workspace bytes, contents undefined
  size_t workspace_bytes = 0;
  Pool* pool = nullptr;  // CPU only; null runs everything on the calling thread
};

}  // namespace grouped
