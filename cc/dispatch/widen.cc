// A product of quantised operands as one of plain ones, which a pass in front writes to the workspace: codes times
// scales of blocks, bfloat16 where that holds the values (numerics 4) and else float32. Scales of groups stay scales:
// the product's kernel multiplies its sums by them. Workspace: widened lhs and rhs, sizes of padded groups, then what
// the product needs.
#include "cc/dispatch/widen.h"

#if GROUPED_WITH_CUDA

#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "cc/api/operands.h"
#include "cc/api/product_inside.h"
#include "cc/dispatch/columns.h"
#include "cc/dispatch/parts.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

constexpr size_t kAlign = 256;

template <class Call>
int64_t segment_of(const Call&) {
  return 0;
}
template <>
int64_t segment_of(const GroupedMatmul& call) {
  return call.segment;
}

// Whether an operand is two arrays, or half of one, or the result is.
bool has_halves(const GroupedMatmul& call) {
  return call.rhs_up.present() || call.lhs_half || call.rhs_half || call.result_half;
}
bool has_halves(const GroupedMatmulAct& call) { return call.rhs_up.present(); }
bool has_halves(const GroupedMatmulDact&) { return false; }

TensorView scratch(void* workspace, size_t* used, DType dtype, std::initializer_list<int64_t> dims) {
  TensorView view;
  view.dtype = dtype;
  view.rank = 0;
  for (int64_t dim : dims) view.dims[view.rank++] = dim;
  view.data = static_cast<char*>(workspace) + *used;
  *used += (static_cast<size_t>(view.bytes()) + kAlign - 1) / kAlign * kAlign;
  return view;
}

// What is to be done: the passes, and the product that follows them.
template <class Call>
struct Plan {
  Call inner;
  Widening passes[2];
  int count = 0;
  SizePadding padding = {};  // of the inner groups; without a result there is none
  size_t used = 0;
};

// The lines of `view` as they are in memory, with blocks of scales along them.
Widening widening_of(const TensorView& view, const TensorView& scales, int64_t block) {
  Widening w{};
  w.values = view.data;
  w.type = view.dtype;
  w.pitch = last_axis(view);
  w.slices = view.rank == 3 ? view.dims[0] : 1;
  w.lines = view.dims[view.rank - 2];
  w.run = w.pitch;
  w.line_block = w.run_block = 1;
  if (!scales.present()) return w;
  w.scales = scales.data;
  w.scale_type = scales.dtype;
  w.line_stride = scales.dims[scales.rank - 1];
  w.run_stride = 1;
  w.run_block = static_cast<int>(block);
  return w;
}

template <class Call>
void widen_row_operands(Plan<Call>* plan, const Call& call, DType type, void* workspace) {
  const OperandScales& s = call.scales;
  const int64_t depth = contracted_length(call);
  if (call.lhs.dtype != type || s.lhs_block) {
    Widening w = widening_of(call.lhs, s.lhs_scales, s.lhs_block);
    if (w.scales != nullptr && w.scale_type == DType::f32) std::swap(w.line_stride, w.run_stride);
    w.run = depth;
    plan->inner.lhs = scratch(workspace, &plan->used, type, {call.lhs.dims[0], depth});
    w.result = plan->inner.lhs.data;
    plan->passes[plan->count++] = w;
  }
  if (call.rhs.dtype != type || s.rhs_block) {
    Widening w = widening_of(call.rhs, s.rhs_scales, s.rhs_block);
    if (w.scales != nullptr) {
      w.slice_stride = s.rhs_scales.dims[1] * s.rhs_scales.dims[2];
      w.line_block = static_cast<int>(s.rhs_block_outer);
    }
    w.sizes = call.group_sizes.template as<const int32_t>();
    const int64_t first = call.rhs_axis == 2 ? call.rhs.dims[1] : depth;
    const int64_t second = call.rhs_axis == 2 ? depth : product_columns(call);
    w.run = second;
    plan->inner.rhs = scratch(workspace, &plan->used, type, {call.rhs.dims[0], first, second});
    w.result = plan->inner.rhs.data;
    plan->passes[plan->count++] = w;
  }
}

