// wgmma of 16-bit elements for tiles of even height (pipeline_even.cuh): both operands in shared memory, the second one
// K-major and any multiple of 16 wide.
#pragma once

#include "cc/device/sm90/ptx.cuh"

namespace grouped::ptx {

#define GROUPED_WGMMA_TYPE(N, REGS, A, B, P, TRANSPOSED, TYPE, ...)                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
               "." TYPE " {" REGS "}, " A ", " B ", p, 1, 1, " TRANSPOSED ", 0;\n}\n"                            \
               : __VA_ARGS__                                                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA))
#define GROUPED_WGMMA_EVEN(N, REGS, A, B, P, TRANSPOSED, ...)              \
  if constexpr (kBf16) {                                                   \
    GROUPED_WGMMA_TYPE(N, REGS, A, B, P, TRANSPOSED, "bf16", __VA_ARGS__); \
  } else {                                                                 \
    GROUPED_WGMMA_TYPE(N, REGS, A, B, P, TRANSPOSED, "f16", __VA_ARGS__);  \
  }

// d[64, kN] (+)= a[64, 16] * b[16, kN]; a and b are shared-memory descriptors, a `transposed` first operand is
// MN-major.
template <class T, int kN, int kTransposedA>
__device__ inline void wgmma_even(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>);
  static_assert(kN % 16 == 0 && kN <= 192);
  if constexpr (kN == 16) {
    GROUPED_WGMMA_EVEN("16", GROUPED_R8, "%8", "%9", "%10", "%11", GROUPED_D8(0))
  } else if constexpr (kN == 32) {
    GROUPED_WGMMA_EVEN("32", GROUPED_R16, "%16", "%17", "%18", "%19", GROUPED_D16(0))
  } else if constexpr (kN == 48) {
    GROUPED_WGMMA_EVEN("48", GROUPED_R24, "%24", "%25", "%26", "%27", GROUPED_D16(0), GROUPED_D8(16))
  } else if constexpr (kN == 64) {
    GROUPED_WGMMA_EVEN("64", GROUPED_R32, "%32", "%33", "%34", "%35", GROUPED_D16(0), GROUPED_D16(16))
  } else if constexpr (kN == 80) {
    GROUPED_WGMMA_EVEN("80", GROUPED_R40, "%40", "%41", "%42", "%43", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D8(32))
  } else if constexpr (kN == 96) {
    GROUPED_WGMMA_EVEN("96", GROUPED_R48, "%48", "%49", "%50", "%51", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32))
  } else if constexpr (kN == 112) {
    GROUPED_WGMMA_EVEN("112", GROUPED_R56, "%56", "%57", "%58", "%59", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32),
                       GROUPED_D8(48))
  } else if constexpr (kN == 128) {
    GROUPED_WGMMA_EVEN("128", GROUPED_R64, "%64", "%65", "%66", "%67", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32),
                       GROUPED_D16(48))
  } else if constexpr (kN == 144) {
    GROUPED_WGMMA_EVEN("144", GROUPED_R72, "%72", "%73", "%74", "%75", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32),
                       GROUPED_D16(48), GROUPED_D8(64))
  } else if constexpr (kN == 160) {
    GROUPED_WGMMA_EVEN("160", GROUPED_R80, "%80", "%81", "%82", "%83", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32),
                       GROUPED_D16(48), GROUPED_D16(64))
  } else if constexpr (kN == 176) {
    GROUPED_WGMMA_EVEN("176", GROUPED_R88, "%88", "%89", "%90", "%91", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32),
                       GROUPED_D16(48), GROUPED_D16(64), GROUPED_D8(80))
  } else if constexpr (kN == 192) {
    GROUPED_WGMMA_EVEN("192", GROUPED_R96, "%96", "%97", "%98", "%99", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32),
                       GROUPED_D16(48), GROUPED_D16(64), GROUPED_D16(80))
  }
}

#undef GROUPED_WGMMA_TYPE
#undef GROUPED_WGMMA_EVEN

}  // namespace grouped::ptx
