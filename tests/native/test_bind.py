"""The three edges: what they list, what they refuse, and that they run the same thing."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grouped_core import _native, _schema, calls, plans
from grouped_core.activations import Activation
from grouped_core.calls import RESULTS, SLOTS, spec_of
from grouped_core.formats import PLAIN, WIDE
from grouped_core.recipes import BF16
from grouped_core.schema import schema
from tests import asserts, cases
from tests.native import compiler
from tests.native.every_call import every_call
from tests.native.runner import PRODUCTS, Native, on_cpu, product

ROOT = Path(__file__).resolve().parents[2]
COUNT = len(SLOTS["grouped_matmul"])
"""Operands of a grouped product."""


def forward(p: cases.Problem, **options) -> calls.Call:
    specs = spec_of(p.x), spec_of(p.w), (1, 1), spec_of(p.group_sizes)
    return calls.grouped_matmul(*specs, p.x.dtype.name, recipe=BF16, **options)


class Elsewhere:
    """An array in the memory of the host that calls itself one of a GPU."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer(capsule, b"dltensor")  # {void* data; int32_t device_type, device_id; ...}
        (ctypes.c_int32 * 2).from_address(address + ctypes.sizeof(ctypes.c_void_p))[:] = 2, self.device
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device


def no_workspace(count: int) -> None:
    pytest.fail(f"asked for {count} bytes of workspace")


def fused(p: cases.Problem) -> calls.Call:
    """A call that has a workspace on the CPU: the rows between its two parts."""
    specs = spec_of(p.x), spec_of(p.w), 1, spec_of(p.group_sizes), p.x.dtype.name
    return calls.grouped_matmul_act(*specs, activation=Activation("relu"), recipe=BF16, hidden=False)


class TestLists:
    def test_the_schema_is_that_of_the_headers(self):
        """`_schema.py` is up to date: names, words and defaults, in order."""
        for kept, native in ((_schema.TYPES, _native.types()), (_schema.CALLS, _native.schema())):
            assert repr(kept) == repr(native), "the schema is outdated; run `make stub`"

    @pytest.mark.parametrize("name", SLOTS)
    def test_calls_are_as_their_schema_says(self, name):
        """Shapes with equal letters, dtypes, presence and parameters of the calls that Python makes."""
        known = schema(name)
        examples = [call for size in ((3, 20, 24, 40), (2, 9, 130, 129)) for call in every_call(*size)]
        found = [call for call in examples if call.name == name]
        assert found
        for call in found:
            specs: tuple[dict[str, Any], ...] = (
                dict(zip(known.inputs, call.inputs, strict=True)),
                dict(zip(known.outputs, call.outputs, strict=True)),
            )
            lengths: dict[str, int] = {}
            for slots, own in zip((known.inputs, known.outputs), specs, strict=True):
                for slot in slots.values():
                    spec = own[slot.name]
                    if slot.beside:
                        assert (spec is None) == (specs[0][slot.beside] is None)
                    if spec is None:
                        assert slot.optional, (call, slot)
                        continue
                    if slot.like:
                        assert spec == specs[slot.like in specs[1]][slot.like], (call, slot)
                        continue
                    dtypes = slot.dtypes or (specs[0][slot.type_of].dtype,)
                    assert spec.dtype in dtypes, (call, slot)
                    fitting = [dims for dims in slot.shapes if len(dims) == len(spec.shape)]
                    assert fitting or not slot.shapes, (call, slot)
                    for dim, length in zip(*fitting, spec.shape, strict=True) if fitting else ():
                        same = (
                            int(dim)
                            if dim.isdecimal()
                            else lengths.setdefault(dim, length)
                            if dim.isalpha()
                            else length
                        )
                        assert same == length, (call, slot)
            params = dict(call.params)
            assert list(params) == [param for param in known.params if param in params]
            assert all(type(value) is type(known.params[param]) for param, value in params.items())

    def test_what_a_call_does_not_have_is_refused(self):
        rows, sizes = calls.ArraySpec((4, 8), "float32"), calls.ArraySpec((2,), "int32")
        operands = {"rows": rows, "group_sizes": sizes}
        for given in (({**operands, "bias": rows}, "float32"), (operands, {"sum": "float32"})):
            with pytest.raises(KeyError, match=r"group_sum has no (operands|results) \['(bias|sum)'\]"):
                calls.new_call("group_sum", *given)
        with pytest.raises(KeyError, match=r"group_sum has no parameters \['rate'\]"):
            calls.new_call("group_sum", operands, "float32", {"rate": 1})
        with pytest.raises(KeyError, match="`result` has several dtypes"):
            calls.new_call("group_sum", operands)
        with pytest.raises(KeyError, match="`result` has no single shape"):
            calls.new_call("grouped_matmul", {"group_sizes": sizes}, "float32")

    def test_required_slots_are_given_and_optional_ones_may_be_absent(self):
        required = [name for name, slot in schema("grouped_matmul").inputs.items() if not slot.optional]
        assert required == ["lhs", "rhs", "group_sizes"]

    def test_every_format_has_an_element_type(self):
        names = _native.dtypes()
        assert set(PLAIN) | set(WIDE) | {"int32", "int64"} <= set(names)
        for name in names:
            assert cases.numpy_dtype(name).name == name

    def test_every_call_has_a_kernel_and_one_handler_per_platform(self):
        assert set(_native.kernels()) == set(SLOTS)
        assert all(_native.kernels().values())
        targets = {f"jg_{name}_v1" for name in SLOTS}
        handlers = _native.handlers()
        assert set(handlers) == ({"cpu", "CUDA"} if _native.cuda_compiled else {"cpu"})
        for platform, found in handlers.items():
            assert set(found) == targets, platform

    def test_kernel_names_are_unique(self):
        names = [name for names in _native.kernels().values() for name in names]
        assert len(names) == len(set(names))

    def test_the_isa_is_one_that_has_a_pinned_kernel_or_is_the_best(self):
        assert _native.cpu_isa() in ("plain", "avx2", "avx512", "avx512bf16", "neonbf16")


