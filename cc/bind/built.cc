#include "cc/bind/built.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace grouped {
namespace {

constexpr int kHopper = 90;  // 10 * major + minor of the compute capability

bool runs(const std::string& built, int chip) {
  if (built == "90a") return chip == kHopper;
  if (built == "90") return chip >= kHopper;  // its PTX serves what came later
  const int sm = std::atoi(built.c_str());
  return sm <= chip && sm / 10 == chip / 10;
}

}  // namespace

std::vector<std::string> built_archs() {
  std::vector<std::string> archs;
  std::istringstream list(GROUPED_BUILT_ARCHS);
  for (std::string arch; std::getline(list, arch, ',');) archs.push_back(arch);
  return archs;
}

std::string built_by() { return GROUPED_CUDA_COMPILER; }

void check_built_for(const std::string& arch) {
  const int chip = std::atoi(arch.c_str() + arch.find('_') + 1);
  const std::vector<std::string> archs = built_archs();
  if (std::any_of(archs.begin(), archs.end(), [&](const std::string& built) { return runs(built, chip); })) return;
  const std::string has = archs.empty() ? "no CUDA kernels" : std::string("kernels for sm_") + GROUPED_BUILT_ARCHS;
  throw std::runtime_error("the GPU is " + arch + ", this build has " + has +
                           "; build it on that machine, or with GROUPED_CUDA_ARCHS=all (for GPUs since sm_80)");
}

}  // namespace grouped
