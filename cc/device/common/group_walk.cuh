// The walk over group sizes that kernels of ragged rows make: where the rows of each group are, and how many parts of
// groups (tiles, blocks, segments, work items) come before it. By the threads of a block or by one warp, group by group
// in their order, a window of them at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cc/device/common/block_sum.cuh"

namespace grouped {
namespace device {

// What comes before a group, or in all. No row is past the limit of the walk.
template <class Rows = int64_t, class Parts = int64_t>
struct GroupTotals {
  Rows rows = 0;
  Parts parts = 0;
};

// Two numbers of parts, each below 2^31, that are added up as one.
__device__ inline int64_t two_counts(int64_t first, int64_t second) { return second << 32 | first; }
__device__ inline int32_t first_count(int64_t both) { return static_cast<int32_t>(both); }
__device__ inline int32_t second_count(int64_t both) { return static_cast<int32_t>(both >> 32); }

// As exclusive_sum, of which one warp needs neither scratch nor barriers.
template <int kWarps, class T>
__device__ inline T sum_before(T value, int64_t* scratch, T* total) {
  if constexpr (kWarps == 1) {
    const T end = warp_prefix_sum(value);
    *total = __shfl_sync(~0u, end, 31);
    return end - value;
  } else {
    return exclusive_sum<kWarps>(value, scratch, total);
  }
}

// One window: kEach neighbouring groups of each thread, with these sizes (a thread behind the last group has zeros).
// Calls use(i, first, end, parts) for the i-th of them: its rows are first ... end - 1, and `parts` come before it.
// parts_of(rows) is how many parts so many rows of a group are; null: not wanted. `before` moves to the next window.
// Sizes below 0 count as 0. Sums are 64 bits wide: 65535 sizes of 31 bits cannot overflow, so clamping after the sum
// is enough (GRP-4).
template <int kWarps, int kEach, class Size, class Rows, class Parts, class PartsOf, class Use>
__device__ inline void walk_window(const Size (&sizes)[kEach], Rows limit, GroupTotals<Rows, Parts>* before,
                                   int64_t* scratch, PartsOf parts_of, Use use) {
  const auto clamped = [&](int64_t row) { return static_cast<Rows>(row < limit ? row : limit); };
  int64_t own = 0, all_rows;
#pragma unroll
  for (int i = 0; i < kEach; ++i) own += max(sizes[i], Size{0});
  int64_t row = before->rows + sum_before<kWarps>(own, scratch, &all_rows);
  before->rows = clamped(before->rows + all_rows);
  Rows edges[kEach + 1];
  edges[0] = clamped(row);
#pragma unroll
  for (int i = 0; i < kEach; ++i) edges[i + 1] = clamped(row += max(sizes[i], Size{0}));
  if constexpr (std::is_same_v<PartsOf, std::nullptr_t>) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) use(i, edges[i], edges[i + 1], Parts{0});
  } else {
    Parts parts[kEach], sum = 0, all_parts;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += parts[i] = parts_of(edges[i + 1] - edges[i]);
    Parts at = before->parts + sum_before<kWarps>(sum, scratch, &all_parts);
    before->parts += all_parts;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      use(i, edges[i], edges[i + 1], at);
      at += parts[i];
    }
  }
}

// All groups, by a block of kThreads or, if these are 32, by a warp: use(g, first, end, parts) for each, as above.
// Gives the totals. `scratch` has 33 entries; a warp needs none.
template <int kThreads, int kEach = 1, class Size, class PartsOf, class Use>
__device__ inline GroupTotals<> walk_groups(int groups, int64_t limit, int64_t* scratch, Size size_of, PartsOf parts_of,
                                            Use use) {
  GroupTotals<> before;
  for (int base = 0; base < groups; base += kEach * kThreads) {
    const int first = base + kEach * static_cast<int>(threadIdx.x % kThreads);
    decltype(size_of(0)) sizes[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) sizes[i] = first + i < groups ? size_of(first + i) : 0;
    const auto known = [&](int i, int64_t begin, int64_t end, int64_t parts) {
      if (first + i < groups) use(first + i, begin, end, parts);
    };
    walk_window<kThreads / 32>(sizes, limit, &before, scratch, parts_of, known);
  }
  return before;
}

}  // namespace device
}  // namespace grouped
