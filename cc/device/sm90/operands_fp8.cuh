// What kernels of 8-bit operands share on the host and at a tile's end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cc/api/operands.h"
#include "cc/device/sm90/layout_fp8.cuh"
#include "cc/device/sm90/ptx.cuh"

namespace grouped::sm90 {

// Calls `launch(types of the operands, type of the result)` with values that say them.
template <class Launch>
void with_fp8_types(const GroupedMatmul& call, Launch launch) {
  const auto with_result = [&](auto pair) {
    switch (call.result.dtype) {
      case DType::f32:
        return launch(pair, float{});
      case DType::f16:
        return launch(pair, __half{});
      default:
        return launch(pair, __nv_bfloat16{});
    }
  };
  const bool wide_lhs = call.lhs.dtype == DType::e5m2, wide_rhs = call.rhs.dtype == DType::e5m2;
  if (wide_lhs) return wide_rhs ? with_result(ptx::Fp8Pair<true, true>{}) : with_result(ptx::Fp8Pair<true, false>{});
  return wide_rhs ? with_result(ptx::Fp8Pair<false, true>{}) : with_result(ptx::Fp8Pair<false, false>{});
}

template <class Params>
void set_scales(const OperandScales& s, Params* p) {
  p->lhs_group_scales = s.lhs_group_scales.present() ? s.lhs_group_scales.as<float>() : nullptr;
  p->rhs_group_scales = s.rhs_group_scales.present() ? s.rhs_group_scales.as<float>() : nullptr;
  p->lhs_scales = s.lhs_scales.present() ? s.lhs_scales.as<float>() : nullptr;
  p->rhs_scales = s.rhs_scales.present() ? s.rhs_scales.as<float>() : nullptr;
  p->scaled = s.lhs_block != 0 || s.rhs_block != 0;
}

// Whether a tile of kCols columns is multiplied whole where `cols` are left, or its first kEdgeCols: kCols seldom
// divides a width, and of the last tile often less exists.
constexpr int kEdgeCols = 128;
template <int kCols>
__device__ inline bool takes_whole_tile(int cols) {
  return kCols <= kEdgeCols || cols > kEdgeCols;
}
// Calls `multiply(columns)` with what a tile is multiplied by.
template <int kCols, class Multiply>
__device__ inline void fp8_tile_cols(int cols, Multiply multiply) {
  if (takes_whole_tile<kCols>(cols)) {
    multiply(std::integral_constant<int, kCols>{});
  } else {
    multiply(std::integral_constant<int, kEdgeCols>{});
  }
}

// A group's scales, and what multiplies by them. They are multiplied at the end, for a tile must not wait for them.
struct Alpha {
  float lhs, rhs;
  __device__ Alpha(const float* lhs_scales, const float* rhs_scales, int group)
      : lhs(lhs_scales != nullptr ? lhs_scales[group] : 1), rhs(rhs_scales != nullptr ? rhs_scales[group] : 1) {}
  __device__ void operator()(int, float (&v)[4]) const {
    const float alpha = __fmul_rn(lhs, rhs);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(alpha, v[i]);
  }
};

}  // namespace grouped::sm90
