// fp32 operands on Hopper's tensor cores, in the recipe's modes tf32 and tf32x3 (numerics 2.5): forward and dgrad,
// [M, N] = rows of lhs [M, K] times the weight of their group ([G, K, N] or [G, N, K]), and wgrad, [G, A, B], the sum
// over a group's rows of outer(lhs[r], rhs[r]). Operands are read as they are in memory; what wgmma cannot read is
// transposed on the chip. Where tiles of wgrad are few, its sums are cut into parts (tiles_sm90.h).
//
//   counter --scheduler--> work ring;  sizes --scan--> groups (wgrad: offsets of a scan in front)
//   loader: raw fp32 blocks, 256 rows and 96 or 128 columns x 32 k, by ragged, packed or scattered maps
//            |                                        |
//            v rhs: splitter warpgroup, in place      v lhs: straight to registers
//   2 consumer warpgroups: wgmma m64nBNk8, fp32 in registers (pipeline_tf32.cuh has barriers and budgets)
//            |  + bias, * row scale; wgrad + what memory holds; slots of 16 rows in shared memory
//            v
//   ragged store, clipped at the group's last row; tail rows cleared as items behind the last tile
//   wgrad in parts: partial sums in the workspace --add_parts--> + what memory holds, transposed if needed --> result
#include <utility>

#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/kernel.h"
#include "cc/api/operands.h"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/sm90/add_parts.cuh"
#include "cc/device/sm90/pipeline_tf32.cuh"
#include "cc/device/sm90/product_launch.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

// Draws items in order: the first is the block's own, the next ones whoever comes first.
class Draw {
 public:
  __device__ explicit Draw(unsigned long long* counter) : counter_(counter), next_(blockIdx.x) {}
  // Called by a whole warp; one ahead, so that no warp waits for the counter.
  __device__ int64_t take() {
    const int64_t item = __shfl_sync(~0u, next_, 0);
    if (threadIdx.x % 32 == 0) next_ = int64_t(atomicAdd(counter_, 1ull)) + gridDim.x;
    return item;
  }

 private:
  unsigned long long* counter_;
  int64_t next_;
};

// An item is a pair of 128-row tiles (schedule.cuh): here one tile of 256 rows, or the odd last row tile's two columns.
template <class Shape, class Push>
__device__ inline void push_pair(Work work, int item, int row_tiles, int rows, int cols, Push push) {
  const int col_tiles = (cols + Shape::kCols - 1) / Shape::kCols;
  const Tile tile = pair_at(item, row_tiles, col_tiles, 0);
  work.kind = Work::kTile;
  work.row0 = tile.row * kTileRows;
  work.valid_rows = rows - work.row0;
  for (int col = tile.col; col <= tile.col + int(tile.across) && col < col_tiles; ++col) {
    work.col0 = col * Shape::kCols;
    push(work);
  }
}

// ---- ragged rows ----

struct Tf32RowsParams : MatmulParams {
  CUtensorMap rhs_up;   // of a second array of weights, whose k follow those of the first
  int32_t first_depth;  // k of the first, a multiple of 32 where there is a second; else all
  DType bias_type;
};

// A bias of any wide type.
struct WideBias {
  static __device__ int64_t bytes(const Tf32RowsParams& p) { return p.bias_type == DType::f32 ? 4 : 2; }
  static __device__ float value(const Tf32RowsParams& p, const char* bias, int i) {
    return device::load_value(bias, p.bias_type, i);
  }
};

