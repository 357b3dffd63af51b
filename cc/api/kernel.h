// One row of a dispatch table. `refuses` and `workspace` see shapes, dtypes and parameters only, so a plan is made at
// trace time, without a device; `launch` enqueues work and returns: no allocation, no synchronisation, no host read of
// device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "cc/api/archs.h"
#include "cc/api/context.h"

namespace grouped {

constexpr int kAlignment = 16;  // bytes; addresses that are multiples of it suit every kernel

enum class Kind {
  special,    // for some calls, faster than the others
  reference,  // plain, for every legal call, and the yardstick of the others
  composed,   // other calls, one after the other
};

template <class Call>
struct Kernel {
  const char* name;  // <call>_<format>[_<part>]_<arch>
  Arch arch;         // what it is made for; dispatch asks it for nothing else
  Kind kind;
  std::string (*refuses)(const Call& call, const Target& target);  // empty: takes the call; else the reason, in words
  size_t (*workspace)(const Call& call, const Target& target);     // bytes of scratch memory
  // CPU kernels find a FloatEnvironment (cc/cpu/parallel.h) and set none: Prepared::launch, through which all edges
  // go, sets it in the caller's thread, also for the parts of a composed call, and parallel_for in its helpers.
  void (*launch)(const Call& call, const Context& context);
  // Bytes that the addresses of lhs, rhs and result must be multiples of. Addresses are seen at launch alone, so where
  // they are not, the next kernel of the table that takes any address runs instead.
  int alignment = 1;
  // Bytes of scratch memory where those addresses are multiples of kAlignment; null: `workspace` says it for any. Of
  // rows that go through dispatch once more, and get other kernels for other addresses.
  size_t (*aligned_workspace)(const Call& call, const Target& target) = nullptr;
  bool low_rank = false;     // whether it takes a call with a low-rank product
  bool reads_codes = false;  // multiplies quantised operands as they are: nothing widens them in front of it
  // Of a kernel in parts what each of them touches, as bits of slots; null: it is one. The part that `context.part`
  // numbers touches no other slot, and finds the workspace as the part before it left it. So an edge frees what only
  // one part reads before it allocates what only the next one writes.
  std::vector<uint64_t> (*parts)(const Call& call) = nullptr;
};

// For `refuses` and `workspace` of kernels that take every call of their table, and that need no scratch memory.
template <class Call>
std::string takes_any(const Call&, const Target&) {
  return "";
}
template <class Call>
size_t no_workspace(const Call&, const Target&) {
  return 0;
}

// The first reason among several.
inline std::string first_of(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons) {
    if (!reason.empty()) return reason;
  }
  return "";
}

}  // namespace grouped
