// One dot product per row, over one or two pairs of vectors. The lanes (cc/cpu/lanes.h) take the products of the first
// pair and then, from lane 0 on, those of the second. Tasks split rows.
#include <algorithm>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/lanes.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

std::string refuses(const RowDot& call, const Target&) {
  return first_of({refuses_unless_plain("lhs", call.lhs), refuses_unless_plain("rhs", call.rhs),
                   refuses_unless_plain("group_lhs", call.group_lhs),
                   refuses_unless_plain("group_rhs", call.group_rhs)});
}

void add_pair(DType a_dtype, const char* a, DType b_dtype, const char* b, int64_t count, float* sums) {
  const Isa& isa = best_isa();
  for (int64_t k = 0; k < count; k += kStrip) {
    const int64_t n = std::min(kStrip, count - k);
    float x[kStrip];
    float y[kStrip];
    isa.decode(a_dtype, a + k * dtype_bytes(a_dtype), n, x);
    isa.decode(b_dtype, b + k * dtype_bytes(b_dtype), n, y);
    add_products(x, y, n, sums);
  }
}

float row_dot(const RowDot& call, const std::vector<int64_t>& ends, int64_t r) {
  float sums[kSums] = {};
  if (call.lhs.present()) {
    const int64_t width = call.lhs.dims[1];
    add_pair(call.lhs.dtype, call.lhs.as<const char>() + r * width * dtype_bytes(call.lhs.dtype), call.rhs.dtype,
             call.rhs.as<const char>() + r * width * dtype_bytes(call.rhs.dtype), width, sums);
  }
  if (call.group_lhs.present()) {
    const int64_t width = call.group_lhs.dims[1];
    const int64_t g = group_of_row(ends, r);
    const char* vector = call.group_rhs_table.present()
                             ? reinterpret_cast<const char*>(call.group_rhs_table.as<const int64_t>()[g])
                             : call.group_rhs.as<const char>() + g * width * dtype_bytes(call.group_rhs.dtype);
    add_pair(call.group_lhs.dtype, call.group_lhs.as<const char>() + r * width * dtype_bytes(call.group_lhs.dtype),
             call.group_rhs.dtype, vector, width, sums);
  }
  return tree_sum(sums);
}

void launch(const RowDot& call, const Context& context) {
  const int64_t rows = call.result.dims[0];
  const std::vector<int64_t> ends = group_ends(call.group_sizes, rows);
  float* result = call.result.as<float>();
  parallel_rows(context.pool, 0, ends.back(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) result[r] = row_dot(call, ends, r);
  });
  zero_rows(context.pool, call.result, ends.back(), rows);
}

}  // namespace

const Kernel<RowDot> row_dot_any_cpu = {"row_dot_any_cpu", Arch::cpu, Kind::reference, refuses, no_workspace, launch};

}  // namespace grouped
