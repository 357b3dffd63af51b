#include "cc/bind/exchange.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cc/api/kernel.h"

namespace nb = nanobind;

namespace grouped {

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

namespace {

constexpr uint32_t kDlpackMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

bool empty(const DlTensor& t) { return std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim; }

size_t item_bytes(const DlTensor& t) { return size_t{t.dtype.bits} * t.dtype.lanes / 8; }

bool contiguous(const DlTensor& t) {
  if (t.strides == nullptr || empty(t)) return true;
  int64_t expected = 1;
  for (int i = t.ndim; i-- > 0;) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    if (__builtin_mul_overflow(expected, t.shape[i], &expected)) return false;
  }
  return true;
}

bool aligned(const DlTensor& t) { return address_of(t) % kAlignment == 0; }

}  // namespace

size_t extent_of(const DlTensor& t) {
  if (empty(t)) return 0;
  int64_t last = 0, packed = 1;  // number of the last element, and the stride of a dimension where none is given
  for (int i = t.ndim; i-- > 0;) {
    const int64_t stride = t.strides == nullptr ? packed : t.strides[i];
    int64_t step;
    if (stride < 0 || __builtin_mul_overflow(stride, t.shape[i] - 1, &step) ||
        __builtin_add_overflow(last, step, &last) || __builtin_mul_overflow(packed, t.shape[i], &packed)) {
      return 0;
    }
  }
  size_t bytes;
  return __builtin_mul_overflow(static_cast<size_t>(last) + 1, item_bytes(t), &bytes) ? 0 : bytes;
}

class Exchange::Facts {
 public:
  Facts(const Exchange& exchange, std::string* text, Addresses* addresses)
      : text_(*text), addresses_(*addresses), exchange_(exchange), device_at_(text->size()) {
    append(device_);  // of all; replaced by that of the first tensor
  }

  bool add(PyObject* operand) {
    if (!add_operand(operand)) return false;
    addresses_.ends.push_back(addresses_.all.size());
    return true;
  }

 private:
  bool add_operand(PyObject* operand) {
    if (operand == Py_None) {
      text_.push_back('-');
      return true;
    }
    if (PyList_Check(operand) || PyTuple_Check(operand)) return add_list(nb::borrow<nb::sequence>(operand));
    DlTensor t;
    if (!exchange_.view(operand, &t)) return false;
    addresses_.all.push_back(address_of(t));
    text_.push_back(aligned(t) ? 't' : 'o');
    return add_spec(t);
  }

