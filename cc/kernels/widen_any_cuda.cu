// Codes times scales of blocks, written as plain numbers: the pass in front of a product whose kernel reads no codes.
//
//   codes --8 per thread and step, kAhead steps in flight--> registers: to fp16 (exact), to fp32, * scale, one rounding
//         --16 or 32 bytes per thread--> memory
//
// Neighbouring threads take neighbouring pieces of 8, so that both sides are whole lines; no shared memory. The usual
// case, whole pieces to bfloat16 with narrow scales, has a kernel for each pair of types, which takes both operands of
// a product in one launch: 4 to 6 instructions per element, where 20 would show beside the memory. Everything else
// (edges, fp32, transposed rows) goes to one that asks at run time, with 256 threads, 4 blocks per SM and at most 64
// registers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/kernels/kernels.h"
#include "cc/math/narrow.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kPiece = 8;  // elements of a thread and step
constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // an SM
constexpr int kAhead = 4;   // steps whose loads are in flight

template <int kBits>
struct Raw {
  uint32_t words[kBits / 4];  // of 8 elements
};

template <int kBits>
__device__ Raw<kBits> load_piece(const uint8_t* at) {
  Raw<kBits> raw;
  if constexpr (kBits == 4) {
    raw.words[0] = __ldg(reinterpret_cast<const uint32_t*>(at));
  } else if constexpr (kBits == 8) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
    raw.words[0] = v.x, raw.words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBits / 16; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(at) + i);
      raw.words[4 * i] = v.x, raw.words[4 * i + 1] = v.y, raw.words[4 * i + 2] = v.z, raw.words[4 * i + 3] = v.w;
    }
  }
  return raw;
}

// The first `count` elements, byte by byte, zeros behind them.
template <int kBits>
__device__ Raw<kBits> gather_piece(const uint8_t* at, int count) {
  Raw<kBits> raw = {};
#pragma unroll
  for (int i = 0; i < kBits; ++i) {
    if (i * 8 < count * kBits) raw.words[i / 4] |= static_cast<uint32_t>(at[i]) << (8 * (i % 4));
  }
  return raw;
}

// Two E2M1 codes, in the low byte: fp16 has their exponent and mantissa bits at its own, 2^14 below.
__device__ __half2 halves_of_e2m1(uint32_t byte) {
  const uint32_t apart = byte * 0x1001u;  // code 0 from bit 0, code 1 from bit 16
  const uint32_t bits = (apart & 0x00080008u) << 12 | (apart & 0x00070007u) << 9;
  return __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(16384.0f));
}

__device__ __half2 halves_of_fp8(uint32_t pair, DType type) {
  const auto codes = static_cast<__nv_fp8x2_storage_t>(pair);
  return __nv_cvt_fp8x2_to_halfraw2(codes, type == DType::e4m3fn ? __NV_E4M3 : __NV_E5M2);
}

// Codes i and i + 1 of a piece, i even.
template <int kBits>
__device__ __half2 halves_of(const Raw<kBits>& raw, DType type, int i) {
  if constexpr (kBits == 4) return halves_of_e2m1(raw.words[0] >> (4 * i) & 0xff);
  return halves_of_fp8(raw.words[i / 4] >> (8 * (i % 4)), type);
}

template <int kBits>
__device__ void decode_piece(const Raw<kBits>& raw, DType type, float (&v)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    float2 pair;
    if constexpr (kBits <= 8) {
      pair = __half22float2(halves_of<kBits>(raw, type, i));
    } else if constexpr (kBits == 16) {
      const uint32_t word = raw.words[i / 2];
      pair =
          make_float2(to_float(static_cast<uint16_t>(word), type), to_float(static_cast<uint16_t>(word >> 16), type));
    } else {
      pair = make_float2(__uint_as_float(raw.words[i]), __uint_as_float(raw.words[i + 1]));
    }
    v[i] = pair.x, v[i + 1] = pair.y;
  }
}

__device__ float scale_at(const void* scales, DType type, int64_t i) {
  if (type == DType::e8m0) {
    return decode_e8m0(__ldg(static_cast<const uint8_t*>(scales) + i));
  }
  return load_value(scales, type, i);
}

// Where a thread is: slice, line and piece, moved on by a fixed step without dividing again.
struct Walk {
  int slice, line, piece;

  __device__ Walk(int64_t index, int pieces, int lines)
      : slice(static_cast<int>(index / pieces / lines)),
        line(static_cast<int>(index / pieces % lines)),
        piece(static_cast<int>(index % pieces)) {}
  __device__ void move(const Walk& by, int pieces, int lines) {
    piece += by.piece;
    const bool carry = piece >= pieces;
    piece -= carry ? pieces : 0;
    line += by.line + carry;
    const bool over = line >= lines;
    line -= over ? lines : 0;
    slice += by.slice + over;
  }
};

