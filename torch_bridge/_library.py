"""The torch operators: each holds one whole rule, so that the dispatcher is paid once a rule, not once a kernel.

Operators see weights and biases as lists (one packed tensor, or one a group) and everything static as text, which
outlives a process in torch's compile caches. Those that write into a caller's tensor return nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from grouped_core import gradients
from grouped_core.calls import ArraySpec
from grouped_core.debug import debug_flags
from grouped_core.formats import Format, wide
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

Execute = Callable[..., list[Any]]
"""How an operator's rules run: `_run.execute`, or for its fake implementation `_run.imagine`.

(rule, static facts, operands, and from `rows` on what `_run.fake` takes) -> results.
"""

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


def forward(execute: Execute, rule: _run.Rule, static: Any, operands: tuple[Any, ...], at: int, *facts: Any) -> Any:
    """What `execute` does with a forward rule; sizes, which stand at `at`, are noted if GROUPED_DEBUG says so."""
    if execute is _run.execute and "sizes" in debug_flags():
        note_sizes(operands[at], operands[0].shape[0])
    return execute(rule, static, operands, *facts)


def _linear(
    execute: Execute,
    x: Tensor,
    weight: list[Tensor],
    group_sizes: Tensor,
    bias: list[Tensor],
    row_scale: Tensor | None,
    op: str,
    out: Tensor | None = None,
) -> Tensor:
    operands = (x, grouped(weight, 3), group_sizes, grouped(bias, 2), row_scale, out)
    return forward(execute, _forward_rule, op, operands, 2, _FORWARD_ROWS)[0]


def _linear_into(*arguments: Any) -> None:
    _linear(*arguments)


def subset(groups: Sequence[int], count: int) -> list[int]:
    """Groups as operators take them: none listed means all."""
    return [] if len(groups) == count else list(groups)


def scattered(buffers: Sequence[Tensor], live: Sequence[int], groups: int) -> list[Tensor | None]:
    """One destination a group: `buffers` in the order of `live`, None elsewhere."""
    destinations: list[Tensor | None] = [None] * int(groups)
    for group, buffer in zip(live or range(groups), buffers, strict=True):
        destinations[group] = buffer
    return destinations


def weight_gradients(
    op: str, dtypes: str, live: Sequence[int], dy: Tensor, k: int, group_sizes: Tensor, n: int | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """A buffer for the weight gradients of the groups `live`, each laid out as its weight; and one part a group.

    Args:
        n: N, if it is not dy's.
    """
    n = dy.shape[1] if n is None else n
    shape = (len(live), n, k) if decode(op).transposed else (len(live), k, n)
    name = dtypes.split(",")[1]
    buffer = dy.new_empty(shape, dtype=_run.TORCH_DTYPES[wide(name)])
    return buffer, scattered(buffer.unbind(), live, group_sizes.shape[0])


def _linear_grads(
    execute: Execute,
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
        buffer, into = weight_gradients(op, dtypes, live, dy, k, group_sizes)
    w, up = weight_operands(weight)
    operands = (x, w, group_sizes, grouped(bias, 2), row_scale, dy, into, None, up, None)
    static = (op, needs, dtypes, int(k), halves, False)
    dx, *dw, db, dc = execute(_backward_rule, static, operands, _BACKWARD_ROWS)
    return [each for each in (dx, *(dw if buffer is None else [buffer]), db, dc) if each is not None]


def _linear_grads_into(
    execute: Execute,
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
    static = (op, needs, dtypes, int(k), halves, accumulate)
    dc = execute(_backward_rule, static, operands, _BACKWARD_ROWS)[-1]
    if scale_grad is not None:
        scale_grad.copy_(dc)


_LIBRARY = torch.library.Library("torch_bridge", "DEF")


def define(name: str, schema: str, body: Callable[..., Any]) -> None:
    """An operator of this package, on CPU and CUDA, and its fake implementation.

    Args:
        body: both of it, given how rules run, and the operator's arguments.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, partial(body, _run.execute), device)
    torch.library.register_fake(f"torch_bridge::{name}", partial(body, _run.imagine), lib=_LIBRARY)


def define_merging(name: str, arguments: str, body: Callable[..., Any], most: int) -> dict[int, Any]:
    """The operators that `define` would make of a body that gives a list, but which raise magnitudes [G] in place.

    Functionalisation takes no operator that changes an argument and gives a list, so there is one for each number of
    results, from 2 (codes and a scale a group) to `most`.

    Args:
        arguments: all but the last one, the magnitudes.
    """
    found: dict[int, Any] = {}
    for count in range(2, most + 1):
        one = f"{name}_merging{count}"
        define(one, f"({arguments}, Tensor(a!) amax) -> ({', '.join(['Tensor'] * count)})", partial(_tuple_of, body))
        found[count] = getattr(torch.ops.torch_bridge, one).default
    return found


def _tuple_of(body: Callable[..., list[Tensor]], *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(body(*arguments))


for _name, _body in (
    ("linear", _linear),
    ("linear_into", _linear_into),
    ("linear_grads", _linear_grads),
    ("linear_grads_into", _linear_grads_into),
):
    define(_name, _SCHEMAS[_name], _body)

linear = torch.ops.torch_bridge.linear.default
linear_into = torch.ops.torch_bridge.linear_into.default
linear_grads = torch.ops.torch_bridge.linear_grads.default
linear_grads_into = torch.ops.torch_bridge.linear_grads_into.default
