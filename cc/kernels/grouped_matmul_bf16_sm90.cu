// Grouped rows on Hopper, bf16 and fp16: forward and dgrad, [M, N] = rows of lhs [M, K] times the weight of their
// group, which is [G, K, N] or [G, N, K] in memory (wgmma reads either major, nothing is transposed).
//
//   counter --leader's scheduler--> mailbox of its peer;  sizes --scan--> work rings of both
//   loader: lhs rows by a ragged map, weights by a packed (or scattered) map, both swizzled; of weights in two arrays,
//           each k block by the map of its half. Blocks of a low-rank product follow those of K (low_rank.cuh)
//            |  ring of blocks: lhs 128 x 64, weights 64 x BN; shared tiles multicast to the pair
//            v
//   2 consumer warpgroups in turn: wgmma m64nBNk16, fp32 in registers
//            |  + bias, * row scale, one rounding; slots of 16 rows in shared memory
//            v
//   ragged store, clipped at the group's last row; tail rows cleared as items behind the last tile
//
//   tile        accumulators     ring         slots           registers, 128 + 256 threads
//   128 x 192   192 per thread   5 x 40 KiB   8 x 1 x 2 KiB   40 / 232    long sums
//   128 x 192   192 per thread   4 x 40 KiB   8 x 4 x 2 KiB   40 / 232    short sums
//   128 x 64    64 per thread    7 x 24 KiB   8 x 2 x 2 KiB   40 / 232    few columns
//   128 x 256   128 per thread   4 x 48 KiB   8 x 1 x 2 KiB   40 / 232    very long sums, shared by both warpgroups
//
// Where the number of rows per group asks for tiles of even height: grouped_matmul_bf16_even_sm90.cu.
#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/kernel.h"
#include "cc/api/operands.h"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/pipeline_cooperative.cuh"
#include "cc/device/sm90/rows_matmul.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
void launch_even_rows(const GroupedMatmul&, const HalvesParams&, void* stream);
}

