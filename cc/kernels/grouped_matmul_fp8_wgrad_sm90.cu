// Grouped contraction on Hopper, 8-bit operands with scales of groups or of blocks of 128: wgrad, [G, A, B]. wgmma
// reads 8-bit operands K-major only, so both come transposed, [A, P] and [B, P], each group's rows padded with zeros to
// a segment of whole blocks of 128. Partial sums go to fp32 after every block (pipeline_fp8.cuh draws the kernel).
//
//   sizes --order_groups--> spans with their segments, longest group first; counter := 0
//   counter --leader's scheduler--> mailbox of its peer --> both work rings; long and short sums mixed
//            |  an empty group's tiles: zeros, stored by the scheduler at once
//   loader: 128 codes of lhs and rhs; scales of the block's rows and columns [P / 128, A], [P / 128, B] word by word
//            |  ring of blocks; shared tiles multicast to the pair
//            v
//   2 or 3 consumer warpgroups, 64 rows each: a block's sums by wgmma, += row scale * column scale * sums in fp32
//            |  * both scales of the group, + what memory holds, fetched into the slots meanwhile, or added to it in
//            |  L2 (float32 of long sums); one rounding
//            v
//   [G, A, B], or one address per group
//
//   results   tile        ring         slots
//   16 bits   192 x 128   4 x 40 KiB   12 x 2 x 2 KiB, a warp's part of a tile
//   fp32      128 x 192   4 x 40 KiB   8 x 3 x 2 KiB, half of that
#include "cc/api/calls.h"
#include "cc/api/kernel.h"
#include "cc/device/sm90/pipeline_fp8.cuh"
#include "cc/device/sm90/rows_product_fp8.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

struct Fp8ContractionParams : ContractionParams {
  const float* lhs_group_scales;  // [groups], or null
  const float* rhs_group_scales;  // likewise
  const float* lhs_scales;        // [blocks, rows], or null
  const float* rhs_scales;        // [blocks, cols], or null
  bool scaled;                    // by block
};

template <class Pair, class Out, bool kScaled>
struct Fp8Contraction {
  using Params = Fp8ContractionParams;
  using Element = Pair;
  using Shape = std::conditional_t<
      sizeof(Out) == 2,
      PromotingShape<kPromotingTallRows, kPromotingTall.cols, kPromotingTall.stages, kPromotingTall.slots>,
      PromotingShape<kTileRows, kPromoting.cols, kPromoting.stages, kPromoting.slots>>;
  // Measured: what float32 results are added to arrives late then, and scales of blocks take the time that is gained.
  static constexpr bool kStoresMeanwhile = sizeof(Out) == 2 && !kScaled;
  using Rhs = RhsTile<Major::k, Shape::kCols>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }
  template <class Multiply>
  static __device__ void with_scaling(const Params&, Multiply multiply) {
    multiply(std::integral_constant<Scaling, kScaled ? Scaling::columns : Scaling::none>{});
  }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t spare, Push push) {
    schedule_contraction<Out, Shape::kCols, Shape::kRows>(
        p, rank, mail, spare,
        [](Work& work, const GroupSpan& span) {
          work.length = elements_of_codes(span.rows);
          work.rows = span.rows;
          work.end = span.first;  // of the segment
        },
        push);
  }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t code = work.end + kCodesPerElement * k;
    load_lhs<1, Shape::kRowBoxes>(&p.lhs, {{code, work.row0, 0, 0}}, boxes, work.across, rank, to, full);
    if (!columns) return;
    Rhs::load(&p.rhs, {{code, work.col0, 0, 0}}, work.across, rank, to + Shape::kRowBoxes * kBlockBytes, full);
  }

  // Scales of one tile, copied by a warp: a lane has every 32nd row and column.
  class ScaleCopies {
   public:
    __device__ ScaleCopies(const Params& p, const Work& work)
        : row_pitch_(p.rows), col_pitch_(p.cols), lane_(threadIdx.x % 32) {
      const int64_t block = work.end / kBlockCodes;
      rows_ = p.lhs_scales + (block * row_pitch_ + work.row0 + lane_);
      columns_ = p.rhs_scales + (block * col_pitch_ + work.col0 + lane_);
      valid_rows_ = p.lhs_scales != nullptr ? work.valid_rows : 0;
      valid_cols_ = p.rhs_scales != nullptr ? p.cols - work.col0 : 0;
    }
    __device__ void start(int block, uint32_t to) const {
#pragma unroll
      for (int i = 0; i < Shape::kRows; i += 32) {
        if (lane_ + i < valid_rows_) device::copy_async<4>(to + stage_row(lane_ + i), rows_ + block * row_pitch_ + i);
      }
#pragma unroll
      for (int i = 0; i < Shape::kCols; i += 32) {
        if (lane_ + i < valid_cols_)
          device::copy_async<4>(to + stage_column(Shape::kRows, lane_ + i), columns_ + block * col_pitch_ + i);
      }
    }

   private:
    const float *rows_, *columns_;
    int64_t row_pitch_, col_pitch_;
    int lane_, valid_rows_, valid_cols_;
  };

  struct Epilogue {
    Alpha group;
    const Params& p;
    const Work& work;
    int row, cols;
    // Fetches what memory holds under the warp's part of the tile.
    __device__ void start(const Slots<Shape::kSlots>& slots) const {
      if (!p.accumulate || row >= work.valid_rows) return;
      if constexpr (sizeof(Out) == 2) {
        fetch_whole<Out, Shape::kCols>(&p.out, contraction_at(work, row), cols, slots);
      } else {
        held().begin(slots);
      }
    }
    __device__ Held<Out, Shape::kSlots> held() const {
      return {&p.out, contraction_at(work, row), 16, cols, Shape::kCols, p.fetched(work.rows)};
    }
  };
  static __device__ Epilogue begin(const Params& p, const Work& work, int row, int cols, const Slots<Shape::kSlots>&) {
    return {Alpha(p.lhs_group_scales, p.rhs_group_scales, work.group), p, work, row, cols};
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               Slots<Shape::kSlots>& slots, Epilogue& epilogue) {
    const ptx::Coords at = contraction_at(work, row);
    if constexpr (sizeof(Out) == 2) {
      store_whole<Out, Shape::kCols>(acc, &p.out, at, cols, slots, p.accumulate, epilogue.group);
    } else {
      auto held = epilogue.held();  // made again: while the tile multiplies there are no registers for it
      held.begun();
      store_or_add<Out, Shape::kCols>(acc, &p.out, at, cols, slots, p.accumulate, held, epilogue.group);
    }
  }

  static __device__ void clear_tail(const Params&, const Work&, uint32_t, int) {}
};

