// Which chips this module has CUDA code for, as cmake/archs.cmake was told.
#pragma once

#include <string>
#include <vector>

namespace grouped {

std::vector<std::string> built_archs();  // of "80", "89", "90", "90a"; empty in a build without CUDA

std::string built_by();  // the version of nvcc, "13.0.88"; empty in a build without CUDA

// The arch of a chip, numbered ten times its compute capability: "sm_90a". Throws std::runtime_error where this module
// has no code for it.
std::string arch_built_for(int chip);

}  // namespace grouped
