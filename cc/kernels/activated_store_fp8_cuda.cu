// Activated rows, or gradients at hidden rows, of bf16 as FP8 codes in one pass: blocks of 128 here, scales of groups
// in activated_groups_fp8_cuda.cu. The plain row is in memory nowhere, unless it is asked for.
//
// Each block draws tiles of 128 rows x 128 activated columns of one group, 256 threads with 8 columns of 8 rows each:
//
//   cp.async, 16 bytes per row: gate, linear half, dz --> own slots of shared memory, 64 or 96 KiB
//        ^ the next tile's, each as soon as the slots that it takes are not read any more
//   once per tile, a row at a time: act(h), or both halves of dz * act'(h), * row scale, rounded --> over the gate and
//        the linear half, act(h) over dz; beside, where wanted: act(h) and the plain gradients to memory, <dz, act(h)>
//        to a partial sum of the row and column tile
//   rows alone: a warp has 16 whole rows --> 32 registers --> as in quantize_fp8_cuda.cu
//   with columns: a warp has 32 rows x 64 columns
//        amaxes of all that is stored, over the lanes that share rows and columns --> 4 KiB of shared memory
//        --barrier--> up to three scales per thread --> 2.5 KiB of factors --barrier-->
//        for act(h), if its transposed codes are wanted beside gradients, and for each half of the result: two rows at
//        a time, decoded once --> codes of both forms --> rows: 8 bytes per lane, 64 per row; columns: 8 bytes per
//        lane, a sector of 32 for four lanes, so that nothing is transposed through shared memory
//
// Where F is no multiple of 128, a block of scales along rows has the last gates and the first linear columns. The tile
// of these gates then draws these linear columns too, into the lanes that would have nothing, and the linear half's
// tiles are shifted by as many columns (`straddle`), so that each is whole blocks. Slot `lane` of the linear half has
// column 8 * lane of the tile, but the first straddle / 8 slots have columns behind the tile, 128 + 8 * lane: their
// gradients are made from memory, where the neighbours of the tile, which are under way, have just read it. Codes are
// read from slot straddle / 8 on, and then from the first ones.
//
// Two blocks per SM of Hopper (128 registers, at most 113 KiB), of act(h) along rows alone three (80 registers). From
// 745 groups on, and where a block has 99 KiB, what threads exchange takes the place of dz. Row sums are added by a
// launch behind. Gradients read 6 bytes per activated column and write 2 to 5; instructions, of which a value of
// SwiGLU's gradients takes 65 in all, take longer than these.
#include <algorithm>
#include <string>
#include <type_traits>

#include "cc/api/archs.h"
#include "cc/api/operands.h"
#include "cc/device/common/row_partials.cuh"
#include "cc/device/quantize/activated_fp8.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

using Problem = ActivatedProblem;
using Shared = ActivatedShared;

// Which of a tile's values a thread has, 8 columns of 8 rows. Rows alone: a warp has 16 whole rows.
struct WholeRows : Shape<false> {
  static constexpr int kLanes = device::kLanes;  // of a row

  // The thread that has vector `lane` of a row.
  __device__ static int thread_of(int row, int lane) { return row / kVector * kLanes + lane; }
};

// With columns: a warp has 32 rows x 64 columns, so that four of its threads have a sector of 32 bytes of a column's
// codes.
struct Sectors {
  static constexpr int kRows = kStoreRows, kColumns = kStoreColumns;
  static constexpr int kWarpRows = 32, kWarpColumns = 64, kLanes = kWarpColumns / kVector;  // lanes of a row
  static constexpr int kRowWarps = kRows / kWarpRows, kColumnWarps = kColumns / kWarpColumns;
  static_assert(kRowWarps * kColumnWarps == kStoreWarps && kLanes * kWarpRows == 32 * kVector);

  int column = threadIdx.x / 32 % kColumnWarps * kWarpColumns + threadIdx.x % kLanes * kVector;
  int row = threadIdx.x / 32 / kColumnWarps * kWarpRows + threadIdx.x % 32 / kLanes * kVector;

  __device__ static int thread_of(int row, int lane) {
    const int warp = row / kWarpRows * kColumnWarps + lane / kLanes;
    return warp * 32 + row % kWarpRows / kVector * kLanes + lane % kLanes;
  }
};

template <int kForms>
using TileOf = typename std::conditional<(kForms & kColumns) != 0, Sectors, WholeRows>::type;

