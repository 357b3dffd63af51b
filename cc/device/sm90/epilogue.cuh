// Accumulators -> shared memory -> global memory. Each warp owns 16 rows (of each 64-row half) of a tile and its own
// slots, so the epilogue needs no barrier among warps; the copy engine clips at the edges of the tensor map. To add to
// what memory holds, the copy engine first fetches it into the same slots, the first of them while the tile multiplies,
// or has float32 sums added in L2.
#pragma once

#include "cc/device/common/product_end.cuh"
#include "cc/device/sm90/layout.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

using device::to_float;

template <class T>
__device__ inline uint32_t pack2(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}

// The slots of one warp, used in turn. The copy engine may still be reading the others.
template <int kSlots, int kSlotBytes_ = kSlotBytes>
struct Slots {
  static constexpr int kBytes = kSlots * kSlotBytes_;
  uint32_t base;  // shared address
  uint32_t full;  // barriers of the slots, for fetches
  uint32_t turn = 0;
  uint32_t parity = 0;  // of the fetches, one bit per slot

  __device__ uint32_t address(uint32_t ahead = 0) const { return base + (turn + ahead) % kSlots * kSlotBytes_; }
  __device__ uint32_t barrier(uint32_t ahead = 0) const { return full + (turn + ahead) % kSlots * 8; }
  __device__ void wait_free() const {
    if (threadIdx.x % 32 == 0) ptx::store_wait_read<kSlots - 1>();
    __syncwarp();
  }
  // Until the fetch into slot i is complete.
  __device__ void wait_fetched(uint32_t i) {
    ptx::barrier_wait(full + 8 * i, parity >> i & 1);
    parity ^= 1u << i;
  }
  __device__ void advance() {
    if (++turn == kSlots) turn = 0;
  }
};

// How many of the slices that a warp stores it fetches of what memory holds there; to the others their float32 sums are
// added in L2, with the same bits. L2 adds 0.94 TB/s on an H100 and a third more on an H200, which hides behind long
// sums, so of these no slice is fetched.
constexpr int kAllSlices = 1 << 20;
constexpr int kLongSum = 1536;  // rows
struct FetchedSlices {
  int of_middle, of_short;  // of sums of middle length and of short ones
  __device__ int operator()(int summed_rows) const {
    constexpr int kMiddleSum = 768;
    return summed_rows >= kLongSum ? 0 : summed_rows >= kMiddleSum ? of_middle : of_short;
  }
};

// Fetches of what memory holds under one tile: slices of 128 bytes by 16 rows, in the order in which they are stored,
// the first `most` of them. To the other slices L2 adds their sums, which it can do for float32 alone.
template <class Out, int kSlots>
class Held {
 public:
  static constexpr int kSliceCols = 128 / sizeof(Out);
  static constexpr bool kAddsInL2 = sizeof(Out) == 4;
  static_assert(kSlots >= 2, "a slot is refilled while the next one is stored");

  // `at` is the warp's first element, `rows` and `cols` what is left of the tensor from there on; its second 16 rows
  // are `half_rows` below the first.
  __device__ Held(const CUtensorMap* map, ptx::Coords at, int rows, int cols, int tile_cols, int most,
                  int half_rows = 64)
      : map_(map),
        at_(at),
        half_rows_(half_rows),
        per_half_(((cols < tile_cols ? cols : tile_cols) + kSliceCols - 1) / kSliceCols),
        total_(rows <= 0           ? 0
               : rows <= half_rows ? per_half_
                                   : 2 * per_half_) {
    if (total_ > most) total_ = most;
  }

  // Before the tile multiplies: fills every slot.
  __device__ void begin(const Slots<kSlots>& slots) {
    if (threadIdx.x % 32 != 0) return;
    ptx::store_wait_read<0>();
    for (int i = 0; i < kSlots && i < total_; ++i) fetch(slots, i);
  }
  // Where another object for the same tile began.
  __device__ void begun() { fetched_ = total_ < kSlots ? total_ : kSlots; }
  // Whether the next slice to be stored is fetched.
  __device__ bool fetches() const { return stored_ < total_; }
  // After the store of a slice, before slots.advance(): refills the slot of the slice before it.
  __device__ void next(const Slots<kSlots>& slots) {
    if (threadIdx.x % 32 == 0 && stored_ != 0 && fetched_ < total_) {
      ptx::store_wait_read<1>();
      fetch(slots, kSlots - 1);
    }
    ++stored_;
  }

