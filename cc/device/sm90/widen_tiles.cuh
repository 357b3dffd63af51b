// Weights that come as codes, widened on the chip: a warpgroup turns the codes of a stage and their scales into the
// bfloat16 tile that the tensor cores read, so that bits are those of a product of widened weights.
//
//   loader: codes of a block --TMA--> behind the tiles of its stage -> codes[s]
//            |  per thread and pass: 32 codes; their scales are in registers, asked for a block before
//            v  bits apart, * scale (code_pairs.h) -> 4 chunks of 16 bytes, swizzled as TMA would have written them
//   full[s] -> consumers, which know nothing of it (pipeline.cuh)
//
//   full[s]    1 arrival with the bytes of the rows, 4 of the widening warps    loader, they -> consumers
//   codes[s]   1 arrival with the bytes of a block's codes                      loader -> widening warps
//
// A block of numbers, of a low-rank product, goes straight to the tile; for it the widening warps arrive at once.
//
// What it may take: a block of 128 x 192 x 64 is 768 cycles of the tensor cores, in which four schedulers issue 3072
// instructions; docs/kernels.md counts them.
#pragma once

#include "cc/device/sm90/coded_weights.cuh"
#include "cc/device/sm90/layout_pieces.cuh"
#include "cc/device/sm90/pipeline.cuh"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {

constexpr int kWideningWarps = kWideningThreads / 32;
constexpr int kCodedThreads = kThreads + kWideningThreads;

// A tile of 128 rows by kCols whose stages have room for codes, behind what is multiplied.
template <bool kNibbles, int kCols_, int kStages_, int kSlots_, int kSlotBytes_ = kSlotBytes>
struct CodedTileShape
    : ShellShape<2 * kBlockBytes + kCols_ * (128 + coded_row_bytes(kNibbles)), kStages_, kSlots_, kSlotBytes_> {
  using Base = ShellShape<2 * kBlockBytes + kCols_ * (128 + coded_row_bytes(kNibbles)), kStages_, kSlots_, kSlotBytes_>;
  static constexpr int kCols = kCols_, kTileCols = kCols_, kSets = 0;
  static constexpr int kCodesAt = 2 * kBlockBytes + kCols * 128;  // in a stage
  static constexpr int kCodesFullAt = Base::kSharedBytes;         // barriers
  static constexpr int kSharedBytes = kCodesFullAt + 8 * kStages_;
  static_assert(kSharedBytes <= kSharedLimit);

  // Of 128 per thread at launch. With 216 for consumers ptxas serialises every wgmma.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 224, kWideningRegisters = 40;
};

// Loads boxes of codes, one after the other, for a product whose box i starts at code `code_of(i)` of line
// `line_of(i)`.
template <bool kNibbles, class CodeOf, class LineOf>
__device__ inline void load_coded(const CodedWeights& w, int group, int boxes, int box_lines, uint32_t to,
                                  uint32_t arrived, CodeOf code_of, LineOf line_of) {
  const uint32_t bytes = box_lines * coded_row_bytes(kNibbles);
  ptx::barrier_arrive_expect(arrived, boxes * bytes);
  for (int i = 0; i < boxes; ++i) {
    ptx::tensor_load(to + i * bytes, &w.map, {{code_of(i) / (kNibbles ? 2 : 1), line_of(i), group, 0}}, arrived);
  }
}

