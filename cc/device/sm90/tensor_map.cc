#if GROUPED_WITH_CUDA
#include "cc/device/sm90/tensor_map.h"

#include <string>

#include "cc/api/check.h"
#include "cc/device/common/driver.h"

namespace grouped {
namespace {

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = driver_entry<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  return encode;
}

inline CUtensorMapDataType tensor_map_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::e4m3fn:
    case DType::e5m2:
    case DType::u8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      GROUPED_CHECK(false, std::string("no tensor map for ") + dtype_name(dtype));
  }
}

}  // namespace

CUtensorMap tensor_map(const void* base, DType dtype, const MapShape& shape, uint32_t box_cols, uint32_t box_rows) {
  CUtensorMap map;
  const uint32_t box[4] = {box_cols, box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const int64_t wide = box_cols * dtype_bytes(dtype);
  const CUtensorMapSwizzle swizzle = wide == 16   ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : wide == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : wide == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult status = tensor_map_encoder()(&map, tensor_map_dtype(dtype), 4, const_cast<void*>(base), shape.dims,
                                               shape.strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  static_assert(kInvalidValue == CUDA_ERROR_INVALID_VALUE && kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
  GROUPED_CHECK(status == CUDA_SUCCESS, tensor_map_failure(status, reinterpret_cast<uintptr_t>(base), shape));
  return map;
}

}  // namespace grouped
#endif
