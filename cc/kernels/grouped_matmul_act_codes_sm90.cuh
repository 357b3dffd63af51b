// The up projection with its activation, of weights that come as codes, as grouped_matmul_act_codes_sm90.cu draws it,
// and its launch, which one file for each width of codes instantiates.
#pragma once

#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/swapped_epilogue.cuh"
#include "cc/device/sm90/widen_tiles.cuh"
#include "cc/kernels/grouped_matmul_act_bf16_sm90.cuh"

namespace grouped::sm90 {

struct CodedUpParams : UpParams {
  CodedWeights coded;
  const float* factors;     // [groups]: scales of groups, or null
  int32_t codes_boxes = 0;  // of a tile of 4-bit codes
};
// Not bound by memory.
__device__ inline NoPace pace_of(const CodedUpParams&, uint32_t) { return {}; }

using ByteUpShape = CodedTileShape<false, kCodedBytesWithActivation.cols, kCodedBytesWithActivation.stages,
                                   kCodedBytesWithActivation.slots, kNarrowSlotBytes>;

// Codes of 8 bits, which are widened in shared memory.
template <Pairs kPairs>
struct ByteUpProduct : UpProduct<__nv_bfloat16, Major::k, kPairs, ByteUpShape>, CodedBlocks {
  using Shape = ByteUpShape;
  using Base = UpProduct<__nv_bfloat16, Major::k, kPairs, Shape>;
  using Params = CodedUpParams;
  static constexpr int kBoxCols = 32;
  static constexpr bool kShortEnd = false;  // more code would spill

  // As CodedBoxes has them (widen_tiles.cuh). Two boxes, one of each part, are 64 columns of a tile.
  static __device__ int coded_cols(int cols) { return 2 * kBoxCols * Base::boxes(cols); }
  static __device__ int coded_column(const Params& p, const Work& work, int col) {
    return p.across * work.col0 + col / kBoxCols * p.weight_part + col % kBoxCols;
  }
  static __device__ int coded_move(const Params& p, int by) { return by / (2 * kBoxCols) * p.step; }

