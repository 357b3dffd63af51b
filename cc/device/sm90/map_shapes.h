// Shapes of the tensor maps that ragged, packed and scattered tensors are read and written through. Arithmetic alone,
// no CUDA: tests/native/schedule_check.cc computes the addresses that the copy engine will.
#pragma once

#include <cstdint>
#include <string>

#include "cc/api/tensor.h"
#include "cc/device/sm90/schedule.cuh"

namespace grouped {

// Rank 4: `dims` innermost first, `strides` in bytes for dimensions 1 to 3.
struct MapShape {
  uint64_t dims[4];
  uint64_t strides[3];
};

// A [M, cols] tensor whose rows are cut into groups. Row r of the group that ends at row `end` and has `rows` rows is
// at coordinates (col, 2^30 - rows + r, 2^30, end): the address wraps around 2^64 to the right row, and rows past the
// group's end are outside dimension 1, so loads give zeros there and stores are dropped. The tensor may be some columns
// of one with `pitch_cols`.
inline MapShape ragged_shape(int64_t cols, int64_t pitch_cols, DType dtype) {
  const uint64_t pitch = uint64_t(pitch_cols) * dtype_bytes(dtype), far = uint64_t(1) << 34;
  return {{uint64_t(cols), uint64_t(sm90::kRagged), 0x7fffffff, 0x7fffffff}, {pitch, far - pitch, pitch}};
}
inline MapShape ragged_shape(int64_t cols, DType dtype) { return ragged_shape(cols, cols, dtype); }

// A [G, rows, cols] tensor; the slice of group g is (g, 0).
inline MapShape packed_shape(int64_t groups, int64_t rows, int64_t cols, DType dtype) {
  const uint64_t pitch = uint64_t(cols) * dtype_bytes(dtype), slice = pitch * rows;
  return {{uint64_t(cols), uint64_t(rows), uint64_t(groups), 1}, {pitch, slice, slice}};
}

// G separate [rows, cols] tensors anywhere in memory, each at its sm90::slice_of the distance to the map's start.
inline MapShape scattered_shape(int64_t rows, int64_t cols, DType dtype) {
  const uint64_t pitch = uint64_t(cols) * dtype_bytes(dtype);
  return {{uint64_t(cols), uint64_t(rows), uint64_t(sm90::kRagged), uint64_t(sm90::kRagged)},
          {pitch, 16, uint64_t(1) << 34}};
}

// Of the driver's CUresult.
constexpr int kInvalidValue = 1, kInvalidContext = 201;

// Why the driver did not encode a map of this shape.
inline std::string tensor_map_failure(int status, uint64_t address, const MapShape& shape) {
  const std::string text = "cuTensorMapEncodeTiled failed with " + std::to_string(status);
  if (status == kInvalidContext) return text + ": no CUDA context is current in this thread; launches must make one so";
  if (status != kInvalidValue) return text + ", a CUresult of cuda.h";
  return text + " for an address " + std::to_string(address % 16) + " bytes past a multiple of 16, " +
         std::to_string(shape.dims[0]) + " columns, pitch " + std::to_string(shape.strides[0]) +
         "; address and pitch must be multiples of 16 bytes";
}

}  // namespace grouped
