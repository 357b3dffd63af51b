#include "cc/bind/exchange.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/bind/launch.h"
#include "cc/bind/plan.h"

namespace nb = nanobind;

namespace grouped {
namespace {

using DlTensor = nb::dlpack::dltensor;

constexpr uint32_t kDlpackMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

// `DLPackExchangeAPI` of dlpack.h 1.3, whose layout is frozen within a major version.
struct ExchangeTable {
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void *allocate, *export_owned, *import_owned;
  int (*view)(void* object, DlTensor* out);  // borrowed; -1 and a Python error where DLPack cannot say it
  void* stream;
};

bool contiguous(const DlTensor& t) {
  if (t.strides == nullptr) return true;
  int64_t expected = 1;
  bool packed = true;
  for (int i = t.ndim; i-- > 0; expected *= t.shape[i]) {
    if (t.shape[i] == 0) return true;
    packed = packed && (t.shape[i] == 1 || t.strides[i] == expected);
  }
  return packed;
}

class Exchange {
 public:
  explicit Exchange(nb::handle tensor_type)
      : type_(nb::borrow(tensor_type)),
        dispatch_name_(nb::str("__torch_dispatch__")),
        dispatch_(nb::getattr(tensor_type, dispatch_name_, nb::none())) {
    const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
    const void* found = capsule.is_none() ? nullptr : PyCapsule_GetPointer(capsule.ptr(), kCapsule);
    if (found == nullptr) {
      PyErr_Clear();
      throw nb::type_error("the tensors have no C exchange interface of DLPack; install PyTorch 2.11 or newer");
    }
    table_ = static_cast<const ExchangeTable*>(found);
    if (table_->version.major != kDlpackMajor) {
      throw nb::type_error(("the tensors speak DLPack " + std::to_string(table_->version.major) +
                            ", expected 1; install a version of jax-grouped for it")
                               .c_str());
    }
    if (table_->view == nullptr) {
      throw nb::type_error("the tensors do not let themselves be read in place; install PyTorch 2.11 or newer");
    }
  }

  // False, without a Python error, for what is no tensor in plain memory.
  bool view(PyObject* object, DlTensor* out) const {
    if (!plain(Py_TYPE(object))) return false;
    if (table_->view(object, out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // Everything that planning looks at, as bytes: equal bytes, equal plans and workspaces. Bits that the dispatcher
  // resolves (negated, zero tensors) are not seen, so launches stand inside operators. None where something is not in
  // plain memory, not contiguous, or not on the one device of the others.
  nb::object describe(nb::tuple operands) const {
    Facts facts(*this);
    const auto count = static_cast<Py_ssize_t>(operands.size());
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!facts.add(PyTuple_GetItem(operands.ptr(), i))) return nb::none();
    }
    return nb::bytes(facts.text.data(), facts.text.size());
  }

  nb::bytes addresses(nb::sequence members) const {
    std::vector<uintptr_t> found;
    for (nb::handle member : members) found.push_back(member.is_none() ? 0 : address(member.ptr()));
    return nb::bytes(found.data(), found.size() * sizeof(uintptr_t));
  }

  uintptr_t address(PyObject* object) const { return address_of(read(object)); }

  // Throws std::invalid_argument for what is no tensor in plain memory.
  DlTensor read(PyObject* object) const {
    DlTensor t;
    if (!view(object, &t)) throw std::invalid_argument("an operand is no tensor in plain memory");
    return t;
  }

  static uintptr_t address_of(const DlTensor& t) { return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset; }

 private:
  static bool aligned(const DlTensor& t) { return address_of(t) % kAlignment == 0; }

  class Facts {
   public:
    std::string text;

    explicit Facts(const Exchange& exchange) : exchange_(exchange) {
      text.reserve(256);
      append(device_);  // of all; replaced by that of the first tensor
    }

    bool add(PyObject* operand) {
      if (operand == Py_None) {
        text.push_back('-');
        return true;
      }
      if (PyList_Check(operand) || PyTuple_Check(operand)) return add_list(nb::borrow<nb::sequence>(operand));
      DlTensor t;
      if (!exchange_.view(operand, &t)) return false;
      text.push_back(aligned(t) ? 't' : 'o');
      return add_spec(t);
    }

   private:
    template <class T>
    void append(const T& value) {
      text.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }

    bool add_spec(const DlTensor& t) {
      if (!contiguous(t)) return false;
      if (device_.device_type == 0) {
        device_ = t.device;
        std::memcpy(text.data(), &device_, sizeof(device_));
      }
      if (t.device.device_type != device_.device_type || t.device.device_id != device_.device_id) return false;
      append(t.dtype.code);
      append(t.dtype.bits);
      append(uint8_t(t.ndim));
      for (int i = 0; i < t.ndim; ++i) append(t.shape[i]);
      return true;
    }

    // Members, where they are there, are alike: one spec says it for all.
    bool add_list(nb::sequence members) {
      text.push_back('l');
      append(nb::len(members));
      const size_t start = text.size();
      size_t end = start;
      bool all_aligned = true, whole_list = true;
      for (nb::handle member : members) {
        if (member.is_none()) {
          whole_list = false;
          continue;
        }
        DlTensor t;
        if (!exchange_.view(member.ptr(), &t) || !add_spec(t)) return false;
        all_aligned = all_aligned && aligned(t);
        if (end == start) {
          end = text.size();
          continue;
        }
        const std::string_view whole = text;
        if (whole.substr(start, end - start) != whole.substr(end)) return false;
        text.resize(end);
      }
      text.push_back(all_aligned ? 'a' : 'u');
      text.push_back(whole_list ? 'w' : 'p');
      return true;
    }

    const Exchange& exchange_;
    nb::dlpack::device device_{};  // type 0 is no device
  };

  // NOTE: a type with a dispatch of its own may have no memory behind it, and some warn when asked.
  bool plain(PyTypeObject* type) const {
    if (reinterpret_cast<PyObject*>(type) == type_.ptr()) return true;
    if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(type_.ptr())) == 0) return false;
    return nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), dispatch_name_, nb::none()).is(dispatch_);
  }

  nb::object type_;
  nb::object dispatch_name_;
  nb::object dispatch_;
  const ExchangeTable* table_ = nullptr;
};