class TestVersions:
    def test_ffi_api_is_one_that_every_supported_runtime_takes(self):
        assert tuple(_native.ffi_api_version) == (0, 3)

    def test_ffi_api_is_not_newer_than_the_installed_runtime(self):
        import re

        import jax

        text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
        minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", text)
        assert minor is not None
        assert _native.ffi_api_version[1] <= int(minor[1])

    def test_the_stub_is_up_to_date(self, tmp_path):
        import sys

        made = tmp_path / "_native.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "--exclude-values", "-m", "grouped_core._native"]
        command += ["-o", str(made), "-q"]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=60)
        kept = (ROOT / "grouped_core" / "_native.pyi").read_text()
        assert kept == made.read_text(), f"the stub is outdated; make it again: {' '.join(command[1:])}"


def test_sources_are_named_as_the_project_names_them():
    """Messages about broken invariants show no path of the machine that built the module, which does not hold one."""
    module = Path(_native.__file__).read_bytes()
    if b".debug_info" in module:
        pytest.skip("a build with debug information names its sources")
    assert str(ROOT).encode() not in module
    folders = "|".join(sorted(path.name for path in (ROOT / "cc").iterdir()))
    found = set(re.findall(rf"[\w./-]*\bcc/(?:{folders})/(?:\w+/)*\w+\.\w+".encode(), module))
    assert b"cc/api/schema.cc" in found
    assert not [path for path in found if not path.startswith(b"cc/")]


@pytest.mark.rule("ERR-6")
def test_programs_without_groups_end_in_an_error_of_xla():
    """A serialised program, which Python does not check: its handler returns an error, and accepts the next call."""
    import jax
    import jax.numpy as jnp

    importlib.import_module("jax_grouped")  # registers the handlers

    def scaled(rows, sizes):
        results = (jax.ShapeDtypeStruct(rows.shape, jnp.float32), jax.ShapeDtypeStruct((0,), jnp.uint8))
        attributes = {"operands": np.int64(7), "results": np.int64(1), "arch": "cpu", "implementation": ""}
        return jax.ffi.ffi_call("jg_scale_rows_v1", results)(rows, rows[:, 0], sizes, **attributes)[0]

    rows = jnp.full((4, 3), 2.0)
    with jax.default_device(jax.devices("cpu")[0]):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"jg_scale_rows_v1: `group_sizes`: int32\[0\], expected 1"
        ):
            jax.jit(scaled)(rows, jnp.zeros(0, jnp.int32)).block_until_ready()
        asserts.filled(np.asarray(jax.jit(scaled)(rows, jnp.array([4], jnp.int32))), 4.0)


