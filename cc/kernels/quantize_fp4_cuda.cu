// E2M1 codes of bf16, fp16 or fp32 values: NVFP4 in blocks of 16 (or 16 x 16), in both forms from one read, and MXFP4
// along rows. Rotated, rounded stochastically, or both, as the call wants.
//
// One launch, and for NVFP4 one before, of which only the amaxes of groups remain. A block scans the group sizes into
// its shared memory and walks over tiles, from the last to the first: the launch before went the other way, and what it
// read last may still be in the L2 cache. A warp has 16 rows of 128 columns, a thread 16 rows of 4:
//
//     cp.async, 16 bytes --> the warp's 4 KiB of shared memory --> 32 registers, two values per word
//                 ^ the next tile's, as soon as this one's are in registers: no other warp reads them, no barrier
//     rows:    amax over 4 lanes, scattered so that a lane finds the scales of 4 rows --> factors back by shuffles
//     columns: (rotated, rounded to bf16 again) a thread has whole blocks: amax, scale and factor without a shuffle
//     codes:   by the adder (cc/math/e2m1.h), eight per word, signs by byte shuffles of what was read
//              --> rows, or columns in place: rows change sides between neighbours, four bytes per lane
//              --> transposed: 8 KiB of shared memory, swizzled by 8 bytes --> lines of 64 bytes
//
// A group's factors, one for each scale, are in a table: a division for each of them, not for each block. Tiles
// have 16 x 1024 values, so that memory is read and written in long runs and the ends of groups waste little; where
// columns are transposed, 128 x 128. 32 KiB of values, 1 of factors, 9 of transposed codes and scales, 12 bytes per
// group.
//
// Instructions bind it as much as memory: 13 per value for one form, 21 for both, of about 18 and 21 in the time that
// 2.56 and 3.13 bytes take; stochastic rounding is bound by them alone.
//
// fp32 values: the same tiles, 8 KiB per warp and 64 registers of values, so 2 blocks per SM (128 registers); a lane
// loads what it will hold. Rotated ones are not rounded. 4.56 and 5.13 bytes per value. Members of a list that are not
// aligned are read value by value (copy_lines).
#include <string>
#include <type_traits>

#include "cc/device/quantize/fp4_tile.cuh"
#include "cc/kernels/kernels.h"
#include "cc/math/e2m1.h"

