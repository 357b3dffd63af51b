"""What the layers of Flax NNX and of Linen have in common: names of constructor arguments, initialisers, checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from grouped_core.exchange import check_budget_factor
from grouped_core.formats import check_flags
from grouped_core.linear_spec import wrong_width
from grouped_core.routing_spec import check_of_layer, router_option
from jax_grouped import _flax_serialization, parallel
from jax_grouped._arguments import as_array, axis_name_option
from jax_grouped._exchange import TRANSPORTS, transport_option
from jax_grouped.moe import moe
from jax_grouped.parallel import MeshAxes
from jax_grouped.routed import routed_mlp

_flax_serialization.register()

Initializer = Callable[..., Array]
Metadata = Mapping[str, Any]

# NOTE: the first axis counts the experts and is not part of the fan-in.
default_kernel_init: Initializer = jax.nn.initializers.lecun_normal(batch_axis=(0,))
default_router_init: Initializer = jax.nn.initializers.lecun_normal()
default_bias_init: Initializer = jax.nn.initializers.zeros

NO_METADATA: Metadata = MappingProxyType({})

_SHARDING = ("out_sharding", "sharding", "sharding_names")  # the keys under which Flax keeps names of axes


def along_one(metadata: Metadata, axis: int) -> Metadata:
    """The metadata of a parameter for one whose `axis` has length 1 instead, and therefore no sharding."""
    found = dict(metadata)
    for name in _SHARDING:
        names = metadata.get(name)
        if isinstance(names, (tuple, list, PartitionSpec)) and axis < len(names):
            axes = [None if at == axis else each for at, each in enumerate(names)]
            found[name] = PartitionSpec(*axes) if isinstance(names, PartitionSpec) else tuple(axes)
    return found


ROUTER = (
    "score",
    "after_topk",
    "normalize",
    "scale",
    "num_groups",
    "topk_groups",
    "group_topk",
    "jitter",
    "sinkhorn",
    "capacity_factor",
    "drop",
    "aux_coeff",
    "z_coeff",
    "axis_name",
)
"""Options of `route.topk_router` that a MoE layer holds."""

LORA = ("lora_rank", "lora_alpha", "lora_dropout")
"""Options of the adapters of a layer."""
ADAPTERS = ("wi_lora", "wo_lora")
"""Names of the adapters of a layer's MLP."""

PARALLEL: Mapping[str, Any] = MappingProxyType(
    {"transport": TRANSPORTS[0], "budget_factor": None, "once_per_rank": False, "send": None, "fsdp": False}
)
"""How a MoE layer is spread over the axes `mesh_axes`, and the defaults; see `parallel.moe`."""

_COMMON = ("use_bias", "dtype", "param_dtype", "kernel_init", "bias_init", "recipe", *LORA, "deterministic")
_EXPERTS = ("activation", *_COMMON, "residuals", "wi_metadata", "wo_metadata", "bias_metadata")

CONSTRUCTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GroupedLinear": (
            *("num_groups", "in_features", "out_features"),
            *(*_COMMON, "kernel_metadata", "bias_metadata"),
        ),
        "GroupedMLP": ("num_groups", "hidden", "mlp_dim", *_EXPERTS),
        "MoE": (
            *("hidden", "mlp_dim", "num_experts", "num_experts_per_tok"),
            *(*ROUTER, "selection_bias", "shared_dim", "shared_gate", "mesh_axes", *PARALLEL),
            *("router_init", "router_metadata", *_EXPERTS),
        ),
    }
)
"""The arguments of each layer; those of NNX also have `rngs`."""


def router_options(layer: Any) -> dict[str, Any]:
    """The options of its router that a layer holds; without jitter where the layer is deterministic."""
    options = {name: getattr(layer, name) for name in ROUTER}
    return options | {"jitter": 0.0} if layer.deterministic else options


def check_moe(layer: Any) -> None:
    """Refuses sizes and options of a MoE layer that are out of range.

    Raises:
        TypeError: a size is not an integer, or a flag is no bool. ValueError: a size or an option is out of range, or
            two contradict.
    """
    experts, chosen = layer.num_experts, layer.num_experts_per_tok
    check_positive("MoE", num_experts=experts, num_experts_per_tok=chosen)
    check_flags("MoE", **{name: getattr(layer, name) for name in ("shared_gate", "once_per_rank", "fsdp")})
    if chosen > experts:
        raise ValueError(
            f"`num_experts_per_tok` of MoE: {chosen}, expected 1 to {experts}, the number of experts; choose fewer."
        )
    router_option(experts, chosen, **{name: getattr(layer, name) for name in ROUTER if name != "axis_name"})
    axis_name_option("MoE", layer.axis_name)
    _check_parallel(layer)
    if layer.shared_dim is not None:
        check_positive("MoE", shared_dim=layer.shared_dim)
    elif layer.shared_gate:
        raise ValueError(
            "`shared_gate` of MoE: True without `shared_dim`, expected False; pass the width of the shared expert too."
        )


