"""The torch operators: each holds one whole rule, so that the dispatcher is paid once a rule, not once a kernel.

Operators see weights and biases as lists (one packed tensor, or one a group) and everything static as text, which
outlives a process in torch's compile caches. Those that write into a caller's tensor return nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from grouped_core import gradients
from grouped_core.calls import ArraySpec, Call
from grouped_core.debug import debug_flags
from grouped_core.formats import WIDE, Format
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.products import in_form
from grouped_core.recipes import Recipe
from torch_bridge import _run
from torch_bridge._run import Operand
from torch_bridge.sizes import note_sizes

NAMES = Names(x="x", w="weight")

# ---------------------------------------------------------------------------------------------------------------------
# Static facts as text

_PRODUCTS = ("forward", "dgrad", "wgrad")


@lru_cache(maxsize=1024)
def encode(
    transposed: bool,
    recipe: Recipe | None,
    scale_bias: bool,
    rows_hint: int = 0,
    implementation: str = "",
    paired: bool = False,
) -> str:
    """A linear operation as the text that operators carry: what differs from the defaults of `Linear`."""
    facts = {
        "transposed": transposed,
        "scale_bias": scale_bias,
        "rows_hint": rows_hint,
        "implementation": implementation,
        "paired": paired,
        "recipe": None if recipe is None else dataclasses.asdict(recipe),
    }
    return json.dumps({name: value for name, value in facts.items() if value}, sort_keys=True)


@lru_cache(maxsize=1024)
def decode(text: str) -> Linear:
    """The linear operation that `encode` wrote down."""
    facts = json.loads(text)
    if "recipe" in facts:
        facts["recipe"] = decode_recipe(facts["recipe"])
    return Linear(NAMES, **facts)


def decode_recipe(fields: dict[str, Any]) -> Recipe:
    """The recipe whose fields `dataclasses.asdict` gave."""
    cells: dict[str, Any] = {product: tuple(Format(**cell) for cell in fields[product]) for product in _PRODUCTS}
    return Recipe(**(fields | cells))


@lru_cache(maxsize=1024)
def saved(text: str, needs: Needs, has_bias: bool, has_scale: bool) -> Needs:
    """Which of x, weight, bias, row_scale backward reads."""
    return gradients.linear_saved(decode(text), needs, has_bias, has_scale)


NEEDS = "xwbs"  # letters for gradients of x, weight, bias, row_scale


def needs_text(needs: Needs) -> str:
    """Needed gradients as letters."""
    return "".join([letter for letter, needed in zip(NEEDS, needs, strict=True) if needed])


# ---------------------------------------------------------------------------------------------------------------------
# Rules over a recorder. Their operands stand in the order of the operators' tensors.


def _forward_rule(run: Any, text: str, operands: Sequence[Any]) -> tuple[Any]:
    x, weight, sizes, bias, row_scale, out = operands
    return (gradients.linear(run, decode(text), x, weight, sizes, bias, row_scale, out),)


_FORWARD_ROWS = (0, 4, 5)  # operands with M rows


_BackwardFacts = tuple[str, str, str, int, tuple[int, ...], bool]
"""The operation, needed gradients, dtypes, K, halves of a weight in two arrays (see `_halves`), whether to add."""


def _backward_rule(run: Any, static: _BackwardFacts, operands: Sequence[Any]) -> tuple[Any, ...]:
    text, letters, dtypes, k, halves, accumulate = static
    x, weight, sizes, bias, row_scale, dy, into, grad_input, up, into_up = operands
    op, needs = decode(text), Needs(*(letter in letters for letter in NEEDS))
    given = specs(op, dtypes, run.spec(dy), run.spec(sizes).shape[0], k)
    found = gradients.linear_grads(
        run,
        op,
        given,
        x,
        weight if up is None else in_form(op, (weight, up)),
        sizes,
        bias,
        row_scale,
        dy,
        needs._replace(w=needs.w and not halves),
        into_w=into,
        accumulate=accumulate,
        grad_input=grad_input,
    )
    arrays = [found.w]
    if halves and needs.w:
        arrays = [
            gradients.weight_grad(run, op, *given[:2], x, dy, sizes, into=to, accumulate=accumulate, half=half)
            for half, to in zip((1, 2), (into, into_up), strict=True)
            if half in halves
        ]
    return (found.x, *arrays, found.bias, found.row_scale)


_BACKWARD_ROWS = (5, 0, 4, 7)


def specs(
    op: Linear, dtypes: str, dy: ArraySpec, groups: int, k: int
) -> tuple[ArraySpec, ArraySpec, ArraySpec | None, ArraySpec | None]:
    """Specs of x, weight, bias, row_scale from their dtypes ("-" where absent), those that are not kept included."""
    rows, n = dy.shape
    x, weight, bias, row_scale = dtypes.split(",")
    return (
        ArraySpec((rows, k), x),
        ArraySpec((groups, n, k) if op.transposed else (groups, k, n), weight),
        None if bias == "-" else ArraySpec((groups, n), bias),
        None if row_scale == "-" else ArraySpec((rows,), row_scale),
    )


def dtypes_text(*operands: Tensor | None) -> str:
    """Dtypes of x, weight, bias, row_scale as text."""
    return dtype_names(*(None if operand is None else operand.dtype for operand in operands))


def dtype_names(*dtypes: torch.dtype | None) -> str:
    """As `dtypes_text`, of the dtypes themselves."""
    return ",".join("-" if dtype is None else _run.dtype_name(dtype) for dtype in dtypes)


def grouped(members: Sequence[Tensor], packed_rank: int) -> Operand:
    """An operand from the list form of operators: nothing, the packed tensor, or one tensor a group."""
    if not members:
        return None
    return members[0] if members[0].dim() == packed_rank else members


def weight_operands(members: Sequence[Tensor]) -> tuple[Operand, Tensor | None]:
    """A weight from the list form of operators, and the second half of one in two arrays."""
    if len(members) == 2 and members[0].dim() == 3:
        return members[0], members[1]
    return grouped(members, 3), None


def _halves(op: str, live: Sequence[int]) -> tuple[int, ...]:
    """Of a weight in two arrays, those at `live` as halves of its columns, 1 and 2; nothing for other weights."""
    return tuple(at + 1 for at in (live or (0, 1))) if decode(op).paired else ()


# ---------------------------------------------------------------------------------------------------------------------
# Operators

_OPERANDS = "Tensor[] weight, Tensor group_sizes, Tensor[] bias, Tensor? row_scale"
_SCHEMAS = {
    "linear": f"(Tensor x, {_OPERANDS}, str op) -> Tensor",
    "linear_into": f"(Tensor x, {_OPERANDS}, str op, Tensor(a!) out) -> ()",
    # Gradients named by `needs`, in its order; of a list of weights only those of the groups `live`. A weight in two
    # arrays is a list of them, has a result for each, and `live` says which.
    "linear_grads": f"(Tensor? x, {_OPERANDS}, Tensor dy, SymInt k, str op, str dtypes, str needs, int[] live)"
    " -> Tensor[]",
    # The same gradients into the caller's tensors; a weight's is added if `accumulate`.
    "linear_grads_into": f"(Tensor? x, {_OPERANDS}, Tensor dy, SymInt k, str op, str dtypes, str needs, int[] live,"
    " bool accumulate, Tensor(a!)? grad_input, Tensor(b!)[] wgrad, Tensor(c!)? scale_grad) -> ()",
}


def _forward_operands(
    x: Tensor,
    weight: Sequence[Tensor],
    group_sizes: Tensor,
    bias: Sequence[Tensor],
    row_scale: Tensor | None,
    out: Tensor | None,
) -> tuple[Any, ...]:
    return x, grouped(weight, 3), group_sizes, grouped(bias, 2), row_scale, out


def _run_forward(op: str, operands: tuple[Any, ...]) -> Tensor:
    flags = debug_flags()
    x, _, group_sizes, *_ = operands
    if "sizes" in flags:
        note_sizes(group_sizes, x.shape[0])
    return _run.run(_forward_rule, op, operands, flags)[0]


def _linear(
    x: Tensor, weight: list[Tensor], group_sizes: Tensor, bias: list[Tensor], row_scale: Tensor | None, op: str
) -> Tensor:
    return _run_forward(op, _forward_operands(x, weight, group_sizes, bias, row_scale, None))


def _linear_fake(
    x: Tensor, weight: list[Tensor], group_sizes: Tensor, bias: list[Tensor], row_scale: Tensor | None, op: str
) -> Tensor:
    operands = _forward_operands(x, weight, group_sizes, bias, row_scale, None)
    return _run.fake(_forward_rule, op, operands, _FORWARD_ROWS, x.device)[0]


def _linear_into(
    x: Tensor,
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    op: str,
    out: Tensor,
) -> None:
    _run_forward(op, _forward_operands(x, weight, group_sizes, bias, row_scale, out))


def _linear_into_fake(
    x: Tensor,
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    op: str,
    out: Tensor,
) -> None:
    operands = _forward_operands(x, weight, group_sizes, bias, row_scale, out)
    _run.fake(_forward_rule, op, operands, _FORWARD_ROWS, x.device)


def subset(groups: Sequence[int], count: int) -> list[int]:
    """Groups as operators take them: none listed means all."""
    return [] if len(groups) == count else list(groups)


def scattered(buffers: Sequence[Tensor], live: Sequence[int], groups: int) -> list[Tensor | None]:
    """One destination a group: `buffers` in the order of `live`, None elsewhere."""
    destinations: list[Tensor | None] = [None] * groups
    for group, buffer in zip(live or range(groups), buffers, strict=True):
        destinations[group] = buffer
    return destinations


def weight_gradients(op: str, dtypes: str, live: Sequence[int], dy: Tensor, k: int, n: int | None = None) -> Tensor:
    """A buffer for the weight gradients of the groups `live`, each laid out as its weight; `n`: N, if not dy's."""
    n = dy.shape[1] if n is None else n
    shape = (len(live), n, k) if decode(op).transposed else (len(live), k, n)
    name = dtypes.split(",")[1]
    return dy.new_empty(shape, dtype=_run.TORCH_DTYPES["bfloat16" if name.startswith("float8") else name])


