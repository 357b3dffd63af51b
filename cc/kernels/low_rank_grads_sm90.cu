// Both gradients that the second factor B of a low-rank adapter takes from dy, bf16 and fp16, rank at most 32: dy is
// read once. One cluster for each group, a CTA of 256 threads for each slice of up to 512 of its columns (256 above
// rank 16).
//
//   4 warps of sums   --cp.async--> ring of 4 stages, 2 ahead: 64 rows x 128 columns of dy, and for the first of the
//                                   slice's columns the 64 x R low rows beside them
//                     32 columns of B's gradient each, summed in registers to the end of the group
//   4 warps of rows   B's slice in shared memory, once; 16 rows of dy B^T each, over all columns of the slice
//                     --st.async--> the same warp of the next CTA, which goes on adding; the last one rounds and stores
//   barriers          a stage is there, 128 threads' copies; a stage is free, 8 warps; sums are there, a slot of them
//   is
//                     free, for each warp of rows
//
// The sums of dy B^T travel so that they are added in the order of the columns, as one warp alone would do it: the bits
// are those of the two products. CTAs of a cluster work on different rows at a time, each a step behind the one before.
//
//   rank   shared memory of a CTA, 2 on a multiprocessor             registers
//   16     4 x 18 KiB + 16 KiB of B + 2 x 4 KiB of sums = 96 KiB     152 and 104, 64 for the sums of B's gradient
//   32     4 x 20 KiB + 16 KiB of B + 2 x 8 KiB of sums = 112 KiB    likewise
#include <algorithm>
#include <string>

#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/common/block_sum.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/narrow_tiles.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kRole = kNarrowThreads, kThreads = 2 * kRole, kWarps = kNarrowWarps;  // threads and warps of a role
constexpr int kPartCols = kWideChunks * kChunk;                                     // of a stage
constexpr int kStages = 4, kAhead = 2;
constexpr int kSumsRegisters = 152, kRowsRegisters = 104;              // of threads of a role: 256 for one of each
constexpr int most_parts(int64_t rank) { return rank <= 16 ? 4 : 2; }  // of a CTA
constexpr int kMostCtas = 8;                                           // of a cluster
constexpr int kSlots = 2;                                              // of sums on their way
constexpr int64_t kMostGroups = 4096;                                  // each CTA adds up all sizes
constexpr int64_t kFewestCtas = 128;  // else two products keep more multiprocessors busy

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
  static constexpr int kNarrow = kNarrow_;
  static constexpr bool kColsLast = kColsLast_;  // B is [R, N], else [N, R]
  using RowsTile = NarrowTile<T, kNarrow, kColsLast ? Form::k_major : Form::n_major>;
  using SumsTile = NarrowTile<T, kNarrow, Form::sums>;
  using Ends = Drain<SumsTile, kColsLast>;

  static constexpr int kMostParts = most_parts(kNarrow);
  static constexpr int kLowChunks = kNarrow / kChunk;
  static constexpr int kStageBytes = kWideBytes + SumsTile::kNarrowBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kFactorBytes = kMostParts * RowsTile::kNarrowBytes;
  static constexpr int kSums = kNarrow / 2;          // of dy B^T in a thread
  static constexpr int kWarpBytes = 32 * kSums * 4;  // that a warp hands on
  static constexpr int kSlotBytes = kWarps * kWarpBytes;
  static constexpr int kBytes = kRingBytes + kFactorBytes + kSlots * kSlotBytes;
  static_assert(kWarps * Ends::kFloats * 4 <= kRingBytes, "the ring has room for the sums that leave");
};

// Rows first ... end - 1 belong to the group, and `all` to some group.
struct Extent {
  int64_t first, end, all;
};

__device__ Extent extent_of(const Params& p, int group, int64_t* scratch) {
  int64_t before = 0, total = 0;
  for (int g = threadIdx.x; g < p.groups; g += kThreads) {
    const int64_t size = max(p.sizes[g], 0);
    total += size;
    if (g < group) before += size;
  }
  int64_t first, all;
  exclusive_sum<kThreads / 32>(before, scratch, &first);
  exclusive_sum<kThreads / 32>(total, scratch, &all);
  const int64_t end = first + max(p.sizes[group], 0);
  return {min(first, p.count), min(end, p.count), min(all, p.count)};
}

__device__ inline int role_thread() { return threadIdx.x % kRole; }

