"""Strictness, options and fixtures of the whole suite."""

from __future__ import annotations

import os

# Before any test module imports JAX: eight host devices, and no implicit promotion of ranks or dtypes. Variables, so
# that tests of the core do not import JAX and subprocesses inherit the settings.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.pop("GROUPED_DEBUG", None)  # of whoever runs the tests: it adds checks
# Dynamo collects garbage after each graph, which takes 10 to 50 ms of .2 to 2 s; Python itself does so later.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes of xdist and PyTorch share a GPU
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores already: threads of PyTorch and NumPy would wait for each other in loops. Kernels of this
    # project have threads of their own.
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import ctypes
import gc
import inspect
import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests import cases, eager_jax

ROOT = Path(__file__).resolve().parent.parent
Draw = Callable[[Mapping[str, Sequence[Any]], "Callable[..., bool] | None"], list[tuple[Any, ...]]]
QUICK_OPTIONS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Options of XLA in jaxlib 0.10, which ends a process with an option that it does not know."""
COLLECTED_AFTER = (50_000, 20, 50)
"""Thresholds of Python's garbage collector: traces and graphs are a million living objects that it looks at in vain."""
RANK_TESTS = ("test_torch_parallel.py", "test_torch_expert_parallel.py")
"""Files whose tests wait for programs of several ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jax-grouped")
    group.addoption("--full", action="store_true", help="run whole products of options instead of every pair of values")
    group.addoption("--random", metavar="SEED", help="draw the matrices at random, half as much again as every pair")
    group.addoption("--soak", action="store_true", help="long random draws in tests/soak")


def quick_compilation() -> str:
    """Options of XLA, except with --full: MLIR and LLVM do as little as they can; programs for a GPU keep level 1.

    A program for the CPU is one LLVM module instead of up to 32 small ones.
    """
    if _gpu_missing() is None:
        return "--xla_backend_optimization_level=1"
    options = f" {QUICK_OPTIONS}" if version("jaxlib").startswith("0.10.") else ""
    return f"--xla_backend_optimization_level=0{options}"


def pytest_configure(config: pytest.Config) -> None:
    # Else each subprocess would compile the modules of the packages again, which takes two seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not config.getoption("--full"):
        # Before JAX is imported, and for subprocesses: MLIR and LLVM take most of the time that XLA's programs for the
        # CPU have here. Passes over HLO are the same; that no bits come from FMA, which LLVM makes only at a higher
        # level, is a test of its own (test_jax_moe.py).
        os.environ["XLA_FLAGS"] += f" {quick_compilation()}"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # One cache of compiled programs for this run, its workers, which inherit the variables, and all subprocesses.
        folder = tempfile.TemporaryDirectory(prefix="jax-grouped-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if "PYTEST_XDIST_WORKER" in os.environ:
        _report_less(config)
    config.addinivalue_line(
        "markers",
        "matrix(valid=None, apart=(), few=None, **options): one run for each pair of option values, but for pairs of "
        "options in `apart`, or for the rows `few`, where a run takes seconds; for each combination with --full",
    )


def _report_less(config: pytest.Config) -> None:
    """Of a test that passes, a worker of xdist reports only the call, not its setup and teardown.

    A report takes about .5 ms of the worker and .2 ms of the process that collects them, and there are 18 000 tests.
    """
    worker: Any = next(each for each in config.pluginmanager.get_plugins() if type(each).__name__ == "WorkerInteractor")
    report_all = worker.pytest_runtest_logreport

    @pytest.hookimpl
    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            report_all(report=report)

    config.pluginmanager.unregister(worker)
    worker.pytest_runtest_logreport = pytest_runtest_logreport
    config.pluginmanager.register(worker)


def measure_no_guards() -> None:
    """Keeps Dynamo, where it is imported, from measuring guards, for this process and those that it forks.

    For its log alone Dynamo measures how long the guards of each graph take when no cache of the processor holds them;
    that costs 20 ms per graph, mostly for memory that is written to empty these caches, and no setting of Dynamo turns
    it off. test_torch_recipes_compile.py alone has 240 graphs.
    """
    if hasattr(guards := sys.modules.get("torch._dynamo.guards"), "profile_guard_manager"):
        setattr(guards, "profile_guard_manager", lambda *_: 0.0)  # noqa: B010


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Collects without Python's garbage collector, which would look at a million living objects again and again.

    What lives after that, modules and the tests themselves, is not looked at while the tests run either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECTED_AFTER)
        gc.enable()
        measure_no_guards()
        # For each program JAX registers the dialects of MLIR in a context of its own, which takes 6 ms, a tenth of what
        # the tests of parity take. Tests lower thousands of small programs, for which one context does.
        if hasattr(mlir := sys.modules.get("jax._src.interpreters.mlir"), "make_ir_context"):
            setattr(mlir, "make_ir_context", cache(mlir.make_ir_context))  # noqa: B010
        if "jax" in sys.modules and not session.config.getoption("--full"):
            eager_jax.share_programs()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws the combinations of `@pytest.mark.matrix(name=values, ...)`, whose names are arguments of the test."""
    for mark in metafunc.definition.iter_markers("matrix"):
        options = dict(mark.kwargs)
        valid, few, apart = options.pop("valid", None), options.pop("few", None), options.pop("apart", ())
        draw = cases.product if metafunc.config.getoption("--full") else partial(cases.pairwise, apart=apart)
        if (seed := metafunc.config.getoption("--random")) is not None:
            draw = partial(cases.drawn, f"{seed} {metafunc.function.__name__}")
        names = sorted(options, key="kernel".__eq__)  # last, as in the rows
        if _gpu_missing() and _for_gpu_alone(metafunc.definition, options):
            # For a GPU that is not there one test takes the place of all rows, and its mark deselects it.
            metafunc.parametrize(",".join(names), [pytest.param(*[None] * len(names), marks=pytest.mark.gpu, id="gpu")])
            continue
        if "kernel" in options:
            options["kernel"] = [kernel for kernel in options["kernel"] if not _left_out(kernel)]
        if few is None or metafunc.config.getoption("--full") or seed is not None:
            rows = matrix_rows(draw, options, valid)
        else:
            rows = [_param(options, row) for row in few]
        assert rows, f"the matrix of {metafunc.function.__name__} is empty"
        metafunc.parametrize(",".join(names), rows)