class TestSameThing:
    """Addresses and DLPack arrays reach the same kernel with the same operands."""

    @pytest.mark.parametrize("which", PRODUCTS)
    @pytest.mark.parametrize("dtype", cases.DTYPES)
    @pytest.mark.parametrize("name", ["tail", "k_n_odd", "groups_65"])
    def test_products(self, which, dtype, name):
        p = cases.problem(cases.named(name), dtype)
        options = {}
        if which == "forward":
            options = {"bias": p.bias, "row_scale": p.row_scale, "scale_bias": True}
        elif which == "wgrad":
            into = cases.normal((p.case.groups, p.case.k, p.case.n), "float32", "into")
            options = {"into": into, "accumulate": True, "result_dtype": "float32"}
        by_address, by_dlpack = (product(Native(dlpack=dlpack), which, p, **options) for dlpack in (False, True))
        asserts.bitwise(by_dlpack, by_address)

    def test_in_place_results_are_the_callers_buffer(self):
        p = cases.problem(cases.named("tail"), "float32")
        out = np.full((p.case.rows, p.case.n), cases.SENTINEL, np.float32)
        call = forward(p, into=spec_of(out))
        inputs = [
            (p.x, "float32"),
            (p.w, "float32"),
            (p.group_sizes, "int32"),
            None,
            None,
            (out, "float32"),
            *[None] * (COUNT - 6),
        ]
        _native.call(call.name, "cpu", "", inputs, [(out, "float32")], dict(call.params), no_workspace, 0)
        asserts.filled(out[p.case.valid :], cases.SENTINEL)
        asserts.bitwise(out[: p.case.valid], product(Native(), "forward", p)[: p.case.valid])

    def test_read_only_inputs_are_taken(self):
        p = cases.problem(cases.named("tail"), "float32")
        p.x.flags.writeable = False
        product(Native(dlpack=True), "forward", p)


