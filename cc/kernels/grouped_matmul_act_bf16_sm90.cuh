// The up projection with its activation, as grouped_matmul_act_bf16_sm90.cu draws it: the product, and its launch,
// which one file for each operand type and layout of weights instantiates.
#pragma once

#include <string>

#include "cc/api/calls.h"
#include "cc/api/context.h"
#include "cc/api/operands.h"
#include "cc/device/sm90/low_rank.cuh"
#include "cc/device/sm90/product_launch.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/math/activation.h"

namespace grouped::sm90 {

constexpr int kSliceCols = 32;  // of a box of weights, and of a piece of a result
constexpr int kTileCols = kWithActivation.cols;
using UpShape = TileShape<kTileCols, kWithActivation.stages, kWithActivation.slots, kNarrowSlotBytes>;

struct UpParams : RowsParams, BiasParams {  // width: of hidden
  CUtensorMap out, hidden[2];  // hidden: one map per half where they are apart, so that each clips at its own edge
  LowMaps low;
  CUtensorMap rhs_up;  // of part 1 of the weights, where `rhs` is of part 0; the same if both are of one array
  // Box i of part 0 of the tile at result column c starts at column c * across + i * step of the weights, the box of
  // part 1 `part` columns further. Parts are gates and linear halves, or else every other box.
  int32_t across, step, part;
  int32_t weight_part, hidden_part;  // the same `part` in the maps of either: 0 where each half has its own
  uint8_t* result;
  uint8_t* hidden_rows;  // null: hidden is not stored
  ActivationSpec activation;
};

// Adds bias[8j] and bias[8j + 1] to a slice's accumulators of two rows; `cols` columns exist.
template <class B>
__device__ inline void add_bias(const B* bias, int cols, float (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (8 * j >= cols) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float b = to_float(bias[8 * j + i]);
      v[4 * j + i] += b;
      v[4 * j + 2 + i] += b;
    }
  }
}

template <class T>
__device__ inline void unpack2(uint32_t v, float& a, float& b) {
  if constexpr (std::is_same_v<T, __half>) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&v));
    a = f.x, b = f.y;
  } else {
    a = __uint_as_float(v << 16), b = __uint_as_float(v & 0xffff0000u);
  }
}

// How gates and linear halves are laid out in hidden: not at all, kinds without a linear half; apart, or in blocks of
// 32 columns; or column by column.
enum class Pairs { none, blocks, columns };

template <class T, Major kWeights, Pairs kPairs, class Shape_ = UpShape>
struct UpProduct {
  using Params = UpParams;
  using Element = T;
  using Shape = Shape_;
  using WarpSlots = typename Shape::WarpSlots;
  static constexpr Major kLhsMajor = Major::k, kRhsMajor = kWeights;
  static constexpr bool kRaggedSums = false, kShortEnd = true, kGated = kPairs != Pairs::none;
  static constexpr bool kOneStore = kPairs == Pairs::blocks;  // the others would spill a word or two
  static constexpr int kParts = kGated ? 2 : 1;               // of a slice of 32 result columns: pieces of hidden
  static constexpr int kResultCols = kTileCols / kParts;
  using Rhs = PairedTile<kRhsMajor>;
  static constexpr int kRowsBox = 64;                             // rows of a box of operands
  static constexpr int kPieceRows = 16, kPieceCols = kSliceCols;  // of a box of results

