// What the kernels of quantised storage share: where groups, tiles and segments are, and the ends of a launch that
// belong to groups instead of tiles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cc/api/calls.h"
#include "cc/api/context.h"
#include "cc/device/common/group_scan.cuh"
#include "cc/math/store.h"

namespace grouped {

constexpr int kStoreRows = 128;  // of a tile: blocks and segments divide it
constexpr int kStoreColumns = 128;

// In the workspace. Rows of group g are offsets[g] ... offsets[g + 1] - 1, its row tiles tiles[g] ... tiles[g + 1] - 1,
// its first row in a padded form segments[g]. Weights are groups of equal size. What no group owns counts as group
// `count`: its tiles cover both the rest of the rows and that of the padded rows.
struct StoreScan {
  int64_t* offsets;   // [count + 1]
  int64_t* tiles;     // [count + 2]
  int64_t* segments;  // [count + 1]
  uint32_t* drawn;    // [kDraws]; tiles that the blocks of each launch have drawn, and kMeasured; zero at first
  uint32_t* amax;     // [count]; zero at first
  uint32_t* rotated;  // [count]; of the rotated values, or of act(h) beside gradients
  // Of held_tiles.cuh, [count] each, zero at first: tiles that are measured, and when all are, the group's scale.
  uint32_t* counted;
  uint32_t* told;
  int count;

  static constexpr size_t kDraws = 3, kMeasured = 2;  // tiles that a launch which stores has measured before
  static constexpr size_t kWords = 4;                 // of a group, from amax on
  static size_t bytes(int64_t count) {
    const size_t n = static_cast<size_t>(count);
    return align_up(sizeof(int64_t) * (3 * n + 4) + sizeof(uint32_t) * (kWords * n + kDraws));
  }
  static StoreScan at(void* workspace, int64_t count) {
    int64_t* words = static_cast<int64_t*>(workspace);
    uint32_t* drawn = reinterpret_cast<uint32_t*>(words + 3 * count + 4);
    StoreScan scan = {};
    scan.offsets = words;
    scan.tiles = words + count + 1;
    scan.segments = words + 2 * count + 3;
    scan.count = static_cast<int>(count);
    scan.count_in(drawn);
    return scan;
  }

  // Words of `drawn` and of all that follows it.
  size_t counters() const { return kDraws + kWords * static_cast<size_t>(count); }
  void count_in(uint32_t* words) {
    drawn = words;
    amax = drawn + kDraws;
    rotated = amax + count;
    counted = rotated + count;
    told = counted + count;
  }
};

// One form of what is stored.
struct QuantizedForm {
  uint8_t* values;  // null: not wanted
  void* scales;
  float* group_scales;
  ScalePlace place;
  int64_t pitch;  // bytes from one row of codes to the next
};

// A tile: rows of one group, or of what no group owns.
struct StoreTile {
  int group;
  int64_t row;     // first, inside the group
  int64_t source;  // first, in the source
  int64_t padded;  // first, in the padded form
  int rows;        // that exist
  int64_t column;
  int columns;
};

// Which row of the source each row is, where they are gathered.
struct Gather {
  const int32_t* places;  // null: rows are those of the source
  uint32_t limit, slots;  // places of the source, and of each of its rows

