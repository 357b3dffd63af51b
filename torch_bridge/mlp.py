"""The experts' MLP as one differentiable operation, and its gradients in parts. The mathematics is grouped_core's.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows: 2F for gated
activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.activations import Activation
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Kept, MlpNeeds, Residuals, kept, needs_dh, needs_dz
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _autocast, _library, _mlp_library, _saved, main_grad, stored_mlp
from torch_bridge._arguments import Members, check_gradient, destinations
from torch_bridge._compiling import is_compiling
from torch_bridge._mlp_arguments import Accumulators, Arguments, check_arguments, check_buffers
from torch_bridge._mlp_library import NAMES
from torch_bridge._products import (
    Launcher,
    Owner,
    ProductFacts,
    check_listed_once,
    mlp_gradients,
    once,
    owners_of,
    plain_launcher,
    product_facts,
)
from torch_bridge._stored_mlp_arguments import is_stored_mlp
from torch_bridge.quantize import StraightThrough


def grouped_mlp(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    wi: Members | QTensor[Tensor] | StraightThrough,
    wo: Members | QTensor[Tensor] | StraightThrough,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    rhs_transposed: bool = True,
    activation: str | Activation = "swiglu",
    probs: Tensor | None = None,
    wi_bias: Members | None = None,
    wo_bias: Members | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Tensor:
    """y[r] = (p[r] act(x[r] wi[g].T + wi_bias[g])) wo[g].T + p[r] wo_bias[g] for row r of group g, p = probs or 1.

    Few kernels: the activation and the probability are applied where the first product ends, and their gradients where
    the product with `wo` ends. The hidden rows are rounded to the dtype of x before the activation reads them. Rows
    past the groups are zero. Differentiable in x, wi, wo, probs and the biases; what needs no gradient is neither
    computed nor saved.

    Args:
        x: [M, K] fp32, bf16 or fp16. Under `torch.autocast` it, the weights and the biases are cast to its dtype, as in
            `F.linear`; else nothing is.
        wi: [G, W, K], gate rows first or interleaved as the `Activation` says; [G, K, W] with `rhs_transposed=False`;
            or a list of G such matrices; or a pair of gate and linear half, [G, F, K] each ([G, K, F]): the same bits,
            nothing is concatenated unless it is quantised.
        wo: [G, K, F], with `rhs_transposed=False` [G, F, K]; or a list.
        group_sizes: G integers, as in `grouped_linear`.
        activation: a kind with its defaults, or an `Activation`.
        probs: [M], the router's probability of each row, fp32 inside; its gradient comes in its dtype.
        wi_bias: [G, W] or a list of vectors. wo_bias: [G, K] or a list.
        recipe: formats of both products; None takes the operands as they stand.
        residuals: what is kept for backward: "save_all" the rows x [M, K], hidden [M, W] and activated [M, F],
            "save_fc1" x and hidden, "save_input" x. The bits are the same.
        wgrad_accum: "main_grad", or a pair for wi and wo, each as in `grouped_linear` or None; that of a wi in two
            tensors is a list of two.
        out, grad_input: the caller's buffers for y and the gradient of x, both [M, K], as in `grouped_linear`.
        implementation: kernels' names, each for its own call; "composed" for the unfused ones. See `explain`.

    Raises:
        TypeError: dtypes, or an argument that is no tensor. ValueError: shapes, devices, layouts, buffers, options.
        NotImplementedError: no kernel takes it. RuntimeError: in backward, `main_grad` cannot be written, or it is
            differentiated again.
    """
    x, (wi, wo), (wi_bias, wo_bias), (first, second) = _autocast.operands(x, (wi, wo), (wi_bias, wo_bias))
    arguments: list[Any] = [x, wi, wo, group_sizes, rhs_transposed, activation, probs, wi_bias, wo_bias, recipe]
    arguments += [residuals, wgrad_accum, implementation]
    if is_stored_mlp(x, wi, wo, recipe):
        return stored_mlp.grouped_mlp(*arguments, out=out, grad_input=grad_input, owners=(first, second))
    both = None if first is None or second is None else (first, second)
    return differentiable(check_arguments(*arguments), out, grad_input, both)


Owners = tuple[Owner, Owner]
"""A module's side of both products."""


