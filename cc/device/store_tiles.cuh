// What the quantisers bound by memory share: 16-bit values, tiles of one group that a block finds in its own shared
// memory, and a launch made of them.
#pragma once

#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "cc/device/store.cuh"

namespace grouped {

constexpr int kStoreThreads = 256;
constexpr int kStoreWarps = kStoreThreads / 32;
constexpr int kReserved = 1024;                  // bytes of shared memory that a block takes beside its own
constexpr int64_t kMostRows = int64_t{1} << 31;  // and tiles: 32 bits count them
constexpr int kMostGroups = 1024;

namespace device {

// What scan_store finds, for few enough groups; three lists, each with room for a few entries more than groups.
struct GroupTable {
  int32_t* offsets;
  int32_t* tiles;
  int32_t* segments;

  static constexpr int kMore = 4;
  static int bytes(const StoreProblem& p) {
    return p.ragged ? 3 * (p.scan.count + kMore) * static_cast<int>(sizeof(int32_t)) : 0;
  }
  __device__ GroupTable(const StoreProblem& p, void* memory)
      : offsets(static_cast<int32_t*>(memory)),
        tiles(offsets + p.scan.count + kMore),
        segments(tiles + p.scan.count + kMore) {}
};

// Rows [M] of ragged groups, tiles of kTileRows; `sums` is scratch of 34 entries.
template <int kTileRows>
__device__ inline void scan_sizes(const StoreProblem& p, const GroupTable& t, int64_t* sums) {
  constexpr int kEach = kMostGroups / kStoreThreads;
  const int first = threadIdx.x * kEach, count = p.scan.count;
  int64_t sizes[kEach], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sizes[i] = first + i < count ? max(p.sizes[first + i], 0) : 0;
    sum += sizes[i];
  }
  int64_t before = exclusive_sum<kStoreWarps>(sum, sums, &total);
  const int64_t end = min(total, p.rows);
  // Tiles in the low half, segments in the high one.
  int64_t parts[kEach];
  sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t start = min(before, p.rows), rows = min(before + sizes[i], p.rows) - start;
    if (first + i < count) t.offsets[first + i] = static_cast<int32_t>(start);
    before += sizes[i];
    parts[i] = divide_up(rows, kTileRows) | (p.segment ? divide_up(rows, p.segment) : 0) << 32;
    sum += parts[i];
  }
  int64_t at = exclusive_sum<kStoreWarps>(sum, sums, &total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i < count) {
      t.tiles[first + i] = static_cast<int32_t>(at);
      t.segments[first + i] = static_cast<int32_t>((at >> 32) * p.segment);
    }
    at += parts[i];
  }
  if (threadIdx.x == 0) {
    const int64_t padded = (total >> 32) * p.segment;
    const int64_t rest = max(p.rows - end, p.padded_rows ? p.padded_rows - padded : 0);
    t.offsets[count] = static_cast<int32_t>(end);
    t.segments[count] = static_cast<int32_t>(padded);
    t.tiles[count] = static_cast<int32_t>(total);
    t.tiles[count + 1] = static_cast<int32_t>(total) + static_cast<int32_t>(divide_up(rest, kTileRows));
  }
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
    tile->padded = t.segments[g] + row;
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

// Tile `item` of a launch, from its first or from its last.
template <int kTileRows, int kTileColumns>
__device__ inline bool find_in_order(const StoreProblem& p, const GroupTable& t, uint32_t item, uint32_t column_tiles,
                                     StoreTile* tile) {
  if (p.last_first) {
    const uint32_t rows = static_cast<uint32_t>(p.rows), each = (rows + kTileRows - 1) / kTileRows;
    const uint32_t tiles = (p.ragged ? t.tiles[p.scan.count + 1] : p.scan.count * each) * column_tiles;
    if (item >= tiles) return false;
    item = tiles - 1 - item;
  }
  return find_in_table<kTileRows, kTileColumns>(p, t, item, column_tiles, tile);
}

// Finds what follows a tile, by a whole warp, and keeps it in the warp's own `next` in shared memory: in registers it
// would live through everything.
template <class Find>
__device__ inline bool find_next(StoreTile& next, Find find) {
  StoreTile found = {};
  const bool more = find(&found);
  __syncwarp();
  if (threadIdx.x % 32 == 0) next = found;
  __syncwarp();
  return more;
}

// The tiles of a block, in turns. Blocks draw them one after the other, so that the grid works on neighbouring memory
// at any time: with a fixed stride blocks drift apart, and memory is read and written in worse order. A tile is drawn
// two turns ahead by one thread, and told to the others by the barrier that every turn has. Amaxes of a turn's values
// are raised behind the next barrier, one for the block: those of 8 warps and of all blocks at once would queue up.
class Turns {
 public:
  struct Shared {
    uint32_t item[2];
    uint32_t amax[2];
    uint32_t other[2];
  };

  // Has a barrier, which the first turn needs. `others`: amaxes of a second kind of values, or null.
  __device__ Turns(const StoreProblem& p, Shared* s, uint32_t* others = nullptr)
      : drawn_(p.drawn), amaxes_(p.raised), others_(others), s_(s) {
    if (threadIdx.x == 0) {
      s->item[1] = blockIdx.x + gridDim.x;
      s->amax[0] = s->amax[1] = s->other[0] = s->other[1] = 0;
    }
    __syncthreads();
  }
  // The item of the next turn.
  __device__ uint32_t next() const { return s_->item[odd_ ^ 1]; }

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

__device__ inline void copy_async(void* shared, const void* global, bool exists) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(exists ? 16 : 0) : "memory");
}

constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;