template <Major kWeights, int kTerms>
struct RowsProduct {
  using Params = Tf32RowsParams;
  using Shape = Tf32Shape<kTerms>;
  static constexpr Major kLhsMajor = Major::k, kRhsMajor = kWeights;
  struct Rhs {  // boxes of 32 k, as many bytes as 64 elements of 16 bits
    static constexpr uint32_t kBoxCols = 64, kBoxRows = kWeights == Major::k ? Shape::kCols : kTf32K;
  };

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t, Push push) {
    RowScan<> scan(p.sizes, p.groups, p.rows, (p.cols + Shape::kCols - 1) / Shape::kCols);
    Draw draw(&p.draws->items);
    while (true) {
      const FoundItem found = scan.find(draw.take());
      Work work{};
      if (found.tile) {
        set_group(p, found, &work);
        push_pair<Shape>(work, found.item, (found.rows + kTileRows - 1) / kTileRows, found.rows, p.cols, push);
      } else {
        const int64_t first = found.end + int64_t(found.item) * kTailRows;
        if (!p.clear_tail || first >= p.rows) break;
        work.kind = Work::kTail;
        work.end = int32_t(first);
        push(work);
      }
    }
    push(Work{});
  }

  static __device__ void load(const Params& p, const Work& work, int k, int units, uint32_t to, uint32_t full) {
    ptx::Coords at = {{k, kRagged - work.rows + work.row0, kRagged, work.end}};
    for (int u = 0; u < units; ++u) {
      ptx::tensor_load(to + u * Shape::kUnitBytes, &p.lhs, at, full);
      at.c[1] += kUnitRows;
    }
    const uint32_t rhs = to + Shape::kLhsBytes;
    const OneOfTwo from = one_of_two(k, p.first_depth);
    const CUtensorMap* map = from.second ? &p.rhs_up : &p.rhs;
    if constexpr (kRhsMajor == Major::k) {
      ptx::tensor_load(rhs, map, {{from.at, work.col0, work.slice2, work.slice3}}, full);
    } else {
      load_boxes(map, {{work.col0, from.at, work.slice2, work.slice3}}, Shape::kCols / kBoxWidth, rhs, full);
    }
  }

  using Epilogue = NothingHeld;
  static __device__ Epilogue begin(const Params&, const Work&, int, int, const Slots<Shape::kSlots>&) { return {}; }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    finish_and_store<WideBias, float, Shape::kCols>(p, work, row, cols, acc, slots, held, [](float (&)[4]) {});
  }

  // Rows [end, end + kTailRows) of the result, by the consumer warps, a warp per row.
  static __device__ void clear_tail(const Params& p, const Work& work, int thread) {
    const int64_t end = p.rows - work.end < kTailRows ? p.rows : work.end + kTailRows;
    for (int64_t row = work.end + thread / 32; row < end; row += kConsumerWarps) {
      float4* to = reinterpret_cast<float4*>(reinterpret_cast<float*>(p.result) + row * p.width + p.first_col);
      for (int i = thread % 32; i < p.cols / 4; i += 32) to[i] = float4{0, 0, 0, 0};
    }
  }
};

// ---- grouped contraction ----

struct Tf32ContractionParams {
  CUtensorMap lhs, rhs, out;
  unsigned long long* counter;  // of drawn items; 0 at the start
  int32_t groups, cols;
  const int64_t* offsets;     // [groups + 1], where groups begin
  const int64_t* into_table;  // addresses of the results, 0 skips a group; null where they are packed
  int64_t out_base;           // address that `out` starts at
  int32_t rows;               // of one group's result
  int32_t parts;              // of each sum; more than one: `out` is [parts * groups, rows, cols], packed
  bool accumulate;            // to what `out` holds; whole sums alone
  bool clear;                 // `out` of groups without rows is set to zero
};
__device__ inline NoPace pace_of(const Tf32ContractionParams&, uint32_t) { return {}; }

template <int kTerms>
struct ContractionProduct {
  using Params = Tf32ContractionParams;
  using Shape = Tf32Shape<kTerms>;
  static constexpr Major kLhsMajor = Major::mn, kRhsMajor = Major::mn;

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t spare, Push push) {
    const int row_tiles = (p.rows + kTf32Rows - 1) / kTf32Rows * (kTf32Rows / kTileRows);  // no odd one goes across
    const int tiles = int(pair_count(row_tiles, (p.cols + Shape::kCols - 1) / Shape::kCols));
    const int64_t items = int64_t(tiles) * p.parts * p.groups;
    const Zeros<float, Shape::kCols> zeros(spare);
    Draw draw(p.counter);
    for (int64_t item = draw.take(); item < items; item = draw.take()) {
      const PartItem drawn = part_at(item, tiles, p.parts);
      Work work{};
      work.group = drawn.group;
      work.part = drawn.part;
      work.slice2 = drawn.part * p.groups + drawn.group;
      if (p.into_table != nullptr) {
        const uint64_t address = uint64_t(p.into_table[work.group]);
        if (address == 0) continue;
        if (p.parts == 1) {
          const Slice slice = slice_of(address - uint64_t(p.out_base));
          work.slice2 = slice.near;
          work.slice3 = slice.far;
        }
      }
      work.end = int32_t(p.offsets[work.group + 1]);
      work.rows = int32_t(work.end - p.offsets[work.group]);
      work.length = kTf32K * blocks_of_part((work.rows + kTf32K - 1) / kTf32K, work.part, p.parts);
      push_pair<Shape>(work, drawn.tile, row_tiles, p.rows, p.cols, [&](const Work& tile) {
        if (tile.length != 0) {
          push(tile);
        } else if (p.clear) {
          for (int row = 0; row < kTf32Rows; row += kTileRows) {
            zeros.store(&p.out, at(tile, row), tile.valid_rows - row, p.cols - tile.col0);
          }
        }
      });
    }
    push(Work{});
    zeros.finish();
  }

  static __device__ void load(const Params& p, const Work& work, int k, int units, uint32_t to, uint32_t full) {
    const int32_t row = kRagged - work.rows + kTf32K * block_of_part(k / kTf32K, work.part, p.parts);
    load_boxes(&p.lhs, {{work.row0, row, kRagged, work.end}}, units * kUnitRows / kBoxWidth, to, full);
    load_boxes(&p.rhs, {{work.col0, row, kRagged, work.end}}, Shape::kCols / kBoxWidth, to + Shape::kLhsBytes, full);
  }

  using Epilogue = Held<float, Shape::kSlots>;
  static __device__ Epilogue begin(const Params& p, const Work& work, int row, int cols,
                                   const Slots<Shape::kSlots>& slots) {
    Epilogue held(&p.out, at(work, row), work.valid_rows - row, cols, Shape::kCols, kAllSlices, 2 * kUnitRows);
    if (p.accumulate) held.begin(slots);
    return held;
  }

  static __device__ ptx::Coords at(const Work& work, int row) {
    return {{work.col0, work.row0 + row, work.slice2, work.slice3}};
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    store_or_add<float, Shape::kCols>(acc, &p.out, at(work, row), cols, slots, p.accumulate, held,
                                      [](int, float (&)[4]) {});
  }

  static __device__ void clear_tail(const Params&, const Work&, int) {}
};

