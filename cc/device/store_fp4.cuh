// A tile of the E2M1 quantiser: what is wanted of it, where a thread's values lie, how they come, and the scales of
// their blocks.
#pragma once

#include <cuda_bf16.h>

#include "cc/device/store_tiles.cuh"

namespace grouped {
namespace device {
namespace fp4 {

constexpr int kThreads = kStoreThreads;
constexpr int kWarps = kStoreWarps;
constexpr int kRows = 16;    // of a thread, and of a block along columns
constexpr int kColumns = 4;  // of a thread
constexpr int kWarpColumns = 32 * kColumns;
constexpr int kCodes = 128;  // of E4M3 scales, none negative
static_assert(kRows == kRotation, "a thread rotates its own");

// What is made of columns, and of which tiles.
enum class Columns { none, in_place, rotated, turned };
constexpr bool is_tall(Columns columns) { return columns == Columns::turned; }

// kBlock 16, or 32: MXFP4. kAlongRows: that form is wanted, too.
template <bool kBf16, int kBlock, bool kSquare, bool kAlongRows, Columns kColumns, bool kStochastic>
struct Options {
  static constexpr bool is_bf16 = kBf16, is_square = kSquare, along_rows = kAlongRows, is_stochastic = kStochastic;
  static constexpr int block = kBlock;
  static constexpr Columns columns = kColumns;
};

// A tile, and where in it a thread's values lie.
template <bool kTall>
struct Shape {
  static constexpr int kTileRows = kTall ? kRows * kWarps : kRows;
  static constexpr int kTileColumns = kTall ? kWarpColumns : kWarpColumns * kWarps;

  int warp_row = kTall ? threadIdx.x / 32 * kRows : 0;
  int warp_column = kTall ? 0 : threadIdx.x / 32 * kWarpColumns;
  int column = warp_column + threadIdx.x % 32 * kColumns;
};

// The factor of each scale of a group, and what an amax is multiplied by for its scale.
struct Factors {
  float of_code[kCodes];
  float step;
};

// The table of groups lies behind it.
struct Shared {
  uint2 raw[kWarps][kRows][32];
  StoreTile next[kWarps];  // a warp's own; in registers it would live through everything
  Factors factors[2];      // by form: rotated columns have scales of their own
  int64_t sums[34];
};
struct TurnedShared : Shared {
  alignas(16) uint64_t codes[kWarpColumns][kWarps];
  alignas(16) uint8_t scales[kWarpColumns][kWarps];
};

template <bool kTall>
__device__ inline void load_tile(const StoreProblem& p, const StoreTile& tile, Shared* s) {
  const Shape<kTall> at;
  const int lane = threadIdx.x % 32, row = at.warp_row + lane / 16, column = at.warp_column + lane % 16 * 8;
  const char* from = static_cast<const char*>(p.source) + 2 * ((tile.source + row) * p.width + tile.column + column);
  const int count = column < tile.columns ? tile.rows - row : 0;  // rows from here that exist
  uint2* to = &s->raw[threadIdx.x / 32][lane / 16][lane % 16 * 2];
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {
    copy_async(to + i * 32, from, i < count);
    from += 4 * p.width;
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ inline void take_tile(const Shared* s, uint2 (&raw)[kRows]) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRows; ++i) raw[i] = s->raw[threadIdx.x / 32][i][threadIdx.x % 32];
  __syncwarp();  // from here on the next tile may come
}

// Value `i` of four.
template <bool kBf16>
__device__ inline float value_at(const uint2& v, int i) {
  const uint32_t word = i < 2 ? v.x : v.y;
  if constexpr (kBf16) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
  return value_of<kBf16>(i % 2 ? word >> 16 : word & 0xFFFFu);
}

// Amaxes of the thread's columns, two a word.
__device__ inline uint2 amax_of_columns(const uint2 (&raw)[kRows]) {
  uint2 found = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    found.x = __vmaxu2(found.x, raw[i].x & kMagnitudes);
    found.y = __vmaxu2(found.y, raw[i].y & kMagnitudes);
  }
  return found;
}

__device__ inline uint32_t largest(const uint2 (&raw)[kRows]) {
  const uint2 found = amax_of_columns(raw);
  return both(__vmaxu2(found.x, found.y));
}

// Blocks of 16 rows, rotated and rounded to bf16 again.
__device__ inline void rotate_columns(uint2 (&raw)[kRows]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float low[kRows], high[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      low[i] = value_at<true>(raw[i], 2 * k);
      high[i] = value_at<true>(raw[i], 2 * k + 1);
    }
    rotate(low);
    rotate(high);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // NOTE: NaN has other bits than float_to_bf16's; its block has a NaN scale, and no value of it counts.
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low[i], high[i]);
      (k ? raw[i].y : raw[i].x) = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
}

// Of the group of a tile, by all threads; 256 of them have an entry each.
__device__ inline void fill_factors(const StoreProblem& p, int group, Shared* s) {
  static_assert(kThreads == 2 * kCodes, "a thread has an entry");
  const int form = threadIdx.x / kCodes, code = threadIdx.x % kCodes;
  const GroupScale scale = group_scale_of(p.scan, p.rule, false, p.encode, form && p.rotate, group);
  __syncthreads();  // nobody needs those of the group before
  s->factors[form].of_code[code] = nvfp4_block_encode_scale(static_cast<uint8_t>(code), scale.decode);
  if (code == 0) s->factors[form].step = fl_mul(scale.encode, kSixth);
  __syncthreads();
}

// A block's code of its scale, and factor.
struct Scaled {
  uint32_t code;
  float factor;
};

// Of two blocks, whose amaxes are the halves of `pair`: as block_scale of cc/math/store.h.
template <class O>
__device__ inline void scale_two(const Factors& of_group, uint32_t pair, Scaled* low, Scaled* high) {
  const float a = value_of<O::is_bf16>(pair & 0xFFFFu), b = value_of<O::is_bf16>(pair >> 16);
  if constexpr (O::block == 16) {
    const uint32_t codes = encode_pair<E4M3>(fl_mul(a, of_group.step), fl_mul(b, of_group.step));
    *low = {codes & 0xFFu, of_group.of_code[codes & 0xFFu]};
    *high = {codes >> 8, of_group.of_code[codes >> 8]};
  } else {
    const uint8_t first = e8m0_code<E2M1>(a), second = e8m0_code<E2M1>(b);
    *low = {first, e8m0_encode_scale(first)};
    *high = {second, e8m0_encode_scale(second)};
  }
}

// Scales of this thread's rows, stored; their factors. True if one that it has found is NaN.
template <class O>
__device__ inline bool row_factors(const StoreProblem& p, const StoreTile& tile, const uint2 (&raw)[kRows],
                                   const Factors& of_group, float (&factors)[kRows]) {
  constexpr int kHalf = kRows / 2, kLanes = O::block / kColumns;  // lanes that share a block
  constexpr int kOwn = kHalf / kLanes;                            // words of a lane in the end
  const Shape<is_tall(O::columns)> at;
  const int lane = threadIdx.x % kLanes;
  uint32_t pair[kHalf];  // rows i and i + 8
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const uint32_t low = __vmaxu2(raw[i].x & kMagnitudes, raw[i].y & kMagnitudes);
    const uint32_t high = __vmaxu2(raw[i + kHalf].x & kMagnitudes, raw[i + kHalf].y & kMagnitudes);
    pair[i] = __vmaxu2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
  }
  // Each step halves what a lane keeps: the upper half of lanes the upper half of words.
#pragma unroll
  for (int step = kLanes / 2, count = kHalf / 2; step; step /= 2, count /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32_t keep = upper ? pair[i + count] : pair[i], send = upper ? pair[i] : pair[i + count];
      pair[i] = __vmaxu2(keep, __shfl_xor_sync(~0u, send, step));
    }
  }
  Scaled own[2 * kOwn];  // rows, and those 8 below
