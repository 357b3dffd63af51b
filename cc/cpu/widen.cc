// Compiled once for each instruction set, GROUPED_ISA naming the namespace (see panel.cc): codes times their block
// scales, as plain elements. Products of codes and scales are exact in fp32 but for fp32 scales that are no powers of
// two (numerics 4), and the one rounding to bfloat16 is exact wherever the value is a bfloat16. Loops run over strips
// and have no branches and no calls, so that compilers make vectors of them.
#include "cc/cpu/panel.h"
#include "cc/math/narrow.h"

namespace grouped {
namespace GROUPED_ISA {
namespace {

constexpr int64_t kStrip = 256;  // elements between two loops: 1 KiB of floats

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class Code>
void decode_bytes(const uint8_t* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = decode<Code>(from[i]);
}

// Codes of four bits, the first of them number `first`.
void decode_halves(const uint8_t* __restrict from, int64_t first, int64_t count, float* __restrict to) {
  from += first / 2;
  if (first % 2 && count > 0) {
    *to++ = decode<E2M1>(unpack_e2m1(*from++, 1));
    --count;
  }
  for (int64_t i = 0; i < count / 2; ++i) {
    to[2 * i] = decode<E2M1>(unpack_e2m1(from[i], 0));
    to[2 * i + 1] = decode<E2M1>(unpack_e2m1(from[i], 1));
  }
  if (count % 2) to[count - 1] = decode<E2M1>(unpack_e2m1(from[count / 2], 0));
}

// Elements of an array of `dtype`, from number `first` on, as floats: exact.
void read(DType dtype, const void* data, int64_t first, int64_t count, float* to) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const auto* words = static_cast<const uint16_t*>(data) + first;
  switch (dtype) {
    case DType::e4m3fn:
      return decode_bytes<E4M3>(bytes + first, count, to);
    case DType::e5m2:
      return decode_bytes<E5M2>(bytes + first, count, to);
    case DType::u8:
      return decode_halves(bytes, first, count, to);
    case DType::e8m0:
      for (int64_t i = 0; i < count; ++i) to[i] = decode_e8m0(bytes[first + i]);
      return;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(words[i]);
      return;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) to[i] = f16_to_float(words[i]);
      return;
    default:
      memcpy(to, static_cast<const float*>(data) + first, static_cast<size_t>(count) * sizeof(float));
  }
}

// Rounded once; `dtype` is float32 or bfloat16, for nothing is widened to float16.
void write(DType dtype, const float* __restrict from, int64_t first, int64_t count, void* data) {
  if (dtype == DType::f32) {
    memcpy(static_cast<float*>(data) + first, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* __restrict to = static_cast<uint16_t*>(data) + first;
  for (int64_t i = 0; i < count; ++i) to[i] = float_to_bf16(from[i]);
}

// Scales of `count` elements from (outer, k) on, along depth or along the outer axis.
void read_scales(const PanelScales& s, int64_t outer, int64_t k, bool along, int64_t count, float* to) {
  const int64_t position = along ? k : outer, block = along ? s.block : s.outer_block;
  const int64_t stride = along ? s.depth_stride : s.outer_stride;
  const int64_t fixed = along ? outer / s.outer_block * s.outer_stride : k / s.block * s.depth_stride;
  if (block == 1 && stride == 1) return read(s.dtype, s.data, fixed + position, count, to);
  for (int64_t i = 0; i < count;) {
    const int64_t index = (position + i) / block;
    const int64_t last = least(count, (index + 1) * block - position);
    float scale;
    read(s.dtype, s.data, fixed + index * stride, 1, &scale);
    for (; i < last; ++i) to[i] = scale;
  }
}

}  // namespace

void widen_block(const PanelOperand& operand, int64_t outer_begin, int64_t outer, int64_t depth_begin, int64_t depth,
                 DType dtype, void* to) {
  const bool along = operand.depth_stride == 1;  // memory runs along depth
  const int64_t lines = along ? outer : depth, run = along ? depth : outer;
  float values[kStrip], scales[kStrip];
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < run; i += kStrip) {
      const int64_t count = least(kStrip, run - i);
      const int64_t o = operand.outer_first + outer_begin + (along ? line : i);
      const int64_t k = depth_begin + (along ? i : line);
      read(operand.dtype, operand.data, o * operand.outer_stride + k * operand.depth_stride, count, values);
      if (operand.scales.data) {
        read_scales(operand.scales, o, k, along, count, scales);
        for (int64_t j = 0; j < count; ++j) values[j] *= scales[j];
      }
      write(dtype, values, line * run + i, count, to);
    }
  }
}

}  // namespace GROUPED_ISA
}  // namespace grouped
