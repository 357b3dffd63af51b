// Block scales of a tile's weight rows on their way to shared memory, with the stage of codes that they belong to:
// words of 4 bytes, whatever address a row's scales start at, and the bytes that a lane picks out of them there.
#pragma once

#include <cstdint>

#include "cc/device/common/copy_async.cuh"
#include "cc/device/sm90/few_rows.cuh"
#include "cc/device/sm90/layout_codes.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {

constexpr int kScaleLanes = 64;  // which copy, kRows rows each

// A group's lines; the one of column `col`, of the last column for those behind it, whose sums are not stored.
__device__ inline uintptr_t scales_of_group(const FewRowsParams& p, int group) {
  return reinterpret_cast<uintptr_t>(p.scales) + int64_t{group} * p.scale_lines * p.scale_line_bytes;
}
__device__ inline int scale_line(const FewRowsParams& p, int col) {
  const int at = min(col, p.cols - 1);
  return p.scale_outer == 1 ? at : at / p.scale_outer;  // an item's first stage waits for it
}

// One of kScaleLanes threads, which have few registers. Stages have kSlabs slabs.
template <Scale kScale, int kRows, int kSlabs>
class ScaleCopies {
 public:
  __device__ void begin(const FewRowsParams& p, const Item& item) {
    const int first = scale_line(p, item.col);
    from_ = scales_of_group(p, item.group()) + int64_t{first} * p.scale_line_bytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) line_[i] = (scale_line(p, item.col + row(i)) - first) * p.scale_line_bytes;
    left_ = p.scale_line_bytes;
  }
  // Of the next stage. Zeros follow the end of a line: what is there may be a NaN.
  __device__ void copy(const FewRowsParams& p, uint32_t to) {
    to += row(0) * kStride;
    uintptr_t first = from_;
    asm volatile("" : "+r"(to), "+l"(first));  // one register, and distances from it
    if (kBytes % 8 == 0 && p.scale_alignment == 8) {
#pragma unroll
      for (int byte = 0; byte < kBytes; byte += 8) {
        const int bytes = min(max(left_ - byte, 0), 8);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          device::copy_async<8>(to + i * kScaleLanes * kStride + byte,
                                reinterpret_cast<const void*>(first + line_[i] + byte), bytes);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uintptr_t from = first + line_[i];
        const int offset = static_cast<int>(from) & 3;
#pragma unroll
        for (int byte = 0; byte < (kScale == Scale::f32 ? kBytes : kBytes + 4); byte += 4) {
          if (byte == kBytes && p.scale_alignment > 1) continue;  // else a stage's bytes touch one word more
          device::copy_async<4>(to + i * kScaleLanes * kStride + byte,
                                reinterpret_cast<const void*>(from - offset + byte),
                                min(max(left_ + offset - byte, 0), 4));
        }
      }
    }
    from_ += kBytes;
    left_ -= kBytes;
  }
  // Whether a byte that this thread copied to `at` may be an E8M0 scale of 2 or more, or a NaN. Bytes of neighbours
  // count as well: the question is which threads need no second look.
  static __device__ bool any_large(const FewRowsParams& p, uint32_t at) {
    at += row(0) * kStride;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int byte = 0; byte <= kBytes; byte += 4) {
        if (byte == kBytes && p.scale_alignment > 1) continue;
        found |= ptx::load_shared_word(at + i * kScaleLanes * kStride + byte);
      }
    }
    return (found & 0x80808080u) != 0;
  }

 private:
  static constexpr int kBytes = scale_bytes_of_slab(kScale) * kSlabs, kStride = 4 * scale_words(kScale, kSlabs);
  static __device__ int row(int i) { return threadIdx.x % kScaleLanes + i * kScaleLanes; }

  uintptr_t from_;   // of the tile's first line
  int line_[kRows];  // bytes behind it
  int left_;         // bytes of a line
};

// Whether a byte in the lines of kRows rows may be an E8M0 scale of 2 or more, or a NaN, likewise.
template <int kRows>
__device__ bool any_large_in_lines(uint32_t lines) {
  lines += threadIdx.x % kScaleLanes * kScaleLineBytes;
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint32_t words[4];
    ptx::load_shared_v4(lines + i * kScaleLanes * kScaleLineBytes, words);
    found |= words[0] | words[1] | words[2] | words[3];
  }
  return (found & 0x80808080u) != 0;
}

// What a lane reads of a stage's scales of its two rows.
template <Scale kScale, int kSlabs>
struct ScaleReader {
  // Of columns `col` and `col` + 8 of the result, which are in row `row` of the tile and 8 behind.
  __device__ ScaleReader(const FewRowsParams& p, int group, int col, int row) {
    const uint32_t q = threadIdx.x % 4;
    place = row * kStride + 4 * scale_word(kScale, 0, q);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t line = scale_line(p, col + 8 * r) * p.scale_line_bytes;
      selector[r] = scale_selector(kScale, static_cast<uint32_t>(scales_of_group(p, group)) + line, q);
    }
  }
  // E8M0: one code, in the low byte; E4M3: two, in the low two; float32: its bits.
  __device__ void read(uint32_t scales, uint32_t (&codes)[kSlabs][2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t at = scales + place + r * 8 * kStride;
      if constexpr (kScale == Scale::f32) {
        codes[0][r] = ptx::load_shared_word(at);
      } else if constexpr (kScale == Scale::e8m0) {
        uint32_t words[4];
        if constexpr (kSlabs == 1) {
          ptx::load_words_v2(at, words[0], words[1]);
        } else {
          ptx::load_shared_v4(at, words);
        }
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          codes[slab][r] = pairs::chosen_bytes(words[slab], words[slab + 1], selector[r]);
        }
      } else if constexpr (in_lines(kScale)) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          const uint32_t word = ptx::load_shared_word(at + 4 * scale_word(kScale, slab, 0));
          codes[slab][r] = pairs::chosen_bytes(word, 0, selector[r]);
        }
      } else if constexpr (kScale == Scale::e4m3) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          const uint32_t low = ptx::load_shared_word(at + 8 * slab), high = ptx::load_shared_word(at + 8 * slab + 4);
          codes[slab][r] = pairs::chosen_bytes(low, high, selector[r]);
        }
      } else {
        codes[0][r] = 0;
      }
    }
  }

 private:
  static constexpr int kStride = 4 * scale_words(kScale, kSlabs);
  static_assert(kSlabs <= 2, "a stage's E8M0 scales are four words at most");

  uint32_t place;        // of the first row's words
  uint32_t selector[2];  // of bytes of two words
};

}  // namespace grouped::sm90
