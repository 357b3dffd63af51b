// Weights that come as codes, widened on the chip: a warpgroup turns the codes of a stage and their scales into the
// bfloat16 tile that the tensor cores read, so that bits are those of a product of widened weights.
//
//   loader: codes of a block --TMA--> behind the tiles of its stage -> codes[s]
//            |  a thread, a pass: 16 bytes of codes; their scales are in registers, asked for a block before
//            v  bits apart, * scale (code_pairs.h) -> 2 or 4 chunks of 16 bytes, swizzled as TMA would have written them
//   full[s] -> consumers, which know nothing of it (pipeline.cuh)
//
// What it may take: a block of 128 x 192 x 64 is 768 cycles of the tensor cores, in which four schedulers issue 3072
// instructions; docs/kernels.md counts them. 40 registers a thread.
#pragma once

#include "cc/device/coded_weights.cuh"
#include "cc/device/layout_pieces.cuh"
#include "cc/device/pipeline.cuh"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {


// Loads boxes of codes, one after the other, for a product whose box i starts at code `code_of(i)` of line `line_of(i)`.
template <bool kNibbles, class CodeOf, class LineOf>
__device__ inline void load_coded(const CodedWeights& w, int group, int boxes, int box_lines, uint32_t to,
                                  uint32_t arrived, CodeOf code_of, LineOf line_of) {
  const uint32_t bytes = box_lines * Pieces<kNibbles>::kRowBytes;
  ptx::barrier_arrive_expect(arrived, boxes * bytes);
  for (int i = 0; i < boxes; ++i) {
    ptx::tensor_load(to + i * bytes, &w.map, {{code_of(i) / (kNibbles ? 2 : 1), line_of(i), group, 0}}, arrived);
  }
}

// The scales of a thread's pieces in the block that is next, one or two a pass. Where blocks of k run along lines
// (Major::k), a pass has lines of its own, which stay while k moves along them; else columns of its own, and k is the
// line.
template <pairs::Codes kCodes, Major kMajor, int kPasses>
class PieceScales {
  static constexpr int kOfPiece = pairs::piece_scales(kCodes), kBlock = pairs::block_of(kCodes);
  using P = Pieces<pairs::is_nibbles(kCodes)>;

 public:
  // `line_of(row)` is the line, Major::mn: the column, of a row of the tile; the latter of rows that are a multiple of 64.
  template <class LineOf>
  __device__ PieceScales(const CodedWeights& w, int group, int thread, LineOf line_of) {
    if constexpr (kOfPiece != 0) {
      scales_ = w.scales + group * w.scale_slice;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = i * P::kRows;
        if constexpr (kMajor == Major::k) {
          const int line = line_of(row + P::row(thread));
          at_[i] = line < w.lines ? (line >> w.line_shift) * w.scale_line : -1;
        } else {
          const int column = line_of(row / 64 * 64) + P::code(thread);
          at_[i] = column < w.line ? column / kBlock : -1;
        }
      }
    }
  }

  // Of the block at k, for one pass.
  __device__ void load(const CodedWeights& w, int k, int thread, int pass) {
    if constexpr (kOfPiece != 0) {
      int along, end;
      int32_t part;
      if constexpr (kMajor == Major::k) {
        along = k + P::code(thread), end = w.line;
        part = along / kBlock;
      } else {
        along = k + pass * P::kRows % 64 + P::row(thread), end = w.lines;
        part = (along >> w.line_shift) * w.scale_line;
      }
      const bool exists = at_[pass] >= 0 && along < end;
#pragma unroll
      for (int i = 0; i < kOfPiece; ++i) held_[pass][i] = exists ? __ldg(scales_ + (at_[pass] + part) + i) : 0;
    }
  }
  __device__ uint32_t operator()(int pass, int i) const {
    if constexpr (kOfPiece == 0) {
      return 0;
    } else {
      return held_[pass][i];
    }
  }

 private:
  const uint8_t* scales_;
  int32_t at_[kPasses];
  uint32_t held_[kPasses][kOfPiece == 0 ? 1 : kOfPiece];
};

