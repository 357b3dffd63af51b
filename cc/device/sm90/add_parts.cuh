// The parts of cut sums (schedule.cuh), added in their order by a launch behind those that made them: with no counter
// of parts that have arrived, nothing has to be cleared, and whoever is early does not wait.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cc/device/common/launch.h"
#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

struct PartialSums {
  const float* sums;          // [parts, groups, rows, cols]; what has no block of k holds nothing
  const int64_t* offsets;     // [groups + 1], where groups begin
  const int64_t* into_table;  // addresses of the results, 0 skips a group; null where they are packed
  float* result;              // [groups, rows, cols], or [groups, cols, rows]
  int32_t parts, groups, rows, cols;
  int32_t block;    // k of one
  bool transposed;  // the result is [cols, rows]
  bool accumulate;
};

constexpr int kAddTile = 32;  // rows and columns of a block, which has a thread for each four elements
constexpr int kAddThreads = kAddTile * kAddTile / 4;
constexpr int kAddAhead = 8;  // loads of a thread that are under way

__device__ inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Rows, columns and pitches are multiples of four, addresses of 16 bytes. Of a group without rows no part is read: its
// sum is +0, and nothing is written where results accumulate.
static __global__ void __launch_bounds__(kAddThreads) add_parts(const PartialSums p) {
  const int row_tiles = (p.rows + kAddTile - 1) / kAddTile, col_tiles = (p.cols + kAddTile - 1) / kAddTile;
  const int group = int(blockIdx.x) / (row_tiles * col_tiles), tile = int(blockIdx.x) % (row_tiles * col_tiles);
  const int64_t length = p.offsets[group + 1] - p.offsets[group], matrix = int64_t(p.rows) * p.cols;
  const int parts = parts_in_use(int((length + p.block - 1) / p.block), p.parts);
  float* result = p.into_table != nullptr ? reinterpret_cast<float*>(p.into_table[group]) : p.result + group * matrix;
  if (result == nullptr || (p.accumulate && parts == 0)) return;

  const int first_row = tile / col_tiles * kAddTile, first_col = tile % col_tiles * kAddTile;
  const int down = int(threadIdx.x) / (kAddTile / 4), right = int(threadIdx.x) % (kAddTile / 4) * 4;
  int row = first_row + down, col = first_col + right;
  float4 sum = {0, 0, 0, 0};
  if (row < p.rows && col < p.cols) {
    const float* from = p.sums + group * matrix + int64_t(row) * p.cols + col;
    const int64_t pitch = p.groups * matrix;
    for (int first = 0; first < parts; first += kAddAhead) {
      float4 part[kAddAhead];
#pragma unroll
      for (int i = 0; i < kAddAhead; ++i) {  // behind the last one that one again: branches would keep loads apart
        const int at = first + i < parts ? first + i : parts - 1;
        part[i] = __ldcs(reinterpret_cast<const float4*>(from + at * pitch));
      }
#pragma unroll
      for (int i = 0; i < kAddAhead; ++i) {
        if (first + i < parts) sum = sum + part[i];
      }
    }
  }
  int rows = p.rows, cols = p.cols;
  if (p.transposed) {
    __shared__ float square[kAddTile][kAddTile + 1];
    const float of_row[4] = {sum.x, sum.y, sum.z, sum.w};
    for (int i = 0; i < 4; ++i) square[down][right + i] = of_row[i];
    __syncthreads();
    sum = {square[right][down], square[right + 1][down], square[right + 2][down], square[right + 3][down]};
    row = first_col + down, col = first_row + right;
    rows = p.cols, cols = p.rows;
  }
  if (row >= rows || col >= cols) return;
  float4* to = reinterpret_cast<float4*>(result + int64_t(row) * cols + col);
  *to = p.accumulate ? sum + *to : sum;
}

inline void launch_add_parts(const PartialSums& p, cudaStream_t stream) {
  const int64_t tiles = int64_t((p.rows + kAddTile - 1) / kAddTile) * ((p.cols + kAddTile - 1) / kAddTile);
  add_parts<<<unsigned(tiles * p.groups), kAddThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace grouped::sm90