template <bool kGrad, int kForms>
constexpr int kBlocks = !kGrad && kForms == kRows ? 3 : 2;

// A tile's rows of one operand, and of the result that takes its place.
using Slots = uint4[kVector][kStoreThreads];
using EightRows = uint4[kVector];

// What threads tell each other of a tile whose columns are stored. Kinds of values: halves of the result, act(h).
constexpr int kOfActivated = 2;
struct Exchange {
  float column_factors[3][kStoreColumns];
  float row_factors[2][kStoreRows];
  uint32_t columns[3][Sectors::kRowWarps][kStoreColumns / 2];  // amaxes by warp, two columns per word
  uint16_t rows[2][Sectors::kColumnWarps][kStoreRows];         // amaxes by the columns that a warp has
  float sums[Sectors::kColumnWarps][kStoreRows];               // the same, of <dz, act(h)>
};
// Rows of each thread that it covers, where it has the memory of an operand.
constexpr int kCovered = 2;
static_assert(sizeof(Exchange) <= kCovered * sizeof(uint4) * kStoreThreads);

// The activated columns that a thread draws: its own of the tile, or, behind the last of them, the first ones, whose
// linear gradients belong to the block of the last gates.
struct Drawn {
  bool own, exists;
  int column;
};

template <class Tile>
__device__ inline Drawn drawn_columns(const Problem& p, const StoreTile& tile) {
  const Tile at;
  const bool own = at.column < tile.columns;
  const int first = at.column - tile.columns;
  if (own || p.straddle == 0) return {own, own, static_cast<int>(tile.column) + at.column};
  return {false, first < p.hidden.width, first};
}

template <class Tile>
__device__ inline Sources sources_of(const Problem& p, const StoreTile& tile, bool exists) {
  const Tile at;
  const Drawn drawn = drawn_columns<Tile>(p, tile);
  return Sources(p, tile.source + at.row, drawn.column, exists && drawn.exists ? tile.rows - at.row : 0);
}

// Starts loads of operand `which`: gates, linear halves (where there are any), dz (with gradients).
__device__ inline void load_operand(const Problem& p, const Sources& sources, int which, Slots* slots) {
  const bool grad = p.grad && which == (p.hidden.gated ? 2 : 1);
  const int64_t pitch = grad ? int64_t{p.hidden.width} : hidden_pitch(p);
  const uint16_t* from = grad ? sources.grad : sources.hidden + which * p.hidden.block;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    copy_vector(&slots[which][i][threadIdx.x], from, i < sources.count);
    from += pitch;
  }
  commit_copies();
}

// ---- What is stored, into the slots.

// Of the rows that lanes share, the one whose sum a lane keeps.
__device__ inline int kept_row() { return threadIdx.x % kVector; }

// act(h) of a tile's rows, over the gates.
template <ActivationKind kKind, class Tile>
__device__ __forceinline__ void activated_tile(const Problem& p, const StoreTile& tile, Slots* slots) {
  const Tile at;
  const int count = at.column < tile.columns ? tile.rows - at.row : 0;  // rows of this thread that exist
  const float* row_scale = p.row_scale ? p.row_scale + tile.source + at.row : nullptr;
  uint4 *gates = &slots[0][0][threadIdx.x], *linears = &slots[is_gated(kKind) ? 1 : 0][0][threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < kVector; ++i, gates += kStoreThreads, linears += kStoreThreads) {
    uint4 t = {};
    if (i < count) {
      t = activated_row<ActivationOf<kKind>>(p.spec, *gates, *linears, row_scale ? row_scale[i] : 1.0f);
    }
    *gates = t;
  }
}

