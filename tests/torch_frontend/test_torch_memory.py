"""How the PyTorch frontend reads memory: which calls count as the same, and which similar ones are refused."""

from __future__ import annotations

import ctypes
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from grouped_core import _native, calls, plans, recipes
from grouped_core.activations import Activation
from grouped_core.formats import FORMATS
from grouped_core.recipes import plain
from tests import asserts
from tests.torch_frontend.nn_tools import FUNCTIONS, setup
from tests.torch_frontend.torch_tools import leaf, operators_of, small
from torch_bridge import (
    _args,
    _cache,
    _record,
    check_debug_word,
    dequantize,
    device_sizes,
    grouped_linear,
    grouped_mlp,
    moe,
    nn,
    quantize,
    route,
    routed_mlp,
    scaling_state,
    sizes,
)
from torch_bridge._memory import EXCHANGE, address_table, empty_on_cpu

_NEEDS_CUDA = pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")


class Marked(Tensor):
    """A tensor in plain memory with another Python type."""


def _shifted(count: int) -> Tensor:
    """`count` floats whose address is no multiple of 16 bytes."""
    return torch.zeros(count + 1)[1:]


def test_facts_are_shapes_dtypes_and_nothing_of_the_values() -> None:
    def facts(**changes: Any) -> bytes | None:
        given = {
            "x": torch.zeros(3, 4),
            "w": torch.ones(2, 4),
            "list": [torch.zeros(4), None, torch.zeros(4)],
        } | changes
        return EXCHANGE.describe((*given.values(), None))

    base = facts()
    assert base is not None
    assert facts(x=torch.ones(3, 4), w=torch.zeros(2, 4)) == base
    assert facts(x=torch.nn.Parameter(torch.ones(3, 4)), w=torch.ones(2, 4).as_subclass(Marked)) == base
    assert facts(x=torch.zeros(8, 4)[2:5]) == base
    others = [
        facts(x=torch.zeros(4, 3)),
        facts(x=torch.zeros(3, 4, 1)),
        facts(x=torch.zeros(3, 4, dtype=torch.int32)),
        facts(x=None),
        facts(w=[torch.ones(2, 4)]),
        facts(list=[torch.zeros(4), torch.zeros(4)]),
        facts(list=[_shifted(4), None, torch.zeros(4)]),
        facts(x=_shifted(12).view(3, 4)),
        facts(w=_shifted(8).view(2, 4)),
    ]
    assert len({base, *others}) == len(others) + 1
    assert None not in others


def _zero_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """What autograd makes in place of zeros: it has elements, and no memory."""
    return torch._efficientzerotensor(tuple(shape), dtype=dtype)


def _negated(value: Tensor) -> Tensor:
    """`value` as a view of its negative: what its memory has is not its values."""
    return torch._neg_view(value.detach().neg())


@pytest.mark.rule("ERR-1", "ERR-5")
@pytest.mark.parametrize("name", ["x", "w", "bias", "row_scale"])
def test_negated_views_are_refused_also_after_a_call_with_the_same_facts(name: str) -> None:
    t = small()
    for given in (t, t._replace(**{name: _negated(getattr(t, name))})):
        refused = asserts.refused(ValueError, ["lazily negated view", "has its signs", "resolve_neg"])
        with refused if given is not t else nullcontext():
            grouped_linear(given.x, given.w, given.sizes, bias=given.bias, row_scale=given.row_scale)


@pytest.mark.rule("ERR-1", "ALL-2")
def test_negated_members_parameters_and_logits_are_refused_also_after_a_call_with_the_same_facts() -> None:
    t = small()
    members, logits = list(t.w.unbind()), torch.randn(6, 4)
    for run in (
        lambda negate: grouped_linear(t.x, [negate(members[0]), *members[1:]], t.sizes),
        lambda negate: grouped_linear(t.x, torch.nn.Parameter(negate(t.w)), t.sizes),
        lambda negate: route.topk_router(negate(logits), 2),
    ):
        run(lambda value: value)
        with asserts.refused(ValueError, ["lazily negated view", "has its signs", "resolve_neg"]):
            run(_negated)


@pytest.mark.rule("ERR-1", "GRD-7")
def test_main_grad_as_a_negated_view_is_refused() -> None:
    t = small()
    weight: Any = torch.nn.Parameter(t.w)
    weight.main_grad = _negated(torch.zeros(t.w.shape))
    y = grouped_linear(t.x, weight, t.sizes, wgrad_accum="main_grad")
    with asserts.refused(RuntimeError, ["`main_grad` of `weight`", "lazily negated view", "resolve_neg"]):
        y.sum().backward()


@pytest.mark.rule("MAT-7")
@pytest.mark.parametrize("form", ["negated", "zero"])
def test_gradients_that_autograd_hands_over_without_their_values_in_memory(form: str) -> None:
    t = small()
    dy = torch.zeros_like(t.dy) if form == "zero" else t.dy
    given = _zero_tensor(dy.shape, dy.dtype) if form == "zero" else _negated(dy)
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

    def gradients(dy: Tensor) -> list[Tensor]:
        x, h, scores = leaf(t.x), leaf(t.x), leaf(logits)
        grouped_linear(x, t.w, t.sizes).backward(dy)
        z = nn.ScaledActivation("gelu_tanh")(h, None)
        z.backward(dy[:, : z.shape[1]])
        weights, _, _ = route.topk_router(scores, 2)
        weights.backward(dy[:5, :2])
        return [x.grad, h.grad, scores.grad]

    for found, expected in zip(gradients(given), gradients(dy), strict=True):
        asserts.bitwise(found, expected)


