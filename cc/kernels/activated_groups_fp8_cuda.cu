// Activated rows, or gradients at hidden rows, of bf16 as FP8 codes with a scale per group, given or found, in one
// pass: a value has one code then, whatever the form, so it is made once. The plain row is in memory nowhere, unless it
// is asked for. activated_store_fp8_cuda.cu has blocks of 128.
//
// Each block draws tiles of 128 rows x 128 activated columns of one group, 256 threads with 8 columns of 8 rows each:
//
//   cp.async, 16 bytes per row: gate, linear half, dz --> rings of 4 rows, each thread's own, 32 or 48 KiB per block
//        ^ row i + 4, of this tile or the next, as soon as row i is in registers: no barrier, and none waits for a tile
//   once per row: act(h), or both halves of dz * act'(h), * row scale, rounded --> * scale of the group --> codes
//        --> rows: 8 bytes per lane, lines of 128
//        --> columns: 16 KiB of shared memory for each half, and for act(h) where it is wanted beside gradients
//        beside, where wanted: amaxes, act(h) and the plain gradients to memory, <dz, act(h)> over 16 lanes to a
//        partial sum of the row and column tile
//   once per tile, where columns are wanted: 4 x 4 bytes transposed in registers --> 16 rows per thread, lines of
//        128 bytes
//
// Two barriers per tile. Gradients: 128 registers, at most 109 KiB, two blocks per SM of Hopper; forward 80, 61 KiB,
// three. Row sums are added by a launch behind.
//
// Under current scaling a launch before finds the amaxes (measure_activated_groups), from the same rings: a warp makes
// a row's values only where a bound (activation_bounds.cuh) reaches what is known of its group, from memory or from the
// block's other warps. Under delayed scaling the launch that stores does so first with rows of groups that have not
// started (start_groups).
//
// Memory and issue slots bound it about equally: gradients read 6 bytes per activated column and write 2 to 5, and take
// some 350 instructions for eight columns of SwiGLU, more of the time the lower the clock is. So the loop over rows
// is inside of the choice of a kind, where gated or not is a constant, and addresses go on by additions.
#include "cc/device/quantize/activated_fp8.cuh"
#include "cc/device/quantize/activation_bounds.cuh"

namespace grouped {
namespace {

using namespace device;

constexpr int kAhead = 4;  // rows of a thread under way
static_assert(kVector % kAhead == 0, "a row's place in the ring is its own");

using Tile = Shape<false>;
using Ring = uint4[kAhead][kStoreThreads];
constexpr int kRing = sizeof(Ring) / sizeof(uint4);

struct Shared : ActivatedShared {
  Amaxes known[2];  // a lower bound of what the group of a turn's tile has, by turns
};

template <bool kGrad>
constexpr int kBlocks = kGrad ? 2 : 3;

// Codes of a tile, a row of 128 bytes. Words of row r are swizzled by r / 16, which a warp of writers has in common and
// lanes that read the same word of different rows have not.
struct Codes {
  alignas(16) uint32_t words[kStoreRows][kStoreColumns / 4];

