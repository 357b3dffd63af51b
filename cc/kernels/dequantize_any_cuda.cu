// Values of a quantised form, of any format at any address.
//
//   scan   one block: where groups, their tiles and their segments are, into the workspace
//   write  blocks of 256 threads walk over tiles of 128 x 128 values of one group; a thread takes 8 columns of 8 rows:
//          8 codes per load --> fp32, block scale, group scale --> one rounding --> 16 bytes
//          (forms with rows as their last axis: codes of the tile through 17 KiB of shared memory first)
//
// Types and whole vectors are known at compile time where results have 16 bits and addresses allow it.
#include <algorithm>
#include <string>
#include <type_traits>

#include "cc/device/common/elements.cuh"
#include "cc/device/quantize/group_scales.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kLanes = kStoreColumns / kVector;
constexpr int kPitch = kStoreRows + 8;

struct Problem {
  StoreScan scan;
  const uint8_t* values;
  int64_t pitch;       // bytes from one row of codes to the next
  const void* scales;  // null: none
  DType scale_type;
  ScalePlace place;
  const float* group_scales;  // null: none
  void* result;
  DType type;
  int64_t width;
  bool ragged;
  bool cross;
  bool transposed;  // rows are the last axis
  int block_bits;   // logarithms of a block's lengths
  int outer_bits;
};

// Eight codes of one row, a byte each, zeros from `count` on.
template <class T>
__device__ uint64_t load_codes(const uint8_t* row, int64_t first, int count) {
  const uint8_t* at = row + first * T::kBits / 8;
  uint64_t codes = 0;
  if constexpr (T::kBits == 8) {
    if (count >= kVector && reinterpret_cast<uintptr_t>(at) % kVector == 0)
      return *reinterpret_cast<const uint64_t*>(at);
#pragma unroll
    for (int i = 0; i < kVector; ++i) codes |= i < count ? static_cast<uint64_t>(at[i]) << (8 * i) : 0;
  } else {
    uint32_t packed = 0;
    if (count >= kVector && reinterpret_cast<uintptr_t>(at) % 4 == 0) {
      packed = *reinterpret_cast<const uint32_t*>(at);
    } else {
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) packed |= 2 * i < count ? static_cast<uint32_t>(at[i]) << (8 * i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) codes |= static_cast<uint64_t>(packed >> (4 * i) & 0xF) << (8 * i);
  }
  return codes;
}

// Scales `step` apart, the first `count` of them: of eight rows or columns. One branch on their type, then all loads.
__device__ inline void load_scales(const Problem& p, int64_t first, int64_t step, int count, float (&scales)[kVector]) {
  if (p.scale_type == DType::f32) {
    const float* at = static_cast<const float*>(p.scales) + first;
#pragma unroll
    for (int i = 0; i < kVector; ++i) scales[i] = i < count ? at[i * step] : 1.0f;
    return;
  }
  const uint8_t* at = static_cast<const uint8_t*>(p.scales) + first;
  uint8_t codes[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) codes[i] = i < count ? at[i * step] : 0;
  if (p.scale_type == DType::e8m0) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) scales[i] = decode_e8m0(codes[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) scales[i] = decode<E4M3>(codes[i]);
  }
}

// Codes of a tile whose rows are the last axis, into shared memory as [column][row].
template <class T>
__device__ void load_transposed(const Problem& p, const StoreTile& tile, uint8_t* shared) {
  const int64_t line = (p.ragged ? 0 : tile.group * p.width) + tile.column;
  const int64_t first = p.ragged ? tile.padded : tile.row;
  for (int item = threadIdx.x; item < tile.columns * kLanes; item += kThreads) {
    const int c = item / kLanes, r = item % kLanes * kVector;
    if (r >= tile.rows) continue;
    const uint64_t codes = load_codes<T>(p.values + (line + c) * p.pitch, first + r, tile.rows - r);
    *reinterpret_cast<uint64_t*>(shared + c * kPitch + r) = codes;
  }
}

