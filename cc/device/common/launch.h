// Checked launches, and facts of the device.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "cc/api/check.h"
#include "cc/api/context.h"

#define GROUPED_CUDA_CHECK(call)                                             \
  do {                                                                       \
    const cudaError_t status_ = (call);                                      \
    if (status_ != cudaSuccess) {                                            \
      static constexpr ::grouped::SourcePath source_path(__FILE__);          \
      ::grouped::fail_cuda(source_path.text, __LINE__, #call, int(status_)); \
    }                                                                        \
  } while (0)

namespace grouped {

// Of a call of the CUDA runtime that did not return cudaSuccess.
[[noreturn]] void fail_cuda(const char* file, int line, const char* call, int status);

// Memory that is zero when the next launch runs: of the caller, or else `own`, which a launch here clears.
template <class T>
T* zeros_or_clear(const Context& context, T* own, size_t count = 1) {
  const size_t bytes = sizeof(T) * count;
  if (context.zeros) {
    if (void* const given = context.zeros->take(bytes)) return static_cast<T*>(given);
  }
  GROUPED_CUDA_CHECK(cudaMemsetAsync(own, 0, bytes, static_cast<cudaStream_t>(context.stream)));
  return own;
}

constexpr int kMaxDevices = 64;

// Of the device that is current in this thread.
int device_index();
int multiprocessors();

// Asked of the driver once per device.
template <cudaDeviceAttr kAttribute>
int attribute_of_device() {
  static std::atomic<int> values[kMaxDevices] = {};
  std::atomic<int>& cached = values[device_index()];
  int value = cached.load(std::memory_order_relaxed);
  if (value == 0) {
    GROUPED_CUDA_CHECK(cudaDeviceGetAttribute(&value, kAttribute, device_index()));
    cached.store(value, std::memory_order_relaxed);
  }
  return value;
}

using OfDevices = std::atomic<bool>[kMaxDevices];

void allow_shared_memory(const void* kernel, int bytes, OfDevices& done);
void prefer_shared_memory(const void* kernel, int bytes, OfDevices& done);

// Lets kKernel use `bytes` of dynamic shared memory: asked of the driver once per kernel and device.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static OfDevices done = {};
  allow_shared_memory(reinterpret_cast<const void*>(kKernel), bytes, done);
}

// Asks for multiprocessors that are divided so that blocks with `bytes` of shared memory find room, whatever kKernel
// itself needs: one that runs beside another kernel or just before it must not make them be divided again, which takes
// an idle multiprocessor.
template <auto kKernel>
void prefer_shared_memory(int bytes) {
  static OfDevices done = {};
  prefer_shared_memory(reinterpret_cast<const void*>(kKernel), bytes, done);
}

// Launches a kernel that may start while the one in front of it on the stream still runs, and waits for it itself
// (wait_for_launch_before).
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

}  // namespace grouped
