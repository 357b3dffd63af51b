"""The local part of an expert-parallel MoE layer, and `shard_map` around it.

Letters: T tokens of a rank, H hidden size, E experts, k experts per token, F expert width, W columns of hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from grouped_core.activations import Activation
from grouped_core.exchange import format_sent, own_experts
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe
from jax_grouped import _mesh, route
from jax_grouped._arguments import to_int32
from jax_grouped._exchange import back, in_a_ring, rounded_once, there
from jax_grouped._mesh import MeshAxes, members, sum_over
from jax_grouped._nodes import value_of
from jax_grouped._rounded import copies, rounded_sum
from jax_grouped._router_product import router_logits
from jax_grouped.moe import SharedExpert, key_of_shared, of_shared
from jax_grouped.quantize import StraightThrough
from jax_grouped.routed import routed_mlp

FUNCTION = "parallel.moe"

TOKENS = {"x": 2, "mask": 1, "experts": 2}
"""Arguments that are split as tokens are, and how many axes they have."""


@dataclass(frozen=True)
class Plan:
    """The static arguments of `parallel.moe`; `routing` as sorted pairs."""

    axes: MeshAxes
    transport: str
    budget_factor: float | None
    once_per_rank: bool
    send: str | None
    fsdp: bool
    k: int
    count: int
    rhs_transposed: bool
    activation: str | Activation
    residuals: str | Residuals
    wgrad_dtype: str | None
    implementation: str | Sequence[str] | None
    lora_scaling: float
    lora_dropout: float
    routing: tuple[tuple[str, Any], ...]
    mesh: Any = None
    check_vma: bool = True


def local_moe(plan: Plan, arrays: dict[str, Any]) -> tuple[Any, route.MoEAux]:
    """y [T, H] and the metrics of all ranks, inside `shard_map`; arrays: the arguments by name, those of this rank."""
    axes, given = plan.axes, dict(arrays)
    x, router, shared = given.pop("x"), given.pop("router"), given.pop("shared", None)
    wi, wo, accum, recipe = (given.pop(name, None) for name in ("wi", "wo", "wgrad_accum", "recipe"))
    biases = {name: given.pop(name, None) for name in ("wi_bias", "wo_bias")}
    lora, lora_key = given.pop("lora", None), given.pop("lora_key", None)
    if plan.fsdp:
        wi, wo = _gathered(plan, wi, 0), _gathered(plan, wo, 1)
        if shared is not None:
            shared = shared._replace(wi=_gathered(plan, shared.wi, 0), wo=_gathered(plan, shared.wo, 1))
    if given.get("key") is not None:
        given["key"] = _own_words(given["key"], axes.tokens)
    check_own(plan, wo)
    names = axes.tokens or None
    routing: dict[str, Any] = {**dict(plan.routing), **given, "axis_name": names}
    of_router, of_routed, *of_rest = copies(x, 2 if shared is None else 3)
    weights, experts, aux = route.topk_router(router_logits(of_router, router), plan.k, **routing)
    options: dict[str, Any] = {
        "rhs_transposed": plan.rhs_transposed,
        "activation": plan.activation,
        "residuals": plan.residuals,
        "implementation": plan.implementation,
    }
    of_experts = {**biases, "recipe": _own_key(recipe, axes), "wgrad_accum": accum, "wgrad_dtype": plan.wgrad_dtype}
    own = None if lora_key is None else _own_words(lora_key, axes.names)
    of_lora = {"lora_scaling": plan.lora_scaling, "lora_dropout": plan.lora_dropout, "lora_key": own}
    if lora is not None:
        of_experts |= {"lora": lora, **of_lora}
    y, dropped = _experts(plan, of_routed, experts, weights, wi, wo, {**options, **of_experts})
    if shared is not None:
        if shared.lora is not None:
            options |= {**of_lora, "lora": shared.lora, "lora_key": None if own is None else key_of_shared(own)}
        shared = shared._replace(recipe=_own_key(shared.recipe, axes))
        y = rounded_sum(y, of_shared(of_rest[0], shared, **options).astype(y.dtype))
    if axes.tensor is not None:
        y = sum_over(y, axes.tensor)
    lost = sum_over(aux.dropped + dropped, axes.tokens)
    return y.astype(x.dtype), aux._replace(load=sum_over(aux.load, axes.tokens), dropped=lost, overflow=lost > 0)


def check_own(plan: Plan, wo: Any) -> None:
    """Refuses weights that do not have as many experts as one rank holds.

    Raises:
        ValueError: the number of experts is wrong.
    """
    own = own_experts(FUNCTION, plan.count, _mesh.size_of(plan.axes.expert))
    held = value_of(wo).shape[0]
    if held != own:
        raise ValueError(
            f"`wo` of {FUNCTION}: {held} experts on a rank, expected {own} of the {plan.count} that `router` chooses "
            "from; pass those of this rank, in order of ranks."
        )


def _experts(
    plan: Plan, x: Any, experts: Any, weights: Any, wi: Any, wo: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The experts' result per token, float32 if ranks have yet to add parts of it; and the number of dropped slots."""
    axis, none = plan.axes.expert, jnp.zeros((), jnp.int32)
    wide = None if plan.axes.tensor is None else "float32"
    if axis is None:
        y = routed_mlp(x, experts, weights, wi, wo, **options)
        return y if wide is None else y.astype(wide), none
    if plan.transport == "ring":
        of_wi, of_wo = (_rounded(plan, each) for each in (wi, wo))
        # So that gradients of all steps are added in float32, and their sum is rounded once.
        biases = {name: options[name] for name in ("wi_bias", "wo_bias") if options[name] is not None}
        options = options | {"wgrad_dtype": "float32"} | {name: b.astype("float32") for name, b in biases.items()}

        def mlp(x: Any, experts: Any, weights: Any) -> Any:
            return routed_mlp(x, experts, weights, of_wi, of_wo, **options)

        own = plan.count // _mesh.size_of(axis)
        y = in_a_ring(mlp, x, experts, weights, own, axis)
        return y if wide else y.astype(x.dtype), none
    codes = format_sent(FUNCTION, plan.send, options["recipe"], adapted="lora" in options)
    how = (plan.transport, plan.budget_factor, plan.once_per_rank, codes)
    found, way = there(FUNCTION, x, experts, weights, plan.count, axis, *how)
    room = way.option.max_rows
    results = routed_mlp(found.rows, found.experts, found.probs, wi, wo, max_rows=room, **options)
    return back(results, way, wide), way.dropped


