// Which sequence a token belongs to. Up to 32 sequences a warp adds up itself; of more, a scan says where they end.
#pragma once

#include "cc/device/common/block_sum.cuh"
#include "cc/device/common/group_scan.cuh"

namespace grouped {

struct Sequences {
  const int32_t* sizes;  // null: there are none
  GroupScan scan;        // of more than kOwnSums
  int count;

  static constexpr int kOwnSums = 32;

  static size_t bytes(int64_t count) { return count > kOwnSums ? GroupScan::bytes(count) : 0; }

  // Scans the sizes if there are many.
  static Sequences prepare(const int32_t* sizes, int64_t count, int64_t tokens, void* workspace, cudaStream_t stream) {
    constexpr int kUnusedTileRows = 1 << 30;  // the scan's tiles are not asked for
    Sequences s = {sizes, {}, static_cast<int>(count)};
    if (count <= kOwnSums) return s;
    s.scan = GroupScan::at(workspace, count);
    launch_scan(sizes, tokens, kUnusedTileRows, false, s.scan, stream);
    return s;
  }
};

namespace device {

// Where sequence `lane` of at most 32 ends; sums are 64 bits wide, and those of lanes behind the last stay as they are.
__device__ inline int64_t sequence_end(const Sequences& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return warp_prefix_sum<int64_t>(lane < s.count && s.sizes[lane] > 0 ? s.sizes[lane] : 0);
}

// The sequence of a token, or -1 past the last. Called by a whole warp.
__device__ inline int sequence_of(const Sequences& s, int64_t token) {
  if (s.count > Sequences::kOwnSums) {
    if (token >= s.scan.offsets[s.count]) return -1;
    return find_last(s.scan.offsets, s.count, token);
  }
  const int before = __popc(__ballot_sync(~0u, sequence_end(s) <= token));  // a prefix of the lanes: ends never fall
  return before < s.count ? before : -1;
}

// The same where each lane has a token of its own.
__device__ inline int sequence_of_lane(const Sequences& s, int64_t token) {
  if (s.count > Sequences::kOwnSums) {
    if (token >= s.scan.offsets[s.count]) return -1;
    int first = 0;
    for (int count = s.count; count > 1;) {
      const int half = count / 2;
      const bool below = s.scan.offsets[first + half] <= token;
      first += below ? half : 0;
      count = below ? count - half : half;
    }
    return first;
  }
  const int64_t end = sequence_end(s);
  int before = 0;
  for (int i = 0; i < s.count; ++i) before += __shfl_sync(~0u, end, i) <= token;
  return before < s.count ? before : -1;
}

struct TokenSpan {
  int64_t begin, end;
};

// The tokens of a sequence. Called by a whole warp, for one sequence.
__device__ inline TokenSpan tokens_of(const Sequences& s, int sequence, int64_t tokens) {
  if (s.count > Sequences::kOwnSums) return {s.scan.offsets[sequence], s.scan.offsets[sequence + 1]};
  const int64_t end = sequence_end(s), before = __shfl_sync(~0u, end, max(sequence - 1, 0));
  return {sequence > 0 ? min(before, tokens) : 0, min(__shfl_sync(~0u, end, sequence), tokens)};
}

// How many tokens belong to any sequence. Called by a whole warp.
__device__ inline int64_t tokens_of_all(const Sequences& s, int64_t tokens) {
  if (s.count > Sequences::kOwnSums) return s.scan.offsets[s.count];
  return min(__shfl_sync(~0u, sequence_end(s), Sequences::kOwnSums - 1), tokens);
}

}  // namespace device
}  // namespace grouped