@pytest.mark.parametrize(
    "operand",
    [
        torch.zeros(4, 3).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(3, 4, device="meta"),
        _zero_tensor((3, 4)),
        torch.eye(3).to_sparse(),
        [torch.zeros(4), torch.zeros(5)],
        [torch.zeros(4), torch.zeros(4, dtype=torch.int32)],
        [torch.zeros(4), 1],
        1.0,
        "text",
    ],
    ids=str,
)
def test_operands_that_kernels_cannot_read_in_place_have_no_facts(operand: Any) -> None:
    assert EXCHANGE.describe((torch.zeros(2), operand)) is None


def test_axes_without_extent_have_no_stride() -> None:
    assert EXCHANGE.describe((torch.zeros(1, 4).t().contiguous(),)) is not None
    assert EXCHANGE.describe((torch.zeros(3, 1).as_strided((3, 1), (1, 7)),)) is not None
    assert EXCHANGE.describe((torch.zeros(0, 4).t(),)) is not None


def test_fake_tensors_are_not_asked_for_memory() -> None:
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EXCHANGE.describe((mode.from_tensor(torch.zeros(3)),)) is None


@pytest.mark.rule("GRD-14", "BUF-2")
@pytest.mark.parametrize("single", [False, True])
def test_a_step_under_a_fake_mode(single: bool) -> None:
    """Fake tensors have no addresses: neither an earlier real step nor buffers without memory get in their way."""

    def step() -> None:
        options: dict[str, Any] = {"single_grouped_weight": single, "accumulate_into_main_grad": True}
        layer = nn.MoE(8, 4, 3, 2, shared_dim=4, shared_gate=True, jitter=0.1, aux_coeff=0.1, **options)
        weights: list[Any] = [each for name, each in layer.named_parameters() if "linear" in name]
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        y, aux = layer(torch.randn(5, 8))
        (y.sum() + aux.aux_loss).backward()
        assert layer.router.weight.grad is not None
        assert all(type(each.grad) is type(torch.zeros(1)) for each in weights)

        x, w = torch.randn(5, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)
        buffers = {"out": torch.empty(5, 4), "grad_input": torch.empty(5, 8)}
        grouped_linear(x, w, torch.tensor([2, 3]), wgrad_accum=torch.zeros(2, 4, 8), **buffers).sum().backward()

    for _ in range(2):
        step()
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            step()


@pytest.mark.rule("ERR-1")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("call", ["grouped_linear", "moe", "permute", "quantize", "dequantize"])
def test_tracing_of_torch_jit_is_refused_and_spoils_nothing(call: str) -> None:
    """Sizes are tensors there, and a program that held them failed in every later call of the same shape."""
    w, layer, experts = torch.randn(2, 3, 8), nn.MoE(8, 4, 3, 2), torch.zeros(7, 1, dtype=torch.int32)
    x, q, of_groups = torch.randn(7, 8), quantize(torch.randn(7, 8), "mxfp8"), torch.tensor([5, 2])
    run = {
        "grouped_linear": lambda x: grouped_linear(x, w, of_groups),
        "moe": lambda x: layer(x)[0],
        "permute": lambda x: route.permute(x, experts, 2)[0],
        "quantize": lambda x: quantize(x, "mxfp8").values,
        "dequantize": lambda x: x + dequantize(q),
    }[call]
    with asserts.refused(NotImplementedError, [call, "torch.jit.trace", "expected eager", "torch.export"]):
        torch.jit.trace(run, x, check_trace=False)
    run(x)


