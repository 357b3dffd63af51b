"""Directions of dependencies (docs/architecture.md) and house rules that a text search can keep."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.core.sources import ROOT, name_of, native_files, python_files

PACKAGES = ("grouped_core", "jax_grouped", "torch_bridge")
NEUTRAL = {"numpy", "ml_dtypes", "jaxtyping", "grouped_core"}
MAY_IMPORT = {
    "grouped_core": NEUTRAL,
    "jax_grouped": NEUTRAL | {"jax_grouped", "jax", "jaxlib"},
    "torch_bridge": NEUTRAL | {"torch_bridge", "torch"},
}
"""Top-level modules that a package's files may import, besides the standard library."""
FILES_MAY_IMPORT = {
    "jax_grouped/_checkpoint_trees.py": {"flax"},
    "jax_grouped/_flax_serialization.py": {"flax"},
    "jax_grouped/_orbax.py": {"etils", "orbax"},
    "jax_grouped/nnx.py": {"flax"},
    "jax_grouped/linen.py": {"flax"},
    "jax_grouped/_layer_recipes.py": {"flax"},
    "torch_bridge/integrations/megatron.py": {"megatron"},
    "torch_bridge/integrations/nemo.py": {"nemo_automodel"},
    "torch_bridge/integrations/torchtitan.py": {"spmd_types", "torchtitan"},
    "torch_bridge/integrations/torchtitan_override.py": {"torchtitan"},
    "torch_bridge/integrations/transformers.py": {"transformers"},
}
"""What single files may import besides."""
MAY_USE_NATIVE = {
    "grouped_core/plans.py",
    "grouped_core/arrays.py",
    "jax_grouped/_run.py",
    "torch_bridge/_memory.py",
    "torch_bridge/_record.py",
}
MAY_READ_VARIABLES = {
    "grouped_core/debug.py",
    "jax_grouped/_ragged.py",  # XLA_FLAGS, for a warning
}

MAY_INCLUDE = {
    "api": {"cc/api/"},
    "math": {"cc/math/", "cc/api/tensor.h"},
    "device/common": {"cc/device/common/", "cc/math/", "cc/api/"},
    "device/quantize": {"cc/device/quantize/", "cc/device/common/", "cc/math/", "cc/api/"},
    "device/sm90": {"cc/device/sm90/", "cc/device/common/", "cc/math/", "cc/api/"},
    "cpu": {"cc/cpu/", "cc/math/", "cc/api/"},
    "kernels": {
        "cc/kernels/kernels.h",
        "cc/kernels/grouped_matmul_",  # products that several files instantiate; no other file there is a header
        "cc/dispatch/tiles_",
        "cc/dispatch/columns.h",
        "cc/device/",
        "cc/cpu/",
        "cc/math/",
        "cc/api/",
    },
    "dispatch": {"cc/dispatch/", "cc/kernels/kernels.h", "cc/math/", "cc/api/"},
    "bind": {"cc/bind/", "cc/dispatch/", "cc/api/", "cc/device/common/driver.h", "cc/cpu/parallel.h", "cc/cpu/panel.h"},
}
"""Our own headers by folder of cc/, as prefixes. Kernels ask for their tile and for the columns of a
product, which is arithmetic, and one kernel is compiled in parts. cc/bind takes the pool, the name of the instruction
set, and what asks the driver for functions."""
FRAMEWORK_HEADERS = ("xla/", "nanobind/", "dlpack", "Python.h", "torch/", "ATen/", "c10/", "jaxlib/", "tensorflow/")
CUDA_HEADERS = ("cuda", "device_", "vector_", "cooperative_groups", "mma.h", "cooperative")


@cache
def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def test_the_search_sees_files():
    assert len(python_files(*PACKAGES)) > 8
    assert len(native_files()) > 15
    assert "grouped_core.calls.ArraySpec" in imports(ROOT / "grouped_core" / "plans.py")
    assert "cc/api/tensor.h" in includes(ROOT / "cc" / "api" / "calls.h")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards(package):
    for path in python_files(package):
        allowed = MAY_IMPORT[package] | FILES_MAY_IMPORT.get(name_of(path), set())
        foreign = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names) - allowed
        assert not foreign, f"{name_of(path)} imports {sorted(foreign)}, expected only {sorted(allowed)}"


