// The extension module grouped_core._native: what the frontends and the tests see of the native side.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/api/archs.h"
#include "cc/bind/built.h"
#include "cc/bind/device.h"
#include "cc/bind/dlpack.h"
#include "cc/bind/exchange.h"
#include "cc/bind/launch.h"
#include "cc/bind/plan.h"
#include "cc/bind/program.h"
#include "cc/bind/python.h"
#include "cc/bind/xla.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/parallel.h"

namespace nb = nanobind;

namespace grouped {
namespace {

nb::dict handlers() {
  nb::dict platforms;
  for (const XlaHandler& handler : xla_handlers()) {
    if (!platforms.contains(handler.platform)) platforms[handler.platform] = nb::dict();
    nb::cast<nb::dict>(platforms[handler.platform])[handler.target.c_str()] = nb::capsule(handler.function);
  }
  return platforms;
}

template <class Call>
void add_kernels(nb::dict* calls) {
  nb::list names;
  for (Platform platform : {Platform::cpu, Platform::cuda}) {
    const Table<Call> rows = table<Call>(platform);
    for (const Kernel<Call>* row = rows.begin; row != rows.end; ++row) names.append(row->name);
  }
  (*calls)[Call::kName] = names;
}

nb::dict kernels() {
  nb::dict calls;
#define X(Call) add_kernels<Call>(&calls);
  GROUPED_CALLS(X)
#undef X
  return calls;
}

template <class Call>
void add_schema(nb::dict* calls) {
  const Schema& s = schema<Call>();
  nb::dict inputs, outputs, params;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const SlotSchema& slot = s.slots[i];
    (i < s.inputs ? inputs : outputs)[slot.name.c_str()] = (slot.optional ? "optional " : "") + slot.text;
  }
  for (const auto& [name, initial] : s.params) params[name.c_str()] = nb::cast(initial);
  (*calls)[Call::kName] = nb::make_tuple(inputs, outputs, params);
}

nb::dict schemas() {
  nb::dict calls;
#define X(Call) add_schema<Call>(&calls);
  GROUPED_CALLS(X)
#undef X
  return calls;
}

nb::dict types() {
  nb::dict result;
  for (const auto& [name, members] : type_sets()) result[name.c_str()] = nb::tuple(nb::cast(members));
  return result;
}

std::vector<std::string> dtypes() {
  return {
#define X(name, tag, bytes) name,
      GROUPED_DTYPES(X)
#undef X
  };
}

std::unique_ptr<Plan> plan(nb::str call_name, nb::str arch, nb::str implementation, nb::sequence inputs,
                           nb::sequence outputs, nb::dict params) {
  return make_plan(text_of(call_name), text_of(arch), text_of(implementation), views_of(inputs), views_of(outputs),
                   params_of(params));
}

// Addresses of the slots of a plan and of its workspace, from Python.
struct Addresses {
  uintptr_t values[kMaxSlots + 1];

