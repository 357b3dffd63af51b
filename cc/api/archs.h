// Architectures of GPUs: the one table of them, which cmake/archs.cmake reads too.
#pragma once

#include <climits>
#include <string>

#include "cc/api/context.h"

namespace grouped {

// Code of the portable kernels, *_cuda.cu, that GROUPED_CUDA_ARCHS can ask for: X(name, first, last). `sm_<name>` code
// runs on the chips `first` to `last`, numbered ten times the compute capability. What runs on later chips as well does
// so as PTX, which the driver compiles for them.
#define GROUPED_PORTABLE_ARCHS(X) \
  X(80, 80, 89)                   \
  X(89, 89, 89)                   \
  X(90, 90, kLater)

// Families of kernels for the instructions of one chip: X(family, chip). Their files are *_<family>.cu, compiled for
// `sm_<chip>a`, which is also the name of the chip among architectures. `<chip>a` in GROUPED_CUDA_ARCHS asks for
// portable code of that chip alone, without PTX; the family itself is built always.
#define GROUPED_FAMILIES(X) X(sm90, 90)

// What a kernel is made for. `cuda`: any GPU that there is portable code for.
enum class Arch {
  cpu,
  cuda,
#define X(family, chip) family,
  GROUPED_FAMILIES(X)
#undef X
};

inline constexpr int kLater = INT_MAX;  // than any chip of the table

// The architecture that programs for a GPU are planned for where none is visible.
inline constexpr char kDefaultArch[] = "sm_90a";

std::string arch_name(int chip);                            // 86: "sm_86", 90: "sm_90a"
bool parse_arch(const std::string& name, Target* target);   // "cpu", "sm_86", "sm_90a"; "sm_90": without its families
bool runs_on(const std::string& portable, int chip);        // whether "80", "90a" is code for the chip
std::string refuses_arch(Arch arch, const Target& target);  // why kernels made for `arch` cannot run; empty: they can

}  // namespace grouped
