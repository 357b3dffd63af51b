"""A whole mixture-of-experts layer, as a function of its parameters; `nn.MoE` holds them.

Letters: T tokens, H hidden size, E experts, k experts per token, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import lora as adapters
from grouped_core import routing_spec
from grouped_core.activations import Activation
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from torch_bridge import _codec
from torch_bridge._args import Accumulators, Members, is_pair
from torch_bridge._checks import check_operand
from torch_bridge._router import check_routing, router_logits
from torch_bridge._serialized import name_in_files
from torch_bridge._tensors import StraightThrough, fixed_spec
from torch_bridge.mlp import grouped_mlp
from torch_bridge.route import MoEAux, topk_router
from torch_bridge.routed import routed_mlp


class SharedExpert(NamedTuple):
    """An expert that every token goes to, without a choice.

    Attributes:
        wi: [1, W, H]. wo: [1, H, F]; F may differ from that of the other experts.
        gate: [1, H]; the expert's result is multiplied by sigmoid(x @ gate.T). None: by 1.
        recipe: the recipe of its products; with delayed scaling it needs a state of its own.
        lora: adapters of wi and wo, as in `grouped_mlp`, with the scale and dropout of those of the other experts.
    """

    wi: Members | QTensor[Tensor] | StraightThrough
    wo: Members | QTensor[Tensor] | StraightThrough
    gate: Tensor | None = None
    recipe: Recipe | BoundRecipe | None = None
    lora: Any = None


name_in_files(SharedExpert)
_codec.register(SharedExpert)  # an argument of `explain` and `why_unsupported`


def moe(
    x: Tensor,
    router: Tensor,
    wi: Members | QTensor[Tensor] | StraightThrough,
    wo: Members | QTensor[Tensor] | StraightThrough,
    k: int,
    *,
    shared: SharedExpert | None = None,
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
        shared: an expert that every token goes to, also a token without another expert; its result is added. The masks
            of its adapters have their own key.
        k: experts per token, at most 32; a router has at most 1024 experts.
        routing: the keywords of `route.topk_router`; coefficients of losses are among them.

    Returns:
        y: [T, H]. aux: `MoEAux`; add its losses to the loss of the model.

    Raises what `topk_router` and `routed_mlp` raise, and ValueError for `out` beside `shared`.
    """
    check_routing("moe", moe, routing)
    if shared is not None and out is not None:
        raise ValueError(
            "`out` of moe: given beside `shared`, expected None, because two results are added; leave it out."
        )
    routing_spec.check_shared("moe", shared, SharedExpert)
    of_shared_lora = None if shared is None else shared.lora
    adapters.check_of_layer(lora, of_shared_lora, lora_scaling, lora_dropout, lora_key, lora_wgrad_accum)
    logits = router_logits(x, router)
    for name, weight in (("wi", wi), ("wo", wo)):
        if (held := experts_held(weight)) is not None:  # what is no weight is refused with the others
            routing_spec.check_experts_held("moe", name, router.shape[0], held)
    of_lora = {"lora_scaling": lora_scaling, "lora_dropout": lora_dropout, "lora_key": lora_key}
    of_experts: dict[str, Any] = {} if lora is None else {"lora": lora, "lora_wgrad_accum": lora_wgrad_accum, **of_lora}
    weights, experts, aux = topk_router(logits, k, **routing)
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
        **of_experts,
    )
    if shared is None:
        return y, aux
    options: dict[str, Any] = {"activation": activation, "residuals": residuals, "implementation": implementation}
    if shared.lora is not None:
        options |= {**of_lora, "lora": shared.lora}
        if lora_key is not None:
            check_operand("lora_key", lora_key, x)
            adapters.check_key(fixed_spec(lora_key))
            options["lora_key"] = key_of_shared(lora_key)
    return y + of_shared(x, shared, rhs_transposed=rhs_transposed, **options), aux


def experts_held(weight: Any) -> int | None:
    """The number of experts that a weight in any form is of; None for what is no weight of several experts."""
    weight = weight.q if isinstance(weight, StraightThrough) else weight
    if isinstance(weight, (list, tuple)) and not is_pair(weight):
        return len(weight)
    shape = getattr(weight[0] if isinstance(weight, (list, tuple)) else weight, "shape", ())
    return int(shape[0]) if len(shape) == 3 else None


def key_of_shared(key: Tensor) -> Tensor:
    """The key uint32 [2] of the dropout masks of a shared expert: the low word's bits inverted (docs/numerics.md).

    Its rows are counted from 0 in a first group, as those of expert 0 are, so the key must tell them apart.
    """
    words = key.view(torch.int32)
    return torch.cat([~words[:1], words[1:]]).view(torch.uint32)


def key_of_part(key: Tensor, number: int) -> Tensor:
    """The key uint32 [2] of the masks of one rank, or of a part of its tokens: `number` is added to the high word."""
    words = key.view(torch.int32)
    return torch.cat([words[:1], words[1:] + number]).view(torch.uint32)


def of_shared(x: Tensor, shared: SharedExpert, **options: Any) -> Tensor:
    """Returns [T, H]: the result of the shared expert at each token; options: those of `grouped_mlp`."""
    if (held := experts_held(shared.wo)) is not None:  # as above
        routing_spec.check_shared_held("moe", held)
    gate = None
    if shared.gate is not None:  # a router with one expert, whose score is the sigmoid
        check_operand("shared.gate", shared.gate, x)
        routing_spec.check_gate(fixed_spec(shared.gate), x.shape[1], transposed=True)
        gate = topk_router(router_logits(x, shared.gate), 1, score="sigmoid")[0].reshape(-1)
    sizes = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    return grouped_mlp(x, shared.wi, shared.wo, sizes, probs=gate, recipe=shared.recipe, **options)
