// The packed product: one dense block of a grouped product, computed from panels that are decoded while they are
// packed; and loops over elements. panel.cc, widen.cc, activate.cc and quantize.cc are built for each instruction set;
// `best_isa` is chosen at run time, by what the processor says of itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/api/tensor.h"
#include "cc/math/activation.h"

namespace grouped {

// Decode scales of an operand's blocks: element (outer o, depth k) has scale (o / outer_block, k / block).
struct PanelScales {
  const void* data;  // null: there are none
  DType dtype;       // float32, E8M0 or E4M3
  int64_t outer_stride;
  int64_t depth_stride;
  int64_t outer_block;
  int64_t block;
};

// An operand with an outer axis (rows of lhs, columns of rhs) and the contracted axis (depth). One stride is 1, both
// count elements; of uint8, which holds two E2M1 codes per byte, they count codes. The product is of outer elements
// from `outer_first` on and of all depth, counted from `data`.
struct PanelOperand {
  const void* data;
  DType dtype;
  int64_t outer_stride;
  int64_t depth_stride;
  int64_t outer_first;
  PanelScales scales;
};

// Where a block goes and what is done on the way: sum * factor + bias, times row scale (or the bias alone, with
// scale_bias), + what is there, one rounding.
struct PanelResult {
  void* data;
  DType dtype;
  int64_t row_stride;  // elements
  const void* bias;    // [columns] of bias_dtype, or null
  DType bias_dtype;
  const float* row_scale;  // [rows], or null
  bool scale_bias;
  bool accumulate;
  float factor;  // 1, or the product of the operands' group scales
};

// result[rows, columns] = lhs[rows, depth] * rhs[depth, columns], multiplied as elements of `dtype`: float32, bfloat16
// or float16. Operands of another type, or with scales, are widened to it on the way. Every element is one chain of
// fp32 additions in the order of depth, whatever the block around it.
struct PanelProduct {
  int64_t rows;     // 0 ... kPanelRows
  int64_t columns;  // 0 ... kPanelColumns
  int64_t depth;    // 0 gives zeros
  DType dtype;
  PanelOperand lhs;
  PanelOperand rhs;
  PanelOperand rhs_rest;  // of depths from `rhs_depth` on, counted from there
  int64_t rhs_depth;      // even, or the whole depth
  PanelResult result;
};

// The largest block of one call: what bounds the scratch memory below.
constexpr int64_t kPanelRows = 504;
constexpr int64_t kPanelColumns = 1024;

struct Isa {
  const char* name;
  bool (*supported)();  // by this machine
  // `next` is what this thread will probably compute after `product` and of the same dtype, or rows = 0: its operands
  // are fetched towards the core meanwhile.
  void (*multiply)(const PanelProduct& product, const PanelProduct& next);
  // `count` elements, to and from float: exact, and rounded once to nearest even.
  void (*decode)(DType dtype, const void* from, int64_t count, float* to);
  void (*encode)(DType dtype, const float* from, int64_t count, void* to);
  // t[i] = act(a[i], u[i]);  and with it da[i] = grad[i] * dt/da, du[i] = grad[i] * dt/du.
  void (*activate)(const ActivationSpec& spec, const float* a, const float* u, int64_t count, float* t);
  void (*activate_grad)(const ActivationSpec& spec, const float* a, const float* u, const float* grad, int64_t count,
                        float* t, float* da, float* du);
  // Magnitudes as bits: the largest of a row;  amax[i] = the larger of it and |x[i]|.
  uint32_t (*row_amax)(const float* x, int64_t count);
  void (*column_amax)(const float* x, int64_t count, uint32_t* amax);
  // codes[i] of x[i] * e[i], and back, one per byte; `type` is E4M3, E5M2, or uint8 for E2M1.
  void (*encode_codes)(DType type, const float* x, const float* e, int64_t count, uint8_t* codes);
  void (*decode_codes)(DType type, const uint8_t* codes, int64_t count, float* values);
};

extern const Isa kIsaPlain;
#if defined(__x86_64__)
extern const Isa kIsaAvx2;
extern const Isa kIsaAvx512;
extern const Isa kIsaAvx512Bf16;
#elif defined(__aarch64__)
extern const Isa kIsaNeonBf16;
#endif

// What this machine can run.
bool has_plain();
bool has_avx2();
bool has_avx512();
bool has_avx512bf16();
bool has_neonbf16();

const Isa& best_isa();
const char* cpu_isa();  // its name

// What a kernel is pinned to; null: the best. And the reason not to run it here, or nothing.
const Isa& pinned_or_best(const Isa* pinned);
std::string refuses_unless_runs(const Isa* pinned);

// 64-byte aligned memory of the calling thread, kept from call to call until the thread ends; contents undefined.
void* panel_scratch(size_t bytes);

}  // namespace grouped
