// Where the magnitudes of a weight's blocks are kept while it is quantised in parts (ShardAmax of cc/api/calls.h).
#pragma once

#include "cc/math/store.h"

namespace grouped {

// Places of one member's magnitudes: 0 is that of the whole, then come the blocks of the form along B, as [row of
// blocks, column of blocks], then those of the form along A, column by column. Both forms share square blocks.
struct ShardSlots {
  int64_t block, outer;  // block 0: there are none
  int64_t tall, wide;    // of the form along B: rows of blocks, and columns
  int64_t cross_tall;    // of the form along A: blocks of one column
  int64_t count;

  template <class Call>
  static ShardSlots of(const Call& call) {
    const int64_t a = call.source.dims[1], b = call.source.dims[2], block = call.block;
    if (block == 0) return {0, 1, 0, 0, 0, 1};
    ShardSlots s = {block, call.block_outer, divide_up(a, call.block_outer), divide_up(b, block), 0, 0};
    s.cross_tall = s.square() ? 0 : divide_up(a, block);
    s.count = 1 + s.tall * s.wide + b * s.cross_tall;
    return s;
  }
  GROUPED_HOST_DEVICE bool square() const { return outer > 1; }
  // Of the block that element (a, b) is in.
  GROUPED_HOST_DEVICE int64_t at(int64_t a, int64_t b) const {
    return block == 0 ? 0 : 1 + a / outer * wide + b / block;
  }
  GROUPED_HOST_DEVICE int64_t cross_at(int64_t a, int64_t b) const {
    return block == 0 || square() ? at(a, b) : 1 + tall * wide + b * cross_tall + a / block;
  }
};

// The elements of one member that the shard has: elements[i] is element first + i of the member.
struct Shard {
  const void* elements;
  int64_t first;
  int64_t count;

  GROUPED_HOST_DEVICE static Shard of(const int64_t* table, int64_t groups, int64_t group) {
    const void* elements = reinterpret_cast<const void*>(table[group]);
    return {elements, table[groups + group], elements ? table[2 * groups + group] : 0};
  }
  GROUPED_HOST_DEVICE bool has(int64_t element) const { return element >= first && element < first + count; }
};

}  // namespace grouped
