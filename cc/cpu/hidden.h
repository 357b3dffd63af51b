// Hidden rows on the CPU: the gate and the linear half of each, in blocks of `interleave` columns (numerics 5), as two
// strips of floats and back.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cc/api/calls.h"
#include "cc/cpu/formats.h"
#include "cc/cpu/panel.h"
#include "cc/math/activation.h"

namespace grouped {

class HiddenStrips {
 public:
  // Of rows that `width` activated columns come from.
  HiddenStrips(const Isa& isa, const ActivationParams& activation, int64_t width)
      : isa(isa),
        spec(activation_spec(activation)),
        width_(width),
        gated_(is_gated(spec.kind)),
        block_(gated_ && activation.interleave ? activation.interleave : width) {}

  // Activated columns from `column` on that one strip takes: whole blocks, or a part of one that is larger.
  int64_t strip(int64_t column) const {
    if (!gated_) return std::min(kStrip, width_ - column);
    if (split()) return std::min(kStrip, block_ - column % block_);
    return std::min(kStrip / block_ * block_, width_ - column);
  }

  // The two halves of `count` activated columns, as `strip` gave them; u is zero where there is none.
  void read(const TensorView& rows, int64_t row, int64_t column, int64_t count, float* a, float* u) const {
    const char* from = place(rows, row, column);
    if (!gated_) {
      isa.decode(rows.dtype, from, count, a);
      std::fill(u, u + count, 0.0f);
    } else if (split()) {
      isa.decode(rows.dtype, from, count, a);
      isa.decode(rows.dtype, from + block_ * dtype_bytes(rows.dtype), count, u);
    } else {
      float both[2 * kStrip];
      isa.decode(rows.dtype, from, 2 * count, both);
      exchange(count, [&](int64_t i, int64_t gate, int64_t linear) { a[i] = both[gate], u[i] = both[linear]; });
    }
  }

  void write(const TensorView& rows, int64_t row, int64_t column, int64_t count, const float* a, const float* u) const {
    char* to = place(rows, row, column);
    if (!gated_) {
      isa.encode(rows.dtype, a, count, to);
    } else if (split()) {
      isa.encode(rows.dtype, a, count, to);
      isa.encode(rows.dtype, u, count, to + block_ * dtype_bytes(rows.dtype));
    } else {
      float both[2 * kStrip];
      exchange(count, [&](int64_t i, int64_t gate, int64_t linear) { both[gate] = a[i], both[linear] = u[i]; });
      isa.encode(rows.dtype, both, 2 * count, to);
    }
  }

  const Isa& isa;
  const ActivationSpec spec;

 private:
  // Whether a strip is two runs of memory, a block being larger than it.
  bool split() const { return block_ > kStrip; }

  char* place(const TensorView& rows, int64_t row, int64_t column) const {
    const int64_t first = gated_ ? gate_column_of(column, block_) : column;
    return rows.as<char>() + (row * rows.dims[1] + first) * dtype_bytes(rows.dtype);
  }

  template <class Body>
  void exchange(int64_t count, const Body& body) const {
    if (block_ == 1) {  // a vector loop
      for (int64_t i = 0; i < count; ++i) body(i, 2 * i, 2 * i + 1);
      return;
    }
    for (int64_t first = 0; first < count; first += block_) {
      for (int64_t i = first; i < first + block_; ++i) body(i, first + i, first + i + block_);
    }
  }

  const int64_t width_;
  const bool gated_;
  const int64_t block_;
};

}  // namespace grouped
