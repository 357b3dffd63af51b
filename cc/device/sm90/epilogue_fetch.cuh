// What an epilogue reads beside its accumulators and what it writes, on the way from and to global memory. A set holds
// three blocks of 64 rows by 128 bytes, 128-byte swizzle, for 64 rows and 64 columns of a tile: two that are fetched
// ahead, and are overwritten with results in place, and one for results alone. Sets form one ring, used in the order of
// the tiles: the warpgroup at its epilogue has all of it, while the other multiplies.
//
//   full[s]    1 arrival, with the bytes          fetching warp -> the 4 warps of the warpgroup whose tile it is
//   done[s]    4 arrivals, one of each warp       they -> storing warp
//   empty[s]   1 arrival, once stores have read   storing warp -> fetching warp
//   turn[w]    4 arrivals per tile                the warps of the other warpgroup
//
// A warpgroup hands over its turn once it has seen the last set of its tile: the other then is never more than one
// phase ahead of a full barrier, which is as far as parity can tell.
#pragma once

#include "cc/device/sm90/operand_loads.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/device/sm90/ring.cuh"
#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

constexpr int kSetCols = 64;
constexpr int kSetBytes = 3 * kBlockBytes;
constexpr int kWarpsOfGroup = 4;

// A tile has row_halves * sets_across sets, those of its first 64 rows first.
template <int kCols>
__device__ inline int sets_across(int valid_cols) {
  return valid_cols <= 0 ? 0 : ((valid_cols < kCols ? valid_cols : kCols) + kSetCols - 1) / kSetCols;
}
__device__ inline int row_halves(int valid_rows) { return valid_rows <= 0 ? 0 : valid_rows <= 64 ? 1 : 2; }

template <class Shape>
__device__ inline void init_sets(uint32_t shared) {
  for (int s = 0; s < Shape::kSets; ++s) {
    ptx::barrier_init(shared + Shape::kSetFullAt + 8 * s, 1);
    ptx::barrier_init(shared + Shape::kSetDoneAt + 8 * s, kWarpsOfGroup);
    ptx::barrier_init(shared + Shape::kSetEmptyAt + 8 * s, 1);
  }
  for (int w = 0; w < 2; ++w) ptx::barrier_init(shared + Shape::kSetTurnAt + 8 * w, kWarpsOfGroup);
}

// The filling end, one lane.
template <class Shape>
class SetFetcher {
 public:
  __device__ explicit SetFetcher(uint32_t shared) : shared_(shared) {}

  // `load(to, barrier)` issues copies of `bytes` into the set.
  template <class Load>
  __device__ void fill(uint32_t bytes, Load load) {
    const uint32_t full = shared_ + Shape::kSetFullAt + 8 * ring_.slot;
    ptx::barrier_wait(shared_ + Shape::kSetEmptyAt + 8 * ring_.slot, ring_.parity ^ 1);
    ptx::barrier_arrive_expect(full, bytes);
    load(shared_ + Shape::kSetsAt + ring_.slot * kSetBytes, full);
    ring_.advance();
  }

 private:
  uint32_t shared_;
  Ring<Shape::kSets> ring_;
};

// The emptying end, one lane.
template <class Shape>
class SetStorer {
 public:
  __device__ explicit SetStorer(uint32_t shared) : shared_(shared) {}

  // `store(from)` issues stores of the set.
  template <class Store>
  __device__ void drain(Store store) {
    ptx::barrier_wait(shared_ + Shape::kSetDoneAt + 8 * ring_.slot, ring_.parity);
    store(shared_ + Shape::kSetsAt + ring_.slot * kSetBytes);
    ptx::store_commit();
    ptx::store_wait_read<0>();
    ptx::barrier_arrive(shared_ + Shape::kSetEmptyAt + 8 * ring_.slot);
    ring_.advance();
  }

 private:
  uint32_t shared_;
  Ring<Shape::kSets> ring_;
};

// A consumer warp's view. It takes every set of its tiles, also one in which it has no valid row, and skips those of
// the other warpgroup's.
template <class Shape>
class SetReader {
 public:
  __device__ SetReader(uint32_t shared, int consumer) : shared_(shared), consumer_(consumer) {}

  // Around the waits of a tile, also of one without sets; `parity` is that of the tile's turn to multiply.
  __device__ void take_turn(uint32_t parity) const {
    ptx::barrier_wait(shared_ + Shape::kSetTurnAt + 8 * consumer_, parity);
  }
  __device__ void hand_over() const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared_ + Shape::kSetTurnAt + 8 * (consumer_ ^ 1));
  }
  __device__ void skip(const Work& work, int cols) {
    ring_.advance(row_halves(work.valid_rows) * sets_across<Shape::kCols>(cols - work.col0));
  }
  __device__ void wait() const { ptx::barrier_wait(shared_ + Shape::kSetFullAt + 8 * ring_.slot, ring_.parity); }
  __device__ uint32_t address() const { return shared_ + Shape::kSetsAt + ring_.slot * kSetBytes; }
  // Ends the work on the set.
  __device__ void done() {
    ptx::fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared_ + Shape::kSetDoneAt + 8 * ring_.slot);
    ring_.advance();
  }

 private:
  uint32_t shared_;
  int consumer_;
  Ring<Shape::kSets> ring_;
};

// For products whose epilogue has no sets.
struct NoSets {
  __device__ NoSets(uint32_t, int) {}
  __device__ void take_turn(uint32_t) const {}
  __device__ void hand_over() const {}
  __device__ void skip(const Work&, int) {}
};

}  // namespace grouped::sm90