// Gradients of a tile's rows; act(h) over dz, where it is stored as well. Returns, if sums of rows are wanted, that of
// row kept_row() over the columns of this warp. kBeside: rows may be wanted in plain too, or
// lanes draw columns of another block; without it a row has a fifth fewer instructions.
template <ActivationKind kKind, bool kBeside, class Tile>
__device__ __forceinline__ float gradients_of_tile(const Problem& p, const StoreTile& tile, Slots* slots) {
  using Act = ActivationOf<kKind>;
  constexpr bool kGated = is_gated(kKind);
  constexpr int kSlot = sizeof(Slots) / sizeof(uint4), kGrads = (kGated ? 2 : 1) * kSlot;
  const Tile at;
  const Drawn drawn = drawn_columns<Tile>(p, tile);
  const int64_t row = tile.source + at.row, width = p.hidden.width, pitch = hidden_pitch(p);
  const int column = drawn.column, count = drawn.exists ? tile.rows - at.row : 0;  // rows that exist
  const float* row_scale = p.row_scale ? p.row_scale + row : nullptr;
  const bool stores = has_activated(p), sums = p.partials != nullptr;
  float kept = 0.0f;
  uint4* mine = &slots[0][0][threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < kVector; ++i, mine += kStoreThreads) {
    float sum = 0.0f;
    if (i < count) {
      uint4 gate = mine[0], linear = {}, t = mine[kGrads];
      if constexpr (kGated) linear = mine[kSlot];
      sum = gradient_row<Act>(p.spec, gate, linear, t, row_scale ? row_scale[i] : 1.0f, sums);
      if constexpr (kBeside) {
        if (drawn.own && p.activated) *reinterpret_cast<uint4*>(p.activated + (row + i) * width + column) = t;
        if (drawn.own && p.result) {
          uint16_t* to = p.result + (row + i) * pitch + p.hidden.gate_column(column);
          *reinterpret_cast<uint4*>(to) = gate;
          if (kGated) *reinterpret_cast<uint4*>(to + p.hidden.block) = linear;
        }
        if (!drawn.own) gate = linear, linear = uint4{}, sum = 0.0f;
      }
      mine[0] = gate;
      if constexpr (kGated) mine[kSlot] = linear;
      if (stores) mine[kGrads] = t;
    } else {
      mine[0] = mine[kGrads] = uint4{};
      if constexpr (kGated) mine[kSlot] = uint4{};
    }
    if (!sums) continue;
    sum = sum_of_lanes<Tile::kLanes>(sum);
    if (kept_row() == i) kept = sum;
  }
  return kept;
}

// Where halves straddle blocks: linear gradients of columns behind the tile's own, into the slots of its first ones,
// which belong to the block before.
template <ActivationKind kKind, class Tile>
__device__ inline void complete_block(const Problem& p, const StoreTile& tile, Slots& linears) {
  const int width = p.hidden.width, lanes = p.straddle / kVector;
#pragma unroll 1
  for (int item = threadIdx.x; item < lanes * kStoreRows; item += kStoreThreads) {
    const int i = item / lanes, lane = item % lanes;
    const int64_t row = tile.source + i;
    const int column = static_cast<int>(tile.column) + kStoreColumns + lane * kVector;
    uint4 linear = {};
    if (i < tile.rows && column < width) {
      const uint16_t* hidden = static_cast<const uint16_t*>(p.hidden.data) + row * 2 * width + column;
      uint4 gate = *reinterpret_cast<const uint4*>(hidden);
      linear = *reinterpret_cast<const uint4*>(hidden + width);
      uint4 grad = *reinterpret_cast<const uint4*>(p.grad + row * width + column);
      gradient_row<ActivationOf<kKind>>(p.spec, gate, linear, grad, p.row_scale ? p.row_scale[row] : 1.0f, false);
    }
    linears[i % kVector][Tile::thread_of(i, lane)] = linear;
  }
}

// What the slots of a tile hold, as it is stored: act over the gates, or the gradients of both halves over these, and
// act over dz where it is stored as well; returns what gradients_of_tile() does. Inlined, long as it is: a function of
// its own knows neither that `p` never changes nor that slots are shared memory.
template <bool kGrad, int kForms, class Tile>
__device__ __forceinline__ float activate_tile(const Problem& p, const StoreTile& tile, Slots* slots) {
  float sum = 0.0f;
  if constexpr (!kGrad) {
    with_activation(p.spec.kind, [&](auto kind) { activated_tile<kind, Tile>(p, tile, slots); });
  } else {
    if (p.activated || p.result || (p.straddle && tile.columns < kStoreColumns)) {
      with_activation(p.spec.kind, [&](auto kind) { sum = gradients_of_tile<kind, true, Tile>(p, tile, slots); });
    } else {
      with_activation(p.spec.kind, [&](auto kind) { sum = gradients_of_tile<kind, false, Tile>(p, tile, slots); });
    }
    if ((kForms & kRows) != 0 && p.straddle) {
      __syncthreads();  // all threads are done with the slots of linear columns
      with_activation(p.spec.kind, [&](auto kind) { complete_block<kind, Tile>(p, tile, slots[1]); });
      __syncthreads();
    }
  }
  return sum;
}

