// FP8 codes of bf16 or fp16 values: a scale a group, blocks of 128 (or 128 x 128), MXFP8's blocks of 32 in place. Both
// forms come from one read.
//
// One launch: each block scans the group sizes into its shared memory, then walks over tiles of 128 x 128 values of one
// group, 256 threads with 8 columns of 8 rows each. Current scaling has a launch before, of which only amaxes remain.
//
//     cp.async, 16 bytes a row --> own part of shared memory --> 32 registers --> amaxes, two values a word
//                 ^ the next tile's, as soon as this one's are in registers: nobody else reads them, no barrier
//     rows:    amax over 16 lanes (4 for blocks of 32), scattered so that each lane finds the scale of one row
//              --> scales back by shuffles --> codes, 8 bytes a row and lane
//     columns: amax over the 8 warps through shared memory, a scale a thread --> codes of two rows a conversion
//              --> turned: 16 KiB of shared memory, swizzled by 8 bytes --> lines of 128 bytes
//
// 32 KiB of raw values, 16 of turned codes, 4 of amaxes and factors, 12 bytes a group; 4 blocks an SM (64 registers)
// keep 128 KiB in flight. Bound by memory: 3.03 bytes a value for one form, 4.06 for both.
#include <string>
#include <type_traits>

#include "cc/device/store_tiles.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = kStoreThreads;
constexpr int kWarps = kStoreWarps;
constexpr int kVector = 8;  // columns, and rows, of a thread
constexpr int kLanes = kStoreColumns / kVector;
constexpr int kWarpRows = kStoreRows / kWarps;
static_assert(kWarpRows == 2 * kVector && kLanes == 16, "a warp has two threads a column vector");

constexpr int kRows = 1, kColumns = 2;  // forms
// Blocks of an SM: as many as spill nothing.
template <int kBlock, bool kSquare, int kForms>
constexpr int kBlocks = kForms == kRows + kColumns && (kBlock == 0 || kSquare) ? 2 : 4;

template <bool kSquare, int kForms>
constexpr bool kIsWide = !kSquare && kForms <= kRows;

// A tile, and where in it a thread's 8 columns of 8 rows lie: as high as the blocks of columns, or, where rows are
// stored alone, wide, so that memory is read and written in long runs and the ends of groups waste less.
template <bool kWide>
struct Shape {
  static constexpr int kRows = kWide ? 16 : kStoreRows;
  static constexpr int kColumns = kWide ? 1024 : kStoreColumns;
  static_assert(kRows * kColumns == kThreads * kVector * kVector, "a value has one thread");

  int column = kWide ? threadIdx.x / kLanes % 8 * 128 + threadIdx.x % kLanes * kVector : threadIdx.x % kLanes * kVector;
  int row = kWide ? threadIdx.x / kLanes / 8 * kVector : threadIdx.x / kLanes * kVector;
};

// The table lies behind it.
struct Shared {
  uint4 raw[kVector][kThreads];
  StoreTile next[kWarps];  // a warp's own; in registers it would live through everything
  uint32_t warp_amax[kWarps];
  int64_t sums[34];
};
struct ColumnShared : Shared {
  alignas(16) uint64_t turned[kStoreColumns][kStoreRows / 8];
  uint4 amax[kWarps][kLanes];  // by warp
  float factors[kStoreRows / 32][kStoreColumns];
};

template <bool kWide>
__device__ inline void load_tile(const StoreProblem& p, const StoreTile& tile, Shared* s) {
  const Shape<kWide> at;
  const char* from =
      static_cast<const char*>(p.source) + 2 * ((tile.source + at.row) * p.width + tile.column + at.column);
  const int count = at.column < tile.columns ? tile.rows - at.row : 0;  // rows of this thread that exist
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    copy_async(&s->raw[i][threadIdx.x], from, i < count);
    from += 2 * p.width;
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ inline void take_tile(const Shared* s, uint4 (&raw)[kVector]) {
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kVector; ++i) raw[i] = s->raw[i][threadIdx.x];
}

