// Where the slots of tokens go: counts per expert, capacity, the order of rows, and experts by token id. One thread
// each: a few passes over [T, k] integers.
#include <algorithm>
#include <vector>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/kernels/kernels.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

void launch_count(const CountExperts& call, const Context&) {
  const int64_t k = call.experts.dims[1], experts = call.counts.dims[1];
  const std::vector<int64_t> ends = group_ends(call.sequence_sizes, call.experts.dims[0]);
  const int32_t* chosen = call.experts.as<const int32_t>();
  int32_t* counts = call.counts.as<int32_t>();
  std::fill_n(counts, call.counts.elements(), 0);
  for (size_t s = 0; s < ends.size(); ++s) {
    for (int64_t slot = group_begin(ends, static_cast<int64_t>(s)) * k; slot < ends[s] * k; ++slot) {
      if (in_range(chosen[slot], experts)) ++counts[static_cast<int64_t>(s) * experts + chosen[slot]];
    }
  }
}

void launch_drop(const DropSlots& call, const Context&) {
  const int64_t slots = call.experts.elements();
  const int32_t* experts = call.experts.as<const int32_t>();
  const float* weights = call.weights.as<const float>();
  int32_t* kept = call.kept.as<int32_t>();
  std::vector<std::vector<int32_t>> of_expert(static_cast<size_t>(call.num_experts));
  for (int64_t slot = 0; slot < slots; ++slot) {
    kept[slot] = in_range(experts[slot], call.num_experts) ? experts[slot] : -1;
    if (kept[slot] >= 0) of_expert[static_cast<size_t>(kept[slot])].push_back(static_cast<int32_t>(slot));
  }
  int64_t dropped = 0;
  for (std::vector<int32_t>& own : of_expert) {
    const auto count = static_cast<int64_t>(own.size());
    if (count <= call.capacity) continue;
    if (call.by_weight) {
      std::nth_element(own.begin(), own.begin() + call.capacity, own.end(), [&](int32_t a, int32_t b) {
        const uint32_t x = rank_of(weights[a]), y = rank_of(weights[b]);
        return x != y ? x > y : a < b;
      });
    }
    for (int64_t i = call.capacity; i < count; ++i) kept[own[static_cast<size_t>(i)]] = -1;
    dropped += count - call.capacity;
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    call.kept_weights.as<float>()[slot] = kept[slot] >= 0 ? weights[slot] : 0.0f;
  }
  call.dropped.as<int32_t>()[0] = static_cast<int32_t>(dropped);
}

void launch_sort(const SortSlots& call, const Context&) {
  const int64_t slots = call.experts.elements(), groups = call.group_sizes.dims[0], rows = call.source.dims[0];
  const int32_t* experts = call.experts.as<const int32_t>();
  int32_t* source = call.source.as<int32_t>();
  int32_t* inverse = call.inverse.as<int32_t>();
  std::vector<int64_t> next(static_cast<size_t>(groups), 0);  // counts, then the next row of each group
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (in_range(experts[slot], groups)) ++next[static_cast<size_t>(experts[slot])];
  }
  int64_t begin = 0, end = 0;  // in rows without bound, and kept to those that there are
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t count = next[static_cast<size_t>(g)];
    next[static_cast<size_t>(g)] = begin;
    begin += (count + call.align - 1) / call.align * call.align;
    const int64_t until = std::min(begin, rows);
    call.group_sizes.as<int32_t>()[g] = static_cast<int32_t>(until - end);
    end = until;
  }
  const float* weights = floats_or_null(call.weights);  // may be null without slots
  float* row_weights = call.row_weights.present() ? call.row_weights.as<float>() : nullptr;
  std::fill_n(source, rows, -1);
  if (row_weights) std::fill_n(row_weights, rows, 0.0f);
  int32_t dropped = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    inverse[slot] = -1;
    if (!in_range(experts[slot], groups)) continue;
    const int64_t row = next[static_cast<size_t>(experts[slot])]++;
    if (row < rows) {
      source[row] = static_cast<int32_t>(slot);
      inverse[slot] = static_cast<int32_t>(row);
      if (row_weights) row_weights[row] = weights[slot];
    } else {
      ++dropped;
    }
  }
  call.dropped.as<int32_t>()[0] = dropped;
}

void launch_pad(const PadGroups& call, const Context&) {
  const int64_t rows = call.inverse.dims[0];
  int32_t* source = call.source.as<int32_t>();
  int32_t* inverse = call.inverse.as<int32_t>();
  std::fill_n(source, call.source.dims[0], -1);
  std::fill_n(inverse, rows, -1);
  const std::vector<int64_t> ends = group_ends(call.group_sizes, rows);
  int64_t begin = 0;  // of the padded group
  for (size_t g = 0; g < ends.size(); ++g) {
    const int64_t first = group_begin(ends, static_cast<int64_t>(g)), count = ends[g] - first;
    for (int64_t i = 0; i < count; ++i) {
      source[begin + i] = static_cast<int32_t>(first + i);
      inverse[first + i] = static_cast<int32_t>(begin + i);
    }
    const int64_t padded = (count + call.align - 1) / call.align * call.align;
    call.padded_sizes.as<int32_t>()[g] = static_cast<int32_t>(padded);
    begin += padded;
  }
}

void launch_hash(const HashExperts& call, const Context& context) {
  const int64_t k = call.experts.dims[1];
  const int32_t* ids = call.token_ids.as<const int32_t>();
  parallel_rows(context.pool, 0, call.experts.dims[0], [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      int32_t* experts = call.experts.as<int32_t>() + t * k;
      if (!call.table.present()) {
        draw_distinct(static_cast<uint32_t>(ids[t]), static_cast<int>(k), static_cast<int>(call.num_experts),
                      [&](int j, int drawn) { experts[j] = drawn; });
      } else if (in_range(ids[t], call.table.dims[0])) {
        std::copy_n(call.table.as<const int32_t>() + ids[t] * k, k, experts);
      } else {
        std::fill_n(experts, k, -1);
      }
    }
  });
}

}  // namespace

const Kernel<CountExperts> count_experts_any_cpu = {
    "count_experts_any_cpu", Arch::cpu, Kind::reference, takes_any, no_workspace, launch_count};
const Kernel<DropSlots> drop_slots_any_cpu = {"drop_slots_any_cpu", Arch::cpu,  Kind::reference, takes_any,
                                              no_workspace,         launch_drop};
const Kernel<SortSlots> sort_slots_any_cpu = {"sort_slots_any_cpu", Arch::cpu,  Kind::reference, takes_any,
                                              no_workspace,         launch_sort};
const Kernel<PadGroups> pad_groups_any_cpu = {"pad_groups_any_cpu", Arch::cpu, Kind::reference, takes_any,
                                              no_workspace,         launch_pad};
const Kernel<HashExperts> hash_experts_any_cpu = {"hash_experts_any_cpu", Arch::cpu,  Kind::reference, takes_any,
                                                  no_workspace,           launch_hash};

}  // namespace grouped
