// Group sizes on the CPU: which group owns which rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/api/halves.h"
#include "cc/cpu/parallel.h"

namespace grouped {

// Ends of the groups: group g owns rows [g ? ends[g - 1] : 0, ends[g]). Negative sizes count as zero, sums above `rows`
// are clamped, in 64 bits.
inline std::vector<int64_t> group_ends(const TensorView& group_sizes, int64_t rows) {
  const int32_t* sizes = group_sizes.as<const int32_t>();
  std::vector<int64_t> ends(static_cast<size_t>(group_sizes.dims[0]));
  int64_t end = 0;
  for (size_t g = 0; g < ends.size(); ++g) {
    end = std::min(rows, end + std::max<int64_t>(sizes[g], 0));
    ends[g] = end;
  }
  return ends;
}

inline int64_t group_begin(const std::vector<int64_t>& ends, int64_t group) {
  return group > 0 ? ends[static_cast<size_t>(group - 1)] : 0;
}

// The group of a row below the last end; empty groups own none.
inline int64_t group_of_row(const std::vector<int64_t>& ends, int64_t row) {
  return std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
}

// Whether an index names one of `count` rows, slots or experts; negative ones and those past the end name none.
inline bool in_range(int32_t index, int64_t count) { return index >= 0 && index < count; }

constexpr int64_t kRowsPerTask = 64;  // of the kernels that stream rows

// body(first, last) over pieces of [begin, end).
template <class Body>
void parallel_rows(Pool* pool, int64_t begin, int64_t end, const Body& body) {
  if (begin >= end) return;
  parallel_for(pool, (end - begin + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t first = begin + task * kRowsPerTask;
    body(first, std::min(end, first + kRowsPerTask));
  });
}

// Rows [begin, end) of a matrix, zeroed: the tail of a result that the library allocates.
inline void zero_rows(Pool* pool, const TensorView& matrix, int64_t begin, int64_t end) {
  const int64_t row_bytes = (matrix.rank > 1 ? matrix.dims[1] : 1) * dtype_bytes(matrix.dtype);
  parallel_rows(pool, begin, end, [&](int64_t first, int64_t last) {
    memset(matrix.as<char>() + first * row_bytes, 0, static_cast<size_t>((last - first) * row_bytes));
  });
}

// The same in some columns alone.
inline void zero_columns(Pool* pool, const TensorView& matrix, Columns columns, int64_t begin, int64_t end) {
  const int64_t bytes = dtype_bytes(matrix.dtype);
  parallel_rows(pool, begin, end, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      memset(matrix.as<char>() + (row * matrix.dims[1] + columns.first) * bytes, 0,
             static_cast<size_t>(columns.count * bytes));
    }
  });
}

}  // namespace grouped