def _linear_grads(
    x: Tensor | None,
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    dy: Tensor,
    k: int,
    op: str,
    dtypes: str,
    needs: str,
    live: list[int],
) -> list[Tensor]:
    buffer = into = None
    halves = _halves(op, live)
    if "w" in needs and live and not halves:  # frozen members of a list have no destination
        buffer = weight_gradients(op, dtypes, live, dy, k)
        into = scattered(buffer.unbind(), live, group_sizes.shape[0])
    w, up = weight_operands(weight)
    operands = (x, w, group_sizes, grouped(bias, 2), row_scale, dy, into, None, up, None)
    dx, *dw, db, dc = _run.run(_backward_rule, (op, needs, dtypes, k, halves, False), operands, debug_flags())
    return [each for each in (dx, *(dw if buffer is None else [buffer]), db, dc) if each is not None]


def _linear_grads_fake(
    x: Tensor | None,
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    dy: Tensor,
    k: int,
    op: str,
    dtypes: str,
    needs: str,
    live: list[int],
) -> list[Tensor]:
    halves = _halves(op, live)
    w, up = weight_operands(weight)
    operands = (x, w, group_sizes, grouped(bias, 2), row_scale, dy, None, None, up, None)
    static = (op, needs, dtypes, int(k), halves, False)
    dx, *dw, db, dc = _run.fake(_backward_rule, static, operands, _BACKWARD_ROWS, dy.device)
    if "w" in needs and live and not halves:
        dw = [weight_gradients(op, dtypes, live, dy, int(k))]
    return [each for each in (dx, *dw, db, dc) if each is not None]


