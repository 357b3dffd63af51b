// Slots in the order of their experts, in two launches (one for few slots), whatever the order of their blocks.
//
//   count   block c: a histogram of its run of slots --> counts[c, G]
//   place   block c: counts[all, g] --> where group g begins, and how many of its slots come before this run
//                    its warps, a part of the run each: histograms --> the next place of a warp and group
//                    32 slots of a warp at once: MATCH finds those of the same group, POPC of the lanes below a slot's
//                    rank among them
//
// A run is a multiple of 1024 slots, and there are at most 128 runs, so that all blocks run at once. Up to 4096 slots
// are one run, which needs no launch that counts. Counters are in shared memory, of as many warps as fit 32 KiB; those
// of more than 8192 groups are in the workspace, of one warp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cc/api/context.h"
#include "cc/device/common/early_launch.cuh"
#include "cc/device/common/group_scan.cuh"

namespace grouped {

struct SlotOrder {
  const int32_t* experts;
  uint32_t* counts;  // [runs, groups]
  uint32_t* next;    // [runs, groups], where counters are in the workspace
  int64_t slots, run;
  int groups, runs;
  int warps;  // that place slots
  int width;  // threads that a sum over runs has for groups, the rest of a block share the runs: a power of two

  static constexpr int kStep = 1024;
  static constexpr int64_t kStepsAlone = 4;
  static constexpr int kSharedCounters = 8192;
  static constexpr int kThreads = 1024;
  static constexpr int kWarps = kThreads / 32;

