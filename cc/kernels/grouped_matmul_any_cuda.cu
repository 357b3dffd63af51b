// Every legal grouped product on any GPU since sm_80: the fallback of all others, and their yardstick.
//
//   scan        one block: offsets and tile prefix into the workspace
//   16 and 8 bit, 128 threads, 2 blocks an SM, which draw tiles from a counter:
//     copy k+2 --cp.async--> ring[3] of (lhs 8 KiB, rhs 8 KiB) --ldmatrix--> 64x64 a warp, mma m16n8k16 --> epilogue
//     the next tile's first two stages are copied while the last is stored
//     48 KiB of shared memory, at most 255 registers: 128 sums, 2 x 32 fragments, the rest addresses
//   float32, 256 threads, 2 blocks an SM, a block a tile:
//     copy k+1 --cp.async--> ring[2] of (lhs 8.3 KiB, rhs 8.3 KiB) --> 8x8 a thread, IEEE FMA --> epilogue
//     33 KiB of shared memory, at most 128 registers: 64 sums, 16 operands
//   epilogue    sums through free shared memory (the ring, or the stage that is not copied early), so that a row's
//               neighbours leave in 16-byte stores
//
// One block owns a tile and its whole contraction, in one order; tiles are 128x128 whatever the shapes, so a row's bits
// depend on nothing but that row, its weights and K: every call is batch invariant.
// 48 KiB and no more: two blocks then fit the 100 KiB of sm_86 and sm_89.
#include <algorithm>
#include <string>
#include <type_traits>

#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/mma_sm80.cuh"
#include "cc/device/common/portable_tiles.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

// Where a staged sum lies, in floats. Chunks of 4 are swizzled: by row, so that the rows of mma's layout fall on
// different banks, and by every other 8, so that 8 lanes that read a vector each do.
__device__ int staged_at(int row, int col, int stride) { return row * stride + (col ^ row % 4 * 8 ^ col / 32 % 2 * 4); }

__device__ void read_staged(const float* staged, int row, int col, int stride, float (&to)[kVector]) {
  const float4 l = *reinterpret_cast<const float4*>(staged + staged_at(row, col, stride));
  const float4 h = *reinterpret_cast<const float4*>(staged + staged_at(row, col + 4, stride));
  to[0] = l.x, to[1] = l.y, to[2] = l.z, to[3] = l.w, to[4] = h.x, to[5] = h.y, to[6] = h.z, to[7] = h.w;
}
__device__ void read_staged(const float* staged, int row, int col, int stride, float (&to)[1]) {
  to[0] = staged[staged_at(row, col, stride)];
}

// Ends kRows x kCols staged sums by kThreads threads, R rows of W columns at once.
template <int kRows, int kCols, int kStride, int kThreads, int R, int W>
__device__ void drain(const Finish& f, const float* staged, int first_row, int first_col, int thread) {
  constexpr int kLanes = kCols / W < kThreads ? kCols / W : kThreads;  // of one row
  constexpr int kStep = kThreads / kLanes;
#pragma unroll 1
  for (int col = thread % kLanes * W; col < kCols; col += kLanes * W) {
#pragma unroll 1
    for (int row = thread / kLanes; row < kRows; row += R * kStep) {
      float sums[R][W];
#pragma unroll
      for (int r = 0; r < R; ++r) read_staged(staged, row + r * kStep, col, kStride, sums[r]);
      finish_rows(f, first_row + row, kStep, first_col + col, sums);
    }
  }
}

template <int kRows, int kCols, int kStride, int kThreads, int R>
__device__ void drain(const Finish& f, const float* staged, int first_row, int first_col, int thread) {
  if (f.vectors) {
    drain<kRows, kCols, kStride, kThreads, R, kVector>(f, staged, first_row, first_col, thread);
  } else {
    drain<kRows, kCols, kStride, kThreads, R, 1>(f, staged, first_row, first_col, thread);
  }
}

// --- 16-bit operands on tensor cores, and 8-bit ones widened to float16, which holds every code exactly
// ---------------

