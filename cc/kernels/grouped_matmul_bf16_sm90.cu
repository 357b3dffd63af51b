// Grouped rows on Hopper, bf16 and fp16: forward and dgrad, [M, N] = rows of lhs [M, K] times the weight of their
// group, which lies as [G, K, N] or [G, N, K] (wgmma reads either major, nothing is transposed).
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
//   tile        accumulators   ring         slots           registers, 128 + 256 threads
//   128 x 192   192 a thread   5 x 40 KiB   8 x 1 x 2 KiB   40 / 232    long sums
//   128 x 192   192 a thread   4 x 40 KiB   8 x 4 x 2 KiB   40 / 232    short sums
//   128 x 64    64 a thread    7 x 24 KiB   8 x 2 x 2 KiB   40 / 232    few columns
#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/kernel.h"
#include "cc/api/operands.h"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/rows_matmul.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

// The same with sums that are multiplied by their group's scales first: of widened operands, whose weights lie as [G,
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
    const float factor = device::group_factor(p.lhs_scales, p.rhs_scales, work.group);
#pragma unroll
    for (int i = 0; i < Shape_::kCols / 2; ++i) acc[i] *= factor;
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

template <const TileChoice& kChoice>
using TileOf = TileShape<kChoice.cols, kChoice.stages, kChoice.slots>;

template <class Product>
void launch_product(const typename Product::Params& p, int64_t row_tiles, void* stream) {
  launch_pairs<grouped_product_sm90<Product>, Product>(p, kThreads, row_tiles, Product::Shape::kCols, stream);
}

template <class T, class Out, Major kWeights, class Shape>
void launch_rows(const GroupedMatmul& call, HalvesParams p, int64_t row_tiles, void* stream) {
  using Product = RowsProduct<T, Out, kWeights, Shape>;
  using Rhs = typename Product::Rhs;
  const int64_t k = call.lhs.dims[1], n = p.cols, groups = p.groups;
  const int64_t rhs_k = call.rhs.dims[call.rhs_axis];
  const int64_t rhs_rows = kWeights == Major::k ? n : rhs_k, rhs_cols = kWeights == Major::k ? rhs_k : n;
  const MapShape rhs_shape = p.rhs_table != nullptr ? scattered_shape(rhs_rows, rhs_cols, call.rhs.dtype)
                                                    : packed_shape(groups, rhs_rows, rhs_cols, call.rhs.dtype);
  p.lhs = tensor_map(call.lhs.data, call.lhs.dtype, ragged_shape(k, call.lhs.dtype), 64, 64);
  p.rhs =
      tensor_map(reinterpret_cast<const void*>(p.rhs_base), call.rhs.dtype, rhs_shape, Rhs::kBoxCols, Rhs::kBoxRows);
  p.first_depth = int32_t(rhs_k);
  p.low = low_maps(call.low, groups, Rhs::kBoxCols, Rhs::kBoxRows, &p.length);
  if (call.rhs_up.present()) {
    p.rhs_up = tensor_map(call.rhs_up.data, call.rhs.dtype, rhs_shape, Rhs::kBoxCols, Rhs::kBoxRows);
  }
  p.out = tensor_map(call.result.as<Out>() + p.first_col, call.result.dtype,
                     ragged_shape(n, p.width, call.result.dtype), 128 / sizeof(Out), 16);
  if constexpr (kWeights == Major::k && std::is_same_v<T, __nv_bfloat16>) {
    if (has_group_scales(call.scales)) {
      ScaledParams scaled{};
      static_cast<HalvesParams&>(scaled) = p;
      scaled.lhs_scales = floats_or_null(call.scales.lhs_group_scales);
      scaled.rhs_scales = floats_or_null(call.scales.rhs_group_scales);
      return launch_product<ScaledRowsProduct<T, Out, kWeights, Shape>>(scaled, row_tiles, stream);
    }
  }
  launch_product<Product>(p, row_tiles, stream);
}

