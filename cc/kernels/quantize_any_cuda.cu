// Codes and scales in any format, of anything at any address.
//
//   scan     one block: where groups, their tiles and their segments are, into the workspace
//   measure  where a scale wants its group's amax: tiles as below, atomicMax on the bits (order-free)
//   store    blocks of 256 threads walk over tiles of 128 x 128 values of one group:
//              values as fp32 into shared memory, once --> form along columns: amaxes, scales, codes
//                                                      --> rotated in place --> form along rows: the same
//   finish   scales and amaxes of groups
//
// 64.5 KiB of values (an odd pitch: threads walk along rows and along columns) and 8 KiB of amaxes and factors per
// block. Bound by instructions; the rows of the table in front of it take the formats where bandwidth counts.
#include <algorithm>
#include <string>

#include "cc/device/common/elements.cuh"
#include "cc/device/quantize/group_scales.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kPitch = kStoreColumns + 1;
constexpr int kLeastBlock = 16;
constexpr int kMostBlocks = kStoreColumns / kLeastBlock;
static_assert(kStoreRows == kStoreColumns, "both forms use the same scratch");

struct Shared {
  float values[kStoreRows * kPitch];
  uint32_t amax[kMostBlocks * kStoreRows];  // of the parts of blocks that are in one row or column
  float factors[kMostBlocks * kStoreRows];  // by block
};

__device__ void load_tile(const FineLaunch& p, const StoreTile& tile, Shared* s) {
  const void* base = p.source;
  int64_t row = tile.source;
  if (p.table) {
    base = reinterpret_cast<const void*>(p.table[tile.group]);
    row = tile.row;
  }
  constexpr int kLanes = kStoreColumns / kVector;
  const int column = threadIdx.x % kLanes * kVector;
  for (int r = threadIdx.x / kLanes; r < kStoreRows; r += kThreads / kLanes) {
    float v[kVector] = {};
    const int count = r < tile.rows ? tile.columns - column : 0;
    const int64_t from = count <= 0 ? -1 : p.gather.places ? p.gather.row(row + r) : row + r;
    if (from >= 0) load_values<kVector>(base, p.source_type, from * p.width + tile.column + column, count, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) s->values[r * kPitch + column + i] = v[i];
  }
  __syncthreads();
}

// Raises an amax by the tile's first `rows` rows; what is beyond them is zero.
__device__ void measure_values(const Shared* s, int rows, uint32_t* slot) {
  uint32_t amax = 0;
  for (int r = threadIdx.x / 32; r < rows; r += kThreads / 32) {
    for (int c = threadIdx.x % 32; c < kStoreColumns; c += 32) amax = amax_with(amax, s->values[r * kPitch + c]);
  }
  raise_amax(slot, amax);
}

// Every 16 rows of a column.
__device__ void rotate_tile(const FineLaunch& p, Shared* s) {
  for (int item = threadIdx.x; item < kStoreRows / kRotation * kStoreColumns; item += kThreads) {
    float* at = s->values + item / kStoreColumns * kRotation * kPitch + item % kStoreColumns;
    float v[kRotation];
#pragma unroll
    for (int i = 0; i < kRotation; ++i) v[i] = at[i * kPitch];
    rotate(v);
#pragma unroll
    for (int i = 0; i < kRotation; ++i) {
      at[i * kPitch] = p.source_type == DType::bf16 ? bf16_to_float(float_to_bf16(v[i])) : v[i];
    }
  }
  __syncthreads();
}

// Rows of the padded form that the tile owns: its segments are whole.
__device__ int padded_rows(const FineLaunch& p, const StoreTile& tile) {
  return p.segment ? (tile.rows + p.segment - 1) / p.segment * p.segment : tile.rows;
}

// A block's scale; 4over6 takes the better of two. `x` are `lines` of 16 values, line_step and step apart.
template <class T>
__device__ BlockScale scale_of(const FineLaunch& p, uint32_t amax, GroupScale group, const float* x, int lines,
                               int line_step, int step) {
  const BlockScale first = block_scale<T>(p.rule, amax, group);
  if constexpr (T::kBits == 4) {
    if (p.choice == 0) return first;
    const uint8_t second = nvfp4_block_scale_inv(bits_float(amax), group.scale, 1.5f);
    float costs[2];
    for (int candidate = 0; candidate < 2; ++candidate) {
      const uint8_t code = candidate ? second : static_cast<uint8_t>(first.scale_inv);
      float sums[kLeastBlock] = {};
      for (int line = 0; line < lines; ++line) {
        sums[line] = nvfp4_row_error(x + line * line_step, step, kLeastBlock, code, group.scale_inv, p.choice == 2);
      }
      costs[candidate] = lines > 1 ? nvfp4_block_error(sums) : sums[0];
    }
    if (costs[1] < costs[0]) return {nvfp4_block_scale(second, group.scale_inv), second};
  }
  return first;
}

