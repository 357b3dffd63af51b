"""Overrides of torchtitan's own mechanism, for runs from its command line, without a call of `register`:

    --override.imports torch_bridge.integrations.torchtitan_override.grouped_experts

Importing this file enters them in torchtitan's table of overrides, where only those that a run names are applied.
Modules keep their Parameters, names and initialisation, so checkpoints are those of torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import torch_bridge
from torch_bridge.integrations._options import options_of, refuse
from torch_bridge.integrations.torchtitan import forward_of, gpt_oss_forward_of, save_list

__all__ = ["grouped_experts", "selective_checkpointing"]


class FusedExperts(GroupedExperts):
    """`GroupedExperts` whose forward is one fused MLP."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Config of `GroupedExperts`, and the options of `register`; `recipe` is a name of `torch_bridge`."""

        recipe: str | None = None
        residuals: str = "save_fc1"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._fused = forward_of(GroupedExperts._grouped_mm, *_options(config))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """y [R, D] of rows x [R, D] sorted by expert, in the dtype of x."""
        return self._fused(self, x_RD, num_tokens_per_expert_E)


class FusedGptOssExperts(GptOssGroupedExperts):
    """`GptOssGroupedExperts` whose forward is one fused MLP."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """Config of `GptOssGroupedExperts`, and the options of `register`; `recipe` is a name of `torch_bridge`."""

        recipe: str | None = None
        residuals: str = "save_fc1"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._fused = gpt_oss_forward_of(GroupedExperts._grouped_mm, *_options(config))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """y [R, D] of rows x [R, D] sorted by expert, in the dtype of x."""
        return self._fused(self, x_RD, num_tokens_per_expert_E)


class SavingAC(SelectiveAC):
    """`SelectiveAC` that keeps the results of our operators as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Config of `SelectiveAC`."""

    def get_save_ops(self) -> set[Any]:
        """The operators whose results are kept."""
        return super().get_save_ops() | save_list()


_FUSED = {GroupedExperts.Config: FusedExperts.Config, GptOssGroupedExperts.Config: FusedGptOssExperts.Config}


@override(target=GroupedExperts.Config, description="Routed experts as one fused MLP of jax-grouped.")
def grouped_experts(config: Any, *, recipe: str | None = None, residuals: str = "save_fc1") -> Any:
    """The config of fused experts for one of torchtitan's.

    Args:
        recipe: the name of a recipe of `torch_bridge`, such as "FP8Block". residuals: as in `grouped_mlp`.

    Raises:
        NotImplementedError: a subclass of torchtitan's experts that is not known.
    """
    fused = _FUSED.get(type(config))
    if fused is None:
        raise refuse(
            "override of grouped experts",
            type(config).__qualname__,
            " or ".join(each.__qualname__ for each in _FUSED),
            "select other modules, or leave out the converter that made this config",
        )
    return derive(config, fused, recipe=recipe, residuals=residuals)


@override(target=SelectiveAC.Config, exact=True, description="Keep the results of jax-grouped's operators.")
def selective_checkpointing(config: Any) -> Any:
    """The config of selective checkpointing with our operators in its save list."""
    return derive(config, SavingAC.Config)


def _options(config: Any) -> tuple[Any, torch.dtype]:
    recipe = None if config.recipe is None else getattr(torch_bridge, config.recipe, config.recipe)
    return options_of("torchtitan", recipe, config.residuals), torch.bfloat16