// One piece, from and to shared memory, two chunks at a time.
template <pairs::Codes kCodes, class ScaleOf>
__device__ inline void widen_piece(uint32_t from, uint32_t to, ScaleOf scale_of) {
  constexpr bool kNibbles = pairs::is_nibbles(kCodes);
  constexpr int kTurns = Pieces<kNibbles>::kChunks / 2, kWords = 4 / kTurns, kScales = pairs::piece_scales(kCodes);
  uint32_t words[4];
  ptx::load_shared_v4(from, words);
  pairs::Factor factor;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (t == 0 || t < kScales) factor = pairs::factor_of<kCodes>(scale_of(t));
    uint32_t chunks[8];
    pairs::widen<kCodes, kWords>(words + t * kWords, factor, chunks);
    ptx::store_shared_v4(to ^ (32 * t), reinterpret_cast<const uint32_t (&)[4]>(chunks[0]));
    ptx::store_shared_v4(to ^ (32 * t + 16), reinterpret_cast<const uint32_t (&)[4]>(chunks[4]));
  }
}

// The widening warpgroup's whole life. Product says where a row of the tile comes from, and how many blocks have codes.
template <pairs::Codes kCodes, class Product>
__device__ inline void widen_tiles(const typename Product::Params& p, uint32_t shared, uint32_t barriers,
                                   const Work* items) {
  using Shape = typename Product::Shape;
  using P = Pieces<pairs::is_nibbles(kCodes)>;
  constexpr int kPasses = P::kPasses(Shape::kCols);
  static_assert(Shape::kCodeBytes == P::kRowBytes);
  const CodedWeights& w = p.coded;
  const int thread = threadIdx.x % kWideningThreads, lane = threadIdx.x % 32;
  const uint32_t from = shared + Shape::kCodesAt + P::from(thread), to = shared + 2 * kBlockBytes + P::to(thread);
  WorkReader<Shape, true> reader(barriers, items);
  Ring<Shape::kStages> ring;
  while (true) {
    const Work& work = reader.get();
    const int kind = work.kind, blocks = work.k_blocks(), cols = p.cols - work.col0;
    if (kind == Work::kDone) return;
    if (kind != Work::kTile) {
      reader.release();
      continue;
    }
    const int passes = cols > 0 ? P::kPasses(Product::coded_cols(cols)) : 0;
    PieceScales<kCodes, Product::kRhsMajor, kPasses> scales(w, work.group, thread,
                                                            [&](int row) { return Product::coded_line(p, work, row); });
    reader.release();
    const auto ask = [&](int k, int pass) {
      if (pass < passes) scales.load(w, k, thread, pass);
    };
#pragma unroll
    for (int i = 0; i < kPasses; ++i) ask(0, i);
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb) {
      const uint32_t stage = ring.slot * Shape::kStageBytes;
      ptx::barrier_wait(barriers + 8 * (Shape::kCodesFull + ring.slot), ring.parity);
      if (Product::from_codes(p, kb)) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (i >= passes) break;
          widen_piece<kCodes>(from + stage + i * P::kPassBytes, to + stage + i * P::kPassChunkBytes,
                              [&](int s) { return scales(i, s); });
          ask((kb + 1) * kBlockK, i);
        }
        ptx::fence_async();
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(barriers + 8 * (Shape::kFull + ring.slot));
      ring.advance();
    }
  }
}

// By what the codes are.
template <bool kNibbles, class Product>
__device__ inline void widen_any(const typename Product::Params& p, uint32_t shared, uint32_t barriers,
                                 const Work* items) {
  using pairs::Codes;
  if constexpr (kNibbles) {
    if (p.coded.codes == Codes::mxfp4) {
      widen_tiles<Codes::mxfp4, Product>(p, shared, barriers, items);
    } else {
      widen_tiles<Codes::nvfp4, Product>(p, shared, barriers, items);
    }
  } else if (p.coded.codes == Codes::mxfp8) {
    widen_tiles<Codes::mxfp8, Product>(p, shared, barriers, items);
  } else {
    widen_tiles<Codes::e4m3, Product>(p, shared, barriers, items);
  }
}

}  // namespace grouped::sm90