size_t bytes_of(const DlTensor& t) {
  int64_t bits = int64_t{t.dtype.bits} * t.dtype.lanes;
  for (int i = 0; i < t.ndim; ++i) bits *= t.shape[i];
  return static_cast<size_t>(bits / 8);
}

// A plan whose operands stand in a list of tensors: what `Plan.launch` does, without an address in Python's hands.
class Launcher {
 public:
  Launcher(nb::object exchange, nb::object plan, std::vector<int> registers)
      : exchange_object_(std::move(exchange)),
        plan_object_(std::move(plan)),
        exchange_(nb::cast<const Exchange*>(exchange_object_)),
        plan_(nb::cast<const Plan*>(plan_object_)),
        registers_(std::move(registers)) {
    if (registers_.size() != plan_->slots + 1) {
      throw std::invalid_argument("got " + std::to_string(registers_.size()) + " registers, expected " +
                                  std::to_string(plan_->slots + 1) + ": operands, results, workspace");
    }
  }

  void launch(nb::list values, uintptr_t stream) const {
    uintptr_t addresses[kMaxSlots + 1];
    DlTensor last{};  // the workspace
    for (size_t slot = 0; slot < registers_.size(); ++slot) {
      addresses[slot] = 0;
      if (registers_[slot] < 0) continue;
      PyObject* value = PyList_GetItem(values.ptr(), registers_[slot]);
      if (value == nullptr) throw nb::python_error();
      last = exchange_->read(value);
      addresses[slot] = Exchange::address_of(last);
    }
    const bool scratch = registers_.back() >= 0;
    const nb::gil_scoped_release unlocked;
    plan_->launch(addresses, addresses[plan_->slots], scratch ? bytes_of(last) : 0, reinterpret_cast<void*>(stream));
  }

 private:
  nb::object exchange_object_;
  nb::object plan_object_;
  const Exchange* exchange_;
  const Plan* plan_;
  std::vector<int> registers_;
};

}  // namespace

void define_exchange(nb::module_& module) {
  nb::class_<Exchange>(module, "Exchange", "Reads tensors of one type through DLPack's C exchange interface.")
      .def(nb::init<nb::handle>(), nb::arg("tensor_type"), nb::sig("def __init__(self, tensor_type: type) -> None"),
           "Raises TypeError for a type that does not offer it.")
      .def("describe", &Exchange::describe, nb::arg("operands"),
           nb::sig("def describe(self, operands: tuple[object, ...]) -> bytes | None"),
           "Device, dtypes and shapes of tensors, None and lists of alike tensors (None: skipped), and of each tensor\n"
           "and list whether its addresses are multiples of 16 bytes: equal bytes mean equal plans and workspaces.\n"
           "None where an operand is something else, is not contiguous, or is on another device than the first.")
      .def("addresses", &Exchange::addresses, nb::arg("members"),
           nb::sig("def addresses(self, members: collections.abc.Sequence[object | None]) -> bytes"),
           "The address of each tensor as a native 64-bit integer, 0 for None.");
  nb::class_<Launcher>(module, "Launcher", "A plan that finds its operands in a list of tensors.")
      .def(nb::init<nb::object, nb::object, std::vector<int>>(), nb::arg("exchange"), nb::arg("plan"),
           nb::arg("registers"),
           nb::sig("def __init__(self, exchange: Exchange, plan: Plan, registers: collections.abc.Sequence[int]) "
                   "-> None"),
           "`registers`: for the operands in slot order, the results and the workspace, the position in the list; -1\n"
           "where absent, or read through a table.")
      .def("launch", &Launcher::launch, nb::arg("values"), nb::arg("stream"),
           nb::sig("def launch(self, values: list, stream: int) -> None"),
           "Runs the kernel; otherwise as `Plan.launch`. Raises ValueError for a workspace that is too small.");
}

}  // namespace grouped
