// Compiled once for each instruction set, GROUPED_ISA naming the namespace (see panel.cc). Plain loops over strips:
// cc/math/narrow.h has no branches and no calls here, so compilers make vectors of them.
#include "cc/cpu/panel.h"
#include "cc/math/narrow.h"

namespace grouped {
namespace GROUPED_ISA {
namespace {

template <class T>
void encode_as(const float* __restrict x, const float* __restrict e, int64_t count, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = encode<T>(fl_mul(x[i], e[i]));
}

template <class T>
void decode_as(const uint8_t* __restrict codes, int64_t count, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] = decode<T>(codes[i]);
}

}  // namespace

// NOTE: magnitudes as signed integers, which have vector maxima on every machine.
uint32_t row_amax(const float* x, int64_t count) {
  int32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(magnitude_bits(x[i]));
    amax = magnitude > amax ? magnitude : amax;
  }
  return static_cast<uint32_t>(amax);
}

void column_amax(const float* __restrict x, int64_t count, uint32_t* __restrict amax) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(magnitude_bits(x[i]));
    const int32_t old = static_cast<int32_t>(amax[i]);
    amax[i] = static_cast<uint32_t>(magnitude > old ? magnitude : old);
  }
}

void encode_codes(DType type, const float* x, const float* e, int64_t count, uint8_t* codes) {
  if (type == DType::e4m3fn) return encode_as<E4M3>(x, e, count, codes);
  if (type == DType::e5m2) return encode_as<E5M2>(x, e, count, codes);
  encode_as<E2M1>(x, e, count, codes);
}

void decode_codes(DType type, const uint8_t* codes, int64_t count, float* values) {
  if (type == DType::e4m3fn) return decode_as<E4M3>(codes, count, values);
  if (type == DType::e5m2) return decode_as<E5M2>(codes, count, values);
  decode_as<E2M1>(codes, count, values);
}

}  // namespace GROUPED_ISA
}  // namespace grouped
