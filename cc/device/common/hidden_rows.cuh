// Hidden rows on the device, eight activated columns at a time: the gate and the linear half of each, in blocks of
// `interleave` columns (numerics 5). Loading and decoding are two steps, so that all loads of a thread are under way
// before it waits for the first.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cc/api/calls.h"
#include "cc/device/common/elements.cuh"
#include "cc/math/activation.h"

namespace grouped {
namespace device {

constexpr int kHiddenVector = 8;  // activated columns of one step

// Eight stored elements of a 16-bit type in the first four words, or of float32 in all.
struct Stored8 {
  uint32_t words[8];
};

template <class Place>
__device__ Stored8 gather_stored(const void* base, DType type, int count, Place place) {
  Stored8 v = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= count) break;
    if (type == DType::f32) {
      v.words[i] = static_cast<const uint32_t*>(base)[place(i)];
    } else {
      v.words[i / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(base)[place(i)]) << (16 * (i % 2));
    }
  }
  return v;
}

// Elements first ... first + count - 1, zeros behind them.
__device__ inline Stored8 load_stored(const void* base, DType type, int64_t first, int count) {
  if (!whole_vector<8>(base, type, first, count)) {
    return gather_stored(base, type, count, [&](int i) { return first + i; });
  }
  Stored8 v;
  const uint4* at = reinterpret_cast<const uint4*>(static_cast<const char*>(base) + first * bytes_of(type));
  const uint4 low = at[0];
  v.words[0] = low.x, v.words[1] = low.y, v.words[2] = low.z, v.words[3] = low.w;
  if (type == DType::f32) {
    const uint4 high = at[1];
    v.words[4] = high.x, v.words[5] = high.y, v.words[6] = high.z, v.words[7] = high.w;
  }
  return v;
}

// NOTE: one branch on the type for all eight; a choice for each would double the instructions.
__device__ inline void decode_stored(const Stored8& v, DType type, float (&values)[8]) {
  if (type == DType::f32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __uint_as_float(v.words[i]);
  } else if (type == DType::bf16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = __uint_as_float(i % 2 ? v.words[i / 2] & 0xFFFF0000u : v.words[i / 2] << 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(v.words[i / 2] >> (16 * (i % 2)))));
    }
  }
}

// Each rounded once, to nearest even.
__device__ inline Stored8 encode_stored(const float (&values)[8], DType type) {
  Stored8 v = {};
  if (type == DType::f32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v.words[i] = __float_as_uint(values[i]);
  } else if (type == DType::bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
    }
  }
  return v;
}

template <class Place>
__device__ void scatter_stored(void* base, DType type, int count, Place place, const Stored8& v) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= count) break;
    if (type == DType::f32) {
      static_cast<uint32_t*>(base)[place(i)] = v.words[i];
    } else {
      static_cast<uint16_t*>(base)[place(i)] = static_cast<uint16_t>(v.words[i / 2] >> (16 * (i % 2)));
    }
  }
}

__device__ inline void store_stored(void* base, DType type, int64_t first, int count, const float (&values)[8]) {
  const Stored8 v = encode_stored(values, type);
  if (!whole_vector<8>(base, type, first, count)) {
    return scatter_stored(base, type, count, [&](int i) { return first + i; }, v);
  }
  uint4* at = reinterpret_cast<uint4*>(static_cast<char*>(base) + first * bytes_of(type));
  at[0] = make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
  if (type == DType::f32) at[1] = make_uint4(v.words[4], v.words[5], v.words[6], v.words[7]);
}

// Where the halves of eight columns are: two runs, sixteen alternating elements, or anything else.
enum class HalvesPlace { apart, alternating, scattered };

struct HiddenRows {
  void* data;
  DType type;
  bool gated;
  HalvesPlace place;
  int block;  // of `interleave`
  int width;  // activated columns; 32 bits are enough for a column, and quicker to divide