constexpr int kMmaCols = 128;  // of a tile
constexpr int kWarpTile = 64;  // rows and columns of sums a warp owns
constexpr int kWarpsARow = kMmaCols / kWarpTile;
constexpr int kMmaThreads = kTileRows / kWarpTile * kWarpsARow * 32;
constexpr int kMmaBlocks = 2;  // an SM
constexpr int kDepth = 32;     // of one stage
constexpr int kStages = 3;
constexpr int kStagesAhead = kStages - 1;  // that copies run ahead of products
constexpr int kLhsBytes = kTileRows * kDepth * 2, kRhsBytes = kMmaCols * kDepth * 2;
constexpr int kStageBytes = kLhsBytes + kRhsBytes;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kChunk = 8;  // elements of 16 bytes
constexpr int kSlab = 16;  // rows of one mma, and those that a warp stages at once
constexpr int kStagedFloats = kSlab * kWarpTile;

// Shared layouts, in 16-byte chunks, swizzled so that the 8 rows of an ldmatrix matrix lie on 32 different banks.
//   k-major:  kExtent rows of 4 chunks along k;  otherwise: 32 rows (k) of kExtent / 8 chunks along the result's axis
template <bool kKMajor, int kExtent>
__device__ uint32_t chunk_offset(int row, int chunk) {
  if constexpr (kKMajor) return row * (kDepth * 2) + ((chunk ^ ((row >> 1) & 3)) * 16);
  return row * (kExtent * 2) + ((chunk ^ (row & 7)) * 16);
}

__device__ uint32_t widened(const char* at, DType type) {
  const uint8_t code = *reinterpret_cast<const uint8_t*>(at);
  return type == DType::e4m3fn ? half_bits_of_e4m3(code) : half_bits_of_e5m2(code);
}

// Elements `first` ... `end` - 1 of a chunk, zeros around them, where 16-byte copies cannot reach: odd strides and
// bases.
__device__ uint4 gather_chunk(const char* at, DType type, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = 2 * i + j;
      pair[j] = e >= count ? 0 : bytes_of(type) == 2 ? reinterpret_cast<const uint16_t*>(at)[e] : widened(at + e, type);
    }
    words[i] = pair[0] | pair[1] << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Whether every row of an operand can be copied in 16-byte pieces.
__device__ bool copies_in_vectors(const char* data, DType type, int64_t stride_bytes) {
  return bytes_of(type) == 2 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

// What one thread copies of one operand of kExtent rows or columns: some chunks of every stage, a fixed step apart.
template <bool kKMajor, int kExtent>
class Copier {
 public:
  Copier() = default;

  // `extent`: elements of the operand from `data` on, along the result's axis. `jump`: bytes that it will be moved by.
  __device__ Copier(const char* data, DType type, int64_t stride_bytes, int extent, int64_t jump) {
    const int chunk = threadIdx.x % kChunksARow, row = threadIdx.x / kChunksARow;
    at_ = data + row * stride_bytes + chunk * kChunk * bytes_of(type);
    offset_ = chunk_offset<kKMajor, kExtent>(row, chunk);
    inner_ = kKMajor ? chunk * kChunk : row;
    outer_left_ = extent - (kKMajor ? row : chunk * kChunk);
    vectors_ = copies_in_vectors(data, type, stride_bytes | jump);
  }

  // Fills this thread's part of the stage at `to`, of which `depth` elements along k exist, with zeros behind them, and
  // moves on. kVectors: the caller knows that 16-byte copies will do.
  template <bool kVectors>
  __device__ void copy(uint32_t to, int depth, DType type, int64_t stride_bytes) {
    const int inner_left = depth - inner_;
    const int64_t step = kRowStep * stride_bytes;
    const char* from = at_;
    to += offset_;
    if (kVectors || vectors_) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i, from += step) {
        const bool exists =
            kKMajor ? inner_left > 0 && outer_left_ > i * kRowStep : inner_left > i * kRowStep && outer_left_ > 0;
        copy_async<16>(to + i * (kMmaThreads * 16), from, exists ? 16 : 0);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunks; ++i, from += step) {
        const bool exists = (kKMajor ? outer_left_ : inner_left) > i * kRowStep;
        const int count = exists ? (kKMajor ? inner_left : outer_left_) : 0;
        store16(to + i * (kMmaThreads * 16), gather_chunk(from, type, count));
      }
    }
    at_ = kKMajor ? at_ + kDepth * bytes_of(type) : from;
  }

  __device__ void move(int64_t bytes) { at_ += bytes; }
  __device__ bool vectors() const { return vectors_; }

 private:
  static constexpr int kChunks = kExtent * kDepth / kChunk / kMmaThreads;
  static constexpr int kChunksARow = (kKMajor ? kDepth : kExtent) / kChunk;
  static constexpr int kRowStep = kMmaThreads / kChunksARow;

  const char* at_;
  uint32_t offset_;
  int inner_;       // of this thread's first chunk, along k
  int outer_left_;  // elements from this thread's first chunk to the operand's end, along the result's axis
  bool vectors_;
};