// Amaxes of blocks, their scales and factors. Along a block values are `along` apart in shared memory, and `across`
// from one line (a row, or column) to the next; `lines` of them exist, `depth` values long.
template <class T>
__device__ void scale_blocks(const FineLaunch& p, const StoreTile& tile, bool cross, int lines, int depth, Shared* s) {
  const int along = cross ? kPitch : 1, across = cross ? 1 : kPitch, outer = p.block_outer;
  const int blocks = (depth + p.block - 1) >> p.block_bits;
  for (int item = threadIdx.x; item < blocks * kStoreRows; item += kThreads) {
    const int line = item % kStoreRows, b = item / kStoreRows;
    const float* x = s->values + line * across + b * p.block * along;
    uint32_t amax = 0;
    for (int i = 0; i < p.block; ++i) amax = amax_with(amax, x[i * along]);
    s->amax[item] = amax;
  }
  __syncthreads();
  const GroupScale group = group_scale_of(p.scan, p.rule, false, p.scale, cross && p.rotate, tile.group);
  const QuantizedForm& form = p.forms[cross];
  for (int item = threadIdx.x; item < blocks * kStoreRows; item += kThreads) {
    const int unit = item % kStoreRows, b = item / kStoreRows, line = unit * outer;
    if (line >= lines) continue;
    uint32_t amax = 0;
    for (int i = 0; i < outer; ++i) amax = max(amax, s->amax[b * kStoreRows + line + i]);
    const float* x = s->values + line * across + b * p.block * along;
    // Lines of square blocks run along the source's rows in either form.
    const BlockScale of_block =
        outer > 1 ? scale_of<T>(p, amax, group,
                                s->values + (cross ? b : unit) * p.block * kPitch + (cross ? unit : b) * p.block,
                                kLeastBlock, kPitch, 1)
                  : scale_of<T>(p, amax, group, x, 1, 0, along);
    s->factors[b * kStoreRows + unit] = of_block.scale;
    int64_t row = p.ragged ? (cross ? tile.padded : tile.source) : tile.row;
    row = cross ? (row >> p.block_bits) + b : (row >> p.outer_bits) + unit;
    const int64_t column = cross ? (tile.column >> p.outer_bits) + unit : (tile.column >> p.block_bits) + b;
    put_scale(form.scales, p.wide_scales, form.place.at(p.ragged ? 0 : tile.group, row, column), of_block.scale_inv);
  }
  __syncthreads();
}

// Codes of four values, in the bytes of a word or, for E2M1, in its low 16 bits; from `count` on they are zero.
template <class T>
__device__ uint32_t codes_of(const float (&y)[4], int count, bool stochastic, const Words4& random) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t code;
    if constexpr (T::kBits == 4) {
      code = stochastic ? encode_e2m1_stochastic(y[i], random.word[i]) : encode<T>(y[i]);
    } else {
      code = encode<T>(y[i]);
    }
    word |= (i < count ? code : 0u) << (i * T::kBits);
  }
  return word;
}

// The first codes of a word to `to`, whole bytes.
template <class T>
__device__ void put_codes(uint8_t* to, uint32_t word, int count) {
  using Word = typename std::conditional<T::kBits == 4, uint16_t, uint32_t>::type;
  if (count >= 4 && reinterpret_cast<uintptr_t>(to) % sizeof(Word) == 0) {
    *reinterpret_cast<Word*>(to) = static_cast<Word>(word);
    return;
  }
  const int bytes = T::kBits == 4 ? (count + 1) / 2 : count;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) {
    if (i < bytes) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

// Codes of the tile in one form, four at a time along its last axis. The position of a value in the source, not in a
// form, has random bits.
template <class T>
__device__ void store_codes(const FineLaunch& p, const StoreTile& tile, bool cross, int rows, Shared* s) {
  const QuantizedForm& form = p.forms[cross];
  const bool transposed = cross && p.transposed;
  const GroupScale group = group_scale_of(p.scan, p.rule, p.block == 0, p.scale, cross && p.rotate, tile.group);
  const uint64_t key = p.stochastic && p.key ? p.key[0] | static_cast<uint64_t>(p.key[1]) << 32 : 0;
  const int lines = transposed ? tile.columns : rows, length = transposed ? rows : tile.columns;
  const int along = transposed ? kPitch : 1, across = transposed ? 1 : kPitch;
  constexpr int kQuads = kStoreColumns / 4;
  for (int item = threadIdx.x; item < lines * kQuads; item += kThreads) {
    const int line = item / kQuads, first = item % kQuads * 4;
    if (first >= length) continue;
    float y[4];
    Words4 random = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = transposed ? first + i : line, c = transposed ? line : first + i;
      float factor = group.scale;
      if (p.block) {
        const int b = (cross ? r : c) >> p.block_bits, unit = (cross ? c : r) >> p.outer_bits;
        factor = s->factors[b * kStoreRows + unit];
      }
      y[i] = fl_mul(s->values[line * across + (first + i) * along], factor);
      if (p.stochastic && (transposed || i == 0)) {
        const Words4 words =
            random_words(key, static_cast<uint32_t>(tile.column + c), static_cast<uint32_t>(tile.row + r),
                         static_cast<uint32_t>(tile.group), p.stream + cross);
        if (transposed) {
          const int w = static_cast<int>((tile.column + c) % 4);
          random.word[i] = w < 2 ? words.word[w & 1] : words.word[2 + (w & 1)];
        } else {
          random = words;
        }
      }
    }
    const int64_t row = !cross ? tile.source : p.ragged ? tile.padded : tile.row;
    const int64_t out_line = transposed ? (p.ragged ? 0 : tile.group * p.width) + tile.column + line : row + line;
    const int64_t out_first = transposed ? row + first : tile.column + first;
    uint8_t* to = form.values + out_line * form.pitch + out_first * T::kBits / 8;
    put_codes<T>(to, codes_of<T>(y, length - first, p.stochastic, random), length - first);
  }
}

