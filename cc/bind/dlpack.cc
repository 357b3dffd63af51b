#include "cc/bind/dlpack.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cc/bind/device.h"
#include "cc/bind/launch.h"
#include "cc/bind/plan.h"
#include "cc/bind/python.h"

namespace nb = nanobind;

namespace grouped {
namespace {

constexpr int kDlpackManaged = 13;  // CUDA managed memory, as good as the device's own
constexpr const char* kNotAnArray =
    "is not an array that DLPack exports (of this dtype, and writable if a result); pass a view of unsigned integers";

bool on(Platform platform, int dlpack_device) {
  if (platform == Platform::cpu) return dlpack_device == nb::device::cpu::value;
  return dlpack_device == nb::device::cuda::value || dlpack_device == kDlpackManaged;
}

template <class Array>
bool is_contiguous(const Array& array) {
  if (array.size() == 0) return true;
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0; stride *= array.shape_ptr()[i]) {
    if (array.shape_ptr()[i] != 1 && array.stride(i) != stride) return false;
  }
  return true;
}

// Operands of one call: their views for the plan, their addresses for the launch, the arrays kept alive meanwhile.
class Operands {
 public:
  explicit Operands(const std::string& call) : call_(call) {}

  // `Access` is nb::ro for inputs, so that read-only arrays may be passed, and nothing for results.
  template <class... Access>
  std::vector<TensorView> add(nb::sequence arrays, const char* role) {
    std::vector<TensorView> views;
    for (nb::handle item : arrays) {
      TensorView view;
      uintptr_t address = 0;
      if (!item.is_none()) {
        const nb::tuple pair = pair_of(item, call_ + ": " + role + " (array, dtype name)");
        nb::ndarray<Access...> array;
        if (!nb::try_cast(pair[0], array)) fail(role, views.size(), kNotAnArray);
        view.dtype = dtype_named(text_of(pair[1]));
        check(array, view.dtype, role, views.size());
        view.rank = static_cast<int>(array.ndim());
        for (size_t i = 0; i < array.ndim(); ++i) view.dims[i] = array.shape_ptr()[i];
        address = reinterpret_cast<uintptr_t>(array.data());
        alive_.emplace_back(array);
      }
      views.push_back(view);
      addresses_.push_back(address);
    }
    return views;
  }

  const uintptr_t* addresses() const { return addresses_.data(); }
  int device() const { return device_id_.value_or(0); }
  std::optional<int> device_type() const { return device_type_; }

 private:
  template <class Array>
  void check(const Array& array, DType dtype, const char* role, size_t index) {
    if (array.ndim() > kMaxRank) fail(role, index, "has rank " + std::to_string(array.ndim()));
    if (array.itemsize() != static_cast<size_t>(dtype_bytes(dtype))) {
      fail(role, index,
           std::string("has items of ") + std::to_string(array.itemsize()) + " bytes, expected " +
               std::to_string(dtype_bytes(dtype)) + " for " + dtype_name(dtype));
    }
    if (!is_contiguous(array)) fail(role, index, "is not C-contiguous");
    if (!device_type_) device_type_ = array.device_type();
    if (!device_id_) device_id_ = array.device_id();
    if (*device_type_ != array.device_type() || *device_id_ != array.device_id()) {
      fail(role, index, "is on another device than the first operand");
    }
  }
  [[noreturn]] void fail(const char* role, size_t index, const std::string& what) const {
    throw std::invalid_argument(call_ + ": " + role + " " + std::to_string(index) + " " + what);
  }

  const std::string& call_;
  std::vector<uintptr_t> addresses_;
  std::vector<nb::ndarray<nb::ro>> alive_;
  std::optional<int> device_type_;
  std::optional<int> device_id_;
};

void call_arrays(const std::string& call_name, const std::string& arch, const std::string& implementation,
                 nb::sequence inputs, nb::sequence outputs, nb::dict params, nb::object make_workspace,
                 uintptr_t stream) {
  Operands operands(call_name);
  const std::vector<TensorView> input_views = operands.add<nb::ro>(inputs, "operand");
  const std::vector<TensorView> output_views = operands.add<>(outputs, "result");
  const std::unique_ptr<Plan> plan =
      make_plan(call_name, arch, implementation, input_views, output_views, params_of(params));
  if (operands.device_type() && !on(plan->platform, *operands.device_type())) {
    throw std::invalid_argument(call_name + ": the arrays are not on the device of arch \"" + arch + "\"");
  }
  uintptr_t scratch = 0;
  std::optional<nb::ndarray<>> scratch_array;
  if (const size_t bytes = plan->workspace_for(operands.addresses()); bytes > 0) {
    const nb::object workspace = make_workspace(bytes);
    if (!nb::try_cast(workspace, scratch_array.emplace())) {
      throw std::invalid_argument(call_name + ": the workspace " + kNotAnArray);
    }
    if (!on(plan->platform, scratch_array->device_type())) {
      throw std::invalid_argument(call_name + ": the workspace is not on the device of arch \"" + arch + "\"");
    }
    if (plan->platform == Platform::cuda && scratch_array->device_id() != operands.device()) {
      throw std::invalid_argument(call_name + ": the workspace is on device " +
                                  std::to_string(scratch_array->device_id()) + ", expected " +
                                  std::to_string(operands.device()) + ", that of the arrays; allocate it there");
    }
    if (!is_contiguous(*scratch_array)) {
      throw std::invalid_argument(call_name + ": the workspace is not C-contiguous");
    }
    scratch = reinterpret_cast<uintptr_t>(scratch_array->data());
  }
  const size_t scratch_bytes = scratch_array ? scratch_array->nbytes() : 0;
  const nb::gil_scoped_release unlocked;
  const DeviceGuard guard(plan->platform, operands.device());
  plan->launch(operands.addresses(), scratch, scratch_bytes, reinterpret_cast<void*>(stream));
}

}  // namespace

void define_array_call(nb::module_& module) {
  module.def(
      "call", &call_arrays, nb::arg("call_name"), nb::arg("arch"), nb::arg("implementation"), nb::arg("inputs"),
      nb::arg("outputs"), nb::arg("params"), nb::arg("make_workspace"), nb::arg("stream"),
      nb::sig("def call(call_name: str, arch: str, implementation: str, "
              "inputs: collections.abc.Sequence[tuple[object, str] | None], outputs: "
              "collections.abc.Sequence[tuple[object, str] | None], "
              "params: dict[str, int | float | str], "
              "make_workspace: collections.abc.Callable[[int], object], stream: int) -> None"),
      "Runs one call on arrays of any DLPack library: (array, dtype name) in slot order, None where absent.\n\n"
      "An array whose library cannot export its dtype is passed as a view of unsigned integers of the same\n"
      "size. Arrays are C-contiguous and on one device. `make_workspace` is asked for an array of as many bytes as\n"
      "the kernel for these arrays needs, unless it needs none.\n"
      "Raises ValueError for arrays that do not fit, RuntimeError where no kernel takes the call.");
}

}  // namespace grouped
