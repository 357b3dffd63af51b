// Tiles with swapped operands (layout_swapped.cuh): how the warps that multiply turn codes into fragments, and how two
// others turn scales into factors.
#pragma once

#include "cc/device/sm90/coded_weights.cuh"
#include "cc/device/sm90/layout_swapped.cuh"
#include "cc/device/sm90/pipeline.cuh"

namespace grouped::sm90 {

// 256 rows by 128 columns. A stage holds rows, codes or else bf16 weights of a low-rank product, factors.
constexpr int kSwappedSlotBytes = 1024;
template <int kStages_, int kSlots_>
struct SwappedShape : ShellShape<6 * kBlockBytes + kFactorBytes, kStages_, kSlots_, kSwappedSlotBytes> {
  using Base = ShellShape<6 * kBlockBytes + kFactorBytes, kStages_, kSlots_, kSwappedSlotBytes>;
  static constexpr int kCols = 2 * kSwappedCols, kTileCols = kCols, kSets = 0;
  // In a stage. Second factors are behind codes, in bytes that a low-rank product's weights take in other blocks.
  static constexpr int kCodesAt = 4 * kBlockBytes, kCodesBytes = kCols * 32, kSecondAt = kCodesAt + kCodesBytes;
  static constexpr int kFactorsAt = 6 * kBlockBytes;
  // Two words for each stage: whether the first and the second 64 columns have second factors.
  static constexpr int kSecondUsedAt = Base::kSharedBytes;
  static constexpr int kSharedBytes = kSecondUsedAt + 8 * kStages_;
  static_assert(kSharedBytes <= kSharedLimit);

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

// The fragments of a unit, half of a block: [step][register].
constexpr int kUnitSteps = kSwappedSteps / 2;
using Fragments = uint32_t[kUnitSteps][4];

// The factor of a scale that needs no second one: it has what the codes' bits lack of the exponent.
template <pairs::Codes kCodes>
__device__ inline uint32_t factor_alone(uint32_t scale) {
  constexpr int kBias = pairs::bias_of(kCodes);
  if constexpr (kCodes == pairs::Codes::nvfp4) {
    return pairs::times(pairs::factor_of<kCodes>(scale).second, pairs::power_of_two(kBias - pairs::kE4M3Shift));
  } else {
    return scale * (pairs::kBoth << 7) + kBias * (pairs::kBoth << 7);  // below 128
  }
}

// What a lane reads of stages: `warp` is one of 8, `stage` the address of a stage. Register 2 i + b of a fragment has
// k 2t + 8 i and the next one of wgmma's 16, in row g + 8 b of A.
template <class Shape, Major kMajor, ColumnOrder kOrder>
class SwappedBlocks;

template <class Shape, ColumnOrder kOrder>
class SwappedBlocks<Shape, Major::k, kOrder> {
 public:
  struct Words {
    uint32_t codes[2][2][4];  // [row g, g + 8 of A][two steps]
    uint32_t factors[2][4];   // of a step each
  };

  __device__ SwappedBlocks(int warp, bool) : warp_(warp) {
    const int line = swapped_column(kOrder, warp, threadIdx.x % 32 / 4);
    for (int i = 0; i < 2; ++i) codes_[i] = Shape::kCodesAt + nibbles_at(line, i);
    factors_ = 4 * factor_of_line(line, 0);
  }

  __device__ void load(uint32_t stage, Words& words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::load_shared_v4(stage + codes_[i / 2] + further(i % 2) * 32, words.codes[i % 2][i / 2]);
    }
    load_factors(stage + Shape::kFactorsAt, words);
  }
  __device__ void load_factors(uint32_t factors, Words& words) const {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      ptx::load_shared_v4(factors + factors_ + 4 * factor_of_line(further(b), 0), words.factors[b]);
    }
  }
  __device__ void widen(const Words& words, int unit, Fragments& a) const {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      uint32_t of_line[4];
      pairs_of_line(words.codes[b][unit], threadIdx.x % 4, of_line);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j / 2][b + 2 * (j % 2)] = of_line[j];
    }
  }
  static __device__ uint32_t factor(const Words& words, int step, int i) { return words.factors[i % 2][step]; }
  // Weights of a low-rank product, K-major as tensor copies write them.
  __device__ void load_low(uint32_t stage, int step, uint32_t (&a)[4]) const {
    const int lane = threadIdx.x % 32, row = swapped_column(kOrder, warp_, lane % 16);
    ptx::load_matrix_x4(stage + Shape::kCodesAt + row * 128 + ((2 * step + lane / 16) ^ (row % 8)) * 16, a);
  }

 private:
  static constexpr __device__ int further(int b) { return swapped_column(kOrder, 0, 8 * b); }

  int warp_;
  uint32_t codes_[2], factors_;
};

