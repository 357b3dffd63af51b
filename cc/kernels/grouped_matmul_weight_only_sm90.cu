// Few rows against quantised weights on Hopper: bf16 rows [M, K], weights [G, N, K] of E4M3 or E2M1 codes, which stream
// through the chip once and are widened in registers. What counts is the rate of memory.
//
//   arrange_rows    rows -> workspace: blocks of 8 rows of one group, zero-filled, in the order in which tensor cores
//                   read them (few_rows.cuh)
//   stream_weights  256 weight rows by up to 24 or 48 rows per tile, or 192 by up to 24 or 96; 1 block per SM. Larger
//                   groups take several tiles of even height. Starts before rows are arranged (stream_weights.cuh).
#include <algorithm>
#include <string>
#include <utility>

#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/common/launch.h"
#include "cc/device/sm90/stream_weights.cuh"
#include "cc/device/sm90/tensor_map.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;
using Params = FewRowsParams;

constexpr int64_t kMostRows = 256;  // a group, on average

Scale scale_of(const GroupedMatmul& c) {
  if (!c.scales.rhs_block) return Scale::none;
  return c.scales.rhs_scales.dtype == DType::f32    ? Scale::f32
         : c.scales.rhs_scales.dtype == DType::e8m0 ? Scale::e8m0
                                                    : Scale::e4m3;
}

// Slabs of k; those of whole stages.
int64_t slabs_of(int64_t k, int a_stage) { return (k + a_stage * kSlabK - 1) / (a_stage * kSlabK) * a_stage; }

int64_t mean_rows(const GroupedMatmul& c) { return c.rows_hint ? c.rows_hint : c.lhs.dims[0] / c.group_sizes.dims[0]; }
// With fp32 scales any number: widened weights would be float32.
bool few_rows(const GroupedMatmul& c) { return scale_of(c) == Scale::f32 || mean_rows(c) <= kMostRows; }

template <class S>
void launch_shape(const GroupedMatmul& call, Params p, cudaStream_t stream) {
  const MapShape shape = packed_shape(call.rhs.dims[0], call.rhs.dims[1], call.rhs.dims[2], DType::u8);
  p.codes = tensor_map(call.rhs.data, DType::u8, shape, S::C::kRowBytes, S::kTileCols);
  if constexpr (S::kScaleLines) {
    const TensorView& scales = call.scales.rhs_scales;
    p.scale_boxes =
        tensor_map(scales.data, DType::u8, packed_shape(scales.dims[0], scales.dims[1], scales.dims[2], DType::u8),
                   kScaleLineBytes, S::kTileCols);
  }
  p.tile_cols = S::kTileCols;
  p.slabs = static_cast<int>(slabs_of(call.lhs.dims[1], S::kSlabs));
  const int64_t pieces = int64_t{p.slabs} * p.most_blocks, at_once = int64_t{kArrangeBlocks} * multiprocessors();
  p.arrange_slabs =
      static_cast<int>(std::clamp<int64_t>((pieces + at_once - 1) / at_once, kArrangeTogether, kArrangeSlabs));
  const int64_t runs = (pieces + p.arrange_slabs - 1) / p.arrange_slabs;
  constexpr auto kArrange = arrange_rows<S::kNibbles, S::kWideCache>;
  prefer_shared_memory<kArrange>(S::kSharedBytes);
  kArrange<<<static_cast<unsigned>(runs), kArrangeThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  allow_shared_memory<stream_weights<S>>(S::kBytes);
  prefer_shared_memory<stream_weights<S>>(S::kSharedBytes);
  const int64_t col_tiles = (p.cols + S::kTileCols - 1) / S::kTileCols;
  const int64_t most = (p.most_blocks + int64_t{S::kBlocks - 1} * p.groups) / S::kBlocks * col_tiles;
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(most, 1, multiprocessors()));
  launch_early(stream_weights<S>, grid, S::kThreads, S::kBytes, stream, p);
}

