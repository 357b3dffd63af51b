#include "cc/bind/program.h"

#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/bind/device.h"
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

// The object of a native class that a Python object holds.
template <class T>
const T* native(nb::handle object, const char* expected) {
  if (!nb::isinstance<T>(object)) throw nb::type_error((std::string("expected ") + expected).c_str());
  return nb::cast<const T*>(object);
}

// A tuple of at least and at most so many items: nanobind checks no index of a tuple.
nb::tuple tuple_of(nb::handle object, size_t least, size_t most, const char* expected) {
  if (nb::isinstance<nb::tuple>(object)) {
    nb::tuple found = nb::borrow<nb::tuple>(object);
    if (found.size() >= least && found.size() <= most) return found;
  }
  throw nb::type_error((std::string("expected ") + expected).c_str());
}

// Where a value of a run is, and how many bytes there are; the address is 0 until it has been read.
struct Place {
  uintptr_t address = 0;
  size_t bytes = 0;
};

// A plan with its operands in a list of tensors: what `Plan.launch` does, without an address in Python's hands.
class Launcher {
 public:
  Launcher(nb::object exchange, nb::object plan, std::vector<int> registers, std::vector<size_t> offsets, int part)
      : exchange_object_(std::move(exchange)),
        plan_object_(std::move(plan)),
        exchange_(native<Exchange>(exchange_object_, "an Exchange")),
        plan_(native<Plan>(plan_object_, "a Plan")),
        registers_(std::move(registers)),
        offsets_(std::move(offsets)),
        part_(part) {
    offsets_.resize(offsets_.empty() ? registers_.size() : offsets_.size());
    if (offsets_.size() != registers_.size()) {
      throw std::invalid_argument("got " + std::to_string(offsets_.size()) + " offsets, expected one per register");
    }
    if (registers_.size() != plan_->slots + 1) {
      throw std::invalid_argument("got " + std::to_string(registers_.size()) + " registers, expected " +
                                  std::to_string(plan_->slots + 1) + ": operands, results, workspace");
    }
    const int parts = static_cast<int>(plan_->parts.size());
    if (part_ < kEveryPart || part_ >= parts) {
      throw std::invalid_argument("part " + std::to_string(part_) + " of " + plan_->kernel + ", which has " +
                                  std::to_string(parts) + "; expected one of them, or -1 for the whole");
    }
  }

  // Whether the workspace holds what an earlier part left in it.
  bool continues() const { return part_ > 0; }

  // The register of the workspace, negative without one.
  int workspace() const { return registers_.back(); }

  void launch(nb::list values, uintptr_t stream) const {
    const Py_ssize_t count = PyList_Size(values.ptr());
    // The caller's list may change while other threads run.
    const nb::object held = nb::steal(PyList_GetSlice(values.ptr(), 0, count));
    if (!held.is_valid()) throw nb::python_error();
    std::vector<Place> places(static_cast<size_t>(count));
    launch(nb::borrow<nb::list>(held), &places, stream, nullptr);
  }

  // `places`: of the values.
  void launch(nb::list values, std::vector<Place>* places, uintptr_t stream, ZeroMemory* zeros) const {
    uintptr_t addresses[kMaxSlots + 1];
    size_t scratch = 0;
    for (size_t slot = 0; slot < registers_.size(); ++slot) {
      addresses[slot] = 0;
      const int at = registers_[slot];
      if (at < 0) continue;
      Place& place = places->at(static_cast<size_t>(at));
      const bool is_workspace = slot == plan_->slots;
      if (place.address == 0 || is_workspace) {
        const DlTensor tensor = exchange_->read(item_of(values, at));
        place = {address_of(tensor), extent_of(tensor)};
      }
      if (is_workspace) {
        scratch = place.bytes;
      } else if (plan_->slot_bytes[slot] > 0 &&
                 (place.bytes < offsets_[slot] || place.bytes - offsets_[slot] < plan_->slot_bytes[slot])) {
        throw std::invalid_argument("value " + std::to_string(at) + " has " + std::to_string(place.bytes) +
                                    " bytes, expected " + std::to_string(plan_->slot_bytes[slot]) + " from byte " +
                                    std::to_string(offsets_[slot]) + " on; pass a tensor of the plan's shape");
      }
      addresses[slot] = place.address + offsets_[slot];
    }
    const int threads = plan_->platform == Platform::cpu ? exchange_->threads() : 0;
    const nb::gil_scoped_release unlocked;
    plan_->launch(addresses, addresses[plan_->slots], scratch, reinterpret_cast<void*>(stream), threads, part_, zeros);
  }