  // Of a row that a group owns; below 0: zeros.
  __device__ int row(int64_t at) const {
    const uint32_t place = static_cast<uint32_t>(__ldg(places + at));
    return place < limit ? static_cast<int>(place / slots) : -1;
  }
};

// A Quantize as all of its kernels take it.
struct StoreProblem {
  StoreScan scan;
  const void* source;
  DType source_type;
  const int64_t* table;  // null: packed
  const int32_t* sizes;  // null: weights
  Gather gather;
  int64_t rows;         // of all groups, or of one weight
  int64_t padded_rows;  // of the padded form; 0: there is none
  int64_t width;
  bool ragged;
  int segment;      // 0: padded rows are those that exist
  bool transposed;  // the cross form has rows as its last axis
  QuantizedForm forms[2];
  DType type;
  bool wide_scales;
  StoreRule rule;
  int block;  // a power of two, or 0
  int block_outer;
  int block_bits;  // their logarithms
  int outer_bits;
  const float* scale;
  const int32_t* skip;
};

// What one launch does of it, and where.
struct StoreLaunch : StoreProblem {
  bool measure;              // amaxes of groups are wanted from this launch
  bool starting;             // groups without a scale of delayed scaling are measured: before it stores, or alone
  const float* scale_other;  // then: scales of act(h), which is stored beside gradients, or null
  uint32_t* raised;          // [groups]: where they go
  bool last_first;           // a launch before has read all tiles: the L2 cache may hold the last ones
  uint32_t* drawn;           // tiles that its blocks have drawn; null: no block has more than two
};

// What is chosen value by value, or block by block; FP8 has nothing of it.
struct FineChoices {
  const uint32_t* key;
  uint32_t stream;
  bool stochastic;
  bool rotate;  // the cross form
  int choice;   // of 4over6: 0 none, 1 absolute errors, 2 squares

