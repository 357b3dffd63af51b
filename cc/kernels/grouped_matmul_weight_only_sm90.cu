// Few rows against quantised weights on Hopper: bf16 rows [M, K], weights [G, N, K] of E4M3 or E2M1 codes, which stream
// through the chip once and are widened in registers. What counts is the rate of memory.
//
//   arrange   rows -> workspace: blocks of 8 rows of one group, zero-filled, in the order in which fragments are read
//   producer  (1 lane): a stage is 128 k of 256 weight rows (tensor copy) and of up to 8 kBlocks rows (one bulk copy)
//            |  ring, 3 to 8 stages: 16 or 32 KiB of codes, 2 KiB a block of rows
//            v
//   8 warps   of 32 weight rows each: codes --bits, * scale--> A fragments; rows --ld.shared.v4--> B fragments;
//             mma m16n8k16, fp32: 8 sums a thread and block of rows
//            |  through 1 KiB a warp, so that 8 columns of a row leave together
//            v
//   result
//
//   kBlocks   rows      sums a thread   stages of E4M3, E2M1
//   4         to 32     32              5, 8
//   8         to 64     64              4, 6
//   16        to 128    128             3, 4
//   384 threads, 1 block an SM, 40 / 232 registers. Groups with more rows than a tile has take several.
//
// A lane owns the same 16 k of 64 in all of its rows, so 16 codes lie together and share a scale. Which of the 16 k of
// an mma a code stands for does not matter as long as the rows agree: codes come apart by masks and shifts alone, and
// `arrange` puts the rows into that order. The bits are a bfloat16 too small by a power of two, which the
// multiplication with the scale sets right: exact wherever codes times scales are bfloat16 (numerics 4).
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
constexpr int kWarps = 8;
constexpr int kWarpCols = kTileCols / kWarps;
constexpr int kThreads = 32 * (kWarps + 4);  // registers are handed over by warpgroups
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBlockRows = 8;
constexpr int kBlockBytes = kBlockRows * kStageK * 2;  // of one stage
constexpr int kMostGroups = 1024;
constexpr int kTables = 3;  // of groups + 1 entries
constexpr int kTableBytes = kTables * (kMostGroups + 8) * 4;
constexpr int kStagedFloats = kBlockRows * (kWarpCols + 4);  // of a warp; rows 4 floats apart in banks
constexpr int kSharedBytes = 227 * 1024;
constexpr int kMostStages = 8;

enum class Scale { none, e8m0, e4m3, f32 };

template <DType kType_, Scale kScale_, int kBlocks_>
struct Shape {
  static constexpr DType kType = kType_;
  static constexpr Scale kScale = kScale_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr bool kNibbles = kType == DType::u8;
  static constexpr int kRowBytes = kNibbles ? kStageK / 2 : kStageK;
  static constexpr int kCodeBytes = kTileCols * kRowBytes;
  static constexpr int kStageBytes = kCodeBytes + kBlocks * kBlockBytes;
  static constexpr int kFixedBytes = 1024 + kTableBytes + kWarps * kStagedFloats * 4;  // and alignment, barriers
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
  int scale_lines, scale_run, scale_outer, scale_block;  // [groups, lines, run]; columns and k that share one
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
// from 64 half + 16 q + 8 part on.
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
    const int k = stage * kStageK + 64 * half + 16 * (lane % 4) + 8 * part;
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

// Four pairs of bfloat16 bits, 2^-kBias of the values. E4M3: of two words, (0 2) (1 3) (4 6) (5 7); E2M1: of one, (0 4)
// (1 5) (2 6) (3 7).
template <bool kNibbles>
struct Codes;

template <>
struct Codes<false> {
  static constexpr int kBias = 120;
  uint32_t words[4];  // of 16 codes
  __device__ void load(uint32_t tile, int row, int half, int q) {
    ptx::load_shared_v4(tile + row * 128 + ((4 * half + q) ^ (row % 8)) * 16, words);
  }
  // Rows of a fragment's lanes, so that eight lanes read different banks.
  static __device__ int row_of(int i) { return i / 2 | i % 2 * 4; }
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
  __device__ void load(uint32_t tile, int row, int half, int q) {
    ptx::load_words_v2(tile + row * 64 + ((2 * half + q / 2) ^ (row / 2 % 4)) * 16 + q % 2 * 8, words[0], words[1]);
  }
  static __device__ int row_of(int i) { return i % 2 | (i & 2) << 1 | i / 4 * 2; }
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

// A scale as factors of the bits above: usually one, two where the product of 2^kBias and the scale is no bfloat16.
struct Factor {
  uint32_t first, second;  // pairs of bfloat16; second 0: not needed
};

constexpr int kE4M3Shift =
    8;  // E4M3 scales are made smaller by 2^8, which the sums make good: s * 2^126 might overflow

template <Scale kScale, int kBias>
__device__ Factor factor_of(uint32_t code) {
  if constexpr (kScale == Scale::e8m0) {
    constexpr uint32_t kLargest = 254 - kBias;  // code whose factor is the largest power of two
    const uint32_t fits = code < kLargest ? code : kLargest;
    const uint32_t bits = code == 255 ? 0x7fc0u : (fits + kBias) << 7;
    const uint32_t rest = code > kLargest && code != 255 ? (code - kLargest + 127) << 7 : 0;
    return {bits * 0x10001u, rest * 0x10001u};
  } else if constexpr (kScale == Scale::e4m3) {
    const float s = device::to_float(device::half_bits_of_e4m3(static_cast<uint8_t>(code)), DType::f16);
    return {device::packed(s, s, DType::bf16) == 0 ? 0u : device::packed(s * 0x1p118f, s * 0x1p118f, DType::bf16), 0u};
  } else {
    return {static_cast<uint32_t>(127 + kBias) * 0x800080u, 0u};
  }
}
static_assert(126 - kE4M3Shift == 118, "the factor of E2M1 codes");

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
      : p_(p), tables_(tables), ring_(ring), barriers_(barriers), staged_(staged) {}

