// Rows times their scales, one rounding. Tasks split rows.
#include <algorithm>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

std::string refuses(const ScaleRows& call, const Target&) {
  return first_of({refuses_unless_plain("rows", call.rows), refuses_unless_plain("result", call.result)});
}

void scale_row(const ScaleRows& call, int64_t r) {
  const Isa& isa = best_isa();
  const int64_t width = call.rows.dims[1];
  const float scale = call.row_scale.as<const float>()[r];
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    const int64_t element = r * width + column;
    float strip[kStrip];
    isa.decode(call.rows.dtype, call.rows.as<const char>() + element * dtype_bytes(call.rows.dtype), count, strip);
    for (int64_t j = 0; j < count; ++j) strip[j] *= scale;
    isa.encode(call.result.dtype, strip, count, call.result.as<char>() + element * dtype_bytes(call.result.dtype));
  }
}

void launch(const ScaleRows& call, const Context& context) {
  const int64_t rows = call.rows.dims[0];
  const std::vector<int64_t> ends = group_ends(call.group_sizes, rows);
  parallel_rows(context.pool, 0, ends.back(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) scale_row(call, r);
  });
  if (!call.into.present()) zero_rows(context.pool, call.result, ends.back(), rows);
}

}  // namespace

const Kernel<ScaleRows> scale_rows_any_cpu = {"scale_rows_any_cpu", Arch::cpu, Kind::reference, refuses,
                                              no_workspace,         launch};

}  // namespace grouped
