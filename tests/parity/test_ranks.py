"""A tensor with a wrong number of axes is refused in the same four parts by every public function of both frontends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from grouped_core.recipes import FP8Current, FP8Delayed, Recipe
from grouped_core.scaling import ScalingState
from jax_grouped import accumulate, nnx, parallel, route
from tests import asserts, ranks
from tests.ranks import (
    BIAS,
    DY,
    H_ROWS,
    KEY,
    LIKE_X,
    OUT,
    PROBS,
    QUANTIZED,
    QUANTIZED_WEIGHTS,
    RESHAPE,
    ROW_SCALE,
    SIZES,
    SLOTS,
    WI_BIAS,
    WO_BIAS,
    Argument,
    E,
    F,
    Function,
    G,
    H,
    K,
    M,
    N,
    T,
    X,
    accumulator,
    member,
    weight,
)
from torch_bridge import nn
from torch_bridge import route as torch_route

pytestmark = pytest.mark.rule("ERR-1")

RECIPES = (None, FP8Current)


# ---------------------------------------------------------------------------------------------------------------------
# JAX


def _jax_array(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(np.full(shape, 2 if dtype == "int32" else 1, dtype))  # of NumPy: no program is compiled


def _jax_quantized(*shape: int) -> Any:
    return jax_grouped.quantize(_jax_array(shape, "float32"), "fp8_tensor" if len(shape) == 3 else "fp8_1x128")


def _jax_state(**arrays: Any) -> Any:
    return jax_grouped.update_scaling(ScalingState(**arrays, algorithm="max"))


def _jax_fwd(**arguments: Any) -> Any:
    x, wi, wo = jnp.ones((M, K)), jnp.ones((G, K, 2 * F)), jnp.ones((G, F, K))
    return accumulate.grouped_mlp_fwd(x, wi, wo, jnp.full((G,), 2), **arguments)


def _jax_bwd_dw(**arguments: Any) -> Any:
    _, res = _jax_fwd()
    *_, deferred = accumulate.grouped_mlp_bwd_dx(res, jnp.ones((M, K)))
    return accumulate.grouped_mlp_bwd_dw(deferred, (arguments["wi"], arguments["wo"]))


def _jax_layer(kind: str, *sizes: int, **options: Any) -> Any:
    return getattr(nnx, kind)(*sizes, rngs=nnx.nnx.Rngs(0), **options)


def _jax_unpermute(y: Any, weights: Any) -> Any:
    experts = jnp.zeros((T, SLOTS), jnp.int32)
    _, _, permutation = route.permute(jnp.ones((T, H)), experts, G)
    return route.unpermute(y, permutation, weights)


def _jax_linear(recipe: Recipe | None) -> Callable[..., Any]:
    return lambda wgrad_accum, **rest: jax_grouped.ragged_dot(**rest, wgrad_accum=wgrad_accum, recipe=recipe)


def _jax_mlp(recipe: Recipe | None, *, transposed: bool = False) -> Callable[..., Any]:
    def run(accum_wi: Any, accum_wo: Any, **rest: Any) -> Any:
        options: dict[str, Any] = {"rhs_transposed": transposed, "recipe": recipe}
        return jax_grouped.grouped_mlp(**rest, **options, wgrad_accum=(accum_wi, accum_wo))

    return run


_BOTH_RECIPES = [("", None), ("recipe:", FP8Current)]


ALONE = parallel.MeshAxes(expert="expert")


def _mesh() -> Any:
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("expert",), axis_types=kinds, devices=jax.devices()[:1])


def _alone(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` inside of `shard_map` over one rank."""
    split = jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=_mesh(), in_specs=split, out_specs=split, check_vma=False))(*arrays)


def _dispatched(y: Any) -> Any:
    tokens, weights = jnp.ones((T, K)), jnp.ones((T, SLOTS))
    _, _, handle = parallel.dispatch(tokens, jnp.zeros((T, SLOTS), jnp.int32), weights, G, axis_name="expert")
    return parallel.combine(y, handle)


def _routed(function: str, name: str, shape: tuple[int, ...], wanted: str, dtype: str = "") -> Argument:
    return Argument(shape, wanted, RESHAPE, f"`{name}` of {function}", dtype)


