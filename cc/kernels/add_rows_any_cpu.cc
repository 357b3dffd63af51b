// Rows times one factor, some elements dropped at random, added to fp32 rows; one rounding. Tasks split rows.
#include <algorithm>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"
#include "cc/math/drops.h"
#include "cc/math/rotate.h"

namespace grouped {
namespace {

std::string refuses(const AddRows& call, const Target&) {
  return first_of({refuses_unless_plain("rows", call.rows), refuses_unless_plain("result", call.result)});
}

// Zeroes what the mask drops of columns first ... first + count - 1, the first a multiple of four.
void drop(const AddRows& call, uint64_t key, int64_t first, int64_t count, int64_t row, int64_t group, float* strip) {
  for (int64_t j = 0; j < count; j += 4) {
    const Words4 words = random_words(key, static_cast<uint32_t>(first + j), static_cast<uint32_t>(row),
                                      static_cast<uint32_t>(group), static_cast<uint32_t>(call.stream));
    for (int64_t i = 0; i < 4 && j + i < count; ++i) {
      if (drops(words.word[i], call.rate)) strip[j + i] = 0.0f;
    }
  }
}

void add_row(const AddRows& call, const std::vector<int64_t>& ends, uint64_t key, int64_t r) {
  const Isa& isa = best_isa();
  const int64_t width = call.rows.dims[1];
  const int64_t group = group_of_row(ends, r);
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    const int64_t element = r * width + column;
    float strip[kStrip];
    isa.decode(call.rows.dtype, call.rows.as<const char>() + element * dtype_bytes(call.rows.dtype), count, strip);
    for (int64_t j = 0; j < count; ++j) strip[j] = fl_mul(strip[j], call.factor);
    if (call.key.present()) drop(call, key, column, count, r - group_begin(ends, group), group, strip);
    if (call.base.present()) {
      const float* base = call.base.as<const float>() + element;
      for (int64_t j = 0; j < count; ++j) strip[j] = with_term(base[j], strip[j]);
    }
    isa.encode(call.result.dtype, strip, count, call.result.as<char>() + element * dtype_bytes(call.result.dtype));
  }
}

void launch(const AddRows& call, const Context& context) {
  const int64_t rows = call.rows.dims[0];
  const std::vector<int64_t> ends = group_ends(call.group_sizes, rows);
  const uint64_t key = call.key.present() ? key_of(call.key.as<const uint32_t>()) : 0;
  parallel_rows(context.pool, 0, ends.back(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) add_row(call, ends, key, r);
  });
  if (!call.into.present()) zero_rows(context.pool, call.result, ends.back(), rows);
}

}  // namespace

const Kernel<AddRows> add_rows_any_cpu = {"add_rows_any_cpu", Arch::cpu, Kind::reference, refuses,
                                          no_workspace,       launch};

}  // namespace grouped
