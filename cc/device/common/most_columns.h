// How wide rows may be.
#pragma once

#include <cstdint>
#include <string>

#include "cc/api/tensor.h"

namespace grouped {

// Of kernels that count columns with 32 bits, also those of the steps behind the last one, which have 2048 at most.
constexpr int64_t kMostColumns = (int64_t{1} << 31) - 4096;

// Of rows of any rank.
inline std::string refuses_many_columns(const TensorView& rows) {
  if (rows.dims[rows.rank - 1] <= kMostColumns) return "";
  return "takes rows of up to 2^31 - 4096 columns, got " + describe(rows);
}

}  // namespace grouped
