// Hopper instructions: mbarriers, clusters, bulk tensor copies, wgmma. One function for each instruction, no policy.
// Shared-memory operands are 32-bit addresses of the shared window (device::shared_address).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cc/device/sm90/registers.h"

namespace grouped::ptx {

// ---- roles ----
template <int kRegisters>
__device__ inline void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// ---- clusters ----
__device__ inline uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(r));
  return r;
}
__device__ inline uint32_t cluster_size() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(r));
  return r;
}
__device__ inline void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}
// Among `kCount` threads of the CTA that name the same barrier, 1 to 15.
template <int kCount>
__device__ inline void named_barrier(int name) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(name), "n"(kCount) : "memory");
}
// The address of the same variable in another CTA of the cluster.
__device__ inline uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
// Writes 8 or 16 bytes in another CTA of the cluster, whose barrier counts them as it does a copy's: nothing waits for
// the writes before. Both are peer addresses.
__device__ inline void store_peer(uint32_t peer, int64_t value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];\n" ::"r"(peer),
               "l"(value), "r"(barrier)
               : "memory");
}
__device__ inline void store_peer_v4(uint32_t peer, float a, float b, float c, float d, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(peer),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}
__device__ inline int64_t load_shared(uint32_t from) {
  int64_t v;
  asm volatile("ld.shared.b64 %0, [%1];\n" : "=l"(v) : "r"(from) : "memory");
  return v;
}

// ---- mbarriers ----
__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// In another CTA of the cluster. Orders what this thread read and what the copy engine and the tensor cores did, no
// writes: with cluster scope it would cost a memory barrier of the whole chip, in the main loop and for every item.
__device__ inline void barrier_arrive_peer(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(peer_address(barrier, rank)) : "memory");
}
__device__ inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// More bytes for an arrival that has been.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- words ----
// Asks for what is at `from` into the L2.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from) : "memory"); }
// A byte that the kernel does not write, as a word: a conversion behind the load would wait for it.
__device__ inline uint32_t load_byte(const uint8_t* from) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];\n" : "=r"(v) : "l"(from));
  return v;
}
// Arrives, as one of the barrier's count, once the copies of words that this thread started are there.
__device__ inline void barrier_arrive_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

// ---- bulk tensor copies ----
struct Coords {
  int32_t c[4];
};
__device__ inline void tensor_load(uint32_t to, const CUtensorMap* map, Coords at, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3])
      : "memory");
}
// The same box into the same place of every CTA of `mask`, each of whose barriers counts the bytes.
__device__ inline void tensor_load_multicast(uint32_t to, const CUtensorMap* map, Coords at, uint32_t barrier,
                                             uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "h"(mask)
      : "memory");
}
__device__ inline void tensor_store(const CUtensorMap* map, Coords at, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map),
               "r"(from), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3])
               : "memory");
}
// Adds float32 to what memory holds: L2 does it, with one rounding and with subnormals.
__device__ inline void tensor_add(const CUtensorMap* map, Coords at, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(
          map),
      "r"(from), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3])
      : "memory");
}
__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until at most kPending stores of this thread still read shared memory.
template <int kPending>
__device__ inline void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
// Orders this thread's ordinary shared-memory writes before the copy engine and the tensor cores read them.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// ---- epilogue ----
__device__ inline void store_matrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ inline void load_matrix_x4(uint32_t from, uint32_t (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}
// Of transposed matrices: lane l has rows 2(l%4) and 1 on of column l/4.
__device__ inline void store_transposed_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
// Likewise: lane l gets rows 2(l%4) and 1 on of column l/4.
__device__ inline void load_transposed_x4(uint32_t from, uint32_t (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}
__device__ inline void store_matrix_x2(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};\n" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ inline void load_shared_v2(uint32_t from, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}
__device__ inline float load_shared_float(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v) : "r"(from) : "memory");
  return v;
}
__device__ inline void store_shared_float(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to), "f"(v) : "memory");
}
__device__ inline void store_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(v) : "memory");
}
__device__ inline void store_shared_v2(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to), "f"(a), "f"(b) : "memory");
}
// The lower half of a word.
__device__ inline void store_shared_half(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(to), "r"(v) : "memory");
}
__device__ inline void load_words_v2(uint32_t from, uint32_t& a, uint32_t& b) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
__device__ inline void store_words_v2(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n" ::"r"(to), "r"(a), "r"(b) : "memory");
}

