#include "cc/dispatch/dispatch.h"

#include <algorithm>
#include <initializer_list>

#include "cc/api/kept.h"
#include "cc/api/operands.h"
#include "cc/api/schema.h"

namespace grouped {
namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t start = 0; start <= list.size();) {
    const size_t comma = std::min(list.find(',', start), list.size());
    parts.push_back(list.substr(start, comma - start));
    start = comma + 1;
  }
  return parts;
}

// A wish is a kernel's name, or a word for kinds of kernels: what composes plain calls is their reference, too.
template <class Call>
bool meets(const Kernel<Call>& kernel, const std::string& wish) {
  if (wish == "reference") return kernel.kind != Kind::special;
  if (wish == "composed") return kernel.kind == Kind::composed;
  return kernel.name == wish;
}

// Alignment concerns products alone: the other calls' kernels take any address.
template <class Call>
bool tables_suit(const Call&, int) {
  return true;
}
bool tables_suit(const GroupedMatmul& call, int alignment) {
  const bool listed = call.rhs_table.present() || call.into_table.present() || call.low.low_rhs_table.present();
  return alignment == 1 || !listed || call.aligned_tables;
}
bool tables_suit(const GroupedMatmulAct& call, int alignment) {
  return alignment == 1 || !(call.rhs_table.present() || call.low.low_rhs_table.present()) || call.aligned_tables;
}
bool tables_suit(const GroupedMatmulDact& call, int alignment) {
  return alignment == 1 || !(call.rhs_table.present() || call.low.low_rhs_table.present()) || call.aligned_tables;
}
bool tables_suit(const LowRankGrads& call, int alignment) {
  return alignment == 1 || !call.factor_table.present() || call.aligned_tables;
}

const TensorView* first_unaligned(std::initializer_list<const TensorView*> views, int alignment) {
  for (const TensorView* view : views) {
    if (reinterpret_cast<uintptr_t>(view->data) % static_cast<uintptr_t>(alignment) != 0) return view;
  }
  return nullptr;
}

// Of what a quantiser writes: codes, and scales beside codes of four bits, which it writes eight at once.
const TensorView* first_unaligned_of(const Quantizing& made, int alignment) {
  const TensorView* found = first_unaligned({&made.values, &made.cross_values}, alignment);
  const DType type = (made.values.present() ? made.values : made.cross_values).dtype;
  if (found != nullptr || type != DType::u8) return found;
  return first_unaligned({&made.scales, &made.cross_scales}, alignment);
}

template <class Call>
const TensorView* find_unaligned(const Call&, int) {
  return nullptr;
}
const TensorView* find_unaligned(const GroupedMatmul& call, int alignment) {
  return first_unaligned({&call.lhs, &call.rhs, &call.rhs_up, &call.result, &call.low.low_lhs, &call.low.low_rhs},
                         alignment);
}
const TensorView* find_unaligned(const GroupedMatmulAct& call, int alignment) {
  const TensorView* found = first_unaligned(
      {&call.lhs, &call.rhs, &call.rhs_up, &call.result, &call.hidden, &call.low.low_lhs, &call.low.low_rhs},
      alignment);
  return found != nullptr ? found : first_unaligned_of(call.quantized, alignment);
}
const TensorView* find_unaligned(const GroupedMatmulDact& call, int alignment) {
  const TensorView* found = first_unaligned(
      {&call.lhs, &call.rhs, &call.hidden, &call.result, &call.activated, &call.low.low_lhs, &call.low.low_rhs},
      alignment);
  if (found == nullptr) found = first_unaligned_of(call.quantized, alignment);
  return found != nullptr ? found : first_unaligned_of(call.quantized_activated, alignment);
}
const TensorView* find_unaligned(const LowRankGrads& call, int alignment) {
  return first_unaligned({&call.rows, &call.factor, &call.low_rows, &call.rows_grad, &call.factor_grad}, alignment);
}
const TensorView* find_unaligned(const Quantize& call, int alignment) {
  const TensorView* found = first_unaligned({&call.source}, alignment);
  return found != nullptr ? found : first_unaligned_of(call, alignment);
}

// Most kernels know nothing of low-rank products, so they are not asked.
template <class Call>
bool has_low_rank(const Call& call) {
  if constexpr (has_low<Call>) {
    return call.low.present();
  } else {
    return false;
  }
}

}  // namespace

template <class Call>
std::string refusal_of(const Kernel<Call>& kernel, const Call& call, const Target& target) {
  std::string reason = refuses_arch(kernel.arch, target);
  if (!reason.empty()) return reason;
  return has_low_rank(call) && !kernel.low_rank ? "takes no low-rank product" : kernel.refuses(call, target);
}

