// Activated rows, or gradients at hidden rows, of bf16 as FP8 codes in one pass: blocks of 128 here, scales of groups
// in activated_groups_fp8_cuda.cu. The plain row is in memory nowhere, unless it is asked for.
//
// Each block draws tiles of 128 rows x 128 activated columns of one group, 256 threads with 8 columns of 8 rows
// each:
//
//   cp.async, 16 bytes per row: gate, linear half, dz --> own slots of shared memory, 64 or 96 KiB
//        ^ the next tile's, each as soon as the slots that it takes are not read any more
//   once per tile, a row at a time: act(h), or both halves of dz * act'(h), * row scale, rounded --> over the gate and
//        the linear half; beside, where wanted: act(h) and the plain gradients to memory, <dz, act(h)> over 16 lanes
//        to a partial sum of the row and column tile
//   for act(h), where its transposed codes are wanted beside gradients, and each half of the result: 32 registers
//        --> rows and columns as in quantize_fp8_cuda.cu; transposed codes take the slots of what has been read
//
// Where F is no multiple of 128, a block of scales along rows has the last gates and the first linear columns. The tile
// of these gates then draws these linear columns too, into the lanes that would have nothing, and the linear half's
// tiles are shifted by as many columns (`straddle`), so that each is whole blocks: a tile takes the linear gradients
// behind its own columns from memory, where its neighbours, which are under way, have just read them.
//
// Two blocks per SM of Hopper (128 registers, at most 109 KiB); row sums are added by a launch behind. Gradients read 6
// bytes per activated column and write 2 to 5; instructions take longer than these.
#include <algorithm>
#include <string>

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

constexpr int kBlocksOfSm = 2;  // three, with fewer registers, are slower where they fit
using ColumnScratch = device::ColumnScratch<DType::bf16>;
using Slots = uint4[kVector][kStoreThreads];
using Tile = Shape<false>;

// Arrays of slots: one per operand. Forward keeps the first, gradients as many as there are halves; transposed codes
// take the place of the last, or of one more where all are kept.
__host__ __device__ inline int slots_of(const Problem& p) { return slots_for(operands_of(p)); }
__host__ __device__ inline int scratch_of(const Problem& p) { return slots_of(p) - 1; }

// The activated columns that a thread draws: its own of the tile, or, behind the last of them, the first ones, whose
// linear gradients belong to the block of the last gates.
struct Drawn {
  bool own, exists;
  int column;
};

__device__ inline Drawn drawn_columns(const Problem& p, const StoreTile& tile) {
  const Tile at;
  const bool own = at.column < tile.columns;
  const int first = at.column - tile.columns;
  if (own || p.straddle == 0) return {own, own, static_cast<int>(tile.column) + at.column};
  return {false, first < p.hidden.width, first};
}

// Where halves straddle blocks: linear gradients of columns behind the tile's own, into the last lanes' slots.
template <class Act>
__device__ inline void complete_block(const Problem& p, const StoreTile& tile, Slots& linears) {
  const Tile at;
  const int64_t width = p.hidden.width, source = tile.source + at.row;
  const int rows = tile.rows - at.row, lanes = p.straddle / kVector;
  uint4* to = &linears[0][threadIdx.x / kLanes * kLanes + kLanes - lanes];
#pragma unroll 1
  for (int item = threadIdx.x % kLanes; item < lanes * kVector; item += kLanes) {
    const int i = item / lanes, lane = item % lanes;
    const int64_t row = source + i, column = tile.column + kStoreColumns + lane * kVector;
    uint4 linear = {};
    if (i < rows && column < width) {
      const uint16_t* hidden = static_cast<const uint16_t*>(p.hidden.data) + row * 2 * width + column;
      uint4 gate = *reinterpret_cast<const uint4*>(hidden);
      linear = *reinterpret_cast<const uint4*>(hidden + width);
      uint4 grad = *reinterpret_cast<const uint4*>(p.grad + row * width + column);
      gradient_row<Act>(p.spec, gate, linear, grad, p.row_scale ? p.row_scale[row] : 1.0f, false);
    }
    to[i * kStoreThreads + lane] = linear;
  }
}

