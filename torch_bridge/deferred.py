"""The experts' MLP in parts, for schedules that compute weight gradients later: forward, every other gradient, weights.

Not differentiable: the parts are the gradient. Each can be captured in a graph of its own; k deferred microbatches give
the bits of k undeferred ones.
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
from grouped_core.gradients import Needs
from grouped_core.mlp_spec import MlpNeeds, MlpSpecs, check_cotangent, restrict
from grouped_core.sizes import GroupSizes
from torch_bridge import _autocast, _saved, _stored_mlp_arguments, _stored_mlp_gradients, mlp, stored_mlp
from torch_bridge._arguments import Members, accumulators_of, check_apart, check_writable
from torch_bridge._mlp_arguments import Accumulators, check_arguments, check_buffers, specs_of
from torch_bridge._mlp_library import NAMES
from torch_bridge._products import Launcher, ProductFacts, mlp_gradients
from torch_bridge._run import spec_of
from torch_bridge._stored_arguments import parts_of
from torch_bridge._stored_mlp_arguments import check_results, is_stored_mlp
from torch_bridge.params import check_operand


@dataclass(frozen=True)
class MlpResiduals:
    """What `grouped_mlp_fwd` keeps: the tensors that the gradients read, and their places."""

    path: Any  # the module whose `launchers` reads this: `mlp`, or `_stored_mlp_gradients`
    facts: Any  # of that module
    specs: MlpSpecs
    sizes: Tensor
    tensors: tuple[Tensor | None, ...]
    weights: tuple[list[Tensor], list[Tensor]]
    rows: tuple[Tensor, ...]  # of `tensors`, those that x is kept in


@dataclass(frozen=True)
class Deferred:
    """What the weight gradients read: dW1 is made of x [M, K] and dh [M, W], dW2 of z [M, F] and dy [M, K].

    Of a recipe that quantises these are codes and scales.
    """

    products: tuple[ProductFacts, ProductFacts]
    work: tuple[Launcher | None, Launcher | None]
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

    Under `torch.autocast` gradients of what is cast come in its dtype, or are added to accumulators unrounded.

    Raises what `grouped_mlp` raises.
    """
    for name, part in ((NAMES.accum, "grouped_mlp_bwd_dw"), (NAMES.grad_input, "grouped_mlp_bwd_dx")):
        if options.pop(name, None) is not None:
            raise ValueError(f"`{name}` of grouped_mlp_fwd: given, expected None; hand it to {part}.")
    signature = inspect.signature(mlp.grouped_mlp).bind(x, wi, wo, group_sizes, **options)
    signature.apply_defaults()
    arguments = signature.arguments
    for name in ("out", NAMES.grad_input):
        arguments.pop(name)
    with torch.no_grad():
        biases = (arguments["wi_bias"], arguments["wo_bias"])
        x, (wi, wo), (wi_bias, wo_bias), _ = _autocast.operands(x, (wi, wo), biases)
        arguments |= {"x": x, "wi": wi, "wo": wo, "wi_bias": wi_bias, "wo_bias": wo_bias}
        if is_stored_mlp(x, wi, wo, arguments["recipe"]):
            return _stored_fwd(_stored_mlp_arguments.check_arguments(**arguments), out, needs)
        given = check_arguments(**arguments)
        if out is not None:
            check_buffers(out, None, given)
        specs, _ = specs_of(given)
        needs, live = _asked(needs, specs, (given.wi, given.wo, given.wi_bias, given.wo_bias))
        # Parts add, whatever the attributes of Parameters say: these belong to `wgrad_accum="main_grad"`.
        adding = (False,) * (len(given.wi) + len(given.wo))
        y, tensors, facts = mlp.forward_and_saved(given, live, needs, out, adding)
        x_kept = () if tensors[1] is None else (tensors[1],)
        return y, MlpResiduals(mlp, facts, specs, given.sizes, tuple(tensors), (given.wi, given.wo), x_kept)


def _stored_fwd(given: Any, out: Tensor | None, needs: MlpNeeds | None) -> tuple[Tensor, MlpResiduals]:
    """As `grouped_mlp_fwd`, where something is quantised. What comes quantised without a master has no gradient."""
    if out is not None:
        check_results(given, out)
    lists = (given.wi_leaves, given.wo_leaves, given.wi_bias, given.wo_bias)
    needs, live = _asked(needs, given.checked.specs, lists)
    needs = needs._replace(x=needs.x and given.leaf is not None, wi=len(live[0]) > 0, wo=len(live[1]) > 0)
    adding: Any = tuple((False,) * max(1, len(each)) for each in lists[:2])
    y, tensors, names, facts = stored_mlp.forward_and_saved(given, live, needs, out, adding)
    x_kept = [each for each, name in zip(tensors, names, strict=False) if name.startswith(_saved.ROWS)]
    rows = tuple(each for each in x_kept if each is not None)
    members, specs = lists[:2], given.checked.specs
    return y, MlpResiduals(_stored_mlp_gradients, facts, specs, given.sizes, tuple(tensors), members, rows)


