#include <cstdlib>
#include <new>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "cc/cpu/panel.h"

namespace grouped {
namespace {

constexpr size_t kLine = 64;

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void* panel_scratch(size_t bytes) {
  static thread_local Scratch scratch;
  if (scratch.bytes < bytes) {
    std::free(scratch.data);
    scratch.bytes = 0;
    scratch.data = std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine);
    if (!scratch.data) throw std::bad_alloc();
    scratch.bytes = bytes;
  }
  return scratch.data;
}

bool has_plain() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#elif defined(__aarch64__)
bool has_neonbf16() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#endif

const Isa& best_isa() {
#if defined(__x86_64__)
  static const Isa* const best = kIsaAvx512Bf16.supported() ? &kIsaAvx512Bf16
                                 : kIsaAvx512.supported()   ? &kIsaAvx512
                                 : kIsaAvx2.supported()     ? &kIsaAvx2
                                                            : &kIsaPlain;
  return *best;
#elif defined(__aarch64__)
  static const Isa* const best = kIsaNeonBf16.supported() ? &kIsaNeonBf16 : &kIsaPlain;
  return *best;
#else
  return kIsaPlain;
#endif
}

const Isa& pinned_or_best(const Isa* pinned) { return pinned ? *pinned : best_isa(); }

std::string refuses_unless_runs(const Isa* pinned) {
  return pinned_or_best(pinned).supported() ? "" : "this machine lacks the instructions that this kernel is pinned to";
}

const char* cpu_isa() { return best_isa().name; }

}  // namespace grouped
