// The order of slots by expert, cut into what each rank of an exchange gets.
//
// A scan of the sizes, then one launch: a thread finds the rank of a slot by bisection over the ranks, the expert of a
// place by bisection over the experts of its rank, and the size of an expert that has places. Block 0 counts what is
// dropped. Every place of the results is written once.
//
// Registers (sm_90): cut_order 32, no shared memory.
#include <algorithm>
#include <string>

#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

constexpr int kThreads = 256;

struct Sending {
  const int64_t* offsets;  // [E + 1], of the scan
  const int32_t* source;
  const int32_t* inverse;
  const float* weights;  // may be null without slots
  int32_t* kept_sizes;
  int32_t* sent;
  int32_t* experts;
  int32_t* places;
  int32_t* dropped;
  float* row_weights;  // null: weights do not travel
  uint32_t slots, all_places, budget;
  int ranks, own, count;  // own: experts of a rank; count: of all ranks

  // Rows of the rank below `row` of the order that have a place.
  __device__ int64_t kept(int64_t row, int64_t start) const { return min(row - start, static_cast<int64_t>(budget)); }
};

// The last i < count with starts[i * step] <= value; starts[0] <= value.
__device__ int find_last_of(const int64_t* starts, int step, int count, int64_t value) {
  int first = 0;
  while (count > 1) {
    const int half = count / 2;
    const bool below = starts[static_cast<int64_t>(first + half) * step] <= value;
    first += below ? half : 0;
    count = below ? count - half : half;
  }
  return first;
}

__device__ void write_place(const Sending& p, uint32_t place) {
  const int rank = static_cast<int>(place / p.budget);
  const int64_t* offsets = p.offsets + static_cast<int64_t>(rank) * p.own;
  const int64_t row = offsets[0] + place % p.budget;
  const bool taken = row < offsets[p.own];
  const int32_t slot = taken ? p.source[row] : -1;
  p.sent[place] = slot;
  p.experts[place] = taken ? find_last_of(offsets, 1, p.own, row) : -1;
  if (p.row_weights) p.row_weights[place] = slot >= 0 && slot < static_cast<int64_t>(p.slots) ? p.weights[slot] : 0.0f;
}

__device__ void write_slot(const Sending& p, uint32_t slot) {
  const int32_t row = p.inverse[slot];
  int64_t place = -1;
  if (row >= 0 && row < p.offsets[p.count]) {
    const int rank = find_last_of(p.offsets, p.own, p.ranks, row);
    const int64_t at = row - p.offsets[static_cast<int64_t>(rank) * p.own];
    if (at < p.budget) place = static_cast<int64_t>(rank) * p.budget + at;
  }
  p.places[slot] = static_cast<int32_t>(place);
}

__global__ void __launch_bounds__(kThreads) cut_order(const __grid_constant__ Sending p) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < p.all_places) write_place(p, i);
  if (i < p.slots) write_slot(p, i);
  if (i < static_cast<uint32_t>(p.count)) {
    const int64_t start = p.offsets[i / p.own * p.own];
    p.kept_sizes[i] = static_cast<int32_t>(p.kept(p.offsets[i + 1], start) - p.kept(p.offsets[i], start));
  }
  if (blockIdx.x > 0 || threadIdx.x >= 32) return;
  int dropped = 0;
  for (int rank = threadIdx.x; rank < p.ranks; rank += 32) {
    const int64_t* offsets = p.offsets + static_cast<int64_t>(rank) * p.own;
    dropped += static_cast<int>(offsets[p.own] - offsets[0] - p.kept(offsets[p.own], offsets[0]));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) dropped += __shfl_xor_sync(~0u, dropped, d);
  if (threadIdx.x == 0) *p.dropped = dropped;
}

size_t scan_bytes(const SendOrder& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

void launch(const SendOrder& call, const Context& context) {
  constexpr int kUnusedTileRows = 1 << 30;  // the scan's tiles are not asked for
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t count = call.group_sizes.dims[0], places = call.sent.dims[0], slots = call.inverse.elements();
  const GroupScan scan = GroupScan::at(context.workspace, count);
  launch_scan(call.group_sizes.as<const int32_t>(), call.source.dims[0], kUnusedTileRows, false, scan, stream);
  const Sending p = {scan.offsets,
                     call.source.as<const int32_t>(),
                     call.inverse.as<const int32_t>(),
                     data_or_null<const float>(call.weights),
                     call.kept_sizes.as<int32_t>(),
                     call.sent.as<int32_t>(),
                     call.experts.as<int32_t>(),
                     call.places.as<int32_t>(),
                     call.dropped.as<int32_t>(),
                     data_or_null<float>(call.row_weights),
                     static_cast<uint32_t>(slots),
                     static_cast<uint32_t>(places),
                     static_cast<uint32_t>(places / call.ranks),
                     static_cast<int>(call.ranks),
                     static_cast<int>(count / call.ranks),
                     static_cast<int>(count)};
  const int64_t threads = std::max({places, slots, count});
  cut_order<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<SendOrder> send_order_any_cuda = {
    "send_order_any_cuda", Arch::cuda, Kind::reference, takes_any, scan_bytes, launch};

}  // namespace grouped