// Two codes of 16 bits; NaN is some NaN.
template <class T>
__device__ inline float2 decode_two(uint32_t codes) {
  if constexpr (T::kBits == 8 && T::kMantissaBits == 2) {  // E5M2 is fp16 cut short
    const uint32_t bits = __byte_perm(codes, 0, 0x1404);
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
#if __CUDA_ARCH__ >= 890
  if constexpr (T::kBits == 8 && T::kMantissaBits == 3) {
    uint32_t bits;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(static_cast<uint16_t>(codes)));
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
#endif
  return make_float2(decode<T>(static_cast<uint8_t>(codes)), decode<T>(static_cast<uint8_t>(codes >> 8)));
}

// NOTE: the hardware's operations and conversions have NaN of their own.
__device__ inline uint32_t bits16(float value, DType type) {
  const uint32_t nan = type == DType::bf16 ? kNanBits >> 16 : 0x7E00u;
  return is_nan_bits(magnitude_bits(value)) ? nan : to_bits(value, type);
}

__device__ inline void put_values(void* base, DType type, int64_t first, int count, float (&v)[kVector]) {
  if (type == DType::f32) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] = is_nan_bits(magnitude_bits(v[i])) ? bits_float(kNanBits) : v[i];
    return store_values<kVector>(base, type, first, count, v);
  }
  uint16_t* to = static_cast<uint16_t*>(base) + first;
  uint32_t words[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) words[i] = bits16(v[2 * i], type) | bits16(v[2 * i + 1], type) << 16;
  if (count >= kVector && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) to[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

// Eight values of 16 bits at a multiple of 16 bytes. NaN is rare, and looked for in all of them at once.
template <bool kBf16>
__device__ inline void put_whole(void* base, int64_t first, const float (&v)[kVector]) {
  constexpr DType kType = kBf16 ? DType::bf16 : DType::f16;
  constexpr uint32_t kMagnitudes = 0x7FFF7FFFu, kInfinity = kBf16 ? 0x7F80u : 0x7C00u;
  uint32_t words[kVector / 2], largest = 0;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    words[i] = packed(v[2 * i], v[2 * i + 1], kType);
    largest = __vmaxu2(largest, words[i] & kMagnitudes);
  }
  if (max(largest & 0xFFFFu, largest >> 16) > kInfinity) {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) words[i] = bits16(v[2 * i], kType) | bits16(v[2 * i + 1], kType) << 16;
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(base) + first) = make_uint4(words[0], words[1], words[2], words[3]);
}

// What is known of the results: nothing, or that eight of them are 16 bytes at a multiple of 16, their codes likewise,
// and that 32 bits count tiles.
enum class Into { any, bf16, f16 };

// Eight columns of eight rows. All loads come first.
template <class T, bool kTransposed, Into kInto>
__device__ void write_square(const Problem& p, const StoreTile& tile, int row, int column, const uint8_t* shared) {
  constexpr bool kWhole = kInto != Into::any;
  const bool cross = kTransposed || p.cross;
  const int count = kWhole ? kVector : min(tile.columns - column, kVector), rows = min(tile.rows - row, kVector);
  const int64_t first = tile.column + column;
  const int64_t stored = (p.ragged ? (cross ? tile.padded : tile.source) : tile.row) + row;
  uint64_t codes[kVector];  // of a row or, transposed, of a column
  if constexpr (kTransposed) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      codes[i] = *reinterpret_cast<const uint64_t*>(shared + (column + i) * kPitch + row);
    }
  } else {
    const uint8_t* line = p.values + ((cross ? tile.padded : tile.source) + row) * p.pitch;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if constexpr (kWhole && T::kBits == 8) {
        codes[i] = i < rows ? *reinterpret_cast<const uint64_t*>(line + first) : 0;
      } else {
        codes[i] = i < rows ? load_codes<T>(line, first, count) : 0;
      }
      line += p.pitch;
    }
  }
  // Blocks along rows are longer than eight, so scales are those of the columns; blocks along columns, of the rows. Of
  // square blocks all eight lines have the same.
  float scales[kVector];
  if (p.scales) {
    const int64_t step = p.outer_bits ? 0 : cross ? p.place.column_step : p.place.row_step;
    const int tall = cross ? p.block_bits : p.outer_bits, wide = cross ? p.outer_bits : p.block_bits;
    load_scales(p, p.place.at(p.ragged ? 0 : tile.group, stored >> tall, first >> wide), step, cross ? count : rows,
                scales);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) scales[i] = 1.0f;
  }
  const float shared_scale = p.group_scales ? p.group_scales[tile.group] : 1.0f;
  int64_t to = (tile.source + row) * p.width + first;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float v[kVector];
#pragma unroll
    for (int c = 0; c < kVector; c += 2) {
      float2 two;
      if constexpr (kTransposed) {
        two = decode_two<T>(static_cast<uint32_t>(codes[c] >> (8 * i) & 0xFF) |
                            static_cast<uint32_t>(codes[c + 1] >> (8 * i) & 0xFF) << 8);
      } else {
        two = decode_two<T>(static_cast<uint32_t>(codes[i] >> (8 * c) & 0xFFFF));
      }
      v[c] = fl_mul(fl_mul(two.x, cross ? scales[c] : scales[i]), shared_scale);
      v[c + 1] = fl_mul(fl_mul(two.y, cross ? scales[c + 1] : scales[i]), shared_scale);
    }
    if (i < rows) {
      if constexpr (kWhole) {
        put_whole<kInto == Into::bf16>(p.result, to, v);
      } else {
        put_values(p.result, p.type, to, count, v);
      }
    }
    to += p.width;
  }
}

