"""Checks of the arguments of `parallel.moe` together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grouped_core import activations, lora, lora_mlp, routing_spec, scaling
from grouped_core.calls import spec_of
from grouped_core.exchange import format_sent, own_experts
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Mlp, MlpNames, check_ranks
from jax_grouped._accumulators import is_sink
from jax_grouped._arguments import as_array, as_operand, to_int32
from jax_grouped._mesh import ranks_along
from jax_grouped._mlp_gradients import members
from jax_grouped._nodes import value_of
from jax_grouped._parallel_moe import FUNCTION, TOKENS, Plan
from jax_grouped.ops import operand_node
from jax_grouped.quantize import StraightThrough


def _wrong(option: str, came: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"`{option}` of {FUNCTION}: {came}, expected {expected}; {remedy}.")


_LETTERS = {
    "mask": "[T]",
    "experts": "[T, k]",
    "bias": "[E]",
    "key": "[2]",
    "sequence_sizes": "[S]",
    "wi_bias": "[E, W]",
    "wo_bias": "[E, H]",
    "lora_key": "[2]",
}


def taken(name: str, value: Any) -> Any:
    """The argument `name` as an array, where it is one; sequences that a caller made are no arrays.

    Raises:
        TypeError: it is no array, or has a dtype that `jax.jit` would cast. ValueError: it is no key.
    """
    if name in _LETTERS:
        value = as_array(name, value, _LETTERS[name])
    if name == "key":
        routing_spec.check_key(FUNCTION, spec_of(value))
    elif name == "lora_key":
        lora.check_key(spec_of(value))
    elif name == "sequence_sizes":
        routing_spec.check_sequence_sizes(FUNCTION, spec_of(value))
        return to_int32(value)
    elif name == "experts" and jnp.issubdtype(value.dtype, jnp.integer):
        return to_int32(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if isinstance(leaf, np.ndarray) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise TypeError(
                f"`{name}{jax.tree_util.keystr(path)}` of {FUNCTION}: dtype {leaf.dtype}, expected one of at most 32 "
                "bits; cast it."
            )
    return value


def weight_of(name: str, weight: Any) -> Any:
    """A weight of the experts, plain, quantised, or a pair, as JAX arrays. Raises TypeError: it is none."""
    if isinstance(weight, tuple | list):
        return tuple([operand_node(as_operand, f"{name}[{at}]", each, "[E, H, F]") for at, each in enumerate(weight)])
    return operand_node(as_operand, name, weight, "[E, H, W]" if name.endswith("wi") else "[E, F, H]")


def check_moe(plan: Plan, arrays: Mapping[str, Any]) -> None:
    """Refuses options that contradict each other.

    Raises:
        ValueError: they do.
    """
    routing, recipe = dict(plan.routing), arrays["recipe"]
    for each in _with_shared(arrays, "recipe").values():
        if each is not None and each.key is not None:
            scaling.check_key(each.key, spec_of)
    if routing.get("axis_name") is not None:
        raise _wrong("axis_name", repr(routing["axis_name"]), "None", "losses are of all tokens that `axes` split")
    format_sent(FUNCTION, plan.send, recipe, adapted="lora" in arrays)
    _check_adapters(plan, arrays)
    if plan.transport == "ring":
        _check_ring(plan, arrays, recipe)
    if plan.fsdp:
        _check_fsdp(plan, arrays)
    if plan.axes.tensor is not None:
        _check_tensor(plan, arrays)


def _with_shared(arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The argument `name` of the experts, and that of a shared expert, by what messages call them."""
    shared = arrays.get("shared")
    return {name: arrays[name]} | ({} if shared is None else {f"shared.{name}": getattr(shared, name)})


def _check_adapters(plan: Plan, arrays: Mapping[str, Any]) -> None:
    if "lora_wgrad_accum" in dict(plan.routing):
        raise _wrong("lora_wgrad_accum", "given", "None", "gradients of adapters are added by JAX")
    adapted = [("lora", arrays["lora"])] if "lora" in arrays else []
    shared = arrays.get("shared")
    adapted += [("shared.lora", shared.lora)] if shared is not None and shared.lora is not None else []
    if not adapted:
        lora.check_absent(plan.lora_scaling, plan.lora_dropout, arrays.get("lora_key"), None)
        return
    name = adapted[0][0]
    if plan.axes.tensor is not None:
        raise _wrong(name, "given with a tensor axis", "None", "adapters are split by experts alone; leave it out")
    if plan.fsdp:
        raise _wrong(name, "given with fsdp=True", "None", "adapters are not gathered; leave one of them out")
    if plan.transport == "ring":
        raise _wrong(name, "given with transport 'ring'", "None", "use another transport")
    for _, pairs in adapted:
        lora_mlp.option(pairs, plan.lora_scaling, plan.lora_dropout, arrays.get("lora_key"))


def _check_ring(plan: Plan, arrays: Mapping[str, Any], recipe: Any) -> None:
    if plan.budget_factor is not None:
        raise _wrong("budget_factor", f"{plan.budget_factor} with transport 'ring'", "None", "a ring has no budget")
    if plan.once_per_rank:
        raise _wrong(
            "once_per_rank", "True with transport 'ring'", "False", "a ring takes every token to every rank once"
        )
    if plan.send == "codes":
        raise _wrong("send", "'codes' with transport 'ring'", "None", "in a ring tokens travel as they are")
    words = "because weights are used once for each rank of the ring; use another transport"
    if "wgrad_accum" in arrays:
        raise _wrong("wgrad_accum", "given with transport 'ring'", "None", words)
    if recipe.state is not None:
        raise _wrong("recipe", "bound to a state with transport 'ring'", "a recipe without a state", words)