// This thread's rows of a half of the result, or of act(h), out of their slots.
template <class Tile>
__device__ inline void take_rows(const Problem& p, const Slots* slots, int which, EightRows& raw) {
  int thread = threadIdx.x;
  if (which == 1 && p.straddle) {
    const Tile at;
    thread = Tile::thread_of(at.row, (at.column + p.straddle) % kStoreColumns / kVector);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) raw[i] = slots[which][i][thread];
}

// ---- Rows alone.

__device__ inline void put_row_sum(const Problem& p, const StoreTile& tile, float sum) {
  const WholeRows at;
  const int row = at.row + kept_row();
  if (!p.partials || threadIdx.x % WholeRows::kLanes >= kVector || row >= tile.rows) return;
  p.partials[tile.column / kStoreColumns * p.store.rows + tile.source + row] = sum;
}

__device__ inline void store_rows(const StoreProblem& p, const StoreTile& tile, const EightRows& raw) {
  float factors[kVector];
  row_factors<DType::bf16, kStoreColumns, Shape<false>>(p, tile, raw, factors);
  const QuantizedForm& form = p.forms[0];
  with_type(p.type, [&](auto type) {
    put_rows<decltype(type), DType::bf16, Shape<false>>(tile, raw, form.values + tile.source * form.pitch + tile.column,
                                                        form.pitch, tile.rows, [&](int i, int) { return factors[i]; });
  });
}

// ---- With columns: amaxes, scales, codes.

// Tells the amaxes of this warp's rows and columns; returns that of this thread's values.
template <bool kByRows>
__device__ inline uint32_t put_amaxes(const EightRows& raw, int kind, Exchange* e) {
  const Sectors at;
  const int lane = threadIdx.x % 32;
  uint4 found = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) found = larger_of(found, raw[i]);
  // Over the four lanes that share columns, of which each keeps two, as in RowAmaxes.
  const bool upper = lane & 16, odd = lane & 8;
  const uint32_t keep0 = upper ? found.z : found.x, keep1 = upper ? found.w : found.y;
  const uint32_t send0 = upper ? found.x : found.z, send1 = upper ? found.y : found.w;
  const uint32_t two0 = __vmaxu2(keep0, __shfl_xor_sync(~0u, send0, 16));
  const uint32_t two1 = __vmaxu2(keep1, __shfl_xor_sync(~0u, send1, 16));
  e->columns[kind][at.row / Sectors::kWarpRows][at.column / 2 + 2 * upper + odd] =
      __vmaxu2(odd ? two1 : two0, __shfl_xor_sync(~0u, odd ? two0 : two1, 8));
  if constexpr (kByRows) {
    const RowAmaxes<DType::bf16, Sectors::kWarpColumns> amaxes(raw);
    uint16_t* rows = &e->rows[kind][at.column / Sectors::kWarpColumns][at.row];
    rows[amaxes.word + 4 * (lane & 1)] = static_cast<uint16_t>(amaxes.found[0] >> 16);  // as bf16 again
  }
  return largest_of(found);
}

__device__ inline void put_row_factor(const StoreProblem& p, const StoreTile& tile, int kind, int row, Exchange* e) {
  uint32_t amax = 0;
#pragma unroll
  for (const auto& warp : e->rows[kind]) amax = max(amax, uint32_t{warp[row]});
  const BlockScale of_block = scale_of<kStoreColumns>(p, amax_of<DType::bf16>(amax));
  e->row_factors[kind][row] = of_block.scale;
  if (row < tile.rows && tile.columns > 0) {
    const uint32_t block = static_cast<uint32_t>(tile.column) / kStoreColumns;
    put_scale(p.forms[0].scales, true, p.forms[0].place.at(0, tile.source + row, block), of_block.scale_inv);
  }
}

__device__ inline void put_column_factor(const StoreProblem& p, const StoreTile& tile, int kind, int column,
                                         Exchange* e) {
  uint32_t amax = 0;
#pragma unroll
  for (const auto& warp : e->columns[kind]) amax = __vmaxu2(amax, warp[column / 2]);
  const BlockScale of_block = scale_of<kStoreRows>(p, amax_of<DType::bf16>(column % 2 ? amax >> 16 : amax & 0xFFFFu));
  e->column_factors[kind][column] = of_block.scale;
  if (column < tile.columns) {
    const uint32_t block = static_cast<uint32_t>(tile.padded) / kStoreRows;
    put_scale(p.forms[1].scales, true, p.forms[1].place.at(0, block, tile.column + column), of_block.scale_inv);
  }
}

