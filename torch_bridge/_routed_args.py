"""Checks the arguments of `routed_mlp`, and counts its rows.

Letters: T tokens, k experts per token, M rows, G groups (experts), K hidden size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core import mlp_spec
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Mlp, MlpSpecs, Residuals
from grouped_core.recipes import BoundRecipe
from grouped_core.routed import row_count
from grouped_core.routing_spec import check_routed_mlp, max_rows_option
from torch_bridge._args import (
    Arguments,
    Members,
    check_rows,
    checked_mlp,
    mlp_arguments,
    mlp_of,
    packed_spec,
    weight_specs,
)
from torch_bridge._checks import ROUTED_NAMES, check_operand, check_readable
from torch_bridge._symbols import MOST_SYMBOLS, settle_rows
from torch_bridge._tensors import dtype_name, home, rows_spec
from torch_bridge._weight_forms import WeightForms
from torch_bridge.sizes import saturate


def routed_arguments(
    x: Any,
    experts: Any,
    weights: Any,
    wi: Any,
    wo: Any,
    rhs_transposed: bool,
    activation: str | Activation,
    wi_bias: Members | None,
    wo_bias: Members | None,
    recipe: Any,
    residuals: str | Residuals,
    max_rows: int | None,
    wgrad_accum: Any,
    implementation: str | Sequence[str] | None,
    caches: tuple[WeightForms | None, WeightForms | None] = (None, None),
) -> Arguments:
    """Checks the arguments of `routed_mlp` and returns them, with the experts as `sizes`; it raises the same errors."""
    if not isinstance(experts, Tensor):
        check_operand(ROUTED_NAMES.sizes, experts, x)  # raises
    if experts.is_floating_point() or experts.is_complex() or experts.dtype is torch.bool:
        raise TypeError(
            f"`{ROUTED_NAMES.sizes}` of routed_mlp: dtype {dtype_name(experts.dtype)}, expected integers; pass "
            "numbers of experts."
        )
    base = (x, wi, wo, saturate(experts), rhs_transposed, activation, weights, wi_bias, wo_bias, recipe, residuals)
    of_tokens: dict[str, Any] = {"operation": "routed_mlp", "names": ROUTED_NAMES, "check": _check}
    of_tokens["max_rows"] = max_rows_option(max_rows)
    return mlp_arguments(*base, wgrad_accum, implementation, caches, **of_tokens)


def _check(
    operands: tuple[Any, ...], bounds: tuple[BoundRecipe, ...], options: tuple[Any, ...], dtypes: tuple[Any, ...]
) -> tuple[Tensor, Mlp, MlpSpecs]:
    """Returns (experts, the operation, specs of the MLP of rows); raises if the operands do not fit together."""
    tokens, wi, wo, experts, weights, *biases = operands
    op, first = mlp_of(options), home(tokens)
    check_rows(op.names.x, tokens, first)
    _check_routing(tokens, experts, weights)
    of_wi, of_wo, *of_biases = weight_specs(op, wi, wo, biases, first)
    of_tokens: Any = packed_spec(tokens, rows=True)
    count = row_count(op.max_rows, of_tokens.shape[0] * int(experts.shape[1]))
    of_x = ArraySpec((count, of_tokens.shape[1]), of_tokens.dtype)
    specs = MlpSpecs(of_x, of_wi, of_wo, ArraySpec((count,), dtype_name(weights.dtype)), *of_biases)
    checked = specs
    if isinstance(tokens, QTensor):  # formats are checked here; where gradients are concerned rows are plain
        checked = specs._replace(x=of_tokens, probs=None)
    sizes = ArraySpec(of_wo.shape[:1], "int32")  # the rows are in as many groups as there are weights
    mlp_spec.check(op, *checked[:3], sizes, *checked[3:])
    return experts, *checked_mlp(op, specs, bounds, dtypes, first)


def _check_routing(tokens: Tensor | QTensor[Tensor], experts: Tensor, weights: Tensor) -> None:
    """Checks tokens [T, K] and their experts and weights [T, k]. Raises TypeError or ValueError."""
    names, x = ROUTED_NAMES, home(tokens)
    check_readable(names.sizes, experts, x)
    check_readable(names.probs, weights, x)
    slots = max([1, *map(int, experts.shape[1:2])])  # there are this many rows per token
    # Values of tokens have T rows in every format whose scales are per row.
    settle_rows(x, experts, weights, most=MOST_SYMBOLS // slots)
    check_routed_mlp(packed_spec(tokens, rows=True), rows_spec(experts), rows_spec(weights))
    for each in (experts, weights):
        torch._check(each.shape[0] == x.shape[0])  # torch.compile may have given them symbols of their own


def rows_of_tokens(given: Arguments) -> Any:
    """Returns M, the number of rows of tokens [T, K] whose experts [T, k] are the `sizes` of `given`.

    If rows are quantised, torch.compile gets a number for M, because lengths of quantised forms are no multiples of a
    symbol.
    """
    op = given.checked.op
    rows, recipe = row_count(op.max_rows, given.x.shape[0] * int(given.sizes.shape[1])), op.recipe
    operands = [given.x, *given.weights, *[each for _, each in given.base]]
    quantised = recipe is not None and recipe.quantized
    return int(rows) if quantised or any(isinstance(each, QTensor) for each in operands) else rows
