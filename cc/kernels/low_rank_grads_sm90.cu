// Both gradients that the second factor B of a low-rank adapter takes from dy, bf16 and fp16, rank at most 32: dy is
// read once. A cluster takes group after group, each of its CTAs a slice of up to 1024 columns, 512 above rank 16; one
// CTA of 384 threads per multiprocessor.
//
//   8 warps of sums   --cp.async--> ring of stages, all but two of them ahead, also into the next group: 64 rows x 128
//                                   columns of dy, and for the first of the slice's columns the 64 x R low rows beside
//                     16 columns of B's gradient each, of every 128, summed in registers to the end of the group
//   4 warps of rows   --cp.async--> B's slice of this group and of the next
//                     16 rows of dy B^T each, over all columns of the slice
//                     --st.async--> the same warp of the next CTA, which goes on adding; the last one rounds and stores
//   barriers          a stage is there, 8 warps that copied; a stage is free, 12 warps; sums are there, and a slot of
//                     them is free, for each warp of rows
//
// The sums of dy B^T travel so that they are added in the order of the columns, as one warp alone would do it: the bits
// are those of the two products. CTAs of a cluster work on different rows at a time, each a step behind the one before.
//
//   rank            16                      32
//   shared memory   7 x 18 KiB              6 x 20 KiB           stages
//                   2 x 32 KiB              2 x 32 KiB           slices of B
//                   2 x 4 KiB               2 x 8 KiB            sums on their way
//                   8 KiB                   16 KiB               B's gradient on its way out
//                   4 KiB                   4 KiB                where groups begin
//                   210 KiB                 220 KiB
//   registers       at most 150 of 168: 64 sums of B's gradient, and 16 or 32 of low rows
#include <algorithm>
#include <atomic>
#include <string>

#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/common/group_walk.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/narrow_tiles.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kPartCols = kWideChunks * kChunk;  // of a stage
constexpr int kMostCtas = 8;                     // of a cluster
constexpr int kMostGroups = 1023;
constexpr int64_t kFewestCtas = 128;  // else two products keep more multiprocessors busy
constexpr int kSumsWarps = kPartCols / kSlab, kRowsWarps = kWideLines / kSlab;
constexpr int kSumsThreads = 32 * kSumsWarps, kRowsThreads = 32 * kRowsWarps;
constexpr int kThreads = kSumsThreads + kRowsThreads;
constexpr int kSlots = 2;                                              // of sums on their way
constexpr int most_parts(int64_t rank) { return rank <= 16 ? 8 : 4; }  // of a CTA

struct Params {
  const char* rows;
  const char* factor;
  const char* low;
  const int32_t* sizes;
  const int64_t* factor_table;
  char* rows_grad;
  char* factor_grad;
  int64_t count;  // M
  int groups, cols, rank;
  DType rows_type, factor_type;  // of the results
};

template <class T, int kNarrow_, bool kColsLast_>
struct Product {
  static constexpr int kNarrow = kNarrow_;       // the highest rank
  static constexpr bool kColsLast = kColsLast_;  // B is [R, N], else [N, R]
  using RowsTile = NarrowTile<T, kNarrow, kColsLast ? Form::k_major : Form::n_major, kRowsWarps>;
  using SumsTile = NarrowTile<T, kNarrow, Form::sums, kSumsWarps>;
  using Ends = Drain<SumsTile, kColsLast>;

  static constexpr int kMostParts = most_parts(kNarrow);
  static constexpr int kStages = kNarrow <= 16 ? 7 : 6, kAhead = kStages - 2;
  static constexpr int kLowChunks = kNarrow / kChunk;
  static constexpr int kStageBytes = kWideBytes + kWideLines * kNarrow * 2;
  static constexpr int kFactorPart = kPartCols * kNarrow * 2, kFactorBytes = kMostParts * kFactorPart;
  static constexpr int kSums = kNarrow / 2;                                                // of dy B^T in a thread
  static constexpr int kWarpBytes = 32 * kSums * 4, kSlotBytes = kRowsWarps * kWarpBytes;  // that one hands on