 private:
  __device__ void fetch(const Slots<kSlots>& slots, int ahead) {
    ptx::barrier_arrive_expect(slots.barrier(ahead), kSlotBytes);
    ptx::tensor_load(slots.address(ahead), map_, slice(fetched_), slots.barrier(ahead));
    ++fetched_;
  }
  __device__ ptx::Coords slice(int i) const {
    const int half = i >= per_half_, col = (i - half * per_half_) * kSliceCols;
    return {{at_.c[0] + col, at_.c[1] + half_rows_ * half, at_.c[2], at_.c[3]}};
  }

  const CUtensorMap* map_;
  ptx::Coords at_;
  int half_rows_, per_half_, total_, fetched_ = 0, stored_ = 0;
};

// For results that are only stored.
struct NothingHeld {
  static constexpr bool kAddsInL2 = false;
  static __device__ bool fetches() { return false; }
  template <class Slots_>
  __device__ void next(const Slots_&) {}
};

// Rounds and writes 128 bytes of each of 16 rows into a slot; with `add`, the sums plus what the slot holds.
template <class Out>
__device__ inline void write_slice(float* sums, uint32_t slot, bool add) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(Out) == 2) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float* v = &sums[4 * j];
      const uint32_t to = slot + slot_of_matrix(lane, j);
      if (add) {
        uint32_t old[4];
        ptx::load_matrix_x4(to, old);
        __syncwarp();  // every lane has read before one writes
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] += to_float(reinterpret_cast<const Out*>(old)[i]);
      }
      ptx::store_matrix_x4(to, pack2<Out>(v[0], v[1]), pack2<Out>(v[2], v[3]), pack2<Out>(v[4], v[5]),
                           pack2<Out>(v[6], v[7]));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* v = &sums[4 * j];
      const uint32_t to = slot + slot_of_pair(lane, j);
      if (add) {
        float old[4];
        ptx::load_shared_v2(to, old[0], old[1]);
        ptx::load_shared_v2(to + 8 * 128, old[2], old[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] += old[i];
      }
      ptx::store_shared_v2(to, v[0], v[1]);
      ptx::store_shared_v2(to + 8 * 128, v[2], v[3]);
    }
  }
}

// Stores the 16 x kCols part of a tile that this warp holds (lane l: rows l/4 and l/4 + 8, columns 8j + 2(l%4) + {0,
// 1}). `at` is its first element in `map`; columns from `valid_cols` on are outside. `change(col, v)` sees four
// accumulators, columns col and col + 1 of the first row, then of the second. The sums are added to what is `held`.
template <class Out, int kCols, int kSlots, class Held_, class Change>
__device__ inline void store_rows(float (&acc)[kCols / 2], const CUtensorMap* map, ptx::Coords at, int valid_cols,
                                  Slots<kSlots>& slots, Held_& held, Change change) {
  constexpr int kSliceCols = 128 / sizeof(Out);
  const int lane = threadIdx.x % 32, lane_col = 2 * (lane % 4);
#pragma unroll
  for (int s = 0; s < kCols / kSliceCols; ++s) {
    if (s * kSliceCols >= valid_cols) break;
    const uint32_t slot = slots.address();
    const bool fetched = held.fetches();
    if (fetched) {
      slots.wait_fetched(slots.turn);
    } else {
      slots.wait_free();
    }
#pragma unroll
    for (int j = 0; j < kSliceCols / 8; ++j) {
      change(s * kSliceCols + 8 * j + lane_col, *reinterpret_cast<float (*)[4]>(&acc[(s * kSliceCols + 8 * j) / 2]));
    }
    write_slice<Out>(&acc[s * kSliceCols / 2], slot, fetched);
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) {
      const ptx::Coords to = {{at.c[0] + s * kSliceCols, at.c[1], at.c[2], at.c[3]}};
      if (Held_::kAddsInL2 && !fetched) {
        ptx::tensor_add(map, to, slot);
      } else {
        ptx::tensor_store(map, to, slot);
      }
      ptx::store_commit();
    }
    held.next(slots);
    slots.advance();
  }
}

// With `add` the sums are added to what is held: two copies of the code, since the one that adds stores a tenth slower.
template <class Out, int kCols, int kSlots, class Held_, class Change>
__device__ inline void store_or_add(float (&acc)[kCols / 2], const CUtensorMap* map, ptx::Coords at, int valid_cols,
                                    Slots<kSlots>& slots, bool add, Held_& held, Change change) {
  if (add) {
    store_rows<Out, kCols, kSlots>(acc, map, at, valid_cols, slots, held, change);
  } else {
    NothingHeld nothing;
    store_rows<Out, kCols, kSlots>(acc, map, at, valid_cols, slots, nothing, change);
  }
}