def differentiable(given: Arguments, out: Tensor | None, grad_input: Tensor | None, owners: Owners | None) -> Tensor:
    """The result of checked arguments, with gradients where somebody needs them."""
    if out is not None or grad_input is not None:
        check_buffers(out, grad_input, given)
    if not given.differentiates():
        return _forward(given, out, False)[0]
    first, second = (None, None) if owners is None else owners
    check_listed_once(
        (NAMES.wi, given.wi, first, given.to_main_grad or len(given.accum_wi) > 0),
        (NAMES.wo, given.wo, second, given.to_main_grad or len(given.accum_wo) > 0),
    )
    if not is_compiling():
        return _attach(given, out, grad_input, None, owners)
    if owners is not None and any(each.delayed is not None for each in owners):
        return _attach_uncompiled(given, out, grad_input, None, owners)
    if not given.to_main_grad and not given.accum_wi and not given.accum_wo:
        return _attach(given, out, grad_input, None, None)
    # A graph holds tensors, not the state of Parameters: both are looked up while it is traced.
    wi, wo = (given.wi, given.wo) if owners is None else (each.parameters for each in owners)
    if given.to_main_grad and main_grad.needs_python([*wi, *wo]):
        return _attach_uncompiled(given, out, grad_input, None, owners)
    overwrite = tuple(main_grad.overwrites(each) for each in (*wi, *wo))
    if given.to_main_grad:
        given = given._replace(accum_wi=destinations(wi, NAMES.wi), accum_wo=destinations(wo, NAMES.wo))
    return _attach(given, out, grad_input, overwrite, None)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def _forward(given: Arguments, out: Tensor | None, keep_h: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, hidden rows if they are kept, activated rows)."""
    weighted = len(given.wo_bias) > 0 and given.probs is not None
    z, *rest = _mlp_library.hidden(given.x, given.wi, given.sizes, given.probs, given.wi_bias, given.text, keep_h)
    operands = (z, given.wo, given.sizes, given.wo_bias, given.probs if weighted else None)
    text = _mlp_library.linear_texts(given.text, weighted)[1]
    if out is None:
        y = _library.linear(*operands, text)
    else:
        _library.linear_into(*operands, text, out)
        y = out.detach()  # of the same storage, but with a history of its own
    return y, rest[0] if rest else None, z


def _attach(
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    overwrite: tuple[bool, ...] | None,
    owners: Owners | None,
) -> Tensor:
    """The result with its gradients; `overwrite` stands for the attributes of that name if they were read already."""
    lists = (given.wi, given.wo, given.wi_bias, given.wo_bias, given.accum_wi, given.accum_wo)
    counts = tuple(len(each) for each in lists)
    members = [each for one in lists for each in one]
    return _Mlp.apply(
        *(given.text, counts, given.to_main_grad, overwrite, owners, given.sizes, out, grad_input),
        given.x,
        given.probs,
        *members,
    )


_attach_uncompiled: Any = torch.compiler.disable(_attach)

_PLAIN_ARGUMENTS = 8  # of `_Mlp` that have no gradient and stand first


@torch.compiler.assume_constant_result
def _kept(
    text: str, has: tuple[bool, bool, bool], x: bool, wi: bool, wo: bool, probs: bool, wi_bias: bool, wo_bias: bool
) -> Kept:
    """`has`: whether there are probabilities and biases; the others: which gradients are needed."""
    return _kept_once(text, has, MlpNeeds(x, wi, wo, probs, wi_bias, wo_bias))


@lru_cache(maxsize=1024)
def _kept_once(text: str, has: tuple[bool, bool, bool], needs: MlpNeeds) -> Kept:
    return kept(_mlp_library.decode(text), needs, *has)


_INPUT, _ACTIVATED = 1, 3  # places of x and z among the saved tensors, h between them
_ROW_NAMES = (_saved.ROWS, _saved.HIDDEN, _saved.ACTIVATED)


class Facts(NamedTuple):
    """What forward tells backward beside tensors."""

    text: str
    needs: MlpNeeds
    probs_dtype: torch.dtype | None
    products: tuple[ProductFacts, ProductFacts]
    saved: tuple[int, ...]  # members saved of wi, wo, wi_bias, wo_bias

    @property
    def weighted(self) -> bool:
        """Whether the second bias is weighted by the probabilities."""
        return _mlp_library.is_weighted(self.products[1].text)


def split(members: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """`members` cut into parts of these lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(members[start : start + count]))
        start += count
    return parts


