"""Layers with recipes that quantise: their state of delayed scaling, and their random keys.

Letters: G groups, R roles (x, weight and dy of each product), L steps of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from grouped_core import scaling
from grouped_core.layouts import LAYOUTS
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from torch_bridge._checks import is_distributed
from torch_bridge._tensors import draw_key, home
from torch_bridge.quantize import scaling_state

BUFFERS = tuple([f"{LAYOUTS['torch_bridge'].state}{name}" for name in scaling.ARRAYS])
"""Buffers of a layer whose recipe uses delayed scaling: [R, G], [R, L, G] and [R], all float32."""
_SCALE, _HISTORY, _TOP = BUFFERS


class ScaledModule(Module):
    """A layer that keeps a state in three buffers if its recipe uses delayed scaling.

    Attributes:
        scaling_recipe: the recipe to which the state belongs, or None.
    """

    scaling_recipe: Recipe | None

    def init_state(self, recipe: Recipe | None, groups: int, products: int, device: Any) -> None:
        """Gives the layer a new state, if the recipe uses delayed scaling."""
        self.scaling_recipe = recipe
        if recipe is None or not recipe.delayed:
            return
        state = scaling_state(recipe, groups, products=products, device=device)
        for name, tensor in zip(BUFFERS, (state.scale, state.history, state.top), strict=True):
            self.register_buffer(name, tensor)

    def take_states(self, layers: Sequence[ScaledModule]) -> None:
        """Takes over the states of layers that run as parts of this one, including scales of quantised weights."""
        for at, layer in enumerate(layers):
            for name in BUFFERS:
                part, whole = layer._buffers.pop(name, None), self._buffers.get(name)
                if part is not None and whole is not None:
                    whole[at * len(part) : (at + 1) * len(part)].copy_(part)

    @property
    def scaling_state(self) -> ScalingState[Tensor] | None:
        """The state of delayed scaling, for `update_scaling`, or None; its arrays are the layer's buffers."""
        if self.scaling_recipe is None:
            return None
        buffers = self._buffers  # faster than attributes of the module
        scale, history, fp8_max = buffers.get(_SCALE), buffers.get(_HISTORY), buffers.get(_TOP)
        if scale is None or history is None or fp8_max is None:
            return None
        return ScalingState(scale, history, fp8_max, self.scaling_recipe.amax_algorithm)

    def reset_state(self) -> None:
        """Resets the state to that before the first step."""
        state, recipe = self.scaling_state, self.scaling_recipe
        if state is None or recipe is None:
            return
        with torch.no_grad():
            state.scale.zero_()
            state.history.zero_()
            fp8_max = scaling.fp8_maxes(recipe, len(state.top) // len(scaling.ROLES))
            state.top.copy_(torch.tensor(fp8_max, dtype=torch.float32, device="cpu"))

    def keep_groups(self, rank: int, ranks: int) -> None:
        """Keeps only the part of the state that belongs to the groups of one rank, an equal part of all."""
        for name in (_SCALE, _HISTORY):  # their last axis numbers groups
            held = self._buffers.get(name)
            if held is not None:
                self._buffers[name] = held.tensor_split(ranks, dim=-1)[rank].clone()

    def follow_state(self, state: ScalingState[Tensor] | None, product: int = 0) -> None:
        """Scales quantised weights of the layer by a state: its own, or that of the layer that contains it."""
        raise NotImplementedError

    # ---- moves and checkpoints ---------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = [self._buffers.get(name) for name in BUFFERS]
        super()._apply(fn, recurse)
        for name, old in zip(BUFFERS, before, strict=True):  # a cast of the layer keeps the state float32
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def spread_state(self, weight: Any, state_dict: dict[str, Any], prefix: str) -> None:
        """Makes the state in a state dict a DTensor, like the weights, if experts are spread over ranks (CKP-7)."""
        if is_distributed(weight):
            from torch_bridge._distributed import beside_experts

            for name in (_SCALE, _HISTORY):
                if (held := state_dict.get(prefix + name)) is not None:
                    state_dict[prefix + name] = beside_experts(weight, held)

    def own_state(self, weight: Any, state_dict: dict[str, Any], prefix: str) -> None:
        """The inverse of `spread_state`; it also takes this rank's part of the state of all experts."""
        if is_distributed(weight):
            from torch_bridge._distributed import own_experts

            for name in (_SCALE, _HISTORY):
                held, given = self._buffers.get(name), state_dict.get(prefix + name)
                if held is not None and given is not None:
                    state_dict[prefix + name] = own_experts(weight, given, held.shape[-1])

    def place_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Moves the state to the device of the tensors that will replace the layer's.

        A state on the meta device has no content: it is reset instead.
        """
        held = self._buffers.get(_SCALE)
        given = (each for name, each in state_dict.items() if name.startswith(prefix) and isinstance(each, Tensor))
        first = next(given, None)
        if held is None or first is None or first.device == held.device:
            return
        for name in BUFFERS:
            old: Any = self._buffers[name]
            self._buffers[name] = torch.empty_like(old, device=first.device) if old.is_meta else old.to(first.device)
        if held.is_meta:
            self.reset_state()

    def take_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Makes the state in a state dict one of this layer; a checkpoint that has none leaves the layer's as it is."""
        self._fit(state_dict, prefix)
        for name in BUFFERS:
            if (held := self._buffers.get(name)) is not None:
                state_dict.setdefault(prefix + name, held)

    def _fit(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Makes a saved state float32, and one of this layer's recipe.

        The values that amaxes are scaled to belong to the recipe. A state of other formats or another margin gets
        scales for those of this one; the two differ by powers of two, so nothing is rounded, and the history serves
        both. A value that no recipe has is loaded as it is.
        """
        held, recipe = self._buffers.get(_TOP), self.scaling_recipe
        if held is None or recipe is None:
            return
        for name in BUFFERS:
            if isinstance(each := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = each.float()
        scale, saved = (state_dict.get(prefix + name) for name in (_SCALE, _TOP))
        if not isinstance(scale, Tensor) or not isinstance(saved, Tensor):
            return
        if saved.shape != held.shape or scale.shape[:-1] != held.shape:
            return  # refused by what loads it
        roles = scaling.fp8_maxes(recipe, len(held) // len(scaling.ROLES))
        own = torch.tensor(roles, dtype=torch.float32, device="cpu").to(saved.device)
        known = (torch.frexp(saved / scaling.LARGEST_E4M3).mantissa == 0.5) | (saved == 1)  # 1: not delayed there
        state_dict[prefix + _SCALE] = scale.detach() * torch.where(known, own / saved, 1.0).to(scale.device)[:, None]
        state_dict[prefix + _TOP] = torch.where(known, own, saved)

    def refit_state(self) -> None:
        """Makes a state that has been loaded in place one of this layer's recipe."""
        held = {name: each for name in BUFFERS if (each := self._buffers.get(name)) is not None}
        loaded: dict[str, Any] = dict(held)
        self._fit(loaded)
        with torch.no_grad():
            for name, each in held.items():
                each.copy_(loaded[name])

    def load_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Loads the state before the parameters, because its scales may be needed to quantise them."""
        with torch.no_grad():
            for name in BUFFERS:
                held, given = self._buffers.get(name), state_dict.get(prefix + name)
                if held is not None and given is not None and held.shape == given.shape:
                    held.copy_(given)


def bound(
    recipe: Recipe | None, state: ScalingState[Tensor] | None, rows: Any, *, training: bool
) -> Recipe | BoundRecipe | None:
    """Returns the recipe of one forward pass, with its state, and with a new key if it uses stochastic rounding.

    Only backward reads the key. Reentrant checkpointing runs the first of two passes without gradients, and both must
    advance the generator equally for random operations after the layer; so a layer in training always draws a key.

    Args:
        rows: the rows of the operation, on whose device the key is drawn.
    """
    if recipe is None:
        return None
    key = None
    if recipe.stochastic and (training or torch.is_grad_enabled()):
        key = draw_key(home(rows).device)
    return recipe if state is None and key is None else BoundRecipe(recipe, state, key)