@pytest.mark.rule("GRP-13")
def test_the_first_call_may_be_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps is saved for backward, and written, by later calls."""
    monkeypatch.setattr(sizes, "_kept", {})
    monkeypatch.setattr(sizes, "_words", {})
    monkeypatch.setenv("GROUPED_DEBUG", "sizes")
    layer, x = nn.MoE(8, 4, 3, 2, shared_dim=4, shared_gate=True, recipe=recipes.FP8Delayed), torch.randn(5, 8)
    with torch.inference_mode():
        layer.set_weight_update(True)
        layer(x)
    layer.set_weight_update(True)
    layer(x)[0].sum().backward()
    assert all(each.grad is not None for each in layer.parameters())
    check_debug_word()


@pytest.mark.rule("GRP-2")
@pytest.mark.parametrize("recipe", [None, recipes.FP8Delayed])
def test_the_default_device_is_not_that_of_operands(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call makes is on the device of its operands. A tensor that is kept for later calls would spoil these."""
    monkeypatch.setattr(sizes, "_kept", {})
    x, listed = torch.randn(5, 8), [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    layer = nn.MoE(8, 4, 3, 2, shared_dim=4, shared_gate=True, recipe=recipe, device="cpu")

    def results() -> list[Tensor]:
        found = grouped_linear(x, listed, [2, 3])
        return [layer(x)[0], found, *torch.autograd.grad(found.sum(), listed), device_sizes([2, 3], "cpu")]

    with torch.device("meta"):
        inside = results()
        nn.MoE(8, 4, 3, 2, recipe=recipe, device="cpu")
    monkeypatch.setattr(sizes, "_kept", {})
    for found, expected in zip(inside, results(), strict=True):
        asserts.bitwise(found, expected)


def test_addresses() -> None:
    members = [torch.zeros(4), None, torch.zeros(8)[4:]]
    expected = [0 if each is None else each.data_ptr() for each in members]
    assert memoryview(EXCHANGE.addresses(members)).cast("q").tolist() == expected
    assert address_table(EXCHANGE.addresses(members), -1).tolist() == expected
    with asserts.refused(ValueError, ["operand", "no tensor"]):
        EXCHANGE.addresses([torch.eye(3).to_sparse()])
    with asserts.refused(TypeError, ["exchange", "DLPack", "install"]):
        _native.Exchange(int)


def test_launchers_refuse_what_is_not_there() -> None:
    specs = [("float32", (2, 3)), ("float32", (2,)), ("int32", (1,)), None]
    plan = _native.plan("scale_rows", "cpu", "", specs, [("float32", (2, 3))], {})
    assert plan.kernel
    assert not plan.workspace_bytes
    with asserts.refused(ValueError, ["got 2", "expected 6", "workspace"]):
        _native.Launcher(EXCHANGE, plan, [0, 1])
    launcher = _native.Launcher(EXCHANGE, plan, [0, 1, 2, -1, 3, -1])
    values = [torch.ones(2, 3), torch.full((2,), 2.0), torch.tensor([2], dtype=torch.int32), torch.empty(2, 3)]
    launcher.launch(values, 0)
    asserts.filled(values[3], 2.0)
    with asserts.refused(ValueError, ["operand", "no tensor"]):
        launcher.launch([*values[:3], None], 0)
    with pytest.raises(IndexError):
        launcher.launch(values[:3], 0)


def test_launchers_read_operands_at_offsets() -> None:
    """The second row of an array takes the place of a tensor of its own."""
    specs = [("float32", (2, 3)), ("float32", (2,)), ("int32", (1,)), None]
    plan = _native.plan("scale_rows", "cpu", "", specs, [("float32", (2, 3))], {})
    launcher = _native.Launcher(EXCHANGE, plan, [0, 1, 2, -1, 3, -1], [0, 8, 0, 0, 0, 0])
    scales = torch.tensor([[2.0, 2.0], [3.0, 3.0]])
    values = [torch.ones(2, 3), scales, torch.tensor([2], dtype=torch.int32), torch.empty(2, 3)]
    launcher.launch(values, 0)
    asserts.filled(values[3], 3.0)
    with asserts.refused(ValueError, ["got 1 offsets", "one per register"]):
        _native.Launcher(EXCHANGE, plan, [0, 1, 2, -1, 3, -1], [8])


def _act_in_codes(rows: int, width: int, groups: int = 2) -> calls.Call:
    """Activated rows as codes, of codes: a call whose kernels have two parts."""
    fmt, last = FORMATS["fp8_1x128"], FORMATS["fp8_128x128"]
    return calls.grouped_matmul_act(
        calls.spec_in_format(fmt, (rows, width), 1, "bfloat16", groups),
        calls.spec_in_format(last, (groups, width, width), 2, "bfloat16"),
        2,
        calls.ArraySpec((groups,), "int32"),
        "bfloat16",
        activation=Activation("relu"),
        recipe=recipes.FP8Block,
        quantized=calls.QuantizedResult(fmt, (True, True)),
    )


def _names(call: calls.Call, slots: Iterable[int]) -> set[str]:
    """Names of those of `slots` that the call has."""
    names = (*calls.SLOTS[call.name], *calls.RESULTS[call.name])
    return {names[slot] for slot in slots if (*call.inputs, *call.outputs)[slot] is not None}


@pytest.mark.parametrize("arch", ["cpu", pytest.param("sm_90a", marks=_NEEDS_CUDA)])
def test_parts_of_a_kernel_touch_slots_of_their_own(arch: str) -> None:
    """Each slot is one of theirs; both read the sizes, and hidden rows. Odd addresses may get another kernel."""
    call = _act_in_codes(512, 256)
    plan = plans.plan(call, arch)
    count = len(call.inputs) + len(call.outputs)
    first, second = plan.parts_for([0] * (count + 1))
    assert _names(call, {*first, *second}) == _names(call, range(count))
    assert {"group_sizes"} <= _names(call, {*first} & {*second}) <= {"group_sizes", "hidden"}
    assert {"lhs", "lhs_scales", "rhs", "rhs_scales"} <= _names(call, first)
    assert _names(call, second) >= {"values", "scales", "cross_values", "cross_scales"}
    odd = plan.parts_for([1] * (count + 1))
    assert odd == ([first, second] if plan.spare == "" else [])
    plain = _planned_call(*_operands(512, 64, torch.bfloat16)[:3], None)
    assert plans.plan(plain, arch).parts_for([0] * (count + 1)) == [], "it stores no codes"


def test_launchers_refuse_parts_that_are_not_there() -> None:
    call = _act_in_codes(40, 128)
    plan = plans.plan(call, "cpu")
    absent = [-1] * (len(call.inputs) + len(call.outputs) + 1)
    for part in (-2, 2):
        with asserts.refused(ValueError, [f"part {part}", plan.kernel, "has 2", "-1 for the whole"]):
            _native.Launcher(EXCHANGE, plan, absent, part=part)
    launchers = [_native.Launcher(EXCHANGE, plan, absent, part=part) for part in (-1, 0, 1)]
    assert [each.continues for each in launchers] == [False, False, True]
    for part, name in ((0, "lhs"), (1, "group_sizes")):
        with asserts.refused(ValueError, [f"address of `{name}` is null"]):
            _native.Launcher(EXCHANGE, plan, absent, part=part).launch([], 0)


def _values_at(addresses: bytes) -> Tensor:
    """float32 [n]: the value at each address."""
    return torch.tensor([ctypes.c_float.from_address(each).value for each in memoryview(addresses).cast("q")])


def _scaling_program(workspace: Any = None, **changes: Any) -> _native.Program:
    """rows [2, 3] times scales, rounded to bf16; the leaves are rows, nothing, a list of scales, sizes."""
    specs = [("float32", (2, 3)), ("float32", (2,)), ("int32", (1,)), None]
    plan = _native.plan("scale_rows", "cpu", "", specs, [("float32", (2, 3))], {})
    launcher = _native.Launcher(EXCHANGE, plan, [0, 1, 2, -1, 3, -1])
    new = ((2, 3), (3, 1), torch.float32)
    given = {
        "exchange": EXCHANGE,
        "steps": [("scale_rows", launcher, ((3, new),), workspace, (0, 1, 2)), (3, 4, torch.bfloat16)],
        "results": [4, -1, -2 - 3],
        "released": [0],
        "registers": 6,
        "empty": empty_on_cpu,
        "table_of": _values_at,
    } | changes
    return _native.Program(**given)


def _leaves() -> list[Any]:
    return [torch.ones(2, 3), None, [torch.ones(1), torch.ones(1) * 2], torch.tensor([2], dtype=torch.int32)]


def test_programs_run_their_steps() -> None:
    leaves = _leaves()
    sizes = leaves[3]
    y, nothing, same = _scaling_program().run(leaves, 0)
    asserts.bitwise(y, torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.bfloat16))
    assert nothing is None
    assert same is sizes
    assert leaves[0] is None, "a released leaf is still in the list"
    assert leaves[3] is sizes
    with asserts.refused(ValueError, ["value 0 has 8 bytes", "expected 24"]):
        _scaling_program().run([None, None, *_leaves()[2:]], 0)
    with asserts.refused(TypeError, ["a step", "Launcher"]):
        _scaling_program(steps=[("scale_rows", "no launcher", (), None, ())])


