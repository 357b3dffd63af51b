// Codes of weights and their scales in shared memory and registers, and the bf16 rows that they meet there.
//
// Both come in slabs of 128 k, one or two of them per stage. A lane owns the same 32 k of a slab in two weight rows.
// They come apart in four parts of 8 k, two steps of wgmma each, as four pairs; which k of a part meet in a pair is
// free as long as the rows are in that order. A block of 8 rows has two pieces per step, of 8 k that the four lanes q
// of a quad own two by two: 8 rows of 16 bytes, without swizzle. Arithmetic alone: tests/native/schedule_check.cc
// follows every code on the CPU.
#pragma once

#include <cstdint>

#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

constexpr int kSlabK = 128;
constexpr int kBlockRows = 8;
constexpr uint32_t kRowPieceBytes = kBlockRows * 16;
constexpr uint32_t kRowBlockBytes = kBlockRows * kSlabK * 2;  // of one slab

// Where pair i of a part is in a block's slab: piece i % 2 of step 2 part + i / 2.
GROUPED_HOST_DEVICE constexpr uint32_t row_pair(int part, int row, int q, int i) {
  return (4 * part + i) * kRowPieceBytes + row * 16 + q * 4;
}
// The rows of one step, for as many blocks as follow one another; the next step's are 2 pieces behind.
GROUPED_HOST_DEVICE inline uint64_t rows_descriptor(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(kRowPieceBytes >> 4) << 16 | uint64_t(kRowBlockBytes >> 4) << 32;
}
constexpr uint32_t kRowStep = 2 * kRowPieceBytes >> 4;

GROUPED_HOST_DEVICE inline uint32_t odd_bytes(uint32_t w) {
#ifdef __CUDA_ARCH__
  return __byte_perm(w, 0, 0x4341);  // one instruction instead of two
#else
  return w >> 8 & 0x00ff00ffu;
#endif
}

// Bits of bfloat16 are 2^-kBias of the values.
template <bool kNibbles>
struct Codes;

// E4M3. Pairs of a word: (0 2), (1 3).
template <>
struct Codes<false> {
  static constexpr int kBias = 120;
  static constexpr int kLoads = 2;  // of 16 bytes, for a lane's 32 k of a row
  static constexpr int kRowBytes = 128;
  // Where the first load of a lane is in a tile, under a swizzle of 128 bytes: eight lanes read eight different
  // chunks of 16 bytes, and rows 8 apart have the same swizzle.
  GROUPED_HOST_DEVICE static uint32_t place(int row, int q) { return row * 128 + ((2 * q) ^ (row % 8)) * 16; }
  // Which of 8 neighbouring k half `h` of pair i is.
  GROUPED_HOST_DEVICE static constexpr int k_of_pair(int i, int h) { return i / 2 * 4 + i % 2 + 2 * h; }
  // Words of one load to the pairs of its part `part`, 0 or 1. A pair of codes in the low bytes, shifted by 4, has its
  // signs at bits 11: adding 0x7800 carries those that are set to bits 15.
  GROUPED_HOST_DEVICE static void pairs(const uint32_t (&words)[4], int part, uint32_t (&to)[4]) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = words[2 * part + i / 2], codes = i % 2 ? odd_bytes(w) : w & 0x00ff00ffu;
      to[i] = (codes * 16 + 0x78007800u) & 0x87f087f0u;
    }
  }
  // Gathers, in the highest bits of bytes, whether some code is a NaN: their bits above are those of 480.
  GROUPED_HOST_DEVICE static void find_nan(const uint32_t (&words)[4], uint32_t& found) {
    for (int i = 0; i < 4; ++i) found |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
  }
  GROUPED_HOST_DEVICE static bool is_nan(uint32_t found) { return (found & 0x80808080u) != 0; }
};