  // Shared memory.
  static constexpr int kFactorAt = kStages * kStageBytes;
  static constexpr int kSlotsAt = kFactorAt + 2 * kFactorBytes;
  static constexpr int kStagedAt = kSlotsAt + kSlots * kSlotBytes;
  static constexpr int kFirstAt = kStagedAt + kSumsWarps * Ends::kFloats * 4;
  static constexpr int kBytes = kFirstAt + (kMostGroups + 1) * 4;
  static_assert(kBytes <= 226 * 1024, "of 227 KiB, beside barriers");
};

// The groups that have rows of those that this cluster takes, in their order. Row first[g] is the first of group g.
class Groups {
 public:
  __device__ Groups(const int32_t* first, int count, int start, int step)
      : first_(first), count_(count), step_(step), group_(start) {
    find();
  }

  __device__ bool end() const { return group_ >= count_; }
  __device__ int group() const { return group_; }
  __device__ int first() const { return first_[group_]; }
  __device__ int rows() const { return first_[group_ + 1] - first_[group_]; }
  __device__ void next() {
    group_ += step_;
    find();
  }

 private:
  __device__ void find() {
    while (group_ < count_ && rows() == 0) group_ += step_;
  }

  const int32_t* first_;
  int count_, step_, group_;
};

// A stage of the ring, of those that a role passes one after the other.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t round = 0;

  __device__ void next() {
    if (++index < kStages) return;
    index = 0;
    ++round;
  }
};

// The ring and its barriers: kStages of stages that are there, then kStages of free ones.
template <class Product>
class Ring {
 public:
  static constexpr int kStages = Product::kStages;
  using Stage = grouped::Stage<kStages>;

  __device__ Ring(uint32_t stages, uint32_t bars) : stages_(stages), bars_(bars) {}

  static __device__ void init(uint32_t bars) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(bars + i * 8, kSumsWarps);
      ptx::barrier_init(bars + (kStages + i) * 8, kSumsWarps + kRowsWarps);
    }
  }

  __device__ uint32_t address(const Stage& s) const { return stages_ + s.index * Product::kStageBytes; }
  // By a warp whose copies are there.
  __device__ void arrive(const Stage& s) const { arrive_at(there(s)); }
  __device__ void wait(const Stage& s) const { ptx::barrier_wait(there(s), s.round % 2); }
  // By a warp that has read it.
  __device__ void leave(const Stage& s) const { arrive_at(free(s)); }
  __device__ void wait_free(const Stage& s) const {
    if (s.round > 0) ptx::barrier_wait(free(s), (s.round - 1) % 2);
  }

 private:
  __device__ uint32_t there(const Stage& s) const { return bars_ + s.index * 8; }
  __device__ uint32_t free(const Stage& s) const { return bars_ + (kStages + s.index) * 8; }
  static __device__ void arrive_at(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
  }

  uint32_t stages_, bars_;
};

// Stages of a slice on their way into the ring: groups, of each rows in blocks of 64, and of each block part after
// part. By the threads of sums.
template <class Product, int kParts>
class Copies {
 public:
  __device__ Copies(const Params& p, const Groups& groups, int col)
      : groups_(groups), col_(col + column()), cols_(p.cols - col - column()) {
    find(p);
  }