// ---- 32-bit operands ----
__device__ inline uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ inline void load_shared_v4(uint32_t from, uint32_t (&v)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}
__device__ inline void store_shared_v4(uint32_t to, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// ---- wgmma ----
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Sums that a wait has made available: no arithmetic on them may move in front of it.
template <int kCount>
__device__ inline void wgmma_done(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define GROUPED_WGMMA_TYPE(N, REGS, A, B, P, TA, TB, TYPE, ...)                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
               "." TYPE " {" REGS "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"                               \
               : __VA_ARGS__                                                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(kTransposedB))
#define GROUPED_WGMMA(N, REGS, A, B, P, TA, TB, ...)                   \
  if constexpr (kBf16) {                                               \
    GROUPED_WGMMA_TYPE(N, REGS, A, B, P, TA, TB, "bf16", __VA_ARGS__); \
  } else {                                                             \
    GROUPED_WGMMA_TYPE(N, REGS, A, B, P, TA, TB, "f16", __VA_ARGS__);  \
  }

#define GROUPED_WGMMA_FP8_PAIRS(MACRO)          \
  if constexpr (Pair::kWideA && Pair::kWideB) { \
    MACRO("e5m2.e5m2");                         \
  } else if constexpr (Pair::kWideA) {          \
    MACRO("e5m2.e4m3");                         \
  } else if constexpr (Pair::kWideB) {          \
    MACRO("e4m3.e5m2");                         \
  } else {                                      \
    MACRO("e4m3.e4m3");                         \
  }
#define GROUPED_WGMMA_FP8_128(TYPES)                                                                     \
  asm volatile(                                                                                          \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPES " {" GROUPED_R64 "}, %64, %65, p, 1, 1;\n}\n" \
      : GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48)                                \
      : "l"(a), "l"(b), "r"(accumulate))
#define GROUPED_WGMMA_FP8_192(TYPES)                                                                        \
  asm volatile(                                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                                          \
      "wgmma.mma_async.sync.aligned.m64n192k32.f32." TYPES " {" GROUPED_R96 "}, %96, %97, p, 1, 1;\n}\n"    \
      : GROUPED_D16(0), GROUPED_D16(16), GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64), GROUPED_D16(80) \
      : "l"(a), "l"(b), "r"(accumulate))

// Element types of two 8-bit operands, which tensor cores take K-major only: E5M2 (wide) or E4M3.
template <bool kWideA_, bool kWideB_>
struct Fp8Pair {
  static constexpr bool kWideA = kWideA_, kWideB = kWideB_;
};
template <class T>
struct IsFp8Pair : std::false_type {};
template <bool kWideA, bool kWideB>
struct IsFp8Pair<Fp8Pair<kWideA, kWideB>> : std::true_type {};

// d[64, kN] (+)= a[64, 32] * b[32, kN] of 8-bit elements.
template <class Pair, int kN>
__device__ inline void wgmma_fp8(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kN == 128 || kN == 192);
  if constexpr (kN == 128) {
    GROUPED_WGMMA_FP8_PAIRS(GROUPED_WGMMA_FP8_128)
  } else {
    GROUPED_WGMMA_FP8_PAIRS(GROUPED_WGMMA_FP8_192)
  }
}

