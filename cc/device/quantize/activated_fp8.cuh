// What the kernels share that activate bf16 rows, or take gradients at hidden rows, and store the result as FP8 codes:
// the call as they see it, and what happens to eight columns of a row.
#pragma once

#include <algorithm>

#include "cc/api/activated.h"
#include "cc/device/common/hidden_rows.cuh"
#include "cc/device/quantize/fp8_tile.cuh"

namespace grouped {
namespace device {

struct ActivatedProblem {
  StoreLaunch store;             // but `width` counts activated columns
  StoreProblem store_activated;  // of act(h), with gradients; no cross form: it is not wanted
  ActivationSpec spec;
  HiddenRows hidden;
  uint32_t* activated_amax;  // [groups], found with those of the result; null: not wanted
  const uint16_t* grad;      // null: forward
  const float* row_scale;    // null: none
  uint16_t* result;          // null: not wanted, as the next two
  uint16_t* activated;
  float* partials;      // [column tiles, rows]
  int32_t* valid_rows;  // set to the first tail row
  bool clear_tail;
  int straddle;  // linear columns in the block of 128 that has the last gates; 0: halves of whole blocks, or no matter
  bool exchanges_over_slot;  // what threads exchange has the memory of dz: its own would cost an SM a block
};

// What a block has in shared memory beside rows and codes, which come before it, and the table, which follows it.
struct ActivatedShared {
  StoreTile next[kStoreWarps];  // of each warp, or of turns
  int64_t sums[34];
  Turns::Shared turns;
};

__host__ __device__ constexpr int halves_of(bool grad, bool gated) { return grad && gated ? 2 : 1; }
// Gates, linear halves, dz.
__host__ __device__ constexpr int operands_of(bool grad, bool gated) { return (gated ? 2 : 1) + (grad ? 1 : 0); }
__host__ __device__ inline int halves_of(const ActivatedProblem& p) {
  return halves_of(p.grad != nullptr, p.hidden.gated);
}
__host__ __device__ inline int operands_of(const ActivatedProblem& p) {
  return operands_of(p.grad != nullptr, p.hidden.gated);
}
__host__ __device__ inline bool has_activated(const ActivatedProblem& p) {
  return p.store_activated.forms[1].values != nullptr;
}

__device__ inline int64_t hidden_pitch(const ActivatedProblem& p) {
  return p.hidden.gated ? 2 * int64_t{p.hidden.width} : int64_t{p.hidden.width};
}

// Where rows are that a thread asks for next, of one activated column vector, and how many there are.
struct Sources {
  const uint16_t *hidden, *grad;
  int count;

  __device__ Sources(const ActivatedProblem& p, int64_t row, int column, int count) : count(count) {
    if (count <= 0) column = 0;
    hidden = static_cast<const uint16_t*>(p.hidden.data) + row * hidden_pitch(p) + p.hidden.gate_column(column);
    grad = p.grad + row * p.hidden.width + column;
  }
};

__device__ inline uint4 rounded(const float (&v)[kVector]) {
  const Stored8 bits = encode_stored(v, DType::bf16);
  return make_uint4(bits.words[0], bits.words[1], bits.words[2], bits.words[3]);
}

__device__ inline void decoded(const uint4& bits, float (&v)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) v[i] = value_at<DType::bf16>(bits, i);
}

// act(h) of eight columns of a row, times its scale.
template <class Act>
__device__ inline uint4 activated_row(const ActivationSpec& spec, const uint4& gate, const uint4& linear, float scale) {
  float a[kVector], u[kVector], t[kVector];
  decoded(gate, a);
  decoded(linear, u);
#pragma unroll
  for (int c = 0; c < kVector; ++c) t[c] = __fmul_rn(scale, Act::value(spec, a[c], u[c]));
  return rounded(t);
}

// The gradients over both halves, and act(h) over dz; returns <dz, act(h)> of these columns, unscaled, if it is wanted.
template <class Act>
__device__ inline float gradient_row(const ActivationSpec& spec, uint4& gate, uint4& linear, uint4& grad, float scale,
                                     bool wants_sum) {
  float a[kVector], u[kVector], t[kVector], dz[kVector], sum = 0.0f;
  decoded(gate, a);
  decoded(linear, u);
  decoded(grad, dz);
#pragma unroll
  for (int c = 0; c < kVector; ++c) {  // a and u become the derivatives
    const typename Act::Grad g = Act::grad(spec, a[c], u[c]);
    t[c] = g.t, a[c] = g.da, u[c] = g.du;
  }
  if (wants_sum) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum = __fmaf_rn(dz[c], t[c], sum);
  }
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    const float scaled = __fmul_rn(scale, dz[c]);
    t[c] = __fmul_rn(scale, t[c]);
    a[c] = __fmul_rn(scaled, a[c]);
    u[c] = __fmul_rn(scaled, u[c]);
  }
  gate = rounded(a);
  linear = rounded(u);
  grad = rounded(t);
  return sum;
}