__device__ inline BlockScale scale_of(const StoreProblem& p, uint32_t amax) {
  const GroupScale none = {1.0f, 1.0f};
  return p.type == DType::e5m2 ? block_scale<E5M2>(p.rule, amax, none) : block_scale<E4M3>(p.rule, amax, none);
}

// Scales of this thread's 8 rows, for blocks of kBlock columns: stores them and returns the factors.
template <bool kBf16, int kBlock, bool kWide>
__device__ inline void row_factors(const StoreProblem& p, const StoreTile& tile, const uint4 (&raw)[kVector],
                                   float (&factors)[kVector]) {
  const Shape<kWide> at;
  const int lane = threadIdx.x % 32;
  uint32_t pair[4];  // rows i and i + 4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t found[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint4& v = raw[i + 4 * k];
      found[k] = both(
          __vmaxu2(__vmaxu2(v.x & kMagnitudes, v.y & kMagnitudes), __vmaxu2(v.z & kMagnitudes, v.w & kMagnitudes)));
    }
    pair[i] = found[0] | found[1] << 16;
  }
  // Each step halves what a lane keeps: the upper half of lanes the upper half of words.
  constexpr int kFirst = kBlock == 32 ? 2 : 8;  // lanes that share a block differ in kFirst and the bits below
  const bool upper = lane & kFirst, odd = lane & (kFirst / 2);
  const uint32_t keep0 = upper ? pair[2] : pair[0], keep1 = upper ? pair[3] : pair[1];
  const uint32_t send0 = upper ? pair[0] : pair[2], send1 = upper ? pair[1] : pair[3];
  const uint32_t two0 = __vmaxu2(keep0, __shfl_xor_sync(~0u, send0, kFirst));
  const uint32_t two1 = __vmaxu2(keep1, __shfl_xor_sync(~0u, send1, kFirst));
  uint32_t mine = __vmaxu2(odd ? two1 : two0, __shfl_xor_sync(~0u, odd ? two0 : two1, kFirst / 2));
  const int word = 2 * upper + odd;
  const int64_t row = tile.source + at.row + word;
  if constexpr (kBlock == 32) {
    float e[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const BlockScale scale = scale_of(p, amax_of<kBf16>(k ? mine >> 16 : mine & 0xFFFFu));
      e[k] = scale.encode;
      if (at.row + word + 4 * k < tile.rows && at.column / 32 * 32 < tile.columns) {
        put_scale(p.forms[0].scales, false,
                  p.forms[0].place.at(0, row + 4 * k, static_cast<uint32_t>(tile.column + at.column) / 32),
                  scale.stored);
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int from = (lane & ~3) | ((i & 3) / 2 * 2 + (i & 1));
      factors[i] = __shfl_sync(~0u, e[i / 4], from);
    }
  } else {
    mine = __vmaxu2(mine, __shfl_xor_sync(~0u, mine, 2));
    mine = __vmaxu2(mine, __shfl_xor_sync(~0u, mine, 1));
    const int high = lane & 1;  // of the word's two rows, which lane has which
    const BlockScale scale = scale_of(p, amax_of<kBf16>(high ? mine >> 16 : mine & 0xFFFFu));
    if (at.row + word + 4 * high < tile.rows && !(lane & 2) && at.column / kBlock * kBlock < tile.columns) {
      put_scale(p.forms[0].scales, true,
                p.forms[0].place.at(0, row + 4 * high, static_cast<uint32_t>(tile.column + at.column) / kBlock),
                scale.stored);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int from = (lane & 16) | ((i & 3) / 2 * 8 + (i & 1) * 4) | i / 4;
      factors[i] = __shfl_sync(~0u, scale.encode, from);
    }
  }
}