extern __shared__ float dynamic_shared[];

__global__ void __launch_bounds__(kThreads) measure_tiles(const __grid_constant__ FineLaunch p, int64_t column_tiles) {
  if ((p.skip && *p.skip != 0) || (p.starting && !must_start(p))) return;
  Shared* s = reinterpret_cast<Shared*>(dynamic_shared);
  StoreTile tile;
  for (int64_t item = blockIdx.x; find_tile(p.scan, item, column_tiles, p.width, &tile); item += gridDim.x) {
    if (tile.group == p.scan.count) break;
    if (p.starting && has_started(p, tile.group)) continue;
    load_tile(p, tile, s);
    measure_values(s, tile.rows, p.scan.amax + tile.group);
    __syncthreads();
    if (p.rotate) {
      rotate_tile(p, s);
      measure_values(s, padded_rows(p, tile), p.scan.rotated + tile.group);
      __syncthreads();
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) store_tiles(const __grid_constant__ FineLaunch p, int64_t column_tiles) {
  if (p.skip && *p.skip != 0) return;
  Shared* s = reinterpret_cast<Shared*>(dynamic_shared);
  StoreTile tile;
  for (int64_t item = blockIdx.x; find_tile(p.scan, item, column_tiles, p.width, &tile); item += gridDim.x) {
    if (tile.group == p.scan.count) {
      store_nothing(p, tile, kStoreRows, kThreads);
      continue;
    }
    load_tile(p, tile, s);
    if (p.measure) measure_values(s, tile.rows, p.scan.amax + tile.group);
    for (int cross = 0; cross < 2; ++cross) {
      if (!p.forms[cross].values) continue;
      if (cross && p.rotate) {
        __syncthreads();
        rotate_tile(p, s);
      }
      const int count = cross ? padded_rows(p, tile) : tile.rows;
      if (p.block) {
        __syncthreads();  // the scratch is free
        scale_blocks<T>(p, tile, cross, cross ? tile.columns : count, cross ? count : tile.columns, s);
      }
      store_codes<T>(p, tile, cross, count, s);
    }
    __syncthreads();
  }
}

size_t workspace(const Quantize& call, const Target&) {
  return StoreScan::bytes(call.group_sizes.present() ? call.group_sizes.dims[0] : call.source.dims[0]);
}

// As many blocks as there may be tiles, at most a few per SM.
unsigned blocks_of(const FineLaunch& p, const Quantize& call) {
  const int64_t rows = call.rows().elements() / (p.width ? p.width : 1);
  const int64_t tiles = (most_row_tiles(rows, p.scan.count, kStoreRows) + divide_up(p.padded_rows, kStoreRows) + 1) *
                        divide_up(p.width, kStoreColumns);
  return static_cast<unsigned>(std::min(tiles, int64_t{4} * multiprocessors()));
}

template <class T>
void store(const Quantize& call, const FineLaunch& p, cudaStream_t stream) {
  allow_shared_memory<store_tiles<T>>(sizeof(Shared));
  store_tiles<T><<<blocks_of(p, call), kThreads, sizeof(Shared), stream>>>(p, divide_up(p.width, kStoreColumns));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

void launch(const Quantize& call, const Context& context) {
  launch_store<FineLaunch>(
      call, context,
      [&](const FineLaunch& p, cudaStream_t stream) {
        if (p.width == 0) return;
        allow_shared_memory<measure_tiles>(sizeof(Shared));
        measure_tiles<<<blocks_of(p, call), kThreads, sizeof(Shared), stream>>>(p, divide_up(p.width, kStoreColumns));
        GROUPED_CUDA_CHECK(cudaGetLastError());
      },
      [&](const FineLaunch& p, cudaStream_t stream) {
        if (p.width == 0) return;
        if (p.type == DType::e4m3fn) return store<E4M3>(call, p, stream);
        if (p.type == DType::e5m2) return store<E5M2>(call, p, stream);
        store<E2M1>(call, p, stream);
      });
}

}  // namespace

const Kernel<Quantize> quantize_any_cuda = {"quantize_any_cuda", Arch::cuda, Kind::reference,
                                            takes_any,           workspace,  launch};

}  // namespace grouped
