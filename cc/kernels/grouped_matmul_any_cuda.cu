// Every legal grouped product on any GPU since sm_80: the fallback of all others, and their yardstick.
//
//   scan        one block: offsets and tile prefix into the workspace
//   16 and 8 bit, 128 threads: mma m16n8k16 by the pipeline of mma_tiles.cuh, which draws it
//   float32, 256 threads, 2 blocks per SM, a block per tile:
//     copy k+1 --cp.async--> ring[2] of (lhs 8.3 KiB, rhs 8.3 KiB) --> 8x8 per thread, IEEE FMA --> epilogue
//     33 KiB of shared memory, at most 128 registers: 64 sums, 16 operands
//   epilogue    sums through free shared memory, so that a row's neighbours leave in 16-byte stores
//
// One block owns a tile and its whole contraction, in one order; tiles are 128x128 whatever the shapes, so a row's bits
// depend on nothing but that row, its weights and K: every call is batch invariant.
#include <algorithm>
#include <string>
#include <type_traits>

#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/mma_tiles.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

// --- 16-bit operands on tensor cores, and 8-bit ones widened to float16, which holds every code exactly
// ---------------

template <class T>
struct Op16 {
  using Shape = MmaShape<2, false>;
  static constexpr bool kKnown = std::is_same_v<T, __nv_bfloat16>;
  // Products of bfloat16 know their types when they are compiled; those of float16 may have 8-bit operands.
  static __device__ DType lhs_type(const Problem& p) { return kKnown ? DType::bf16 : p.lhs_type; }
  static __device__ DType rhs_type(const Problem& p) { return kKnown ? DType::bf16 : p.rhs_type; }

  template <bool kFirst>
  static __device__ void multiply(const Fragments<Shape>& f, Sums<Shape>& sums) {
    multiply_all<Shape>(f, sums, [](float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
      multiply_add<T>(sum, a, b0, b1);
    });
  }
};

struct Ops16 {
  using Shape = MmaShape<2, false>;
  template <class F>
  static __device__ void choose(const Problem& p, const F& multiply) {
    if (p.lhs_type == DType::bf16) {
      multiply(Op16<__nv_bfloat16>{});
    } else {
      multiply(Op16<__half>{});
    }
  }
};

// --- float32 operands: IEEE products and sums, k ascending
// ------------------------------------------------------------

constexpr int kFmaTile = kTileRows;  // columns as well
constexpr int kFmaThreads = 256;
constexpr int kFmaDepth = 16;
constexpr int kFmaStages = 2;
constexpr int kFmaStride = kFmaTile + 4;  // floats; keeps 16-byte alignment and spreads transposing writes over banks
constexpr int kFmaOperand = kFmaDepth * kFmaStride;
constexpr int kFmaCopies = kFmaTile * kFmaDepth / kFmaThreads;

// Single values, so any stride will do; a k-major operand is transposed on its way to shared memory.
class ValueCopier {
 public:
  __device__ ValueCopier(const char* data, bool k_major, int64_t stride, int extent) {
    k_ = k_major ? threadIdx.x % kFmaDepth : threadIdx.x / kFmaTile;
    const int outer = k_major ? threadIdx.x / kFmaDepth : threadIdx.x % kFmaTile;
    outer_left_ = extent - outer;
    at_ = reinterpret_cast<const float*>(data) + (k_major ? outer * stride + k_ : k_ * stride + outer);
    offset_ = (k_ * kFmaStride + outer) * static_cast<int>(sizeof(float));
  }

  // Fills this thread's part of the stage at `to`, of which `depth` elements along k exist, and moves on.
  __device__ void copy(uint32_t to, int depth, bool k_major, int64_t stride) {
    const int k_step = k_major ? 0 : kFmaThreads / kFmaTile;
    const int outer_step = k_major ? kFmaThreads / kFmaDepth : 0;
    const int shared_step = (k_step * kFmaStride + outer_step) * static_cast<int>(sizeof(float));
    const int64_t step = (k_step + outer_step) * stride;
#pragma unroll
    for (int i = 0; i < kFmaCopies; ++i) {
      const bool exists = k_ + i * k_step < depth && i * outer_step < outer_left_;
      copy_async<4>(to + offset_ + i * shared_step, at_ + i * step, exists ? 4 : 0);
    }
    at_ += k_major ? kFmaDepth : kFmaDepth * stride;
  }

  __device__ void move(int64_t bytes) {
    at_ = reinterpret_cast<const float*>(reinterpret_cast<const char*>(at_) + bytes);
  }

 private:
  const float* at_;
  uint32_t offset_;
  int k_, outer_left_;
};

