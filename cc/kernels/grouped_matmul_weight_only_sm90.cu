// Few rows against quantised weights on Hopper: bf16 rows [M, K], weights [G, N, K] of E4M3 or E2M1 codes, which stream
// through the chip once and are widened in registers. What counts is the rate of memory.
//
//   arrange   rows -> workspace: blocks of 8 rows of one group, zero-filled, in the order in which fragments are read
//   producer  (1 lane): a stage is 128 k of 256 weight rows (tensor copy) and of up to 8 kBlocks rows (one bulk copy)
//            |  ring, 3 to 8 stages: 16 or 32 KiB of codes, 2 KiB a block of rows
//            v
//   warps     of 16 or 32 weight rows each: codes --bits, * scale--> A fragments; rows --ld.shared.v4--> B fragments;
//             mma m16n8k16, fp32: 4 or 8 sums a thread and block of rows
//            |  through shared memory, so that 8 columns of a row leave together
//            v
//   result
//
//   kBlocks   rows      warps   sums a thread   stages of E4M3, E2M1   registers
//   4         to 32     16      16              5, 8                   32 / 112
//   8         to 64     8       64              4, 6                   40 / 232
//   16        to 128    8       128             3, 4                   40 / 232
//   1 block an SM. Groups with more rows than a tile has take several.
//
// A lane owns the same 32 k of 128 in all of its rows, so their codes lie together and have one scale, or two. Which of
// the 16 k of an mma a code stands for does not matter as long as the rows agree: codes come apart by masks and shifts
// alone, and `arrange` puts the rows into that order. The bits are a bfloat16 too small by a power of two, which the
// multiplication with the scale sets right: exact wherever codes times scales are bfloat16 (numerics 4).
#include <cuda_fp8.h>

#include <algorithm>
#include <string>

#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/factor.cuh"
#include "cc/device/launch.h"
#include "cc/device/mma.cuh"
#include "cc/device/ptx.cuh"
#include "cc/device/ring.cuh"
#include "cc/device/values.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

constexpr int kStageK = 128;
constexpr int kTileCols = 256;  // weight rows
constexpr int kBlockRows = 8;
constexpr int kBlockBytes = kBlockRows * kStageK * 2;  // of one stage
constexpr int kMostGroups = 1024;
constexpr int kTables = 3;  // of groups + 1 entries
constexpr int kTableBytes = kTables * (kMostGroups + 8) * 4;
constexpr int kSharedBytes = 227 * 1024;
constexpr int kMostStages = 8;

enum class Scale { none, e8m0, e4m3, f32 };

