// What products of 8-bit rows and weights share, whether their partial sums go to fp32 or not: operands, epilogue and
// refusals. Codes are K-major in both operands.
#pragma once

#include <string>
#include <type_traits>

#include "cc/api/calls.h"
#include "cc/api/kernel.h"
#include "cc/device/common/launch.h"
#include "cc/device/sm90/operands_fp8.cuh"
#include "cc/device/sm90/rows_product.cuh"
#include "cc/device/sm90/tensor_map.h"

namespace grouped::sm90 {

struct Fp8RowsParams : MatmulParams {  // `length` is that of a row in 16-bit elements
  const float* lhs_group_scales;       // [groups], or null
  const float* rhs_group_scales;       // likewise
  const float* lhs_scales;             // [blocks, rows], or null
  const float* rhs_scales;             // [groups, column blocks, blocks], or null
  bool scaled;                         // by block
};

template <class Pair, class Out, class Shape_>
struct Fp8Rows {
  using Params = Fp8RowsParams;
  using Element = Pair;
  using Shape = Shape_;
  using Result = Out;
  static constexpr Major kLhsMajor = Major::k, kRhsMajor = Major::k;
  static constexpr bool kRaggedSums = false, kOneStore = false;
  using Rhs = RhsTile<kRhsMajor, Shape::kCols>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }
  template <class Multiply>
  static __device__ void multiply_cols(int cols, Multiply multiply) {
    fp8_tile_cols<Shape::kCols>(cols, multiply);
  }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows(p, Shape::kCols, rank, mail, push);
  }

  static __device__ void load(const Params& p, const Work& work, int k, int halves, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t code = kCodesPerElement * k;
    load_lhs<1>(&p.lhs, ragged_at(work, code, 0), halves, work.across, rank, to, full);
    if (!columns) return;
    Rhs::load(&p.rhs, {{code, work.col0, work.slice2, work.slice3}}, work.across, rank, to + 2 * kBlockBytes, full);
  }

  struct Epilogue : NothingHeld {
    Alpha group;  // fetched while the tile multiplies
    __device__ void start(const Slots<Shape::kSlots>&) const {}
  };
  static __device__ Epilogue begin(const Params& p, const Work& work, int, int, const Slots<Shape::kSlots>&) {
    return {{}, Alpha(p.lhs_group_scales, p.rhs_group_scales, work.group)};
  }

  template <int kSums>
  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[kSums],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    using Bias = std::conditional_t<sizeof(Out) == 2, Out, __nv_bfloat16>;
    if (p.bias == nullptr && p.bias_table == nullptr && p.row_scale == nullptr) {  // no questions for every column
      store_part<Out, Shape::kCols>(acc, &p.out, ragged_at(work, work.col0, row), cols, slots, held, held.group);
    } else {
      finish_and_store<Bias, Out, Shape::kCols>(p, work, row, cols, acc, slots, held,
                                                [&](float (&v)[4]) { held.group(0, v); });
    }
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    const int64_t bytes = int64_t(p.cols) * sizeof(Out);
    clear_rows(p, work, rank, thread, p.result, bytes, bytes);
  }
};

inline std::string refuses_fp8_rows(const GroupedMatmul& c, const Target&) {
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (!is_fp8(c.lhs.dtype) || !is_fp8(c.rhs.dtype)) {
    return std::string("takes float8_e4m3fn and float8_e5m2; lhs is ") + dtype_name(c.lhs.dtype) + ", rhs " +
           dtype_name(c.rhs.dtype);
  }
  const OperandScales& s = c.scales;
  if (!s.lhs_scales.present() && !s.rhs_scales.present() && !s.lhs_group_scales.present() &&
      !s.rhs_group_scales.present()) {
    return "is for operands with scales: those without are multiplied exactly";
  }
  if (c.rhs_axis != 2) return "takes weights stored as [G, N, K], their contracted axis last";
  const DType out = c.result.dtype;
  if (out != DType::bf16 && out != DType::f16 && out != DType::f32) {
    return std::string("gives bfloat16, float16 or float32, not ") + dtype_name(out);
  }
  if (c.bias.present() && c.bias.dtype != DType::f32 && c.bias.dtype != (out == DType::f32 ? DType::bf16 : out)) {
    return std::string("takes a bias of float32 or of the result's 16-bit type, not ") + dtype_name(c.bias.dtype);
  }
  if (c.accumulate) return "does not accumulate into ragged rows";
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], n = c.result.dims[1];
  if (m >= kRagged) return "takes fewer than 2^30 rows";
  if (n >= kRagged || k >= kRagged) return "takes fewer than 2^30 columns";
  if (k % 16 != 0) return "needs rows of whole 16 bytes: K = " + std::to_string(k) + " is no multiple of 16";
  if (n % 8 != 0) {
    return "needs result rows of a multiple of 16 bytes: N = " + std::to_string(n) + " is no multiple of 8";
  }
  if ((m / kTileRows + c.group_sizes.dims[0]) * ((n + 127) / 128) >= kMaxItems) {
    return "takes fewer than 2^31 pairs of tiles";
  }
  return "";
}