  // The next stage; its part is a constant where it is asked for. Behind the end nothing is copied, but an empty group
  // is committed, so that waits keep counting.
  __device__ void copy(const Params& p, int part, uint32_t stage) {
    if (left_ > 0) {
      const bool exists = part * kPartCols < cols_;
      const uint32_t to = stage + chunk_offset<kWideChunks>(line(), threadIdx.x % kWideChunks);
      const char* from = from_ + part * (kPartCols * 2);
#pragma unroll
      for (int i = 0; i < kWideLines; i += kStep) {
        const bool copies = exists && line() + i < left_;
        copy_async<16>(to + i * (kWideChunks * 16), copies ? from + int64_t{i} * p.cols * 2 : p.rows, copies ? 16 : 0);
      }
      if (part == 0 && threadIdx.x < kWideLines * kLowChunks) {
        const int low_line = threadIdx.x / kLowChunks, chunk = threadIdx.x % kLowChunks;
        const bool copies = low_line < left_ && chunk * kChunk < p.rank;
        copy_async<16>(stage + kWideBytes + chunk_offset<kLowChunks>(low_line, chunk), copies ? low_from_ : p.low,
                       copies ? 16 : 0);
      }
      if (part == kParts - 1) {
        left_ -= kWideLines;
        from_ += int64_t{kWideLines} * p.cols * 2;
        low_from_ += int64_t{kWideLines} * p.rank * 2;
        if (left_ <= 0) {
          groups_.next();
          find(p);
        }
      }
    }
    commit_copies();
  }

 private:
  static constexpr int kLowChunks = Product::kLowChunks;
  static constexpr int kStep = kSumsThreads / kWideChunks;  // lines
  static_assert(kStep % 8 == 0, "the swizzle of all lines of a thread is the same");
  static __device__ int line() { return threadIdx.x / kWideChunks; }
  static __device__ int column() { return threadIdx.x % kWideChunks * kChunk; }

  __device__ void find(const Params& p) {
    left_ = 0;
    if (groups_.end()) return;
    const int64_t first = groups_.first();
    left_ = groups_.rows();
    from_ = p.rows + ((first + line()) * p.cols + col_) * 2;
    low_from_ = p.low + ((first + threadIdx.x / kLowChunks) * p.rank + threadIdx.x % kLowChunks * kChunk) * 2;
  }

  Groups groups_;
  int col_, cols_;  // of this thread's chunk; it and those behind it
  int left_;        // rows of the group to copy
  const char* from_;
  const char* low_from_;
};

// The slice of a group's factor from column `col` on, behind whose end there are zeros. By the threads of rows.
template <class Product>
__device__ void copy_factor(const Params& p, int group, int col, int parts, uint32_t to) {
  using Tile = typename Product::RowsTile;
  constexpr int kChunks = Tile::kNarrowChunks;
  const char* base = p.factor_table ? reinterpret_cast<const char*>(p.factor_table[group])
                                    : p.factor + int64_t{group} * p.cols * p.rank * 2;
  const int count = parts * Tile::kNarrowLines * kChunks;
#pragma unroll 1
  for (int i = threadIdx.x - kSumsThreads; i < count; i += kRowsThreads) {
    const int chunk = i % kChunks, line = i / kChunks % Tile::kNarrowLines, part = i / kChunks / Tile::kNarrowLines;
    const int along = chunk * kChunk + (Product::kColsLast ? col + part * kPartCols : 0);
    const int across = line + (Product::kColsLast ? 0 : col + part * kPartCols);
    const int width = Product::kColsLast ? p.cols : p.rank, height = Product::kColsLast ? p.rank : p.cols;
    const bool exists = along < width && across < height;
    copy_async<16>(to + part * Product::kFactorPart + chunk_offset<kChunks>(line, chunk),
                   exists ? base + (int64_t{across} * width + along) * 2 : base, exists ? 16 : 0);
  }
}

// The sums of dy B^T on their way from the warp before to the one behind: kSlots blocks of rows at a time.
template <class Product>
class Relay {
 public:
  static constexpr int kSums = Product::kSums;
  static constexpr int kBarriers = 2 * kSlots * kRowsWarps;

  // `slots`, `bars`: in every CTA at the same place. Of a warp: kSlots barriers of sums that are there, then kSlots of
  // slots in the CTA behind that are free.
  __device__ Relay(uint32_t slots, uint32_t bars, uint32_t rank)
      : rank_(rank),
        sums_(slots + threadIdx.x % kRowsThreads * 16),
        there_(bars + threadIdx.x / 32 % kRowsWarps * (2 * kSlots * 8)),
        free_(there_ + kSlots * 8) {}