  Addresses(const Plan& plan, nb::list addresses) {
    const size_t count = addresses.size();
    if (count != plan.slots + 1) {
      throw std::invalid_argument("got " + std::to_string(count) + " addresses, expected " +
                                  std::to_string(plan.slots + 1) + ": operands, results, workspace");
    }
    for (size_t i = 0; i < count; ++i) {
      values[i] = PyLong_AsSize_t(PyList_GetItem(addresses.ptr(), static_cast<Py_ssize_t>(i)));
      if (values[i] == static_cast<size_t>(-1) && PyErr_Occurred() != nullptr) throw nb::python_error();
    }
  }
};

// An address does not tell how much memory is there. Arrays of a call are checked (dlpack.cc), and those of a program
// are what its plans were made for.
void launch(const Plan& plan, nb::list addresses, uintptr_t stream) {
  const Addresses given(plan, std::move(addresses));
  const uintptr_t workspace = given.values[plan.slots];
  const nb::gil_scoped_release unlocked;
  plan.launch(given.values, workspace, workspace == 0 ? 0 : SIZE_MAX, reinterpret_cast<void*>(stream));
}

size_t bytes_for(const Plan& plan, nb::list addresses) {
  return plan.workspace_for(Addresses(plan, std::move(addresses)).values);
}

nb::list parts_for(const Plan& plan, nb::list addresses) {
  nb::list result;
  if (!plan.in_parts(Addresses(plan, std::move(addresses)).values)) return result;
  for (const uint64_t part : plan.parts) {
    nb::list slots;
    for (size_t slot = 0; slot < plan.slots; ++slot) {
      if ((part >> slot & 1) != 0) slots.append(slot);
    }
    result.append(slots);
  }
  return result;
}

nb::list refusals(const Plan& plan) {
  nb::list result;
  for (const Refusal& refusal : plan.refusals) result.append(nb::make_tuple(refusal.kernel, refusal.reason));
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // frameworks keep plans and closures alive until the process ends
  m.doc() = "Native calls of jax-grouped, offered as XLA FFI handlers, as plans over addresses and over DLPack arrays.";
  m.attr("ffi_api_version") = nb::make_tuple(xla_ffi_api_major(), xla_ffi_api_minor());
  m.attr("cuda_compiled") = cuda_compiled();
  m.attr("cuda_archs") = nb::tuple(nb::cast(built_archs()));
  m.attr("cuda_compiler") = built_by();
  m.attr("default_cuda_arch") = kDefaultArch;

  m.def("handlers", &handlers, nb::sig("def handlers() -> dict[str, dict[str, object]]"),
        "Capsules to register with XLA: platform (\"cpu\", \"CUDA\") -> target (\"jg_<call>_v1\") -> handler.");
  m.def("kernels", &kernels, nb::sig("def kernels() -> dict[str, list[str]]"), "Every call's kernels, best first.");
  m.def("schema", &schemas,
        nb::sig("def schema() -> dict[str, tuple[dict[str, str], dict[str, str], dict[str, int | float | str]]]"),
        "Every call's operands and results, name to words, and parameters, name to default, in order. The words are\n"
        "those of cc/api/schema.h, behind \"optional\" where the slot may be absent.");
  m.def("types", &types, nb::sig("def types() -> dict[str, tuple[str, ...]]"),
        "The sets of element types that the words of `schema` name.");
  m.def("dtypes", &dtypes, "Names of the element types, as NumPy and ml_dtypes spell them.");
  m.def(
      "cpu_threads", [] { return own_pool().threads(); },
      "Threads of the CPU kernels outside of JAX, which brings its own: one for each processor that affinity and\n"
      "cgroup quotas let this process keep busy, found at the first use.");
  m.def("cpu_isa", [] { return std::string(cpu_isa()); }, "Instruction set that the CPU kernels use on this machine.");
  m.def("device_arch", &device_arch, nb::arg("device"),
        "Arch of a CUDA device, as plans take it: \"sm_90a\". Raises RuntimeError where there is no such device, or\n"
        "no code for it in this build.");
  m.def(
      "capture_of", &capture_of, nb::arg("stream"),
      "Number of the CUDA graph's capture that a stream, by its handle, is part of: no two captures of a process have\n"
      "the same. 0 where there is none. Raises RuntimeError where the stream cannot be asked.");
  m.def("arch_built_for", &arch_built_for, nb::arg("chip"),
        "Arch of a chip, ten times its compute capability: 90 is \"sm_90a\". Raises RuntimeError where this build has\n"
        "no code for it.");

  nb::class_<Plan>(m, "Plan", "One call with its shapes, decided: which kernel runs it and what it needs.")
      .def_ro("kernel", &Plan::kernel, "Name of the chosen kernel; empty where none takes the call.")
      .def_ro("spare", &Plan::spare,
              "The kernel that runs where addresses are not multiples of 16 bytes; empty: none needed.")
      .def_prop_ro("refusals", &refusals, nb::sig("def refusals(self) -> list[tuple[str, str]]"),
                   "(kernel, reason) of the kernels asked before the chosen one; of all where there is none.")
      .def_ro("workspace_bytes", &Plan::workspace_bytes,
              "Bytes of workspace to allocate whatever the addresses, room for alignment included; 0: none.")
      .def_ro("aligned_workspace_bytes", &Plan::aligned_workspace_bytes,
              "The same where the addresses of operands and results are multiples of 16 bytes.")
      .def("workspace_for", &bytes_for, nb::arg("addresses"),
           nb::sig("def workspace_for(self, addresses: list[int]) -> int"),
           "The same for these addresses, listed as for `launch`; 0 is a multiple of 16, that of the workspace is not\n"
           "looked at.")
      .def(
          "parts_for", &parts_for, nb::arg("addresses"),
          nb::sig("def parts_for(self, addresses: list[int]) -> list[list[int]]"),
          "The slots, operands and then results, that each part of the kernel touches, which a `Launcher` can run one\n"
          "at a time; addresses as in `workspace_for`. Empty: the kernel that runs at these addresses has one part.")
      .def(
          "launch", &launch, nb::arg("addresses"), nb::arg("stream"),
          nb::sig("def launch(self, addresses: list[int], stream: int) -> None"),
          "Runs the kernel: addresses of the operands in slot order (0: absent, or read through a table), of the\n"
          "results and of the workspace (0: none), which has the bytes that `workspace_for` says of them; `stream` is\n"
          "a cudaStream_t, 0 on the CPU.\n"
          "Raises ValueError for a null or unshared buffer, RuntimeError where no kernel took the call.");
  m.def(
      "plan", &plan, nb::arg("call_name"), nb::arg("arch"), nb::arg("implementation"), nb::arg("inputs"),
      nb::arg("outputs"), nb::arg("params"),
      nb::sig("def plan(call_name: str, arch: str, implementation: str, "
              "inputs: collections.abc.Sequence[tuple[str, tuple[int, ...]] | None], outputs: "
              "collections.abc.Sequence[tuple[str, tuple[int, ...]] | None], "
              "params: dict[str, int | float | str]) -> Plan"),
      "Chooses a kernel by shapes, dtypes and parameters alone; no device is needed.\n\n"
      "`arch` is \"cpu\" or \"sm_90a\"; `implementation` is empty, a comma list of kernels, \"reference\" or\n"
      "\"composed\"; operands are (dtype, shape) in slot order, None where absent. Raises ValueError for what is not\n"
      "a call, an arch or a parameter; that no kernel takes it is an answer, Plan.kernel == \"\".");
  define_array_call(m);
  define_exchange(m);
  define_program(m);
}

}  // namespace grouped
