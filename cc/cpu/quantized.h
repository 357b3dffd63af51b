// Quantised arrays in memory, for the CPU kernels that write and read them (numerics 2.4; shapes: cc/api/calls.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cc/cpu/groups.h"
#include "cc/math/store.h"

namespace grouped {

// Values are worked on in tiles that stay in the second cache level: every block, and every segment, divides them.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 256;

// Rows of one group: in the source, in a form padded to segments, and in bands of kTileRows.
struct QuantizedGroup {
  int64_t begin;  // first row in the source
  int64_t rows;
  int64_t segment;  // first row of the padded form
  int64_t band;     // first band
};

struct Band {
  int64_t group;
  int64_t row;    // first, inside the group
  int64_t valid;  // rows that exist
};

class QuantizedGroups {
 public:
  // Rows [M, X] of groups, or, without sizes, weights [G, A, B], one member per group.
  QuantizedGroups(const TensorView& shape, const TensorView& group_sizes, int64_t segment) {
    const bool ragged = group_sizes.present();
    std::vector<int64_t> ends;
    if (ragged) ends = group_ends(group_sizes, shape.dims[0]);
    const int64_t count = ragged ? group_sizes.dims[0] : shape.dims[0];
    int64_t begin = 0, padded = 0, band = 0;
    for (int64_t g = 0; g < count; ++g) {
      const int64_t rows = ragged ? ends[static_cast<size_t>(g)] - begin : shape.dims[1];
      groups_.push_back({begin, rows, padded, band});
      begin += rows;
      padded += segment > 0 ? divide_up(rows, segment) * segment : rows;
      band += divide_up(rows, kTileRows);
    }
    end_ = begin;
    padded_ = padded;
    bands_ = band;
  }

  const QuantizedGroup& operator[](int64_t g) const { return groups_[static_cast<size_t>(g)]; }
  int64_t count() const { return static_cast<int64_t>(groups_.size()); }
  int64_t end() const { return end_; }        // rows that belong to a group
  int64_t padded() const { return padded_; }  // rows of the padded form that do
  int64_t bands() const { return bands_; }

  Band band(int64_t index) const {
    const auto after = std::upper_bound(groups_.begin(), groups_.end(), index,
                                        [](int64_t i, const QuantizedGroup& group) { return i < group.band; });
    const QuantizedGroup& group = *(after - 1);
    const int64_t row = (index - group.band) * kTileRows;
    return {after - 1 - groups_.begin(), row, std::min(kTileRows, group.rows - row)};
  }

 private:
  std::vector<QuantizedGroup> groups_;
  int64_t end_ = 0, padded_ = 0, bands_ = 0;
};

// `count` codes, one per byte, to where code `first` of a row starts; two per byte for E2M1, where `first` is even.
inline void put_codes(DType type, const uint8_t* codes, int64_t count, uint8_t* row, int64_t first) {
  if (type != DType::u8) {
    memcpy(row + first, codes, static_cast<size_t>(count));
    return;
  }
  uint8_t* to = row + first / 2;
  for (int64_t i = 0; i + 1 < count; i += 2) to[i / 2] = pack_e2m1(codes[i], codes[i + 1]);
  if (count % 2) to[count / 2] = pack_e2m1(codes[count - 1], 0);
}

inline void take_codes(DType type, const uint8_t* row, int64_t first, int64_t count, uint8_t* codes) {
  if (type != DType::u8) {
    memcpy(codes, row + first, static_cast<size_t>(count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) codes[i] = unpack_e2m1(row[(first + i) / 2], static_cast<int>(i % 2));
}

}  // namespace grouped
