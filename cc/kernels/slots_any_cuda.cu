// Where the slots of tokens go: counts per expert, the order of rows, and experts by token id.
//
// count_experts   clear --> 1024 slots per block, counted in shared memory if 8192 counters suffice, else in the result
// sort_slots      two launches, cc/device/common/slot_order.cuh; the last one writes padding and the tail as well, so
// every
//                 place of the results is written once
// pad_groups      a scan of the sizes, then a thread per row of both maps finds its group by bisection
// hash_experts    a thread per token: its row of the table, or its draws
//
// Registers and shared memory (sm_90): count_chosen 26, 33 KiB; count_slots 32, 32 KiB; place_slots 64, 41 KiB, one
// block of 1024 threads per multiprocessor; map_padded 18; hash_tokens 32, and 144 bytes of local memory for the draws.
// Predicted for T = 8192, k = 8, 128 groups on an H200: 64 blocks, count 2.5 us, place 4.5 us, and as they overlap 6 us
// together: five trips to memory, one after the other, and fifteen barriers, rather than bytes.
#include <algorithm>
#include <string>

#include "cc/device/common/refusals.h"
#include "cc/device/common/slot_order.cuh"
#include "cc/device/common/token_sequences.cuh"
#include "cc/kernels/kernels.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

using namespace device;

// ---- Counts

constexpr int kCountThreads = 256;
constexpr int kCountedABlock = 1024;
constexpr int kSharedCounts = 8192;

struct Counting {
  const int32_t* experts;
  int32_t* counts;
  Sequences sequences;
  int64_t slots;
  int slots_per_token, groups;
};

// The sequence of a token by the ends of sequences 0 ... count - 1: the first that ends behind it, or `count`.
__device__ int find_sequence(const int64_t* ends, int count, int64_t token) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <bool kShared>
__global__ void __launch_bounds__(kCountThreads) count_chosen(const __grid_constant__ Counting p) {
  __shared__ int own[kShared ? kSharedCounts : 1];
  __shared__ int64_t own_ends[Sequences::kOwnSums];
  const int sequences = p.sequences.count;
  const bool few = sequences <= Sequences::kOwnSums;
  if (few && threadIdx.x < 32) own_ends[threadIdx.x] = sequence_end(p.sequences);
  if (kShared) {
    for (int i = threadIdx.x; i < sequences * p.groups; i += kCountThreads) own[i] = 0;
  }
  __syncthreads();
  const int64_t* ends = few ? own_ends : p.sequences.scan.offsets + 1;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCountedABlock;
  const int64_t end = min(first + kCountedABlock, p.slots);
  for (int64_t slot = first + threadIdx.x; slot < end; slot += kCountThreads) {
    const int expert = p.experts[slot];
    const int sequence = find_sequence(ends, sequences, slot / p.slots_per_token);
    if (sequence == sequences || !is_group(expert, p.groups)) continue;
    if (kShared) {
      atomicAdd(own + sequence * p.groups + expert, 1);
    } else {
      atomicAdd(p.counts + static_cast<int64_t>(sequence) * p.groups + expert, 1);
    }
  }
  if (!kShared) return;
  __syncthreads();
  for (int i = threadIdx.x; i < sequences * p.groups; i += kCountThreads) {
    if (own[i] > 0) atomicAdd(p.counts + i, own[i]);
  }
}

size_t count_bytes(const CountExperts& call, const Target&) { return Sequences::bytes(call.sequence_sizes.dims[0]); }

