// Rows gathered by slot, and the rows of a token's slots summed. Tasks split rows of the result; each is read, changed
// in strips of fp32 and rounded once.
#include <algorithm>
#include <cstring>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/lanes.h"
#include "cc/cpu/panel.h"
#include "cc/kernels/kernels.h"
#include "cc/math/exact.h"

namespace grouped {
namespace {

// Where a row of `width` elements begins, from `column` on.
const char* at(const TensorView& matrix, int64_t width, int64_t row, int64_t column = 0) {
  return matrix.as<const char>() + (row * width + column) * dtype_bytes(matrix.dtype);
}
char* into(const TensorView& matrix, int64_t width, int64_t row, int64_t column = 0) {
  return const_cast<char*>(at(matrix, width, row, column));
}

void gather_row(const GatherRows& call, int64_t row) {
  const int64_t width = call.rows.rank == 1 ? 1 : call.rows.dims[1], bytes = width * dtype_bytes(call.rows.dtype);
  const int32_t slot = call.source.as<const int32_t>()[row];
  if (!in_range(slot, call.rows.dims[0] * call.slots)) {
    memset(into(call.result, width, row), 0, static_cast<size_t>(bytes));
    return;
  }
  const int64_t from = slot / call.slots;
  if (!call.weights.present()) {
    memcpy(into(call.result, width, row), at(call.rows, width, from), static_cast<size_t>(bytes));
    return;
  }
  const Isa& isa = best_isa();
  const float weight = call.weights.as<const float>()[slot];
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    float strip[kStrip];
    isa.decode(call.rows.dtype, at(call.rows, width, from, column), count, strip);
    for (int64_t j = 0; j < count; ++j) strip[j] = fl_mul(weight, strip[j]);
    isa.encode(call.result.dtype, strip, count, into(call.result, width, row, column));
  }
}

// Row `row` of a result of gathered columns.
void gather_columns(const GatherRows& call, int64_t row) {
  const int64_t from = call.rows.dims[1], count = call.source.dims[0], bytes = dtype_bytes(call.rows.dtype);
  const int32_t* source = call.source.as<const int32_t>();
  for (int64_t r = 0; r < count; ++r) {
    char* to = into(call.result, count, row, r);
    if (in_range(source[r], from * call.slots)) {
      memcpy(to, at(call.rows, from, row, source[r] / call.slots), static_cast<size_t>(bytes));
    } else {
      memset(to, 0, static_cast<size_t>(bytes));
    }
  }
}

void launch_gather(const GatherRows& call, const Context& context) {
  if (call.axis == 1) {
    parallel_for(context.pool, call.rows.dims[0], [&](int64_t row) { gather_columns(call, row); });
    return;
  }
  parallel_rows(context.pool, 0, call.source.elements(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) gather_row(call, r);
  });
}

void combine_row(const CombineRows& call, int64_t token) {
  const Isa& isa = best_isa();
  const int64_t width = call.rows.dims[1], k = call.inverse.dims[1];
  const int32_t* rows = call.inverse.as<const int32_t>() + token * k;
  const float* weights = call.weights.present() ? call.weights.as<const float>() + token * k : nullptr;
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    float sums[kStrip] = {}, strip[kStrip];
    for (int64_t j = 0; j < k; ++j) {
      if (!in_range(rows[j], call.rows.dims[0])) continue;
      isa.decode(call.rows.dtype, at(call.rows, width, rows[j], column), count, strip);
      const float weight = weights ? weights[j] : 1.0f;
      for (int64_t i = 0; i < count; ++i) sums[i] = fl_add(sums[i], fl_mul(weight, strip[i]));
    }
    isa.encode(call.result.dtype, sums, count, into(call.result, width, token, column));
  }
}

void launch_combine(const CombineRows& call, const Context& context) {
  parallel_rows(context.pool, 0, call.result.dims[0], [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) combine_row(call, t);
  });
}

// The sums of cc/cpu/lanes.h, written out: behind its functions compilers swap factors here, and where several NaNs
// meet another one comes out.
float dot(const TensorView& rows, int64_t row, const TensorView& grad, int64_t token) {
  const Isa& isa = best_isa();
  const int64_t width = rows.dims[1];
  float sums[kSums] = {};
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    float x[kStrip], y[kStrip];
    isa.decode(rows.dtype, at(rows, width, row, column), count, x);
    isa.decode(grad.dtype, at(grad, width, token, column), count, y);
    int64_t i = 0;
    for (; i + kSums <= count; i += kSums) {
      for (int64_t j = 0; j < kSums; ++j) sums[j] = fl_add(sums[j], fl_mul(x[i + j], y[i + j]));
    }
    for (int64_t j = 0; i + j < count; ++j) sums[j] = fl_add(sums[j], fl_mul(x[i + j], y[i + j]));
  }
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) sums[j] = fl_add(sums[j], sums[j + half]);
  }
  return sums[0];
}

void launch_dot(const CombineDot& call, const Context& context) {
  const int64_t k = call.inverse.dims[1];
  parallel_rows(context.pool, 0, call.inverse.dims[0], [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int64_t j = 0; j < k; ++j) {
        const int32_t row = call.inverse.as<const int32_t>()[t * k + j];
        call.result.as<float>()[t * k + j] =
            in_range(row, call.rows.dims[0]) ? dot(call.rows, row, call.grad, t) : 0.0f;
      }
    }
  });
}

}  // namespace

const Kernel<GatherRows> gather_rows_any_cpu = {"gather_rows_any_cpu", Arch::cpu,    Kind::reference, takes_any,
                                                no_workspace,          launch_gather};
const Kernel<CombineRows> combine_rows_any_cpu = {"combine_rows_any_cpu", Arch::cpu,     Kind::reference, takes_any,
                                                  no_workspace,           launch_combine};
const Kernel<CombineDot> combine_dot_any_cpu = {"combine_dot_any_cpu", Arch::cpu, Kind::reference, takes_any,
                                                no_workspace,          launch_dot};

}  // namespace grouped