def test_programs_forget_where_a_register_was() -> None:
    """A register that is made again is another tensor, and one that no later step reads may be made again."""
    specs = [("float32", (4, 4)), ("int32", (1,)), None]
    plan = _native.plan("group_sum", "cpu", "", specs, [("float32", (1, 4))], {})
    launcher, new = _native.Launcher(EXCHANGE, plan, [0, 1, -1, 2, -1]), (2, ((1, 4), (4, 1), torch.float32))
    steps = [("first", launcher, (new,), None, [2]), ("second", launcher, (new,), None, [])]
    kept: list[Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        kept.append(torch.zeros(shape, dtype=dtype))
        return kept[-1]

    program = _native.Program(EXCHANGE, steps, [2], [], 3, empty, _values_at)
    (y,) = program.run([torch.ones(4, 4), torch.tensor([4], dtype=torch.int32)], 0)
    for each in (y, *kept):
        asserts.filled(each, 4.0)


def test_leaves_live_while_a_table_is_made_of_them() -> None:
    leaves: list[Any] = [[torch.ones(1)], torch.full((7,), 7.0)]
    seen = weakref.ref(leaves[1])

    def table_of(addresses: bytes) -> Tensor:
        leaves.clear()
        assert seen() is not None, "the second leaf is freed"
        return _values_at(addresses)

    _, second = _native.Program(EXCHANGE, [], [0, 1], [], 2, empty_on_cpu, table_of).run(leaves, 0)
    asserts.filled(second, 7.0)


def test_tensors_live_until_their_launch_returns() -> None:
    """The list that the caller passes may change while other threads run; here it does just before."""
    specs = [("float32", (2, 3)), ("float32", (2,)), ("int32", (1,)), None]
    plan = _native.plan("scale_rows", "cpu", "", specs, [("float32", (2, 3))], {})
    result = torch.empty(2, 3)
    values = [torch.ones(2, 3), torch.full((2,), 2.0), torch.tensor([2], dtype=torch.int32), result]
    seen = weakref.ref(values[0])

    def threads() -> int:
        values.clear()
        assert seen() is not None, "the rows are freed before the launch"
        return 1

    exchange = _native.Exchange(Tensor, None, threads)
    _native.Launcher(exchange, plan, [0, 1, 2, -1, 3, -1]).launch(values, 0)
    asserts.filled(result, 2.0)


def test_launchers_refuse_tensors_of_too_few_bytes() -> None:
    call = _act_in_codes(40, 128)
    plan = plans.plan(call, "cpu")
    count = len(call.inputs) + len(call.outputs)
    specs = [getattr(each, "values", each) for each in (*call.inputs, *call.outputs)]
    present = [at for at, each in enumerate(specs) if each is not None]
    registers = [present.index(at) if at in present else -1 for at in range(count)] + [len(present)]
    assert plan.workspace_bytes
    launcher = _native.Launcher(EXCHANGE, plan, registers)
    whole = [
        torch.zeros(specs[at].shape, dtype=getattr(torch, specs[at].dtype))  # pyrefly: ignore[missing-attribute]
        for at in present
    ]
    room = torch.zeros(plan.workspace_bytes, dtype=torch.uint8)
    launcher.launch([*whole, room], 0)
    few = torch.zeros(1)
    for at in (0, len(present) - 1):
        for short in (few, few.expand(1 << 20)):
            with asserts.refused(ValueError, [f"value {at} has 4 bytes", "expected"]):
                launcher.launch([*whole[:at], short, *whole[at + 1 :], room], 0)
    with asserts.refused(ValueError, ["workspace has 1 bytes"]):
        launcher.launch([*whole, room[:1].expand(plan.workspace_bytes)], 0)


def test_a_cache_may_be_asked_while_it_drops_what_it_kept() -> None:
    cache = _native.FactsCache(EXCHANGE, 2, Several)
    drops: list[int] = []

    class Asking:
        def __del__(self) -> None:
            drops.append(len(cache))
            for number in range(50):
                cache.keep((torch.ones(3),), number, "another")

    for at in range(100):
        cache.keep((torch.ones(4),), at % 7, Asking())
    assert len(drops) > 50
    assert len(cache) <= 2


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: _native.Program(EXCHANGE, [], [], [], 0, len, len, None, ()), "current device"),
        (lambda: _native.Program(EXCHANGE, [()], [], [], 0, len, len), "a step"),
        (lambda: _native.Program(EXCHANGE, [], [()], [], 0, len, len), "a result"),
        (lambda: _native.Program(EXCHANGE, [], [], [], 1 << 30, len, len), "registers"),
        (lambda: _native.FactsCache(EXCHANGE, 3, tuple).find(((),)), "a layout and a tuple"),
        (lambda: _native.FactsCache(EXCHANGE, 3, tuple).find(((1, 2),)), "a layout and a tuple"),
        (lambda: _native.FactsCache(EXCHANGE, 3, int).find((3,)), "a layout and a tuple"),
        (lambda: _run_kept(()), "starts with a Program"),
        (lambda: _run_kept((None,)), "starts with a Program"),
        (lambda: _run_kept(5), "starts with a Program"),
        (lambda: _native.Launcher(EXCHANGE, 5, []), "a Plan"),
        (lambda: _native.Launcher(5, 5, []), "an Exchange"),
        (lambda: _scaling_program((5, ((7,), (1,)))), "a new tensor"),
    ],
)
def test_programs_and_caches_refuse_what_they_cannot_read(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises((TypeError, ValueError), match=expected):
        make()


def _run_kept(value: Any) -> Any:
    cache, operands = _native.FactsCache(EXCHANGE, 3, Several), (torch.ones(2),)
    cache.keep(operands, 0, value)
    return cache.run(operands, 0)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("operand", ["sizes", "weight"])
def test_tensors_that_start_within_an_element_are_refused(operand: str) -> None:
    sizes, weight = torch.tensor([2, 2], dtype=torch.int32), torch.ones(2, 16, 16)
    if operand == "sizes":
        sizes = torch.frombuffer(bytearray(16), dtype=torch.int32, count=2, offset=1)
    else:
        weight = torch.frombuffer(bytearray(4 * 512 + 2), dtype=torch.float32, offset=2).view(2, 16, 16)
    with asserts.refused(ValueError, ["no multiple of 4 bytes", "clone"]):
        grouped_linear(torch.ones(4, 16), weight, sizes)


def test_programs_let_launches_be_watched() -> None:
    """`watch` runs in place of the launch, when the results are allocated and nothing is freed."""
    seen: list[Any] = []

    def watch(name: str, launcher: Any, values: list[Any], made: tuple[int, ...], stream: int) -> None:
        seen.append((name, made, stream, [each is not None for each in values]))
        values[made[0]].fill_(5.0)

    program = _scaling_program((5, ((7,), (1,), torch.uint8)))
    asserts.filled(program.run(_leaves(), 0, watch)[0], 5.0)
    assert seen == [("scale_rows", (3,), 0, [True, True, True, True, False, True])]


class Several(NamedTuple):
    """An operand or a result of several leaves."""

    layout: Any
    leaves: tuple[Any, ...]


def test_results_of_several_leaves_have_their_layout() -> None:
    program = _scaling_program(results=[("rows", [4, -1, -2 - 3]), 4], flat=Several)
    leaves = _leaves()
    several, y = program.run(leaves, 0)
    assert isinstance(several, Several)
    assert several.layout == "rows"
    assert several.leaves[0] is y
    assert several.leaves[1:] == (None, leaves[3])


def test_a_kept_program_runs_on_the_operands_for_which_it_is_found() -> None:
    cache = _native.FactsCache(EXCHANGE, 3, Several)
    rows, nothing, scales, sizes = _leaves()
    operands = (rows, nothing, Several("scales", (scales,)), sizes)
    assert cache.run(operands, 0) is None, "nothing was kept"
    cache.keep(operands, 0, (_scaling_program(), "what else is known"))
    assert cache.run(operands, 1) is None, "another number"
    for given in (operands, [operands]):
        found: Any = cache.run(given, 0)
        y, _, same = found
        asserts.bitwise(y, torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.bfloat16))
        assert same is sizes
    held = [operands]
    freed = weakref.ref(rows)
    alive: list[bool] = []

    def watch(name: str, launcher: Any, values: list[Any], made: tuple[int, ...], stream: int) -> None:
        assert not held, "operands are still in the list"
        launcher.launch(values, stream)
        values[0] = None
        alive.append(freed() is not None)

    del operands, rows, given
    cache.run(held, 0, watch)
    assert alive == [False], "rows that no later launch reads are still alive"


