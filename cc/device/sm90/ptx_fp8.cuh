// wgmma of 8-bit elements for sums that start from zero with every block (pipeline_fp8.cuh), of many widths.
#pragma once

#include <type_traits>

#include "cc/device/sm90/ptx.cuh"

namespace grouped::ptx {

#define GROUPED_LIST(...) __VA_ARGS__
// P0 to P4 are the numbers of the operands behind the sums: both descriptors, or registers and a descriptor.
#define GROUPED_WGMMA_PART(N, REGS, A, SUM, TYPES, ...) GROUPED_WGMMA_PART_(N, REGS, A, SUM, TYPES, __VA_ARGS__)
#define GROUPED_WGMMA_PART_(N, REGS, P0, P1, P2, P3, P4, SUM, TYPES, ...)                                           \
  if constexpr (std::is_same_v<A, uint64_t>) {                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k32.f32." TYPES " {" REGS "}, " P0 ", " P1 ", " SUM         \
                 ", 1, 1;\n"                                                                                        \
                 : __VA_ARGS__                                                                                      \
                 : "l"(a), "l"(b));                                                                                 \
  } else {                                                                                                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k32.f32." TYPES " {" REGS "}, {" P0 ", " P1 ", " P2 ", " P3 \
                 "}, " P4 ", " SUM ", 1, 1;\n"                                                                      \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }
#define GROUPED_WGMMA_TYPES(N, REGS, P, SUM, ...)                               \
  if constexpr (Pair::kWideA && Pair::kWideB) {                                 \
    GROUPED_WGMMA_PART(N, REGS, GROUPED_LIST(P), SUM, "e5m2.e5m2", __VA_ARGS__) \
  } else if constexpr (Pair::kWideA) {                                          \
    GROUPED_WGMMA_PART(N, REGS, GROUPED_LIST(P), SUM, "e5m2.e4m3", __VA_ARGS__) \
  } else if constexpr (Pair::kWideB) {                                          \
    GROUPED_WGMMA_PART(N, REGS, GROUPED_LIST(P), SUM, "e4m3.e5m2", __VA_ARGS__) \
  } else {                                                                      \
    GROUPED_WGMMA_PART(N, REGS, GROUPED_LIST(P), SUM, "e4m3.e4m3", __VA_ARGS__) \
  }
#define GROUPED_WGMMA_WIDE(N, REGS, P, SUMS, FIRST)           \
  if constexpr (kFirst) {                                     \
    GROUPED_WGMMA_TYPES(N, REGS, GROUPED_LIST(P), "0", FIRST) \
  } else {                                                    \
    GROUPED_WGMMA_TYPES(N, REGS, GROUPED_LIST(P), "1", SUMS)  \
  }

// d[64, kN] (+)= a[64, 32] * b[32, kN] of 8-bit elements; with kFirst the sum begins here, and what d held is not even
// named. `a` is a descriptor, or four registers: bytes k = 4t to 4t + 3 of row g, the same of row g + 8, and both 16 on
// (lane l/4 = g, l%4 = t).
template <class Pair, int kN, bool kFirst, class A>
__device__ inline void wgmma_fp8_part(float (&d)[kN / 2], const A& a, uint64_t b) {
  static_assert((kN % 8 == 0 && kN <= 96) || (kN % 16 == 0 && kN <= 192));
  if constexpr (kN == 8) {
    GROUPED_WGMMA_WIDE("8", GROUPED_R4, GROUPED_LIST("%4", "%5", "%6", "%7", "%8"), GROUPED_LIST(GROUPED_D4(0)),
                       GROUPED_LIST(GROUPED_W4(0)))
  } else if constexpr (kN == 16) {
    GROUPED_WGMMA_WIDE("16", GROUPED_R8, GROUPED_LIST("%8", "%9", "%10", "%11", "%12"), GROUPED_LIST(GROUPED_D8(0)),
                       GROUPED_LIST(GROUPED_W8(0)))
  } else if constexpr (kN == 24) {
    GROUPED_WGMMA_WIDE("24", GROUPED_R12, GROUPED_LIST("%12", "%13", "%14", "%15", "%16"),
                       GROUPED_LIST(GROUPED_D8(0), GROUPED_D4(8)), GROUPED_LIST(GROUPED_W8(0), GROUPED_W4(8)))
  } else if constexpr (kN == 32) {
    GROUPED_WGMMA_WIDE("32", GROUPED_R16, GROUPED_LIST("%16", "%17", "%18", "%19", "%20"), GROUPED_LIST(GROUPED_D16(0)),
                       GROUPED_LIST(GROUPED_W16(0)))
  } else if constexpr (kN == 40) {
    GROUPED_WGMMA_WIDE("40", GROUPED_R20, GROUPED_LIST("%20", "%21", "%22", "%23", "%24"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D4(16)), GROUPED_LIST(GROUPED_W16(0), GROUPED_W4(16)))
  } else if constexpr (kN == 48) {
    GROUPED_WGMMA_WIDE("48", GROUPED_R24, GROUPED_LIST("%24", "%25", "%26", "%27", "%28"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D8(16)), GROUPED_LIST(GROUPED_W16(0), GROUPED_W8(16)))
  } else if constexpr (kN == 56) {
    GROUPED_WGMMA_WIDE("56", GROUPED_R28, GROUPED_LIST("%28", "%29", "%30", "%31", "%32"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D8(16), GROUPED_D4(24)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W8(16), GROUPED_W4(24)))
  } else if constexpr (kN == 64) {
    GROUPED_WGMMA_WIDE("64", GROUPED_R32, GROUPED_LIST("%32", "%33", "%34", "%35", "%36"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16)), GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16)))
  } else if constexpr (kN == 72) {
    GROUPED_WGMMA_WIDE("72", GROUPED_R36, GROUPED_LIST("%36", "%37", "%38", "%39", "%40"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D4(32)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W4(32)))
  } else if constexpr (kN == 80) {
    GROUPED_WGMMA_WIDE("80", GROUPED_R40, GROUPED_LIST("%40", "%41", "%42", "%43", "%44"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D8(32)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W8(32)))
  } else if constexpr (kN == 88) {
    GROUPED_WGMMA_WIDE("88", GROUPED_R44, GROUPED_LIST("%44", "%45", "%46", "%47", "%48"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D8(32), GROUPED_D4(40)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W8(32), GROUPED_W4(40)))
  } else if constexpr (kN == 96) {
    GROUPED_WGMMA_WIDE("96", GROUPED_R48, GROUPED_LIST("%48", "%49", "%50", "%51", "%52"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32)))
  } else if constexpr (kN == 112) {
    GROUPED_WGMMA_WIDE("112", GROUPED_R56, GROUPED_LIST("%56", "%57", "%58", "%59", "%60"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D8(48)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W8(48)))
  } else if constexpr (kN == 128) {
    GROUPED_WGMMA_WIDE("128", GROUPED_R64, GROUPED_LIST("%64", "%65", "%66", "%67", "%68"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W16(48)))
  } else if constexpr (kN == 144) {
    GROUPED_WGMMA_WIDE("144", GROUPED_R72, GROUPED_LIST("%72", "%73", "%74", "%75", "%76"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48), GROUPED_D8(64)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W16(48), GROUPED_W8(64)))
  } else if constexpr (kN == 160) {
    GROUPED_WGMMA_WIDE("160", GROUPED_R80, GROUPED_LIST("%80", "%81", "%82", "%83", "%84"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W16(48), GROUPED_W16(64)))
  } else if constexpr (kN == 176) {
    GROUPED_WGMMA_WIDE("176", GROUPED_R88, GROUPED_LIST("%88", "%89", "%90", "%91", "%92"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64),
                                    GROUPED_D8(80)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W16(48), GROUPED_W16(64),
                                    GROUPED_W8(80)))
  } else if constexpr (kN == 192) {
    GROUPED_WGMMA_WIDE("192", GROUPED_R96, GROUPED_LIST("%96", "%97", "%98", "%99", "%100"),
                       GROUPED_LIST(GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64),
                                    GROUPED_D16(80)),
                       GROUPED_LIST(GROUPED_W16(0), GROUPED_W16(16), GROUPED_W16(32), GROUPED_W16(48), GROUPED_W16(64),
                                    GROUPED_W16(80)))
  }
}

#undef GROUPED_LIST
#undef GROUPED_WGMMA_PART
#undef GROUPED_WGMMA_PART_
#undef GROUPED_WGMMA_TYPES
#undef GROUPED_WGMMA_WIDE

}  // namespace grouped::ptx
