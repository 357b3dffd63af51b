// At most `capacity` slots per expert.
//
// by position   two launches, cc/device/common/slot_order.cuh: a slot's rank among those of its expert decides
// by weight     the same two launches write slots and the ranks of their weights, by expert, to the workspace;
//               select, a block per expert: the rank at which `capacity` is full is found digit by digit, in four
//               passes over the expert's ranks with a histogram of 256 digits; slots above it are kept, and of those
//               at it the first ones
//
// Registers and shared memory (sm_90): place_slots 63 or 64, 41 KiB; select 32, 1.3 KiB.
#include <string>

#include "cc/device/common/refusals.h"
#include "cc/device/common/slot_order.cuh"
#include "cc/kernels/kernels.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

using namespace device;

// What keeping has in common: counts alone say how many slots go.
struct Capacity {
  const float* weights;
  int32_t* kept;
  float* kept_weights;
  int32_t* dropped;
  uint32_t capacity;

  __device__ void store(int64_t slot, int expert, bool keeps) const {
    kept[slot] = keeps ? expert : -1;
    kept_weights[slot] = keeps ? weights[slot] : 0.0f;
  }

  __device__ uint32_t excess(uint32_t slots) const { return slots > capacity ? slots - capacity : 0; }
  __device__ void end(int64_t, int64_t all_dropped) const {
    if (blockIdx.x == 0 && threadIdx.x == 0) *dropped = static_cast<int32_t>(all_dropped);
  }
};

struct ByPosition : Capacity {
  __device__ int64_t rows(uint32_t) const { return 0; }
  __device__ uint32_t first(int64_t) const { return 0; }
  __device__ uint32_t group(int, uint32_t slots, int64_t) const { return excess(slots); }
  __device__ void slot(int64_t slot, int expert, bool valid, uint32_t rank) const {
    store(slot, expert, valid && rank < capacity);
  }
};

// Slots by expert, for `select`.
struct ByWeight : Capacity {
  uint32_t* begins;  // [E + 1]
  uint32_t* ranks;   // [slots]
  int32_t* slots;    // [slots]
  int experts;

  __device__ int64_t rows(uint32_t count) const { return count; }
  __device__ uint32_t first(int64_t begin) const { return static_cast<uint32_t>(begin); }
  __device__ uint32_t group(int g, uint32_t count, int64_t begin) const {
    if (blockIdx.x == 0) begins[g] = first(begin);
    return excess(count);
  }
  __device__ void end(int64_t rows, int64_t all_dropped) const {
    Capacity::end(rows, all_dropped);
    if (blockIdx.x == 0 && threadIdx.x == 0) begins[experts] = first(rows);
  }
  __device__ void slot(int64_t slot, int expert, bool valid, uint32_t place) const {
    if (!valid) return store(slot, expert, false);
    ranks[place] = rank_of(weights[slot]);
    slots[place] = static_cast<int32_t>(slot);
  }
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 256;
static_assert(kDigits == kThreads, "a thread a digit");

__global__ void __launch_bounds__(kThreads) select(const __grid_constant__ ByWeight p) {
  __shared__ uint32_t digits[kDigits];
  __shared__ int64_t scratch[33];
  __shared__ uint32_t found_digit, found_left;
  const int expert = static_cast<int>(blockIdx.x);
  const uint32_t begin = p.begins[expert], count = p.begins[expert + 1] - begin;
  const uint32_t* ranks = p.ranks + begin;
  const int32_t* slots = p.slots + begin;
  if (count <= p.capacity) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) p.store(slots[i], expert, true);
    return;
  }
  uint32_t above = 0,
           left = p.capacity;  // upper digits of the rank that is looked for; slots that it and less may fill
  for (int shift = 24; shift >= 0; shift -= 8) {
    digits[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t rank = ranks[i];
      if (shift == 24 || rank >> (shift + 8) == above) atomicAdd(digits + (rank >> shift & 255u), 1u);
    }
    __syncthreads();
    const uint32_t digit = kDigits - 1 - threadIdx.x;  // the largest first
    const int64_t own = digits[digit];
    int64_t total;
    const int64_t before = exclusive_sum<kWarps>(own, scratch, &total);
    if (before < left && left <= before + own) {  // of one thread alone, as capacity is at least 1 and below the count
      found_digit = digit;
      found_left = left - static_cast<uint32_t>(before);
    }
    __syncthreads();
    above = above << 8 | found_digit;
    left = found_left;  // both change behind the next barrier at the earliest
  }
  // `above` is a whole rank now, and `left` of the slots that have it are kept.
  int64_t seen = 0;
  for (uint32_t i0 = 0; i0 < count; i0 += kThreads) {
    const uint32_t i = i0 + threadIdx.x;
    const bool exists = i < count;
    const uint32_t rank = exists ? ranks[i] : 0;
    const bool equal = exists && rank == above;
    int64_t total;
    const int64_t before = seen + exclusive_sum<kWarps>(equal, scratch, &total);
    seen += total;
    const bool keeps = rank > above || (equal && before < left);
    if (exists) p.store(slots[i], expert, keeps);
  }
}

SlotOrder order_of(const DropSlots& call) { return SlotOrder::plan(call.experts.elements(), call.num_experts); }

size_t list_bytes(const DropSlots& call) { return align_up(sizeof(uint32_t) * call.experts.elements()); }

size_t workspace(const DropSlots& call, const Target&) {
  const size_t order = order_of(call).bytes();
  if (!call.by_weight) return order;
  return order + align_up(sizeof(uint32_t) * (call.num_experts + 1)) + 2 * list_bytes(call);
}

void launch(const DropSlots& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  SlotOrder order = order_of(call);
  order.place(call.experts.as<const int32_t>(), context.workspace);
  const Capacity capacity = {call.weights.as<const float>(), call.kept.as<int32_t>(), call.kept_weights.as<float>(),
                             call.dropped.as<int32_t>(), static_cast<uint32_t>(call.capacity)};
  if (!call.by_weight) {
    launch_slot_order(order, ByPosition{capacity}, context);
    return;
  }
  char* lists = static_cast<char*>(context.workspace) + order.bytes();
  char* begins = lists + 2 * list_bytes(call);
  const ByWeight by_weight = {capacity, reinterpret_cast<uint32_t*>(begins), reinterpret_cast<uint32_t*>(lists),
                              reinterpret_cast<int32_t*>(lists + list_bytes(call)), static_cast<int>(call.num_experts)};
  launch_slot_order(order, by_weight, context);
  if (call.experts.elements() == 0) return;
  select<<<static_cast<unsigned>(call.num_experts), kThreads, 0, stream>>>(by_weight);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<DropSlots> drop_slots_any_cuda = {
    "drop_slots_any_cuda", Arch::cuda, Kind::reference, takes_any, workspace, launch};

}  // namespace grouped