// d[64, kN] (+)= a[64, 16] * b[16, kN]; a and b are shared-memory descriptors, `transposed` operands are MN-major. Of
// 8-bit elements, which come by pairs of types, the same bytes are 32 deep.
template <class T, int kN, int kTransposedA, int kTransposedB>
__device__ inline void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  constexpr bool kPair = IsFp8Pair<T>::value, kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kPair ? !kTransposedA && !kTransposedB : kBf16 || std::is_same_v<T, __half>);
  static_assert(kPair ? kN == 128 || kN == 192 : kN % 16 == 0 && kN <= 192);
  if constexpr (kPair) {
    wgmma_fp8<T, kN>(d, a, b, accumulate);
  } else if constexpr (kN == 16) {
    GROUPED_WGMMA("16", GROUPED_R8, "%8", "%9", "%10", "%11", "%12", GROUPED_D8(0))
  } else if constexpr (kN == 32) {
    GROUPED_WGMMA("32", GROUPED_R16, "%16", "%17", "%18", "%19", "%20", GROUPED_D16(0))
  } else if constexpr (kN == 48) {
    GROUPED_WGMMA("48", GROUPED_R24, "%24", "%25", "%26", "%27", "%28", GROUPED_D16(0), GROUPED_D8(16))
  } else if constexpr (kN == 64) {
    GROUPED_WGMMA("64", GROUPED_R32, "%32", "%33", "%34", "%35", "%36", GROUPED_D16(0), GROUPED_D16(16))
  } else if constexpr (kN == 80) {
    GROUPED_WGMMA("80", GROUPED_R40, "%40", "%41", "%42", "%43", "%44", GROUPED_D16(0), GROUPED_D16(16), GROUPED_D8(32))
  } else if constexpr (kN == 96) {
    GROUPED_WGMMA("96", GROUPED_R48, "%48", "%49", "%50", "%51", "%52", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32))
  } else if constexpr (kN == 112) {
    GROUPED_WGMMA("112", GROUPED_R56, "%56", "%57", "%58", "%59", "%60", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32), GROUPED_D8(48))
  } else if constexpr (kN == 128) {
    GROUPED_WGMMA("128", GROUPED_R64, "%64", "%65", "%66", "%67", "%68", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32), GROUPED_D16(48))
  } else if constexpr (kN == 144) {
    GROUPED_WGMMA("144", GROUPED_R72, "%72", "%73", "%74", "%75", "%76", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32), GROUPED_D16(48), GROUPED_D8(64))
  } else if constexpr (kN == 160) {
    GROUPED_WGMMA("160", GROUPED_R80, "%80", "%81", "%82", "%83", "%84", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64))
  } else if constexpr (kN == 176) {
    GROUPED_WGMMA("176", GROUPED_R88, "%88", "%89", "%90", "%91", "%92", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64), GROUPED_D8(80))
  } else if constexpr (kN == 192) {
    GROUPED_WGMMA("192", GROUPED_R96, "%96", "%97", "%98", "%99", "%100", GROUPED_D16(0), GROUPED_D16(16),
                  GROUPED_D16(32), GROUPED_D16(48), GROUPED_D16(64), GROUPED_D16(80))
  }
}

#define GROUPED_WGMMA_TF32(N, REGS, A, B, ACCUMULATE, ...)                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k8.f32.tf32.tf32 {" REGS "}, {" A "}, " B ", " ACCUMULATE \
               ", 1, 1;\n"                                                                                      \
               : __VA_ARGS__                                                                                    \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))

// d[64, kN] += a[64, 8] * b[8, kN] of tf32: a in registers, as mma m16n8k8 has it, b K-major in shared memory.
template <int kN>
__device__ inline void wgmma_tf32(float (&d)[kN / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  static_assert(kN == 96 || kN == 128);
  if constexpr (kN == 96) {
    GROUPED_WGMMA_TF32("96", GROUPED_R48, "%48, %49, %50, %51", "%52", "1", GROUPED_D16(0), GROUPED_D16(16),
                       GROUPED_D16(32));
  } else {
    GROUPED_WGMMA_TF32("128", GROUPED_R64, "%64, %65, %66, %67", "%68", "1", GROUPED_D16(0), GROUPED_D16(16),
                       GROUPED_D16(32), GROUPED_D16(48));
  }
}
// d[64, 96] = a[64, 8] * b[8, 96]: what d held is not even named, or it would have to be made first.
__device__ inline void wgmma_tf32_first(float (&d)[48], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                        uint64_t b) {
  GROUPED_WGMMA_TF32("96", GROUPED_R48, "%48, %49, %50, %51", "%52", "0", GROUPED_W16(0), GROUPED_W16(16),
                     GROUPED_W16(32));
}

#undef GROUPED_WGMMA_TF32
#undef GROUPED_WGMMA_FP8_128
#undef GROUPED_WGMMA_FP8_192
#undef GROUPED_WGMMA_FP8_PAIRS
#undef GROUPED_WGMMA_TYPE
#undef GROUPED_WGMMA

}  // namespace grouped::ptx
