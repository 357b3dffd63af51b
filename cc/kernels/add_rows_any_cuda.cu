// Rows times one factor, some elements dropped at random, added to fp32 rows; one rounding.
//
//   scan   one block: where the groups end, into the workspace
//   add    a warp per row, 8 values per lane: loads of rows and base, two counters of random words, store;
//          tail rows are zeroed or left alone
//
// No shared memory; about 48 registers.
#include <string>

#include "cc/api/calls.h"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"
#include "cc/math/drops.h"
#include "cc/math/rotate.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kVector = 8;
constexpr int kThreads = 256;
constexpr int kRowsABlock = kThreads / 32;
constexpr int kUnusedTileRows = 1 << 30;  // the scan's tiles are not asked for

struct Problem {
  GroupScan scan;
  const void* rows;
  const float* base;    // null: absent
  const uint32_t* key;  // null: nothing is dropped
  void* result;
  int64_t count, width;
  DType type, result_type;
  float factor, rate;
  uint32_t stream;
  bool keeps_tail;
};

__device__ void drop_values(const Problem& p, int64_t col, uint32_t row, uint32_t group, float (&values)[kVector]) {
  const uint64_t key = static_cast<uint64_t>(p.key[1]) << 32 | p.key[0];
#pragma unroll
  for (int first = 0; first < kVector; first += 4) {
    const Words4 words = random_words(key, static_cast<uint32_t>(col + first), row, group, p.stream);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (drops(words.word[i], p.rate)) values[first + i] = 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ Problem p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / 32;
  if (row >= p.count) return;
  const bool tail = row >= p.scan.offsets[p.scan.count];
  if (tail && p.keeps_tail) return;
  const int group = p.key && !tail ? find_last(p.scan.offsets, p.scan.count, row) : 0;
  const uint32_t own = p.key && !tail ? static_cast<uint32_t>(row - p.scan.offsets[group]) : 0;
  for (int64_t col = threadIdx.x % 32 * kVector; col < p.width; col += 32 * kVector) {
    const int left = static_cast<int>(min(p.width - col, static_cast<int64_t>(kVector)));
    const int64_t first = row * p.width + col;
    float values[kVector] = {};
    if (!tail) {
      load_values(p.rows, p.type, first, left, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = fl_mul(values[i], p.factor);
      if (p.key) drop_values(p, col, own, static_cast<uint32_t>(group), values);
      if (p.base) {
        float base[kVector];
        load_values(p.base, DType::f32, first, left, base);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = with_term(base[i], values[i]);
      }
    }
    store_values(p.result, p.result_type, first, left, values);
  }
}

std::string refuses(const AddRows& call, const Target&) { return refuses_unless_plain({&call.rows, &call.result}); }

size_t workspace(const AddRows& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

void launch(const AddRows& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  Problem p = {};
  p.count = call.rows.dims[0];
  if (p.count == 0) return;
  p.scan = GroupScan::at(context.workspace, call.group_sizes.dims[0]);
  p.rows = call.rows.data;
  p.base = call.base.present() ? call.base.as<const float>() : nullptr;
  p.key = call.key.present() ? call.key.as<const uint32_t>() : nullptr;
  p.result = call.result.data;
  p.width = call.rows.dims[1];
  p.type = call.rows.dtype;
  p.result_type = call.result.dtype;
  p.factor = call.factor;
  p.rate = call.rate;
  p.stream = static_cast<uint32_t>(call.stream);
  p.keeps_tail = call.into.present();
  launch_scan(call.group_sizes.as<const int32_t>(), p.count, kUnusedTileRows, false, p.scan, stream);
  combine<<<static_cast<unsigned>((p.count + kRowsABlock - 1) / kRowsABlock), kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<AddRows> add_rows_any_cuda = {"add_rows_any_cuda", Arch::cuda, Kind::reference, refuses,
                                           workspace,           launch};

}  // namespace grouped