def imported_files(package: str) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports, inside of functions too."""
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in python_files(package)
    }
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for imported in imports(path):
            while imported and imported not in files:
                imported = imported.rpartition(".")[0]
            if imported not in ("", package, name):  # the package itself offers names to others
                found[name].add(imported)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other(package):
    """Directly or by others: a file can be read with nothing but those below it in mind."""
    left = imported_files(package)
    assert sum(map(len, left.values())) > len(left) / 2
    while free := [name for name, below in left.items() if not below & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"{sorted(left)} import each other, or files that do"


def test_the_native_module_is_used_in_few_places():
    users = {
        name_of(path) for path in python_files(*PACKAGES) if any("grouped_core._native" in m for m in imports(path))
    }
    assert users <= MAY_USE_NATIVE, f"{sorted(users - MAY_USE_NATIVE)} use _native past `plans` and the runners"


@pytest.mark.rule("MLM #7495", "MLM #4636")
@pytest.mark.rule("ERR-4")
def test_variables_are_read_in_one_place_and_never_in_native_code():
    for path in python_files(*PACKAGES):
        text = path.read_text()
        if name_of(path) not in MAY_READ_VARIABLES:
            assert not re.search(r"\bos\.environ|\bgetenv\b", text), f"{name_of(path)} reads environment variables"
    for path in native_files():
        assert "getenv" not in path.read_text(), f"{name_of(path)} reads environment variables"


def test_whether_a_graph_is_made_is_asked_in_one_place():
    """PyTorch's own question has another answer in older releases, inside of nodes."""
    asking = {name_of(path) for path in python_files("torch_bridge") if "compiler.is_compiling" in path.read_text()}
    assert asking == {"torch_bridge/_compiling.py"}


def test_benchmarks_and_examples_share_only_the_cases():
    for folder, allowed in (("benchmarks", {"tests.cases"}), ("examples", set())):
        for path in python_files(folder):
            mine = {m for m in imports(path) if m.split(".")[0] in ("tests", "benchmarks", "examples")}
            bad = {m for m in mine if not m.startswith((*allowed, folder))}
            assert not bad, f"{name_of(path)} imports {sorted(bad)}"
    for path in python_files("tests"):
        bad = {m for m in imports(path) if m.split(".")[0] in ("benchmarks", "examples")}
        assert not bad, f"{name_of(path)} imports {sorted(bad)}"


def test_tests_import_no_other_tests():
    """What several of them use is in a module without tests."""
    for path in python_files("tests"):
        bad = {m for m in imports(path) if re.match(r"tests(\.\w+)*\.test_\w+", m)}
        assert not bad, f"{name_of(path)} imports {sorted(bad)}"


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_native_code_includes_downwards(folder):
    for path in sorted((ROOT / "cc" / folder).iterdir()):
        own = [header for header in includes(path) if header.startswith("cc/")]
        bad = [header for header in own if not header.startswith(tuple(MAY_INCLUDE[folder]))]
        assert not bad, f"{name_of(path)} includes {bad}, expected only {sorted(MAY_INCLUDE[folder])}"


def test_folders_of_native_code_are_known():
    folders = {path.parent.relative_to(ROOT / "cc").as_posix() for path in native_files()}
    assert folders == set(MAY_INCLUDE)


def test_frameworks_end_at_the_bindings():
    for path in native_files():
        headers = includes(path)
        if path.parent.name != "bind":
            bad = [header for header in headers if header.startswith(FRAMEWORK_HEADERS)]
            assert not bad, f"{name_of(path)} includes {bad}"
        assert not [h for h in headers if h.startswith(("torch/", "ATen/", "c10/"))], f"{name_of(path)}: torch headers"


def test_cuda_ends_at_its_own_files():
    """What the CPU build compiles needs no toolkit: cc/api, cc/cpu, cc/dispatch and every .cc of cc/kernels."""
    for path in native_files():
        if path.parent.name in ("api", "cpu", "dispatch") or (
            name_of(path).startswith("cc/kernels/") and path.suffix == ".cc"
        ):
            bad = [header for header in includes(path) if header.startswith(CUDA_HEADERS)]
            assert not bad, f"{name_of(path)} includes {bad}"