// Codes of `rows` rows; the factor of value c of row i is factor(i, c).
template <class T, bool kBf16, bool kWide, class Factor>
__device__ inline void put_rows(const StoreTile& tile, const uint4 (&raw)[kVector], uint8_t* to, int64_t pitch,
                                int rows, Factor factor) {
  const Shape<kWide> at;
  const int count = at.column < tile.columns ? rows - at.row : 0;
  to += at.row * pitch + at.column;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    uint32_t words[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t codes[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int first = 4 * k + 2 * c;
        codes[c] = encode_pair<T>(fl_mul(value_at<kBf16>(raw[i], first), factor(i, first)),
                                  fl_mul(value_at<kBf16>(raw[i], first + 1), factor(i, first + 1)));
      }
      words[k] = codes[0] | codes[1] << 16;
    }
    if (i < count) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    to += pitch;
  }
}

// Scales of the tile's columns, for blocks of kBlock rows, stored; factors of this thread's columns.
template <bool kBf16, int kBlock>
__device__ inline void column_factors(const StoreProblem& p, const StoreTile& tile, const uint4 (&raw)[kVector],
                                      int rows, ColumnShared* s, float (&factors)[kVector]) {
  const Shape<false> at;
  uint4 found = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    found.x = __vmaxu2(found.x, raw[i].x & kMagnitudes);
    found.y = __vmaxu2(found.y, raw[i].y & kMagnitudes);
    found.z = __vmaxu2(found.z, raw[i].z & kMagnitudes);
    found.w = __vmaxu2(found.w, raw[i].w & kMagnitudes);
  }
  found.x = __vmaxu2(found.x, __shfl_xor_sync(~0u, found.x, 16));
  found.y = __vmaxu2(found.y, __shfl_xor_sync(~0u, found.y, 16));
  found.z = __vmaxu2(found.z, __shfl_xor_sync(~0u, found.z, 16));
  found.w = __vmaxu2(found.w, __shfl_xor_sync(~0u, found.w, 16));
  if (threadIdx.x % 32 < kLanes) s->amax[threadIdx.x / 32][threadIdx.x % kLanes] = found;
  __syncthreads();
  constexpr int kBlockWarps = kBlock / kWarpRows;
  for (int item = threadIdx.x; item < kStoreRows / kBlock * kStoreColumns; item += kThreads) {
    const int column = item % kStoreColumns, b = item / kStoreColumns;
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < kBlockWarps; ++w) {
      amax = max(amax, uint32_t{reinterpret_cast<const uint16_t*>(s->amax[b * kBlockWarps + w])[column]});
    }
    const BlockScale scale = scale_of(p, amax_of<kBf16>(amax));
    s->factors[b][column] = scale.encode;
    if (column < tile.columns && b * kBlock < rows) {
      const uint32_t first = static_cast<uint32_t>(p.ragged ? tile.padded : tile.row);
      put_scale(p.forms[1].scales, kBlock == 128,
                p.forms[1].place.at(p.ragged ? 0 : tile.group, first / kBlock + b, tile.column + column), scale.stored);
    }
  }
  __syncthreads();
  const float4* from = reinterpret_cast<const float4*>(&s->factors[at.row / kBlock][at.column]);
  const float4 low = from[0], high = from[1];
  factors[0] = low.x, factors[1] = low.y, factors[2] = low.z, factors[3] = low.w;
  factors[4] = high.x, factors[5] = high.y, factors[6] = high.z, factors[7] = high.w;
}

