// A tile of the E2M1 quantiser: what is wanted of it, where a thread's values are, how they come, and the scales of
// their blocks.
#pragma once

#include <cuda_bf16.h>

#include "cc/device/quantize/tiles.cuh"

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
enum class Columns { none, in_place, rotated, transposed };
constexpr bool is_tall(Columns columns) { return columns == Columns::transposed; }

// kBlock 16, or 32: MXFP4. kAlongRows: that form is wanted, too.
template <DType kFrom, int kBlock, bool kSquare, bool kAlongRows, Columns kColumns, bool kStochastic>
struct Options {
  static constexpr DType from = kFrom;
  static constexpr bool is_square = kSquare, along_rows = kAlongRows, is_stochastic = kStochastic;
  static constexpr int block = kBlock;
  static constexpr Columns columns = kColumns;
};

// A tile, and where in it a thread's values are.
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

// Four values as they come: two per word, or one.
template <DType kFrom>
using Four = typename std::conditional<kFrom == DType::f32, uint4, uint2>::type;

// The table of groups follows it.
template <DType kFrom>
struct Shared {
  Four<kFrom> raw[kWarps][kRows][32];
  SourceTile next[kWarps];  // a warp's own; in registers it would live through everything
  Factors factors[2];       // by form: rotated columns have scales of their own
  int64_t sums[34];
};
template <DType kFrom>
struct TransposedShared : Shared<kFrom> {
  alignas(16) uint64_t codes[kWarpColumns][kWarps];
  alignas(16) uint8_t scales[kWarpColumns][kWarps];
};

// 16 bytes per lane: half of the lanes have a row of 16-bit values, all of them one of fp32 values.
template <DType kFrom, bool kTall>
__device__ inline void load_tile(const FineLaunch& p, const SourceTile& tile, Shared<kFrom>* s) {
  constexpr int kLanes = 8 * kBytes<kFrom>, kStep = 32 / kLanes, kValues = 16 / kBytes<kFrom>;  // of a row, of a lane
  const Shape<kTall> at;
  const int lane = threadIdx.x % 32, below = lane / kLanes, along = lane % kLanes * kValues;
  const int row = at.warp_row + below, column = at.warp_column + along;
  const int64_t pitch = kBytes<kFrom> * p.width;
  const int rows = column < tile.columns ? tile.rows - row : 0;  // rows from here that exist
  copy_lines<kFrom, kRows / kStep>(reinterpret_cast<uint4*>(&s->raw[threadIdx.x / 32][below][along / kColumns]),
                                   kStep * kLanes, tile.values + row * pitch + kBytes<kFrom> * column, kStep * pitch,
                                   (rows + kStep - 1) / kStep, has_vectors(tile.values));
  commit_copies();
}

template <DType kFrom>
__device__ inline void take_tile(const Shared<kFrom>* s, Four<kFrom> (&raw)[kRows]) {
  wait_all_copies();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRows; ++i) raw[i] = s->raw[threadIdx.x / 32][i][threadIdx.x % 32];
  __syncwarp();  // from here on the next tile may come
}

using device::value_at;
// Value `i` of four.
template <DType kFrom>
__device__ inline float value_at(const uint2& v, int i) {
  const uint32_t word = i < 2 ? v.x : v.y;
  if constexpr (kFrom == DType::bf16) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
  return value_of<kFrom>(i % 2 ? word >> 16 : word & 0xFFFFu);
}

// Bytes that have the signs of values 0, 2, 1, 3 at the top.
__device__ inline uint32_t high_bytes(const uint2& v) { return __byte_perm(v.x, v.y, 0x7351); }
__device__ inline uint32_t high_bytes(const uint4& v) {
  return __byte_perm(__byte_perm(v.x, v.z, 0x0073), __byte_perm(v.y, v.w, 0x0073), 0x5410);
}
// Those of value `i` of two rows, in bytes 0 and 1.
__device__ inline uint32_t high_bytes(const uint2& one, const uint2& other, int i) {
  return __byte_perm(i < 2 ? one.x : one.y, i < 2 ? other.x : other.y, i % 2 ? 0x0073 : 0x0051);
}
__device__ inline uint32_t high_bytes(const uint4& one, const uint4& other, int i) {
  return __byte_perm(word_of(one, i), word_of(other, i), 0x0073);
}