// Fragments of one k16 step for a warp's 64x64 sums.
struct Fragments {
  uint32_t a[kWarpTile / kSlab][4];
  uint32_t b[kWarpTile / kSlab][4];  // two columns of 8 each
};

// Where this lane reads its fragments. One offset an operand: the swizzle turns steps of 2 chunks into exclusive-or.
template <bool kLhsKMajor, bool kRhsKMajor>
class FragmentLoader {
 public:
  __device__ FragmentLoader() {
    const int warp = threadIdx.x / 32, matrix = threadIdx.x % 32 / 8, line = threadIdx.x % 8;
    const int m = warp / kWarpsARow * kWarpTile, n = warp % kWarpsARow * kWarpTile;
    // a: matrices (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8);  b: (n, k), (n, k + 8), (n + 8, k), (n + 8, k + 8)
    const int low = matrix % 2, high = matrix / 2;
    lhs_ = kLhsKMajor ? chunk_offset<true, kTileRows>(m + low * 8 + line, high)
                      : chunk_offset<false, kTileRows>(high * 8 + line, m / kChunk + low);
    rhs_ = kRhsKMajor ? chunk_offset<true, kMmaCols>(n + high * 8 + line, low)
                      : chunk_offset<false, kMmaCols>(low * 8 + line, n / kChunk + high);
  }

  __device__ void load(uint32_t stage, int k16, Fragments* f) const {
#pragma unroll
    for (int i = 0; i < kWarpTile / kSlab; ++i) {
      load_matrices<!kLhsKMajor>(slab<kLhsKMajor, kTileRows>(stage + lhs_, i, k16), f->a[i]);
    }
#pragma unroll
    for (int j = 0; j < kWarpTile / kSlab; ++j) {
      load_matrices<!kRhsKMajor>(slab<kRhsKMajor, kMmaCols>(stage + kLhsBytes + rhs_, j, k16), f->b[j]);
    }
  }

 private:
  template <bool kKMajor, int kExtent>
  static __device__ uint32_t slab(uint32_t at, int index, int k16) {
    constexpr uint32_t kTwoChunks = 32;
    return kKMajor ? (at ^ (k16 * kTwoChunks)) + index * kSlab * kDepth * 2
                   : (at ^ (index * kTwoChunks)) + k16 * kSlab * kExtent * 2;
  }

  uint32_t lhs_, rhs_;
};

using Sums = float[kWarpTile / kSlab][kWarpTile / 8][4];

__device__ void clear(Sums& sums) {
#pragma unroll
  for (auto& slab : sums) {
#pragma unroll
    for (auto& block : slab) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }
}