// A row's sum over the kCount lanes of a warp that share it.
template <int kCount>
__device__ inline float sum_of_lanes(float sum) {
#pragma unroll
  for (int d = 1; d < kCount; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  return sum;
}

// Where the result's columns of a tile are, of each half. Where a block straddles the halves, the tile of the last
// gates has it whole, and the linear half's tiles begin behind it: the last one may be narrow, or have no columns.
__device__ inline StoreTile result_tile(const ActivatedProblem& p, const StoreTile& tile, int half) {
  StoreTile part = tile;
  if (!p.grad) return part;
  if (p.straddle == 0) {
    part.column = p.hidden.gate_column(static_cast<int>(tile.column)) + half * p.hidden.block;
    return part;
  }
  if (half) part.column += p.hidden.width + p.straddle;
  part.columns = max(0, min(2 * p.hidden.width - static_cast<int>(part.column), kStoreColumns));
  return part;
}

// A tile of the tail: zeros, in the plain results where they are to be cleared.
__device__ inline void activate_nothing(const ActivatedProblem& p, const StoreTile& tile) {
  for (int half = 0; half < halves_of(p); ++half) {
    store_nothing(p.store, result_tile(p, tile, half), kStoreRows, kStoreThreads);
  }
  if (has_activated(p)) store_nothing(p.store_activated, tile, kStoreRows, kStoreThreads);
  if (!p.clear_tail) return;
  for (int item = threadIdx.x; item < kStoreRows * kLanes; item += kStoreThreads) {
    const int lane = item % kLanes * kVector, column = static_cast<int>(tile.column) + lane;
    const int64_t row = tile.source + item / kLanes;
    if (lane >= tile.columns || row >= p.store.rows) continue;
    if (p.activated) *reinterpret_cast<uint4*>(p.activated + row * p.hidden.width + column) = uint4{};
    if (p.result) {
      uint16_t* to = p.result + row * hidden_pitch(p) + p.hidden.gate_column(column);
      *reinterpret_cast<uint4*>(to) = uint4{};
      if (p.hidden.gated) *reinterpret_cast<uint4*>(to + p.hidden.block) = uint4{};
    }
  }
}

}  // namespace device

inline int64_t column_tiles_of(int64_t width) { return divide_up(width, kStoreColumns); }

// What a block has beside ActivatedShared, what its threads exchange, and the table, in tiles of codes: rows of its
// operands, and where a scale belongs to a group the codes of so many results.
constexpr int kActivatedUnit = kStoreRows * kStoreColumns;
constexpr int units_with_block_scales(int operands) { return 2 * operands; }
constexpr int units_with_group_scales(int operands, int transposed) { return operands + transposed; }

// Launches kKernel, whose blocks have `bytes` of shared memory and a table of the groups behind.
template <auto kKernel>
void run_activated(const ActivatedStore& call, device::ActivatedProblem p, int most_blocks, int most_bytes, int bytes,
                   const LaunchOptions& how) {
  allow_shared_memory<kKernel>(
      std::min(most_bytes + device::GroupTable::most_bytes(kFewGroups), shared_memory_of_block()));
  bytes += device::GroupTable::bytes(p.store);
  const int64_t column_tiles = column_tiles_of(p.hidden.width);
  const int64_t tiles = most_row_tiles_of(call.store, kStoreRows) * column_tiles;
  const unsigned grid = blocks_for(tiles, most_blocks, bytes);
  if (grid == 0) return;
  ready_to_draw(&p.store, tiles, grid, how);
  kKernel<<<grid, kStoreThreads, bytes, how.stream>>>(p, static_cast<uint32_t>(column_tiles));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// activated_groups_fp8_cuda.cu: scales of groups; without forms, their amaxes.
void run_activated_groups(const ActivatedStore& call, const device::ActivatedProblem& p, bool store,
                          const LaunchOptions& how);

}  // namespace grouped
