// What the bindings ask of the CUDA runtime. It is linked statically and touched only when one of these is called, so
// that the module loads where there is no driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/api/context.h"

namespace grouped {

bool cuda_compiled();
std::string device_arch(int device);  // "sm_90a"; throws std::runtime_error where there is no such device

// The number of the capture that `stream` is part of, of which a process has no two equal ones; 0 where there is none.
uint64_t capture_of(uintptr_t stream);

// Enqueues zeros on `stream`.
void clear_on_device(void* memory, size_t bytes, void* stream);

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

// A launch needs a context that is current in its thread: the driver's own calls, such as that which encodes tensor
// maps, make none. Where none is, the guard makes that of `stream` current for its lifetime, which also says the
// device; where the stream does not say it (0 is of any device), that of the thread's device, for good. The thread's
// device stays what it is. Does nothing on the CPU.
class ContextGuard {
 public:
  ContextGuard(Platform platform, void* stream);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace grouped
