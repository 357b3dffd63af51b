"""The torch operators of the linear operation on stored operands.

`x_form`, `weight_form` and `dy_forms` are texts of `Stored`. Operands without one are plain, and stored on the way
where the recipe stores them, by the multipliers `encode`. In backward `x_form` may have a second line, of x as the
weight gradient reads it beside what the row scale's reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import gradients, storing
from grouped_core.gradients import Needs
from torch_bridge import _library
from torch_bridge._library import NEEDS, Execute, decode, define, grouped
from torch_bridge._stored import described, operand_of, slots_of


class _Static(NamedTuple):
    op: str
    x_form: str
    weight_form: str


def _linear_rule(run: Any, static: _Static, operands: Sequence[Any]) -> tuple[Any]:
    sizes, bias, row_scale, out, *encode = operands[6:]
    rows = run.spec(operands[0]).shape[0]
    x, weight = operand_of(operands[:3], static.x_form, rows), operand_of(operands[3:6], static.weight_form, rows)
    return (gradients.linear(run, decode(static.op), x, weight, sizes, bias, row_scale, out, tuple(encode)),)


def _linear(
    execute: Execute,
    x: list[Tensor],
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    encode_x: Tensor | None,
    encode_weight: Tensor | None,
    op: str,
    x_form: str,
    weight_form: str,
    out: Tensor | None = None,
) -> Tensor:
    rows, weights = slots_of(x, x_form, 2), slots_of(weight, weight_form, 3)
    operands = (*rows, *weights, group_sizes, grouped(bias, 2), row_scale, out, encode_x, encode_weight)
    return _library.forward(execute, _linear_rule, _Static(op, x_form, weight_form), operands, 6, (0, 8, 9), (0, 1))[0]


def _linear_into(*arguments: Any) -> None:
    _linear(*arguments)


_OPERANDS = "Tensor[] x, Tensor[] weight, Tensor group_sizes, Tensor[] bias, Tensor? row_scale"
_FORMS = "str op, str x_form, str weight_form"
_ENCODE = "Tensor? encode_x, Tensor? encode_weight"
define("stored_linear", f"({_OPERANDS}, {_ENCODE}, {_FORMS}) -> Tensor", _linear)
define("stored_linear_into", f"({_OPERANDS}, {_ENCODE}, {_FORMS}, Tensor(a!) out) -> ()", _linear_into)
linear = torch.ops.torch_bridge.stored_linear.default
linear_into = torch.ops.torch_bridge.stored_linear_into.default


class _GradStatic(NamedTuple):
    op: str
    x_form: str
    weight_form: str
    dy_forms: tuple[str, ...]
    dtypes: str
    needs: str
    k: int
    accumulate: bool


def width_of(columns: int, dy_forms: Sequence[str]) -> int:
    """N of a dy of so many columns; where nobody reads it as it is, it has none and its forms tell."""
    return columns or described(dy_forms[0])[2][1]


def _grads_rule(run: Any, static: _GradStatic, operands: Sequence[Any]) -> tuple[Any, ...]:
    sizes, bias, row_scale, dy, key, encode, into, grad_input = operands[6:14]
    (rows, columns), groups = run.spec(dy).shape, run.spec(sizes).shape[0]
    dy_spec = run.spec(dy)._replace(shape=(rows, width_of(columns, static.dy_forms)))
    op = decode(static.op)
    x_form, _, second_form = static.x_form.partition("\n")
    texts = (second_form, *static.dy_forms)
    forms = [operand_of(operands[14 + 3 * at : 17 + 3 * at], text, rows) for at, text in enumerate(texts)]
    found = gradients.linear_backward(
        run,
        op,
        _library.specs(op, static.dtypes, dy_spec, groups, static.k),
        operand_of(operands[:3], x_form, rows),
        operand_of(operands[3:6], static.weight_form, rows),
        sizes,
        bias,
        row_scale,
        dy,
        Needs(*(letter in static.needs for letter in NEEDS)),
        into_w=into,
        accumulate=static.accumulate,
        grad_input=grad_input,
        extras=storing.Extras(key, encode, measure=False),
        stored_x=forms[0],
        stored_dy=storing.joined(forms[1:]) if static.dy_forms else None,
    )
    return tuple(found.grads)


def _grads_operands(
    static: _GradStatic,
    x: list[Tensor],
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    dy: list[Tensor],
    key: Tensor | None,
    encode: Tensor | None,
    into: Any,
    grad_input: Tensor | None,
) -> tuple[Any, ...]:
    plain, *parts = dy
    x_form, _, second_form = static.x_form.partition("\n")
    count = len(described(x_form)[4]) if x_form else 1
    rows, forms = slots_of(x[:count], x_form, 2), [*slots_of(x[count:], second_form, 2)]
    for text in static.dy_forms:
        count = len(described(text)[4])
        forms += slots_of(parts[:count], text, 2)
        parts = parts[count:]
    weights = slots_of(weight, static.weight_form, 3)
    return (*rows, *weights, group_sizes, grouped(bias, 2), row_scale, plain, key, encode, into, grad_input, *forms)


_GRADS_FACTS = ((8, 9, 13), (0, 1, *range(14, 23)))  # operands that have M rows, and forms of such


def _grads(
    execute: Execute,
    x: list[Tensor],
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    dy: list[Tensor],
    key: Tensor | None,
    encode: Tensor | None,
    k: int,
    op: str,
    x_form: str,
    weight_form: str,
    dy_forms: list[str],
    dtypes: str,
    needs: str,
    live: list[int],
) -> list[Tensor]:
    buffer = into = None
    if "w" in needs and live:  # frozen members of a list have no destination
        n = int(width_of(dy[0].shape[1], dy_forms))
        buffer, into = _library.weight_gradients(op, dtypes, live, dy[0], k, group_sizes, n)
    static = _GradStatic(op, x_form, weight_form, tuple(dy_forms), dtypes, needs, int(k), False)
    operands = _grads_operands(static, x, weight, group_sizes, bias, row_scale, dy, key, encode, into, None)
    dx, dw, db, dc = execute(_grads_rule, static, operands, *_GRADS_FACTS)
    return [each for each in (dx, dw if buffer is None else buffer, db, dc) if each is not None]


def _grads_into(
    execute: Execute,
    x: list[Tensor],
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    dy: list[Tensor],
    key: Tensor | None,
    encode: Tensor | None,
    k: int,
    op: str,
    x_form: str,
    weight_form: str,
    dy_forms: list[str],
    dtypes: str,
    needs: str,
    live: list[int],
    accumulate: bool,
    grad_input: Tensor | None,
    wgrad: list[Tensor],
    scale_grad: Tensor | None,
) -> None:
    into = grouped(wgrad, 3)
    if into is wgrad:  # of a list of weights
        into = _library.scattered(wgrad, live, group_sizes.shape[0])
    static = _GradStatic(op, x_form, weight_form, tuple(dy_forms), dtypes, needs, int(k), accumulate)
    operands = _grads_operands(static, x, weight, group_sizes, bias, row_scale, dy, key, encode, into, grad_input)
    dc = execute(_grads_rule, static, operands, *_GRADS_FACTS)[3]
    if scale_grad is not None:
        scale_grad.copy_(dc)


_DY = "Tensor[] dy, Tensor? key, Tensor? encode, SymInt k"  # multipliers of x, where it is quantised once more
_REST = "str[] dy_forms, str dtypes, str needs, int[] live"
define("stored_linear_grads", f"({_OPERANDS}, {_DY}, {_FORMS}, {_REST}) -> Tensor[]", _grads)
define(
    "stored_linear_grads_into",
    f"({_OPERANDS}, {_DY}, {_FORMS}, {_REST}, bool accumulate, Tensor(a!)? grad_input, Tensor(b!)[] wgrad,"
    " Tensor(c!)? scale_grad) -> ()",
    _grads_into,
)
linear_grads = torch.ops.torch_bridge.stored_linear_grads.default
linear_grads_into = torch.ops.torch_bridge.stored_linear_grads_into.default
