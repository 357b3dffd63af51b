// Delayed scaling, a step of every role and group. State is a few numbers per group, so latency is what it costs: a
// block has 8 groups of a role and 128 slots of their history at a time, 8 of which a thread loads at once.
//
//   history --8 loads per thread in flight--> registers --barrier--> one slot further, over what was read; largest of
//   each group by shuffles and shared memory --> new scale
//
// 32 KiB of registers for 1024 slots of 8 groups, 1 KiB of shared memory.
#include <string>

#include "cc/device/common/launch.h"
#include "cc/kernels/kernels.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

constexpr int kThreads = 1024;
constexpr int kGroups = 8;  // a sector of 32 bytes
constexpr int kSlots = kThreads / kGroups;
constexpr int kHeld = 8;

struct Problem {
  const float* scale;
  const float* history;
  const float* top;
  float* new_scale;
  float* new_history;
  int64_t groups, length;
  bool most_recent;
};

__global__ void __launch_bounds__(kThreads) update_scales(const Problem p) {
  __shared__ uint32_t peaks[kThreads / 32][kGroups];
  const int64_t role = blockIdx.y, group = int64_t{blockIdx.x} * kGroups + threadIdx.x % kGroups;
  const int slot = threadIdx.x / kGroups;
  const bool exists = group < p.groups;
  const float* in = p.history + role * p.length * p.groups + group;
  float* out = p.new_history + role * p.length * p.groups + group;
  const float newest = exists ? in[0] : 0.0f;
  const bool keep = delayed_keeps(newest);
  uint32_t peak = magnitude_bits(newest);
  for (int64_t first = 1; first < p.length; first += kHeld * kSlots) {
    float held[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t i = first + k * kSlots + slot;
      held[k] = exists && i < p.length ? in[i * p.groups] : 0.0f;
      if (!p.most_recent) peak = amax_with(peak, held[k]);
    }
    __syncthreads();  // in place, a slot is written only when all threads have read
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t i = first + k * kSlots + slot, to = keep ? i : i - 1;
      if (exists && i < p.length && to > 0) out[to * p.groups] = held[k];
    }
  }
  peak = max(peak, __shfl_xor_sync(~0u, peak, 8));
  peak = max(peak, __shfl_xor_sync(~0u, peak, 16));
  if (threadIdx.x % 32 < kGroups) peaks[threadIdx.x / 32][threadIdx.x % kGroups] = peak;
  __syncthreads();
  if (slot != 0 || !exists) return;
  for (int w = 1; w < kThreads / 32; ++w) peak = max(peak, peaks[w][threadIdx.x]);
  out[0] = 0.0f;
  if (!keep && p.length > 1) out[(p.length - 1) * p.groups] = newest;
  const int64_t at = role * p.groups + group;
  p.new_scale[at] = keep ? p.scale[at] : delayed_scale(peak, p.top[role]);
}

std::string refuses(const ScaleUpdate& call, const Target&) {
  constexpr int64_t kMost = 65535;  // of a grid's second axis
  return call.scale.dims[0] > kMost ? "takes up to 65535 roles" : "";
}

void launch(const ScaleUpdate& call, const Context& context) {
  const Problem p = {
      call.scale.as<const float>(), call.history.as<const float>(),  call.top.as<const float>(),
      call.new_scale.as<float>(),   call.new_history.as<float>(),    call.scale.dims[1],
      call.history.dims[1],         call.algorithm == "most_recent",
  };
  if (call.scale.elements() == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(p.groups, kGroups)), static_cast<unsigned>(call.scale.dims[0]));
  update_scales<<<grid, kThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ScaleUpdate> scale_update_any_cuda = {
    "scale_update_any_cuda", Arch::cuda, Kind::reference, refuses, no_workspace, launch};

}  // namespace grouped
