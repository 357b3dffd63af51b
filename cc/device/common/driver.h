// Functions of the CUDA driver, fetched at run time, so that the library loads where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "cc/api/check.h"

namespace grouped {

// `name` as it is since CUDA `version` (12000 for 12.0), of type `Function`.
template <class Function>
Function driver_entry(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
#else  // there the version is that of the toolkit
  static_cast<void>(version);
  const cudaError_t status = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());  // else the next launch would fail as well
  GROUPED_CHECK(status == cudaSuccess,
                std::string("asking the driver for ") + name + ": " + cudaGetErrorString(status));
  GROUPED_CHECK(found == cudaDriverEntryPointSuccess && entry != nullptr,
                std::string("the driver has no ") + name + "; a driver for CUDA 12 or newer is needed");
  return reinterpret_cast<Function>(entry);
}

}  // namespace grouped
