// The host's side of the products: what they refuse, parameters and tensor maps out of a call, and launches. Shared by
// all of them, whatever their element types and pipelines.
#pragma once

#include <initializer_list>
#include <string>

#include "cc/api/calls.h"
#include "cc/api/halves.h"
#include "cc/api/kernel.h"
#include "cc/api/operands.h"
#include "cc/device/common/launch.h"
#include "cc/device/sm90/row_contraction.cuh"
#include "cc/device/sm90/rows_product.cuh"
#include "cc/device/sm90/tensor_map.h"

namespace grouped::sm90 {

constexpr int kMapBytes = 128;  // of a row of a box, whatever the element type
constexpr int kOutRows = 16;    // of a box of results: a slot's

// ---- refusals ----

// An axis of a call, by the letter that its documentation has.
struct NamedAxis {
  const char* name;
  int64_t length;
  int multiple;  // of elements, which make 16 bytes
};

inline std::string refuses_16_bytes(std::initializer_list<NamedAxis> axes) {
  for (const NamedAxis& axis : axes) {
    if (axis.length % axis.multiple == 0) continue;
    return std::string("needs rows of a multiple of 16 bytes: ") + axis.name + " = " + std::to_string(axis.length) +
           " is no multiple of " + std::to_string(axis.multiple);
  }
  return "";
}

inline std::string refuses_extents(int64_t rows, std::initializer_list<int64_t> columns) {
  if (rows >= kRagged) return "takes fewer than 2^30 rows";
  for (const int64_t count : columns) {
    if (count >= kRagged) return "takes fewer than 2^30 columns";
  }
  return "";
}

inline std::string refuses_items(int64_t items) {
  return items < kMaxItems ? "" : "takes fewer than 2^31 pairs of tiles";
}
// Of ragged rows by tiles `tile_cols` wide, the narrowest of a kernel.
inline std::string refuses_row_tiles(int64_t rows, int64_t groups, int64_t cols, int tile_cols) {
  return refuses_items((rows / kTileRows + groups) * ((cols + tile_cols - 1) / tile_cols));
}
// Of the results [groups, rows, cols] of a contraction.
inline std::string refuses_contraction_tiles(int64_t rows, int64_t groups, int64_t cols, int tile_cols) {
  return refuses_items(pair_count(int((rows + kTileRows - 1) / kTileRows), int((cols + tile_cols - 1) / tile_cols)) *
                       groups);
}

inline std::string refuses_16_bit_lhs(DType lhs) {
  if (lhs == DType::bf16 || lhs == DType::f16) return "";
  return std::string("takes bfloat16 and float16; lhs is ") + dtype_name(lhs);
}
inline std::string refuses_bias(const TensorView& bias, DType beside_float) {
  if (!bias.present() || bias.dtype == beside_float || bias.dtype == DType::f32) return "";
  return std::string("takes a bias of float32 or ") + dtype_name(beside_float) + ", not " + dtype_name(bias.dtype);
}

// ---- products over rows ----

// Operands and order of items but for maps and `cols`. `draws`: in the workspace, for counters that start at zero.
template <class Call>
void set_rows(const Call& call, const Context& context, void* draws, RowsParams* p) {
  p->sizes = call.group_sizes.template as<int32_t>();
  p->draws = zeros_or_clear(context, static_cast<RowDraws*>(draws));
  p->rhs_table = call.rhs_table.present() ? call.rhs_table.template as<int64_t>() : nullptr;
  // Listed weights are addressed relative to any mapped address.
  p->rhs_base = reinterpret_cast<int64_t>(p->rhs_table != nullptr ? call.lhs.data : call.rhs.data);
  p->rows = call.lhs.dims[0];
  p->groups = int32_t(call.group_sizes.dims[0]);
}
template <class Call>
void set_bias(const Call& call, BiasParams* p) {
  p->bias = call.bias.present() ? call.bias.data : nullptr;
  p->bias_table = call.bias_table.present() ? call.bias_table.template as<int64_t>() : nullptr;
  p->row_scale = floats_or_null(call.row_scale);
  p->float_bias = call.bias.present() && call.bias.dtype == DType::f32;
}
// All but maps and `length`.
inline void set_matmul(const GroupedMatmul& call, const Context& context, MatmulParams* p) {
  set_rows(call, context, context.workspace, p);
  set_bias(call, p);
  const Columns made = columns_of(call.result, call.result_half);
  p->cols = int32_t(made.count);
  p->first_col = int32_t(made.first);
  p->width = int32_t(call.result.dims[1]);
  p->result = call.result.as<uint8_t>();
  p->scale_bias = call.scale_bias != 0;
  p->clear_tail = !call.into.present();
}

// Elements of a box that is as wide as the layout wants, `cols` in 16-bit elements.
constexpr uint32_t box_elements(uint32_t cols, DType dtype) { return cols * 2 / dtype_bytes(dtype); }

inline CUtensorMap map_of_rows(const TensorView& rows, uint32_t box_rows = 64) {
  return tensor_map(rows.data, rows.dtype, ragged_shape(rows.dims[1], rows.dtype), box_elements(64, rows.dtype),
                    box_rows);
}
// Of weights in boxes of Rhs: those at `base`, packed or listed.
template <class Rhs>
CUtensorMap map_of_weights(const TensorView& weights, const void* base, bool listed) {
  const int64_t rows = weights.dims[1], cols = weights.dims[2];
  const MapShape shape =
      listed ? scattered_shape(rows, cols, weights.dtype) : packed_shape(weights.dims[0], rows, cols, weights.dtype);
  return tensor_map(base, weights.dtype, shape, box_elements(Rhs::kBoxCols, weights.dtype), Rhs::kBoxRows);
}
template <class Rhs, class Call>
void map_weights(const Call& call, RowsParams* p) {
  p->rhs = map_of_weights<Rhs>(call.rhs, reinterpret_cast<const void*>(p->rhs_base), p->rhs_table != nullptr);
}
template <class Rhs, class Call>
void map_operands(const Call& call, RowsParams* p) {
  p->lhs = map_of_rows(call.lhs);
  map_weights<Rhs>(call, p);
}
// Of the columns that a product makes of its result, in boxes as wide as a slot, or as given.
inline void map_result(const GroupedMatmul& call, MatmulParams* p, uint32_t box_cols = 0,
                       uint32_t box_rows = kOutRows) {
  const DType dtype = call.result.dtype;
  if (box_cols == 0) box_cols = kMapBytes / dtype_bytes(dtype);
  p->out = tensor_map(p->result + int64_t(p->first_col) * dtype_bytes(dtype), dtype,
                      ragged_shape(p->cols, p->width, dtype), box_cols, box_rows);
}

// Row tiles that any sizes can give: every group may have one that is not full.
inline int64_t most_row_tiles(const RowsParams& p) { return (p.rows + int64_t(kTileRows - 1) * p.groups) / kTileRows; }

// ---- launches ----

template <class Product>
using ProductKernel = void (*)(const typename Product::Params);

// A kernel of CTA pairs for so many items. NOTE: kernels are arguments; of template arguments alone nvcc makes no code.
template <class Product>
void launch_pairs(ProductKernel<Product> kernel, const typename Product::Params& p, int64_t items, void* stream,
                  unsigned threads = kThreads) {
  static OfDevices allowed = {};  // a product has one kernel
  constexpr int kBytes = Product::Shape::kSharedBytes;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes, allowed);
  const int64_t pairs = multiprocessors() / 2;
  const unsigned grid = 2 * unsigned(items < pairs ? items : pairs);
  kernel<<<grid, threads, kBytes, static_cast<cudaStream_t>(stream)>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// A product over rows; its tiles are `kCols` wide.
template <class Product, int kCols = Product::Shape::kCols>
void launch_rows_product(ProductKernel<Product> kernel, const typename Product::Params& p, void* stream,
                         unsigned threads = kThreads) {
  launch_pairs<Product>(kernel, p, most_row_tiles(p) * ((p.cols + 2 * kCols - 1) / (2 * kCols)), stream, threads);
}

// ---- contractions over rows ----

// Parameters but for the operands' maps; orders the groups, in the workspace.
template <bool kSegmented>
void set_contraction(const GroupedMatmul& call, int64_t most_rows, int64_t rows, int64_t cols, const Context& context,
                     ContractionParams* p) {
  p->groups = int32_t(call.group_sizes.dims[0]);
  GroupSpan* spans = static_cast<GroupSpan*>(context.workspace);
  p->spans = spans;
  p->draws = reinterpret_cast<Draws*>(spans + 2 * p->groups);
  p->into_table = call.into_table.present() ? call.into_table.as<int64_t>() : nullptr;
  p->rows = int32_t(rows);
  p->cols = int32_t(cols);
  p->accumulate = call.accumulate != 0;
  order_groups<kSegmented><<<1, kOrderThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(
      call.group_sizes.as<int32_t>(), p->groups, most_rows, spans, spans + p->groups, p->draws);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  // Scattered results are addressed relative to any mapped address.
  const void* base = p->into_table != nullptr ? context.workspace : call.result.data;
  p->out_base = reinterpret_cast<int64_t>(base);
  const DType out = call.result.dtype;
  p->out = tensor_map(
      base, out, p->into_table != nullptr ? scattered_shape(rows, cols, out) : packed_shape(p->groups, rows, cols, out),
      kMapBytes / dtype_bytes(out), kOutRows);
}

template <class Product>
void launch_contraction(ProductKernel<Product> kernel, const typename Product::Params& p, void* stream,
                        unsigned threads = kThreads) {
  constexpr int kCols = Product::Shape::kCols, kRows = Product::Shape::kRowBoxes * 64;
  const int row_tiles = (p.rows + kRows - 1) / kRows, col_tiles = (p.cols + kCols - 1) / kCols;
  launch_pairs<Product>(kernel, p, pair_count(row_tiles, col_tiles) * p.groups, stream, threads);
}

}  // namespace grouped::sm90