// Of tiles of kTileCols columns, if each group has rows of one tile: the columns that the busiest multiprocessor makes,
// and then those that a row of tiles makes, with what is behind the last.
template <int kTileCols>
std::pair<int64_t, int64_t> cols_made(const Params& p) {
  const int64_t row = (p.cols + kTileCols - 1) / kTileCols, tiles = row * std::min<int64_t>(p.groups, p.rows);
  return {(tiles + multiprocessors() - 1) / multiprocessors() * kTileCols, row * kTileCols};
}

// 256 weight rows by up to 48 rows, or 192 by up to 96, where a group usually has as many: a code is widened once for
// all of them. With 4-bit codes, and so few rows that 24 are enough for most groups, stages of two slabs, and 192
// weight rows where the busiest multiprocessor is done earlier with them or, as early, fewer columns are made for
// nothing.
template <bool kNibbles, Scale kScale>
void launch_scale(const GroupedMatmul& call, const Params& p, cudaStream_t stream) {
  if constexpr (kNibbles) {
    if (mean_rows(call) <= 18) {
      using Narrow = StreamShape<true, kScale, 12, 2>;
      using Wide = StreamShape<true, kScale, 16, 2>;
      const bool narrow = cols_made<Narrow::kTileCols>(p) < cols_made<Wide::kTileCols>(p);
      return narrow ? launch_shape<Narrow>(call, p, stream) : launch_shape<Wide>(call, p, stream);
    }
  }
  if (mean_rows(call) <= (kScale == Scale::f32 ? 22 : 36)) {
    launch_shape<StreamShape<kNibbles, kScale, 16>>(call, p, stream);
  } else {
    launch_shape<StreamShape<kNibbles, kScale, 12>>(call, p, stream);
  }
}
// With tensor copies of scales, where each column has a line of its own and all are at multiples of 16 bytes.
template <bool kNibbles, Scale kScale, Scale kLines>
void launch_lines(const GroupedMatmul& call, const Params& p, cudaStream_t stream) {
  const uintptr_t starts = reinterpret_cast<uintptr_t>(p.scales) | static_cast<uintptr_t>(p.scale_line_bytes);
  starts % kScaleLineBytes == 0 && p.scale_outer == 1 ? launch_scale<kNibbles, kLines>(call, p, stream)
                                                      : launch_scale<kNibbles, kScale>(call, p, stream);
}

constexpr int64_t kMostCols = 256;  // of an item: 16 for each of at most 16 warps

std::string refuses(const GroupedMatmul& c, const Target&) {
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (c.lhs.dtype != DType::bf16 || c.scales.lhs_block || c.scales.lhs_group_scales.present()) {
    return "takes plain rows of bfloat16, not " + describe(c.lhs);
  }
  const bool nibbles = c.rhs.dtype == DType::u8;
  if (c.rhs.dtype != DType::e4m3fn && !nibbles) return "takes weights of E4M3 or E2M1 codes, not " + describe(c.rhs);
  if (c.rhs_axis != 2 || c.rhs_table.present() || c.rhs_up.present()) return "takes weights as one array [G, N, K]";
  if (c.result_half) return "makes all columns of a result";
  if (c.batch_invariant) return "is chosen by the number of rows, which must not show in a row's bits";
  const Scale scale = scale_of(c);
  const int64_t block = c.scales.rhs_block, k = c.lhs.dims[1], n = c.result.dims[1], groups = c.group_sizes.dims[0];
  const bool known = nibbles ? (scale == Scale::e8m0 && block == 32) || (scale == Scale::e4m3 && block == 16)
                             : scale == Scale::none || (scale == Scale::e8m0 && block == 32) ||
                                   (scale == Scale::f32 && block == kSlabK);
  if (!known) return "takes no blocks of " + std::to_string(block) + " with " + describe(c.scales.rhs_scales);
  if (!is_plain(c.result.dtype) || (c.bias.present() && !is_plain(c.bias.dtype))) {
    return "gives float32, bfloat16 or float16 and takes biases of these";
  }
  if (c.accumulate) return "does not accumulate into ragged rows";
  if (groups > kMostGroups) return "takes at most " + std::to_string(kMostGroups) + " groups";
  if (!few_rows(c)) return "is for few rows per group";
  if (k % (nibbles ? 32 : 16) != 0) return "needs rows of codes of a multiple of 16 bytes: K = " + std::to_string(k);
  if (n % 8 != 0) return "needs result rows of a multiple of 16 bytes: N = " + std::to_string(n);
  if ((c.lhs.dims[0] / kBlockRows + 2 * groups) * (n / 128 + 1) > INT32_MAX) return "takes fewer than 2^31 tiles";
  if (const TensorView& s = c.scales.rhs_scales; s.present()) {  // the lines of an item have 32-bit offsets
    const int64_t line = s.dims[2] * scale_bytes(scale), lines = std::min<int64_t>(s.dims[1], kMostCols);
    if (line * lines > INT32_MAX) return "takes lines of scales below 2^31 bytes for each " + std::to_string(lines);
  }
  if (c.lhs.dims[0] > INT32_MAX / 2 || k > INT32_MAX / 2 || n > INT32_MAX / 2) return "takes dimensions below 2^30";
  return "";
}

