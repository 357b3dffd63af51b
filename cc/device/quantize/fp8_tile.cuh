// FP8 codes of a tile of values, of which a thread holds 8 columns of 8 rows: 256 threads (quantize_fp8_cuda.cu
// draws how), or one warp (quantize_fp8_rows_cuda.cu).
#pragma once

#include <string>

#include "cc/api/operands.h"
#include "cc/device/quantize/tiles.cuh"

namespace grouped {
namespace device {

constexpr int kVector = 8;  // columns, and rows, of a thread
constexpr int kLanes = kStoreColumns / kVector;
constexpr int kWarpRows = kStoreRows / kStoreWarps;
static_assert(kWarpRows == 2 * kVector && kLanes == 16, "a warp has two threads per column vector");

constexpr int kRows = 1, kColumns = 2;  // forms

// A tile, and where in it a thread's 8 columns of 8 rows are: as high as the blocks of columns, or, where rows are
// stored alone, wide, so that memory is read and written in long runs and the ends of groups waste less.
template <bool kWide>
struct Shape {
  static constexpr int kRows = kWide ? 16 : kStoreRows;
  static constexpr int kColumns = kWide ? 1024 : kStoreColumns;
  static_assert(kRows * kColumns == kStoreThreads * kVector * kVector, "a value has one thread");

  int column = kWide ? threadIdx.x / kLanes % 8 * 128 + threadIdx.x % kLanes * kVector : threadIdx.x % kLanes * kVector;
  int row = kWide ? threadIdx.x / kLanes / 8 * kVector : threadIdx.x / kLanes * kVector;
};

// A tile of one warp, and where in it a thread's values are: rows alone, 512 bytes of the source and 256 of codes in
// each.
struct Strip {
  static constexpr int kRows = kVector;
  static constexpr int kColumns = 32 * kVector;

  int column = threadIdx.x % 32 * kVector;
  static constexpr int row = 0;
};

// Of the forms that are transposed.
template <DType kFrom>
struct ColumnScratch {
  alignas(16) uint64_t transposed[kStoreColumns][kStoreRows / 8];
  Eight<kFrom> amax[kStoreWarps][kLanes];  // by warp
  float factors[kStoreRows / 32][kStoreColumns];
};

// Blocks of 32 have scales of powers of two in 8 bits, others of 32.
template <int kBlock>
__device__ inline BlockScale scale_of(const StoreProblem& p, uint32_t amax) {
  if constexpr (kBlock != 32) return fp32_block_scale(p.rule.fp32, amax);
  return p.type == DType::e5m2 ? e8m0_block_scale<E5M2>(amax) : e8m0_block_scale<E4M3>(amax);
}

// Amaxes of this thread's 8 rows over the lanes that share kBlock columns (32, 64 or 128), fp32 bits. Each step halves
// what a lane keeps: the upper half of lanes the upper half of words. A lane ends up with those of rows `word` and
// word + 4 (32 columns), or of one of them, the second where the lane is odd.
template <DType kFrom, int kBlock>
struct RowAmaxes {
  static constexpr int kFirst = kBlock / 16;  // lanes that share the columns differ in kFirst and the bits below

  const int lane = threadIdx.x % 32;
  const bool upper = lane & kFirst, odd = lane & (kFirst / 2);
  const int word = 2 * upper + odd;
  uint32_t found[2];