  static __device__ void load_codes(const Params& p, const Work& work, int k, uint32_t to, uint32_t arrived) {
    load_coded<false>(
        p.coded, work.group, 2 * Base::boxes(p.cols - work.col0), kBoxCols, to, arrived, [&](int) { return k; },
        [&](int box) { return p.across * work.col0 + box / 2 * p.step + box % 2 * p.weight_part; });
  }
  static __device__ void widen(const Params& p, const Shell<Shape> shell) { widen_any<false, ByteUpProduct>(p, shell); }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[kTileCols / 2],
                               typename Base::WarpSlots& slots, NothingHeld& held) {
    if (p.factors != nullptr) device::scale_sums(acc, device::group_factor(nullptr, p.factors, work.group));
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

using NibbleUpShape = SwappedShape<kSwapped.stages, kSwapped.slots>;

// Codes of 4 bits, which are widened in registers. Rows g of A are gates, or else the tile's first 64
// columns, and rows g + 8 the linear columns of the same results, or else its second 64.
template <Pairs kPairs>
struct NibbleUpProduct : UpProduct<__nv_bfloat16, Major::k, kPairs, NibbleUpShape>, CodedBlocks {
  using Shape = NibbleUpShape;
  using Params = CodedUpParams;
  using T = __nv_bfloat16;
  static constexpr bool kGated = kPairs != Pairs::none;
  static constexpr ColumnOrder kOrder = kPairs == Pairs::columns ? ColumnOrder::alternating : ColumnOrder::halves;
  static constexpr int kResultCols = kGated ? kSwappedCols : 2 * kSwappedCols;  // of a tile
  static constexpr int kRowsBox = kSwappedRowsBox, kPieceRows = 32;
  static constexpr int kPieceBytes = kPieceRows * kSliceCols * int(sizeof(T));
  // Of 32 rows of a warpgroup: of hidden, and of results. Two sets of them where there is room.
  static constexpr int kHiddenPieces = 2, kPieces = kHiddenPieces + (kGated ? 1 : 2);
  static constexpr int kSets = 4 * Shape::WarpSlots::kBytes / (kPieces * kPieceBytes);
  static constexpr int kLowBoxRows = PairedTile<Major::k>::kBoxRows;

  // Weights come in boxes: those of part 0, then those of part 1 (UpParams), or where columns are not apart one behind
  // the other.
  static __device__ int box_line(const Params& p, const Work& work, int box, int boxes, int rows) {
    const int first = p.across * work.col0;
    if constexpr (kPairs != Pairs::blocks) return first + box * rows;
    return first + box % (boxes / 2) * p.step + box / (boxes / 2) * p.weight_part;
  }
  // One box, or of gates and linear columns boxes of 64 lines each, or of 32 where blocks of 32 of them alternate.
  struct CodesAt {
    static constexpr int kMost = 4;
    int group, count;
    int line[kMost];
    __device__ CodesAt(const Params& p, const Work& work) : group(work.group), count(p.codes_boxes) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) line[i] = box_line(p, work, i, count, Shape::kCols / count);
    }
    __device__ void load(const Params& p, int k, uint32_t to, uint32_t full) const {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i >= count) break;
        ptx::tensor_load(to + i * (Shape::kCodesBytes / count), &p.coded.map, {{k / 2, line[i], group, 0}}, full);
      }
    }
  };
  static __device__ int coded_column(const Params& p, const Work& work, int col) {
    return box_line(p, work, col / kLowBoxRows, Shape::kCols / kLowBoxRows, kLowBoxRows) + col % kLowBoxRows;
  }
  static __device__ uint32_t rhs_bytes(int) { return Shape::kCols * 128; }
  static __device__ void load_rhs(const Params& p, const Work& work, const FromLow& part, uint32_t, uint32_t to,
                                  uint32_t full) {
    constexpr int kBoxes = Shape::kCols / kLowBoxRows;
    for (int i = 0; i < kBoxes; ++i) {
      ptx::tensor_load(to + i * kLowBoxRows * 128, &p.low.rhs,
                       {{part.at, box_line(p, work, i, kBoxes, kLowBoxRows), part.slice.near, part.slice.far}}, full);
    }
  }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows<two_columns_at, kSwappedRows>(p, kResultCols, rank, mail, push);
  }
  static __device__ int columns_left(const Params& p, const Work& work, int consumer) {
    return p.cols - work.col0 - consumer * kSliceCols;
  }
  static __device__ auto slots(const Shell<Shape>& shell, int warp) {
    return SharedSlots<4, kSets * kPieces, kPieceBytes>(shell.slots(0).base, warp);
  }

  // The bias at rows g and g + 8 of A.
  static __device__ void bias_of(const Params& p, const Work& work, int col, float (&bias)[2]) {
    using Bias = device::BiasOf<T>;
    bias[0] = bias[1] = 0;
    const char* from = device::bias_at<Bias>(p, work.group, 0);
    if (from == nullptr) return;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int result = work.col0 + col + (kGated ? 0 : b * kSwappedCols);
      const int hidden = kPairs == Pairs::none ? result
                         : kPairs == Pairs::columns
                             ? 2 * result + b
                             : p.across * work.col0 + col / kSliceCols * p.step + col % kSliceCols + b * p.part;
      if (result < p.cols) bias[b] = Bias::value(p, from, hidden);
    }
  }

  template <class Slots_>
  static __device__ void store_swapped(const Params& p, const Work& work, int warp, float (&acc)[kSwappedRows / 2],
                                       Slots_& slots) {
    if (p.factors != nullptr) device::scale_sums(acc, device::group_factor(nullptr, p.factors, work.group));
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = warp / 4 * kSliceCols;  // column of the warpgroup's results
    float bias[2];
    bias_of(p, work, first + warp % 4 * 8 + g, bias);
    constexpr int kAll = kSwappedRows / 8;
    uint32_t h[kAll][2];  // rows 8 j + 2t and 1 on, at rows g and g + 8 of A
#pragma unroll
    for (int i = 0; i < 2 * kAll; ++i) {
      const float b = bias[i % 2];
      h[i / 2][i % 2] = pack2<T>(acc[2 * i] + b, acc[2 * i + 1] + b);
    }
    // One copy of the code, at the price of moving the rows up: activations of all kinds are large.
#pragma unroll 1
    for (int row0 = 0; row0 < kSwappedRows && row0 < work.valid_rows; row0 += kPieceRows) {
      constexpr int kStep = kPieceRows / 8;
      uint32_t z[kStep][kGated ? 1 : 2];
      with_activation(p.activation.kind, [&](auto kind) {
        if constexpr (is_gated(decltype(kind)::value) == kGated) {
          using Act = ActivationOf<decltype(kind)::value>;
#pragma unroll
          for (int j = 0; j < kStep; ++j) {
            float scale[2];
            swapped_row_scales(p.row_scale, work, row0 / 8 + j, scale);
            float a[2], u[2];
            unpack2<T>(h[j][0], a[0], a[1]);
            unpack2<T>(h[j][1], u[0], u[1]);
            if constexpr (kGated) {
              z[j][0] = pack2<T>(scale[0] * Act::value(p.activation, a[0], u[0]),
                                 scale[1] * Act::value(p.activation, a[1], u[1]));
            } else {
              z[j][0] =
                  pack2<T>(scale[0] * Act::value(p.activation, a[0], 0), scale[1] * Act::value(p.activation, a[1], 0));
              z[j][1] =
                  pack2<T>(scale[0] * Act::value(p.activation, u[0], 0), scale[1] * Act::value(p.activation, u[1], 0));
            }
          }
        }
      });
      const uint32_t slot = slots.template take<kPieces>();
      const bool hidden = p.hidden_rows != nullptr;
      const auto write = [&](int piece, const auto& from, int b) {
        const uint32_t to = slot + piece * kPieceBytes + narrow_slot_of(lane, warp % 4);
        ptx::store_transposed_x4(to, from[0][b], from[1][b], from[2][b], from[3][b]);
      };
      static_assert(kStep == 4);
      if (hidden && kPairs == Pairs::columns) {
#pragma unroll
        for (int i = 0; i < 2 * kStep; ++i) {
          const int row = 8 * (i / 2) + 2 * t + i % 2;
          const uint32_t pair = __byte_perm(h[i / 2][0], h[i / 2][1], i % 2 ? 0x7632 : 0x5410);
          ptx::store_shared(slot + warp % 4 / 2 * kPieceBytes + narrow_slot_of(row, warp % 2 * 2 + g / 4) + g % 4 * 4,
                            pair);
        }
      } else if (hidden) {
        write(0, h, 0);
        write(1, h, 1);
      }
#pragma unroll
      for (int b = 0; b < kPieces - kHiddenPieces; ++b) write(kHiddenPieces + b, z, b);
      slots.send([&] {
        const ptx::Coords at = ragged_at(work, 0, row0);
        const auto store = [&](const CUtensorMap* map, int col, int piece) {
          ptx::tensor_store(map, {{col, at.c[1], at.c[2], at.c[3]}}, slot + piece * kPieceBytes);
        };
        const int col = work.col0 + first;
        if (hidden) {
          const int of_hidden = p.across * work.col0 + first / kSliceCols * (kGated ? p.step : kSliceCols);
#pragma unroll
          for (int part = 0; part < kHiddenPieces; ++part) {
            store(&p.hidden[kGated ? part : 0], of_hidden + part * (kGated ? p.hidden_part : kSwappedCols), part);
          }
        }
#pragma unroll
        for (int b = 0; b < kPieces - kHiddenPieces; ++b) store(&p.out, col + b * kSwappedCols, kHiddenPieces + b);
      });
#pragma unroll
      for (int j = 0; j + kStep < kAll; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) h[j][b] = h[j + kStep][b];
      }
    }
  }
};

