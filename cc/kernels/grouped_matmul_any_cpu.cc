// The packed CPU product for every format of the operands, mixed at will: blocks of the result are independent tasks,
// each one PanelProduct.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cc/api/halves.h"
#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

std::string refuses_operand(const char* name, const TensorView& operand) {
  return is_code(operand.dtype) ? "" : refuses_unless_plain(name, operand);
}

std::string refuses_operands(const GroupedMatmul& call, const Target&) {
  const bool odd = call.rhs_up.present() && call.rhs.dims[call.rhs_axis] % 2 != 0;  // bf16 is multiplied in pairs
  return first_of({refuses_operand("lhs", call.lhs), refuses_operand("rhs", call.rhs),
                   refuses_unless_plain("result", call.result), refuses_unless_plain("bias", call.bias),
                   odd ? "contracts a weight in two arrays if both are even; rhs is " + describe(call.rhs) : ""});
}

// A block of the result: of the matrix in ragged rows, of group's matrix in ragged contraction.
struct Task {
  int64_t group;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
  int64_t depth;
  int64_t work() const { return rows * columns * std::max<int64_t>(depth, 1); }
};

// What the two kinds of product have in common: the matrix of results that each group owns.
struct Problem {
  std::vector<int64_t> ends;
  std::vector<int64_t> first_rows;  // of what is contracted, in ragged contraction
  bool ragged_rows;
  int64_t segment;
  int64_t rows;     // of a group's result, in ragged contraction
  int64_t columns;  // of every group's result, those that are made
  int64_t depth;    // contracted, in ragged rows

  explicit Problem(const GroupedMatmul& call)
      : ends(group_ends(call.group_sizes, call.segment ? call.rows : call.lhs.dims[0])),
        ragged_rows(!call.contract_rows),
        segment(call.segment) {
    rows = ragged_rows ? 0 : call.result.dims[1];
    columns = ragged_rows ? columns_of(call.result, call.result_half).count : call.result.dims[2];
    depth = ragged_rows ? contracted_length(call) : 0;
    int64_t first = 0;
    for (int64_t g = 0; g < static_cast<int64_t>(ends.size()); ++g) {
      first_rows.push_back(first);
      first += depth_of(g);
    }
  }
  int64_t begin(int64_t g) const { return group_begin(ends, g); }
  int64_t size(int64_t g) const { return ends[static_cast<size_t>(g)] - begin(g); }
  int64_t rows_of(int64_t g) const { return ragged_rows ? size(g) : rows; }
  // A segment is contracted whole: what follows a group's last row is zero, or belongs to a rotated block.
  int64_t depth_of(int64_t g) const {
    if (ragged_rows) return depth;
    return segment ? divide_up(size(g), segment) * segment : size(g);
  }
};

const void* table_entry(const TensorView& table, int64_t g) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(table.as<const int64_t>()[g]));
}

// A wgrad that is frozen (null destination), or that would add nothing to an accumulator, is not written.
bool skips(const GroupedMatmul& call, const Problem& problem, int64_t g) {
  if (problem.ragged_rows) return problem.size(g) == 0;
  if (call.into_table.present() && !table_entry(call.into_table, g)) return true;
  return call.accumulate && problem.size(g) == 0;
}

constexpr int64_t kTasksPerThread = 12;     // enough that the last ones even out
constexpr int64_t kLeastTaskColumns = 256;  // below, packing lhs again for each task would show

// Columns of a task: as many as a block takes, halved while tasks would be too few. Only the speed depends on it.
int64_t task_columns(const GroupedMatmul& call, const Problem& problem, int64_t threads) {
  double work = 0;
  int64_t tallest = 0;
  for (int64_t g = 0; g < static_cast<int64_t>(problem.ends.size()); ++g) {
    if (skips(call, problem, g)) continue;
    work += static_cast<double>(problem.rows_of(g)) * static_cast<double>(problem.depth_of(g));
    tallest = std::max(tallest, std::min(problem.rows_of(g), kPanelRows) * problem.depth_of(g));
  }
  const double share = work * static_cast<double>(problem.columns) / static_cast<double>(threads * kTasksPerThread);
  int64_t columns = kPanelColumns;
  while (columns > kLeastTaskColumns && static_cast<double>(tallest) * static_cast<double>(columns) > share) {
    columns /= 2;
  }
  return columns;
}