// Slots that hold all of a warp's part, slice i in slot i: nothing is waited for between slices, and what memory holds
// is fetched whole.
template <class Out, int kCols, int kSlots>
constexpr bool holds_whole() {
  return kSlots * (128 / int(sizeof(Out))) == kCols;
}
template <class Out, int kCols, int kSlots>
__device__ inline void fetch_whole(const CUtensorMap* map, ptx::Coords at, int valid_cols, const Slots<kSlots>& slots) {
  static_assert(holds_whole<Out, kCols, kSlots>());
  constexpr int kSliceCols = 128 / sizeof(Out);
  if (threadIdx.x % 32 != 0) return;
  ptx::store_wait_read<0>();
  for (int s = 0; s < kSlots && s * kSliceCols < valid_cols; ++s) {
    ptx::barrier_arrive_expect(slots.full + 8 * s, kSlotBytes);
    ptx::tensor_load(slots.base + s * kSlotBytes, map, {{at.c[0] + s * kSliceCols, at.c[1], at.c[2], at.c[3]}},
                     slots.full + 8 * s);
  }
}
// As store_rows; with `add` the sums are added to what fetch_whole brings.
template <class Out, int kCols, int kSlots, class Change>
__device__ inline void store_whole(float (&acc)[kCols / 2], const CUtensorMap* map, ptx::Coords at, int valid_cols,
                                   Slots<kSlots>& slots, bool add, Change change) {
  static_assert(holds_whole<Out, kCols, kSlots>());
  constexpr int kSliceCols = 128 / sizeof(Out);
  const int lane = threadIdx.x % 32, lane_col = 2 * (lane % 4);
  if (!add) {
    if (lane == 0) ptx::store_wait_read<0>();
    __syncwarp();
  }
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (s * kSliceCols >= valid_cols) break;
    if (add) slots.wait_fetched(s);
#pragma unroll
    for (int j = 0; j < kSliceCols / 8; ++j) {
      change(s * kSliceCols + 8 * j + lane_col, *reinterpret_cast<float (*)[4]>(&acc[(s * kSliceCols + 8 * j) / 2]));
    }
    write_slice<Out>(&acc[s * kSliceCols / 2], slots.base + s * kSlotBytes, add);
  }
  ptx::fence_async();
  __syncwarp();
  if (lane == 0) {
    for (int s = 0; s < kSlots && s * kSliceCols < valid_cols; ++s) {
      ptx::tensor_store(map, {{at.c[0] + s * kSliceCols, at.c[1], at.c[2], at.c[3]}}, slots.base + s * kSlotBytes);
    }
    ptx::store_commit();
  }
}

// Either of them, for results that are only stored.
template <class Out, int kCols, int kSlots, class Held_, class Change>
__device__ inline void store_part(float (&acc)[kCols / 2], const CUtensorMap* map, ptx::Coords at, int valid_cols,
                                  Slots<kSlots>& slots, Held_& held, Change change) {
  if constexpr (holds_whole<Out, kCols, kSlots>()) {
    store_whole<Out, kCols>(acc, map, at, valid_cols, slots, false, change);
  } else {
    store_rows<Out, kCols, kSlots>(acc, map, at, valid_cols, slots, held, change);
  }
}

// Zeros under whole tiles, by one warp and from one slot: they cost the warpgroups that multiply no turn, and no warp
// waits for them.
template <class Out, int kCols, int kRows = kTileRows>
class Zeros {
 public:
  __device__ explicit Zeros(uint32_t slot) : slot_(slot) {
    for (int i = threadIdx.x % 32; i < kSlotBytes / 8; i += 32) ptx::store_shared_v2(slot + 8 * i, 0, 0);
    ptx::fence_async();
    __syncwarp();
  }
  // `at` is the tile's first element, `rows` and `cols` what is left of the tensor from there on.
  __device__ void store(const CUtensorMap* map, ptx::Coords at, int rows, int cols) const {
    if (threadIdx.x % 32 != 0) return;
    for (int row = 0; row < kRows && row < rows; row += 16) {
      for (int col = 0; col < kCols && col < cols; col += 128 / sizeof(Out)) {
        ptx::tensor_store(map, {{at.c[0] + col, at.c[1] + row, at.c[2], at.c[3]}}, slot_);
      }
    }
    ptx::store_commit();
  }
  // Before the slot goes away.
  __device__ void finish() const {
    if (threadIdx.x % 32 == 0) ptx::store_wait_read<0>();
  }

 private:
  uint32_t slot_;
};

}  // namespace grouped::sm90
