// Slots of tokens that are sent to a rank once: which of them goes there, and what the rank is told of the others. One
// thread: passes over [T, k] and [P, j] integers.
#include <algorithm>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

void launch_ranks(const RankSlots& call, const Context&) {
  const int64_t k = call.experts.dims[1], own = call.num_experts / call.ranks;
  const int32_t* experts = call.experts.as<const int32_t>();
  int32_t* ranks = call.slot_ranks.as<int32_t>();
  for (int64_t slot = 0; slot < call.experts.elements(); ++slot) {
    const int64_t rank = in_range(experts[slot], call.num_experts) ? experts[slot] / own : -1;
    const int32_t* first = ranks + slot / k * k;
    const bool again = std::find(first, static_cast<const int32_t*>(ranks + slot), rank) != ranks + slot;
    ranks[slot] = static_cast<int32_t>(again ? -1 : rank);
  }
}

void launch_rows(const RowSlots& call, const Context&) {
  const int64_t slots = call.experts.elements(), k = call.experts.dims[1];
  const int64_t all_places = call.local.dims[0], of_place = call.local.dims[1];
  const int64_t own = call.num_experts / call.ranks, budget = all_places / call.ranks;
  const int32_t* experts = call.experts.as<const int32_t>();
  const int32_t* sent = call.sent.as<const int32_t>();
  const int32_t* places = call.places.as<const int32_t>();
  const float* weights = floats_or_null(call.weights);  // may be null without slots
  float* row_weights = call.row_weights.present() ? call.row_weights.as<float>() : nullptr;
  std::fill_n(call.local.as<int32_t>(), call.local.elements(), -1);
  if (row_weights) std::fill_n(row_weights, call.local.elements(), 0.0f);
  for (int64_t place = 0; place < all_places; ++place) {
    if (!in_range(sent[place], slots)) continue;
    const int64_t first = sent[place] / k * k, from = place / budget * own;
    int64_t entry = place * of_place;
    for (int64_t slot = first; slot < first + k && entry < (place + 1) * of_place; ++slot) {
      if (experts[slot] < from || experts[slot] >= from + own) continue;
      call.local.as<int32_t>()[entry] = static_cast<int32_t>(experts[slot] - from);
      if (row_weights) row_weights[entry] = weights[slot];
      ++entry;
    }
  }
  int64_t dropped = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    int64_t entry = -1;
    if (in_range(experts[slot], call.num_experts)) {
      const int64_t rank = experts[slot] / own;
      const auto shares = [&](int32_t expert) { return in_range(expert, call.num_experts) && expert / own == rank; };
      const int32_t* first = experts + slot / k * k;
      const int64_t leader = std::find_if(first, experts + slot, shares) - experts;
      const int64_t before = std::count_if(first, experts + slot, shares);
      if (in_range(places[leader], all_places) && before < of_place) entry = places[leader] * of_place + before;
      dropped += entry < 0;
    }
    call.inverse.as<int32_t>()[slot] = static_cast<int32_t>(entry);
  }
  call.dropped.as<int32_t>()[0] = static_cast<int32_t>(dropped);
}

}  // namespace

const Kernel<RankSlots> rank_slots_any_cpu = {"rank_slots_any_cpu", Arch::cpu,   Kind::reference, takes_any,
                                              no_workspace,         launch_ranks};
const Kernel<RowSlots> row_slots_any_cpu = {"row_slots_any_cpu", Arch::cpu,    Kind::reference,
                                            takes_any,           no_workspace, launch_rows};

}  // namespace grouped
