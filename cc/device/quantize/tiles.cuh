// What the quantisers bound by memory share: values of a source as they come, tiles of one group that a block finds in
// its own shared memory, and a launch made of them.
#pragma once

#include <cuda_fp16.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "cc/device/common/copy_async.cuh"
#include "cc/device/common/most_columns.h"
#include "cc/device/quantize/group_scales.cuh"

namespace grouped {

constexpr int kStoreThreads = 256;
constexpr int kStoreWarps = kStoreThreads / 32;
constexpr int kReserved = 1024;                  // bytes of shared memory that a block takes beside its own
constexpr int64_t kMostRows = int64_t{1} << 31;  // and tiles: 32 bits count them
constexpr int kMostGroups = 4096;                // that ragged rows may have
constexpr int kFewGroups = 1024;                 // where a block has 99 KiB of shared memory

namespace device {

// What scan_store finds, for few enough groups; lists, each with room for a few entries more than groups.
struct GroupTable {
  int32_t* offsets;
  int32_t* tiles;
  int32_t* segments;  // where rows are padded

  static constexpr int kMore = 4;
  static constexpr int most_bytes(int groups) { return 3 * (groups + kMore) * static_cast<int>(sizeof(int32_t)); }
  static int bytes(const StoreProblem& p) {
    return p.ragged ? (p.segment ? 3 : 2) * (p.scan.count + kMore) * static_cast<int>(sizeof(int32_t)) : 0;
  }
  __device__ GroupTable(const StoreProblem& p, void* memory)
      : offsets(static_cast<int32_t*>(memory)),
        tiles(offsets + p.scan.count + kMore),
        segments(tiles + p.scan.count + kMore) {}
};

// Rows [M] of ragged groups, tiles of kTileRows; `scratch` has 33 entries.
template <int kTileRows>
__device__ inline void scan_sizes(const StoreProblem& p, const GroupTable& t, int64_t* scratch) {
  constexpr int kEach = 4;
  list_groups<kStoreThreads, kEach, kTileRows, false>(t, p.scan.count, p.rows, p.padded_rows, p.segment, scratch,
                                                      [&](int g) { return p.sizes[g]; });
  __syncthreads();
}

// As find_tile, from the table; weights need none. There are fewer rows than 2^31, so all but addresses has 32 bits.
template <int kTileRows, int kTileColumns>
__device__ inline bool find_in_table(const StoreProblem& p, const GroupTable& t, uint32_t item, uint32_t column_tiles,
                                     StoreTile* tile) {
  const int row_tile = static_cast<int>(item / column_tiles);
  int row, left;
  if (p.ragged) {
    if (row_tile >= t.tiles[p.scan.count + 1]) return false;
    const int g = find_last(t.tiles, p.scan.count + 1, row_tile);
    row = (row_tile - t.tiles[g]) * kTileRows;
    left = g < p.scan.count ? t.offsets[g + 1] - t.offsets[g] - row : 0;
    tile->group = g;
    tile->source = t.offsets[g] + row;
    tile->padded = (p.segment ? t.segments[g] : 0) + row;
  } else {
    const int rows = static_cast<int>(p.rows), each = (rows + kTileRows - 1) / kTileRows, g = row_tile / each;
    if (g >= p.scan.count) return false;
    row = (row_tile - g * each) * kTileRows;
    left = rows - row;
    tile->group = g;
    tile->source = g * rows + row;
    tile->padded = 0;
  }
  tile->row = row;
  tile->rows = min(left, kTileRows);
  const int column = static_cast<int>(item - row_tile * column_tiles) * kTileColumns;
  tile->column = column;
  tile->columns = min(static_cast<int>(p.width) - column, kTileColumns);
  return true;
}

// All tiles of a launch.
template <int kTileRows>
__device__ inline uint32_t tiles_in_all(const StoreProblem& p, const GroupTable& t, uint32_t column_tiles) {
  const uint32_t rows = static_cast<uint32_t>(p.rows), each = (rows + kTileRows - 1) / kTileRows;
  return (p.ragged ? t.tiles[p.scan.count + 1] : p.scan.count * each) * column_tiles;
}

// Tile `item` of a launch, from its first or from its last.
template <int kTileRows, int kTileColumns>
__device__ inline bool find_in_order(const StoreLaunch& p, const GroupTable& t, uint32_t item, uint32_t column_tiles,
                                     StoreTile* tile) {
  if (p.last_first) {
    const uint32_t tiles = tiles_in_all<kTileRows>(p, t, column_tiles);
    if (item >= tiles) return false;
    item = tiles - 1 - item;
  }
  return find_in_table<kTileRows, kTileColumns>(p, t, item, column_tiles, tile);
}

// Finds what follows a tile, by a whole warp, and keeps it in the warp's own `next` in shared memory: in registers it
// would live through everything.
template <class Tile, class Find>
__device__ inline bool find_next(Tile& next, Find find) {
  Tile found = {};
  const bool more = find(&found);
  __syncwarp();
  if (threadIdx.x % 32 == 0) next = found;
  __syncwarp();
  return more;
}

// The tiles of a block, in turns. Blocks draw them one after the other, so that the grid works on neighbouring memory
// at any time: with a fixed stride blocks drift apart, and memory is read and written in worse order. A tile is drawn
// two turns ahead by one thread, or three where it asks right behind the barrier that every turn has, which tells it to
// the others. Amaxes of a turn's values are raised behind the next barrier, one for the block: those of 8 warps and of
// all blocks at once would queue up.
class Turns {
 public:
  struct Shared {
    uint32_t item[2];
    uint32_t amax[2];
    uint32_t other[2];
  };

