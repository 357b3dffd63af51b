// Gradients at the hidden rows, as grouped_matmul_dact_bf16_sm90.cu draws them: the product, and its launch.
#pragma once

#include <string>

#include "cc/api/calls.h"
#include "cc/api/context.h"
#include "cc/api/operands.h"
#include "cc/device/common/row_partials.cuh"
#include "cc/device/sm90/dact_epilogue.cuh"
#include "cc/device/sm90/low_rank.cuh"
#include "cc/device/sm90/product_launch.cuh"
#include "cc/dispatch/columns.h"
#include "cc/dispatch/tiles_sm90.h"

namespace grouped::sm90 {

// A fifth stage is worth more than a third set, and a second set more than a sixth stage.
template <const TileChoice& kChoice>
using DactShapeOf = FetchingShape<TileShape<kChoice.cols, kChoice.stages, kChoice.slots>, 2>;
using DactShape = DactShapeOf<kDact>;

struct DactParams : RowsParams {
  LowMaps low;
  CUtensorMap z;
  CUtensorMap hidden[2], grad[2];  // of a set's first and second block
  int32_t* valid_rows;             // set to the first tail row
  const float* row_scale;          // [rows], or null
  float* partials;                 // [column tiles, rows] row sums; null: not wanted
  uint8_t *result, *activated;     // null: not wanted
  HiddenColumns columns;
  ActivationSpec spec;
  float one;  // 1, see move_up
};
// With their long epilogue clusters progress by fits and starts: they would wait longer than L2 saves.
__device__ inline NoPace pace_of(const DactParams&, uint32_t) { return {}; }

template <class T, Major kWeights, class Shape_ = DactShape>
struct DactProduct {
  using Params = DactParams;
  using Element = T;
  using Shape = Shape_;
  static constexpr Major kLhsMajor = Major::k, kRhsMajor = kWeights;
  static constexpr bool kRaggedSums = false, kShortEnd = true;
  using Rhs = RhsTile<kRhsMajor, Shape::kCols>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }
  template <class Multiply>
  static __device__ void multiply_cols(int, Multiply multiply) {
    multiply(std::integral_constant<int, Shape::kCols>{});
  }

