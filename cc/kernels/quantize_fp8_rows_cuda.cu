// FP8 codes of bf16, fp16 or fp32 values in blocks along rows, of 128 (fp32 scales) or 32 (MXFP8), where rows alone are
// wanted: ragged ones, or those of weights, each in strips of its own. Such a scale concerns one row, so groups do not
// matter, but for where the last one ends, or where a list says that a weight is.
//
// A warp takes one strip of 8 rows x 256 columns, 8 columns of each row a lane, and is done: the grid is as large as
// the source, columns fastest, and a block is 8 warps that know nothing of each other.
//
//     sizes  --32 at a time, two sums over the warp--> the first row that no group owns
//                                                          |
//     source --8 x ld.global.nc, 16 bytes per lane --> 32 registers; zeros from that row on and past the width
//        --> amaxes of 8 rows, two per word --> over 16 lanes (4 for blocks of 32), scattered so that each lane finds
//            the scale of one row (two) --> factors back by shuffles --> codes, 8 bytes per row and lane
//
// Gathered rows: eight lanes find a row each, and all load from there.
//
// No shared memory, no barrier, no workspace. 64 registers, so that 4 blocks per SM have 128 KiB under way: by
// estimate several times what the latency of memory asks for, so there is room for every warp to read the sizes again.
// Meant to be bound by memory: 3.03 bytes per value, and about 10 issue slots in time for 21. Of fp32 values per lane
// reads 32 bytes of a row by two loads, the second out of the L1 cache; 2 blocks of 128 registers have as many bytes
// under way.
#include <string>

#include "cc/api/operands.h"
#include "cc/device/quantize/fp8_tile.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

template <DType kFrom>
constexpr int kBlocksOfSm = kFrom == DType::f32 ? 2 : 4;

// Rows that groups own, by a whole warp: no more than `rows`, fewer than 2^31.
__device__ inline int rows_of_groups(const int32_t* sizes, int count, int rows) {
  int64_t sum = 0;
  for (int g = threadIdx.x % 32; g < count; g += 32) sum += max(sizes[g], 0);
  const uint32_t mine = static_cast<uint32_t>(min(sum, int64_t{rows}));
  // Halves, so that no sum needs more than 32 bits.
  const int64_t low = __reduce_add_sync(~0u, mine & 0xFFFFu), high = __reduce_add_sync(~0u, mine >> 16);
  return static_cast<int>(min(low + (high << 16), int64_t{rows}));
}

// Eight values of a lane, if they exist.
__device__ inline void take(const char* from, bool exists, uint4* v) {
  *v = exists ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
}
__device__ inline void take(const char* from, bool exists, Floats8* v) {
  take(from, exists, &v->low);
  take(from + sizeof(uint4), exists, &v->high);
}
template <DType kFrom>
__device__ inline void take_singly(const char* from, Eight<kFrom>* v) {
  if constexpr (kFrom == DType::f32) {
    *v = {load_singly<kFrom>(from), load_singly<kFrom>(from + sizeof(uint4))};
  } else {
    *v = load_singly<kFrom>(from);
  }
}

// `strips` of 8 rows: of ragged rows, or `each` of one weight after the other.
template <DType kFrom, int kBlock>
__global__ void __launch_bounds__(kStoreThreads, kBlocksOfSm<kFrom>)
    store_strips(const __grid_constant__ StoreProblem p, uint32_t strips, uint32_t each, uint32_t column_strips) {
  if (p.skip && *p.skip != 0) return;
  const Strip at;
  const uint32_t item = blockIdx.x * kStoreWarps + threadIdx.x / 32, strip = item / column_strips;
  if (strip >= strips) return;
  const int rows = static_cast<int>(p.rows), weight = static_cast<int>(strip / each);
  const int first = static_cast<int>(strip - weight * each) * Strip::kRows;  // of the rows, or of a weight's
  const int column = static_cast<int>(item - strip * column_strips) * Strip::kColumns;
  StoreTile tile = {};
  tile.source = weight * p.rows + first;
  tile.rows = min(rows - first, Strip::kRows);
  tile.column = column;
  tile.columns = min(static_cast<int>(p.width) - column, Strip::kColumns);
  const int end = p.ragged ? rows_of_groups(p.sizes, p.scan.count, rows) : rows;
  const int count = at.column < tile.columns ? end - first : 0;  // rows of this thread that have values
  const int64_t pitch = kBytes<kFrom> * p.width;
  const char* from = p.table ? reinterpret_cast<const char*>(p.table[weight])
                             : static_cast<const char*>(p.source) + weight * p.rows * pitch;
  const bool vectors = has_vectors(from);
  from += kBytes<kFrom> * int64_t{column + at.column};
  const char* const lines = from + first * pitch;  // where rows are not gathered
  Eight<kFrom> raw[kVector];
  if (p.gather.places) {
    const int lane = threadIdx.x % 32, own = lane < min(end - first, kVector) ? p.gather.row(first + lane) : -1;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int row = __shfl_sync(~0u, own, i);
      take(from + max(row, 0) * pitch, row >= 0 && at.column < tile.columns, &raw[i]);
    }
  } else if (vectors) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) take(lines + i * pitch, i < count, &raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      raw[i] = {};
      if (i < count) take_singly<kFrom>(lines + i * pitch, &raw[i]);
    }
  }
  float factors[kVector];
  row_factors<kFrom, kBlock, Strip>(p, tile, raw, factors);
  const QuantizedForm& form = p.forms[0];
  with_type(p.type, [&](auto type) {
    put_rows<decltype(type), kFrom, Strip>(tile, raw, form.values + tile.source * form.pitch + tile.column, form.pitch,
                                           tile.rows, [&](int i, int) { return factors[i]; });
  });
}

// Strips of rows that follow each other in memory: of ragged rows, or of one weight.
int64_t strips_of_each(const Quantize& call) {
  return divide_up(call.rows().dims[call.group_sizes.present() ? 0 : 1], Strip::kRows);
}
int64_t row_strips_of(const Quantize& call) {
  return strips_of_each(call) * (call.group_sizes.present() ? 1 : call.source.dims[0]);
}

int64_t column_strips_of(const Quantize& call) {
  return divide_up(call.source.dims[call.source.rank - 1], Strip::kColumns);
}

int64_t strips_of(const Quantize& call) { return row_strips_of(call) * column_strips_of(call); }

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

template <DType kFrom, int kBlock>
void run(const Quantize& call, const Context& context) {
  const int64_t strips = strips_of(call);
  if (strips == 0) return;
  store_strips<kFrom, kBlock><<<static_cast<unsigned>(divide_up(strips, kStoreWarps)), kStoreThreads, 0,
                                static_cast<cudaStream_t>(context.stream)>>>(
      store_problem(call, context), static_cast<uint32_t>(row_strips_of(call)),
      static_cast<uint32_t>(strips_of_each(call)), static_cast<uint32_t>(column_strips_of(call)));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <DType kFrom>
void run_block(const Quantize& call, const Context& context) {
  if (call.block == 32) return run<kFrom, 32>(call, context);
  run<kFrom, 128>(call, context);
}

void launch(const Quantize& call, const Context& context) {
  if (call.source.dtype == DType::f32) return run_block<DType::f32>(call, context);
  if (call.source.dtype == DType::bf16) return run_block<DType::bf16>(call, context);
  run_block<DType::f16>(call, context);
}

}  // namespace

const Kernel<Quantize> quantize_fp8_rows_cuda = {
    "quantize_fp8_rows_cuda", Arch::cuda, Kind::special, refuses, no_workspace, launch, kAlignment};

}  // namespace grouped