def _linear_grads_into(
    x: Tensor | None,
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    dy: Tensor,
    k: int,
    op: str,
    dtypes: str,
    needs: str,
    live: list[int],
    accumulate: bool,
    grad_input: Tensor | None,
    wgrad: list[Tensor],
    scale_grad: Tensor | None,
) -> None:
    into, into_up = grouped(wgrad, 3), None
    halves = _halves(op, live)
    if halves and wgrad:
        into, into_up = (dict(zip(halves, wgrad, strict=True)).get(half) for half in (1, 2))
    elif into is wgrad:  # of a list of weights
        into = scattered(wgrad, live, group_sizes.shape[0])
    w, up = weight_operands(weight)
    operands = (x, w, group_sizes, grouped(bias, 2), row_scale, dy, into, grad_input, up, into_up)
    dc = _run.run(_backward_rule, (op, needs, dtypes, k, halves, accumulate), operands, debug_flags())[-1]
    if scale_grad is not None:
        scale_grad.copy_(dc)


def _linear_grads_into_fake(*_: Any) -> None:
    """Nothing comes back, and the operands were checked with the forward call."""


_LIBRARY = torch.library.Library("torch_bridge", "DEF")


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator of this package, on CPU and CUDA, and its fake implementation."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"torch_bridge::{name}", fake, lib=_LIBRARY)


