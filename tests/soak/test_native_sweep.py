"""Random native calls on hostile operands, for the build with ASan and UBSan (`make sanitize`) as for any other.

Buffers are heap blocks that end where the operand ends, at any address that its element type allows, so an overrun by
one element is seen. Draws depend on the seed alone: a failure names it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from grouped_core import _native, calls, plans
from grouped_core.activations import KINDS, Activation
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call, LowRank
from grouped_core.recipes import plain
from tests import asserts, cases
from tests.bounds import Bounded, Expected

SHORT, LONG = 250, 20_000
SEEDS_A_TEST = 50
_NAN = 0xFF


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        count = LONG if metafunc.config.getoption("--soak") else SHORT
        metafunc.parametrize("first_seed", range(0, count, SEEDS_A_TEST))


class Draw:
    """Random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def width(self) -> int:
        """A K or N: odd, around vector and tile widths, seldom long."""
        return int(
            self.one(1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 47, 48, 49, 63, 65, 100, 130, self.rng.integers(1, 300))
        )

    def sizes(self, groups: int, rows: int) -> list[int]:
        """Sizes that fit, that do not, or that are nonsense."""
        kind = self.one("fit", "fit", "short", "over", "hostile", "zero", "one")
        if kind == "hostile":
            numbers = [0, 1, -1, -(2**31), 2**31 - 1, rows, -rows, rows + 1, 7]
            return [int(self.one(*numbers)) for _ in range(groups)]
        total = {"fit": rows, "short": rows // 2, "over": 2 * rows + 3, "zero": 0, "one": 0}[kind]
        shares = self.rng.dirichlet(np.ones(groups)) if kind != "zero" else np.ones(groups) / groups
        sizes = [int(m) for m in self.rng.multinomial(total, shares)]
        if kind == "one":
            sizes[int(self.rng.integers(groups))] = rows
        return sizes

    def block(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Bytes of a heap block of their own, which ends with them; all NaN."""
        element = cases.numpy_dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
        offset = element.itemsize * int(self.rng.integers(0, 16 // element.itemsize))
        memory = np.full(offset + nbytes, _NAN, np.uint8)
        return memory[offset:].view(element).reshape(shape)

    def numbers(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        block = self.block(shape, dtype)
        block[...] = self.rng.standard_normal(shape).astype(block.dtype)
        return block


def wide(draw: Draw) -> str:
    return draw.one(*cases.DTYPES)


def addresses(draw: Draw, members: list[np.ndarray | None]) -> np.ndarray:
    table = draw.block((len(members),), "int64")
    table[:] = [0 if member is None else member.ctypes.data for member in members]
    return table


def spec(array: np.ndarray | None) -> ArraySpec | None:
    return None if array is None else ArraySpec(array.shape, array.dtype.name)


@dataclasses.dataclass
class Work:
    """A call, its operands by slot, and for the oracle the packed forms of those that are given by tables."""

    call: Call
    arrays: dict[str, np.ndarray]
    packed: dict[str, np.ndarray]
    members: list[np.ndarray | None] | None = None  # of the destinations, where a table gives them
    keep: list[np.ndarray] = dataclasses.field(default_factory=list)  # what other tables point to


def matmul(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    groups, a, b = len(sizes), draw.width(), draw.width()
    dtype, result = wide(draw), wide(draw)
    if draw.one(True, False, False):
        return wgrad(draw, sizes, rows, a, b, dtype, result)
    axis = draw.one(1, 2)
    lhs = draw.numbers((rows, a), dtype)
    rhs = draw.numbers((groups, a, b) if axis == 1 else (groups, b, a), dtype)
    bias = draw.numbers((groups, b), wide(draw)) if draw.one(True, False) else None
    scale = draw.numbers((rows,), "float32") if draw.one(True, False) else None
    into = draw.numbers((rows, b), result) if draw.one(True, False, False) else None
    listed, listed_bias = draw.one(True, False, False), bias is not None and draw.one(True, False)
    low, listed_low = low_rank(draw, groups, rows, b, dtype), draw.one(True, False)
    call = calls.grouped_matmul(
        spec(lhs),
        spec(rhs),
        (1, axis),
        spec(sizes),
        result,
        recipe=plain(dtype),
        bias=spec(bias),
        row_scale=spec(scale),
        into=spec(into),
        tables=(listed, listed_bias, False),
        scale_bias=bool(bias is not None and scale is not None and draw.one(True, False)),
        low=low_spec(low, table=listed_low),
        rows_hint=int(draw.one(0, 1, 1000)),
    )
    packed = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "bias": bias, "row_scale": scale, "into": into, **low}
    arrays = {name: array for name, array in packed.items() if array is not None}
    keep: list[np.ndarray] = []
    low_weight = low.get("low_rhs")
    for name, whole, wanted in (("rhs", rhs, listed), ("bias", bias, listed_bias), ("low_rhs", low_weight, listed_low)):
        if wanted and whole is not None:
            members = [draw.numbers(whole.shape[1:], whole.dtype.name) for _ in range(groups)]
            for g, member in enumerate(members):
                member[...] = whole[g]
            arrays[f"{name}_table"] = addresses(draw, members)
            del arrays[name]
            keep += members
    return Work(call, arrays, packed, keep=keep)


def low_rank(draw: Draw, groups: int, rows: int, width: int, dtype: str) -> dict[str, np.ndarray]:
    """Operands of a low-rank product beside one of `width` columns, if there is one."""
    if draw.one(True, False, False):
        return {}
    rank, axis, dtype = int(draw.one(1, 2, 4, 8, 16, 31, 64)), draw.one(1, 2), draw.one(dtype, wide(draw))
    shape = (groups, rank, width) if axis == 1 else (groups, width, rank)
    return {"low_lhs": draw.numbers((rows, rank), dtype), "low_rhs": draw.numbers(shape, dtype)}


def low_spec(low: dict[str, np.ndarray], *, table: bool = False) -> LowRank | None:
    """What a call knows of these operands."""
    if not low:
        return None
    lhs, rhs = (ArraySpec(array.shape, array.dtype.name) for array in low.values())
    return LowRank(lhs, rhs, 1 if rhs.shape[1] == lhs.shape[1] else 2, table)


def low_rank_grads(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    groups, width, rank, dtype = len(sizes), draw.width(), int(draw.one(1, 2, 4, 8, 16, 31, 64)), wide(draw)
    axis, listed = draw.one(1, 2), draw.one(True, False)
    factor = draw.numbers((groups, width, rank) if axis == 1 else (groups, rank, width), dtype)
    packed = {"rows": draw.numbers((rows, width), dtype), "factor": factor}
    packed |= {"low_rows": draw.numbers((rows, rank), dtype), "group_sizes": sizes}
    arrays, keep = dict(packed), []
    if listed:
        keep = [draw.numbers(each.shape, dtype) for each in factor]
        for one, each in zip(keep, factor, strict=True):
            one[...] = each
        arrays["factor_table"] = addresses(draw, [*keep])
        del arrays["factor"]
    call = calls.low_rank_grads(
        *(spec(packed["rows"]), spec(factor), axis, spec(packed["low_rows"]), spec(sizes), (wide(draw), wide(draw))),
        recipe=plain(dtype),
        table=listed,
        aligned_tables=False,
    )
    return Work(call, arrays, packed, keep=keep)


def added_rows(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    matrix, result = draw.numbers((rows, draw.width()), wide(draw)), wide(draw)
    base = draw.numbers(matrix.shape, "float32") if draw.one(True, False) else None
    into = draw.numbers(matrix.shape, result) if draw.one(True, False) else None
    rate = draw.one(0.0, 0.0, 0.1, 0.75)
    key = draw.block((2,), "uint32") if rate else None
    if key is not None:
        key[...] = draw.rng.integers(0, 2**32, 2)
    packed = {"rows": matrix, "group_sizes": sizes, "base": base, "key": key, "into": into}
    arrays = {name: array for name, array in packed.items() if array is not None}
    options = {"factor": draw.one(1.0, -0.3, 0.0, 1e3), "rate": rate, "stream": draw.one(0, 1, 7)}
    call = calls.add_rows(spec(matrix), spec(sizes), result, base=spec(base), into=spec(into), **options)
    return Work(call, arrays, packed)


def wgrad(draw: Draw, sizes: np.ndarray, rows: int, a: int, b: int, dtype: str, result: str) -> Work:
    groups = len(sizes)
    lhs, rhs = draw.numbers((rows, a), dtype), draw.numbers((rows, b), dtype)
    into = draw.numbers((groups, a, b), result) if draw.one(True, False) else None
    accumulate = into is not None and draw.one(True, False)
    listed = into is not None and draw.one(True, False)
    call = calls.grouped_matmul(
        spec(lhs),
        spec(rhs),
        (0, 0),
        spec(sizes),
        result,
        recipe=plain(dtype),
        into=spec(into),
        tables=(False, False, listed),
        accumulate=accumulate,
    )
    packed = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "into": into}
    arrays = {name: array for name, array in packed.items() if array is not None}
    members = None
    if listed:
        members = [draw.numbers((a, b), result) if draw.one(True, True, False) else None for _ in range(groups)]
        for g, member in enumerate(members):
            if member is not None:
                member[...] = into[g]
        arrays["into_table"] = addresses(draw, members)
        del arrays["into"]
    return Work(call, arrays, packed, members)


def group_sum(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    matrix = draw.numbers((rows, draw.width()), wide(draw))
    scale = draw.numbers((rows,), "float32") if draw.one(True, False) else None
    packed = {"rows": matrix, "group_sizes": sizes, "row_scale": scale}
    arrays = {name: array for name, array in packed.items() if array is not None}
    return Work(calls.group_sum(spec(matrix), spec(sizes), wide(draw), spec(scale)), arrays, packed)


def row_dot(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    k, n, groups = draw.width(), draw.width(), len(sizes)
    which = draw.one("pair", "group", "both")
    packed: dict[str, Any] = {"group_sizes": sizes}
    if which != "group":
        packed.update(lhs=draw.numbers((rows, k), wide(draw)), rhs=draw.numbers((rows, k), wide(draw)))
    if which != "pair":
        packed.update(group_lhs=draw.numbers((rows, n), wide(draw)), group_rhs=draw.numbers((groups, n), wide(draw)))
    pair = (spec(packed["lhs"]), spec(packed["rhs"])) if which != "group" else None
    group_pair = (spec(packed["group_lhs"]), spec(packed["group_rhs"])) if which != "pair" else None
    return Work(calls.row_dot(spec(sizes), rows, pair, group_pair), dict(packed), packed)


def scale_rows(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    matrix, scale = draw.numbers((rows, draw.width()), wide(draw)), draw.numbers((rows,), "float32")
    result = wide(draw)
    into = draw.numbers(matrix.shape, result) if draw.one(True, False) else None
    packed = {"rows": matrix, "row_scale": scale, "group_sizes": sizes, "into": into}
    arrays = {name: array for name, array in packed.items() if array is not None}
    return Work(calls.scale_rows(spec(matrix), spec(scale), spec(sizes), result, spec(into)), arrays, packed)


def activation_of(draw: Draw) -> tuple[Activation, int]:
    """A kind with its defaults, and an expert width that its interleave divides."""
    kind, width = draw.one(*KINDS), draw.width()
    if not KINDS[kind].gated or draw.one(True, False):
        return Activation(kind), width
    block = draw.one(1, 2, 3, 8, 16, 32)
    return Activation(kind, interleave=block), block * int(draw.one(1, 2, 3, 9))


def wanted_of(draw: Draw) -> tuple[bool, bool, bool]:
    return draw.one((True, True, True), (True, False, True), (False, True, False), (False, False, True))


def activated(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    activation, width = activation_of(draw)
    hidden = draw.numbers((rows, activation.fc1_width(width)), wide(draw))
    scale = draw.numbers((rows,), "float32") if draw.one(True, False) else None
    packed = {"rows": hidden, "group_sizes": sizes, "row_scale": scale}
    call = calls.activation(spec(hidden), spec(sizes), wide(draw), activation=activation, row_scale=spec(scale))
    return Work(call, dict(packed), packed)


def activated_grad(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    activation, width = activation_of(draw)
    hidden = draw.numbers((rows, activation.fc1_width(width)), wide(draw))
    grad = draw.numbers((rows, width), wide(draw))
    scale, base = (draw.numbers((rows,), "float32") if draw.one(True, False) else None for _ in range(2))
    packed = {"grad": grad, "rows": hidden, "group_sizes": sizes, "row_scale": scale, "row_base": base}
    call = calls.activation_grad(
        spec(grad),
        spec(hidden),
        spec(sizes),
        wide(draw),
        activation=activation,
        wanted=wanted_of(draw),
        row_scale=spec(scale),
        row_base=spec(base),
    )
    return Work(call, dict(packed), packed)


def product_act(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    (activation, width), k, dtype, axis = activation_of(draw), draw.width(), wide(draw), draw.one(1, 2)
    columns = activation.fc1_width(width)
    lhs = draw.numbers((rows, k), dtype)
    rhs = draw.numbers((len(sizes), k, columns) if axis == 1 else (len(sizes), columns, k), dtype)
    bias = draw.numbers((len(sizes), columns), wide(draw)) if draw.one(True, False) else None
    scale = draw.numbers((rows,), "float32") if draw.one(True, False) else None
    low = low_rank(draw, len(sizes), rows, columns, dtype)
    packed = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "bias": bias, "row_scale": scale, **low}
    call = calls.grouped_matmul_act(
        spec(lhs),
        spec(rhs),
        axis,
        spec(sizes),
        wide(draw),
        activation=activation,
        recipe=plain(dtype),
        bias=spec(bias),
        row_scale=spec(scale),
        hidden=draw.one(True, False),
        low=low_spec(low),
    )
    return Work(call, dict(packed), packed)


def product_dact(draw: Draw, sizes: np.ndarray, rows: int) -> Work:
    (activation, width), n, dtype, axis = activation_of(draw), draw.width(), wide(draw), draw.one(1, 2)
    lhs = draw.numbers((rows, n), dtype)
    rhs = draw.numbers((len(sizes), n, width) if axis == 1 else (len(sizes), width, n), dtype)
    hidden = draw.numbers((rows, activation.fc1_width(width)), wide(draw))
    scale, base = (draw.numbers((rows,), "float32") if draw.one(True, False) else None for _ in range(2))
    low = low_rank(draw, len(sizes), rows, width, dtype)
    packed = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "hidden": hidden, "row_scale": scale, "row_base": base}
    packed |= low
    call = calls.grouped_matmul_dact(
        spec(lhs),
        spec(rhs),
        axis,
        spec(sizes),
        spec(hidden),
        wide(draw),
        activation=activation,
        recipe=plain(dtype),
        wanted=wanted_of(draw),
        row_scale=spec(scale),
        row_base=spec(base),
        low=low_spec(low),
    )
    return Work(call, dict(packed), packed)


def work_of(draw: Draw) -> Work:
    """A random call; rows past the groups hold NaN."""
    rows = int(draw.one(0, 1, 2, 7, 8, 9, 33, 64, 65, 200, draw.rng.integers(0, 700)))
    groups = int(draw.one(1, 1, 2, 3, 5, 8, 33, 70))
    sizes = draw.block((groups,), "int32")
    sizes[:] = draw.sizes(groups, rows)
    fused = (activated, activated_grad, product_act, product_dact)
    make = draw.one(matmul, matmul, matmul, group_sum, row_dot, scale_rows, added_rows, low_rank_grads, *fused)
    work = make(draw, sizes, rows)
    end = cases.Case("drawn", tuple(int(s) for s in sizes), rows, 1, 1, frozenset()).valid
    names = ("lhs", "rows", "row_scale", "group_lhs", "grad", "hidden", "row_base", "low_lhs", "low_rows", "base") + (
        ("rhs",) if dict(work.call.params).get("rhs_axis", 0) == 0 else ()
    )
    for name in names:
        if work.packed.get(name) is not None:
            work.packed[name][end:] = np.nan
    return work


def launch(draw: Draw, work: Work, plan: _native.Plan) -> list[np.ndarray | None]:
    """The results; None where one is not asked for or went to a table."""
    results: list[np.ndarray | None] = [None] if work.members is not None else []
    if "into" in work.arrays:
        results = [work.arrays["into"]]
    if not results:
        results = [None if out is None else draw.block(out.shape, out.dtype) for out in work.call.outputs]
    addresses = [
        0 if work.arrays.get(slot) is None else work.arrays[slot].ctypes.data for slot in SLOTS[work.call.name]
    ]
    targets = [0 if result is None else result.ctypes.data for result in results]
    needed = plan.workspace_for([*addresses, *targets, 0])
    workspace = draw.block((needed,), "uint8")
    plan.launch([*addresses, *targets, workspace.ctypes.data if needed else 0], 0)
    return results


def expected_of(work: Work, kernel: str) -> tuple[Bounded | None, ...]:
    packed = [work.packed.get(slot) for slot in SLOTS[work.call.name]]
    names = SLOTS[work.call.name]
    operands = [
        array if array is None or name in ("group_sizes", "key") else Bounded.of(array)
        for name, array in zip(names, packed, strict=True)
    ]
    return Expected({work.call.name: kernel})(work.call, operands)


def check(seed: int) -> None:
    draw = Draw(seed)
    work = work_of(draw)
    names = [name for name in _native.kernels()[work.call.name] if "_cpu" in name]
    call = dataclasses.replace(work.call, implementation=draw.one("", *names))
    plan = plans.attempt(call, "cpu")
    assert plan.kernel or call.implementation, f"seed {seed}: {plans.refusal(call, 'cpu', plan.refusals)}"
    if not plan.kernel:
        return  # this machine lacks the instructions of the pinned kernel
    expected = expected_of(work, plan.kernel)  # before the launch, which may write into an operand
    results = launch(draw, work, plan)
    what = f"seed {seed}: {plan.kernel}"
    if work.members is None:
        for name, result, wanted in zip(RESULTS[call.name], results, expected, strict=True):
            if result is not None and wanted is not None:
                asserts.within(result, wanted, f"{what}, {name}")
        return
    (whole,) = expected
    assert whole is not None
    for g, member in enumerate(work.members):
        if member is not None:
            part = Bounded(whole.value[g], whole.error[g], whole.dtype)
            asserts.within(member, part, f"{what}, destination {g}")


@pytest.mark.rule("GRP-4", "GRP-5", "GRP-12", "MAT-4", "MAT-5", "MAT-7")
def test_random_calls(first_seed):
    for seed in range(first_seed, first_seed + SEEDS_A_TEST):
        check(seed)


def hostile_spec(draw: Draw, given: ArraySpec | None) -> ArraySpec | None:
    """A spec with something wrong, mostly."""
    if given is None:
        return draw.one(None, ArraySpec((3,), "float32"))
    shape = list(given.shape)
    kind = draw.one("same", "same", "absent", "rank", "longer", "huge", "negative", "dtype")
    if kind == "absent":
        return None
    if kind == "rank":
        return ArraySpec(tuple(draw.one(shape[:-1], [*shape, 2])), given.dtype)
    if kind in ("longer", "huge", "negative") and shape:
        change = {"longer": 1, "huge": 2**62, "negative": -(2**40)}[kind]
        shape[int(draw.rng.integers(len(shape)))] += change
        return ArraySpec(tuple(shape), given.dtype)
    return ArraySpec(given.shape, draw.one(*_native.dtypes())) if kind == "dtype" else given


@pytest.mark.rule("ERR-3")
def test_plans_of_broken_calls_are_refused_in_words(first_seed):
    """Whatever the specs, planning answers: a kernel, every kernel's reason, or ValueError; never a crash."""
    for seed in range(first_seed, first_seed + SEEDS_A_TEST):
        draw = Draw(seed)
        work = work_of(draw)
        inputs = tuple(hostile_spec(draw, given) for given in work.call.inputs)
        params = dict(work.call.params)
        for name in params:
            if draw.one(True, False, False, False):
                text = draw.one("ieee", "", "swiglu", "x" * 999)
                params[name] = text if isinstance(params[name], str) else draw.one(0, 1, 2, -1, 2**62)
        call = dataclasses.replace(work.call, inputs=inputs, params=tuple(params.items()))
        arch = draw.one("cpu", "cpu", "sm_80", "sm_90a")
        try:
            plan = plans.attempt(call, arch)
        except ValueError:
            continue
        assert plan.kernel or all(reason for _, reason in plan.refusals), f"seed {seed}: refused without words"
