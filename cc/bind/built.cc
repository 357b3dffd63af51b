#include "cc/bind/built.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "cc/api/archs.h"

namespace grouped {
std::vector<std::string> built_archs() {
  std::vector<std::string> archs;
  std::istringstream list(GROUPED_BUILT_ARCHS);
  for (std::string arch; std::getline(list, arch, ',');) archs.push_back(arch);
  return archs;
}

std::string built_by() { return GROUPED_CUDA_COMPILER; }

std::string arch_built_for(int chip) {
  const std::string arch = arch_name(chip);
  const std::vector<std::string> archs = built_archs();
  if (std::any_of(archs.begin(), archs.end(), [&](const std::string& built) { return runs_on(built, chip); })) {
    return arch;
  }
  const std::string has = archs.empty() ? "no CUDA kernels" : std::string("kernels for sm_") + GROUPED_BUILT_ARCHS;
  throw std::runtime_error("the GPU is " + arch + ", this build has " + has +
                           "; build it on that machine, or with GROUPED_CUDA_ARCHS=all (for GPUs since sm_80)");
}

}  // namespace grouped