def test_a_kept_program_does_not_run_where_another_device_is_current() -> None:
    operands = tuple(_leaves())
    for current, runs in ((0, True), (1, False)):
        cache = _native.FactsCache(EXCHANGE, 3, Several)
        cache.keep(
            operands, 0, (_scaling_program(place=(0, lambda device=current: device, lambda device: 7, torch.uint8)),)
        )
        streams: list[int] = []
        found = cache.run(operands, 0, lambda *launch, seen=streams: seen.append(launch[-1]))  # pyrefly: ignore[missing-attribute]
        assert (found is not None) == runs
        assert streams == [7] * runs


def test_facts_find_what_was_kept_for_them() -> None:
    cache = _native.FactsCache(EXCHANGE, 3, Several)
    layout, other = ("layout",), ["layout"]
    a, b = torch.zeros(2), torch.zeros(3)
    cache.keep((a, None), 0, "plain")
    cache.keep((Several(layout, (a, b)), None), 0, "flat")
    leaves: list[Any] = []
    assert cache.find((torch.ones(2), None), 0, leaves) == "plain"
    assert len(leaves) == 2
    assert cache.find((a, None), 1) is None, "another number"
    assert cache.find((b, None)) is None, "other facts"
    leaves.clear()
    assert cache.find((Several(layout, (a, b)), None), 0, leaves) == "flat"
    assert leaves[0] is a
    assert leaves[1:] == [b, None]
    assert cache.find((Several(other, (a, b)), None)) is None, "another layout"
    assert cache.find((None, Several(layout, (a, b)))) is None, "another operand"
    assert cache.find((1, None)) is None
    cache.keep((1, None), 0, "nothing")
    assert len(cache) == 2
    for rows in range(3, 6):
        cache.keep((torch.zeros(rows),), 0, rows)
    assert len(cache) == 2, "it is emptied when it is full"