template <class T>
__device__ void multiply_add_all(const Fragments& f, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kWarpTile / kSlab; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpTile / 8; ++j) {
      multiply_add<T>(sums[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Both operands of one tile on their way into the ring, stage after stage.
template <bool kLhsKMajor, bool kRhsKMajor>
class Copies {
 public:
  Copies() = default;

  __device__ Copies(const Problem& p, const Place& at)
      : lhs_(lhs_at(p, at), p.lhs_type, p.lhs_stride * bytes_of(p.lhs_type), at.rows, 0),
        rhs_(rhs_at(p, at), p.rhs_type, p.rhs_stride * bytes_of(p.rhs_type), at.cols, p.rhs_jump),
        depth_left_(at.depth) {}

  // Stages behind the end are filled with zeros, which nobody multiplies.
  template <bool kVectors>
  __device__ void copy_stage(uint32_t stage, const Problem& p, DType lhs_type, DType rhs_type) {
    rhs_.move(depth_left_ == p.jump_depth ? p.rhs_jump : 0);
    lhs_.template copy<kVectors>(stage, depth_left_, lhs_type, p.lhs_stride * bytes_of(lhs_type));
    rhs_.template copy<kVectors>(stage + kLhsBytes, depth_left_, rhs_type, p.rhs_stride * bytes_of(rhs_type));
    commit_copies();
    depth_left_ -= kDepth;
  }

  __device__ void copy_early(uint32_t ring, const Problem& p) {
#pragma unroll 1
    for (int i = 0; i < kStagesAhead; ++i) copy_stage<false>(ring + i * kStageBytes, p, p.lhs_type, p.rhs_type);
  }

  __device__ bool vectors() const { return lhs_.vectors() && rhs_.vectors(); }
  __device__ int depth_left() const { return depth_left_; }

 private:
  Copier<kLhsKMajor, kTileRows> lhs_;
  Copier<kRhsKMajor, kMmaCols> rhs_;
  int depth_left_;  // to copy
};

// The whole contraction of a tile whose early stages are on their way. The loop has no branch where kVectors holds:
// that lets loads run between products.
template <class T, bool kVectors, bool kLhsKMajor, bool kRhsKMajor>
__device__ __forceinline__ void contract(const Problem& p, Copies<kLhsKMajor, kRhsKMajor>* copies, uint32_t ring,
                                         Sums& sums) {
  const uint32_t last_stage = ring + (kStages - 1) * kStageBytes;
  // Products of bfloat16 know their types when they are compiled; those of float16 may have 8-bit operands.
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  const DType lhs_type = kBf16 ? DType::bf16 : p.lhs_type, rhs_type = kBf16 ? DType::bf16 : p.rhs_type;
  const FragmentLoader<kLhsKMajor, kRhsKMajor> fragments;
  Fragments even, odd;
  wait_copies<kStagesAhead - 1>();
  __syncthreads();
  uint32_t use = ring;
  fragments.load(use, 0, &even);
  fragments.load(use, 1, &odd);
  copies->template copy_stage<kVectors>(last_stage, p, lhs_type, rhs_type);
  multiply_add_all<T>(even, sums);
#pragma unroll 1
  while (copies->depth_left() > -kStagesAhead * kDepth) {
    wait_copies<kStagesAhead - 1>();
    __syncthreads();
    const uint32_t free = use;  // its last read lies before the barrier
    use = use == last_stage ? ring : use + kStageBytes;
    fragments.load(use, 0, &even);
    multiply_add_all<T>(odd, sums);
    fragments.load(use, 1, &odd);
    copies->template copy_stage<kVectors>(free, p, lhs_type, rhs_type);
    multiply_add_all<T>(even, sums);
  }
  multiply_add_all<T>(odd, sums);
  wait_copies<0>();
}

// Sums of lane l: rows l/4 and l/4 + 8 of each slab, columns 2 (l%4) and the next of each 8. They pass through shared
// memory slab by slab, so that 8 lanes store 64 neighbours.
__device__ void drain_sums(const Finish& f, const Sums& sums, float* staged, int warp_row, int warp_col) {
  int lane;  // read anew for every tile: what follows from it must not occupy registers in the loop
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll 1
  for (int slab = 0; slab < kWarpTile / kSlab; ++slab) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWarpTile / kSlab; ++i) {
      if (i != slab) continue;  // sums are registers: no index at run time
#pragma unroll
      for (int j = 0; j < kWarpTile / 8; ++j) {
        float* at = staged + staged_at(lane / 4, j * 8 + lane % 4 * 2, kWarpTile);
        const float (&s)[4] = sums[i][j];
        *reinterpret_cast<float2*>(at) = make_float2(s[0], s[1]);
        *reinterpret_cast<float2*>(at + 8 * kWarpTile) = make_float2(s[2], s[3]);
      }
    }
    __syncwarp();
    drain<kSlab, kWarpTile, kWarpTile, 32, 2>(f, staged, warp_row + slab * kSlab, warp_col, lane);
  }
}

// Element type and copies are chosen at run time, outside the loop: three kernels to compile instead of nine. Between
// tiles, what a block knows lies in shared memory, for the loop needs every register.
template <bool kLhsKMajor, bool kRhsKMajor>
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks) multiply_mma(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) char ring[];
  __shared__ int64_t next;   // tile
  __shared__ Place summed;   // tile whose sums are to be stored
  __shared__ bool has_sums;  // there is one
  const uint32_t stages = shared_address(ring);
  const int warp = threadIdx.x / 32;
  float* staged = reinterpret_cast<float*>(ring + kStagesAhead * kStageBytes) + warp * kStagedFloats;
  Sums sums;
  if (threadIdx.x == 0) {
    next = blockIdx.x;
    has_sums = false;
  }
  for (;;) {
    __syncthreads();  // the ring is free
    Place at;
    const Found found = find_tile<kMmaCols>(p, next, &at);
    const bool sums_follow = found == Found::tile && at.depth > 0;
    Copies<kLhsKMajor, kRhsKMajor> copies;
    if (sums_follow) {
      copies = Copies<kLhsKMajor, kRhsKMajor>(p, at);
      copies.copy_early(stages, p);
    }
    int64_t drawn = 0;
    if (threadIdx.x == 0) drawn = atomicAdd(reinterpret_cast<unsigned long long*>(p.scan.drawn), 1ull);
    if (has_sums) {
      drain_sums(finish_at(p, summed), sums, staged, warp / kWarpsARow * kWarpTile, warp % kWarpsARow * kWarpTile);
    }
    if (found == Found::end) return;
    if (found == Found::tile && at.depth == 0) write_zeros<kMmaCols>(finish_at(p, at), kMmaThreads);
    __syncthreads();  // the stages of staged sums are free
    if (threadIdx.x == 0) {
      next = gridDim.x + drawn;
      summed = at;
      has_sums = sums_follow;
    }
    if (!sums_follow) continue;
    clear(sums);
    if (p.lhs_type == DType::bf16) {
      if (copies.vectors()) {
        contract<__nv_bfloat16, true>(p, &copies, stages, sums);
      } else {
        contract<__nv_bfloat16, false>(p, &copies, stages, sums);
      }
    } else if (copies.vectors()) {
      contract<__half, true>(p, &copies, stages, sums);
    } else {
      contract<__half, false>(p, &copies, stages, sums);
    }
  }
}
static_assert(kMmaThreads / 32 * kStagedFloats * 4 <= kStageBytes, "staged sums fit into the stage not copied early");