namespace grouped {
namespace {

using namespace device;
using namespace device::fp4;

// Of an SM: as many as spill nothing.
template <class O>
constexpr int kBlocks =
    O::from == DType::f32 || O::is_stochastic || (O::along_rows && O::columns != Columns::none) ? 2 : 3;
template <DType kFrom>
constexpr int kMeasureBlocks = kFrom == DType::f32 ? 2 : 4;

constexpr uint32_t kNanCodes = 0x77777777u;

// The signs of eight values, at the fourth bits of nibbles: those of the bytes of `even` go to nibbles 0, 2, 4, 6.
__device__ inline uint32_t signs_of(uint32_t even, uint32_t odd) {
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Where a thread's codes of one form go, two bytes per row: of the first `count` rows, `pitch` bytes apart.
struct Lines {
  uint8_t* to;
  int64_t pitch;
  int count;
  uint32_t stream;  // of random numbers
};

// Codes along rows in kForms forms, of values that are decoded once. The factors of row i are factors(form, i), asked
// for by whole warps; where one is NaN (`mend`: of some value of the thread) NaN's code is stored.
template <class O, int kForms, class Factor>
__device__ inline void put_lines(const FineLaunch& p, const StoreTile& tile, const Four<O::from> (&raw)[kRows],
                                 const Lines (&lines)[kForms], bool mend, Factor factors) {
  const Shape<is_tall(O::columns)> at;
  const uint32_t column = static_cast<uint32_t>(tile.column) + at.column;
  const uint32_t row = static_cast<uint32_t>(tile.row) + at.warp_row;
  const uint64_t key = O::is_stochastic && p.key ? p.key[0] | static_cast<uint64_t>(p.key[1]) << 32 : 0;
  const bool exists = at.column < tile.columns;  // of two neighbours both do
  // Of two rows, the lower of two lanes stores the first, four bytes, and the other one the second.
  const int odd = threadIdx.x % 2;
  const uint32_t order = odd ? 0x3276 : 0x5410;
  uint8_t* to[kForms];
#pragma unroll
  for (int f = 0; f < kForms; ++f) to[f] = lines[f].to + odd * (lines[f].pitch - kColumns / 2);
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = fabsf(value_at<O::from>(raw[i + k / 4], k % 4));
    const uint32_t one = high_bytes(raw[i]), other = high_bytes(raw[i + 1]);
    const uint32_t signs = signs_of(__byte_perm(one, other, 0x5410), __byte_perm(one, other, 0x7632));
#pragma unroll
    for (int f = 0; f < kForms; ++f) {
      uint32_t found[8];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Factors4 factor = factors(f, i + r);
        Words4 random = {};
        if constexpr (O::is_stochastic) random = random_words(key, column, row + i + r, tile.group, lines[f].stream);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float y = fl_mul(x[4 * r + c], factor.of[c]);
          found[4 * r + c] = O::is_stochastic ? stochastic_e2m1(y, random.word[c]) : nearest_e2m1(y);
        }
      }
      const uint32_t word = pack_codes<O::is_stochastic ? kStochasticBase : kNearestBase>(found) + signs;
      const uint32_t line = __byte_perm(word, __shfl_xor_sync(~0u, word, 1), order);
      if (exists && i + odd < lines[f].count) *reinterpret_cast<uint32_t*>(to[f]) = line;
      to[f] += 2 * lines[f].pitch;
    }
  }
  if (!__any_sync(~0u, mend)) return;
  __syncwarp();  // a neighbour has stored half of them
#pragma unroll
  for (int f = 0; f < kForms; ++f) {
    to[f] = lines[f].to;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Factors4 factor = factors(f, i);
      uint32_t mask = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) mask |= isnan(factor.of[c]) ? 0xFu << (4 * c) : 0u;
      if (exists && i < lines[f].count && mask) {
        uint16_t* codes = reinterpret_cast<uint16_t*>(to[f]);
        *codes = static_cast<uint16_t>((*codes & ~mask) | (kNanCodes & mask));
      }
      to[f] += lines[f].pitch;
    }
  }
}

// Where a column's codes are in shared memory.
__device__ inline int swapped(int column) { return column ^ (column / 32 & 1); }

// Codes of columns to shared memory, 8 bytes each, and from there to lines of `rows` codes, a multiple of 16. The
// factor of column c is factor(c).
template <class O, class Factor>
__device__ inline void put_transposed(const FineLaunch& p, const StoreTile& tile, const Four<O::from> (&raw)[kRows],
                                      TransposedShared<O::from>* s, Factor factor) {
  static_assert(!O::is_stochastic, "weights are rounded to the nearest");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    uint32_t words[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t found[8], sign[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        found[i] = nearest_e2m1(fl_mul(fabsf(value_at<O::from>(raw[8 * k + i], c)), factor(c)));
      }
      // Signs of rows i and i + 2, in bytes 0 and 1.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * k + i / 2 * 4 + i % 2;
        sign[i] = high_bytes(raw[row], raw[row + 2], c);
      }
      words[k] = pack_codes<kNearestBase>(found) +
                 signs_of(__byte_perm(sign[0], sign[2], 0x5410), __byte_perm(sign[1], sign[3], 0x5410));
      if (isnan(factor(c))) words[k] = kNanCodes;
    }
    // Lanes write the same piece of columns that are 4 apart: 16 of them to different banks.
    s->codes[swapped(lane * kColumns + c)][warp ^ lane % 8] = words[0] | static_cast<uint64_t>(words[1]) << 32;
  }
  __syncthreads();
  const QuantizedForm& form = p.forms[1];
  const int64_t line = tile.group * p.width + tile.column;
  uint8_t* to = form.values + line * form.pitch + tile.row / 2;
  const int piece = threadIdx.x % kWarps;
