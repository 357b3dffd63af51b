// Rows gathered by slot, and the rows of a token's slots summed; each is one launch.
//
// gather    source[4 rows] --/ slots--> 4 vectors of 16 bytes a thread, all under way at once --[* weight]--> result
// columns   a thread an element of the result's row, with 8 rows of it under way
// combine   inverse, weights of 2, 4 or 8 places --> as many vectors of 16 bytes a thread, all under way at once
//           --product, sum, place by place--> 8 sums of fp32 --one rounding--> result
//
// Neighbouring threads have neighbouring vectors of a row (cc/device/spread.cuh). Where rows are not whole vectors at
// multiples of 16 bytes, the largest unit that divides addresses and rows takes their place, and has the same bits.
// Results of more than half an L2 cache are written as what is not read again: a gathered row comes from one of k times
// as many rows, and the rows that are read again stay in the cache then.
//
// No shared memory, no barrier. Registers and bytes under way a multiprocessor, of which the memory wants about 40 KiB:
//   gather 16 bytes, 4 rows     32 registers, 64 warps: 128 KiB      weighted, 16 bits: 40, 48 warps: 96 KiB
//   combine 16 bits, 8 places   72 registers, 24 warps:  96 KiB      4 places: 48, 40 warps: 80 KiB
// Predicted for T = 8192, H = 2048, k = 8, bf16 on an H200 (4.25 TB/s): gather writes 256 MiB and reads 32 MiB once, 75
// us, or 130 if all rows come from memory again; combine reads 256 MiB and writes 32 MiB, 76 us. Instructions take 15
// to 20 us of either.
#include <algorithm>
#include <string>
#include <type_traits>

#include "cc/device/launch.h"
#include "cc/device/operand.h"
#include "cc/device/spread.cuh"
#include "cc/device/values.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int64_t kStreamedBytes = int64_t{24} << 20;

// The address of a tensor, or a row's bytes, in units of the largest power of two up to 16 that divides them all.
int common_unit(std::initializer_list<uintptr_t> values) {
  uintptr_t all = 16;
  for (const uintptr_t value : values) all |= value;
  return static_cast<int>(all & (~all + 1));
}
uintptr_t address(const TensorView& t) { return reinterpret_cast<uintptr_t>(t.data); }

// body(std::integral_constant<DType, type>{}) of a wide type.
template <class Body>
void with_wide_type(DType type, const Body& body) {
  if (type == DType::f32) return body(std::integral_constant<DType, DType::f32>{});
  if (type == DType::bf16) return body(std::integral_constant<DType, DType::bf16>{});
  body(std::integral_constant<DType, DType::f16>{});
}

// ---- W values of a type, as they lie in memory: conversion waits until all loads are under way

template <DType kType, int W>
struct Piece {
  static constexpr int kWords = W * bytes_of(kType) / 16;
  uint4 words[kWords];

  __device__ void load(const void* base, int64_t vector) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(static_cast<const uint4*>(base) + vector * kWords + i);
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
  float one;

  __device__ void load(const void* base, int64_t vector) { one = load_value(base, kType, vector); }
  __device__ void clear() { one = 0.0f; }
  __device__ float value(int) const { return one; }
};

// ---- Gather

constexpr int kGathered = 4;  // rows a thread

struct Gather {
  Spread spread;
  const void* rows;
  const int32_t* source;
  const float* weights;
  void* result;
  uint32_t limit, slots;  // N * slots, slots
  bool streamed;
};

// Where the thread's rows come from: numbers of slots, `limit` where there is none.
__device__ inline void find_sources(const Gather& p, const SpreadPlace& at, uint32_t (&slot)[kGathered]) {
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const int64_t row = at.row + u * at.step;
    slot[u] = row < p.spread.rows ? static_cast<uint32_t>(__ldg(p.source + row)) : p.limit;
  }
}

template <class Vector>
__global__ void __launch_bounds__(kSpreadThreads) copy_rows(const __grid_constant__ Gather p) {
  const SpreadPlace at(p.spread);
  if (at.vector >= p.spread.vectors) return;
  uint32_t slot[kGathered];
  find_sources(p, at, slot);
  Vector values[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    values[u] = Vector{};
    if (slot[u] < p.limit) {
      const int64_t from = static_cast<int64_t>(slot[u] / p.slots) * p.spread.vectors + at.vector;
      values[u] = __ldg(static_cast<const Vector*>(p.rows) + from);
    }
  }
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const int64_t row = at.row + u * at.step;
    if (row >= p.spread.rows) continue;
    Vector* to = static_cast<Vector*>(p.result) + row * p.spread.vectors + at.vector;
    if (p.streamed) {
      __stcs(to, values[u]);
    } else {
      *to = values[u];
    }
  }
}