  __device__ static int swizzled(int word, int chunk) { return word ^ 4 * chunk; }
  // Of eight columns; those of the next rows, up to a multiple of 16, are kPitch further on each.
  static constexpr int kPitch = kStoreColumns / sizeof(uint2);
  __device__ uint2* place(int row, int column) {
    return reinterpret_cast<uint2*>(&words[row][swizzled(column / 4, row / 16)]);
  }
};
static_assert(16 % kVector == 0, "rows of a thread are one run of places");

// How many of these a tile has.
__host__ __device__ inline int transposed_of(const ActivatedProblem& p) {
  return p.store.forms[1].values ? halves_of(p) + (has_activated(p) ? 1 : 0) : 0;
}

__device__ inline Sources sources_of(const ActivatedProblem& p, const StoreTile& tile, bool exists) {
  const Tile at;
  return Sources(p, tile.source + at.row, static_cast<int>(tile.column) + at.column,
                 exists && at.column < tile.columns ? tile.rows - at.row : 0);
}

// Starts the loads of a row, whose place in the first ring is `to`, and goes on to the next. kGated is p.hidden.gated,
// a constant where the kind of activation is one.
template <bool kGrad, bool kGated>
__device__ __forceinline__ void load_row(const ActivatedProblem& p, Sources& from, bool exists, uint4* to) {
  copy_vector(to, from.hidden, exists);
  if (kGated) copy_vector(to + kRing, from.hidden + p.hidden.block, exists);
  if (kGrad) copy_vector(to + (kGated ? 2 : 1) * kRing, from.grad, exists);
  commit_copies();
  from.hidden += (kGated ? 2 : 1) * int64_t{p.hidden.width};
  if (kGrad) from.grad += p.hidden.width;
}

// Row i of a tile, out of the rings; the row kAhead behind it, of the tile or of `next`, is asked for in its place.
template <bool kGrad, bool kGated>
__device__ __forceinline__ void take_row(const ActivatedProblem& p, const StoreTile& next, bool loads, int i,
                                         Ring* ring, Sources& ahead, uint4& gate, uint4& linear, uint4& grad) {
  wait_copies<kAhead - 1>();
  uint4* mine = &ring[0][i % kAhead][threadIdx.x];
  gate = mine[0];
  if (kGated) linear = mine[kRing];
  if (kGrad) grad = mine[(kGated ? 2 : 1) * kRing];
  if (i == kVector - kAhead) ahead = sources_of(p, next, loads);
  load_row<kGrad, kGated>(p, ahead, (i + kAhead) % kVector < ahead.count, mine);
}

template <class T>
__device__ inline uint2 codes_of(const uint4& bits, float factor) {
  const auto pair = [&](int i) {
    return encode_pair<T>(fl_mul(value_at<DType::bf16>(bits, i), factor),
                          fl_mul(value_at<DType::bf16>(bits, i + 1), factor));
  };
  return make_uint2(joined(pair(0), pair(2)), joined(pair(4), pair(6)));
}

__device__ inline uint32_t larger(uint32_t found, const uint4& bits) {
  return __vmaxu2(__vmaxu2(found, __vmaxu2(bits.x & kMagnitudes, bits.y & kMagnitudes)),
                  __vmaxu2(bits.z & kMagnitudes, bits.w & kMagnitudes));
}

__device__ inline float factor_of(const StoreProblem& p, int group) {
  return group_scale_of(p.scan, p.rule, true, p.scale, false, group).scale;
}

// Whether a call wants both forms of gradients, and nothing in plain.
__device__ inline bool is_usual(const ActivatedProblem& p) {
  return p.store.forms[0].values && p.store.forms[1].values && !p.activated && !p.result;
}

// Rows of a tile, while the first of `next` are asked for: the largest magnitude of the result, and codes, in
// `transposed` those of each half of the result and of act(h). kUsual: is_usual(), which leaves most branches out of a
// row.
template <ActivationKind kKind, bool kGrad, bool kUsual>
__device__ __forceinline__ uint32_t activate_rows_of(const ActivatedProblem& p, const StoreTile& tile,
                                                     const StoreTile& next, bool loads, Ring* ring, Codes* transposed) {
  using Act = ActivationOf<kKind>;
  constexpr bool kGated = is_gated(kKind), kTwo = kGrad && kGated;
  constexpr int kCodes = sizeof(Codes) / sizeof(uint2);
  const Tile at;
  const bool by_rows = kUsual || p.store.forms[0].values, by_columns = kUsual || p.store.forms[1].values;
  const bool sees = p.store.measure, plain = kGrad && !kUsual;
  const bool stores_activated = kGrad && has_activated(p), sums = kGrad && p.partials != nullptr;
  const int64_t source = tile.source + at.row, width = p.hidden.width, pitch = hidden_pitch(p);
  const int column = static_cast<int>(tile.column) + at.column, block = p.hidden.block;
  const int rows = tile.rows - at.row, count = at.column < tile.columns ? rows : 0;  // of this thread that exist
  const int first = kGrad ? p.hidden.gate_column(column) : column;
  const float factor = factor_of(p.store, tile.group);
  float activated_factor = 1.0f;
  if (stores_activated) activated_factor = factor_of(p.store_activated, tile.group);
  uint8_t* codes = p.store.forms[0].values + source * p.store.forms[0].pitch + first;
  uint2* const first_place = transposed->place(at.row, at.column);
  Sources ahead = sources_of(p, tile, true);
  ahead.hidden += kAhead * pitch, ahead.grad += kAhead * width;
  uint32_t largest = 0;

  const auto encode = [&](const uint4& low, const uint4& high, uint2(&made)[2]) {
    with_type(p.store.type, [&](auto type) {
      made[0] = codes_of<decltype(type)>(low, factor);
      if (kTwo) made[1] = codes_of<decltype(type)>(high, factor);
    });
  };
  const auto encode_activated = [&](const uint4& bits) {
    uint2 made;
    with_type(p.store_activated.type, [&](auto type) { made = codes_of<decltype(type)>(bits, activated_factor); });
    return made;
  };
  // Padding holds the codes of zeros.
  uint2 none[2] = {}, none_activated = {};
  if (by_columns) encode(uint4{}, uint4{}, none);
  if (stores_activated) none_activated = encode_activated(uint4{});
#pragma unroll 1
  for (int i = 0; i < kVector; ++i) {
    uint4 gate, linear = {}, t = {};
    take_row<kGrad, kGated>(p, next, loads, i, ring, ahead, gate, linear, t);
    uint2 made[2] = {none[0], none[1]}, made_activated = none_activated;
    float sum = 0.0f;
    if (i < count) {
      const float scale = p.row_scale ? p.row_scale[source + i] : 1.0f;
      if constexpr (kGrad) {
        sum = gradient_row<Act>(p.spec, gate, linear, t, scale, sums);
      } else {
        gate = activated_row<Act>(p.spec, gate, linear, scale);
      }
      if (sees) largest = larger(largest, gate);
      if (sees && kTwo) largest = larger(largest, linear);
      encode(gate, linear, made);
      if (by_rows) {
        uint8_t* to = codes + i * p.store.forms[0].pitch;
        *reinterpret_cast<uint2*>(to) = made[0];
        if (kTwo) *reinterpret_cast<uint2*>(to + block) = made[1];
      }
      if (stores_activated) made_activated = encode_activated(t);
      if (plain && p.activated) {
        *reinterpret_cast<uint4*>(p.activated + (source + i) * width + column) = t;
      }
      if (plain && p.result) {
        uint16_t* to = p.result + (source + i) * pitch + first;
        *reinterpret_cast<uint4*>(to) = gate;
        if (kGated) *reinterpret_cast<uint4*>(to + block) = linear;
      }
    }
    if (by_columns) {
      uint2* place = first_place + i * Codes::kPitch;
      place[0] = made[0];
      if (kTwo) place[kCodes] = made[1];
      if (stores_activated) place[(kTwo ? 2 : 1) * kCodes] = made_activated;
    }
    if (sums) {
      sum = sum_of_lanes<kLanes>(sum);
      if (threadIdx.x % kLanes == 0 && i < rows)
        p.partials[tile.column / kStoreColumns * p.store.rows + source + i] = sum;
    }
  }
  return both(largest);
}

template <bool kGrad, bool kUsual>
__device__ __forceinline__ uint32_t activate_rows(const ActivatedProblem& p, const StoreTile& tile,
                                                  const StoreTile& next, bool loads, Ring* ring, Codes* transposed) {
  uint32_t largest = 0;
  with_activation(p.spec.kind, [&](auto kind) {
    largest = activate_rows_of<kind, kGrad, kUsual>(p, tile, next, loads, ring, transposed);
  });
  return largest;
}

// The amaxes of a tile's values, but of those alone that may be above `known`, which all warps raise.
template <ActivationKind kKind, bool kGrad>
__device__ __forceinline__ Amaxes measure_rows_of(const ActivatedProblem& p, const StoreTile& tile,
                                                  const StoreTile& next, bool loads, Ring* ring, Amaxes* known) {
  using Act = ActivationOf<kKind>;
  constexpr bool kGated = is_gated(kKind);
  const Tile at;
  const int lane = threadIdx.x % 32, rows = tile.rows - at.row, count = at.column < tile.columns ? rows : 0;
  const bool sees_activated = kGrad && p.activated_amax != nullptr;
  const ActivationBounds<kKind, kGrad> bounds_of(p.spec);
  volatile Amaxes* const seen = known;
  Sources ahead = sources_of(p, tile, true);
  ahead.hidden += kAhead * hidden_pitch(p), ahead.grad += kAhead * int64_t{p.hidden.width};
  float scales = 1.0f;  // of one row per lane
  if (p.row_scale && lane % kLanes < min(rows, kVector)) scales = p.row_scale[tile.source + at.row + lane % kLanes];
  uint32_t largest = 0, largest_activated = 0;
#pragma unroll 1
  for (int i = 0; i < kVector; ++i) {
    uint4 gate, linear = {}, t = {};
    take_row<kGrad, kGated>(p, next, loads, i, ring, ahead, gate, linear, t);
    const float scale = __shfl_sync(~0u, scales, lane / kLanes * kLanes + i);
    const auto bound = bounds_of(gate, linear, t, scale);
    const bool may = bound.result >= seen->result || (sees_activated && bound.activated >= seen->activated);
    if (!__any_sync(~0u, may && i < count)) continue;
    if (i < count) {
      if constexpr (kGrad) {
        gradient_row<Act>(p.spec, gate, linear, t, scale, false);
      } else {
        gate = activated_row<Act>(p.spec, gate, linear, scale);
      }
      largest = larger(largest, gate);
      if (kGrad && kGated) largest = larger(largest, linear);
      if (sees_activated) largest_activated = larger(largest_activated, t);
    }
    const auto raise = [&](uint32_t* amax, uint32_t found) {
      found = __reduce_max_sync(~0u, found);
      if (lane == 0) atomicMax(amax, amax_of<DType::bf16>(found));
    };
    raise(&known->result, both(largest));
    if (sees_activated) raise(&known->activated, both(largest_activated));
  }
  return {amax_of<DType::bf16>(both(largest)), amax_of<DType::bf16>(both(largest_activated))};
}

template <bool kGrad>
__device__ __forceinline__ Amaxes measure_rows(const ActivatedProblem& p, const StoreTile& tile, const StoreTile& next,
                                               bool loads, Ring* ring, Amaxes* known) {
  Amaxes largest = {};
  with_activation(p.spec.kind,
                  [&](auto kind) { largest = measure_rows_of<kind, kGrad>(p, tile, next, loads, ring, known); });
  return largest;
}

// Transposed codes of a tile to lines of `rows` bytes, a multiple of 16.
__device__ inline void put_lines(const StoreProblem& p, const StoreTile& tile, const Codes& codes, int rows) {
  const int chunk = threadIdx.x % 8, word = threadIdx.x / 8;  // 16 rows, 4 columns
  uint32_t lines[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t w[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) w[r] = codes.words[16 * chunk + 4 * k + r][Codes::swizzled(word, chunk)];
    uint32_t columns[4];
    turn_codes(w, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) lines[c][k] = columns[c];
  }
  if (chunk * 16 >= rows) return;
  uint8_t* to = p.forms[1].values + (tile.column + 4 * word) * p.forms[1].pitch + tile.padded + chunk * 16;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (4 * word + c < tile.columns) {
      *reinterpret_cast<uint4*>(to + c * p.forms[1].pitch) =
          make_uint4(lines[c][0], lines[c][1], lines[c][2], lines[c][3]);
    }
  }
}

// Asks for the first rows of a tile that none goes before.
template <bool kGrad>
__device__ __forceinline__ void begin_tile(const ActivatedProblem& p, const StoreTile& tile, Ring* ring) {
  Sources from = sources_of(p, tile, true);
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    uint4* to = &ring[0][i][threadIdx.x];
    p.hidden.gated ? load_row<kGrad, true>(p, from, i < from.count, to)
                   : load_row<kGrad, false>(p, from, i < from.count, to);
  }
}

