"""The experts' MLP as one differentiable operation. `grouped_core` defines the mathematics.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows: 2F for gated
activations, else F.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from grouped_core import mlp as rules
from grouped_core.activations import Activation
from grouped_core.formats import QTensor
from grouped_core.gradients import with_weight_grad
from grouped_core.mlp_spec import Mlp, MlpNeeds, MlpSpecs, Residuals, kept, needs_dh
from grouped_core.quantizing import NO_MEASURES
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _adapted_mlp, _saved
from torch_bridge._args import Accumulators, Arguments, Members, mlp_arguments, positions
from torch_bridge._autograd import Deliver, Facts, Forwarded, MainGradients, Operation, Saved
from torch_bridge._calling import OPERATIONS
from torch_bridge._checks import MLP_NAMES
from torch_bridge._gradients import WeightGradient
from torch_bridge._operators import call_prepared, define
from torch_bridge._record import Rule, prepare
from torch_bridge._scaling import Scaling
from torch_bridge._tensors import StraightThrough
from torch_bridge._weight_forms import read_by_dgrad, with_forms


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
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1,  # not 1.0, which Dynamo would make a symbol
    lora_dropout: float = 0,
    lora_key: Tensor | None = None,
    lora_wgrad_accum: str | Sequence[Any] | None = None,
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
        lora: adapters of both weights, ((A, B) of wi, (A, B) of wo), either pair or None; the weights are then frozen
            (docs/lora.md). A [G, r, K] and B [G, W, r] of wi, A [G, r, F] and B [G, K, r] of wo, as in
            `grouped_linear`; with `rhs_transposed=False` the last two axes are swapped.
        lora_scaling, lora_dropout, lora_key: as in `grouped_linear`, for both adapters; each draws masks of its own.
        lora_wgrad_accum: "main_grad", or accumulators in the structure of `lora`.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: wrong shapes, devices, layouts, buffers or
            options. NotImplementedError: no kernel supports the call. RuntimeError: in backward, `main_grad` cannot be
            written, or the operation is differentiated twice.
    """
    arguments = (x, wi, wo, group_sizes, rhs_transposed, activation, probs, wi_bias, wo_bias, recipe, residuals)
    names, options = (MLP.name, _adapted_mlp.NAME), (lora_scaling, lora_dropout, lora_key)
    of_lora = (lora, options, wgrad_accum, lora_wgrad_accum)
    return _adapted_mlp.run_mlp(names, arguments, *of_lora, implementation, out, grad_input, cast=_CAST)


_CAST = positions(mlp_arguments, "x", "wi", "wo", "wi_bias", "wo_bias")
"""The positions of the arguments that autocast casts, besides adapters."""


# ---------------------------------------------------------------------------------------------------------------------
# Operators


NO_EXTRAS = (NO_MEASURES, NO_MEASURES)
_ForwardOperands = namedtuple("_ForwardOperands", "x wi wo sizes probs wi_bias wo_bias out extras")
"""Operands of forward, in the order of `rules.mlp`; `extras` has those of both products."""


def _forward_rule(run: Any, static: tuple[Mlp, MlpNeeds], o: _ForwardOperands) -> tuple[Any, ...]:
    op, needs = static
    return rules.mlp(run, op, *o[:-1], needs=needs, extras=o.extras or NO_EXTRAS)[:6]


_FORWARD = define(
    "mlp",
    _forward_rule,
    _ForwardOperands,
    rows=("x", "probs", "out"),
    written=("out",),
    most_results=14,  # y, h, and rows and weights of both products in the forms that backward reads
    notes_sizes=True,
)

GradFacts = tuple[Mlp, MlpSpecs, MlpNeeds, bool]
"""Static facts of both stages of backward; the last: whether the stage also computes the gradient of its weight."""

_HiddenOperands = namedtuple("_HiddenOperands", "x h z wi wo sizes probs wi_bias wo_bias dy extras")
"""Operands of the first stage, which ends at the gradient of the hidden rows, in the order of `rules.at_hidden`."""


def _hidden_rule(run: Any, static: GradFacts, o: _HiddenOperands) -> tuple[Any, ...]:
    op, specs, needs, new_wo = static
    *found, z, dy = rules.at_hidden(run, op, specs, *o[:-1], needs=needs, extras=o.extras or NO_EXTRAS)[:6]
    return *found, *with_weight_grad(run, op.fc2(), specs.wo, z, dy, o.sizes, wanted=new_wo)


_AT_HIDDEN = define(
    "mlp_at_hidden",
    _hidden_rule,
    _HiddenOperands,
    rows=("x", "h", "z", "probs", "dy"),
    most_results=15,  # three gradients, two forms of dh; the gradient of wo, or z and dy in the forms that it reads
)

_FirstOperands = namedtuple("_FirstOperands", "dh of_dh x wi sizes grad_input extras")
"""Operands of the second stage, the gradients of the first product; dh and its codes come from the first stage."""


def _first_rule(run: Any, static: GradFacts, o: _FirstOperands) -> tuple[Any, ...]:
    op, specs, needs, new_wi = static
    options = {"grad_input": o.grad_input, "extras": (o.extras or NO_EXTRAS)[0]}
    found = rules.first_product(run, op, specs, o.x, o.wi, o.sizes, o.dh, o.of_dh, needs=needs, **options)
    own = with_weight_grad(run, op.fc1(), specs.wi, found.rows, found.dy, o.sizes, wanted=new_wi)
    return found.x, found.bias, *own