// Codes of columns to shared memory, 8 rows in one word, and from there to lines of `rows` bytes (a multiple of 16).
template <class T, bool kBf16>
__device__ inline void put_turned(const StoreProblem& p, const StoreTile& tile, const uint4 (&raw)[kVector],
                                  const float (&factors)[kVector], int rows, ColumnShared* s) {
  const Shape<false> at;
  const int lane = at.column / kVector, piece = at.row / 8;
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    uint32_t words[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t codes[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = 4 * k + 2 * r;
        codes[r] = encode_pair<T>(fl_mul(value_at<kBf16>(raw[first], c), factors[c]),
                                  fl_mul(value_at<kBf16>(raw[first + 1], c), factors[c]));
      }
      words[k] = codes[0] | codes[1] << 16;
    }
    // Sixteen lanes write the same piece of columns that are 8 apart: their words go to different banks.
    s->turned[at.column + c][piece ^ lane] = words[0] | static_cast<uint64_t>(words[1]) << 32;
  }
  __syncthreads();
  const StoredForm& form = p.forms[1];
  uint8_t* to = form.values + ((p.ragged ? 0 : tile.group * p.width) + tile.column) * form.pitch +
                (p.ragged ? tile.padded : tile.row);
  const int chunk = threadIdx.x % 8;  // 16 bytes of a line
#pragma unroll
  for (int i = 0; i < kStoreColumns * 8 / kThreads; ++i) {
    const int column = threadIdx.x / 8 + i * (kThreads / 8), swap = column / kVector;
    const ulonglong2 v = *reinterpret_cast<const ulonglong2*>(&s->turned[column][2 * chunk ^ (swap & ~1)]);
    const ulonglong2 codes = swap & 1 ? ulonglong2{v.y, v.x} : v;
    if (column < tile.columns && chunk * 16 < rows) {
      *reinterpret_cast<ulonglong2*>(to + column * form.pitch + chunk * 16) = codes;
    }
  }
}

__device__ inline void forget_values(uint4 (&raw)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) forget(raw[i].x), forget(raw[i].y), forget(raw[i].z), forget(raw[i].w);
}

// The largest magnitude of this thread's values, 16 bits.
__device__ inline uint32_t largest(const uint4 (&raw)[kVector]) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    found = __vmaxu2(found, __vmaxu2(__vmaxu2(raw[i].x & kMagnitudes, raw[i].y & kMagnitudes),
                                     __vmaxu2(raw[i].z & kMagnitudes, raw[i].w & kMagnitudes)));
  }
  return both(found);
}

// The scale of a whole tile, of either form: square blocks.
template <bool kBf16>
__device__ inline float square_factor(const StoreProblem& p, const StoreTile& tile, const uint4 (&raw)[kVector],
                                      Shared* s) {
  const uint32_t warp = __reduce_max_sync(~0u, largest(raw));
  if (threadIdx.x % 32 == 0) s->warp_amax[threadIdx.x / 32] = warp;
  __syncthreads();
  uint32_t amax = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max(amax, s->warp_amax[w]);
  const BlockScale scale = scale_of(p, amax_of<kBf16>(amax));
  const int64_t row = tile.row / kStoreRows, column = tile.column / kStoreColumns;
  if (threadIdx.x == 0) {
    for (const StoredForm& form : p.forms) {
      if (form.values) put_scale(form.scales, true, form.place.at(tile.group, row, column), scale.stored);
    }
  }
  return scale.encode;
}

__device__ inline void store_group_scales(const StoreProblem& p) {
  for (int g = threadIdx.x; g < p.scan.count; g += kThreads) {
    const float scale = group_scale_of(p.scan, p.rule, true, p.encode, false, g).decode;
    if (p.forms[0].group_scales) p.forms[0].group_scales[g] = scale;
    if (p.forms[1].group_scales) p.forms[1].group_scales[g] = scale;
  }
}

// body(E4M3{}) or body(E5M2{}), a branch around whole loops.
template <class Body>
__device__ inline void with_type(DType type, Body body) {
  if (type == DType::e5m2) return body(E5M2{});
  body(E4M3{});
}

template <int kForms>
using SharedOf = typename std::conditional<(kForms & kColumns) != 0, ColumnShared, Shared>::type;

