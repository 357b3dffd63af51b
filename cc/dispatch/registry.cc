// The tables, best first. A kernel that is not listed here does not exist; nothing registers itself.
#include "cc/dispatch/dispatch.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

template <class Call, size_t N>
Table<Call> rows_of(const Kernel<Call> (&rows)[N]) {
  return {rows, rows + N};
}

}  // namespace

template <>
Table<GroupedMatmul> table<GroupedMatmul>() {
  static const Kernel<GroupedMatmul> rows[] = {
      grouped_matmul_any_cpu,
      // Never reached unless pinned: they take what the row above takes, at most.
      grouped_matmul_any_cpu_avx512,
      grouped_matmul_any_cpu_avx2,
      grouped_matmul_any_cpu_plain,
  };
  return rows_of(rows);
}

template <>
Table<GroupSum> table<GroupSum>() {
  static const Kernel<GroupSum> rows[] = {
      group_sum_any_cpu,
  };
  return rows_of(rows);
}

template <>
Table<RowDot> table<RowDot>() {
  static const Kernel<RowDot> rows[] = {
      row_dot_any_cpu,
  };
  return rows_of(rows);
}

template <>
Table<ScaleRows> table<ScaleRows>() {
  static const Kernel<ScaleRows> rows[] = {
      scale_rows_any_cpu,
  };
  return rows_of(rows);
}

}  // namespace grouped
