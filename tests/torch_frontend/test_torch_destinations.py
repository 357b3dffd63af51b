"""Destinations of weight gradients: their dtypes and layouts, lists of them, and those that cannot be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from grouped_core.activations import Activation
from tests import asserts, bounds, cases
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import problem
from tests.torch_frontend.gradient_tools import as_argument, members_of, plain_gradient, stacked
from tests.torch_frontend.nn_tools import CASE, main_grads
from tests.torch_frontend.torch_tools import leaf, operation, small
from torch_bridge import MXFP8, grouped_linear, grouped_mlp, nn, quantize, straight_through


@pytest.mark.rule("GRD-8")
@pytest.mark.rule("MAT-11")
@pytest.mark.matrix(
    weight_dtype=cases.DTYPES,
    dtype=cases.DTYPES,
    listed=(False, True),
    overwrite=(False, True),
    by=("tensor", "main_grad"),
)
def test_destinations_of_any_wide_dtype(weight_dtype: str, dtype: str, listed: bool, overwrite: bool, by: str) -> None:
    problem = cases.problem(cases.named(CASE), weight_dtype, transposed=True)
    t = small(CASE, weight_dtype)
    parameters = members_of(t.w, listed)
    start = cases.normal(t.w.shape, dtype, "accumulator")
    held = [torch.from_numpy(start.astype("float32")).to(getattr(torch, dtype))]
    held = [each.clone() for each in held[0]] if listed else held
    for parameter, buffer in zip(parameters, held, strict=True):
        parameter.overwrite_main_grad = overwrite
        if by == "main_grad":
            parameter.main_grad = buffer
    accum = by if by == "main_grad" else as_argument(held, listed)
    addresses = [each.data_ptr() for each in held]
    grouped_linear(t.x, as_argument(parameters, listed), t.sizes, wgrad_accum=accum).backward(t.dy)
    assert [each.data_ptr() for each in held] == addresses
    expected = bounds.expect_linear_grads(
        operation(),
        problem.x,
        problem.w,
        problem.group_sizes,
        None,
        None,
        problem.dy,
        into_w=start,
        accumulate=not overwrite,
    )
    asserts.within(stacked(held, listed), expected.w, "main_grad")
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.rule("MAT-5")
def test_accumulators_of_a_list_with_frozen_members() -> None:
    t = small("jagged")
    plain = plain_gradient(t)
    weight = [leaf(w, g != 1) for g, w in enumerate(t.w)]
    accumulators: list[Tensor | None] = [torch.zeros(w.shape) for w in weight]
    accumulators[1] = None
    grouped_linear(t.x, weight, t.sizes, wgrad_accum=accumulators).backward(t.dy)
    for g, accumulator in enumerate(accumulators):
        assert weight[g].grad is None
        if accumulator is not None:
            asserts.bitwise(accumulator, plain[g])
    accumulators[0] = None
    with asserts.refused(ValueError, ["`wgrad_accum[0]`", "None", "`weight[0]` needs a gradient", "freeze"]):
        grouped_linear(t.x, weight, t.sizes, wgrad_accum=accumulators)


@pytest.mark.rule("MAT-11")
def test_accumulation_over_microbatches_adds_up() -> None:
    t = small()
    weight, accumulator = leaf(t.w), torch.zeros(t.w.shape)
    for _ in range(2):
        grouped_linear(t.x, weight, t.sizes, wgrad_accum=accumulator).backward(t.dy)
    asserts.bitwise(accumulator, 2 * plain_gradient(t))
    y = grouped_linear(t.x, weight, t.sizes, wgrad_accum=accumulator)
    accumulator.zero_()  # between forward and backward, as an optimizer step in between would
    y.backward(t.dy)
    asserts.bitwise(accumulator, plain_gradient(t))


@pytest.mark.rule("DEF-9")
@pytest.mark.rule("GRD-6")
@pytest.mark.rule("GRD-7")
@pytest.mark.rule("GRD-8")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("made", "fragments"),
    [
        (lambda w: None, ["missing", "views as", "create it", "not a cast"]),
        (lambda w: "grad", ["`: str", "views as", "create it", "not a cast"]),
        (lambda w: torch.zeros(w.numel() + 1), ["shape (", "contiguous", "views as", "allocate"]),
        (lambda w: torch.zeros((*w.shape, 2))[..., 0], ["strides", "without a copy", "allocate"]),
        (lambda w: torch.zeros(w.mT.shape).mT, ["strides", "without a copy", "allocate"]),
        (
            lambda w: torch.zeros(w.shape, dtype=torch.float64),
            ["torch.float64", "float32, bfloat16, float16", "allocate"],
        ),
        (lambda w: torch.zeros(w.shape, device="meta"), ["meta", "expected it on cpu", "allocate"]),
    ],
    ids=["missing", "kind", "numel", "strided", "transposed", "dtype", "device"],
)
def test_main_grads_that_cannot_be_written(made: Any, fragments: list[str], listed: bool) -> None:
    t = small()
    parameters = members_of(t.w, listed)
    for parameter in parameters:
        parameter.main_grad = made(parameter)
    with torch.no_grad():  # inference never needs one
        grouped_linear(t.x, as_argument(parameters, listed), t.sizes, wgrad_accum="main_grad")
    y = grouped_linear(t.x, as_argument(parameters, listed), t.sizes, wgrad_accum="main_grad")
    name = "`weight[0]`" if listed else "`weight`"
    with asserts.refused(RuntimeError, ["`main_grad` of", name, *fragments]):
        y.backward(t.dy)


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("single", [False, True])
def test_a_layer_names_the_parameter_without_a_destination(single: bool, lora_rank: int | None) -> None:
    options: dict[str, Any] = {"single_grouped_weight": single, "lora_rank": lora_rank}
    layer = nn.GroupedMLP(3, 8, 8, accumulate_into_main_grad=True, **options)
    missing = "linear_fc2.lora_B" if lora_rank else "linear_fc2.weight" if single else "linear_fc2.weight1"
    main_grads([each for name, each in layer.named_parameters() if name != missing], 0.0)
    y = layer(torch.ones(6, 8), [1, 2, 3])
    with asserts.refused(RuntimeError, [f"`main_grad` of `{missing}`", "missing", "create it"]):
        y.sum().backward()


@pytest.mark.rule("GRD-6")
def test_a_cast_in_place_of_the_parameter() -> None:
    t = small()
    parameter: Any = Parameter(t.w.double())
    parameter.main_grad = torch.zeros(t.w.shape)
    y = grouped_linear(t.x, parameter.float(), t.sizes, wgrad_accum="main_grad")
    with asserts.refused(RuntimeError, ["`main_grad` of `weight`", "missing", "expected", "not a cast or a view"]):
        y.backward(t.dy)


@pytest.mark.rule("MAT-5", "QNT-4")
@pytest.mark.parametrize("needs_x", [False, True], ids=["", "dx"])
def test_an_accumulator_of_a_quantised_weight_without_a_master_is_written(needs_x: bool) -> None:
    """Whether or not anything else needs a gradient."""
    t = small("jagged", "bfloat16")
    q = quantize(t.w, "mxfp8", axis=(2, 1))
    master, wanted = leaf(t.w), torch.ones(t.w.shape)
    grouped_linear(t.x, straight_through(master, q), t.sizes, recipe=MXFP8, wgrad_accum=wanted).backward(t.dy)

    def run(x: Any, accum: Any) -> Any:
        return grouped_linear(x, q, t.sizes, recipe=MXFP8, wgrad_accum=accum)

    def compiled(x: Any, accum: Any) -> Any:
        return torch.compile(run, fullgraph=True, backend="aot_eager")(x, accum)

    for f in (run, compiled) if needs_x else (run,):
        x, accum = leaf(t.x, needs_x), torch.ones(t.w.shape)
        f(x, accum).backward(t.dy)
        asserts.bitwise(accum, wanted)
        assert (x.grad is not None) == needs_x
    if not needs_x:  # a graph has a backward for its own inputs alone
        with pytest.raises(Exception, match="quantised weight without a master"):
            compiled(leaf(t.x, False), torch.ones(t.w.shape))
        with torch.no_grad():
            assert not run(t.x, torch.ones(t.w.shape)).requires_grad


@pytest.mark.rule("MLP-4", "QNT-4")
@pytest.mark.parametrize("policy", ["save_all", "save_fc1", "save_input"])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=["both", "wi", "wo"])
@pytest.mark.parametrize("needs_x", [False, True], ids=["", "dx"])
def test_accumulators_of_quantised_weights_of_an_mlp_are_written(
    needs_x: bool, given: tuple[bool, bool], policy: str
) -> None:
    of = cases.named(CASE)
    operands, dy = problem(of, "bfloat16", Activation("swiglu"), transposed=True)
    t: dict[str, Any] = {name: None if each is None else to_torch(each) for name, each in operands.items()}
    weights = [t["wi"], t["wo"]]
    held = [quantize(each, "mxfp8", axis=(2, 1)) for each in weights]
    masters = [straight_through(leaf(each), q) for each, q in zip(weights, held, strict=True)]

    def run(wi: Any, wo: Any) -> tuple[Tensor | None, list[Tensor]]:
        x, accums = leaf(t["x"], needs_x), [torch.ones(each.shape) for each in weights]
        pair = tuple([each if one else None for each, one in zip(accums, given, strict=True)])
        options: Any = {"recipe": MXFP8, "residuals": policy, "wgrad_accum": pair}
        grouped_mlp(x, wi, wo, t["group_sizes"], probs=t["probs"], **options).backward(to_torch(dy))
        return x.grad, accums

    (dx, found), (dx_of_masters, wanted) = run(*held), run(*masters)
    if needs_x:
        asserts.bitwise(dx, dx_of_masters)
    for each, one in zip(found, wanted, strict=True):
        asserts.bitwise(each, one)


@pytest.mark.rule("ERR-1", "QNT-4")
@pytest.mark.parametrize("given", ["others", 3, [torch.zeros(1)]], ids=["text", "number", "list"])
def test_what_is_no_accumulator_of_a_quantised_weight_is_refused(given: Any) -> None:
    t = small("jagged", "bfloat16")
    q = quantize(t.w, "mxfp8", axis=(2, 1))
    with asserts.refused(ValueError, ["`wgrad_accum`", "expected a tensor", "quantised and packed", "pass one"]):
        grouped_linear(t.x, q, t.sizes, recipe=MXFP8, wgrad_accum=given)