def test_kernels_are_named_after_their_files():
    """<call>_<format>[_<part>]_<arch>: file, registered name, test id and benchmark label are one string.

    Kernels that compose others are all in cc/dispatch, whose compose.h, widen.h and quantized.h list them by name. A
    file that holds several small kernels for one purpose has a name of the same form, which ends as theirs do.
    """
    from grouped_core import _native

    files = [path for path in (ROOT / "cc" / "kernels").iterdir() if path.suffix in (".cc", ".cu")]
    stems = {path.stem for path in files}
    for path in files:
        held = re.findall(r'= \{\s*"(\w+)",', path.read_text())
        stems |= {name for name in held if name.split("_")[-2:] == path.stem.split("_")[-2:]}
    for header in ("compose.h", "widen.h", "quantized.h"):
        stems |= set(re.findall(r"> (\w+);", (ROOT / "cc" / "dispatch" / header).read_text()))
    for call, names in _native.kernels().items():
        for name in names:
            assert name.startswith(f"{call}_"), f"{name} is listed under {call}"
            assert any(name == stem or name.startswith(f"{stem}_") for stem in stems), f"{name} has no file"


def test_names_of_kernels_say_what_their_fields_say():
    """Dispatch reads the fields alone; people, tests and benchmarks read the names."""
    row = re.compile(r'const Kernel<\w+> \w+ = \{\s*"(\w+)",\s*Arch::(\w+),\s*Kind::(\w+),')
    rows = [found for path in native_files() for found in row.findall(path.read_text())]
    assert len(rows) > 80
    for name, arch, kind in rows:
        assert re.search(rf"_{arch}(_|$)", name), f"{name} is made for {arch}"
        assert ("_any_" in name) == (kind == "reference"), f"{name} is of the kind {kind}"


@pytest.mark.parametrize("folder", [*PACKAGES, "cc", "tests", "benchmarks", "examples"])
def test_what_is_left_to_do_has_an_issue(folder):
    word = "TO" + "DO"
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".pyi", ".h", ".cc", ".cu", ".cuh"):
            bad = re.findall(rf"{word}(?!\(#\d+\)).*", path.read_text())
            assert not bad, f"{name_of(path)}: {bad[0]!r} names no issue; write {word}(#number)"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_export_by_name(package):
    assert (ROOT / package / "py.typed").exists()
    init = ROOT / package / "__init__.py"
    assert init.exists()
    # Recipes are listed once, in `__all__` of their own module.
    assert "import *" not in init.read_text().replace("from grouped_core.recipes import *", "")


@pytest.mark.parametrize(
    "modules",
    [
        {
            "grouped_core": ("jax", "torch"),
            "grouped_core.arrays": ("jax", "torch", "cupy"),
            "jax_grouped": ("torch", "flax"),
        },
        {
            "torch_bridge": ("jax", "flax", "transformers", "torch_bridge.integrations"),
            "torch_bridge.integrations.transformers": ("transformers",),
        },
    ],
    ids=lambda modules: next(iter(modules)),
)
def test_a_package_imports_without_the_other_framework_and_without_a_driver(python, modules):
    """Modules are imported one after the other; what each must not load is looked for before the next."""
    program = f"""
import importlib, sys
for module, absent in {modules!r}.items():
    importlib.import_module(module)
    loaded = [name for name in absent if name in sys.modules]
    assert not loaded, f"importing {{module}} loads {{loaded}}"
"""
    if "grouped_core" in modules:
        program += """
import grouped_core._native
assert "libcuda.so" not in open("/proc/self/maps").read(), "the driver was loaded"
"""
    python(program)


@pytest.mark.rule("GRP-3")
def test_host_reads_of_sizes_are_not_written_in_the_packages():
    for path in python_files("jax_grouped", "torch_bridge"):
        text = path.read_text()
        bad = re.findall(r"\b(?:group_)?sizes(?:\.value)?\.(?:item|tolist|cpu|numpy)\(", text)
        assert not bad, f"{name_of(path)} reads group sizes on the host: {bad}"