#pragma unroll
  for (int i = 0; i < kWarpColumns / (kThreads / kWarps); ++i) {
    const int column = threadIdx.x / kWarps + i * (kThreads / kWarps);
    const uint64_t codes = s->codes[swapped(column)][piece ^ column / kColumns % 8];
    if (column < tile.columns && piece * kRows < tile.rows) {
      *reinterpret_cast<uint64_t*>(to + column * form.pitch + piece * 8) = codes;
    }
  }
}

// The scales of transposed columns, from shared memory: a tile has 8 of a column, side by side.
template <DType kFrom>
__device__ inline void put_transposed_scales(const FineLaunch& p, const StoreTile& tile,
                                             const TransposedShared<kFrom>* s) {
  const int column = threadIdx.x;
  if (column >= tile.columns) return;
  const int64_t first = p.forms[1].place.at(tile.group, tile.row / kRows, tile.column + column);
  uint8_t* to = static_cast<uint8_t*>(p.forms[1].scales) + first;
  const uint8_t* from = s->scales[column];
  if (tile.rows == kRows * kWarps && first % kWarps == 0) {
    *reinterpret_cast<uint64_t*>(to) = *reinterpret_cast<const uint64_t*>(from);
    return;
  }
  for (int i = 0; i * kRows < tile.rows; ++i) to[i] = from[i];
}

// What belongs to groups.
__device__ inline void store_group_scales(const FineLaunch& p) {
  for (int g = threadIdx.x; g < p.scan.count; g += kThreads) {
    for (int form = 0; form < 2; ++form) {
      float* to = p.forms[form].group_scales;
      if (to) to[g] = group_scale_of(p.scan, p.rule, false, p.scale, form && p.rotate, g).scale_inv;
    }
  }
}

// Scales of this thread's columns as they stay in place, stored. True if one of them is NaN.
template <class O>
__device__ inline bool place_scales(const FineLaunch& p, const StoreTile& tile, const Scaled (&scales)[kColumns]) {
  const Shape<false> at;
  const QuantizedForm& form = p.forms[1];
  if (at.column < tile.columns) {
    const int64_t first = form.place.at(0, tile.padded / kRows, tile.column + at.column);
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(form.scales) + first) =
        scales[0].code | scales[1].code << 8 | scales[2].code << 16 | scales[3].code << 24;
  }
  return isnan(scales[0].factor) || isnan(scales[1].factor) || isnan(scales[2].factor) || isnan(scales[3].factor);
}

template <bool kTall>
__device__ inline Lines lines_along(const FineLaunch& p, const StoreTile& tile) {
  const Shape<kTall> at;
  const QuantizedForm& form = p.forms[0];
  return {form.values + (tile.source + at.warp_row) * form.pitch + (tile.column + at.column) / 2, form.pitch,
          tile.rows - at.warp_row, p.stream};
}
__device__ inline Lines lines_across(const FineLaunch& p, const StoreTile& tile) {
  const Shape<false> at;
  const QuantizedForm& form = p.forms[1];
  return {form.values + tile.padded * form.pitch + (tile.column + at.column) / 2, form.pitch, kRows, p.stream + 1};
}

// NOTE: `zero` is one that the compiler does not know: else it holds what it has decoded from one form to the next, and
// spills it.
__device__ inline void forget_values(uint2 (&raw)[kRows], uint32_t zero) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) raw[i].x ^= zero, raw[i].y ^= zero;
}
__device__ inline void forget_values(uint4 (&raw)[kRows], uint32_t zero) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) raw[i].x ^= zero, raw[i].y ^= zero, raw[i].z ^= zero, raw[i].w ^= zero;
}