// Where the codes of a product's tile come from, for tiles of columns that are next to one another: boxes of 64 codes
// by 64. `Params`: those of the product.
constexpr int kCodedBox = 64;
template <bool kNibbles, Major kMajor, int kCols>
struct CodedBoxes : CodedBlocks {
  // Columns of a tile of which codes are loaded and widened, where so many are left.
  static __device__ int coded_cols(int left) {
    return left >= kCols ? kCols : (left + kCodedBox - 1) / kCodedBox * kCodedBox;
  }
  // The line, or for MN-major weights the code in a line, of column `col` of a tile, below 64; and how much further it
  // is for the column `by` on, a multiple of 64.
  template <class Params>
  static __device__ int coded_column(const Params&, const Work& work, int col) {
    return work.col0 + col;
  }
  template <class Params>
  static __device__ int coded_move(const Params&, int by) {
    return by;
  }
  template <class Params>
  static __device__ void load_codes(const Params& p, const Work& work, int k, uint32_t to, uint32_t arrived) {
    const auto col = [&](int box) { return work.col0 + box * kCodedBox; };
    const auto at_k = [&](int) { return k; };
    const int boxes = coded_cols(p.cols - work.col0) / kCodedBox;
    if constexpr (kMajor == Major::k) {
      load_coded<kNibbles>(p.coded, work.group, boxes, kCodedBox, to, arrived, at_k, col);
    } else {
      load_coded<kNibbles>(p.coded, work.group, boxes, kCodedBox, to, arrived, col, at_k);
    }
  }
};

// The scales of a thread's pieces in the block that is next, one or two per pass. Where blocks of k run along lines
// (Major::k), a pass has lines of its own; else columns of its own, and k is the line. What follows the last k
// takes the last scale: its codes are zero, and where that scale is NaN the sum is NaN as well. What follows the
// last column takes any scale.
template <pairs::Codes kCodes, Major kMajor, int kPasses>
class PieceScales {
  static constexpr int kOfPiece = pairs::scales_of_32(kCodes), kBlock = pairs::block_of(kCodes);

 public:
  // `first` is the line of the thread's piece in the first pass; Major::mn: the code of a line that is the tile's first
  // column.
  __device__ PieceScales(const CodedWeights& w, int group, int thread, int first) {
    if constexpr (kOfPiece != 0) {
      first_ = uint32_t(group) * w.scale_slice;
      if constexpr (kMajor == Major::k) {
        first_ += (first >> w.line_shift) * w.scale_line;
      } else {
        first_ += (first + piece_code(thread)) / kBlock;
      }
    }
  }

  // Goes to the block at k.
  __device__ void move(const CodedWeights& w, int k, int thread) {
    if constexpr (kOfPiece != 0) {
      if constexpr (kMajor == Major::k) {
        constexpr int kLast = kOfPiece == 1 ? 1 : kPieceCodes;  // two scales: both are the line's
        at_ = first_ + min(k + piece_code(thread), w.line - kLast) / kBlock;
      } else {
        at_ = first_ + (min(k + piece_row(thread), w.lines - 1) >> w.line_shift) * w.scale_line;
      }
    }
  }
  // Asks for those of a pass whose columns are `columns` behind the tile's first.
  __device__ void load(const CodedWeights& w, int pass, int columns) {
    if constexpr (kOfPiece != 0) {
      const uint32_t step =
          kMajor == Major::k ? uint32_t(columns >> w.line_shift) * w.scale_line : uint32_t(columns) / kBlock;
      const uint32_t at = min(at_ + step, w.scale_bytes - kOfPiece);
#pragma unroll
      for (int i = 0; i < kOfPiece; ++i) held_[pass][i] = __ldg(w.scales + at + i);
    }
  }
  // Whether a scale of this thread, in any pass, needs a second product.
  __device__ bool need_second() const {
    bool any = false;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) any = any || pairs::needs_second<kCodes>(held_[pass][0]);
    return any;
  }
  // Of the halves of a piece in a pass.
  __device__ void factors(int pass, pairs::Factor (&of_halves)[2]) const {
    of_halves[0] = pairs::factor_of<kCodes>(kOfPiece == 0 ? 0 : held_[pass][0]);
    of_halves[1] = kOfPiece < 2 ? of_halves[0] : pairs::factor_of<kCodes>(held_[pass][kOfPiece - 1]);
  }

 private:
  uint32_t first_, at_;
  uint32_t held_[kPasses][kOfPiece == 0 ? 1 : kOfPiece] = {};
};