// --- float32 operands: IEEE products and sums, k ascending
// ------------------------------------------------------------

constexpr int kFmaTile = kTileRows;  // columns as well
constexpr int kFmaThreads = 256;
constexpr int kFmaDepth = 16;
constexpr int kFmaStages = 2;
constexpr int kFmaStride = kFmaTile + 4;  // floats; keeps 16-byte alignment and spreads transposing writes over banks
constexpr int kFmaOperand = kFmaDepth * kFmaStride;
constexpr int kFmaCopies = kFmaTile * kFmaDepth / kFmaThreads;

// Single values, so any stride will do; a k-major operand is turned on its way to shared memory.
class ValueCopier {
 public:
  __device__ ValueCopier(const char* data, bool k_major, int64_t stride, int extent) {
    k_ = k_major ? threadIdx.x % kFmaDepth : threadIdx.x / kFmaTile;
    const int outer = k_major ? threadIdx.x / kFmaDepth : threadIdx.x % kFmaTile;
    outer_left_ = extent - outer;
    at_ = reinterpret_cast<const float*>(data) + (k_major ? outer * stride + k_ : k_ * stride + outer);
    offset_ = (k_ * kFmaStride + outer) * static_cast<int>(sizeof(float));
  }

  // Fills this thread's part of the stage at `to`, of which `depth` elements along k exist, and moves on.
  __device__ void copy(uint32_t to, int depth, bool k_major, int64_t stride) {
    const int k_step = k_major ? 0 : kFmaThreads / kFmaTile;
    const int outer_step = k_major ? kFmaThreads / kFmaDepth : 0;
    const int shared_step = (k_step * kFmaStride + outer_step) * static_cast<int>(sizeof(float));
    const int64_t step = (k_step + outer_step) * stride;
#pragma unroll
    for (int i = 0; i < kFmaCopies; ++i) {
      const bool exists = k_ + i * k_step < depth && i * outer_step < outer_left_;
      copy_async<4>(to + offset_ + i * shared_step, at_ + i * step, exists ? 4 : 0);
    }
    at_ += k_major ? kFmaDepth : kFmaDepth * stride;
  }

