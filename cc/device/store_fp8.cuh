// FP8 codes of a tile of 16-bit values, of which a thread holds 8 columns of 8 rows: 256 threads (quantize_fp8_cuda.cu
// draws how), or one warp (quantize_fp8_rows_cuda.cu).
#pragma once

#include "cc/device/store_tiles.cuh"

namespace grouped {
namespace device {

constexpr int kVector = 8;  // columns, and rows, of a thread
constexpr int kLanes = kStoreColumns / kVector;
constexpr int kWarpRows = kStoreRows / kStoreWarps;
static_assert(kWarpRows == 2 * kVector && kLanes == 16, "a warp has two threads a column vector");

constexpr int kRows = 1, kColumns = 2;  // forms

// A tile, and where in it a thread's 8 columns of 8 rows lie: as high as the blocks of columns, or, where rows are
// stored alone, wide, so that memory is read and written in long runs and the ends of groups waste less.
template <bool kWide>
struct Shape {
  static constexpr int kRows = kWide ? 16 : kStoreRows;
  static constexpr int kColumns = kWide ? 1024 : kStoreColumns;
  static_assert(kRows * kColumns == kStoreThreads * kVector * kVector, "a value has one thread");

  int column = kWide ? threadIdx.x / kLanes % 8 * 128 + threadIdx.x % kLanes * kVector : threadIdx.x % kLanes * kVector;
  int row = kWide ? threadIdx.x / kLanes / 8 * kVector : threadIdx.x / kLanes * kVector;
};

// A tile of one warp, and where in it a thread's values lie: rows alone, 512 bytes of the source and 256 of codes in
// each.
struct Strip {
  static constexpr int kRows = kVector;
  static constexpr int kColumns = 32 * kVector;

  int column = threadIdx.x % 32 * kVector;
  static constexpr int row = 0;
};

// Of the forms that are turned.
struct ColumnScratch {
  alignas(16) uint64_t turned[kStoreColumns][kStoreRows / 8];
  uint4 amax[kStoreWarps][kLanes];  // by warp
  float factors[kStoreRows / 32][kStoreColumns];
};

__device__ inline BlockScale scale_of(const StoreProblem& p, uint32_t amax) {
  const GroupScale none = {1.0f, 1.0f};
  return p.type == DType::e5m2 ? block_scale<E5M2>(p.rule, amax, none) : block_scale<E4M3>(p.rule, amax, none);
}

// Scales of this thread's 8 rows, for blocks of kBlock columns: stores them and returns the factors. Tile: a Shape or
// Strip.
template <bool kBf16, int kBlock, class Tile>
__device__ inline void row_factors(const StoreProblem& p, const StoreTile& tile, const uint4 (&raw)[kVector],
                                   float (&factors)[kVector]) {
  const Tile at;
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
template <class T, bool kBf16, class Tile, class Factor>
__device__ inline void put_rows(const StoreTile& tile, const uint4 (&raw)[kVector], uint8_t* to, int64_t pitch,
                                int rows, Factor factor) {
  const Tile at;
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
                                      int rows, ColumnScratch* s, float (&factors)[kVector]) {
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
  for (int item = threadIdx.x; item < kStoreRows / kBlock * kStoreColumns; item += kStoreThreads) {
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
                                  const float (&factors)[kVector], int rows, ColumnScratch* s) {
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
  for (int i = 0; i < kStoreColumns * 8 / kStoreThreads; ++i) {
    const int column = threadIdx.x / 8 + i * (kStoreThreads / 8), swap = column / kVector;
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

__device__ inline void store_group_scales(const StoreProblem& p) {
  for (int g = threadIdx.x; g < p.scan.count; g += kStoreThreads) {
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

}  // namespace device
}  // namespace grouped