template <class Shape, ColumnOrder kOrder>
class SwappedBlocks<Shape, Major::mn, kOrder> {
 public:
  struct Words {
    uint32_t codes[2][4];  // of 32 lines
    uint32_t factors[8];
  };

  __device__ SwappedBlocks(int warp, bool nvfp4) : warp_(warp) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    codes_ = Shape::kCodesAt + swapped_bytes_at(warp, threadIdx.x % 32);
    factors_ = 2 * factor_across(2 * t, warp / 2 * 2 + (nvfp4 ? g / 4 : 0));
  }

  __device__ void load(uint32_t stage, Words& words) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_transposed_x4(stage + codes_ + i * 32 * 32, words.codes[i]);
    load_factors(stage + Shape::kFactorsAt, words);
  }
  __device__ void load_factors(uint32_t factors, Words& words) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::load_shared_v4(factors + factors_ + 16 * i, reinterpret_cast<uint32_t (&)[4]>(words.factors[4 * i]));
    }
  }
  __device__ void widen(const Words& words, int unit, Fragments& a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t of_lines[2];
      pairs_of_bytes(words.codes[unit][i], warp_, of_lines);
#pragma unroll
      for (int b = 0; b < 2; ++b) a[i / 2][b + 2 * (i % 2)] = of_lines[b];
    }
  }
  static __device__ uint32_t factor(const Words& words, int step, int i) { return words.factors[2 * step + i / 2]; }
  // MN-major: two neighbouring columns of a line are this lane's.
  __device__ void load_low(uint32_t stage, int step, uint32_t (&a)[4]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, chunk = warp_ / 2 % 2 * 4 + g / 2;
    const uint32_t from = stage + Shape::kCodesAt + warp_ / 4 * kBlockBytes + g % 2 * 8 + warp_ % 2 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t lines[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int k = 16 * step + 8 * i + 2 * t + e;
        lines[e] = ptx::load_shared_word(from + k * 128 + (chunk ^ (k % 8)) * 16);
      }
      a[2 * i] = __byte_perm(lines[0], lines[1], 0x5410);
      a[2 * i + 1] = __byte_perm(lines[0], lines[1], 0x7632);
    }
  }

 private:
  int warp_;
  uint32_t codes_, factors_;
};

// ---- factors ----

// The scales that a lane turns into factors: of two lines of 64 codes, which belong to one half of a tile's columns.
// What follows the last line or code takes the last one's. With kBothHalves consumers read factors of both halves,
// of which one may need second factors and the other not: these are then always there.
template <pairs::Codes kCodes, Major kMajor, bool kBothHalves>
class ScalesOfBlocks {
  static constexpr bool kAlong = kMajor == Major::k;
  static constexpr int kBlock = pairs::block_of(kCodes), kRepeat = kBlock / kFactorCodes;
  static constexpr int kLines = 2, kOfLine = 64 / kBlock;
  static_assert(kBlockK == 64 && kSwappedCols == 64);

