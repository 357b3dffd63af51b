"""Gradients of the experts' MLP on stored operands: what backward makes of what forward kept (`stored_mlp`).

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import gradients
from grouped_core import mlp as rules
from grouped_core.formats import Format, QTensor
from grouped_core.mlp_spec import Mlp, MlpNeeds, needs_dh, needs_dz
from grouped_core.recipes import Recipe
from torch_bridge import _mlp_library, _stored, _stored_mlp
from torch_bridge._products import Launcher, ProductFacts
from torch_bridge._run import TORCH_DTYPES
from torch_bridge._stored import NOTHING, Stored, Wanted
from torch_bridge._stored_mlp_arguments import Checked
from torch_bridge.quantize import DY, WEIGHT, Use, X
from torch_bridge.stored import forms_of, launcher, quantised, with_recipe


class Facts(NamedTuple):
    """What forward tells backward beside tensors."""

    checked: Checked
    uses: tuple[Use, Use]
    needs: MlpNeeds
    products: tuple[ProductFacts, ProductFacts]
    texts: tuple[str, ...]  # of the forms of x, z, wi, wi once more (`_Kept.wi_read`) and wo
    counts: tuple[int, ...]  # saved tensors of these, of wi_bias and of wo_bias
    probs_dtype: torch.dtype | None


class _Kept(NamedTuple):
    """What forward kept, but for the hidden rows, which go as soon as nothing reads them."""

    x: Stored
    z: Stored
    sizes: Tensor
    probs: Tensor | None
    wi: Stored
    wi_read: Stored  # as forward read it, where the hidden rows are made again of a cached weight
    wo: Stored
    wi_bias: list[Tensor]
    wo_bias: list[Tensor]


class _AtHidden(NamedTuple):
    """What the pass at the hidden rows leaves for the weight gradients and dx."""

    dh: Tensor | None
    forms: tuple[Stored, Stored] | None  # of dh, along features and along rows, where the pass stored them
    dp: Tensor | None
    z: Tensor | None  # the activated rows again
    z_form: Stored | None  # or these, along rows


class _Plan(NamedTuple):
    """What backward does, as far as it does not depend on arrays."""

    dy: Wanted  # its forms; of a quantised one plain ones too
    dh: Wanted
    within: Wanted  # those that the pass at the hidden rows stores; empty where dh is stored in a pass of its own
    rebuilt: Wanted  # of z, likewise, where the weight gradient alone reads it


@lru_cache(maxsize=1024)
def _plan(text: str, texts: tuple[str, str], needs: MlpNeeds, is_stored: bool) -> _Plan:
    op = _mlp_library.decode(text)
    (_, own), (_, second) = (with_recipe(each) for each in texts)
    cells: Wanted = (((1, second.dgrad[0]),) if needs_dz(needs) else ()) + (((0, second.wgrad[1]),) if needs.wo else ())
    of_dh = tuple(rules.grad_row_forms(own, needs))
    within = in_one_pass(op, of_dh) if needs_dh(needs) else ()
    rebuilt = ((0, second.wgrad[0]),) if within and rules.rebuilt_rows(op, second, None) is not None else ()
    return _Plan(cells if is_stored else quantised(cells), quantised(of_dh), within, rebuilt)


def in_one_pass(op: Mlp, wanted: Sequence[tuple[int, Format]]) -> Wanted:
    """`wanted`, where the activation's own pass stores it; else nothing."""
    return tuple(wanted) if rules.stored_within(op, wanted) else ()


