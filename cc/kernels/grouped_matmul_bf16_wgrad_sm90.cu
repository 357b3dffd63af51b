// Grouped contraction on Hopper, bf16 and fp16: wgrad, [G, A, B], slice g = sum over the rows r of group g of
// outer(lhs[r], rhs[r]). Both operands are read as they lie, row-major, that is MN-major for wgmma.
//
//   sizes --order_groups--> spans, longest group first; counter := 0
//   counter --leader's scheduler--> mailbox of its peer --> both work rings; long and short sums mixed
//            |  an empty group's tiles: zeros, stored by the scheduler at once
//   loader: 64 rows of lhs and rhs by ragged maps; rows past the group's end arrive as zeros in both, whatever follows
//            |  ring of blocks: lhs 64 x 128, rhs 64 x BN; shared tiles multicast to the pair
//            v
//   2 consumer warpgroups: wgmma m64nBNk16, fp32 in registers; a CTA owns a tile and its whole sum
//            |  + what memory holds, fetched into the slots meanwhile; one rounding
//            v
//   [G, A, B], or one address a group
//
//   tile        accumulators   ring         slots           registers, 128 + 256 threads
//   128 x 192   192 a thread   4 x 40 KiB   8 x 4 x 2 KiB   40 / 232
#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/kernel.h"
#include "cc/device/launch.h"
#include "cc/device/pipeline.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

struct alignas(16) GroupSpan {
  int32_t group, rows, end, pad;
};
struct alignas(16) Draws {
  unsigned long long counter;  // of both ends, schedule.cuh
  int64_t mean_rows;           // of a group
};

// ---- groups, longest first ----

// Row counts in buckets of at most 1.6 %: the exponent and six bits of the number of k blocks; 0 for an empty group.
constexpr int kBuckets = 26 * 64;
__device__ inline int bucket(int rows) {
  if (rows == 0) return 0;
  const float blocks = float((rows + kBlockK - 1) / kBlockK);
  return (__float_as_int(blocks) >> 17) - (127 << 6) + 1;
}

// Sum over the block of the values of lower threads; `total` is the sum over all.
__device__ inline int64_t block_scan(int64_t value, int64_t* of_warp, int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const int64_t up = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += up;
  }
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int w = 0; w < int(blockDim.x) / 32; ++w) {
    if (w < warp) before += of_warp[w];
    all += of_warp[w];
  }
  __syncthreads();
  *total = all;
  return before + sum - value;
}

constexpr int kOrderThreads = 1024;

// One block. Groups of one bucket come in any order: which tile is computed when has no influence on its bits.
__global__ void __launch_bounds__(kOrderThreads) order_groups(const int32_t* sizes, int groups, int64_t max_rows,
                                                              GroupSpan* spans, GroupSpan* unordered, Draws* draws) {
  __shared__ int32_t start[kBuckets];
  __shared__ int64_t of_warp[kOrderThreads / 32];
  for (int i = threadIdx.x; i < kBuckets; i += kOrderThreads) start[i] = 0;
  __syncthreads();
  int64_t rows_before = 0;
  for (int first = 0; first < groups; first += kOrderThreads) {
    const int g = first + threadIdx.x;
    const int64_t size = g < groups && sizes[g] > 0 ? sizes[g] : 0;
    int64_t total;
    const int64_t begin = rows_before + block_scan(size, of_warp, &total);
    rows_before += total;
    const int64_t from = begin < max_rows ? begin : max_rows, end = begin + size < max_rows ? begin + size : max_rows;
    if (g >= groups) continue;
    unordered[g] = {g, int32_t(end - from), int32_t(end), 0};
    atomicAdd(&start[bucket(int(end - from))], 1);
  }
  if (threadIdx.x == 0) *draws = {0, (rows_before < max_rows ? rows_before : max_rows) / groups};
  __syncthreads();
  int64_t after = 0;  // groups in longer buckets
  for (int first = 0; first < kBuckets; first += kOrderThreads) {
    const int i = kBuckets - 1 - first - int(threadIdx.x);
    const int64_t count = i >= 0 ? start[i] : 0;
    int64_t total;
    const int64_t at = after + block_scan(count, of_warp, &total);
    after += total;
    if (i >= 0) start[i] = int32_t(at);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < groups; g += kOrderThreads) {
    const GroupSpan span = unordered[g];
    spans[atomicAdd(&start[bucket(span.rows)], 1)] = span;
  }
}

// ---- the product ----