// The slice of the factor from column `col` on, behind whose end there are zeros. By a role's threads.
template <class Product>
__device__ void copy_factor(const Params& p, int group, int col, int parts, uint32_t to) {
  using Tile = typename Product::RowsTile;
  constexpr int kChunks = Tile::kNarrowChunks;
  const char* base = p.factor_table ? reinterpret_cast<const char*>(p.factor_table[group])
                                    : p.factor + int64_t{group} * p.cols * p.rank * 2;
  const int count = parts * Tile::kNarrowLines * kChunks;
#pragma unroll 1
  for (int i = role_thread(); i < count; i += kRole) {
    const int chunk = i % kChunks, line = i / kChunks % Tile::kNarrowLines, part = i / kChunks / Tile::kNarrowLines;
    const int along = chunk * kChunk + (Product::kColsLast ? col + part * kPartCols : 0);
    const int across = line + (Product::kColsLast ? 0 : col + part * kPartCols);
    const int width = Product::kColsLast ? p.cols : p.rank, height = Product::kColsLast ? p.rank : p.cols;
    const bool exists = along < width && across < height;
    copy_async<16>(to + part * Tile::kNarrowBytes + chunk_offset<kChunks>(line, chunk),
                   exists ? base + (int64_t{across} * width + along) * 2 : base, exists ? 16 : 0);
  }
}

// Stages of a slice on their way into the ring: rows in blocks of 64, and of each block part after part.
template <class Product, int kParts>
class Copies {
 public:
  __device__ Copies(const Params& p, const Extent& extent, int col)
      : from_(p.rows +
              ((extent.first + role_thread() / kWideChunks) * p.cols + col + role_thread() % kWideChunks * kChunk) * 2),
        low_from_(p.low +
                  ((extent.first + role_thread() / kLowChunks) * p.rank + role_thread() % kLowChunks * kChunk) * 2),
        left_(static_cast<int>(extent.end - extent.first)),
        cols_(p.cols - col - role_thread() % kWideChunks * kChunk) {}

  // The next stage, which `there` counts; nothing behind the end.
  __device__ void copy_stage(const Params& p, uint32_t stage, uint32_t there) {
    if (left_ <= 0) return;
    constexpr int kStep = kRole / kWideChunks;
    const int line = role_thread() / kWideChunks, chunk = role_thread() % kWideChunks;
    const bool exists = part_ * kPartCols < cols_;
    const uint32_t to = stage + chunk_offset<kWideChunks>(line, chunk);
    const char* from = exists ? from_ + part_ * (kPartCols * 2) : p.rows;
#pragma unroll
    for (int i = 0; i < kWideLines / kStep; ++i) {
      const bool copies = exists && line + i * kStep < left_;
      copy_async<16>(to + i * (kRole * 16), copies ? from + int64_t{i} * kStep * p.cols * 2 : p.rows, copies ? 16 : 0);
    }
    if (part_ == 0) copy_low(p, stage + kWideBytes);
    ptx::barrier_arrive_copies(there);
    if (++part_ < kParts) return;
    part_ = 0;
    left_ -= kWideLines;
    from_ += int64_t{kWideLines} * p.cols * 2;
    low_from_ += int64_t{kWideLines} * p.rank * 2;
  }

 private:
  static constexpr int kLowChunks = Product::kLowChunks;

  __device__ void copy_low(const Params& p, uint32_t to) {
    constexpr int kStep = kRole / kLowChunks;
    const int line = role_thread() / kLowChunks, chunk = role_thread() % kLowChunks;
#pragma unroll
    for (int i = 0; i < kWideLines; i += kStep) {
      const bool copies = line + i < left_ && chunk * kChunk < p.rank;
      copy_async<16>(to + chunk_offset<kLowChunks>(line + i, chunk),
                     copies ? low_from_ + int64_t{i} * p.rank * 2 : p.low, copies ? 16 : 0);
    }
  }

  const char* from_;
  const char* low_from_;
  int left_;  // rows to copy
  int cols_;  // of this thread's chunk and behind it
  int part_ = 0;
};

// Where a role is in the ring, and its barriers: kStages of stages that are there, then kStages of free ones.
class Ring {
 public:
  __device__ explicit Ring(uint32_t bars) : bars_(bars) {}

  static __device__ void init(uint32_t bars) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(bars + i * 8, kRole);
      ptx::barrier_init(bars + (kStages + i) * 8, 2 * kWarps);
    }
  }

  __device__ uint32_t there(int unit) const { return bars_ + unit % kStages * 8; }
  __device__ void wait(int unit) const { ptx::barrier_wait(there(unit), unit / kStages % 2); }
  // By a warp that has read the stage.
  __device__ void leave(int unit) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(bars_ + (kStages + unit % kStages) * 8);
  }
  // Until the stage is free that `unit` will be in.
  __device__ void wait_free(int unit) const {
    if (unit >= kStages) ptx::barrier_wait(bars_ + (kStages + unit % kStages) * 8, (unit / kStages - 1) % 2);
  }

 private:
  uint32_t bars_;
};