_FIRST_PRODUCT = define(
    "mlp_first_product",
    _first_rule,
    _FirstOperands,
    rows=("x", "dh", "of_dh", "grad_input"),
    written=("grad_input",),
    most_results=8,  # two gradients, and that of wi, or x and dh in the forms that it reads
)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward


def facts_of(stages: Sequence[Rule], op: Mlp, specs: MlpSpecs, needs: MlpNeeds, whole: Sequence[bool]) -> Facts:
    """Returns the facts of an MLP with these operators; the last one runs only if hidden rows need a gradient."""
    forward, at_hidden, first_product = stages
    keep = kept(op, needs, specs.probs is not None, specs.wi_bias is not None, specs.wo_bias is not None)
    backward = (prepare(at_hidden, (op, specs, needs, needs.wo and whole[1])),)
    if needs_dh(needs):
        backward = (*backward, prepare(first_product, (op, specs, needs, needs.wi and whole[0])))
    return Facts(op, specs, needs, any(needs), keep, (op.fc1(), op.fc2()), prepare(forward, (op, needs)), backward)


def weights_of(given: Arguments, facts: Facts, scaling: Scaling) -> tuple[Any, Any]:
    """Returns (wi, wo), with the quantised forms that their layers keep."""
    wi, wo = given.weights
    if given.caches == (None, None):
        return wi, wo
    training, (of_wi, of_wo) = facts.training, rules.cached_forms(facts.op, facts.needs, facts.keep.z)
    wi = with_forms(given.caches[0], wi, of_wi, scaling, 0, training=training)
    return wi, with_forms(given.caches[1], wo, of_wo, scaling, 1, training=training)


def _forward(given: Arguments, facts: Facts, scaling: Scaling, m: Any, out: Tensor | None) -> Forwarded:
    (wi, wo), (wi_bias, wo_bias) = weights_of(given, facts, scaling), given.biases
    x, sizes, probs, training, keep = given.x, given.sizes, given.row_scale, facts.training, facts.keep
    extras = scaling.extras(2, None, training=training)
    operands = (x, wi, wo, sizes, probs, wi_bias, wo_bias, out, extras)  # in the order of _ForwardOperands
    y, x, h, z, wi, wo = call_prepared(facts.forward, operands, m)
    if not training:
        return y, ()
    probs = probs if keep.probs else None
    wi_bias, wo_bias = wi_bias if keep.wi_bias else None, wo_bias if keep.wo_bias else None
    return y, (x, h, z, sizes, probs, scaling.key, wi, wo, wi_bias, wo_bias)


def _backward(
    saved: Saved, kept: list[Any], dy: Tensor | QTensor[Tensor], grad_input: Tensor | None, deliver: Deliver
) -> MainGradients:
    x, h, z, sizes, probs, key, wi, wo, wi_bias, wo_bias = kept
    kept.clear()
    scaling, grad_input = saved.scaling, grad_input if saved.facts.needs.x else None
    extras = scaling.extras(2, key, training=True)
    wo = read_by_dgrad(wo, saved.facts.op.recipe)
    at_hidden = [(x, h, z, wi, wo, sizes, probs, wi_bias, wo_bias, dy, extras)]  # in the order of _HiddenOperands
    extras = scaling.extras(1, key, training=True)
    first = [(x, wi, sizes, grad_input, extras)]  # in the order of _FirstOperands, from x on
    del x, h, z, wi, wo, dy
    return in_stages(saved, sizes, at_hidden, first, deliver)


def in_stages(
    saved: Saved,
    sizes: Tensor,
    at_hidden: list[tuple[Any, ...]],
    first: list[tuple[Any, ...]],
    deliver: Deliver,
    of_wi: Callable[..., WeightGradient] = WeightGradient,
) -> MainGradients:
    """Runs backward in two stages, and delivers the gradient of a weight after each.

    Args:
        at_hidden, first: two lists, each with the operands of one stage; `first` is without the results of the first
            stage, and x and wi are at its front. Both are emptied, and the caller must hold none of these operands, so
            that rows and quantised weights are freed once no launch reads them.
        of_wi: makes the gradient of wi from the arguments of `WeightGradient`.
    """
    facts = saved.facts
    needs, specs, (fc1, fc2) = facts.needs, facts.specs, facts.products
    dp, db2, dh, of_dh, z, dy, *made = call_prepared(facts.backward[0], at_hidden, saved.rows)
    if needs.wo:
        deliver(1, WeightGradient(fc2, specs.wo, z, dy, sizes, saved.rows, made=made))
    del z, dy
    dx = db1 = None
    if len(facts.backward) > 1:
        x, wi, *others = first.pop()
        wi = read_by_dgrad(wi, facts.op.recipe) if needs.x else wi
        operands = [(dh, of_dh, x, wi, *others)]  # in the order of _FirstOperands, or that of the caller
        del x, wi, others, dh, of_dh
        dx, db1, rows, dh, *made = call_prepared(facts.backward[1], operands, saved.rows)
        if needs.wi:
            deliver(0, of_wi(fc1, specs.wi, rows, dh, sizes, saved.rows, made=made))
    return dx, dp, (db1, db2)


MLP = Operation(
    name="grouped_mlp",
    product=_FORWARD,
    weights=(MLP_NAMES.wi, MLP_NAMES.wo),
    rows=_saved.OF_ROWS,
    places=positions(mlp_arguments, "wi", "wo"),
    scale_place=positions(mlp_arguments, "probs")[0],
    check=mlp_arguments,
    needs=MlpNeeds,
    facts=partial(facts_of, (_FORWARD, _AT_HIDDEN, _FIRST_PRODUCT)),
    forward=_forward,
    backward=_backward,
)
OPERATIONS[MLP.name] = MLP