  // Boxes per part. The last tile of a row may have one less: it is what a width that 96 does not divide pays for.
  static constexpr int kBoxes = kTileCols / 64, kEdgeBoxes = kBoxes - 1;
  static __device__ int boxes(int cols) { return cols <= kResultCols / kBoxes * kEdgeBoxes ? kEdgeBoxes : kBoxes; }
  static __device__ uint32_t rhs_bytes(int cols) { return 2 * boxes(cols) * Rhs::kBoxBytes; }
  template <class Multiply>
  static __device__ void multiply_cols(int cols, Multiply multiply) {
    if (boxes(cols) == kBoxes) {
      multiply(std::integral_constant<int, 64 * kBoxes>{});
    } else {
      multiply(std::integral_constant<int, 64 * kEdgeBoxes>{});
    }
  }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows(p, kResultCols, rank, mail, push);
  }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const FromLow part(p.low, work, k);
    load_lhs<1>(part.low ? &p.low.lhs : &p.lhs, ragged_at(work, part.at, 0), boxes, work.across, rank, to, full);
    if (columns) load_rhs(p, work, part, rank, to + 2 * kBlockBytes, full);
  }
  static __device__ void load_rhs(const Params& p, const Work& work, const FromLow& part, uint32_t rank, uint32_t to,
                                  uint32_t full) {
    const int32_t col = p.across * work.col0;
    const int32_t c0 = kRhsMajor == Major::k ? part.at : col, c1 = kRhsMajor == Major::k ? col : part.at;
    const CUtensorMap *first = part.low ? &p.low.rhs : &p.rhs, *second = part.low ? &p.low.rhs : &p.rhs_up;
    Rhs::load(first, second, {{c0, c1, part.slice.near, part.slice.far}}, p.weight_part, p.step,
              boxes(p.cols - work.col0), work.across, rank, to, full);
  }

  using Epilogue = NothingHeld;
  static __device__ Epilogue begin(const Params&, const Work&, int, int, const WarpSlots&) { return {}; }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[kTileCols / 2],
                               WarpSlots& slots, Epilogue&) {
    float scale[2];  // of rows l/4 and l/4 + 8
    row_scales(p.row_scale, work, row, scale);
    const ptx::Coords at = ragged_at(work, work.col0, row);
#pragma unroll
    for (int s = 0; s < kResultCols / kSliceCols; ++s) {
      const int left = cols - s * kSliceCols;
      if (left <= 0) break;
      const int32_t col = p.across * work.col0 + s * (kGated ? p.step : kSliceCols);
      uint32_t h[kParts][8];  // words 2j, 2j + 1: columns 8j + 2(l%4) + {0, 1} of rows l/4, l/4 + 8
      uint32_t z[8];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float (&v)[16] = *reinterpret_cast<float (*)[16]>(&acc[kSliceCols / 2 * (kParts * s + part)]);
        bias_to(p, work, col + part * p.part, left, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) h[part][i] = pack2<T>(v[2 * i], v[2 * i + 1]);
        if (p.hidden_rows != nullptr) {
          store_piece(&p.hidden[part], {{col + part * p.hidden_part, at.c[1], at.c[2], at.c[3]}}, slots,
                      [&](uint32_t slot) { write_matrices(slot, h[part]); });
        }
        if (kPairs != Pairs::columns && part + 1 < kParts) continue;  // a linear half is to come
        with_activation(p.activation.kind, [&](auto kind) {
          if constexpr (is_gated(decltype(kind)::value) == kGated) {
            activate<ActivationOf<decltype(kind)::value>>(p, scale, h, part, z);
          }
        });
      }
      store_piece(&p.out, {{at.c[0] + s * kSliceCols, at.c[1], at.c[2], at.c[3]}}, slots, [&](uint32_t slot) {
        if constexpr (kPairs == Pairs::columns) {
          write_words(slot, z);
        } else {
          write_matrices(slot, z);
        }
      });
    }
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    const int64_t bytes = int64_t(p.cols) * sizeof(T), hidden_bytes = int64_t(p.width) * sizeof(T);
    clear_rows(p, work, rank, thread, p.result, bytes, bytes);
    if (p.hidden_rows != nullptr) clear_rows(p, work, rank, thread, p.hidden_rows, hidden_bytes, hidden_bytes);
  }

 private:
  // Adds the bias of hidden's columns col and on, of which `cols` results are left.
  static __device__ void bias_to(const Params& p, const Work& work, int col, int cols, float (&v)[16]) {
    const char* bias = device::bias_at<device::BiasOf<T>>(p, work.group, col + 2 * (threadIdx.x % 4));
    if (bias == nullptr) return;
    if (kPairs == Pairs::columns) cols = p.width - col;
    if (p.float_bias) {
      add_bias(reinterpret_cast<const float*>(bias), cols, v);
    } else {
      add_bias(reinterpret_cast<const T*>(bias), cols, v);
    }
  }

  // z of a slice, placed as h is. Where pairs are column by column: of one part, word 4 * part + j as results 16 * part
  // + 4j + (l&2) + {0, 1} of row l/4 + 8 * (l&1).
  template <class Act>
  static __device__ void activate(const Params& p, const float (&scale)[2], const uint32_t (&h)[kParts][8], int part,
                                  uint32_t (&z)[8]) {
    const auto value = [&](float a, float u) { return Act::value(p.activation, a, u); };
    if constexpr (kPairs == Pairs::columns) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float t[2];  // of the two rows
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float a, u;
          unpack2<T>(h[part][2 * j + r], a, u);
          t[r] = scale[r] * value(a, u);
        }
        // Neighbouring lanes hold neighbouring results of both rows: each keeps one row.
        const bool odd = threadIdx.x % 2;
        const float other = __shfl_xor_sync(~0u, odd ? t[0] : t[1], 1);
        z[4 * part + j] = odd ? pack2<T>(other, t[1]) : pack2<T>(t[0], other);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float a[2], u[2] = {0, 0};
        unpack2<T>(h[0][i], a[0], a[1]);
        if constexpr (kGated) unpack2<T>(h[kParts - 1][i], u[0], u[1]);
        z[i] = pack2<T>(scale[i % 2] * value(a[0], u[0]), scale[i % 2] * value(a[1], u[1]));
      }
    }
  }

  // One piece, 16 rows x 32 columns of this warp, from a slot that `write` fills.
  template <class Write>
  static __device__ void store_piece(const CUtensorMap* map, ptx::Coords at, WarpSlots& slots, Write write) {
    slots.wait_free();
    const uint32_t slot = slots.address();
    write(slot);
    ptx::fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::tensor_store(map, at, slot);
      ptx::store_commit();
    }
    slots.advance();
  }
  static __device__ void write_matrices(uint32_t slot, const uint32_t (&v)[8]) {
    const uint32_t lane = threadIdx.x % 32, to = slot + narrow_slot_of(lane % 16, lane / 16);
    ptx::store_matrix_x4(to, v[0], v[1], v[2], v[3]);
    ptx::store_matrix_x4(to ^ 32, v[4], v[5], v[6], v[7]);  // two chunks further
  }
  static __device__ void write_words(uint32_t slot, const uint32_t (&v)[8]) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4 + 8 * (lane % 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      ptx::store_shared(slot + narrow_slot_of(row, i / 2) + 8 * (i % 2) + 2 * (lane & 2), v[i]);
    }
  }
};