def _rounded(plan: Plan, weight: Any) -> Any:
    """A weight whose gradients are added in float32 before they are rounded."""
    if isinstance(weight, tuple | list):
        return tuple([_rounded(plan, each) for each in weight])
    if isinstance(weight, StraightThrough):  # only its dtype is read
        return replace(weight, master=weight.master.astype("float32"))
    return weight if isinstance(weight, QTensor) else rounded_once(plan.wgrad_dtype, weight)


def _gathered(plan: Plan, weight: Any, product: int) -> Any:
    """A weight whose H is split over the data axes, whole; its gradient is added up and split again."""
    axis = _hidden_axis(plan.rhs_transposed, product)
    names = members(plan.axes.data)
    return jax.tree.map(lambda each: jax.lax.all_gather(each, names, axis=axis, tiled=True), weight)


def _hidden_axis(transposed: bool, product: int) -> int:
    """The axis of H in a weight of the first product, [E, H, W] or transposed [E, W, H], or of the second."""
    return 1 if transposed == bool(product) else 2


def _own_key(recipe: Any, axes: MeshAxes) -> Any:
    """`recipe` with a key of this rank's own, where it has one."""
    if not isinstance(recipe, BoundRecipe) or recipe.key is None:
        return recipe
    return replace(recipe, key=_own_words(recipe.key, axes.names))