def _check_fsdp(plan: Plan, arrays: Mapping[str, Any]) -> None:
    if plan.axes.data is None:
        raise _wrong("fsdp", "True without a data axis", "False", "name the axis of the shards as `MeshAxes.data`")
    if "wgrad_accum" in arrays:
        raise _wrong("wgrad_accum", "given with fsdp=True", "None", "gradients of shards are added by JAX")
    _check_plain(arrays, "fsdp=True")


def _check_tensor(plan: Plan, arrays: Mapping[str, Any]) -> None:
    for name in ("wi_bias", "wo_bias"):
        if name in arrays:
            words = "because every rank of the tensor axis would add it once"
            raise _wrong(name, "given with a tensor axis", "None", f"{words}; leave it out, or the tensor axis")
    _check_plain(arrays, "a tensor axis")
    activation = activations.resolve(plan.activation)
    for name, wi in _with_shared(arrays, "wi").items():
        if activation.gated and activation.interleave is None and not isinstance(wi, tuple | list):
            came = "gate and linear columns in one array, with a tensor axis"
            remedy = "pass (gate, up), so that a rank has the columns of both that belong together"
            raise _wrong(name, came, "a pair of arrays, or an interleaved activation", remedy)


def _check_plain(arrays: Mapping[str, Any], what: str) -> None:
    for name, node in (_with_shared(arrays, "wi") | _with_shared(arrays, "wo")).items():
        members = node if isinstance(node, tuple | list) else (node,)
        if any(isinstance(each, QTensor | StraightThrough) for each in members):
            words = "codes are split by experts alone; pass the plain weight, which a recipe quantises on each rank"
            raise _wrong(name, f"quantised, with {what}", "a plain array", words)


def _check_states(arrays: Mapping[str, Any]) -> None:
    for name, recipe in _with_shared(arrays, "recipe").items():
        if recipe is not None and recipe.state is not None:
            words = "because JAX would then add the states of all ranks; leave check_vma on"
            raise _wrong(name, "bound to a state, with check_vma=False", "a recipe without a state", words)


def _check_experts(plan: Plan, arrays: Mapping[str, Any]) -> None:
    """Refuses arrays of another number of experts than the router has."""
    for name in ("wo", "wi", "wi_bias", "wo_bias", "lora", "wgrad_accum"):
        whole = arrays.get(name)
        leaves = jax.tree_util.tree_leaves_with_path(whole, is_leaf=lambda n: isinstance(n, QTensor | StraightThrough))
        for path, leaf in leaves:
            held = tuple(value_of(leaf).shape[:1])
            if held not in ((), (plan.count,)):
                place = f"{name}{jax.tree_util.keystr(path)}"
                raise _wrong(place, f"{held[0]} experts", f"{plan.count} as in `router`", "pass those of all ranks")


def check_split(plan: Plan, mesh: Any, arrays: Mapping[str, Any]) -> None:
    """Refuses whole arrays that the axes of the mesh do not divide.

    Raises:
        ValueError: an axis is no multiple.
    """
    axes = plan.axes
    if (split := dict(plan.routing).get("split_sequences", False)) is not False:
        words = "`sequence_sizes` are those of all tokens there; leave it out"
        raise _wrong("split_sequences", f"{split!r} outside of shard_map", "False", words)
    mlp = Mlp(MlpNames(), activations.resolve(plan.activation), transposed=plan.rhs_transposed)
    wi = arrays["wi"]
    shapes = {"wi": None if isinstance(wi, tuple | list) else wi, "wo": arrays["wo"]}
    check_ranks(mlp, **{name: None if each is None else tuple(value_of(each).shape) for name, each in shapes.items()})
    accums = arrays.get("wgrad_accum") or ()
    if any(each is not None and not is_sink(each) for entry in accums for each in members(entry)):
        words = "a Ref cannot enter shard_map here; call it inside your own jax.shard_map"
        raise _wrong("wgrad_accum", "a jax.Ref outside of shard_map", "arrays", words)
    if accums and ranks_along(mesh, axes.data) > 1:
        words = "because each of them would add to a copy of its own; split experts over this axis too"
        raise _wrong("wgrad_accum", f"given with {ranks_along(mesh, axes.data)} ranks of a data axis", "None", words)
    if not plan.check_vma:
        _check_states(arrays)
    own_experts(FUNCTION, plan.count, ranks_along(mesh, axes.expert))
    _check_experts(plan, arrays)
    hidden, parts = arrays["x"].shape[1], ranks_along(mesh, axes.data)
    if plan.fsdp and hidden % parts:
        raise _wrong("fsdp", f"True with H = {hidden} over {parts} ranks", f"a multiple of {parts}", "leave it out")
    ranks = ranks_along(mesh, axes.data) * ranks_along(mesh, axes.expert)
    tokens = arrays["x"].shape[0]
    if tokens % ranks:
        remedy = "pad the tokens, with `mask` False for padding"
        raise _wrong("x", f"{tokens} tokens over {ranks} ranks", f"a multiple of {ranks}", remedy)
    for name, rank in TOKENS.items():
        if name in arrays and (arrays[name].ndim != rank or arrays[name].shape[0] != tokens):
            came = f"shape {tuple(arrays[name].shape)}"
            raise _wrong(name, came, f"{tokens} tokens, {rank} axes", "pass one entry for each token of `x`")
    if axes.tensor is None:
        return
    activation, parts = activations.resolve(plan.activation), ranks_along(mesh, axes.tensor)
    least = parts * (activation.interleave or 1)
    for name, weight in _with_shared(arrays, "wo").items():
        width = value_of(weight).shape[2 if plan.rhs_transposed else 1]
        if width % least:
            raise _wrong(
                name, f"F = {width} over {parts} ranks", f"a multiple of {least}", "choose another tensor axis"
            )