def _has_mark(value: object, name: str) -> bool:
    """Whether a value of an option is a parameter with a mark."""
    return any(mark.name == name for mark in getattr(value, "marks", ()))


def _left_out(kernel: object) -> bool:
    """Whether this machine has no GPU for a kernel, or lacks its instructions."""
    return _has_mark(kernel, "wider") or (_gpu_missing() is not None and _has_mark(kernel, "gpu"))


def _for_gpu_alone(test: pytest.Item, options: Mapping[str, Sequence[Any]]) -> bool:
    """Whether no row of a matrix can run without a GPU."""
    kernels = options.get("kernel", ())
    return test.get_closest_marker("gpu") is not None or (
        len(kernels) > 0 and all(_has_mark(kernel, "gpu") for kernel in kernels)
    )


def matrix_rows(draw: Draw, options: Mapping[str, Sequence[Any]], valid: Callable[..., bool] | None) -> list[Any]:
    """The rows of a matrix, as parameters of a test.

    `kernel` is an option like others as far as kernels for the CPU go, which are one source compiled for several
    instruction sets. A kernel for a GPU, which has a mark, meets every pair of the other options.
    """
    if "kernel" not in options:
        return [_param(options, row) for row in draw(options, valid)]
    others = {name: values for name, values in options.items() if name != "kernel"}
    told = valid is not None and "kernel" in inspect.signature(valid).parameters
    marked = [kernel for kernel in options["kernel"] if not isinstance(kernel, str)]
    shared = {**others, "kernel": [kernel for kernel in options["kernel"] if isinstance(kernel, str)]}
    rows = [_param(shared, row) for row in draw(shared, valid)]
    alone = draw(others, valid) if marked and not told else []
    for kernel in marked:
        own = draw({**others, "kernel": kernel.values}, valid) if told else [(*row, *kernel.values) for row in alone]
        rows += [_param(shared, row, kernel.marks) for row in own]
    return rows


def _param(options: Iterable[str], row: Sequence[Any], marks: Collection[Any] = ()) -> Any:
    label = "-".join(_label(name, value) for name, value in zip(options, row, strict=True))
    return pytest.param(*row, marks=marks, id=label)


def _label(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, tuple) and all(isinstance(part, bool) for part in value):
        return name + "".join("01"[part] for part in value)
    if isinstance(value, tuple) and all(part is None or isinstance(part, str | int) for part in value):
        return "_".join(map(str, value))
    if isinstance(value, str | int | cases.Case):
        return str(value)
    return (
        getattr(value, "name", None)
        or getattr(value, "__name__", None)
        or (name if value is not None else f"no_{name}")
    )


@cache
def _gpu_missing() -> str | None:
    """Why there is no GPU to test on, asked of the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver reports error {code}"
    return None if count.value else "the NVIDIA driver sees no device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {mark for mark, reason in _reasons(config).items() if reason}
    marked = [item for item in items if any(mark.name in left_out for mark in item.iter_markers())]
    if marked:
        config.hook.pytest_deselected(items=marked)
        kept = set(items).difference(marked)
        items[:] = [item for item in items if item in kept]
    # They wait for minutes for processes of their own: the first worker of xdist waits while others run the rest.
    items.sort(key=lambda item: item.path.name not in RANK_TESTS)


def _reasons(config: pytest.Config) -> dict[str, str | None]:
    """Why tests with a mark are left out."""
    return {
        "gpu": _gpu_missing(),
        "wider": "they are of kernels whose instructions this CPU lacks",  # tests/native/runner.py marks only these
        "slow": None if config.getoption("--full") else "they run with --full (`make test-full`)",
    }


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says which tests are left out, and why."""
    return [f"tests with the mark {mark} are left out: {reason}" for mark, reason in _reasons(config).items() if reason]


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that the library logs from now on."""
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("grouped_core"), Kept(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """True in a long run."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def python(tmp_path: Path):
    """Runs a program in a fresh interpreter, outside this one's imports; returns its output, fails with its errors."""
    import subprocess

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,  # seconds; two framework imports on a busy machine take a while
        )
        assert done.returncode == 0, f"the program failed with {done.returncode}:\n{done.stderr}"
        return done.stdout

    return run