def forward_and_saved(
    given: Arguments,
    live: Sequence[tuple[int, ...]],
    needs: MlpNeeds,
    out: Tensor | None,
    overwrite: tuple[bool, ...] | None,
) -> tuple[Tensor, list[Tensor | None], Facts]:
    """(y, the tensors that backward reads, what it has to know); `live`: members that need gradients, of four lists."""
    x, wi, wo, sizes, probs, wi_bias, wo_bias, text, *_ = given
    keep = _kept(text, (probs is not None, len(wi_bias) > 0, len(wo_bias) > 0), *needs)
    y, h, z = _forward(given, out, keep.h)
    lists = [
        part if saved else []
        for part, saved in zip((wi, wo, wi_bias, wo_bias), (keep.wi, keep.wo, keep.wi_bias, keep.wo_bias), strict=True)
    ]
    weighted = len(wo_bias) > 0 and probs is not None
    texts = _mlp_library.linear_texts(text, weighted)
    flags = given.to_main_grad and overwrite is None

    make = product_facts.__wrapped__ if is_compiling() else product_facts  # traced sizes are no keys

    def product(at: int, rows: Tensor, weights: list[Tensor], biases: list[Tensor], name: str) -> ProductFacts:
        start = 0 if at == 0 else len(wi)
        scale = probs if at == 1 and weighted else None
        return make(
            texts[at],
            (rows.dtype, weights[0].dtype, biases[0].dtype if biases else None, None if scale is None else scale.dtype),
            rows.shape[1],
            (len(weights), len(biases), len(lists[at])),
            (weights[0].dim() == 3, len(biases) > 0 and biases[0].dim() == 2),
            (live[at], live[2 + at]),
            needs.x and at == 0,
            flags,
            None if overwrite is None else overwrite[start : start + len(weights)],
            name,
        )

    tensors = [
        sizes,
        x if keep.x else None,
        h,
        z if keep.z else None,
        probs if keep.probs else None,
        *(each for part in lists for each in part),
    ]
    facts = Facts(
        text,
        needs,
        None if probs is None else probs.dtype,
        (product(0, x, wi, wi_bias, NAMES.wi), product(1, z, wo, wo_bias, NAMES.wo)),
        tuple(len(part) for part in lists),
    )
    return y, tensors, facts


