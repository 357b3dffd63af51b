// Compiled once for each instruction set, GROUPED_ISA naming the namespace: plain, which all machines of an
// architecture have (on aarch64 it includes NEON); avx2, avx512, avx512bf16; neonbf16.
//
// lhs is packed into panels of kTileRows rows, rhs into panels of kTileColumns columns, both depth-major, so that one
// step along depth reads one short run of each and the tile of sums stays in registers. A unit of a panel is 32 bits:
// one decoded float or, where the machine multiplies bfloat16 pairs, two neighbours along depth. Panels are filled up
// with zeros. Sums continue over blocks of depth through a tile in memory instead of being added up: the order of an
// element's sum depends on nothing but depth.
#include "cc/cpu/panel.h"

#include <utility>

#include "cc/cpu/simd.h"

namespace grouped {
namespace GROUPED_ISA {

// In widen.cc: `outer` by `depth` elements of an operand times their scales, as dense elements of `dtype` (float32,
// bfloat16 or float16), the axis that is contiguous in memory last.
void widen_block(const PanelOperand& operand, int64_t outer_begin, int64_t outer, int64_t depth_begin, int64_t depth,
                 DType dtype, void* to);

namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 28 sums, two vectors of rhs and one broadcast: 31 of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 6;  // 12 sums: 15 of 16 registers
#elif defined(__ARM_NEON)
constexpr int kTileRows = 12;  // 24 sums, two vectors of rhs, and lhs: 27 to 29 of 32 registers
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileColumns = 2 * kLanes;
// Of a lhs panel: kTileRows and padding, so that its rows are aligned vectors.
constexpr int kLhsWidth = (kTileRows + kLanes - 1) / kLanes * kLanes;
constexpr int64_t kTile = kTileRows * kTileColumns;

constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kDepthUnits = 256;  // a rhs panel of one depth block fits the first cache level
constexpr int64_t kStripeUnits = 8;
constexpr int64_t kChunkColumns = 128;  // rhs columns packed at a time; with the lhs block in the second level
static_assert(kPanelRows % kTileRows == 0 && kChunkColumns % kTileColumns == 0, "blocks are whole tiles");

// Not shared with other files: of inline functions the linker keeps one, and this file is built for newer sets, too.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
// uint8 holds two codes per byte.
constexpr int64_t code_bytes(DType dtype, int64_t codes) {
  return dtype == DType::u8 ? ceil_div(codes, 2) : codes * dtype_bytes(dtype);
}

// Scratch, in units.
constexpr int64_t kLhsSpace = kPanelRows / kTileRows * kLhsWidth * kDepthUnits;
constexpr int64_t kRhsSpace = kChunkColumns * kDepthUnits;
constexpr int64_t kSumsSpace = kPanelRows * kPanelColumns;
constexpr int64_t kWideSpace = kPanelRows * kDepthUnits;  // an operand's block, widened; a unit holds all its depth
static_assert(kChunkColumns <= kPanelRows, "either operand's");

// ---- Formats of panels: what a unit holds, how it is read from memory, how units multiply.

template <class Type>
struct Decoded {
  using Stored = typename Type::Stored;
  static constexpr int64_t kDepth = 1;  // elements of depth in a unit
  static GROUPED_INLINE U32 along_depth(const Stored* from) {
    return (U32)Type::decode(load<typename Type::Vector>(from));
  }
  static GROUPED_INLINE U32 across_depth(const Stored* from, int64_t, int64_t) { return along_depth(from); }
  static GROUPED_INLINE F32 multiply_add(uint32_t lhs, U32 rhs, F32 sum) {
    return GROUPED_ISA::multiply_add(broadcast(bits_float(lhs)), (F32)rhs, sum);
  }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct Pairs {
  using Stored = uint16_t;
  static constexpr int64_t kDepth = 2;
  static GROUPED_INLINE U32 along_depth(const Stored* from) { return load<U32>(from); }
  static GROUPED_INLINE U32 across_depth(const Stored* from, int64_t stride, int64_t depth) {
    const U32 first = widen(load<U16>(from));
    if (depth < 2) return first;
    return first | (widen(load<U16>(from + stride)) << 16);
  }
  static GROUPED_INLINE F32 multiply_add(uint32_t lhs, U32 rhs, F32 sum) {
#if defined(__AVX512BF16__)
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(lhs)), (__m512bh)rhs);
#else
    return (F32)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)vdupq_n_u32(lhs), (bfloat16x8_t)rhs);
#endif
  }
};
using BFloat16Panel = Pairs;
#else
using BFloat16Panel = Decoded<BFloat16>;
#endif