  static FineChoices of(const Quantize& call);
};
struct FineLaunch : StoreLaunch, FineChoices {};

// How the host launches it.
struct LaunchOptions {
  const Context& context;
  cudaStream_t stream;
  bool cleared;  // counters of drawn tiles are zero already
};

namespace device {

template <int kTileRows>
struct TilesOf {
  __device__ int64_t operator()(int64_t rows) const { return divide_up(rows, kTileRows); }
};

// Where groups are, by one block, into lists as StoreScan has them; kSegments: also where rows are not padded.
// `tiles_of(rows)`: entries of `tiles` for so many rows of a group. `scratch` has 33 entries.
template <int kThreads, int kEach, int kTileRows, bool kSegments, class Lists, class Size,
          class Tiles = TilesOf<kTileRows>>
__device__ inline void list_groups(const Lists& to, int count, int64_t limit, int64_t padded, int segment,
                                   int64_t* scratch, Size size_of, Tiles tiles_of = {}) {
  using Index = std::remove_reference_t<decltype(*to.offsets)>;
  const auto put = [&](int g, int64_t row, int64_t parts) {
    to.offsets[g] = static_cast<Index>(row);
    to.tiles[g] = static_cast<Index>(first_count(parts));
    if (kSegments || segment) to.segments[g] = static_cast<Index>(int64_t{second_count(parts)} * segment);
  };
  const GroupTotals<> all = walk_groups<kThreads, kEach>(
      count, limit, scratch, size_of,
      [&](int64_t rows) { return two_counts(tiles_of(rows), segment ? divide_up(rows, segment) : 0); },
      [&](int g, int64_t first, int64_t, int64_t parts) { put(g, first, parts); });
  if (threadIdx.x != 0) return;
  put(count, all.rows, all.parts);
  const int64_t rest = max(limit - all.rows, padded ? padded - int64_t{second_count(all.parts)} * segment : 0);
  to.tiles[count + 1] = static_cast<Index>(first_count(all.parts) + divide_up(rest, kTileRows));
}

// One block. `sizes` null: `count` groups of `rows` rows each. `padded`: rows of the padded form, or 0.
static __global__ void __launch_bounds__(kScanThreads)
    scan_store(const int32_t* sizes, int64_t rows, int64_t padded, int segment, StoreScan scan) {
  __shared__ int64_t scratch[33];
  for (int g = threadIdx.x; g < scan.count; g += kScanThreads) scan.amax[g] = scan.rotated[g] = 0;
  list_groups<kScanThreads, 1, kStoreRows, true>(scan, scan.count, sizes ? rows : rows * scan.count, padded, segment,
                                                 scratch, [&](int g) { return sizes ? int64_t{sizes[g]} : rows; });
}

// Tile `item` of [row tiles] x [column tiles], the column running fastest; false past the last one. By a whole warp.
template <class Index>
__device__ inline bool find_tile(const StoreScan& scan, Index item, Index column_tiles, int64_t width,
                                 StoreTile* tile) {
  const Index row_tile = item / column_tiles;
  if (row_tile >= scan.tiles[scan.count + 1]) return false;
  // Empty groups start where the next one does: the last of equals has the tile.
  const int g = find_last(scan.tiles, scan.count + 1, int64_t{row_tile});
  tile->group = g;
  tile->row = (row_tile - scan.tiles[g]) * kStoreRows;
  tile->source = scan.offsets[g] + tile->row;
  tile->padded = scan.segments[g] + tile->row;
  const int64_t left = g < scan.count ? scan.offsets[g + 1] - tile->source : 0;
  tile->rows = static_cast<int>(left < kStoreRows ? left : kStoreRows);
  tile->column = int64_t{item - row_tile * column_tiles} * kStoreColumns;
  tile->columns = static_cast<int>(min(width - tile->column, int64_t{kStoreColumns}));
  return true;
}

// Raises the amax of a group by what one warp has seen; NaN is one NaN.
__device__ inline void raise_amax(uint32_t* slot, uint32_t amax) {
  amax = __reduce_max_sync(~0u, amax);
  if (threadIdx.x % 32 == 0 && amax > *reinterpret_cast<volatile uint32_t*>(slot)) {
    atomicMax(slot, float_bits(amax_value(amax)));
  }
}

__device__ inline void put_scale(void* scales, bool wide, int64_t index, uint32_t stored) {
  if (wide) {
    static_cast<uint32_t*>(scales)[index] = stored;
  } else {
    static_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(stored);
  }
}

struct GroupResults {
  StoreScan scan;
  StoreRule rule;
  bool per_group;
  bool rotate;
  const float* scale;
  const int32_t* skip;
  float* group_scales;
  float* cross_group_scales;
  const float* into_amax;
  float* amax;
};

__device__ inline GroupScale group_scale_of(const StoreScan& scan, const StoreRule& rule, bool per_group,
                                            const float* scale, bool rotated, int group) {
  if (scale) return delayed_group_scale(rule, scale[group], scan.amax[group]);
  return group_scale(rule, per_group, (rotated ? scan.rotated : scan.amax)[group]);
}

static __global__ void finish_groups(const GroupResults r) {
  const int g = blockIdx.x * blockDim.x + threadIdx.x;
  if (g >= r.scan.count || (r.skip && *r.skip != 0)) return;
  if (r.group_scales) r.group_scales[g] = group_scale_of(r.scan, r.rule, r.per_group, r.scale, false, g).scale_inv;
  if (r.cross_group_scales) {
    r.cross_group_scales[g] = group_scale_of(r.scan, r.rule, r.per_group, r.scale, r.rotate, g).scale_inv;
  }
  if (r.amax) r.amax[g] = amax_value(r.into_amax ? amax_with(r.scan.amax[g], r.into_amax[g]) : r.scan.amax[g]);
}

__device__ inline uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_relaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Whether there is nothing to measure in a group, under delayed scaling.
__device__ inline bool has_started(const StoreLaunch& p, int group) {
  return p.scale[group] != 0.0f && (!p.scale_other || p.scale_other[group] != 0.0f);
}

// Whether any of this thread's groups, which the block divides, has rows and has not started.
__device__ inline bool sees_a_start(const StoreLaunch& p) {
  bool starts = false;
  for (int g = threadIdx.x; g < p.scan.count; g += blockDim.x) {
    starts |= (!p.sizes || p.sizes[g] > 0) && !has_started(p, g);
  }
  return starts;
}

// Whether a `starting` launch has groups to measure, by a whole block.
__device__ inline bool must_start(const StoreLaunch& p) { return __syncthreads_or(sees_a_start(p)); }

// Zero codes: `lines` of `length` bytes, `pitch` apart.
__device__ inline void zero_codes(uint8_t* to, int lines, int length, int64_t pitch, int threads) {
  const int chunks = (length + 15) / 16;
  for (int item = threadIdx.x; item < lines * chunks; item += threads) {
    uint8_t* at = to + item / chunks * pitch + item % chunks * 16;
    const int count = min(length - item % chunks * 16, 16);
    if (count == 16 && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
      *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
    } else {
      for (int i = 0; i < count; ++i) at[i] = 0;
    }
  }
}

// One tile, `height` rows, of what no group owns, as if it were zeros: of the rows, and of the padded rows.
__device__ inline void store_nothing(const StoreProblem& p, const StoreTile& tile, int height, int threads) {
  const uint32_t none = p.wide_scales ? float_bits(scale_inv(fp32_scale(0.0f, p.rule.fp32))) : 0;
  const int bits = p.type == DType::u8 ? 4 : 8;
  for (int cross = 0; cross < 2; ++cross) {
    const QuantizedForm& form = p.forms[cross];
    const int64_t first = cross ? tile.padded : tile.source, left = (cross ? p.padded_rows : p.rows) - first;
    const int count = static_cast<int>(min(left, int64_t{height}));
    if (!form.values || count <= 0) continue;
    if (cross && p.transposed) {
      zero_codes(form.values + tile.column * form.pitch + first, tile.columns, count, form.pitch, threads);
    } else {
      zero_codes(form.values + first * form.pitch + tile.column * bits / 8, count, (tile.columns * bits + 7) / 8,
                 form.pitch, threads);
    }
    if (!p.block) continue;
    const int tall = cross ? count >> p.block_bits : count;
    const int wide = cross ? tile.columns : (tile.columns + p.block - 1) >> p.block_bits;
    for (int item = threadIdx.x; item < tall * wide; item += threads) {
      const int64_t row = (cross ? first >> p.block_bits : first) + item / wide;
      const int64_t column = (cross ? tile.column : tile.column >> p.block_bits) + item % wide;
      put_scale(form.scales, p.wide_scales, form.place.at(0, row, column), none);
    }
  }
}

}  // namespace device

template <class T>
T* data_of(const TensorView& t) {
  return t.present() ? t.as<T>() : nullptr;
}

// Of a power of two; 0 of 0.
inline int log2_of(int64_t value) {
  int bits = 0;
  while (int64_t{1} << (bits + 1) <= value) ++bits;
  return bits;
}

inline float largest_value(DType type) {
  return type == DType::e4m3fn ? E4M3::kMax : type == DType::e5m2 ? E5M2::kMax : E2M1::kMax;
}

inline StoreProblem store_problem(const Quantize& call, const Context& context) {
  StoreProblem p = {};
  const bool ragged = call.group_sizes.present();
  const int64_t groups = ragged ? call.group_sizes.dims[0] : call.source.dims[0];
  const int64_t tall = call.rows().dims[ragged ? 0 : 1], wide = call.source.dims[ragged ? 1 : 2];
  const int64_t block = call.block > 0 ? call.block : 1, outer = call.block_outer;
  const TensorView& cross = call.cross_values;
  const int64_t padded = ragged && cross.present() ? cross.dims[call.transposed ? 1 : 0] : 0;
  p.scan = StoreScan::at(context.workspace, groups);
  p.source = call.source.data;
  p.source_type = call.source.dtype;
  p.table = data_of<const int64_t>(call.source_table);
  p.gather = {data_of<const int32_t>(call.places), static_cast<uint32_t>(call.source.dims[0] * call.slots),
              static_cast<uint32_t>(call.slots)};
  p.sizes = data_of<const int32_t>(call.group_sizes);
  p.rows = tall;
  p.padded_rows = padded;
  p.width = wide;
  p.ragged = ragged;
  p.segment = ragged && cross.present() ? static_cast<int>(call.segment) : 0;
  p.transposed = !ragged || call.transposed != 0;
  p.type = call.values.present() ? call.values.dtype : cross.dtype;
  p.forms[0] = {data_of<uint8_t>(call.values), data_of<void>(call.scales), data_of<float>(call.group_scales),
                ScalePlace::of(call.scales, ragged, false, divide_up(tall, outer), divide_up(wide, block)),
                row_bytes(p.type, wide)};
  p.forms[1] = {
      data_of<uint8_t>(cross), data_of<void>(call.cross_scales), data_of<float>(call.cross_group_scales),
      ScalePlace::of(call.cross_scales, ragged, true, divide_up(ragged ? padded : tall, block), divide_up(wide, outer)),
      cross.present() ? cross.dims[cross.rank - 1] : 0};
  p.wide_scales = call.rule == "fp32";
  p.rule = store_rule(call, largest_value(p.type), call.source.dtype == DType::bf16);
  p.block = static_cast<int>(call.block);
  p.block_outer = static_cast<int>(outer);
  p.block_bits = log2_of(p.block);
  p.outer_bits = log2_of(p.block_outer);
  p.scale = data_of<const float>(call.scale);
  p.skip = data_of<const int32_t>(call.skip);
  return p;
}

inline FineChoices FineChoices::of(const Quantize& call) {
  return {
      data_of<const uint32_t>(call.key),
      static_cast<uint32_t>(call.stream),
      call.stochastic != 0,
      call.rotate != 0 && call.cross_values.present(),
      call.four_over_six.empty()         ? 0
      : call.four_over_six == "absolute" ? 1
                                         : 2,
  };
}

// A StoreLaunch or FineLaunch of a call, with nothing said of the launch.
template <class Launch>
Launch launch_of(const Quantize& call, const Context& context) {
  Launch p = {};
  static_cast<StoreProblem&>(p) = store_problem(call, context);
  if constexpr (std::is_base_of_v<FineChoices, Launch>) static_cast<FineChoices&>(p) = FineChoices::of(call);
  return p;
}

// The results that belong to groups.
inline void launch_finish(const Quantize& call, const StoreProblem& p, cudaStream_t stream) {
  const device::GroupResults results = {
      p.scan,
      p.rule,
      p.block == 0,
      FineChoices::of(call).rotate,
      p.scale,
      p.skip,
      p.forms[0].group_scales,
      p.forms[1].group_scales,
      data_of<const float>(call.into_amax),
      data_of<float>(call.amax),
  };
  constexpr int kThreads = 256;
  device::finish_groups<<<static_cast<unsigned>(divide_up(p.scan.count, kThreads)), kThreads, 0, stream>>>(results);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// Whether scales of groups want amaxes of groups first: of all, or of those that delayed scaling has yet to start.
inline bool finds_group_scales(const Quantize& call) {
  if (call.block != 0 && call.rule != "nvfp4") return false;
  return !call.scale.present() || call.starts_at_one == 0;
}

// Runs what a Quantize is made of: the scan, `measure(p)` where scales want the amax of a group first, `store(p)`, and
// the results that belong to groups.
template <class Launch, class Measure, class Store>
void launch_store(const Quantize& call, const Context& context, Measure measure, Store store) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  Launch p = launch_of<Launch>(call, context);
  const bool stores = p.forms[0].values || p.forms[1].values, found = finds_group_scales(call);
  const bool ahead = !stores || found;
  device::scan_store<<<1, kScanThreads, 0, stream>>>(p.sizes, p.rows, p.padded_rows, p.segment, p.scan);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  p.raised = p.scan.amax;
  p.starting = stores && p.scale && found;
  if (ahead) measure(p, stream);
  p.measure = call.amax.present() && (!ahead || p.starting);
  if (stores) store(p, stream);
  if (!p.forms[0].group_scales && !p.forms[1].group_scales && !call.amax.present()) return;
  launch_finish(call, p, stream);
}

}  // namespace grouped
