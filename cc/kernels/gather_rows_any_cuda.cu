// Rows gathered by slot, one launch.
//
//   rows      source[4 rows] --/ slots--> 4 vectors of 16 bytes a thread, all under way at once --[* weight]--> result
//   columns   a thread an element of the result's rows, 8 of which are under way
//
// Neighbouring threads have neighbouring vectors of a row (cc/device/spread.cuh). Where rows are not whole vectors at
// multiples of 16 bytes, the largest unit that divides addresses and rows takes their place; the bits are the same.
// Large results are written as what is not read again: k rows of the result come from one row, which then stays in the
// L2 cache until the last of them.
//
// No shared memory, no barrier. Registers and bytes under way a multiprocessor, of which memory wants about 40 KiB:
//   copied, 16 bytes     38 registers, 48 warps:  96 KiB      narrower units 26, 27      columns 40 at most
//   weighted, 16 bits    48 registers, 40 warps:  80 KiB      fp32 58, 32 warps: 128 KiB
// Predicted for T = 8192, H = 2048, k = 8, bf16 on an H200 (4.25 TB/s): 256 MiB written and 32 MiB read once, 75 us, or
// 130 us if every row came from memory again. Instructions take about 20 us of it.
#include <algorithm>
#include <string>

#include "cc/device/launch.h"
#include "cc/device/operand.h"
#include "cc/device/pieces.cuh"
#include "cc/device/spread.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int64_t kStreamedBytes = int64_t{24} << 20;  // about half an L2 cache

constexpr int kGathered = 4;  // rows a thread

struct Gather {
  Spread spread;
  const void* rows;
  const int32_t* source;
  const float* weights;
  void* result;
  uint32_t limit, slots;  // N * slots, slots
  uint32_t row_bytes;
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
  const char* column = opaque(static_cast<const char*>(p.rows) + at.vector * static_cast<int64_t>(sizeof(Vector)));
  Vector values[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    values[u] = Vector{};
    if (slot[u] < p.limit) {
      values[u] =
          __ldg(reinterpret_cast<const Vector*>(column + static_cast<uint64_t>(slot[u] / p.slots) * p.row_bytes));
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
  using Values = Piece<kType, W>;
  const char* column = opaque(static_cast<const char*>(p.rows) + at.vector * Values::kBytes);
  Values pieces[kGathered];
  float weights[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    pieces[u].clear();
    weights[u] = 0.0f;
    if (slot[u] < p.limit) {
      pieces[u].load(column + static_cast<uint64_t>(slot[u] / p.slots) * p.row_bytes);
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

std::string refuses(const GatherRows& call, const Target& target) {
  if (target.platform == Platform::cuda && call.weights.present() && !is_wide(call.rows.dtype)) {
    return "weighs float32, bfloat16 or float16, got " + describe(call.rows);
  }
  return call.axis == 1 ? refuses_unless_cuda(target) : refuses_wide_rows(call.rows, target);
}

size_t workspace(const GatherRows&, const Target&) { return 0; }

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

void launch(const GatherRows& call, const Context& context) {
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
  p.row_bytes = static_cast<uint32_t>(width * dtype_bytes(call.rows.dtype));
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

}  // namespace

const Kernel<GatherRows> gather_rows_any_cuda = {"gather_rows_any_cuda", refuses, workspace, launch};

}  // namespace grouped
