"""Mixture-of-experts layers over several devices: expert, tensor and data parallel, on `jax.shard_map`.

`moe` is the whole layer; `dispatch` and `combine` are its two exchanges, for layers of one's own. What is computed does
not depend on how the layer is spread (docs/contracts.md, LYR-9): docs/parallel.md.

Letters: P ranks of the expert axis, T tokens, E experts, L = E / P experts of a rank, k experts per token, B rows that
one rank sends to one rank at most, j experts of a row at most, H hidden size, F expert width, W columns of the hidden
rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from grouped_core import exchange, linear_spec
from grouped_core.activations import Activation
from grouped_core.calls import spec_of
from grouped_core.formats import as_flag
from grouped_core.mlp_spec import Residuals, residuals_option
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.routing_spec import check_floats, check_router, check_shared, integers
from jax_grouped import _mesh, _parallel_moe, _ragged, route
from jax_grouped._arguments import as_array, as_bound, axis_names, to_int32
from jax_grouped._exchange import TRANSPORTS, Way, back, there, transport_option
from jax_grouped._mesh import MeshAxes as MeshAxes
from jax_grouped._mlp_gradients import Accumulators, accumulators_of
from jax_grouped._parallel_checks import check_moe, check_split, taken, weight_of
from jax_grouped._ragged import ragged_all_to_all as ragged_all_to_all
from jax_grouped.moe import SharedExpert
from jax_grouped.route import MoEAux, Permutation


def moe(
    x: Float[Array, "T H"],
    router: Float[Array, "H E"],
    wi: Any,
    wo: Any,
    k: int,
    *,
    axes: MeshAxes,
    transport: str = "all_to_all",
    budget_factor: float | None = None,
    once_per_rank: bool = False,
    send: str | None = None,
    mesh: Any = None,
    check_vma: bool = True,
    fsdp: bool = False,
    shared: SharedExpert | None = None,
    rhs_transposed: bool = False,
    activation: str | Activation = "swiglu",
    wi_bias: Float[Array, "E W"] | None = None,
    wo_bias: Float[Array, "E H"] | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    wgrad_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1.0,
    lora_dropout: float = 0.0,
    lora_key: Array | None = None,
    **routing: Any,
) -> tuple[Float[Array, "T H"], MoEAux]:
    """`jax_grouped.moe` over the axes of a mesh: experts on different devices, to which rows travel and back.

    Outside of `jax.shard_map` it takes whole arrays, on Auto and Explicit meshes, and opens `shard_map` itself. Inside,
    where all of `axes` are manual, it takes the arrays of this rank: T / (data * expert) tokens and E / P experts.

    Args:
        x, router, wi, wo, k: as in `jax_grouped.moe`; E counts the experts of all ranks.
        axes: the axes of the mesh. Tokens are split over data and expert axes in this order, experts over the expert
            axis, the width F over the tensor axis; `y` is split as `x` is.
        transport: "all_to_all" exchanges parts of a static size between all ranks, "ragged_all_to_all" only the rows in
            use; both give the bits of one device. "ring" passes tokens from rank to rank, without a budget; results
            are summed in float32 and differ from those of one device by a few roundings.
        budget_factor: a rank sends to one rank at most this many times the mean number of rows, T k / P for T tokens of
            a rank; rows beyond are dropped and counted in `MoEAux`. None: as many as there can be.
        once_per_rank: a token is sent to a rank once, with all its experts there, instead of once for each; the sum of
            their results, rounded to the dtype of x, comes back. The mean number of rows is then that of the tokens
            with an expert on a rank, T (1 - C(E - L, k) / C(E, k)). y and the gradient of x differ from those of one
            device by these roundings; no other gradient does. Not with a ring.
        send: what travels to the experts. "tokens": rows of x, quantised where they arrive. "codes": rows quantised
            where they are sent, half the bytes or less, for recipes whose scales are those of single rows (FP8Block,
            MXFP8); y, dx and the gradient of wo have the same bits, the gradient of wi reads the dequantised codes.
            None: codes where the recipe allows it.
        mesh: the mesh; None: that of `jax.set_mesh`, or of x.
        check_vma: the argument of `shard_map`, where it is opened here.
        fsdp: weights are also sharded over the data axes, along H; they are gathered here, and their gradients are
            added up and sharded again. Without this option weights are never gathered.
        shared, rhs_transposed, activation, wi_bias, wo_bias, recipe, residuals, wgrad_accum, wgrad_dtype,
            implementation: as in `jax_grouped.moe`. With a tensor axis a gated `wi` is a pair, or interleaved so that
            the columns of a rank are whole pairs; so is that of `shared`.
        lora, lora_scaling, lora_dropout, lora_key: adapters of the experts, as in `grouped_mlp`, split as the experts
            are; those of `shared` are replicated. Tokens then travel as they are. Not with `fsdp`, a tensor axis or a
            ring. Each rank adds its number to the high word of the key, so masks are not those of one device.
        routing: options of `route.topk_router`; `mask` [T] and `experts` [T, k] are split as `x` is. Outside of
            `shard_map`, `sequence_sizes` [S] are those of all tokens, wherever ranks begin; inside, those of this
            rank's tokens, as many on every rank, or parts with `split_sequences`.

    Returns:
        y [T, H] in the dtype of x, and `MoEAux`, equal on all ranks: losses, load and entropy of all tokens, dropped
        slots of all ranks.

    Raises:
        ValueError, TypeError: a shape, dtype or option does not fit.
    """
    function = _parallel_moe.FUNCTION
    x, router = as_array("x", x, "[T, H]"), as_array("router", router, "[H, E]")
    check_rank("moe", "x", "x", x.shape, of=function)
    check_rank("moe", "router", "router", router.shape, of=function)
    check_router(function, router.shape, x.shape[1])
    (k,), name = integers(function, k=k), transport_option(function, transport)
    budget_factor = exchange.check_budget_factor(function, budget_factor)
    if not isinstance(axes, MeshAxes):
        raise TypeError(
            f"`axes` of {function}: {type(axes).__name__}, expected a MeshAxes; pass parallel.MeshAxes(expert=...), "
            "with the names of axes of the mesh."
        )
    for each, array in (("x", x), ("router", router)):
        check_floats(function, each, spec_of(array))
    check_shared(function, shared, SharedExpert)
    arrays: dict[str, Any] = {"x": x, "router": router, "wi": weight_of("wi", wi), "wo": weight_of("wo", wo)}
    arrays |= {"lora": lora, "recipe": as_bound(linear_spec.recipe_option(recipe))}
    if wgrad_accum is not None:
        arrays["wgrad_accum"] = accumulators_of("wgrad_accum", wgrad_accum, isinstance(arrays["wi"], tuple))
    if shared is not None:
        wi, wo = weight_of("shared.wi", shared.wi), weight_of("shared.wo", shared.wo)
        arrays["shared"] = shared._replace(wi=wi, wo=wo, recipe=as_bound(linear_spec.recipe_option(shared.recipe)))
    arrays |= {"wi_bias": wi_bias, "wo_bias": wo_bias, "lora_key": lora_key}
    arrays |= {each: routing.pop(each, None) for each in ("mask", "experts", "bias", "key", "sequence_sizes")}
    arrays = {each: taken(each, value) for each, value in arrays.items() if value is not None}
    for each, option in routing.items():
        if not isinstance(option, Hashable):
            raise TypeError(
                f"`{each}` of {function}: {type(option).__name__}, expected a Python value, for which the program is "
                "compiled; pass e.g. a float."
            )
    plan = _parallel_moe.Plan(
        axes=axes,
        transport=name,
        budget_factor=budget_factor,
        once_per_rank=as_flag("once_per_rank", once_per_rank),
        send=send,
        fsdp=as_flag("fsdp", fsdp),
        k=k,
        count=router.shape[1],
        rhs_transposed=as_flag("rhs_transposed", rhs_transposed),
        activation=activation,
        residuals=residuals_option(residuals, can_offload=True),
        wgrad_dtype=linear_spec.dtype_option(wgrad_dtype) or None,
        implementation=linear_spec.implementation_names(implementation) or None,
        lora_scaling=lora_scaling,
        lora_dropout=lora_dropout,
        routing=tuple(sorted(routing.items())),
        check_vma=as_flag("check_vma", check_vma),
    )
    check_moe(plan, arrays)
    linear_spec.check_keywords(function, routing, moe, route.topk_router)
    if name == "ragged_all_to_all":
        _ragged.warn_about_flags(jax.default_backend())
    if _mesh.is_inside(function, axes):
        return _parallel_moe.local_moe(plan, arrays)
    where = _mesh.mesh_for(function, axes, mesh, x)
    check_split(plan, where, arrays)
    return _parallel_moe.open_moe(replace(plan, mesh=where), arrays)


# ---------------------------------------------------------------------------------------------------------------------
# The two exchanges


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["probs", "dropped", "overflow", "permutation", "way"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Handle:
    """What `dispatch` did, for `combine`: a pytree, so it may be saved, rematerialised, and carried by a scan.

    Attributes:
        probs: the router's weight of each row, fp32 [M], 0 where there is no row; differentiable.
        dropped: slots of all ranks without a row, int32 scalar. overflow: whether there are any, bool scalar.
        permutation, way: where the rows are, and how they were sent.
    """

    probs: Float[Array, " M"]
    dropped: Int[Array, ""]
    overflow: Bool[Array, ""]
    permutation: Permutation
    way: Way


def dispatch(
    x: Float[Array, "T H"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    num_experts: int,
    *,
    axis_name: str | tuple[str, ...],
    transport: str = "all_to_all",
    budget_factor: float | None = None,
    once_per_rank: bool = False,
) -> tuple[Float[Array, "M H"], Int[Array, " L"], Handle]:
    """Sends each token to the ranks of its experts, inside `jax.shard_map`; rank r has experts r L to (r + 1) L - 1.

    Args:
        x: [T, H], the tokens of this rank; differentiable. experts: [T, k], 0 to E - 1; other numbers are no expert.
        weights: [T, k], the router's weights; they travel as fp32 and come out as `handle.probs`; differentiable.
        num_experts: E. axis_name: the expert axis.
        transport: "all_to_all" or "ragged_all_to_all". budget_factor, once_per_rank: as in `moe`.

    Returns:
        rows [M, H] of the experts of this rank, sorted by expert, then source rank, token and slot, with zeros behind
        the last one, M = P B, or with `once_per_rank` at most P B j, j = min(k, L); their sizes, int32 [L]; and
        `Handle`.

    Raises:
        ValueError, TypeError: a shape, dtype or option does not fit.
    """
    function = "parallel.dispatch"
    name = transport_option(function, transport, TRANSPORTS[:2])
    (num_experts,), axes = integers(function, num_experts=num_experts), axis_names(function, axis_name)
    if not axes:
        raise ValueError(f"`axis_name` of {function}: {axis_name}, expected a mesh axis; name that of the experts.")
    x, experts = as_array("x", x, "[T, H]"), as_array("experts", experts, "[T, k]")
    weights = as_array("weights", weights, "[T, k]")
    exchange.check_dispatch(function, *(spec_of(each) for each in (x, experts, weights)))
    if name == "ragged_all_to_all":
        _ragged.warn_about_flags(jax.default_backend())
    how = (num_experts, axes, name, budget_factor, as_flag("once_per_rank", once_per_rank))
    found, way = there(function, x, to_int32(experts), weights, *how)
    options: dict[str, Any] = {"probs": found.probs, "max_rows": way.option.max_rows}
    rows, sizes, permutation = route.permute(found.rows, found.experts, way.option.own, **options)
    lost, probs = _mesh.sum_over(way.dropped, axes), permutation.probs
    assert probs is not None, "weights were given"
    return rows, sizes, Handle(probs, lost, lost > 0, permutation, way)


def combine(y: Float[Array, "M H"], handle: Handle) -> Float[Array, "T H"]:
    """Sends the results of the rows of `dispatch` back, and sums them per token in the order of slots, in fp32.

    Weights are not applied again: multiply by `handle.probs`, or give it to `grouped_mlp` as `probs`.

    Args:
        y: [M, H]; differentiable. handle: the one that `dispatch` returned.

    Returns:
        [T, H] in the dtype of y, rounded once; slots without a row add 0.

    Raises:
        ValueError: another number of rows. TypeError: a dtype does not fit, or it is no handle.
    """
    y = as_array("y", y, "[M, H]")
    linear_spec.check_made_by("parallel.combine", "handle", handle, Handle, "dispatch")
    exchange.check_combine("parallel.combine", spec_of(y), handle.permutation.source.shape[0])
    return back(route.unpermute(y, handle.permutation), handle.way)
