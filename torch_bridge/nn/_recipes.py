"""Layers with recipes that quantise: state of delayed scaling, random keys, and the way to `stored` and `stored_mlp`.

Letters: G groups, M rows, K in, N out, R roles, L steps of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from grouped_core import scaling
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from torch_bridge import stored, stored_mlp
from torch_bridge._stored_arguments import home, listed
from torch_bridge.params import is_distributed
from torch_bridge.quantize import StraightThrough, scaling_state

BUFFERS = ("scaling_scale", "scaling_history", "scaling_top")
"""Buffers of a layer whose recipe scales with delay: [R, G], [R, L, G] and [R], all float32."""


def add_state(module: Module, recipe: Recipe | None, groups: int, products: int, device: Any) -> None:
    """Gives `module` a fresh state, if the recipe scales with delay."""
    if recipe is None or not recipe.delayed:
        return
    state = scaling_state(recipe, groups, products=products, device=device)
    for name, tensor in zip(BUFFERS, (state.scale, state.history, state.top), strict=True):
        module.register_buffer(name, tensor)


def take_states(module: Module, layers: Sequence[Module]) -> None:
    """Takes the states away from layers that run as parts of `module`, with what they hold of quantised weights."""
    for at, layer in enumerate(layers):
        for name in BUFFERS:
            part, whole = layer._buffers.pop(name, None), module._buffers.get(name)
            if part is not None and whole is not None:
                whole[at * len(part) : (at + 1) * len(part)].copy_(part)


def state_of(module: Module, recipe: Recipe | None) -> ScalingState[Tensor] | None:
    """The state of a layer, of its buffers as they are now; None where it has none."""
    held = [module._buffers.get(name) for name in BUFFERS]
    if recipe is None or any(each is None for each in held):
        return None
    return ScalingState(held[0], held[1], held[2], recipe.amax_algorithm)  # pyright: ignore[reportReturnType]


def reset_state(module: Module, recipe: Recipe | None) -> None:
    """The state as it is before the first step."""
    state = state_of(module, recipe)
    if state is None or recipe is None:
        return
    with torch.no_grad():
        state.scale.zero_()
        state.history.zero_()
        tops = scaling.tops(recipe, len(state.top) // len(scaling.ROLES))
        state.top.copy_(torch.tensor(tops, dtype=torch.float32))


def take_groups(module: Module, rank: int, ranks: int) -> None:
    """Leaves of the state what belongs to the groups of one rank, an equal part of all."""
    for name in BUFFERS[:2]:  # whose last axis numbers groups
        held = module._buffers.get(name)
        if held is not None:
            module._buffers[name] = held.tensor_split(ranks, dim=-1)[rank].clone()


def spread_state(weight: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """In a state dict the state of experts that are spread over ranks is a DTensor, as their weights are (CKP-7)."""
    if is_distributed(weight):
        from torch_bridge.parallel import beside_experts  # which imports torch.distributed.tensor

        for name in BUFFERS[:2]:
            if (held := state_dict.get(prefix + name)) is not None:
                state_dict[prefix + name] = beside_experts(weight, held)


def own_state(module: Module, weight: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """The inverse of `spread_state`; of the state of all experts this rank's part, too."""
    if is_distributed(weight):
        from torch_bridge.parallel import own_experts  # likewise

        for name in BUFFERS[:2]:
            held, given = module._buffers.get(name), state_dict.get(prefix + name)
            if held is not None and given is not None:
                state_dict[prefix + name] = own_experts(weight, given, held.shape[-1])


def applied(module: Module, before: Sequence[Tensor | None]) -> None:
    """Undoes what a cast of the layer did to its state, which stays float32; `before`: of the buffers, by name."""
    for name, old in zip(BUFFERS, before, strict=True):
        new = module._buffers.get(name)
        if old is not None and new is not None and new.dtype != old.dtype:
            module._buffers[name] = old.to(new.device)


def held_state(module: Module) -> list[Tensor | None]:
    """The buffers of the state, None for those that are not there."""
    return [module._buffers.get(name) for name in BUFFERS]


