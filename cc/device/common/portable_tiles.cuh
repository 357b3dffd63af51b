// A grouped product as the portable kernels see it, and its tiles: which one is mine, where its operands are, where its
// result goes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cc/api/calls.h"
#include "cc/api/context.h"
#include "cc/api/halves.h"
#include "cc/api/operands.h"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/common/group_scan.cuh"

namespace grouped {
namespace device {

constexpr int kTileRows = 128;  // of a tile, unless a kernel chooses otherwise
constexpr int kVector = 8;      // columns that are stored at once

struct Problem {
  GroupScan scan;
  const char* lhs;
  const char* rhs;
  const char* bias;
  const float* row_scale;
  const float* lhs_factors;  // [groups], or null
  const float* rhs_factors;
  char* result;
  const int64_t* rhs_table;
  const int64_t* bias_table;
  const int64_t* into_table;
  int64_t tokens;      // M
  int64_t lhs_stride;  // elements from one row in memory to the next
  int64_t rhs_stride;
  int64_t rhs_group_stride;  // elements from one group's weight to the next; 0 in a ragged contraction
  int64_t rhs_jump;          // bytes to add where a contraction goes on in a second array (halves.h); 0: in one
  int64_t result_stride;     // also of the bias, from one group to the next
  int64_t row_tiles;         // of one group in a ragged contraction; a matter of the scan else
  int64_t col_tiles;         // the sizes of tiles are each kernel's choice
  int rows;                  // of one group's result in a ragged contraction
  int cols;                  // of the result, those that are made,
  int first_col;             // and the first of them, also in the bias
  int depth;                 // K; a matter of the scan in a ragged contraction
  int jump_depth;            // what is left of the contraction at the jump
  DType lhs_type, rhs_type, bias_type, result_type;
  bool rhs_k_major;
  bool contract_rows, scale_bias, accumulate;
};

// A tile, in few registers: what else there is to know is computed where it is used.
struct Place {
  int group;
  int first_row;  // of the result's rows: of all tokens with ragged rows, of the group's matrix in a contraction
  int first_col;
  int rows;  // how much of the tile exists
  int cols;
  int depth;  // length of the contraction; 0: nothing to add
};

enum class Found { tile, skip, end };

__device__ inline const char* element(const char* base, DType type, int64_t index) {
  return base + index * bytes_of(type);
}

__device__ inline char* result_of(const Problem& p, int64_t group) {
  if (p.into_table) return reinterpret_cast<char*>(p.into_table[group]);
  return p.result + group * p.rows * p.cols * bytes_of(p.result_type);
}

template <int kTileCols, int kRows>
__device__ void place_in_matrix(const Problem& p, int64_t index, int64_t row_tiles, int64_t start, int64_t end,
                                Place* at) {
  int64_t row, col;
  place_in_bands(index, row_tiles, p.col_tiles, &row, &col);
  at->first_row = static_cast<int>(start + row * kRows);
  at->first_col = static_cast<int>(col * kTileCols);
  at->rows = min(static_cast<int>(end) - at->first_row, kRows);
  at->cols = min(p.cols - at->first_col, kTileCols);
}

// Tiles of the tail have depth 0.
template <int kTileCols, int kRows = kTileRows>
__device__ Found find_rows_tile(const Problem& p, int64_t index, Place* at) {
  const int64_t row_tile = index / p.col_tiles;
  if (row_tile >= p.scan.tiles[p.scan.count + 1]) return Found::end;
  const int g = find_last(p.scan.tiles, p.scan.count + 1, row_tile);
  const bool tail = g == p.scan.count;
  at->group = g;
  at->depth = tail ? 0 : p.depth;
  const int64_t first = p.scan.tiles[g];
  place_in_matrix<kTileCols, kRows>(p, index - first * p.col_tiles, p.scan.tiles[g + 1] - first, p.scan.offsets[g],
                                    tail ? p.tokens : p.scan.offsets[g + 1], at);
  return Found::tile;
}

// Every group has the same tiles, so only offsets are asked for.
template <int kTileCols, int kRows = kTileRows>
__device__ Found find_contraction_tile(const Problem& p, int64_t index, Place* at) {
  const int64_t group_tiles = p.row_tiles * p.col_tiles;
  const int64_t g = index / group_tiles;
  if (g >= p.scan.count) return Found::end;
  at->group = static_cast<int>(g);
  at->depth = static_cast<int>(p.scan.offsets[g + 1] - p.scan.offsets[g]);
  if (result_of(p, g) == nullptr || (p.accumulate && at->depth == 0)) return Found::skip;
  place_in_matrix<kTileCols, kRows>(p, index - g * group_tiles, p.row_tiles, 0, p.rows, at);
  return Found::tile;
}

template <int kTileCols, int kRows = kTileRows>
__device__ Found find_tile(const Problem& p, int64_t index, Place* at) {
  return p.contract_rows ? find_contraction_tile<kTileCols, kRows>(p, index, at)
                         : find_rows_tile<kTileCols, kRows>(p, index, at);
}

// First elements of a tile's operands.
__device__ inline const char* lhs_at(const Problem& p, const Place& at) {
  if (!p.contract_rows) return element(p.lhs, p.lhs_type, at.first_row * p.lhs_stride);
  return element(p.lhs, p.lhs_type, p.scan.offsets[at.group] * p.lhs_stride + at.first_row);
}
__device__ inline const char* rhs_at(const Problem& p, const Place& at) {
  if (p.contract_rows) return element(p.rhs, p.rhs_type, p.scan.offsets[at.group] * p.rhs_stride + at.first_col);
  const char* weight = p.rhs_table ? reinterpret_cast<const char*>(p.rhs_table[at.group])
                                   : element(p.rhs, p.rhs_type, at.group * p.rhs_group_stride);
  return element(weight, p.rhs_type, at.first_col * (p.rhs_k_major ? p.rhs_stride : 1));
}

__device__ inline bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

__device__ inline Finish finish_at(const Problem& p, const Place& at) {
  Finish f = {};
  f.result = result_of(p, p.contract_rows ? at.group : 0) +
             (at.first_row * p.result_stride + p.first_col + at.first_col) * bytes_of(p.result_type);
  f.result_stride = p.result_stride;
  f.result_type = p.result_type;
  f.factor = 1.0f;
  f.rows = at.rows;
  f.cols = at.cols;
  f.vectors = at.cols % 8 == 0 && aligned(f.result) && f.result_stride * bytes_of(f.result_type) % 16 == 0;
  if (at.depth == 0) return f;
  f.factor = group_factor(p.lhs_factors, p.rhs_factors, at.group);
  if (p.bias_table) {
    f.bias = element(reinterpret_cast<const char*>(p.bias_table[at.group]), p.bias_type, p.first_col + at.first_col);
  } else if (p.bias) {
    f.bias = element(p.bias, p.bias_type, at.group * p.result_stride + p.first_col + at.first_col);
  }
  f.vectors = f.vectors && aligned(f.bias);
  f.bias_type = p.bias_type;
  f.row_scale = p.row_scale ? p.row_scale + at.first_row : nullptr;
  f.scale_bias = p.scale_bias;
  f.accumulate = p.accumulate;
  return f;
}

template <int kTileCols, int W>
__device__ void write_zeros(const Finish& f, int threads) {
  constexpr int kVectors = kTileCols / W;
#pragma unroll 1
  for (int i = threadIdx.x; i < f.rows * kVectors; i += threads) {
    float sums[1][W] = {};
    finish_rows(f, i / kVectors, 0, i % kVectors * W, sums);
  }
}

// Stores zeros in a tile of depth 0, by so many threads.
template <int kTileCols>
__device__ void write_zeros(const Finish& f, int threads) {
  if (f.vectors) {
    write_zeros<kTileCols, kVector>(f, threads);
  } else {
    write_zeros<kTileCols, 1>(f, threads);
  }
}

// ---- the host's side ----

// What becomes of a portable kernel's sums: scales of groups, a bias, one rounding.
inline std::string refuses_ends(const GroupedMatmul& call) {
  if (call.segment || call.scales.lhs_block || call.scales.rhs_block) return "takes no scales but those of groups";
  if (!is_wide(call.result.dtype)) return "gives float32, bfloat16 or float16, not " + describe(call.result);
  if (call.bias.present() && !is_wide(call.bias.dtype)) {
    return "takes a bias of float32, bfloat16 or float16, got " + describe(call.bias);
  }
  return "";
}

constexpr int64_t kMostCoordinates = INT32_MAX - 256;  // tile coordinates are 32 bits wide

// What portable kernels that read `depth` elements of a contraction at once cannot address.
inline std::string refuses_extents(const GroupedMatmul& call, int depth) {
  if (call.rhs_up.present() && call.rhs.dims[call.rhs_axis] % depth != 0) {
    return "contracts a weight in two arrays if both are a multiple of " + std::to_string(depth) + " deep; rhs is " +
           describe(call.rhs);
  }
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    for (int i = 0; i < t->rank; ++i) {
      if (t->dims[i] > kMostCoordinates) return "takes dimensions below 2^31 - 256, got " + describe(*t);
    }
  }
  return "";
}

inline int64_t tiles_of(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

// The call, for tiles of `tile_rows` x `tile_cols` of its result.
inline Problem problem_of(const GroupedMatmul& call, const Context& context, int tile_rows, int tile_cols) {
  const bool contract = call.contract_rows != 0;
  const int64_t* lhs = call.lhs.dims;
  const int64_t* rhs = call.rhs.dims;
  const bool k_major = !contract && call.rhs_axis == 2;
  const Columns lhs_columns = columns_of(call.lhs, call.lhs_half);
  const Columns rhs_columns = columns_of(call.rhs, call.rhs_half);
  Problem p = {};
  p.scan = GroupScan::at(context.workspace, call.group_sizes.dims[0]);
  p.lhs = call.lhs.as<const char>() + lhs_columns.first * dtype_bytes(call.lhs.dtype);
  p.rhs = call.rhs.as<const char>() + rhs_columns.first * dtype_bytes(call.rhs.dtype);
  p.bias = call.bias.present() ? call.bias.as<const char>() : nullptr;
  p.row_scale = call.row_scale.present() ? call.row_scale.as<const float>() : nullptr;
  p.lhs_factors = floats_or_null(call.scales.lhs_group_scales);
  p.rhs_factors = floats_or_null(call.scales.rhs_group_scales);
  p.result = call.result.as<char>();
  p.rhs_table = call.rhs_table.present() ? call.rhs_table.as<const int64_t>() : nullptr;
  p.bias_table = call.bias_table.present() ? call.bias_table.as<const int64_t>() : nullptr;
  p.into_table = call.into_table.present() ? call.into_table.as<const int64_t>() : nullptr;
  p.tokens = lhs[0];
  p.lhs_stride = lhs[1];
  p.rhs_stride = contract ? rhs[1] : rhs[2];
  p.rhs_group_stride = contract ? 0 : rhs[1] * rhs[2];
  p.rows = contract ? static_cast<int>(lhs_columns.count) : 0;
  p.cols = static_cast<int>(contract ? rhs_columns.count : rhs[k_major ? 1 : 2]);
  p.first_col = static_cast<int>(columns_of(call.result, call.result_half).first);
  p.result_stride = call.result.dims[call.result.rank - 1];
  p.depth = contract ? 0 : static_cast<int>(lhs[1]);
  if (call.rhs_up.present()) {
    const int64_t half = rhs[call.rhs_axis];
    const int64_t step = k_major ? half : half * rhs[2];  // what addresses have advanced by
    p.rhs_jump = call.rhs_up.as<const char>() - p.rhs - step * dtype_bytes(call.rhs.dtype);
    p.jump_depth = static_cast<int>(half);
  }
  p.row_tiles = tiles_of(p.rows, tile_rows);
  p.col_tiles = tiles_of(p.cols, tile_cols);
  p.lhs_type = call.lhs.dtype;
  p.rhs_type = call.rhs.dtype;
  p.bias_type = call.bias.dtype;
  p.result_type = call.result.dtype;
  p.rhs_k_major = k_major;
  p.contract_rows = contract;
  p.scale_bias = call.scale_bias != 0;
  p.accumulate = call.accumulate != 0;
  return p;
}

inline int64_t most_tiles(const Problem& p, int tile_rows) {
  return p.contract_rows ? p.scan.count * p.row_tiles * p.col_tiles
                         : most_row_tiles(p.tokens, p.scan.count, tile_rows) * p.col_tiles;
}

inline size_t scan_bytes(const GroupedMatmul& call, const Target&) {
  return GroupScan::bytes(call.group_sizes.dims[0]);
}

// Scans the sizes of groups for tiles of so many rows; how many tiles there can be at most. 0: there is nothing to do.
inline int64_t scan_tiles(const GroupedMatmul& call, const Problem& p, int tile_rows, cudaStream_t stream) {
  const int64_t tiles = most_tiles(p, tile_rows);
  const bool keeps_tail = call.into.present();
  if (tiles != 0) launch_scan(call.group_sizes.as<const int32_t>(), p.tokens, tile_rows, !keeps_tail, p.scan, stream);
  return tiles;
}

}  // namespace device
}  // namespace grouped