 private:
  nb::object exchange_object_;
  nb::object plan_object_;
  const Exchange* exchange_;
  const Plan* plan_;
  std::vector<int> registers_;
  std::vector<size_t> offsets_;
  int part_;
};

// A new tensor: the arguments of the function that allocates it.
struct Made {
  int at;
  nb::object shape, strides, dtype;
};

// A launch, or, where `launcher` is not set, a cast of `source` to the first dtype of `made`.
struct Step {
  nb::object name, launcher;
  const Launcher* launch = nullptr;
  std::vector<Made> workspace;  // one, or none: where this is the first launch that uses it
  std::vector<Made> made;
  nb::object made_at;          // registers of `made`, for `watch`
  std::vector<int> last_used;  // registers that no later step reads
  int source = -1;
};

// A result: a register, nothing, or leaf n as kFirstLeaf - n; several of them where there is a layout.
struct Result {
  static constexpr int kAbsent = -1, kFirstLeaf = -2;

  nb::object layout;
  std::vector<int> at;
};

// Registers: the operands that are there, in order | what steps make, workspaces included.
//
//   leaves   x   None   [w0, w1]          registers   x   table   y   workspace
//            |            `-- table_of(addresses) --------^       ^       ^
//            `-- taken out of the list, so that               empty(shape, strides, dtype)
//                x is freed after its last launch
class Program {
 public:
  Program(nb::object exchange, nb::list steps, nb::sequence results, std::vector<int> released, int registers,
          nb::object empty, nb::object table_of, nb::object flat, nb::object place)
      : exchange_object_(std::move(exchange)),
        exchange_(native<Exchange>(exchange_object_, "an Exchange")),
        released_(std::move(released)),
        registers_(registers),
        empty_(std::move(empty)),
        table_of_(std::move(table_of)),
        flat_(std::move(flat)),
        to_(nb::str("to")) {
    if (registers < 0 || registers > kMostRegisters) {
      throw std::invalid_argument("got " + std::to_string(registers) + " registers, expected 0 to " +
                                  std::to_string(kMostRegisters));
    }
    for (nb::handle step : steps) steps_.push_back(step_of(tuple_of(step, 3, 5, kStep)));
    for (nb::handle result : results) results_.push_back(result_of(result));
    if (!place.is_none()) {
      const nb::tuple facts = tuple_of(place, 4, 4, "(device, current device, current stream, dtype of bytes)");
      device_ = facts[0];
      current_device_ = facts[1];
      stream_of_ = facts[2];
      bytes_ = facts[3];
    }
  }

  // What a run holds: its registers and their addresses as far as they are known, and leaves that are not released.
  struct Started {
    nb::list values;
    std::vector<Place> places;
    std::vector<nb::object> kept;
  };