// One tile in the forms that are wanted.
template <class O, class Scratch>
__device__ inline void store_tile(const FineLaunch& p, const StoreTile& tile, Four<O::from> (&raw)[kRows], Scratch* s,
                                  uint32_t zero) {
  constexpr bool kTall = is_tall(O::columns);
  const Shape<kTall> at;
  if constexpr (O::is_square) {
    const Scaled scale = square_scale<O>(raw, s->factors[0]);
    const int row = static_cast<int>(tile.row + at.warp_row), column = static_cast<int>(tile.column + at.column);
    const bool first = at.warp_row < tile.rows && at.column < tile.columns && column % kRows == 0;
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const QuantizedForm& form = p.forms[f];
      if (first && (f ? kTall : O::along_rows)) {
        put_scale(form.scales, false, form.place.at(tile.group, row / kRows, column / kRows), scale.code);
      }
    }
    if constexpr (O::along_rows) {
      put_lines<O>(p, tile, raw, {lines_along<kTall>(p, tile)}, isnan(scale.factor),
                   [&](int, int) { return Factors4{{scale.factor, scale.factor, scale.factor, scale.factor}}; });
    }
    if constexpr (O::along_rows && kTall) forget_values(raw, zero);
    if constexpr (kTall) {
      __syncthreads();  // the codes of the tile before have left shared memory
      put_transposed<O>(p, tile, raw, s, [&](int) { return scale.factor; });
    }
    return;
  }
  Scaled scales[kColumns] = {};
  const auto across = [&](int, int) {
    return Factors4{{scales[0].factor, scales[1].factor, scales[2].factor, scales[3].factor}};
  };
  if constexpr (O::along_rows) {
    const RowFactors<O> factors = row_factors<O>(p, tile, raw, s->factors[0]);
    // Decoding 16-bit values once is worth their registers; fp32 values are decoded.
    if constexpr (O::columns == Columns::in_place && O::from != DType::f32) {
      column_scales<O>(raw, s->factors[1], scales);
      const bool mend = factors.found_nan | place_scales<O>(p, tile, scales);
      put_lines<O>(p, tile, raw, {lines_along<false>(p, tile), lines_across(p, tile)}, mend,
                   [&](int f, int i) { return f ? across(f, i) : factors.at(i); });
      return;
    }
    put_lines<O>(p, tile, raw, {lines_along<kTall>(p, tile)}, factors.found_nan,
                 [&](int, int i) { return factors.at(i); });
    if constexpr (kTall || O::is_stochastic || O::from == DType::f32) forget_values(raw, zero);
  }
  if constexpr (O::columns == Columns::none) return;
  if constexpr (O::columns == Columns::rotated) rotate_columns(raw);
  column_scales<O>(raw, s->factors[1], scales);
  if constexpr (kTall) {
    __syncthreads();  // those of the tile before have left shared memory
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      s->scales[at.column + c][threadIdx.x / 32] = static_cast<uint8_t>(scales[c].code);
    }
    put_transposed<O>(p, tile, raw, s, [&](int c) { return scales[c].factor; });
    put_transposed_scales<O::from>(p, tile, s);
  } else {
    const bool mend = place_scales<O>(p, tile, scales);
    put_lines<O>(p, tile, raw, {lines_across(p, tile)}, mend, across);
  }
}

// Tiles of one group each: body(tile, raw) with their values in registers, while the next one's are on their way. What
// no group owns goes to rest(tile).
template <DType kFrom, bool kTall, class Body, class Rest>
__device__ inline void walk_tiles(const FineLaunch& p, uint32_t column_tiles, const GroupTable& table, Shared<kFrom>* s,
                                  Body body, Rest rest) {
  using Tile = Shape<kTall>;
  if (p.ragged) scan_sizes<Tile::kTileRows>(p, table, s->sums);
  const auto find = [&](uint32_t item, SourceTile* tile) {
    return find_source<kFrom, Tile::kTileRows, Tile::kTileColumns>(p, table, item, column_tiles, tile);
  };
  SourceTile tile;
  SourceTile& next = s->next[threadIdx.x / 32];
  uint32_t item = blockIdx.x;
  bool more = find(item, &tile), loaded = false;
  for (; more; tile = next) {
    item += gridDim.x;
    const bool owned = tile.group < p.scan.count;
    if (owned && !loaded) load_tile<kFrom, kTall>(p, tile, s);
    // While this tile's values arrive.
    more = find_next(next, [&](SourceTile* found) { return find(item, found); });
    loaded = false;
    if (!owned) {
      rest(tile);
      continue;
    }
    Four<kFrom> raw[kRows];
    take_tile<kFrom>(s, raw);
    loaded = more && next.group < p.scan.count;
    if (loaded) load_tile<kFrom, kTall>(p, next, s);
    body(tile, raw);
  }
}

