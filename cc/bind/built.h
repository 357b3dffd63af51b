// Which chips this module has CUDA code for, as cmake/archs.cmake was told.
#pragma once

#include <string>
#include <vector>

namespace grouped {

std::vector<std::string> built_archs();  // of "80", "89", "90", "90a"; empty in a build without CUDA

std::string built_by();  // the version of nvcc, "13.0.88"; empty in a build without CUDA

// Throws std::runtime_error where the kernels cannot run on a GPU of this arch ("sm_90a") for lack of code.
void check_built_for(const std::string& arch);

}  // namespace grouped