void widen_contracted(Plan<GroupedMatmul>* plan, const GroupedMatmul& call, DType type, void* workspace) {
  const OperandScales& s = call.scales;
  struct Side {
    const TensorView& view;
    const TensorView& scales;
    int64_t block, width;
    TensorView* widened;
  };
  const Side sides[] = {{call.lhs, s.lhs_scales, s.lhs_block, call.result.dims[1], &plan->inner.lhs},
                        {call.rhs, s.rhs_scales, s.rhs_block, call.result.dims[2], &plan->inner.rhs}};
  for (const Side& side : sides) {
    if (side.view.dtype == type && !side.block && !call.transposed) continue;
    Widening w = widening_of(side.view, side.scales, side.block);
    w.transposed = call.transposed != 0;
    const int64_t padded = side.view.dims[call.transposed ? 1 : 0];
    if (w.transposed) {
      std::swap(w.line_stride, w.run_stride);
    } else {
      w.run = side.width;
      std::swap(w.line_block, w.run_block);
    }
    *side.widened = scratch(workspace, &plan->used, type, {padded, side.width});
    w.result = side.widened->data;
    plan->passes[plan->count++] = w;
  }
  if (call.segment) {
    plan->inner.group_sizes = scratch(workspace, &plan->used, DType::i32, {call.group_sizes.dims[0]});
    plan->padding = {call.group_sizes.as<const int32_t>(), call.group_sizes.dims[0], call.rows, call.segment,
                     plan->inner.group_sizes.as<int32_t>()};
    plan->inner.segment = plan->inner.transposed = plan->inner.rows = 0;
  }
}

template <class Call>
Plan<Call> plan_of(const Call& call, void* workspace) {
  Plan<Call> plan;
  plan.inner = call;
  const DType type = multiplied_type(call);
  bool contracted = false;
  if constexpr (std::is_same_v<Call, GroupedMatmul>) {
    contracted = call.contract_rows != 0;
    if (contracted) widen_contracted(&plan, call, type, workspace);
  }
  if (!contracted) widen_row_operands(&plan, call, type, workspace);
  for (int i = 0; i < plan.count; ++i) plan.passes[i].result_type = type;
  OperandScales& s = plan.inner.scales;
  s.lhs_scales = s.rhs_scales = TensorView{};
  s.lhs_block = s.rhs_block = 0;
  s.rhs_block_outer = 1;
  if (type == DType::f32) plan.inner.fp32_mode = "ieee";  // codes times scales have more bits than tf32
  return plan;
}

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

template <class Call>
std::string refuses(const Call& call, const Target& target) {
  if (has_plain_operands(call) && call.lhs.dtype == call.rhs.dtype && !segment_of(call)) {
    return "is for quantised operands; these are plain";
  }
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    if (!is_plain(t->dtype) && !is_code(t->dtype)) return "takes codes and plain numbers, not " + describe(*t);
  }
  if (call.rhs_table.present() || has_halves(call)) return "takes operands and results of one array each";
  for (const int64_t block : {call.scales.lhs_block, call.scales.rhs_block, call.scales.rhs_block_outer}) {
    if (block != 0 && !is_power_of_two(block)) {
      return "takes blocks of a power of two, not " + std::to_string(block);
    }
  }
  if constexpr (!std::is_same_v<Call, GroupedMatmul>) {
    if (call.quantized.stores()) return "gives plain rows";
  }
  if (!std::is_same_v<Call, GroupedMatmul> || call.low.present()) {
    // Then a row behind, which leaves the weights as they are, reads fewer bytes.
    GroupedMatmul product = product_inside(call);
    product.low = LowRank{};
    const Table<GroupedMatmul> products = table<GroupedMatmul>(target.platform);
    for (const Kernel<GroupedMatmul>* better = products.begin; better != products.end; ++better) {
      if (better->reads_codes && refusal_of(*better, product, target).empty()) {
        return std::string("leaves this product to ") + better->name + ", which reads codes as they are";
      }
    }
  }
  const Choice<Call> choice = choose(plan_of(call, nullptr).inner, target, "");
  if (choice.kernel) return "";
  return choice.refusals.back().kernel + ": " + choice.refusals.back().reason;
}

template <class Call, bool kAligned>
size_t workspace(const Call& call, const Target& target) {
  const Plan<Call> plan = plan_of(call, nullptr);
  return plan.used + choose(plan.inner, target, "").bytes(kAligned);
}

template <class Call>
void launch(const Call& call, const Context& context) {
  const Plan<Call> plan = plan_of(call, context.workspace);
  launch_widenings(plan.passes, plan.count, plan.padding, context.stream);
  run_part(plan.inner, behind(context, plan.used));
}

}  // namespace

#define GROUPED_WIDENED(Call, name, arch)                                                                      \
  const Kernel<Call> name = {#name,        arch, Kind::special,         refuses<Call>, workspace<Call, false>, \
                             launch<Call>, 1,    workspace<Call, true>, true};
GROUPED_WIDENED(GroupedMatmul, grouped_matmul_widened_cuda, Arch::cuda)
GROUPED_WIDENED(GroupedMatmulAct, grouped_matmul_act_widened_cuda, Arch::cuda)
GROUPED_WIDENED(GroupedMatmulDact, grouped_matmul_dact_widened_cuda, Arch::cuda)
#undef GROUPED_WIDENED

}  // namespace grouped

#endif  // GROUPED_WITH_CUDA
