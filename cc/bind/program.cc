#include "cc/bind/program.h"

#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/bind/exchange.h"
#include "cc/bind/launch.h"
#include "cc/bind/plan.h"

namespace nb = nanobind;

namespace grouped {
namespace {

PyObject* item_of(nb::handle list, Py_ssize_t at) {
  PyObject* item = PyList_GetItem(list.ptr(), at);
  if (item == nullptr) throw nb::python_error();
  return item;
}

void set_item(nb::handle list, Py_ssize_t at, nb::object item) {
  if (PyList_SetItem(list.ptr(), at, item.release().ptr()) != 0) throw nb::python_error();
}

nb::list list_of(size_t count) {
  nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(count)));
  if (!list.is_valid()) throw nb::python_error();
  for (size_t at = 0; at < count; ++at) set_item(list, static_cast<Py_ssize_t>(at), nb::none());
  return list;
}

// A plan whose operands stand in a list of tensors: what `Plan.launch` does, without an address in Python's hands.
class Launcher {
 public:
  Launcher(nb::object exchange, nb::object plan, std::vector<int> registers, std::vector<size_t> offsets)
      : exchange_object_(std::move(exchange)),
        plan_object_(std::move(plan)),
        exchange_(nb::cast<const Exchange*>(exchange_object_)),
        plan_(nb::cast<const Plan*>(plan_object_)),
        registers_(std::move(registers)),
        offsets_(std::move(offsets)) {
    offsets_.resize(offsets_.empty() ? registers_.size() : offsets_.size());
    if (offsets_.size() != registers_.size()) {
      throw std::invalid_argument("got " + std::to_string(offsets_.size()) + " offsets, expected one per register");
    }
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
      last = exchange_->read(item_of(values, registers_[slot]));
      addresses[slot] = address_of(last) + offsets_[slot];
    }
    const size_t scratch = registers_.back() >= 0 ? bytes_of(last) : 0;
    const int threads = plan_->platform == Platform::cpu ? exchange_->threads() : 0;
    const nb::gil_scoped_release unlocked;
    plan_->launch(addresses, addresses[plan_->slots], scratch, reinterpret_cast<void*>(stream), threads);
  }

 private:
  nb::object exchange_object_;
  nb::object plan_object_;
  const Exchange* exchange_;
  const Plan* plan_;
  std::vector<int> registers_;
  std::vector<size_t> offsets_;
};

// A new tensor: the arguments of the function that allocates it.
struct Made {
  int at;
  nb::object shape, strides, dtype;
};

// A launch, or, where `launcher` is not set, a cast of `source` to the first dtype of `made`.
struct Step {
  nb::object name, launcher;
  std::vector<Made> made;
  nb::object made_at;          // their registers, for `watch`
  std::vector<int> last_used;  // registers that no later step reads
  int source = -1;
};

// Registers: the operands that are there, in order | what steps make ... | the workspace, which all launches share.
//
//   leaves   x   None   [w0, w1]          registers   x   table   y   workspace
//            |            `-- table_of(list) -------------^       ^       ^
//            `-- taken out of the list, so that               empty(shape, strides, dtype)
//                x is freed after its last launch
class Program {
 public:
  Program(nb::list steps, std::vector<int> results, std::vector<int> released, int registers, nb::object workspace,
          nb::object empty, nb::object table_of)
      : results_(std::move(results)),
        released_(std::move(released)),
        registers_(registers),
        empty_(std::move(empty)),
        table_of_(std::move(table_of)),
        to_(nb::str("to")) {
    for (nb::handle step : steps) steps_.push_back(step_of(nb::cast<nb::tuple>(step)));
    if (!workspace.is_none()) workspace_ = {made_of(registers - 1, nb::cast<nb::tuple>(workspace))};
  }

  nb::list run(nb::list leaves, uintptr_t stream, nb::object watch) const {
    nb::list values = list_of(static_cast<size_t>(registers_));
    fill(values, leaves);
    for (const int at : released_) set_item(leaves, at, nb::none());
    for (const Made& made : workspace_) allocate(values, made);
    for (const Step& step : steps_) {
      if (!step.launcher.is_valid()) {
        const nb::object source = nb::borrow(item_of(values, step.source));
        set_item(values, step.made[0].at, nb::getattr(source, to_)(step.made[0].dtype));
        continue;
      }
      for (const Made& made : step.made) allocate(values, made);
      if (watch.is_none()) {
        nb::cast<const Launcher*>(step.launcher)->launch(values, stream);
      } else {
        watch(step.name, step.launcher, values, step.made_at, stream);
      }
      for (const int at : step.last_used) set_item(values, at, nb::none());
    }
    return picked(values, leaves);
  }