// Raises the amaxes of groups that have not started. NOTE: in first steps alone. It is called where nothing is alive
// yet and finds everything again, because inlined, or called later, it would cost other steps registers.
template <bool kGrad>
__device__ __noinline__ void start_groups(const ActivatedProblem& p, uint32_t column_tiles, Ring* ring, Shared* s) {
  const GroupTable table(p.store, s + 1);
  scan_sizes<Tile::kRows>(p.store, table, s->sums);
  const uint32_t tiles = tiles_in_all<Tile::kRows>(p.store, table, column_tiles);
  measure_first(p.store, tiles, &s->turns.item[0], [&](uint32_t item) {
    StoreTile tile;
    if (!find_in_order<Tile::kRows, Tile::kColumns>(p.store, table, item, column_tiles, &tile)) return false;
    if (tile.group == p.store.scan.count || has_started(p.store, tile.group)) return true;
    begin_tile<kGrad>(p, tile, ring);
    if (threadIdx.x == 0) s->known[0] = {};
    __syncthreads();
    const Amaxes largest = measure_rows<kGrad>(p, tile, tile, false, ring, s->known);
    wait_all_copies();
    raise_amax(p.store.scan.amax + tile.group, largest.result);
    if (kGrad && p.activated_amax) raise_amax(p.activated_amax + tile.group, largest.activated);
    return true;
  });
}

