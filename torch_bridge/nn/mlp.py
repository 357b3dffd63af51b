"""The experts' MLP as a layer of two grouped linear layers; `torch_bridge.mlp` does the arithmetic.

Letters: G groups (experts), M rows sorted by group, H hidden size of the model, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core.activations import Activation, resolve
from grouped_core.formats import as_flag
from grouped_core.linear_spec import check_keywords
from grouped_core.mlp_spec import Residuals, residuals_option
from grouped_core.recipes import BoundRecipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes
from torch_bridge import _adapted_mlp, main_grad, mlp
from torch_bridge._calling import run
from torch_bridge._compiling import is_compiling
from torch_bridge._tensors import home
from torch_bridge.nn import _lora, _primary
from torch_bridge.nn._checks import (
    cast_rows,
    check_microbatch,
    check_recipe,
    check_width,
    compute_dtype,
    positive,
)
from torch_bridge.nn._scaling_state import ScaledModule, bound
from torch_bridge.nn._state import OrderedColumns
from torch_bridge.nn.activation import shortest
from torch_bridge.nn.linear import GroupedLinear, check_layers
from torch_bridge.routed import ROUTED


def fused_mlp(
    fc1: GroupedLinear,
    fc2: GroupedLinear,
    activation: str | Activation,
    residuals: str | Residuals,
    x: Tensor,
    group_sizes: Any,
    probs: Tensor | None,
    out: Tensor | None,
    grad_input: Tensor | None,
    state: ScalingState[Tensor] | None = None,
    first_microbatch: bool | None = None,
    *,
    routed: bool = False,
    max_rows: int | None = None,
) -> Tensor:
    """Runs both layers and the activation between them as one operation.

    Args:
        state: the state of delayed scaling of both products; None: each layer has its own, or none.
        routed: whether x are tokens; then `group_sizes` and `probs` are their experts and weights.
        max_rows: the room for rows of tokens, as in `routed_mlp`.
    """
    if (fc1.quantized_weights or fc2.quantized_weights) and is_compiling():
        _primary.refuse_export()
        return _uncompiled(
            *(fc1, fc2, activation, residuals, x, group_sizes, probs, out, grad_input, state, first_microbatch),
            routed=routed,
            max_rows=max_rows,
        )
    parameters = (fc1.weight_parameters(), fc2.weight_parameters())
    if fc1.accumulate_into_main_grad != fc2.accumulate_into_main_grad:
        raise ValueError(
            f"`accumulate_into_main_grad`: {fc1.accumulate_into_main_grad} in the first layer and "
            f"{fc2.accumulate_into_main_grad} in the second, expected the same in both; set it in both."
        )
    dtype = compute_dtype(x, parameters[0][0].dtype)
    wi, wo = fc1.weights(parameters[0], dtype), fc2.weights(parameters[1], dtype)
    fc1.note_addresses(wi)
    fc2.note_addresses(wo)
    recipe: Any = bound(fc1.recipe, state, x, training=fc1.training or fc2.training)
    if state is None and fc1.recipe is not None and fc1.recipe.delayed:
        key = recipe.key if isinstance(recipe, BoundRecipe) else None
        recipe = tuple(BoundRecipe(each.recipe, each.scaling_state, key) for each in (fc1, fc2))
    first = fc1.cache_of("linear_fc1", parameters[0], first_microbatch)
    second = fc2.cache_of("linear_fc2", parameters[1], first_microbatch)
    rows, biases = cast_rows(x, dtype), (fc1.biases(x), fc2.biases(x))
    owners: tuple[Any, ...] = (
        fc1.owner(parameters[0], fc1.weight_names, "linear_fc1."),
        fc2.owner(parameters[1], fc2.weight_names, "linear_fc2."),
    )
    if routed:
        name, operands = ROUTED.name, (rows, group_sizes, probs, wi, wo, True, activation, *biases)
    else:
        name, operands = mlp.MLP.name, (rows, wi, wo, group_sizes, True, activation, probs, *biases)
    operands = (*operands, recipe, residuals, *([max_rows] if routed else []))
    if fc1.lora.rank or fc2.lora.rank:
        name = _adapted_mlp.ROUTED_NAME if routed else _adapted_mlp.NAME
        adapters, owners = _adapters(fc1, fc2, home(x), dtype)
        operands = (*operands, *adapters)
    return run(
        name,
        operands,
        "main_grad" if fc1.accumulate_into_main_grad else None,
        None,
        out,
        grad_input,
        owners,
        (first, second),
    )


def _adapters(
    fc1: GroupedLinear, fc2: GroupedLinear, x: Tensor, dtype: torch.dtype
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(A and B of both layers, scaling, dropout, its key), and the owners of these four; None where a layer has none.

    Raises:
        ValueError: the adapters of the two layers have different options.
    """
    having = [layer for layer in (fc1, fc2) if layer.lora.rank]
    if len({layer.lora[1:] for layer in having}) > 1:
        raise ValueError(
            f"`lora_alpha` / `lora_rank`, `lora_dropout`: {fc1.lora[1:]} in the first layer and {fc2.lora[1:]} in the "
            "second, expected the same in both; set them in both."
        )
    factors: list[Any] = []
    owners: list[Any] = []
    for layer, path in ((fc1, "linear_fc1."), (fc2, "linear_fc2.")):
        factors += _lora.operands(layer, dtype) if layer.lora.rank else (None, None)
        owners += _lora.owners(layer, path) if layer.lora.rank else (None, None)
    scaling, dropout = having[0].lora[1:]
    training = any(layer.training for layer in having)
    return (*factors, scaling, *_lora.key(dropout, training, x.device)), tuple(owners)