// ---- Packing: `depth` elements of the first Width rows (columns) of the `outer` there are. Whole vectors are read
// while `outer` lasts, so the padding of a lhs panel may hold its neighbours; the edge is first copied beside zeros.

// Depth is contiguous: squares are transposed in registers.
template <class Panel, int Width>
void pack_along(const typename Panel::Stored* from, int64_t stride, int64_t outer, int64_t depth, uint32_t* panel) {
  using Stored = typename Panel::Stored;
  constexpr int64_t kSquareDepth = kLanes * Panel::kDepth;
  const int64_t units = ceil_div(depth, Panel::kDepth);
  for (int64_t unit = 0; unit < units; unit += kLanes) {
    const int64_t k = unit * Panel::kDepth;
    const int64_t deep = least(kSquareDepth, depth - k);
    for (int w = 0; w < Width; w += kLanes) {
      U32 square[kLanes];
      if (deep == kSquareDepth && w + kLanes <= outer) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = Panel::along_depth(from + (w + i) * stride + k);
      } else {
        for (int i = 0; i < kLanes; ++i) {
          Stored edge[kSquareDepth] = {};
          if (w + i < outer) memcpy(edge, from + (w + i) * stride + k, static_cast<size_t>(deep) * sizeof(Stored));
          square[i] = Panel::along_depth(edge);
        }
      }
      transpose(square);
      uint32_t* to = panel + unit * Width + w;
      if (unit + kLanes <= units) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + i * Width, square[i]);
      } else {
        for (int64_t i = 0; i < units - unit; ++i) store(to + i * Width, square[i]);
      }
    }
  }
}

// The outer axis is contiguous: rows are copied (and paired).
template <class Panel, int Width>
void pack_across(const typename Panel::Stored* from, int64_t stride, int64_t outer, int64_t depth, uint32_t* panel) {
  using Stored = typename Panel::Stored;
  for (int64_t k = 0; k < depth; k += Panel::kDepth, panel += Width, from += Panel::kDepth * stride) {
    const int64_t deep = least(Panel::kDepth, depth - k);
    for (int w = 0; w < Width; w += kLanes) {
      if (w + kLanes <= outer) {
        store(panel + w, Panel::across_depth(from + w, stride, deep));
        continue;
      }
      Stored edge[2 * kLanes] = {};
      for (int64_t i = 0; w < outer && i < deep; ++i) {
        memcpy(edge + i * kLanes, from + i * stride + w, static_cast<size_t>(outer - w) * sizeof(Stored));
      }
      store(panel + w, Panel::across_depth(edge, kLanes, deep));
    }
  }
}

// All panels of `outer` by `depth`, one behind the other, `Step` rows (columns) in each. Memory is read in the order
// of its addresses: where the outer axis is contiguous, a few steps of depth for all panels before the next few.
template <class Panel, int Step, int Width>
void pack(const PanelOperand& operand, int64_t outer_begin, int64_t outer, int64_t depth_begin, int64_t depth,
          uint32_t* panels) {
  const auto* from = static_cast<const typename Panel::Stored*>(operand.data) +
                     (operand.outer_first + outer_begin) * operand.outer_stride + depth_begin * operand.depth_stride;
  const int64_t panel_units = ceil_div(depth, Panel::kDepth) * Width;
  if (operand.depth_stride == 1) {
    for (int64_t i = 0; i < outer; i += Step, from += Step * operand.outer_stride, panels += panel_units) {
      pack_along<Panel, Width>(from, operand.outer_stride, outer - i, depth, panels);
    }
    return;
  }
  constexpr int64_t kStripe = kStripeUnits * Panel::kDepth;
  for (int64_t k = 0; k < depth; k += kStripe, from += kStripe * operand.depth_stride) {
    uint32_t* panel = panels + k / Panel::kDepth * Width;
    for (int64_t i = 0; i < outer; i += Step, panel += panel_units) {
      pack_across<Panel, Width>(from + i, operand.depth_stride, outer - i, least(kStripe, depth - k), panel);
    }
  }
}

