// Rows gathered by slot, one launch; for large ones whose places are not given a memset and two.
//
//   rows      source[4 rows] --/ slots--> 4 vectors of 16 bytes per thread, all under way --[* weight]--> result
//   large     source --> place[slot], the row of the result; then a block per row reads it once and stores it at all
//             places of its slots. Rows that no slot or a slot again comes to are listed, and gathered beside; where
//             the caller gave the places, rows without a slot are looked for in the source beside
//   columns   a thread per element of the result's rows, 8 of which are under way
//
// Neighbouring threads have neighbouring vectors of a row (cc/device/common/row_threads.cuh). Where rows are not whole
// vectors at multiples of 16 bytes, the largest unit that divides addresses and rows takes their place; the bits are
// the same. Large results are written as what is not read again: k rows of the result come from one row, which then
// stays in the L2 cache until the last of them.
//
// No shared memory and no barrier, but where rows without a slot are looked for. Registers (sm_90) and bytes under way
// per multiprocessor, of which memory wants 40 KiB:
//   copied, 16 bytes     32 registers, 64 warps, 128 KiB      narrower units 30      columns 40 at most
//   weighted, 16 bits    39 registers, 48 warps,  96 KiB      fp32 48, 40 warps, 160 KiB
// T = 8192, H = 2048, k = 8, bf16 on an H200 (4.25 TB/s): 256 MiB written and 32 MiB read once are 75 us. Gathered,
// each row crosses the fabric of the L2 cache k times beside the k stores: 107 us. Scattered, once: 84.
#include <algorithm>
#include <string>

#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/device/common/row_pieces.cuh"
#include "cc/device/common/row_threads.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int64_t kStreamedBytes = int64_t{24} << 20;  // about half an L2 cache

constexpr int kGathered = 4;  // rows per thread

struct Gather {
  Spread spread;
  const void* rows;
  const int32_t* source;
  const float* weights;
  void* result;
  uint32_t limit;  // N * slots
  uint32_t row_bytes;
  Divisor slots;
  uint32_t each;  // slots
  bool streamed;
};

// What a thread reads and writes: `bytes` of each of its rows.
struct Strip {
  const char* from;          // of row 0
  char* to;                  // of the thread's first row
  int64_t step;              // bytes from one of its rows in the result to the next
  uint32_t slot[kGathered];  // of each row; at least the limit where it has none

  __device__ Strip(const Gather& p, const SpreadPlace& at, int bytes) {
    from = opaque(static_cast<const char*>(p.rows) + at.vector * bytes);
    to = static_cast<char*>(p.result) + at.row * p.row_bytes + at.vector * bytes;
    step = static_cast<int64_t>(at.step) * p.row_bytes;
    const int32_t* source = p.source + at.row;
#pragma unroll
    for (int u = 0; u < kGathered; ++u) {
      slot[u] = u * at.step < at.left ? static_cast<uint32_t>(__ldg(source + u * at.step)) : p.limit;
    }
  }
  __device__ const char* row(const Gather& p, int u) const {
    return from + static_cast<uint64_t>(p.slots.quotient(slot[u])) * p.row_bytes;
  }
};

template <class Vector>
__global__ void __launch_bounds__(kSpreadThreads) copy_rows(const __grid_constant__ Gather p) {
  const SpreadPlace at(p.spread);
  if (at.vector >= p.spread.vectors) return;
  Strip strip(p, at, sizeof(Vector));
  Vector values[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    values[u] = Vector{};
    if (strip.slot[u] < p.limit) values[u] = __ldg(reinterpret_cast<const Vector*>(strip.row(p, u)));
  }
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    Vector* to = reinterpret_cast<Vector*>(strip.to);
    strip.to += strip.step;
    if (u * at.step >= at.left) continue;
    if (p.streamed) {
      __stcs(to, values[u]);
    } else {
      *to = values[u];
    }
  }
}

// ---- large rows, scattered ----

