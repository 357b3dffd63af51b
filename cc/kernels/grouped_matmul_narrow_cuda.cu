// Products with one narrow side on any GPU since sm_80, bf16 and fp16: those of low-rank adapters, with at most 32
// columns, or 32 rows or columns of a weight's gradient. They do little arithmetic; what counts is the rate at which
// the wide operand arrives.
//
//   scan      one block: offsets and tile prefix into the workspace
//   multiply  128 threads, 2 or 3 blocks per multiprocessor of Hopper, which draw tiles from a counter. A tile is
//             64 rows and all of K, or, in a contraction, 128 columns of the wide operand and all rows of a group
//     copies ahead --cp.async--> ring of (wide 64 x 128 as in memory, 16 KiB; narrow, 2 to 8 KiB)
//                  --ldmatrix--> 16 x C or 32 x C per warp, mma m16n8k16, C = 16 or 32
//     the next tile's first stages are copied while the last tile is stored through the last stage
//     74 to 119 registers of 168: 8 to 32 sums, fragments, the rest addresses
//
//   form      wide operand   narrow operand     result                       depth, stages   shared memory, C = 16, 32
//   rows      [tokens, K]    [C, K] or [K, C]   [tokens, C]                  128, 3          60, 72 KiB
//   sums      [rows, 128]    [rows, C]          [128, C], transposed: [C, 128]   64, 4           72, 80 KiB
//
// In either form a stage has 64 lines of 256 bytes: with lines of 128 bytes products over rows took 6 to 12 % more
// time. One block owns a tile and its whole contraction. In which order a sum is added depends neither on M nor on G,
// so every call is batch invariant; on Hopper its bits are those of wgmma, which a test holds.
#include <algorithm>
#include <string>
#include <utility>

#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/operands.h"
#include "cc/device/common/early_launch.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/narrow_tiles.cuh"
#include "cc/device/common/portable_tiles.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = kNarrowThreads;

// What one thread copies of an operand. A stage holds kLines lines of kChunks chunks. kAlong: the depth of a product
// runs along the lines, else across them.
template <int kLines, int kChunks, bool kAlong>
class Copier {
 public:
  Copier() = default;
  // `extent`: existing lines if depth runs along them, else existing elements of each.
  __device__ Copier(const char* data, int64_t stride, int extent) {
    line_ = threadIdx.x / kChunks, chunk_ = threadIdx.x % kChunks;
    at_ = data + line_ * stride + chunk_ * 16;
    exists_ = kAlong ? extent : extent > chunk_ * kChunk ? kLines : 0;
  }

  // Fills this thread's part of the stage at `to` of which `depth` elements exist, with zeros behind them, and moves
  // on.
  __device__ void copy(uint32_t to, int depth, int64_t stride) {
    const int lines = kAlong ? (depth > chunk_ * kChunk ? exists_ : 0) : min(depth, exists_);
    to += chunk_offset<kChunks>(line_, chunk_);
    const char* from = at_;
#pragma unroll
    for (int i = 0; i < kLines / kStep; ++i, from += kStep * stride) {
      copy_async<16>(to + i * (kThreads * 16), from, line_ + i * kStep < lines ? 16 : 0);
    }
    at_ += kAlong ? kChunks * 16 : kLines * stride;
  }

 private:
  static constexpr int kStep = kThreads / kChunks;  // lines
  static_assert(kLines % kStep == 0 && kStep % 8 == 0, "the swizzle of all lines of a thread is the same");

  const char* at_;
  int line_, chunk_;
  int exists_;  // lines
};

template <class T, int kNarrow, Form kForm>
struct Narrow {
  using Tile = NarrowTile<T, kNarrow, kForm>;
  using Sums = typename Tile::Sums;
  static constexpr bool kWideAlong = Tile::kWideAlong;
  static constexpr int kDepth = Tile::kDepth;
  static constexpr int kStageBytes = kWideBytes + Tile::kNarrowBytes;
  static constexpr int kStages = kWideAlong ? 3 : 4, kStagesAhead = kStages - 1;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kBlocks = kBytes <= 72 * 1024 ? 3 : 2;  // a multiprocessor of Hopper