// Asks for the memory of an operand's next block, a few lines at a time between tiles, so that packing finds it near.
class Ahead {
 public:
  // In so many calls of `next`; none when `outer` or `depth` is not positive.
  Ahead(const PanelOperand& operand, int64_t outer_begin, int64_t outer, int64_t depth_begin, int64_t depth,
        int64_t calls) {
    if (outer <= 0 || depth <= 0) return;
    const bool along = operand.depth_stride == 1;
    stride_ = code_bytes(operand.dtype, along ? operand.outer_stride : operand.depth_stride);
    row_ = static_cast<const char*>(operand.data) +
           code_bytes(operand.dtype,
                      (operand.outer_first + outer_begin) * operand.outer_stride + depth_begin * operand.depth_stride);
    row_bytes_ = code_bytes(operand.dtype, along ? depth : outer);
    rows_ = along ? outer : depth;
    each_ = ceil_div(rows_ * ceil_div(row_bytes_, kLine), calls);
  }
  void next() {
    for (int64_t i = 0; i < each_ && rows_ > 0; ++i) {
      __builtin_prefetch(row_ + offset_, 0, 2);
      offset_ += kLine;
      if (offset_ >= row_bytes_) {
        offset_ = 0;
        row_ += stride_;
        --rows_;
      }
    }
  }

 private:
  const char* row_ = nullptr;
  int64_t stride_ = 0;
  int64_t row_bytes_ = 0;
  int64_t rows_ = 0;
  int64_t each_ = 0;
  int64_t offset_ = 0;
};

// ---- The inner loop: `Rows` rows of a tile.