  // Has a barrier, which the first turn needs. `others`: amaxes of a second kind of values, or null.
  __device__ Turns(const StoreLaunch& p, Shared* s, uint32_t* others = nullptr)
      : drawn_(p.drawn), amaxes_(p.raised), others_(others), s_(s) {
    if (threadIdx.x == 0) {
      s->item[1] = blockIdx.x + gridDim.x;
      s->amax[0] = s->amax[1] = s->other[0] = s->other[1] = 0;
    }
    __syncthreads();
  }
  // The item of the next turn.
  __device__ uint32_t next() const { return s_->item[odd_ ^ 1]; }
  // Behind meet(): that of the turn behind it.
  __device__ uint32_t after_next() const { return s_->item[odd_]; }
  __device__ int odd() const { return odd_; }

  // Draws what meet() tells: called well before it, as the counter takes a while to answer.
  __device__ void draw() {
    if (threadIdx.x == 0 && drawn_) item_ = 2 * gridDim.x + atomicAdd(drawn_, 1u);
  }
  // What this warp has seen of the values of the turn, which are of `group`.
  __device__ void see(uint32_t amax, int group) {
    amax = __reduce_max_sync(~0u, amax);
    if (threadIdx.x % 32 == 0) atomicMax(&s_->amax[odd_], amax);
    group_ = group;
  }
  // Beside, of the other values.
  __device__ void see_other(uint32_t amax) {
    amax = __reduce_max_sync(~0u, amax);
    if (threadIdx.x % 32 == 0) atomicMax(&s_->other[odd_], amax);
  }
  // The turn's barrier.
  __device__ void meet() {
    if (threadIdx.x == 0) s_->item[odd_] = item_;
    __syncthreads();
    raise();
  }
  __device__ void advance() { odd_ ^= 1; }
  // After the last turn, behind its advance().
  __device__ void finish() {
    __syncthreads();
    raise();
  }

 private:
  // The amax of the group of the turn before, by what that turn has seen.
  __device__ void raise() {
    if (group_ >= 0 && threadIdx.x == 32) {
      uint32_t& seen = s_->amax[odd_ ^ 1];
      atomicMax(amaxes_ + group_, float_bits(amax_value(seen)));
      seen = 0;
      if (others_) {
        uint32_t& other = s_->other[odd_ ^ 1];
        atomicMax(others_ + group_, float_bits(amax_value(other)));
        other = 0;
      }
    }
    group_ = -1;
  }

