// wgmma of 8-bit elements for sums that start from zero with every block (pipeline_fp8.cuh), of many widths.
#pragma once

#include "cc/device/sm90/ptx.cuh"

namespace grouped::ptx {

#define GROUPED_LIST(...) __VA_ARGS__
#define GROUPED_WGMMA_PART(N, REGS, A, B, SUM, TYPES, ...)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k32.f32." TYPES " {" REGS "}, " A ", " B ", " SUM ", 1, 1;\n" \
               : __VA_ARGS__                                                                                        \
               : "l"(a), "l"(b))
#define GROUPED_WGMMA_TYPES(N, REGS, A, B, SUM, ...)                  \
  if constexpr (Pair::kWideA && Pair::kWideB) {                       \
    GROUPED_WGMMA_PART(N, REGS, A, B, SUM, "e5m2.e5m2", __VA_ARGS__); \
  } else if constexpr (Pair::kWideA) {                                \
    GROUPED_WGMMA_PART(N, REGS, A, B, SUM, "e5m2.e4m3", __VA_ARGS__); \
  } else if constexpr (Pair::kWideB) {                                \
    GROUPED_WGMMA_PART(N, REGS, A, B, SUM, "e4m3.e5m2", __VA_ARGS__); \
  } else {                                                            \
    GROUPED_WGMMA_PART(N, REGS, A, B, SUM, "e4m3.e4m3", __VA_ARGS__); \
  }
#define GROUPED_WGMMA_WIDE(N, REGS, A, B, SUMS, FIRST) \
  if constexpr (kFirst) {                              \
    GROUPED_WGMMA_TYPES(N, REGS, A, B, "0", FIRST)     \
  } else {                                             \
    GROUPED_WGMMA_TYPES(N, REGS, A, B, "1", SUMS)      \
  }

// d[64, kN] (+)= a[64, 32] * b[32, kN] of 8-bit elements; with kFirst the sum begins here, and what d held is not even
// named.
template <class Pair, int kN, bool kFirst>
__device__ inline void wgmma_fp8_part(float (&d)[kN / 2], uint64_t a, uint64_t b) {
  static_assert((kN % 8 == 0 && kN <= 96) || kN == 128);
  if constexpr (kN == 8) {
    GROUPED_WGMMA_WIDE("8", GROUPED_R4, "%4", "%5", GROUPED_LIST(GROUPED_D4(0)), GROUPED_LIST(GROUPED_W4(0)))
  } else if constexpr (kN == 16) {
    GROUPED_WGMMA_WIDE("16", GROUPED_R8, "%8", "%9", GROUPED_LIST(GROUPED_D8(0)), GROUPED_LIST(GROUPED_W8(0)))
  } else if constexpr (kN == 24) {
    GROUPED_WGMMA_WIDE("24", GROUPED_R12, "%12", "%13", GROUPED_LIST(GROUPED_D8(0), GROUPED_D4(8)),
                       GROUPED_LIST(GROUPED_W8(0), GROUPED_W4(8)))
  } else if constexpr (kN == 32) {
    GROUPED_WGMMA_WIDE("32", GROUPED_R16, "%16", "%17", GROUPED_LIST(GROUPED_D16(0)), GROUPED_LIST(GROUPED_W16(0)))
  } else if constexpr (kN == 40) {
    GROUPED_WGMMA_WIDE("40", GROUPED_R20, "%20", "%21", GROUPED_LIST(GROUPED_D16(0), GROUPED_D4(16)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W4(16)))
  } else if constexpr (kN == 48) {
    GROUPED_WGMMA_WIDE("48", GROUPED_R24, "%24", "%25", GROUPED_LIST(GROUPED_D16(0), GROUPED_D8(16)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W8(16)))
  } else if constexpr (kN == 56) {
    GROUPED_WGMMA_WIDE("56", GROUPED_R28, "%28", "%29", GROUPED_LIST(GROUPED_D16(0), GROUPED_D8(16), GROUPED_D4(24)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W8(16), GROUPED_W4(24)))
  } else if constexpr (kN == 64) {
    GROUPED_WGMMA_WIDE("64", GROUPED_R32, "%32", "%33", GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16)))
  } else if constexpr (kN == 72) {
    GROUPED_WGMMA_WIDE("72", GROUPED_R36, "%36", "%37", GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D4(32)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W4(32)))
  } else if constexpr (kN == 80) {
    GROUPED_WGMMA_WIDE("80", GROUPED_R40, "%40", "%41", GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D8(32)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W8(32)))
  } else if constexpr (kN == 88) {
    GROUPED_WGMMA_WIDE("88", GROUPED_R44, "%44", "%45",
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D8(32), GROUPED_D4(40)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W8(32), GROUPED_W4(40)))
  } else if constexpr (kN == 96) {
    GROUPED_WGMMA_WIDE("96", GROUPED_R48, "%48", "%49", GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32)))
  } else if constexpr (kN == 128) {
    GROUPED_WGMMA_WIDE("128", GROUPED_R64, "%64", "%65",
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W16(48)))
  }
}

#undef GROUPED_LIST
#undef GROUPED_WGMMA_PART
#undef GROUPED_WGMMA_TYPES
#undef GROUPED_WGMMA_WIDE

}  // namespace grouped::ptx
