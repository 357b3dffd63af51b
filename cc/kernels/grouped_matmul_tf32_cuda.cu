// float32 operands on the tensor cores of any GPU since sm_80, in the recipe's modes tf32 and tf32x3 (numerics 2.5), by
// the pipeline of mma_tiles.cuh: m16n8k8, of operands that are rounded or split in registers.
//
//   mode     tile        ring             accumulators   registers   products per 8 k
//   tf32     128 x 128   3 x (8 + 8) KiB  128            244         1
//   tf32x3   128 x 64    4 x (8 + 4) KiB  64 + 64        255         3
//
// The small products of tf32x3 come first, and each 16 terms are summed apart. In rows they are low x high', then high
// x low'. In contractions over rows, where the two layouts of a result exchange the operands, both are in one
// instruction of 4 k, [low, high] x [high', low'], so that the layouts have the same bits; high x high' then takes
// instructions of 4 k as well, for those of 8 would want the high parts in a second group of registers.
#include <initializer_list>
#include <string>

#include "cc/api/archs.h"
#include "cc/api/calls.h"
#include "cc/device/common/mma_tiles.cuh"
#include "cc/device/common/tf32.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

template <int kTerms, bool kContraction = false>
struct Tf32 {
  using Shape = MmaShape<4, kTerms != 1>;
  static constexpr int kSlabs = kMmaRows / kMmaSlab, kBlocks = Shape::kWarpCols / 8;
  static __device__ DType lhs_type(const Problem&) { return DType::f32; }
  static __device__ DType rhs_type(const Problem&) { return DType::f32; }

  template <class F>
  static __device__ void choose(const Problem&, const F& multiply) {
    multiply(Tf32{});
  }

  template <bool kFirst>
  static __device__ void multiply(const Fragments<Shape>& f, Sums<Shape>& sums) {
    if constexpr (kTerms == 1) {
      multiply_rounded<kFirst>(f, sums);
    } else {
      multiply_split<kFirst>(f, sums);
    }
  }

 private:
  template <bool kFirst>
  static __device__ void multiply_rounded(const Fragments<Shape>& f, Sums<Shape>& sums) {
    uint32_t b[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) b[j][e] = as_tf32(f.column(j, e));
    }
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = as_tf32(f.a[i][e]);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) multiply_add_tf32<kFirst>(sums[i][j], a, b[j][0], b[j][1]);
    }
  }

  template <bool kFirst>
  static __device__ void multiply_split(const Fragments<Shape>& f, Sums<Shape>& sums) {
    Tf32Parts b[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) b[j][e] = split_tf32(f.column(j, e));
    }
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if constexpr (kContraction) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // the first and the second 4 k
          const Tf32Parts above = split_tf32(f.a[i][2 * e]), below = split_tf32(f.a[i][2 * e + 1]);
          const uint32_t both[4] = {above.low, below.low, above.high, below.high};
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
            if (e == 0) {
              multiply_add_tf32<kFirst>(sums[i][j], both, b[j][e].high, b[j][e].low);
            } else {
              multiply_add_tf32<false>(sums[i][j], both, b[j][e].high, b[j][e].low);
            }
          }
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) multiply_add_tf32(sums[i][j], above.high, below.high, b[j][e].high);
        }
      } else {
        uint32_t low[4], high[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Tf32Parts parts = split_tf32(f.a[i][e]);
          low[e] = parts.low, high[e] = parts.high;
        }
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) multiply_add_tf32<kFirst>(sums[i][j], low, b[j][0].high, b[j][1].high);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) multiply_add_tf32<false>(sums[i][j], high, b[j][0].low, b[j][1].low);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) multiply_add_tf32<false>(sums[i][j], high, b[j][0].high, b[j][1].high);
      }
    }
  }
};

// Chips whose tensor cores multiply tf32 more than three times as fast as the other units float32; by NVIDIA's
// published rates all others do so once or twice as fast.
bool gains_by_splitting(int chip) { return chip == 80 || chip == 90 || chip == 100 || chip == 103; }

// Older chips are reported to add the first and the second 4 k of an instruction of 8 one after the other, so that
// operands that change places would meet in another order.
constexpr int kFirstUnsplit = 90;

std::string refuses(const GroupedMatmul& call, const Target& target) {
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    if (t->dtype != DType::f32) return "takes two operands of float32, got " + describe(*t);
  }
  if (call.fp32_mode != "tf32" && call.fp32_mode != "tf32x3") {
    return "multiplies in tf32 and tf32x3; this call wants " + call.fp32_mode;
  }
  if (call.fp32_mode == "tf32x3" && !gains_by_splitting(target.sm)) {
    return "leaves tf32x3 to float32 units, which are faster than three products in tf32 on " + arch_name(target.sm);
  }
  if (call.fp32_mode == "tf32x3" && call.contract_rows && target.sm < kFirstUnsplit) {
    return "leaves weight gradients in tf32x3 to float32 units on " + arch_name(target.sm) +
           ": the bits of both layouts may differ there";
  }
  if (std::string reason = refuses_ends(call); !reason.empty()) return reason;
  return refuses_extents(call, Tf32<1>::Shape::kDepth);
}

void launch(const GroupedMatmul& call, const Context& context) {
  return call.fp32_mode == "tf32" ? launch_mma<Tf32<1>>(call, context)
                                  : launch_mma<Tf32<3>, Tf32<3, true>>(call, context);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_tf32_cuda = {
    "grouped_matmul_tf32_cuda", Arch::cuda, Kind::special, refuses, scan_bytes, launch};

}  // namespace grouped