template <DType kType_, Scale kScale_, int kBlocks_>
struct Shape {
  static constexpr DType kType = kType_;
  static constexpr Scale kScale = kScale_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr bool kNibbles = kType == DType::u8;
  static constexpr int kWarps = kBlocks == 4 ? 16 : 8;
  static constexpr int kWarpCols = kTileCols / kWarps;
  static constexpr int kFragments = kWarpCols / 16;
  static constexpr int kGroup = kBlocks == 4 ? 2 : 4;  // blocks multiplied at once
  static constexpr int kThreads = 32 * (kWarps + 4);   // registers are handed over by warpgroups
  static constexpr int kProducerRegisters = kWarps == 16 ? 32 : 40, kConsumerRegisters = kWarps == 16 ? 112 : 232;
  static constexpr int kStagedBytes = kWarps * kBlockRows * (kWarpCols + 4) * 4;  // rows 4 floats apart in banks
  static constexpr int kRowBytes = kNibbles ? kStageK / 2 : kStageK;
  static constexpr int kCodeBytes = kTileCols * kRowBytes;
  static constexpr int kStageBytes = kCodeBytes + kBlocks * kBlockBytes;
  static constexpr int kFixedBytes = 1024 + kTableBytes + kStagedBytes;  // and barriers
  static constexpr int kFitting = (kSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static constexpr int kBytes = kStages * kStageBytes + kFixedBytes;
  static_assert(kStages >= 3, "copies run ahead");
};

struct Params {
  CUtensorMap codes;
  const int32_t* sizes;
  const uint8_t* lhs;
  uint8_t* arranged;  // [stages of k, blocks, 2 KiB]
  int32_t* tables;    // first row, first block, first row tile of each group; the last entries are totals
  const void* scales;
  const float* factors;  // [groups], or null
  const uint8_t* bias;
  const int64_t* bias_table;
  const float* row_scale;
  uint8_t* result;
  int64_t rows;
  int most_blocks;
  int groups, cols, depth;
  int scale_lines, scale_run, scale_outer, scale_shift;  // [groups, lines, run]; columns, and 2^shift k, share one
  int tile_blocks;
  DType result_type, bias_type;
  bool scale_bias, clear_tail;
};

// --- arrange ---

constexpr int kArrangeThreads = 128;  // pieces of 8 k of one block and stage

// Rows and blocks before group g, for 32 groups at a time: an inclusive sum over the warp.
__device__ int64_t warp_sums(int64_t value) {
  for (int d = 1; d < 32; d *= 2) {
    const int64_t below = __shfl_up_sync(~0u, value, d);
    if (threadIdx.x % 32 >= d) value += below;
  }
  return value;
}

struct Span {
  int first, end;  // rows
};

// Calls use(g, span, first block, first tile) for every group, by one warp, each lane its own group.
template <class Use>
__device__ void for_groups(const Params& p, Use use) {
  int64_t rows = 0;
  int blocks = 0, tiles = 0;
  for (int first = 0; first < p.groups; first += 32) {
    const int g = first + threadIdx.x % 32;
    const int64_t size = g < p.groups && p.sizes[g] > 0 ? p.sizes[g] : 0;
    const int64_t end = rows + warp_sums(size);
    const Span span = {int(min(end - size, p.rows)), int(min(end, p.rows))};
    const int mine = (span.end - span.first + kBlockRows - 1) / kBlockRows;
    const int my_tiles = (mine + p.tile_blocks - 1) / p.tile_blocks;
    const int blocks_end = blocks + int(warp_sums(mine)), tiles_end = tiles + int(warp_sums(my_tiles));
    if (g < p.groups) use(g, span, blocks_end - mine, tiles_end - my_tiles);
    rows = __shfl_sync(~0u, end, 31);
    blocks = __shfl_sync(~0u, blocks_end, 31);
    tiles = __shfl_sync(~0u, tiles_end, 31);
  }
  if (threadIdx.x % 32 == 0) use(p.groups, Span{int(min(rows, p.rows)), 0}, blocks, tiles);
}

// The order of 8 neighbours in two B fragments: pairs whose codes come apart together.
template <bool kNibbles>
__device__ uint4 in_fragment_order(uint4 x) {
  if constexpr (kNibbles) {  // 0 4, 1 5, 2 6, 3 7
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
  } else {  // 0 2, 1 3, 4 6, 5 7
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
                      __byte_perm(x.z, x.w, 0x7632));
  }
}

// Block x: one block of 8 rows, or, the last of all, the tables. Thread (half, part, lane = 4 row + q) moves the 8 k
// from 32 q + 16 half + 8 part on.
template <bool kNibbles>
__global__ void __launch_bounds__(kArrangeThreads) arrange_rows(const __grid_constant__ Params p) {
  __shared__ int found[2];  // first row, rows
  const int block = blockIdx.x;
  const bool tables = block == p.most_blocks;
  if (threadIdx.x == 0) found[1] = 0;
  __syncthreads();
  if (threadIdx.x < 32 && (!tables || blockIdx.y == 0)) {
    for_groups(p, [&](int g, Span span, int first_block, int first_tile) {
      if (tables) {
        p.tables[g] = span.first;
        p.tables[kMostGroups + 8 + g] = first_block;
        p.tables[2 * (kMostGroups + 8) + g] = first_tile;
      } else if (g < p.groups && block >= first_block) {
        const int row = span.first + (block - first_block) * kBlockRows;
        if (row < span.end) found[0] = row, found[1] = span.end - row;
      }
    });
  }
  __syncthreads();
  if (tables || found[1] == 0) return;
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32 % 2, half = threadIdx.x / 64;
  const int row = lane / 4, stages = (p.depth + kStageK - 1) / kStageK;
  const uint8_t* from = p.lhs + (int64_t{found[0]} + row) * p.depth * 2;
  for (int stage = blockIdx.y; stage < stages; stage += gridDim.y) {
    const int k = stage * kStageK + 32 * (lane % 4) + 16 * half + 8 * part;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < found[1] && k < p.depth) x = *reinterpret_cast<const uint4*>(from + int64_t{k} * 2);
    uint8_t* to = p.arranged + (int64_t{stage} * p.most_blocks + block) * kBlockBytes;
    reinterpret_cast<uint4*>(to)[threadIdx.x] = in_fragment_order<kNibbles>(x);
  }
}

