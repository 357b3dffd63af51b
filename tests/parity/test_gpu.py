"""Both frontends on a GPU: the same bits as each other, within bounds of the oracle, and usable in CUDA graphs."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from grouped_core import arrays
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.recipes import plain
from tests import asserts, bounds, cases
from tests.parity.adapters import JAX, TORCH, to_torch
from tests.torch_frontend.gpu_tools import REPLAYED, ROWS, TEMPORARY_BYTES, captured, launches_only, temporary_bytes

pytestmark = [
    pytest.mark.gpu,
    # torch's own words: capture runs on a stream of its own, and the mode that finds synchronisation is a prototype.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
]

CASES = [
    cases.named(name)
    for name in ("tail", "jagged", "clamped", "negative", "k_n_odd", "groups_65", "all_empty", "k_2880")
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(jax.devices("cuda")[0]))
        stack.enter_context(torch.device("cuda"))
        yield


def operands(p: cases.Problem, bias: bool, row_scale: bool) -> dict[str, Any]:
    held = {"bias": p.bias if bias else None, "row_scale": p.row_scale if row_scale else None}
    return {"x": p.x, "w": p.w, "group_sizes": p.group_sizes, **held}


@pytest.mark.rule("ALL-1", "ALL-2", "GRP-4", "GRP-5", "GRP-6", "MAT-1", "MAT-9")
@pytest.mark.matrix(
    case=CASES,
    dtype=cases.DTYPES,
    transposed=(False, True),
    bias=(False, True),
    row_scale=(False, True),
    scale_bias=(False, True),
    valid=lambda bias, row_scale, scale_bias, **_: not scale_bias or (bias and row_scale),
)
def test_both_frontends_give_the_same_bits_within_the_bounds(case, dtype, transposed, bias, row_scale, scale_bias):
    p = cases.problem(case, dtype, transposed=transposed)
    given = operands(p, bias, row_scale)
    needs = Needs(bias=bias, row_scale=row_scale)
    options = {"transposed": transposed, "scale_bias": scale_bias}
    y, y_jax = TORCH.forward(given, **options), JAX.forward(given, **options)
    asserts.bitwise(y_jax, y, "y of jax")
    asserts.bitwise(TORCH.forward(given, **options), y, "y again")
    found, found_jax = (frontend.gradients(given, p.dy, needs, **options) for frontend in (TORCH, JAX))
    op = Linear(Names("x", "w"), transposed=transposed, scale_bias=scale_bias)
    held = (given["x"], given["w"], given["group_sizes"], given["bias"], given["row_scale"])
    kernels = dict.fromkeys(("group_sum", "row_dot", "scale_rows"), "on_a_gpu_cuda")
    kernels["grouped_matmul"] = "on_a_gpu_sm90"
    asserts.within(y, bounds.expect_linear(op, *held, kernels=kernels), "y")
    expected = bounds.expect_linear_grads(op, *held, p.dy, needs, kernels=kernels)
    for name, need, a, b, wanted in zip(needs._fields, needs, found, found_jax, expected, strict=True):
        if need:
            asserts.bitwise(b, a, f"gradient of {name} from jax")
            asserts.within(a, wanted, f"gradient of {name}")


@pytest.mark.rule("MAT-3", "MAT-7")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_lists_of_weights_and_odd_addresses_give_the_same_results(dtype, offset):
    """Weights one element off a 16-byte boundary go to another kernel, with the same bounds."""
    p = cases.problem(cases.named("tail"), dtype, transposed=True)
    x, sizes, w = to_torch(p.x), to_torch(p.group_sizes), to_torch(p.w)
    members = []
    for member in w:
        memory = torch.empty(member.numel() + 16, dtype=member.dtype)
        members.append(memory[offset : offset + member.numel()].view(member.shape).copy_(member).requires_grad_())
    y = torch_bridge.grouped_linear(x, members, sizes)
    op = Linear(Names("x", "w"), transposed=True)
    kernels = {"grouped_matmul": "on_a_gpu_cuda"}
    asserts.within(y, bounds.expect_linear(op, p.x, p.w, p.group_sizes, kernels=kernels), "y")
    y.backward(to_torch(p.dy))
    expected = bounds.expect_linear_grads(
        op, p.x, p.w, p.group_sizes, None, None, p.dy, Needs(False, True, False, False), kernels=kernels
    )
    asserts.within(torch.stack([member.grad for member in members]), expected.w, "dw")
    shifted = torch.empty(w.numel() + 16, dtype=w.dtype)[offset : offset + w.numel()].view(w.shape).copy_(w)
    asserts.within(
        torch_bridge.grouped_linear(x, shifted, sizes),
        bounds.expect_linear(op, p.x, p.w, p.group_sizes, kernels=kernels),
        "y of one packed weight",
    )


class Step:
    """A forward and backward of the linear operation on static buffers, tail rows poisoned."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.x = normal(ROWS, 256).requires_grad_()
        self.w = normal(4, 320, 256).requires_grad_()
        self.bias = normal(4, 320).requires_grad_()
        self.scale = torch.rand(ROWS, generator=generator).requires_grad_()
        self.dy = normal(ROWS, 320)
        self.sizes = torch.zeros(4, dtype=torch.int32)
        self.clean = [t.detach().clone() for t in (self.x, self.dy)]

    def load(self, sizes: tuple[int, ...]) -> None:
        valid = min(ROWS, sum(max(size, 0) for size in sizes))
        for tensor, clean in zip((self.x, self.dy), self.clean, strict=True):
            tensor.data.copy_(clean)
            tensor.data[valid:] = float("nan")
        self.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))

    def run(self) -> list[torch.Tensor]:
        y = torch_bridge.grouped_linear(self.x, self.w, self.sizes, bias=self.bias, row_scale=self.scale)
        return [y, *torch.autograd.grad(y, (self.x, self.w, self.bias, self.scale), self.dy)]


