// Block scales of a tile's weight rows on their way to shared memory, with the stage of codes that they belong to:
// words of 4 bytes, whatever address a row's scales start at, and the bytes that a lane picks out of them there.
#pragma once

#include <cstdint>

#include "cc/device/codes.cuh"
#include "cc/device/few_rows.cuh"
#include "cc/device/ptx.cuh"

namespace grouped::sm90 {

// Words of a row and stage in shared memory: those that its bytes touch, rounded up to a power of two.
constexpr int scale_words(Scale scale) {
  return scale == Scale::none ? 0 : scale == Scale::f32 ? 1 : scale == Scale::e8m0 ? 2 : 4;
}

constexpr int kScaleLanes = 64;  // which copy, kRows rows each

// A group's lines; the one of column `col`, of the last column for those behind it, whose sums nobody stores.
__device__ inline uintptr_t scales_of_group(const FewRowsParams& p, int group) {
  return reinterpret_cast<uintptr_t>(p.scales) + int64_t{group} * p.scale_lines * p.scale_line_bytes;
}
__device__ inline int scale_line(const FewRowsParams& p, int col) { return min(col, p.cols - 1) / p.scale_outer; }

// One of kScaleLanes threads, which have few registers.
template <Scale kScale, int kRows>
class ScaleCopies {
 public:
  __device__ void begin(const FewRowsParams& p, const Item& item) {
    const int first = scale_line(p, item.col);
    from_ = scales_of_group(p, item.group) + int64_t{first} * p.scale_line_bytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) line_[i] = (scale_line(p, item.col + row(i)) - first) * p.scale_line_bytes;
    left_ = p.scale_line_bytes;
  }
  // Of the next stage. Zeros follow the end of a line: what is there may be a NaN.
  __device__ void copy(const FewRowsParams& p, uint32_t to) {
    constexpr int kBytes = scale_bytes_of_stage(kScale), kStride = 4 * scale_words(kScale);
    to += row(0) * kStride;
    asm("" : "+r"(to));  // one register, and distances from it
    if (kBytes == 8 && p.scale_alignment == 8) {
      const int bytes = min(max(left_, 0), 8);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::copy_part<8>(to + i * kScaleLanes * kStride, reinterpret_cast<const void*>(from_ + line_[i]), bytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uintptr_t from = from_ + line_[i];
        const int offset = static_cast<int>(from) & 3;
#pragma unroll
        for (int byte = 0; byte < (kScale == Scale::f32 ? kBytes : kBytes + 4); byte += 4) {
          if (byte == kBytes && p.scale_alignment > 1) continue;  // else a stage's bytes touch one word more
          ptx::copy_part<4>(to + i * kScaleLanes * kStride + byte, reinterpret_cast<const void*>(from - offset + byte),
                            min(max(left_ + offset - byte, 0), 4));
        }
      }
    }
    from_ += kBytes;
    left_ -= kBytes;
  }

 private:
  static __device__ int row(int i) { return threadIdx.x % kScaleLanes + i * kScaleLanes; }

  uintptr_t from_;   // of the tile's first line
  int line_[kRows];  // bytes behind it
  int left_;         // bytes of a line
};

// What a lane reads of a stage's scales of its two rows.
template <Scale kScale>
struct ScaleReader {
  // Of columns `col` and `col` + 8 of the result, which lie in row `row` of the tile and 8 behind.
  __device__ ScaleReader(const FewRowsParams& p, int group, int col, int row) {
    const uint32_t q = threadIdx.x % 4;
    place = row * 4 * scale_words(kScale) + (kScale == Scale::e4m3 ? q / 2 * 4 : 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t line = scale_line(p, col + 8 * r) * p.scale_line_bytes;
      const uint32_t first =
          (static_cast<uint32_t>(scales_of_group(p, group)) + line) % 4 + (kScale == Scale::e4m3 ? q % 2 * 2 : q);
      chosen[r] = kScale == Scale::e4m3 ? first | (first + 1) << 4 : 0x8880 | first;
    }
  }
  // E8M0: one code; E4M3: two; float32: its bits.
  __device__ uint32_t read(uint32_t scales, int r) const {
    const uint32_t at = scales + place + r * 8 * 4 * scale_words(kScale);
    if constexpr (kScale == Scale::f32) return ptx::load_shared_word(at);
    uint32_t low, high;
    if constexpr (kScale == Scale::e4m3) {
      low = ptx::load_shared_word(at), high = ptx::load_shared_word(at + 4);
      return __byte_perm(low, high, chosen[r]);
    } else {
      ptx::load_words_v2(at, low, high);
      return __byte_perm(low, high, chosen[r]) & 0xff;
    }
  }

  uint32_t place;      // of the first row's words
  uint32_t chosen[2];  // bytes of two words, a selector
};

}  // namespace grouped::sm90
