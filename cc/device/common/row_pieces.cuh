// Pieces of rows of any type at any address, loaded as they are in memory.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "cc/device/common/elements.cuh"

namespace grouped {

// The address of a tensor, or a row's bytes, in units of the largest power of two up to 16 that divides them all.
inline int common_unit(std::initializer_list<uintptr_t> values) {
  uintptr_t all = 16;
  for (const uintptr_t value : values) all |= value;
  return static_cast<int>(all & (~all + 1));
}
inline uintptr_t address(const TensorView& t) { return reinterpret_cast<uintptr_t>(t.data); }

// body(std::integral_constant<DType, type>{}) of a wide type.
template <class Body>
void with_wide_type(DType type, const Body& body) {
  if (type == DType::f32) return body(std::integral_constant<DType, DType::f32>{});
  if (type == DType::bf16) return body(std::integral_constant<DType, DType::bf16>{});
  body(std::integral_constant<DType, DType::f16>{});
}

namespace device {

// A pointer whose making the compiler does not see: else it makes it again for each of many loads that may not happen.
__device__ inline const char* opaque(const char* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// W values of a type as they are in memory: they are converted when all loads are under way.
template <DType kType, int W>
struct Piece {
  static constexpr int kBytes = W * bytes_of(kType);
  static constexpr int kWords = W * bytes_of(kType) / 16;
  uint4 words[kWords];

  __device__ void load(const void* at) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(static_cast<const uint4*>(at) + i);
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ float value(int i) const {
    constexpr int kEach = 16 / bytes_of(kType);
    const uint4 w = words[i / kEach];
    const int at = i % kEach * bytes_of(kType) / 4;
    const uint32_t word = at == 0 ? w.x : at == 1 ? w.y : at == 2 ? w.z : w.w;
    if constexpr (kType == DType::f32) return __uint_as_float(word);
    return to_float(static_cast<uint16_t>(i % 2 ? word >> 16 : word & 0xFFFFu), kType);
  }
};
template <DType kType>
struct Piece<kType, 1> {
  static constexpr int kBytes = bytes_of(kType);
  float one;

  __device__ void load(const void* at) { one = load_value(at, kType, 0); }
  __device__ void clear() { one = 0.0f; }
  __device__ float value(int) const { return one; }
};

}  // namespace device
}  // namespace grouped