  __device__ explicit RowAmaxes(const uint4 (&raw)[kVector]) {
    uint32_t pair[4];  // rows i and i + 4
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = largest_of(raw[i], raw[i + 4]);
    const uint32_t keep0 = upper ? pair[2] : pair[0], keep1 = upper ? pair[3] : pair[1];
    const uint32_t send0 = upper ? pair[0] : pair[2], send1 = upper ? pair[1] : pair[3];
    const uint32_t two0 = __vmaxu2(keep0, __shfl_xor_sync(~0u, send0, kFirst));
    const uint32_t two1 = __vmaxu2(keep1, __shfl_xor_sync(~0u, send1, kFirst));
    uint32_t mine = __vmaxu2(odd ? two1 : two0, __shfl_xor_sync(~0u, odd ? two0 : two1, kFirst / 2));
    if constexpr (kBlock == 32) {
      found[0] = amax_of<kFrom>(mine & 0xFFFFu);
      found[1] = amax_of<kFrom>(mine >> 16);
    } else {
      if constexpr (kBlock == 128) mine = __vmaxu2(mine, __shfl_xor_sync(~0u, mine, 2));
      mine = __vmaxu2(mine, __shfl_xor_sync(~0u, mine, 1));
      found[0] = amax_of<kFrom>(lane & 1 ? mine >> 16 : mine & 0xFFFFu);
    }
  }
  __device__ explicit RowAmaxes(const Floats8 (&raw)[kVector]) {
    uint32_t row[kVector], four[4];  // rows 0, 1, 4, 5, or 2, 3, 6, 7
#pragma unroll
    for (int i = 0; i < kVector; ++i) row[i] = largest_of(raw[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = row[i / 2 * 4 + i % 2], high = row[i / 2 * 4 + i % 2 + 2];
      four[i] = max(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, kFirst));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t low = four[2 * k], high = four[2 * k + 1];
      found[k] = max(odd ? high : low, __shfl_xor_sync(~0u, odd ? low : high, kFirst / 2));
    }
    if constexpr (kBlock != 32) {
      const bool second = lane & 1;
      found[0] = max(second ? found[1] : found[0], __shfl_xor_sync(~0u, second ? found[0] : found[1], 1));
      if constexpr (kBlock == 128) found[0] = max(found[0], __shfl_xor_sync(~0u, found[0], 2));
    }
  }
};

// Scales of this thread's 8 rows, for blocks of kBlock columns: stores them and returns the factors. Tile: a Shape or
// Strip.
template <DType kFrom, int kBlock, class Tile>
__device__ inline void row_factors(const StoreProblem& p, const StoreTile& tile, const Eight<kFrom> (&raw)[kVector],
                                   float (&factors)[kVector]) {
  const Tile at;
  const RowAmaxes<kFrom, kBlock> amaxes(raw);
  const int lane = amaxes.lane, word = amaxes.word;
  const int64_t row = tile.source + at.row + word;
  if constexpr (kBlock == 32) {
    float e[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const BlockScale of_block = scale_of<kBlock>(p, amaxes.found[k]);
      e[k] = of_block.scale;
      if (at.row + word + 4 * k < tile.rows && at.column / 32 * 32 < tile.columns) {
        put_scale(p.forms[0].scales, false,
                  p.forms[0].place.at(0, row + 4 * k, static_cast<uint32_t>(tile.column + at.column) / 32),
                  of_block.scale_inv);
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int from = (lane & ~3) | ((i & 3) / 2 * 2 + (i & 1));
      factors[i] = __shfl_sync(~0u, e[i / 4], from);
    }
  } else {
    const int high = lane & 1;  // of the word's two rows, which lane has which
    const BlockScale of_block = scale_of<kBlock>(p, amaxes.found[0]);
    if (at.row + word + 4 * high < tile.rows && !(lane & 2) && at.column / kBlock * kBlock < tile.columns) {
      put_scale(p.forms[0].scales, true,
                p.forms[0].place.at(0, row + 4 * high, static_cast<uint32_t>(tile.column + at.column) / kBlock),
                of_block.scale_inv);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int from = (lane & 16) | ((i & 3) / 2 * 8 + (i & 1) * 4) | i / 4;
      factors[i] = __shfl_sync(~0u, of_block.scale, from);
    }
  }
}

// Two pairs of codes: what makes the first can add it to the second, in one instruction.
__device__ inline uint32_t joined(uint16_t first, uint16_t second) {
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(first), "h"(second));
  return word;
}

// Codes of `rows` rows; the factor of value c of row i is factor(i, c).
template <class T, DType kFrom, class Tile, class Factor>
__device__ inline void put_rows(const StoreTile& tile, const Eight<kFrom> (&raw)[kVector], uint8_t* to, int64_t pitch,
                                int rows, Factor factor) {
  const Tile at;
  const int count = at.column < tile.columns ? rows - at.row : 0;
  to += at.row * pitch + at.column;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    uint32_t words[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint16_t codes[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int first = 4 * k + 2 * c;
        codes[c] = encode_pair<T>(fl_mul(value_at<kFrom>(raw[i], first), factor(i, first)),
                                  fl_mul(value_at<kFrom>(raw[i], first + 1), factor(i, first + 1)));
      }
      words[k] = joined(codes[0], codes[1]);
    }
    if (i < count) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    to += pitch;
  }
}

// Four codes of each of four rows become four codes of each of four columns.
__device__ inline void turn_codes(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low0 = __byte_perm(rows[0], rows[1], 0x5140), low1 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high0 = __byte_perm(rows[0], rows[1], 0x7362), high1 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low0, low1, 0x5410), columns[1] = __byte_perm(low0, low1, 0x7632);
  columns[2] = __byte_perm(high0, high1, 0x5410), columns[3] = __byte_perm(high0, high1, 0x7632);
}

