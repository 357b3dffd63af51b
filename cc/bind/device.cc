#include "cc/bind/device.h"

#include <stdexcept>

#if GROUPED_WITH_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cc/bind/built.h"
#include "cc/device/common/driver.h"
#endif

namespace grouped {

#if GROUPED_WITH_CUDA

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // else the next launch, which asks for it, would fail as well
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// What the runtime has no calls for: contexts that are current, or not, in this thread.
struct Contexts {
  CUresult(CUDAAPI* current)(CUcontext*);
  CUresult(CUDAAPI* push)(CUcontext);
  CUresult(CUDAAPI* pop)(CUcontext*);
  CUresult(CUDAAPI* of_stream)(CUstream, CUcontext*);

  static const Contexts& driver() {
    static const Contexts entries = {
        driver_entry<decltype(current)>("cuCtxGetCurrent", 4000),
        driver_entry<decltype(push)>("cuCtxPushCurrent", 4000),
        driver_entry<decltype(pop)>("cuCtxPopCurrent", 4000),
        driver_entry<decltype(of_stream)>("cuStreamGetCtx", 9020),
    };
    return entries;
  }
};

// Streams that are numbers, and of any device: 0, cudaStreamLegacy and cudaStreamPerThread.
bool names_a_device(void* stream) {
  return stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread;
}

}  // namespace

bool cuda_compiled() { return true; }

std::string device_arch(int device) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the device's arch");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the device's arch");
  return arch_built_for(10 * major + minor);
}

uint64_t capture_of(uintptr_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  check(cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status, &number), "asking for a capture");
  return status == cudaStreamCaptureStatusNone ? 0 : number;
}

void clear_on_device(void* memory, size_t bytes, void* stream) {
  const ContextGuard guard(Platform::cuda, stream);
  check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "clearing memory");
}

DeviceGuard::DeviceGuard(Platform platform, int device) {
  if (platform != Platform::cuda) return;
  int current = 0;
  check(cudaGetDevice(&current), "asking for the current device");
  if (current == device) return;
  check(cudaSetDevice(device), "choosing the arrays' device");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  // Fails only where the context is lost, for it was the current one: the next call says so, a destructor cannot.
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

ContextGuard::ContextGuard(Platform platform, void* stream) {
  if (platform != Platform::cuda) return;
  const Contexts& driver = Contexts::driver();
  CUcontext context = nullptr;
  if (driver.current(&context) == CUDA_SUCCESS && context != nullptr) return;
  if (names_a_device(stream) && driver.of_stream(static_cast<CUstream>(stream), &context) == CUDA_SUCCESS) {
    pushed_ = driver.push(context) == CUDA_SUCCESS;
    if (pushed_) return;
  }
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  check(cudaSetDevice(device), "making the current device's context current");
}

ContextGuard::~ContextGuard() {
  CUcontext popped = nullptr;
  if (pushed_) static_cast<void>(Contexts::driver().pop(&popped));
}

#else

bool cuda_compiled() { return false; }

std::string device_arch(int) { throw std::runtime_error("this build has no CUDA kernels; build it where nvcc is"); }

uint64_t capture_of(uintptr_t) { return 0; }

void clear_on_device(void*, size_t, void*) { throw std::runtime_error("this build has no CUDA kernels"); }

DeviceGuard::DeviceGuard(Platform, int) {}
DeviceGuard::~DeviceGuard() = default;
ContextGuard::ContextGuard(Platform, void*) {}
ContextGuard::~ContextGuard() = default;

#endif

}  // namespace grouped
