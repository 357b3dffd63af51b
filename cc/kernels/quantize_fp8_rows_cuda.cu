// FP8 codes of bf16 or fp16 values in blocks along rows, of 128 (fp32 scales) or 32 (MXFP8), where rows alone are
// wanted: ragged ones, or those of weights. Such a scale concerns one row, so groups do not matter, but for where the
// last one ends.
//
// A warp takes one strip of 8 rows x 256 columns, 8 columns of each row a lane, and is done: the grid is as large as
// the source, columns fastest, and a block is 8 warps that know nothing of each other.
//
//     sizes  --32 at a time, two sums over the warp--> the first row that no group owns
//                                                          |
//     source --8 x ld.global.nc, 16 bytes a lane --> 32 registers; zeros from that row on and past the width
//        --> amaxes of 8 rows, two a word --> over 16 lanes (4 for blocks of 32), scattered so that each lane finds the
//            scale of one row (two) --> factors back by shuffles --> codes, 8 bytes a row and lane
//
// No shared memory, no barrier, no workspace. 64 registers, so that 4 blocks an SM have 128 KiB under way: by
// estimate several times what the latency of memory asks for, so there is room for every warp to read the sizes again.
// Meant to be bound by memory: 3.03 bytes a value, and about 10 issue slots in time for 21.
#include <string>

#include "cc/api/operands.h"
#include "cc/device/store_fp8.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kBlocksOfSm = 4;

// Rows that groups own, by a whole warp: no more than `rows`, fewer than 2^31.
__device__ inline int rows_of_groups(const int32_t* sizes, int count, int rows) {
  int64_t sum = 0;
  for (int g = threadIdx.x % 32; g < count; g += 32) sum += max(sizes[g], 0);
  const uint32_t mine = static_cast<uint32_t>(min(sum, int64_t{rows}));
  // Halves, so that no sum needs more than 32 bits.
  const int64_t low = __reduce_add_sync(~0u, mine & 0xFFFFu), high = __reduce_add_sync(~0u, mine >> 16);
  return static_cast<int>(min(low + (high << 16), int64_t{rows}));
}

// Of `rows` rows, those of all weights in turn.
template <bool kBf16, int kBlock>
__global__ void __launch_bounds__(kStoreThreads, kBlocksOfSm)
    store_strips(const __grid_constant__ StoreProblem p, int rows, uint32_t column_strips) {
  if (p.skip && *p.skip != 0) return;
  const Strip at;
  const uint32_t item = blockIdx.x * kStoreWarps + threadIdx.x / 32, row_strip = item / column_strips;
  const int first = static_cast<int>(row_strip) * Strip::kRows;
  if (first >= rows) return;
  const int column = static_cast<int>(item - row_strip * column_strips) * Strip::kColumns;
  StoreTile tile = {};
  tile.source = first;
  tile.rows = min(rows - first, Strip::kRows);
  tile.column = column;
  tile.columns = min(static_cast<int>(p.width) - column, Strip::kColumns);
  const int end = p.ragged ? rows_of_groups(p.sizes, p.scan.count, rows) : rows;
  const int count = at.column < tile.columns ? end - first : 0;  // rows of this thread that have values
  const char* from = static_cast<const char*>(p.source) + 2 * (first * p.width + column + at.column);
  uint4 raw[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    raw[i] = i < count ? __ldg(reinterpret_cast<const uint4*>(from + 2 * i * p.width)) : uint4{};
  }
  float factors[kVector];
  row_factors<kBf16, kBlock, Strip>(p, tile, raw, factors);
  const StoredForm& form = p.forms[0];
  with_type(p.type, [&](auto type) {
    put_rows<decltype(type), kBf16, Strip>(tile, raw, form.values + tile.source * form.pitch + tile.column, form.pitch,
                                           tile.rows, [&](int i, int) { return factors[i]; });
  });
}

int64_t rows_of(const Quantize& call) {
  return call.group_sizes.present() ? call.source.dims[0] : call.source.dims[0] * call.source.dims[1];
}

int64_t column_strips_of(const Quantize& call) {
  return divide_up(call.source.dims[call.source.rank - 1], Strip::kColumns);
}

int64_t strips_of(const Quantize& call) { return divide_up(rows_of(call), Strip::kRows) * column_strips_of(call); }

std::string refuses(const Quantize& call, const Target& target) {
  const std::string reason = refuses_tiles(call, target);
  if (!reason.empty()) return reason;
  if (call.cross_values.present()) return "stores rows alone";
  const DType type = call.values.dtype;
  if (!is_fp8(type)) return std::string("gives FP8, not ") + dtype_name(type);
  if (call.rule != "fp32" && call.rule != "e8m0") return "has no rule " + call.rule;
  if (call.block != (call.rule == "fp32" ? 128 : 32) || call.block_outer != 1) {
    return "takes blocks of 128, of 32 with E8M0 scales, along rows";
  }
  if (call.amax.present()) return "finds no amaxes of groups";
  if (strips_of(call) >= kMostRows) return "takes fewer than 2^31 strips of 8 x 256 values";
  return "";
}

size_t workspace(const Quantize&, const Target&) { return 0; }

template <bool kBf16, int kBlock>
void run(const Quantize& call, const Context& context) {
  const int64_t strips = strips_of(call);
  if (strips == 0) return;
  store_strips<kBf16, kBlock><<<static_cast<unsigned>(divide_up(strips, kStoreWarps)), kStoreThreads, 0,
                                static_cast<cudaStream_t>(context.stream)>>>(
      store_problem(call, context), static_cast<int>(rows_of(call)), static_cast<uint32_t>(column_strips_of(call)));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <bool kBf16>
void run_block(const Quantize& call, const Context& context) {
  if (call.block == 32) return run<kBf16, 32>(call, context);
  run<kBf16, 128>(call, context);
}

void launch(const Quantize& call, const Context& context) {
  if (call.source.dtype == DType::bf16) return run_block<true>(call, context);
  run_block<false>(call, context);
}

}  // namespace

const Kernel<Quantize> quantize_fp8_rows_cuda = {"quantize_fp8_rows_cuda", refuses, workspace, launch, kAlignment};

}  // namespace grouped