__device__ inline void put_row_sum(float sum, Exchange* e) {
  const Sectors at;
  e->sums[at.column / Sectors::kWarpColumns][at.row + kept_row()] = sum;
}

// All scales of a tile, and the sums of its rows.
template <int kForms>
__device__ inline void put_factors(const Problem& p, const StoreTile& tile, Exchange* e) {
  static_assert(kStoreRows == kStoreColumns && kStoreThreads == 2 * kStoreRows);
  const int half = threadIdx.x / kStoreRows, item = threadIdx.x % kStoreRows;  // the row, and the column
  if (half < halves_of(p)) {
    const StoreTile part = result_tile(p, tile, half);
    if constexpr ((kForms & kRows) != 0) put_row_factor(p.store, part, half, item, e);
    put_column_factor(p.store, part, half, item, e);
  }
  if (half != 0) return;
  if (has_activated(p)) put_column_factor(p.store_activated, tile, kOfActivated, item, e);
  if (p.partials && item < tile.rows) {
    // As the last step of sum_of_lanes() over all 16 lanes of a row.
    p.partials[tile.column / kStoreColumns * p.store.rows + tile.source + item] =
        __fadd_rn(e->sums[0][item], e->sums[1][item]);
  }
}

// Codes of values of a kind, by rows and by columns; each value is decoded once.
template <class T, int kForms>
__device__ inline void put_codes(const StoreProblem& p, const StoreTile& tile, const EightRows& raw, int kind,
                                 const Exchange* e) {
  const Sectors at;
  const bool exists = at.column < tile.columns;
  const int count = exists ? tile.rows - at.row : 0;
  float by_column[kVector], by_row[kVector];
  take_eight(&e->column_factors[kind][at.column], by_column);
  if constexpr ((kForms & kRows) != 0) take_eight(&e->row_factors[kind][at.row], by_row);
  const uint32_t row_pitch = static_cast<uint32_t>(p.forms[0].pitch), pitch = static_cast<uint32_t>(p.forms[1].pitch);
  uint8_t* const to = p.forms[0].values + (tile.source + at.row) * row_pitch + tile.column + at.column;
  uint32_t words[kVector][2];
  uint16_t second[kVector];  // pair of a word
#pragma unroll
  for (int step = 0; step < kVector; step += 2) {
    const int i = step ^ 2;  // rows 2 and 3 before 0 and 1, for joined()
    float v[2][kVector];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      decoded(raw[i + r], v[r]);
      if constexpr ((kForms & kRows) != 0) {
        const auto pair = [&](int c) {
          return encode_pair<T>(fl_mul(v[r][c], by_row[i + r]), fl_mul(v[r][c + 1], by_row[i + r]));
        };
        const uint2 codes = make_uint2(joined(pair(0), pair(2)), joined(pair(4), pair(6)));
        if (i + r < count) *reinterpret_cast<uint2*>(to + (i + r) * int64_t{row_pitch}) = codes;
      }
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const uint16_t pair = encode_pair<T>(fl_mul(v[0][c], by_column[c]), fl_mul(v[1][c], by_column[c]));
      if (i % 4 != 0) second[c] = pair;
      if (i % 4 == 0) words[c][i / 4] = joined(pair, second[c]);
    }
  }
  if (!exists) return;  // rows that do not exist are padding, as segments are whole blocks
  uint8_t* const line = p.forms[1].values + (tile.column + at.column) * pitch + tile.padded + at.row;
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    *reinterpret_cast<uint2*>(line + c * int64_t{pitch}) = make_uint2(words[c][0], words[c][1]);
  }
}