@pytest.mark.rule("TE #3171", "DeepGEMM #444")
@pytest.mark.rule("CAP-1", "CAP-2", "CAP-3", "GRP-3", "GRP-5")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_captured_graph_replays_with_other_sizes(dtype):
    """One graph, nine size vectors, twice each, bitwise equal to eager calls; the stream is not the default one."""
    step = Step(dtype)
    step.load(REPLAYED[0])
    graph, results = captured(step.run)
    for sizes in REPLAYED:
        step.load(sizes)
        eager = [t.clone() for t in step.run()]
        for _ in range(2):
            for tensor in results:
                tensor.fill_(float("nan"))
            graph.replay()
            for name, a, b in zip(("y", "dx", "dw", "db", "dc"), results, eager, strict=True):
                asserts.bitwise(a, b, f"{name} with sizes {sizes}")


@pytest.mark.rule("CAP-1", "GRP-3")
def test_calls_neither_synchronise_nor_copy_nor_allocate():
    step = Step(torch.bfloat16)
    step.load(REPLAYED[3])
    launches_only(step.run)


@pytest.mark.rule("CAP-5", "CAP-6")
@pytest.mark.parametrize("flags", ["", "--xla_gpu_graph_min_graph_size=1", "--xla_gpu_enable_command_buffer="])
def test_jax_results_do_not_depend_on_command_buffers(python, flags):
    """The same bits without XLA's graphs, with default flags, and for single calls; sizes change between runs."""
    program = """
import jax, jax.numpy as jnp, numpy as np, hashlib
import jax_grouped
x = jax.random.normal(jax.random.key(0), (1024, 256), jnp.bfloat16)
w = jax.random.normal(jax.random.key(1), (4, 256, 320), jnp.bfloat16)
v = jax.random.normal(jax.random.key(2), (4, 320, 256), jnp.bfloat16)
@jax.jit
def step(x, w, v, sizes):
    def loss(x, w, v):
        return (jax_grouped.ragged_dot(jax_grouped.ragged_dot(x, w, sizes), v, sizes).astype(jnp.float32) ** 2).sum()
    return jax.value_and_grad(loss, (0, 1, 2))(x, w, v)
digest = hashlib.sha256()
for sizes in SIZES:
    for _ in range(3):
        out = jax.tree.map(np.asarray, step(x, w, v, jnp.array(sizes, jnp.int32)))
    for leaf in jax.tree.leaves(out):
        digest.update(leaf.tobytes())
print(digest.hexdigest())
""".replace("SIZES", repr([list(sizes) for sizes in REPLAYED]))
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    plain_run = python(program, XLA_FLAGS="", **settings)
    assert python(program, XLA_FLAGS=flags, **settings) == plain_run