// kBlock 0: one scale a group; kSquare: of blocks 128 x 128. kForms 0: amaxes alone.
template <bool kBf16, int kBlock, bool kSquare, int kForms>
__global__ void __launch_bounds__(kThreads, kBlocks<kBlock, kSquare, kForms>)
    store_tiles(const __grid_constant__ StoreProblem p, uint32_t column_tiles) {
  constexpr bool kWide = kIsWide<kSquare, kForms>;
  using Tile = Shape<kWide>;
  extern __shared__ uint4 dynamic_shared[];
  if (p.skip && *p.skip != 0) return;
  using Scratch = SharedOf<kForms>;
  Scratch* s = reinterpret_cast<Scratch*>(dynamic_shared);
  const GroupTable table(p, s + 1);
  if (p.ragged) scan_sizes<Tile::kRows>(p, table, s->sums);
  StoreTile tile;
  StoreTile& next = s->next[threadIdx.x / 32];
  uint32_t item = blockIdx.x;
  bool more = find_in_table<Tile::kRows, Tile::kColumns>(p, table, item, column_tiles, &tile);
  if (more && tile.group < p.scan.count) load_tile<kWide>(p, tile, s);
  if (kBlock == 0 && kForms && blockIdx.x == 0) store_group_scales(p);
  for (; more; tile = next) {
    item += gridDim.x;
    {  // while this tile's values arrive
      StoreTile found = {};
      more = find_in_table<Tile::kRows, Tile::kColumns>(p, table, item, column_tiles, &found);
      __syncwarp();
      if (threadIdx.x % 32 == 0) next = found;
      __syncwarp();
    }
    if (tile.group == p.scan.count) {  // from here on there is nothing else
      if (kForms) store_nothing(p, tile, Tile::kRows, kThreads);
      continue;
    }
    uint4 raw[kVector];
    take_tile(s, raw);
    uint32_t amax = 0;
    if (!kForms || p.measure) amax = largest(raw);
    if (more && next.group < p.scan.count) load_tile<kWide>(p, next, s);
    if (!kForms || p.measure) raise_amax(p.scan.amax + tile.group, amax_of<kBf16>(amax));
    if constexpr (kForms == 0) continue;
    float shared = 1.0f;
    if (kBlock == 0) shared = group_scale_of(p.scan, p.rule, true, p.encode, false, tile.group).encode;
    if (kSquare) shared = square_factor<kBf16>(p, tile, raw, s);
    float factors[kVector];
    if constexpr ((kForms & kRows) != 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) factors[i] = shared;
      if constexpr (kBlock > 0 && !kSquare) row_factors<kBf16, kBlock, kWide>(p, tile, raw, factors);
      const StoredForm& form = p.forms[0];
      with_type(p.type, [&](auto type) {
        put_rows<decltype(type), kBf16, kWide>(tile, raw, form.values + tile.source * form.pitch + tile.column,
                                               form.pitch, tile.rows, [&](int i, int) { return factors[i]; });
      });
    }
    if constexpr ((kForms & kColumns) != 0) {
      if (kBlock == 0 || kSquare) __syncthreads();  // the codes of the tile before have left shared memory
      if constexpr (kForms == kRows + kColumns) {
        forget_values(raw);
        asm volatile("" : "+f"(shared));
      }
      const int count = p.segment ? (tile.rows + p.segment - 1) / p.segment * p.segment : tile.rows;
#pragma unroll
      for (int i = 0; i < kVector; ++i) factors[i] = shared;
      if constexpr (kBlock > 0 && !kSquare) column_factors<kBf16, kBlock>(p, tile, raw, count, s, factors);
      const StoredForm& form = p.forms[1];
      with_type(p.type, [&](auto type) {
        if (kBlock == 32 && !p.transposed) {
          put_rows<decltype(type), kBf16, false>(tile, raw, form.values + tile.padded * form.pitch + tile.column,
                                                 form.pitch, count, [&](int, int c) { return factors[c]; });
        } else {
          put_turned<decltype(type), kBf16>(p, tile, raw, factors, count, s);
        }
      });
    }
    if (kSquare) __syncthreads();  // everybody has read the amaxes of warps
  }
}