// What is widened at once: 32 codes of 4 bits, a piece, or 16 of 8 bits; four words of shared memory either way.
template <pairs::Codes kCodes>
struct Portion {
  static constexpr bool kNibbles = pairs::is_nibbles(kCodes);
  static constexpr int kOfPiece = kNibbles ? 1 : 2, kChunks = kPieceChunks / kOfPiece;
  static constexpr int kCodedBytes = kPassRows * coded_row_bytes(kNibbles);  // of a pass

  // Of the portion `at`, counted over all passes.
  static __device__ void load(uint32_t from, int at, uint32_t (&words)[4]) {
    ptx::load_shared_v4((from + at / kOfPiece * kCodedBytes) ^ (16 * (at % kOfPiece)), words);
  }
  template <bool kTwice>
  static __device__ void widen(const uint32_t (&words)[4], const pairs::Factor (&factors)[2], uint32_t to, int at) {
    to += at / kOfPiece * kPassBytes;
#pragma unroll
    for (int half = 0; half < kChunks / 2; ++half) {
      const int first = at % kOfPiece * kChunks + 2 * half;  // of the piece's chunks
      uint32_t chunks[8];
      pairs::widen<kCodes, kNibbles ? 2 : 4, kTwice>(words + 2 * half, factors[first / 2], chunks);
      ptx::store_shared_v4(to ^ (16 * first), reinterpret_cast<const uint32_t (&)[4]>(chunks[0]));
      ptx::store_shared_v4(to ^ (16 * first + 16), reinterpret_cast<const uint32_t (&)[4]>(chunks[4]));
    }
  }
};

// The widening warpgroup's whole life. Product says where columns of the tile come from, and which blocks have codes.
template <pairs::Codes kCodes, class Product>
__device__ inline void widen_tiles(const typename Product::Params& p, const Shell<typename Product::Shape> shell) {
  using Shape = typename Product::Shape;
  constexpr int kPasses = Shape::kCols / kPassRows;
  using Part = Portion<kCodes>;
  const CodedWeights& w = p.coded;
  const int thread = threadIdx.x % kWideningThreads;
  const uint32_t from = shell.shared + Shape::kCodesAt + piece_codes(pairs::is_nibbles(kCodes), thread);
  const uint32_t to = shell.shared + 2 * kBlockBytes + piece_chunk(thread);
  WorkReader<Shape, true> reader(shell.barriers, shell.items);
  Ring<Shape::kStages> ring;
  while (true) {
    const Work& work = reader.get();
    const int kind = work.kind, cols = p.cols - work.col0;
    int left = work.k_blocks();
    if (kind == Work::kDone) return;
    const int row = Product::kRhsMajor == Major::k ? piece_row(thread) : 0;
    PieceScales<kCodes, Product::kRhsMajor, kPasses> scales(w, work.group, thread, Product::coded_column(p, work, row));
    reader.release();
    if (kind != Work::kTile) continue;
    const int passes = cols > 0 ? Product::coded_cols(cols) / kPassRows : 0;
    scales.move(w, 0, thread);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (i < passes) scales.load(w, i, Product::coded_move(p, i * kPassRows));
    }
#pragma unroll 1
    for (int kb = 0; left > 0; --left) {
      const uint32_t stage = ring.slot * Shape::kStageBytes;
      ptx::barrier_wait(shell.shared + Shape::kCodesFullAt + 8 * ring.slot, ring.parity);
      if (Product::from_codes(p, kb++)) {
        scales.move(w, kb * kBlockK, thread);
        const auto block = [&](auto twice) {
          uint32_t words[2][4];
          pairs::Factor factors[2];
          Part::load(from + stage, 0, words[0]);
#pragma unroll
          for (int at = 0; at < kPasses * Part::kOfPiece; ++at) {
            const int pass = at / Part::kOfPiece;
            if (pass >= passes) break;
            if (at % Part::kOfPiece == 0) {
              scales.factors(pass, factors);
              // Long before the fence, which waits for loads as well.
              scales.load(w, pass, Product::coded_move(p, pass * kPassRows));
            }
            // Past the last pass: codes that are not used.
            if (at + 1 < kPasses * Part::kOfPiece) Part::load(from + stage, at + 1, words[(at + 1) % 2]);
            Part::template widen<decltype(twice)::value>(words[at % 2], factors, to + stage, at);
          }
        };
        if constexpr (!pairs::may_need_second(kCodes)) {
          block(std::bool_constant<pairs::needs_second<kCodes>(0)>{});
        } else if (__any_sync(~0u, scales.need_second())) {  // one question per block, not one per pair
          block(std::true_type{});
        } else {
          block(std::false_type{});
        }
        ptx::fence_async();
      }
      __syncwarp();
      if (shell.lane == 0) ptx::barrier_arrive(shell.full(ring.slot));
      ring.advance();
    }
  }
}