class TestRefusals:
    P = cases.problem(cases.named("tail"), "float32")

    def pieces(self):
        p = self.P
        call = forward(p)
        inputs: list[Any] = [(p.x, "float32"), (p.w, "float32"), (p.group_sizes, "int32"), *[None] * (COUNT - 3)]
        outputs = [(np.empty((p.case.rows, p.case.n), np.float32), "float32")]
        return call, inputs, outputs, dict(call.params)

    def run(self, call, inputs, outputs, params):
        _native.call(call.name, "cpu", "", inputs, outputs, params, no_workspace, 0)

    @pytest.mark.parametrize(
        ("slot", "array", "words"),
        [
            (0, (P.x[:, ::2], "float32"), ["grouped_matmul: operand 0", "not C-contiguous"]),
            (0, (P.x, "bfloat16"), ["operand 0", "items of 4 bytes", "expected 2 for bfloat16"]),
            (0, (P.x, "float64"), ["dtype float64 is not known", "expected one of float32, bfloat16"]),
            (0, (P.x.reshape(1, 1, 1, *P.x.shape), "float32"), ["operand 0", "rank 5"]),
            (0, None, ["operand `lhs` is absent"]),
        ],
        ids=["strided", "itemsize", "dtype", "rank", "absent"],
    )
    def test_operands(self, slot, array, words):
        call, inputs, outputs, params = self.pieces()
        inputs[slot] = array
        with asserts.refused(ValueError, words):
            self.run(call, inputs, outputs, params)

    def test_pairs(self):
        call, inputs, outputs, params = self.pieces()
        inputs[0] = (self.P.x,)
        with asserts.refused(TypeError, ["grouped_matmul: operand (array, dtype name) must be a pair or None"]):
            self.run(call, inputs, outputs, params)

    def test_counts(self):
        call, inputs, outputs, params = self.pieces()
        with asserts.refused(ValueError, [f"got {COUNT - 1} operands and 1 results", f"expected {COUNT} and 1"]):
            self.run(call, inputs[:-1], outputs, params)

    def test_parameters(self):
        call, inputs, outputs, params = self.pieces()
        with asserts.refused(ValueError, ["grouped_matmul: an unknown or repeated parameter among", "speed"]):
            self.run(call, inputs, outputs, {**params, "speed": 1})
        with asserts.refused(ValueError, ["parameter `rhs_axis` must be an integer"]):
            self.run(call, inputs, outputs, {**params, "rhs_axis": "1"})
        with asserts.refused(ValueError, ["parameter `fp32_mode` must be a string"]):
            self.run(call, inputs, outputs, {**params, "fp32_mode": 1})

    def test_names(self):
        call, inputs, outputs, params = self.pieces()
        with asserts.refused(ValueError, ['call "matmul" is none', "grouped_matmul"]):
            self.run(dataclasses.replace(call, name="matmul"), inputs, outputs, params)

    def test_addresses(self):
        call, *_ = self.pieces()
        plan = plans.plan(call, "cpu")
        with asserts.refused(ValueError, [f"got 3 addresses, expected {COUNT + 2}"]):
            plan.launch([1, 2, 3], 0)
        with asserts.refused(ValueError, ["the address of `lhs` is null", "grouped_matmul("]):
            plan.launch([0] * (COUNT + 2), 0)

    def test_unshared_buffers(self):
        p = self.P
        out = np.empty((p.case.rows, p.case.n), np.float32)
        other = np.empty_like(out)
        plan = plans.plan(forward(p, into=spec_of(out)), "cpu")
        pointers = [
            p.x.ctypes.data,
            p.w.ctypes.data,
            p.group_sizes.ctypes.data,
            0,
            0,
            out.ctypes.data,
            *[0] * (COUNT - 6),
        ]
        with asserts.refused(ValueError, ["`into` and the result are not the same buffer", "alias them"]):
            plan.launch([*pointers, other.ctypes.data, 0], 0)

    def test_workspaces(self):
        """Their size as it is counts, wherever they start; a byte too few is refused before anything runs."""
        p = self.P
        call = fused(p)
        needed = plans.plan(call, "cpu").workspace_bytes
        assert needed > p.case.rows * p.case.n * 4
        arrays = {"lhs": (p.x, "float32"), "rhs": (p.w, "float32"), "group_sizes": (p.group_sizes, "int32")}
        inputs = [arrays.get(slot) for slot in SLOTS[call.name]]
        out = np.full((p.case.rows, p.case.n), cases.SENTINEL, np.float32)

        def run(workspace: Any) -> None:
            outputs = [(out, "float32"), *[None] * (len(RESULTS[call.name]) - 1)]
            _native.call(call.name, "cpu", "", inputs, outputs, dict(call.params), workspace, 0)

        words = [f"the workspace has {needed - 257} bytes", f"expected {needed} in {call.name}(", "allocate as many"]
        with asserts.refused(ValueError, words):
            run(lambda count: np.empty(count - 257, np.uint8))
        asserts.filled(out, cases.SENTINEL)
        with asserts.refused(ValueError, [call.name, "the workspace", "not an array"]):
            run(lambda count: None)
        with asserts.refused(ValueError, [call.name, "the workspace", "not C-contiguous"]):
            run(lambda count: np.empty(count, np.uint8)[::-1])
        run(lambda count: np.empty(count + 3, np.uint8)[3:])
        asserts.bitwise(out, Native()(call, [None if each is None else each[0] for each in inputs])[0])
        with asserts.refused(ValueError, ["the workspace has 0 bytes", f"expected {needed}"]):
            addresses = [0 if each is None else each[0].ctypes.data for each in inputs]
            plans.plan(call, "cpu").launch([*addresses, out.ctypes.data, *[0] * len(RESULTS[call.name])], 0)

    @pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")
    def test_workspaces_of_another_device(self):
        p = self.P
        call = fused(p)
        arrays = {"lhs": (p.x, "float32"), "rhs": (p.w, "float32"), "group_sizes": (p.group_sizes, "int32")}
        inputs = [(Elsewhere(each[0], 1), each[1]) if (each := arrays.get(slot)) else None for slot in SLOTS[call.name]]
        out = Elsewhere(np.empty((p.case.rows, p.case.n), np.float32), 1)
        outputs = [(out, "float32"), *[None] * (len(RESULTS[call.name]) - 1)]
        with asserts.refused(
            ValueError, [call.name, "the workspace is on device 0", "expected 1", "allocate it there"]
        ):
            _native.call(
                *(call.name, "sm_90a", "", inputs, outputs, dict(call.params)),
                lambda count: Elsewhere(np.empty(count, np.uint8), 0),
                0,
            )

    def test_parts_at_addresses_that_no_kernel_takes(self, tmp_path):
        """Of a part of a call, whose only kernel wants alignment; no kernel for the CPU does."""
        sources = ("tests/native/dispatch_check.cc", "cc/api/schema.cc", "cc/api/archs.cc", "cc/api/words.cc")
        program = compiler.build(tmp_path / "check", sources, ("-Wno-unused-function",))
        ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.splitlines() == [
            "1 launch",
            "only_aligned needs addresses that are multiples of 16 bytes, which that of `rhs` is not; align it, for no "
            "other kernel of grouped_matmul takes this part of the call",
        ]

    @pytest.mark.rule("ERR-3")
    def test_a_call_that_no_kernel_takes(self):
        call, inputs, outputs, params = self.pieces()
        with pytest.raises(RuntimeError, match="no kernel takes grouped_matmul"):
            _native.call(call.name, "cpu", "no_such_kernel", inputs, outputs, params, no_workspace, 0)


