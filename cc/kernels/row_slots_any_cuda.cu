// Slots of tokens that are sent to a rank once: which of them goes there, and what the rank is told of the others.
//
// rank_slots   a thread per slot reads the slots of its token in front of it
// row_slots    clear of the count --> a thread per entry of a place looks for its slot among those of the token, and a
//              thread per slot counts those in front of it that go to the same rank; blocks add up what is dropped
//
// Every place of the results is written once. A token's slots are read again from the first-level cache.
//
// Registers (sm_90): find_ranks 16, fill_rows 32, no shared memory.
#include <algorithm>

#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

// ---- Which slots are sent

struct Ranking {
  const int32_t* experts;
  int32_t* ranks;
  uint32_t slots, k, count, own;  // own: experts of a rank; count: of all ranks
};

__global__ void __launch_bounds__(kThreads) find_ranks(const __grid_constant__ Ranking p) {
  const uint32_t slot = blockIdx.x * kThreads + threadIdx.x;
  if (slot >= p.slots) return;
  const auto expert = static_cast<uint32_t>(p.experts[slot]);  // negative ones are beyond the count
  bool leads = expert < p.count;
  const uint32_t from = expert / p.own * p.own;
  for (uint32_t i = slot / p.k * p.k; leads && i < slot; ++i) {
    leads = static_cast<uint32_t>(p.experts[i]) - from >= p.own;
  }
  p.ranks[slot] = leads ? static_cast<int32_t>(expert / p.own) : -1;
}

void launch_ranks(const RankSlots& call, const Context& context) {
  const int64_t slots = call.experts.elements();
  if (slots == 0) return;
  const Ranking p = {call.experts.as<const int32_t>(),
                     call.slot_ranks.as<int32_t>(),
                     static_cast<uint32_t>(slots),
                     static_cast<uint32_t>(call.experts.dims[1]),
                     static_cast<uint32_t>(call.num_experts),
                     static_cast<uint32_t>(call.num_experts / call.ranks)};
  find_ranks<<<blocks_of(slots), kThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ---- What their rows say

struct Filling {
  const int32_t* experts;
  const int32_t* sent;
  const int32_t* places;
  const float* weights;  // may be null without slots
  int32_t* local;
  int32_t* inverse;
  int32_t* dropped;
  float* row_weights;  // null: weights do not travel
  uint32_t slots, k, all_places, of_place, budget, count, own;
};

__device__ void write_entry(const Filling& p, uint32_t entry) {
  const uint32_t place = entry / p.of_place, from = place / p.budget * p.own;
  uint32_t left = entry - place * p.of_place;  // slots of this rank in front of the one of this entry
  const auto sent = static_cast<uint32_t>(p.sent[place]);
  int32_t local = -1;
  float weight = 0.0f;
  if (sent < p.slots) {
    const uint32_t first = sent / p.k * p.k;
    for (uint32_t slot = first; local < 0 && slot < first + p.k; ++slot) {
      const uint32_t expert = static_cast<uint32_t>(p.experts[slot]) - from;
      if (expert >= p.own) continue;
      if (left == 0) {
        local = static_cast<int32_t>(expert);
        if (p.row_weights) weight = p.weights[slot];
      }
      --left;
    }
  }
  p.local[entry] = local;
  if (p.row_weights) p.row_weights[entry] = weight;
}

// Whether the slot is dropped.
__device__ bool write_slot(const Filling& p, uint32_t slot) {
  const auto expert = static_cast<uint32_t>(p.experts[slot]);
  int32_t entry = -1;
  if (expert < p.count) {
    const uint32_t from = expert / p.own * p.own;
    uint32_t before = 0, leader = slot;
    for (uint32_t i = slot / p.k * p.k; i < slot; ++i) {
      const bool shares = static_cast<uint32_t>(p.experts[i]) - from < p.own;
      if (shares && before == 0) leader = i;
      before += shares ? 1 : 0;
    }
    const auto place = static_cast<uint32_t>(p.places[leader]);
    if (place < p.all_places && before < p.of_place) entry = static_cast<int32_t>(place * p.of_place + before);
  }
  p.inverse[slot] = entry;
  return expert < p.count && entry < 0;
}

__global__ void __launch_bounds__(kThreads) fill_rows(const __grid_constant__ Filling p) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < p.all_places * p.of_place) write_entry(p, i);
  const int dropped = __syncthreads_count(i < p.slots && write_slot(p, i));
  if (threadIdx.x == 0 && dropped > 0) atomicAdd(p.dropped, dropped);
}

void launch_rows(const RowSlots& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t places = call.local.dims[0], slots = call.experts.elements();
  GROUPED_CUDA_CHECK(cudaMemsetAsync(call.dropped.data, 0, sizeof(int32_t), stream));
  const int64_t threads = std::max(call.local.elements(), slots);
  if (threads == 0) return;
  const Filling p = {call.experts.as<const int32_t>(),
                     call.sent.as<const int32_t>(),
                     call.places.as<const int32_t>(),
                     data_or_null<const float>(call.weights),
                     call.local.as<int32_t>(),
                     call.inverse.as<int32_t>(),
                     call.dropped.as<int32_t>(),
                     data_or_null<float>(call.row_weights),
                     static_cast<uint32_t>(slots),
                     static_cast<uint32_t>(call.experts.dims[1]),
                     static_cast<uint32_t>(places),
                     static_cast<uint32_t>(call.local.dims[1]),
                     static_cast<uint32_t>(places / call.ranks),
                     static_cast<uint32_t>(call.num_experts),
                     static_cast<uint32_t>(call.num_experts / call.ranks)};
  fill_rows<<<blocks_of(threads), kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<RankSlots> rank_slots_any_cuda = {"rank_slots_any_cuda", Arch::cuda,  Kind::reference, takes_any,
                                               no_workspace,          launch_ranks};
const Kernel<RowSlots> row_slots_any_cuda = {"row_slots_any_cuda", Arch::cuda, Kind::reference, takes_any,
                                             no_workspace,         launch_rows};

}  // namespace grouped