  static __device__ void init(uint32_t bars) {
    for (int i = 0; i < kBarriers; ++i) ptx::barrier_init(bars + i * 8, 1);
  }

  __device__ void receive(int block, float* sums) const {
    const int slot = block % kSlots;
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_expect(there_ + slot * 8, Product::kWarpBytes);
    ptx::barrier_wait(there_ + slot * 8, block / kSlots % 2);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      uint32_t v[4];
      ptx::load_shared_v4(sums_ + slot * Product::kSlotBytes + i / 4 * (kRowsThreads * 16), v);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] = __uint_as_float(v[j]);
    }
  }

  // The slot of `block` may be written again. Called once an instruction has read what became of its sums (send or a
  // store): the arrival waits for no load, and did overtake those of receive.
  __device__ void release(int block) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_peer(free_ + block % kSlots * 8, rank_ - 1);
  }

  __device__ void send(int block, const float* sums) const {
    const int slot = block % kSlots;
    if (block >= kSlots) ptx::barrier_wait(free_ + slot * 8, (block / kSlots - 1) % 2);
    const uint32_t barrier = ptx::peer_address(there_ + slot * 8, rank_ + 1);
    const uint32_t to = ptx::peer_address(sums_ + slot * Product::kSlotBytes, rank_ + 1);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      ptx::store_peer_v4(to + i / 4 * (kRowsThreads * 16), sums[i], sums[i + 1], sums[i + 2], sums[i + 3], barrier);
    }
  }

 private:
  uint32_t rank_, sums_, there_, free_;
};

// Stores this warp's 16 rows of dy B^T, of which `rows` exist, from row `first` on.
template <class Tile>
__device__ void store_rows(const Params& p, int64_t first, int rows, const typename Tile::Sums& sums) {
  const int lane = threadIdx.x % 32, line = Tile::first_row() + lane / 4;
#pragma unroll
  for (int i = 0; i < Tile::kNarrow / 4; ++i) {
    const int row = line + i % 2 * 8, col = i / 2 * 8 + lane % 4 * 2;
    if (row >= rows || col >= p.rank) continue;
    const float low = sums[0][i / 2][i % 2 * 2], high = sums[0][i / 2][i % 2 * 2 + 1];
    const int64_t at = (first + row) * p.rank + col;
    if (p.rows_type == DType::f32) {
      *reinterpret_cast<float2*>(p.rows_grad + at * 4) = make_float2(low, high);
    } else {
      *reinterpret_cast<uint32_t*>(p.rows_grad + at * 2) = packed(low, high, p.rows_type);
    }
  }
}