template <bool kNibbles, Pairs kPairs>
void launch_coded_pairs(const GroupedMatmulAct& call, CodedUpParams p, void* stream) {
  if constexpr (kNibbles) {
    using Product = NibbleUpProduct<kPairs>;
    p.codes_boxes = kPairs != Pairs::blocks ? 1 : p.across == 1 ? 2 : 4;
    p.coded = coded_weights(call, Product::Shape::kCols / p.codes_boxes);
    launch_up_product<Product>(swapped_product_sm90<Product>, call, p, kThreads, stream);
  } else {
    using Product = ByteUpProduct<kPairs>;
    p.coded = coded_weights(call, Product::kBoxCols);
    launch_up_product<Product>(coded_product_sm90<Product>, call, p, kCodedThreads, stream);
  }
}

// By how gates and linear halves are laid out.
template <bool kNibbles>
void launch_coded_up(const GroupedMatmulAct& call, CodedUpParams p, void* stream) {
  if (!is_gated(p.activation.kind)) return launch_coded_pairs<kNibbles, Pairs::none>(call, p, stream);
  return call.activation.interleave == 1 ? launch_coded_pairs<kNibbles, Pairs::columns>(call, p, stream)
                                         : launch_coded_pairs<kNibbles, Pairs::blocks>(call, p, stream);
}

}  // namespace grouped::sm90