template <bool kGrad, int kForms>
__global__ void __launch_bounds__(kStoreThreads, (kBlocks<kGrad, kForms>))
    store_activated_blocks(const __grid_constant__ Problem p, uint32_t column_tiles) {
  using Tile = TileOf<kForms>;
  constexpr bool kByColumns = (kForms & kColumns) != 0;
  constexpr int kLooking = kStoreWarps - 1;  // the warp that looks for tiles: one with few scales to find
  extern __shared__ uint4 dynamic_shared[];
  Slots* slots = reinterpret_cast<Slots*>(dynamic_shared);
  const int operands = operands_of(p), halves = halves_of(p);
  const bool over = kGrad && kByColumns && p.exchanges_over_slot;
  Slots* const behind_slots = slots + operands;
  Exchange* e = reinterpret_cast<Exchange*>(over ? behind_slots - 1 : behind_slots);
  Shared* s = kByColumns && !over ? reinterpret_cast<Shared*>(e + 1) : reinterpret_cast<Shared*>(behind_slots);
  const GroupTable table(p.store, s + 1);
  Turns turns(p.store, &s->turns);
  scan_sizes<Tile::kRows>(p.store, table, s->sums);
  const int count = p.store.scan.count;
  if (p.valid_rows && blockIdx.x == 0 && threadIdx.x == 0) *p.valid_rows = table.offsets[count];
  const auto find = [&](uint32_t item, StoreTile* found) {
    return find_in_order<Tile::kRows, Tile::kColumns>(p.store, table, item, column_tiles, found);
  };
  // One warp looks for a tile, two turns ahead.
  const auto look_for = [&](uint32_t item, StoreTile* to) {
    if (threadIdx.x / 32 != kLooking) return;
    StoreTile found = {};
    if (!find(item, &found)) found.group = count + 1;
    if (threadIdx.x % 32 == 0) *to = found;
  };
  look_for(turns.next(), &s->next[0]);
  turns.draw();
  StoreTile tile;
  if (!find(blockIdx.x, &tile)) return;
  if (tile.group < count) {
    const Sources first = sources_of<Tile>(p, tile, true);
    for (int i = 0; i < operands; ++i) load_operand(p, first, i, slots);
  }
  const bool stores_activated = kGrad && kByColumns && has_activated(p);
  const int activated = operands - 1;  // over dz
  for (; tile.group <= count; turns.advance()) {
    const bool exists = tile.group < count;  // or it is of the tail
    EightRows raw;
    uint4 covered[kCovered];
    uint32_t amax = 0;
    wait_all_copies();
    if (exists) {
      const float sum = activate_tile<kGrad, kForms, Tile>(p, tile, slots);
      if constexpr (kByColumns) {
        if (stores_activated) take_rows<Tile>(p, slots, activated, raw);
        if (over) __syncthreads();  // all threads are done with the slots of dz
        if (p.partials) put_row_sum(sum, e);
        if (stores_activated) {
          put_amaxes<false>(raw, kOfActivated, e);
          for (int i = 0; i < kCovered; ++i) covered[i] = raw[i];
        }
#pragma unroll 1
        for (int half = 0; half < halves; ++half) {
          take_rows<Tile>(p, slots, half, raw);
          amax = max(amax, put_amaxes<(kForms & kRows) != 0>(raw, half, e));
        }
      } else if constexpr (kGrad) {
        put_row_sum(p, tile, sum);
      }
    }
    turns.meet();
    turns.draw();
    const StoreTile& next = s->next[turns.odd()];
    StoreTile* const behind = &s->next[turns.odd() ^ 1];
    const bool loads = next.group < count;
    const Sources ahead = sources_of<Tile>(p, next, loads);
    if (!exists) {
      look_for(turns.after_next(), behind);
      activate_nothing(p, tile);
      for (int i = 0; i < operands && loads; ++i) load_operand(p, ahead, i, slots);
    } else {
      // The next tile's operands take the place of what is not read any more.
      const int free = operands - (stores_activated || over ? 1 : 0);
      for (int i = halves; i < free && loads; ++i) load_operand(p, ahead, i, slots);
      if constexpr (kByColumns) {
        if (p.store.measure) turns.see(amax_of<DType::bf16>(amax), tile.group);
        put_factors<kForms>(p, tile, e);
        look_for(turns.after_next(), behind);
        __syncthreads();
        if (stores_activated) {
          take_rows<Tile>(p, slots, activated, raw);
          for (int i = 0; i < kCovered; ++i) raw[i] = covered[i];
          if (loads && !over) load_operand(p, ahead, activated, slots);
          with_type(p.store_activated.type, [&](auto type) {
            put_codes<decltype(type), kColumns>(p.store_activated, tile, raw, kOfActivated, e);
          });
        }
      } else {
        look_for(turns.after_next(), behind);
      }
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        const StoreTile part = result_tile(p, tile, half);
        take_rows<Tile>(p, slots, half, raw);
        if (half && p.straddle) __syncthreads();  // other threads have read this one's slots
        if (loads) load_operand(p, ahead, half, slots);
        if constexpr (kByColumns) {
          with_type(p.store.type, [&](auto type) { put_codes<decltype(type), kForms>(p.store, part, raw, half, e); });
        } else {
          if (p.store.measure) turns.see(amax_of<DType::bf16>(largest(raw)), tile.group);
          store_rows(p.store, part, raw);
        }
      }
      if (over) {
        __syncthreads();  // all factors have been read
        if (loads) load_operand(p, ahead, operands - 1, slots);
      }
    }
    tile = next;
  }
  turns.finish();
}

