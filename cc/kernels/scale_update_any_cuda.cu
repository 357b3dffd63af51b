// Delayed scaling, a step of every role and group: a thread each, so a slot of the history is one coalesced load of a
// warp. State is a few numbers a group; the launch is what it costs.
#include <string>

#include "cc/device/launch.h"
#include "cc/kernels/kernels.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

constexpr int kThreads = 128;

struct Problem {
  const float* scale;
  const float* history;
  const float* top;
  float* new_scale;
  float* new_history;
  int64_t groups, length, count;
  bool most_recent;
};

__global__ void __launch_bounds__(kThreads) update_scales(const Problem p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.count) return;
  const int64_t role = at / p.groups, first = role * p.length * p.groups + at % p.groups;
  p.new_scale[at] = delayed_update(p.history + first, p.new_history + first, p.length, p.groups, p.scale[at],
                                   p.top[role], p.most_recent);
}

std::string refuses(const ScaleUpdate&, const Target& target) {
  return target.platform == Platform::cuda ? "" : "is a CUDA kernel";
}

size_t workspace(const ScaleUpdate&, const Target&) { return 0; }

void launch(const ScaleUpdate& call, const Context& context) {
  const Problem p = {
      call.scale.as<const float>(), call.history.as<const float>(), call.top.as<const float>(),
      call.new_scale.as<float>(),   call.new_history.as<float>(),   call.scale.dims[1],
      call.history.dims[1],         call.scale.elements(),          call.algorithm == "most_recent",
  };
  if (p.count == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  update_scales<<<static_cast<unsigned>(divide_up(p.count, kThreads)), kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ScaleUpdate> scale_update_any_cuda = {"scale_update_any_cuda", refuses, workspace, launch};

}  // namespace grouped
