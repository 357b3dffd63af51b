#include "cc/bind/device.h"

#include <stdexcept>

#if GROUPED_WITH_CUDA
#include <cuda_runtime_api.h>

#include "cc/bind/built.h"
#endif

namespace grouped {

#if GROUPED_WITH_CUDA

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

bool cuda_compiled() { return true; }

std::string device_arch(int device) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the device's arch");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the device's arch");
  const int sm = 10 * major + minor;
  // The one chip for which code with architecture-specific instructions is built.
  const std::string arch = "sm_" + std::to_string(sm) + (sm == 90 ? "a" : "");
  check_built_for(arch);
  return arch;
}

DeviceGuard::DeviceGuard(Platform platform, int device) {
  if (platform != Platform::cuda) return;
  int current = 0;
  check(cudaGetDevice(&current), "asking for the current device");
  // Also where it is the current one: a thread that has asked the runtime for nothing yet, such as one of autograd's,
  // has no context, and the driver's cuTensorMapEncodeTiled makes none.
  check(cudaSetDevice(device), "choosing the arrays' device");
  if (current != device) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  // Fails only where the context is lost, for it was the current one: the next call says so, a destructor cannot.
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

#else

bool cuda_compiled() { return false; }

std::string device_arch(int) { throw std::runtime_error("this build has no CUDA kernels; build it where nvcc is"); }

DeviceGuard::DeviceGuard(Platform, int) {}
DeviceGuard::~DeviceGuard() = default;

#endif

}  // namespace grouped