// --- codes in registers ---

__device__ uint32_t times(uint32_t pair, uint32_t factor) {
  const __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&factor));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// 16 codes, as pairs of bfloat16 bits, 2^-kBias of the values. E4M3: of two words, (0 2) (1 3) (4 6) (5 7); E2M1: of
// one, (0 4) (1 5) (2 6) (3 7).
template <bool kNibbles>
struct Codes;

template <>
struct Codes<false> {
  static constexpr int kBias = 120;
  uint32_t words[4];
  // Where a lane's 32 k of a row lie in the tile, and both halves of them. Eight lanes read eight different chunks of
  // 16 bytes; rows 8 apart are swizzled alike.
  static __device__ uint32_t place(int row, int q) { return row * 128 + ((2 * q) ^ (row % 8)) * 16; }
  static __device__ void load(uint32_t at, Codes (&halves)[2]) {
    ptx::load_shared_v4(at, halves[0].words);
    ptx::load_shared_v4(at ^ 16, halves[1].words);
  }
  __device__ void pairs(int part, uint32_t (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t w = words[2 * part + i];
      to[2 * i] = (w << 8 & 0x80008000u) | (w << 4 & 0x07f007f0u);
      to[2 * i + 1] = (w & 0x80008000u) | (w >> 4 & 0x07f007f0u);
    }
  }
  // Whether some code is a NaN, whose bits are those of 480 here.
  __device__ bool has_nan() const {
    uint32_t carries = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) carries |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
    return (carries & 0x80808080u) != 0;
  }
  static __device__ uint32_t with_nan(uint32_t pair) {
#pragma unroll
    for (int i = 0; i < 32; i += 16) {
      if ((pair >> i & 0x07f0u) == 0x07f0u) pair |= 0x7fc0u << i;
    }
    return pair;
  }
};

template <>
struct Codes<true> {
  static constexpr int kBias = 126;
  uint32_t words[2];
  static __device__ uint32_t place(int row, int q) { return row * 64 + (q ^ (row / 2 % 4)) * 16; }
  static __device__ void load(uint32_t at, Codes (&halves)[2]) {
    uint32_t w[4];
    ptx::load_shared_v4(at, w);
    halves[0].words[0] = w[0], halves[0].words[1] = w[1], halves[1].words[0] = w[2], halves[1].words[1] = w[3];
  }
  __device__ void pairs(int part, uint32_t (&to)[4]) const {
    const uint32_t w = words[part];
    to[0] = (w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u);
    to[1] = (w << 8 & 0x80008000u) | (w << 2 & 0x01c001c0u);
    to[2] = (w << 4 & 0x80008000u) | (w >> 2 & 0x01c001c0u);
    to[3] = (w & 0x80008000u) | (w >> 6 & 0x01c001c0u);
  }
  __device__ bool has_nan() const { return false; }
  static __device__ uint32_t with_nan(uint32_t pair) { return pair; }
};

constexpr int kE4M3Shift =
    8;  // E4M3 scales are made smaller by 2^8, which the sums make good: s * 2^126 might overflow
static_assert(Codes<true>::kBias - kE4M3Shift == 118, "the exponent below");

// Factors of the bits above that make values of them, as pairs of bfloat16. Scales of E8M0 are exponents; where the
// product of 2^kBias and one is no bfloat16, or the scale is NaN, it is `rare`, and takes two multiplications.
template <Scale kScale, int kBias>
struct Factors;

template <int kBias>
struct Factors<Scale::e8m0, kBias> {
  static constexpr uint32_t kLargest = 254 - kBias, kExponent = 0x00800080u;  // of two bfloat16
  static __device__ bool is_rare(uint32_t code) { return code > kLargest; }
  static __device__ uint32_t first(uint32_t code) { return (code + kBias) * kExponent; }
  static __device__ uint32_t first_of_rare(uint32_t code) {
    return code == 255 ? 0x7fc07fc0u : first(code < kLargest ? code : kLargest);
  }
  static __device__ uint32_t second_of_rare(uint32_t code) {
    return (code == 255 || code < kLargest ? 127 : code - kLargest + 127) * kExponent;
  }
};
template <int kBias>
struct Factors<Scale::e4m3, kBias> {
  static __device__ bool is_rare(uint32_t) { return false; }
  static __device__ uint32_t first(uint32_t code) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(code), __NV_E4M3);
    const float s = __half2float(__low2half(__half2(raw))) * 0x1p118f;
    return device::packed(s, s, DType::bf16);
  }
  static __device__ uint32_t first_of_rare(uint32_t code) { return first(code); }
  static __device__ uint32_t second_of_rare(uint32_t) { return 0x3f803f80u; }
};
template <Scale kScale, int kBias>
struct Factors {  // codes alone
  static __device__ bool is_rare(uint32_t) { return false; }
  static __device__ uint32_t first(uint32_t) { return (127 + kBias) * 0x00800080u; }
  static __device__ uint32_t first_of_rare(uint32_t) { return first(0); }
  static __device__ uint32_t second_of_rare(uint32_t) { return 0x3f803f80u; }
};

