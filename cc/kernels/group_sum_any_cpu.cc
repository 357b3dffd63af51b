// Sums of a group's rows in two stages: fp32 partial sums over blocks of kBlockRows rows, counted from the group's
// first row, then the partial sums in order. Tasks split groups and columns.
#include <algorithm>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

constexpr int64_t kBlockRows = 256;

std::string refuses(const GroupSum& call, const Target&) {
  return first_of({refuses_unless_plain("rows", call.rows), refuses_unless_plain("result", call.result)});
}

// Columns [column, column + count) of the rows [begin, end).
void sum_strip(const GroupSum& call, int64_t begin, int64_t end, int64_t column, int64_t count, float* total) {
  const Isa& isa = best_isa();
  const int64_t width = call.rows.dims[1];
  const int64_t bytes = dtype_bytes(call.rows.dtype);
  const float* scale = call.row_scale.present() ? call.row_scale.as<const float>() : nullptr;
  std::fill(total, total + count, 0.0f);
  for (int64_t block = begin; block < end; block += kBlockRows) {
    float partial[kStrip] = {};
    for (int64_t r = block; r < std::min(end, block + kBlockRows); ++r) {
      float row[kStrip];
      isa.decode(call.rows.dtype, call.rows.as<const char>() + (r * width + column) * bytes, count, row);
      const float s = scale ? scale[r] : 1.0f;
      for (int64_t j = 0; j < count; ++j) partial[j] += s * row[j];
    }
    for (int64_t j = 0; j < count; ++j) total[j] += partial[j];
  }
}

void launch(const GroupSum& call, const Context& context) {
  const std::vector<int64_t> ends = group_ends(call.group_sizes, call.rows.dims[0]);
  const int64_t width = call.rows.dims[1];
  const int64_t strips = (width + kStrip - 1) / kStrip;
  parallel_for(context.pool, static_cast<int64_t>(ends.size()) * strips, [&](int64_t task) {
    const int64_t group = task / strips;
    const int64_t column = task % strips * kStrip;
    const int64_t count = std::min(kStrip, width - column);
    float total[kStrip];
    sum_strip(call, group_begin(ends, group), ends[static_cast<size_t>(group)], column, count, total);
    best_isa().encode(call.result.dtype, total, count,
                      call.result.as<char>() + (group * width + column) * dtype_bytes(call.result.dtype));
  });
}

}  // namespace

const Kernel<GroupSum> group_sum_any_cpu = {"group_sum_any_cpu", Arch::cpu, Kind::reference, refuses,
                                            no_workspace,        launch};

}  // namespace grouped