_uncompiled: Any = torch.compiler.disable(fused_mlp, reason="quantised Parameters stay outside of graphs")


class GroupedMLP(OrderedColumns, ScaledModule):
    """y[r] = (p[r] act(x[r] W1[g].T + b1[g])) W2[g].T + p[r] b2[g], g being the group of row r, p = probs or 1.

    It holds `linear_fc1` and `linear_fc2`, two `GroupedLinear`, and runs them as one operation, without calling their
    `forward` or its hooks. Hooks after delayed weight gradients are registered on these two layers.

    Args:
        num_groups: G. hidden: H. mlp_dim: F.
        activation: a kind, or an `Activation`. With gated kinds the first weight is [2F, H], gate rows first or
            interleaved.
        bias: whether both layers have one; the second bias is multiplied by the probabilities.
        residuals: what is kept for backward, as in `grouped_mlp`. With "save_input" backward quantises the weights of
            the first layer again, unless they are cached.
        options: the other keywords of `GroupedLinear`, for both layers.

    Raises:
        TypeError, ValueError: an option has an invalid value, or contradicts another.
    """

    operation = staticmethod(mlp.grouped_mlp)

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        mlp_dim: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        residuals: str | Residuals = "save_fc1",
        **options: Any,
    ) -> None:
        super().__init__()
        num_groups, hidden, mlp_dim = positive("GroupedMLP", num_groups=num_groups, hidden=hidden, mlp_dim=mlp_dim)
        if "scale_bias" in options:
            raise TypeError(
                "`scale_bias` of GroupedMLP: given, expected no such keyword, because its second bias is always "
                "multiplied by the probabilities; use a Sequential for another meaning."
            )
        check_keywords("GroupedMLP", options, GroupedMLP, GroupedLinear)
        bias = as_flag("bias", bias, "GroupedMLP")
        check_recipe("GroupedMLP", options.get("recipe"))
        self._activation = resolve(activation)
        self._residuals = residuals_option(residuals)
        plain = self.residuals == Residuals(self.residuals.policy)
        self._as_given = (shortest(self.activation), self.residuals.policy if plain else self.residuals)
        wide = self.activation.fc1_width(mlp_dim)
        self.linear_fc1 = GroupedLinear(num_groups, hidden, wide, bias=bias, **options)
        self.linear_fc2 = GroupedLinear(num_groups, mlp_dim, hidden, bias=bias, scale_bias=bias, **options)
        self.init_state(self.linear_fc1.recipe, num_groups, 2, options.get("device"))
        self.take_states((self.linear_fc1, self.linear_fc2))
        self._share_state()

    @property
    def activation(self) -> Activation:
        """The activation, which is fixed at construction."""
        return self._activation

    @property
    def residuals(self) -> Residuals:
        """What forward saves for backward, which is fixed at construction."""
        return self._residuals

    def forward(
        self,
        x: Tensor,
        group_sizes: Tensor | Sequence[int] | GroupSizes,
        probs: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """y [M, H] of x [M, H]; rows past the groups are zero.

        Args:
            x: [M, H]. group_sizes: G integers. probs: [M], the router's probability of each row; None: 1.
            is_first_microbatch: for the cache of quantised weights, as in `GroupedLinear`.
            out, grad_input: the caller's buffers for y and the gradient of x, in the dtype of the computation.

        Raises what `grouped_mlp` raises.
        """
        return self.run(x, group_sizes, probs, is_first_microbatch, out, grad_input)

    def run(
        self,
        x: Tensor,
        group_sizes: Any,
        probs: Tensor | None,
        first: bool | None,
        out: Tensor | None,
        grad_input: Tensor | None,
        *,
        routed: bool = False,
        max_rows: int | None = None,
    ) -> Tensor:
        """`forward`; with `routed` that of tokens, and `group_sizes` and `probs` are their experts and weights."""
        check_width("GroupedMLP", x, self._layers()[0], "hidden", "linear_fc1.weight")
        if first is not None:
            check_microbatch(first)
        operands = (*self._as_given, x, group_sizes, probs, out, grad_input, self.scaling_state, first)
        return fused_mlp(*self._layers(), *operands, routed=routed, max_rows=max_rows)

    def _layers(self) -> tuple[GroupedLinear, GroupedLinear]:
        held: Any = self._modules  # faster than attributes of the module
        return held["linear_fc1"], held["linear_fc2"]

    def _share_state(self) -> None:
        for product, layer in enumerate((self.linear_fc1, self.linear_fc2)):
            layer.follow_state(self.scaling_state, product)

    def backward_dw(self, all: bool = False) -> None:
        """Runs the oldest delayed weight gradients (`all`: all) of FC2, then FC1; then FC2's hooks, then FC1's."""
        main_grad.backward_dw([self.linear_fc2, self.linear_fc1], every=all)

    def pending_wgrads(self) -> int:
        """The number of backward passes whose delayed weight gradients are pending."""
        return max(self.linear_fc1.pending_wgrads(), self.linear_fc2.pending_wgrads())

    def fire_wgrad_hooks(self) -> None:
        """Calls FC2's hooks, then FC1's; needed after the replay of a graph, which does not call them."""
        self.linear_fc2.fire_wgrad_hooks()
        self.linear_fc1.fire_wgrad_hooks()

    def merge(self) -> None:
        """Merges adapters as `GroupedLinear` does, in each layer that has one.

        Raises:
            ValueError: neither has, or one cannot be merged. Then none is.
        """
        for layer in self.check_merge():
            layer.merge()

    def check_merge(self) -> list[GroupedLinear]:
        """Returns the layers that `merge` changes. Raises what it raises."""
        having = [layer for layer in self._layers() if layer.lora.rank]
        if not having:
            raise ValueError("`merge` of GroupedMLP: no adapter, expected one; make the layer with `lora_rank`.")
        for layer in having:
            layer.check_merge()
        return having

    def peft_state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """The adapters with the names and in the layout of PEFT's `target_parameters` on `gate_up_proj`, `down_proj`.

        Args:
            prefix: the path of an experts module in PEFT, e.g. "base_model.model.model.layers.0.mlp.experts". A dot at
                its end makes no difference.

        Raises:
            ValueError: a layer has no adapter.
        """
        return _lora.to_peft(self._layers(), prefix)

    def load_peft_state_dict(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Loads adapters from PEFT, in place; the others of `state` are ignored. prefix: as in `peft_state_dict`.

        Raises:
            TypeError: no mapping of tensors. ValueError: an entry is missing or has another shape. Nothing is loaded
                then.
        """
        _lora.from_peft(self._layers(), state, prefix)

    def refresh_weight_table(self) -> None:
        """Makes captured graphs read the weights at their current addresses."""
        self.linear_fc1.refresh_weight_table()
        self.linear_fc2.refresh_weight_table()

    def set_weight_update(self, flag: bool) -> None:
        """Does what `GroupedLinear.set_weight_update` does, for both layers."""
        self.linear_fc1.set_weight_update(flag)
        self.linear_fc2.set_weight_update(flag)

    def reset_parameters(self) -> None:
        """Draws new values, as in `GroupedLinear`."""
        self.reset_state()
        self.linear_fc1.reset_parameters()
        self.linear_fc2.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> GroupedMLP:
        super()._apply(fn, recurse)
        self._share_state()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_state()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.spread_state(self.linear_fc1.weight_parameters()[0], destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        check_layers(self, state_dict, prefix)
        self.own_state(self.linear_fc1.weight_parameters()[0], state_dict, prefix)
        if local_metadata.get("assign_to_params_buffers", False):
            self.place_state(state_dict, prefix)
        self.take_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        self._share_state()  # the layers load afterwards, and may quantise their weights with its scales
