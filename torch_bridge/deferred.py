"""The experts' MLP in parts, for schedules that delay wgrad: forward, all other gradients, weight gradients.

The parts are not differentiable, as they compute the gradient themselves. Each can be captured in its own graph;
k deferred microbatches give the bits of k undeferred ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_core import linear_spec
from grouped_core.calls import ArraySpec
from grouped_core.formats import QTensor, wide
from grouped_core.lora import LORA
from grouped_core.mlp_spec import MlpNeeds, check_cotangent, restrict
from grouped_core.sizes import GroupSizes
from torch_bridge import _autocast
from torch_bridge._args import (
    Accumulators,
    Lists,
    Members,
    accumulator_pair,
    accumulators_of,
    check_apart,
    check_buffers,
    check_writable,
    mlp_arguments,
)
from torch_bridge._autograd import Saved, forward_and_saved
from torch_bridge._checks import MLP_NAMES as NAMES
from torch_bridge._checks import check_operand
from torch_bridge._compiling import beside_graphs
from torch_bridge._gradients import Route, WeightGradient
from torch_bridge._tensors import as_read, fixed_spec, note_written, tensors_of, unpack
from torch_bridge.mlp import MLP, grouped_mlp


@dataclass(frozen=True)
class MlpResiduals:
    """What `grouped_mlp_fwd` keeps: the tensors that the gradients read, and their layouts."""

    saved: Saved
    x: ArraySpec
    sizes: Tensor
    tensors: tuple[Tensor | None, ...]
    weights: tuple[list[Tensor], ...]
    lists: Lists  # of weights and biases


@dataclass(frozen=True)
class Deferred:
    """What the weight gradients read: dW1 needs x [M, K] and dh [M, W], dW2 needs z [M, F] and dy [M, K].

    With a recipe that quantises, these are quantised values and scales.
    """

    work: tuple[WeightGradient | None, ...]
    weights: tuple[list[Tensor], ...]
    lists: Lists  # of weights and biases


@beside_graphs
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
    """y [M, K] of `grouped_mlp`, and the tensors that its gradients read.

    Args:
        x, wi, wo, group_sizes, out, options: those of `grouped_mlp` except `wgrad_accum` and `grad_input`, which the
            parts of backward take, and adapters.
        needs: which gradients will be computed; None: all that exist. Nothing is kept for the others.

    Under `torch.autocast`, gradients of cast operands have its dtype, or are added to accumulators unrounded.

    Raises what `grouped_mlp` raises.
    """
    for name, part in ((NAMES.accum, "grouped_mlp_bwd_dw"), (NAMES.grad_input, "grouped_mlp_bwd_dx")):
        if options.pop(name, None) is not None:
            raise ValueError(f"`{name}` of grouped_mlp_fwd: given, expected None; hand it to {part}.")
    signature = inspect.signature(grouped_mlp).bind(x, wi, wo, group_sizes, **options)
    if given := [name for name in signature.arguments if name.startswith(LORA)]:
        raise ValueError(
            f"`{given[0]}` of grouped_mlp_fwd: given, expected no adapter, whose gradients are small and not deferred; "
            "call grouped_mlp."
        )
    signature.apply_defaults()
    left_out = (*[name for name in signature.arguments if name.startswith(LORA)], "out", NAMES.grad_input)
    arguments = {name: value for name, value in signature.arguments.items() if name not in left_out}
    with torch.no_grad():
        given = mlp_arguments(**_autocast.cast_named(arguments), join=False)
        if out is not None:
            check_buffers(given, out, None)
        op, specs = given.checked.op, given.checked.specs
        asked = restrict(needs or MlpNeeds(), specs)
        own = [len(leaves) > 0 for leaves in given.leaves]  # a quantised operand without a master has no gradient
        asked = asked._replace(x=asked.x and given.leaf is not None, wi=asked.wi and own[0], wo=asked.wo and own[1])
        y, tensors, saved = forward_and_saved(MLP, given, MLP.facts(op, specs, asked, (False, False)), out)
        x_spec = ArraySpec(tuple(given.x.shape), specs.x.dtype)
        return y, MlpResiduals(saved, x_spec, given.sizes, tuple(tensors), given.leaves, given.checked.lists)


@beside_graphs
def grouped_mlp_bwd_dx(
    res: MlpResiduals, dy: Tensor | QTensor[Tensor], *, grad_input: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Any, Any, Deferred]:
    """(dx, dp, db1, db2, deferred): all gradients except those of the weights, and the operands of the latter.

    Args:
        res: from `grouped_mlp_fwd`.
        dy: [M, K], the gradient of y, optionally quantised as the products of the recipe read it.
        grad_input: the caller's buffer for dx [M, K].

    Returns:
        dx [M, K], dp [M], db1 [G, W] and db2 [G, K] (lists of vectors for listed biases), None for those that are not
        needed; and the argument of `grouped_mlp_bwd_dw`.

    Raises:
        TypeError, ValueError: dy does not match y; the buffer does not fit, or overlaps a tensor that is read.
    """
    linear_spec.check_made_by("grouped_mlp_bwd_dx", "res", res, MlpResiduals, "grouped_mlp_fwd")
    plain = dy.values if isinstance(dy, QTensor) else as_read(dy) if isinstance(dy, Tensor) else dy
    check_operand("dy", plain, res.sizes)
    if isinstance(dy, QTensor):
        op, specs = res.saved.facts.op, res.saved.facts.specs
        check_cotangent(res.x, ArraySpec(dy.shape, dy.dtype), dy.format, op.fc2().resolve(specs.x, specs.wo))
    else:
        check_cotangent(res.x, fixed_spec(plain))
        dy = plain
    kept = unpack(res.saved.layouts, res.tensors)
    if grad_input is not None:
        _check_grad_input(res, grad_input, tensors_of(dy), tensors_of(kept[0]))
    work: list[WeightGradient | None] = [None, None]
    with torch.no_grad():
        dx, dp, of_biases = MLP.backward(res.saved, kept, dy, grad_input, work.__setitem__)
        if grad_input is not None:
            note_written([grad_input])
        db1, db2 = (
            None if found is None else found if packed else list(found.unbind())
            for found, (_, packed) in zip(of_biases, res.lists[len(work) :], strict=True)
        )
        return dx, dp, db1, db2, Deferred(tuple(work), res.weights, res.lists)


def _check_grad_input(res: MlpResiduals, buffer: Tensor, dy: list[Tensor], x: list[Tensor]) -> None:
    check_operand(NAMES.grad_input, buffer, res.sizes, written=True)
    check_writable(NAMES.grad_input, buffer)
    linear_spec.check_buffer(NAMES.grad_input, fixed_spec(buffer), ArraySpec(res.x.shape, wide(res.x.dtype)))
    names = {id(res.sizes): NAMES.sizes} | {id(each): NAMES.x for each in x}
    read = [(names.get(id(each), "what is kept"), each) for each in res.tensors if each is not None]
    check_apart([(NAMES.grad_input, buffer)], [*[("dy", each) for each in dy], *read])


@beside_graphs
def grouped_mlp_bwd_dw(
    deferred: Deferred, wgrad_accum: Accumulators | None = None
) -> tuple[Tensor | list[Tensor | None] | None, Tensor | list[Tensor | None] | None]:
    """(dW1, dW2) in the form and layout of `wi` and `wo`.

    Args:
        deferred: from `grouped_mlp_bwd_dx`.
        wgrad_accum: a pair, for wi and wo, of accumulators to which the gradient is added: a tensor, or for a list (and
            for a wi in two tensors) a list with None for members without a gradient. None is returned for these.

    Raises:
        TypeError, ValueError: accumulators do not fit, or overlap; then nothing was added.
    """
    linear_spec.check_made_by("grouped_mlp_bwd_dw", "deferred", deferred, Deferred, "grouped_mlp_bwd_dx")
    advice = "put None where the gradient is to be returned"
    pair = accumulator_pair((None, None) if wgrad_accum is None else wgrad_accum, advice, "None or a pair")
    d = deferred
    to: list[list[Tensor | None]] = [
        [] if accum is None else accumulators_of(accum, weights, f"{NAMES.accum}[{at}]", name)
        for at, (accum, weights, name) in enumerate(zip(pair, d.weights, MLP.weights, strict=True))
    ]
    written = [(f"{NAMES.accum}[{at}]", each) for at, some in enumerate(to) for each in some]
    check_apart(written, [("what is kept", each) for work in d.work if work is not None for each in work.tensors()])
    results = []
    with torch.no_grad():
        for at in (1, 0):
            weights, accumulators, (count, packed) = d.weights[at], to[at], d.lists[at]
            trained = tuple([n for n in range(len(weights)) if not accumulators or accumulators[n] is not None])
            # The parts always add; attributes of Parameters count only for `wgrad_accum="main_grad"`.
            owners = weights if accumulators else ()
            route = Route(MLP.weights[at], count, packed, trained, owners, accumulators, overwrite=(False,) * count)
            found = route.deliver(d.work[at])
            is_none = all(each is None for each in found)  # no gradient was computed, or all were added
            results.append(None if is_none else found[0] if packed else found)
    return results[1], results[0]
