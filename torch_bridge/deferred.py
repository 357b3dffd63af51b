"""The experts' MLP in parts, for schedules that compute weight gradients later: forward, every other gradient, weights.

Not differentiable: the parts are the gradient. Each can be captured in a graph of its own; k deferred microbatches give
the bits of k undeferred ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_core import linear_spec
from grouped_core.calls import ArraySpec
from grouped_core.gradients import Needs
from grouped_core.mlp_spec import MlpNeeds, MlpSpecs, check_cotangent, restrict
from grouped_core.sizes import GroupSizes
from torch_bridge import mlp
from torch_bridge._arguments import Members, accumulators_of, check_apart, check_writable
from torch_bridge._mlp_arguments import Accumulators, check_arguments, check_buffers, specs_of
from torch_bridge._mlp_library import NAMES
from torch_bridge._products import ProductFacts
from torch_bridge._run import spec_of
from torch_bridge.mlp import Facts, HiddenGradients
from torch_bridge.params import check_operand


@dataclass(frozen=True)
class MlpResiduals:
    """What `grouped_mlp_fwd` keeps: the tensors that the gradients read, and their places."""

    facts: Facts
    specs: MlpSpecs
    tensors: tuple[Tensor | None, ...]
    weights: tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Deferred:
    """What the weight gradients read: dW1 is made of x [M, K] and dh [M, W], dW2 of z [M, F] and dy [M, K]."""

    facts: Facts
    rows: HiddenGradients
    sizes: Tensor
    weights: tuple[list[Tensor], list[Tensor]]


def grouped_mlp_fwd(
    x: Tensor,
    wi: Members,
    wo: Members,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    out: Tensor | None = None,
    needs: MlpNeeds | None = None,
    **options: Any,
) -> tuple[Tensor, MlpResiduals]:
    """y [M, K] of `grouped_mlp`, and what its gradients read.

    Args:
        x, wi, wo, group_sizes, out, options: those of `grouped_mlp` but `wgrad_accum` and `grad_input`, which the parts
            of backward take.
        needs: which gradients will be asked for; None: all of what there is. Nothing is kept for the others.

    Raises what `grouped_mlp` raises.
    """
    for name, part in ((NAMES.accum, "grouped_mlp_bwd_dw"), (NAMES.grad_input, "grouped_mlp_bwd_dx")):
        if options.pop(name, None) is not None:
            raise ValueError(f"`{name}` of grouped_mlp_fwd: given, expected None; hand it to {part}.")
    with torch.no_grad():
        given = check_arguments(x, wi, wo, group_sizes, **options)
        if out is not None:
            check_buffers(out, None, given)
        specs, _ = specs_of(given)
        needs = restrict(needs or MlpNeeds(), specs)
        lists = (given.wi, given.wo, given.wi_bias, given.wo_bias)
        asked = (needs.wi, needs.wo, needs.wi_bias, needs.wo_bias)
        live = [tuple(range(len(each))) if need else () for each, need in zip(lists, asked, strict=True)]
        # Parts add, whatever the attributes of Parameters say: these belong to `wgrad_accum="main_grad"`.
        adding = (False,) * (len(given.wi) + len(given.wo))
        y, tensors, facts = mlp.forward_and_saved(given, live, needs, out, adding)
        return y, MlpResiduals(facts, specs, tuple(tensors), (given.wi, given.wo))


def grouped_mlp_bwd_dx(
    res: MlpResiduals, dy: Tensor, *, grad_input: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Any, Any, Deferred]:
    """(dx, dp, db1, db2, deferred): every gradient but those of the weights, and what these read.

    Args:
        res: from `grouped_mlp_fwd`. dy: [M, K], the gradient of y. grad_input: the caller's buffer for dx [M, K].

    Returns:
        dx [M, K], dp [M], db1 [G, W] and db2 [G, K] (lists of vectors for listed biases), None for what was not asked
        for; and what `grouped_mlp_bwd_dw` takes.

    Raises:
        TypeError, ValueError: dy is not like y; the buffer does not fit, or overlaps what is read.
    """
    sizes = res.tensors[0]
    assert sizes is not None, "sizes are always kept"
    dy = dy.contiguous()
    check_operand("dy", dy, sizes)
    check_cotangent(res.specs.x, spec_of(dy))
    if grad_input is not None:
        _check_grad_input(res, grad_input, dy)
    with torch.no_grad():
        rows = mlp.hidden_gradients(res.facts, res.tensors, dy)
        facts, needs = _asking(res.facts, weights=False), res.facts.needs
        second = mlp.second_gradients(facts, res.tensors, rows, (), ())
        first = mlp.first_gradients(facts, res.tensors, rows, (), (), grad_input)
        left = HiddenGradients(
            x=rows.x if needs.wi else None,
            dh=rows.dh if needs.wi else None,
            z=rows.z if needs.wo else None,
            dy=rows.dy if needs.wo else None,
            dp=None,
        )
        deferred = Deferred(res.facts, left, sizes, res.weights)
        return first.x, rows.dp, _form(facts, 0, first.biases), _form(facts, 1, second.biases), deferred


def _check_grad_input(res: MlpResiduals, buffer: Tensor, dy: Tensor) -> None:
    sizes, x, *rest = res.tensors
    check_operand(NAMES.grad_input, buffer, dy)
    check_writable(NAMES.grad_input, buffer)
    linear_spec.check_buffer(NAMES.grad_input, spec_of(buffer), ArraySpec(res.specs.x.shape, res.specs.x.dtype))
    read = [("dy", dy), (NAMES.x, x), (NAMES.sizes, sizes), *(("what is kept", each) for each in rest)]
    check_apart([(NAMES.grad_input, buffer)], read)


def grouped_mlp_bwd_dw(
    deferred: Deferred, wgrad_accum: Accumulators | None = None
) -> tuple[Tensor | list[Tensor] | None, Tensor | list[Tensor] | None]:
    """(dW1, dW2) in the form and layout of `wi` and `wo`, from what backward left.

    Args:
        deferred: from `grouped_mlp_bwd_dx`.
        wgrad_accum: a pair, for wi and wo, of what is added to in place: a tensor, or for a list (a wi in two tensors
            too) a list with None for members whose gradient nobody wants. None is returned for these.

    Raises:
        TypeError, ValueError: accumulators that do not fit, or overlap; nothing was added then.
    """
    pair = (None, None) if wgrad_accum is None else wgrad_accum
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"`{NAMES.accum}`: {wgrad_accum!r}, expected None or a pair, of `{NAMES.wi}` and of `{NAMES.wo}`; "
            "put None where the gradient is to be returned."
        )
    d = deferred
    to: list[list[Tensor | None]] = [
        [] if accum is None else accumulators_of(accum, weights, f"{NAMES.accum}[{at}]", name)
        for at, (accum, weights, name) in enumerate(zip(pair, d.weights, (NAMES.wi, NAMES.wo), strict=True))
    ]
    written = [(f"{NAMES.accum}[{at}]", each) for at, some in enumerate(to) for each in some]
    check_apart(written, [("x", d.rows.x), ("dh", d.rows.dh), ("z", d.rows.z), ("dy", d.rows.dy), ("sizes", d.sizes)])
    facts = _asking(d.facts, weights=True)
    first, second = (_into(product, some) for product, some in zip((facts.first, facts.second), to, strict=True))
    facts = facts._replace(first=first, second=second, saved=(0, 0, 0, 0))
    tensors = (d.sizes, d.rows.x, None, None, None)
    with torch.no_grad():
        dw1 = mlp.first_gradients(facts, tensors, d.rows, d.weights[0] if to[0] else (), to[0], None)
        dw2 = mlp.second_gradients(facts, tensors, d.rows, d.weights[1] if to[1] else (), to[1])
    return _packed(dw1.weights, first.packed[0]), _packed(dw2.weights, second.packed[0])


def _into(product: ProductFacts, accumulators: Sequence[Tensor | None]) -> ProductFacts:
    """The facts of a weight gradient, for the members that have an accumulator, if there are any."""
    if not accumulators:
        return product
    live = [at for at in product.live if accumulators[at] is not None]
    return product._replace(live=live, needs=product.needs._replace(w=product.needs.w and bool(live)))


def _asking(facts: Facts, *, weights: bool) -> Facts:
    """The facts, asking for the weight gradients alone, or for all the others."""

    def part(needs: Needs) -> Needs:
        return Needs(False, needs.w, False, False) if weights else needs._replace(w=False)

    first, second = facts.first, facts.second
    return facts._replace(
        first=first._replace(needs=part(first.needs)), second=second._replace(needs=part(second.needs))
    )


def _form(facts: Facts, at: int, gradients: list[Tensor | None]) -> Any:
    return _packed(gradients, (facts.first, facts.second)[at].packed[1])


def _packed(gradients: list[Any], packed: bool) -> Any:
    """One tensor for a packed operand, a list for one in several, None where nothing was asked for."""
    if not any(each is not None for each in gradients):
        return None
    return gradients[0] if packed and len(gradients) == 1 else gradients