int most_blocks(const GroupedMatmul& c) {
  return static_cast<int>((c.lhs.dims[0] + int64_t{kBlockRows - 1} * c.group_sizes.dims[0]) / kBlockRows);
}

size_t workspace(const GroupedMatmul& c, const Target&) {
  return static_cast<size_t>(slabs_of(c.lhs.dims[1], kMostSlabs) * most_blocks(c) * kRowBlockBytes);
}

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  Params p{};
  const bool nibbles = call.rhs.dtype == DType::u8;
  const Scale scale = scale_of(call);
  p.sizes = call.group_sizes.as<const int32_t>();
  p.lhs = call.lhs.as<const uint8_t>();
  p.arranged = static_cast<uint8_t*>(context.workspace);
  p.factors = floats_or_null(call.scales.rhs_group_scales);
  p.bias = call.bias.present() ? call.bias.as<const uint8_t>() : nullptr;
  p.bias_table = call.bias_table.present() ? call.bias_table.as<const int64_t>() : nullptr;
  p.row_scale = floats_or_null(call.row_scale);
  p.result = call.result.as<uint8_t>();
  p.rows = call.lhs.dims[0];
  p.most_blocks = most_blocks(call);
  p.groups = static_cast<int>(call.group_sizes.dims[0]);
  p.cols = static_cast<int>(call.result.dims[1]);
  p.depth = static_cast<int>(call.lhs.dims[1]);
  if (const TensorView& s = call.scales.rhs_scales; s.present()) {
    p.scales = s.as<const uint8_t>();
    p.scale_lines = static_cast<int>(s.dims[1]);
    p.scale_line_bytes = static_cast<int>(s.dims[2]) * scale_bytes(scale);
    p.scale_outer = static_cast<int>(call.scales.rhs_block_outer);
    const uintptr_t starts = reinterpret_cast<uintptr_t>(p.scales) | static_cast<uintptr_t>(p.scale_line_bytes);
    p.scale_alignment = starts % 8 == 0 ? 8 : starts % 4 == 0 ? 4 : 1;
  }
  p.result_type = call.result.dtype;
  p.bias_type = call.bias.present() ? call.bias.dtype : DType::f32;
  p.scale_bias = call.scale_bias != 0;
  p.clear_tail = !call.into.present();
  if (nibbles) {
    return scale == Scale::e8m0 ? launch_lines<true, Scale::e8m0, Scale::e8m0_lines>(call, p, stream)
                                : launch_lines<true, Scale::e4m3, Scale::e4m3_lines>(call, p, stream);
  }
  if (scale == Scale::none) return launch_scale<false, Scale::none>(call, p, stream);
  return scale == Scale::e8m0 ? launch_lines<false, Scale::e8m0, Scale::e8m0_lines>(call, p, stream)
                              : launch_scale<false, Scale::f32>(call, p, stream);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_weight_only_sm90 = {"grouped_matmul_weight_only_sm90",
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