template <DType kType, int W>
__global__ void __launch_bounds__(kSpreadThreads) weigh_rows(const __grid_constant__ Gather p) {
  const SpreadPlace at(p.spread);
  if (at.vector >= p.spread.vectors) return;
  uint32_t slot[kGathered];
  find_sources(p, at, slot);
  Piece<kType, W> pieces[kGathered];
  float weights[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    pieces[u].clear();
    weights[u] = 0.0f;
    if (slot[u] < p.limit) {
      pieces[u].load(p.rows, static_cast<int64_t>(slot[u] / p.slots) * p.spread.vectors + at.vector);
      weights[u] = __ldg(p.weights + slot[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const int64_t row = at.row + u * at.step;
    if (row >= p.spread.rows) continue;
    float values[W];
#pragma unroll
    for (int i = 0; i < W; ++i) values[i] = __fmul_rn(weights[u], pieces[u].value(i));
    store_vector(p.result, kType, (row * p.spread.vectors + at.vector) * W, values);
  }
}

// result[c, r] = rows[c, source[r] / slots]; an element is `parts` units, of one for addresses that suit its type.
constexpr int kColumnRows = 8;
constexpr unsigned kMostGridRows = 65535;

struct Columns {
  const void* rows;
  const int32_t* source;
  void* result;
  int64_t height, from, to;  // C; N and M in units
  uint32_t limit, slots, parts;
};

template <class Unit>
__global__ void __launch_bounds__(kSpreadThreads) copy_columns(const __grid_constant__ Columns p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSpreadThreads + threadIdx.x;
  if (at >= p.to) return;
  const uint32_t slot = static_cast<uint32_t>(__ldg(p.source + at / p.parts));
  const bool exists = slot < p.limit;
  const int64_t column = static_cast<int64_t>(slot / p.slots) * p.parts + at % p.parts;
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kColumnRows; first < p.height;
       first += static_cast<int64_t>(gridDim.y) * kColumnRows) {
    Unit values[kColumnRows];
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      values[i] = Unit{};
      if (exists && first + i < p.height) {
        values[i] = __ldg(static_cast<const Unit*>(p.rows) + (first + i) * p.from + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      if (first + i < p.height) static_cast<Unit*>(p.result)[(first + i) * p.to + at] = values[i];
    }
  }
}

std::string refuses_gather(const GatherRows& call, const Target& target) {
  if (target.platform == Platform::cuda && call.weights.present() && !is_wide(call.rows.dtype)) {
    return "weighs float32, bfloat16 or float16, got " + describe(call.rows);
  }
  return refuses_unless_cuda(target);
}

template <class Call>
size_t no_workspace(const Call&, const Target&) {
  return 0;
}

void launch_copy(Gather p, int64_t row_bytes, int unit, cudaStream_t stream) {
  p.spread = Spread::plan(row_bytes / unit, p.spread.rows, kGathered);
  const unsigned blocks = p.spread.blocks();
  if (unit == 16) {
    copy_rows<uint4><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else if (unit == 8) {
    copy_rows<uint2><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else if (unit == 4) {
    copy_rows<unsigned><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else if (unit == 2) {
    copy_rows<unsigned short><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else {
    copy_rows<unsigned char><<<blocks, kSpreadThreads, 0, stream>>>(p);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

void launch_columns(const GatherRows& call, cudaStream_t stream) {
  const int64_t bytes = dtype_bytes(call.rows.dtype);
  const int unit = common_unit({address(call.rows), address(call.result), static_cast<uintptr_t>(bytes)});
  const int64_t parts = bytes / unit;
  const Columns p = {call.rows.data,
                     call.source.as<const int32_t>(),
                     call.result.data,
                     call.rows.dims[0],
                     call.rows.dims[1] * parts,
                     call.source.dims[0] * parts,
                     static_cast<uint32_t>(call.rows.dims[1] * call.slots),
                     static_cast<uint32_t>(call.slots),
                     static_cast<uint32_t>(parts)};
  if (p.to == 0 || p.height == 0) return;
  const int64_t tall = (p.height + kColumnRows - 1) / kColumnRows;
  const dim3 grid(static_cast<unsigned>((p.to + kSpreadThreads - 1) / kSpreadThreads),
                  static_cast<unsigned>(std::min<int64_t>(tall, kMostGridRows)));
  if (unit == 8) {
    copy_columns<uint2><<<grid, kSpreadThreads, 0, stream>>>(p);
  } else if (unit == 4) {
    copy_columns<unsigned><<<grid, kSpreadThreads, 0, stream>>>(p);
  } else if (unit == 2) {
    copy_columns<unsigned short><<<grid, kSpreadThreads, 0, stream>>>(p);
  } else {
    copy_columns<unsigned char><<<grid, kSpreadThreads, 0, stream>>>(p);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

void launch_gather(const GatherRows& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  if (call.axis == 1) return launch_columns(call, stream);
  const int64_t rows = call.source.elements(), width = call.rows.rank == 1 ? 1 : call.rows.dims[1];
  if (rows == 0) return;
  Gather p = {};
  p.spread.rows = rows;
  p.rows = call.rows.data;
  p.source = call.source.as<const int32_t>();
  p.weights = data_or_null<const float>(call.weights);
  p.result = call.result.data;
  p.slots = static_cast<uint32_t>(call.slots);
  p.limit = static_cast<uint32_t>(call.rows.dims[0] * call.slots);
  p.streamed = call.result.bytes() > kStreamedBytes;
  const int64_t row_bytes = width * dtype_bytes(call.rows.dtype);
  const int unit = common_unit({address(call.rows), address(call.result), static_cast<uintptr_t>(row_bytes)});
  if (!p.weights) return launch_copy(p, row_bytes, unit, stream);
  const bool vectors = unit == 16 && width % 8 == 0;
  p.spread = Spread::plan(vectors ? width / 8 : width, rows, kGathered);
  with_wide_type(call.rows.dtype, [&](auto type) {
    if (vectors) {
      weigh_rows<decltype(type)::value, 8><<<p.spread.blocks(), kSpreadThreads, 0, stream>>>(p);
    } else {
      weigh_rows<decltype(type)::value, 1><<<p.spread.blocks(), kSpreadThreads, 0, stream>>>(p);
    }
  });
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ---- Combine

struct Combine {
  Spread spread;
  const void* rows;
  const int32_t* inverse;
  const float* weights;  // null: 1
  void* result;
  uint32_t row_count;
  int slots;
  DType result_type;
};

// Blocks that should fit a multiprocessor, so that the registers of all places under way fit.
constexpr int combine_blocks(int words) { return words >= 16 ? 2 : words >= 8 ? 3 : words >= 4 ? 5 : 6; }

template <DType kType, int W, int kPlaces>
__global__ void __launch_bounds__(kSpreadThreads, combine_blocks(kPlaces * W * bytes_of(kType) / 16))
    sum_rows(const __grid_constant__ Combine p) {
  const SpreadPlace at(p.spread);
  if (at.vector >= p.spread.vectors || at.row >= p.spread.rows) return;
  const int64_t first = at.row * p.slots;
  float sums[W] = {};
  for (int j0 = 0; j0 < p.slots; j0 += kPlaces) {
    uint32_t row[kPlaces];
    float weights[kPlaces];
    Piece<kType, W> pieces[kPlaces];
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      row[j] = j0 + j < p.slots ? static_cast<uint32_t>(__ldg(p.inverse + first + j0 + j)) : ~0u;
    }
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      pieces[j].clear();
      if (row[j] < p.row_count) pieces[j].load(p.rows, row[j] * p.spread.vectors + at.vector);
    }
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      // A place without a row adds 0 * 0: sums start at +0 and are never -0, so that changes none of their bits.
      weights[j] = row[j] < p.row_count ? p.weights ? __ldg(p.weights + first + j0 + j) : 1.0f : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
#pragma unroll
      for (int i = 0; i < W; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(weights[j], pieces[j].value(i)));
    }
  }
  store_vector(p.result, p.result_type, (at.row * p.spread.vectors + at.vector) * W, sums);
}

template <DType kType, int W>
void launch_sum(const Combine& p, cudaStream_t stream) {
  const unsigned blocks = p.spread.blocks();
  if (p.slots <= 2) {
    sum_rows<kType, W, 2><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else if (p.slots <= 4) {
    sum_rows<kType, W, 4><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else {
    sum_rows<kType, W, 8><<<blocks, kSpreadThreads, 0, stream>>>(p);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

std::string refuses_combine(const CombineRows& call, const Target& target) {
  if (target.platform == Platform::cuda && (!is_wide(call.rows.dtype) || !is_wide(call.result.dtype))) {
    return "takes and gives float32, bfloat16 or float16, got " + describe(call.rows) + " for " + describe(call.result);
  }
  return refuses_unless_cuda(target);
}

void launch_combine(const CombineRows& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t tokens = call.result.dims[0], width = call.rows.dims[1];
  if (tokens == 0) return;
  const bool vectors = common_unit({address(call.rows), address(call.result)}) == 16 && width % 8 == 0;
  const Combine p = {Spread::plan(vectors ? width / 8 : width, tokens, 1),
                     call.rows.data,
                     call.inverse.as<const int32_t>(),
                     data_or_null<const float>(call.weights),
                     call.result.data,
                     static_cast<uint32_t>(call.rows.dims[0]),
                     static_cast<int>(call.inverse.dims[1]),
                     call.result.dtype};
  with_wide_type(call.rows.dtype, [&](auto type) {
    if (vectors) {
      launch_sum<decltype(type)::value, 8>(p, stream);
    } else {
      launch_sum<decltype(type)::value, 1>(p, stream);
    }
  });
}

}  // namespace

const Kernel<GatherRows> gather_rows_any_cuda = {"gather_rows_any_cuda", refuses_gather, no_workspace, launch_gather};
const Kernel<CombineRows> combine_rows_any_cuda = {"combine_rows_any_cuda", refuses_combine, no_workspace,
                                                   launch_combine};

}  // namespace grouped