__global__ void __launch_bounds__(kFmaThreads, 2) multiply_fma(const __grid_constant__ Problem p) {
  __shared__ __align__(16) float ring[kFmaStages][2][kFmaOperand];
  // Thread (x, y) owns rows 4y ... 4y+3 and 64 more, columns 4x ... 4x+3 and 64 more: reads of a warp coincide.
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const bool lhs_k_major = !p.contract_rows;
  Place at;
  for (int64_t index = blockIdx.x;; index += gridDim.x) {
    const Found found = find_tile<kFmaTile>(p, index, &at);
    if (found == Found::end) return;
    if (found == Found::skip) continue;
    if (at.depth == 0) {
      write_zeros<kFmaTile>(finish_at(p, at), kFmaThreads);
      continue;
    }
    ValueCopier lhs(lhs_at(p, at), lhs_k_major, p.lhs_stride, at.rows);
    ValueCopier rhs(rhs_at(p, at), p.rhs_k_major, p.rhs_stride, at.cols);
    float sums[8][8] = {};
    // Step -1 fills the first stage.
#pragma unroll 1
    for (int step = -1; step * kFmaDepth < at.depth; ++step) {
      const int depth_left = at.depth - (step + 1) * kFmaDepth;
      if (depth_left > 0) {
        if (depth_left == p.jump_depth) rhs.move(p.rhs_jump);
        const uint32_t fill = shared_address(ring[(step + 1) % kFmaStages]);
        lhs.copy(fill, depth_left, lhs_k_major, p.lhs_stride);
        rhs.copy(fill + kFmaOperand * sizeof(float), depth_left, p.rhs_k_major, p.rhs_stride);
      }
      commit_copies();
      if (step < 0) continue;
      wait_copies<1>();
      __syncthreads();
      const float* a = ring[step % kFmaStages][0] + 4 * y;
      const float* b = ring[step % kFmaStages][1] + 4 * x;
#pragma unroll
      for (int k = 0; k < kFmaDepth; ++k) {
        float left[8], right[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 l = *reinterpret_cast<const float4*>(a + k * kFmaStride + half * 64);
          const float4 r = *reinterpret_cast<const float4*>(b + k * kFmaStride + half * 64);
          left[4 * half] = l.x, left[4 * half + 1] = l.y, left[4 * half + 2] = l.z, left[4 * half + 3] = l.w;
          right[4 * half] = r.x, right[4 * half + 1] = r.y, right[4 * half + 2] = r.z, right[4 * half + 3] = r.w;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i][j] = __fmaf_rn(left[i], right[j], sums[i][j]);
        }
      }
      __syncthreads();
    }
    const Finish finish = finish_at(p, at);
    float* staged = &ring[0][0][0];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i / 4 != half) continue;  // sums are registers: no index at run time
        const int row = 4 * y + i % 4;
        const float (&s)[8] = sums[i];
        *reinterpret_cast<float4*>(staged + staged_at(row, 4 * x, kFmaStride)) = make_float4(s[0], s[1], s[2], s[3]);
        *reinterpret_cast<float4*>(staged + staged_at(row, 4 * x + 64, kFmaStride)) =
            make_float4(s[4], s[5], s[6], s[7]);
      }
      __syncthreads();
      drain<kFmaTile / 2, kFmaTile, kFmaStride, kFmaThreads, 1>(finish, staged, half * (kFmaTile / 2), 0, threadIdx.x);
      __syncthreads();
    }
  }
}
static_assert(kFmaTile / 2 * kFmaStride <= kFmaStages * 2 * kFmaOperand, "half a tile fits in the ring");

// --- the kernel object
// ------------------------------------------------------------------------------------------------

constexpr int64_t kMostBlocks = INT32_MAX;

std::string refuses(const GroupedMatmul& call, const Target&) {
  const bool same = call.lhs.dtype == call.rhs.dtype && is_wide(call.lhs.dtype);
  if (!same && !(is_fp8(call.lhs.dtype) && is_fp8(call.rhs.dtype))) {
    return "takes two operands of float32, bfloat16 or float16, or two of float8, got " + describe(call.lhs) + " and " +
           describe(call.rhs);
  }
  if (std::string reason = refuses_ends(call); !reason.empty()) return reason;
  return refuses_extents(call, Ops16::Shape::kDepth);
}

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dtype != DType::f32) return launch_mma<Ops16>(call, context);
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const Problem p = problem_of(call, context, kTileRows, kFmaTile);
  const int64_t tiles = scan_tiles(call, p, kTileRows, stream);
  if (tiles == 0) return;
  const unsigned blocks = static_cast<unsigned>(std::min(tiles, kMostBlocks));  // a block takes several tiles then
  multiply_fma<<<blocks, kFmaThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_any_cuda = {
    "grouped_matmul_any_cuda", Arch::cuda, Kind::reference, refuses, scan_bytes, launch};

}  // namespace grouped