constexpr uint32_t kNowhere = UINT32_MAX;
constexpr unsigned kScatterThreads = 256;
constexpr int64_t kLeastVectors = 64;  // of a row
constexpr unsigned kListBlocks = 264;

// Where slots go, in the workspace. All bytes are 0xff at first, so that no slot has a place and the list no last
// entry.
struct Places {
  uint32_t* last;    // of the list
  uint32_t* place;   // [N * slots]
  uint32_t* listed;  // [rows of the result] at most

  static size_t bytes(const GatherRows& c) {
    return sizeof(uint32_t) * static_cast<size_t>(1 + c.rows.dims[0] * c.slots + c.source.elements());
  }
  static Places at(void* workspace, uint32_t limit) {
    uint32_t* words = static_cast<uint32_t*>(workspace);
    return {words, words + 1, words + 1 + limit};
  }
};

__global__ void __launch_bounds__(kScatterThreads)
    find_places(const int32_t* source, uint32_t rows, uint32_t limit, Places to) {
  const uint32_t row = blockIdx.x * kScatterThreads + threadIdx.x;
  if (row >= rows) return;
  const uint32_t slot = static_cast<uint32_t>(source[row]);
  if (slot < limit && atomicCAS(to.place + slot, kNowhere, row) == kNowhere) return;
  to.listed[atomicAdd(to.last, 1u) + 1] = row;
}

// What is in the list.
__device__ void gather_listed(const Gather& p, const Places& from, uint32_t vectors) {
  const uint32_t count = *from.last + 1;
  for (uint32_t i = blockIdx.x; i < count; i += kListBlocks) {
    const uint64_t row = from.listed[i];
    const uint32_t slot = static_cast<uint32_t>(p.source[row]);
    const uint4* of = static_cast<const uint4*>(p.rows) + uint64_t{p.slots.quotient(slot)} * vectors;
    for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      __stcs(static_cast<uint4*>(p.result) + row * vectors + v, slot < p.limit ? __ldg(of + v) : uint4{});
    }
  }
}

// Zeros in rows without a slot. Such rows come in long runs, so neighbours belong to different blocks.
__device__ void clear_empty(const Gather& p, uint32_t count, uint32_t vectors) {
  __shared__ uint32_t found, empty[kScatterThreads];
  for (uint32_t first = blockIdx.x; first < count; first += kListBlocks * kScatterThreads) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kScatterThreads; i += blockDim.x) {
      const uint64_t row = first + uint64_t{i} * kListBlocks;
      if (row < count && static_cast<uint32_t>(p.source[row]) >= p.limit) {
        empty[atomicAdd(&found, 1u)] = static_cast<uint32_t>(row);
      }
    }
    __syncthreads();
    for (uint32_t i = 0; i < found; ++i) {
      uint4* to = static_cast<uint4*>(p.result) + uint64_t{empty[i]} * vectors;
      for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x) __stcs(to + v, uint4{});
    }
    __syncthreads();
  }
}

// `count` rows of the result; kGiven: the caller knows the places. The first kListBlocks blocks see to the rows that no
// place leads to.
template <bool kGiven>
__global__ void __launch_bounds__(kScatterThreads)
    scatter_rows(const __grid_constant__ Gather p, const Places from, uint32_t count) {
  const uint32_t vectors = p.row_bytes / sizeof(uint4);
  const uint4* rows = static_cast<const uint4*>(p.rows);
  uint4* result = static_cast<uint4*>(p.result);
  if (blockIdx.x < kListBlocks) return kGiven ? clear_empty(p, count, vectors) : gather_listed(p, from, vectors);
  const uint32_t row = blockIdx.x - kListBlocks, slots = p.each;
  const uint32_t* place = from.place + uint64_t{row} * slots;
  for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x) {
    const uint4 value = __ldg(rows + uint64_t{row} * vectors + v);
#pragma unroll 4
    for (uint32_t i = 0; i < slots; ++i) {
      const uint32_t to = place[i];
      if (to < count) __stcs(result + uint64_t{to} * vectors + v, value);
    }
  }
}