extern __shared__ uint4 dynamic_shared[];

// Amaxes of groups, as they come and rotated.
template <DType kFrom, bool kRotated>
__global__ void __launch_bounds__(kThreads, kMeasureBlocks<kFrom>)
    measure_tiles(const __grid_constant__ FineLaunch p, uint32_t column_tiles, uint32_t) {
  if (p.skip && *p.skip != 0) return;
  Shared<kFrom>* s = reinterpret_cast<Shared<kFrom>*>(dynamic_shared);
  walk_tiles<kFrom, false>(
      p, column_tiles, GroupTable(p, s + 1), s,
      [&](const StoreTile& tile, Four<kFrom>(&raw)[kRows]) {
        raise_amax(p.scan.amax + tile.group, amax_of<kFrom>(largest(raw)));
        if constexpr (kRotated) {
          rotate_columns(raw);
          raise_amax(p.scan.rotated + tile.group, amax_of<kFrom>(largest(raw)));
        }
      },
      [](const StoreTile&) {});
}

template <class O>
using SharedOf = typename std::conditional<is_tall(O::columns), TransposedShared<O::from>, Shared<O::from>>::type;

template <class O>
__global__ void __launch_bounds__(kThreads, kBlocks<O>)
    store_tiles(const __grid_constant__ FineLaunch p, uint32_t column_tiles, uint32_t zero) {
  constexpr bool kTall = is_tall(O::columns);
  if (p.skip && *p.skip != 0) return;
  using Scratch = SharedOf<O>;
  Scratch* s = reinterpret_cast<Scratch*>(dynamic_shared);
  if (blockIdx.x == 0) store_group_scales(p);
  int filled = -1;
  walk_tiles<O::from, kTall>(
      p, column_tiles, GroupTable(p, s + 1), s,
      [&](const StoreTile& tile, Four<O::from>(&raw)[kRows]) {
        if (p.measure) raise_amax(p.scan.amax + tile.group, amax_of<O::from>(largest(raw)));
        if constexpr (O::block == 16) {
          if (tile.group != filled) fill_factors<O::from>(p, tile.group, s);
          filled = tile.group;
        }
        store_tile<O>(p, tile, raw, s, zero);
      },
      [&](const StoreTile& tile) { store_nothing(p, tile, Shape<kTall>::kTileRows, kThreads); });
}

std::string refuses(const Quantize& call, const Target& target) {
  const std::string reason = refuses_tiles(call, target);
  if (!reason.empty()) return reason;
  const bool ragged = call.group_sizes.present(), nvfp4 = call.rule == "nvfp4";
  const TensorView& cross = call.cross_values;
  const DType type = (call.values.present() ? call.values : cross).dtype;
  if (type != DType::u8) return std::string("gives E2M1, not ") + dtype_name(type);
  if (call.places.present()) return "gathers no rows";
  if (!call.four_over_six.empty()) return "does not choose between scales (four_over_six)";
  if (!nvfp4) {
    if (call.block != 32 || call.block_outer != 1) return "takes e8m0 scales of blocks of 32";
    if (cross.present()) return "takes e8m0 scales along rows";
    if (call.stochastic) return "rounds stochastically under nvfp4 scales";
  }
  if (call.stochastic && !ragged) return "rounds rows stochastically, not weights";
  if (!cross.present()) return "";
  if (!ragged && call.source.dims[1] % kRows != 0) return "transposes weights whose rows are a multiple of 16";
  if (ragged && call.segment != kRows) return "takes segments of 16";
  if (call.rotate && call.source.dtype == DType::f16) return "rotates bfloat16 and float32";
  return "";
}