// --- the product ---

struct Item {
  int group, first_row, rows, first_block, col;
};

// The item `index`: of one group, row tiles of the same columns next to each other, so that codes are read from memory
// once. Tables lie in shared memory.
__device__ bool find_item(const Params& p, const int32_t* tables, int64_t index, Item* item) {
  const int32_t* rows = tables;
  const int32_t* blocks = rows + kMostGroups + 8;
  const int32_t* tiles = blocks + kMostGroups + 8;
  const int col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  if (index >= int64_t{tiles[p.groups]} * col_tiles) return false;
  int low = 0, high = p.groups;  // the last group whose first item is not behind
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (int64_t{tiles[middle]} * col_tiles <= index ? low : high) = middle;
  }
  const int row_tiles = tiles[low + 1] - tiles[low];
  const int inside = static_cast<int>(index - int64_t{tiles[low]} * col_tiles);
  const int tile = inside % row_tiles * p.tile_blocks;
  item->group = low;
  item->first_row = rows[low] + tile * kBlockRows;
  item->rows = min(rows[low + 1] - item->first_row, p.tile_blocks * kBlockRows);
  item->first_block = blocks[low] + tile;
  item->col = inside / row_tiles * kTileCols;
  return true;
}

__device__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

template <class S>
__device__ void produce(const Params& p, const int32_t* tables, uint32_t ring, uint32_t barriers) {
  const int stages = (p.depth + kStageK - 1) / kStageK;
  int slot = 0;
  uint32_t parity = 1;
  Item item;
  for (int64_t index = blockIdx.x; find_item(p, tables, index, &item); index += gridDim.x) {
    const uint32_t row_bytes = (item.rows + kBlockRows - 1) / kBlockRows * kBlockBytes;
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t full = barriers + 16 * slot, to = ring + slot * S::kStageBytes;
      ptx::barrier_wait(full + 8, parity);
      ptx::barrier_arrive_expect(full, S::kCodeBytes + row_bytes);
      ptx::tensor_load(to, &p.codes, {{stage * S::kRowBytes, item.col, item.group, 0}}, full);
      bulk_load(to + S::kCodeBytes, p.arranged + (int64_t{stage} * p.most_blocks + item.first_block) * kBlockBytes,
                row_bytes, full);
      if (++slot == S::kStages) slot = 0, parity ^= 1;
    }
  }
}

template <class S>
class Consumer {
 public:
  __device__ Consumer(const Params& p, const int32_t* tables, uint32_t ring, uint32_t barriers, float* staged)
      : p_(p),
        tables_(tables),
        ring_(ring),
        barriers_(barriers),
        staged_(staged),
        place_(C::place(column(0), threadIdx.x % 4)) {
    // Kept, not computed anew in every stage, where registers allow.
    if constexpr (S::kBlocks < 16) asm("" : "+r"(place_));
  }

  __device__ void run() {
    Item item;
    for (int64_t index = blockIdx.x; find_item(p_, tables_, index, &item); index += gridDim.x) {
      multiply(item);
      finish(item);
    }
  }

 private:
  using C = Codes<S::kNibbles>;
  using F = Factors<S::kScale, C::kBias>;
  static constexpr int kFragments = S::kFragments;  // of 16 weight rows
  static constexpr int kRowsOfLane = 2 * kFragments;
  static constexpr bool kInSums = S::kScale == Scale::f32;              // scales multiply sums, not codes
  static constexpr int kCodesOfRow = S::kScale == Scale::e4m3 ? 2 : 1;  // scales of a lane's 32 k
  using Fragment = uint32_t[4];

  // This lane's row `r` of the tile.
  static __device__ int column(int r) {
    return static_cast<int>(threadIdx.x) / 32 * S::kWarpCols + r * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }

