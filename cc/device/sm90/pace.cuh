// Clusters that stay side by side along the contracted axis. The tiles under way at one time, 8 pairs of rows by 8
// columns, read the same rows and weights, and L2 holds what they share if they read it at about the same time. Over
// long rows they drift apart, by more than L2 holds: of K = 28 672 a product read its operands six times from memory.
//
// So the loader of each leader reports every kPaceBlocks blocks, and waits while it is more than kPaceLead reports
// ahead of the mean of all clusters. This is advice and no barrier: where a cluster does not run, because other kernels
// hold its multiprocessors, the one that has waited kPacePatience loads long ends the pacing of the launch. Which
// cluster waits has no influence on bits.
#pragma once

#include <cstdint>

namespace grouped::sm90 {

// Whether rows of so many 16-bit elements are worth it: the tiles under way then share more than 40 MB. At 4096 pacing
// changes nothing. Some kernels never keep pace (NoPace).
constexpr bool keeps_pace(int length) { return length >= 6144; }

constexpr int kPaceBlocks = 16;
constexpr uint32_t kPaceLead = 1;
constexpr int kPacePatience = 300;  // loads, about 0.2 ms

// In the workspace, cleared before each launch.
struct alignas(16) RowDraws {
  unsigned long long items;  // drawn
  uint32_t reports;          // of all clusters; from kPaceOver on no loader waits
};
constexpr uint32_t kPaceOver = uint32_t(1) << 31;

#if defined(__CUDACC__)

// What one lane, the loader of a leader, does.
class Pace {
 public:
  // `reports` null: no pacing.
  __device__ Pace(uint32_t* reports, uint32_t rank) : reports_(rank == 0 ? reports : nullptr) {}

  // Before each block.
  __device__ void step() {
    if (reports_ == nullptr || --left_ != 0) return;
    left_ = kPaceBlocks;
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;\n" ::"l"(reports_) : "memory");
    if (++mine_ <= kPaceLead) return;
    const uint32_t mean = gridDim.x / 2 * (mine_ - kPaceLead);
    for (int loads = 0; load() < mean; ++loads) {
      if (loads != kPacePatience) continue;
      finish();
      reports_ = nullptr;
      return;
    }
  }
  // After the last tile: clusters that still work no longer wait.
  __device__ void finish() const {
    if (reports_ == nullptr) return;
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;\n" ::"l"(reports_), "r"(kPaceOver) : "memory");
  }

 private:
  __device__ uint32_t load() const {
    uint32_t reports;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(reports) : "l"(reports_) : "memory");
    return reports;
  }

  uint32_t* reports_;
  uint32_t mine_ = 0;
  int left_ = kPaceBlocks;
};

struct NoPace {
  __device__ void step() const {}
  __device__ void finish() const {}
};

#endif  // __CUDACC__

}  // namespace grouped::sm90