__device__ void write_piece(const Widening& w, const Walk& at, int count, const float (&v)[kPiece]) {
  const int64_t i = int64_t{at.piece} * kPiece;
  if (!w.transposed) {
    store_values(w.result, w.result_type, (int64_t{at.slice} * w.lines + at.line) * w.run + i, count, v);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    if (j < count) store_value(w.result, w.result_type, (int64_t{at.slice} * w.run + i + j) * w.lines + at.line, v[j]);
  }
}

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    widen(const __grid_constant__ Widening w, bool vectors, int line_shift, int run_shift) {
  const int pieces = static_cast<int>((w.run + kPiece - 1) / kPiece), lines = static_cast<int>(w.lines);
  Walk at(static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, pieces, lines);
  const Walk step(static_cast<int64_t>(gridDim.x) * kThreads, pieces, lines);
  const auto* codes = static_cast<const uint8_t*>(w.values);
  const bool shared_scale = w.scales != nullptr && (1 << run_shift) >= kPiece;  // by a whole piece
  const bool own_scales = w.scales != nullptr && !shared_scale;
  const auto exists = [&](const Walk& a) { return a.slice < w.slices && (!w.sizes || w.sizes[a.slice] > 0); };
  const auto count_of = [&](const Walk& a) {
    return static_cast<int>(min(w.run - int64_t{a.piece} * kPiece, int64_t{kPiece}));
  };
  const auto scale_of = [&](const Walk& a, int i) {
    const int64_t line = a.slice * w.slice_stride + (a.line >> line_shift) * w.line_stride;
    return scale_at(w.scales, w.scale_type, line + ((int64_t{a.piece} * kPiece + i) >> run_shift) * w.run_stride);
  };
  while (at.slice < w.slices) {
    Raw<kBits> raw[kAhead];
    float scale[kAhead];
    Walk of = at;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      raw[u] = {};
      scale[u] = 1.0f;
      if (exists(of)) {
        const int64_t first = (int64_t{of.slice} * lines + of.line) * w.pitch + int64_t{of.piece} * kPiece;
        const uint8_t* from = codes + first * kBits / 8;
        raw[u] = vectors ? load_piece<kBits>(from) : gather_piece<kBits>(from, count_of(of));
        if (shared_scale) scale[u] = scale_of(of, 0);
      }
      of.move(step, pieces, lines);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (exists(at)) {
        const int count = count_of(at);
        float v[kPiece];
        decode_piece<kBits>(raw[u], w.type, v);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          if (own_scales) scale[u] = j < count ? scale_of(at, j) : 0.0f;
          v[j] = __fmul_rn(v[j], scale[u]);
        }
        write_piece(w, at, count, v);
      }
      at.move(step, pieces, lines);
    }
  }
}

// --- the usual case: whole pieces, bfloat16, narrow scales ---

enum class Scales { none, shared, own };  // by a piece; by each column, in a ragged contraction

// n / divisor for n < 2^31 and divisor > 1: one multiplication.
struct Divider {
  uint32_t magic, shift;

  static Divider of(uint32_t divisor) {
    uint32_t bits = 0;
    while ((uint64_t{1} << bits) < divisor) ++bits;
    return {static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + divisor - 1) / divisor), bits - 1};
  }
  __device__ uint32_t divide(uint32_t n) const { return __umulhi(n, magic) >> shift; }
};

// Whether one of four codes is 0 or 255, which represent a subnormal number and NaN.
__device__ bool has_special_e8m0(uint32_t codes) {
  return (((codes - 0x01010101u) & ~codes) | ((~codes - 0x01010101u) & codes)) & 0x80808080u;
}

// Codes i and i + 1 of a piece times their scales: in fp32 by E8M0, and in fp16, which holds the products (numerics 4),
// by E4M3. `scale` is one code for all, or a code each, `special` whether one of these is 0 or 255.
template <DType kType, DType kScaleType, Scales kScales, int kBits>
__device__ uint32_t widened(const Raw<kBits>& raw, uint2 scale, bool special, int i) {
  __half2 halves = halves_of<kBits>(raw, kType, i);
  const uint32_t codes = kScales == Scales::own ? (i < 4 ? scale.x : scale.y) >> (8 * (i % 4)) : scale.x * 0x101u;
  if constexpr (kScales != Scales::none && kScaleType == DType::e4m3fn) {
    halves = __hmul2(halves, halves_of_fp8(codes, DType::e4m3fn));
  }
  float2 v = __half22float2(halves);
  if constexpr (kScales == Scales::shared && kScaleType == DType::e8m0) {
    const float s = decode_e8m0(scale.x);
    v = make_float2(__fmul_rn(v.x, s), __fmul_rn(v.y, s));
  } else if constexpr (kScales == Scales::own && kScaleType == DType::e8m0) {
    float x = __uint_as_float(codes << 23 & 0x7f800000u), y = __uint_as_float(codes << 15 & 0x7f800000u);
    if (special) x = decode_e8m0(codes & 0xff), y = decode_e8m0(codes >> 8 & 0xff);
    v = make_float2(__fmul_rn(v.x, x), __fmul_rn(v.y, y));
  }
  return packed(v.x, v.y, DType::bf16);
}

