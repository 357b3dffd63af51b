// Floats as sums of bfloat16 parts, and sums of parts; one launch, bound by memory.
//
//   split_parts   4 neighbours per thread --> three parts each, in registers --> a vector of 8 bytes for each place
//   sum_parts     a vector of 16 bytes of each part, all under way at once --> sums, the last part first
//
// Where the elements from the axis on are no multiple of 4, a thread has one; the bits are the same. Neither has shared
// memory; up to 40 registers. Predicted for [8192, 128] in three parts on an H200: 4 and 6 MiB, 3 us each.
#include <string>

#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/device/common/row_pieces.cuh"
#include "cc/kernels/kernels.h"
#include "cc/math/parts.h"

namespace grouped {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(int64_t items) { return static_cast<unsigned>((items + kThreads - 1) / kThreads); }

template <class T, int W>
struct alignas(sizeof(T) * W) Vector {
  T at[W];
};

// `inner` and `items` count vectors of W elements.
template <int W>
__global__ void __launch_bounds__(kThreads)
    split(const Vector<float, W>* source, Vector<uint16_t, W>* result, int64_t items, int64_t inner, PartOrder order) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) return;
  const int64_t row = item / inner;
  const Vector<float, W> from = source[item];
  Vector<uint16_t, W> parts[3];
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const Parts of = parts_of(from.at[i]);
#pragma unroll
    for (int p = 0; p < 3; ++p) parts[p].at[i] = of.bits[p];
  }
  Vector<uint16_t, W>* to = result + row * order.count * inner + (item - row * inner);
#pragma unroll
  for (int p = 0; p < kMostParts; ++p) {
    if (p >= order.count) break;
    const int part = order.part[p];
    to[p * inner] = part == 0 ? parts[0] : part == 1 ? parts[1] : parts[2];
  }
}

template <int W>
__global__ void __launch_bounds__(kThreads)
    sum(const Vector<float, W>* source, Vector<float, W>* result, int64_t items, int64_t inner, int count) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) return;
  const int64_t row = item / inner;
  const Vector<float, W>* from = source + row * count * inner + (item - row * inner);
  Vector<float, W> parts[kMostParts];
#pragma unroll
  for (int p = 0; p < kMostParts; ++p) {
    if (p < count) parts[p] = from[p * inner];
  }
  Vector<float, W> sums;
#pragma unroll
  for (int p = kMostParts - 1; p >= 0; --p) {
    if (p >= count) continue;
#pragma unroll
    for (int i = 0; i < W; ++i) sums.at[i] = p == count - 1 ? parts[p].at[i] : fl_add(parts[p].at[i], sums.at[i]);
  }
  result[item] = sums;
}

bool by_four(const TensorView& source, const TensorView& result, int64_t inner) {
  return inner % 4 == 0 && common_unit({address(source), address(result)}) == 16;
}

template <int W>
void launch_split_of(const SplitParts& call, const SplitAt& at, const PartOrder& order, cudaStream_t stream) {
  const int64_t items = at.outer * at.inner / W;
  split<W><<<blocks_of(items), kThreads, 0, stream>>>(
      call.source.as<const Vector<float, W>>(), call.result.as<Vector<uint16_t, W>>(), items, at.inner / W, order);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

void launch_split(const SplitParts& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const SplitAt at(call.source, call.axis);
  if (at.outer * at.inner == 0) return;
  PartOrder order;
  read_order(call.order, &order);
  if (by_four(call.source, call.result, at.inner)) return launch_split_of<4>(call, at, order, stream);
  launch_split_of<1>(call, at, order, stream);
}

template <int W>
void launch_sum_of(const SumParts& call, const SplitAt& at, cudaStream_t stream) {
  const int64_t items = at.outer * at.inner / W;
  sum<W><<<blocks_of(items), kThreads, 0, stream>>>(call.source.as<const Vector<float, W>>(),
                                                    call.result.as<Vector<float, W>>(), items, at.inner / W,
                                                    static_cast<int>(call.count));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

void launch_sum(const SumParts& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const SplitAt at(call.result, call.axis);
  if (at.outer * at.inner == 0) return;
  if (by_four(call.source, call.result, at.inner)) return launch_sum_of<4>(call, at, stream);
  launch_sum_of<1>(call, at, stream);
}

}  // namespace

const Kernel<SplitParts> split_parts_any_cuda = {"split_parts_any_cuda", Arch::cuda,  Kind::reference, takes_any,
                                                 no_workspace,           launch_split};
const Kernel<SumParts> sum_parts_any_cuda = {"sum_parts_any_cuda", Arch::cuda, Kind::reference, takes_any,
                                             no_workspace,         launch_sum};

}  // namespace grouped