  struct Held {
    uint32_t code[kRowsOfLane][kCodesOfRow];
  };
  // Scales of this lane's rows: where the first is, and how many stages have one.
  struct Line {
    const uint8_t* first;
    int stages;
  };
  __device__ void find_scales(const Item& item, Line (&lines)[kRowsOfLane]) const {
    constexpr int kBytes = kInSums ? 4 : 1;
    const int k = kInSums ? 0 : 32 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      const int col = item.col + column(r);
      const int64_t line = (int64_t{item.group} * p_.scale_lines + col / p_.scale_outer) * p_.scale_run;
      lines[r].first = static_cast<const uint8_t*>(p_.scales) + (line + (k >> p_.scale_shift)) * kBytes;
      lines[r].stages = col < p_.cols ? (p_.depth - k + kStageK - 1) / kStageK : 0;
    }
  }
  static __device__ void load_scales(const Line (&lines)[kRowsOfLane], int stage, Held* held) {
    constexpr int kStep = S::kScale == Scale::e8m0 ? kStageK / 32 : S::kScale == Scale::e4m3 ? kStageK / 16 : 4;
    if constexpr (S::kScale != Scale::none) {
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        const uint8_t* at = lines[r].first + stage * kStep;
#pragma unroll
        for (int i = 0; i < kCodesOfRow; ++i) {
          held->code[r][i] = 0;
          if (stage >= lines[r].stages) continue;
          held->code[r][i] = kInSums ? __ldg(reinterpret_cast<const uint32_t*>(at)) : __ldg(at + i);
        }
      }
    }
  }

  // A fragments of one half of the lane's k: 4 steps of k16. Branches would keep rows from overlapping, so what is rare
  // is found out for all rows at once.
  template <bool kRare>
  __device__ void widen(const C (&codes)[kRowsOfLane][2], int half, const Held& held,
                        Fragment (&a)[4][kFragments]) const {
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      const uint32_t code = held.code[r][kCodesOfRow == 2 ? half : 0];
      const uint32_t factor = kRare ? F::first_of_rare(code) : F::first(code);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];
        codes[r][half].pairs(part, pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kRare) pairs[i] = C::with_nan(pairs[i]);
          pairs[i] = times(pairs[i], factor);
          if constexpr (kRare) pairs[i] = times(pairs[i], F::second_of_rare(code));
          a[2 * part + i / 2][r / 2][r % 2 + 2 * (i % 2)] = pairs[i];
        }
      }
    }
  }

  // Sums of one half, kGroup blocks of rows at a time so that products which follow each other do not wait. Blocks that
  // do not exist give sums that nobody stores.
  template <class Sums>
  __device__ void multiply_half(uint32_t rows, int blocks, const Fragment (&a)[4][kFragments], Sums& sums) const {
#pragma unroll
    for (int first = 0; first < S::kBlocks; first += S::kGroup) {
      if (first >= blocks) break;
      uint32_t b[S::kGroup][2][4];
#pragma unroll
      for (int j = 0; j < S::kGroup; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          ptx::load_shared_v4(rows + (first + j) * kBlockBytes + part * (kBlockBytes / 4), b[j][part]);
        }
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int j = 0; j < S::kGroup; ++j) {
#pragma unroll
          for (int f = 0; f < kFragments; ++f) {
            device::multiply_add<__nv_bfloat16>(sums[f][first + j], a[step][f], b[j][step / 2][step % 2 * 2],
                                                b[j][step / 2][step % 2 * 2 + 1]);
          }
        }
      }
    }
  }

  __device__ void multiply(const Item& item) {
    const int stages = (p_.depth + kStageK - 1) / kStageK;
    const int blocks = (item.rows + kBlockRows - 1) / kBlockRows;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (auto& of_fragment : sums_) {
#pragma unroll
      for (auto& s : of_fragment) s[0] = s[1] = s[2] = s[3] = 0.0f;
    }
    Line lines[kRowsOfLane] = {};
    if constexpr (S::kScale != Scale::none) find_scales(item, lines);
    Held held = {}, next = {};
    load_scales(lines, 0, &next);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      held = next;
      if (stage + 1 < stages) load_scales(lines, stage + 1, &next);
      const uint32_t full = barriers_ + 16 * slot_, tile = ring_ + slot_ * S::kStageBytes;
      ptx::barrier_wait(full, parity_);
      C codes[kRowsOfLane][2];
      bool rare = false;
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) C::load(tile + place_ + r * 8 * S::kRowBytes, codes[r]);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        rare = rare || codes[r][0].has_nan() || codes[r][1].has_nan() || F::is_rare(held.code[r][0]);
      }
      rare = __any_sync(~0u, rare);
      float part[kInSums ? kFragments : 1][kInSums ? S::kBlocks : 1][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Fragment a[4][kFragments];
        if (rare) {
          widen<true>(codes, half, held, a);
        } else {
          widen<false>(codes, half, held, a);
        }
        const uint32_t rows = tile + S::kCodeBytes + half * (kBlockBytes / 2) + lane * 16;
        if constexpr (kInSums) {
          multiply_half(rows, blocks, a, part);
        } else {
          multiply_half(rows, blocks, a, sums_);
        }
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(full + 8);
      if (++slot_ == S::kStages) slot_ = 0, parity_ ^= 1;
      if constexpr (kInSums) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int j = 0; j < S::kBlocks; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums_[f][j][i] = __fmaf_rn(part[f][j][i], __uint_as_float(held.code[2 * f + i / 2][0]), sums_[f][j][i]);
            }
          }
        }
      }
    }
  }

  __device__ void finish(const Item& item) {
    using namespace device;
    const int lane = threadIdx.x % 32, col = item.col + threadIdx.x / 32 * S::kWarpCols;
    constexpr int kStride = S::kWarpCols + 4;
    float* staged = staged_ + threadIdx.x / 32 * (kBlockRows * kStride);
    Finish f = {};
    f.factor = group_factor(nullptr, p_.factors, item.group) *
               (S::kScale == Scale::e4m3 ? static_cast<float>(1 << kE4M3Shift) : 1.0f);
    f.result_stride = p_.cols;
    f.result_type = p_.result_type;
    f.bias_type = p_.bias_type;
    f.scale_bias = p_.scale_bias;
    f.vectors = true;
    f.cols = p_.cols - col;
    const uint8_t* bias = p_.bias_table ? reinterpret_cast<const uint8_t*>(p_.bias_table[item.group])
                          : p_.bias     ? p_.bias + int64_t{item.group} * p_.cols * bytes_of(p_.bias_type)
                                        : nullptr;
    if (bias) bias += int64_t{col} * bytes_of(p_.bias_type);
    f.bias = bias;
    const bool vectors = reinterpret_cast<uintptr_t>(bias) % 16 == 0;
#pragma unroll
    for (int j = 0; j < S::kBlocks; ++j) {
      if (j * kBlockRows >= item.rows) break;
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        const int c = r * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) staged[(lane % 4 * 2 + i) * kStride + c] = sums_[r / 2][j][r % 2 * 2 + i];
      }
      __syncwarp();
      const int64_t row = item.first_row + j * kBlockRows;
      f.rows = item.rows - j * kBlockRows;
      f.result = p_.result + (row * p_.cols + col) * bytes_of(p_.result_type);
      f.row_scale = p_.row_scale ? p_.row_scale + row : nullptr;
      constexpr int kLanesARow = S::kWarpCols / 8;
      const int out_row = lane / kLanesARow, out_col = lane % kLanesARow * 8;
      if (out_row >= kBlockRows) continue;
      const float* at = staged + out_row * kStride + out_col;
      if (vectors) {
        float values[1][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[0][i] = at[i];
        finish_rows(f, out_row, kBlockRows, out_col, values);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          float value[1][1] = {{at[i]}};
          finish_rows(f, out_row, kBlockRows, out_col + i, value);
        }
      }
    }
  }

  const Params& p_;
  const int32_t* tables_;
  uint32_t ring_, barriers_;
  float* staged_;
  int slot_ = 0;
  uint32_t parity_ = 0;
  uint32_t place_;  // of this lane's first codes in a tile
  float sums_[kFragments][S::kBlocks][4];
};