def _own_words(key: Any, names: tuple[str, ...]) -> Any:
    """A key for this rank: its number is added to the high word."""
    rank = _mesh.rank_of(names).astype(key.dtype)
    return key + jnp.stack([jnp.zeros_like(rank), rank])


# ---------------------------------------------------------------------------------------------------------------------
# From outside of shard_map


@partial(jax.jit, static_argnums=0)
def open_moe(plan: Plan, arrays: dict[str, Any]) -> tuple[Any, route.MoEAux]:
    """`local_moe` of whole arrays on `plan.mesh`; y is split as tokens are, the metrics are replicated."""
    specs = {name: _spec(plan, name, each) for name, each in arrays.items()}
    laid = _mesh.lay_out(FUNCTION, plan.mesh, arrays, specs)
    sizes = laid.get("sequence_sizes")

    def body(local: dict[str, Any]) -> tuple[Any, route.MoEAux]:
        if "wgrad_accum" in local and plan.check_vma:  # only with one rank along the data axes, over which dW varies
            one = partial(_mesh.vary_over, axis=plan.axes.data)
            local = local | {"wgrad_accum": jax.tree.map(one, local["wgrad_accum"])}
        if sizes is not None:
            tokens = local["x"].shape[0]
            local = local | {"sequence_sizes": _own_sizes(local["sequence_sizes"], tokens, plan.axes)}
            return local_moe(replace(plan, routing=(*plan.routing, ("split_sequences", True))), local)
        return local_moe(plan, local)

    return jax.shard_map(
        body,
        mesh=plan.mesh,
        in_specs=(specs,),
        out_specs=(_mesh.spec_over(plan.axes.tokens, 2), P()),
        axis_names=_mesh.manual_axes(plan.mesh, plan.axes, plan.check_vma),
        check_vma=plan.check_vma,
    )(laid)


def _own_sizes(sizes: Any, tokens: int, axes: MeshAxes) -> Any:
    """How many tokens of each sequence this rank has, of `sizes` [S] of all ranks' tokens in order."""
    first = _mesh.rank_of(axes.tokens) * tokens
    after = first + tokens
    given = jnp.clip(to_int32(sizes), 0, after)
    # Sums that saturate: sizes may be of any length.
    ends = jnp.clip(jax.lax.associative_scan(lambda one, other: jnp.minimum(one + other, after), given), first, after)
    return jnp.diff(ends, prepend=first)


def _spec(plan: Plan, name: str, node: Any) -> Any:
    """How the argument `name` is split, as a tree of specs where it is a tree."""
    axes = plan.axes
    if name in TOKENS:
        return _mesh.spec_over(axes.tokens, TOKENS[name])
    if name in ("wi", "wo"):
        return _mesh.weight_specs(node, _weight_spec(plan, axes.expert, int(name == "wo")))
    if name in ("wi_bias", "wo_bias", "lora"):
        return P(axes.expert)
    if name == "recipe":
        return _mesh.recipe_specs(node, axes.expert)
    if name == "wgrad_accum":
        return tuple(_mesh.weight_specs(each, _weight_spec(plan, axes.expert, at)) for at, each in enumerate(node))
    if name == "shared":
        wi, wo = (_mesh.weight_specs(each, _weight_spec(plan, None, at)) for at, each in enumerate(node[:2]))
        rest = [None if each is None else P() for each in (node.gate, node.lora)]
        specs: Any = (wi, wo, rest[0], _mesh.recipe_specs(node.recipe, None), rest[1])
        return SharedExpert(*specs)
    return P()


def _weight_spec(plan: Plan, experts: Any, product: int) -> P:
    """The weight [E, ...] of one product: experts, its axis H with `fsdp`, and its axis F."""
    hidden = plan.axes.data if plan.fsdp else None
    last = (hidden, plan.axes.tensor)
    return P(experts, *(last if _hidden_axis(plan.rhs_transposed, product) == 1 else last[::-1]))