// The amaxes of all groups, into p.store.raised and p.activated_amax.
template <bool kGrad>
__global__ void __launch_bounds__(kStoreThreads, kBlocks<kGrad>)
    measure_activated_groups(const __grid_constant__ ActivatedProblem p, uint32_t column_tiles) {
  extern __shared__ uint4 dynamic_shared[];
  Ring* ring = reinterpret_cast<Ring*>(dynamic_shared);
  Shared* s = reinterpret_cast<Shared*>(ring + operands_of(p));
  const GroupTable table(p.store, s + 1);
  uint32_t* const amaxes_of_activated = kGrad ? p.activated_amax : nullptr;
  if (threadIdx.x == 0) s->known[0] = {};
  Turns turns(p.store, &s->turns, amaxes_of_activated);
  scan_sizes<Tile::kRows>(p.store, table, s->sums);
  const int count = p.store.scan.count;
  const auto find = [&](uint32_t item, StoreTile* found) {
    return find_in_order<Tile::kRows, Tile::kColumns>(p.store, table, item, column_tiles, found) &&
           found->group < count;
  };
  StoreTile tile;
  StoreTile& next = s->next[threadIdx.x / 32];
  bool more = find(blockIdx.x, &tile);
  if (more) begin_tile<kGrad>(p, tile, ring);
  for (; more; tile = next, turns.advance()) {
    turns.draw();
    more = find_next(next, [&](StoreTile* found) { return find(turns.next(), found); });
    Amaxes known = {};  // of the next tile's group, by now
    if (threadIdx.x == 0 && more) {
      known.result = load_relaxed(p.store.raised + next.group);
      if (amaxes_of_activated) known.activated = load_relaxed(amaxes_of_activated + next.group);
    }
    const Amaxes largest = measure_rows<kGrad>(p, tile, next, more, ring, &s->known[turns.odd()]);
    if (threadIdx.x == 0) s->known[turns.odd() ^ 1] = known;
    turns.meet();
    turns.see(largest.result, tile.group);
    if (amaxes_of_activated) turns.see_other(largest.activated);
  }
  wait_all_copies();
  turns.finish();
}

