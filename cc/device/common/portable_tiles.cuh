// A grouped product as the portable kernels see it, and its tiles: which one is mine, where its operands lie, where its
// result goes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/common/group_scan.cuh"

namespace grouped {
namespace device {

constexpr int kTileRows = 128;

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
  int64_t col_tiles;         // of kTileCols columns, which each kernel chooses
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

template <int kTileCols>
__device__ void place_in_matrix(const Problem& p, int64_t index, int64_t row_tiles, int64_t start, int64_t end,
                                Place* at) {
  int64_t row, col;
  place_in_bands(index, row_tiles, p.col_tiles, &row, &col);
  at->first_row = static_cast<int>(start + row * kTileRows);
  at->first_col = static_cast<int>(col * kTileCols);
  at->rows = min(static_cast<int>(end) - at->first_row, kTileRows);
  at->cols = min(p.cols - at->first_col, kTileCols);
}

// Tiles of the tail have depth 0.
template <int kTileCols>
__device__ Found find_rows_tile(const Problem& p, int64_t index, Place* at) {
  const int64_t row_tile = index / p.col_tiles;
  if (row_tile >= p.scan.tiles[p.scan.count + 1]) return Found::end;
  const int g = find_last(p.scan.tiles, p.scan.count + 1, row_tile);
  const bool tail = g == p.scan.count;
  at->group = g;
  at->depth = tail ? 0 : p.depth;
  const int64_t first = p.scan.tiles[g];
  place_in_matrix<kTileCols>(p, index - first * p.col_tiles, p.scan.tiles[g + 1] - first, p.scan.offsets[g],
                             tail ? p.tokens : p.scan.offsets[g + 1], at);
  return Found::tile;
}

// Every group has the same tiles, so only offsets are asked for.
template <int kTileCols>
__device__ Found find_contraction_tile(const Problem& p, int64_t index, Place* at) {
  const int64_t group_tiles = p.row_tiles * p.col_tiles;
  const int64_t g = index / group_tiles;
  if (g >= p.scan.count) return Found::end;
  at->group = static_cast<int>(g);
  at->depth = static_cast<int>(p.scan.offsets[g + 1] - p.scan.offsets[g]);
  if (result_of(p, g) == nullptr || (p.accumulate && at->depth == 0)) return Found::skip;
  place_in_matrix<kTileCols>(p, index - g * group_tiles, p.row_tiles, 0, p.rows, at);
  return Found::tile;
}

template <int kTileCols>
__device__ Found find_tile(const Problem& p, int64_t index, Place* at) {
  return p.contract_rows ? find_contraction_tile<kTileCols>(p, index, at) : find_rows_tile<kTileCols>(p, index, at);
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

}  // namespace device
}  // namespace grouped