  // Takes what a run needs of the leaves, after which the caller may let go of them. `checked`: they have the facts for
  // which the steps were planned; otherwise their sizes are compared.
  Started start(const std::vector<PyObject*>& leaves, const Addresses& addresses, bool checked) const {
    constexpr size_t kEnough = SIZE_MAX;
    Started started{list_of(static_cast<size_t>(registers_)), {}, {}};
    started.places.reserve(static_cast<size_t>(registers_));
    started.kept.reserve(leaves.size());
    size_t begin = 0;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const nb::object leaf = nb::borrow(leaves[i]);
      started.kept.push_back(leaf);
      if (leaf.is_none()) continue;
      const bool listed = PyList_Check(leaf.ptr()) || PyTuple_Check(leaf.ptr());
      const uintptr_t* own = addresses.all.data() + begin;
      const size_t bytes = (addresses.ends[i] - begin) * sizeof(*own);
      set_item(started.values, static_cast<Py_ssize_t>(started.places.size()),
               listed ? table_of_(nb::bytes(own, bytes)) : leaf);
      started.places.push_back(listed || !checked ? Place{} : Place{*own, kEnough});
      begin = addresses.ends[i];
    }
    started.places.resize(static_cast<size_t>(registers_));
    for (const int at : released_) started.kept.at(static_cast<size_t>(at)).reset();
    return started;
  }

  nb::list finish(Started started, uintptr_t stream, nb::object watch) const {
    const nb::list& values = started.values;
    const size_t zero_bytes = watch.is_none() ? zero_bytes_.load() : 0;
    const Memory memory = zero_bytes > 0 ? cleared(zero_bytes, stream) : Memory();
    ZeroMemory zeros(memory.start, zero_bytes);
    for (const Step& step : steps_) {
      if (!step.launcher.is_valid()) {
        const nb::object source = nb::borrow(item_of(values, step.source));
        put(&started, step.made[0].at, nb::getattr(source, to_)(step.made[0].dtype));
        continue;
      }
      for (const Made& made : step.workspace) allocate(&started, made);
      for (const Made& made : step.made) allocate(&started, made);
      if (watch.is_none()) {
        step.launch->launch(values, &started.places, stream, &zeros);
      } else {
        watch(step.name, step.launcher, values, step.made_at, stream);
      }
      for (const int at : step.last_used) put(&started, at, nb::none());
    }
    constexpr int kWorthATensor = 2;  // launches that would clear memory of their own
    if (zeros.takers() >= kWorthATensor) zero_bytes_ = zeros.wanted();
    nb::list found = list_of(results_.size());
    for (size_t i = 0; i < results_.size(); ++i) {
      set_item(found, static_cast<Py_ssize_t>(i), picked(results_[i], started));
    }
    return found;
  }

  nb::list run(nb::list leaves, uintptr_t stream, nb::object watch) const {
    const nb::list held = nb::steal<nb::list>(PyList_GetSlice(leaves.ptr(), 0, PyList_Size(leaves.ptr())));
    if (!held.is_valid()) throw nb::python_error();
    std::vector<PyObject*> taken;
    for (nb::handle leaf : held) taken.push_back(leaf.ptr());
    Started started = start(taken, exchange_->addresses_of(taken), false);
    PyList_SetSlice(held.ptr(), 0, PyList_Size(held.ptr()), nullptr);
    for (const int at : released_) set_item(leaves, at, nb::none());
    return finish(std::move(started), stream, std::move(watch));
  }

  // False where another device than the program's is current.
  bool current_stream(uintptr_t* stream) const {
    *stream = 0;
    if (!device_.is_valid()) return true;
    if (!current_device_().equal(device_)) return false;
    *stream = nb::cast<uintptr_t>(stream_of_(device_));
    return true;
  }

 private:
  static constexpr int kMostRegisters = 1 << 20;
  static constexpr const char* kStep =
      "a step as (name, Launcher, new tensors, new workspace, last used) or (source, result, dtype)";

  // (register, (shape, strides, dtype))
  static Made made_of(nb::handle given) {
    const nb::tuple pair = tuple_of(given, 2, 2, "(register, new tensor)");
    const nb::tuple facts = tuple_of(pair[1], 3, 3, "(shape, strides, dtype) of a new tensor");
    return {nb::cast<int>(pair[0]), facts[0], facts[1], facts[2]};
  }

  static Step step_of(nb::tuple given) {
    Step step;
    if (given.size() == 3) {  // (source, result, dtype)
      step.source = nb::cast<int>(given[0]);
      step.made.push_back({nb::cast<int>(given[1]), nb::none(), nb::none(), given[2]});
      return step;
    }
    if (given.size() != 5 || !nb::isinstance<Launcher>(given[1])) {
      throw nb::type_error((std::string("expected ") + kStep).c_str());
    }
    step.name = given[0];
    step.launcher = given[1];
    step.launch = nb::cast<const Launcher*>(step.launcher);
    nb::list ats;
    for (nb::handle each : given[2]) {
      step.made.push_back(made_of(each));
      ats.append(step.made.back().at);
    }
    if (!given[3].is_none()) step.workspace = {made_of(given[3])};
    step.made_at = nb::tuple(ats);
    step.last_used = nb::cast<std::vector<int>>(given[4]);
    return step;
  }

  static Result result_of(nb::handle given) {
    if (!nb::isinstance<nb::tuple>(given)) return {{}, {nb::cast<int>(given)}};
    const nb::tuple facts = tuple_of(given, 2, 2, "a result as a register, or as (layout, registers)");
    return {facts[0], nb::cast<std::vector<int>>(facts[1])};
  }

  // What was known of the register's place is no longer true.
  static void put(Started* started, int at, nb::object value) {
    set_item(started->values, at, std::move(value));
    started->places.at(static_cast<size_t>(at)) = {};
  }

  void allocate(Started* started, const Made& made) const {
    put(started, made.at, empty_(made.shape, made.strides, made.dtype));
  }

  struct Memory {
    nb::object tensor;
    void* start = nullptr;
  };

  Memory cleared(size_t bytes, uintptr_t stream) const {
    const nb::object tensor = empty_(nb::make_tuple(bytes), nb::make_tuple(1), bytes_);
    void* const start = reinterpret_cast<void*>(address_of(exchange_->read(tensor.ptr())));
    clear_on_device(start, bytes, reinterpret_cast<void*>(stream));
    return {tensor, start};
  }

  nb::object picked(const Result& result, const Started& started) const {
    if (!result.layout.is_valid()) return leaf_of(result.at[0], started);
    nb::list leaves;
    for (const int at : result.at) leaves.append(leaf_of(at, started));
    return flat_(result.layout, nb::tuple(leaves));
  }

  static nb::object leaf_of(int at, const Started& started) {
    if (at == Result::kAbsent) return nb::none();
    if (at >= 0) return nb::borrow(item_of(started.values, at));
    return started.kept.at(static_cast<size_t>(Result::kFirstLeaf - at));
  }

  nb::object exchange_object_;
  const Exchange* exchange_;
  std::vector<Step> steps_;
  std::vector<Result> results_;
  std::vector<int> released_;
  int registers_;
  nb::object empty_, table_of_, flat_, to_;
  nb::object device_, current_device_, stream_of_, bytes_;  // not set on the CPU
  // Bytes of zeros that the launches of an earlier run asked for, which later ones find cleared by one launch.
  mutable std::atomic<size_t> zero_bytes_{0};
};