std::string refuses(const Quantize& call, const Target& target) {
  const std::string reason = refuses_tiles(call, target);
  if (!reason.empty()) return reason;
  const bool ragged = call.group_sizes.present();
  const TensorView& cross = call.cross_values;
  const DType type = (call.values.present() ? call.values : cross).dtype;
  if (type != DType::e4m3fn && type != DType::e5m2) return std::string("gives FP8, not ") + dtype_name(type);
  if (call.rule != "fp32" && call.rule != "e8m0") return "has no rule " + call.rule;
  if (call.rule == "fp32" && call.block != 0 && call.block != 128) return "takes blocks of 128";
  if (call.rule == "e8m0" && (call.block != 32 || call.block_outer != 1)) return "takes blocks of 32";
  if (!cross.present()) return "";
  if (!ragged && call.source.dims[1] % 16 != 0) return "turns weights whose rows are a multiple of 16";
  if (ragged && call.turned && call.segment % 16 != 0) return "turns rows in segments of 16 or more";
  if (ragged && !call.turned && call.block != 32) return "leaves blocks of 32 in place, turns others";
  return "";
}

size_t workspace(const Quantize& call, const Target&) { return StoreScan::bytes(groups_of(call)); }

template <bool kBf16, int kBlock, bool kSquare, int kForms>
void run(const Quantize& call, const StoreProblem& p, cudaStream_t stream) {
  using Tile = Shape<kIsWide<kSquare, kForms>>;
  constexpr auto kKernel = store_tiles<kBf16, kBlock, kSquare, kForms>;
  constexpr int kMostBytes = sizeof(SharedOf<kForms>) + 3 * (kMostGroups + GroupTable::kMore) * sizeof(int32_t);
  const int bytes = static_cast<int>(sizeof(SharedOf<kForms>)) + GroupTable::bytes(p);
  allow_shared_memory<kKernel>(kMostBytes);
  const int64_t column_tiles = divide_up(p.width, Tile::kColumns);
  const int64_t tiles = most_row_tiles_of(call, Tile::kRows) * column_tiles;
  const unsigned grid = blocks_for(tiles, kBlocks<kBlock, kSquare, kForms>, bytes);
  if (grid == 0) return;
  kKernel<<<grid, kThreads, bytes, stream>>>(p, static_cast<uint32_t>(column_tiles));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <bool kBf16, int kBlock, bool kSquare>
void run_forms(const Quantize& call, const StoreProblem& p, cudaStream_t stream) {
  if (!p.forms[0].values) return run<kBf16, kBlock, kSquare, kColumns>(call, p, stream);
  if (!p.forms[1].values) return run<kBf16, kBlock, kSquare, kRows>(call, p, stream);
  run<kBf16, kBlock, kSquare, kRows + kColumns>(call, p, stream);
}

template <bool kBf16>
void launch_as(const Quantize& call, const Context& context) {
  launch_tiles(
      call, context, [&](const StoreProblem& p, cudaStream_t stream) { run<kBf16, 0, false, 0>(call, p, stream); },
      [&](const StoreProblem& p, cudaStream_t stream) {
        if (p.block == 0) return run_forms<kBf16, 0, false>(call, p, stream);
        if (p.block == 32) return run_forms<kBf16, 32, false>(call, p, stream);
        if (p.block_outer > 1) return run_forms<kBf16, 128, true>(call, p, stream);
        run_forms<kBf16, 128, false>(call, p, stream);
      });
}

void launch(const Quantize& call, const Context& context) {
  if (call.source.dtype == DType::bf16) return launch_as<true>(call, context);
  launch_as<false>(call, context);
}

}  // namespace

const Kernel<Quantize> quantize_fp8_cuda = {"quantize_fp8_cuda", refuses, workspace, launch, kAlignment};

}  // namespace grouped