std::vector<Task> make_tasks(const GroupedMatmul& call, const Problem& problem, int64_t threads) {
  const int64_t columns = task_columns(call, problem, threads);
  std::vector<Task> tasks;
  for (int64_t g = 0; g < static_cast<int64_t>(problem.ends.size()); ++g) {
    if (skips(call, problem, g)) continue;
    const int64_t begin = problem.ragged_rows ? problem.begin(g) : 0;
    const int64_t blocks = divide_up(problem.rows_of(g), kPanelRows);
    for (int64_t column = 0; column < problem.columns; column += columns) {
      for (int64_t block = 0; block < blocks; ++block) {  // of nearly equal height
        const int64_t first = problem.rows_of(g) * block / blocks;
        const int64_t last = problem.rows_of(g) * (block + 1) / blocks;
        tasks.push_back(
            {g, begin + first, last - first, column, std::min(columns, problem.columns - column), problem.depth_of(g)});
      }
    }
  }
  // Long ones first: the short ones then fill the gaps at the end.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work() > b.work(); });
  return tasks;
}

const char* at(const void* data, DType dtype, int64_t element) {
  return static_cast<const char*>(data) + element * dtype_bytes(dtype);
}

// The block scales of a group's operand. `outer` blocks of `block` elements; float32 ones may be transposed, the block
// index first.
PanelScales scales_of(const TensorView& scales, int64_t first, bool blocks_first, int64_t outer_block, int64_t block) {
  if (!scales.present()) return {};
  const int64_t width = scales.dims[scales.rank - 1];
  const char* data = at(scales.data, scales.dtype, first * width);
  return {data, scales.dtype, blocks_first ? 1 : width, blocks_first ? width : 1, outer_block, block};
}

// Rows of the contracted axis `first` ... of one operand of a ragged contraction, for columns from `column` on.
PanelOperand contracted_rows(const GroupedMatmul& call, const TensorView& operand, const TensorView& scales,
                             int64_t block, int64_t first, int64_t column) {
  const int64_t width = last_axis(operand);
  const PanelScales s = scales_of(scales, block ? first / block : 0, true, 1, block);
  if (call.transposed) return {at(operand.data, operand.dtype, first), operand.dtype, width, 1, column, s};
  const int64_t bytes = first * operand.dims[1] * dtype_bytes(operand.dtype);
  return {operand.as<const char>() + bytes, operand.dtype, 1, width, column, s};
}

// One weight, in `rhs` or a half of it: [depth, columns] with rhs_axis 1, [columns, depth] with 2.
PanelOperand weight_of(const GroupedMatmul& call, const TensorView& rhs, int64_t group, int64_t column) {
  const void* data = call.rhs_table.present() ? table_entry(call.rhs_table, group)
                                              : at(rhs.data, rhs.dtype, group * rhs.dims[1] * rhs.dims[2]);
  const OperandScales& s = call.scales;
  const int64_t lines = s.rhs_scales.present() ? s.rhs_scales.dims[1] : 0;
  PanelScales scales = scales_of(s.rhs_scales, group * lines, false, s.rhs_block_outer, s.rhs_block);
  if (call.rhs_axis == 1) {  // codes that were made for a contraction along the other axis
    std::swap(scales.outer_stride, scales.depth_stride);
    std::swap(scales.outer_block, scales.block);
    return {data, rhs.dtype, 1, last_axis(rhs), column, scales};
  }
  return {data, rhs.dtype, last_axis(rhs), 1, column, scales};
}

float factor_of(const GroupedMatmul& call, int64_t g) {
  float factor = 1;
  for (const TensorView* scales : {&call.scales.lhs_group_scales, &call.scales.rhs_group_scales}) {
    if (scales->present()) factor *= scales->as<const float>()[g];
  }
  return factor;
}