__device__ inline uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <bool kBf16>
__device__ inline float value_of(uint32_t bits16) {
  if constexpr (kBf16) return __uint_as_float(bits16 << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits16)));
}
// Value `i` of eight.
template <bool kBf16>
__device__ inline float value_at(const uint4& v, int i) {
  const uint32_t word = word_of(v, i / 2);
  if constexpr (kBf16) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
  return value_of<kBf16>(i % 2 ? word >> 16 : word & 0xFFFFu);
}
// Bits of the fp32 value of a magnitude in 16 bits.
template <bool kBf16>
__device__ inline uint32_t amax_of(uint32_t bits16) {
  return float_bits(value_of<kBf16>(bits16));
}

__device__ inline uint32_t both(uint32_t pair) { return max(pair & 0xFFFFu, pair >> 16); }

// NOTE: keeps the compiler from holding decoded values from one use of `word` to the next: decoding is cheaper than
// registers.
__device__ inline void forget(uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace device

inline int64_t groups_of(const Quantize& call) {
  return call.group_sizes.present() ? call.group_sizes.dims[0] : call.source.dims[0];
}

inline int shared_memory_of_sm() {
  static std::atomic<int> values[kMaxDevices] = {};
  std::atomic<int>& cached = values[device_index()];
  int value = cached.load(std::memory_order_relaxed);
  if (value == 0) {
    GROUPED_CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index()));
    cached.store(value, std::memory_order_relaxed);
  }
  return value;
}

// Tiles of `height` rows of all groups and of what none owns; rows have one at least, for what belongs to groups.
inline int64_t most_row_tiles_of(const Quantize& call, int64_t height) {
  const bool ragged = call.group_sizes.present();
  const int64_t groups = groups_of(call), tall = call.source.dims[ragged ? 0 : 1];
  if (!ragged) return groups * divide_up(tall, height);
  const int64_t padded = call.cross_values.present() ? call.cross_values.dims[call.turned ? 1 : 0] : 0;
  return std::max<int64_t>(most_row_tiles(tall, groups, height) + divide_up(std::max(tall, padded), height), 1);
}

// Why a call does not fit such tiles; empty: it does.
inline std::string refuses_tiles(const Quantize& call, const Target& target) {
  if (target.platform != Platform::cuda) return "is a CUDA kernel";
  const DType from = call.source.dtype;
  if (from != DType::bf16 && from != DType::f16) return "takes bfloat16 or float16, not " + describe(call.source);
  if (!call.values.present() && !call.cross_values.present()) return "stores codes";
  if (call.source_table.present()) return "takes packed weights";
  if (!call.group_sizes.present() && call.source.elements() == 0) return "takes weights that have elements";
  const int64_t width = call.source.dims[call.source.rank - 1];
  if (width == 0 || width % 8 != 0) return "takes widths that are multiples of 8";
  if (call.source.elements() / std::max<int64_t>(width, 1) + kMostGroups * kStoreRows >= kMostRows) {
    return "takes fewer than 2^31 rows in all";
  }
  if (most_row_tiles_of(call, kStoreRows) * divide_up(width, kStoreColumns) >= kMostRows) {
    return "takes fewer than 2^31 tiles";
  }
  if (groups_of(call) > kMostGroups) return "takes up to 1024 groups";
  return "";
}

// Blocks for `tiles`, at most `most` an SM, each with `bytes` of shared memory.
inline unsigned blocks_for(int64_t tiles, int most, int bytes) {
  // One at least, so that a launch that does not fit says so.
  const int64_t blocks = std::max(std::min(most, shared_memory_of_sm() / (bytes + kReserved)), 1);
  return static_cast<unsigned>(std::min(tiles, blocks * multiprocessors()));
}

// Before a launch of `grid` blocks for `tiles` tiles: clears its counter, where any block draws.
inline void ready_to_draw(StoreProblem* p, int64_t tiles, unsigned grid, cudaStream_t stream) {
  if (tiles <= 2 * int64_t{grid}) p->drawn = nullptr;
  if (p->drawn && !p->cleared) GROUPED_CUDA_CHECK(cudaMemsetAsync(p->drawn, 0, sizeof(*p->drawn), stream));
}

// As launch_store, but the scan, and the scales of groups, are the kernels' own. Where scales do not want the amaxes of
// all groups first, those that the caller wants are raised on the way. Under delayed scaling the launch that measures
// is over at once where all groups have started; the memory that it wants zero is cleared together with the counters.
template <class Measure, class Store>
void launch_tiles(const Quantize& call, const Context& context, Measure measure, Store store) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  StoreProblem p = store_problem(call, context);
  const bool ahead = finds_group_scales(call);
  const bool all = ahead && !p.encode;
  const bool on_the_way = !all && call.amax.present();
  const auto clear = [&](uint32_t* from, size_t words) {
    GROUPED_CUDA_CHECK(cudaMemsetAsync(from, 0, sizeof(uint32_t) * words, stream));
  };
  // `amax` follows `drawn`, and `rotated` follows `amax`.
  if (ahead) clear(p.scan.drawn, 2 + 2 * static_cast<size_t>(p.scan.count));
  p.cleared = ahead;
  p.drawn = p.scan.drawn;
  p.raised = p.scan.amax;
  p.starting = ahead && !all;
  if (ahead) measure(p, stream);
  p.starting = false;
  p.measure = on_the_way;
  if (on_the_way) {
    p.raised = call.amax.as<uint32_t>();  // the bits of a magnitude
    if (!call.into_amax.present()) clear(p.raised, static_cast<size_t>(p.scan.count));
  }
  p.drawn = p.scan.drawn + 1;
  p.last_first = all;
  store(p, stream);
  if (all && call.amax.present()) launch_finish(call, p, stream);
}

}  // namespace grouped