def place_state(module: Module, recipe: Recipe | None, state_dict: dict[str, Any], prefix: str) -> None:
    """Brings the state to the device of the tensors that are to take the place of the layer's.

    On the meta device there is nothing to bring: there it starts anew.
    """
    held = module._buffers.get(BUFFERS[0])
    given = (each for name, each in state_dict.items() if name.startswith(prefix) and isinstance(each, Tensor))
    first = next(given, None)
    if held is None or first is None or first.device == held.device:
        return
    for name in BUFFERS:
        old: Any = module._buffers[name]
        module._buffers[name] = torch.empty_like(old, device=first.device) if old.is_meta else old.to(first.device)
    if held.is_meta:
        reset_state(module, recipe)


def load_state(module: Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Loads the state ahead of the parameters, which may be quantised with its multipliers."""
    with torch.no_grad():
        for name in BUFFERS:
            held, given = module._buffers.get(name), state_dict.get(prefix + name)
            if held is not None and given is not None and held.shape == given.shape:
                held.copy_(given)


def keep_missing(module: Module, state_dict: dict[str, Any], prefix: str) -> None:
    """A checkpoint of another recipe has no state: the layer's own then stays."""
    for name, held in zip(BUFFERS, held_state(module), strict=True):
        if held is not None:
            state_dict.setdefault(prefix + name, held)


def bound(
    recipe: Recipe | None, state: ScalingState[Tensor] | None, device: torch.device, *, training: bool
) -> BoundRecipe:
    """The recipe of one forward pass: with a key of its own, if something is rounded stochastically.

    Backward alone reads it. Reentrant checkpointing runs the first of two passes without gradients, and both must draw
    alike, lest what is random behind the layer differ; so a layer in training draws always.
    """
    key = None
    if recipe is not None and recipe.stochastic and (training or torch.is_grad_enabled()):
        # From the generator of the device, which graphs advance at each replay; it draws no unsigned numbers.
        drawn = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)
        key = drawn.view(torch.uint32)
    return BoundRecipe(recipe, state, key)


def linear(
    layer: Any,
    rows: Any,
    weights: Any,
    parameters: tuple[Any, ...],
    group_sizes: Any,
    row_scale: Tensor | None,
    first: bool | None,
    out: Tensor | None,
    grad_input: Tensor | None,
) -> Tensor:
    """`GroupedLinear.forward` where something is quantised.

    Args:
        layer: the GroupedLinear. rows, weights: in the dtype of the computation. first: `is_first_microbatch`.
    """
    recipe = bound(layer.recipe, state_of(layer, layer.recipe), home(rows).device, training=layer.training)
    _note_addresses(layer, weights)
    return stored.linear(
        *(rows, weights, group_sizes, True, layer.biases(rows), row_scale, layer.scale_bias, recipe),
        *("main_grad" if layer.accumulate_into_main_grad else None, None, out, grad_input),
        owner=layer.owner(parameters),
        cache=layer.cache.bind("GroupedLinear", parameters, first),
    )


def _note_addresses(layer: Any, weights: Any) -> None:
    if not isinstance(weights, StraightThrough):  # held quantised, in one packed array
        layer.note_addresses(listed(weights))


def mlp(
    fc1: Any,
    fc2: Any,
    arguments: Any,
    residuals: Any,
    state: ScalingState[Tensor] | None,
    owners: Any,
    first: bool | None,
    out: Tensor | None,
    grad_input: Tensor | None,
) -> Tensor:
    """`nn.mlp.fused_mlp` where something is quantised.

    Args:
        arguments: of `grouped_mlp`, up to the biases. state: of both products; None: each layer has its own, or none.
    """
    training = fc1.training or fc2.training
    recipe: Any = bound(fc1.recipe, state, home(arguments[0]).device, training=training)
    if state is None:
        key = recipe.key
        recipe = tuple(BoundRecipe(each.recipe, state_of(each, each.recipe), key) for each in (fc1, fc2))
    for layer, weights in zip((fc1, fc2), arguments[1:3], strict=True):
        _note_addresses(layer, weights)
    caches = [
        layer.cache.bind(name, layer.weight_parameters(), first)
        for name, layer in (("linear_fc1", fc1), ("linear_fc2", fc2))
    ]
    accum = "main_grad" if fc1.accumulate_into_main_grad else None
    rest = (recipe, residuals, accum, None, out, grad_input, owners, (caches[0], caches[1]))
    return stored_mlp.grouped_mlp(*[*arguments, *rest])