 private:
  static Made made_of(int at, nb::tuple facts) { return {at, facts[0], facts[1], facts[2]}; }

  static Step step_of(nb::tuple given) {
    Step step;
    if (given.size() == 3) {  // (source, result, dtype)
      step.source = nb::cast<int>(given[0]);
      step.made.push_back({nb::cast<int>(given[1]), nb::none(), nb::none(), given[2]});
      return step;
    }
    if (given.size() != 4 || !nb::isinstance<Launcher>(given[1])) {
      throw nb::type_error("a step must be (name, Launcher, new tensors, last used) or (source, result, dtype)");
    }
    step.name = given[0];  // (name, launcher, ((register, (shape, strides, dtype)), ...), registers)
    step.launcher = given[1];
    nb::list ats;
    for (nb::handle each : given[2]) {
      const nb::tuple pair = nb::cast<nb::tuple>(each);
      step.made.push_back(made_of(nb::cast<int>(pair[0]), nb::cast<nb::tuple>(pair[1])));
      ats.append(pair[0]);
    }
    step.made_at = nb::tuple(ats);
    step.last_used = nb::cast<std::vector<int>>(given[3]);
    return step;
  }

  void fill(nb::list values, nb::list leaves) const {
    int next = 0;
    const Py_ssize_t count = PyList_Size(leaves.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) {
      const nb::object leaf = nb::borrow(item_of(leaves, i));
      if (leaf.is_none()) continue;
      const bool listed = PyList_Check(leaf.ptr()) || PyTuple_Check(leaf.ptr());
      set_item(values, next++, listed ? table_of_(leaf) : leaf);
    }
  }

  void allocate(nb::list values, const Made& made) const {
    set_item(values, made.at, empty_(made.shape, made.strides, made.dtype));
  }

  nb::list picked(nb::list values, nb::list leaves) const {
    nb::list found = list_of(results_.size());
    for (size_t i = 0; i < results_.size(); ++i) {
      const int at = results_[i];
      if (at == kAbsent) continue;
      PyObject* item = at >= 0 ? item_of(values, at) : item_of(leaves, kFirstLeaf - at);
      set_item(found, static_cast<Py_ssize_t>(i), nb::borrow(item));
    }
    return found;
  }

  // How results are written: a register, nothing, or leaf n as kFirstLeaf - n.
  static constexpr int kAbsent = -1, kFirstLeaf = -2;

  std::vector<Step> steps_;
  std::vector<int> results_, released_;
  int registers_;
  std::vector<Made> workspace_;  // one, or none
  nb::object empty_, table_of_, to_;
};

// Finds what was decided for operands with the same facts, which takes less time than to make these facts an object.
// An operand is a leaf, or a `flat`: a pair of a layout, which counts by identity, and a tuple of leaves.
class FactsCache {
 public:
  FactsCache(nb::object exchange, size_t most, nb::object flat)
      : exchange_object_(std::move(exchange)),
        exchange_(nb::cast<const Exchange*>(exchange_object_)),
        most_(most),
        flat_(std::move(flat)) {}

  nb::object find(nb::tuple operands, int64_t number, nb::object leaves) const {
    const Key key(*this, operands, number, leaves);
    if (!key.known) return nb::none();
    const auto found = values_.find(key.facts);
    return found == values_.end() ? nb::none() : found->second.value;
  }

  void keep(nb::tuple operands, int64_t number, nb::object value) {
    const Key key(*this, operands, number, nb::none());
    if (!key.known) return;
    if (values_.size() >= most_) values_.clear();
    values_[key.facts] = {std::move(value), layouts_of(operands)};
  }

  size_t size() const { return values_.size(); }

 private:
  struct Entry {
    nb::object value;
    nb::list layouts;  // kept alive, so that no other layout gets the address of one in the key
  };

  struct Key {
    std::string facts;
    bool known;

    Key(const FactsCache& cache, nb::tuple operands, int64_t number, nb::object given) {
      nb::list leaves = given.is_none() ? nb::list() : nb::borrow<nb::list>(given);
      facts.reserve(512);
      append(number);
      const size_t count = operands.size();
      for (size_t i = 0; i < count; ++i) {
        const nb::object operand = operands[i];
        if (!cache.is_flat(operand)) {
          leaves.append(operand);
          continue;
        }
        append(i);
        append(PyTuple_GetItem(operand.ptr(), 0));
        for (nb::handle leaf : nb::borrow<nb::tuple>(PyTuple_GetItem(operand.ptr(), 1))) leaves.append(leaf);
      }
      known = cache.exchange_->append_facts(leaves, &facts);
    }

    template <class T>
    void append(const T& value) {
      facts.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  };

  bool is_flat(nb::handle operand) const { return operand.type().is(flat_); }

