"""A whole mixture-of-experts layer, as a function of its parameters.

The layers of `jax_grouped.nnx` and `jax_grouped.linen` hold the parameters and call `moe`. Letters: T tokens, H hidden
size, E experts, k experts per token, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from grouped_core import linear_spec, routing_spec
from grouped_core import lora as adapters
from grouped_core.activations import Activation
from grouped_core.calls import spec_of
from grouped_core.mlp_spec import Residuals
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe
from jax_grouped import route
from jax_grouped._arguments import as_array, one_group
from jax_grouped._mlp_gradients import Accumulators
from jax_grouped._nodes import value_of
from jax_grouped._rounded import copies, rounded_sum
from jax_grouped._router_product import router_logits
from jax_grouped.mlp import grouped_mlp
from jax_grouped.route import MoEAux
from jax_grouped.routed import routed_mlp


class SharedExpert(NamedTuple):
    """An expert that every token goes to, without a choice.

    Attributes:
        wi: [1, H, W]. wo: [1, F, H]; F may differ from that of the other experts.
        gate: [H, 1]; the expert's result is multiplied by sigmoid(x @ gate). None: by 1.
        recipe: the recipe of its products; with delayed scaling it needs a state of its own.
        lora: adapters of wi and wo, as in `grouped_mlp`, with the scale and dropout of those of the other experts.
    """

    wi: Float[Array, "1 H W"]
    wo: Float[Array, "1 F H"]
    gate: Float[Array, "H 1"] | None = None
    recipe: Recipe | BoundRecipe | None = None
    lora: Any = None


def moe(
    x: Float[Array, "T H"],
    router: Float[Array, "H E"],
    wi: Any,
    wo: Any,
    k: int,
    *,
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
    mlp: Callable[..., Array] = routed_mlp,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1.0,
    lora_dropout: float = 0.0,
    lora_key: Array | None = None,
    lora_wgrad_accum: Sequence[Any] | None = None,
    **routing: Any,
) -> tuple[Float[Array, "T H"], MoEAux]:
    """A mixture-of-experts layer: each token goes to k experts; their results are summed with the router's weights.

    Args:
        x: [T, H]. router: [H, E], used in fp32, with at most 1024 experts. k: experts per token, at most 32.
        wi, wo, rhs_transposed, activation, wi_bias, wo_bias, recipe, residuals, wgrad_accum, wgrad_dtype,
            implementation: arguments of the experts' MLP, as in `grouped_mlp`.
        shared: an expert that every token goes to, also a token without another expert; its result is added. The masks
            of its adapters have their own key.
        mlp: the function of the experts, with the arguments of `routed_mlp`; for comparisons.
        lora, lora_scaling, lora_dropout, lora_key, lora_wgrad_accum: adapters of the experts, as in `grouped_mlp`.
        routing: options of `route.topk_router`.

    Returns:
        y [T, H] in the dtype of x, and `MoEAux`.

    Raises:
        ValueError, TypeError: a shape, dtype or option does not fit.
    """
    linear_spec.check_keywords("moe", routing, moe, route.topk_router)
    x, router = as_array("x", x, "[T, H]"), as_array("router", router, "[H, E]")
    check_rank("moe", "x", "x", x.shape, of="moe")
    check_rank("moe", "router", "router", router.shape, of="moe")
    routing_spec.check_router("moe", router.shape, x.shape[1])
    routing_spec.check_floats("moe", "router", spec_of(router))
    routing_spec.check_shared("moe", shared, SharedExpert)
    of_shared_lora = None if shared is None else shared.lora
    adapters.check_of_layer(lora, of_shared_lora, lora_scaling, lora_dropout, lora_key, lora_wgrad_accum)
    for name, weight in (("wi", wi), ("wo", wo)):
        one = weight[0] if isinstance(weight, (list, tuple)) and weight else weight
        held = tuple(getattr(value_of(one), "shape", ()))
        if len(held) == 3:  # what is no weight of several experts is refused with the other weights
            routing_spec.check_experts_held("moe", name, router.shape[1], held[0])
    of_router, of_experts, *of_rest = copies(x, 2 if shared is None else 3)
    weights, experts, aux = route.topk_router(router_logits(of_router, router), k, **routing)
    of_lora: dict[str, Any] = {} if lora is None else {"lora": lora, "lora_wgrad_accum": lora_wgrad_accum}
    options = {"lora_scaling": lora_scaling, "lora_dropout": lora_dropout, "lora_key": lora_key}
    y = mlp(
        of_experts,
        experts,
        weights,
        wi,
        wo,
        rhs_transposed=rhs_transposed,
        activation=activation,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        recipe=recipe,
        residuals=residuals,
        wgrad_accum=wgrad_accum,
        wgrad_dtype=wgrad_dtype,
        implementation=implementation,
        **(of_lora and of_lora | options),
    )
    if shared is None:
        return y, aux
    if lora_key is not None:
        options["lora_key"] = key_of_shared(lora_key)
    of_all = of_shared(
        of_rest[0],
        shared,
        rhs_transposed=rhs_transposed,
        activation=activation,
        residuals=residuals,
        implementation=implementation,
        **({} if shared.lora is None else {"lora": shared.lora} | options),
    )
    return rounded_sum(y, of_all), aux


def key_of_shared(key: Array) -> Array:
    """The key uint32 [2] of the dropout masks of a shared expert: the low word's bits inverted (docs/numerics.md).

    Its rows are counted from 0 in a first group, as those of expert 0 are, so the key must tell them apart.

    Raises:
        TypeError: it is no array. ValueError: it is not two words.
    """
    key = as_array(f"{adapters.LORA}_key", key, "[2]")
    adapters.check_key(spec_of(key))
    return jnp.stack([~key[0], key[1]])


def of_shared(x: Float[Array, "T H"], shared: SharedExpert, **options: Any) -> Float[Array, "T H"]:
    """Returns the result of the shared expert at each token; options: those of `grouped_mlp`."""
    held = tuple(getattr(value_of(shared.wo), "shape", ()))
    if len(held) == 3:  # as above
        routing_spec.check_shared_held("moe", held[0])
    gate = None
    if shared.gate is not None:  # a router with one expert, whose score is the sigmoid
        gate = as_array("shared.gate", shared.gate, "[H, 1]")
        routing_spec.check_gate(spec_of(gate), x.shape[1], transposed=False)
        of_gate, x = copies(x, 2)
        gate = route.topk_router(router_logits(of_gate, gate), 1, score="sigmoid")[0][:, 0]
    sizes, recipe = one_group(x.shape[0]), shared.recipe
    return grouped_mlp(x, shared.wi, shared.wo, sizes, probs=gate, recipe=recipe, **options)
