// Activated rows, times their scales, one rounding.
//
//   scan       one block: where the groups end, into the workspace
//   activate   a team of 32 to 256 threads per row, 8 columns per thread and step: 16-byte loads of both halves, math,
//              16-byte store; tail rows are zeroed or left alone
//
// No shared memory; at most 48 registers: 16 values in flight and the activation's. Bound by memory.
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
  const float* row_scale;  // null: none
  void* result;
  DType type;
  int64_t count;  // rows
  int team;
  bool zero_tail;
};

template <ActivationKind kKind>
__global__ void __launch_bounds__(kTeamThreads) activate_rows(const __grid_constant__ Problem p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kTeamThreads / p.team) + threadIdx.x / p.team;
  if (row >= p.count) return;
  const bool tail = row >= p.scan.offsets[p.scan.count];
  if (tail && !p.zero_tail) return;
  const float scale = p.row_scale && !tail ? p.row_scale[row] : 1.0f;
  const int width = p.rows.width;
  for (int column = threadIdx.x % p.team * kHiddenVector; column < width; column += p.team * kHiddenVector) {
    const int count = min(width - column, kHiddenVector);
    float t[kHiddenVector] = {};
    if (!tail) {
      float a[kHiddenVector], u[kHiddenVector];
      decode_halves(p.rows, load_halves(p.rows, row, column, count), a, u);
#pragma unroll
      for (int i = 0; i < kHiddenVector; ++i) {
        t[i] = __fmul_rn(scale, ActivationOf<kKind>::value(p.spec, a[i], u[i]));
      }
    }
    store_stored(p.result, p.type, row * width + column, count, t);
  }
}

std::string refuses(const ActivationForward& call, const Target&) {
  return first_of({refuses_unless_plain({&call.rows, &call.result}), refuses_many_columns(call.rows)});
}

size_t workspace(const ActivationForward& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

void launch(const ActivationForward& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  Problem p = {};
  p.scan = GroupScan::at(context.workspace, call.group_sizes.dims[0]);
  p.spec = activation_spec(call.activation);
  p.rows = HiddenRows::of(call.rows, call.activation, is_gated(p.spec.kind), call.result.dims[1]);
  p.row_scale = call.row_scale.present() ? call.row_scale.as<const float>() : nullptr;
  p.result = call.result.data;
  p.type = call.result.dtype;
  p.count = call.rows.dims[0];
  p.team = team_size(p.rows.width);
  p.zero_tail = call.zero_tail != 0;
  if (p.count == 0) return;
  launch_scan(call.group_sizes.as<const int32_t>(), p.count, kUnusedTileRows, false, p.scan, stream);
  with_activation(p.spec.kind, [&](auto kind) {
    activate_rows<decltype(kind)::value><<<team_blocks(p.count, p.team), kTeamThreads, 0, stream>>>(p);
  });
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ActivationForward> activation_any_cuda = {
    "activation_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