  // Worked on at once: 8 chains per thread hide the latencies of one another.
  static constexpr int kChunks = Shape::kCols <= 128 ? 2 : 1;

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    // Every CTA says the same.
    schedule_rows<row_pair_at>(p, Shape::kCols, rank, mail, push, [&](int32_t row) { *p.valid_rows = row; });
  }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const FromLow part(p.low, work, k);
    load_lhs<1>(part.low ? &p.low.lhs : &p.lhs, ragged_at(work, part.at, 0), boxes, work.across, rank, to, full);
    if (!columns) return;
    const int32_t c0 = kRhsMajor == Major::k ? part.at : work.col0, c1 = kRhsMajor == Major::k ? work.col0 : part.at;
    Rhs::load(part.low ? &p.low.rhs : &p.rhs, {{c0, c1, part.slice.near, part.slice.far}}, work.across, rank,
              to + 2 * kBlockBytes, full);
  }

  static __device__ void fetch(const Params& p, const Work& work, SetFetcher<Shape>& sets) {
    const int blocks = is_gated(p.spec.kind) ? 2 : 1;
    for_sets(p, work, [&](int col, int row) {
      sets.fill(blocks * kBlockBytes, [&](uint32_t to, uint32_t barrier) {
        for (int b = 0; b < blocks; ++b) {
          ptx::tensor_load(to + b * kBlockBytes, &p.hidden[b], ragged_at(work, p.columns.column(col, b), row), barrier);
        }
      });
    });
  }

  static __device__ void store_sets(const Params& p, const Work& work, SetStorer<Shape>& sets) {
    const int blocks = p.result == nullptr ? 0 : is_gated(p.spec.kind) ? 2 : 1;
    for_sets(p, work, [&](int col, int row) {
      sets.drain([&](uint32_t from) {
        for (int b = 0; b < blocks; ++b) {
          ptx::tensor_store(&p.grad[b], ragged_at(work, p.columns.column(col, b), row), from + b * kBlockBytes);
        }
        if (p.activated != nullptr) ptx::tensor_store(&p.z, ragged_at(work, col, row), from + 2 * kBlockBytes);
      });
    });
  }

  // body(first column, first row of the tile) for each set.
  template <class Body>
  static __device__ void for_sets(const Params& p, const Work& work, Body body) {
    const int across = sets_across<Shape::kCols>(p.cols - work.col0);
    for (int half = 0; half < row_halves(work.valid_rows); ++half) {
      for (int s = 0; s < across; ++s) body(work.col0 + s * kSetCols, 64 * half);
    }
  }

  using Epilogue = NothingHeld;
  static __device__ Epilogue begin(const Params&, const Work&, int, int, const Slots<Shape::kSlots>&) { return {}; }

  // Sets are taken by a loop that works on the first accumulators and moves the others up, as chunks are inside of one.
  static __device__ void store_tile(const Params& p, const Work& work, int first_row, int cols,
                                    float (&acc)[2][Shape::kCols / 2], SetReader<Shape>& sets) {
    constexpr int kAcross = Shape::kCols / kSetCols;
    float (&dz)[Shape::kCols] = reinterpret_cast<float (&)[Shape::kCols]>(acc);
    float sum[2] = {0, 0}, scale[2];
    int left = row_halves(work.valid_rows) * sets_across<Shape::kCols>(cols);
#pragma unroll 1
    for (int i = 0; i < 2 * kAcross; ++i) {
      const int half = i / kAcross, col = i % kAcross * kSetCols, row = first_row + 64 * half;
      if (col == 0) row_scales(p.row_scale, work, row, scale);
      if (64 * half < work.valid_rows && col < cols) {
        sets.wait();
        if (--left == 0) sets.hand_over();
        if (row < work.valid_rows) {
          hidden_gradients<T, kChunks>(p.spec, p.one, dz, scale, sum, p.columns.chunks, cols - col,
                                       sets.address() + first_row * 128);
          if (p.partials != nullptr && (col + kSetCols >= cols || col + kSetCols == Shape::kCols)) {
            store_sums(p, work, row, sum);
          }
        }
        sets.done();
      }
      move_up<Shape::kCols - kSetCols / 2, kSetCols / 2>(dz, p.one);
    }
  }

  // Rows [end, end + kTailRows) of the results, half of them per CTA, by its 256 consumer threads.
  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    const int64_t pitch = int64_t(p.cols) * sizeof(T), first = work.end + rank * (kTailRows / 2);
    int64_t rows = p.rows - first;
    if (rows > kTailRows / 2) rows = kTailRows / 2;
    const auto clear = [&](uint8_t* result, int64_t pitch) {
      if (result == nullptr) return;
      for (int64_t at = 16 * thread; at < rows * pitch; at += 16 * 32 * kConsumerWarps) {
        *reinterpret_cast<int4*>(result + first * pitch + at) = int4{0, 0, 0, 0};
      }
    };
    clear(p.result, is_gated(p.spec.kind) ? 2 * pitch : pitch);
    clear(p.activated, pitch);
  }

 private:
  // Ends the sums of the warp's 16 rows of a half.
  static __device__ void store_sums(const Params& p, const Work& work, int row, float (&sum)[2]) {
    const int lane = threadIdx.x % 32;
    float* partials = p.partials + work.col0 / Shape::kCols * p.rows + (work.end - work.rows + work.row0 + row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(~0u, sum[i], 1));
      sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(~0u, sum[i], 2));
      const int r = lane / 4 + 8 * i;
      if (lane % 4 == 0 && row + r < work.valid_rows) partials[r] = sum[i];
      sum[i] = 0;
    }
  }
};

// Workspace: draws and first tail row, then the partials.
struct alignas(256) DactHead {
  RowDraws draws;
  int32_t valid_rows;
};

