"""The experts' MLP with frozen weights and low-rank adapters, for rows (`grouped_mlp`) and for tokens (`routed_mlp`).

`grouped_core.lora_mlp` defines the mathematics. Letters: G groups, M rows, T tokens, k experts per token, K hidden size
of the model, F expert width, r rank.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from grouped_core import linear_spec, lora_mlp
from grouped_core import lora as adapters
from grouped_core import mlp as rules
from grouped_core.lora_mlp import Adapters, Factors, Kept, LoraMlpNeeds, PairGrads
from grouped_core.mlp_spec import Mlp, MlpSpecs, needs_dh
from grouped_core.quantizing import NO_MEASURES
from grouped_core.routing import Order
from torch_bridge import _saved
from torch_bridge._args import Arguments, mlp_arguments, positions
from torch_bridge._autograd import Deliver, Facts, Forwarded, MainGradients, Operation, Saved
from torch_bridge._calling import OPERATIONS, run
from torch_bridge._checks import ROUTED_NAMES
from torch_bridge._gradients import WeightGradient
from torch_bridge._lora_args import (
    MLP_LORA_NAMES,
    AdaptedMlp,
    AdaptedSpecs,
    adapted_mlp_arguments,
    adapted_routed_arguments,
    factor_places,
)
from torch_bridge._operators import call_prepared, define
from torch_bridge._record import Rule, prepare
from torch_bridge._routed_args import routed_arguments, rows_of_tokens
from torch_bridge._scaling import Scaling
from torch_bridge._tensors import rows_spec
from torch_bridge._weight_forms import read_by_dgrad, with_forms
from torch_bridge.sizes import every_row

NAME, ROUTED_NAME = "grouped_mlp_lora", "routed_mlp_lora"


def run_mlp(
    names: tuple[str, str],
    arguments: tuple[Any, ...],
    lora: Any,
    options: tuple[Any, Any, Any],
    wgrad_accum: Any,
    lora_wgrad_accum: Any,
    *call: Any,
    cast: tuple[int, ...],
) -> Tensor:
    """Runs an MLP of rows or of tokens, with adapters if `lora` has some.

    Args:
        names: the names of the operation without and with adapters. arguments: those of its public function, up to the
            residual policy.
        options: scaling, dropout and key of the adapters. call: the arguments `implementation`, `out` and `grad_input`.
        cast: the positions of the arguments to which autocast applies, besides adapters.
    """
    if lora is None:
        adapters.check_absent(*options, lora_wgrad_accum)
        return run(names[0], arguments, wgrad_accum, *call, cast=cast)
    adapters.check_no_weight_gradient(wgrad_accum=wgrad_accum)
    adapted = (*arguments, *lora_mlp.option(lora, *options)[1], *options)
    return run(names[1], adapted, lora_mlp.accumulators_option(lora_wgrad_accum), *call, cast=cast)


# ---------------------------------------------------------------------------------------------------------------------
# Operators


_GradFacts = tuple[Mlp, Adapters, MlpSpecs, LoraMlpNeeds, bool]
"""Static facts of a stage of backward; the last one: whether the stage makes the gradient of its B as a new tensor."""

_Operands = namedtuple("_Operands", "x wi wo sizes probs wi_bias wo_bias out a_wi b_wi a_wo b_wo key extras")
"""Operands of forward for rows; `extras` has those of both products."""

_TokenOperands = namedtuple(
    "_TokenOperands", "x experts weights wi wo tokens wi_bias wo_bias out a_wi b_wi a_wo b_wo key extras"
)
"""Operands of forward for tokens."""


_NO_EXTRAS = (NO_MEASURES, NO_MEASURES)


def _forward_rule(run: Any, static: tuple[Mlp, Adapters, LoraMlpNeeds], o: Any) -> tuple[Any, ...]:
    op, adapters, needs = static
    *operands, a_wi, b_wi, a_wo, b_wo, key, extras = o
    factors = Factors(a_wi, b_wi, a_wo, b_wo)
    given: Any = (run, op, adapters, factors, key, tuple(operands))
    (y, x, *rest), u_wi, u_wo = lora_mlp.forward(*given, needs=needs, extras=extras or _NO_EXTRAS)
    h, z, wi, wo = rest[:4]
    if op.keeps_rows:
        return y, x, h, z, wi, wo, u_wi, u_wo
    if not any(needs):
        return y, *[None] * 10
    order = x
    return y, order.sizes, order.source, order.inverse, order.probs, h, z, wi, wo, u_wi, u_wo


_FORWARD = define(
    NAME,
    _forward_rule,
    _Operands,
    rows=("x", "probs", "out"),
    written=("out",),
    most_results=16,  # y, h, the products with both A, and rows and weights in the forms that backward reads
    notes_sizes=True,
)
_ROUTED_FORWARD = define(
    ROUTED_NAME,
    _forward_rule,
    _TokenOperands,
    derived=("x", "experts", "weights", "out"),
    written=("out",),
    most_results=20,  # those of `_FORWARD`, and the order of the rows
)

_HiddenOperands = namedtuple(
    "_HiddenOperands", "x h z wi wo sizes probs wi_bias wo_bias dy u_wi u_wo b_wi a_wo b_wo key extras"
)
"""Operands of the first stage of backward for rows, which ends at the gradient of the hidden rows."""

_TokenHiddenOperands = namedtuple(
    "_TokenHiddenOperands",
    "x h z wi wo sizes source inverse probs wi_bias wo_bias dy u_wi u_wo b_wi a_wo b_wo key extras",
)
"""Operands of the first stage of backward for tokens."""


def _hidden_rule(run: Any, static: _GradFacts, o: Any) -> tuple[Any, ...]:
    op, adapters, specs, needs, new_b = static
    *operands, u_wi, u_wo, b_wi, a_wo, b_wo, key, extras = o
    options: dict[str, Any] = {"new_b": new_b, "extras": extras or _NO_EXTRAS}
    if not op.keeps_rows:
        sizes, source, inverse, probs = operands[5:9]
        operands[5:9] = [Order(sizes, source, inverse, None, probs)]
        options["weights_dtype"] = specs.probs.dtype if specs.probs else "float32"
    factors = Factors(None, b_wi, a_wo, b_wo)
    given: Any = (run, op, adapters, specs, factors, key, (u_wi, u_wo), tuple(operands), needs)
    found, grads = lora_mlp.at_hidden(*given, **options)
    return found.probs, found.wo_bias, found.dh, found.of_dh, *grads


_AT_HIDDEN = define(
    f"{NAME}_at_hidden",
    _hidden_rule,
    _HiddenOperands,
    rows=("x", "h", "z", "probs", "dy", "u_wi", "u_wo"),
    most_results=12,
)
_ROUTED_AT_HIDDEN = define(
    f"{ROUTED_NAME}_at_hidden",
    _hidden_rule,
    _TokenHiddenOperands,
    derived=("x", "h", "z", "source", "inverse", "probs", "dy", "u_wi", "u_wo"),
    most_results=12,
)

_FirstOperands = namedtuple("_FirstOperands", "x wi sizes dh of_dh u_wi a_wi b_wi key grad_input extras")
"""Operands of the second stage of backward for rows, which makes the gradients of the first product."""

_TokenFirstOperands = namedtuple(
    "_TokenFirstOperands", "x wi sizes source inverse dh of_dh u_wi a_wi b_wi key grad_input extras"
)
"""Operands of the second stage of backward for tokens."""


def _first_rule(run: Any, static: _GradFacts, o: Any) -> tuple[Any, ...]:
    op, adapters, specs, needs, new_b = static
    *operands, u_wi, a_wi, b_wi, key, grad_input, extras = o
    if not op.keeps_rows:
        sizes, source, inverse = operands[2:5]
        operands[2:5] = [Order(sizes, source, inverse, None, None)]
    given: Any = (run, op, adapters, specs, Factors(a_wi, b_wi), key, u_wi, tuple(operands), needs)
    options: dict[str, Any] = {"new_b": new_b, "grad_input": grad_input, "extras": (extras or _NO_EXTRAS)[0]}
    found, grads = lora_mlp.first_product(*given, **options)
    return found.x, found.bias, *grads


_FIRST = define(
    f"{NAME}_first_product",
    _first_rule,
    _FirstOperands,
    rows=("x", "dh", "of_dh", "u_wi", "grad_input"),
    written=("grad_input",),
    most_results=6,
)
_ROUTED_FIRST = define(
    f"{ROUTED_NAME}_first_product",
    _first_rule,
    _TokenFirstOperands,
    derived=("x", "source", "inverse", "dh", "of_dh", "u_wi", "grad_input"),
    written=("grad_input",),
    most_results=6,
)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward


def _facts(
    stages: Sequence[Rule], op: AdaptedMlp, specs: AdaptedSpecs, needs: LoraMlpNeeds, whole: Sequence[bool]
) -> Facts:
    forward, at_hidden, first = stages
    base, adapters = op
    of_base: MlpSpecs = specs.base
    has = [each is not None for each in (of_base.probs, of_base.wi_bias, of_base.wo_bias)]
    keep = lora_mlp.kept(base, adapters, needs, *has)
    static = (base, adapters, of_base, needs)
    _, new_b_wi, _, new_b_wo = whole
    backward = (prepare(at_hidden, (*static, new_b_wo)),)
    if needs_dh(lora_mlp.base_needs(adapters, needs)):
        backward = (*backward, prepare(first, (*static, new_b_wi)))
    products, forward_stage = lora_mlp.products(*op), prepare(forward, (base, adapters, needs))
    return Facts(op, specs, needs, any(needs), keep, products, forward_stage, backward)


def _weights_of(given: Arguments, facts: Facts, scaling: Scaling) -> list[Any]:
    """Returns both frozen weights, with the quantised forms that their layers keep."""
    weights = [each for _, each in given.base]
    if given.caches == (None, None):
        return weights
    base, adapters = facts.op
    needs = lora_mlp.base_needs(adapters, facts.needs)
    wanted = rules.cached_forms(base, needs, facts.keep.base.z)
    return [
        with_forms(cache, weight, forms, scaling, at, training=facts.training)
        for at, (cache, weight, forms) in enumerate(zip(given.caches, weights, wanted, strict=True))
    ]


def _forward(given: Arguments, facts: Facts, scaling: Scaling, m: Any, out: Tensor | None) -> Forwarded:
    wi, wo = _weights_of(given, facts, scaling)
    (wi_bias, wo_bias), sizes, probs, keep = given.biases, given.sizes, given.row_scale, facts.keep
    extras = scaling.extras(2, None, training=facts.training)
    # In the order of _Operands.
    operands = (given.x, wi, wo, sizes, probs, wi_bias, wo_bias, out, *given.weights, given.key, extras)
    y, x, h, z, wi, wo, u_wi, u_wo = call_prepared(facts.forward, operands, m)
    if not facts.training:
        return y, ()
    probs = probs if keep.base.probs else None
    biases = _kept_biases(given, keep)
    return y, (
        x,
        h,
        z,
        sizes,
        probs,
        wi,
        wo,
        *biases,
        u_wi,
        u_wo,
        *lora_mlp.kept_operands(keep, Factors(*given.weights)),
        given.key,
        scaling.key,
    )


def _kept_biases(given: Arguments, keep: Kept) -> tuple[Any, Any]:
    wi_bias, wo_bias = given.biases
    return wi_bias if keep.base.wi_bias else None, wo_bias if keep.base.wo_bias else None


def _forward_of_tokens(given: Arguments, facts: Facts, scaling: Scaling, m: Any, out: Tensor | None) -> Forwarded:
    x: Any = given.x
    wi, wo = _weights_of(given, facts, scaling)
    (wi_bias, wo_bias), keep = given.biases, facts.keep
    if out is not None:
        linear_spec.check_buffer(ROUTED_NAMES.out, rows_spec(out), rows_spec(x))
    extras = scaling.extras(2, None, training=facts.training)
    tokens = (x, given.sizes, given.row_scale, wi, wo, every_row(x), wi_bias, wo_bias, out)
    operands = (*tokens, *given.weights, given.key, extras)  # in the order of _TokenOperands
    y, sizes, source, inverse, probs, h, z, wi, wo, u_wi, u_wo = call_prepared(facts.forward, operands, m)
    if not facts.training:
        return y, ()
    x, probs = x if keep.base.x else None, probs if keep.base.probs else None
    order = (sizes, source, inverse, probs)
    factors = (*lora_mlp.kept_operands(keep, Factors(*given.weights)), given.key, scaling.key)
    return y, (x, h, z, *order, wi, wo, *_kept_biases(given, keep), u_wi, u_wo, *factors)


def _backward(saved: Saved, kept: list[Any], dy: Tensor, grad_input: Tensor | None, deliver: Deliver) -> MainGradients:
    """Runs both stages, each followed by the gradients of its A and B. Operands are freed once no launch reads them."""
    facts = saved.facts
    of_rows = facts.op.base.keeps_rows
    x, h, z, *kept[:] = kept
    sizes, *order = [kept.pop(0) for _ in range(1 if of_rows else 3)]
    probs, wi, wo, wi_bias, wo_bias, u_wi, u_wo, a_wi, b_wi, a_wo, b_wo, key, scaling_key = kept
    kept.clear()
    scaling, needs = saved.scaling, facts.needs
    again = x if facts.op.base.residuals.policy == "save_input" else None
    extras = scaling.extras(2, scaling_key, training=True)
    wo = read_by_dgrad(wo, facts.op.base.recipe)
    rows = (again, h, z, wi, wo, sizes, *order, probs, wi_bias, wo_bias, dy)
    operands = [(*rows, u_wi, u_wo, b_wi, a_wo, b_wo, key, extras)]  # in the order of _HiddenOperands
    del rows, again, h, z, wo, u_wo, dy
    dp, db2, dh, of_dh, *grads = call_prepared(facts.backward[0], operands, saved.rows)
    _deliver(saved, sizes, 1, PairGrads(*grads), deliver)
    del grads
    dx = db1 = None
    if len(facts.backward) > 1:
        grad_input, extras = grad_input if needs.x else None, scaling.extras(1, scaling_key, training=True)
        wi = read_by_dgrad(wi, facts.op.base.recipe) if needs.x else wi
        # In the order of _FirstOperands.
        operands = [(x, wi, sizes, *order, dh, of_dh, u_wi, a_wi, b_wi, key, grad_input, extras)]
        del x, wi, dh, of_dh, u_wi
        dx, db1, *grads = call_prepared(facts.backward[1], operands, saved.rows)
        _deliver(saved, sizes, 0, PairGrads(*grads), deliver)
    return dx, dp, (db1, db2)


def _deliver(saved: Saved, sizes: Tensor, at: int, grads: PairGrads, deliver: Deliver) -> None:
    """Delivers the gradients of A and B of product `at`: 0 for wi, 1 for wo."""
    facts = saved.facts
    needs = facts.needs[1 + 2 * at : 3 + 2 * at]
    parts = ((grads.rows_a, grads.dy_a, None), (grads.rows_b, grads.dy_b, grads.b))
    for factor, (needed, (rows, dy, made)) in enumerate(zip(needs, parts, strict=True), start=2 * at):
        product, spec = facts.products[factor], facts.specs.factors[factor]
        if needed and product is not None:
            deliver(factor, WeightGradient(product, spec, rows, dy, sizes, saved.rows, made=(made, None)))


ADAPTED_MLP = Operation(
    name=NAME,
    product=_FORWARD,
    weights=MLP_LORA_NAMES,
    rows=_saved.OF_ROWS,
    places=factor_places(mlp_arguments),
    scale_place=positions(mlp_arguments, "probs")[0],
    check=adapted_mlp_arguments,
    needs=LoraMlpNeeds,
    facts=partial(_facts, (_FORWARD, _AT_HIDDEN, _FIRST)),
    forward=_forward,
    backward=_backward,
)
ADAPTED_ROUTED = Operation(
    name=ROUTED_NAME,
    product=_ROUTED_FORWARD,
    weights=MLP_LORA_NAMES,
    rows=_saved.OF_ROWS,
    places=factor_places(routed_arguments),
    scale_place=positions(routed_arguments, "weights")[0],
    check=adapted_routed_arguments,
    needs=LoraMlpNeeds,
    facts=partial(_facts, (_ROUTED_FORWARD, _ROUTED_AT_HIDDEN, _ROUTED_FIRST)),
    forward=_forward_of_tokens,
    backward=_backward,
    count=rows_of_tokens,
)
OPERATIONS[NAME], OPERATIONS[ROUTED_NAME] = ADAPTED_MLP, ADAPTED_ROUTED
