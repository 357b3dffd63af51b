// What the bindings ask of the CUDA runtime. It is linked statically and touched only when one of these is called, so
// that the module loads where there is no driver.
#pragma once

#include <string>

#include "cc/api/context.h"

namespace grouped {

bool cuda_compiled();
std::string device_arch(int device);  // "sm_90a"; throws std::runtime_error where there is no such device

// Makes `device` current for its lifetime; does nothing on the CPU.
class DeviceGuard {
 public:
  DeviceGuard(Platform platform, int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

}  // namespace grouped