namespace {

using namespace sm90;

// The same with sums that are multiplied by their group's scales first: of widened operands, with weights [G,
// N, K]. A kernel of its own, so that products without scales keep theirs.
struct ScaledParams : HalvesParams {
  const float* lhs_scales;  // [groups], or null
  const float* rhs_scales;
};

template <class T, class Out, Major kWeights, class Shape_>
struct ScaledRowsProduct : RowsProduct<T, Out, kWeights, Shape_> {
  using Params = ScaledParams;
  using Base = RowsProduct<T, Out, kWeights, Shape_>;
  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape_::kCols / 2],
                               Slots<Shape_::kSlots>& slots, NothingHeld& held) {
    device::scale_sums(acc, device::group_factor(p.lhs_scales, p.rhs_scales, work.group));
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

template <const TileChoice& kChoice>
using TileOf = TileShape<kChoice.cols, kChoice.stages, kChoice.slots>;
using CooperativeTile = CooperativeShape<kCooperative.cols / 2, kCooperative.stages, kCooperative.slots>;

template <class T, class Out, Major kWeights, class Shape>
void launch_rows(const GroupedMatmul& call, HalvesParams p, void* stream) {
  using Product = RowsProduct<T, Out, kWeights, Shape>;
  map_halves<typename Product::Rhs>(call, &p);
  map_result(call, &p);
  if constexpr (std::is_same_v<Shape, CooperativeTile>) {
    launch_rows_product<Product, Shape::kTileCols>(cooperative_product_sm90<Product>, p, stream);
  } else {
    if constexpr (kWeights == Major::k && std::is_same_v<T, __nv_bfloat16>) {
      if (has_group_scales(call.scales)) {
        ScaledParams scaled{};
        static_cast<HalvesParams&>(scaled) = p;
        scaled.lhs_scales = floats_or_null(call.scales.lhs_group_scales);
        scaled.rhs_scales = floats_or_null(call.scales.rhs_group_scales);
        using Scaled = ScaledRowsProduct<T, Out, kWeights, Shape>;
        return launch_rows_product<Scaled>(grouped_product_sm90<Scaled>, scaled, stream);
      }
    }
    launch_rows_product<Product>(grouped_product_sm90<Product>, p, stream);
  }
}

template <class T, class Out, class Shape>
void launch_shape(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  return call.rhs_axis == 2 ? launch_rows<T, Out, Major::k, Shape>(call, p, stream)
                            : launch_rows<T, Out, Major::mn, Shape>(call, p, stream);
}

template <class T, class Out>
void launch_types(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  const TileChoice& tile = rows_tile_sm90(p.length, sizeof(Out), p.cols);
  if (&tile == &kNarrow) return launch_shape<T, Out, TileOf<kNarrow>>(call, p, stream);
  if constexpr (sizeof(Out) == 2) {
    // Products with scales of groups are kernels of their own, which do without these tiles.
    if (!has_group_scales(call.scales)) {
      if (even_tiles_sm90(p.rows, p.groups, p.length, p.cols)) return launch_even_rows(call, p, stream);
      if (&tile == &kCooperative) return launch_shape<T, Out, CooperativeTile>(call, p, stream);
    }
    if (&tile != &kManySlots) return launch_shape<T, Out, TileOf<kManyStages>>(call, p, stream);
  }
  return launch_shape<T, Out, TileOf<kManySlots>>(call, p, stream);
}

std::string refuses(const GroupedMatmul& c, const Target&) {
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (std::string reason = refuses_16_bit_lhs(c.lhs.dtype); !reason.empty()) return reason;
  if (c.rhs.dtype != c.lhs.dtype) {
    return std::string("takes one operand type; rhs is ") + dtype_name(c.rhs.dtype) + ", lhs " +
           dtype_name(c.lhs.dtype);
  }
  if (c.result.dtype != c.lhs.dtype && c.result.dtype != DType::f32) {
    return std::string("gives the operands' type or float32, not ") + dtype_name(c.result.dtype);
  }
  if (std::string reason = refuses_bias(c.bias, c.lhs.dtype); !reason.empty()) return reason;
  if (!has_plain_operands(c)) return "takes no scales of blocks";
  if (has_group_scales(c.scales) && (c.lhs.dtype != DType::bf16 || c.rhs_axis != 2)) {
    return "takes scales of groups beside bfloat16 operands and weights stored [G, N, K] alone";
  }
  if (c.accumulate) return "does not accumulate into ragged rows";
  // Blocks of k then begin where those of one array do, so sums are added in the same order.
  if (c.rhs_up.present() && c.rhs.dims[c.rhs_axis] % kBlockK != 0) {
    return "contracts weights in two arrays if both are a multiple of 64 deep; rhs is " + describe(c.rhs);
  }
  if (has_group_scales(c.scales) && c.low.present()) {
    return "takes no scales of groups beside a low-rank product: they would multiply its sums as well";
  }
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], n = columns_of(c.result, c.result_half).count;
  return first_of({refuses_low(c.low, c.lhs.dtype, c.rhs_axis), refuses_extents(m, {c.result.dims[1], k}),
                   refuses_16_bytes({{"K", k, 8}, {"N", n, 8}}), refuses_row_tiles(m, c.group_sizes.dims[0], n, 128)});
}

size_t workspace(const GroupedMatmul&, const Target&) { return sizeof(RowDraws); }

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  HalvesParams p{};
  set_matmul(call, context, &p);
  p.length = int32_t(call.lhs.dims[1]);
  const bool wide = call.result.dtype == DType::f32;
  if (call.lhs.dtype == DType::bf16) {
    return wide ? launch_types<__nv_bfloat16, float>(call, p, context.stream)
                : launch_types<__nv_bfloat16, __nv_bfloat16>(call, p, context.stream);
  }
  return wide ? launch_types<__half, float>(call, p, context.stream)
              : launch_types<__half, __half>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_bf16_sm90 = {
    "grouped_matmul_bf16_sm90", Arch::sm90, Kind::special, refuses, workspace, launch, kAlignment, nullptr, true};

}  // namespace grouped
