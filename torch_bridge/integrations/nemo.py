"""NeMo Automodel: its grouped experts run as one fused MLP.

`register()` replaces the grouped products of `GroupedExperts` (backend `experts="torch_mm"`) and the `forward` of
`GroupedExpertsDeepEP`. Their Parameters stay where they are and are read in place. The per-expert loop
(`experts="torch"`) and the experts of TransformerEngine (`experts="te"`) stay Automodel's own.

Letters: T tokens, k experts per token, E local experts, M rows sorted by expert, H features of the model, F features of
an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grouped_core.activations import Activation
from grouped_core.hosts import check_installed
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import Recipe
from torch_bridge import route
from torch_bridge.integrations._options import Options, local, options_of, refuse
from torch_bridge.integrations._replacing import Registration, Replacement
from torch_bridge.integrations._replacing import register as replace
from torch_bridge.mlp import grouped_mlp
from torch_bridge.routed import routed_mlp

__all__ = ["register"]

FORWARD = ("self", "x", "token_mask", "weights", "indices")
"""Parameters of the `forward` of Automodel's experts."""
GROUPED = (
    *("self", "x", "token_mask", "weights", "indices", "gate_and_up_projs", "down_projs", "gate_up_proj_bias"),
    *("down_proj_bias", "n_local_experts", "experts_start_idx"),
)
"""Parameters of `GroupedExperts._forward_grouped_mm`."""


def register(*, recipe: Recipe | None = None, residuals: str | Residuals = "save_fc1") -> Registration:
    """Replaces the grouped products of Automodel's experts.

    Call it before the model runs or is compiled. The last call is in force until it is undone, by
    `undo()` or the end of a `with` block.

    Args:
        recipe: formats of the products, as in `grouped_mlp`; without delayed scaling and stochastic rounding.
        residuals: what is kept for backward, as in `grouped_mlp`.

    Raises:
        ImportError: nemo-automodel is not installed. TypeError, ValueError: an option has an invalid value.
        NotImplementedError: the recipe needs a state or keys, or a function of Automodel has other parameters.
    """
    check_installed("nemo_automodel", "docs/hosts_training.md")
    from nemo_automodel.components.moe import experts, optimized_ops

    options = options_of("NeMo Automodel", recipe, residuals)
    weigh = optimized_ops._apply_router_weight_fp32
    return replace(
        "nemo",
        [
            Replacement(experts.GroupedExperts, "_forward_grouped_mm", GROUPED, lambda own: grouped_mm_of(options)),
            Replacement(experts.GroupedExpertsDeepEP, "forward", FORWARD, lambda own: dispatched_of(options, weigh)),
        ],
    )


def grouped_mm_of(options: Options) -> Callable[..., Tensor]:
    """`GroupedExperts._forward_grouped_mm`: the sum of the local experts of each token, of tokens x [T, H].

    The result is [T, H], or with `apply_router_weight_after_down` [T, 1, H], whose second axis the caller sums. It has
    the dtype of x, and float32 where results of several ranks are summed.
    """

    def _forward_grouped_mm(
        self: Any,
        x: Tensor,
        token_mask: Tensor,
        weights: Tensor,
        indices: Tensor,
        gate_and_up_projs: Tensor,
        down_projs: Tensor,
        gate_up_proj_bias: Tensor | None,
        down_proj_bias: Tensor | None,
        n_local_experts: int,
        experts_start_idx: int,
    ) -> Tensor:
        _check(self)
        experts = (indices - experts_start_idx).masked_fill(~token_mask.unsqueeze(-1), -1)  # others add nothing
        keywords: dict[str, Any] = {
            **options.keywords(),
            "rhs_transposed": False,
            "activation": activation_of(self.config),
            "wi_bias": gate_up_proj_bias,
            "wo_bias": down_proj_bias,
        }
        if self.config.apply_router_weight_after_down:
            rows, sizes, permutation = route.permute(x, experts, n_local_experts)
            y = grouped_mlp(rows, gate_and_up_projs, down_projs, sizes, **keywords)
            y = route.unpermute(y, permutation, weights).unsqueeze(1)
        else:
            y = routed_mlp(x, experts, weights, gate_and_up_projs, down_projs, **keywords)
        return y if n_local_experts == self.n_routed_experts else y.float()

    return _forward_grouped_mm


def dispatched_of(options: Options, weigh: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """`forward` of `GroupedExpertsDeepEP`: y [T, H] of tokens x [T, H], exchanged by Automodel's dispatcher.

    Args:
        weigh: the host's multiplication by the router's weights behind the second product.
    """

    def forward(self: Any, x: Tensor, token_mask: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        _check(self)
        rows, counts, probs = self._dispatch_tokens(x, token_mask, weights, indices)
        after = self.config.apply_router_weight_after_down
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.expert_bias else (None, None)
        y = grouped_mlp(
            *(rows, local(self.gate_and_up_projs).to(rows.dtype), local(self.down_projs).to(rows.dtype), counts),
            rhs_transposed=False,
            activation=activation_of(self.config),
            probs=None if after else probs.squeeze(-1),
            wi_bias=None if biases[0] is None else local(biases[0]).to(rows.dtype),
            wo_bias=None if biases[1] is None else local(biases[1]).to(rows.dtype),
            **options.keywords(),
        )
        return self.token_dispatcher.token_unpermutation(weigh(y, probs, rows.dtype) if after else y)

    return forward


def activation_of(config: Any) -> Activation:
    """The activation of a MoEConfig: gate and linear half contiguous, in "quick_geglu" in alternating columns.

    Raises:
        NotImplementedError: an activation that is not known.
    """
    kind, limit, alpha = config.expert_activation, config.activation_limit, config.activation_alpha
    if kind == "swiglu":
        if config.swiglu_limit > 0:
            return Activation("clamped_swiglu", limit=config.swiglu_limit)
        return Activation("swiglu")
    if kind == "swigluoai":
        return Activation("clamped_qgeglu", alpha=alpha, limit=limit if limit > 0 else None, offset=1.0)
    if kind == "quick_geglu":
        return Activation("clamped_qgeglu", alpha=alpha, limit=limit, offset=1.0, interleave=1)
    if kind in _PLAIN:
        return Activation(_PLAIN[kind])
    raise refuse(
        "`expert_activation` of the config",
        repr(kind),
        "swiglu, swigluoai, quick_geglu, geglu or relu2",
        "choose one of these, or use Automodel's own experts",
    )


_PLAIN = {"geglu": "geglu_tanh", "relu2": "srelu"}


def _check(module: Any) -> None:
    if module.use_mxfp8:
        raise refuse(
            f"`experts` of the backend of {type(module).__name__}",
            "'torch_mm_mxfp8'",
            "'torch_mm', because formats are chosen by our recipe",
            "set it so, and pass recipe=torch_bridge.MXFP8 to `register`",
        )