// Finds what was decided for operands with the same facts, which takes less time than to make these facts an object.
// An operand is a leaf, or a `flat`: a pair of a layout, which counts by identity, and a tuple of leaves.
class FactsCache {
 public:
  FactsCache(nb::object exchange, size_t most, nb::object flat)
      : exchange_object_(std::move(exchange)),
        exchange_(native<Exchange>(exchange_object_, "an Exchange")),
        most_(most),
        flat_(std::move(flat)) {}

  nb::object find(nb::tuple operands, int64_t number, nb::object leaves) const {
    const Key key(*this, operands, number);
    for (PyObject* leaf : key.leaves) {
      if (!leaves.is_none()) nb::borrow<nb::list>(leaves).append(nb::handle(leaf));
    }
    return value_of(key);
  }

  // NOTE: a launch lets other threads run, which may empty this cache, so `value` keeps the program.
  nb::object run(nb::object given, int64_t number, nb::object watch) const {
    const bool held = PyList_Check(given.ptr()) != 0;
    auto operands = tuple_of(held ? nb::handle(item_of(given, 0)) : given, 0, SIZE_MAX, "operands as a tuple");
    const Key key(*this, operands, number);
    const nb::object value = value_of(key);
    if (value.is_none()) return value;
    constexpr const char* kValue = "a tuple that starts with a Program, which `keep` was given";
    const auto* program = native<Program>(tuple_of(value, 1, SIZE_MAX, kValue)[0], kValue);
    uintptr_t stream = 0;
    if (!program->current_stream(&stream)) return nb::none();
    Program::Started started = program->start(key.leaves, key.addresses, true);
    if (held && PyList_SetSlice(given.ptr(), 0, 1, nullptr) != 0) throw nb::python_error();
    operands.reset();
    return program->finish(std::move(started), stream, std::move(watch));
  }