// By what the codes are.
template <bool kNibbles, class Product>
__device__ inline void widen_any(const typename Product::Params& p, const Shell<typename Product::Shape> shell) {
  using pairs::Codes;
  if constexpr (kNibbles) {
    if (p.coded.codes == Codes::mxfp4) {
      widen_tiles<Codes::mxfp4, Product>(p, shell);
    } else {
      widen_tiles<Codes::nvfp4, Product>(p, shell);
    }
  } else if (p.coded.codes == Codes::mxfp8) {
    widen_tiles<Codes::mxfp8, Product>(p, shell);
  } else {
    widen_tiles<Codes::e4m3, Product>(p, shell);
  }
}

// As PairLoads, of codes where a block has them.
template <class Product>
struct CodedLoads : PairLoads<Product> {
  using Params = typename Product::Params;
  using Shape = typename Product::Shape;
  int rhs_bytes;

  __device__ CodedLoads(const Params& p, const Work& work) : PairLoads<Product>(p, work) {
    rhs_bytes = int(this->bytes) - this->boxes * kBlockBytes;
    this->bytes = this->boxes * kBlockBytes;
  }
  __device__ void load(const Params& p, const Work& work, int block, uint32_t rank, uint32_t stage,
                       uint32_t full) const {
    // Barriers of both kinds are side by side.
    const uint32_t arrived = full + (Shape::kCodesFullAt - Shape::kBarriersAt - 8 * Shape::kFull);
    const bool coded = this->columns && Product::from_codes(p, block);
    if (coded) {
      Product::load_codes(p, work, block * kBlockK, stage + Shape::kCodesAt, arrived);
    } else {
      if (this->columns) ptx::barrier_expect(full, rhs_bytes);
      ptx::barrier_arrive(arrived);
    }
    Product::load(p, work, block * kBlockK, this->boxes, this->columns && !coded, rank, stage, full);
  }
};

template <class Product>
struct CodedPingpong : Pingpong<Product> {
  using Params = typename Product::Params;
  using Shape = typename Product::Shape;
  using Loads = CodedLoads<Product>;

  static __device__ RingArrivals rings(const Params& p) {
    const RingArrivals plain = Pingpong<Product>::rings(p);
    return {plain.full + kWideningWarps, plain.empty, plain.readers + kWideningWarps};
  }
  static __device__ void init(const Shell<Shape> shell) {
    Pingpong<Product>::init(shell);
    for (int s = 0; s < Shape::kStages; ++s) ptx::barrier_init(shell.shared + Shape::kCodesFullAt + 8 * s, 1);
  }
  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    if (warp >= 4 + kConsumerWarps) {
      ptx::set_max_registers_down<Shape::kWideningRegisters>();
      Product::widen(p, shell);
      __syncwarp();
    } else {
      Pingpong<Product>::work(p, shell, warp);
    }
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kCodedThreads, 1)
    coded_product_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, CodedPingpong>(p);
}

}  // namespace grouped::sm90