inline size_t fp8_rows_workspace(const GroupedMatmul&, const Target&) { return sizeof(unsigned long long); }

// Parameters but for the maps; sets the call's counter to zero.
inline Fp8RowsParams fp8_rows_params(const GroupedMatmul& call, const Context& context) {
  Fp8RowsParams p{};
  p.sizes = call.group_sizes.as<int32_t>();
  p.counter = static_cast<unsigned long long*>(context.workspace);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(p.counter, 0, sizeof(*p.counter), static_cast<cudaStream_t>(context.stream)));
  p.rhs_table = call.rhs_table.present() ? call.rhs_table.as<int64_t>() : nullptr;
  p.rhs_base = reinterpret_cast<int64_t>(p.rhs_table != nullptr ? call.lhs.data : call.rhs.data);
  p.bias = call.bias.present() ? call.bias.data : nullptr;
  p.bias_table = call.bias_table.present() ? call.bias_table.as<int64_t>() : nullptr;
  p.float_bias = call.bias.present() && call.bias.dtype == DType::f32;
  p.row_scale = call.row_scale.present() ? call.row_scale.as<float>() : nullptr;
  p.result = call.result.as<uint8_t>();
  p.rows = call.lhs.dims[0];
  p.groups = int32_t(call.group_sizes.dims[0]);
  p.cols = p.width = int32_t(call.result.dims[1]);
  p.length = int32_t(call.lhs.dims[1] / kCodesPerElement);
  p.scale_bias = call.scale_bias != 0;
  p.clear_tail = !call.into.present();
  set_scales(call.scales, &p);
  return p;
}

// Launches kKernel<Product>, whose parameters lack their maps.
template <class Product, auto kKernel>
void launch_fp8_rows(const GroupedMatmul& call, Fp8RowsParams p, void* stream) {
  using Rhs = typename Product::Rhs;
  using Out = typename Product::Result;
  const int64_t k = call.lhs.dims[1], n = p.cols;
  const MapShape rhs_shape =
      p.rhs_table != nullptr ? scattered_shape(n, k, call.rhs.dtype) : packed_shape(p.groups, n, k, call.rhs.dtype);
  p.lhs = tensor_map(call.lhs.data, call.lhs.dtype, ragged_shape(k, call.lhs.dtype), kBlockCodes, 64);
  p.rhs = tensor_map(reinterpret_cast<const void*>(p.rhs_base), call.rhs.dtype, rhs_shape, kBlockCodes, Rhs::kBoxRows);
  p.out = tensor_map(call.result.data, call.result.dtype, ragged_shape(n, call.result.dtype), 128 / sizeof(Out), 16);
  constexpr int kCols = Product::Shape::kCols, kBytes = Product::Shape::kSharedBytes;
  allow_shared_memory<kKernel>(kBytes);
  // Every group may have one tile that is not full.
  const int64_t row_tiles = (p.rows + int64_t(kTileRows - 1) * p.groups) / kTileRows;
  const int64_t items = row_tiles * ((n + 2 * kCols - 1) / (2 * kCols)), pairs = multiprocessors() / 2;
  const unsigned grid = 2 * unsigned(items < pairs ? items : pairs);
  kKernel<<<grid, kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace grouped::sm90
