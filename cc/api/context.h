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

constexpr int kEveryPart = -1;

// Memory of the caller that holds zeros when the launches of one call run, in pieces for launches that ask for them.
// Callers of several launches clear it once, where each launch would clear memory of its own.
class ZeroMemory {
 public:
  ZeroMemory(void* memory, size_t bytes) : next_(static_cast<char*>(memory)), left_(memory == nullptr ? 0 : bytes) {}

  // A piece at a multiple of kPiece bytes from the start; null where there is not enough left.
  void* take(size_t bytes) {
    const size_t padded = (bytes + kPiece - 1) / kPiece * kPiece;
    wanted_ += padded;
    ++takers_;
    if (padded > left_) return nullptr;
    void* const piece = next_;
    next_ += padded;
    left_ -= padded;
    return piece;
  }

  size_t wanted() const { return wanted_; }  // bytes that all takers so far asked for
  int takers() const { return takers_; }

 private:
  static constexpr size_t kPiece = 128;  // no two kernels count in one cache line

  char* next_;
  size_t left_, wanted_ = 0;
  int takers_ = 0;
};

struct Context {
  Target target;
  void* stream = nullptr;     // cudaStream_t; unused on the CPU
  void* workspace = nullptr;  // 256-byte aligned, at least Kernel::workspace bytes, contents undefined
  size_t workspace_bytes = 0;
  Pool* pool = nullptr;         // CPU only; null runs everything on the calling thread
  ZeroMemory* zeros = nullptr;  // CUDA only; null: launches clear memory of their own
  int part = kEveryPart;        // of a kernel with `parts` (kernel.h)

  bool runs(int number) const { return part == kEveryPart || part == number; }
};

}  // namespace grouped