// The sums of dy B^T on their way from the warp before to the one behind: kSlots blocks of rows at a time.
template <class Product>
class Relay {
 public:
  static constexpr int kBarriers = 2 * kSlots * kWarps;

  // `slots`, `bars`: in every CTA at the same place. Of a warp: kSlots barriers of sums that are there, then kSlots of
  // slots in the CTA behind that are free.
  __device__ Relay(uint32_t slots, uint32_t bars, uint32_t rank)
      : rank_(rank),
        sums_(slots + role_thread() * 16),
        there_(bars + role_thread() / 32 * (2 * kSlots * 8)),
        free_(there_ + kSlots * 8) {}

  static __device__ void init(uint32_t bars) {
    for (int i = 0; i < kBarriers; ++i) ptx::barrier_init(bars + i * 8, 1);
  }

  __device__ void receive(int block, float* sums) {
    const int slot = block % kSlots;
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_expect(there_ + slot * 8, Product::kWarpBytes);
    ptx::barrier_wait(there_ + slot * 8, block / kSlots % 2);
#pragma unroll
    for (int i = 0; i < Product::kSums; i += 4) {
      uint32_t v[4];
      ptx::load_shared_v4(sums_ + slot * Product::kSlotBytes + i / 4 * (kRole * 16), v);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] = __uint_as_float(v[j]);
    }
  }

  // The slot of `block` may be written again. Called once an instruction has read what became of its sums (send or a
  // store): the arrival waits for no load, and could overtake those of receive.
  __device__ void release(int block) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_peer(free_ + block % kSlots * 8, rank_ - 1);
  }

  __device__ void send(int block, const float* sums) {
    const int slot = block % kSlots;
    if (block >= kSlots) ptx::barrier_wait(free_ + slot * 8, (block / kSlots - 1) % 2);
    const uint32_t barrier = ptx::peer_address(there_ + slot * 8, rank_ + 1);
    const uint32_t to = ptx::peer_address(sums_ + slot * Product::kSlotBytes, rank_ + 1);
#pragma unroll
    for (int i = 0; i < Product::kSums; i += 4) {
      ptx::store_peer_v4(to + i / 4 * (kRole * 16), sums[i], sums[i + 1], sums[i + 2], sums[i + 3], barrier);
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

// Zeros in the rows of no group: every cluster takes some, 16 bytes a thread.
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

// The role of sums: the gradient of the factor, and all copies.
template <class Product, int kParts>
__device__ void sum_columns(const Params& p, const Extent& extent, int col, uint32_t ring, const Ring& stages,
                            typename Product::SumsTile::Sums (&sums)[kParts]) {
  using Tile = typename Product::SumsTile;
  const int count = static_cast<int>(extent.end - extent.first);
  const auto stage_of = [&](int unit) { return ring + unit % kStages * Product::kStageBytes; };
  Copies<Product, kParts> copies(p, extent, col);
#pragma unroll 1
  for (int unit = 0; unit < kAhead; ++unit) copies.copy_stage(p, stage_of(unit), stages.there(unit));
#pragma unroll
  for (int part = 0; part < kParts; ++part) Tile::clear(sums[part]);
  int unit = 0;
#pragma unroll 1
  for (int row = 0; row < count; row += kWideLines) {
    uint32_t low[kWideLines / 16][Product::kNarrow / 16][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part, ++unit) {
      stages.wait_free(unit + kAhead);
      copies.copy_stage(p, stage_of(unit + kAhead), stages.there(unit + kAhead));
      stages.wait(unit);
      const uint32_t use = stage_of(unit);
#pragma unroll
      for (int k = 0; k < kWideLines; k += 16) {
        uint32_t a[Tile::kSlabs][4];
        Tile::load_wide(use, k, a);
#pragma unroll
        for (int n = 0; n < Product::kNarrow; n += 16) {
          if (part == 0) Tile::load_narrow(use + kWideBytes, n, k, low[k / 16][n / 16]);
          Tile::add(a, low[k / 16][n / 16], n, sums[part]);
        }
      }
      stages.leave(unit);
    }
  }
}

// The role of rows: dy B^T, from the CTA before to the one behind.
template <class Product, int kParts>
__device__ void multiply_rows(const Params& p, const Extent& extent, uint32_t ring, const Ring& stages, uint32_t factor,
                              Relay<Product>& relay, bool is_first, bool is_last) {
  using Tile = typename Product::RowsTile;
  const int count = static_cast<int>(extent.end - extent.first);
  int unit = 0;
#pragma unroll 1
  for (int block = 0; block * kWideLines < count; ++block) {
    typename Tile::Sums sums;
    Tile::clear(sums);
    if (!is_first) relay.receive(block, &sums[0][0][0]);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part, ++unit) {
      stages.wait(unit);
      Tile::add_block(ring + unit % kStages * Product::kStageBytes, factor + part * Tile::kNarrowBytes, sums);
      stages.leave(unit);
    }
    if (is_last) {
      store_rows<Tile>(p, extent.first + block * kWideLines, count - block * kWideLines, sums);
    } else {
      relay.send(block, &sums[0][0][0]);
    }
    if (!is_first) relay.release(block);
  }
}

template <class Product, int kParts>
__global__ void __launch_bounds__(kThreads, 2) low_rank_grads(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) int64_t ring_bars[2 * kStages], relay_bars[Relay<Product>::kBarriers];
  __shared__ int64_t scratch[33];
  const uint32_t rank = ptx::cluster_rank(), ctas = ptx::cluster_size();
  const int group = static_cast<int>(blockIdx.x / ctas), col = static_cast<int>(rank) * (kParts * kPartCols);
  const uint32_t ring = shared_address(shared), factor = ring + Product::kRingBytes;
  const bool sums_columns = threadIdx.x < kRole;
  if (threadIdx.x == 0) {
    Ring::init(shared_address(ring_bars));
    Relay<Product>::init(shared_address(relay_bars));
    ptx::barrier_init_fence();
  }
  if (!sums_columns) copy_factor<Product>(p, group, col, kParts, factor);
  const Extent extent = extent_of(p, group, scratch);
  clear_tail(p, extent.all);
  wait_all_copies();
  ptx::cluster_barrier();  // barriers and the factor are there, in every CTA
  const Ring stages(shared_address(ring_bars));
  typename Product::SumsTile::Sums sums[kParts];
  if (sums_columns) {
    ptx::set_max_registers_up<kSumsRegisters>();
    sum_columns<Product, kParts>(p, extent, col, ring, stages, sums);
  } else {
    ptx::set_max_registers_down<kRowsRegisters>();
    Relay<Product> relay(factor + Product::kFactorBytes, shared_address(relay_bars), rank);
    multiply_rows<Product, kParts>(p, extent, ring, stages, factor, relay, rank == 0, rank + 1 == ctas);
  }
  __syncthreads();  // the ring is free
  if (sums_columns) {
    float* staged = reinterpret_cast<float*>(shared) + threadIdx.x / 32 * Product::Ends::kFloats;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Product::Ends::store(finish_factor<Product>(p, group, col + part * kPartCols), sums[part], staged);
      __syncwarp();
    }
  }
  ptx::cluster_barrier();  // nobody's slots and barriers are written any more
}