// Zeros in the rows of no group: every CTA takes some, 16 bytes per thread.
__device__ void clear_tail(const Params& p, int64_t first) {
  const int bytes = bytes_of(p.rows_type) * p.rank;  // of a row, a multiple of 16
  const int64_t begin = first * bytes / 16, end = p.count * bytes / 16;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = begin + index; i < end; i += int64_t{gridDim.x} * kThreads) {
    reinterpret_cast<uint4*>(p.rows_grad)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Where the gradient of the factor goes that belongs to columns `col` and on.
template <class Product>
__device__ Finish finish_factor(const Params& p, int group, int col) {
  const int cols = max(0, min(p.cols - col, kPartCols));
  Finish f = {};
  f.result_type = p.factor_type;
  f.result_stride = Product::kColsLast ? p.cols : p.rank;
  const int64_t at = int64_t{group} * p.cols * p.rank + (Product::kColsLast ? col : int64_t{col} * p.rank);
  f.result = p.factor_grad + at * bytes_of(f.result_type);
  f.factor = 1.0f;
  f.rows = Product::kColsLast ? p.rank : cols;
  f.cols = Product::kColsLast ? cols : p.rank;
  f.vectors = true;  // both axes are multiples of 8
  return f;
}

// The role of sums: the gradient of the factor, of groups without rows too, and all copies of dy and of low rows.
template <class Product, int kParts>
__device__ void sum_columns(const Params& p, const int32_t* first, int start, int step, int col,
                            const Ring<Product>& ring, float* staged) {
  using Tile = typename Product::SumsTile;
  constexpr int kAhead = Product::kAhead;
  Copies<Product, kParts> copies(p, Groups(first, p.groups, start, step), col);
  typename Ring<Product>::Stage use, fill;
#pragma unroll
  for (int i = 0; i < kAhead; ++i, fill.next()) copies.copy(p, i % kParts, ring.address(fill));
#pragma unroll 1
  for (int group = start; group < p.groups; group += step) {
    const int count = first[group + 1] - first[group];
    typename Tile::Sums sums[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) Tile::clear(sums[part]);
#pragma unroll 1
    for (int row = 0; row < count; row += kWideLines) {
      uint32_t low[kWideLines / 16][Product::kNarrow / 16][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part, use.next(), fill.next()) {
        ring.wait_free(fill);
        copies.copy(p, (part + kAhead) % kParts, ring.address(fill));
        wait_copies<kAhead>();
        ring.arrive(use);
        ring.wait(use);
        const uint32_t stage = ring.address(use);
#pragma unroll
        for (int k = 0; k < kWideLines; k += 16) {
          uint32_t a[Tile::kSlabs][4];
          Tile::load_wide(stage, k, a);
#pragma unroll
          for (int n = 0; n < Product::kNarrow; n += 16) {
            if (part == 0) Tile::load_narrow(stage + kWideBytes, n, k, low[k / 16][n / 16]);
            Tile::add(a, low[k / 16][n / 16], n, sums[part]);
          }
        }
        ring.leave(use);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Product::Ends::store(finish_factor<Product>(p, group, col + part * kPartCols), sums[part], staged);
      __syncwarp();
    }
  }
}

// The role of rows: dy B^T, from the CTA before to the one behind.
template <class Product, int kParts>
__device__ void multiply_rows(const Params& p, Groups groups, int col, const Ring<Product>& ring, uint32_t factors,
                              const Relay<Product>& relay, bool is_first, bool is_last) {
  using Tile = typename Product::RowsTile;
  typename Ring<Product>::Stage use;
  int block = 0;  // of all groups
  uint32_t factor = factors, other = factors + Product::kFactorBytes;
  if (!groups.end()) copy_factor<Product>(p, groups.group(), col, kParts, factor);
#pragma unroll 1
  while (!groups.end()) {
    const int64_t first = groups.first();
    const int count = groups.rows();
    groups.next();
    wait_all_copies();
    ptx::named_barrier<kRowsThreads>(1);  // the factor is there, and all have read that of the group before
    if (!groups.end()) copy_factor<Product>(p, groups.group(), col, kParts, other);
#pragma unroll 1
    for (int row = 0; row < count; row += kWideLines, ++block) {
      typename Tile::Sums sums;
      Tile::clear(sums);
      if (!is_first) relay.receive(block, &sums[0][0][0]);
#pragma unroll 1
      for (int part = 0; part < kParts; ++part, use.next()) {
        ring.wait(use);
        Tile::add_block(ring.address(use), factor + part * Product::kFactorPart, sums);
        ring.leave(use);
      }
      if (is_last) {
        store_rows<Tile>(p, first + row, count - row, sums);
      } else {
        relay.send(block, &sums[0][0][0]);
      }
      if (!is_first) relay.release(block);
    }
    const uint32_t read = factor;
    factor = other;
    other = read;
  }
}

template <class Product, int kParts>
__global__ void __launch_bounds__(kThreads, 1) low_rank_grads(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) int64_t ring_bars[2 * Product::kStages], relay_bars[Relay<Product>::kBarriers];
  __shared__ int64_t scratch[33];
  const uint32_t rank = ptx::cluster_rank(), ctas = ptx::cluster_size();
  const int cluster = static_cast<int>(blockIdx.x / ctas), clusters = static_cast<int>(gridDim.x / ctas);
  const int col = static_cast<int>(rank) * (kParts * kPartCols);
  if (threadIdx.x == 0) {
    Ring<Product>::init(shared_address(ring_bars));
    Relay<Product>::init(shared_address(relay_bars));
    ptx::barrier_init_fence();
  }
  int32_t* first = reinterpret_cast<int32_t*>(shared + Product::kFirstAt);
  const GroupTotals<> all = walk_groups<kThreads>(
      p.groups, p.count, scratch, [&](int g) { return p.sizes[g]; }, nullptr,
      [&](int g, int64_t begin, int64_t, int64_t) { first[g] = static_cast<int32_t>(begin); });
  if (threadIdx.x == 0) first[p.groups] = static_cast<int32_t>(all.rows);
  ptx::cluster_barrier();  // all that is known, and every CTA's barriers, are there
  const uint32_t base = shared_address(shared);
  const Ring<Product> ring(base, shared_address(ring_bars));
  if (threadIdx.x < kSumsThreads) {
    float* staged = reinterpret_cast<float*>(shared + Product::kStagedAt) + threadIdx.x / 32 * Product::Ends::kFloats;
    sum_columns<Product, kParts>(p, first, cluster, clusters, col, ring, staged);
  } else {
    const Relay<Product> relay(base + Product::kSlotsAt, shared_address(relay_bars), rank);
    const Groups groups(first, p.groups, cluster, clusters);
    multiply_rows<Product, kParts>(p, groups, col, ring, base + Product::kFactorAt, relay, rank == 0, rank + 1 == ctas);
  }
  clear_tail(p, all.rows);
  ptx::cluster_barrier();  // no CTA's slots and barriers are written any more
}

// ---- the host's side ----

int64_t parts_of(int64_t cols) { return (cols + kPartCols - 1) / kPartCols; }

int64_t fewest_ctas(int64_t cols, int64_t rank) { return (parts_of(cols) + most_parts(rank) - 1) / most_parts(rank); }
int64_t most_ctas(int64_t cols) { return std::min<int64_t>(parts_of(cols), kMostCtas); }

std::string refuses(const LowRankGrads& call, const Target&) {
  const DType type = call.rows.dtype;
  const int64_t cols = call.rows.dims[1], rank = call.low_rows.dims[1], groups = call.group_sizes.dims[0];
  if (type != DType::bf16 && type != DType::f16) return "takes bfloat16 and float16, got " + describe(call.rows);
  if (rank > kMostNarrow) return "takes a rank of at most " + std::to_string(kMostNarrow);
  if (cols % kChunk != 0 || rank % kChunk != 0 || cols == 0 || rank == 0) return "needs rows of a multiple of 16 bytes";
  if (call.rows.dims[0] > INT32_MAX / 2) return "takes fewer than 2^30 rows";
  if (groups > kMostGroups) return "takes at most " + std::to_string(kMostGroups) + " groups";
  if (fewest_ctas(cols, rank) > kMostCtas) {
    return "takes at most " + std::to_string(kMostCtas * most_parts(rank) * kPartCols) + " columns of this rank";
  }
  if (groups * most_ctas(cols) < kFewestCtas) return "is for more groups, or wider rows";
  return "";
}

// A launch of clusters of so many CTAs. `attribute` has to stay where it is.
cudaLaunchConfig_t config_of(int clusters, int ctas, int bytes, cudaStream_t stream, cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = static_cast<unsigned>(ctas);
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// How many clusters of so many CTAs run at once: they stay within a part of the chip, so that multiprocessors are left
// over. Asked of the driver once per size and device.
template <class Product>
int most_clusters(int ctas) {
  constexpr auto kKernel = low_rank_grads<Product, Product::kMostParts>;
  static std::atomic<int> known[kMaxDevices][kMostCtas + 1] = {};
  std::atomic<int>& clusters = known[device_index()][ctas];
  if (clusters == 0) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = config_of(1, ctas, Product::kBytes, nullptr, &attribute);
    int found = 0;
    GROUPED_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kKernel, &config));
    clusters = std::max(found, 1);
  }
  return clusters;
}