template <class Pair, class Out, bool kScaled>
void launch_product(const GroupedMatmul& call, Fp8ContractionParams p, void* stream) {
  using Product = Fp8Contraction<Pair, Out, kScaled>;
  const int64_t positions = call.lhs.dims[1];
  // Without rows nothing is loaded, but a map wants an address and an extent.
  const bool empty = positions == 0;
  const auto map = [&](const TensorView& codes, int64_t rows, uint32_t box_rows) {
    return tensor_map(empty ? p.spans : codes.data, codes.dtype,
                      packed_shape(1, rows, empty ? kBlockCodes : positions, codes.dtype), kBlockCodes, box_rows);
  };
  p.lhs = map(call.lhs, p.rows, 64);
  p.rhs = map(call.rhs, p.cols, Product::Rhs::kBoxRows);
  launch_contraction<Product>(grouped_product_fp8_sm90<Product>, p, stream, Product::Shape::kThreads);
}

std::string refuses(const GroupedMatmul& c, const Target&) {
  if (!c.contract_rows) return "is for a contraction over rows; this call has ragged rows";
  if (!is_fp8(c.lhs.dtype) || !is_fp8(c.rhs.dtype)) {
    return std::string("takes float8_e4m3fn and float8_e5m2; lhs is ") + dtype_name(c.lhs.dtype) + ", rhs " +
           dtype_name(c.rhs.dtype);
  }
  if (!c.transposed || c.segment != kBlockCodes)
    return "takes transposed operands whose rows are padded to segments of 128";
  const DType out = c.result.dtype;
  if (out != DType::bf16 && out != DType::f16 && out != DType::f32) {
    return std::string("gives bfloat16, float16 or float32, not ") + dtype_name(out);
  }
  const OperandScales& s = c.scales;
  if ((s.lhs_block != 0 && s.lhs_block != kBlockCodes) || (s.rhs_block != 0 && s.rhs_block != kBlockCodes)) {
    return "takes scales of 128 rows, not of " + std::to_string(s.lhs_block) + " and " + std::to_string(s.rhs_block);
  }
  if (s.lhs_block != 0 && s.lhs_scales.dtype != DType::f32) return "takes float32 scales";
  if (s.rhs_block != 0 && s.rhs_scales.dtype != DType::f32) return "takes float32 scales";
  const int64_t a = c.result.dims[1], b = c.result.dims[2];
  return first_of({refuses_extents(c.lhs.dims[1], {a, b}), refuses_16_bytes({{"B", b, 8}}),
                   refuses_contraction_tiles(a, c.group_sizes.dims[0], b, 128)});
}

// Of the 6 slices in a whole tile. Where memory is as fast as an H200's, L2 adds faster as well.
FetchedSlices fetched_slices() {
  const int64_t bytes_per_us = int64_t{attribute_of_device<cudaDevAttrMemoryClockRate>()} / 1000 * 2 *
                               attribute_of_device<cudaDevAttrGlobalMemoryBusWidth>() / 8;
  constexpr int64_t kFast = 4000000;  // 4 TB/s; an H100 has 3.35, an H200 4.8
  return bytes_per_us >= kFast ? FetchedSlices{1, 3} : FetchedSlices{3, kAllSlices};
}

size_t workspace(const GroupedMatmul& c, const Target&) { return contraction_workspace(c.group_sizes.dims[0]); }

void launch(const GroupedMatmul& call, const Context& context) {
  Fp8ContractionParams p{};
  set_contraction<true>(call, call.rows, call.result.dims[1], call.result.dims[2], context, &p);
  set_scales(call.scales, &p);
  p.fetched = fetched_slices();
  with_fp8_types(call, [&](auto pair, auto out) {
    using Pair = decltype(pair);
    using Out = decltype(out);
    return p.scaled ? launch_product<Pair, Out, true>(call, p, context.stream)
                    : launch_product<Pair, Out, false>(call, p, context.stream);
  });
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_fp8_wgrad_sm90 = {"grouped_matmul_fp8_wgrad_sm90",
                                                             Arch::sm90,
                                                             Kind::special,
                                                             refuses,
                                                             workspace,
                                                             launch,
                                                             kAlignment,
                                                             nullptr,
                                                             false,
                                                             true};

}  // namespace grouped
