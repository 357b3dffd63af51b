// Rows times a factor each, fp32, one rounding.
//
//   scan    one block: where the groups end, into the workspace
//   scale   a warp per row, 8 values per lane: 16-byte load, product, 16-byte store; tail rows are zeroed or left alone
//
// No shared memory; about 32 registers.
#include <string>

#include "cc/api/calls.h"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kVector = 8;
constexpr int kThreads = 256;
constexpr int kRowsABlock = kThreads / 32;
constexpr int kUnusedTileRows = 1 << 30;  // the scan's tiles are not asked for

__global__ void __launch_bounds__(kThreads)
    multiply_rows(GroupScan scan, const void* rows, DType type, const float* row_scale, int64_t count, int64_t width,
                  bool keeps_tail, void* result, DType result_type) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / 32;
  if (row >= count) return;
  const bool tail = row >= scan.offsets[scan.count];
  if (tail && keeps_tail) return;
  const float scale = tail ? 0.0f : row_scale[row];
  for (int64_t col = threadIdx.x % 32 * kVector; col < width; col += 32 * kVector) {
    const int left = static_cast<int>(min(width - col, static_cast<int64_t>(kVector)));
    float values[kVector] = {};
    if (!tail) load_values(rows, type, row * width + col, left, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = __fmul_rn(scale, values[i]);
    store_values(result, result_type, row * width + col, left, values);
  }
}

std::string refuses(const ScaleRows& call, const Target&) { return refuses_unless_plain({&call.rows, &call.result}); }

size_t workspace(const ScaleRows& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

void launch(const ScaleRows& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t rows = call.rows.dims[0];
  if (rows == 0) return;
  const GroupScan scan = GroupScan::at(context.workspace, call.group_sizes.dims[0]);
  launch_scan(call.group_sizes.as<const int32_t>(), rows, kUnusedTileRows, false, scan, stream);
  multiply_rows<<<static_cast<unsigned>((rows + kRowsABlock - 1) / kRowsABlock), kThreads, 0, stream>>>(
      scan, call.rows.data, call.rows.dtype, call.row_scale.as<const float>(), rows, call.rows.dims[1],
      call.into.present(), call.result.data, call.result.dtype);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ScaleRows> scale_rows_any_cuda = {
    "scale_rows_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