size_t workspace(const Quantize& call, const Target&) { return StoreScan::bytes(groups_of(call)); }

template <class Scratch, bool kTall, auto kKernel>
void run(const Quantize& call, const FineLaunch& p, int most_blocks, const LaunchOptions& how) {
  using Tile = Shape<kTall>;
  constexpr int kOwnBytes = sizeof(Scratch);
  const int bytes = kOwnBytes + GroupTable::bytes(p);
  allow_shared_memory<kKernel>(most_shared_bytes<kOwnBytes>());
  const int64_t column_tiles = divide_up(p.width, Tile::kTileColumns);
  const unsigned grid = blocks_for(most_row_tiles_of(call, Tile::kTileRows) * column_tiles, most_blocks, bytes);
  if (grid == 0) return;
  kKernel<<<grid, kThreads, bytes, how.stream>>>(p, static_cast<uint32_t>(column_tiles), 0);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <class O>
void run_store(const Quantize& call, const FineLaunch& p, const LaunchOptions& how) {
  run<SharedOf<O>, is_tall(O::columns), store_tiles<O>>(call, p, kBlocks<O>, how);
}

// In blocks of 16, the forms that are wanted.
template <DType kFrom, bool kSquare, Columns kColumns, bool kStochastic>
void run_forms(const Quantize& call, const FineLaunch& p, const LaunchOptions& how) {
  if (!p.forms[0].values) {
    run_store<Options<kFrom, 16, kSquare, false, kColumns, kStochastic>>(call, p, how);
  } else if (!p.forms[1].values) {
    run_store<Options<kFrom, 16, kSquare, true, Columns::none, kStochastic>>(call, p, how);
  } else {
    run_store<Options<kFrom, 16, kSquare, true, kColumns, kStochastic>>(call, p, how);
  }
}

template <DType kFrom, Columns kColumns>
void run_ragged(const Quantize& call, const FineLaunch& p, const LaunchOptions& how) {
  if (p.stochastic) return run_forms<kFrom, false, kColumns, true>(call, p, how);
  run_forms<kFrom, false, kColumns, false>(call, p, how);
}

template <DType kFrom>
void launch_as(const Quantize& call, const Context& context) {
  launch_tiles<FineLaunch>(
      call, context,
      [&](const FineLaunch& p, const LaunchOptions& how) {
        if constexpr (kFrom != DType::f16) {
          if (p.rotate)
            return run<Shared<kFrom>, false, measure_tiles<kFrom, true>>(call, p, kMeasureBlocks<kFrom>, how);
        }
        run<Shared<kFrom>, false, measure_tiles<kFrom, false>>(call, p, kMeasureBlocks<kFrom>, how);
      },
      [&](const FineLaunch& p, const LaunchOptions& how) {
        if (p.block == 32) {
          return run_store<Options<kFrom, 32, false, true, Columns::none, false>>(call, p, how);
        }
        if (p.block_outer > 1) return run_forms<kFrom, true, Columns::transposed, false>(call, p, how);
        if (!p.ragged) return run_forms<kFrom, false, Columns::transposed, false>(call, p, how);
        if constexpr (kFrom != DType::f16) {
          if (p.rotate) return run_ragged<kFrom, Columns::rotated>(call, p, how);
        }
        run_ragged<kFrom, Columns::in_place>(call, p, how);
      });
}

void launch(const Quantize& call, const Context& context) {
  if (call.source.dtype == DType::f32) return launch_as<DType::f32>(call, context);
  if (call.source.dtype == DType::bf16) return launch_as<DType::bf16>(call, context);
  launch_as<DType::f16>(call, context);
}

}  // namespace

const Kernel<Quantize> quantize_fp4_cuda = {"quantize_fp4_cuda", Arch::cuda, Kind::special, refuses,
                                            workspace,           launch,     kAlignment};

}  // namespace grouped
