// The operands of mma_tiles.cuh in shared memory: how they come there, and how a warp reads what `mma.sync` multiplies.
// A stage is 64 bytes along the contraction, whatever the elements: 16, 32 or 64 of them.
#pragma once

#include <cstdint>

#include "cc/device/common/elements.cuh"
#include "cc/device/common/mma_sm80.cuh"
#include "cc/device/common/portable_tiles.cuh"

namespace grouped {
namespace device {

constexpr int kMmaThreads = 128;
constexpr int kMmaRing = 48 * 1024;
constexpr int kMmaRows = 64;  // of sums that a warp owns
constexpr int kMmaWarpsARow = 2;
constexpr int kMmaSlab = 16;     // rows of one mma, and those that a warp stages at once
constexpr int kStageDepth = 64;  // bytes
static_assert(kTileRows / kMmaRows * kMmaWarpsARow * 32 == kMmaThreads);

// What the operands of a kernel are in shared memory. kApart: the sum of a stage is finished before it is added.
template <int kBytes_, bool kApart_>
struct MmaShape {
  static constexpr int kBytes = kBytes_;  // of an element
  static constexpr bool kApart = kApart_;
  static constexpr int kWarpCols = kApart ? 32 : 64;
  static constexpr int kCols = kMmaWarpsARow * kWarpCols;
  static constexpr int kChunk = 16 / kBytes;           // elements of 16 bytes
  static constexpr int kDepth = kStageDepth / kBytes;  // of one stage
  static constexpr int kLhsBytes = kTileRows * kStageDepth, kStageBytes = kLhsBytes + kCols * kStageDepth;
  static constexpr int kStages = kMmaRing / kStageBytes;
  static constexpr int kStagesAhead = kStages - 1;  // that copies run ahead of products
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kStagedFloats = kMmaSlab * kWarpCols;
  static_assert(kMmaThreads / 32 * kStagedFloats * 4 <= kStageBytes, "staged sums fit into the stage not copied early");
};

// Shared layouts, in 16-byte chunks, swizzled so that what a warp reads at once is on 32 different banks: the 8 rows
// of an ldmatrix matrix, of 8-bit codes two out of each four neighbours, or 8 elements of 4 bytes in each of 4 rows.
//   k-major:  kExtent rows of 4 chunks along k;  otherwise: kDepth rows (k) of kExtent / kChunk chunks along the
//   result's axis
template <class Shape, bool kKMajor, int kExtent>
__device__ uint32_t chunk_offset(int row, int chunk) {
  if constexpr (kKMajor) return row * kStageDepth + ((chunk ^ ((row >> 1) & 3)) * 16);
  static_assert(kKMajor || Shape::kBytes > 1 || kExtent == 64, "two rows of codes are on all banks");
  const int swizzle = Shape::kBytes == 4 ? row % 4 * 2 : Shape::kBytes == 2 ? row % 8 : row / 4 % 4;
  return row * (kExtent * Shape::kBytes) + ((chunk ^ swizzle) * 16);
}

__device__ inline uint32_t widened(const char* at, DType type) {
  const uint8_t code = *reinterpret_cast<const uint8_t*>(at);
  return type == DType::e4m3fn ? half_bits_of_e4m3(code) : half_bits_of_e5m2(code);
}

// Element i of those at `at`, as it is in kBytes bytes of shared memory.
template <int kBytes>
__device__ uint32_t staged_element(const char* at, DType type, int i) {
  if constexpr (kBytes == 1) return reinterpret_cast<const uint8_t*>(at)[i];
  return bytes_of(type) == 2 ? reinterpret_cast<const uint16_t*>(at)[i] : widened(at + i, type);
}

// The first `count` elements of 2 or 1 bytes of a chunk, zeros behind them, where 16-byte copies cannot reach: odd
// strides and bases.
template <int kBytes>
__device__ uint4 gather_chunk(const char* at, DType type, int count) {
  constexpr int kPerWord = 4 / kBytes;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int e = kPerWord * i + j;
      words[i] |= (e >= count ? 0 : staged_element<kBytes>(at, type, e)) << 8 * kBytes * j;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// What one thread copies of one operand of kExtent rows or columns: some chunks of every stage, a fixed step apart.
template <class Shape, bool kKMajor, int kExtent>
class Copier {
 public:
  Copier() = default;

  // `extent`: elements of the operand from `data` on, along the result's axis. `jump`: bytes that it will be moved by.
  __device__ Copier(const char* data, DType type, int64_t stride_bytes, int extent, int64_t jump) {
    const int chunk = threadIdx.x % kChunksARow, row = threadIdx.x / kChunksARow;
    at_ = data + row * stride_bytes + chunk * kChunk * bytes_of(type);
    offset_ = chunk_offset<Shape, kKMajor, kExtent>(row, chunk);
    inner_ = kKMajor ? chunk * kChunk : row;
    outer_left_ = extent - (kKMajor ? row : chunk * kChunk);
    vectors_ = bytes_of(type) == Shape::kBytes && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
               (stride_bytes | jump) % 16 == 0;
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
        const uint32_t chunk = to + i * (kMmaThreads * 16);
        if constexpr (Shape::kBytes == 4) {
#pragma unroll
          for (int e = 0; e < kChunk; ++e) copy_async<4>(chunk + 4 * e, from + 4 * e, e < count ? 4 : 0);
        } else {
          store16(chunk, gather_chunk<Shape::kBytes>(from, type, count));
        }
      }
    }
    at_ = kKMajor ? at_ + Shape::kDepth * bytes_of(type) : from;
  }

