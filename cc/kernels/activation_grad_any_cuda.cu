// Gradients at hidden rows, activated rows and the dot products of rows with them.
//
//   scan       one block: where the groups end, into the workspace
//   gradients  a team of 32 to 256 threads per row, 8 columns per thread and step: 16-byte loads of dz and both halves,
//              value and derivatives, 16-byte stores; products dz * t into one fp32 sum per thread --> tree over a
//              warp's lanes --> warps of the team in order (32 bytes of shared memory), row_base last
//
// 64 registers (situ_glu 75): 24 values in flight and the activation's. The order of a row's sum depends on F alone.
// Bound by memory.
#include <string>

#include "cc/api/calls.h"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/hidden_rows.cuh"
#include "cc/device/common/most_columns.h"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kUnusedTileRows = 1 << 30;  // the scan's tiles are not asked for

struct Problem {
  GroupScan scan;
  ActivationSpec spec;
  HiddenRows rows;
  const void* grad;
  DType grad_type;
  const float* row_scale;  // null: none
  const float* row_base;   // null: none
  HiddenRows result;       // null data: not wanted, as the next two
  void* activated;
  DType activated_type;
  float* row_sum;
  int64_t count;  // rows
  int team;
  bool zero_tail;
};

// Blocks of an SM: as many as spill nothing. Loads in flight are what counts.
template <ActivationKind kKind>
constexpr int kBlocks = kKind == ActivationKind::situ_glu ? 3 : 4;

// Columns of one row that a thread computes; what it adds to the row's sum.
template <ActivationKind kKind>
__device__ float grad_columns(const Problem& p, int64_t row, bool tail) {
  const float scale = p.row_scale && !tail ? p.row_scale[row] : 1.0f;
  const int width = p.rows.width;
  float sum = 0.0f;
  for (int column = threadIdx.x % p.team * kHiddenVector; column < width; column += p.team * kHiddenVector) {
    const int count = min(width - column, kHiddenVector);
    float t[kHiddenVector] = {}, da[kHiddenVector] = {}, du[kHiddenVector] = {};
    if (!tail) {
      const StoredHalves halves = load_halves(p.rows, row, column, count);
      const Stored8 grad = load_stored(p.grad, p.grad_type, row * width + column, count);
      float a[kHiddenVector], u[kHiddenVector], dz[kHiddenVector];
      decode_halves(p.rows, halves, a, u);
      decode_stored(grad, p.grad_type, dz);
#pragma unroll
      for (int i = 0; i < kHiddenVector; ++i) {
        const typename ActivationOf<kKind>::Grad g = ActivationOf<kKind>::grad(p.spec, a[i], u[i]);
        const float scaled = __fmul_rn(scale, dz[i]);
        sum = __fmaf_rn(dz[i], g.t, sum);
        t[i] = __fmul_rn(scale, g.t);
        da[i] = __fmul_rn(scaled, g.da);
        du[i] = __fmul_rn(scaled, g.du);
      }
    }
    if (p.result.data) store_halves(p.result, row, column, count, da, du);
    if (p.activated) store_stored(p.activated, p.activated_type, row * width + column, count, t);
  }
  return sum;
}

template <ActivationKind kKind>
__global__ void __launch_bounds__(kTeamThreads, kBlocks<kKind>) grad_rows(const __grid_constant__ Problem p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kTeamThreads / p.team) + threadIdx.x / p.team;
  const bool tail = row >= p.scan.offsets[p.scan.count];
  float sum = row < p.count && (!tail || p.zero_tail) ? grad_columns<kKind>(p, row, tail) : 0.0f;
  if (!p.row_sum) return;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  __shared__ float warps[kTeamThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x % p.team != 0 || row >= p.count) return;
  for (int w = 1; w < p.team / 32; ++w) sum += warps[threadIdx.x / 32 + w];
  const float base = p.row_base && !tail ? p.row_base[row] : 0.0f;
  p.row_sum[row] = tail ? 0.0f : base + sum;
}

std::string refuses(const ActivationGrad& call, const Target&) {
  return first_of(
      {refuses_unless_plain({&call.grad, &call.rows, &call.result, &call.activated}), refuses_many_columns(call.rows)});
}

size_t workspace(const ActivationGrad& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

template <class T>
T* data_of(const TensorView& t) {
  return t.present() ? t.as<T>() : nullptr;
}

void launch(const ActivationGrad& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t width = call.grad.dims[1];
  Problem p = {};
  p.scan = GroupScan::at(context.workspace, call.group_sizes.dims[0]);
  p.spec = activation_spec(call.activation);
  p.rows = HiddenRows::of(call.rows, call.activation, is_gated(p.spec.kind), width);
  p.grad = call.grad.data;
  p.grad_type = call.grad.dtype;
  p.row_scale = data_of<const float>(call.row_scale);
  p.row_base = data_of<const float>(call.row_base);
  p.result = HiddenRows::of(call.result, call.activation, is_gated(p.spec.kind), width);
  p.activated = data_of<void>(call.activated);
  p.activated_type = call.activated.dtype;
  p.row_sum = data_of<float>(call.row_sum);
  p.count = call.grad.dims[0];
  p.team = team_size(width);
  p.zero_tail = call.zero_tail != 0;
  if (p.count == 0) return;
  launch_scan(call.group_sizes.as<const int32_t>(), p.count, kUnusedTileRows, false, p.scan, stream);
  with_activation(p.spec.kind, [&](auto kind) {
    grad_rows<decltype(kind)::value><<<team_blocks(p.count, p.team), kTeamThreads, 0, stream>>>(p);
  });
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ActivationGrad> activation_grad_any_cuda = {
    "activation_grad_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
