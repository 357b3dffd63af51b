"""Adapters of the MLP: finite differences, merged float64 weights for every format, what is kept, masks, policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from grouped_core import lora, lora_mlp, mlp, rounding
from grouped_core.activations import Activation
from grouped_core.arrays import ArrayRunner, quantize
from grouped_core.formats import FORMATS, QTensor
from grouped_core.lora import Adapter
from grouped_core.lora_mlp import Adapters, Factors, LoraMlpNeeds
from grouped_core.mlp_spec import POLICIES, Mlp, MlpNames, MlpNeeds, MlpSpecs, Residuals
from grouped_core.products import operand_spec
from grouped_core.quantizing import dequantize
from grouped_core.recipes import MXFP8, FP8Block, FP8Current
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases
from tests.bounds import Bounded, Expected
from tests.core.adapter_tools import Recorder

TINY = cases.Case("tiny", (3, 0, 2), 7, 4, 3, frozenset())
WIDER = cases.Case("wider", (37, 0, 70), 120, 96, 64, frozenset())
KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)
OPERANDS = ("x", "wi", "wo", "probs", "wi_bias", "wo_bias")
ALL = LoraMlpNeeds()
NAMES = LoraMlpNeeds._fields


@dataclasses.dataclass
class Setup:
    """The MLP, its adapters, its operands by name (None where absent) and dy."""

    op: Mlp
    adapters: Adapters
    arrays: dict[str, Any]
    sizes: np.ndarray
    dy: Any
    key: np.ndarray | None

    @property
    def factors(self) -> Factors:
        """A and B of both adapters."""
        return Factors(*[self.arrays[name] for name in Factors._fields])

    def needs(self, wanted: LoraMlpNeeds = ALL) -> LoraMlpNeeds:
        """`wanted` without the operands that are absent."""
        return LoraMlpNeeds(*[need and self.arrays[n] is not None for n, need in wanted._asdict().items()])

    def forward(self, run: Any, needs: LoraMlpNeeds = lora_mlp.NO_NEEDS, **changed: Any) -> lora_mlp.Forward:
        now = dataclasses.replace(self, arrays={**self.arrays, **changed})
        x, wi, wo, probs, b1, b2 = (now.arrays[name] for name in OPERANDS)
        operands = (x, wi, wo, self.sizes, probs, b1, b2, None)
        return lora_mlp.forward(run, self.op, self.adapters, now.factors, self.key, operands, needs=needs)

    def backward(
        self, run: Any, needs: LoraMlpNeeds, into: Factors = lora_mlp.NOTHING, *, new_b: bool = True
    ) -> dict[str, Any]:
        """Every gradient in `needs`, from nothing but what is kept; `new_b`: those of B along with others if new."""
        saved, u_wi, u_wo = self.forward(run, needs)
        a = self.arrays
        keep = lora_mlp.kept(self.op, self.adapters, needs, *[a[name] is not None for name in OPERANDS[3:]])
        assert (u_wi is not None, u_wo is not None) == (keep.u_wi, keep.u_wo)
        for name in ("x", "h", "z", "wi", "wo"):
            assert (getattr(saved, name) is not None) == getattr(keep.base, name), name
        found_specs: Any = [None if a[name] is None else operand_spec(run, a[name]) for name in OPERANDS]
        specs = MlpSpecs(*found_specs)
        held = [a[name] if getattr(keep.base, name) else None for name in OPERANDS[3:]]
        factors = lora_mlp.kept_operands(keep, self.factors)
        rows: Any = (saved.x, saved.h, saved.z, saved.wi, saved.wo, self.sizes, *held, self.dy)
        given: Any = (run, self.op, self.adapters, specs, factors, self.key, (u_wi, u_wo), rows, needs)
        hidden, of_wo = lora_mlp.at_hidden(*given, new_b=new_b and into.b_wo is None)
        rows = (saved.x, saved.wi, self.sizes, hidden.dh, hidden.of_dh)
        given = (*given[:6], u_wi, rows, needs)
        first, of_wi = lora_mlp.first_product(*given, new_b=new_b and into.b_wi is None)
        of_factors = Factors(*[None if each is None else run.spec(each) for each in self.factors])
        grads = lora_mlp.grads_of_factors(run, self.op, self.adapters, of_factors, (of_wi, of_wo), self.sizes, into)
        found = {"x": first.x, "probs": hidden.probs, "wi_bias": first.bias, "wo_bias": hidden.wo_bias}
        found |= grads._asdict()
        return {name: found[name] if need else None for name, need in zip(NAMES, needs, strict=True)}


def setup(
    case: cases.Case = TINY,
    dtype: str = "float32",
    *,
    kind: str = "swiglu",
    transposed: bool = False,
    others: bool = True,
    absent: str = "",
    dropout: float = 0.0,
    rank: int = 2,
    policy: str = "save_fc1",
    exact: bool = False,
) -> Setup:
    """`others`: with probabilities and biases. `absent`: the weight without an adapter."""
    activation = Activation(kind)
    wide = activation.fc1_width(case.n)
    shapes = {"wi": (case.k, wide), "wo": (case.n, case.k), "a_wi": (case.k, rank), "b_wi": (rank, wide)}
    shapes |= {"a_wo": (case.n, rank), "b_wo": (rank, case.k)}
    held: dict[str, Any] = {}
    for name, shape in shapes.items():
        array = cases.normal((case.groups, *shape), "float32", name) / np.float32(np.sqrt(shape[0]))
        held[name] = np.ascontiguousarray(array.swapaxes(1, 2)) if transposed else array
    rows = {"x": (case.rows, case.k), "probs": (case.rows,), "dy": (case.rows, case.k)}
    held |= {name: cases.normal(shape, "float32", name) for name, shape in rows.items()}
    held |= {"wi_bias": cases.normal((case.groups, wide), "float32", "b1")}
    held |= {"wo_bias": cases.normal((case.groups, case.k), "float32", "b2")}
    for name in rows:
        held[name][case.valid :] = cases.TAIL
    for name, array in held.items():
        narrow = "float64" if exact else "float32" if name == "probs" else dtype
        held[name] = array.astype(cases.numpy_dtype(narrow))
    if not others:
        held |= dict.fromkeys(OPERANDS[3:])
    if absent:
        held |= {f"a_{absent}": None, f"b_{absent}": None}
    both = [
        None if name == absent else Adapter(f"lora[{at}]", 0.5, dropout, stream=at)
        for at, name in enumerate(("wi", "wo"))
    ]
    op = Mlp(MlpNames(), activation, transposed=transposed, residuals=Residuals(policy))
    sizes = np.array(case.sizes, np.int32)
    return Setup(op, Adapters(*both), held, sizes, held.pop("dy"), KEY if dropout else None)


@pytest.mark.rule("LOR-1", "LOR-4")
@pytest.mark.matrix(
    kind=("swiglu", "gelu_tanh"),
    transposed=(False, True),
    others=(False, True),
    absent=("", "wi", "wo"),
    dropout=(0.0, 0.4),
)
def test_gradients_are_finite_differences(kind, transposed, others, absent, dropout):
    options = {"kind": kind, "transposed": transposed, "others": others, "absent": absent, "dropout": dropout}
    s = setup(exact=True, **options)
    run, step = Oracle(exact=True), 1e-4
    for name, grad in s.backward(run, s.needs()).items():
        array = s.arrays[name]
        if array is None:
            assert grad is None
            continue
        expected = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            if name in ("x", "probs") and at[0] >= TINY.valid:
                continue
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[at] += sign * step
                ends.append(np.sum((s.dy * s.forward(run, **{name: moved}).base.y)[: TINY.valid]))
            expected[at] = (ends[0] - ends[1]) / (2 * step)
        error = bounds.FINITE_DIFFERENCES * np.max(np.abs(expected))
        asserts.within(grad, Bounded(expected, np.full_like(expected, error), "float64"), name)


BASES = ("float32", "bfloat16", "float16", "fp8_tensor", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d")


def with_base(s: Setup, base: str) -> Setup:
    """The problem with both weights in a format, quantised along the axis that forward contracts alone."""
    if base in FORMATS and not FORMATS[base].plain:
        axis = s.op.fc1().weight_axes()[0]
        s.arrays |= {name: quantize(s.arrays[name], FORMATS[base], axis=axis) for name in ("wi", "wo")}
    return s


def of_merged_weights(s: Setup) -> dict[str, np.ndarray]:
    """y and all gradients in float64: the MLP of the weights W + s A B, whose gradients are taken through A and B."""
    run = Oracle(exact=True)
    a: dict[str, Any] = {}
    for name, each in s.arrays.items():
        plain = dequantize(Oracle(), each, None, "float32") if isinstance(each, QTensor) else each
        a[name] = np.asarray(plain).astype(np.float64)
    swap = (0, 2, 1) if s.op.transposed else (0, 1, 2)
    factors = {name: a[name].transpose(swap) for name in Factors._fields}
    for name in ("wi", "wo"):
        a[name] = a[name] + (0.5 * factors[f"a_{name}"] @ factors[f"b_{name}"]).transpose(swap)
    x, wi, wo, p, b1, b2 = (a[name] for name in OPERANDS)
    dy = np.asarray(s.dy).astype(np.float64)
    made = mlp.mlp(run, s.op, x, wi, wo, s.sizes, p, b1, b2, needs=MlpNeeds(wo=False))
    specs = MlpSpecs(*[run.spec(each) for each in (x, wi, wo, p, b1, b2)])
    main = mlp.main_grads(run, s.op, specs, x, made.h, None, wi, wo, s.sizes, p, b1, b2, dy, MlpNeeds())
    grads: dict[str, Any] = {
        "y": made.y,
        "x": main.x,
        "probs": main.probs,
        "wi_bias": main.wi_bias,
        "wo_bias": main.wo_bias,
    }
    weights = {"wi": mlp.weight_grad(run, s.op.fc1(), specs.wi, x, main.dh, s.sizes)}
    weights["wo"] = mlp.weight_grad(run, s.op.fc2(), specs.wo, main.z, dy, s.sizes)
    for name, grad in weights.items():
        grad = grad.transpose(swap)
        grads[f"a_{name}"] = (0.5 * grad @ factors[f"b_{name}"].swapaxes(1, 2)).transpose(swap)
        grads[f"b_{name}"] = (0.5 * factors[f"a_{name}"].swapaxes(1, 2) @ grad).transpose(swap)
    return grads


def bounded(s: Setup) -> Setup:
    """The same problem for the runner that bounds errors."""
    kept = {n: each if each is None or isinstance(each, QTensor) else Bounded.of(each) for n, each in s.arrays.items()}
    return dataclasses.replace(s, arrays=kept, dy=Bounded.of(s.dy))


@pytest.mark.rule("LOR-1", "LOR-2", "LOR-4")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_base_follows_merged_weights_in_float64(base, transposed):
    """Native results within the rounding of the products; backward reads the codes that were made for forward."""
    dtype = base if base in cases.DTYPES else "bfloat16"
    s = with_base(setup(WIDER, dtype, transposed=transposed, rank=8), base)
    run, exact = ArrayRunner(s.dy), of_merged_weights(s)
    found = {"y": s.forward(run).base.y, **s.backward(run, s.needs())}
    limits = {"y": bounded(s).forward(Expected()).base.y, **bounded(s).backward(Expected(), s.needs())}
    for name, array in exact.items():
        valid = slice(0, WIDER.valid) if name in ("y", "x", "probs") else slice(None)
        limit, kept = limits[name].error[valid], run.spec(found[name]).dtype
        asserts.within(found[name][valid], Bounded(array[valid], limit, kept), name)
        if name in Factors._fields:
            asserts.zero(found[name][1], f"{name} of an empty group")
    for name in ("y", "x", "probs"):
        asserts.zero(found[name][WIDER.valid :], f"tail of {name}")


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("others", [False, True])
def test_step_0_is_bitwise_the_base(base, others):
    dtype = base if base in cases.DTYPES else "bfloat16"
    s = with_base(setup(WIDER, dtype, transposed=True, others=others, rank=8), base)
    run, a = ArrayRunner(s.dy), s.arrays
    zeros = {name: np.zeros_like(a[name]) for name in ("b_wi", "b_wo")}
    x, wi, wo, p, b1, b2 = (a[name] for name in OPERANDS)
    alone = mlp.mlp(run, s.op, x, wi, wo, s.sizes, p, b1, b2).y
    asserts.bitwise(s.forward(run, **zeros).base.y, alone)
    for name in ("b_wi", "b_wo"):
        other = {each: zero for each, zero in zeros.items() if each != name}
        assert np.any(np.asarray(s.forward(run, **other).base.y) != alone), f"{name} does nothing"


SOME_NEEDS = (
    ALL,
    lora_mlp.NO_NEEDS,
    *(lora_mlp.NO_NEEDS._replace(**{name: True}) for name in NAMES),
    *(ALL._replace(**{name: False}) for name in NAMES),
)


@pytest.mark.rule("LOR-2", "LOR-4", "MLP-9", "MLP-11", "ALL-4")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("absent", ["", "wi", "wo"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_what_is_kept_is_enough_and_policies_agree(policy, absent, dropout):
    options: dict[str, Any] = {"absent": absent, "dropout": dropout}
    s, reference = (setup(dtype="bfloat16", policy=each, **options) for each in (policy, "save_fc1"))
    run = Oracle()
    full = reference.backward(run, reference.needs())
    for wanted in SOME_NEEDS:
        needs = s.needs(wanted)
        if not any(needs):
            assert s.forward(run, needs)[1:] == (None, None)
            continue
        for name, grad in s.backward(run, needs).items():
            assert (grad is not None) == getattr(needs, name), f"{name} with {needs}"
            if grad is not None:
                asserts.bitwise(grad, full[name], f"{name} with {needs} under {policy}")


@pytest.mark.rule("LOR-2")
@pytest.mark.parametrize("wanted", SOME_NEEDS[2:])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_weight_gradient_of_the_base_is_launched(wanted, policy):
    s, run = setup(exact=True, policy=policy), Recorder()
    needs = s.needs(wanted)
    s.backward(run, needs)
    assert run.gradients == sorted(s.arrays[name].shape for name in Factors._fields if getattr(needs, name))
    through_wo = lora_mlp.kept(s.op, s.adapters, needs, True, True, True).factors.b_wo
    at_once = (needs.b_wi and (needs.x or needs.a_wi)) + (needs.b_wo and through_wo)
    assert run.count("low_rank_grads") == at_once


@pytest.mark.rule("LOR-4", "MLP-9", "ALL-1")
@pytest.mark.matrix(
    dtype=cases.DTYPES,
    policy=POLICIES,
    transposed=(False, True),
    others=(False, True),
    absent=("", "wi", "wo"),
    dropout=(0.0, 0.4),
    recipe=(None, FP8Current, MXFP8),
    base=("", "mxfp4"),
    frozen=("", *NAMES[:5]),
    valid=lambda dtype, recipe, base: dtype == "bfloat16" or (recipe is None and (not base or dtype == "float32")),
)
def test_gradients_of_b_made_along_with_others_have_the_same_bits(
    dtype, policy, transposed, others, absent, dropout, recipe, base, frozen
):
    options: dict[str, Any] = {"transposed": transposed, "others": others, "absent": absent, "dropout": dropout}
    s = setup(WIDER, dtype, policy=policy, rank=8, **options)
    s.op = dataclasses.replace(s.op, recipe=recipe if not base else None)
    s = with_base(s, base) if base else s
    run, needs = ArrayRunner(s.dy), s.needs(ALL._replace(**{frozen: False} if frozen else {}))
    expected = s.backward(run, needs, new_b=False)
    for name, grad in s.backward(run, needs).items():
        assert (grad is None) == (expected[name] is None), name
        if grad is not None:
            asserts.bitwise(grad, expected[name], name)


@pytest.mark.rule("LOR-4", "MAT-11")
def test_gradients_of_b_that_are_accumulated_are_products_of_their_own():
    s = setup(exact=True)
    into = Factors(None, np.zeros_like(s.arrays["b_wi"]), None, None)
    for destinations, count in ((into, 1), (into._replace(b_wo=np.zeros_like(s.arrays["b_wo"])), 0)):
        run = Recorder()
        s.backward(run, s.needs(), into=destinations)
        assert run.count("low_rank_grads") == count
        assert run.gradients == sorted(s.arrays[name].shape for name in Factors._fields)


@pytest.mark.rule("LOR-2", "LOR-4")
@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (("a_wi", "b_wi", "a_wo", "b_wo"), "x h wo u_wi u_wo a_wo b_wi b_wo"),
        (("b_wo",), "u_wo"),
        (("a_wo", "b_wo"), "z u_wo b_wo"),
        (("a_wi", "b_wi"), "x h wo u_wi a_wo b_wi b_wo"),
        (("x",), "h wi wo a_wi b_wi a_wo b_wo"),
    ],
)
def test_kept_arrays(wanted, kept):
    s = setup(others=False)
    needs = lora_mlp.NO_NEEDS._replace(**dict.fromkeys(wanted, True))
    found = lora_mlp.kept(s.op, s.adapters, needs, False, False, False)
    named = {**found.base._asdict(), "u_wi": found.u_wi, "u_wo": found.u_wo, **found.factors._asdict()}
    assert {name for name, keeps in named.items() if keeps} == set(kept.split())


def dropped(rows: np.ndarray, stream: int, rate: float, valid: int, sizes: np.ndarray) -> np.ndarray:
    """Rows without the elements that the specification drops."""
    found, start = np.asarray(rows).copy(), 0
    for g, end in enumerate(np.cumsum(sizes)):
        words = rounding.random_words(int(KEY[0]) | int(KEY[1]) << 32, end - start, rows.shape[1], g, stream)
        found[start:end] *= np.where((words >> 8) * 2.0**-24 < rate, 0, np.float32(1 / (1 - rate)))
        start = end
    found[valid:] = 0
    return found


@pytest.mark.rule("LOR-1")
def test_the_option_numbers_the_masks_of_both_products():
    pair = (np.zeros(0), np.zeros(0))
    for given, streams in (((pair, pair), [0, 1]), ((pair, None), [0, None]), ((None, pair), [None, 1])):
        static, _ = lora_mlp.option(given, 0.5, 0.25, np.zeros(2, np.uint32))
        assert [None if each is None else each.stream for each in static] == streams


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("weight", ["wi", "wo"])
def test_each_product_has_masks_of_its_own(weight):
    """Those of x are drawn from stream 0, those of the activated rows from stream 1."""
    rate, other = 0.25, "wo" if weight == "wi" else "wi"
    s = setup(WIDER, absent=other, others=False, dropout=rate, rank=8, policy="save_all")
    s.arrays[weight] = np.zeros_like(s.arrays[weight])
    run = ArrayRunner(s.dy)
    plain = Adapter("lora", 0.5)
    if weight == "wi":
        x = dropped(s.arrays["x"], 0, rate, WIDER.valid, s.sizes)
        without = dataclasses.replace(s, adapters=Adapters(plain, None), key=None)
        expected = without.forward(run, x=x).base.y
    else:
        saved = s.forward(run, lora_mlp.NO_NEEDS._replace(a_wo=True)).base
        z = dropped(saved.z, 1, rate, WIDER.valid, s.sizes)
        factors = s.arrays["a_wo"], s.arrays["b_wo"]
        expected = lora.forward(run, s.op.fc2(), plain, z, s.arrays["wo"], *factors, s.sizes).y
    asserts.bitwise(s.forward(run).base.y, expected)


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("recipe", [FP8Current, FP8Block, MXFP8], ids=lambda r: r.name)
def test_a_recipe_concerns_the_base_alone(recipe):
    """With a base of zeros, the recipe changes nothing: adapters run in the dtype of x, forward and backward."""
    plain = setup(WIDER, "bfloat16", others=False, rank=8)
    for name in ("wi", "wo"):
        plain.arrays[name] = np.zeros_like(plain.arrays[name])
    quantised = dataclasses.replace(plain, op=dataclasses.replace(plain.op, recipe=recipe))
    run = ArrayRunner(plain.dy)
    asserts.bitwise(quantised.forward(run).base.y, plain.forward(run).base.y)
    expected = plain.backward(run, plain.needs())
    for name, grad in quantised.backward(run, plain.needs()).items():
        if grad is not None:
            asserts.bitwise(grad, expected[name], name)


@pytest.mark.rule("LOR-4", "MAT-11")
def test_gradients_are_added_to_accumulators():
    s = setup(WIDER, "bfloat16", rank=8)
    run = ArrayRunner(s.dy)
    fresh = s.backward(run, s.needs())
    into = Factors(*[np.full(each.shape, 0.5, np.float32) for each in s.factors])
    s.backward(run, s.needs(), into=into)
    relative, absolute = bounds.ADDED
    for name, array in into._asdict().items():
        asserts.filled(array[1], 0.5, f"{name} of an empty group")
        added = (array - np.float32(0.5)).astype(np.float64)
        limit = relative * np.abs(added) + absolute * (1 + np.abs(added))
        asserts.within(fresh[name], Bounded(added, limit, "bfloat16"), name)
