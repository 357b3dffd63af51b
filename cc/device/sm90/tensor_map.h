// Tensor maps, which the driver encodes.
#pragma once

#include <cuda.h>

#include "cc/api/tensor.h"
#include "cc/device/sm90/map_shapes.h"

namespace grouped {

// A map of rank 4, swizzled as wide as its box: 32, 64 or 128 bytes; one of 16 is not swizzled. A context must be
// current in this thread.
CUtensorMap tensor_map(const void* base, DType dtype, const MapShape& shape, uint32_t box_cols, uint32_t box_rows);

}  // namespace grouped