// Of anything but the types of operands and the weights.
inline std::string refuses_up(const GroupedMatmulAct& c) {
  ActivationKind kind{};
  if (!activation_named(c.activation.kind, &kind)) return "knows no activation " + c.activation.kind;
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], f = c.result.dims[1], s = c.activation.interleave;
  if (is_gated(kind) && s != 0 && s != f && s != kSliceCols && s != 1) {
    return "takes an interleave of 0, 1 or 32, not " + std::to_string(s);
  }
  return first_of({refuses_low(c.low, c.lhs.dtype, c.rhs_axis), refuses_extents(m, {2 * f, k}),
                   refuses_16_bytes({{"K", k, 8}, {"F", f, 8}}), refuses_row_tiles(m, c.group_sizes.dims[0], f, 64)});
}

// What does not depend on the weights' type; clears the draws.
inline UpParams up_params(const GroupedMatmulAct& call, const Context& context) {
  UpParams p{};
  set_rows(call, context, context.workspace, &p);
  set_bias(call, &p);
  p.cols = int32_t(call.result.dims[1]);
  p.length = int32_t(call.lhs.dims[1]);
  p.clear_tail = call.zero_tail != 0;
  p.result = call.result.as<uint8_t>();
  p.hidden_rows = call.hidden.present() ? call.hidden.as<uint8_t>() : nullptr;
  p.activation = activation_spec(call.activation);
  const bool gated = is_gated(p.activation.kind);
  const bool apart = gated && (call.activation.interleave == 0 || call.activation.interleave == p.cols);
  p.width = gated ? 2 * p.cols : p.cols;
  p.across = gated && !apart ? 2 : 1;
  p.step = apart ? kSliceCols : 2 * kSliceCols;
  p.part = apart ? p.cols : kSliceCols;
  p.weight_part = call.rhs_up.present() ? 0 : p.part;
  p.hidden_part = apart ? 0 : p.part;
  return p;
}

// With maps of the weights in place; makes the others.
template <class Product>
void launch_up_product(ProductKernel<Product> kernel, const GroupedMatmulAct& call, typename Product::Params p,
                       unsigned threads, void* stream) {
  using T = typename Product::Element;
  using Rhs = typename Product::Rhs;
  const DType dtype = call.lhs.dtype;
  p.lhs = map_of_rows(call.lhs, Product::kRowsBox);
  p.low = low_maps(call.low, p.groups, Rhs::kBoxCols, Rhs::kBoxRows, &p.length, Product::kRowsBox);
  p.out = tensor_map(p.result, dtype, ragged_shape(p.cols, dtype), Product::kPieceCols, Product::kPieceRows);
  const int64_t half = p.hidden_part == 0 ? p.cols : 0;  // where linear halves are apart, they start here
  for (int part = 0; part < Product::kParts && p.hidden_rows != nullptr; ++part) {
    p.hidden[part] = tensor_map(p.hidden_rows + part * half * sizeof(T), dtype,
                                ragged_shape(p.width - half, p.width, dtype), Product::kPieceCols, Product::kPieceRows);
  }
  launch_rows_product<Product, Product::kResultCols>(kernel, p, stream, threads);
}

template <class T, Major kWeights, Pairs kPairs>
void launch_up(const GroupedMatmulAct& call, UpParams p, void* stream) {
  using Product = UpProduct<T, kWeights, kPairs>;
  using Rhs = typename Product::Rhs;
  map_weights<Rhs>(call, &p);
  p.rhs_up = call.rhs_up.present() ? map_of_weights<Rhs>(call.rhs_up, call.rhs_up.data, false) : p.rhs;
  p.paced = keeps_pace(p.length);
  launch_up_product<Product>(grouped_product_sm90<Product>, call, p, kThreads, stream);
}

// By how gates and linear halves are laid out.
template <class T, Major kWeights>
void launch_up_pairs(const GroupedMatmulAct& call, const UpParams& p, void* stream) {
  if (!is_gated(p.activation.kind)) return launch_up<T, kWeights, Pairs::none>(call, p, stream);
  return call.activation.interleave == 1 ? launch_up<T, kWeights, Pairs::columns>(call, p, stream)
                                         : launch_up<T, kWeights, Pairs::blocks>(call, p, stream);
}

}  // namespace grouped::sm90