// Two magnitudes as the source has them, as one amax each.
template <DType kFrom>
using Two = typename std::conditional<kFrom == DType::f32, uint2, uint32_t>::type;

__device__ inline uint32_t larger_two(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ inline uint2 larger_two(const uint2& a, const uint2& b) { return make_uint2(max(a.x, b.x), max(a.y, b.y)); }
__device__ inline uint32_t from_lane(uint32_t v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
__device__ inline uint2 from_lane(const uint2& v, int mask) {
  return make_uint2(__shfl_xor_sync(~0u, v.x, mask), __shfl_xor_sync(~0u, v.y, mask));
}

// Amaxes of two rows of the thread.
__device__ inline uint32_t amax_of_rows(const uint2& one, const uint2& other) {
  const uint32_t low = __vmaxu2(one.x & kMagnitudes, one.y & kMagnitudes);
  const uint32_t high = __vmaxu2(other.x & kMagnitudes, other.y & kMagnitudes);
  return __vmaxu2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}
__device__ inline uint2 amax_of_rows(const uint4& one, const uint4& other) {
  return make_uint2(largest_float(one), largest_float(other));
}

// Amaxes of the thread's columns.
__device__ inline uint2 amax_of_columns(const uint2 (&raw)[kRows]) {
  uint2 found = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    found.x = __vmaxu2(found.x, raw[i].x & kMagnitudes);
    found.y = __vmaxu2(found.y, raw[i].y & kMagnitudes);
  }
  return found;
}
__device__ inline uint4 amax_of_columns(const uint4 (&raw)[kRows]) {
  uint4 found = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i) found = larger_floats(found, raw[i]);
  return found;
}

__device__ inline uint32_t largest(const uint2 (&raw)[kRows]) {
  const uint2 found = amax_of_columns(raw);
  return both(__vmaxu2(found.x, found.y));
}
__device__ inline uint32_t largest(const uint4 (&raw)[kRows]) { return largest_float(amax_of_columns(raw)); }

// Blocks of 16 rows, rotated and rounded to bf16 again.
__device__ inline void rotate_columns(uint2 (&raw)[kRows]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float low[kRows], high[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      low[i] = value_at<DType::bf16>(raw[i], 2 * k);
      high[i] = value_at<DType::bf16>(raw[i], 2 * k + 1);
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

// fp32 values stay what they become.
__device__ inline void rotate_columns(uint4 (&raw)[kRows]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = value_at<DType::f32>(raw[i], c);
    rotate(v);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      (c == 0 ? raw[i].x : c == 1 ? raw[i].y : c == 2 ? raw[i].z : raw[i].w) = __float_as_uint(v[i]);
    }
  }
}

// Of the group of a tile, by all threads; 256 of them have an entry each.
template <DType kFrom>
__device__ inline void fill_factors(const FineLaunch& p, int group, Shared<kFrom>* s) {
  static_assert(kThreads == 2 * kCodes, "a thread has an entry");
  const int form = threadIdx.x / kCodes, code = threadIdx.x % kCodes;
  const GroupScale found = group_scale_of(p.scan, p.rule, false, p.scale, form && p.rotate, group);
  __syncthreads();  // those of the group before are not needed any more
  s->factors[form].of_code[code] = nvfp4_block_scale(static_cast<uint8_t>(code), found.scale_inv);
  if (code == 0) s->factors[form].step = fl_mul(found.scale, kSixth);
  __syncthreads();
}

// A block's code of its scale, and factor.
struct Scaled {
  uint32_t code;
  float factor;
};

// Of two blocks with these amaxes: as block_scale of cc/math/store.h.
template <class O>
__device__ inline void scale_two(const Factors& of_group, float a, float b, Scaled* low, Scaled* high) {
  if constexpr (O::block == 16) {
    const uint32_t codes = encode_pair<E4M3>(fl_mul(a, of_group.step), fl_mul(b, of_group.step));
    *low = {codes & 0xFFu, of_group.of_code[codes & 0xFFu]};
    *high = {codes >> 8, of_group.of_code[codes >> 8]};
  } else {
    const uint8_t first = e8m0_code<E2M1>(a), second = e8m0_code<E2M1>(b);
    *low = {first, e8m0_scale(first)};
    *high = {second, e8m0_scale(second)};
  }
}