struct Clusters {
  int clusters, ctas, parts;  // parts of a CTA
};

// Those that need the fewest steps one after the other: groups of a cluster, times parts of a CTA, of which there are
// kernels for even numbers.
template <class Product>
Clusters choose_clusters(const Params& p) {
  Clusters best = {};
  int64_t fewest = INT64_MAX;
  for (int ctas = static_cast<int>(fewest_ctas(p.cols, p.rank)); ctas <= most_ctas(p.cols); ++ctas) {
    const int clusters = std::min(most_clusters<Product>(ctas), p.groups);
    const int parts = static_cast<int>((parts_of(p.cols) + 2 * ctas - 1) / (2 * ctas)) * 2;
    const int64_t steps = int64_t{(p.groups + clusters - 1) / clusters} * parts;
    if (steps >= fewest) continue;
    fewest = steps;
    best = {clusters, ctas, parts};
  }
  return best;
}

template <class Product, int kParts = Product::kMostParts>
void launch_parts(const Params& p, const Clusters& chosen, cudaStream_t stream) {
  if constexpr (kParts > 2) {
    if (chosen.parts < kParts) return launch_parts<Product, kParts - 2>(p, chosen, stream);
  }
  constexpr auto kKernel = low_rank_grads<Product, kParts>;
  allow_shared_memory<kKernel>(Product::kBytes);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = config_of(chosen.clusters, chosen.ctas, Product::kBytes, stream, &attribute);
  GROUPED_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, p));
}

