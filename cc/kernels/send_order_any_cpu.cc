// The order of slots by expert, cut into what each rank of an exchange gets. One thread: two passes over integers.
#include <algorithm>
#include <vector>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

void launch(const SendOrder& call, const Context&) {
  const int64_t experts = call.group_sizes.dims[0], own = experts / call.ranks, budget = call.sent.dims[0] / call.ranks;
  const int64_t slots = call.inverse.elements();
  const int32_t* source = call.source.as<const int32_t>();
  const int32_t* inverse = call.inverse.as<const int32_t>();
  const float* weights = floats_or_null(call.weights);  // may be null without slots
  float* row_weights = call.row_weights.present() ? call.row_weights.as<float>() : nullptr;
  const std::vector<int64_t> ends = group_ends(call.group_sizes, call.source.dims[0]);
  std::fill_n(call.sent.as<int32_t>(), call.sent.dims[0], -1);
  std::fill_n(call.experts.as<int32_t>(), call.sent.dims[0], -1);
  if (row_weights) std::fill_n(row_weights, call.sent.dims[0], 0.0f);
  int64_t dropped = 0;
  std::vector<int64_t> starts(static_cast<size_t>(call.ranks));  // row of the first slot of each rank
  for (int64_t rank = 0; rank < call.ranks; ++rank) {
    const int64_t start = group_begin(ends, rank * own);
    starts[static_cast<size_t>(rank)] = start;
    for (int64_t e = 0; e < own; ++e) {
      const int64_t first = group_begin(ends, rank * own + e) - start;
      const int64_t last = ends[static_cast<size_t>(rank * own + e)] - start, kept = std::min(last, budget);
      for (int64_t at = first; at < kept; ++at) {
        const int32_t slot = source[start + at];
        call.sent.as<int32_t>()[rank * budget + at] = slot;
        call.experts.as<int32_t>()[rank * budget + at] = static_cast<int32_t>(e);
        if (row_weights && slot >= 0 && slot < slots) row_weights[rank * budget + at] = weights[slot];
      }
      call.kept_sizes.as<int32_t>()[rank * own + e] = static_cast<int32_t>(std::max<int64_t>(kept - first, 0));
      dropped += last - first - std::max<int64_t>(kept - first, 0);
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    int64_t place = -1;
    if (inverse[slot] >= 0 && inverse[slot] < ends.back()) {
      const int64_t rank = std::upper_bound(starts.begin(), starts.end(), inverse[slot]) - starts.begin() - 1;
      const int64_t at = inverse[slot] - starts[static_cast<size_t>(rank)];
      if (at < budget) place = rank * budget + at;
    }
    call.places.as<int32_t>()[slot] = static_cast<int32_t>(place);
  }
  call.dropped.as<int32_t>()[0] = static_cast<int32_t>(dropped);
}

}  // namespace

const Kernel<SendOrder> send_order_any_cpu = {"send_order_any_cpu", Arch::cpu, Kind::reference, takes_any,
                                              no_workspace,         launch};

}  // namespace grouped
