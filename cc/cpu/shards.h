// Parts of weights on the CPU: a task takes a band of rows of one member, which no block straddles.
#pragma once

#include "cc/cpu/parallel.h"
#include "cc/cpu/quantized.h"
#include "cc/math/shards.h"

namespace grouped {

// Elements of one row that the shard has.
struct ShardStrip {
  int64_t row;
  int64_t column;
  int64_t count;
  const void* elements;
};

// body(member, first row, last row) for bands of kTileRows rows.
template <class Call, class Body>
void shard_bands(Pool* pool, const Call& call, const Body& body) {
  const int64_t rows = call.source.dims[1], bands = divide_up(rows, kTileRows);
  parallel_for(pool, call.source.dims[0] * bands, [&](int64_t task) {
    const int64_t first = task % bands * kTileRows;
    body(task / bands, first, std::min(rows, first + kTileRows));
  });
}

// body(strip) for what the shard has of rows [first, last) of a member, at most kTileColumns elements of one row at a
// time.
template <class Call, class Body>
void shard_strips(const Call& call, int64_t member, int64_t first, int64_t last, const Body& body) {
  const int64_t width = call.source.dims[2], bytes = dtype_bytes(call.source.dtype);
  const Shard shard = Shard::of(call.source_table.template as<const int64_t>(), call.source.dims[0], member);
  for (int64_t row = first; row < last; ++row) {
    const int64_t begin = std::max(row * width, shard.first);
    const int64_t end = std::min((row + 1) * width, shard.first + shard.count);
    for (int64_t at = begin; at < end; at += kTileColumns) {
      const char* elements = static_cast<const char*>(shard.elements) + (at - shard.first) * bytes;
      body(ShardStrip{row, at - row * width, std::min(kTileColumns, end - at), elements});
    }
  }
}

}  // namespace grouped
