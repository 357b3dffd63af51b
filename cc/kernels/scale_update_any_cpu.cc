// Delayed scaling, a step of every role and group. State is a few numbers per group: one thread.
#include "cc/cpu/formats.h"
#include "cc/kernels/kernels.h"
#include "cc/math/scales.h"

namespace grouped {
namespace {

void launch(const ScaleUpdate& call, const Context&) {
  const int64_t roles = call.scale.dims[0], groups = call.scale.dims[1], length = call.history.dims[1];
  const bool most_recent = call.algorithm == "most_recent";
  for (int64_t role = 0; role < roles; ++role) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = role * length * groups + g, at = role * groups + g;
      call.new_scale.as<float>()[at] =
          delayed_update(call.history.as<const float>() + first, call.new_history.as<float>() + first, length, groups,
                         call.scale.as<const float>()[at], call.top.as<const float>()[role], most_recent);
    }
  }
}

}  // namespace

const Kernel<ScaleUpdate> scale_update_any_cpu = {"scale_update_any_cpu", Arch::cpu, Kind::reference, takes_any,
                                                  no_workspace,           launch};

}  // namespace grouped
