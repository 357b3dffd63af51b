// Sums of rows whose columns several blocks have: one partial sum per column tile, added in the order of the tiles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace grouped {

constexpr int kPartialThreads = 256;

// row_sum[r] = row_base[r] + the partials [column tiles, rows] of row r; 0 in the tail.
static __global__ void __launch_bounds__(kPartialThreads)
    sum_partials(const float* partials, const int32_t* valid_rows, const float* row_base, float* row_sum, int64_t rows,
                 int col_tiles) {
  const int64_t row = int64_t(blockIdx.x) * kPartialThreads + threadIdx.x;
  if (row >= rows) return;
  float sum = 0;
  if (row < *valid_rows) {
    for (int tile = 0; tile < col_tiles; ++tile) sum = __fadd_rn(sum, partials[tile * rows + row]);
    if (row_base != nullptr) sum = __fadd_rn(row_base[row], sum);
  }
  row_sum[row] = sum;
}

inline unsigned partial_blocks(int64_t rows) { return unsigned((rows + kPartialThreads - 1) / kPartialThreads); }

}  // namespace grouped