  __device__ void move(int64_t bytes) { at_ += bytes; }
  __device__ bool vectors() const { return vectors_; }

 private:
  static constexpr int kChunk = Shape::kChunk;
  static constexpr int kChunks = kExtent * Shape::kDepth / kChunk / kMmaThreads;
  static constexpr int kChunksARow = (kKMajor ? Shape::kDepth : kExtent) / kChunk;
  static constexpr int kRowStep = kMmaThreads / kChunksARow;
  static constexpr int kSwizzled = kKMajor || Shape::kBytes == 2 ? 8 : Shape::kBytes == 4 ? 4 : 16;  // rows
  static_assert(kRowStep % kSwizzled == 0, "the swizzle repeats");

  const char* at_;
  uint32_t offset_;
  int inner_;       // of this thread's first chunk, along k
  int outer_left_;  // elements from this thread's first chunk to the operand's end, along the result's axis
  bool vectors_;
};

// Whether codes are contracted across their lines. Two blocks of 8 columns are the even and the odd ones of 16 then.
template <class Shape, bool kKMajor>
constexpr bool kTurned = !kKMajor && Shape::kBytes == 1;

// Fragments of half a stage for a warp's sums: in mma's order for a, two blocks of 8 columns each for b.
template <class Shape>
struct Fragments {
  uint32_t a[kMmaRows / kMmaSlab][4];
  uint32_t b[Shape::kWarpCols / kMmaSlab][4];

