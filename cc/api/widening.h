// An array of codes with scales of blocks, to be written as plain numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cc/api/tensor.h"

namespace grouped {

// `slices` matrices of `lines` lines of `run` elements. Blocks are powers of two; the scale of element i of line l of
// slice s is scales[s * slice_stride + l / line_block * line_stride + i / run_block * run_stride].
struct Widening {
  const void* values;
  DType type;          // E4M3, E5M2, uint8 (two E2M1 codes per byte), or plain
  int64_t pitch;       // elements from one line in memory to the next
  const void* scales;  // null: none
  DType scale_type;    // float32, E8M0 or E4M3
  int64_t slice_stride, line_stride, run_stride;
  int line_block, run_block;
  void* result;
  DType result_type;  // bfloat16 or float32
  int64_t slices, lines, run;
  const int32_t* sizes;  // [slices]: one that is not positive leaves its slice alone; null: all are written
  bool transposed;       // the result's lines are the array's columns
};

// padded[g] = rows of group g, of `rows` in all, rounded up to whole segments; null: nothing.
struct SizePadding {
  const int32_t* sizes;
  int64_t groups, rows, segment;
  int32_t* padded;
};

}  // namespace grouped