// Rows past the groups, zeroed by everybody together.
template <int kThreads>
__device__ void clear_tail(const Params& p, const int32_t* tables) {
  const int64_t row_words = int64_t{p.cols} * device::bytes_of(p.result_type) / 16;
  const int64_t first = tables[p.groups] * row_words, end = p.rows * row_words;
  uint4* words = reinterpret_cast<uint4*>(p.result);
  for (int64_t i = first + blockIdx.x * int64_t{kThreads} + threadIdx.x; i < end; i += int64_t{gridDim.x} * kThreads) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) stream_weights(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  int32_t* tables = reinterpret_cast<int32_t*>(memory + S::kStages * S::kStageBytes);
  float* staged = reinterpret_cast<float*>(memory + S::kStages * S::kStageBytes + kTableBytes);
  const uint32_t ring = ptx::shared_address(memory);
  const uint32_t barriers = ring + S::kBytes - 1024;  // full and empty of each stage
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      ptx::barrier_init(barriers + 16 * s, 1);
      ptx::barrier_init(barriers + 16 * s + 8, S::kWarps);
    }
    ptx::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < kTableBytes / 4; i += S::kThreads) tables[i] = p.tables[i];
  __syncthreads();
  if (p.clear_tail) clear_tail<S::kThreads>(p, tables);
  if (threadIdx.x / 32 >= S::kWarps) {
    ptx::set_max_registers_down<S::kProducerRegisters>();
    if (threadIdx.x == 32 * S::kWarps) produce<S>(p, tables, ring, barriers);
    return;
  }
  ptx::set_max_registers_up<S::kConsumerRegisters>();
  Consumer<S>(p, tables, ring, barriers, staged).run();
}