  // Word `half` of column block j of 8.
  __device__ uint32_t column(int j, int half) const { return b[j / 2][j % 2 * 2 + half]; }
};

// Where a lane reads the fragments of one operand: 16 of its rows or columns and half a stage at a time, as the words
// (low, k), (low + 8, k), (low, k + half), (low + 8, k + half) of mma's `a`, or with the middle two exchanged, for `b`.
// Codes that are contracted across their lines come as pairs of neighbours in a line, from transposed matrices of
// 16-bit values: lane l gets pair l/4 of lines 4 (l%4) and the next of one matrix, and of the two lines behind them of
// another, and one permutation of bytes of both words makes four lines of one column.
template <class Shape, bool kKMajor, int kExtent, bool kLhs>
class OperandReader {
 public:
  // `first`: of the warp's rows or columns.
  __device__ explicit OperandReader(int first) {
    const int lane = threadIdx.x % 32;
    if constexpr (kByWords) {
      at_ = chunk_offset<Shape, false, kExtent>(lane % 4, (first + lane / 4) / 4) + lane / 4 % 4 * 4;
    } else {
      const int matrix = lane / 8, line = lane % 8;
      const int outer = kLhs ? matrix % 2 : matrix / 2, inner = kLhs ? matrix / 2 : matrix % 2;
      if constexpr (kTurned<Shape, kKMajor>) {
        const int first_line = matrix / 2 * 16 + matrix % 2 * 2;
        at_ = chunk_offset<Shape, false, kExtent>(first_line + line / 2 * 4 + line % 2, first / Shape::kChunk);
      } else if constexpr (kKMajor) {
        at_ = chunk_offset<Shape, true, kExtent>(first + outer * 8 + line, inner);
      } else {
        at_ = chunk_offset<Shape, false, kExtent>(inner * 8 + line, first / Shape::kChunk + outer);
      }
    }
  }

  // The swizzle turns steps along the result's axis, or along k, into exclusive-or.
  __device__ void load(uint32_t operand, int slab, int half, uint32_t (&to)[4]) const {
    constexpr int kLine = kExtent * Shape::kBytes;  // bytes, where lines run along the result's axis
    const uint32_t at = operand + at_;
    if constexpr (kByWords) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int outer = kLhs ? i % 2 : i / 2, inner = kLhs ? i / 2 : i % 2;
        to[i] = load_word((at ^ (slab * kMmaSlab + outer * 8) * 4) + (half * 8 + inner * 4) * kLine);
      }
    } else if constexpr (kKMajor) {
      load_matrices<false>((at ^ (half * (kStageDepth / 2))) + slab * kMmaSlab * kStageDepth, to);
    } else {
      load_matrices<true>((at ^ (slab * kMmaSlab * Shape::kBytes)) + half * (Shape::kDepth / 2) * kLine, to);
      if constexpr (kTurned<Shape, kKMajor>) {
        const uint32_t low = to[1], high = to[2];
        to[1] = __byte_perm(high, to[3], kEvenBytes);
        to[2] = __byte_perm(to[0], low, kOddBytes);
        to[0] = __byte_perm(to[0], low, kEvenBytes);
        to[3] = __byte_perm(high, to[3], kOddBytes);
      }
    }
  }

 private:
  static constexpr bool kByWords = !kKMajor && Shape::kBytes == 4;  // which ldmatrix cannot transpose
  static_assert(!kTurned<Shape, kKMajor> || !kLhs, "rows of 8-bit codes are contracted along lines");
  static constexpr uint32_t kEvenBytes = 0x6420, kOddBytes = 0x7531;

  uint32_t at_;
};

template <class Shape, bool kLhsKMajor, bool kRhsKMajor>
class FragmentLoader {
 public:
  __device__ FragmentLoader()
      : lhs_(threadIdx.x / 32 / kMmaWarpsARow * kMmaRows), rhs_(threadIdx.x / 32 % kMmaWarpsARow * Shape::kWarpCols) {}

  __device__ void load(uint32_t stage, int half, Fragments<Shape>* f) const {
#pragma unroll
    for (int i = 0; i < kMmaRows / kMmaSlab; ++i) lhs_.load(stage, i, half, f->a[i]);
#pragma unroll
    for (int j = 0; j < Shape::kWarpCols / kMmaSlab; ++j) rhs_.load(stage + Shape::kLhsBytes, j, half, f->b[j]);
  }

 private:
  OperandReader<Shape, kLhsKMajor, kTileRows, true> lhs_;
  OperandReader<Shape, kRhsKMajor, Shape::kCols, false> rhs_;
};

}  // namespace device
}  // namespace grouped