  // Every block of `place` reads all counts: the more groups, the fewer runs.
  static int64_t most_runs(int64_t groups) {
    return groups <= 1024 ? 128 : groups <= kSharedCounters ? 131072 / groups : 32;
  }
  static SlotOrder plan(int64_t slots, int64_t groups) {
    SlotOrder o = {};
    const int64_t steps = std::max<int64_t>((slots + kStep - 1) / kStep, 1);
    const int64_t most = steps <= kStepsAlone ? 1 : most_runs(groups);
    const int64_t steps_a_run = (steps + most - 1) / most;
    o.slots = slots;
    o.run = steps_a_run * kStep;
    o.groups = static_cast<int>(groups);
    o.runs = static_cast<int>((steps + steps_a_run - 1) / steps_a_run);
    o.warps = kWarps;
    while (o.warps > 1 && o.warps * groups > kSharedCounters) o.warps /= 2;
    o.width = 32;
    while (o.width < kThreads && o.width < groups) o.width *= 2;
    return o;
  }
  bool shared() const { return groups <= kSharedCounters; }
  __host__ __device__ bool alone() const { return runs == 1; }
  size_t counts_bytes() const { return align_up(sizeof(uint32_t) * static_cast<size_t>(runs) * groups); }
  size_t bytes() const { return counts_bytes() * (shared() ? 1 : 2); }
  void place(const int32_t* from, void* workspace) {
    experts = from;
    counts = static_cast<uint32_t*>(workspace);
    next = reinterpret_cast<uint32_t*>(static_cast<char*>(workspace) + counts_bytes());
  }
};

namespace device {

__device__ inline bool is_group(int expert, int groups) {
  return static_cast<unsigned>(expert) < static_cast<unsigned>(groups);
}

template <bool kShared>
__global__ void __launch_bounds__(SlotOrder::kThreads) count_slots(const __grid_constant__ SlotOrder o) {
  __shared__ uint32_t own[kShared ? SlotOrder::kSharedCounters : 1];
  let_next_launch_begin();
  uint32_t* counts = o.counts + static_cast<int64_t>(blockIdx.x) * o.groups;
  uint32_t* counters = kShared ? own : counts;
  for (int g = threadIdx.x; g < o.groups; g += SlotOrder::kThreads) counters[g] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * o.run, end = min(first + o.run, o.slots);
  for (int64_t slot = first + threadIdx.x; slot < end; slot += SlotOrder::kThreads) {
    const int expert = o.experts[slot];
    if (is_group(expert, o.groups)) atomicAdd(counters + expert, 1u);
  }
  if (!kShared) return;
  __syncthreads();
  for (int g = threadIdx.x; g < o.groups; g += SlotOrder::kThreads) counts[g] = own[g];
}

// `Use` says what becomes of it:
//   int64_t rows(uint32_t count)                  rows of a group of that many slots
//   uint32_t first(int64_t begin)                 the place of a group's first slot; `begin` is the sum of rows before
//   uint32_t group(int g, uint32_t count, int64_t begin)       sees each group in every block; slots that it drops
//   void end(int64_t rows, int64_t dropped)       sees the sums of both, every thread of every block
//   void slot(int64_t slot, int expert, bool valid, uint32_t place)
template <bool kShared, class Use>
__global__ void __launch_bounds__(SlotOrder::kThreads, 1)
    place_slots(const __grid_constant__ SlotOrder o, const __grid_constant__ Use use) {
  __shared__ uint32_t own[kShared ? SlotOrder::kSharedCounters : 1];
  __shared__ uint32_t all_parts[SlotOrder::kThreads], before_parts[SlotOrder::kThreads];
  __shared__ int64_t scratch[33];
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t* counters = kShared ? own : o.next + static_cast<int64_t>(blockIdx.x) * o.groups;
  uint32_t* mine = counters + static_cast<int64_t>(warp) * o.groups;
  const int64_t part = o.run / o.warps;  // a multiple of 32
  const int64_t first = blockIdx.x * o.run + warp * part;
  const int64_t end = warp < o.warps ? min(first + part, o.slots) : first;

  if (o.warps > 1 || o.alone()) {  // else one warp's counts are those of the run
    for (int i = threadIdx.x; i < o.warps * o.groups; i += SlotOrder::kThreads) counters[i] = 0;
    __syncthreads();
    for (int64_t slot = first + lane; slot < end; slot += 32) {
      const int expert = o.experts[slot];
      if (is_group(expert, o.groups)) atomicAdd(mine + expert, 1u);
    }
  }

  if (o.alone()) {
    __syncthreads();
  } else {
    wait_for_launch_before();
  }
  int64_t rows = 0, dropped = 0;
  const int column = threadIdx.x % o.width, share = threadIdx.x / o.width, shares = SlotOrder::kThreads / o.width;
  for (int g0 = 0; g0 < o.groups; g0 += o.width) {
    const int g = g0 + column;
    uint32_t all = 0, before = 0;
    if (g < o.groups && o.alone()) {
      for (int w = share; w < o.warps; w += shares) all += counters[w * o.groups + g];
    } else if (g < o.groups) {
#pragma unroll 8
      for (int r = share; r < o.runs; r += shares) {
        const uint32_t count = o.counts[r * o.groups + g];  // at most 2^21 of them
        all += count;
        before += r < static_cast<int>(blockIdx.x) ? count : 0;
      }
    }
    all_parts[threadIdx.x] = all;
    before_parts[threadIdx.x] = before;
    __syncthreads();
    const bool owner = share == 0 && g < o.groups;
    if (owner) {
      for (int s = 1; s < shares; ++s) {
        all += all_parts[s * o.width + column];
        before += before_parts[s * o.width + column];
      }
    }
    int64_t total;
    const int64_t begin = rows + exclusive_sum<SlotOrder::kWarps>(owner ? use.rows(all) : 0, scratch, &total);
    rows += total;
    if (owner) {
      dropped += use.group(g, all, begin);
      uint32_t place = use.first(begin) + before;
      for (int w0 = 0; w0 < o.warps; w0 += kAtOnce) {  // loads first: the compiler keeps the order of loads and stores
        uint32_t of_warp[kAtOnce] = {};
#pragma unroll
        for (int w = 0; w < kAtOnce; ++w) {
          if (o.warps > 1 && w0 + w < o.warps) of_warp[w] = counters[(w0 + w) * o.groups + g];
        }
#pragma unroll
        for (int w = 0; w < kAtOnce; ++w) {
          if (w0 + w < o.warps) counters[(w0 + w) * o.groups + g] = place;
          place += of_warp[w];
        }
      }
    }
  }
  int64_t all_dropped;
  exclusive_sum<SlotOrder::kWarps>(dropped, scratch, &all_dropped);  // its barriers show the counters to all warps
  use.end(rows, all_dropped);

  for (int64_t slot0 = first; slot0 < end; slot0 += 32) {
    const int64_t slot = slot0 + lane;
    const int expert = slot < end ? o.experts[slot] : -1;
    const bool valid = is_group(expert, o.groups);
    const unsigned same = __match_any_sync(~0u, valid ? expert : -1);
    const unsigned rank = __popc(same & ((1u << lane) - 1));
    const uint32_t place = valid ? mine[expert] + rank : 0;
    __syncwarp();  // all have read before one writes
    if (valid && rank == 0) mine[expert] = place + __popc(same);
    __syncwarp();
    if (slot < end) use.slot(slot, expert, valid, place);
  }
}

}  // namespace device

template <bool kShared, class Use>
void launch_order(const SlotOrder& o, const Use& use, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const unsigned runs = static_cast<unsigned>(o.runs);
  if (!o.alone()) {
    device::count_slots<kShared><<<runs, SlotOrder::kThreads, 0, stream>>>(o);
    GROUPED_CUDA_CHECK(cudaGetLastError());
  }
  if (!o.alone() && context.target.sm >= 90) {
    launch_early(device::place_slots<kShared, Use>, runs, SlotOrder::kThreads, 0, stream, o, use);
    return;
  }
  device::place_slots<kShared><<<runs, SlotOrder::kThreads, 0, stream>>>(o, use);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <class Use>
void launch_slot_order(const SlotOrder& o, const Use& use, const Context& context) {
  if (o.shared()) return launch_order<true>(o, use, context);
  launch_order<false>(o, use, context);
}

}  // namespace grouped
