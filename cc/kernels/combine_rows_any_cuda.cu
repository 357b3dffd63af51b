// The rows of a token's slots summed, one launch.
//
//   inverse, weights of 2, 4 or 8 places --> as many vectors of 16 bytes per thread, all under way at once
//       --product, sum, place by place--> 8 sums of fp32 --one rounding--> result
//
// Neighbouring threads have neighbouring vectors of a row (cc/device/common/row_threads.cuh). Where rows are not whole
// vectors of 8 values at multiples of 16 bytes, a thread has one value; the bits are the same.
//
// No shared memory, no barrier. A thread of up to 2 places has two tokens, for one has too little under way. Registers
// (sm_90) and bytes under way per multiprocessor, of which memory wants 40 KiB:
//   16 bits   8 places: 72 registers, 24 warps, 96 KiB      4: 48, 40 warps, 80 KiB      2: 48, 40 warps, 80 KiB
//   fp32      8 places: 104 registers, 16 warps, 128 KiB    4: 63, 24 warps, 96 KiB      2: 70, 24 warps, 96 KiB
// T = 8192, H = 2048, k = 8, bf16 on an H200: 72 us, 0.99 of the copy rate; k = 2, H = 4096, one token per thread:
// 58 us, 0.81, where memory was busy for 69 % of the time.
#include <string>

#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/device/common/row_pieces.cuh"
#include "cc/device/common/row_threads.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

struct Combine {
  Spread spread;
  const void* rows;
  const int32_t* inverse;
  const float* weights;  // null: 1
  void* result;
  uint32_t row_count, row_bytes;
  int slots;
  DType result_type;
};

// Blocks that should fit on a multiprocessor, so that the registers of all pieces under way fit.
constexpr int combine_blocks(int words) { return words >= 16 ? 2 : words >= 8 ? 3 : words >= 4 ? 5 : 6; }

// A thread has kTokens tokens, `step` apart.
template <DType kType, int W, int kPlaces, int kTokens>
__global__ void __launch_bounds__(kSpreadThreads, combine_blocks(kTokens * kPlaces * W * bytes_of(kType) / 16))
    sum_rows(const __grid_constant__ Combine p) {
  const SpreadPlace at(p.spread);
  if (at.vector >= p.spread.vectors || at.row >= p.spread.rows) return;
  using Values = Piece<kType, W>;
  const char* column = opaque(static_cast<const char*>(p.rows) + at.vector * Values::kBytes);
  float sums[kTokens][W] = {};
  for (int first = 0; first < p.slots; first += kPlaces) {
    uint32_t row[kTokens][kPlaces];
    float weights[kTokens][kPlaces];
    Values pieces[kTokens][kPlaces];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t slot = (at.row + t * at.step) * p.slots + first;
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        const bool there = t * at.step < at.left && first + j < p.slots;
        row[t][j] = there ? static_cast<uint32_t>(__ldg(p.inverse + slot + j)) : ~0u;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        pieces[t][j].clear();
        if (row[t][j] < p.row_count) pieces[t][j].load(column + static_cast<uint64_t>(row[t][j]) * p.row_bytes);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t slot = (at.row + t * at.step) * p.slots + first;
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        // A place without a row adds 0 * 0: sums start at +0 and are never -0, so that changes none of their bits.
        weights[t][j] = row[t][j] < p.row_count ? p.weights ? __ldg(p.weights + slot + j) : 1.0f : 0.0f;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
#pragma unroll
        for (int i = 0; i < W; ++i) {
          sums[t][i] = __fadd_rn(sums[t][i], __fmul_rn(weights[t][j], pieces[t][j].value(i)));
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t * at.step >= at.left) break;
    const int64_t row = at.row + t * at.step;
    store_vector(p.result, p.result_type, (row * p.spread.vectors + at.vector) * W, sums[t]);
  }
}

// Tokens per thread: those of few slots have too little under way alone.
constexpr int tokens_a_thread(int64_t slots) { return slots <= 2 ? 2 : 1; }

template <DType kType, int W>
void launch_sum(const Combine& p, cudaStream_t stream) {
  const unsigned blocks = p.spread.blocks();
  if (p.slots <= 2) {
    sum_rows<kType, W, 2, tokens_a_thread(2)><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else if (p.slots <= 4) {
    sum_rows<kType, W, 4, tokens_a_thread(4)><<<blocks, kSpreadThreads, 0, stream>>>(p);
  } else {
    sum_rows<kType, W, 8, tokens_a_thread(8)><<<blocks, kSpreadThreads, 0, stream>>>(p);
  }
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

std::string refuses(const CombineRows& call, const Target&) {
  const std::string reason = refuses_unless_plain({&call.rows, &call.result});
  return reason.empty() ? refuses_wide_rows(call.rows) : reason;
}

void launch(const CombineRows& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t tokens = call.result.dims[0], width = call.rows.dims[1];
  if (tokens == 0) return;
  const bool vectors = common_unit({address(call.rows), address(call.result)}) == 16 && width % 8 == 0;
  const int64_t slots = call.inverse.dims[1];
  const Combine p = {Spread::plan(vectors ? width / 8 : width, tokens, tokens_a_thread(slots)),
                     call.rows.data,
                     call.inverse.as<const int32_t>(),
                     data_or_null<const float>(call.weights),
                     call.result.data,
                     static_cast<uint32_t>(call.rows.dims[0]),
                     static_cast<uint32_t>(width * dtype_bytes(call.rows.dtype)),
                     static_cast<int>(slots),
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

const Kernel<CombineRows> combine_rows_any_cuda = {
    "combine_rows_any_cuda", Arch::cuda, Kind::reference, refuses, no_workspace, launch};

}  // namespace grouped
