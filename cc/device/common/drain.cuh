// Sums that leave through shared memory, so that a row's neighbours are stored together.
#pragma once

#include "cc/device/common/elements.cuh"
#include "cc/device/common/portable_tiles.cuh"

namespace grouped {
namespace device {

// Where a staged sum is, in floats. Chunks of 4 are swizzled: by row, so that the rows of mma's layout fall on
// different banks, and by every other 8 or row, so that 8 lanes that read a vector each do.
__device__ inline int staged_at(int row, int col, int stride) {
  return row * stride + (col ^ row % 4 * 8 ^ (col / 32 + row) % 2 * 4);
}

__device__ inline void read_staged(const float* staged, int row, int col, int stride, float (&to)[kVector]) {
  const float4 l = *reinterpret_cast<const float4*>(staged + staged_at(row, col, stride));
  const float4 h = *reinterpret_cast<const float4*>(staged + staged_at(row, col + 4, stride));
  to[0] = l.x, to[1] = l.y, to[2] = l.z, to[3] = l.w, to[4] = h.x, to[5] = h.y, to[6] = h.z, to[7] = h.w;
}
__device__ inline void read_staged(const float* staged, int row, int col, int stride, float (&to)[1]) {
  to[0] = staged[staged_at(row, col, stride)];
}

// Ends kRows x kCols staged sums by kThreads threads, R rows of W columns at once.
template <int kRows, int kCols, int kStride, int kThreads, int R, int W>
__device__ void drain(const Finish& f, const float* staged, int first_row, int first_col, int thread) {
  constexpr int kLanes = kCols / W < kThreads ? kCols / W : kThreads;  // of one row
  constexpr int kStep = kThreads / kLanes;
#pragma unroll 1
  for (int col = thread % kLanes * W; col < kCols; col += kLanes * W) {
#pragma unroll 1
    for (int row = thread / kLanes; row < kRows; row += R * kStep) {
      float sums[R][W];
#pragma unroll
      for (int r = 0; r < R; ++r) read_staged(staged, row + r * kStep, col, kStride, sums[r]);
      finish_rows(f, first_row + row, kStep, first_col + col, sums);
    }
  }
}

template <int kRows, int kCols, int kStride, int kThreads, int R>
__device__ void drain(const Finish& f, const float* staged, int first_row, int first_col, int thread) {
  if (f.vectors) {
    drain<kRows, kCols, kStride, kThreads, R, kVector>(f, staged, first_row, first_col, thread);
  } else {
    drain<kRows, kCols, kStride, kThreads, R, 1>(f, staged, first_row, first_col, thread);
  }
}

}  // namespace device
}  // namespace grouped
