"""A whole mixture-of-experts layer, as a function of its parameters; `nn.MoE` holds them.

Letters: T tokens, H hidden size, E experts, k experts per token, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grouped_core.activations import Activation
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from torch_bridge._args import Accumulators, Members
from torch_bridge._router import router_logits
from torch_bridge._tensors import StraightThrough
from torch_bridge.route import MoEAux, topk_router
from torch_bridge.routed import routed_mlp


def moe(
    x: Tensor,
    router: Tensor,
    wi: Members | QTensor[Tensor] | StraightThrough,
    wo: Members | QTensor[Tensor] | StraightThrough,
    k: int,
    *,
    rhs_transposed: bool = True,
    activation: str | Activation = "swiglu",
    wi_bias: Members | None = None,
    wo_bias: Members | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    out: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1,  # not 1.0, which Dynamo would make a symbol
    lora_dropout: float = 0,
    lora_key: Tensor | None = None,
    lora_wgrad_accum: str | Sequence[Any] | None = None,
    **routing: Any,
) -> tuple[Tensor, MoEAux]:
    """(y, aux): each token goes to k experts, whose results are summed with the weights of the router.

    Logits are x router^T in fp32, with this library's product, so that frameworks route with the same bits. No fp32
    copy of x is kept for backward. Differentiable in x, router, wi, wo and the biases, once.

    Args:
        x: [T, H] fp32, bf16 or fp16. router: [E, H].
        wi, wo and the keywords up to `lora_wgrad_accum`: as in `routed_mlp`.
        k: experts per token. routing: the keywords of `route.topk_router`; coefficients of losses are among them.

    Returns:
        y: [T, H]. aux: `MoEAux`; add its losses to the loss of the model.

    Raises what `topk_router` and `routed_mlp` raise.
    """
    weights, experts, aux = topk_router(router_logits(x, router), k, **routing)
    y = routed_mlp(
        *(x, experts, weights, wi, wo),
        rhs_transposed=rhs_transposed,
        activation=activation,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        recipe=recipe,
        residuals=residuals,
        wgrad_accum=wgrad_accum,
        out=out,
        implementation=implementation,
        lora=lora,
        lora_scaling=lora_scaling,
        lora_dropout=lora_dropout,
        lora_key=lora_key,
        lora_wgrad_accum=lora_wgrad_accum,
    )
    return y, aux