  template <class T>
  void append(const T& value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  bool add_spec(const DlTensor& t) {
    if (!contiguous(t)) return false;
    if (device_.device_type == 0) {
      device_ = t.device;
      std::memcpy(text_.data() + device_at_, &device_, sizeof(device_));
    }
    if (t.device.device_type != device_.device_type || t.device.device_id != device_.device_id) return false;
    append(t.dtype.code);
    append(t.dtype.bits);
    append(uint8_t(t.ndim));
    for (int i = 0; i < t.ndim; ++i) append(t.shape[i]);
    return true;
  }

  // Members that are present have one dtype and shape: one spec says it for all.
  bool add_list(nb::sequence members) {
    text_.push_back('l');
    append(nb::len(members));
    const size_t start = text_.size();
    size_t end = start;
    bool all_aligned = true, whole_list = true;
    for (nb::handle member : members) {
      if (member.is_none()) {
        addresses_.all.push_back(0);
        whole_list = false;
        continue;
      }
      DlTensor t;
      if (!exchange_.view(member.ptr(), &t) || !add_spec(t)) return false;
      addresses_.all.push_back(address_of(t));
      all_aligned = all_aligned && aligned(t);
      if (end == start) {
        end = text_.size();
        continue;
      }
      const std::string_view whole = text_;
      if (whole.substr(start, end - start) != whole.substr(end)) return false;
      text_.resize(end);
    }
    text_.push_back(all_aligned ? 'a' : 'u');
    text_.push_back(whole_list ? 'w' : 'p');
    return true;
  }

  std::string& text_;
  Addresses& addresses_;
  const Exchange& exchange_;
  const size_t device_at_;
  nb::dlpack::device device_{};  // type 0 is no device
};

Exchange::Exchange(nb::handle tensor_type, nb::handle plain_subclass, nb::handle threads)
    : type_(nb::borrow(tensor_type)),
      plain_subclass_(nb::borrow(plain_subclass)),
      threads_(nb::borrow(threads)),
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

bool Exchange::view(PyObject* object, DlTensor* out) const {
  if (!plain(Py_TYPE(object))) return false;
  if (table_->view(object, out) != 0) {
    PyErr_Clear();
    return false;
  }
  if (empty(*out)) return true;
  const size_t item = item_bytes(*out);
  return out->data != nullptr &&  // elements without memory: a zero tensor of autograd
         (item == 0 || address_of(*out) % item == 0);
}

DlTensor Exchange::read(PyObject* object) const {
  DlTensor t;
  if (!view(object, &t)) {
    throw std::invalid_argument(
        "an operand is no tensor in plain memory, or starts within an element; pass a copy of it");
  }
  return t;
}

int Exchange::threads() const { return threads_.is_none() ? 0 : nb::cast<int>(threads_()); }

bool Exchange::append_facts(const std::vector<PyObject*>& operands, std::string* text, Addresses* addresses) const {
  Facts facts(*this, text, addresses);
  for (PyObject* operand : operands) {
    if (!facts.add(operand)) return false;
  }
  return true;
}

Addresses Exchange::addresses_of(const std::vector<PyObject*>& operands) const {
  Addresses found;
  for (PyObject* operand : operands) {
    if (PyList_Check(operand) || PyTuple_Check(operand)) {
      for (nb::handle member : nb::borrow<nb::sequence>(operand)) {
        found.all.push_back(member.is_none() ? 0 : address_of(read(member.ptr())));
      }
    } else if (operand != Py_None) {
      found.all.push_back(address_of(read(operand)));
    }
    found.ends.push_back(found.all.size());
  }
  return found;
}

nb::object Exchange::describe(nb::tuple operands) const {
  std::string text;
  std::vector<PyObject*> found;
  for (nb::handle operand : operands) found.push_back(operand.ptr());
  Addresses addresses;
  if (!append_facts(found, &text, &addresses)) return nb::none();
  return nb::bytes(text.data(), text.size());
}

nb::bytes Exchange::addresses(nb::sequence members) const {
  const nb::list list(members);
  const Addresses found = addresses_of({list.ptr()});
  return nb::bytes(found.all.data(), found.all.size() * sizeof(uintptr_t));
}

// NOTE: a type with a dispatch of its own may have no memory behind it, and some warn when asked.
bool Exchange::plain(PyTypeObject* type) const {
  PyObject* const object = reinterpret_cast<PyObject*>(type);
  if (object == type_.ptr() || object == plain_subclass_.ptr()) return true;
  if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(type_.ptr())) == 0) return false;
  return nb::getattr(nb::handle(object), dispatch_name_, nb::none()).is(dispatch_);
}

void define_exchange(nb::module_& module) {
  nb::class_<Exchange>(module, "Exchange", "Reads tensors of one type through DLPack's C exchange interface.")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), nb::arg("tensor_type"),
           nb::arg("plain_subclass") = nb::none(), nb::arg("threads") = nb::none(),
           nb::sig("def __init__(self, tensor_type: type, plain_subclass: type | None = None, "
                   "threads: collections.abc.Callable[[], int] | None = None) -> None"),
           "`plain_subclass`: a subclass without a `__torch_dispatch__` of its own, recognised without asking for it.\n"
           "`threads`: asked before each launch on the CPU, which then uses at most so many threads.\n"
           "Raises TypeError for a type that does not offer the interface.")
      .def("describe", &Exchange::describe, nb::arg("operands"),
           nb::sig("def describe(self, operands: tuple[object, ...]) -> bytes | None"),
           "Device, dtypes and shapes of tensors, None and lists of equal specs (None: skipped), and of each tensor\n"
           "and list whether its addresses are multiples of 16 bytes: equal bytes mean equal plans and workspaces.\n"
           "None where an operand is something else, is not contiguous, or is on another device than the first.")
      .def("addresses", &Exchange::addresses, nb::arg("members"),
           nb::sig("def addresses(self, members: collections.abc.Sequence[object | None]) -> bytes"),
           "The address of each tensor as a native 64-bit integer, 0 for None.");
}

}  // namespace grouped
