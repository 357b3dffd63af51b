// Results of tiles with swapped operands: a lane has rows 8 j + 2t and 1 on, in two columns. They are transposed on
// their way to slots in shared memory, from where tensor copies store them, clipped at the group's last row.
#pragma once

#include "cc/device/sm90/pipeline_swapped.cuh"
#include "cc/device/sm90/rows_product.cuh"

namespace grouped::sm90 {

// Slots that kWarps neighbouring warps fill together: kCount of them.
template <int kWarps, int kCount, int kBytes>
class SharedSlots {
 public:
  // `base` is the first slot of all warps, `warp` one of 8.
  __device__ SharedSlots(uint32_t base, int warp)
      : base_(base + warp / kWarps * (kCount * kBytes)), name_(1 + warp / kWarps) {}

  // Until the next `kTaken` slots are free, of which the first is returned; they are next to one another.
  template <int kTaken>
  __device__ uint32_t take() {
    static_assert(kCount % kTaken == 0);
    if (leads()) ptx::store_wait_read<kCount / kTaken - 1>();
    meet();
    const uint32_t slot = base_ + turn_ * kBytes;
    turn_ = (turn_ + kTaken) % kCount;
    return slot;
  }
  // Once all warps have written: `store()` by one thread.
  template <class Store>
  __device__ void send(Store store) const {
    ptx::fence_async();
    meet();
    if (!leads()) return;
    store();
    ptx::store_commit();
  }

 private:
  static __device__ bool leads() { return threadIdx.x % (32 * kWarps) == 0; }
  __device__ void meet() const {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      ptx::named_barrier<32 * kWarps>(name_);
    }
  }

  uint32_t base_;
  int name_, turn_ = 0;
};

// The column of a tile that a lane has in row g + 8 b of A.
template <class Product>
__device__ inline int swapped_column_of(int warp, int b) {
  const int line = threadIdx.x % 32 / 4 + 8 * b;
  if constexpr (Product::kRhsMajor == Major::k) {
    return swapped_column(Product::kOrder, warp, line);
  } else {
    return swapped_column_of_bytes(warp, line);
  }
}

// Slots of results: of 16 neighbouring columns, which are one warp's, or of 32 that two warps share.
template <class Shape, class Out, Major kMajor>
struct SwappedOut {
  static constexpr int kWarps = kMajor == Major::k ? 1 : 2, kCols = 16 * kWarps;
  static constexpr int kBytes = kSwappedSlotBytes * kWarps, kRows = kBytes / (kCols * int(sizeof(Out)));
  using Slots = SharedSlots<kWarps, Shape::kSlots, kBytes>;
};

// Ends and stores a warp's 16 columns of a tile: bias, row scale, one rounding.
template <class Product, class Bias, class Out, class Params, class Slots_>
__device__ inline void store_swapped_tile(const Params& p, const Work& work, int warp, float (&acc)[kSwappedRows / 2],
                                          Slots_& slots) {
  using At = SwappedOut<typename Product::Shape, Out, Product::kRhsMajor>;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int col0 = work.col0 + warp / At::kWarps * At::kCols, cols = p.cols - col0;
  if (cols <= 0) return;
  const char* bias = device::bias_at<Bias>(p, work.group, p.first_col + col0);
  int column[2];
  float of_column[2] = {};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    column[b] = swapped_column_of<Product>(warp, b) % At::kCols;
    if (bias != nullptr && column[b] < cols) of_column[b] = Bias::value(p, bias, column[b]);
  }
  const bool plain = bias == nullptr && p.row_scale == nullptr;
#pragma unroll
  for (int row0 = 0; row0 < kSwappedRows; row0 += At::kRows) {
    if (row0 >= work.valid_rows) break;
    const uint32_t slot = slots.template take<1>();
    if (!plain) {
#pragma unroll
      for (int j = 0; j < At::kRows / 8; ++j) {
        float scale[2];
        swapped_row_scales(p.row_scale, work, row0 / 8 + j, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& sum = acc[(row0 + 8 * j) / 2 + e];
          sum = device::ended(sum, scale[e % 2], of_column[e / 2], p.scale_bias);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const float* v = &acc[(row0 + 8 * j) / 2];  // [column][row]
      const int row = 8 * j + 2 * t;
      if constexpr (Product::kRhsMajor == Major::mn) {  // columns are neighbours
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if constexpr (sizeof(Out) == 4) {
            ptx::store_shared_v2(slot + (row + e) * 128 + ((column[0] / 4) ^ ((row + e) % 8)) * 16 + column[0] % 4 * 4,
                                 v[e], v[2 + e]);
          } else {
            ptx::store_shared(slot + narrow_slot_of(row + e, column[0] / 8) + column[0] % 8 * 2,
                              pack2<Out>(v[e], v[2 + e]));
          }
        }
      } else if constexpr (sizeof(Out) == 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int col = column[e / 2];
          ptx::store_shared_float(slot + narrow_slot_of(row + e % 2, col / 4) + col % 4 * 4, v[e]);
        }
      } else if (j % 2 == 0) {  // 8 rows more at once
        ptx::store_transposed_x4(slot + nibbles_at(8 * j + lane / 16 * 8 + lane % 8, lane / 8 % 2),
                                 pack2<Out>(v[0], v[1]), pack2<Out>(v[2], v[3]), pack2<Out>(v[4], v[5]),
                                 pack2<Out>(v[6], v[7]));
      }
    }
    slots.send([&] { ptx::tensor_store(&p.out, ragged_at(work, col0, row0), slot); });
  }
}

}  // namespace grouped::sm90