// E2M1. Pairs of a word: (0 4), (1 5), (2 6), (3 7).
template <>
struct Codes<true> {
  static constexpr int kBias = 126;
  static constexpr int kLoads = 1;
  static constexpr int kRowBytes = 64;
  GROUPED_HOST_DEVICE static uint32_t place(int row, int q) { return row * 64 + (q ^ (row / 2 % 4)) * 16; }
  GROUPED_HOST_DEVICE static constexpr int k_of_pair(int i, int h) { return i + 4 * h; }
  // One multiplication makes two copies of a code: one with the sign at bit 15, one with the magnitude at bits 8 to 6.
  GROUPED_HOST_DEVICE static void pairs(const uint32_t (&words)[4], int part, uint32_t (&to)[4]) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = words[part] >> (i / 2 * 8);
      to[i] = (i % 2 ? (w & 0x00f000f0u) * 0x104 : (w & 0x000f000fu) * 0x1040) & 0x81c081c0u;
    }
  }
  GROUPED_HOST_DEVICE static void find_nan(const uint32_t (&)[4], uint32_t&) {}
  GROUPED_HOST_DEVICE static bool is_nan(uint32_t) { return false; }
};

// --- scales ---

// Of a weight row's blocks. `_lines`: a row's scales are whole lines of 16 bytes, at multiples of 16, which tensor
// copies bring; others come by words.
enum class Scale { none, e8m0, e8m0_lines, e4m3, e4m3_lines, f32 };

constexpr bool is_e8m0(Scale scale) { return scale == Scale::e8m0 || scale == Scale::e8m0_lines; }
constexpr bool is_e4m3(Scale scale) { return scale == Scale::e4m3 || scale == Scale::e4m3_lines; }
constexpr bool in_lines(Scale scale) { return scale == Scale::e8m0_lines || scale == Scale::e4m3_lines; }
constexpr int scale_bytes(Scale scale) { return scale == Scale::none ? 0 : scale == Scale::f32 ? 4 : 1; }
// Bytes of the scales of one row and slab.
constexpr int scale_bytes_of_slab(Scale scale) { return scale == Scale::none ? 0 : is_e4m3(scale) ? 8 : 4; }
constexpr int kScaleLineBytes = 16;
// From one row's words to the next one's in a stage: a line, or room for the words that the bytes of `slabs` touch,
// wherever they start. Eight rows are in banks of their own.
constexpr int scale_words(Scale scale, int slabs) {
  return scale == Scale::none  ? 0
         : scale == Scale::f32 ? 1
         : in_lines(scale)     ? kScaleLineBytes / 4
                               : (scale == Scale::e8m0 ? 2 : 3) * slabs + (scale == Scale::e4m3 && slabs == 1);
}
// Where in its line a stage's scales begin: a line is loaded once for each of the stages that it has scales of.
GROUPED_HOST_DEVICE constexpr uint32_t scale_in_line(Scale scale, int slabs, int stage) {
  return in_lines(scale) ? stage * slabs * scale_bytes_of_slab(scale) % kScaleLineBytes : 0;
}
// Where the scales of a lane's 32 k of a slab are in a row's words: bytes of this word and the next, by a selector, if
// the line of scales starts `start` bytes behind a multiple of 4. E8M0: one byte, and three times the sign of another,
// which is 0 where no scale is large; E4M3: two.
GROUPED_HOST_DEVICE constexpr uint32_t scale_word(Scale scale, int slab, uint32_t q) {
  return is_e4m3(scale) ? 2 * slab + q / 2 : slab;
}
GROUPED_HOST_DEVICE constexpr uint32_t scale_selector(Scale scale, uint32_t start, uint32_t q) {
  const uint32_t first = start % 4 + (is_e4m3(scale) ? q % 2 * 2 : q);
  return is_e4m3(scale) ? first | (first + 1) << 4 : 0x8880 | first;
}

// --- a stage: codes of its slabs, rows of its slabs, scales ---

template <bool kNibbles, Scale kScale, int kTileCols, int kBlocks, int kSlabs>
struct StageLayout {
  static constexpr int kCodeBytes = kTileCols * Codes<kNibbles>::kRowBytes;  // of a slab
  static constexpr int kRowsBytes = kBlocks * kRowBlockBytes;                // of a slab
  static constexpr int kRowsAt = kSlabs * kCodeBytes;
  static constexpr int kScalesAt = kRowsAt + kSlabs * kRowsBytes;
  static constexpr int kBytes = (kScalesAt + kTileCols * 4 * scale_words(kScale, kSlabs) + 1023) / 1024 * 1024;
};

}  // namespace grouped::sm90
