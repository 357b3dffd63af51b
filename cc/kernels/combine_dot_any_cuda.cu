// Dot products of the rows of a token's slots with its gradient (gradients of combining weights).
//
//   a warp (fewer lanes of narrow rows) has four places of a token
//   grad[t] --8 values per lane and step-----------+
//   rows of 4 places --8 values per lane each------+--> 4 fp32 sums per lane, in order --> tree over the lanes
//
// No shared memory. The order depends on H alone. Five vectors of 16 bytes per lane are under way: 48 to 52 registers
// for 16 bits, 64 for fp32, 76 for mixed types (sm_90), 32 warps, 80 KiB per multiprocessor. Predicted for T = 8192, H
// = 2048, k = 8, bf16 on an H200: 304 MiB, 80 us.
#include <string>

#include "cc/device/common/elements.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kVector = 8;
constexpr int kThreads = 256;
constexpr int kPlaces = 4;

struct Problem {
  const void* rows;
  const void* grad;
  const int32_t* inverse;
  float* result;
  int64_t items, width;  // four places of a token each; H
  uint32_t row_count;
  int slots, parts;  // k, and how many items a token has
  int lanes;         // of an item: a power of two
  DType rows_type, grad_type;
};

// Types that are known when it is compiled, and whole vectors at multiples of 16 bytes; or any.
template <DType kType>
struct Known {
  static constexpr int kBlocks = 4;  // of a multiprocessor
  static __device__ void rows(const Problem& p, int64_t first, int, float (&values)[kVector]) {
    load_vector(p.rows, kType, first, values);
  }
  static __device__ void grad(const Problem& p, int64_t first, int, float (&values)[kVector]) {
    load_vector(p.grad, kType, first, values);
  }
};
struct Any {
  static constexpr int kBlocks = 3;
  static __device__ void rows(const Problem& p, int64_t first, int count, float (&values)[kVector]) {
    load_values(p.rows, p.rows_type, first, count, values);
  }
  static __device__ void grad(const Problem& p, int64_t first, int count, float (&values)[kVector]) {
    load_values(p.grad, p.grad_type, first, count, values);
  }
};

template <class Load>
__global__ void __launch_bounds__(kThreads, Load::kBlocks) dot_slots(const __grid_constant__ Problem p) {
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / p.lanes;
  const int lane = static_cast<int>(threadIdx.x) % p.lanes;
  const int64_t token = item / p.parts;
  const int place = static_cast<int>(item % p.parts) * kPlaces;
  const int64_t slot = token * p.slots + place;
  const bool exists = item < p.items;
  uint32_t row[kPlaces];
  bool any = false;
#pragma unroll
  for (int j = 0; j < kPlaces; ++j) {
    row[j] = exists && place + j < p.slots ? static_cast<uint32_t>(p.inverse[slot + j]) : ~0u;
    any |= row[j] < p.row_count;
  }
  float sums[kPlaces] = {};
  if (any) {
    for (int64_t col = lane * kVector; col < p.width; col += p.lanes * kVector) {
      const int count = static_cast<int>(min(p.width - col, static_cast<int64_t>(kVector)));
      float grad[kVector], values[kPlaces][kVector] = {};
      Load::grad(p, token * p.width + col, count, grad);
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        if (row[j] < p.row_count) Load::rows(p, row[j] * p.width + col, count, values[j]);
      }
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[j] = __fmaf_rn(values[j][i], grad[i], sums[j]);
      }
    }
  }
  for (int d = p.lanes / 2; d > 0; d /= 2) {
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], d);
  }
  if (!exists || lane != 0) return;
#pragma unroll
  for (int j = 0; j < kPlaces; ++j) {
    if (place + j < p.slots) p.result[slot + j] = row[j] < p.row_count ? sums[j] : 0.0f;
  }
}

std::string refuses(const CombineDot& call, const Target&) { return refuses_unless_plain({&call.rows, &call.grad}); }

void launch(const CombineDot& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t tokens = call.inverse.dims[0];
  if (tokens == 0) return;
  Problem p = {};
  p.rows = call.rows.data;
  p.grad = call.grad.data;
  p.inverse = call.inverse.as<const int32_t>();
  p.result = call.result.as<float>();
  p.width = call.rows.dims[1];
  p.row_count = static_cast<uint32_t>(call.rows.dims[0]);
  p.slots = static_cast<int>(call.inverse.dims[1]);
  p.parts = (p.slots + kPlaces - 1) / kPlaces;
  p.items = tokens * p.parts;
  p.lanes = 1;
  while (p.lanes < 32 && p.lanes * kVector < p.width) p.lanes *= 2;
  p.rows_type = call.rows.dtype;
  p.grad_type = call.grad.dtype;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.grad);
  const bool known = p.rows_type == p.grad_type && p.width % kVector == 0 && addresses % 16 == 0;
  const unsigned blocks = static_cast<unsigned>((p.items * p.lanes + kThreads - 1) / kThreads);
  if (known && p.rows_type == DType::bf16) {
    dot_slots<Known<DType::bf16>><<<blocks, kThreads, 0, stream>>>(p);
  } else if (known && p.rows_type == DType::f16) {
    dot_slots<Known<DType::f16>><<<blocks, kThreads, 0, stream>>>(p);
  } else if (known && p.rows_type == DType::f32) {
    dot_slots<Known<DType::f32>><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    dot_slots<Any><<<blocks, kThreads, 0, stream>>>(p);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<CombineDot> combine_dot_any_cuda = {"combine_dot_any_cuda", Arch::cuda, Kind::reference, refuses,
                                                 no_workspace,           launch};

}  // namespace grouped
