#include "cc/api/archs.h"

#include <algorithm>
#include <cctype>
#include <iterator>

namespace grouped {
namespace {

struct Portable {
  const char* name;
  int first, last;
};
constexpr Portable kPortable[] = {
#define X(name, first, last) {#name, first, last},
    GROUPED_PORTABLE_ARCHS(X)
#undef X
};

struct Family {
  Arch arch;
  int chip;
};
constexpr Family kFamilies[] = {
#define X(family, chip) {Arch::family, chip},
    GROUPED_FAMILIES(X)
#undef X
};

bool has_family(int chip) {
  return std::any_of(std::begin(kFamilies), std::end(kFamilies), [chip](const Family& f) { return f.chip == chip; });
}

}  // namespace

std::string arch_name(int chip) { return "sm_" + std::to_string(chip) + (has_family(chip) ? "a" : ""); }

bool parse_arch(const std::string& name, Target* target) {
  if (name == "cpu") {
    *target = Target{};
    return true;
  }
  if (name.compare(0, 3, "sm_") != 0) return false;
  size_t end = 3;
  int chip = 0;
  while (end < name.size() && end < 6 && std::isdigit(static_cast<unsigned char>(name[end]))) {
    chip = 10 * chip + (name[end++] - '0');
  }
  const bool families = has_family(chip) && name.compare(end, std::string::npos, "a") == 0;
  if (end < 5 || !(families || end == name.size())) return false;
  *target = Target{Platform::cuda, chip, families};
  return true;
}

bool runs_on(const std::string& portable, int chip) {
  for (const Portable& row : kPortable) {
    if (portable == row.name) return row.first <= chip && chip <= row.last;
  }
  return has_family(chip) && portable == std::to_string(chip) + "a";
}

std::string refuses_arch(Arch arch, const Target& target) {
  if (arch == Arch::cpu) return target.platform == Platform::cpu ? "" : "is for the CPU";
  if (target.platform != Platform::cuda) return "is for CUDA";
  if (arch == Arch::cuda) {
    const int first = kPortable[0].first;
    if (target.sm >= first) return "";
    return "needs " + arch_name(first) + " or later, the device is " + arch_name(target.sm);
  }
  for (const Family& family : kFamilies) {
    if (family.arch == arch && (family.chip != target.sm || !target.families)) {
      return "needs an " + arch_name(family.chip) + " GPU";
    }
  }
  return "";
}

}  // namespace grouped