  static HiddenRows of(const TensorView& rows, const ActivationParams& params, bool gated, int64_t width) {
    const int columns = static_cast<int>(width);
    const int block = gated && params.interleave ? static_cast<int>(params.interleave) : columns;
    const bool apart = block == columns || block % kHiddenVector == 0;
    return {rows.data, rows.dtype,
            gated,     apart ? HalvesPlace::apart : block == 1 ? HalvesPlace::alternating : HalvesPlace::scattered,
            block,     columns};
  }
  __device__ int64_t row_start(int64_t row) const { return row * (gated ? 2 * int64_t{width} : int64_t{width}); }
  __device__ int gate_column(int column) const {
    return gated && block != width ? gate_column_of(column, block) : column;
  }
};

struct StoredHalves {
  Stored8 gate, linear;  // with alternating halves: the first and the second eight of the sixteen
};

__device__ inline int first_eight(int count) { return min(2 * count, 8); }
__device__ inline int second_eight(int count) { return max(2 * count - 8, 0); }

// `count` (up to eight) activated columns from `column`, a multiple of eight, on.
__device__ inline StoredHalves load_halves(const HiddenRows& h, int64_t row, int column, int count) {
  const int64_t start = h.row_start(row);
  StoredHalves v = {};
  if (h.place == HalvesPlace::apart) {
    const int64_t first = start + h.gate_column(column);
    v.gate = load_stored(h.data, h.type, first, count);
    if (h.gated) v.linear = load_stored(h.data, h.type, first + h.block, count);
  } else if (h.place == HalvesPlace::alternating) {
    v.gate = load_stored(h.data, h.type, start + 2 * column, first_eight(count));
    v.linear = load_stored(h.data, h.type, start + 2 * column + 8, second_eight(count));
  } else {
    v.gate = gather_stored(h.data, h.type, count, [&](int i) { return start + h.gate_column(column + i); });
    v.linear = gather_stored(h.data, h.type, count, [&](int i) { return start + h.gate_column(column + i) + h.block; });
  }
  return v;
}

__device__ inline void decode_halves(const HiddenRows& h, const StoredHalves& v, float (&a)[8], float (&u)[8]) {
  decode_stored(v.gate, h.type, a);
  decode_stored(v.linear, h.type, u);
  if (h.place != HalvesPlace::alternating) return;
  float both[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) both[i] = a[i], both[i + 8] = u[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = both[2 * i], u[i] = both[2 * i + 1];
}

__device__ inline void store_halves(const HiddenRows& h, int64_t row, int column, int count, const float (&a)[8],
                                    const float (&u)[8]) {
  const int64_t start = h.row_start(row);
  if (h.place == HalvesPlace::apart) {
    const int64_t first = start + h.gate_column(column);
    store_stored(h.data, h.type, first, count, a);
    if (h.gated) store_stored(h.data, h.type, first + h.block, count, u);
  } else if (h.place == HalvesPlace::alternating) {
    float low[8], high[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[2 * i] = a[i], low[2 * i + 1] = u[i];
      high[2 * i] = a[i + 4], high[2 * i + 1] = u[i + 4];
    }
    store_stored(h.data, h.type, start + 2 * column, first_eight(count), low);
    store_stored(h.data, h.type, start + 2 * column + 8, second_eight(count), high);
  } else {
    const auto place = [&](int i) { return start + h.gate_column(column + i); };
    scatter_stored(h.data, h.type, count, place, encode_stored(a, h.type));
    scatter_stored(h.data, h.type, count, [&](int i) { return place(i) + h.block; }, encode_stored(u, h.type));
  }
}

// ---- Which threads compute what: a team of threads per row, a fixed number for a width.

constexpr int kTeamThreads = 256;  // of a block
constexpr int kTeamSteps = 8;      // fewest steps per row for which more threads join

inline int team_size(int64_t width) {
  int team = 32;
  while (team < kTeamThreads && width > kTeamSteps * kHiddenVector * team) team *= 2;
  return team;
}

inline unsigned team_blocks(int64_t rows, int team) {
  const int64_t rows_a_block = kTeamThreads / team;
  return static_cast<unsigned>((rows + rows_a_block - 1) / rows_a_block);
}

}  // namespace device
}  // namespace grouped