// ---- the host's side ----

int64_t parts_of(int64_t cols) { return (cols + kPartCols - 1) / kPartCols; }
int64_t ctas_of(int64_t cols, int most) { return (parts_of(cols) + most - 1) / most; }

std::string refuses(const LowRankGrads& call, const Target&) {
  const DType type = call.rows.dtype;
  const int64_t cols = call.rows.dims[1], rank = call.low_rows.dims[1], groups = call.group_sizes.dims[0];
  if (type != DType::bf16 && type != DType::f16) return "takes bfloat16 and float16, got " + describe(call.rows);
  if (rank > kMostNarrow) return "takes a rank of at most " + std::to_string(kMostNarrow);
  if (cols % kChunk != 0 || rank % kChunk != 0 || cols == 0 || rank == 0) return "needs rows of a multiple of 16 bytes";
  const int most = most_parts(rank);
  if (ctas_of(cols, most) > kMostCtas) {
    return "takes at most " + std::to_string(kMostCtas * most * kPartCols) + " columns of this rank";
  }
  if (call.rows.dims[0] > INT32_MAX / 2) return "takes fewer than 2^30 rows";
  if (groups > kMostGroups) return "takes at most " + std::to_string(kMostGroups) + " groups";
  if (groups * ctas_of(cols, most) < kFewestCtas) {
    return "is for at least " + std::to_string(kFewestCtas) + " slices of " + std::to_string(most * kPartCols) +
           " columns of a group";
  }
  return "";
}

template <class Product, int kParts>
void launch_parts(const Params& p, unsigned ctas, cudaStream_t stream) {
  constexpr auto kKernel = low_rank_grads<Product, kParts>;
  allow_shared_memory<kKernel>(Product::kBytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.groups) * ctas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Product::kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  GROUPED_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, p));
}

template <class Product, int kParts = Product::kMostParts>
void launch_product(const Params& p, cudaStream_t stream) {
  const int64_t ctas = ctas_of(p.cols, Product::kMostParts);
  if constexpr (kParts > 1) {
    if (parts_of(p.cols) <= ctas * (kParts - 1)) return launch_product<Product, kParts - 1>(p, stream);
  }
  launch_parts<Product, kParts>(p, static_cast<unsigned>(ctas), stream);
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