  __device__ void run() {
    Item item;
    for (int64_t index = blockIdx.x; find_item(p_, tables_, index, &item); index += gridDim.x) {
      multiply(item);
      finish(item);
    }
  }

 private:
  using C = Codes<S::kNibbles>;
  static constexpr int kRowsOfLane = 4;                     // of the weight: two fragments of two
  static constexpr bool kInSums = S::kScale == Scale::f32;  // scales multiply sums, not codes

  // Offset of this lane's row `r` from the tile's first column.
  static __device__ int column(int r) {
    const int lane = threadIdx.x % 32;
    return threadIdx.x / 32 * kWarpCols + r * 8 + C::row_of(lane / 4);
  }

  // Scales of one stage: of half h and row r, or, fp32, of row r alone.
  struct Held {
    uint32_t code[kInSums ? 1 : 2][kRowsOfLane];
  };
  __device__ void load_scales(const Item& item, int stage, Held* held) const {
    if constexpr (S::kScale != Scale::none) {
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        const int col = item.col + column(r);
        const int64_t line = int64_t{item.group} * p_.scale_lines + col / p_.scale_outer;
#pragma unroll
        for (int h = 0; h < (kInSums ? 1 : 2); ++h) {
          const int k = stage * kStageK + (kInSums ? 0 : 64 * h + 16 * (threadIdx.x % 4));
          const bool exists = col < p_.cols && k < p_.depth;
          const int64_t at = line * p_.scale_run + k / p_.scale_block;
          if constexpr (kInSums) {
            held->code[h][r] = exists ? __ldg(static_cast<const uint32_t*>(p_.scales) + at) : 0;
          } else {
            held->code[h][r] = exists ? __ldg(static_cast<const uint8_t*>(p_.scales) + at) : 0;
          }
        }
      }
    }
  }

