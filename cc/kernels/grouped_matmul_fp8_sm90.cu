// Grouped rows on Hopper, 8-bit operands with scales of groups or of blocks of 128: forward and dgrad, partial sums go
// to fp32 every 128 contracted codes (pipeline_fp8.cuh draws the kernel).
//
//   lhs codes by a ragged map, weight codes [G, N, K] by a packed (or scattered) map, 128 codes per block; scales of
//   its rows [blocks, M] and of its columns [G, N / 128, blocks] word by word
//            |  ring of blocks; shared tiles multicast to the pair
//            v
//   2 consumer warpgroups, 64 rows each: a block's sums by wgmma, += row scale * column scale * sums in fp32
//            |  * both scales of the group, + bias, * row scale, one rounding; slots of 16 rows in shared memory
//            v
//   ragged store, clipped at the group's last row; tail rows cleared as items behind the last tile
//
// Where the number of rows per group asks for tiles of even height: grouped_matmul_fp8_even_sm90.cu.
#include "cc/device/sm90/pipeline_fp8.cuh"
#include "cc/device/sm90/rows_product_fp8.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
void launch_even_fp8_rows(const GroupedMatmul&, Fp8RowsParams, void* stream);
}

namespace {

using namespace sm90;

using Shape = PromotingShape<kTileRows, kPromoting.cols, kPromoting.stages, kPromoting.slots>;

template <class Pair, class Out>
struct PromotedRows : Fp8Rows<Pair, Out, Shape> {
  static constexpr bool kStoresMeanwhile = true;

  template <class Multiply>
  static __device__ void with_scaling(const Fp8RowsParams& p, Multiply multiply) {
    if (p.scaled) {
      multiply(std::integral_constant<Scaling, Scaling::parts>{});
    } else {
      multiply(std::integral_constant<Scaling, Scaling::none>{});
    }
  }

  // Scales of one tile, copied by a warp: a lane has four rows, and the first lanes a part of the columns each.
  class ScaleCopies {
   public:
    __device__ ScaleCopies(const Fp8RowsParams& p, const Work& work)
        : rows_(p.lhs_scales), columns_(p.rhs_scales), pitch_(p.rows), row_(threadIdx.x % 32) {
      const int blocks = work.k_blocks(), col = work.col0 + kPartCols * row_;
      const int column_blocks = (p.cols + kBlockCodes - 1) / kBlockCodes;
      rows_ += work.end - work.rows + work.row0 + row_;
      columns_ += (int64_t(work.group) * column_blocks + col / kBlockCodes) * blocks;
      valid_rows_ = p.lhs_scales != nullptr ? work.valid_rows : 0;
      has_part_ = p.rhs_scales != nullptr && row_ < Shape::kCols / kPartCols && col < p.cols;
    }
    __device__ void start(int block, uint32_t to) const {
#pragma unroll
      for (int i = 0; i < kTileRows; i += 32) {
        if (row_ + i < valid_rows_) device::copy_async<4>(to + stage_row(row_ + i), rows_ + block * pitch_ + i);
      }
      if (has_part_) device::copy_async<4>(to + stage_column(Shape::kRows, row_), columns_ + block);
    }

   private:
    const float *rows_, *columns_;
    int64_t pitch_;
    int row_, valid_rows_;
    bool has_part_;
  };
};

std::string refuses(const GroupedMatmul& c, const Target& target) {
  const std::string reason = refuses_fp8_rows(c, target);
  if (!reason.empty()) return reason;
  const OperandScales& s = c.scales;
  if ((s.lhs_block != 0 && s.lhs_block != kBlockCodes) || (s.rhs_block != 0 && s.rhs_block != kBlockCodes)) {
    return "takes scales of 128 contracted codes, not of " + std::to_string(s.lhs_block) + " and " +
           std::to_string(s.rhs_block);
  }
  if (s.rhs_block != 0 && s.rhs_block_outer != kBlockCodes) return "takes scales of 128 x 128 weights";
  if (s.lhs_block != 0 && s.lhs_scales.dtype != DType::f32) return "takes float32 scales";
  if (s.rhs_block != 0 && s.rhs_scales.dtype != DType::f32) return "takes float32 scales";
  return "";
}

void launch(const GroupedMatmul& call, const Context& context) {
  launch_fp8_rows<PromotedRows>(call, context, [&](auto product, Fp8RowsParams p) {
    using Product = decltype(product);
    if (sizeof(typename Product::Result) == 2 && !p.scaled && even_fp8_tiles_sm90(p.rows, p.groups)) {
      return launch_even_fp8_rows(call, p, context.stream);
    }
    map_weights<typename Product::Rhs>(call, &p);
    launch_rows_product<Product>(grouped_product_fp8_sm90<Product>, p, context.stream);
  });
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_fp8_sm90 = {"grouped_matmul_fp8_sm90",
                                                       Arch::sm90,
                                                       Kind::special,
                                                       refuses,
                                                       fp8_rows_workspace,
                                                       launch,
                                                       kAlignment,
                                                       nullptr,
                                                       false,
                                                       true};

}  // namespace grouped
