#if GROUPED_WITH_CUDA
#include "cc/device/common/launch.h"

#include <string>

namespace grouped {

void fail_cuda(const char* file, int line, const char* call, int status) {
  static_cast<void>(cudaGetLastError());  // else the next launch, which asks for it, would fail as well
  fail(file, line, std::string(call) + ": " + cudaGetErrorString(cudaError_t(status)));
}

int device_index() {
  int device = 0;
  GROUPED_CUDA_CHECK(cudaGetDevice(&device));
  GROUPED_CHECK(device < kMaxDevices, "device " + std::to_string(device) + " is beyond the last that is supported, 63");
  return device;
}

int multiprocessors() { return attribute_of_device<cudaDevAttrMultiProcessorCount>(); }

void allow_shared_memory(const void* kernel, int bytes, OfDevices& done) {
  std::atomic<bool>& allowed = done[device_index()];
  if (allowed.load(std::memory_order_relaxed)) return;
  GROUPED_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.store(true, std::memory_order_relaxed);
}

void prefer_shared_memory(const void* kernel, int bytes, OfDevices& done) {
  std::atomic<bool>& asked = done[device_index()];
  if (asked.load(std::memory_order_relaxed)) return;
  const int whole = attribute_of_device<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
  const int percent = static_cast<int>(int64_t{bytes} * 100 / whole);  // rounded up to what the device can do
  GROUPED_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
  asked.store(true, std::memory_order_relaxed);
}

}  // namespace grouped
#endif