template <bool kGrad>
__global__ void __launch_bounds__(kStoreThreads, kBlocks<kGrad>)
    store_activated_groups(const __grid_constant__ ActivatedProblem p, uint32_t column_tiles) {
  extern __shared__ uint4 dynamic_shared[];
  const bool stores_activated = kGrad && has_activated(p);
  Ring* ring = reinterpret_cast<Ring*>(dynamic_shared);
  Codes* transposed = reinterpret_cast<Codes*>(ring + operands_of(p));
  Shared* s = reinterpret_cast<Shared*>(transposed + transposed_of(p));
  if (p.store.starting && must_start(p.store)) start_groups<kGrad>(p, column_tiles, ring, s);
  const GroupTable table(p.store, s + 1);
  Turns turns(p.store, &s->turns);
  scan_sizes<Tile::kRows>(p.store, table, s->sums);
  const int count = p.store.scan.count;
  const auto find = [&](uint32_t item, StoreTile* found) {
    return find_in_order<Tile::kRows, Tile::kColumns>(p.store, table, item, column_tiles, found);
  };
  StoreTile tile;
  StoreTile& next = s->next[threadIdx.x / 32];
  bool more = find(blockIdx.x, &tile);
  if (more && tile.group < count) begin_tile<kGrad>(p, tile, ring);
  if (blockIdx.x == 0) {
    store_group_scales(p.store);
    if (stores_activated) store_group_scales(p.store_activated);
    if (p.valid_rows && threadIdx.x == 0) *p.valid_rows = table.offsets[count];
  }
  for (; more; tile = next, turns.advance()) {
    turns.draw();
    more = find_next(next, [&](StoreTile* found) { return find(turns.next(), found); });
    const bool loads = more && next.group < count;
    if (tile.group == count) {
      activate_nothing(p, tile);
      if (loads) begin_tile<kGrad>(p, next, ring);
      turns.meet();
      continue;
    }
    const uint32_t largest = kGrad && is_usual(p) ? activate_rows<kGrad, kGrad>(p, tile, next, loads, ring, transposed)
                                                  : activate_rows<kGrad, false>(p, tile, next, loads, ring, transposed);
    turns.meet();
    if (p.store.measure) turns.see(amax_of<DType::bf16>(largest), tile.group);
    if (!p.store.forms[1].values) continue;
    const int segment = p.store.segment, rows = segment ? (tile.rows + segment - 1) / segment * segment : tile.rows;
#pragma unroll 1
    for (int half = 0; half < halves_of(p); ++half) {
      put_lines(p.store, result_tile(p, tile, half), transposed[half], rows);
    }
    if (stores_activated) put_lines(p.store_activated, tile, transposed[halves_of(p)], rows);
    __syncthreads();  // before the next tile's codes
  }
  wait_all_copies();
  turns.finish();
}