def _moved(tensor: Tensor) -> Tensor:
    """A copy whose address is no multiple of 16 bytes."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def _fused(run: Any, static: Any, operands: Any) -> Any:
    """A rule of one call that has a workspace; `static` is the kernel to pin."""
    x, w, sizes = operands.x, operands.w, operands.sizes
    call = calls.grouped_matmul_act(
        *(x.spec, w.spec, 2, sizes.spec, x.spec.dtype),
        activation=Activation("relu"),
        recipe=plain(x.spec.dtype),
        hidden=False,
        implementation=static,
    )
    given = {"lhs": x, "rhs": w, "group_sizes": sizes}
    return run(call, [given.get(slot) for slot in calls.SLOTS[call.name]])[:1]


class _Fused(NamedTuple):
    x: Any
    w: Any
    sizes: Any
    bias: Any


FUSED = _record.Rule("fused", _fused, _Fused, frozenset({"x"}), frozenset())


def _planned_call(*operands: Tensor | None) -> calls.Call:
    given = [_record.given_of(each, has_memory=False) for each in operands]
    (call,) = _record.record(FUSED, "", (None,) * 4, given, len(operands[0])).calls
    return call


def _operands(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, sizes of two groups, and a bias that the rule above leaves alone."""
    x, w = torch.ones(rows, width, dtype=dtype), torch.ones(2, width, width, dtype=dtype)
    return x, w, torch.tensor([rows - 1, 1], dtype=torch.int32), torch.ones(width)


def _registers(call: calls.Call) -> list[int]:
    """Three operands, the first result, the workspace."""
    return [0, 1, 2, *[-1] * (len(call.inputs) - 3), 3, *[-1] * (len(call.outputs) - 1), 4]