  void keep(nb::tuple operands, int64_t number, nb::object value) {
    const Key key(*this, operands, number);
    if (!key.known) return;
    Entry entry{std::move(value), layouts_of(operands)};
    // What is replaced dies at the end: its destructors may run Python, which may ask this cache.
    std::unordered_map<std::string, Entry> emptied;
    if (values_.size() >= most_) emptied.swap(values_);
    std::swap(values_[key.facts], entry);
  }

  size_t size() const { return values_.size(); }

 private:
  struct Entry {
    nb::object value;
    nb::list layouts;  // kept alive, so that no other layout gets the address of one in the key
  };

  struct Key {
    std::string facts;
    std::vector<PyObject*> leaves;  // as long as the operands live
    Addresses addresses;
    bool known;

    Key(const FactsCache& cache, nb::handle operands, int64_t number) {
      constexpr size_t kUsual = 16;
      facts.reserve(512);
      leaves.reserve(kUsual);
      addresses.all.reserve(kUsual);
      addresses.ends.reserve(kUsual);
      append(number);
      const Py_ssize_t count = PyTuple_Size(operands.ptr());
      for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* const operand = PyTuple_GetItem(operands.ptr(), i);
        if (!cache.is_flat(operand)) {
          leaves.push_back(operand);
          continue;
        }
        const nb::tuple flat = tuple_of(operand, 2, 2, kFlat);
        append(i);
        append(flat[0].ptr());
        for (nb::handle leaf : tuple_of(flat[1], 0, SIZE_MAX, kFlat)) leaves.push_back(leaf.ptr());
      }
      known = cache.exchange_->append_facts(leaves, &facts, &addresses);
    }

    template <class T>
    void append(const T& value) {
      facts.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  };

  static constexpr const char* kFlat = "an operand of several leaves as a pair of a layout and a tuple of leaves";

  bool is_flat(nb::handle operand) const { return operand.type().is(flat_); }

  nb::object value_of(const Key& key) const {
    if (!key.known) return nb::none();
    const auto found = values_.find(key.facts);
    return found == values_.end() ? nb::none() : found->second.value;
  }