  // Both operands of one tile on their way into the ring, stage after stage.
  struct Copies {
    Copier<kWideLines, kWideChunks, kWideAlong> wide;
    Copier<Tile::kNarrowLines, Tile::kNarrowChunks, Tile::kNarrowAlong> narrow;
    int depth;  // to copy

    Copies() = default;
    __device__ Copies(const Problem& p, const Place& at)
        : wide(lhs_at(p, at), p.lhs_stride * 2, at.rows),
          narrow(rhs_at(p, at), p.rhs_stride * 2, at.cols),
          depth(at.depth) {}

    // Behind the end nothing is copied, but an empty group is committed, so that waits keep counting.
    __device__ void copy_stage(uint32_t stage, const Problem& p) {
      if (depth > 0) {
        wide.copy(stage, depth, p.lhs_stride * 2);
        narrow.copy(stage + kWideBytes, depth, p.rhs_stride * 2);
      }
      commit_copies();
      depth -= kDepth;
    }
  };

  static __device__ void contract(const Problem& p, Copies* copies, uint32_t ring, int depth, Sums& sums) {
    const uint32_t end = ring + kBytes;
    uint32_t use = ring, fill = ring + kStagesAhead * kStageBytes;
#pragma unroll 1
    for (; depth > 0; depth -= kDepth) {
      wait_copies<kStagesAhead - 1>();
      __syncthreads();  // the stage is there, and all have read the one that is filled now
      copies->copy_stage(fill, p);
      Tile::add_block(use, use + kWideBytes, sums);
      fill = use;
      use += kStageBytes;
      if (use == end) use = ring;
    }
  }
};

// Where the tile of a transposed result goes: all rows of a gradient, 128 of its columns.
__device__ Finish finish_transposed(const Problem& p, const Place& at) {
  Finish f = {};
  f.result = result_of(p, at.group) + at.first_row * bytes_of(p.result_type);
  f.result_stride = p.rows;
  f.result_type = p.result_type;
  f.factor = at.depth == 0 ? 1.0f : group_factor(p.lhs_factors, p.rhs_factors, at.group);
  f.rows = at.cols;
  f.cols = at.rows;
  f.vectors = aligned(f.result);
  f.accumulate = p.accumulate;
  return f;
}

template <class Product, bool kTransposed>
__global__ void __launch_bounds__(kThreads, Product::kBlocks) multiply_narrow(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) char ring[];
  __shared__ int64_t next;  // tile
  using Tile = typename Product::Tile;
  using Ends = Drain<Tile, kTransposed>;
  static_assert(kNarrowWarps * Ends::kFloats * 4 <= Product::kStageBytes,
                "the stage that is not copied early is enough");
  const auto finish = [&](const Place& at) { return kTransposed ? finish_transposed(p, at) : finish_at(p, at); };
  const uint32_t stages = shared_address(ring);
  float* staged = reinterpret_cast<float*>(ring + Product::kStagesAhead * Product::kStageBytes);
  typename Product::Sums sums;
  Place summed;  // the tile whose sums are to be stored
  bool has_sums = false;
  if (threadIdx.x == 0) next = blockIdx.x;
  wait_for_launch_before();
  for (;;) {
    __syncthreads();  // the ring is free
    Place at;
    const Found found = find_tile<kMostNarrow, Tile::kTile>(p, next, &at);
    const bool sums_follow = found == Found::tile && at.depth > 0;
    typename Product::Copies copies;
    if (sums_follow) {
      copies = typename Product::Copies(p, at);
#pragma unroll 1
      for (int i = 0; i < Product::kStagesAhead; ++i) copies.copy_stage(stages + i * Product::kStageBytes, p);
    }
    int64_t drawn = 0;
    if (threadIdx.x == 0) drawn = atomicAdd(reinterpret_cast<unsigned long long*>(p.scan.drawn), 1ull);
    if (has_sums) Ends::store(finish(summed), sums, staged + threadIdx.x / 32 * Ends::kFloats);
    if (found == Found::end) return;
    if (found == Found::tile && at.depth == 0)
      write_zeros<kTransposed ? Tile::kTile : kMostNarrow>(finish(at), kThreads);
    __syncthreads();  // the stage of staged sums is free, and all know their tile
    if (threadIdx.x == 0) next = gridDim.x + drawn;
    summed = at;
    has_sums = sums_follow;
    if (!sums_follow) continue;
    Tile::clear(sums);
    Product::contract(p, &copies, stages, at.depth, sums);
  }
}