PanelProduct block(const GroupedMatmul& call, const Problem& problem, const Task& t) {
  const OperandScales& s = call.scales;
  PanelProduct p{};
  p.rows = t.rows;
  p.columns = t.columns;
  p.depth = t.depth;
  p.dtype = multiplied_type(call);
  p.rhs_depth = p.depth;
  if (problem.ragged_rows) {
    const bool transposed = s.lhs_scales.present() && s.lhs_scales.dtype == DType::f32;
    p.lhs = {call.lhs.data,
             call.lhs.dtype,
             last_axis(call.lhs),
             1,
             t.row,
             scales_of(s.lhs_scales, 0, transposed, 1, s.lhs_block)};
    p.rhs = weight_of(call, call.rhs, t.group, t.column);
    if (call.rhs_up.present()) {
      p.rhs_rest = weight_of(call, call.rhs_up, t.group, t.column);
      p.rhs_depth = call.rhs.dims[call.rhs_axis];
    }
  } else {
    const int64_t first = problem.first_rows[static_cast<size_t>(t.group)];
    const int64_t lhs_first = columns_of(call.lhs, call.lhs_half).first;
    const int64_t rhs_first = columns_of(call.rhs, call.rhs_half).first;
    p.lhs = contracted_rows(call, call.lhs, s.lhs_scales, s.lhs_block, first, lhs_first + t.row);
    p.rhs = contracted_rows(call, call.rhs, s.rhs_scales, s.rhs_block, first, rhs_first + t.column);
  }
  p.result.factor = factor_of(call, t.group);

  const int64_t group_offset = problem.ragged_rows ? 0 : t.group * problem.rows * problem.columns;
  const void* result = call.into_table.present() ? table_entry(call.into_table, t.group)
                                                 : at(call.result.data, call.result.dtype, group_offset);
  const int64_t width = call.result.dims[call.result.rank - 1];
  const int64_t column = columns_of(call.result, call.result_half).first + t.column;
  p.result.data = const_cast<char*>(at(result, call.result.dtype, t.row * width + column));
  p.result.dtype = call.result.dtype;
  p.result.row_stride = width;
  if (call.bias.present() || call.bias_table.present()) {
    p.result.bias_dtype = call.bias.dtype;
    p.result.bias = call.bias_table.present() ? at(table_entry(call.bias_table, t.group), call.bias.dtype, column)
                                              : at(call.bias.data, call.bias.dtype, t.group * width + column);
  }
  if (call.row_scale.present()) p.result.row_scale = call.row_scale.as<const float>() + t.row;
  p.result.scale_bias = call.scale_bias != 0;
  p.result.accumulate = call.accumulate != 0;
  return p;
}

void run(const GroupedMatmul& call, const Context& context, const Isa& isa) {
  const Problem problem(call);
  const int64_t threads = context.pool ? context.pool->threads() : 1;
  const std::vector<Task> tasks = make_tasks(call, problem, threads);
  const int64_t count = static_cast<int64_t>(tasks.size());
  if (problem.ragged_rows && !call.into.present()) {
    zero_columns(context.pool, call.result, columns_of(call.result, call.result_half), problem.ends.back(),
                 call.lhs.dims[0]);
  }
  const auto product = [&](int64_t i) {
    return i < count ? block(call, problem, tasks[static_cast<size_t>(i)]) : PanelProduct{};
  };
  parallel_for(context.pool, count, [&](int64_t i) { isa.multiply(product(i), product(i + threads)); });
}

template <const Isa& (*isa)()>
void launch(const GroupedMatmul& call, const Context& context) {
  run(call, context, isa());
}

template <bool (*has)()>
std::string refuses_pinned(const GroupedMatmul& call, const Target& target) {
  if (!has()) return "this machine lacks the instructions that this kernel is pinned to";
  return refuses_operands(call, target);
}

const Isa& plain() { return kIsaPlain; }

}  // namespace

// Panels are in memory that each thread keeps (panel_scratch), a few MiB whatever the shapes: no workspace.
const Kernel<GroupedMatmul> grouped_matmul_any_cpu = {"grouped_matmul_any_cpu", Arch::cpu,    Kind::reference,
                                                      refuses_operands,         no_workspace, launch<best_isa>};
const Kernel<GroupedMatmul> grouped_matmul_any_cpu_plain = {
    "grouped_matmul_any_cpu_plain", Arch::cpu, Kind::reference, refuses_pinned<has_plain>, no_workspace, launch<plain>};

#if defined(__x86_64__)
namespace {
const Isa& avx2() { return kIsaAvx2; }
const Isa& avx512() { return kIsaAvx512; }
}  // namespace
const Kernel<GroupedMatmul> grouped_matmul_any_cpu_avx2 = {"grouped_matmul_any_cpu_avx2", Arch::cpu,    Kind::reference,
                                                           refuses_pinned<has_avx2>,      no_workspace, launch<avx2>};
const Kernel<GroupedMatmul> grouped_matmul_any_cpu_avx512 = {
    "grouped_matmul_any_cpu_avx512", Arch::cpu,    Kind::reference,
    refuses_pinned<has_avx512>,      no_workspace, launch<avx512>};
#endif

}  // namespace grouped
