// Grouped contraction on Hopper, bf16 and fp16: wgrad, [G, A, B], slice g = sum over the rows r of group g of
// outer(lhs[r], rhs[r]). Both operands are read as they are in memory, row-major, that is MN-major for wgmma.
//
//   sizes --order_groups--> spans, longest group first; counter := 0
//   counter --leader's scheduler--> mailbox of its peer --> both work rings; long and short sums mixed
//            |  an empty group's tiles: zeros, stored by the scheduler at once
//   loader: 64 rows of lhs and rhs by ragged maps; rows past the group's end arrive as zeros in both, whatever follows
//            |  ring of blocks: lhs 64 x 128, rhs 64 x BN; shared tiles multicast to the pair
//            v
//   2 consumer warpgroups: wgmma m64nBNk16, fp32 in registers; a CTA owns a tile and its whole sum
//            |  + what memory holds, fetched into the slots meanwhile, or added to it in L2 (float32 of long sums); one
//            |  rounding
//            v
//   [G, A, B], or one address per group
//
//   tile        accumulators     ring         slots           registers, 128 + 256 threads
//   128 x 192   192 per thread   4 x 40 KiB   8 x 4 x 2 KiB   40 / 232
//   128 x 192   192 per thread   5 x 40 KiB   8 x 1 x 2 KiB   40 / 232    some results that are only stored
//   128 x 64    64 per thread    7 x 24 KiB   8 x 2 x 2 KiB   40 / 232    few columns
#include <algorithm>

#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/kernel.h"
#include "cc/api/operands.h"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/product_launch.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

template <class T, class Out, class Shape_>
struct ContractionProduct {
  using Params = ContractionParams;
  using Element = T;
  using Shape = Shape_;
  static constexpr Major kLhsMajor = Major::mn, kRhsMajor = Major::mn;
  static constexpr bool kRaggedSums = true, kOneStore = false;
  using Rhs = RhsTile<kRhsMajor, Shape::kCols>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t spare, Push push) {
    schedule_contraction<Out, Shape::kCols>(
        p, rank, mail, spare,
        [](Work& work, const GroupSpan& span) {
          work.length = span.rows;
          work.rows = span.rows;
          work.end = span.end;
        },
        push);
  }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t row = kRagged - work.rows + k;
    load_lhs<0>(&p.lhs, {{work.row0, row, kRagged, work.end}}, boxes, work.across, rank, to, full);
    if (columns)
      Rhs::load(&p.rhs, {{work.col0, row, kRagged, work.end}}, work.across, rank, to + 2 * kBlockBytes, full);
  }

  using Epilogue = Held<Out, Shape::kSlots>;
  static __device__ Epilogue begin(const Params& p, const Work& work, int row, int cols,
                                   const Slots<Shape::kSlots>& slots) {
    Epilogue held(&p.out, contraction_at(work, row), work.valid_rows - row, cols, Shape::kCols,
                  sizeof(Out) == 4 ? p.fetched(work.rows) : kAllSlices);
    if (p.accumulate) held.begin(slots);
    return held;
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    store_or_add<Out, Shape::kCols>(acc, &p.out, contraction_at(work, row), cols, slots, p.accumulate, held,
                                    [](int, float (&)[4]) {});
  }

  static __device__ void clear_tail(const Params&, const Work&, uint32_t, int) {}
};

// The same with sums that are only stored, which one slot allows.
template <class T, class Shape_>
struct StoredContractionProduct : ContractionProduct<T, T, Shape_> {
  using typename ContractionProduct<T, T, Shape_>::Params;
  using Epilogue = NothingHeld;
  static __device__ Epilogue begin(const Params&, const Work&, int, int, const Slots<Shape_::kSlots>&) { return {}; }
  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape_::kCols / 2],
                               Slots<Shape_::kSlots>& slots, Epilogue& held) {
    store_part<T, Shape_::kCols>(acc, &p.out, contraction_at(work, row), cols, slots, held, [](int, float (&)[4]) {});
  }
};

// The same with sums that are multiplied by their group's scales before anything is added: of widened operands.
struct ScaledContractionParams : ContractionParams {
  const float* lhs_scales;  // [groups], or null
  const float* rhs_scales;
};