// Whether the narrow operand of a contraction is its left one. Operands are then exchanged, and the result is stored
// transposed.
bool transposes(const GroupedMatmul& call) {
  return call.contract_rows && columns_of(call.rhs, call.rhs_half).count > kMostNarrow;
}

std::string refuses(const GroupedMatmul& call, const Target&) {
  const DType type = call.lhs.dtype;
  if ((type != DType::bf16 && type != DType::f16) || call.rhs.dtype != type) {
    return "takes two operands of bfloat16, or two of float16, got " + describe(call.lhs) + " and " +
           describe(call.rhs);
  }
  if (std::string reason = device::refuses_ends(call); !reason.empty()) return reason;
  if (call.rhs_up.present()) return "takes a weight in one array";
  const int64_t left = columns_of(call.lhs, call.lhs_half).count;  // K of products over rows
  const int64_t right =
      call.contract_rows ? columns_of(call.rhs, call.rhs_half).count : call.rhs.dims[3 - call.rhs_axis];
  if ((call.contract_rows ? std::min(left, right) : right) > kMostNarrow) {
    return "is for products with at most " + std::to_string(kMostNarrow) +
           " columns, and for gradients with as many rows or columns";
  }
  if (left % kChunk != 0 || right % kChunk != 0) return "needs rows of a multiple of 16 bytes";
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    for (int i = 0; i < t->rank; ++i) {
      if (t->dims[i] > INT32_MAX / 2) return "takes dimensions below 2^30, got " + describe(*t);
    }
  }
  return "";
}

template <class Product, bool kTransposed>
void launch_product(const GroupedMatmul& call, const Context& context) {
  constexpr int kTile = Product::Tile::kTile;
  Problem p = problem_of(call, context, kTile, kMostNarrow);
  if (kTransposed) {
    std::swap(p.lhs, p.rhs);
    std::swap(p.lhs_stride, p.rhs_stride);
    std::swap(p.lhs_factors, p.rhs_factors);
    std::swap(p.rows, p.cols);
    p.row_tiles = tiles_of(p.rows, kTile);
    p.col_tiles = 1;
  }
  const int64_t tiles = most_tiles(p, kTile);
  if (tiles == 0) return;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  launch_scan(call.group_sizes.as<const int32_t>(), p.tokens, kTile, !call.into.present(), p.scan, stream);
  constexpr auto kKernel = multiply_narrow<Product, kTransposed>;
  allow_shared_memory<kKernel>(Product::kBytes);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, Product::kBlocks * multiprocessors()));
  if (context.target.sm >= 90) return launch_early(kKernel, blocks, kThreads, Product::kBytes, stream, p);
  kKernel<<<blocks, kThreads, Product::kBytes, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <class T, int kNarrow>
void launch_form(const GroupedMatmul& call, const Context& context) {
  if (transposes(call)) return launch_product<Narrow<T, kNarrow, Form::sums>, true>(call, context);
  if (call.contract_rows) return launch_product<Narrow<T, kNarrow, Form::sums>, false>(call, context);
  if (call.rhs_axis == 2) return launch_product<Narrow<T, kNarrow, Form::k_major>, false>(call, context);
  launch_product<Narrow<T, kNarrow, Form::n_major>, false>(call, context);
}

template <class T>
void launch_type(const GroupedMatmul& call, const Context& context) {
  const int64_t cols = transposes(call)     ? columns_of(call.lhs, call.lhs_half).count
                       : call.contract_rows ? columns_of(call.rhs, call.rhs_half).count
                                            : call.rhs.dims[3 - call.rhs_axis];
  return cols <= 16 ? launch_form<T, 16>(call, context) : launch_form<T, 32>(call, context);
}

void launch(const GroupedMatmul& call, const Context& context) {
  return call.lhs.dtype == DType::bf16 ? launch_type<__nv_bfloat16>(call, context) : launch_type<__half>(call, context);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_narrow_cuda = {
    "grouped_matmul_narrow_cuda", Arch::cuda, Kind::special, refuses, scan_bytes, launch, kAlignment};

}  // namespace grouped