  __device__ void move(int64_t bytes) {
    at_ = reinterpret_cast<const float*>(reinterpret_cast<const char*>(at_) + bytes);
  }

 private:
  const float* at_;
  uint32_t offset_;
  int k_, outer_left_;
};

__global__ void __launch_bounds__(kFmaThreads, 2) multiply_fma(const __grid_constant__ Problem p) {
  __shared__ __align__(16) float ring[kFmaStages][2][kFmaOperand];
  // Thread (x, y) owns rows 4y ... 4y+3 and 64 more, columns 4x ... 4x+3 and 64 more: reads of a warp coincide.
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const bool lhs_k_major = !p.contract_rows;
  Place at;
  for (int64_t index = blockIdx.x;; index += gridDim.x) {
    const Found found = find_tile<kFmaTile>(p, index, &at);
    if (found == Found::end) return;
    if (found == Found::skip) continue;
    if (at.depth == 0) {
      write_zeros<kFmaTile>(finish_at(p, at), kFmaThreads);
      continue;
    }
    ValueCopier lhs(lhs_at(p, at), lhs_k_major, p.lhs_stride, at.rows);
    ValueCopier rhs(rhs_at(p, at), p.rhs_k_major, p.rhs_stride, at.cols);
    float sums[8][8] = {};
    // Step -1 fills the first stage.
#pragma unroll 1
    for (int step = -1; step * kFmaDepth < at.depth; ++step) {
      const int depth_left = at.depth - (step + 1) * kFmaDepth;
      if (depth_left > 0) {
        if (depth_left == p.jump_depth) rhs.move(p.rhs_jump);
        const uint32_t fill = shared_address(ring[(step + 1) % kFmaStages]);
        lhs.copy(fill, depth_left, lhs_k_major, p.lhs_stride);
        rhs.copy(fill + kFmaOperand * sizeof(float), depth_left, p.rhs_k_major, p.rhs_stride);
      }
      commit_copies();
      if (step < 0) continue;
      wait_copies<1>();
      __syncthreads();
      const float* a = ring[step % kFmaStages][0] + 4 * y;
      const float* b = ring[step % kFmaStages][1] + 4 * x;
#pragma unroll
      for (int k = 0; k < kFmaDepth; ++k) {
        float left[8], right[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 l = *reinterpret_cast<const float4*>(a + k * kFmaStride + half * 64);
          const float4 r = *reinterpret_cast<const float4*>(b + k * kFmaStride + half * 64);
          left[4 * half] = l.x, left[4 * half + 1] = l.y, left[4 * half + 2] = l.z, left[4 * half + 3] = l.w;
          right[4 * half] = r.x, right[4 * half + 1] = r.y, right[4 * half + 2] = r.z, right[4 * half + 3] = r.w;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i][j] = __fmaf_rn(left[i], right[j], sums[i][j]);
        }
      }
      __syncthreads();
    }
    const Finish finish = finish_at(p, at);
    float* staged = &ring[0][0][0];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i / 4 != half) continue;  // sums are registers: no index at run time
        const int row = 4 * y + i % 4;
        const float (&s)[8] = sums[i];
        *reinterpret_cast<float4*>(staged + staged_at(row, 4 * x, kFmaStride)) = make_float4(s[0], s[1], s[2], s[3]);
        *reinterpret_cast<float4*>(staged + staged_at(row, 4 * x + 64, kFmaStride)) =
            make_float4(s[4], s[5], s[6], s[7]);
      }
      __syncthreads();
      drain<kFmaTile / 2, kFmaTile, kFmaStride, kFmaThreads, 1>(finish, staged, half * (kFmaTile / 2), 0, threadIdx.x);
      __syncthreads();
    }
  }
}
static_assert(kFmaTile / 2 * kFmaStride <= kFmaStages * 2 * kFmaOperand, "half a tile fits in the ring");