int64_t activated_width(const ActivatedStore& call, bool gated) { return call.hidden.dims[1] / (gated ? 2 : 1); }

template <bool kGrad, int kForms>
void run(const ActivatedStore& call, Problem p, const LaunchOptions& how) {
  constexpr int kExchange = kForms & kColumns ? sizeof(Exchange) : 0, kSlots = sizeof(Slots);
  static_assert(kSlots == kActivatedUnit * units_with_block_scales(1));
  constexpr int kMost = kBlocks<kGrad, kForms>;
  int bytes = operands_of(p) * kSlots + static_cast<int>(sizeof(Shared));
  const int least = bytes + GroupTable::bytes(p.store);
  p.exchanges_over_slot = kGrad && blocks_of_sm(kMost, least + kExchange) < blocks_of_sm(kMost, least);
  if (!p.exchanges_over_slot) bytes += kExchange;
  run_activated<store_activated_blocks<kGrad, kForms>>(
      call, p, kMost, (kGrad ? 3 : 2) * kSlots + kExchange + sizeof(Shared), bytes, how);
}

template <int kForms>
void run(const ActivatedStore& call, const Problem& p, const LaunchOptions& how) {
  p.grad ? run<true, kForms>(call, p, how) : run<false, kForms>(call, p, how);
}

void run_blocks(const ActivatedStore& call, const Problem& p, const LaunchOptions& how) {
  if (!p.store.forms[0].values) return run<kColumns>(call, p, how);
  if (!p.store.forms[1].values) return run<kRows>(call, p, how);
  run<kRows + kColumns>(call, p, how);
}

size_t partials_at(const ActivatedStore& call) {
  return StoreScan::bytes(groups_of(call.store)) + sizeof(int32_t) * 64;
}

// Shared memory of a block at launch, with the largest table that the groups may want.
int block_bytes(const ActivatedStore& call, bool gated) {
  const bool grad = call.grad.present();
  const int operands = operands_of(grad, gated);
  const int results = halves_of(grad, gated) + (call.store_activated.cross_values.present() ? 1 : 0);
  const int units = call.store.block != 0
                        ? units_with_block_scales(operands)
                        : units_with_group_scales(operands, call.store.cross_values.present() ? results : 0);
  // An Exchange beside fits wherever there are fewer than three operands, and with three it can do without.
  return units * kActivatedUnit + static_cast<int>(sizeof(Shared)) +
         GroupTable::most_bytes(static_cast<int>(groups_of(call.store)));
}

}  // namespace

std::string refuses_activated_store(const ActivatedStore& call, const Target& target) {
  for (const std::string& reason : {refuses_tiles(call.store, target), refuses_many_columns(call.hidden)}) {
    if (!reason.empty()) return reason;
  }
  if (groups_of(call.store) > kFewGroups) return "takes up to 1024 groups";
  for (const TensorView* t : {&call.store.source, &call.hidden, &call.grad, &call.result, &call.activated}) {
    if (t->present() && t->dtype != DType::bf16) return "takes and gives bfloat16, not " + describe(*t);
  }
  ActivationKind kind{};
  if (!activation_named(call.activation.kind, &kind)) return "knows no activation " + call.activation.kind;
  const int64_t width = activated_width(call, is_gated(kind)), s = call.activation.interleave;
  if (width % kVector != 0) return "takes widths that are multiples of 8";
  const int64_t unit = call.grad.present() ? kStoreColumns : kVector;
  if (is_gated(kind) && s != 0 && s != width && s % unit != 0) {
    return "takes halves in one piece or interleaved in multiples of " + std::to_string(unit) + " columns, not " +
           std::to_string(s);
  }
  const Quantize& store = call.store;
  const TensorView& cross = store.cross_values;
  const DType type = (store.values.present() ? store.values : cross).dtype;
  if (!is_fp8(type)) return std::string("gives FP8, not ") + dtype_name(type);
  if (store.rule != "fp32" || (store.block != 0 && store.block != kStoreColumns)) {
    return "takes fp32 scales of groups or of blocks of 128";
  }
  if (cross.present() && (!store.transposed || store.segment % 16 != 0))
    return "transposes rows in segments of 16 or more";
  if (const int bytes = block_bytes(call, is_gated(kind)); has_small_blocks(target) && bytes > kSmallBlock) {
    return "needs " + std::to_string(bytes) + " bytes of shared memory per block, which has " +
           std::to_string(kSmallBlock) + " on " + arch_name(target.sm);
  }
  return "";
}