// ---- the kernel object ----

template <class Product>
void launch_product(const typename Product::Params& p, int64_t items, cudaStream_t stream) {
  constexpr int kBytes = Product::Shape::kSharedBytes;
  allow_shared_memory<grouped_product_tf32_sm90<Product>>(kBytes);
  const unsigned grid = unsigned(items < multiprocessors() ? items : multiprocessors());
  grouped_product_tf32_sm90<Product><<<grid, kTf32Threads, kBytes, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

int64_t made_cols(const GroupedMatmul& c) {
  return c.contract_rows ? c.result.dims[2] : columns_of(c.result, c.result_half).count;
}

// 128-row tiles that any sizes can give: every group may have one that is not full.
int64_t most_row_tiles(const GroupedMatmul& c) {
  const int64_t groups = c.group_sizes.dims[0];
  return c.contract_rows ? groups * ((c.result.dims[1] + kTileRows - 1) / kTileRows)
                         : c.lhs.dims[0] / kTileRows + groups;
}

template <class Product>
void launch_rows(const GroupedMatmul& call, const Context& context) {
  using Rhs = typename Product::Rhs;
  constexpr int kCols = Product::Shape::kCols;
  Tf32RowsParams p{};
  set_matmul(call, context, &p);
  p.length = int32_t(call.lhs.dims[1]);
  p.bias_type = call.bias.dtype;
  p.first_depth = int32_t(call.rhs.dims[call.rhs_axis]);
  map_operands<Rhs>(call, &p);
  map_result(call, &p);
  if (call.rhs_up.present()) p.rhs_up = map_of_weights<Rhs>(call.rhs_up, call.rhs_up.data, false);
  launch_product<Product>(p, most_row_tiles(call) * ((p.cols + kCols - 1) / kCols),
                          static_cast<cudaStream_t>(context.stream));
}

SumCut cut_of(const GroupedMatmul& c) {
  if (c.batch_invariant) return {1, false};
  // By the width of whole operands, also where a half is read: the bits are those of the gradient in one piece.
  const int tile_cols = c.fp32_mode == "tf32" ? Tf32Shape<1>::kCols : Tf32Shape<3>::kCols;
  return cut_sums_sm90(c.group_sizes.dims[0], c.lhs.dims[1], c.rhs.dims[1], tile_cols);
}

// The workspace: the counter of items; of contractions also the scan of the sizes and, of cut sums, their parts.
struct Room {
  static constexpr size_t kScanAt = align_up(sizeof(RowDraws));
  size_t parts_at, bytes;

  static Room of(const GroupedMatmul& c) {
    if (!c.contract_rows) return {kScanAt, kScanAt};
    const size_t parts_at = kScanAt + GroupScan::bytes(c.group_sizes.dims[0]);
    const int parts = cut_of(c).parts;
    return {parts_at, parts_at + (parts > 1 ? size_t(parts) * size_t(c.result.bytes()) : 0)};
  }
};

template <int kTerms>
void launch_contraction(const GroupedMatmul& call, const Context& context) {
  constexpr int kCols = Tf32Shape<kTerms>::kCols;
  static_assert(kTf32Rows == kTallRows);
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  char* const memory = static_cast<char*>(context.workspace);
  Tf32ContractionParams p{};
  p.counter = zeros_or_clear(context, static_cast<unsigned long long*>(context.workspace));
  p.groups = int32_t(call.group_sizes.dims[0]);
  const GroupScan scan = GroupScan::at(memory + Room::kScanAt, p.groups);
  launch_scan(call.group_sizes.as<const int32_t>(), call.lhs.dims[0], kTileRows, false, scan, stream);
  p.offsets = scan.offsets;
  p.into_table = call.into_table.present() ? call.into_table.as<int64_t>() : nullptr;
  const SumCut cut = cut_of(call);
  const bool whole = cut.parts == 1, accumulate = call.accumulate != 0;
  p.parts = cut.parts;
  p.accumulate = whole && accumulate;
  p.clear = whole && !accumulate;
  struct Operand {
    const TensorView* rows;
    Columns columns;
  };
  Operand lhs{&call.lhs, columns_of(call.lhs, call.lhs_half)}, rhs{&call.rhs, columns_of(call.rhs, call.rhs_half)};
  if (cut.transposed) std::swap(lhs, rhs);
  p.rows = int32_t(lhs.columns.count);
  p.cols = int32_t(rhs.columns.count);
  const DType f32 = DType::f32;
  const auto map_of = [&](const Operand& x) {
    // Without rows nothing is loaded, but a map wants an address.
    const void* from = x.rows->dims[0] == 0 ? context.workspace : x.rows->as<float>() + x.columns.first;
    return tensor_map(from, f32, ragged_shape(x.columns.count, x.rows->dims[1], f32), kBoxWidth, kTf32K);
  };
  p.lhs = map_of(lhs);
  p.rhs = map_of(rhs);
  // Scattered results are addressed relative to any mapped address.
  const bool scattered = whole && p.into_table != nullptr;
  float* const sums = reinterpret_cast<float*>(memory + Room::of(call).parts_at);
  const void* out = scattered ? memory : whole ? call.result.data : sums;
  p.out_base = reinterpret_cast<int64_t>(out);
  p.out = tensor_map(
      out, f32,
      scattered ? scattered_shape(p.rows, p.cols, f32) : packed_shape(int64_t{p.parts} * p.groups, p.rows, p.cols, f32),
      kBoxWidth, kOutRows);
  launch_product<ContractionProduct<kTerms>>(p, p.parts * p.groups * tall_tiles_sm90(p.rows, p.cols, kCols), stream);
  if (whole) return;
  launch_add_parts({sums, p.offsets, p.into_table, call.result.as<float>(), p.parts, p.groups, p.rows, p.cols, kTf32K,
                    cut.transposed, accumulate},
                   stream);
}

template <int kTerms>
void launch_terms(const GroupedMatmul& call, const Context& context) {
  if (call.contract_rows) return launch_contraction<kTerms>(call, context);
  return call.rhs_axis == 2 ? launch_rows<RowsProduct<Major::k, kTerms>>(call, context)
                            : launch_rows<RowsProduct<Major::mn, kTerms>>(call, context);
}

std::string refuses(const GroupedMatmul& c, const Target&) {
  for (const TensorView* t : {&c.lhs, &c.rhs}) {
    if (t->dtype != DType::f32) return "takes two operands of float32, got " + describe(*t);
  }
  if (!has_plain_operands(c) || has_group_scales(c.scales) || c.segment) return "takes no scaled operands";
  if (c.fp32_mode != "tf32" && c.fp32_mode != "tf32x3") {
    return "multiplies in tf32 and tf32x3; this call wants " + c.fp32_mode;
  }
  if (c.result.dtype != DType::f32) return "gives float32, not " + describe(c.result);
  if (c.bias.present() && !device::is_wide(c.bias.dtype)) {
    return "takes a bias of float32, bfloat16 or float16, got " + describe(c.bias);
  }
  if (c.accumulate && !c.contract_rows) return "does not accumulate into ragged rows";
  if (c.rhs_up.present() && c.rhs.dims[c.rhs_axis] % kTf32K != 0) {
    return "contracts a weight in two arrays if both are a multiple of 32 deep; rhs is " + describe(c.rhs);
  }
  const int64_t inner = made_cols(c), m = c.lhs.dims[0];
  const int64_t k = c.contract_rows ? c.result.dims[1] : c.lhs.dims[1];
  const std::string reason =
      first_of({refuses_extents(m, {k, inner}), refuses_16_bytes({{"K", k, 4}, {"N", inner, 4}})});
  if (!reason.empty()) return reason;
  constexpr int64_t kNarrowest = Tf32Shape<3>::kCols;
  if (most_row_tiles(c) * ((inner + kNarrowest - 1) / kNarrowest) >= kMaxItems) return "takes fewer than 2^31 tiles";
  return "";
}

size_t workspace(const GroupedMatmul& c, const Target&) { return Room::of(c).bytes; }

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dims[0] == 0 && !call.contract_rows) return;
  return call.fp32_mode == "tf32" ? launch_terms<1>(call, context) : launch_terms<3>(call, context);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_fp32_sm90 = {
    "grouped_matmul_fp32_sm90", Arch::sm90, Kind::special, refuses, workspace, launch, kAlignment};

}  // namespace grouped