  nb::list layouts_of(nb::tuple operands) const {
    nb::list layouts;
    for (nb::handle operand : operands) {
      if (is_flat(operand)) layouts.append(tuple_of(operand, 2, 2, kFlat)[0]);
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
      .def(
          nb::init<nb::object, nb::object, std::vector<int>, std::vector<size_t>, int>(), nb::arg("exchange"),
          nb::arg("plan"), nb::arg("registers"), nb::arg("offsets") = std::vector<size_t>(),
          nb::arg("part") = kEveryPart,
          nb::sig("def __init__(self, exchange: Exchange, plan: Plan, registers: collections.abc.Sequence[int], "
                  "offsets: collections.abc.Sequence[int] = (), part: int = -1) -> None"),
          "`registers`: for the operands in slot order, the results and the workspace, the position in the list; -1\n"
          "where absent, or read through a table. `offsets`: for each, the bytes from the start of the tensor to the\n"
          "operand; none: 0 for all. `part`: of those of the plan, whose other slots are absent; -1: the whole. Parts\n"
          "run in order, and nothing else writes to the workspace between them.")
      .def_prop_ro("continues", &Launcher::continues, "Whether the workspace holds what an earlier part left in it.")
      .def_prop_ro("workspace", &Launcher::workspace, "The register of the workspace, -1 without one.")
      .def("launch", nb::overload_cast<nb::list, uintptr_t>(&Launcher::launch, nb::const_), nb::arg("values"),
           nb::arg("stream"), nb::sig("def launch(self, values: list, stream: int) -> None"),
           "Runs the kernel; otherwise as `Plan.launch`. Raises ValueError for a workspace that is too small.");
  nb::class_<Program>(module, "Program", "The planned steps of a rule, which run on the tensors of a list.")
      .def(
          nb::init<nb::object, nb::list, nb::sequence, std::vector<int>, int, nb::object, nb::object, nb::object,
                   nb::object>(),
          nb::arg("exchange"), nb::arg("steps"), nb::arg("results"), nb::arg("released"), nb::arg("registers"),
          nb::arg("empty"), nb::arg("table_of"), nb::arg("flat").none() = nb::none(),
          nb::arg("place").none() = nb::none(),
          nb::sig("def __init__(self, exchange: Exchange, steps: list[tuple], "
                  "results: collections.abc.Sequence[int | tuple[object, collections.abc.Sequence[int]]], "
                  "released: collections.abc.Sequence[int], registers: int, "
                  "empty: collections.abc.Callable[..., object], "
                  "table_of: collections.abc.Callable[[bytes], object], flat: type | None = None, "
                  "place: tuple[int, collections.abc.Callable[[], int], collections.abc.Callable[[int], int], object] "
                  "| None = None) -> None"),
          "A new tensor is given by the arguments of `empty`, (shape, strides, dtype).\n\n"
          "`steps`: launches (name, launcher, ((register, new tensor), ...), (register, new workspace) or None,\n"
          "registers that no later step uses) and casts (register, register of the result, dtype). `results`: of each\n"
          "a register, -1 for None, or leaf n as -2 - n; or (layout, several of these), of which `flat` makes one\n"
          "result. `released`: leaves that are taken out of the list. `registers`: their number; those of the leaves\n"
          "that are there come first. `table_of` makes a tensor of a leaf that is a list, from its\n"
          "`Exchange.addresses`. `place`: the CUDA device, what tells the current one, what tells the current\n"
          "stream of a device, and the dtype of bytes; None: the CPU.")
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
      .def("run", &FactsCache::run, nb::arg("operands"), nb::arg("number"), nb::arg("watch").none() = nb::none(),
           nb::sig("def run(self, operands: tuple[object, ...] | list[tuple[object, ...]], number: int, "
                   "watch: collections.abc.Callable[[str, Launcher, list, tuple[int, ...], int], None] | None = None) "
                   "-> list | None"),
           "What `find` and `Program.run` do, where the object that was kept is a tuple that starts with a program: "
           "the\n"
           "results on the current stream. None where `find` has no answer or another device is current.\n"
           "`operands`: or a list with only them, from which they are taken, so that they are freed after their last "
           "use.")
      .def("keep", &FactsCache::keep, nb::arg("operands"), nb::arg("number"), nb::arg("value"),
           nb::sig("def keep(self, operands: tuple[object, ...], number: int, value: object) -> None"),
           "Keeps `value`, unless `describe` has no answer.")
      .def("__len__", &FactsCache::size);
}

}  // namespace grouped
