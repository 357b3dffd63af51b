// The XLA edge: each call as an FFI handler, `jg_<call>_v1`.
#pragma once

#include <string>
#include <vector>

namespace grouped {

struct XlaHandler {
  const char* platform;  // as jax.ffi.register_ffi_target spells it: "cpu", "CUDA"
  std::string target;
  void* function;  // an XLA_FFI_Handler*
};

std::vector<XlaHandler> xla_handlers();
int xla_ffi_api_major();
int xla_ffi_api_minor();

}  // namespace grouped