#pragma unroll
  for (int i = 0; i < kOwn; ++i) scale_two<O>(of_group, pair[i], &own[i], &own[i + kOwn]);
  const int first = at.warp_row + lane * kOwn;
  const int count = at.column / O::block * O::block < tile.columns ? tile.rows - first : 0;
  const ScalePlace& place = p.forms[0].place;
  uint8_t* to = static_cast<uint8_t*>(p.forms[0].scales) +
                place.at(0, tile.source + first, static_cast<uint32_t>(tile.column + at.column) / O::block);
#pragma unroll
  for (int i = 0; i < 2 * kOwn; ++i) {
    const int row = i % kOwn + i / kOwn * kHalf;
    if (row < count) to[row * place.row_step] = static_cast<uint8_t>(own[i].code);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    factors[i] = __shfl_sync(~0u, own[i % kHalf % kOwn + i / kHalf * kOwn].factor, i % kHalf / kOwn, kLanes);
  }
  bool found_nan = false;
#pragma unroll
  for (int i = 0; i < 2 * kOwn; ++i) found_nan |= isnan(own[i].factor);
  return found_nan;
}

// Those of its columns, of whole blocks.
template <class O>
__device__ inline void column_scales(const uint2 (&raw)[kRows], const Factors& of_group, Scaled (&scales)[kColumns]) {
  const uint2 found = amax_of_columns(raw);
  scale_two<O>(of_group, found.x, &scales[0], &scales[1]);
  scale_two<O>(of_group, found.y, &scales[2], &scales[3]);
}

// The one of its block of 16 x 16.
template <class O>
__device__ inline Scaled square_scale(const uint2 (&raw)[kRows], const Factors& of_group) {
  uint32_t amax = largest(raw);
  amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
  Scaled scale, none;
  scale_two<O>(of_group, amax, &scale, &none);
  return scale;
}

}  // namespace fp4
}  // namespace device
}  // namespace grouped