 public:
  // `line(i)` is the weights' line of column i (Major::k), `first` the code of a line that is the first column
  // (Major::mn).
  template <class Line>
  __device__ ScalesOfBlocks(const CodedWeights& w, int lane, int group, int half, int first, Line line)
      : lane_(lane), half_(half) {
    const uint8_t* of_group = w.scales + uint32_t(group) * w.scale_slice;
    last_ = (w.line - 1) / kBlock;
    first_ = kAlong ? 0 : (first + half * kSwappedCols) / kBlock;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      from_[i] = of_group;
      if constexpr (kAlong) from_[i] += uint32_t(min(line(line_of(i)), w.lines - 1) >> w.line_shift) * w.scale_line;
    }
  }
  // Starts to load those of the block at k, into one of two sets.
  __device__ void load(const CodedWeights& w, int k, int set) {
    uint32_t (&held)[kLines][kOfLine] = held_[set];
    const int first = kAlong ? k / kBlock : first_;
    const bool whole = first + kOfLine - 1 <= last_;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const uint8_t* from = from_[i];
      if constexpr (!kAlong) from += uint32_t(min(k + lane_ + 32 * i, w.lines - 1) >> w.line_shift) * w.scale_line;
      if (whole) {
        from += first;
#pragma unroll
        for (int j = 0; j < kOfLine; ++j) held[i][j] = ptx::load_byte(from + j);
      } else {
#pragma unroll
        for (int j = 0; j < kOfLine; ++j) held[i][j] = ptx::load_byte(from + min(first + j, last_));
      }
    }
  }
  // Writes the factors of a set's block. Returns whether there are second ones that are not 1.
  __device__ bool write(int set, uint32_t factors, uint32_t second) const {
    const uint32_t (&held)[kLines][kOfLine] = held_[set];
    if constexpr (pairs::may_need_second(kCodes)) {
      static_assert(pairs::largest_of_one<kCodes>() >= 127, "a scale below 128 needs no second factor");
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < kLines * kOfLine; ++i) bits |= held[i / kOfLine][i % kOfLine];
      if (__any_sync(~0u, bits >= 128)) {
        write_all(held, factors, [](uint32_t scale) { return pairs::factor_of<kCodes>(scale).first; });
        write_all(held, second, [](uint32_t scale) { return pairs::factor_of<kCodes>(scale).second; });
        return true;
      }
      if (kBothHalves) write_all(held, second, [](uint32_t) { return pairs::power_of_two(0); });
    }
    write_all(held, factors, [](uint32_t scale) { return factor_alone<kCodes>(scale); });
    return false;
  }

 private:
  __device__ int line_of(int i) const { return half_ * kSwappedCols + lane_ + 32 * i; }

  template <class Make>
  __device__ void write_all(const uint32_t (&held)[kLines][kOfLine], uint32_t to, Make make) const {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      uint32_t made[kOfLine];
#pragma unroll
      for (int j = 0; j < kOfLine; ++j) made[j] = make(held[i][j]);
      if constexpr (kAlong) {
        const uint32_t words[4] = {made[0], made[1 / kRepeat], made[2 / kRepeat], made[3 / kRepeat]};
        ptx::store_shared_v4(to + 4 * factor_of_line(line_of(i), 0), words);
      } else {
#pragma unroll
        for (int j = 0; j < kOfLine; ++j) {
          ptx::store_shared_half(to + 2 * factor_across(lane_ + 32 * i, 4 * half_ + j * kRepeat), made[j]);
        }
      }
    }
  }

  int lane_, half_, first_, last_;
  const uint8_t* from_[kLines];
  uint32_t held_[2][kLines][kOfLine];  // of two blocks
};

// The whole life of warps 2 and 3, each for one half of a tile's columns. Scales are loaded two blocks ahead.
template <pairs::Codes kCodes, class Product>
__device__ inline void make_factors(const typename Product::Params& p, const Shell<typename Product::Shape>& shell,
                                    int half) {
  using Shape = typename Product::Shape;
  const CodedWeights& w = p.coded;
  int lane = shell.lane;
  asm volatile("" : "+r"(lane));  // in a register: else it is computed for every block
  WorkReader<Shape, true> reader(shell.barriers, shell.items);
  Ring<Shape::kStages> ring;
  while (true) {
    const Work& work = reader.get();
    const int kind = work.kind, blocks = work.k_blocks();
    const int coded = work.col0 < p.cols ? Product::coded_blocks(p, blocks) : 0;
    if (kind == Work::kDone) return;
    ScalesOfBlocks<kCodes, Product::kRhsMajor, Product::kOrder == ColumnOrder::halves> scales(
        w, lane, work.group, half, work.col0, [&](int col) { return Product::coded_column(p, work, col); });
    reader.release();
    if (kind != Work::kTile) continue;
    scales.load(w, 0, 0);
    scales.load(w, kBlockK, 1);  // behind the last k: any
    for (int b = 0; b < blocks; b += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (b + i >= blocks) break;
        ptx::barrier_wait(shell.empty(ring.slot), ring.parity ^ 1);
        if (b + i < coded) {
          const uint32_t stage = shell.stage(ring.slot);
          const bool second = scales.write(i, stage + Shape::kFactorsAt, stage + Shape::kSecondAt);
          if (lane == 0) {
            ptx::store_shared(shell.shared + Shape::kSecondUsedAt + 8 * ring.slot + 4 * half, second);
          }
          // Copies of a low-rank product will write over second factors. The fence waits for loads as well.
          if (pairs::may_need_second(kCodes) && blocks > coded) ptx::fence_async();
          scales.load(w, (b + i + 2) * kBlockK, i);
        }
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shell.full(ring.slot));
        ring.advance();
      }
    }
  }
}

}  // namespace grouped::sm90