// Of anything but the types of operands and the weights.
inline std::string refuses_dact(const GroupedMatmulDact& c) {
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], f = product_columns(c);
  if (k == 0 || f == 0) return "takes no empty rows";
  if (!HiddenColumns::takes(c.activation.interleave)) {
    return "takes halves in one piece or interleaved in blocks of 1, 8, 16, 32 or a multiple of 64 columns, not " +
           std::to_string(c.activation.interleave);
  }
  return first_of({refuses_low(c.low, c.lhs.dtype, c.rhs_axis), refuses_extents(m, {2 * f, k}),
                   refuses_16_bytes({{"K", k, 8}, {"F", f, 8}}),
                   refuses_row_tiles(m, c.group_sizes.dims[0], f, DactShape::kCols)});
}

inline int64_t dact_col_tiles(int64_t f, int tile_cols) { return (f + tile_cols - 1) / tile_cols; }

inline size_t dact_workspace(const GroupedMatmulDact& c, int tile_cols) {
  const int64_t partials = c.row_sum.present() ? c.lhs.dims[0] * dact_col_tiles(product_columns(c), tile_cols) : 0;
  return sizeof(DactHead) + sizeof(float) * size_t(partials);
}

// What does not depend on the weights' type; clears the draws.
inline DactParams dact_params(const GroupedMatmulDact& call, const Context& context) {
  DactHead* head = static_cast<DactHead*>(context.workspace);
  DactParams p{};
  set_rows(call, context, &head->draws, &p);
  p.valid_rows = &head->valid_rows;
  p.row_scale = floats_or_null(call.row_scale);
  if (call.row_sum.present()) {
    p.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(context.workspace) + sizeof(DactHead));
  }
  p.result = call.result.present() ? call.result.as<uint8_t>() : nullptr;
  p.activated = call.activated.present() ? call.activated.as<uint8_t>() : nullptr;
  p.length = int32_t(call.lhs.dims[1]);
  p.cols = int32_t(product_columns(call));
  p.clear_tail = call.zero_tail != 0;
  p.columns = HiddenColumns::of(call.activation.interleave);
  p.spec = activation_spec(call.activation);
  p.one = 1;
  return p;
}

// With the map of the weights in place; makes the others. Row sums are ended too.
template <class Product>
void launch_dact_product(ProductKernel<Product> kernel, const GroupedMatmulDact& call, typename Product::Params p,
                         unsigned threads, cudaStream_t stream) {
  using T = typename Product::Element;
  using Rhs = typename Product::Rhs;
  const int64_t n = p.cols, wide = call.hidden.dims[1];
  const DType dtype = call.lhs.dtype;
  p.lhs = map_of_rows(call.lhs);
  p.low = low_maps(call.low, p.groups, Rhs::kBoxCols, Rhs::kBoxRows, &p.length);
  // Halves that are in one piece each have a map of their own, which ends where they do.
  const bool apart = is_gated(p.spec.kind) && p.columns.period == HiddenColumns::kApart;
  const MapShape hidden_shape = ragged_shape(apart ? n : wide, wide, dtype);
  for (int b = 0; b < 2; ++b) {
    const int64_t offset = apart ? b * n * int64_t(sizeof(T)) : 0;
    p.hidden[b] = tensor_map(call.hidden.as<uint8_t>() + offset, dtype, hidden_shape, kSetCols, 64);
    if (p.result != nullptr) p.grad[b] = tensor_map(p.result + offset, dtype, hidden_shape, kSetCols, 64);
  }
  if (p.activated != nullptr) p.z = tensor_map(p.activated, dtype, ragged_shape(n, dtype), kSetCols, 64);
  launch_rows_product<Product>(kernel, p, stream, threads);
  if (p.partials == nullptr) return;
  sum_partials<<<partial_blocks(p.rows), kPartialThreads, 0, stream>>>(
      p.partials, p.valid_rows, call.row_base.present() ? call.row_base.as<float>() : nullptr, call.row_sum.as<float>(),
      p.rows, int(dact_col_tiles(p.cols, Product::Shape::kCols)));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace grouped::sm90