def _check_parallel(layer: Any) -> None:
    transport_option("MoE", layer.transport)
    check_budget_factor("MoE", layer.budget_factor)
    if layer.mesh_axes is None:
        for name, default in PARALLEL.items():
            if getattr(layer, name) != default:
                raise ValueError(
                    f"`{name}` of MoE: {getattr(layer, name)!r} without `mesh_axes`, expected {default!r}; pass the "
                    "axes of the mesh too, a jax_grouped.parallel.MeshAxes."
                )
    elif not isinstance(layer.mesh_axes, MeshAxes):
        raise TypeError(
            f"`mesh_axes` of MoE: {type(layer.mesh_axes).__name__}, expected None or a MeshAxes; pass "
            'jax_grouped.parallel.MeshAxes(expert="..."), with the names of the axes.'
        )
    elif layer.axis_name is not None:
        raise ValueError(
            f"`axis_name` of MoE: {layer.axis_name!r} beside `mesh_axes`, expected None; losses are then those of all "
            "tokens, so leave it out."
        )


def function_of(layer: Any) -> Callable[..., Any]:
    """The function of a layer: `moe`, or `parallel.moe` over its axes.

    Raises:
        ValueError: the layer is spread over devices, but its class defines its own function of the experts, `mlp`.
    """
    mlp = getattr(layer, "mlp", None)
    if layer.mesh_axes is None:
        return partial(moe, mlp=mlp or routed_mlp)
    if mlp is not None:
        raise ValueError(
            "`mesh_axes` of MoE: given with another `mlp`, expected None; `parallel.moe` runs routed_mlp, so take the "
            "one of MoE, or write the layer with parallel.dispatch and combine."
        )
    options = {name: getattr(layer, name) for name in PARALLEL}
    return partial(parallel.moe, axes=layer.mesh_axes, **options)


def check_dtypes(layer: str, dtype: Any, param_dtype: Any) -> None:
    """Refuses a dtype of the computation or of the parameters that is none of floating point numbers.

    Raises:
        TypeError: it is another one, or none.
    """
    for name, given, wanted in (("dtype", dtype, "None or a"), ("param_dtype", param_dtype, "a")):
        try:
            floats = given is None or jnp.issubdtype(jnp.dtype(given), jnp.floating)
        except TypeError:  # of NumPy, for what it does not know
            floats = False
        if not floats:
            raise TypeError(
                f"`{name}` of {layer}: {given!r}, expected {wanted} dtype of floating point numbers; pass one, e.g. "
                "jnp.bfloat16."
            )


def check_positive(layer: str, **sizes: Any) -> None:
    """Refuses sizes that are no integers of 1 or more.

    Raises:
        TypeError: no integer. ValueError: below 1.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise TypeError(f"`{name}` of {layer}: {size!r}, expected an integer; give the size of that axis.")
        if size < 1:
            raise ValueError(f"`{name}` of {layer}: {size}, expected 1 or more; give the size of that axis.")


def check_width(layer: str, x: Array, option: str, weight: str, shape: tuple[int, ...]) -> None:
    """Refuses x whose last axis is not the one that the layer contracts.

    Args:
        option: the layer's option for the length of that axis. weight, shape: the parameter that x meets, [G, K, N].

    Raises:
        ValueError: it has another length.
    """
    if x.ndim > 1 and x.shape[-1] != shape[1]:
        raise wrong_width(layer, x.shape, shape[1], option, weight, shape)


def as_tokens(x: Array) -> Array:
    """x [..., H] as tokens [T, H].

    Raises:
        TypeError: x is no array. ValueError: x has no axes.
    """
    x = as_array("x", x, "[..., H]")
    if not x.ndim:
        raise ValueError("`x` of MoE: shape (), expected at least one axis [..., H]; pass tokens of H columns.")
    return _reshaped(x, x, (-1, x.shape[-1]))


def in_shape_of(x: Array, y: Array) -> Array:
    """The results y [T, H] in the shape of x [..., H]. Raises ValueError: x cannot be split as they are."""
    return _reshaped(x, y, x.shape)


def _reshaped(x: Array, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        return array.reshape(shape)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":
            raise
        raise ValueError(
            f"`x` of MoE: shape {x.shape} over the Explicit axes of a mesh, expected tokens [T, H], or a first axis "
            "that is split as tokens are, a multiple of their ranks; reshape it, or reshard it first."
        ) from error


def of_tokens(x: Array, mask: Any, experts: Any) -> dict[str, Any]:
    """mask [...] and experts [..., k] of x [..., H], as arguments of `route.topk_router`.

    Raises:
        TypeError: one is no array. ValueError: their leading axes are not those of x.
    """
    mask = None if mask is None else as_array("mask", mask, "[...]")
    experts = None if experts is None else as_array("experts", experts, "[..., k]")
    shapes = [None if each is None else each.shape for each in (mask, experts)]
    check_of_layer(x.shape[:-1], *shapes)
    return {
        "mask": None if mask is None else mask.reshape(-1),
        "experts": None if experts is None else experts.reshape(-1, experts.shape[-1]),
    }
