"""The torch operators of the experts' MLP that the linear operation does not have already.

Its second product, and every gradient of a product, are the linear operators'. What is left is the first product with
the activation, and the gradients at the hidden rows; each holds one whole rule of `grouped_core.mlp`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from grouped_core import gradients
from grouped_core import mlp as rules
from grouped_core.activations import Activation
from grouped_core.mlp_spec import NO_NEEDS, Mlp, MlpNames, Residuals
from grouped_core.products import in_form, operand_spec
from grouped_core.recipes import Recipe
from grouped_core.storing import NO_EXTRAS, Extras, Within
from torch_bridge import _library
from torch_bridge._library import Execute

NAMES = MlpNames()


@lru_cache(maxsize=1024)
def encode(
    transposed: bool,
    activation: Activation,
    recipe: Recipe | None,
    residuals: Residuals,
    rows_hint: int = 0,
    implementation: str = "",
    paired: bool = False,
) -> str:
    """An MLP as the text that operators carry."""
    facts: dict[str, Any] = {"transposed": transposed, "rows_hint": rows_hint, "implementation": implementation}
    facts |= {"activation": dataclasses.asdict(activation), "residuals": residuals.policy, "paired": paired}
    if recipe is not None:
        facts["recipe"] = dataclasses.asdict(recipe)
    return json.dumps(facts, sort_keys=True)


@lru_cache(maxsize=1024)
def decode(text: str) -> Mlp:
    """The MLP that `encode` wrote down."""
    facts = json.loads(text)
    facts["activation"] = Activation(**facts["activation"])
    facts["residuals"] = Residuals(facts["residuals"])
    if "recipe" in facts:
        facts["recipe"] = _library.decode_recipe(facts["recipe"])
    return Mlp(NAMES, **facts)


@torch.compiler.assume_constant_result
def linear_texts(text: str, scale_bias: bool) -> tuple[str, str]:
    """The two products as the linear operators know them; `scale_bias`: the second bias is weighted."""
    return _linear_texts(text, scale_bias)


@lru_cache(maxsize=1024)
def _linear_texts(text: str, scale_bias: bool) -> tuple[str, str]:
    op = decode(text)
    first, second = (
        _library.encode(op.transposed, op.recipe, scaled, op.rows_hint, op.implementation, paired)
        for scaled, paired in ((False, op.paired), (scale_bias, False))
    )
    return first, second


@torch.compiler.assume_constant_result
def is_weighted(text: str) -> bool:
    """Whether a linear operation's bias is weighted by row."""
    return _library.decode(text).scale_bias


def wanted(dh: bool, z: bool, dp: bool) -> str:
    """Wanted gradients at the hidden rows as letters."""
    return "".join(letter for letter, want in zip(WANTED, (dh, z, dp), strict=True) if want)


# ---------------------------------------------------------------------------------------------------------------------
# Rules over a recorder. Their operands stand in the order of the operators' tensors.


def _hidden_rule(run: Any, static: tuple[str, bool], operands: Sequence[Any]) -> tuple[Any, ...]:
    text, keep = static
    x, wi, sizes, probs, wi_bias, up = operands
    op = decode(text)
    weight = wi if up is None else in_form(op.fc1(), (wi, up))
    return hidden_rule(run, op, x, weight, sizes, probs, wi_bias, keep)[:2]


def hidden_rule(
    run: Any,
    op: Mlp,
    x: Any,
    wi: Any,
    sizes: Any,
    probs: Any,
    wi_bias: Any,
    keep: bool,
    stored: Within | None = None,
    extras: Extras = NO_EXTRAS,
) -> tuple[Any, ...]:
    """z, h and the magnitudes of z; plain operands are cast, or stored, as the recipe says; `extras`: of x and wi."""
    forms = rules.first_forms(run, op, x, wi, sizes, extras, NO_NEEDS)
    return rules.hidden_rows(run, op, forms.x, forms.w, sizes, probs, wi_bias, keep=keep, stored=stored)


_HIDDEN_ROWS = (0, 3)  # operands with M rows


def _grads_rule(run: Any, static: tuple[str, str], operands: Sequence[Any]) -> tuple[Any, ...]:
    text, wanted = static
    h, wo, sizes, probs, wo_bias, dy = operands
    return grads_rule(run, decode(text), h, wo, sizes, probs, wo_bias, dy, dy, wanted)[:3]


def grads_rule(
    run: Any,
    op: Mlp,
    h: Any,
    wo: Any,
    sizes: Any,
    probs: Any,
    wo_bias: Any,
    dy: Any,
    stored_dy: Any,
    wanted: str,
    stored: Within | None = None,
    stored_z: Within | None = None,
) -> rules.HiddenGrads:
    """dh, z and dp, of them what `wanted` names; `stored_dy` is dy as the product stores it, or dy itself."""
    second = op.fc2()
    w_spec: Any = operand_spec(run, wo)
    recipe = second.resolve(run.spec(h), w_spec)
    (weight,), _ = gradients.store_weight(run, recipe, wo, second.weight_axes()[1], Extras())
    form = rules.grad_forms(run, op, run.spec(h), wo, stored_dy, sizes, Extras(), (True, False)).forms[0]
    dh, z, dp = (letter in wanted for letter in WANTED)
    rows, how = (h, weight, sizes, probs, wo_bias, dy), {"stored_dy": form, "stored": stored, "stored_z": stored_z}
    return rules.hidden_grads(run, op, *rows, (dh, z, dp), **how)


_GRADS_ROWS = (0, 3, 5)

WANTED = "hzp"
"""Letters for dh, z, and the gradient of the probabilities."""


# ---------------------------------------------------------------------------------------------------------------------
# Operators

_SCHEMAS = {
    # z [M, F], and with `keep` h [M, W]; wi is packed, one tensor a group, or gate and linear half
    "mlp_hidden": "(Tensor x, Tensor[] wi, Tensor group_sizes, Tensor? probs, Tensor[] wi_bias, str op, bool keep)"
    " -> Tensor[]",
    # what `wanted` names, in the order of WANTED
    "mlp_hidden_grads": "(Tensor h, Tensor[] wo, Tensor group_sizes, Tensor? probs, Tensor[] wo_bias, Tensor dy,"
    " str op, str wanted) -> Tensor[]",
}


def _hidden(
    execute: Execute,
    x: Tensor,
    wi: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wi_bias: list[Tensor],
    op: str,
    keep: bool,
) -> list[Tensor]:
    w, up = _library.weight_operands(wi)
    operands = (x, w, group_sizes, probs, _library.grouped(wi_bias, 2), up)
    return _present(_library.forward(execute, _hidden_rule, (op, keep), operands, 2, _HIDDEN_ROWS))


def _hidden_grads(
    execute: Execute,
    h: Tensor,
    wo: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: Tensor,
    op: str,
    wanted: str,
) -> list[Tensor]:
    operands = (h, _library.grouped(wo, 3), group_sizes, probs, _library.grouped(wo_bias, 2), dy)
    return _present(execute(_grads_rule, (op, wanted), operands, _GRADS_ROWS))


def _present(results: Sequence[Tensor | None]) -> list[Tensor]:
    return [each for each in results if each is not None]


_library.define("mlp_hidden", _SCHEMAS["mlp_hidden"], _hidden)
_library.define("mlp_hidden_grads", _SCHEMAS["mlp_hidden_grads"], _hidden_grads)

hidden = torch.ops.torch_bridge.mlp_hidden.default
hidden_grads = torch.ops.torch_bridge.mlp_hidden_grads.default