template <class S>
void launch_shape(const Params& p, cudaStream_t stream) {
  const unsigned parts = static_cast<unsigned>(std::min((p.depth + kStageK - 1) / kStageK, 8));
  arrange_rows<S::kNibbles><<<dim3(p.most_blocks + 1, parts), kArrangeThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  allow_shared_memory<stream_weights<S>>(S::kBytes);
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  const int64_t most = (p.most_blocks + int64_t{p.tile_blocks - 1} * p.groups) / p.tile_blocks * col_tiles;
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(most, 1, multiprocessors()));
  stream_weights<S><<<grid, S::kThreads, S::kBytes, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

Scale scale_of(const GroupedMatmul& c) {
  if (!c.scales.rhs_block) return Scale::none;
  return c.scales.rhs_scales.dtype == DType::f32    ? Scale::f32
         : c.scales.rhs_scales.dtype == DType::e8m0 ? Scale::e8m0
                                                    : Scale::e4m3;
}

// Blocks of rows of a tile, from what a group usually has, so that most groups need one tile; 0: too many rows. fp32
// scales keep two sets of sums, so no more than 8 blocks, and any number of tiles: widened weights would be fp32.
int tile_blocks(const GroupedMatmul& c) {
  const int64_t mean = c.rows_hint ? c.rows_hint : c.lhs.dims[0] / c.group_sizes.dims[0];
  if (scale_of(c) == Scale::f32) return mean <= 16 ? 4 : 8;
  return mean <= 16 ? 4 : mean <= 44 ? 8 : mean <= 96 ? 16 : 0;
}

template <DType kType, Scale kScale>
void launch_blocks(const Params& p, cudaStream_t stream) {
  if (p.tile_blocks == 4) return launch_shape<Shape<kType, kScale, 4>>(p, stream);
  if constexpr (kScale != Scale::f32) {
    if (p.tile_blocks == 16) return launch_shape<Shape<kType, kScale, 16>>(p, stream);
  }
  return launch_shape<Shape<kType, kScale, 8>>(p, stream);
}

std::string refuses(const GroupedMatmul& c, const Target& target) {
  if (target.platform != Platform::cuda || target.sm != 90 || !target.sm_a) return "needs an sm_90a GPU";
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (c.lhs.dtype != DType::bf16 || c.scales.lhs_block || c.scales.lhs_group_scales.present()) {
    return "takes plain rows of bfloat16, not " + describe(c.lhs);
  }
  const bool nibbles = c.rhs.dtype == DType::u8;
  if (c.rhs.dtype != DType::e4m3fn && !nibbles) return "takes weights of E4M3 or E2M1 codes, not " + describe(c.rhs);
  if (c.rhs_axis != 2 || c.rhs_table.present() || c.rhs_up.present()) return "takes weights as one array [G, N, K]";
  if (c.result_half) return "makes all columns of a result";
  if (c.batch_invariant) return "is chosen by the number of rows, which must not show in a row's bits";
  const Scale scale = scale_of(c);
  const int64_t block = c.scales.rhs_block, k = c.lhs.dims[1], n = c.result.dims[1], groups = c.group_sizes.dims[0];
  const bool known = nibbles ? (scale == Scale::e8m0 && block == 32) || (scale == Scale::e4m3 && block == 16)
                             : scale == Scale::none || (scale == Scale::e8m0 && block == 32) ||
                                   (scale == Scale::f32 && block == kStageK);
  if (!known) return "takes no blocks of " + std::to_string(block) + " with " + describe(c.scales.rhs_scales);
  if (!is_plain(c.result.dtype) || (c.bias.present() && !is_plain(c.bias.dtype))) {
    return "gives float32, bfloat16 or float16 and takes biases of these";
  }
  if (c.accumulate) return "does not accumulate into ragged rows";
  if (groups > kMostGroups) return "takes at most " + std::to_string(kMostGroups) + " groups";
  if (tile_blocks(c) == 0) return "is for few rows a group";
  if (k % (nibbles ? 32 : 16) != 0) return "needs rows of codes of a multiple of 16 bytes: K = " + std::to_string(k);
  if (n % 8 != 0) return "needs result rows of a multiple of 16 bytes: N = " + std::to_string(n);
  if (c.lhs.dims[0] > INT32_MAX / 2 || k > INT32_MAX / 2 || n > INT32_MAX / 2) return "takes dimensions below 2^30";
  return "";
}