void launch_count(const CountExperts& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t sequences = call.sequence_sizes.dims[0], slots = call.experts.elements();
  GROUPED_CUDA_CHECK(cudaMemsetAsync(call.counts.data, 0, static_cast<size_t>(call.counts.bytes()), stream));
  if (slots == 0) return;
  const Counting p = {call.experts.as<const int32_t>(),
                      call.counts.as<int32_t>(),
                      Sequences::prepare(call.sequence_sizes.as<const int32_t>(), sequences, call.experts.dims[0],
                                         context.workspace, stream),
                      slots,
                      static_cast<int>(call.experts.dims[1]),
                      static_cast<int>(call.counts.dims[1])};
  const unsigned blocks = static_cast<unsigned>((slots + kCountedABlock - 1) / kCountedABlock);
  if (call.counts.elements() <= kSharedCounts) {
    count_chosen<true><<<blocks, kCountThreads, 0, stream>>>(p);
  } else {
    count_chosen<false><<<blocks, kCountThreads, 0, stream>>>(p);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ---- Order

struct Rows {
  int32_t* group_sizes;
  int32_t* source;
  int32_t* inverse;
  int32_t* dropped;
  const float* weights;  // may be null without slots
  float* row_weights;    // or null
  uint32_t count;        // M
  uint32_t align;

  __device__ void store(int64_t row, int64_t slot) const {  // -1: none
    source[row] = static_cast<int32_t>(slot);
    if (row_weights) row_weights[row] = slot < 0 ? 0.0f : weights[slot];
  }

  __device__ int64_t rows(uint32_t slots) const {  // both are below 2^31, so their sum is no overflow
    return static_cast<int64_t>((slots + align - 1) / align) * align;
  }
  // Rows behind the last are all the same, and few enough for 32 bits: M and the slots are below 2^31.
  __device__ uint32_t first(int64_t begin) const {
    return static_cast<uint32_t>(min(begin, static_cast<int64_t>(count)));
  }
  __device__ uint32_t group(int g, uint32_t slots, int64_t begin) const {
    const uint32_t start = first(begin), end = first(begin + rows(slots)), used = first(begin + slots);
    if (blockIdx.x == 0) group_sizes[g] = static_cast<int32_t>(end - start);
    // All blocks share a group's padding, which may be long.
    for (uint32_t row = used + blockIdx.x; row < end; row += gridDim.x) store(row, -1);
    return slots - (used - start);
  }
  __device__ void end(int64_t all_rows, int64_t all_dropped) const {
    const int64_t step = static_cast<int64_t>(gridDim.x) * SlotOrder::kThreads;
    const int64_t begin = first(all_rows) + static_cast<int64_t>(blockIdx.x) * SlotOrder::kThreads + threadIdx.x;
    for (int64_t row = begin; row < count; row += step) store(row, -1);
    if (blockIdx.x == 0 && threadIdx.x == 0) *dropped = static_cast<int32_t>(all_dropped);
  }
  __device__ void slot(int64_t slot, int, bool valid, uint32_t row) const {
    const bool placed = valid && row < count;
    inverse[slot] = placed ? static_cast<int32_t>(row) : -1;
    if (placed) store(row, slot);
  }
};

SlotOrder order_of(const SortSlots& call) { return SlotOrder::plan(call.experts.elements(), call.group_sizes.dims[0]); }

size_t sort_bytes(const SortSlots& call, const Target&) { return order_of(call).bytes(); }

void launch_sort(const SortSlots& call, const Context& context) {
  SlotOrder order = order_of(call);
  order.place(call.experts.as<const int32_t>(), context.workspace);
  const Rows rows = {call.group_sizes.as<int32_t>(),
                     call.source.as<int32_t>(),
                     call.inverse.as<int32_t>(),
                     call.dropped.as<int32_t>(),
                     data_or_null<const float>(call.weights),
                     data_or_null<float>(call.row_weights),
                     static_cast<uint32_t>(call.source.dims[0]),
                     static_cast<uint32_t>(call.align)};
  launch_slot_order(order, rows, context);
}

// ---- Padding

constexpr int kPadThreads = 256;

struct Padding {
  GroupScan scan;  // with tiles of `align` rows
  int32_t* padded_sizes;
  int32_t* source;
  int32_t* inverse;
  int64_t padded, rows, align;  // P, M
};

// The last group that starts at or before `value`, which is not empty then.
__device__ int find_group(const int64_t* starts, int count, int64_t value) {
  return find_sequence(starts + 1, count - 1, value);
}

__global__ void __launch_bounds__(kPadThreads) map_padded(const __grid_constant__ Padding p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPadThreads + threadIdx.x;
  const int64_t* offsets = p.scan.offsets;
  const int64_t* tiles = p.scan.tiles;
  if (i < p.scan.count) p.padded_sizes[i] = static_cast<int32_t>((tiles[i + 1] - tiles[i]) * p.align);
  if (i < p.rows) {
    int64_t to = -1;
    if (i < offsets[p.scan.count]) {
      const int g = find_group(offsets, p.scan.count, i);
      to = tiles[g] * p.align + i - offsets[g];
    }
    p.inverse[i] = static_cast<int32_t>(to);
  }
  if (i < p.padded) {
    int64_t from = -1;
    const int64_t tile = i / p.align;
    if (tile < tiles[p.scan.count]) {
      const int g = find_group(tiles, p.scan.count, tile);
      from = offsets[g] + i - tiles[g] * p.align;
      if (from >= offsets[g + 1]) from = -1;
    }
    p.source[i] = static_cast<int32_t>(from);
  }
}

size_t pad_bytes(const PadGroups& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

void launch_pad(const PadGroups& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t groups = call.group_sizes.dims[0];
  const Padding p = {GroupScan::at(context.workspace, groups),
                     call.padded_sizes.as<int32_t>(),
                     call.source.as<int32_t>(),
                     call.inverse.as<int32_t>(),
                     call.source.dims[0],
                     call.inverse.dims[0],
                     call.align};
  launch_scan(call.group_sizes.as<const int32_t>(), p.rows, static_cast<int>(call.align), false, p.scan, stream);
  const int64_t threads = std::max(p.padded, groups);  // rows are at most padded rows
  map_padded<<<static_cast<unsigned>((threads + kPadThreads - 1) / kPadThreads), kPadThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ---- Experts by token id

constexpr int kHashThreads = 128;

__global__ void __launch_bounds__(kHashThreads)
    hash_tokens(const int32_t* ids, const int32_t* table, int64_t table_rows, int64_t tokens, int slots, int experts,
                int32_t* result) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kHashThreads + threadIdx.x;
  if (token >= tokens) return;
  const int32_t id = ids[token];
  int32_t* mine = result + token * slots;
  if (!table) {
    draw_distinct(static_cast<uint32_t>(id), slots, experts, [&](int j, int drawn) { mine[j] = drawn; });
    return;
  }
  const bool known = id >= 0 && id < table_rows;
  for (int j = 0; j < slots; ++j) mine[j] = known ? table[static_cast<int64_t>(id) * slots + j] : -1;
}

size_t hash_bytes(const HashExperts&, const Target&) { return 0; }

void launch_hash(const HashExperts& call, const Context& context) {
  const int64_t tokens = call.experts.dims[0];
  if (tokens == 0) return;
  const bool has_table = call.table.present();
  hash_tokens<<<static_cast<unsigned>((tokens + kHashThreads - 1) / kHashThreads), kHashThreads, 0,
                static_cast<cudaStream_t>(context.stream)>>>(
      call.token_ids.as<const int32_t>(), data_or_null<const int32_t>(call.table), has_table ? call.table.dims[0] : 0,
      tokens, static_cast<int>(call.experts.dims[1]), static_cast<int>(call.num_experts), call.experts.as<int32_t>());
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<CountExperts> count_experts_any_cuda = {
    "count_experts_any_cuda", Arch::cuda, Kind::reference, takes_any, count_bytes, launch_count};
const Kernel<SortSlots> sort_slots_any_cuda = {
    "sort_slots_any_cuda", Arch::cuda, Kind::reference, takes_any, sort_bytes, launch_sort};
const Kernel<PadGroups> pad_groups_any_cuda = {
    "pad_groups_any_cuda", Arch::cuda, Kind::reference, takes_any, pad_bytes, launch_pad};
const Kernel<HashExperts> hash_experts_any_cuda = {
    "hash_experts_any_cuda", Arch::cuda, Kind::reference, takes_any, hash_bytes, launch_hash};

}  // namespace grouped
