"""The torch operators of the experts' MLP on quantised operands, beside those of `_mlp_library`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.calls import ArraySpec
from grouped_core.formats import QTensor
from grouped_core.storing import Extras, Within, within
from torch_bridge._library import Execute, define, define_merging, forward, grouped
from torch_bridge._mlp_library import decode, grads_rule, hidden_rule
from torch_bridge._run import TORCH_DTYPES
from torch_bridge._stored import Stored, Wanted, lengths_of, made_of, operand_of, present, slots_of, store_facts


class _Hidden(NamedTuple):
    op: str
    x_form: str
    wi_form: str
    keep: bool
    how: str


def _within(how: str, **arrays: Any) -> Within | None:
    """How a result is stored, of the text of `store_text`; "": it is not."""
    if not how:
        return None
    wanted, stream = store_facts(how)
    return within(wanted, stream=stream, measure=arrays["amax"] is not None, **arrays)


def _lengths(group_sizes: Tensor, *hows: str) -> Any:
    """As `_run.fake` takes them, of results stored so."""
    wanted = tuple([form for how in hows if how for form in store_facts(how)[0]])
    return partial(lengths_of, wanted, group_sizes.shape[0]) if wanted else None


def _hidden_rule(run: Any, static: _Hidden, operands: Sequence[Any]) -> tuple[Any, ...]:
    rows = run.spec(operands[0]).shape[0]
    x, wi = operand_of(operands[:3], static.x_form, rows), operand_of(operands[3:6], static.wi_form, rows)
    sizes, probs, wi_bias, encode, amax, *first = operands[6:]
    stored, extras = _within(static.how, encode=encode, amax=amax), Extras(None, *first, measure=False)
    z, h, _ = hidden_rule(run, decode(static.op), x, wi, sizes, probs, wi_bias, static.keep, stored, extras)
    forms = [z, z.other] if isinstance(z, QTensor) else [z]
    return (*present(*forms), h)


def _hidden(
    execute: Execute,
    x: list[Tensor],
    wi: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wi_bias: list[Tensor],
    encode_x: Tensor | None,
    encode_wi: Tensor | None,
    encode: Tensor | None,
    op: str,
    x_form: str,
    wi_form: str,
    keep: bool,
    how: str,
    amax: Tensor | None = None,
) -> list[Tensor]:
    rows, weights = slots_of(x, x_form, 2), slots_of(wi, wi_form, 3)
    operands = (*rows, *weights, group_sizes, probs, grouped(wi_bias, 2), encode, amax, encode_x, encode_wi)
    static, facts = _Hidden(op, x_form, wi_form, keep, how), ((0, 7), (0, 1), _lengths(group_sizes, how))
    found = forward(execute, _hidden_rule, static, operands, 6, *facts)
    return [each for each in found if each is not None]


class _Grads(NamedTuple):
    op: str
    wo_form: str
    dy_form: str
    wanted: str
    how: str
    how_z: str


def _grads_rule(run: Any, static: _Grads, operands: Sequence[Any]) -> tuple[Any, ...]:
    h, sizes, probs, wo_bias, dy, encode, key, encode_z, amax, *slots = operands
    rows = run.spec(dy).shape[0]
    wo, stored_dy = operand_of(slots[:3], static.wo_form, rows), operand_of(slots[3:], static.dy_form, rows)
    stored = _within(static.how, encode=encode, amax=amax, key=key)
    stored_z = _within(static.how_z, encode=encode_z, amax=None)
    rows, how = (h, wo, sizes, probs, wo_bias, dy, stored_dy), {"stored": stored, "stored_z": stored_z}
    dh, z, dp, forms = grads_rule(run, decode(static.op), *rows, static.wanted, **how)
    plain = (dh, None, dp) if isinstance(z, QTensor) else (dh, z, dp)
    return (*plain, *present(*forms.forms), *(present(z) if isinstance(z, QTensor) else ()))


def _grads_operands(
    h: Tensor,
    wo: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: list[Tensor],
    encode: Tensor | None,
    key: Tensor | None,
    encode_z: Tensor | None,
    amax: Tensor | None,
    wo_form: str,
    dy_form: str,
) -> tuple[Any, ...]:
    plain, *parts = dy
    form = slots_of(parts, dy_form, 2) if dy_form else (plain, None, None)
    given = (h, group_sizes, probs, grouped(wo_bias, 2), plain, encode, key, encode_z, amax)
    return (*given, *slots_of(wo, wo_form, 3), *form)


def _grads(
    execute: Execute,
    h: Tensor,
    wo: list[Tensor],
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: list[Tensor],
    encode: Tensor | None,
    key: Tensor | None,
    encode_z: Tensor | None,
    op: str,
    wo_form: str,
    dy_form: str,
    wanted: str,
    how: str,
    how_z: str,
    amax: Tensor | None = None,
) -> list[Tensor]:
    operands = _grads_operands(h, wo, group_sizes, probs, wo_bias, dy, encode, key, encode_z, amax, wo_form, dy_form)
    facts = ((0, 2, 4), (12, 13), _lengths(group_sizes, how, how_z))
    found = execute(_grads_rule, _Grads(op, wo_form, dy_form, wanted, how, how_z), operands, *facts)
    return [each for each in found if each is not None]


_HIDDEN = (
    "Tensor[] x, Tensor[] wi, Tensor group_sizes, Tensor? probs, Tensor[] wi_bias,"
    " Tensor? encode_x, Tensor? encode_wi, Tensor? encode,"
    " str op, str x_form, str wi_form, bool keep, str how"
)
_GRADS = (
    "Tensor h, Tensor[] wo, Tensor group_sizes, Tensor? probs, Tensor[] wo_bias, Tensor[] dy,"
    " Tensor? encode, Tensor? key, Tensor? encode_z,"
    " str op, str wo_form, str dy_form, str wanted, str how, str how_z"
)
define("stored_mlp_hidden", f"({_HIDDEN}) -> Tensor[]", _hidden)
define("stored_mlp_hidden_grads", f"({_GRADS}) -> Tensor[]", _grads)
_hidden_op = torch.ops.torch_bridge.stored_mlp_hidden.default
_grads_op = torch.ops.torch_bridge.stored_mlp_hidden_grads.default
# Both forms are of one format, so of two arrays; beside them the hidden rows, or three gradients, of which z may have
# a form of three arrays.
_hidden_merging = define_merging("stored_mlp_hidden", _HIDDEN, _hidden, 5)
_grads_merging = define_merging("stored_mlp_hidden_grads", _GRADS, _grads, 9)


class Activated(NamedTuple):
    """z [M, F] as it is or in its forms, and h [M, W] if it is kept."""

    z: list[Stored]
    h: Tensor | None


def hidden(
    x: Stored,
    wi: Stored,
    group_sizes: Tensor,
    probs: Tensor | None,
    wi_bias: list[Tensor],
    first: tuple[Tensor | None, Tensor | None],
    op: str,
    *,
    keep: bool,
    spec: ArraySpec,
    wanted: Wanted = (),
    encode: Tensor | None = None,
    amax: Tensor | None = None,
) -> Activated:
    """The first product and the activation.

    Args:
        first: multipliers of x and wi, where these are stored on the way. spec: of z. wanted: the forms that z is
            stored in, all from one pass; none: z as it is. encode, amax: of these, as of `store`.
    """
    made = made_of(wanted, spec.shape, TORCH_DTYPES[spec.dtype])
    texts = (op, x.text, wi.text, keep, made.how)
    operands = (x.tensors, wi.tensors, group_sizes, probs, wi_bias, *first, encode, *texts)
    if amax is None or not made.merges:
        found = _hidden_op(*operands)
    else:
        found = _hidden_merging[made.arrays + keep](*operands, amax)
    z = made.take(found) if wanted else [Stored([found[0]])]
    return Activated(z, found[-1] if keep else None)


class Gradients(NamedTuple):
    """dh [M, W], z [M, F], dp [M] float32, None where not wanted; and the forms of dh and z that are stored."""

    dh: Tensor | None
    z: Tensor | None
    dp: Tensor | None
    forms: list[Stored]
    z_forms: list[Stored]


def hidden_grads(
    h: Tensor,
    wo: Stored,
    group_sizes: Tensor,
    probs: Tensor | None,
    wo_bias: list[Tensor],
    dy: Tensor,
    stored_dy: Stored,
    op: str,
    letters: str,
    *,
    wanted: Wanted = (),
    encode: Tensor | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
    wanted_z: Wanted = (),
    encode_z: Tensor | None = None,
) -> Gradients:
    """Gradients at the hidden rows, of which `letters` names those that are wanted as they are.

    Args:
        stored_dy: dy as the product stores it; without text it is dy. wanted: the forms that dh is stored in, all from
            one pass. encode, amax, key: of these, as of `store`. wanted_z: likewise of z, beside `wanted` alone.
    """
    made, count = made_of(wanted, h.shape, h.dtype, 1), len(letters)
    width = h.shape[1] // (2 if decode(op).activation.gated else 1)
    of_z = made_of(wanted_z, (h.shape[0], width), h.dtype)
    parts = [dy, *(stored_dy.tensors if stored_dy.text else [])]
    texts = (op, wo.text, stored_dy.text, letters, made.how, of_z.how)
    operands = (h, wo.tensors, group_sizes, probs, wo_bias, parts, encode, key, encode_z, *texts)
    if amax is None or not made.merges:
        found = _grads_op(*operands)
    else:
        found = _grads_merging[count + made.arrays + of_z.arrays](*operands, amax)
    plain = dict(zip(letters, found, strict=False))
    forms, z_forms = made.take(found, count), of_z.take(found, count + made.arrays)
    return Gradients(plain.get("h"), plain.get("z"), plain.get("p"), forms, z_forms)