def _asked(
    needs: MlpNeeds | None, specs: MlpSpecs, lists: Sequence[list[Tensor]]
) -> tuple[MlpNeeds, list[tuple[int, ...]]]:
    """Needed gradients, and the members of wi, wo and their biases that have one."""
    needs = restrict(needs or MlpNeeds(), specs)
    asked = (needs.wi, needs.wo, needs.wi_bias, needs.wo_bias)
    return needs, [tuple(range(len(each))) if need else () for each, need in zip(lists, asked, strict=True)]


def grouped_mlp_bwd_dx(
    res: MlpResiduals, dy: Tensor | QTensor[Tensor], *, grad_input: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Any, Any, Deferred]:
    """(dx, dp, db1, db2, deferred): every gradient but those of the weights, and what these read.

    Args:
        res: from `grouped_mlp_fwd`.
        dy: [M, K], the gradient of y, perhaps quantised as the products of the recipe read it.
        grad_input: the caller's buffer for dx [M, K].

    Returns:
        dx [M, K], dp [M], db1 [G, W] and db2 [G, K] (lists of vectors for listed biases), None for what was not asked
        for; and what `grouped_mlp_bwd_dw` takes.

    Raises:
        TypeError, ValueError: dy is not like y; the buffer does not fit, or overlaps what is read.
    """
    if isinstance(dy, QTensor) and res.path is mlp:
        raise ValueError(
            f"`dy`: stored as {dy.format.name}, expected a plain tensor, for the recipe of this operation quantises "
            "nothing; dequantise it."
        )
    plain = dy.values if isinstance(dy, QTensor) else dy.contiguous()
    check_operand("dy", plain, res.sizes)
    check_cotangent(res.specs.x, ArraySpec(dy.shape, dy.dtype) if isinstance(dy, QTensor) else spec_of(plain))
    if grad_input is not None:
        _check_grad_input(res, grad_input, parts_of(dy) if isinstance(dy, QTensor) else [plain])
    dy = dy if isinstance(dy, QTensor) else plain
    with torch.no_grad():
        dp, work = res.path.launchers(res.facts, list(res.tensors), dy)
        products = res.facts.products
        one, two = (
            each.of_weights() if each is not None and of.needs.w else None
            for each, of in zip(work, products, strict=True)
        )
        first, second = mlp_gradients(_asking(products, weights=False), work, ((), ()), ((), ()), grad_input)
        db1, db2 = (_packed(of.biases, facts.packed[1]) for of, facts in zip((first, second), products, strict=True))
        return first.x, dp, db1, db2, Deferred(products, (one, two), res.weights)


def _check_grad_input(res: MlpResiduals, buffer: Tensor, dy: list[Tensor]) -> None:
    check_operand(NAMES.grad_input, buffer, res.sizes)
    check_writable(NAMES.grad_input, buffer)
    wanted = ArraySpec(res.specs.x.shape, wide(res.specs.x.dtype))
    linear_spec.check_buffer(NAMES.grad_input, spec_of(buffer), wanted)
    rest = [each for each in res.tensors if each is not None and each is not res.sizes]
    read = [*(("dy", each) for each in dy), (NAMES.sizes, res.sizes), *((NAMES.x, each) for each in res.rows)]
    read += [("what is kept", each) for each in rest if not any(each is row for row in res.rows)]
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
    check_apart(written, [("what is kept", each) for work in d.work if work is not None for each in work.tensors()])
    asking = _asking(d.products, weights=True)
    one, two = (_into(product, some) for product, some in zip(asking, to, strict=True))
    owners = [weights if some else () for weights, some in zip(d.weights, to, strict=True)]
    with torch.no_grad():
        dw1, dw2 = mlp_gradients((one, two), list(d.work), owners, to, None)
    return _packed(dw1.weights, one.packed[0]), _packed(dw2.weights, two.packed[0])


def _into(product: ProductFacts, accumulators: Sequence[Tensor | None]) -> ProductFacts:
    """The facts of a weight gradient, for the members that have an accumulator, if there are any."""
    if not accumulators:
        return product
    live = [at for at in product.live if accumulators[at] is not None]
    return product._replace(live=live, needs=product.needs._replace(w=product.needs.w and len(live) > 0))


def _asking(products: tuple[ProductFacts, ProductFacts], *, weights: bool) -> tuple[ProductFacts, ProductFacts]:
    """The facts, asking for the weight gradients alone, or for all the others."""

    def part(facts: ProductFacts) -> ProductFacts:
        needs = facts.needs
        return facts._replace(needs=Needs(False, needs.w, False, False) if weights else needs._replace(w=False))

    return part(products[0]), part(products[1])


def _packed(gradients: list[Any], packed: bool) -> Any:
    """One tensor for a packed operand, a list for one in several, None where nothing was asked for."""
    if not any(each is not None for each in gradients):
        return None
    return gradients[0] if packed and len(gradients) == 1 else gradients