def launchers(
    facts: Facts, tensors: list[Any], dy: Tensor | QTensor[Tensor]
) -> tuple[Tensor | None, list[Launcher | None]]:
    """The gradient of the probabilities, and what is left of each product once that at the hidden rows is there.

    Args:
        tensors: as `stored_mlp.forward_and_saved` gave them; they are taken out of the list.
    """
    needs, rows = facts.needs, dy.shape[0]
    first, second = facts.checked.products
    plan = _plan(facts.checked.text, (first.text, second.text), needs, isinstance(dy, QTensor))
    h, key, kept = _taken_apart(facts, tensors)
    one, two = (use._replace(key=key) for use in facts.uses)
    z, plain_z = kept.z, None
    if (needs_dz(needs) and h is None) or (not needs_dz(needs) and needs.wo and not z.tensors):
        h, plain_z = _hidden_again(facts, one, kept, rows)
    of_dy = _grad_forms(dy, plan.dy, kept.sizes, two, second.recipe, 0)
    dy = _plain_gradient(dy, of_dy, kept.sizes, read=needs.wo_bias or (needs.probs and bool(kept.wo_bias)))
    dh = forms = dp = None
    if h is not None:
        rebuilds = needs.wo and plain_z is None and not z.tensors
        dh, forms, dp, z_again, z_form = _at_hidden(facts, plan, (one, two), kept, h, dy, of_dy[0], rebuilds=rebuilds)
        z, plain_z = z if z_form is None else z_form, z_again if plain_z is None else plain_z
        z_again = None
    h = None
    if needs.wo:
        z = z if plain_z is None or z.tensors else Stored([plain_z])
        z = _form(z, (0, second.recipe.wgrad[0]), rows, kept.sizes, _delayed(two, X, second.recipe), second.recipe)
    plain_z = None
    work: list[Launcher | None] = [None, None]
    if any(facts.products[0].needs):
        assert dh is not None, "gradients of the first product are needed"
        forms = forms or _grad_forms(dh, plan.dh, kept.sizes, one, first.recipe, 1)
        work[0] = _first_product(facts, one, kept, dh, [form for form in forms if form.text])
    if any(facts.products[1].needs):
        scale = kept.probs if second.op.scale_bias else None
        operands = (z, NOTHING, kept.sizes, kept.wo_bias, scale, dy, [form for form in of_dy[1:] if form.text])
        work[1] = launcher(*operands, key, two.delayed(X)[0], facts.products[1])
    return dp, work


def _taken_apart(facts: Facts, tensors: list[Any]) -> tuple[Tensor | None, Tensor | None, _Kept]:
    """(hidden rows, key, the rest) of the tensors that forward saved."""

    def take(count: int) -> list[Any]:
        part = tensors[:count]
        del tensors[:count]
        return part

    x_count, z_count, wi_count, read_count, wo_count, *biases = facts.counts
    x_text, z_text, wi_text, read_text, wo_text = facts.texts
    x = Stored(take(x_count), x_text)
    (h,) = take(1)
    z = Stored(take(z_count), z_text)
    sizes, probs, key = take(3)
    wi, wi_read = Stored(take(wi_count), wi_text), Stored(take(read_count), read_text)
    wo = Stored(take(wo_count), wo_text)
    return h, key, _Kept(x, z, sizes, probs, wi, wi_read, wo, *map(take, biases))


def _hidden_again(facts: Facts, use: Use, kept: _Kept, rows: int) -> tuple[Tensor | None, Tensor]:
    """The hidden rows, if gradients need them, and the activated ones; no magnitudes are merged, for forward did."""
    op, recipe, _ = facts.checked.products[0]
    cells, axis = recipe.forward, op.weight_axes()[0]
    x = _form(kept.x, (1, cells[0]), rows, kept.sizes, use.delayed(X), recipe)
    wi = kept.wi_read
    if not wi.tensors:
        wi = _form(kept.wi, (axis, cells[1]), rows, None, use.delayed(WEIGHT), recipe)
    z, h = _stored_mlp.hidden(
        *(x, wi, kept.sizes, kept.probs, kept.wi_bias, (None, None), facts.checked.text),
        keep=needs_dz(facts.needs),
        spec=facts.checked.hidden,
    )
    (plain,) = z[0].tensors
    return h, plain


def _plain_gradient(dy: Tensor | QTensor[Tensor], forms: tuple[Stored, Stored], sizes: Tensor, *, read: bool) -> Tensor:
    """dy as it is; of a quantised one its values where they are read, by products or by biases, else only the type and
    the rows.

    Args:
        forms: of dy; plain ones are its values already.
    """
    if not isinstance(dy, QTensor):
        return dy
    for form in forms:
        if form.tensors and not form.text:
            return form.tensors[0]
    if read:
        return _stored.dequantize(dy, sizes, dy.dtype)
    return dy.values.new_empty((dy.shape[0], 0), dtype=TORCH_DTYPES[dy.dtype])