@pytest.mark.rule("TE #2660")
def test_launchers_refuse_a_workspace_that_is_too_small() -> None:
    operands = _operands(40, 32, torch.float32)
    call = _planned_call(*operands)
    plan = plans.plan(call, "cpu")
    needed = plan.workspace_bytes
    registers = _registers(call)
    assert [slot for slot, spec in enumerate(call.inputs) if spec] == [0, 1, 2]
    launcher, result = _native.Launcher(EXCHANGE, plan, registers), torch.full((40, 32), 7.0)
    for small_one in (torch.empty(needed - 257, dtype=torch.uint8), torch.empty(needed // 4 - 65), torch.empty(0, 9)):
        words = [f"the workspace has {small_one.nbytes} bytes", f"expected {needed}", "grouped_matmul_act(", "allocate"]
        with asserts.refused(ValueError, words):
            launcher.launch([*operands[:3], result, small_one], 0)
        asserts.filled(result, 7.0)
    launcher.launch([*operands[:3], result, torch.empty(needed // 4 + 1)[1:]], 0)
    asserts.filled(result, 32.0)


@_NEEDS_CUDA
def test_a_refused_launch_names_the_odd_address() -> None:
    """The workspace has the size for aligned addresses. Nothing is launched, so no device is needed."""
    operands = [*_operands(512, 64, torch.bfloat16)[:3], torch.empty(512, 64, dtype=torch.bfloat16)]
    call = _planned_call(*operands[:3], None)
    plan = plans.plan(call, "sm_90a")
    launcher = _native.Launcher(EXCHANGE, plan, _registers(call))
    workspace = torch.empty(plan.aligned_workspace_bytes, dtype=torch.uint8)
    for at, name in ((0, "lhs"), (1, "rhs"), (3, "result")):
        odd = [_moved(each) if each is operands[at] else each for each in operands]
        sizes = [
            f"the workspace has {workspace.nbytes} bytes",
            f"expected {plan.workspace_bytes} in grouped_matmul_act(",
        ]
        with asserts.refused(ValueError, [*sizes, f"address of `{name}` is no multiple of 16", "align it"]):
            launcher.launch([*odd, workspace], 0)


@_NEEDS_CUDA
def test_odd_addresses_make_the_workspace_larger(monkeypatch) -> None:
    """The workspace is larger only if an operand that a kernel needs aligned is not, and for composed kernels."""
    monkeypatch.setattr(_record, "arch_of", lambda device: "sm_90a")  # planned for, never launched
    x, w, sizes, bias = _operands(512, 64, torch.bfloat16)

    def workspace(*operands: Tensor, kernel: str = "") -> int:
        return _record._program(
            FUSED, kernel, (None,) * 4, operands, len(operands[0]), torch.device("cpu")
        ).workspace_bytes

    between = x.numel() * x.itemsize
    for even in ((x, w, sizes, bias), (x, w, _moved(sizes), bias), (x, w, sizes, _moved(bias))):
        assert 0 < workspace(*even) < 1024
    for odd in ((_moved(x), w, sizes, bias), (x, _moved(w), sizes, bias)):
        assert between < workspace(*odd) < between + 4096
    composed = [workspace(each, w, sizes, bias, kernel="composed") for each in (x, _moved(x))]
    assert composed[0] == composed[1] > between


@pytest.mark.rule("ERR-1")
def test_a_call_that_differs_in_layout_alone_is_checked_again() -> None:
    t = small()
    square = t.x[: t.x.shape[1]].contiguous()  # [K, K]: its transpose has the same shape
    weight = [w.clone() for w in t.w]
    for _ in range(2):
        grouped_linear(square, weight, t.sizes)
        with asserts.refused(ValueError, ["`x`", "strides", "contiguous"]):
            grouped_linear(square.t(), weight, t.sizes)
        with asserts.refused(TypeError, ["`weight[1]`", "dtype"]):
            grouped_linear(square, [weight[0], weight[1].double(), *weight[2:]], t.sizes)


def _call(form: str, recipe: Any, x: Tensor | None = None) -> Tensor:
    """A function of `FUNCTIONS` on fresh operands and a fresh state, of rows `x` if they are given."""
    one = setup(form, True, case="idle_ends", dtype="bfloat16")
    groups = len(one.sizes)
    weights = [leaf(each) for each in one.weights]
    if recipe is not None and recipe.delayed:
        recipe = recipe.bind(scaling_state(recipe, groups, products=len(weights) // groups))
    rows = leaf(one.x if x is None else x)
    if form == "grouped_linear":
        return grouped_linear(rows, weights, one.sizes, recipe=recipe)
    return grouped_mlp(rows, weights[:groups], weights[groups:], one.sizes, recipe=recipe)


CHECKS = ("_check_linear", "_check_mlp")
"""The functions that check operands of the public functions."""


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("recipe", [None, recipes.FP8Delayed, recipes.MXFP8], ids=lambda r: r and r.name)
@pytest.mark.parametrize("form", FUNCTIONS)
def test_operands_are_checked_once_for_their_facts(monkeypatch: pytest.MonkeyPatch, form: str, recipe: Any) -> None:
    """Other tensors with the same facts are not checked again; other facts or another recipe are checked."""
    first = _call(form, recipe)
    checked: list[str] = []
    for name in CHECKS:

        def note(check: Any, name: str, *arguments: Any) -> Any:
            checked.append(name)
            return check(*arguments)

        monkeypatch.setattr(_args, name, partial(note, getattr(_args, name), name))
    monkeypatch.setattr(_record, "_program", lambda *_: pytest.fail("planned again"))
    asserts.bitwise(_call(form, recipe), first)
    assert not checked
    monkeypatch.undo()
    for name in CHECKS:
        monkeypatch.setattr(_args, name, lambda *_: pytest.fail("checked"))
    with pytest.raises(pytest.fail.Exception, match="checked"):
        _call(form, recipe, torch.zeros(len(first) + 1, setup(form, True).x.shape[1], dtype=torch.bfloat16))
    others = [] if recipe is None else [recipe.replace(name="another"), recipe.replace(history=recipe.history + 1)]
    for other in others:
        with pytest.raises(pytest.fail.Exception, match="checked"):
            _call(form, other)


@pytest.mark.rule("ERR-1")
def test_quantised_operands_are_checked_by_what_they_mean() -> None:
    """The same arrays along another axis, in another format or of another nominal dtype are another operand."""
    t = small("tail", "bfloat16")
    square = t.w[:, :, : t.w.shape[1]].contiguous()
    x = t.x[:, : square.shape[1]].contiguous()
    q = quantize(square, "mxfp8")
    y = grouped_linear(x, q, t.sizes)
    for _ in range(2):
        asserts.bitwise(grouped_linear(x, q, t.sizes), y)
        with asserts.refused(ValueError, ["`weight`", "along axis 1", "expected along axis 2"]):
            grouped_linear(x, dataclasses.replace(q, axis=1), t.sizes)
        with asserts.refused(ValueError, ["`weight`", "quantised as mxfp8", "FP8Block"]):
            grouped_linear(x, q, t.sizes, recipe=recipes.FP8Block)
    wide = grouped_linear(x.float(), dataclasses.replace(q, dtype="float32"), t.sizes)
    assert (y.dtype, wide.dtype) == (torch.bfloat16, torch.float32)


def test_a_cache_of_decisions_is_emptied_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "MOST", 2)
    kept: _cache.Cache[int, int] = _cache.Cache()
    assert [kept.keep(at, -at) for at in range(3)] == [0, -1, -2]
    assert kept == {2: -2}


def test_operators_refuse_what_kernels_cannot_read() -> None:
    t = small()
    square = t.x[: t.x.shape[1]].contiguous()
    (operator, (_, *facts)), *_ = operators_of(lambda: grouped_linear(square, list(t.w.clone()), t.sizes))
    for _ in range(2):
        with asserts.refused(ValueError, ["operand 0", "strides", "contiguous"]):
            operator([square.t(), *t.w.clone(), t.sizes], *facts)
        with asserts.refused(ValueError, ["operator", "mixed", "grouped_linear"]):
            operator([square, t.w[0].clone(), t.w[1, :8].clone(), *t.w[2:].clone(), t.sizes], *facts)


@pytest.mark.parametrize("listed", [False, True])
def test_tensors_without_memory_are_refused_also_after_a_call_that_ran(listed: bool) -> None:
    t = small()
    w = list(t.w.clone().unbind()) if listed else t.w.clone()
    name = "`weight[1]`" if listed else "`weight`"
    grouped_linear(t.x, w, t.sizes)
    one = w
    if isinstance(w, list):
        one = w[1] = w[1].clone()
    assert isinstance(one, Tensor)
    one.untyped_storage().resize_(0)
    with asserts.refused(ValueError, [name, "storage is empty", "restore"]):
        grouped_linear(t.x, w, t.sizes)
    zeros = _zero_tensor(t.w.shape, t.w.dtype)
    with asserts.refused(ValueError, ["`weight", "zero tensor", "zeros_like"]):
        grouped_linear(t.x, list(zeros.unbind()) if listed else zeros, t.sizes)
    with asserts.refused(ValueError, ["`x`", "zero tensor", "zeros_like"]):
        grouped_linear(_zero_tensor(t.x.shape, t.x.dtype), t.w, t.sizes)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("name", "shape", "run"),
    [
        ("x", (6, 8), lambda x: moe(x, torch.ones(4, 8), torch.ones(4, 8, 8), torch.ones(4, 8, 4), 2)),
        (
            "router",
            (4, 8),
            lambda r: moe(torch.ones(6, 8), r, torch.ones(4, 8, 8), torch.ones(4, 8, 4), 2),
        ),
        ("x", (4, 8, 8), lambda w: quantize(w, "mxfp8", axis=2)),
        ("h", (6, 8), lambda h: nn.ScaledSwiGLU()(h, torch.ones(6))),
        ("probs", (6,), lambda p: nn.ScaledSwiGLU()(torch.ones(6, 8), p)),
    ],
)
def test_every_function_names_the_tensor_that_has_no_memory(name: str, shape: tuple[int, ...], run: Any) -> None:
    freed = torch.ones(shape)
    freed.untyped_storage().resize_(0)
    with asserts.refused(ValueError, [f"`{name}`", "storage is empty", "restore"]):
        run(freed)
    with asserts.refused(ValueError, [f"`{name}`", "zero tensor", "zeros_like"]):
        run(_zero_tensor(shape, torch.float32))


@pytest.mark.rule("ERR-1", "BUF-2")
def test_buffers_without_memory_are_named() -> None:
    t = small()
    weight: Any = torch.nn.Parameter(t.w)
    weight.main_grad, out = torch.zeros(t.w.shape), torch.empty(t.x.shape[0], t.w.shape[1], dtype=t.x.dtype)
    y = grouped_linear(t.x, weight, t.sizes, wgrad_accum="main_grad")
    for each in (weight.main_grad, out):
        each.untyped_storage().resize_(0)
    with asserts.refused(RuntimeError, ["`main_grad` of `weight`", "storage is empty", "restore or allocate it"]):
        y.sum().backward()
    with asserts.refused(ValueError, ["`out`", "storage is empty"]):
        grouped_linear(t.x, t.w, t.sizes, out=out)


@pytest.mark.parametrize("freed", ["row_scale", "probs", "group_sizes", "experts", "weights", "permute"])
def test_rows_and_sizes_without_memory_are_named(freed: str) -> None:
    t = small()
    tokens, groups = t.x.shape[0], t.w.shape[0]
    wi, wo = torch.zeros(groups, 8, t.x.shape[1]), torch.zeros(groups, t.x.shape[1], 8)
    scale, sizes = torch.ones(tokens), t.sizes.clone()
    experts, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2)

    def run() -> object:
        if freed == "permute":
            return route.permute(t.x, experts, groups, probs=weights)
        if freed == "probs":
            return grouped_mlp(t.x.float(), wi, wo, sizes, activation="gelu_tanh", probs=scale)
        if freed in ("experts", "weights"):
            return routed_mlp(t.x.float(), experts, weights, wi, wo, activation="gelu_tanh")
        return grouped_linear(t.x, t.w, sizes, row_scale=scale)

    run()
    gone = {"group_sizes": sizes, "experts": experts, "weights": weights, "permute": weights}.get(freed, scale)
    gone.untyped_storage().resize_(0)
    name = "probs" if freed == "permute" else freed
    for _ in range(2):
        with asserts.refused(ValueError, [f"`{name}`", "storage is empty", "expected elements", "restore"]):
            run()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sizes_without_memory_are_not_read(dtype: torch.dtype) -> None:
    t = small()
    sizes = t.sizes.to(dtype).clone()
    sizes.untyped_storage().resize_(0)
    for run in (lambda: grouped_linear(t.x, t.w, sizes), lambda: device_sizes(sizes, "cpu")):
        with asserts.refused(ValueError, ["`group_sizes`", "storage is empty", "restore"]):
            run()


def test_tensors_of_other_types_run() -> None:
    t = small()
    expected = grouped_linear(t.x, t.w, t.sizes)
    asserts.bitwise(grouped_linear(t.x.as_subclass(Marked), t.w, t.sizes).as_subclass(Tensor), expected)
