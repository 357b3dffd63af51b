"""The grouped linear operation, with gradients. `grouped_core` defines the mathematics.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grouped_core import gradients, quantizing
from grouped_core import lora as adapters
from grouped_core.formats import QTensor
from grouped_core.gradients import LinearSpecs, Needs
from grouped_core.linear_spec import Linear
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _adapter, _saved
from torch_bridge._args import Arguments, Members, linear_arguments, positions
from torch_bridge._autograd import Deliver, Facts, Forwarded, MainGradients, Operation, Saved
from torch_bridge._calling import OPERATIONS, run
from torch_bridge._checks import NAMES
from torch_bridge._gradients import WeightGradient
from torch_bridge._operators import call_prepared, define
from torch_bridge._record import prepare
from torch_bridge._scaling import Scaling
from torch_bridge._tensors import StraightThrough
from torch_bridge._weight_forms import read_by_dgrad, with_forms


def grouped_linear(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    weight: Members | QTensor[Tensor] | StraightThrough,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    rhs_transposed: bool = True,
    bias: Members | None = None,
    row_scale: Tensor | None = None,
    scale_bias: bool = False,
    recipe: Recipe | BoundRecipe | None = None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: tuple[Members, Members] | None = None,
    lora_scaling: float = 1,  # not 1.0, which Dynamo would make a symbol
    lora_dropout: float = 0,
    lora_key: Tensor | None = None,
    lora_wgrad_accum: str | Sequence[Any] | None = None,
) -> Tensor:
    """The product [M, N] of grouped rows: `row_scale[r] * (x[r] @ weight[g].T + bias[g])` for row r of group g.

    Rows past the groups are zero. Differentiable in x, weight, bias and row_scale; gradients that are not needed are
    neither computed nor prepared for. A list of weights gives the same bits as a packed weight and is not stacked;
    frozen members get no gradient.

    Args:
        x: [M, K] fp32, bf16, fp16, e4m3fn or e5m2; or quantised. Under `torch.autocast` x, the weight and the bias are
            cast to its dtype, as in `F.linear`; without it nothing is cast.
        weight: [G, N, K], or [G, K, N] with `rhs_transposed=False`; or a list of G such matrices; or quantised. The
            gradient of a quantised operand goes to the master tensor of `straight_through`; without one there is none.
        group_sizes: G integers on the device of x; a list or CPU tensor is copied there without synchronisation.
            A sum above M is clamped, and a negative size counts as 0.
        bias: [G, N] or a list of G vectors, added before the result is rounded once.
        row_scale: [M]; with `scale_bias` it multiplies only the bias.
        recipe: formats of the three products; None uses the operands without quantising them. If a state of delayed
            scaling is bound to it (`Recipe.bind`), the state's amax is updated in place.
        wgrad_accum: None returns the weight's gradient. With a tensor of the weight's shape (for a list, a list with
            None for frozen members) backward adds the gradient to it instead; "main_grad" does so with the attribute
            of that name: see `torch_bridge.main_grad`. The weight's gradient is then None (with "main_grad" possibly a
            zero dummy), also from `torch.autograd.grad`.
        out, grad_input: the caller's buffers for y [M, N] and the gradient of x [M, K], in the dtype of autocast if it
            is on. The results share their storage (under torch.compile they may be copies, and the `.grad` of a leaf x
            is always a copy), and rows past the groups are not written.
        implementation: one or several names of kernels; see `explain`. With an adapter they apply to the base product.
        lora: an adapter (A, B) of the weight, which is then frozen (docs/lora.md): A [G, r, K] and B [G, N, r], or
            [G, K, r] and [G, r, N] with `rhs_transposed=False`, r from 1 to 256, of the dtype of x; or lists of G
            matrices. `lora_scaling * (x[r] @ A[g].T) @ B[g].T` is added to the product in front of the bias.
        lora_dropout, lora_key: elements of x are dropped on their way to A with this probability, by the key: uint32
            [2], low word first, given if and only if the probability is not 0.
        lora_wgrad_accum: what `wgrad_accum` is for a weight, as a pair for A and B, or "main_grad".

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: wrong shapes, devices, layouts, buffers or
            options. NotImplementedError: no kernel supports the call. RuntimeError: in backward, `main_grad` cannot be
            written, or the operation is differentiated twice.
    """
    arguments = (x, weight, group_sizes, rhs_transposed, bias, row_scale, scale_bias, recipe)
    if lora is None:
        adapters.check_absent(lora_scaling, lora_dropout, lora_key, lora_wgrad_accum)
        return run(LINEAR.name, arguments, wgrad_accum, implementation, out, grad_input, cast=_CAST)
    adapters.check_no_weight_gradient(wgrad_accum=wgrad_accum)
    adapted = (*arguments, *adapters.pair_option(lora), lora_scaling, lora_dropout, lora_key)
    return run(_adapter.NAME, adapted, lora_wgrad_accum, implementation, out, grad_input, cast=_CAST)


_CAST = positions(linear_arguments, "x", "weight", "bias")
"""The positions of the arguments that autocast casts, besides adapters."""


# ---------------------------------------------------------------------------------------------------------------------
# Operators


_NO_EXTRAS = (quantizing.NO_MEASURES,)
_ForwardOperands = namedtuple("_ForwardOperands", "x weight sizes bias row_scale out extras")
"""Operands of forward, in the order of `gradients.linear_forward`."""


def _forward_rule(run: Any, static: tuple[Linear, Needs], o: _ForwardOperands) -> tuple[Any, Any, Any]:
    op, needs = static
    (extras,) = o.extras or _NO_EXTRAS
    found = gradients.linear_forward(run, op, *o[:-1], extras=extras, needs=needs)
    return found.y, found.x, found.w


_FORWARD = define(
    "linear",
    _forward_rule,
    _ForwardOperands,
    rows=("x", "row_scale", "out"),
    written=("out",),
    most_results=7,  # y, and x and the weight in the forms that backward reads
    notes_sizes=True,
)

_GradOperands = namedtuple("_GradOperands", "x weight sizes bias row_scale dy grad_input extras")
"""Operands of the gradients, in the order of `gradients.main_grads`."""


def _main_grads_rule(run: Any, static: tuple[Linear, LinearSpecs, Needs, bool], o: _GradOperands) -> tuple[Any, ...]:
    op, specs, needs, new_w = static
    (extras,) = o.extras or _NO_EXTRAS
    options: dict[str, Any] = {"needs": needs, "grad_input": o.grad_input, "extras": extras}
    *found, rows, dy = gradients.main_grads(run, op, specs, *o[:-2], **options)[:5]
    return *found, *gradients.with_weight_grad(run, op, specs[1], rows, dy, o.sizes, wanted=new_w)


_MAIN_GRADS = define(
    "linear_main_grads",
    _main_grads_rule,
    _GradOperands,
    rows=("x", "row_scale", "dy", "grad_input"),
    written=("grad_input",),
    most_results=9,  # three gradients, and that of the weight, or x and dy in the forms that it reads
)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward


def _facts(op: Linear, specs: LinearSpecs, needs: Needs, whole: Sequence[bool]) -> Facts:
    _, _, bias, row_scale = specs
    keep = gradients.linear_saved(op, needs, bias is not None, row_scale is not None)
    forward, main = prepare(_FORWARD, (op, needs)), prepare(_MAIN_GRADS, (op, specs, needs, needs.w and whole[0]))
    return Facts(op, specs, needs, any(needs), keep, (op,), forward, (main,))


def _forward(given: Arguments, facts: Facts, scaling: Scaling, m: Any, out: Tensor | None) -> Forwarded:
    (weight,), (bias,), (cache,) = given.weights, given.biases, given.caches
    training, row_scale = facts.training, given.row_scale
    if cache is not None:
        forms = gradients.cached_forms(facts.op, facts.needs, row_scale is not None)
        weight = with_forms(cache, weight, forms, scaling, 0, training=training)
    extras = scaling.extras(1, None, training=training)
    operands = (given.x, weight, given.sizes, bias, row_scale, out, extras)  # in the order of _ForwardOperands
    y, x, weight = call_prepared(facts.forward, operands, m)
    if not training:
        return y, ()
    keep = facts.keep
    row_scale, bias = row_scale if keep.row_scale else None, bias if keep.bias else None
    return y, (x, given.sizes, row_scale, weight, bias, scaling.key)


def _backward(saved: Saved, kept: list[Any], dy: Tensor, grad_input: Tensor | None, deliver: Deliver) -> MainGradients:
    x, sizes, row_scale, weight, bias, key = kept
    kept.clear()
    facts = saved.facts
    weight = read_by_dgrad(weight, facts.op.recipe)
    extras = saved.scaling.extras(1, key, training=True)
    grad_input = grad_input if facts.needs.x else None
    operands = [(x, weight, sizes, bias, row_scale, dy, grad_input, extras)]  # in the order of _GradOperands
    del x, weight, dy  # so that they are freed once no launch reads them
    dx, db, dc, rows, of_dy, *made = call_prepared(facts.backward[0], operands, saved.rows)
    if facts.needs.w:
        deliver(0, WeightGradient(facts.op, facts.specs[1], rows, of_dy, sizes, saved.rows, made=made))
    return dx, dc, (db,)


LINEAR = Operation(
    name="grouped_linear",
    product=_FORWARD,
    weights=(NAMES.w,),
    rows=(_saved.ROWS,),
    places=positions(linear_arguments, "weight"),
    scale_place=positions(linear_arguments, "row_scale")[0],
    check=linear_arguments,
    needs=lambda x, weight, row_scale, bias: Needs(x, weight, bias, row_scale),
    facts=_facts,
    forward=_forward,
    backward=_backward,
)
OPERATIONS[LINEAR.name] = LINEAR