// Scales of groups that are found want a launch that finds them, which the result's have as well: of all groups, or, if
// the result is scaled with delay, of those that have not started.
bool finds_activated(const ActivatedStore& call) {
  const Quantize& z = call.store_activated;
  return z.cross_values.present() && finds_group_scales(z);
}

bool stores_activated(const ActivatedStore& call) {
  const Quantize &store = call.store, &z = call.store_activated;
  if (finds_activated(call)) {
    if (!finds_group_scales(store) || z.amax.present()) return false;
    if (store.scale.present() && !z.scale.present()) return false;
  }
  // Its padded rows are those of the gradients.
  return is_fp8(z.cross_values.dtype) && z.rule == "fp32" && z.transposed && store.cross_values.present() &&
         z.segment == store.segment && z.block == store.block;
}

// The quantiser's own, the first tail row, then partial sums of rows.
size_t activated_store_bytes(const ActivatedStore& call) {
  if (!call.row_sum.present()) return partials_at(call);
  return partials_at(call) + sizeof(float) * size_t(call.grad.dims[0] * column_tiles_of(call.grad.dims[1]));
}

void launch_activated_store(const ActivatedStore& call, const Context& context) {
  Problem all = {};
  all.spec = activation_spec(call.activation);
  const bool gated = is_gated(all.spec.kind);
  const int64_t width = activated_width(call, gated);
  all.hidden = HiddenRows::of(call.hidden, call.activation, gated, width);
  all.grad = data_of<const uint16_t>(call.grad);
  all.row_scale = data_of<const float>(call.row_scale);
  char* behind = static_cast<char*>(context.workspace) + partials_at(call);
  const auto problem_of = [&](const StoreLaunch& p) {
    Problem problem = all;
    problem.store = p;
    problem.store.width = width;
    if (finds_activated(call)) {
      problem.activated_amax = p.scan.rotated;  // nothing is rotated here
      problem.store.scale_other = data_of<const float>(call.store_activated.scale);
    }
    return problem;
  };
  launch_tiles<StoreLaunch>(
      call.store, context,
      [&](const StoreLaunch& p, const LaunchOptions& how) { run_activated_groups(call, problem_of(p), false, how); },
      [&](const StoreLaunch& p, const LaunchOptions& how) {
        Problem found = problem_of(p);
        found.result = data_of<uint16_t>(call.result);
        found.activated = data_of<uint16_t>(call.activated);
        found.clear_tail = call.zero_tail != 0;
        if (gated && found.grad && p.block != 0 && p.forms[0].values) {
          found.straddle = static_cast<int>(column_tiles_of(width) * kStoreColumns - width);
        }
        if (call.store_activated.cross_values.present()) {
          found.store_activated = store_problem(call.store_activated, context);
          if (finds_activated(call)) found.store_activated.scan.amax = p.scan.rotated;
        }
        if (call.row_sum.present()) {
          found.valid_rows = reinterpret_cast<int32_t*>(behind) - 64;
          found.partials = reinterpret_cast<float*>(behind);
        }
        p.block == 0 ? run_activated_groups(call, found, true, how) : run_blocks(call, found, how);
        if (!found.partials || p.rows == 0) return;
        sum_partials<<<partial_blocks(p.rows), kPartialThreads, 0, how.stream>>>(
            found.partials, found.valid_rows, data_of<const float>(call.row_base), call.row_sum.as<float>(), p.rows,
            static_cast<int>(column_tiles_of(width)));
        GROUPED_CUDA_CHECK(cudaGetLastError());
      });
}

}  // namespace grouped
