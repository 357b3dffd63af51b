// Checked launches, device facts, and tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "cc/api/check.h"
#include "cc/api/tensor.h"
#include "cc/device/driver.h"
#include "cc/device/maps.h"

#define GROUPED_CUDA_CHECK(call)                                                                  \
  do {                                                                                            \
    const cudaError_t status_ = (call);                                                           \
    GROUPED_CHECK(status_ == cudaSuccess, std::string(#call ": ") + cudaGetErrorString(status_)); \
  } while (0)

namespace grouped {

constexpr int kMaxDevices = 64;

// Of the device that is current in this thread.
inline int device_index() {
  int device = 0;
  GROUPED_CUDA_CHECK(cudaGetDevice(&device));
  GROUPED_CHECK(device < kMaxDevices, "device " + std::to_string(device) + " is beyond the last that is supported, 63");
  return device;
}

inline int multiprocessors() {
  static std::atomic<int> counts[kMaxDevices] = {};
  std::atomic<int>& cached = counts[device_index()];
  int count = cached.load(std::memory_order_relaxed);
  if (count == 0) {
    GROUPED_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_index()));
    cached.store(count, std::memory_order_relaxed);
  }
  return count;
}

// Lets kKernel use `bytes` of dynamic shared memory: asked of the driver once a kernel and device.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<bool> done[kMaxDevices] = {};
  std::atomic<bool>& allowed = done[device_index()];
  if (allowed.load(std::memory_order_relaxed)) return;
  GROUPED_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.store(true, std::memory_order_relaxed);
}

// Asks for multiprocessors that are divided so that blocks with `bytes` of shared memory find room, whatever kKernel
// itself needs: one that runs beside another kernel or just before it must not make them be divided anew, which takes
// an idle multiprocessor.
template <auto kKernel>
void prefer_shared_memory(int bytes) {
  static std::atomic<bool> done[kMaxDevices] = {};
  std::atomic<bool>& asked = done[device_index()];
  if (asked.load(std::memory_order_relaxed)) return;
  int whole = 0;
  GROUPED_CUDA_CHECK(cudaDeviceGetAttribute(&whole, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index()));
  const int percent = static_cast<int>(int64_t{bytes} * 100 / whole);  // rounded up to what the device can do
  GROUPED_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
  asked.store(true, std::memory_order_relaxed);
}

// Launches a kernel that may start while the one in front of it on the stream still runs, and waits for it itself
// (ptx::wait_for_grid_before).
template <class... Params, class... Arguments>
void launch_early(void (*kernel)(Params...), unsigned blocks, unsigned threads, int shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  GROUPED_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
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

// A map of rank 4, swizzled as wide as its box: 64 or 128 bytes. A context must be current in this thread.
inline CUtensorMap tensor_map(const void* base, DType dtype, const MapShape& shape, uint32_t box_cols,
                              uint32_t box_rows) {
  CUtensorMap map;
  const uint32_t box[4] = {box_cols, box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle =
      box_cols * dtype_bytes(dtype) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult status = tensor_map_encoder()(&map, tensor_map_dtype(dtype), 4, const_cast<void*>(base), shape.dims,
                                               shape.strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  static_assert(kInvalidValue == CUDA_ERROR_INVALID_VALUE && kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
  GROUPED_CHECK(status == CUDA_SUCCESS, tensor_map_failure(status, reinterpret_cast<uintptr_t>(base), shape));
  return map;
}

}  // namespace grouped
