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

from grouped_core.gradients import Needs
from grouped_core.mlp_spec import MlpNeeds
from torch_bridge import mlp
from torch_bridge._arguments import accumulators_of
from torch_bridge._mlp_arguments import Accumulators, check_arguments, check_buffers
from torch_bridge._mlp_library import NAMES
from torch_bridge.mlp import Facts, HiddenGradients


@dataclass(frozen=True)
class MlpResiduals:
    """What `grouped_mlp_fwd` keeps: the tensors that the gradients read, and their places."""

    facts: Facts
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
    *args: Any, out: Tensor | None = None, needs: MlpNeeds | None = None, **kwargs: Any
) -> tuple[Tensor, MlpResiduals]:
    """y [M, K] of `grouped_mlp`, and what its gradients read.

    Args:
        args, kwargs: those of `grouped_mlp` but `wgrad_accum` and `grad_input`, which the parts of backward take.
        needs: which gradients will be asked for; None: all of what there is. Nothing is kept for the others.

    Raises what `grouped_mlp` raises.
    """
    with torch.no_grad():
        given = check_arguments(*args, **kwargs)
        if out is not None:
            check_buffers(out, None, given)
        needs = needs or MlpNeeds()
        needs = needs._replace(
            probs=needs.probs and given.probs is not None,
            wi_bias=needs.wi_bias and bool(given.wi_bias),
            wo_bias=needs.wo_bias and bool(given.wo_bias),
        )
        lists = (given.wi, given.wo, given.wi_bias, given.wo_bias)
        asked = (needs.wi, needs.wo, needs.wi_bias, needs.wo_bias)
        live = [list(range(len(each))) if need else [] for each, need in zip(lists, asked, strict=True)]
        y, tensors, facts = mlp.forward_and_saved(given, live, needs, out, None)
        return y, MlpResiduals(facts, tuple(tensors), (given.wi, given.wo))


def grouped_mlp_bwd_dx(
    res: MlpResiduals, dy: Tensor, *, grad_input: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Any, Any, Deferred]:
    """(dx, dp, db1, db2, deferred): every gradient but those of the weights, and what these read.

    Args:
        res: from `grouped_mlp_fwd`. dy: [M, K], the gradient of y. grad_input: the caller's buffer for dx [M, K].

    Returns:
        dx [M, K], dp [M], db1 [G, W] and db2 [G, K] (lists of vectors for listed biases), None for what was not asked
        for; and what `grouped_mlp_bwd_dw` takes.
    """
    with torch.no_grad():
        rows = mlp.hidden_gradients(res.facts, res.tensors, dy.contiguous())
        facts = _asking(res.facts, weights=False)
        second = mlp.second_gradients(facts, res.tensors, rows, (), ())
        first = mlp.first_gradients(facts, res.tensors, rows, (), (), grad_input)
        deferred = Deferred(res.facts, rows._replace(dp=None), _sizes(res), res.weights)
        return first.x, rows.dp, _form(facts, 0, first.biases), _form(facts, 1, second.biases), deferred


def grouped_mlp_bwd_dw(
    deferred: Deferred, wgrad_accum: Accumulators | None = None
) -> tuple[Tensor | list[Tensor] | None, Tensor | list[Tensor] | None]:
    """(dW1, dW2) in the form and layout of `wi` and `wo`, from what backward left.

    Args:
        deferred: from `grouped_mlp_bwd_dx`.
        wgrad_accum: a pair, for wi and wo, of what is added to in place, each as in `grouped_mlp`; None is returned for
            these.
    """
    pair = (None, None) if wgrad_accum is None else wgrad_accum
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"`{NAMES.accum}`: {wgrad_accum!r}, expected None or a pair, of `{NAMES.wi}` and of `{NAMES.wo}`; "
            "put None where the gradient is to be returned."
        )
    with torch.no_grad():
        d, facts = deferred, _asking(deferred.facts, weights=True)
        tensors = (d.sizes, d.rows.x, None, None, None)
        facts = facts._replace(saved=(0, 0, 0, 0))
        found = []
        for at, (accum, weights, name) in enumerate(zip(pair, d.weights, (NAMES.wi, NAMES.wo), strict=True)):
            to = [] if accum is None else accumulators_of(accum, weights, f"{NAMES.accum}[{at}]", name)
            owners: Sequence[Tensor] = weights if to else ()
            if at == 0:
                result = mlp.first_gradients(facts, tensors, d.rows, owners, to, None)
            else:
                result = mlp.second_gradients(facts, tensors, d.rows, owners, to)
            found.append(_packed(result.weights, (facts.first, facts.second)[at].packed[0]))
        return found[0], found[1]


def _sizes(res: MlpResiduals) -> Tensor:
    sizes = res.tensors[0]
    assert sizes is not None, "sizes are always kept"
    return sizes


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
    """One tensor for a packed operand, a list for a listed one, None where nothing was asked for."""
    if not any(each is not None for each in gradients):
        return None
    return gradients[0] if packed else gradients