template <DType kType, int W>
__global__ void __launch_bounds__(kSpreadThreads) weigh_rows(const __grid_constant__ Gather p) {
  using Values = Piece<kType, W>;
  const SpreadPlace at(p.spread);
  if (at.vector >= p.spread.vectors) return;
  Strip strip(p, at, Values::kBytes);
  Values pieces[kGathered];
  float weights[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    pieces[u].clear();
    weights[u] = 0.0f;
    if (strip.slot[u] < p.limit) {
      pieces[u].load(strip.row(p, u));
      weights[u] = __ldg(p.weights + strip.slot[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    char* to = strip.to;
    strip.to += strip.step;
    if (u * at.step >= at.left) continue;
    float values[W];
#pragma unroll
    for (int i = 0; i < W; ++i) values[i] = __fmul_rn(weights[u], pieces[u].value(i));
    store_vector(to, kType, 0, values);
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

std::string refuses(const GatherRows& call, const Target&) {
  if (call.weights.present() && !is_wide(call.rows.dtype)) {
    return "weighs float32, bfloat16 or float16, got " + describe(call.rows);
  }
  return call.axis == 1 ? "" : refuses_wide_rows(call.rows);
}

void launch_copy(Gather p, int64_t rows, int unit, cudaStream_t stream) {
  p.spread = Spread::plan(p.row_bytes / unit, rows, kGathered);
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

// Whether rows that are wide, and many, are copied several times.
bool scatters(const GatherRows& c) {
  return c.axis == 0 && c.rows.rank == 2 && !c.weights.present() && c.slots > 1 && c.result.bytes() > kStreamedBytes &&
         c.rows.dims[1] * dtype_bytes(c.rows.dtype) >= kLeastVectors * int64_t{sizeof(uint4)};
}

size_t workspace(const GatherRows& call, const Target&) {
  return scatters(call) && !call.places.present() ? Places::bytes(call) : 0;
}

void launch_scatter(const Gather& p, const GatherRows& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const uint32_t rows = static_cast<uint32_t>(call.source.elements());
  const unsigned blocks = kListBlocks + static_cast<unsigned>(call.rows.dims[0]);
  const unsigned threads = std::min(kScatterThreads, (p.row_bytes / unsigned{sizeof(uint4)} + 31) / 32 * 32);
  if (call.places.present()) {
    scatter_rows<true><<<blocks, threads, 0, stream>>>(p, Places{nullptr, call.places.as<uint32_t>(), nullptr}, rows);
    GROUPED_CUDA_CHECK(cudaGetLastError());
    return;
  }
  const Places places = Places::at(context.workspace, p.limit);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(places.last, 0xff, sizeof(uint32_t) * (size_t{p.limit} + 1), stream));
  find_places<<<(rows + kScatterThreads - 1) / kScatterThreads, kScatterThreads, 0, stream>>>(p.source, rows, p.limit,
                                                                                              places);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  scatter_rows<false><<<blocks, threads, 0, stream>>>(p, places, rows);
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
  const int64_t row_bytes = width * dtype_bytes(call.rows.dtype);
  Gather p = {{},
              call.rows.data,
              call.source.as<const int32_t>(),
              data_or_null<const float>(call.weights),
              call.result.data,
              static_cast<uint32_t>(call.rows.dims[0] * call.slots),
              static_cast<uint32_t>(row_bytes),
              Divisor(static_cast<uint32_t>(call.slots)),
              static_cast<uint32_t>(call.slots),
              call.result.bytes() > kStreamedBytes};
  const int unit = common_unit({address(call.rows), address(call.result), static_cast<uintptr_t>(row_bytes)});
  if (scatters(call) && unit == sizeof(uint4)) return launch_scatter(p, call, context);
  if (!p.weights) return launch_copy(p, rows, unit, stream);
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

const Kernel<GatherRows> gather_rows_any_cuda = {
    "gather_rows_any_cuda", Arch::cuda, Kind::reference, refuses, workspace, launch};

}  // namespace grouped
