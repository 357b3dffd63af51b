// Parts of weights on the device: a block takes a tile of 64 x 64 elements of one member. What the shard has decides
// which tiles have work, and is in device memory: the grid covers whole weights, and idle blocks leave at once.
#pragma once

#include <string>

#include "cc/device/common/elements.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/quantize/group_scales.cuh"
#include "cc/math/shards.h"

namespace grouped {

constexpr int kShardTile = 64;
constexpr int kShardThreads = 256;
constexpr int kShardPitch = kShardTile + 1;    // threads walk along rows and along columns
constexpr int kShardBlocks = kShardTile / 16;  // most blocks along a tile

struct ShardProblem {
  const int64_t* table;
  DType source_type;
  int64_t groups, rows, width;
  ShardSlots slots;
  uint32_t* amax;

  template <class Call>
  static ShardProblem of(const Call& call) {
    const int64_t* dims = call.source.dims;
    return {call.source_table.template as<const int64_t>(),
            call.source.dtype,
            dims[0],
            dims[1],
            dims[2],
            ShardSlots::of(call),
            call.amax.template as<uint32_t>()};
  }
  dim3 grid() const {
    return {static_cast<unsigned>(divide_up(width, kShardTile)), static_cast<unsigned>(divide_up(rows, kShardTile)),
            static_cast<unsigned>(groups)};
  }
};

// Why the grid cannot cover the weights; empty: it can.
template <class Call>
std::string refuses_shards(const Call& call) {
  constexpr int64_t kMost = 65535;
  if (divide_up(call.source.dims[1], kShardTile) > kMost || call.source.dims[0] > kMost) {
    return "takes up to 65535 members of fewer than 2^22 rows";
  }
  return "";
}

namespace device {

// A block's tile.
struct ShardPart {
  Shard shard;
  int64_t member, row, column;  // of its first element
  int64_t rows, width;          // of the member

  __device__ static ShardPart mine(const ShardProblem& p) {
    const int64_t member = blockIdx.z;
    return {Shard::of(p.table, p.groups, member), member, int64_t{blockIdx.y} * kShardTile,
            int64_t{blockIdx.x} * kShardTile,     p.rows, p.width};
  }
  // Whether the shard has some of its rows; a whole block agrees.
  __device__ bool any() const {
    const int64_t last = min(row + kShardTile, rows);
    return shard.count > 0 && row * width < shard.first + shard.count && shard.first < last * width;
  }
  __device__ bool has(int r, int c) const {
    return row + r < rows && column + c < width && shard.has((row + r) * width + column + c);
  }
  // [kShardTile][kShardPitch] values, 0 for what the shard does not have.
  __device__ void load(DType type, float* values) const {
    for (int item = threadIdx.x; item < kShardTile * kShardTile; item += kShardThreads) {
      const int r = item / kShardTile, c = item % kShardTile;
      float x = 0.0f;
      if (has(r, c)) x = load_value(shard.elements, type, (row + r) * width + column + c - shard.first);
      values[r * kShardPitch + c] = x;
    }
    __syncthreads();
  }
};

// Elements of a tile that share a block, along its contracted axis.
__device__ inline int block_in_tile(const ShardSlots& slots) {
  return slots.block < kShardTile ? static_cast<int>(slots.block) : kShardTile;
}

}  // namespace device
}  // namespace grouped