int most_blocks(const GroupedMatmul& c) {
  return static_cast<int>((c.lhs.dims[0] + int64_t{kBlockRows - 1} * c.group_sizes.dims[0]) / kBlockRows);
}

size_t workspace(const GroupedMatmul& c, const Target&) {
  const int64_t stages = (c.lhs.dims[1] + kStageK - 1) / kStageK;
  return static_cast<size_t>(kTableBytes + stages * most_blocks(c) * kBlockBytes);
}

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  Params p{};
  const bool nibbles = call.rhs.dtype == DType::u8;
  const MapShape shape = packed_shape(call.rhs.dims[0], call.rhs.dims[1], call.rhs.dims[2], DType::u8);
  p.codes = tensor_map(call.rhs.data, DType::u8, shape, nibbles ? kStageK / 2 : kStageK, kTileCols);
  p.sizes = call.group_sizes.as<const int32_t>();
  p.lhs = call.lhs.as<const uint8_t>();
  p.tables = static_cast<int32_t*>(context.workspace);
  p.arranged = static_cast<uint8_t*>(context.workspace) + kTableBytes;
  p.factors = floats_or_null(call.scales.rhs_group_scales);
  p.bias = call.bias.present() ? call.bias.as<const uint8_t>() : nullptr;
  p.bias_table = call.bias_table.present() ? call.bias_table.as<const int64_t>() : nullptr;
  p.row_scale = floats_or_null(call.row_scale);
  p.result = call.result.as<uint8_t>();
  p.rows = call.lhs.dims[0];
  p.most_blocks = most_blocks(call);
  p.groups = static_cast<int>(call.group_sizes.dims[0]);
  p.cols = static_cast<int>(call.result.dims[1]);
  p.depth = static_cast<int>(call.lhs.dims[1]);
  if (const TensorView& s = call.scales.rhs_scales; s.present()) {
    p.scales = s.data;
    p.scale_lines = static_cast<int>(s.dims[1]);
    p.scale_run = static_cast<int>(s.dims[2]);
    p.scale_outer = static_cast<int>(call.scales.rhs_block_outer);
    p.scale_shift = call.scales.rhs_block == 16 ? 4 : call.scales.rhs_block == 32 ? 5 : 7;
  }
  p.tile_blocks = tile_blocks(call);
  p.result_type = call.result.dtype;
  p.bias_type = call.bias.present() ? call.bias.dtype : DType::f32;
  p.scale_bias = call.scale_bias != 0;
  p.clear_tail = !call.into.present();
  const Scale scale = scale_of(call);
  if (nibbles) {
    return scale == Scale::e8m0 ? launch_blocks<DType::u8, Scale::e8m0>(p, stream)
                                : launch_blocks<DType::u8, Scale::e4m3>(p, stream);
  }
  if (scale == Scale::none) return launch_blocks<DType::e4m3fn, Scale::none>(p, stream);
  return scale == Scale::e8m0 ? launch_blocks<DType::e4m3fn, Scale::e8m0>(p, stream)
                              : launch_blocks<DType::e4m3fn, Scale::f32>(p, stream);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_weight_only_sm90 = {"grouped_matmul_weight_only_sm90", refuses, workspace,
                                                               launch, kAlignment};

}  // namespace grouped