  uint32_t* drawn_;
  uint32_t* amaxes_;
  uint32_t* others_;
  Shared* s_;
  uint32_t item_ = 0x7FFFFFFF;  // past every launch
  int group_ = -1, odd_ = 0;
};

// Before a launch stores: all of its blocks draw tiles and measure them, and each block goes on when all `tiles` are
// measured. A block waits for tiles alone that running blocks have drawn, so it does not matter which blocks run.
// `measure(item)` says whether there is such a tile; `told` is shared memory.
template <class Measure>
__device__ inline void measure_first(const StoreLaunch& p, uint32_t tiles, volatile uint32_t* told, Measure measure) {
  uint32_t *const drawn = p.scan.drawn, *const measured = p.scan.drawn + StoreScan::kMeasured;
  uint32_t own = 0;
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) *told = atomicAdd(drawn, 1u);
    __syncthreads();
    if (!measure(*told)) break;
    ++own;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // what the block has measured is seen before the count is
    atomicAdd(measured, own);
    while (load_acquire(measured) < tiles) __nanosleep(100);
  }
  __syncthreads();
}

// 16 bytes, or zeros.
__device__ inline void copy_vector(void* shared, const void* global, bool exists) {
  copy_async<16>(shared_address(shared), global, exists ? 16 : 0);
}

template <DType kFrom>
constexpr int kBytes = kFrom == DType::f32 ? 4 : 2;  // of a value

// A tile, and the address of its first value; of gathered rows that of its column in the first row of the source.
struct SourceTile : StoreTile {
  const char* values;
};

// As find_in_order. Weights in a list are where the table says; their addresses are found while the values of the tile
// before are on their way.
template <DType kFrom, int kTileRows, int kTileColumns>
__device__ inline bool find_source(const StoreLaunch& p, const GroupTable& t, uint32_t item, uint32_t column_tiles,
                                   SourceTile* tile) {
  if (!find_in_order<kTileRows, kTileColumns>(p, t, item, column_tiles, tile)) return false;
  const char* base = static_cast<const char*>(p.source);
  int64_t row = tile->source;
  if (p.table) {
    base = reinterpret_cast<const char*>(p.table[tile->group]);
    row = tile->row;
  }
  if (p.gather.places) row = 0;
  tile->values = base + kBytes<kFrom> * (row * p.width + tile->column);
  return true;
}

// NOTE: the host sees no addresses of a list's members, so the kernels look themselves. Widths are multiples of 8:
// where a tile's first value is aligned, all of its vectors are.
__device__ inline bool has_vectors(const char* values) { return reinterpret_cast<uintptr_t>(values) % 16 == 0; }

// 16 bytes of values from an address that is aligned as one value is.
template <DType kFrom>
__device__ inline uint4 load_singly(const char* from) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kFrom == DType::f32) {
      words[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
    } else {
      const uint16_t* pair = reinterpret_cast<const uint16_t*>(from) + 2 * i;
      words[i] = __ldg(pair) | static_cast<uint32_t>(__ldg(pair + 1)) << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Starts copies of `count` lines of 16 bytes, `pitch` apart and zeros from line `exist` on, to every `step`-th place of
// shared memory. What is not aligned is there at once.
template <DType kFrom, int kCount>
__device__ inline void copy_lines(uint4* to, int step, const char* from, int64_t pitch, int exist, bool vectors) {
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) copy_vector(to + i * step, from + i * pitch, i < exist);
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) to[i * step] = i < exist ? load_singly<kFrom>(from + i * pitch) : uint4{};
  }
}

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;  // of two values of 16 bits

__device__ inline uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Eight values as they come.
struct Floats8 {
  uint4 low, high;
};
template <DType kFrom>
using Eight = typename std::conditional<kFrom == DType::f32, Floats8, uint4>::type;