template <class Panel, int Rows>
void add_products(const uint32_t* lhs, const uint32_t* rhs, int64_t units, bool first, float* tile) {
  F32 sum[Rows][2];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
    sum[i][0] = first ? F32{} : load<F32>(tile + i * kTileColumns);
    sum[i][1] = first ? F32{} : load<F32>(tile + i * kTileColumns + kLanes);
  }
  for (int64_t unit = 0; unit < units; ++unit, lhs += kLhsWidth, rhs += kTileColumns) {
    const U32 left = load<U32>(rhs);
    const U32 right = load<U32>(rhs + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      sum[i][0] = Panel::multiply_add(lhs[i], left, sum[i][0]);
      sum[i][1] = Panel::multiply_add(lhs[i], right, sum[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
    store(tile + i * kTileColumns, sum[i][0]);
    store(tile + i * kTileColumns + kLanes, sum[i][1]);
  }
}

using AddProducts = void (*)(const uint32_t*, const uint32_t*, int64_t, bool, float*);

// By the number of rows: a group's last tile costs only the rows it has.
template <class Panel, int... I>
AddProducts add_products_of(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr AddProducts kTable[] = {add_products<Panel, I + 1>...};
  return kTable[rows - 1];
}
template <class Panel>
AddProducts add_products_of(int64_t rows) {
  return add_products_of<Panel>(rows, std::make_integer_sequence<int, kTileRows>());
}

// ---- The epilogue of one tile (numerics 1).

template <class Type>
void write_tile(const float* tile, int64_t rows, int64_t columns, const float* bias, const float* row_scale,
                const PanelResult& result, int64_t row, int64_t column) {
  using Stored = typename Type::Stored;
  const bool scale_bias =
      result.scale_bias;  // NOTE: copies, as the stores below might change `result` for all GCC knows
  const bool accumulate = result.accumulate;
  const float factor = result.factor;
  const int64_t stride = result.row_stride;
  Stored* to = static_cast<Stored*>(result.data) + row * stride + column;
  for (int64_t i = 0; i < rows; ++i, to += stride, tile += kTileColumns) {
    const F32 scale = broadcast(row_scale ? row_scale[row + i] : 1.0f);
    for (int64_t j = 0; j < columns; j += kLanes) {
      F32 value = load<F32>(tile + j) * broadcast(factor);
      if (bias) value += scale_bias ? load<F32>(bias + j) * scale : load<F32>(bias + j);
      if (row_scale && !scale_bias) value *= scale;
      if (accumulate) value += load_decoded<Type>(to + j, columns - j);
      store_encoded<Type>(to + j, value, columns - j);
    }
  }
}

// Asks for the lines that a tile will be written to.
void expect_tile(const PanelResult& result, int64_t element_bytes, int64_t rows, int64_t columns, int64_t row,
                 int64_t column) {
  for (int64_t i = 0; i < rows; ++i) {
    const char* to = static_cast<const char*>(result.data) + ((row + i) * result.row_stride + column) * element_bytes;
    for (int64_t j = 0; j < columns * element_bytes; j += kLine) __builtin_prefetch(to + j, 1, 3);
  }
}

using WriteTile = void (*)(const float*, int64_t, int64_t, const float*, const float*, const PanelResult&, int64_t,
                           int64_t);

WriteTile write_tile_of(DType dtype) {
  if (dtype == DType::bf16) return write_tile<BFloat16>;
  if (dtype == DType::f16) return write_tile<Float16>;
  return write_tile<Float32>;
}

// ---- Rows of elements.

template <class Type>
void decode_elements(const void* from, int64_t count, float* to) {
  const auto* source = static_cast<const typename Type::Stored*>(from);
  for (int64_t i = 0; i < count; i += kLanes) {
    store_encoded<Float32>(to + i, load_decoded<Type>(source + i, count - i), count - i);
  }
}

template <class Type>
void encode_elements(const float* from, int64_t count, void* to) {
  auto* target = static_cast<typename Type::Stored*>(to);
  for (int64_t i = 0; i < count; i += kLanes) {
    store_encoded<Type>(target + i, load_decoded<Float32>(from + i, count - i), count - i);
  }
}

void decode(DType dtype, const void* from, int64_t count, float* to) {
  if (dtype == DType::bf16) return decode_elements<BFloat16>(from, count, to);
  if (dtype == DType::f16) return decode_elements<Float16>(from, count, to);
  decode_elements<Float32>(from, count, to);
}

void encode(DType dtype, const float* from, int64_t count, void* to) {
  if (dtype == DType::bf16) return encode_elements<BFloat16>(from, count, to);
  if (dtype == DType::f16) return encode_elements<Float16>(from, count, to);
  encode_elements<Float32>(from, count, to);
}

// ---- The block.

// Where the depths of rhs from k on are, and how many are there in one piece.
struct Source {
  const PanelOperand& operand;
  int64_t begin;
  int64_t depth;
};
Source rhs_at(const PanelProduct& p, int64_t k) {
  if (k == 0 || k < p.rhs_depth) return {p.rhs, k, p.rhs_depth - k};
  return {p.rhs_rest, k - p.rhs_depth, p.depth - k};
}

int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// pack, of an operand that may have to be widened first, into `wide`.
template <class Panel, int Step, int Width>
void pack_any(DType dtype, const PanelOperand& operand, int64_t outer_begin, int64_t outer, int64_t depth_begin,
              int64_t depth, uint32_t* panels, void* wide) {
  if (operand.dtype == dtype && !operand.scales.data) {
    return pack<Panel, Step, Width>(operand, outer_begin, outer, depth_begin, depth, panels);
  }
  const bool along = operand.depth_stride == 1;
  widen_block(operand, outer_begin, outer, depth_begin, depth, dtype, wide);
  const PanelOperand widened = {wide, dtype, along ? depth : 1, along ? 1 : outer, 0, {}};
  pack<Panel, Step, Width>(widened, 0, outer, 0, depth, panels);
}

template <class Panel>
void multiply_panels(const PanelProduct& p, const PanelProduct& next) {
  auto* lhs = static_cast<uint32_t*>(panel_scratch(
      static_cast<size_t>(kLhsSpace + kRhsSpace + kWideSpace + kSumsSpace + kChunkColumns) * sizeof(uint32_t)));
  uint32_t* rhs = lhs + kLhsSpace;
  uint32_t* wide = rhs + kRhsSpace;
  float* sums = reinterpret_cast<float*>(wide + kWideSpace);
  float* bias = sums + kSumsSpace;
  const WriteTile write = write_tile_of(p.result.dtype);
  const int64_t result_bytes = bytes_of(p.result.dtype);

  constexpr int64_t kDepthBlock = kDepthUnits * Panel::kDepth;
  const auto block_depth = [](const PanelProduct& of, int64_t from) {
    return least(kDepthBlock, rhs_at(of, from).depth);
  };
  const int64_t tile_step = block_depth(p, 0) < p.depth ? kTile : 0;  // a single block needs one tile of sums
  bool last = false;
  for (int64_t k = 0, depth; !last; k += depth) {
    depth = block_depth(p, k);
    const Source source = rhs_at(p, k);
    const int64_t units = ceil_div(depth, Panel::kDepth);
    last = k + depth >= p.depth;
    pack_any<Panel, kTileRows, kLhsWidth>(p.dtype, p.lhs, 0, p.rows, k, depth, lhs, wide);
    float* tile = sums;
    for (int64_t chunk = 0; chunk < p.columns; chunk += kChunkColumns) {
      const int64_t columns = least(kChunkColumns, p.columns - chunk);
      pack_any<Panel, kTileColumns, kTileColumns>(p.dtype, source.operand, chunk, columns, source.begin, depth, rhs,
                                                  wide);
      if (last && p.result.bias) {
        decode(p.result.bias_dtype, static_cast<const char*>(p.result.bias) + chunk * bytes_of(p.result.bias_dtype),
               columns, bias);
      }
      const bool more = chunk + columns < p.columns;  // columns of this depth block; else the next block, or `next`
      const PanelProduct& then = more || !last ? p : next;
      const int64_t then_column = more ? chunk + columns : 0;
      const int64_t then_k = more ? k : last ? 0 : k + depth;
      const int64_t then_depth = block_depth(then, then_k);
      const Source then_source = rhs_at(then, then_k);
      const int64_t tiles = ceil_div(columns, kTileColumns) * ceil_div(p.rows, kTileRows);
      Ahead ahead_rhs(then_source.operand, then_column, least(kChunkColumns, then.columns - then_column),
                      then_source.begin, then_depth, tiles);
      Ahead ahead_lhs(then.lhs, 0, more ? 0 : then.rows, then_k, then_depth, tiles);
      for (int64_t j = 0; j < columns; j += kTileColumns) {
        const int64_t tile_columns = least(kTileColumns, columns - j);
        for (int64_t i = 0; i < p.rows; i += kTileRows, tile += tile_step) {
          const int64_t rows = least(kTileRows, p.rows - i);
          ahead_rhs.next();
          ahead_lhs.next();
          if (last) expect_tile(p.result, result_bytes, rows, tile_columns, i, chunk + j);
          add_products_of<Panel>(rows)(lhs + i / kTileRows * kLhsWidth * units, rhs + j * units, units, k == 0, tile);
          if (last) {
            write(tile, rows, tile_columns, p.result.bias ? bias + j : nullptr, p.result.row_scale, p.result, i,
                  chunk + j);
          }
        }
      }
    }
  }
}

void multiply(const PanelProduct& product, const PanelProduct& next) {
  if (product.dtype == DType::bf16) return multiply_panels<BFloat16Panel>(product, next);
  if (product.dtype == DType::f16) return multiply_panels<Decoded<Float16>>(product, next);
  multiply_panels<Decoded<Float32>>(product, next);
}

}  // namespace

// In activate.cc.
void activate(const ActivationSpec& spec, const float* a, const float* u, int64_t count, float* t);
void activate_grad(const ActivationSpec& spec, const float* a, const float* u, const float* grad, int64_t count,
                   float* t, float* da, float* du);
// In quantize.cc.
uint32_t row_amax(const float* x, int64_t count);
void column_amax(const float* x, int64_t count, uint32_t* amax);
void encode_codes(DType type, const float* x, const float* e, int64_t count, uint8_t* codes);
void decode_codes(DType type, const uint8_t* codes, int64_t count, float* values);

}  // namespace GROUPED_ISA

#define GROUPED_ISA_ROW(isa) \
  {                          \
      #isa,                  \
      has_##isa,             \
      isa::multiply,         \
      isa::decode,           \
      isa::encode,           \
      isa::activate,         \
      isa::activate_grad,    \
      isa::row_amax,         \
      isa::column_amax,      \
      isa::encode_codes,     \
      isa::decode_codes}
#if defined(__AVX512BF16__)
const Isa kIsaAvx512Bf16 = GROUPED_ISA_ROW(avx512bf16);
#elif defined(__AVX512F__)
const Isa kIsaAvx512 = GROUPED_ISA_ROW(avx512);
#elif defined(__AVX2__)
const Isa kIsaAvx2 = GROUPED_ISA_ROW(avx2);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
const Isa kIsaNeonBf16 = GROUPED_ISA_ROW(neonbf16);
#else
const Isa kIsaPlain = GROUPED_ISA_ROW(plain);
#endif

}  // namespace grouped