// An array in the usual case, with `blocks` blocks of the grid for each of its slices.
struct Pass {
  Widening w;
  Divider by_pieces;
  int line_shift, run_shift;
  uint32_t blocks;
};

// One launch for both operands of a product, or for one of them.
struct Passes {
  Pass of[2];
  uint32_t first_blocks;  // of the grid, for the first array
  SizePadding padding;    // by the last block, where it is wanted
};

template <int kCount>
__device__ void pad_sizes(const SizePadding& p) {
  __shared__ int64_t scratch[33];
  walk_groups<kCount>(
      static_cast<int>(p.groups), p.rows, scratch, [&](int g) { return p.sizes[g]; }, nullptr,
      [&](int g, int64_t first, int64_t end, int64_t) {
        p.padded[g] = static_cast<int32_t>((end - first + p.segment - 1) / p.segment * p.segment);
      });
}

__global__ void __launch_bounds__(kScanThreads) pad_sizes_alone(const SizePadding padding) {
  pad_sizes<kScanThreads>(padding);
}

// A block takes kAhead runs of kThreads pieces at a time.
template <DType kType, DType kScaleType, Scales kScales>
__global__ void __launch_bounds__(kThreads) widen_pieces(const __grid_constant__ Passes passes) {
  constexpr int kBits = kType == DType::u8 ? 4 : 8;
  if (passes.padding.padded != nullptr && blockIdx.x + 1 == gridDim.x) return pad_sizes<kThreads>(passes.padding);
  const bool is_second = blockIdx.x >= passes.first_blocks;
  const Pass& pass = passes.of[is_second];
  const Widening& w = pass.w;
  const uint32_t index = blockIdx.x - (is_second ? passes.first_blocks : 0), block = index % pass.blocks;
  const int64_t slice = index / pass.blocks;
  if (w.sizes != nullptr && w.sizes[slice] <= 0) return;
  const uint32_t pieces = static_cast<uint32_t>(w.run / kPiece), count = static_cast<uint32_t>(w.lines) * pieces;
  const auto* codes = static_cast<const uint8_t*>(w.values) + slice * w.lines * w.run * kBits / 8;
  const auto* scales = static_cast<const uint8_t*>(w.scales) + slice * w.slice_stride;
  auto* result = static_cast<uint4*>(w.result) + slice * count;
  for (uint32_t first = block * kAhead * kThreads + threadIdx.x; first < count;
       first += pass.blocks * kAhead * kThreads) {
    Raw<kBits> raw[kAhead];
    uint2 scale[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const uint32_t piece = first + u * kThreads;
      raw[u] = {};
      scale[u] = make_uint2(0, 0);
      if (piece < count) {
        raw[u] = load_piece<kBits>(codes + int64_t{piece} * kBits);
        if constexpr (kScales != Scales::none) {
          const uint32_t line = pass.by_pieces.divide(piece), inside = (piece - line * pieces) * kPiece;
          const auto* from = scales + (line >> pass.line_shift) * w.line_stride;
          if constexpr (kScales == Scales::shared) {
            scale[u].x = __ldg(from + (inside >> pass.run_shift));
          } else {
            scale[u] = __ldg(reinterpret_cast<const uint2*>(from + inside));
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const uint32_t piece = first + u * kThreads;
      if (piece >= count) break;
      const bool special = has_special_e8m0(scale[u].x) || has_special_e8m0(scale[u].y);
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = widened<kType, kScaleType, kScales>(raw[u], scale[u], special, 2 * j);
      result[piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

int shift_of(int block) {
  int shift = 0;
  while ((1 << shift) < block) ++shift;
  return shift;
}

bool aligned(const void* address, int bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

Pass pass_of(const Widening& w) {
  const int64_t pieces = w.run / kPiece, count = w.lines * pieces;
  constexpr int64_t kRounds = 4;  // of a block, where there are plenty
  const int64_t blocks = (count + kRounds * kAhead * kThreads - 1) / (kRounds * kAhead * kThreads);
  return {w, Divider::of(static_cast<uint32_t>(pieces)), shift_of(w.line_block), shift_of(w.run_block),
          static_cast<uint32_t>(blocks)};
}

bool has_own_scales(const Widening& w) { return w.scales != nullptr && w.run_block < kPiece; }

// Types and scales as the kernel of the usual case has them: equal ones share a launch.
DType scales_of(const Widening& w) { return w.scales == nullptr ? DType::u8 : w.scale_type; }
bool have_the_same_types(const Widening& a, const Widening& b) {
  return a.type == b.type && scales_of(a) == scales_of(b) && has_own_scales(a) == has_own_scales(b);
}

bool is_usual(const Widening& w) {
  const int64_t pieces = w.run / kPiece;
  if (w.transposed || w.result_type != DType::bf16 || w.run % kPiece != 0 || w.pitch != w.run || pieces < 2 ||
      w.lines * pieces > INT32_MAX || w.lines == 0 || !aligned(w.values, 8)) {
    return false;
  }
  if (has_own_scales(w)) {
    return w.run_block == 1 && w.run_stride == 1 && aligned(w.scales, 8) && w.line_stride % kPiece == 0;
  }
  return w.scales == nullptr || w.run_stride == 1;
}

// Launches the kernel of the usual case for one or two arrays of the same types; false where it does not take them.
bool launch_usual(const Widening* arrays, int count, const SizePadding& padding, cudaStream_t stream) {
  Passes passes = {};
  passes.padding = padding;
  int64_t blocks = padding.padded != nullptr;
  for (int i = 0; i < count; ++i) {
    passes.of[i] = pass_of(arrays[i]);
    blocks += passes.of[i].blocks * arrays[i].slices;
    if (i == 0) passes.first_blocks = passes.of[i].blocks * static_cast<uint32_t>(arrays[i].slices);
  }
  if (blocks > INT32_MAX) return false;
  const Widening& w = arrays[0];
#define GROUPED_USUAL(TYPE, SCALE, KIND)                                                                             \
  if (w.type == DType::TYPE && scales_of(w) == DType::SCALE && has_own_scales(w) == (Scales::KIND == Scales::own)) { \
    widen_pieces<DType::TYPE, DType::SCALE, Scales::KIND>                                                            \
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(passes);                                            \
    GROUPED_CUDA_CHECK(cudaGetLastError());                                                                          \
    return true;                                                                                                     \
  }
  GROUPED_USUAL(e4m3fn, u8, none)
  GROUPED_USUAL(e5m2, u8, none)
  GROUPED_USUAL(e4m3fn, e8m0, shared)
  GROUPED_USUAL(e5m2, e8m0, shared)
  GROUPED_USUAL(u8, e8m0, shared)
  GROUPED_USUAL(u8, e4m3fn, shared)
  GROUPED_USUAL(e4m3fn, e8m0, own)
  GROUPED_USUAL(e5m2, e8m0, own)
  GROUPED_USUAL(u8, e4m3fn, own)
#undef GROUPED_USUAL
  return false;
}

template <int kBits>
void launch_bits(const Widening& w, cudaStream_t stream) {
  const int64_t pieces = w.slices * w.lines * ((w.run + kPiece - 1) / kPiece);
  if (pieces == 0) return;
  const int64_t blocks = (pieces + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{kBlocks} * multiprocessors()));
  const bool vectors = w.run % kPiece == 0 && w.pitch % kPiece == 0 && aligned(w.values, std::min(kBits, 16));
  widen<kBits><<<grid, kThreads, 0, stream>>>(w, vectors, shift_of(w.line_block), shift_of(w.run_block));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

void launch_any(const Widening& w, cudaStream_t stream) {
  switch (w.type) {
    case DType::u8:
      return launch_bits<4>(w, stream);
    case DType::f32:
      return launch_bits<32>(w, stream);
    case DType::bf16:
    case DType::f16:
      return launch_bits<16>(w, stream);
    default:
      return launch_bits<8>(w, stream);
  }
}

}  // namespace

void launch_widenings(const Widening* arrays, int count, const SizePadding& padding, void* on) {
  const auto stream = static_cast<cudaStream_t>(on);
  if (count == 2 && is_usual(arrays[0]) && is_usual(arrays[1]) && have_the_same_types(arrays[0], arrays[1]) &&
      launch_usual(arrays, 2, padding, stream)) {
    return;
  }
  for (int i = 0; i < count; ++i) {
    if (!is_usual(arrays[i]) || !launch_usual(arrays + i, 1, {}, stream)) launch_any(arrays[i], stream);
  }
  if (padding.padded == nullptr) return;
  pad_sizes_alone<<<1, kScanThreads, 0, stream>>>(padding);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace grouped