  nb::list layouts_of(nb::tuple operands) const {
    nb::list layouts;
    for (nb::handle operand : operands) {
      if (is_flat(operand)) layouts.append(nb::handle(PyTuple_GetItem(operand.ptr(), 0)));
    }
    return layouts;
  }

  nb::object exchange_object_;
  const Exchange* exchange_;
  size_t most_;
  nb::object flat_;
  std::unordered_map<std::string, Entry> values_;
};

}  // namespace

void define_program(nb::module_& module) {
  nb::class_<Launcher>(module, "Launcher", "A plan that finds its operands in a list of tensors.")
      .def(nb::init<nb::object, nb::object, std::vector<int>, std::vector<size_t>>(), nb::arg("exchange"),
           nb::arg("plan"), nb::arg("registers"), nb::arg("offsets") = std::vector<size_t>(),
           nb::sig("def __init__(self, exchange: Exchange, plan: Plan, registers: collections.abc.Sequence[int], "
                   "offsets: collections.abc.Sequence[int] = ()) -> None"),
           "`registers`: for the operands in slot order, the results and the workspace, the position in the list; -1\n"
           "where absent, or read through a table. `offsets`: for each, the bytes from the start of the tensor to the\n"
           "operand; none: 0 for all.")
      .def("launch", &Launcher::launch, nb::arg("values"), nb::arg("stream"),
           nb::sig("def launch(self, values: list, stream: int) -> None"),
           "Runs the kernel; otherwise as `Plan.launch`. Raises ValueError for a workspace that is too small.");
  nb::class_<Program>(module, "Program", "The planned steps of a rule, which run on the tensors of a list.")
      .def(nb::init<nb::list, std::vector<int>, std::vector<int>, int, nb::object, nb::object, nb::object>(),
           nb::arg("steps"), nb::arg("results"), nb::arg("released"), nb::arg("registers"), nb::arg("workspace").none(),
           nb::arg("empty"), nb::arg("table_of"),
           nb::sig("def __init__(self, steps: list[tuple], results: collections.abc.Sequence[int], "
                   "released: collections.abc.Sequence[int], registers: int, "
                   "workspace: tuple[tuple[int, ...], tuple[int, ...], object] | None, "
                   "empty: collections.abc.Callable[..., object], "
                   "table_of: collections.abc.Callable[[typing.Any], object]) -> None"),
           "A new tensor is given by the arguments of `empty`, (shape, strides, dtype), also the workspace.\n\n"
           "`steps`: launches (name, launcher, ((register, new tensor), ...), registers that no later step reads) and\n"
           "casts (register, register of the result, dtype). `results`: of each a register, -1 for None, or leaf n as\n"
           "-2 - n. `released`: leaves that are taken out of the list. `registers`: their number; those of the leaves\n"
           "that are there come first, and the workspace is the last. `table_of` makes a tensor of a leaf that is a\n"
           "list.")
      .def(
          "run", &Program::run, nb::arg("leaves"), nb::arg("stream"), nb::arg("watch").none() = nb::none(),
          nb::sig("def run(self, leaves: list, stream: int, watch: collections.abc.Callable[[str, Launcher, list, "
                  "tuple[int, ...], int], None] | None = None) -> list"),
          "Runs all steps on `stream` and returns the results. `watch` runs in place of each launch, with the name of\n"
          "its call, its launcher, all registers, those of its new results, and the stream.");
  nb::class_<FactsCache>(module, "FactsCache", "Objects by `Exchange.describe` of operands, and a number.")
      .def(nb::init<nb::object, size_t, nb::object>(), nb::arg("exchange"), nb::arg("most"), nb::arg("flat"),
           nb::sig("def __init__(self, exchange: Exchange, most: int, flat: type) -> None"),
           "`most`: number of entries at which the cache is emptied. `flat`: the class, a tuple of a layout and a "
           "tuple\n"
           "of leaves, of operands that are several leaves. Layouts count by their identity.")
      .def("find", &FactsCache::find, nb::arg("operands"), nb::arg("number") = 0, nb::arg("leaves").none() = nb::none(),
           nb::sig("def find(self, operands: tuple[object, ...], number: int = 0, leaves: list | None = None) -> "
                   "typing.Any"),
           "The object that was kept for these facts; None where there is none, or `describe` has no answer. The "
           "leaves\n"
           "of the operands are appended to `leaves`.")
      .def("keep", &FactsCache::keep, nb::arg("operands"), nb::arg("number"), nb::arg("value"),
           nb::sig("def keep(self, operands: tuple[object, ...], number: int, value: object) -> None"),
           "Keeps `value`, unless `describe` has no answer.")
      .def("__len__", &FactsCache::size);
}

}  // namespace grouped