template <class O>
__device__ inline void scale_two(const Factors& of_group, uint32_t pair, Scaled* low, Scaled* high) {
  scale_two<O>(of_group, value_of<O::from>(pair & 0xFFFFu), value_of<O::from>(pair >> 16), low, high);
}
template <class O>
__device__ inline void scale_two(const Factors& of_group, const uint2& two, Scaled* low, Scaled* high) {
  scale_two<O>(of_group, __uint_as_float(two.x), __uint_as_float(two.y), low, high);
}

// Factors of the four values of a row.
struct Factors4 {
  float of[kColumns];
};

// Those of this thread's rows, scattered over the lanes that share their blocks: a thread would have to hold 16.
template <class O>
struct RowFactors {
  static constexpr int kHalf = kRows / 2, kLanes = O::block / kColumns;  // lanes that share a block
  static constexpr int kOwn = kHalf / kLanes;                            // rows of a lane, and those 8 below

  float own[2 * kOwn];
  bool found_nan;

  // By the whole warp.
  __device__ Factors4 at(int row) const {
    const float e = __shfl_sync(~0u, own[row % kHalf % kOwn + row / kHalf * kOwn], row % kHalf / kOwn, kLanes);
    return {{e, e, e, e}};
  }
};

// Scales of this thread's rows, stored; their factors.
template <class O>
__device__ inline RowFactors<O> row_factors(const FineLaunch& p, const StoreTile& tile,
                                            const Four<O::from> (&raw)[kRows], const Factors& of_group) {
  constexpr int kHalf = RowFactors<O>::kHalf, kLanes = RowFactors<O>::kLanes, kOwn = RowFactors<O>::kOwn;
  const Shape<is_tall(O::columns)> at;
  const int lane = threadIdx.x % kLanes;
  Two<O::from> pair[kHalf];  // rows i and i + 8
#pragma unroll
  for (int i = 0; i < kHalf; ++i) pair[i] = amax_of_rows(raw[i], raw[i + kHalf]);
  // Each step halves what a lane keeps: the upper half of lanes the upper half of words.
#pragma unroll
  for (int step = kLanes / 2, count = kHalf / 2; step; step /= 2, count /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const Two<O::from> keep = upper ? pair[i + count] : pair[i], send = upper ? pair[i] : pair[i + count];
      pair[i] = larger_two(keep, from_lane(send, step));
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
  RowFactors<O> factors;
  factors.found_nan = false;
#pragma unroll
  for (int i = 0; i < 2 * kOwn; ++i) {
    factors.own[i] = own[i].factor;
    factors.found_nan |= isnan(own[i].factor);
  }
  return factors;
}

// Those of its columns, of whole blocks.
template <class O>
__device__ inline void column_scales(const Four<O::from> (&raw)[kRows], const Factors& of_group,
                                     Scaled (&scales)[kColumns]) {
  const Four<O::from> found = amax_of_columns(raw);
  if constexpr (O::from == DType::f32) {
    scale_two<O>(of_group, make_uint2(found.x, found.y), &scales[0], &scales[1]);
    scale_two<O>(of_group, make_uint2(found.z, found.w), &scales[2], &scales[3]);
  } else {
    scale_two<O>(of_group, found.x, &scales[0], &scales[1]);
    scale_two<O>(of_group, found.y, &scales[2], &scales[3]);
  }
}

// The one of its block of 16 x 16.
template <class O>
__device__ inline Scaled square_scale(const Four<O::from> (&raw)[kRows], const Factors& of_group) {
  uint32_t amax = largest(raw);
  amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
  Scaled scale, none;
  scale_two<O>(of_group, value_of<O::from>(amax), 0.0f, &scale, &none);
  return scale;
}

}  // namespace fp4
}  // namespace device
}  // namespace grouped
