"""torchtitan: its grouped experts run as one fused MLP, and its selective checkpointing keeps their results.

`register()` replaces the `forward` of `GroupedExperts` and `GptOssGroupedExperts`. Their Parameters stay where they are
and are read in place, so optimizers, FSDP2, expert parallelism and checkpoints do not change. For runs from the command
line of torchtitan, `torchtitan_override` has the same as overrides.

Letters: E local experts, R rows sorted by expert, D features of the model, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.activations import Activation
from grouped_core.hosts import check_installed
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import Recipe
from torch_bridge import nn
from torch_bridge.integrations._options import Options, local, options_of, refuse
from torch_bridge.integrations._replacing import Registration, Replacement
from torch_bridge.integrations._replacing import register as replace
from torch_bridge.mlp import grouped_mlp

__all__ = ["register", "save_list"]

FORWARD = ("self", "x_RD", "num_tokens_per_expert_E")
"""Parameters of the `forward` of torchtitan's grouped experts."""

Forward = Callable[[Any, Tensor, Tensor], Tensor]


def register(
    *,
    recipe: Recipe | None = None,
    residuals: str | Residuals = "save_fc1",
    dtype: torch.dtype | None = torch.bfloat16,
) -> Registration:
    """Replaces the forward of torchtitan's grouped experts and extends the save list of its selective checkpointing.

    Call it before the model is built, wrapped or compiled. The last call is in force until it is undone, by
    `undo()` or the end of a `with` block.

    Args:
        recipe: formats of the products, as in `grouped_mlp`; without delayed scaling and stochastic rounding.
        residuals: what is kept for backward, as in `grouped_mlp`.
        dtype: rows and weights are cast to it, as torchtitan does; None: to the dtype of the rows.

    Raises:
        ImportError: torchtitan is not installed. TypeError, ValueError: an option has an invalid value.
        NotImplementedError: the recipe needs a state or keys, or a function of torchtitan has other parameters.
    """
    check_installed("torchtitan", "docs/hosts_training.md")
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.common import moe
    from torchtitan.models.gpt_oss import moe as gpt_oss

    options = options_of("torchtitan", recipe, residuals)
    experts, gpt_oss_experts = moe.GroupedExperts, gpt_oss.GptOssGroupedExperts
    product = experts._grouped_mm
    return replace(
        "torchtitan",
        [
            Replacement(experts, "forward", FORWARD, lambda own: forward_of(product, options, dtype)),
            Replacement(gpt_oss_experts, "forward", FORWARD, lambda own: gpt_oss_forward_of(product, options, dtype)),
            Replacement(activation_checkpoint, "_get_default_save_ops", (), _with_operators),
        ],
    )


def save_list() -> set[Any]:
    """Our operators for the save list of selective checkpointing: it then keeps their results, as it keeps products.

    `register` adds them. A subclass of `SelectiveAC` with a `get_save_ops` of its own adds them itself.
    """
    return nn.save_list()


def _with_operators(own: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    def _get_default_save_ops() -> set[Any]:
        return own() | save_list()

    return _get_default_save_ops


# ---------------------------------------------------------------------------------------------------------------------
# The forward of the experts


class _Layout(NamedTuple):
    """The Parameters of a class of experts, in the order in which `_checked` returns them."""

    owner: str
    parameters: tuple[str, ...]


_EXPERTS = _Layout("GroupedExperts", ("w1_EFD", "w3_EFD", "w2_EDF"))
_GPT_OSS = _Layout("GptOssGroupedExperts", ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"))


def forward_of(product: Any, options: Options, dtype: torch.dtype | None) -> Forward:
    """`forward` of `GroupedExperts`: y [R, D] of rows x [R, D], in the dtype of x; rows past the sum of counts are 0.

    Args:
        product: the host's own `_grouped_mm`.
    """

    def forward(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        kind = x_RD.dtype if dtype is None else dtype
        w1, w3, w2 = (local(each).to(kind) for each in _checked(self, _EXPERTS, product))
        y = grouped_mlp(x_RD.to(kind), (w1, w3), w2, num_tokens_per_expert_E, **options.keywords())
        return y.type_as(x_RD)

    return forward


def gpt_oss_forward_of(product: Any, options: Options, dtype: torch.dtype | None) -> Forward:
    """`forward` of `GptOssGroupedExperts`, as `forward_of`; biases and their gradients keep the Parameters' dtype."""

    def forward(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        kind = x_RD.dtype if dtype is None else dtype
        wi, wi_bias, wo, wo_bias = _checked(self, _GPT_OSS, product)
        y = grouped_mlp(
            *(x_RD.to(kind), local(wi).to(kind), local(wo).to(kind), num_tokens_per_expert_E),
            activation=Activation("clamped_qgeglu", limit=self.swiglu_limit, interleave=1),
            wi_bias=local(wi_bias),
            wo_bias=_share(wo, local(wo_bias)),
            **options.keywords(),
        )
        return y.type_as(x_RD)

    return forward


def _share(weight: Any, bias: Tensor) -> Tensor:
    """The second bias as torchtitan adds it on each of several tensor-parallel ranks, whose results are summed."""
    mesh: Any = getattr(weight, "device_mesh", None)
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
        return bias
    from torchtitan.models.gpt_oss.moe import ScaleBiasForward

    return ScaleBiasForward.apply(bias, mesh.size(mesh.mesh_dim_names.index("tp")), bias.dtype)


def _checked(module: Any, layout: _Layout, product: Any) -> list[Any]:
    """The Parameters of an experts module, after refusing a subclass that computes something else.

    Raises:
        NotImplementedError: it has other Parameters, or another product; or torchtitan checks types of distribution.
    """
    import spmd_types

    kind = type(module)
    if spmd_types.is_type_checking():
        raise refuse(
            f"forward of {kind.__name__}",
            "types of distribution are checked, which our operators do not declare",
            "no such check",
            "set `parallelism.spmd_typechecking` to false",
        )
    if kind._grouped_mm is not product:
        raise refuse(
            f"`_grouped_mm` of {kind.__name__}",
            "replaced by a product in other formats",
            f"the one of torchtitan's {layout.owner}",
            "leave its converter out, and pass `recipe` to `register` instead",
        )
    held = {name: each for name, each in module._parameters.items() if each is not None}
    if held.keys() != set(layout.parameters):
        raise refuse(
            f"Parameters of {kind.__name__}",
            ", ".join(sorted(held)) or "none",
            ", ".join(layout.parameters),
            "give the class a forward of its own, or use a release of torchtitan that docs/hosts_training.md lists",
        )
    return [held[name] for name in layout.parameters]