template <bool kGrad, bool kStore>
void run(const ActivatedStore& call, const ActivatedProblem& p, const LaunchOptions& how) {
  constexpr int kOperands = kGrad ? 3 : 2, kTransposed = !kStore ? 0 : kGrad ? 3 : 1;
  static_assert(kOperands * sizeof(Ring) + kTransposed * sizeof(Codes) ==
                units_with_group_scales(kOperands, kTransposed) * kActivatedUnit);
  constexpr auto kKernel = kStore ? store_activated_groups<kGrad> : measure_activated_groups<kGrad>;
  run_activated<kKernel>(call, p, kBlocks<kGrad>,
                         kOperands * sizeof(Ring) + kTransposed * sizeof(Codes) + sizeof(Shared),
                         static_cast<int>(operands_of(p) * sizeof(Ring) +
                                          (kStore ? transposed_of(p) : 0) * sizeof(Codes) + sizeof(Shared)),
                         how);
}

}  // namespace

void run_activated_groups(const ActivatedStore& call, const ActivatedProblem& p, bool store, const LaunchOptions& how) {
  if (p.grad) return store ? run<true, true>(call, p, how) : run<true, false>(call, p, how);
  store ? run<false, true>(call, p, how) : run<false, false>(call, p, how);
}

}  // namespace grouped