@pytest.mark.rule("TE #2048")
@pytest.mark.rule("CAP-5")
def test_xla_puts_the_calls_into_graphs(python):
    """XLA's log names every native call as part of a command buffer, with default flags, and runs it."""
    program = """
import os, subprocess, sys
child = '''
import jax, jax.numpy as jnp, jax_grouped
x = jnp.ones((256, 128), jnp.bfloat16); w = jnp.ones((4, 128, 128), jnp.bfloat16)
s = jnp.full((4,), 64, jnp.int32)
def chain(x, w):
    for _ in range(4):
        x = jax_grouped.ragged_dot(x, w, s)
    return x.astype(jnp.float32).sum()
step = jax.jit(jax.grad(chain, (0, 1))).lower(x, w).compile()
print(step.as_text())
for _ in range(3):
    jax.block_until_ready(step(x, w))
'''
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, env=os.environ)
assert done.returncode == 0, done.stderr[-2000:]
print(done.stdout + done.stderr)
"""
    log = python(
        program,
        XLA_FLAGS="",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        TF_CPP_MIN_LOG_LEVEL="0",
        TF_CPP_VMODULE="command_buffer_conversion_pass=3,command_buffer_thunk=3",
    )
    ours = re.findall(r"%?([\w.\-]+) = [^\n]* custom-call\([^\n]*custom_call_target=\"jg_", log)
    graphs = re.findall(r"Creating command buffer thunk.* with the following thunks: (.*)", log)
    assert ours, "no call of ours in the compiled program"
    outside = [name for name in ours if not any(name in graph.split(", ") for graph in graphs)]
    assert not outside, f"{outside} of {ours} are in no graph; graphs: {graphs}\n{log[-3000:]}"
    assert "Execute command buffer" in log, "graphs were made, but none was launched"


@pytest.mark.rule("TE #2213")
@pytest.mark.rule("GRP-3")
def test_jax_moves_nothing_between_host_and_device():
    """Compiled steps run under a guard that forbids every transfer."""
    x = jax.random.normal(jax.random.key(0), (256, 64), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (4, 64, 128), jnp.bfloat16)
    sizes = jnp.array([100, 0, 27, 90], jnp.int32)

    @jax.jit
    def step(x, w, sizes):
        return jax.grad(lambda x, w: jax_grouped.ragged_dot(x, w, sizes).astype(jnp.float32).sum(), (0, 1))(x, w)

    wanted = step(x, w, sizes)
    with jax.transfer_guard("disallow"):
        found = jax.block_until_ready(step(x, w, sizes))
    for name, a, b in zip(("dx", "dw"), found, wanted, strict=True):
        asserts.bitwise(a, b, name)


