// The low-rank product beside a product over rows: its blocks of k follow those of the other in the same main loop.
// What tensor copies read past a last column or row is zero, so neither depth need be a multiple of a block.
#pragma once

#include <cstdint>
#include <string>

#include "cc/api/calls.h"
#include "cc/device/sm90/rows_product.cuh"
#include "cc/device/sm90/tensor_map.h"

namespace grouped::sm90 {

struct LowMaps {
  CUtensorMap lhs, rhs;
  const int64_t* table;       // addresses of the weights of each group; null: one array
  int64_t base;               // start of the map of listed weights
  int32_t first = INT32_MAX;  // k of its first block; none: beyond all
};

// Where the block at k comes from.
struct FromLow {
  bool low;
  int32_t at;   // k in its own operands
  Slice slice;  // last two coordinates of the weights of the tile's group
  __device__ FromLow(const LowMaps& maps, const Work& work, int k)
      : low(k >= maps.first), at(low ? k - maps.first : k), slice{work.slice2, work.slice3} {
    if (!low) return;
    slice = {work.group, 0};
    if (maps.table != nullptr) slice = slice_of(uint64_t(__ldg(maps.table + work.group) - maps.base));
  }
};

inline std::string refuses_low(const LowRank& low, DType dtype, int64_t rhs_axis) {
  if (!low.present()) return "";
  if (low.low_lhs.dtype != dtype) return std::string("takes a low-rank product of its operands' type alone");
  if (low.low_rhs_axis != rhs_axis) return "takes low-rank weights that are stored as the others";
  const int64_t rank = low.low_lhs.dims[1];
  if (rank % 8 != 0) return "takes ranks of a multiple of 8, not " + std::to_string(rank);
  return "";
}

// Both maps, for weights in boxes of `box_cols` x `box_rows` and rows in boxes of 64 x `lhs_rows`; adds to `length`,
// the depth of all blocks.
inline LowMaps low_maps(const LowRank& low, int64_t groups, uint32_t box_cols, uint32_t box_rows, int32_t* length,
                        uint32_t lhs_rows = 64) {
  LowMaps maps{};
  maps.first = INT32_MAX;
  if (!low.present()) return maps;
  const DType dtype = low.low_lhs.dtype;
  const int64_t rank = low.low_lhs.dims[1];
  maps.first = (*length + kBlockK - 1) / kBlockK * kBlockK;
  *length = maps.first + int32_t(rank);
  maps.lhs = tensor_map(low.low_lhs.data, dtype, ragged_shape(rank, dtype), 64, lhs_rows);
  const int64_t rows = low.low_rhs.dims[1], cols = low.low_rhs.dims[2];
  const bool listed = low.low_rhs_table.present();
  // Listed weights are addressed relative to any mapped address.
  const void* base = listed ? low.low_lhs.data : low.low_rhs.data;
  maps.table = listed ? low.low_rhs_table.as<const int64_t>() : nullptr;
  maps.base = reinterpret_cast<int64_t>(base);
  maps.rhs =
      tensor_map(base, dtype, listed ? scattered_shape(rows, cols, dtype) : packed_shape(groups, rows, cols, dtype),
                 box_cols, box_rows);
  return maps;
}

}  // namespace grouped::sm90