namespace {

template <class Call>
bool ask(const Kernel<Call>& kernel, const Call& call, const Target& target, Choice<Call>* choice) {
  std::string reason = refusal_of(kernel, call, target);
  if (reason.empty() && !tables_suit(call, kernel.alignment)) {
    reason = "needs addresses of listed weights that are multiples of " + std::to_string(kernel.alignment) + " bytes";
  }
  if (!reason.empty()) {
    if (choice->kernel == nullptr) choice->refusals.push_back({kernel.name, std::move(reason)});
    return false;
  }
  const size_t bytes = kernel.workspace(call, target);
  if (choice->kernel == nullptr) {
    choice->kernel = &kernel;
    choice->aligned_workspace_bytes = kernel.aligned_workspace ? kernel.aligned_workspace(call, target) : bytes;
  } else if (kernel.alignment == 1) {
    choice->spare = &kernel;
  } else {
    return false;
  }
  choice->workspace_bytes = std::max(choice->workspace_bytes, bytes);
  return choice->spare != nullptr || choice->kernel->alignment == 1;
}

// All that a choice follows from, as bytes: the target, and of a call the operands that are there, with their types and
// dimensions, and the parameters.
class ChoiceFacts {
 public:
  explicit ChoiceFacts(const Target& target) {
    bytes_.reserve(512);
    append(target.platform);
    append(target.sm);
    append(target.families);
  }

  void input(const char*, TensorView& view, const char*) { append_view(view); }
  void optional(const char*, TensorView& view, const char*) { append_view(view); }
  void output(const char*, TensorView& view, const char*) { append_view(view); }
  void optional_output(const char*, TensorView& view, const char*) { append_view(view); }
  void param(const char*, int64_t& value) { append(value); }
  void param(const char*, float& value) { append(value); }
  void param(const char*, std::string& value) {
    append(value.size());
    bytes_ += value;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  void append_view(const TensorView& view) {
    append(static_cast<signed char>(view.rank));
    if (!view.present()) return;
    append(view.dtype);
    bytes_.append(reinterpret_cast<const char*>(view.dims), static_cast<size_t>(view.rank) * sizeof(view.dims[0]));
  }
  template <class T>
  void append(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  std::string bytes_;
};

}  // namespace

template <class Call>
Choice<Call> choose(const Call& call, const Target& target, const std::string& implementation) {
  const Table<Call> rows = table<Call>(target.platform);
  Choice<Call> choice;
  if (implementation.empty()) {
    for (const Kernel<Call>* row = rows.begin; row != rows.end; ++row) {
      if (ask(*row, call, target, &choice)) return choice;
    }
    return choice;
  }
  for (const std::string& wish : split(implementation)) {
    bool known = false;
    for (const Kernel<Call>* row = rows.begin; row != rows.end; ++row) {
      if (!meets(*row, wish)) continue;
      known = true;
      if (ask(*row, call, target, &choice)) return choice;
    }
    if (!known)
      choice.refusals.push_back({wish, std::string("no kernel of ") + Call::kName + " has this name on this platform"});
  }
  return choice;
}

template <class Call>
Chosen<Call> chosen_before(const Call& call, const Target& target) {
  constexpr size_t kMost = 1024;
  static auto* kept = new Kept<Chosen<Call>, kMost>;  // never destroyed, for a program may run at exit
  ChoiceFacts facts(target);
  Call visited = call;
  visited.visit(facts);
  return kept->get(facts.bytes(), [&]() -> Chosen<Call> { return choose(call, target, ""); });
}

template <class Call>
std::string unaligned(const Call& call, int alignment) {
  const TensorView* found = find_unaligned(call, alignment);
  if (found == nullptr) return "";
  Views views;
  const_cast<Call&>(call).visit(views);  // `visit` serves visitors that write, too; this one reads
  const size_t slot = static_cast<size_t>(std::find(views.all, views.all + views.count, found) - views.all);
  return schema<Call>().slots[slot].name;
}

template <class Call>
std::string misaligned(const Kernel<Call>& kernel, const Call& call) {
  return std::string(kernel.name) + " needs addresses that are multiples of " + std::to_string(kernel.alignment) +
         " bytes, which that of `" + unaligned(call, kernel.alignment) + "` is not";
}

template <class Call>
const Kernel<Call>* kernel_for(const Chosen<Call>& choice, const Call& call) {
  const int alignment = choice.kernel->alignment;
  return alignment == 1 || find_unaligned(call, alignment) == nullptr ? choice.kernel : choice.spare;
}

template <class Call>
size_t workspace_for(const Choice<Call>& choice, const Call& call) {
  if (choice.aligned_workspace_bytes == choice.workspace_bytes) return choice.workspace_bytes;
  return find_unaligned(call, kAlignment) == nullptr ? choice.aligned_workspace_bytes : choice.workspace_bytes;
}

#define X(Call)                                                                           \
  template std::string refusal_of<Call>(const Kernel<Call>&, const Call&, const Target&); \
  template Choice<Call> choose<Call>(const Call&, const Target&, const std::string&);     \
  template std::string unaligned<Call>(const Call&, int);                                 \
  template std::string misaligned<Call>(const Kernel<Call>&, const Call&);                \
  template Chosen<Call> chosen_before<Call>(const Call&, const Target&);                  \
  template const Kernel<Call>* kernel_for<Call>(const Chosen<Call>&, const Call&);        \
  template size_t workspace_for<Call>(const Choice<Call>&, const Call&);
GROUPED_CALLS(X)
#undef X

}  // namespace grouped
