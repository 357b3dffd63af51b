"""The experts' MLP as one differentiable operation. `grouped_core` defines the mathematics.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows: 2F for gated
activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from grouped_core import mlp as rules
from grouped_core.activations import Activation
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import NO_NEEDS, Mlp, MlpNeeds, MlpSpecs, Residuals, kept, needs_dh
from grouped_core.quantizing import NO_MEASURES
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _autocast, _saved
from torch_bridge._args import Accumulators, Arguments, Members, mlp_arguments
from torch_bridge._autograd import NOTHING, Deliver, Kept, MainGradients, Operation, Saved
from torch_bridge._calling import OPERATIONS, run
from torch_bridge._checks import MLP_NAMES
from torch_bridge._gradients import (
    WeightGradient,
    with_forms,
)
from torch_bridge._operators import call, define
from torch_bridge._scaling import DY, WEIGHT, X
from torch_bridge._tensors import StraightThrough


def grouped_mlp(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    wi: Members | QTensor[Tensor] | StraightThrough,
    wo: Members | QTensor[Tensor] | StraightThrough,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    rhs_transposed: bool = True,
    activation: str | Activation = "swiglu",
    probs: Tensor | None = None,
    wi_bias: Members | None = None,
    wo_bias: Members | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Tensor:
    """y[r] = (p[r] act(x[r] wi[g].T + wi_bias[g])) wo[g].T + p[r] wo_bias[g] for row r of group g, p = probs or 1.

    It needs few kernels: the activation and the probability are fused into the first product, and their gradients into
    the dgrad of `wo`. The hidden rows are rounded to the dtype of x before the activation. Rows past the groups are
    zero. Differentiable in x, wi, wo, probs and the biases; gradients that are not needed are neither computed nor
    prepared for.

    Args:
        x: [M, K] fp32, bf16 or fp16. Under `torch.autocast` x, the weights and the biases are cast to its dtype, as in
            `F.linear`; without it nothing is cast.
        wi: [G, W, K], gate rows first or interleaved according to the `Activation`; [G, K, W] with
            `rhs_transposed=False`; or a list of G such matrices; or a pair of gate and linear half, [G, F, K] each
            ([G, K, F]), with the same bits; the pair is concatenated only if it is quantised.
        wo: [G, K, F], or [G, F, K] with `rhs_transposed=False`; or a list.
        group_sizes: G integers, as in `grouped_linear`.
        activation: the name of a kind, with its defaults, or an `Activation`.
        probs: [M], the router's probability of each row, fp32 in the computation; the gradient has the dtype of probs.
        wi_bias: [G, W] or a list of vectors. wo_bias: [G, K] or a list.
        recipe: formats of both products; None uses the operands without quantising them.
        residuals: what is kept for backward: "save_all" the rows x [M, K], hidden [M, W] and activated [M, F],
            "save_fc1" x and hidden, "save_input" x. The choice does not change the bits.
        wgrad_accum: "main_grad", or a pair for wi and wo, each as in `grouped_linear` or None; for a wi in two tensors
            it is a list of two.
        out, grad_input: the caller's buffers for y and the gradient of x, both [M, K], as in `grouped_linear`.
        implementation: names of kernels, each for its own call; "composed" for the unfused ones. See `explain`.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: wrong shapes, devices, layouts, buffers or
            options. NotImplementedError: no kernel supports the call. RuntimeError: in backward, `main_grad` cannot be
            written, or the operation is differentiated twice.
    """
    x, (wi, wo), (wi_bias, wo_bias), owners = _autocast.operands(x, (wi, wo), (wi_bias, wo_bias))
    arguments = (x, wi, wo, group_sizes, rhs_transposed, activation, probs, wi_bias, wo_bias, recipe, residuals)
    return run(MLP.name, arguments, wgrad_accum, implementation, out, grad_input, tuple(owners), (None, None))


# ---------------------------------------------------------------------------------------------------------------------
# Operators


class MlpForward(NamedTuple):
    """Static facts of forward."""

    op: Mlp
    needs: MlpNeeds


class MlpOperands(NamedTuple):
    """Operands of forward; `extras` belong to the first product, `extras_2` to the second."""

    x: Any
    wi: Any
    wo: Any
    sizes: Any
    probs: Any
    wi_bias: Any
    wo_bias: Any
    out: Any
    extras: Any
    extras_2: Any


def _forward_rule(run: Any, static: MlpForward, o: MlpOperands) -> tuple[Any, ...]:
    operands = (o.x, o.wi, o.wo, o.sizes, o.probs, o.wi_bias, o.wo_bias, o.out)
    extras = (o.extras or NO_MEASURES, o.extras_2 or NO_MEASURES)
    return rules.mlp(run, static.op, *operands, needs=static.needs, extras=extras)[:6]


_FORWARD = define(
    "mlp",
    _forward_rule,
    MlpOperands,
    MlpForward,
    rows=("x", "probs", "out"),
    written=("out",),
    most_results=14,  # y, h, and rows and weights of both products as backward reads them
    notes_sizes=True,
)


class MlpGrads(NamedTuple):
    """Static facts of both stages of backward."""

    op: Mlp
    specs: MlpSpecs
    needs: MlpNeeds


class HiddenOperands(NamedTuple):
    """Operands of the first stage, which ends at the gradient of the hidden rows."""

    x: Any
    h: Any
    z: Any
    wi: Any
    wo: Any
    sizes: Any
    probs: Any
    wi_bias: Any
    wo_bias: Any
    dy: Any
    extras: Any
    extras_2: Any


def _hidden_rule(run: Any, static: MlpGrads, o: HiddenOperands) -> tuple[Any, ...]:
    operands = (o.x, o.h, o.z, o.wi, o.wo, o.sizes, o.probs, o.wi_bias, o.wo_bias, o.dy)
    extras = (o.extras or NO_MEASURES, o.extras_2 or NO_MEASURES)
    return rules.at_hidden(run, static.op, static.specs, *operands, needs=static.needs, extras=extras)[:6]


_AT_HIDDEN = define(
    "mlp_at_hidden",
    _hidden_rule,
    HiddenOperands,
    MlpGrads,
    rows=("x", "h", "z", "probs", "dy"),
    most_results=15,  # three gradients, two forms of dh, and z and dy as the weight gradient reads them
)


class FirstOperands(NamedTuple):
    """Operands of the second stage, the gradients of the first product."""

    x: Any
    wi: Any
    sizes: Any
    dh: Any
    of_dh: Any
    grad_input: Any
    extras: Any


def _first_rule(run: Any, static: MlpGrads, o: FirstOperands) -> tuple[Any, ...]:
    operands = (o.x, o.wi, o.sizes, o.dh, o.of_dh)
    options = {"grad_input": o.grad_input, "extras": o.extras or NO_MEASURES}
    found = rules.first_product(run, static.op, static.specs, *operands, needs=static.needs, **options)
    return found.x, found.bias, found.rows, found.dy


_FIRST_PRODUCT = define(
    "mlp_first_product",
    _first_rule,
    FirstOperands,
    MlpGrads,
    rows=("x", "dh", "of_dh", "grad_input"),
    written=("grad_input",),
    most_results=8,  # two gradients, and x and dh as the weight gradient reads them
)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward


def _forward(given: Arguments, needs: MlpNeeds, out: Tensor | None) -> tuple[Tensor, Kept]:
    (one, two), (wi, wo), (wi_bias, wo_bias) = given.scaling, given.weights, given.biases
    x, sizes, probs, training = given.x, given.sizes, given.row_scale, any(needs)
    keep = kept(given.op, needs, probs is not None, wi_bias is not None, wo_bias is not None)
    if given.caches != (None, None):
        of_wi, of_wo = rules.cached_forms(given.op, needs, keep.z)
        wi = with_forms(given.caches[0], wi, of_wi, one, training=training)
        wo = with_forms(given.caches[1], wo, of_wo, two, training=training)
    extras = [each.extras(X, WEIGHT, training=training) for each in (one, two)]
    operands = MlpOperands(x, wi, wo, sizes, probs, wi_bias, wo_bias, out, *extras)
    y, x, h, z, wi, wo = call(_FORWARD, MlpForward(given.op, needs), operands, given.x.shape[0])
    if not training:
        return y, NOTHING
    probs, wi_bias, wo_bias = (
        each if needed else None
        for each, needed in ((probs, keep.probs), (wi_bias, keep.wi_bias), (wo_bias, keep.wo_bias))
    )
    return y, Kept((x, h, z, sizes, probs, one.key, wi, wo, wi_bias, wo_bias), _saved.OF_ROWS)


def _hidden_operands(kept: list[Any], *others: Any) -> HiddenOperands:
    """The operands of the first stage, removed from the list."""
    x, h, z, sizes, probs, _, wi, wo, wi_bias, wo_bias = kept
    kept.clear()
    return HiddenOperands(x, h, z, wi, wo, sizes, probs, wi_bias, wo_bias, *others)


def _backward(
    saved: Saved, kept: list[Any], dy: Tensor | QTensor[Tensor], grad_input: Tensor | None, deliver: Deliver
) -> MainGradients:
    x, _, _, sizes, _, key, wi, *_ = kept
    op, needs, static = saved.op, saved.needs, MlpGrads(saved.op, saved.specs, saved.needs)
    extras = [each._replace(key=key).extras(X, WEIGHT, DY, training=True) for each in saved.scaling]
    operands: Any = [_hidden_operands(kept, dy, *extras)]  # `call` empties the list, and frees the hidden rows inside
    dp, db2, dh, of_dh, z, dy_form = call(_AT_HIDDEN, static, operands, saved.rows)
    if needs.wo:
        deliver(1, WeightGradient(op.fc2(), saved.specs.wo, z, dy_form, sizes))
    del z, dy, dy_form
    dx = db1 = None
    if needs_dh(needs):
        buffer = grad_input if needs.x else None
        operands = FirstOperands(x, wi, sizes, dh, of_dh, buffer, extras[0])
        dx, db1, rows, dh = call(_FIRST_PRODUCT, static, operands, saved.rows)
        if needs.wi:
            deliver(0, WeightGradient(op.fc1(), saved.specs.wi, rows, dh, sizes))
    return MainGradients(dx, dp, (db1, db2))


def _needs(x: bool, weights: Sequence[bool], probs: bool, biases: Sequence[bool]) -> MlpNeeds:
    return MlpNeeds(x, weights[0], weights[1], probs, biases[0], biases[1])


def weight_dtypes(op: Mlp, specs: MlpSpecs) -> tuple[str, ...]:
    """Dtypes of the gradients of both weights."""
    return op.fc1().gradient_dtype(specs.wi), op.fc2().gradient_dtype(specs.wo)


NAMES = (MLP_NAMES.wi, MLP_NAMES.wo)
MLP = Operation(
    name="grouped_mlp",
    weights=NAMES,
    places=(1, 2),
    scale_place=6,
    check=mlp_arguments,
    needs_names=("wi", "wo"),
    no_needs=NO_NEEDS,
    needs=_needs,
    weight_dtypes=weight_dtypes,
    forward=_forward,
    backward=_backward,
)
OPERATIONS[MLP.name] = MLP