DIGEST = """
import hashlib, os
os.sched_setaffinity(0, {cpus})
import numpy as np
from grouped_core.arrays import grouped_linear, grouped_linear_grads
from tests import cases
case = cases.Case("threads", (150, 0, 301, 61), 540, 131, 277, frozenset())
digest = hashlib.sha256()
for dtype in cases.DTYPES:
    p = cases.problem(case, dtype)
    options = dict(bias=p.bias, row_scale=p.row_scale)
    digest.update(grouped_linear(p.x, p.w, p.group_sizes, **options).tobytes())
    for grad in grouped_linear_grads(p.x, p.w, p.group_sizes, p.dy, **options):
        digest.update(grad.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.rule("ALL-2")
def test_the_number_of_threads_changes_no_bits(python):
    import os

    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this process may run on one CPU only")
    digests = {python(DIGEST.format(cpus=set(some))) for some in (cpus[:1], cpus[:2], cpus)}
    assert len(digests) == 1


@pytest.mark.rule("ALL-2")
def test_calls_from_several_threads_at_once():
    p = cases.problem(cases.Case("crowd", (90, 40), 140, 64, 96, frozenset()), "bfloat16")
    expected = {which: product(Native(check=False), which, p) for which in PRODUCTS}
    wrong: list[BaseException] = []

    def work(which: str) -> None:
        try:
            for _ in range(20):
                asserts.bitwise(product(Native(check=False), which, p), expected[which], which)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in PRODUCTS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_a_forked_child_computes(python):
    """Its parent's pool has no threads there."""
    python("""
import os
from tests import cases
from tests.native.every_call import every_call
from tests.native.runner import Native, product
p = cases.problem(cases.named("rows_1027"), "bfloat16")
expected = product(Native(check=False), "forward", p).tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if product(Native(check=False), "forward", p).tobytes() == expected else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_children_forked_during_calls_compute(python):
    """What other threads held in the parent, or waited for, is free: new shapes look up the kernels of their parts."""
    python("""
import os, signal, threading
import numpy as np
from grouped_core import _native
NAMES, RESULTS = (list(each) for each in _native.schema()["grouped_matmul_act"][:2])
def arrays(rows):
    x, w = np.ones((rows, 3), np.float32), np.ones((2, 3, 4), np.float32)
    given = [(x, "float32"), (w, "float32"), (np.array([rows // 2] * 2, np.int32), "int32")]
    y = [(np.empty((rows, 2), np.float32), "float32")]
    return given + [None] * (len(NAMES) - 3), y + [None] * (len(RESULTS) - 1)
def call(rows):
    made = arrays(rows)
    _native.call("grouped_matmul_act", "cpu", "", *made, {"kind": "swiglu"}, lambda n: np.empty(n, np.uint8), 0)
call(2)
held = arrays(2)
specs = [[None if each is None else (each[1], each[0].shape) for each in side] for side in held]
plan = _native.plan("grouped_matmul_act", "cpu", "", *specs, {"kind": "swiglu"})
workspace = np.empty(plan.workspace_bytes, np.uint8)
addresses = [0 if each is None else each[0].ctypes.data for side in held for each in side] + [workspace.ctypes.data]
stop = False
def launch():
    while not stop:
        for _ in range(1000):
            plan.launch(addresses, 0)
threads = [threading.Thread(target=launch, daemon=True) for _ in range(2)]
for each in threads:
    each.start()
for at in range(300):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for rows in range(4 + 6 * at, 10 + 6 * at, 2):
            call(rows)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop = True
for each in threads:
    each.join()
""")


def test_float_environment_is_the_callers_own_afterwards():
    """A kernel clears flush-to-zero for itself alone; here it is off before, so it must be off after."""
    product(Native(check=False), "forward", cases.problem(cases.named("uniform"), "float32"))
    assert np.float32(2.0**-140) * np.float32(0.5) == np.float32(2.0**-141)


@pytest.mark.parametrize("call", sorted(SLOTS))
def test_cpu_kernels_exist_for_every_call(call):
    assert on_cpu(call)
