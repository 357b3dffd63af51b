#if GROUPED_WITH_CUDA
#include "cc/device/launch.h"

#include <string>

#include "cc/device/driver.h"
#include "cc/device/tensor_map.h"

namespace grouped {

void fail_cuda(const char* file, int line, const char* call, int status) {
  fail(file, line, std::string(call) + ": " + cudaGetErrorString(cudaError_t(status)));
}

int device_index() {
  int device = 0;
  GROUPED_CUDA_CHECK(cudaGetDevice(&device));
  GROUPED_CHECK(device < kMaxDevices, "device " + std::to_string(device) + " is beyond the last that is supported, 63");
  return device;
}

int multiprocessors() {
  static std::atomic<int> counts[kMaxDevices] = {};
  std::atomic<int>& cached = counts[device_index()];
  int count = cached.load(std::memory_order_relaxed);
  if (count == 0) {
    GROUPED_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_index()));
    cached.store(count, std::memory_order_relaxed);
  }
  return count;
}

void allow_shared_memory(const void* kernel, int bytes, OfDevices& done) {
  std::atomic<bool>& allowed = done[device_index()];
  if (allowed.load(std::memory_order_relaxed)) return;
  GROUPED_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.store(true, std::memory_order_relaxed);
}

void prefer_shared_memory(const void* kernel, int bytes, OfDevices& done) {
  std::atomic<bool>& asked = done[device_index()];
  if (asked.load(std::memory_order_relaxed)) return;
  int whole = 0;
  GROUPED_CUDA_CHECK(cudaDeviceGetAttribute(&whole, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index()));
  const int percent = static_cast<int>(int64_t{bytes} * 100 / whole);  // rounded up to what the device can do
  GROUPED_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
  asked.store(true, std::memory_order_relaxed);
}

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
  const CUtensorMapSwizzle swizzle = wide == 32   ? CU_TENSOR_MAP_SWIZZLE_NONE
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
