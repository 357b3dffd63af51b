"""prime-rl: functions with the signatures of its expert kernels, each one fused MLP.

`register()` puts them in the place of prime-rl's. prime-rl is not on a package index, so they were tested against its
published signatures (`prime_rl.trainer.models.layers.moe.kernels`), not against the package. Its `expert_parallel`
wrapper stays around them.

Letters: E local experts, R rows sorted by expert, D features of the model, F features of an expert.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grouped_core.activations import Activation
from grouped_core.hosts import check_installed
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import Recipe
from torch_bridge.integrations._options import Options, options_of
from torch_bridge.integrations._replacing import Registration, Replacement
from torch_bridge.integrations._replacing import register as replace
from torch_bridge.mlp import grouped_mlp

__all__ = ["register"]

GATED = ("w1", "w2", "w3", "x", "num_tokens_per_expert")
NOT_GATED = ("w1", "w2", "_w3", "x", "num_tokens_per_expert")
GPT_OSS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias", "x", "num_tokens_per_expert")
"""Parameters of the three kernels of prime-rl."""


def register(*, recipe: Recipe | None = None, residuals: str | Residuals = "save_fc1") -> Registration:
    """Replaces the grouped expert kernels of prime-rl, where they are defined and where its experts imported them.

    Call it before the model is built. The last call is in force until it is undone, by `undo()` or
    the end of a `with` block.

    Args:
        recipe: formats of the products, as in `grouped_mlp`; without delayed scaling and stochastic rounding.
        residuals: what is kept for backward, as in `grouped_mlp`.

    Raises:
        ImportError: prime-rl is not installed. TypeError, ValueError: an option has an invalid value.
        NotImplementedError: the recipe needs a state or keys, or a kernel of prime-rl has other parameters.
    """
    check_installed("prime_rl", "docs/hosts_training.md")
    kernels, experts = (importlib.import_module(f"prime_rl.trainer.models.layers.moe.{at}") for at in _MODULES)
    options = options_of("prime-rl", recipe, residuals)
    rows = [
        ("_run_experts_grouped_mm_impl", GATED, run_experts),
        ("_run_nongated_experts_grouped_mm_impl", NOT_GATED, run_nongated_experts),
        ("_run_gpt_oss_experts_grouped_mm_impl", GPT_OSS, run_gpt_oss_experts),
    ]
    return replace(
        "prime_rl",
        [
            Replacement(module, name, parameters, lambda own, make=make: make(options))
            for module in (kernels, experts)
            for name, parameters, make in rows
        ],
    )


_MODULES = ("kernels", "experts")


def run_experts(options: Options) -> Callable[..., Tensor]:
    """The kernel of gated experts: y [R, D] of x [R, D], with w1 and w3 [E, F, D], w2 [E, D, F]."""

    def _run_experts_grouped_mm_impl(
        w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor
    ) -> Tensor:
        rows, gate, linear, wo = _cast(x, w1, w3, w2)
        return grouped_mlp(rows, (gate, linear), wo, _integers(num_tokens_per_expert), **options.keywords()).type_as(x)

    return _run_experts_grouped_mm_impl


def run_nongated_experts(options: Options) -> Callable[..., Tensor]:
    """The kernel of experts with a squared ReLU: w1 [E, F, D], w2 [E, D, F]; the third weight is not used."""

    def _run_nongated_experts_grouped_mm_impl(
        w1: Tensor, w2: Tensor, _w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor
    ) -> Tensor:
        rows, wi, wo = _cast(x, w1, w2)
        y = grouped_mlp(rows, wi, wo, _integers(num_tokens_per_expert), activation="srelu", **options.keywords())
        return y.type_as(x)

    return _run_nongated_experts_grouped_mm_impl


def run_gpt_oss_experts(options: Options) -> Callable[..., Tensor]:
    """The kernel of GPT-OSS: gate_up_proj [E, D, 2F] with gate and linear columns in turn, down_proj [E, F, D]."""

    def _run_gpt_oss_experts_grouped_mm_impl(
        gate_up_proj: Tensor,
        gate_up_proj_bias: Tensor,
        down_proj: Tensor,
        down_proj_bias: Tensor,
        x: Tensor,
        num_tokens_per_expert: Tensor,
    ) -> Tensor:
        rows, wi, wo, wi_bias, wo_bias = _cast(x, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
        y = grouped_mlp(
            *(rows, wi, wo, _integers(num_tokens_per_expert)),
            rhs_transposed=False,
            activation=Activation("clamped_qgeglu", limit=7.0, alpha=1.702, offset=1.0, interleave=1),
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            **options.keywords(),
        )
        return y.type_as(x)

    return _run_gpt_oss_experts_grouped_mm_impl


def _cast(*tensors: Any) -> tuple[Tensor, ...]:
    """Operands in bfloat16, in which prime-rl multiplies."""
    return tuple([each.bfloat16() for each in tensors])


def _integers(counts: Tensor) -> Tensor:
    """prime-rl's router counts tokens in float32; counts below 2^24 are exact there."""
    return counts.to(torch.int32)