template <class T, bool kTransposed, Into kInto>
__global__ void __launch_bounds__(kThreads, 3)
    write_tiles(const __grid_constant__ Problem p, int64_t column_tiles, int64_t rows) {
  using Index = typename std::conditional<kInto == Into::any, int64_t, uint32_t>::type;
  __shared__ alignas(8) uint8_t shared[kTransposed ? kStoreColumns * kPitch : 8];
  StoreTile tile;
  const Index across = static_cast<Index>(column_tiles);
  for (Index item = blockIdx.x; find_tile(p.scan, item, across, p.width, &tile); item += gridDim.x) {
    const bool tail = tile.group == p.scan.count;
    if (tail) tile.rows = static_cast<int>(min(rows - tile.source, int64_t{kStoreRows}));
    if (kTransposed && !tail) {
      __syncthreads();
      load_transposed<T>(p, tile, shared);
      __syncthreads();
    }
    const int column = threadIdx.x % kLanes * kVector, row = threadIdx.x / kLanes * kVector;
    if (column >= tile.columns) continue;
    if (!tail) {
      if (row < tile.rows) write_square<T, kTransposed, kInto>(p, tile, row, column, shared);
      continue;
    }
    for (int i = 0; i < min(tile.rows - row, kVector); ++i) {
      float zeros[kVector] = {};
      put_values(p.result, p.type, (tile.source + row + i) * p.width + tile.column + column,
                 min(tile.columns - column, kVector), zeros);
    }
  }
}

template <class T, Into kInto>
void write_into(const Problem& p, int64_t column_tiles, int64_t rows, unsigned grid, cudaStream_t stream) {
  const auto kernel = p.transposed ? write_tiles<T, true, kInto> : write_tiles<T, false, kInto>;
  kernel<<<grid, kThreads, 0, stream>>>(p, column_tiles, rows);
}

template <class T>
void write(const Problem& p, int64_t column_tiles, int64_t rows, unsigned grid, cudaStream_t stream) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.values) | reinterpret_cast<uintptr_t>(p.result);
  const int64_t tiles = (most_row_tiles(rows, p.scan.count, kStoreRows) + 1) * column_tiles;
  const bool whole = p.width % kVector == 0 && addresses % 16 == 0 && tiles < int64_t{1} << 31;
  if (whole && p.type == DType::bf16) return write_into<T, Into::bf16>(p, column_tiles, rows, grid, stream);
  if (whole && p.type == DType::f16) return write_into<T, Into::f16>(p, column_tiles, rows, grid, stream);
  write_into<T, Into::any>(p, column_tiles, rows, grid, stream);
}

size_t workspace(const Dequantize& call, const Target&) {
  return StoreScan::bytes(call.group_sizes.present() ? call.group_sizes.dims[0] : call.result.dims[0]);
}

void launch(const Dequantize& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const bool ragged = call.group_sizes.present(), cross = call.cross != 0;
  const int64_t groups = ragged ? call.group_sizes.dims[0] : call.result.dims[0];
  const int64_t tall = call.result.dims[ragged ? 0 : 1], block = call.block > 0 ? call.block : 1;
  const int segment = ragged && cross ? static_cast<int>(call.segment) : 0;
  Problem p = {};
  p.scan = StoreScan::at(context.workspace, groups);
  p.values = call.values.as<const uint8_t>();
  p.pitch = call.values.dims[call.values.rank - 1];
  p.scales = data_of<const void>(call.scales);
  p.scale_type = call.scales.dtype;
  p.width = call.result.dims[call.result.rank - 1];
  p.transposed = cross && (!ragged || call.transposed);
  const int64_t padded = segment ? call.values.dims[call.transposed ? 1 : 0] : tall;
  p.place = ScalePlace::of(call.scales, ragged, cross, divide_up(padded, cross ? block : call.block_outer),
                           divide_up(p.width, cross ? call.block_outer : block));
  p.group_scales = data_of<const float>(call.group_scales);
  p.result = call.result.data;
  p.type = call.result.dtype;
  p.ragged = ragged;
  p.cross = cross;
  p.block_bits = log2_of(block);
  p.outer_bits = log2_of(call.block_outer);
  const int64_t rows = ragged ? tall : tall * groups;
  if (rows == 0 || p.width == 0) return;
  scan_store<<<1, kScanThreads, 0, stream>>>(data_of<const int32_t>(call.group_sizes), tall, 0, segment, p.scan);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  const int64_t column_tiles = divide_up(p.width, kStoreColumns);
  const int64_t tiles = (most_row_tiles(rows, groups, kStoreRows) + 1) * column_tiles;
  // A tile per block: started in order, they keep to neighbouring memory.
  const unsigned grid = static_cast<unsigned>(std::min(tiles, int64_t{1} << 30));
  const DType codes = call.values.dtype;
  if (codes == DType::e4m3fn) {
    write<E4M3>(p, column_tiles, rows, grid, stream);
  } else if (codes == DType::e5m2) {
    write<E5M2>(p, column_tiles, rows, grid, stream);
  } else {
    write<E2M1>(p, column_tiles, rows, grid, stream);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<Dequantize> dequantize_any_cuda = {
    "dequantize_any_cuda", Arch::cuda, Kind::reference, takes_any, workspace, launch};

}  // namespace grouped