template <class T, class Out, class Shape_>
struct ScaledContractionProduct : ContractionProduct<T, Out, Shape_> {
  using Params = ScaledContractionParams;
  using Base = ContractionProduct<T, Out, Shape_>;
  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape_::kCols / 2],
                               Slots<Shape_::kSlots>& slots, typename Base::Epilogue& held) {
    const float factor = device::group_factor(p.lhs_scales, p.rhs_scales, work.group);
#pragma unroll
    for (int i = 0; i < Shape_::kCols / 2; ++i) acc[i] *= factor;
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

template <const TileChoice& kChoice>
using TileOf = TileShape<kChoice.cols, kChoice.stages, kChoice.slots>;

template <class Product>
void map_rows(const GroupedMatmul& call, ContractionParams* p) {
  using T = typename Product::Element;
  using Rhs = typename Product::Rhs;
  // Without rows nothing is loaded, but a map wants an address.
  const bool empty = call.lhs.dims[0] == 0;
  const auto map = [&](const TensorView& rows, int64_t half, uint32_t box_cols, uint32_t box_rows) {
    const Columns columns = columns_of(rows, half);
    return tensor_map(empty ? static_cast<const void*>(p->spans) : rows.as<const T>() + columns.first, rows.dtype,
                      ragged_shape(columns.count, rows.dims[1], rows.dtype), box_cols, box_rows);
  };
  p->lhs = map(call.lhs, call.lhs_half, 64, 64);
  p->rhs = map(call.rhs, call.rhs_half, Rhs::kBoxCols, Rhs::kBoxRows);
}

template <class T, class Out, class Shape>
void launch_shape(const GroupedMatmul& call, ContractionParams p, void* stream) {
  using Product = ContractionProduct<T, Out, Shape>;
  map_rows<Product>(call, &p);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (has_group_scales(call.scales)) {
      ScaledContractionParams scaled{};
      static_cast<ContractionParams&>(scaled) = p;
      scaled.lhs_scales = floats_or_null(call.scales.lhs_group_scales);
      scaled.rhs_scales = floats_or_null(call.scales.rhs_group_scales);
      using Scaled = ScaledContractionProduct<T, Out, Shape>;
      return launch_contraction<Scaled>(grouped_product_sm90<Scaled>, scaled, stream);
    }
  }
  launch_contraction<Product>(grouped_product_sm90<Product>, p, stream);
}

template <class T>
void launch_stored(const GroupedMatmul& call, ContractionParams p, void* stream) {
  using Product = StoredContractionProduct<T, TileOf<kManyStages>>;
  map_rows<Product>(call, &p);
  launch_contraction<Product>(grouped_product_sm90<Product>, p, stream);
}

template <class T, class Out>
void launch_types(const GroupedMatmul& call, const ContractionParams& p, void* stream) {
  if (p.cols <= kNarrow.cols) return launch_shape<T, Out, TileOf<kNarrow>>(call, p, stream);
  if constexpr (std::is_same_v<T, Out>) {
    const bool only_stored = !p.accumulate && !has_group_scales(call.scales);
    if (only_stored && many_stages_for_sums_sm90(call.lhs.dims[0], p.groups)) return launch_stored<T>(call, p, stream);
  }
  return launch_shape<T, Out, TileOf<kManySlots>>(call, p, stream);
}

std::string refuses(const GroupedMatmul& c, const Target&) {
  if (!c.contract_rows) return "is for a contraction over rows; this call has ragged rows";
  if (std::string reason = refuses_16_bit_lhs(c.lhs.dtype); !reason.empty()) return reason;
  if (c.rhs.dtype != c.lhs.dtype) {
    return std::string("takes one operand type; rhs is ") + dtype_name(c.rhs.dtype) + ", lhs " +
           dtype_name(c.lhs.dtype);
  }
  if (c.result.dtype != c.lhs.dtype && c.result.dtype != DType::f32) {
    return std::string("gives the operands' type or float32, not ") + dtype_name(c.result.dtype);
  }
  if (!has_plain_operands(c) || c.segment) return "takes no scales of blocks and no segments";
  if (has_group_scales(c.scales) && c.lhs.dtype != DType::bf16) {
    return "takes scales of groups beside bfloat16 operands alone";
  }
  const int64_t m = c.lhs.dims[0], a = columns_of(c.lhs, c.lhs_half).count, b = columns_of(c.rhs, c.rhs_half).count;
  return first_of({refuses_extents(m, {a, b}), refuses_16_bytes({{"A", a, 8}, {"B", b, 8}}),
                   refuses_contraction_tiles(a, c.group_sizes.dims[0], b, 128)});
}

// Long sums leave L2 room for one operand of a group. If all its columns fit, they are read from memory once when tiles
// go column by column, group by group; short sums mix long and short ones instead.
void keep_columns_near(ContractionParams* p, int64_t rows_of_all) {
  constexpr int64_t kNear = 24 << 20;  // bytes
  const int64_t rows = rows_of_all / std::max(p->groups, 1);
  if (rows < kLongSum || rows * p->cols * 2 > kNear) return;
  p->window = 1;
  p->in_order = true;
}

size_t workspace(const GroupedMatmul& c, const Target&) { return contraction_workspace(c.group_sizes.dims[0]); }

void launch(const GroupedMatmul& call, const Context& context) {
  ContractionParams p{};
  set_contraction<false>(call, call.lhs.dims[0], columns_of(call.lhs, call.lhs_half).count,
                         columns_of(call.rhs, call.rhs_half).count, context, &p);
  p.fetched = {5, kAllSlices};  // of the 12 slices in a whole tile
  keep_columns_near(&p, call.lhs.dims[0]);
  const bool wide = call.result.dtype == DType::f32;
  if (call.lhs.dtype == DType::bf16) {
    return wide ? launch_types<__nv_bfloat16, float>(call, p, context.stream)
                : launch_types<__nv_bfloat16, __nv_bfloat16>(call, p, context.stream);
  }
  return wide ? launch_types<__half, float>(call, p, context.stream)
              : launch_types<__half, __half>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_bf16_wgrad_sm90 = {
    "grouped_matmul_bf16_wgrad_sm90", Arch::sm90, Kind::special, refuses, workspace, launch, kAlignment};

}  // namespace grouped
