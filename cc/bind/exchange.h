// Tensors of a library that offers DLPack's C exchange interface (PyTorch does): read in tens of nanoseconds each,
// where asking Python for shape, dtype, device and address takes most of a microsecond.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

namespace grouped {

using DlTensor = nanobind::dlpack::dltensor;

inline uintptr_t address_of(const DlTensor& t) { return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset; }
// Bytes from the first element to the end of the last one, whatever the order of the dimensions; 0 where there is no
// element, or where a stride is negative.
size_t extent_of(const DlTensor& t);

struct ExchangeTable;

// Addresses of operands, one after another: that of a tensor, those of the members of a list (0: skipped), none of
// None.
struct Addresses {
  std::vector<uintptr_t> all;
  std::vector<size_t> ends;  // of the part of each operand
};

class Exchange {
 public:
  // `plain_subclass`: has no dispatch of its own and is recognised without asking for it; None: there is none.
  // `threads`: says how many threads the library would use on the CPU; None: as many as there are.
  Exchange(nanobind::handle tensor_type, nanobind::handle plain_subclass, nanobind::handle threads);

  // What `threads` says now; 0: as many as there are.
  int threads() const;

  // False, without a Python error, for what is no tensor in plain memory, or starts within an element.
  bool view(PyObject* object, DlTensor* out) const;

  // Throws std::invalid_argument for what is no tensor in plain memory.
  DlTensor read(PyObject* object) const;

  // Appends everything that planning looks at, of operands: equal bytes, equal plans and workspaces. A negative bit is
  // not seen; PyTorch sets it on strided views of complex numbers, which are refused. False where something is not in
  // plain memory (a zero tensor has none), not contiguous, or not on the one device of the others.
  // `addresses` gets those of the operands.
  bool append_facts(const std::vector<PyObject*>& operands, std::string* text, Addresses* addresses) const;

  // Throws std::invalid_argument for what is no tensor in plain memory.
  Addresses addresses_of(const std::vector<PyObject*>& operands) const;

  nanobind::object describe(nanobind::tuple operands) const;
  nanobind::bytes addresses(nanobind::sequence members) const;

 private:
  class Facts;
  bool plain(PyTypeObject* type) const;

  nanobind::object type_;
  nanobind::object plain_subclass_;
  nanobind::object threads_;
  nanobind::object dispatch_name_;
  nanobind::object dispatch_;
  const ExchangeTable* table_ = nullptr;
};

void define_exchange(nanobind::module_& module);

}  // namespace grouped
