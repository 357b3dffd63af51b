"""The torch operators of the experts' MLP on quantised operands, beside those of `_mlp_library`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.debug import debug_flags
from torch_bridge import _run
from torch_bridge._library import define, grouped
from torch_bridge._mlp_library import decode, grads_rule, hidden_rule
from torch_bridge._stored import operand_of, slots_of


class _Hidden(NamedTuple):
    op: str
    x_form: str
    wi_form: str
    keep: bool


def _hidden_rule(run: Any, static: _Hidden, operands: Sequence[Any]) -> tuple[Any, ...]:
    rows = run.spec(operands[0]).shape[0]
    x, wi = operand_of(operands[:3], static.x_form, rows), operand_of(operands[3:6], static.wi_form, rows)
    sizes, probs, wi_bias = operands[6:]
    return hidden_rule(run, decode(static.op), x, wi, sizes, probs, wi_bias, static.keep)


def _hidden(
    x: list[Tensor],
    wi: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wi_bias: list[Tensor],
    op: str,
    x_form: str,
    wi_form: str,
    keep: bool,
) -> list[Tensor]:
    operands = (*slots_of(x, x_form, 2), *slots_of(wi, wi_form, 3), group_sizes, probs, grouped(wi_bias, 2))
    found = _run.run(_hidden_rule, _Hidden(op, x_form, wi_form, keep), operands, debug_flags())
    return [each for each in found if each is not None]


def _hidden_fake(
    x: list[Tensor],
    wi: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wi_bias: list[Tensor],
    op: str,
    x_form: str,
    wi_form: str,
    keep: bool,
) -> list[Tensor]:
    operands = (*slots_of(x, x_form, 2), *slots_of(wi, wi_form, 3), group_sizes, probs, grouped(wi_bias, 2))
    found = _run.fake(_hidden_rule, _Hidden(op, x_form, wi_form, keep), operands, (), x[0].device)
    return [each for each in found if each is not None]


class _Grads(NamedTuple):
    op: str
    wo_form: str
    dy_form: str
    wanted: str


def _grads_rule(run: Any, static: _Grads, operands: Sequence[Any]) -> tuple[Any, ...]:
    h, sizes, probs, wo_bias, dy, *slots = operands
    rows = run.spec(dy).shape[0]
    wo, stored = operand_of(slots[:3], static.wo_form, rows), operand_of(slots[3:], static.dy_form, rows)
    return grads_rule(run, decode(static.op), h, wo, sizes, probs, wo_bias, dy, stored, static.wanted)


def _grads_operands(
    h: Tensor,
    wo: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: list[Tensor],
    wo_form: str,
    dy_form: str,
) -> tuple[Any, ...]:
    plain, *parts = dy
    form = slots_of(parts, dy_form, 2) if dy_form else (plain, None, None)
    return (h, group_sizes, probs, grouped(wo_bias, 2), plain, *slots_of(wo, wo_form, 3), *form)


def _grads(
    h: Tensor,
    wo: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: list[Tensor],
    op: str,
    wo_form: str,
    dy_form: str,
    wanted: str,
) -> list[Tensor]:
    operands = _grads_operands(h, wo, group_sizes, probs, wo_bias, dy, wo_form, dy_form)
    found = _run.run(_grads_rule, _Grads(op, wo_form, dy_form, wanted), operands, debug_flags())
    return [each for each in found if each is not None]


def _grads_fake(
    h: Tensor,
    wo: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: list[Tensor],
    op: str,
    wo_form: str,
    dy_form: str,
    wanted: str,
) -> list[Tensor]:
    operands = _grads_operands(h, wo, group_sizes, probs, wo_bias, dy, wo_form, dy_form)
    found = _run.fake(_grads_rule, _Grads(op, wo_form, dy_form, wanted), operands, (), h.device)
    return [each for each in found if each is not None]


define(
    "stored_mlp_hidden",
    "(Tensor[] x, Tensor[] wi, Tensor group_sizes, Tensor? probs, Tensor[] wi_bias, str op, str x_form, str wi_form,"
    " bool keep) -> Tensor[]",
    _hidden,
    _hidden_fake,
)
define(
    "stored_mlp_hidden_grads",
    "(Tensor h, Tensor[] wo, Tensor group_sizes, Tensor? probs, Tensor[] wo_bias, Tensor[] dy, str op, str wo_form,"
    " str dy_form, str wanted) -> Tensor[]",
    _grads,
    _grads_fake,
)
hidden = torch.ops.torch_bridge.stored_mlp_hidden.default
hidden_grads = torch.ops.torch_bridge.stored_mlp_hidden_grads.default