struct ContractionParams {
  CUtensorMap lhs, rhs, out;
  const GroupSpan* spans;
  Draws* draws;
  const int64_t* into_table;  // addresses of the results, 0 skips a group; null where they are packed
  int64_t out_base;           // address that `out` starts at
  int32_t groups, rows, cols;
  bool accumulate;
};

template <class T, class Out, class Shape_>
struct ContractionProduct {
  using Params = ContractionParams;
  using Element = T;
  using Shape = Shape_;
  static constexpr Major kLhsMajor = Major::mn, kRhsMajor = Major::mn;
  static constexpr bool kRaggedSums = true;
  using Rhs = RhsTile<kRhsMajor, Shape::kCols>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t spare, Push push) {
    const int row_tiles = (p.rows + kTileRows - 1) / kTileRows;
    const int col_tiles = (p.cols + Shape::kCols - 1) / Shape::kCols;
    const int per_group = int(pair_count(row_tiles, col_tiles)), items = per_group * p.groups;
    Mailbox pair(rank, mail);
    const Zeros<Out, Shape::kCols> zeros(spare);
    // Rows drawn beyond the mean. Pairs start at different points of the mix, not all with a long sum.
    int64_t surplus = int64_t(p.spans[0].rows) * (blockIdx.x / 2) / (gridDim.x / 2);
    const int64_t mean_rows = p.draws->mean_rows;
    int64_t next = 0;
    const auto draw = [&] {
      if (!pair.leader() || threadIdx.x % 32 != 0) return;
      const uint64_t step = surplus > 0 ? kFromBack : kFromFront;
      next = drawn_item(atomicAdd(&p.draws->counter, step), step, items);
    };
    draw();
    while (true) {
      const int64_t item = pair.share(next);
      if (item < 0) break;
      const int4 packed = __ldg(reinterpret_cast<const int4*>(p.spans + int(item) / per_group));
      const GroupSpan span = {packed.x, packed.y, packed.z, 0};
      surplus += span.rows - mean_rows;
      draw();  // one ahead
      Work work{};
      work.slice2 = span.group;
      if (p.into_table != nullptr) {
        const uint64_t address = uint64_t(p.into_table[span.group]);
        if (address == 0) continue;
        const Slice slice = slice_of(address - uint64_t(p.out_base));
        work.slice2 = slice.near;
        work.slice3 = slice.far;
      }
      const Tile tile = pair_at(int(item) % per_group, row_tiles, col_tiles, rank);
      work.kind = Work::kTile;
      work.length = span.rows;
      work.row0 = tile.row * kTileRows;
      work.col0 = tile.col * Shape::kCols;
      work.valid_rows = p.rows - work.row0;
      work.across = tile.across;
      work.group = span.group;
      work.rows = span.rows;
      work.end = span.end;
      if (span.rows != 0) {
        push(work);
      } else if (!p.accumulate) {
        zeros.store(&p.out, at(work, 0), work.valid_rows, p.cols - work.col0);
      }
    }
    push(Work{});
    zeros.finish();
  }

  static __device__ void load(const Params& p, const Work& work, int k, int halves, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t row = kRagged - work.rows + k;
    load_lhs<0>(&p.lhs, {{work.row0, row, kRagged, work.end}}, halves, work.across, rank, to, full);
    if (columns)
      Rhs::load(&p.rhs, {{work.col0, row, kRagged, work.end}}, work.across, rank, to + 2 * kBlockBytes, full);
  }

  using Epilogue = Held<Out, Shape::kSlots>;
  static __device__ Epilogue begin(const Params& p, const Work& work, int row, int cols,
                                   const Slots<Shape::kSlots>& slots) {
    Epilogue held(&p.out, at(work, row), work.valid_rows - row, cols, Shape::kCols);
    if (p.accumulate) held.begin(slots);
    return held;
  }

  static __device__ ptx::Coords at(const Work& work, int row) {
    return {{work.col0, work.row0 + row, work.slice2, work.slice3}};
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    store_rows<Out, Shape::kCols, Shape::kSlots>(acc, &p.out, at(work, row), cols, slots, p.accumulate, held,
                                                 [](int, float (&)[4]) {});
  }

  static __device__ void clear_tail(const Params&, const Work&, uint32_t, int) {}
};

using Shape = TileShape<kManySlots.cols, kManySlots.stages, kManySlots.slots>;

