// wgmma whose 64 x 16 operand of bfloat16 is in registers, as mma m16n8k16 has it: for as few columns as there are rows
// of a small group, and for tiles whose operands are swapped.
#pragma once

#include <cstdint>

#include "cc/device/sm90/registers.h"

namespace grouped::ptx {

#define GROUPED_WGMMA(N, REGS, A, B, SUM, ...)                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" REGS "}, {" A "}, " B ", " SUM \
               ", 1, 1, 0;\n"                                                                             \
               : __VA_ARGS__                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define GROUPED_WGMMA_OF(SUM, D4, D8)                                                                                  \
  if constexpr (kN == 8) {                                                                                             \
    GROUPED_WGMMA("8", GROUPED_R4, "%4, %5, %6, %7", "%8", SUM, D4(0));                                                \
  } else if constexpr (kN == 16) {                                                                                     \
    GROUPED_WGMMA("16", GROUPED_R8, "%8, %9, %10, %11", "%12", SUM, D8(0));                                            \
  } else if constexpr (kN == 32) {                                                                                     \
    GROUPED_WGMMA("32", GROUPED_R16, "%16, %17, %18, %19", "%20", SUM, D8(0), D8(8));                                  \
  } else if constexpr (kN == 24) {                                                                                     \
    GROUPED_WGMMA("24", GROUPED_R12, "%12, %13, %14, %15", "%16", SUM, D8(0), D4(8));                                  \
  } else if constexpr (kN == 48) {                                                                                     \
    GROUPED_WGMMA("48", GROUPED_R24, "%24, %25, %26, %27", "%28", SUM, D8(0), D8(8), D8(16));                          \
  } else if constexpr (kN == 64) {                                                                                     \
    GROUPED_WGMMA("64", GROUPED_R32, "%32, %33, %34, %35", "%36", SUM, D8(0), D8(8), D8(16), D8(24));                  \
  } else if constexpr (kN == 80) {                                                                                     \
    GROUPED_WGMMA("80", GROUPED_R40, "%40, %41, %42, %43", "%44", SUM, D8(0), D8(8), D8(16), D8(24), D8(32));          \
  } else if constexpr (kN == 128) {                                                                                    \
    GROUPED_WGMMA("128", GROUPED_R64, "%64, %65, %66, %67", "%68", SUM, D8(0), D8(8), D8(16), D8(24), D8(32), D8(40),  \
                  D8(48), D8(56));                                                                                     \
  } else if constexpr (kN == 192) {                                                                                    \
    GROUPED_WGMMA("192", GROUPED_R96, "%96, %97, %98, %99", "%100", SUM, D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), \
                  D8(48), D8(56), D8(64), D8(72), D8(80), D8(88));                                                     \
  } else if constexpr (kN == 256) {                                                                                    \
    GROUPED_WGMMA("256", GROUPED_R128, "%128, %129, %130, %131", "%132", SUM, D8(0), D8(8), D8(16), D8(24), D8(32),    \
                  D8(40), D8(48), D8(56), D8(64), D8(72), D8(80), D8(88), D8(96), D8(104), D8(112), D8(120));          \
  } else {                                                                                                             \
    GROUPED_WGMMA("96", GROUPED_R48, "%48, %49, %50, %51", "%52", SUM, D8(0), D8(8), D8(16), D8(24), D8(32), D8(40));  \
  }

// d[64, kN] += a[64, 16] * b[16, kN]; with kFirst the sum begins here, and what d held is not even named.
template <int kN, bool kFirst>
__device__ inline void wgmma_register(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kN == 8 || kN == 16 || kN == 24 || kN == 32 || kN == 48 || kN == 64 || kN == 80 || kN == 96 ||
                kN == 128 || kN == 192 || kN == 256);
  if constexpr (kFirst) {
    GROUPED_WGMMA_OF("0", GROUPED_W4, GROUPED_W8)
  } else {
    GROUPED_WGMMA_OF("1", GROUPED_D4, GROUPED_D8)
  }
}

#undef GROUPED_WGMMA
#undef GROUPED_WGMMA_OF

}  // namespace grouped::ptx