template <DType kFrom>
__device__ inline float value_of(uint32_t bits) {
  if constexpr (kFrom == DType::f32) return __uint_as_float(bits);
  if constexpr (kFrom == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}
// Value `i` of 16 bytes, or of eight.
template <DType kFrom>
__device__ inline float value_at(const uint4& v, int i) {
  if constexpr (kFrom == DType::f32) return __uint_as_float(word_of(v, i));
  const uint32_t word = word_of(v, i / 2);
  if constexpr (kFrom == DType::bf16) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
  return value_of<kFrom>(i % 2 ? word >> 16 : word & 0xFFFFu);
}
template <DType kFrom>
__device__ inline float value_at(const Floats8& v, int i) {
  return value_at<kFrom>(i < 4 ? v.low : v.high, i % 4);
}
// Bits of the fp32 value of a magnitude as the source has it.
template <DType kFrom>
__device__ inline uint32_t amax_of(uint32_t bits) {
  return float_bits(value_of<kFrom>(bits));
}

// Value by value the larger one of a magnitude and that of a value.
__device__ inline uint4 larger_of(const uint4& a, const uint4& v) {
  return make_uint4(__vmaxu2(a.x, v.x & kMagnitudes), __vmaxu2(a.y, v.y & kMagnitudes),
                    __vmaxu2(a.z, v.z & kMagnitudes), __vmaxu2(a.w, v.w & kMagnitudes));
}
__device__ inline uint4 larger_floats(const uint4& a, const uint4& v) {
  return make_uint4(max(a.x, v.x & kMagnitude), max(a.y, v.y & kMagnitude), max(a.z, v.z & kMagnitude),
                    max(a.w, v.w & kMagnitude));
}
__device__ inline Floats8 larger_of(const Floats8& a, const Floats8& v) {
  return {larger_floats(a.low, v.low), larger_floats(a.high, v.high)};
}

__device__ inline uint32_t both(uint32_t pair) { return max(pair & 0xFFFFu, pair >> 16); }

// The largest magnitudes of values 0, 2, 4, 6 and of values 1, 3, 5, 7.
__device__ inline uint32_t largest_pair_of(const uint4& v) {
  return __vmaxu2(__vmaxu2(v.x & kMagnitudes, v.y & kMagnitudes), __vmaxu2(v.z & kMagnitudes, v.w & kMagnitudes));
}
// The largest magnitude of eight values, as the source has it.
__device__ inline uint32_t largest_of(const uint4& v) { return both(largest_pair_of(v)); }
// Of two rows, the first in the low half.
__device__ inline uint32_t largest_of(const uint4& v, const uint4& w) {
  const uint32_t low = largest_pair_of(v), high = largest_pair_of(w);
  return __vmaxu2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}
__device__ inline uint32_t largest_float(const uint4& v) {
  return max(max(v.x & kMagnitude, v.y & kMagnitude), max(v.z & kMagnitude, v.w & kMagnitude));
}
__device__ inline uint32_t largest_of(const Floats8& v) { return max(largest_float(v.low), largest_float(v.high)); }

__device__ inline uint4 shuffled(const uint4& v, int mask) {
  return make_uint4(__shfl_xor_sync(~0u, v.x, mask), __shfl_xor_sync(~0u, v.y, mask), __shfl_xor_sync(~0u, v.z, mask),
                    __shfl_xor_sync(~0u, v.w, mask));
}
__device__ inline Floats8 shuffled(const Floats8& v, int mask) {
  return {shuffled(v.low, mask), shuffled(v.high, mask)};
}

// NOTE: keeps the compiler from holding decoded values from one use of `word` to the next: decoding is cheaper than
// registers.
__device__ inline void forget(uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace device

inline int64_t groups_of(const Quantize& call) {
  return call.group_sizes.present() ? call.group_sizes.dims[0] : call.source.dims[0];
}

inline int shared_memory_of_sm() { return attribute_of_device<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(); }
inline int shared_memory_of_block() { return attribute_of_device<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }

// Tiles of `height` rows of all groups and of what none owns; rows have one at least, for what belongs to groups.
inline int64_t most_row_tiles_of(const Quantize& call, int64_t height) {
  const bool ragged = call.group_sizes.present();
  const int64_t groups = groups_of(call), tall = call.rows().dims[ragged ? 0 : 1];
  if (!ragged) return groups * divide_up(tall, height);
  const int64_t padded = call.cross_values.present() ? call.cross_values.dims[call.transposed ? 1 : 0] : 0;
  return std::max<int64_t>(most_row_tiles(tall, groups, height) + divide_up(std::max(tall, padded), height), 1);
}

constexpr int kSmallBlock = 99 * 1024;  // bytes
// Whether a block has no more than kSmallBlock of shared memory.
inline bool has_small_blocks(const Target& target) { return target.sm == 86 || target.sm == 89 || target.sm >= 120; }

// What a kernel that needs kBytes beside its table of groups may ask for on this device.
template <int kBytes>
int most_shared_bytes() {
  using device::GroupTable;
  static_assert(kBytes + GroupTable::most_bytes(kFewGroups) <= kSmallBlock, "fits everywhere");
  return std::min(kBytes + GroupTable::most_bytes(kMostGroups), shared_memory_of_block());
}

// Why a call does not fit such tiles; empty: it does.
inline std::string refuses_tiles(const Quantize& call, const Target& target) {
  const DType from = call.source.dtype;
  if (from != DType::bf16 && from != DType::f16 && from != DType::f32) {
    return "takes float32, bfloat16 or float16, not " + describe(call.source);
  }
  if (!call.values.present() && !call.cross_values.present()) return "stores codes";
  if (!call.group_sizes.present() && call.source.elements() == 0) return "takes weights that have elements";
  const int64_t width = call.source.dims[call.source.rank - 1];
  if (width == 0 || width % 8 != 0) return "takes widths that are multiples of 8";
  if (width > kMostColumns) return refuses_many_columns(call.source);
  if (call.rows().elements() / std::max<int64_t>(width, 1) + kMostGroups * kStoreRows >= kMostRows) {
    return "takes fewer than 2^31 rows in all";
  }
  if (most_row_tiles_of(call, kStoreRows) * divide_up(width, kStoreColumns) >= kMostRows) {
    return "takes fewer than 2^31 tiles";
  }
  const int64_t most = has_small_blocks(target) ? kFewGroups : kMostGroups;
  if (call.group_sizes.present() && groups_of(call) > most) {
    return "takes up to " + std::to_string(most) + " groups of rows on this device";
  }
  return "";
}

// How many blocks of an SM, at most `most`, have `bytes` of shared memory each.
inline int blocks_of_sm(int most, int bytes) { return std::min(most, shared_memory_of_sm() / (bytes + kReserved)); }

// Blocks for `tiles`, at most `most` per SM, each with `bytes` of shared memory.
inline unsigned blocks_for(int64_t tiles, int most, int bytes) {
  // One at least, so that a launch that does not fit says so.
  const int64_t blocks = std::max(blocks_of_sm(most, bytes), 1);
  return static_cast<unsigned>(std::min(tiles, blocks * multiprocessors()));
}

// Before a launch of `grid` blocks for `tiles` tiles: clears its counter, where any block draws.
inline void ready_to_draw(StoreLaunch* p, int64_t tiles, unsigned grid, const LaunchOptions& how) {
  if (tiles <= 2 * int64_t{grid}) p->drawn = nullptr;
  if (p->drawn && !how.cleared) p->drawn = zeros_or_clear(how.context, p->drawn);
}

// As launch_store, but the scan, and the scales of groups, are the kernels' own. Where scales do not want the amaxes of
// all groups first, those that the caller wants are raised on the way. Under delayed scaling `store` itself measures
// groups that have not started (measure_first), which FP8 alone can have; the memory that it wants zero is cleared
// together with the counters.
template <class Launch, class Measure, class Store>
void launch_tiles(const Quantize& call, const Context& context, Measure measure, Store store) {
  LaunchOptions how = {context, static_cast<cudaStream_t>(context.stream), false};
  Launch p = launch_of<Launch>(call, context);
  const bool ahead = finds_group_scales(call);
  const bool all = ahead && !p.scale;
  const bool on_the_way = !all && call.amax.present();
  if (ahead) p.scan.count_in(zeros_or_clear(context, p.scan.drawn, p.scan.counters()));
  how.cleared = ahead;
  uint32_t* const wanted = on_the_way ? call.amax.as<uint32_t>() : nullptr;  // the bits of magnitudes
  if (on_the_way && !call.into_amax.present()) {
    const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(p.scan.count);
    GROUPED_CUDA_CHECK(cudaMemsetAsync(wanted, 0, bytes, how.stream));
  }
  p.drawn = p.scan.drawn;
  p.raised = p.scan.amax;
  p.starting = ahead && !all;
  if (all) measure(p, how);
  p.measure = on_the_way;
  if (on_the_way) p.raised = wanted;
  p.drawn = p.scan.drawn + 1;
  p.last_first = all;
  store(p, how);
  if (all && call.amax.present()) launch_finish(call, p, how.stream);
}

}  // namespace grouped