def _at_hidden(
    facts: Facts,
    plan: _Plan,
    uses: tuple[Use, Use],
    kept: _Kept,
    h: Tensor,
    dy: Tensor,
    dy_form: Stored,
    *,
    rebuilds: bool,
) -> _AtHidden:
    """Gradients at the hidden rows, and the activated rows again if the second weight's gradient lacks them."""
    (one, two), needs = uses, facts.needs
    plain = needs_dh(needs) and (not plan.within or needs.wi_bias)
    wanted_z = plan.rebuilt if rebuilds else ()
    encode, live = one.delayed(DY, training=True)
    found = _stored_mlp.hidden_grads(
        *(h, kept.wo, kept.sizes, kept.probs, kept.wo_bias, dy, dy_form, facts.checked.text),
        _mlp_library.wanted(plain, rebuilds and not wanted_z, needs.probs),
        wanted=plan.within,
        encode=encode,
        amax=live,
        key=one.key,
        wanted_z=wanted_z,
        encode_z=two.delayed(X)[0] if wanted_z else None,
    )
    dh, dp = found.dh, found.dp
    forms = _by_axis(plan.within, found.forms) if plan.within else None
    if forms is not None and dh is None:  # nobody reads it as it is
        dh = h.new_empty((h.shape[0], 0))
    if dp is not None and facts.probs_dtype is not None:
        dp = dp.to(facts.probs_dtype)
    return _AtHidden(dh, forms, dp, found.z, found.z_forms[0] if wanted_z else None)


def _first_product(facts: Facts, use: Use, kept: _Kept, dh: Tensor, forms: list[Stored]) -> Launcher:
    """dx and the first weight's gradient, of dh [M, W] in `forms`."""
    op, recipe, _ = facts.checked.products[0]
    needs, rows, of_x = facts.needs, dh.shape[0], _delayed(use, X, recipe)
    x, wi = kept.x if needs.wi else NOTHING, NOTHING  # what only made the hidden rows again is not read here
    if x.tensors and not recipe.wgrad[0].plain:
        x = _form(x, (0, recipe.wgrad[0]), rows, kept.sizes, of_x, recipe)
    if needs.x:
        turned = (op.weight_axes()[1], recipe.dgrad[1])
        wi = _form(kept.wi, turned, rows, None, _delayed(use, WEIGHT, recipe), recipe)
    return launcher(x, wi, kept.sizes, kept.wi_bias, None, dh, forms, use.key, of_x[0], facts.products[0])


def _delayed(use: Use, role: int, recipe: Recipe) -> tuple[Tensor | None, Tensor | None]:
    """Multipliers of x or the weight where backward stores them, and magnitudes, if forward did not find them."""
    return use.delayed(role, training=gradients.measures_late(recipe, role))


def _form(
    kept: Stored,
    wanted: tuple[int, Format],
    rows: int,
    sizes: Tensor | None,
    delayed: tuple[Tensor | None, Tensor | None],
    recipe: Recipe,
) -> Stored:
    """An operand of forward in the form `wanted`: as it was kept, or made of that."""
    if _stored.reads(kept.text, *wanted):
        return kept
    return forms_of(_whole(kept, rows), (wanted,), sizes, delayed[0], recipe, delayed[1])[0]


def _whole(stored: Stored, rows: int) -> Any:
    """The operand that `arrays_of` or `_with_other` took apart."""
    first, _, second = stored.text.partition("\n")
    if second:
        count = len(_stored.described(first)[4])
        other = _stored.restored(Stored(stored.tensors[count:], second), rows)
        return dataclasses.replace(_stored.restored(Stored(stored.tensors[:count], first), rows), other=other)
    if first:
        return _stored.restored(stored, rows)
    return stored.tensors[0] if len(stored.tensors) == 1 else stored.tensors


def _grad_forms(dy: Any, wanted: Wanted, sizes: Tensor, use: Use, recipe: Recipe, stream: int) -> tuple[Stored, Stored]:
    """dy along its features and along its rows, each if wanted, from one pass; magnitudes are merged."""
    if isinstance(dy, QTensor):
        return _by_axis(wanted, forms_of(dy, wanted, sizes, None, recipe))
    if not wanted:
        return NOTHING, NOTHING
    encode, live = use.delayed(DY, training=True)
    return _by_axis(wanted, _stored.store([dy], wanted, sizes, encode=encode, amax=live, key=use.key, stream=stream))


def _by_axis(wanted: Wanted, made: Sequence[Stored]) -> tuple[Stored, Stored]:
    """The forms along features and along rows; without arrays where there is none."""
    forms = {axis: form for (axis, _), form in zip(wanted, made, strict=True)}
    return forms.get(1, NOTHING), forms.get(0, NOTHING)
