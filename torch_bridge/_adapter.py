"""The grouped linear operation of a frozen weight with a low-rank adapter; `grouped_core.lora` defines the mathematics.

Letters: G groups, M rows, K in, N out, r rank.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core import gradients, lora, quantizing
from grouped_core.gradients import LinearSpecs
from grouped_core.linear_spec import Linear
from grouped_core.lora import Adapter, LoraNeeds
from torch_bridge import _saved
from torch_bridge._args import Arguments, positions
from torch_bridge._autograd import Deliver, Facts, Forwarded, MainGradients, Operation, Saved
from torch_bridge._calling import OPERATIONS
from torch_bridge._gradients import WeightGradient
from torch_bridge._lora_args import LORA_NAMES, Adapted, AdaptedSpecs, adapted_arguments
from torch_bridge._operators import call, call_prepared, define
from torch_bridge._record import prepare
from torch_bridge._scaling import Scaling
from torch_bridge._weight_forms import read_by_dgrad, with_forms

NAME = "grouped_linear_lora"


# ---------------------------------------------------------------------------------------------------------------------
# Operators


AdaptedOperands = namedtuple("AdaptedOperands", "x weight a b sizes bias row_scale out key extras")
"""Operands of forward, in the order of `lora.forward`."""


def _extras(o: Any) -> quantizing.Extras:
    return o.extras[0] if o.extras else quantizing.NO_MEASURES


def _forward_rule(run: Any, static: tuple[Linear, Adapter, LoraNeeds], o: AdaptedOperands) -> tuple[Any, ...]:
    op, adapter, needs = static
    read = (o.x, o.weight, o.a, o.b, o.sizes, o.bias, o.row_scale, o.out, o.key)
    return lora.forward(run, op, adapter, *read, extras=_extras(o), needs=needs)[:4]


_FORWARD = define(
    NAME,
    _forward_rule,
    AdaptedOperands,
    rows=("x", "row_scale", "out"),
    written=("out",),
    most_results=8,  # y, the product with A, and x and the weight in the forms that backward reads
    notes_sizes=True,
)


AdaptedGradOperands = namedtuple("AdaptedGradOperands", "x weight u a b sizes bias row_scale dy key grad_input extras")
"""Operands of all gradients except that of A, and except that of B if it is computed later."""


def _main_grads_rule(
    run: Any, static: tuple[Linear, Adapter, LinearSpecs, LoraNeeds, bool], o: AdaptedGradOperands
) -> tuple[Any, ...]:
    op, adapter, specs, needs, new_b = static
    read = (o.x, o.weight, o.u, o.a, o.b, o.sizes, o.bias, o.row_scale, o.dy, o.key)
    options: dict[str, Any] = {"new_b": new_b, "grad_input": o.grad_input, "extras": _extras(o)}
    return lora.main_grads(run, op, adapter, specs, *read, needs=needs, **options)[:8]


_MAIN_GRADS = define(
    f"{NAME}_main_grads",
    _main_grads_rule,
    AdaptedGradOperands,
    rows=("x", "u", "row_scale", "dy", "grad_input"),
    written=("grad_input",),
    most_results=7,  # these include either the gradient of B, or its two operands
)


MergeOperands = namedtuple("MergeOperands", "weight b a sizes")
"""Operands of `merged`: the weight and B as rows, A, and the group sizes, which all are N."""


def _merge_rule(run: Any, adapter: Adapter, o: MergeOperands) -> tuple[Any, ...]:
    return (lora.merged(run, adapter, *o),)


_MERGE = define("lora_merge", _merge_rule, MergeOperands, rows=("weight", "b"))


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """weight + scaling B A, [G, N, K], rounded once to the dtype of weight.

    Args:
        weight: [G, N, K]. a: [G, r, K]. b: [G, N, r].
    """
    groups, columns, depth = weight.shape
    sizes = torch.full((groups,), columns, dtype=torch.int32, device=weight.device)
    rows = (weight.reshape(-1, depth), b.reshape(-1, b.shape[-1]), a.contiguous(), sizes)
    (made,) = call(_MERGE, Adapter(scaling=scaling), MergeOperands(*rows), groups * columns)
    return made.view(weight.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward


def _facts(op: Adapted, specs: AdaptedSpecs, needs: LoraNeeds, whole: Sequence[bool]) -> Facts:
    base, adapter = op
    _, _, bias, row_scale = specs.base
    keep = lora.kept(base, needs, bias is not None, row_scale is not None)
    forward = prepare(_FORWARD, (base, adapter, needs))
    main = prepare(_MAIN_GRADS, (base, adapter, specs.base, needs, whole[1]))
    products = (adapter.down(base), adapter.up(base))
    return Facts(op, specs, needs, any(needs), keep, products, forward, (main,))


def _forward(given: Arguments, facts: Facts, scaling: Scaling, m: Any, out: Tensor | None) -> Forwarded:
    (a, b), (bias,), (cache,) = given.weights, given.biases, given.caches
    ((_, weight),) = given.base
    training, row_scale, keep = facts.training, given.row_scale, facts.keep
    if cache is not None:
        needs = gradients.Needs(keep.w, False, False, False)
        forms = gradients.cached_forms(facts.op.base, needs, row_scale is not None)
        weight = with_forms(cache, weight, forms, scaling, 0, training=training)
    extras = scaling.extras(1, None, training=training)
    # In the order of AdaptedOperands.
    operands = (given.x, weight, a, b, given.sizes, bias, row_scale, out, given.key, extras)
    y, x, weight, u = call_prepared(facts.forward, operands, m)
    if not training:
        return y, ()
    row_scale, bias = row_scale if keep.row_scale else None, bias if keep.bias else None
    a, b = a if keep.a else None, b if keep.b else None
    key = given.key if keep.x or keep.a else None
    return y, (x, u, given.sizes, row_scale, weight, a, b, bias, key, scaling.key)


def _backward(saved: Saved, kept: list[Any], dy: Tensor, grad_input: Tensor | None, deliver: Deliver) -> MainGradients:
    x, u, sizes, row_scale, weight, a, b, bias, key, scaling_key = kept
    kept.clear()
    facts = saved.facts
    needs, (down, up), factors = facts.needs, facts.products, facts.specs.factors
    weight = read_by_dgrad(weight, facts.op.base.recipe)
    extras = saved.scaling.extras(1, scaling_key, training=True)
    grad_input = grad_input if needs.x else None
    # In the order of AdaptedGradOperands.
    operands = [(x, weight, u, a, b, sizes, bias, row_scale, dy, key, grad_input, extras)]
    del x, weight, u, dy  # so that they are freed once no launch reads them
    dx, d_bias, dc, rows_a, dy_a, rows_b, dy_b, db = call_prepared(facts.backward[0], operands, saved.rows)
    if needs.a:
        deliver(0, WeightGradient(down, factors[0], rows_a, dy_a, sizes, saved.rows))
    if needs.b:
        deliver(1, WeightGradient(up, factors[1], rows_b, dy_b, sizes, saved.rows, made=(db, None)))
    return dx, dc, (d_bias,)


ADAPTED = Operation(
    name=NAME,
    product=_FORWARD,
    weights=LORA_NAMES,
    rows=(_saved.ROWS,),
    places=positions(adapted_arguments, "a", "b"),
    scale_place=positions(adapted_arguments, "row_scale")[0],
    check=adapted_arguments,
    needs=lambda x, a, b, row_scale, bias: LoraNeeds(x, a, b, bias, row_scale),
    facts=_facts,
    forward=_forward,
    backward=_backward,
)
OPERATIONS[ADAPTED.name] = ADAPTED