template <class T, class Out, class Shape>
void launch_shape(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  const int64_t row_tiles = most_row_tiles(p.rows, p.groups);
  return call.rhs_axis == 2 ? launch_rows<T, Out, Major::k, Shape>(call, p, row_tiles, stream)
                            : launch_rows<T, Out, Major::mn, Shape>(call, p, row_tiles, stream);
}

template <class T, class Out>
void launch_types(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  const TileChoice& tile = rows_tile_sm90(p.length, sizeof(Out), p.cols);
  if (&tile == &kNarrow) return launch_shape<T, Out, TileOf<kNarrow>>(call, p, stream);
  if constexpr (sizeof(Out) == 2) {
    if (&tile == &kManyStages) return launch_shape<T, Out, TileOf<kManyStages>>(call, p, stream);
  }
  return launch_shape<T, Out, TileOf<kManySlots>>(call, p, stream);
}

std::string refuses(const GroupedMatmul& c, const Target&) {
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (c.lhs.dtype != DType::bf16 && c.lhs.dtype != DType::f16) {
    return std::string("takes bfloat16 and float16; lhs is ") + dtype_name(c.lhs.dtype);
  }
  if (c.rhs.dtype != c.lhs.dtype) {
    return std::string("takes one operand type; rhs is ") + dtype_name(c.rhs.dtype) + ", lhs " +
           dtype_name(c.lhs.dtype);
  }
  if (c.result.dtype != c.lhs.dtype && c.result.dtype != DType::f32) {
    return std::string("gives the operands' type or float32, not ") + dtype_name(c.result.dtype);
  }
  if (c.bias.present() && c.bias.dtype != c.lhs.dtype && c.bias.dtype != DType::f32) {
    return std::string("takes a bias of the operands' type or float32, not ") + dtype_name(c.bias.dtype);
  }
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
  const std::string low = refuses_low(c.low, c.lhs.dtype, c.rhs_axis);
  if (!low.empty()) return low;
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], n = columns_of(c.result, c.result_half).count;
  if (m >= kRagged) return "takes fewer than 2^30 rows";
  if (c.result.dims[1] >= kRagged || k >= kRagged) return "takes fewer than 2^30 columns";
  if (k % 8 != 0) return "needs lhs rows of a multiple of 16 bytes: K = " + std::to_string(k) + " is no multiple of 8";
  if (n % 8 != 0)
    return "needs result rows of a multiple of 16 bytes: N = " + std::to_string(n) + " is no multiple of 8";
  if ((m / kTileRows + c.group_sizes.dims[0]) * ((n + 127) / 128) >= kMaxItems) {
    return "takes fewer than 2^31 pairs of tiles";
  }
  return "";
}

size_t workspace(const GroupedMatmul&, const Target&) { return sizeof(unsigned long long); }

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  HalvesParams p{};
  p.sizes = call.group_sizes.as<int32_t>();
  p.counter = static_cast<unsigned long long*>(context.workspace);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(p.counter, 0, sizeof(*p.counter), static_cast<cudaStream_t>(context.stream)));
  p.rhs_table = call.rhs_table.present() ? call.rhs_table.as<int64_t>() : nullptr;
  p.rhs_base = reinterpret_cast<int64_t>(p.rhs_table != nullptr ? call.lhs.data : call.rhs.data);
  p.bias = call.bias.present() ? call.bias.data : nullptr;
  p.bias_table = call.bias_table.present() ? call.bias_table.as<int64_t>() : nullptr;
  p.float_bias = call.bias.present() && call.bias.dtype == DType::f32;
  p.row_scale = call.row_scale.present() ? call.row_scale.as<float>() : nullptr;
  p.result = call.result.as<uint8_t>();
  p.rows = call.lhs.dims[0];
  p.groups = int32_t(call.group_sizes.dims[0]);
  const Columns made = columns_of(call.result, call.result_half);
  p.cols = int32_t(made.count);
  p.first_col = int32_t(made.first);
  p.width = int32_t(call.result.dims[1]);
  p.length = int32_t(call.lhs.dims[1]);
  p.scale_bias = call.scale_bias != 0;
  p.clear_tail = !call.into.present();
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