// What the slots of a tile hold, as it is stored: act over the gates, or the gradients of both halves over these, and
// act over dz where it is stored as well. Inlined, long as it is: a function of its own knows neither that `p` never
// changes nor that slots are shared memory.
template <bool kStraddles>
__device__ __forceinline__ void activate_tile(const Problem& p, const StoreTile& tile, Slots* slots) {
  const Tile at;
  const bool gated = p.hidden.gated;
  const int64_t source = tile.source + at.row, width = p.hidden.width, pitch = hidden_pitch(p);
  const Drawn drawn = drawn_columns(p, tile);
  const int column = drawn.column;
  const int count = drawn.exists ? tile.rows - at.row : 0;  // rows of this thread that exist
  const float* row_scale = p.row_scale ? p.row_scale + source : nullptr;
  uint4 *gates = &slots[0][0][threadIdx.x], *linears = gated ? &slots[1][0][threadIdx.x] : gates;
  const ActivationSpec spec = p.spec;
  if (!p.grad) {
    with_activation(spec.kind, [&](auto kind) {
#pragma unroll 1
      for (int i = 0; i < kVector; ++i) {
        const float scale = row_scale && i < count ? row_scale[i] : 1.0f;
        const uint4 t = activated_row<ActivationOf<decltype(kind)::value>>(spec, gates[i * kStoreThreads],
                                                                           linears[i * kStoreThreads], scale);
        gates[i * kStoreThreads] = i < count ? t : uint4{};
      }
    });
    return;
  }
  uint4* grads = &slots[gated ? 2 : 1][0][threadIdx.x];
  uint16_t* activated = p.activated && drawn.own ? p.activated + source * width + column : nullptr;
  uint16_t* result = p.result && drawn.own ? p.result + source * pitch + p.hidden.gate_column(column) : nullptr;
  float* partials = p.partials ? p.partials + tile.column / kStoreColumns * p.store.rows + source : nullptr;
  const int block = p.hidden.block, rows = tile.rows - at.row;
  const bool stores = has_activated(p);
  const int shift = p.straddle / kVector;  // lanes from a linear column's gate to the column in its own block
  with_activation(spec.kind, [&](auto kind) {
#pragma unroll 1
    for (int i = 0; i < kVector; ++i) {
      const bool exists = i < count;
      const float scale = row_scale && exists ? row_scale[i] : 1.0f;
      uint4 gate = gates[i * kStoreThreads], linear = linears[i * kStoreThreads], t = grads[i * kStoreThreads];
      float sum = gradient_row<ActivationOf<decltype(kind)::value>>(spec, gate, linear, t, scale, partials != nullptr);
      if (!exists) gate = linear = uint4{}, sum = 0.0f;
      if (kStraddles && shift) {
        __syncwarp();  // all lanes have read the row
        if (threadIdx.x % kLanes >= shift) linears[i * kStoreThreads - shift] = drawn.own ? linear : uint4{};
        gates[i * kStoreThreads] = drawn.own ? gate : linear;
        if (!drawn.own) sum = 0.0f;
      } else {
        if (gated) linears[i * kStoreThreads] = linear;
        gates[i * kStoreThreads] = gate;
      }
      if (stores) grads[i * kStoreThreads] = exists ? t : uint4{};
      if (exists && activated) *reinterpret_cast<uint4*>(activated + i * width) = t;
      if (exists && result) {
        *reinterpret_cast<uint4*>(result + i * pitch) = gate;
        if (gated) *reinterpret_cast<uint4*>(result + i * pitch + block) = linear;
      }
      if (partials) put_partial(sum, partials + i, i < rows);
    }
    if (kStraddles && shift) {
      __syncwarp();
      complete_block<ActivationOf<decltype(kind)::value>>(p, tile, slots[1]);
      __syncwarp();
    }
  });
}

// Starts loads of a tile's operand `which`: gates, linear halves (where there are any), dz (with gradients).
__device__ inline void load_operand(const Problem& p, const StoreTile& tile, int which, Slots* slots) {
  const Tile at;
  const Drawn drawn = drawn_columns(p, tile);
  const int count = drawn.exists ? tile.rows - at.row : 0;  // rows of this thread that exist
  const int column = count > 0 ? drawn.column : 0;
  const int64_t row = tile.source + at.row;
  const bool grad = p.grad && which == (p.hidden.gated ? 2 : 1);
  const int64_t pitch = grad ? int64_t{p.hidden.width} : hidden_pitch(p);
  const uint16_t* from = grad ? p.grad + row * pitch + column
                              : static_cast<const uint16_t*>(p.hidden.data) + row * pitch +
                                    p.hidden.gate_column(column) + which * p.hidden.block;
  uint4(&to)[kVector][kStoreThreads] = slots[which];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    copy_vector(&to[i][threadIdx.x], from, i < count);
    from += pitch;
  }
  commit_copies();
}

