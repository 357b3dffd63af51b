// Floats as sums of bfloat16 parts, and sums of parts. Tasks split what comes before the axis of the parts, or the
// elements from it on where nothing comes before.
#include <algorithm>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/kernels/kernels.h"
#include "cc/math/parts.h"

namespace grouped {
namespace {

// Calls body(r, first, last) for runs of the elements of each row of `matrix`, split at `axis`.
template <class Body>
void parallel_runs(Pool* pool, const SplitAt& matrix, const Body& body) {
  constexpr int64_t kRun = 16384;
  const int64_t runs = (matrix.inner + kRun - 1) / kRun;
  parallel_rows(pool, 0, matrix.outer * runs, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t from = i % runs * kRun;
      body(i / runs, from, std::min(from + kRun, matrix.inner));
    }
  });
}

void launch_split(const SplitParts& call, const Context& context) {
  PartOrder order;
  read_order(call.order, &order);
  const SplitAt at(call.source, call.axis);
  parallel_runs(context.pool, at, [&](int64_t row, int64_t first, int64_t last) {
    const float* from = call.source.as<const float>() + row * at.inner;
    uint16_t* to = call.result.as<uint16_t>() + row * order.count * at.inner;
    for (int64_t i = first; i < last; ++i) {
      const Parts parts = parts_of(from[i]);
      for (int p = 0; p < order.count; ++p) to[p * at.inner + i] = parts.bits[order.part[p]];
    }
  });
}

void launch_sum(const SumParts& call, const Context& context) {
  const SplitAt at(call.result, call.axis);
  const int64_t count = call.count;
  parallel_runs(context.pool, at, [&](int64_t row, int64_t first, int64_t last) {
    const float* from = call.source.as<const float>() + row * count * at.inner;
    float* to = call.result.as<float>() + row * at.inner;
    for (int64_t i = first; i < last; ++i) {
      float sum = from[(count - 1) * at.inner + i];
      for (int64_t p = count - 2; p >= 0; --p) sum = fl_add(from[p * at.inner + i], sum);
      to[i] = sum;
    }
  });
}

}  // namespace

const Kernel<SplitParts> split_parts_any_cpu = {"split_parts_any_cpu", Arch::cpu,   Kind::reference, takes_any,
                                                no_workspace,          launch_split};
const Kernel<SumParts> sum_parts_any_cpu = {"sum_parts_any_cpu", Arch::cpu,    Kind::reference,
                                            takes_any,           no_workspace, launch_sum};

}  // namespace grouped