__device__ inline void take_eight(const float* from, float (&to)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// Scales of the tile's columns, for blocks of kBlock rows, stored; factors of this thread's columns.
template <DType kFrom, int kBlock>
__device__ inline void column_factors(const StoreProblem& p, const StoreTile& tile, const Eight<kFrom> (&raw)[kVector],
                                      int rows, ColumnScratch<kFrom>* s, float (&factors)[kVector]) {
  using Magnitude = typename std::conditional<kFrom == DType::f32, uint32_t, uint16_t>::type;
  const Shape<false> at;
  Eight<kFrom> found = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) found = larger_of(found, raw[i]);
  found = larger_of(found, shuffled(found, 16));
  if (threadIdx.x % 32 < kLanes) s->amax[threadIdx.x / 32][threadIdx.x % kLanes] = found;
  __syncthreads();
  constexpr int kBlockWarps = kBlock / kWarpRows;
  for (int item = threadIdx.x; item < kStoreRows / kBlock * kStoreColumns; item += kStoreThreads) {
    const int column = item % kStoreColumns, b = item / kStoreColumns;
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < kBlockWarps; ++w) {
      amax = max(amax, uint32_t{reinterpret_cast<const Magnitude*>(s->amax[b * kBlockWarps + w])[column]});
    }
    const BlockScale of_block = scale_of<kBlock>(p, amax_of<kFrom>(amax));
    s->factors[b][column] = of_block.scale;
    if (column < tile.columns && b * kBlock < rows) {
      const uint32_t first = static_cast<uint32_t>(p.ragged ? tile.padded : tile.row);
      put_scale(p.forms[1].scales, kBlock == 128,
                p.forms[1].place.at(p.ragged ? 0 : tile.group, first / kBlock + b, tile.column + column),
                of_block.scale_inv);
    }
  }
  __syncthreads();
  take_eight(&s->factors[at.row / kBlock][at.column], factors);
}

// Codes of columns to shared memory, 8 rows in one word, and from there to lines of `rows` bytes (a multiple of 16).
template <class T, DType kFrom>
__device__ inline void put_transposed(const StoreProblem& p, const StoreTile& tile, const Eight<kFrom> (&raw)[kVector],
                                      const float (&factors)[kVector], int rows, ColumnScratch<kFrom>* s) {
  const Shape<false> at;
  const int lane = at.column / kVector, piece = at.row / 8;
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    uint32_t words[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint16_t codes[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = 4 * k + 2 * r;
        codes[r] = encode_pair<T>(fl_mul(value_at<kFrom>(raw[first], c), factors[c]),
                                  fl_mul(value_at<kFrom>(raw[first + 1], c), factors[c]));
      }
      words[k] = joined(codes[0], codes[1]);
    }
    // Sixteen lanes write the same piece of columns that are 8 apart: their words go to different banks.
    s->transposed[at.column + c][piece ^ lane] = words[0] | static_cast<uint64_t>(words[1]) << 32;
  }
  __syncthreads();
  const QuantizedForm& form = p.forms[1];
  uint8_t* to = form.values + ((p.ragged ? 0 : tile.group * p.width) + tile.column) * form.pitch +
                (p.ragged ? tile.padded : tile.row);
  const int chunk = threadIdx.x % 8;  // 16 bytes of a line
#pragma unroll
  for (int i = 0; i < kStoreColumns * 8 / kStoreThreads; ++i) {
    const int column = threadIdx.x / 8 + i * (kStoreThreads / 8), swap = column / kVector;
    const ulonglong2 v = *reinterpret_cast<const ulonglong2*>(&s->transposed[column][2 * chunk ^ (swap & ~1)]);
    const ulonglong2 codes = swap & 1 ? ulonglong2{v.y, v.x} : v;
    if (column < tile.columns && chunk * 16 < rows) {
      *reinterpret_cast<ulonglong2*>(to + column * form.pitch + chunk * 16) = codes;
    }
  }
}

// Values of 16 bits, so that nothing decoded is held from one form to the next.
__device__ inline void forget_values(uint4 (&raw)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) forget(raw[i].x), forget(raw[i].y), forget(raw[i].z), forget(raw[i].w);
}
__device__ inline void forget_values(Floats8 (&)[kVector]) {}

// The largest magnitude of this thread's values, as the source has it.
template <class Vector>
__device__ inline uint32_t largest(const Vector (&raw)[kVector]) {
  Vector found = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) found = larger_of(found, raw[i]);
  return largest_of(found);
}

__device__ inline void store_group_scales(const StoreProblem& p) {
  for (int g = threadIdx.x; g < p.scan.count; g += kStoreThreads) {
    const float scale = group_scale_of(p.scan, p.rule, true, p.scale, false, g).scale_inv;
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

// Why these tiles do not give the forms of a call; empty: they do.
inline std::string refuses_fp8_forms(const Quantize& call) {
  const TensorView& cross = call.cross_values;
  const DType type = (call.values.present() ? call.values : cross).dtype;
  if (!is_fp8(type)) return std::string("gives FP8, not ") + dtype_name(type);
  if (!cross.present()) return "";
  const bool ragged = call.group_sizes.present();
  if (!ragged && call.source.dims[1] % 16 != 0) return "transposes weights whose rows are a multiple of 16";
  if (ragged && call.transposed && call.segment % 16 != 0) return "transposes rows in segments of 16 or more";
  if (ragged && !call.transposed && call.block != 32) return "leaves blocks of 32 in place, transposes others";
  return "";
}
}  // namespace grouped