// The forms of one half of the result, out of `from`, whose memory is free when `taken` is called; `measure`: its amax
// is wanted. `scratch` is that of an operand that has been read.
template <int kForms, class Taken>
__device__ inline void store_half(const StoreProblem& p, bool measure, const StoreTile& tile, const Slots& from,
                                  ColumnScratch* scratch, Turns& turns, Taken taken) {
  uint4 raw[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) raw[i] = from[i][threadIdx.x];
  uint32_t amax = 0;
  if (measure) amax = largest(raw);
  taken();
  if (measure) turns.see(amax_of<DType::bf16>(amax), tile.group);
  float factors[kVector];
  if constexpr ((kForms & kRows) != 0) {
    row_factors<DType::bf16, kStoreColumns, Tile>(p, tile, raw, factors);
    const QuantizedForm& form = p.forms[0];
    with_type(p.type, [&](auto type) {
      put_rows<decltype(type), DType::bf16, Tile>(tile, raw, form.values + tile.source * form.pitch + tile.column,
                                                  form.pitch, tile.rows, [&](int i, int) { return factors[i]; });
    });
  }
  if constexpr ((kForms & kColumns) != 0) {
    if constexpr (kForms == kRows + kColumns) forget_values(raw);
    __syncthreads();  // all threads have read what the scratch overwrites, and the codes of the half before
    const int count = p.segment ? (tile.rows + p.segment - 1) / p.segment * p.segment : tile.rows;
    column_factors<DType::bf16, kStoreRows>(p, tile, raw, count, scratch, factors);
    with_type(p.type,
              [&](auto type) { put_transposed<decltype(type), DType::bf16>(p, tile, raw, factors, count, scratch); });
  }
}

template <int kForms>
__global__ void __launch_bounds__(kStoreThreads, kBlocksOfSm)
    store_activated_blocks(const __grid_constant__ Problem p, uint32_t column_tiles) {
  extern __shared__ uint4 dynamic_shared[];
  Slots* slots = reinterpret_cast<Slots*>(dynamic_shared);
  const int operands = operands_of(p), halves = halves_of(p);
  ColumnScratch* scratch = reinterpret_cast<ColumnScratch*>(slots + scratch_of(p));
  Shared* s = reinterpret_cast<Shared*>(slots + slots_of(p));
  const GroupTable table(p.store, s + 1);
  Turns turns(p.store, &s->turns);
  scan_sizes<Tile::kRows>(p.store, table, s->sums);
  const int count = p.store.scan.count;
  if (p.valid_rows && blockIdx.x == 0 && threadIdx.x == 0) *p.valid_rows = table.offsets[count];
  StoreTile tile;
  StoreTile& next = s->next[threadIdx.x / 32];
  const auto find = [&](uint32_t item, StoreTile* found) {
    return find_in_order<Tile::kRows, Tile::kColumns>(p.store, table, item, column_tiles, found);
  };
  bool more = find(blockIdx.x, &tile);
  for (int i = 0; i < operands && more && tile.group < count; ++i) load_operand(p, tile, i, slots);
  for (; more; tile = next, turns.advance()) {
    turns.draw();
    more = find_next(next, [&](StoreTile* found) { return find(turns.next(), found); });
    const bool loads = more && next.group < count;
    if (tile.group == count) {
      activate_nothing(p, tile);
      for (int i = 0; i < operands && loads; ++i) load_operand(p, next, i, slots);
      turns.meet();
      continue;
    }
    wait_all_copies();
    turns.meet();
    activate_tile<(kForms & kRows) != 0>(p, tile, slots);
    if constexpr ((kForms & kColumns) != 0) {  // first, for it is where the scratch will be
      if (has_activated(p)) {
        store_half<kColumns>(p.store_activated, false, tile, slots[scratch_of(p)], scratch, turns, [] {});
      }
    }
    // The next tile's operands take the place of what has been read: of a half in registers, of what forward has no
    // more use for, of the scratch last.
    for (int half = 0; half < halves; ++half) {
      store_half<kForms>(p.store, p.store.measure, result_tile(p, tile, half), slots[half], scratch, turns, [&] {
        if (loads) load_operand(p, next, half, slots);
      });
    }
    if constexpr ((kForms & kColumns) != 0) __syncthreads();  // the codes have left the scratch
    for (int i = halves; i < operands && loads; ++i) load_operand(p, next, i, slots);
  }
  turns.finish();
}

int64_t activated_width(const ActivatedStore& call, bool gated) { return call.hidden.dims[1] / (gated ? 2 : 1); }

template <int kForms>
void run(const ActivatedStore& call, const Problem& p, const LaunchOptions& how) {
  static_assert(sizeof(ColumnScratch) <= sizeof(Slots), "the scratch has the memory of one array of slots");
  static_assert(sizeof(Slots) * slots_for(3) == kActivatedUnit * units_with_block_scales(3));
  run_activated<store_activated_blocks<kForms>>(call, p, kBlocksOfSm, 3 * sizeof(Slots) + sizeof(Shared),
                                                static_cast<int>(slots_of(p) * sizeof(Slots) + sizeof(Shared)), how);
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