def launchers(facts: Facts, tensors: Sequence[Any], dy: Tensor) -> tuple[Tensor | None, list[Launcher | None]]:
    """The gradient of the probabilities, and what is left of each product once that at the hidden rows is there.

    Rows that were not kept are computed again.
    """
    sizes, x, h, z, probs, *saved = tensors
    needs, (wi, wo, wi_bias, wo_bias) = facts.needs, split(saved, facts.saved)
    dh = dp = None
    if needs_dz(needs):
        if h is None:  # as in `grouped_core.mlp.main_grads`
            z, h = _mlp_library.hidden(x, wi, sizes, probs, wi_bias, facts.text, True)
        letters = _mlp_library.wanted(needs_dh(needs), needs.wo and z is None, needs.probs)
        results = _mlp_library.hidden_grads(h, wo, sizes, probs, wo_bias, dy, facts.text, letters)
        found = dict(zip(letters, results, strict=True))
        dh, z, dp = found.get("h"), found.get("z", z), found.get("p")
        if dp is not None:
            dp = dp.to(facts.probs_dtype)
    elif needs.wo and z is None:
        (z,) = _mlp_library.hidden(x, wi, sizes, probs, wi_bias, facts.text, False)
    one, two = facts.products
    first = second = None
    if dh is not None:
        first = plain_launcher(x, wi, sizes, wi_bias, None, dh, one.k, one.text, one.dtypes)
    if any(two.needs):
        scale = probs if facts.weighted else None
        second = plain_launcher(z, wo, sizes, wo_bias, scale, dy, two.k, two.text, two.dtypes)
    return dp, [first, second]


class _Mlp(torch.autograd.Function):
    """Gradients around the operators. What backward reads is saved, results never."""

    @staticmethod
    def forward(
        ctx: Any,
        text: str,
        counts: tuple[int, ...],
        to_main_grad: bool,
        overwrite: tuple[bool, ...] | None,
        owners: Owners | None,
        sizes: Tensor,
        out: Tensor | None,
        grad_input: Tensor | None,
        x: Tensor,
        probs: Tensor | None,
        *members: Any,
    ) -> Tensor:
        """`members`: the tensors of wi, wo, their biases and accumulators, as many of each as `counts` says."""
        wi, wo, wi_bias, wo_bias, accum_wi, accum_wo = split(members, counts)
        needs_x, needs_probs, *needed = ctx.needs_input_grad[_PLAIN_ARGUMENTS:]
        live = [tuple([at for at, need in enumerate(part) if need]) for part in split(needed, counts[:4])]
        needs = MlpNeeds(needs_x, len(live[0]) > 0, len(live[1]) > 0, needs_probs, len(live[2]) > 0, len(live[3]) > 0)
        given = Arguments(x, wi, wo, sizes, probs, wi_bias, wo_bias, text, to_main_grad, accum_wi, accum_wo)
        y, tensors, ctx.facts = forward_and_saved(given, live, needs, out, overwrite)
        rows = tensors[_INPUT : _ACTIVATED + 1]
        _saved.tell([*rows, tensors[0], *tensors[_ACTIVATED + 1 :]], _ROW_NAMES)
        ctx.save_for_backward(*tensors)
        # NOTE: no saved tensors: destinations change between forward and backward, Parameters are asked for attributes.
        ctx.grad_input, ctx.for_leaf = grad_input, x.is_leaf
        ctx.accumulators = (accum_wi, accum_wo)
        first, second = (None, None) if owners is None else owners
        owners_wi, delayed_wi = owners_of(wi, to_main_grad or len(accum_wi) > 0, first)
        owners_wo, delayed_wo = owners_of(wo, to_main_grad or len(accum_wo) > 0, second)
        ctx.owners, ctx.delayed = (owners_wi, owners_wo), (delayed_wi, delayed_wo)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dy [M, K]."""
        (dy,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            gradients = _backward(ctx, dy)
        return once("grouped_mlp", gradients, sources)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dy = dy.contiguous()
    check_gradient(dy, ctx.grad_input, *ctx.accumulators)
    facts, tensors = ctx.facts, list(ctx.saved_tensors)
    if not is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: rows go as soon as nothing reads them
    dp, work = launchers(facts, tensors, dy)
    tensors.clear()
    first, second = mlp_gradients(
        facts.products, work, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed, for_leaf=ctx.for_leaf
    )
    return (
        *[None] * _PLAIN_ARGUMENTS,
        first.x,
        dp,
        *first.weights,
        *second.weights,
        *first.biases,
        *second.biases,
        *[None] * (len(ctx.accumulators[0]) + len(ctx.accumulators[1])),
    )