define("linear", _SCHEMAS["linear"], _linear, _linear_fake)
define("linear_into", _SCHEMAS["linear_into"], _linear_into, _linear_into_fake)
define("linear_grads", _SCHEMAS["linear_grads"], _linear_grads, _linear_grads_fake)
define("linear_grads_into", _SCHEMAS["linear_grads_into"], _linear_grads_into, _linear_grads_into_fake)

linear = torch.ops.torch_bridge.linear.default
linear_into = torch.ops.torch_bridge.linear_into.default
linear_grads = torch.ops.torch_bridge.linear_grads.default
linear_grads_into = torch.ops.torch_bridge.linear_grads_into.default


# ---------------------------------------------------------------------------------------------------------------------
# Planning


def forward_calls(
    x: Tensor,
    weight: Sequence[Tensor],
    group_sizes: Tensor,
    bias: Sequence[Tensor],
    row_scale: Tensor | None,
    op: str,
    out: Tensor | None,
) -> list[Call]:
    """Native calls of the forward operator."""
    return _run.calls_of(_forward_rule, op, _forward_operands(x, weight, group_sizes, bias, row_scale, out))


def backward_calls(
    x: Tensor,
    weight: Sequence[Tensor],
    group_sizes: Tensor,
    bias: Sequence[Tensor],
    row_scale: Tensor | None,
    op: str,
    needs: Needs,
    into_dtype: str | None,
    grad_input: Tensor | None,
) -> list[Call]:
    """Native calls of the gradients `needs`; those of weights go to destinations of `into_dtype`, if not None."""
    n = weight[0].shape[-2 if decode(op).transposed else -1]
    dy = x.new_empty((x.shape[0], n), dtype=_forward_dtype(x), device="meta")
    into = None
    if into_dtype is not None and needs.w:
        into = grouped([each.to("meta", _run.TORCH_DTYPES[into_dtype]) for each in weight], 3)
    dtypes = dtypes_text(x, weight[0], bias[0] if bias else None, row_scale)
    operands = (x, grouped(weight, 3), group_sizes, grouped(bias, 2), row_scale, dy, into, grad_input, None, None)
    static = (op, needs_text(needs), dtypes, x.shape[1], (), into is not None)
    return _run.calls_of(_backward_rule, static, operands)


def _forward_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if _run.dtype_name(x.dtype) in WIDE else torch.bfloat16