  // A fragments of one half: 4 steps of k16 for 32 rows.
  __device__ void widen(uint32_t tile, int half, const Held& held, uint32_t (&a)[4][2][4]) const {
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      C codes;
      codes.load(tile, column(r), half, threadIdx.x % 4);
      const Factor factor = factor_of<S::kScale, C::kBias>(kInSums ? 0 : held.code[kInSums ? 0 : half][r]);
      const bool nan = codes.has_nan();
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];
        codes.pairs(part, pairs);
        if (nan) {
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[i] = C::with_nan(pairs[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = times(pairs[i], factor.first);
        if (factor.second != 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[i] = times(pairs[i], factor.second);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) a[2 * part + i / 2][r / 2][r % 2 + 2 * (i % 2)] = pairs[i];
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
    Held held = {}, next = {};
    load_scales(item, 0, &next);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      held = next;
      if (stage + 1 < stages) load_scales(item, stage + 1, &next);
      const uint32_t full = barriers_ + 16 * slot_, tile = ring_ + slot_ * S::kStageBytes;
      ptx::barrier_wait(full, parity_);
      float part[kInSums ? 2 : 1][kInSums ? S::kBlocks : 1][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4][2][4];
        widen(tile, half, held, a);
        const uint32_t rows = tile + S::kCodeBytes + half * (kBlockBytes / 2) + lane * 16;
#pragma unroll
        for (int j = 0; j < S::kBlocks; ++j) {
          if (j >= blocks) break;
          uint32_t b[2][4];
          ptx::load_shared_v4(rows + j * kBlockBytes, b[0]);
          ptx::load_shared_v4(rows + j * kBlockBytes + kBlockBytes / 4, b[1]);
#pragma unroll
          for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int f = 0; f < 2; ++f) {
              float (&to)[4] = kInSums ? part[kInSums ? f : 0][kInSums ? j : 0] : sums_[f][j];
              device::multiply_add<__nv_bfloat16>(to, a[step][f], b[step / 2][step % 2 * 2],
                                                  b[step / 2][step % 2 * 2 + 1]);
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(full + 8);
      if (++slot_ == S::kStages) slot_ = 0, parity_ ^= 1;
      if constexpr (kInSums) {
#pragma unroll
        for (int f = 0; f < 2; ++f) {
#pragma unroll
          for (int j = 0; j < S::kBlocks; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums_[f][j][i] = __fmaf_rn(part[f][j][i], __uint_as_float(held.code[0][2 * f + i / 2]), sums_[f][j][i]);
            }
          }
        }
      }
    }
  }

  __device__ void finish(const Item& item) {
    using namespace device;
    const int lane = threadIdx.x % 32, col = item.col + threadIdx.x / 32 * kWarpCols;
    float* staged = staged_ + threadIdx.x / 32 * kStagedFloats;
    constexpr int kStride = kWarpCols + 4;
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
        const int c = r * 8 + C::row_of(lane / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) staged[(lane % 4 * 2 + i) * kStride + c] = sums_[r / 2][j][r % 2 * 2 + i];
      }
      __syncwarp();
      const int64_t row = item.first_row + j * kBlockRows;
      f.rows = item.rows - j * kBlockRows;
      f.result = p_.result + (row * p_.cols + col) * bytes_of(p_.result_type);
      f.row_scale = p_.row_scale ? p_.row_scale + row : nullptr;
      const float* at = staged + lane / 4 * kStride + lane % 4 * 8;
      if (vectors) {
        float values[1][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[0][i] = at[i];
        finish_rows(f, lane / 4, kBlockRows, lane % 4 * 8, values);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          float value[1][1] = {{at[i]}};
          finish_rows(f, lane / 4, kBlockRows, lane % 4 * 8 + i, value);
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
  float sums_[2][S::kBlocks][4];
};

// Rows past the groups, zeroed by everybody together.
__device__ void clear_tail(const Params& p, const int32_t* tables) {
  const int64_t row_words = int64_t{p.cols} * device::bytes_of(p.result_type) / 16;
  const int64_t first = tables[p.groups] * row_words, end = p.rows * row_words;
  uint4* words = reinterpret_cast<uint4*>(p.result);
  for (int64_t i = first + blockIdx.x * int64_t{kThreads} + threadIdx.x; i < end; i += int64_t{gridDim.x} * kThreads) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) stream_weights(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  int32_t* tables = reinterpret_cast<int32_t*>(memory + S::kStages * S::kStageBytes);
  float* staged = reinterpret_cast<float*>(memory + S::kStages * S::kStageBytes + kTableBytes);
  const uint32_t ring = ptx::shared_address(memory);
  const uint32_t barriers = ring + S::kBytes - 1024;  // full and empty of each stage
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      ptx::barrier_init(barriers + 16 * s, 1);
      ptx::barrier_init(barriers + 16 * s + 8, kWarps);
    }
    ptx::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < kTableBytes / 4; i += kThreads) tables[i] = p.tables[i];
  __syncthreads();
  if (p.clear_tail) clear_tail(p, tables);
  if (threadIdx.x / 32 >= kWarps) {
    ptx::set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == 32 * kWarps) produce<S>(p, tables, ring, barriers);
    return;
  }
  ptx::set_max_registers_up<kConsumerRegisters>();
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
  stream_weights<S><<<grid, kThreads, S::kBytes, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// Blocks of rows of a tile, from what a group usually has, so that most groups need one tile; 0: too many rows.
int tile_blocks(const GroupedMatmul& c) {
  const int64_t mean = c.rows_hint ? c.rows_hint : c.lhs.dims[0] / c.group_sizes.dims[0];
  return mean <= 16 ? 4 : mean <= 44 ? 8 : mean <= 96 ? 16 : 0;
}

Scale scale_of(const GroupedMatmul& c) {
  if (!c.scales.rhs_block) return Scale::none;
  return c.scales.rhs_scales.dtype == DType::f32    ? Scale::f32
         : c.scales.rhs_scales.dtype == DType::e8m0 ? Scale::e8m0
                                                    : Scale::e4m3;
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
  if (c.rhs_axis != 2 || c.rhs_table.present()) return "takes weights as one array [G, N, K]";
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
  const int blocks = tile_blocks(c);
  if (blocks == 0 || (scale == Scale::f32 && blocks > 8)) return "is for few rows a group";
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
    p.scale_block = static_cast<int>(call.scales.rhs_block);
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