JAX: dict[str, Function] = {
    **{
        f"{prefix}ragged_dot": Function(
            _jax_linear(recipe),
            {
                "lhs": X,
                "rhs": weight("[G, K, N]", G, K, N),
                "group_sizes": SIZES,
                "bias": BIAS,
                "row_scale": ROW_SCALE,
                "out": OUT,
                "wgrad_accum": accumulator(G, K, N),
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    **{
        f"{prefix}grouped_mlp": Function(
            _jax_mlp(recipe),
            {
                "x": X,
                "wi": weight("[G, K, W]", G, K, 2 * F),
                "wo": weight("[G, F, K]", G, F, K),
                "group_sizes": SIZES,
                "probs": PROBS,
                "wi_bias": WI_BIAS,
                "wo_bias": WO_BIAS,
                "out": LIKE_X,
                "accum_wi": accumulator(G, K, 2 * F),
                "accum_wo": accumulator(G, F, K),
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    "transposed:ragged_dot": Function(
        lambda lhs, rhs: jax_grouped.ragged_dot(lhs, rhs, jnp.full((G,), 2), rhs_transposed=True),
        {"lhs": X, "rhs": weight("[G, N, K]", G, N, K)},
    ),
    "transposed:grouped_mlp": Function(
        lambda wi, wo: jax_grouped.grouped_mlp(jnp.ones((M, K)), wi, wo, jnp.full((G,), 2), rhs_transposed=True),
        {"wi": weight("[G, W, K]", G, 2 * F, K), "wo": weight("[G, K, F]", G, K, F)},
    ),
    "pair:grouped_mlp": Function(
        lambda gate, up: jax_grouped.grouped_mlp(jnp.ones((M, K)), (gate, up), jnp.ones((G, F, K)), jnp.full((G,), 2)),
        {
            "gate": dataclasses.replace(weight("[G, K, F]", G, K, F), thing="wi[0]"),
            "up": dataclasses.replace(weight("[G, K, F]", G, K, F), thing="wi[1]"),
        },
    ),
    "quantised:ragged_dot": Function(
        lambda lhs, group_sizes, bias, row_scale: jax_grouped.ragged_dot(
            lhs, _jax_quantized(G, N, K), group_sizes, rhs_transposed=True, bias=bias, row_scale=row_scale
        ),
        {"lhs": X, "group_sizes": SIZES, "bias": BIAS, "row_scale": ROW_SCALE},
    ),
    "quantize": Function(
        lambda x, group_sizes, key: jax_grouped.quantize(x, "fp8_1x128", group_sizes=group_sizes, key=key),
        {"x": QUANTIZED, "group_sizes": SIZES, "key": KEY},
    ),
    "weights:quantize": Function(lambda x: jax_grouped.quantize(x, "fp8_tensor"), {"x": QUANTIZED_WEIGHTS}),
    "dequantize": Function(
        lambda group_sizes: jax_grouped.dequantize(_jax_quantized(M, K), group_sizes=group_sizes),
        {"group_sizes": SIZES},
    ),
    "straight_through": Function(
        lambda master: jax_grouped.straight_through(master, _jax_quantized(G, K, N)),
        {"master": Argument((G, K, N), f"({G}, {K}, {N}) = shape of `q`", "pass its own master")},
    ),
    "patch": Function(jax_grouped.patch, {}),
    "size_status": Function(lambda group_sizes: jax_grouped.size_status(group_sizes, M), {"group_sizes": SIZES}),
    "update_scaling": Function(
        _jax_state,  # of layers in a scan: one more axis of all arrays is good
        {**ranks.STATES, "scale": dataclasses.replace(ranks.STATES["scale"], also=(3,))},
    ),
    "update_scalings": Function(
        lambda **arrays: nnx.update_scalings({"layer": ScalingState(**arrays, algorithm="max")}),
        {**ranks.STATES, "scale": dataclasses.replace(ranks.STATES["scale"], also=(3,))},
    ),
    "scaling_state": Function(lambda: jax_grouped.scaling_state(FP8Delayed, G)),
    "explain": Function(
        lambda lhs: jax_grouped.explain(jax_grouped.ragged_dot, lhs, jnp.ones((G, K, N)), jnp.full((G,), 2)), {"lhs": X}
    ),
    "why_unsupported": Function(
        lambda lhs: _raised(
            jax_grouped.why_unsupported, jax_grouped.ragged_dot, lhs, jnp.ones((G, K, N)), jnp.full((G,), 2)
        ),
        {"lhs": X},
    ),
    "topk_router": Function(
        lambda logits, bias, mask, experts, sequence_sizes, key: route.topk_router(
            *(logits, SLOTS), bias=bias, mask=mask, experts=experts, sequence_sizes=sequence_sizes, key=key, jitter=0.1
        ),
        {
            "logits": _routed("topk_router", "logits", (T, E), "two axes [T, E]"),
            "bias": _routed("topk_router", "bias", (E,), "one axis [E]"),
            "mask": _routed("topk_router", "mask", (T,), "one axis [T]", "bool"),
            "experts": _routed("topk_router", "experts", (T, SLOTS), "two axes [T, k]", "int32"),
            "sequence_sizes": Argument(
                (2,), "one axis [S]", "pass one size per sequence", "`sequence_sizes` of topk_router", "int32"
            ),
            "key": Argument((2,), "one axis [2]", "low word first", "`key` of topk_router", "uint32"),
        },
    ),
    "hash_experts": Function(
        lambda token_ids, table: route.hash_experts(token_ids, SLOTS, E, table=table),
        {
            "token_ids": _routed("hash_experts", "token_ids", (T,), "one axis [T]", "int32"),
            "table": Argument(
                (6, SLOTS), "two axes [V, k]", "pass k experts per token id", "`table` of hash_experts", "int32"
            ),
        },
    ),
    "balance_quantile": Function(
        lambda logits, bias, mask: route.balance_quantile(logits, bias, SLOTS, mask=mask),
        {
            "logits": _routed("balance_quantile", "logits", (T, E), "two axes [T, E]"),
            "bias": _routed("balance_quantile", "bias", (E,), "one axis [E]"),
            "mask": _routed("balance_quantile", "mask", (T,), "one axis [T]", "bool"),
        },
    ),
    "alignment_for": Function(lambda: route.alignment_for(None)),
    "pad_groups": Function(
        lambda rows, sizes: route.pad_groups(rows, sizes, 4),
        {
            "rows": _routed("pad_groups", "rows", (M, H), "two axes [M, H]"),
            "sizes": dataclasses.replace(SIZES, thing="`sizes` of pad_groups"),
        },
    ),
    "unpad_groups": Function(
        lambda rows: route.unpad_groups(rows, route.pad_groups(jnp.ones((M, H)), jnp.full((G,), 2), 1)[2]),
        {"rows": _routed("unpad_groups", "rows", (M, H), "two axes [P, H]")},
    ),
    "routed_mlp": Function(
        lambda accum_wi, accum_wo, **rest: jax_grouped.routed_mlp(**rest, wgrad_accum=(accum_wi, accum_wo)),
        {
            "x": _routed("routed_mlp", "x", (T, K), "two axes [T, K]"),
            "experts": _routed("routed_mlp", "experts", (T, SLOTS), "two axes [T, k]", "int32"),
            "weights": _routed("routed_mlp", "weights", (T, SLOTS), "two axes [T, k]"),
            "wi": weight("[G, K, W]", G, K, 2 * F),
            "wo": weight("[G, F, K]", G, F, K),
            "wi_bias": WI_BIAS,
            "wo_bias": WO_BIAS,
            "out": Argument((T, K), f"({T}, {K}) = all rows", "allocate a buffer of that shape"),
            "accum_wi": accumulator(G, K, 2 * F, thing="wgrad_accum"),
            "accum_wo": accumulator(G, F, K, thing="wgrad_accum"),
        },
    ),
    "update_bias": Function(
        lambda bias, load: route.update_bias(bias, load, 0.1),
        {
            "bias": _routed("update_bias", "bias", (E,), "one axis [E]"),
            "load": _routed("update_bias", "load", (E,), "one axis [E]", "int32"),
        },
    ),
    "permute": Function(
        lambda x, experts, probs: route.permute(x, experts, G, probs=probs),
        {
            "x": _routed("permute", "x", (T, H), "two axes [T, H]"),
            "experts": _routed("permute", "experts", (T, SLOTS), "two axes [T, k]", "int32"),
            "probs": _routed("permute", "probs", (T, SLOTS), "two axes [T, k]"),
        },
    ),
    "unpermute": Function(
        _jax_unpermute,
        {
            "y": _routed("unpermute", "y", (T * SLOTS, H), "two axes [M, H]"),
            "weights": _routed("unpermute", "weights", (T, SLOTS), "two axes [T, k]"),
        },
    ),
    "moe": Function(
        lambda x, router, wi, wo: jax_grouped.moe(x, router, wi, wo, SLOTS),
        {
            "x": _routed("moe", "x", (T, K), "two axes [T, H]"),
            "router": _routed("moe", "router", (K, G), "two axes [H, E]"),
            "wi": weight("[G, K, W]", G, K, 2 * F),
            "wo": weight("[G, F, K]", G, F, K),
        },
    ),
    "parallel:moe": Function(
        lambda x, router, wi, wo: parallel.moe(x, router, wi, wo, SLOTS, axes=ALONE, mesh=_mesh()),
        {
            "x": _routed("parallel.moe", "x", (T, K), "two axes [T, H]"),
            "router": _routed("parallel.moe", "router", (K, G), "two axes [H, E]"),
            "wi": weight("[G, K, W]", G, K, 2 * F),
            "wo": weight("[G, F, K]", G, F, K),
        },
    ),
    "dispatch": Function(
        lambda x, experts, weights: _alone(
            lambda x, chosen, probs: parallel.dispatch(x, chosen, probs, G, axis_name="expert"), x, experts, weights
        ),
        {
            "x": _routed("parallel.dispatch", "x", (T, K), "two axes [T, H]"),
            "experts": _routed("parallel.dispatch", "experts", (T, SLOTS), "two axes [T, k]", "int32"),
            "weights": _routed("parallel.dispatch", "weights", (T, SLOTS), "two axes [T, k]"),
        },
    ),
    "combine": Function(
        lambda y: _alone(_dispatched, y), {"y": _routed("parallel.combine", "y", (T * SLOTS, K), "two axes [M, H]")}
    ),
    "ragged_all_to_all": Function(  # the axes of rows are free
        lambda: _alone(
            lambda rows, at: parallel.ragged_all_to_all(rows, rows, at, at, at, at, axis_name="expert"),
            *(jnp.ones((T, K)), jnp.zeros((1,), jnp.int32)),
        )
    ),
    "grouped_mlp_fwd": Function(
        lambda probs, wi_bias, wo_bias, out: _jax_fwd(probs=probs, wi_bias=wi_bias, wo_bias=wo_bias, out=out),
        {"probs": PROBS, "wi_bias": WI_BIAS, "wo_bias": WO_BIAS, "out": LIKE_X},
    ),
    "grouped_mlp_bwd_dx": Function(lambda dy: accumulate.grouped_mlp_bwd_dx(_jax_fwd()[1], dy), {"dy": DY}),
    "grouped_mlp_bwd_dw": Function(_jax_bwd_dw, {"wi": accumulator(G, K, 2 * F), "wo": accumulator(G, F, K)}),
    "value_and_accumulate_grad": Function(lambda: accumulate.value_and_accumulate_grad(lambda *_: jnp.zeros(()))),
    "GroupedLinear": Function(
        lambda x, group_sizes: _jax_layer("GroupedLinear", G, K, N)(x, group_sizes), {"x": X, "group_sizes": SIZES}
    ),
    "GroupedMLP": Function(
        lambda x, group_sizes, probs: _jax_layer("GroupedMLP", G, K, F)(x, group_sizes, probs),
        {"x": X, "group_sizes": SIZES, "probs": PROBS},
    ),
    "MoE": Function(
        lambda x: _jax_layer("MoE", K, F, E, SLOTS)(x),
        {"x": Argument((T, K), "at least one axis [..., H]", "pass tokens of H columns", "`x` of MoE", also=(1, 3))},
    ),
    "interleave": Function(
        lambda weight: jax_grouped.interleave(weight, 2),
        {
            "weight": Argument(
                (2 * F,), "at least one axis", "pass a weight or a bias", "`weight` of interleave", also=(2,)
            )
        },
    ),
    "deinterleave": Function(
        lambda weight: jax_grouped.deinterleave(weight, 2),
        {
            "weight": Argument(
                (2 * F,), "at least one axis", "pass a weight or a bias", "`weight` of deinterleave", also=(2,)
            )
        },
    ),
}


def _raised(why: Callable[..., str | None], *arguments: Any) -> None:
    """Raises the reason that `why_unsupported` returns, so that it is checked like the other messages."""
    reason = why(*arguments)
    if reason is not None:
        raise ValueError(reason)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch


def _torch_array(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.full(shape, 2 if dtype == "int32" else 1, dtype=getattr(torch, dtype or "float32"))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


_SIZES = torch.full((G,), 2, dtype=torch.int32)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _torch_quantized(*shape: int) -> Any:
    return torch_bridge.quantize(torch.ones(shape), "fp8_tensor" if len(shape) == 3 else "fp8_1x128")


def _torch_linear(recipe: Recipe | None, *, transposed: bool = True) -> Callable[..., Any]:
    def run(x: Any, **rest: Any) -> Any:
        return torch_bridge.grouped_linear(_leaf(x), **rest, rhs_transposed=transposed, recipe=recipe)

    return run


def _torch_listed(recipe: Recipe | None) -> Callable[..., Any]:
    def run(weight: Any, bias: Any, accum: Any) -> Any:
        options: dict[str, Any] = {"bias": [bias, _ones(N)], "wgrad_accum": [accum, _ones(N, K)], "recipe": recipe}
        return torch_bridge.grouped_linear(_leaf(_ones(M, K)), [weight, _ones(N, K)], _SIZES, **options)

    return run


def _torch_mlp(recipe: Recipe | None, *, transposed: bool = True) -> Callable[..., Any]:
    def run(x: Any, accum_wi: Any, accum_wo: Any, **rest: Any) -> Any:
        options: dict[str, Any] = {"rhs_transposed": transposed, "recipe": recipe, "wgrad_accum": (accum_wi, accum_wo)}
        return torch_bridge.grouped_mlp(_leaf(x), **rest, **options)

    return run


def _torch_listed_mlp(recipe: Recipe | None) -> Callable[..., Any]:
    def run(wi: Any, wo: Any, wi_bias: Any, wo_bias: Any) -> Any:
        biases: dict[str, Any] = {"wi_bias": [wi_bias, _ones(2 * F)], "wo_bias": [wo_bias, _ones(K)]}
        lists = ([wi, _ones(2 * F, K)], [wo, _ones(K, F)])
        return torch_bridge.grouped_mlp(_ones(M, K), *lists, _SIZES, **biases, recipe=recipe)

    return run


def _torch_fwd(**arguments: Any) -> Any:
    return torch_bridge.grouped_mlp_fwd(_ones(M, K), _ones(G, 2 * F, K), _ones(G, K, F), _SIZES, **arguments)


def _torch_bwd_dx(dy: Any, grad_input: Any) -> Any:
    return torch_bridge.grouped_mlp_bwd_dx(_torch_fwd()[1], dy, grad_input=grad_input)


def _torch_bwd_dw(wi: Any, wo: Any) -> Any:
    *_, deferred = _torch_bwd_dx(_ones(M, K), None)
    return torch_bridge.grouped_mlp_bwd_dw(deferred, (wi, wo))


def _torch_state(**arrays: Any) -> Any:
    return torch_bridge.update_scaling(ScalingState(**arrays, algorithm="max"))


def _torch_layer(kind: str, *sizes: Any, **options: Any) -> Callable[..., Any]:
    def run(x: Any, **rest: Any) -> Any:
        return getattr(nn, kind)(*sizes, **options)(_leaf(x), **rest)

    return run


def _sequential(fuse: str) -> Callable[..., Any]:
    def run(x: Any, group_sizes: Any, probs: Any) -> Any:
        layers = (nn.GroupedLinear(G, K, 2 * F), nn.ScaledSwiGLU(), nn.GroupedLinear(G, F, K, scale_bias=True))
        return nn.Sequential(*layers, fuse=fuse)(x, group_sizes, probs, group_sizes, probs)

    return run


def _torch_unpermute(y: Any, weights: Any) -> Any:
    experts = torch.zeros((T, SLOTS), dtype=torch.int32)
    return torch_route.unpermute(y, torch_route.permute(_ones(T, H), experts, G)[2], weights)


def _torch_routed(recipe: Recipe | None) -> Callable[..., Any]:
    def run(x: Any, accum_wi: Any, accum_wo: Any, **rest: Any) -> Any:
        return torch_bridge.routed_mlp(_leaf(x), **rest, recipe=recipe, wgrad_accum=(accum_wi, accum_wo))

    return run


_TORCH_ROUTING: dict[str, Callable[..., Any]] = {
    "topk_router": lambda logits, **rest: torch_route.topk_router(logits, SLOTS, **rest, jitter=0.1),
    "update_bias": lambda bias, load: torch_route.update_bias(bias, load, 0.1),
    "permute": lambda x, experts, probs: torch_route.permute(x, experts, G, probs=probs),
    "unpermute": _torch_unpermute,
}
"""Functions with the arguments and messages of those of JAX."""

_MLP_ARGUMENTS = {"group_sizes": SIZES, "probs": PROBS, "out": LIKE_X, "grad_input": LIKE_X}
_LINEAR_ARGUMENTS = {"group_sizes": SIZES, "row_scale": ROW_SCALE, "out": OUT, "grad_input": LIKE_X}

TORCH: dict[str, Function] = {
    **{
        f"{prefix}grouped_linear": Function(
            _torch_linear(recipe),
            {
                "x": X,
                "weight": weight("[G, N, K]", G, N, K),
                "bias": BIAS,
                "wgrad_accum": accumulator(G, N, K),
                **_LINEAR_ARGUMENTS,
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    **{
        f"{prefix}grouped_mlp": Function(
            _torch_mlp(recipe),
            {
                "x": X,
                "wi": weight("[G, W, K]", G, 2 * F, K),
                "wo": weight("[G, K, F]", G, K, F),
                "wi_bias": WI_BIAS,
                "wo_bias": WO_BIAS,
                "accum_wi": accumulator(G, 2 * F, K, thing="wgrad_accum[0]"),
                "accum_wo": accumulator(G, K, F, thing="wgrad_accum[1]"),
                **_MLP_ARGUMENTS,
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    **{
        f"listed:{prefix}grouped_linear": Function(
            _torch_listed(recipe),
            {
                "weight": member("weight[0]", "[N, K]", N, K),
                "bias": member("bias[0]", "[N]", N),
                "accum": accumulator(N, K, thing="wgrad_accum[0]"),
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    **{
        f"listed:{prefix}grouped_mlp": Function(
            _torch_listed_mlp(recipe),
            {
                "wi": dataclasses.replace(member("wi[0]", "[W, K]", 2 * F, K), also=(3,)),  # then it may be a pair
                "wo": member("wo[0]", "[K, F]", K, F),
                "wi_bias": member("wi_bias[0]", "[W]", 2 * F),
                "wo_bias": member("wo_bias[0]", "[K]", K),
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    **{
        f"pair:{prefix}grouped_mlp": Function(
            lambda up, recipe=recipe: torch_bridge.grouped_mlp(
                _ones(M, K), [_ones(G, F, K), up], _ones(G, K, F), _SIZES, recipe=recipe
            ),
            {"up": dataclasses.replace(weight("[G, F, K]", G, F, K), thing="wi[1]")},
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    "layout:grouped_linear": Function(
        lambda weight: torch_bridge.grouped_linear(_ones(M, K), weight, _SIZES, rhs_transposed=False),
        {"weight": weight("[G, K, N]", G, K, N)},
    ),
    "quantised:grouped_linear": Function(
        lambda x, group_sizes, bias, row_scale: torch_bridge.grouped_linear(
            x, _torch_quantized(G, N, K), group_sizes, bias=bias, row_scale=row_scale
        ),
        {"x": X, "group_sizes": SIZES, "bias": BIAS, "row_scale": ROW_SCALE},
    ),
    "quantize": Function(
        lambda x, group_sizes, key: torch_bridge.quantize(x, "fp8_1x128", group_sizes=group_sizes, key=key),
        {"x": QUANTIZED, "group_sizes": SIZES, "key": KEY},
    ),
    "weights:quantize": Function(lambda x: torch_bridge.quantize(x, "fp8_tensor"), {"x": QUANTIZED_WEIGHTS}),
    "dequantize": Function(
        lambda group_sizes: torch_bridge.dequantize(_torch_quantized(M, K), group_sizes=group_sizes),
        {"group_sizes": SIZES},
    ),
    "straight_through": Function(
        lambda master: torch_bridge.straight_through(master, _torch_quantized(G, N, K)),
        {"master": Argument((G, N, K), f"({G}, {N}, {K}) = shape of `q`", "pass its own master")},
    ),
    "size_status": Function(lambda group_sizes: torch_bridge.size_status(group_sizes, M), {"group_sizes": SIZES}),
    "device_sizes": Function(
        lambda values: torch_bridge.device_sizes(values, "cpu"),
        {"values": dataclasses.replace(SIZES, thing="group_sizes")},
    ),
    "check_debug_word": Function(torch_bridge.check_debug_word),
    "update_scaling": Function(_torch_state, ranks.STATES),
    "scaling_state": Function(lambda: torch_bridge.scaling_state(FP8Delayed, G)),
    "explain": Function(
        lambda x: torch_bridge.explain(torch_bridge.grouped_linear, x, _ones(G, N, K), _SIZES), {"x": X}
    ),
    "why_unsupported": Function(
        lambda x: _raised(torch_bridge.why_unsupported, torch_bridge.grouped_linear, x, _ones(G, N, K), _SIZES),
        {"x": X},
    ),
    "grouped_mlp_fwd": Function(
        lambda probs, wi_bias, wo_bias, out: _torch_fwd(probs=probs, wi_bias=wi_bias, wo_bias=wo_bias, out=out),
        {"probs": PROBS, "wi_bias": WI_BIAS, "wo_bias": WO_BIAS, "out": LIKE_X},
    ),
    "grouped_mlp_bwd_dx": Function(_torch_bwd_dx, {"dy": DY, "grad_input": LIKE_X}),
    "grouped_mlp_bwd_dw": Function(
        _torch_bwd_dw,
        {
            "wi": accumulator(G, 2 * F, K, thing="wgrad_accum[0]"),
            "wo": accumulator(G, K, F, thing="wgrad_accum[1]"),
        },
    ),
    "quantized_model_init": Function(lambda: nn.quantized_model_init()),
    "save_list": Function(lambda: nn.save_list()),
    **{
        f"{prefix}GroupedLinear": Function(
            _torch_layer("GroupedLinear", G, K, N, recipe=recipe), {"x": X, **_LINEAR_ARGUMENTS}
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    **{
        f"{prefix}GroupedMLP": Function(_torch_layer("GroupedMLP", G, K, F, recipe=recipe), {"x": X, **_MLP_ARGUMENTS})
        for prefix, recipe in _BOTH_RECIPES
    },
    "Sequential": Function(_sequential("always"), {"x": X, "group_sizes": SIZES, "probs": PROBS}),
    "composed:Sequential": Function(_sequential("never"), {"x": X, "group_sizes": SIZES, "probs": PROBS}),
    **{
        name: Function(
            lambda h, probs, name=name, given=given: getattr(nn, name)(*given)(h, probs), {"h": H_ROWS, "probs": PROBS}
        )
        for name, given in (
            ("ScaledActivation", ("swiglu",)),
            ("ScaledSwiGLU", ()),
            ("ScaledSReLU", ()),
            ("ScaledSiTUGLU", ()),
            ("ScaledClampedQGeGLU", ()),
        )
    },
    **{name: dataclasses.replace(JAX[name], call=call) for name, call in _TORCH_ROUTING.items()},
    "balance_quantile": Function(
        lambda logits, bias, mask: torch_route.balance_quantile(logits, bias, SLOTS, mask=mask),
        {
            "logits": _routed("balance_quantile", "logits", (T, E), "two axes [T, E]"),
            "bias": _routed("balance_quantile", "bias", (E,), "one axis [E]"),
            "mask": _routed("balance_quantile", "mask", (T,), "one axis [T]", "bool"),
        },
    ),
    "hash_experts": Function(
        lambda token_ids, table: torch_route.hash_experts(token_ids, SLOTS, E, table=table),
        {
            "token_ids": _routed("hash_experts", "token_ids", (T,), "one axis [T]", "int32"),
            "table": dataclasses.replace(
                _routed("hash_experts", "table", (T, SLOTS), "two axes [V, k]", "int32"),
                remedy="pass k experts per token id",
            ),
        },
    ),
    "pad_groups": Function(
        lambda rows, sizes: torch_route.pad_groups(rows, sizes, 4),
        {
            "rows": _routed("pad_groups", "rows", (M, H), "two axes [M, H]"),
            "sizes": dataclasses.replace(SIZES, thing="`sizes` of pad_groups"),
        },
    ),
    "unpad_groups": Function(
        lambda rows: torch_route.unpad_groups(rows, torch_route.pad_groups(_ones(M, H), _SIZES, 4)[2]),
        {"rows": _routed("unpad_groups", "rows", (12, H), "two axes [P, H]")},
    ),
    "alignment_for": Function(lambda: torch_route.alignment_for(FP8Current)),
    **{
        f"{prefix}routed_mlp": Function(
            _torch_routed(recipe),
            {
                "x": X,
                "experts": _routed("routed_mlp", "experts", (M, SLOTS), "two axes [T, k]", "int32"),
                "weights": _routed("routed_mlp", "weights", (M, SLOTS), "two axes [T, k]"),
                "wi": weight("[G, W, K]", G, 2 * F, K),
                "wo": weight("[G, K, F]", G, K, F),
                "wi_bias": WI_BIAS,
                "wo_bias": WO_BIAS,
                "accum_wi": accumulator(G, 2 * F, K, thing="wgrad_accum[0]"),
                "accum_wo": accumulator(G, K, F, thing="wgrad_accum[1]"),
                "out": LIKE_X,
                "grad_input": LIKE_X,
            },
        )
        for prefix, recipe in _BOTH_RECIPES
    },
    "moe": Function(
        lambda x, router, wi, wo: torch_bridge.moe(x, router, wi, wo, SLOTS),
        {
            "x": _routed("moe", "x", (T, K), "two axes [T, H]"),
            "router": _routed("moe", "router", (G, K), "two axes [E, H]"),
            "wi": weight("[G, W, K]", G, 2 * F, K),
            "wo": weight("[G, K, F]", G, K, F),
        },
    ),
    "MoE": Function(_torch_layer("MoE", K, F, E, SLOTS), JAX["MoE"].arguments),
    "interleave": dataclasses.replace(JAX["interleave"], call=lambda weight: torch_bridge.interleave(weight, 2)),
    "deinterleave": dataclasses.replace(JAX["deinterleave"], call=lambda weight: torch_bridge.deinterleave(weight, 2)),
}


# ---------------------------------------------------------------------------------------------------------------------


def _cases(functions: dict[str, Function]) -> list[Any]:
    return [
        pytest.param(function, name, shape, id=f"{key}-{name}-{shape}".replace(" ", ""))
        for key, function in functions.items()
        for name, argument in function.arguments.items()
        for shape in argument.wrong()
    ]


def _refused(function: Function, name: str, shape: tuple[int, ...], make: Callable[..., Any]) -> None:
    good = {each: make(argument.shape, argument.dtype or "float32") for each, argument in function.arguments.items()}
    argument = function.arguments[name]
    wrong = make(shape, argument.dtype or "float32")
    with asserts.refused(ValueError, argument.fragments(name, shape)):
        function.call(**(good | {name: wrong}))


@pytest.mark.parametrize(("function", "name", "shape"), _cases(JAX))
def test_jax_refuses_another_number_of_axes(function: Function, name: str, shape: tuple[int, ...]) -> None:
    _refused(function, name, shape, _jax_array)


@pytest.mark.parametrize(("function", "name", "shape"), _cases(TORCH))
def test_torch_refuses_another_number_of_axes(function: Function, name: str, shape: tuple[int, ...]) -> None:
    _refused(function, name, shape, _torch_array)


@pytest.mark.parametrize("functions", [JAX, TORCH], ids=["jax", "torch"])
def test_the_good_calls_work(functions: dict[str, Function]) -> None:
    """Otherwise a refusal would prove nothing."""
    make = _jax_array if functions is JAX else _torch_array
    for function in functions.values():
        arguments = function.arguments.items()
        function.call(**{name: make(each.shape, each.dtype or "float32") for name, each in arguments})


def test_no_public_function_is_missing() -> None:
    ours = ranks.public_functions(jax_grouped, route, accumulate, nnx, parallel)
    assert not {name for name in ours if name not in {key.split(":")[-1] for key in JAX}}
    theirs = ranks.public_functions(torch_bridge, nn, torch_route)
    assert not {name for name in theirs if name not in {key.split(":")[-1] for key in TORCH}}
