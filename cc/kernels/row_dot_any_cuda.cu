// Dot products of rows with rows, and of rows with their group's vector (row-scale gradients).
//
//   scan   one block: offsets into the workspace
//   dot    a warp per row: 8 products per lane and step, both pairs into one fp32 sum per lane --> tree over the lanes
//
// No shared memory; about 48 registers: 16 values in flight. The order depends on K and N alone.
#include <string>

#include "cc/api/calls.h"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kVector = 8;
constexpr int kThreads = 256;
constexpr int kRowsABlock = kThreads / 32;
constexpr int kUnusedTileRows = 1 << 30;  // the scan's tiles are not asked for

struct Vectors {
  const void* data;
  DType type;
};

struct Problem {
  GroupScan scan;
  Vectors lhs, rhs;              // null data: absent
  Vectors group_lhs, group_rhs;  // group_lhs.data null: absent
  const int64_t* group_rhs_table;
  int64_t rows, width, group_width;
  float* result;
};

__device__ float add_products(Vectors a, int64_t a_first, Vectors b, int64_t b_first, int64_t width, float sum) {
  for (int64_t col = threadIdx.x % 32 * kVector; col < width; col += 32 * kVector) {
    const int count = static_cast<int>(min(width - col, static_cast<int64_t>(kVector)));
    float left[kVector], right[kVector];
    load_values(a.data, a.type, a_first + col, count, left);
    load_values(b.data, b.type, b_first + col, count, right);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = __fmaf_rn(left[i], right[i], sum);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) dot_rows(const __grid_constant__ Problem p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / 32;
  if (row >= p.rows) return;
  float sum = 0.0f;
  if (row < p.scan.offsets[p.scan.count]) {
    if (p.lhs.data) sum = add_products(p.lhs, row * p.width, p.rhs, row * p.width, p.width, sum);
    if (p.group_lhs.data) {
      const int g = find_last(p.scan.offsets, p.scan.count, row);
      Vectors vector = p.group_rhs;
      int64_t first = g * p.group_width;
      if (p.group_rhs_table) {
        vector.data = reinterpret_cast<const void*>(p.group_rhs_table[g]);
        first = 0;
      }
      sum = add_products(p.group_lhs, row * p.group_width, vector, first, p.group_width, sum);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  }
  if (threadIdx.x % 32 == 0) p.result[row] = sum;
}

bool readable(const TensorView& t) {
  return !t.present() || is_wide(t.dtype) || t.dtype == DType::e4m3fn || t.dtype == DType::e5m2;
}

std::string refuses(const RowDot& call, const Target&) {
  for (const TensorView* t : {&call.lhs, &call.rhs, &call.group_lhs, &call.group_rhs}) {
    if (!readable(*t)) return "takes float32, bfloat16, float16 or float8, got " + describe(*t);
  }
  if (call.result.dtype != DType::f32) return "gives float32, not " + describe(call.result);
  return "";
}

size_t workspace(const RowDot& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

Vectors vectors(const TensorView& t) { return t.present() ? Vectors{t.data, t.dtype} : Vectors{nullptr, DType::f32}; }

void launch(const RowDot& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  Problem p = {};
  p.scan = GroupScan::at(context.workspace, call.group_sizes.dims[0]);
  p.lhs = vectors(call.lhs);
  p.rhs = vectors(call.rhs);
  p.group_lhs = vectors(call.group_lhs);
  p.group_rhs = vectors(call.group_rhs);
  p.group_rhs_table = call.group_rhs_table.present() ? call.group_rhs_table.as<const int64_t>() : nullptr;
  p.rows = call.result.dims[0];
  p.width = call.lhs.present() ? call.lhs.dims[1] : 0;
  p.group_width = call.group_lhs.present() ? call.group_lhs.dims[1] : 0;
  p.result = call.result.as<float>();
  if (p.rows == 0) return;
  launch_scan(call.group_sizes.as<const int32_t>(), p.rows, kUnusedTileRows, false, p.scan, stream);
  dot_rows<<<static_cast<unsigned>((p.rows + kRowsABlock - 1) / kRowsABlock), kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<RowDot> row_dot_any_cuda = {"row_dot_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