@pytest.mark.rule("marin #5394", "marin #6979")
@pytest.mark.rule("MAT-1", "MAT-11")
@pytest.mark.parametrize("transposed", [False, True])
def test_products_take_no_memory_beyond_results(transposed):
    """Operands are far larger than the bound, so a copy or transpose of one would exceed it."""
    rows, groups, k, n = 8192, 16, 1024, 1536
    x = torch.randn(rows, k, dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(groups, *((n, k) if transposed else (k, n)), dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(rows, n, dtype=torch.bfloat16)
    sizes = torch.full((groups,), rows // groups - 3, dtype=torch.int32)
    assert min(x.nbytes, w.nbytes, dy.nbytes) > TEMPORARY_BYTES

    def linear() -> torch.Tensor:
        return torch_bridge.grouped_linear(x, w, sizes, rhs_transposed=transposed)

    y = linear()
    for name, call in (
        ("forward", lambda: (linear(),)),
        ("backward", lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)),
    ):
        taken = temporary_bytes(call)
        assert taken < TEMPORARY_BYTES, f"{name} takes {taken / 2**20:.1f} MiB"

    def product(x, w, sizes):
        return jax_grouped.ragged_dot(x, w, sizes, rhs_transposed=transposed)

    def gradients(x, w, dy, sizes):
        return jax.vjp(lambda x, w: product(x, w, sizes), x, w)[1](dy)

    shapes = [jax.ShapeDtypeStruct(tuple(t.shape), "bfloat16") for t in (x, w, dy)]
    counts = jax.ShapeDtypeStruct((groups,), "int32")
    for function, given in ((product, (*shapes[:2], counts)), (gradients, (*shapes, counts))):
        memory: Any = jax.jit(function).lower(*given).compile().memory_analysis()
        taken = memory.temp_size_in_bytes
        assert taken < TEMPORARY_BYTES, f"{function.__name__} takes {taken / 2**20:.1f} MiB"


def large(rows: int, groups: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    """x, w [G, N, K] and dy on the device, of small integers: their sums are exact in any order."""
    generator = torch.Generator("cuda").manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        values = torch.randint(-2, 3, shape, generator=generator, dtype=torch.int8)
        return values.to(torch.bfloat16).requires_grad_()

    return whole(rows, k), whole(groups, n, k), whole(rows, n).detach()


@pytest.mark.rule("GRP-4", "MAT-7")
@pytest.mark.parametrize(
    ("rows", "groups", "k", "n"),
    [(2**23 + 1000, 3, 264, 16), (2**23 + 1000, 3, 16, 264), (600, 600, 2048, 2048)],
    ids=["x", "y", "weights"],
)
def test_elements_beyond_the_reach_of_32_bits(rows, groups, k, n):
    """The last rows and the last group of tensors of more than 2^31 elements equal a call on these alone."""
    x, w, dy = large(rows, groups, k, n)
    assert max(x.numel(), w.numel(), dy.numel()) > 2**31
    few = 500 if groups == 3 else 1  # rows of the last group
    sizes = torch.full((groups,), (rows - few) // (groups - 1), dtype=torch.int32)
    sizes[-2] += rows - few - int(sizes[:-1].sum())
    sizes[-1] = few
    y = torch_bridge.grouped_linear(x, w, sizes)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    last = [t.detach()[-few:].clone().requires_grad_() for t in (x, dy)]
    weight = w.detach()[-1:].clone().requires_grad_()
    alone = torch_bridge.grouped_linear(last[0], weight, torch.tensor([few], dtype=torch.int32))
    dx_alone, dw_alone = torch.autograd.grad(alone, (last[0], weight), last[1].detach())
    for name, a, b in (("y", y[-few:], alone), ("dx", dx[-few:], dx_alone), ("dw", dw[-1:], dw_alone)):
        asserts.bitwise(a.detach(), b.detach(), name)


@pytest.mark.rule("ALL-1")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cupy_arrays_go_through_the_same_calls(dtype):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    p = cases.problem(cases.named("tail"), dtype)
    moved = [cupy.asarray(a) for a in (p.x, p.w, p.group_sizes, p.bias, p.row_scale, p.dy)]
    x, w, sizes, bias, row_scale, dy = moved
    y = arrays.grouped_linear(x, w, sizes, bias=bias, row_scale=row_scale)
    given = operands(p, True, True)
    asserts.bitwise(cupy.asnumpy(y), TORCH.forward(given, transposed=False), "y of cupy")
    found = arrays.grouped_linear_grads(x=x, w=w, group_sizes=sizes, bias=bias, row_scale=row_scale, dy=dy)
    expected = TORCH.gradients(given, p.dy, Needs(), transposed=False)
    for name, a, b in zip(Needs._fields, found, expected, strict=True):
        asserts.bitwise(cupy.asnumpy(a), b, f"gradient of {name} from cupy")


@pytest.mark.rule("ALL-7")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant_rows_do_not_see_the_batch(dtype):
    """Eight rows have the same bits by themselves and among a thousand."""
    rng = np.random.default_rng(0)
    x = to_torch(rng.standard_normal((ROWS, 256)).astype(cases.numpy_dtype(dtype)))
    w = to_torch(rng.standard_normal((4, 256, 320)).astype(cases.numpy_dtype(dtype)))
    recipe = plain(dtype).replace(batch_invariant=True)
    sizes = torch.tensor([300, 100, 24, 600], dtype=torch.int32)
    y = torch_bridge.grouped_linear(x, w, sizes, rhs_transposed=False, recipe=recipe)
    alone = torch_bridge.grouped_linear(
        x[390:398].contiguous(),
        w[1:2].contiguous(),
        torch.tensor([8], dtype=torch.int32),
        rhs_transposed=False,
        recipe=recipe,
    )
    asserts.bitwise(alone, y[390:398], "rows alone")


def test_products_with_long_rows_run_beside_one_another():
    """Their clusters wait for one another, but not for clusters whose multiprocessors another product holds."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(9000, 8192, dtype=torch.bfloat16, generator=generator)
    w = torch.randn(4, 768, 8192, dtype=torch.bfloat16, generator=generator)
    sizes = torch.tensor([4000, 61, 0, 4939], dtype=torch.int32)
    expected = torch_bridge.grouped_linear(x, w, sizes)
    streams = [torch.cuda.Stream() for _ in range(4)]
    found: list[torch.Tensor] = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(torch_bridge.grouped_linear(x, w, sizes))
    torch.cuda.synchronize()
    for i, y in enumerate(found):
        asserts.bitwise(y, expected, f"y of call {i}")


def test_a_threads_first_call_finds_a_context():
    # Autograd's threads ask the runtime for nothing before our first tensor map.
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    x, w, sizes = (to_torch(each).cuda() for each in (p.x, p.w, p.group_sizes))
    expected = torch_bridge.grouped_linear(x, w, sizes)
    found = torch.empty_like(expected)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            torch_bridge.grouped_linear(x, w, sizes, out=found)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    valid = int(sizes.sum())
    asserts.bitwise(found[:valid], expected[:valid], "y of another thread")