template <class Any>
void launch_product(const Params& p, cudaStream_t stream) {
  allow_shared_memory<low_rank_grads<Any, Any::kMostParts>>(Any::kBytes);  // which choose_clusters asks about
  launch_parts<Any>(p, choose_clusters<Any>(p), stream);
}

template <class T, int kNarrow>
void launch_rank(const Params& p, bool cols_last, cudaStream_t stream) {
  if (cols_last) return launch_product<Product<T, kNarrow, true>>(p, stream);
  launch_product<Product<T, kNarrow, false>>(p, stream);
}

template <class T>
void launch_type(const Params& p, bool cols_last, cudaStream_t stream) {
  if (p.rank <= 16) return launch_rank<T, 16>(p, cols_last, stream);
  launch_rank<T, 32>(p, cols_last, stream);
}

void launch(const LowRankGrads& call, const Context& context) {
  Params p = {};
  p.rows = call.rows.as<const char>();
  p.factor = call.factor.as<const char>();
  p.low = call.low_rows.as<const char>();
  p.sizes = call.group_sizes.as<const int32_t>();
  p.factor_table = call.factor_table.present() ? call.factor_table.as<const int64_t>() : nullptr;
  p.rows_grad = call.rows_grad.as<char>();
  p.factor_grad = call.factor_grad.as<char>();
  p.count = call.rows.dims[0];
  p.groups = static_cast<int>(call.group_sizes.dims[0]);
  p.cols = static_cast<int>(call.rows.dims[1]);
  p.rank = static_cast<int>(call.low_rows.dims[1]);
  p.rows_type = call.rows_grad.dtype;
  p.factor_type = call.factor_grad.dtype;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const bool cols_last = call.factor_axis == 2;
  if (call.rows.dtype == DType::bf16) return launch_type<__nv_bfloat16>(p, cols_last, stream);
  launch_type<__half>(p, cols_last, stream);
}

}  // namespace

const Kernel<LowRankGrads> low_rank_grads_sm90 = {"low_rank_grads_sm90",      Arch::sm90, Kind::special, refuses,
                                                  no_workspace<LowRankGrads>, launch,     kAlignment};

}  // namespace grouped
