// Sums of each group's rows, in two stages of fixed order (bias gradients).
//
//   scan      one block: offsets and the prefix of row blocks into the workspace
//   partial   rows --16 B per thread, 8 columns--> fp32 sum of one block of kSumRows rows of one group --> workspace
//   ordered   workspace --one column per thread--> sum of the group's blocks, in order --> one rounding
//
// No shared memory; about 40 registers: 8 sums and the loads in flight. Row blocks start at the group's first row, so a
// group's bits depend on its own rows alone.
#include <algorithm>
#include <string>

#include "cc/api/calls.h"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kSumRows = 64;
constexpr int kVector = 8;
constexpr int kPartialThreads = 128;
constexpr int kOrderedThreads = 128;
constexpr int64_t kMostColumnBlocks = 65535;

__global__ void __launch_bounds__(kPartialThreads)
    partial_sums(GroupScan scan, const void* rows, DType type, const float* row_scale, int64_t width, float* partials) {
  const int64_t block = blockIdx.x;
  if (block >= scan.tiles[scan.count]) return;
  const int g = find_last(scan.tiles, scan.count, block);
  const int64_t first = scan.offsets[g] + (block - scan.tiles[g]) * kSumRows;
  const int64_t end = min(first + kSumRows, scan.offsets[g + 1]);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kPartialThreads * kVector;
  for (int64_t col = (static_cast<int64_t>(blockIdx.y) * kPartialThreads + threadIdx.x) * kVector; col < width;
       col += step) {
    const int count = static_cast<int>(min(width - col, static_cast<int64_t>(kVector)));
    float sums[kVector] = {};
#pragma unroll 4
    for (int64_t r = first; r < end; ++r) {
      float values[kVector];
      load_values(rows, type, r * width + col, count, values);
      const float scale = row_scale ? row_scale[r] : 1.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] = __fmaf_rn(scale, values[i], sums[i]);
    }
    store_values(partials, DType::f32, block * width + col, count, sums);
  }
}

__global__ void __launch_bounds__(kOrderedThreads)
    ordered_sums(GroupScan scan, const float* partials, int64_t width, void* result, DType type) {
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kOrderedThreads + threadIdx.x;
  const int g = blockIdx.y;
  if (col >= width) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t block = scan.tiles[g]; block < scan.tiles[g + 1]; ++block) sum += partials[block * width + col];
  store_value(result, type, g * width + col, sum);
}

int64_t most_blocks(const GroupSum& call) {
  return most_row_tiles(call.rows.dims[0], call.group_sizes.dims[0], kSumRows);
}

std::string refuses(const GroupSum& call, const Target&) { return refuses_unless_plain({&call.rows, &call.result}); }

size_t workspace(const GroupSum& call, const Target&) {
  return GroupScan::bytes(call.group_sizes.dims[0]) +
         align_up(sizeof(float) * static_cast<size_t>(most_blocks(call) * call.rows.dims[1]));
}

void launch(const GroupSum& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t rows = call.rows.dims[0], width = call.rows.dims[1], count = call.group_sizes.dims[0];
  const GroupScan scan = GroupScan::at(context.workspace, count);
  float* partials = reinterpret_cast<float*>(static_cast<char*>(context.workspace) + GroupScan::bytes(count));
  launch_scan(call.group_sizes.as<const int32_t>(), rows, kSumRows, false, scan, stream);
  if (rows > 0) {
    constexpr int64_t kColumns = kPartialThreads * kVector;
    const int64_t column_blocks = std::min((width + kColumns - 1) / kColumns, kMostColumnBlocks);
    const dim3 grid(static_cast<unsigned>(most_blocks(call)), static_cast<unsigned>(column_blocks));
    partial_sums<<<grid, kPartialThreads, 0, stream>>>(
        scan, call.rows.data, call.rows.dtype, call.row_scale.present() ? call.row_scale.as<const float>() : nullptr,
        width, partials);
    GROUPED_CUDA_CHECK(cudaGetLastError());
  }
  const dim3 grid(static_cast<unsigned>((width + kOrderedThreads - 1) / kOrderedThreads), static_cast<unsigned>(count));
  ordered_sums<<<grid, kOrderedThreads, 0, stream>>>(scan, partials, width, call.result.data, call.result.dtype);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<GroupSum> group_sum_any_cuda = {
    "group_sum_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