// --- the kernel object
// ------------------------------------------------------------------------------------------------

constexpr int64_t kMostCoordinates = INT32_MAX - kMmaCols;  // tile coordinates are 32 bits wide
constexpr int64_t kMostBlocks = INT32_MAX;

std::string refuses(const GroupedMatmul& call, const Target&) {
  const bool same = call.lhs.dtype == call.rhs.dtype && is_wide(call.lhs.dtype);
  if (!same && !(is_fp8(call.lhs.dtype) && is_fp8(call.rhs.dtype))) {
    return "takes two operands of float32, bfloat16 or float16, or two of float8, got " + describe(call.lhs) + " and " +
           describe(call.rhs);
  }
  if (std::string reason = device::refuses_ends(call); !reason.empty()) return reason;
  if (call.rhs_up.present() && call.rhs.dims[call.rhs_axis] % kDepth != 0) {
    return "contracts a weight in two arrays if both are a multiple of 32 deep; rhs is " + describe(call.rhs);
  }
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    for (int i = 0; i < t->rank; ++i) {
      if (t->dims[i] > kMostCoordinates) return "takes dimensions below 2^31 - 256, got " + describe(*t);
    }
  }
  return "";
}

size_t workspace(const GroupedMatmul& call, const Target&) { return GroupScan::bytes(call.group_sizes.dims[0]); }

template <bool kLhsKMajor, bool kRhsKMajor>
void launch_mma(const Problem& p, int64_t tiles, cudaStream_t stream) {
  allow_shared_memory<multiply_mma<kLhsKMajor, kRhsKMajor>>(kRingBytes);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles, kMmaBlocks * multiprocessors()));
  multiply_mma<kLhsKMajor, kRhsKMajor><<<blocks, kMmaThreads, kRingBytes, stream>>>(p);
}

void launch(const GroupedMatmul& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const Problem p = problem_of(call, context, kTileRows, call.lhs.dtype == DType::f32 ? kFmaTile : kMmaCols);
  const bool keeps_tail = call.into.present();
  const int64_t tiles = most_tiles(p, kTileRows);
  if (tiles == 0) return;
  launch_scan(call.group_sizes.as<const int32_t>(), p.tokens, kTileRows, !keeps_tail, p.scan, stream);
  if (p.lhs_type == DType::f32) {
    const unsigned blocks = static_cast<unsigned>(std::min(tiles, kMostBlocks));  // a block takes several tiles then
    multiply_fma<<<blocks, kFmaThreads, 0, stream>>>(p);
  } else if (p.contract_rows) {
    launch_mma<false, false>(p, tiles, stream);
  } else if (p.rhs_k_major) {
    launch_mma<true, true>(p, tiles, stream);
  } else {
    launch_mma<true, false>(p, tiles, stream);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_any_cuda = {
    "grouped_matmul_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