template <class T, class Out>
void launch_types(const GroupedMatmul& call, ContractionParams p, void* stream) {
  using Product = ContractionProduct<T, Out, Shape>;
  using Rhs = typename Product::Rhs;
  constexpr int kBytes = Shape::kSharedBytes;
  allow_shared_memory<grouped_product_sm90<Product>>(kBytes);
  const DType in = call.lhs.dtype, out = call.result.dtype;
  // Without rows nothing is loaded, but a map wants an address.
  const bool empty = call.lhs.dims[0] == 0;
  const int64_t lhs_first = columns_of(call.lhs, call.lhs_half).first;
  const int64_t rhs_first = columns_of(call.rhs, call.rhs_half).first;
  p.lhs = tensor_map(empty ? static_cast<const void*>(p.spans) : call.lhs.as<const T>() + lhs_first, in,
                     ragged_shape(p.rows, call.lhs.dims[1], in), 64, 64);
  p.rhs = tensor_map(empty ? static_cast<const void*>(p.spans) : call.rhs.as<const T>() + rhs_first, in,
                     ragged_shape(p.cols, call.rhs.dims[1], in), Rhs::kBoxCols, Rhs::kBoxRows);
  p.out = tensor_map(
      reinterpret_cast<const void*>(p.out_base), out,
      p.into_table != nullptr ? scattered_shape(p.rows, p.cols, out) : packed_shape(p.groups, p.rows, p.cols, out),
      128 / sizeof(Out), 16);
  const int row_tiles = (p.rows + kTileRows - 1) / kTileRows, col_tiles = (p.cols + Shape::kCols - 1) / Shape::kCols;
  const int64_t items = pair_count(row_tiles, col_tiles) * p.groups, pairs = multiprocessors() / 2;
  const unsigned grid = 2 * unsigned(items < pairs ? items : pairs);
  grouped_product_sm90<Product><<<grid, kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

std::string refuses(const GroupedMatmul& c, const Target& target) {
  if (target.platform != Platform::cuda || target.sm != 90 || !target.sm_a) return "needs an sm_90a GPU";
  if (!c.contract_rows) return "is for a contraction over rows; this call has ragged rows";
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
  const int64_t m = c.lhs.dims[0], a = columns_of(c.lhs, c.lhs_half).count, b = columns_of(c.rhs, c.rhs_half).count;
  if (m >= kRagged) return "takes fewer than 2^30 rows";
  if (a >= kRagged || b >= kRagged) return "takes fewer than 2^30 columns";
  if (a % 8 != 0) return "needs lhs rows of a multiple of 16 bytes: A = " + std::to_string(a) + " is no multiple of 8";
  if (b % 8 != 0) return "needs rhs rows of a multiple of 16 bytes: B = " + std::to_string(b) + " is no multiple of 8";
  if (pair_count(int((a + kTileRows - 1) / kTileRows), int((b + 127) / 128)) * c.group_sizes.dims[0] >= kMaxItems) {
    return "takes fewer than 2^31 pairs of tiles";
  }
  return "";
}

size_t workspace(const GroupedMatmul& c, const Target&) {
  return sizeof(GroupSpan) * 2 * size_t(c.group_sizes.dims[0]) + sizeof(Draws);  // spans, unordered spans
}

void launch(const GroupedMatmul& call, const Context& context) {
  ContractionParams p{};
  p.groups = int32_t(call.group_sizes.dims[0]);
  GroupSpan* spans = static_cast<GroupSpan*>(context.workspace);
  p.spans = spans;
  p.draws = reinterpret_cast<Draws*>(spans + 2 * p.groups);
  p.into_table = call.into_table.present() ? call.into_table.as<int64_t>() : nullptr;
  // Scattered results are addressed relative to any mapped address.
  p.out_base = reinterpret_cast<int64_t>(p.into_table != nullptr ? context.workspace : call.result.data);
  p.rows = int32_t(columns_of(call.lhs, call.lhs_half).count);
  p.cols = int32_t(columns_of(call.rhs, call.rhs_half).count);
  p.accumulate = call.accumulate != 0;
  order_groups<<<1, kOrderThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(
      call.group_sizes.as<int32_t>(), p.groups, call.lhs.dims[0], spans, spans + p.groups, p.draws);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  const bool wide = call.result.dtype == DType::f32;
  if (call.lhs.dtype == DType::bf16) {
    return wide ? launch_types<__nv_bfloat16, float>(call, p, context.stream)
                : launch_types<__nv_bfloat16, __nv_bfloat16>(call, p, context.stream);
  }
  return wide ? launch_types<__half, float>(call, p, context.stream)
              : launch_types<__half, __half>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_bf16_wgrad_sm90 = {"grouped_matmul_bf16_wgrad_sm90", refuses, workspace,
                                                              launch, kAlignment};

}  // namespace grouped
