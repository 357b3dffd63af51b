// Results of tiles of even height: a lane has rows 8 j + 2t and 1 on in columns g and g + 8 of its warp's 16. They are
// transposed on their way to shared memory, into pieces of 16 rows x 64 columns that the warps of a warpgroup fill
// together, and stored as far as the tile has rows, clipped at the group's last one.
#pragma once

#include "cc/device/sm90/rows_product.cuh"

namespace grouped::sm90 {

// Shared memory in which a warpgroup prepares what it stores: kSets times kSetBytes, taken in turn.
template <int kSets, int kSetBytes>
class EvenSlots {
 public:
  static constexpr int kBytes = kSets * kSetBytes;

  __device__ EvenSlots(uint32_t base, int consumer) : base_(base + consumer * kBytes), name_(1 + consumer) {}
  // All warps of the warpgroup.
  __device__ void meet() const { ptx::named_barrier<128>(name_); }
  // The next set, once it is free.
  __device__ uint32_t take() {
    if (threadIdx.x % 32 == 0) ptx::store_wait_read<kSets - 1>();
    meet();
    const uint32_t set = base_ + turn_ * kSetBytes;
    if (++turn_ == kSets) turn_ = 0;
    return set;
  }
  // Once all warps have written: `store()` by one lane of each.
  template <class Store>
  __device__ void send(Store store) const {
    ptx::fence_async();
    meet();
    if (threadIdx.x % 32 != 0) return;
    store();
    ptx::store_commit();
  }

 private:
  uint32_t base_;
  int name_, turn_ = 0;
};

// The row that `lane` addresses for a transposed stmatrix x4 of its warp's 16 columns, in a piece: columns 0 to 7 and 8
// to 15 of rows 0 to 7, then of rows 8 to 15.
__device__ inline uint32_t even_place(int warp, int lane) {
  const uint32_t row = lane / 16 * 8 + lane % 8;
  return row * 128 + ((2 * warp + lane / 8 % 2) ^ (row % 8)) * 16;
}

// Which two of 64 columns a lane has.
struct ColumnsOfLane {
  int first, step;
};
__device__ inline ColumnsOfLane even_columns(int warp) { return {16 * warp + int(threadIdx.x) % 32 / 4, 8}; }
// Of weights whose codes are turned (layout_fp8.cuh).
__device__ inline ColumnsOfLane turned_columns(int warp) { return {16 * warp + int(threadIdx.x) % 32 / 4 * 2, 1}; }

// Bias and row scale of the sums of 64 columns, from col0 on.
template <class Bias, class Params>
__device__ inline void end_even(const Params& p, const Work& work, int col0, ColumnsOfLane columns,
                                float (&sums)[kEvenRows / 2]) {
  const char* bias = device::bias_at<Bias>(p, work.group, p.first_col + col0);
  if (bias == nullptr && p.row_scale == nullptr) return;
  float of_column[2] = {};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int col = columns.first + columns.step * b;
    if (bias != nullptr && col0 + col < p.cols) of_column[b] = Bias::value(p, bias, col);
  }
#pragma unroll
  for (int j = 0; j < kEvenRows / 8; ++j) {
    if (8 * j >= work.valid_rows) break;
    float scale[2];
    swapped_row_scales(p.row_scale, work, j, scale);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& sum = sums[4 * j + e];
      sum = device::ended(sum, scale[e % 2], of_column[e / 2], p.scale_bias);
    }
  }
}

// Rounds and stores the sums of a warpgroup's 64 columns, from col0 on, kSetRows rows at once.
template <class Out, int kSetRows, class Params, class Slots_>
__device__ inline void store_even(const Params& p, const Work& work, int col0, int warp,
                                  const float (&sums)[kEvenRows / 2], Slots_& slots) {
  constexpr int kPieceRows = 16, kPieces = kSetRows / kPieceRows;
  const uint32_t place = even_place(warp, threadIdx.x % 32);
#pragma unroll
  for (int row0 = 0; row0 < kEvenRows; row0 += kSetRows) {
    if (row0 >= work.valid_rows) break;
    const uint32_t slot = slots.take();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float* v = &sums[(row0 + kPieceRows * i) / 2];
      ptx::store_transposed_x4(slot + i * kSlotBytes + place, pack2<Out>(v[0], v[1]), pack2<Out>(v[2], v[3]),
                               pack2<Out>(v[4], v[5]), pack2<Out>(v[6], v[7]));
    }
    slots.send([&] {
#pragma unroll
      for (int i = 0; i < kPieces; i += 4) {
        const int piece = i + warp, row = row0 + kPieceRows * piece;
        if (row < work.valid_rows) ptx::tensor_store(&p.out, ragged_at(work, col0, row), slot + piece * kSlotBytes);
      }
    });
  }
}

}  // namespace grouped::sm90
