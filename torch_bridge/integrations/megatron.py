"""Megatron-core: the experts of its MoE layer as one fused MLP, chosen by a spec.

    spec = get_moe_module_spec_for_backend(megatron.provider(TESpecProvider()), num_experts=64, moe_grouped_gemm=True)

or `megatron.register()` before any spec is made. Parameters are named, shaped and initialised as in `TEGroupedMLP`
(`linear_fc1.weight0` [2F, H], gate rows first, ...), and distributed checkpoints are interchangeable with it and with
`SequentialMLP`.

Letters: G local experts, M rows sorted by expert, H features that experts read, F features of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grouped_core.activations import Activation
from grouped_core.hosts import check_installed
from grouped_core.mlp_spec import Residuals, residuals_option
from grouped_core.recipes import Recipe
from torch_bridge import main_grad
from torch_bridge.integrations._options import refuse
from torch_bridge.integrations._replacing import Registration, Replacement
from torch_bridge.integrations._replacing import register as replace
from torch_bridge.nn.linear import GroupedLinear
from torch_bridge.nn.mlp import fused_mlp

__all__ = ["GroupedMLP", "experts", "provider", "register"]

MODULES = ("self", "moe_use_grouped_gemm", "moe_use_legacy_grouped_gemm")
"""Parameters of `BackendSpecProvider.grouped_mlp_modules`."""


class GroupedMLP(nn.Module):
    """Megatron's local experts as one fused MLP of two `GroupedLinear`.

    Args:
        num_local_experts: G. config: a TransformerConfig. submodules: None; there is nothing to choose.
        pg_collection: process groups `ep`, `expt_tp`, `expt_dp`; None: those of Megatron's parallel state.

    Raises:
        NotImplementedError: the config asks for something that is not supported; the message says what and why.
    """

    recipe: Recipe | None = None
    residuals: str | Residuals = "save_fc1"

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        super().__init__()
        if submodules is not None:
            raise refuse(
                "`submodules` of GroupedMLP",
                type(submodules).__name__,
                "None, because both layers and the activation are one operation",
                "take the spec from `provider(...)`, or leave them out",
            )
        if pg_collection is None:
            from megatron.core.transformer.moe.moe_utils import (
                get_default_pg_collection,
            )

            pg_collection = get_default_pg_collection()
        self.config: Any = config
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        _check(config, self.recipe, self.tp_group.size())
        self.activation = activation_of(config)
        hidden = config.moe_latent_size or config.hidden_size
        width = _part(config.moe_ffn_hidden_size, self.tp_group.size())
        options: dict[str, Any] = {
            "bias": config.add_bias_linear,
            "device": _device(config),
            "dtype": config.params_dtype,
            "recipe": self.recipe,
            "accumulate_into_main_grad": config.gradient_accumulation_fusion,
            "delay_wgrad_compute": config.delay_wgrad_compute,
        }
        wide = self.activation.fc1_width(width)
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, wide, **options)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, hidden, scale_bias=config.add_bias_linear, **options)
        if config.perform_initialization:
            self._initialise()
        for each in self.parameters():
            setattr(each, "allreduce", config.expert_model_parallel_size == 1)  # noqa: B010  a Parameter declares none
        self.register_load_state_dict_post_hook(_forget_extra_states)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor | Sequence[int],
        permuted_probs: Tensor | None,
    ) -> tuple[Tensor, None]:
        """(y, None) with y [M, H] of rows [M, H], weighted by the probabilities; there is never a bias left to add.

        Args:
            permuted_local_hidden_states: rows [M, H]. tokens_per_expert: G integers, on any device, or a list; those on
                a GPU are not read by the host. permuted_probs: [M]; None: 1.

        Raises what `grouped_mlp` raises.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input and probs is not None:
            # Megatron's own meaning of the option: rows are weighted and rounded in front of the experts.
            rows, probs = (rows * probs.unsqueeze(-1)).to(rows.dtype), None
        y = fused_mlp(
            *(self.linear_fc1, self.linear_fc2, self.activation, self.residuals, rows, tokens_per_expert, probs),
            *(None, None),
        )
        return y, None

    def backward_dw(self) -> None:
        """Computes the oldest delayed weight gradients, those of FC2 first, and calls the hooks that DDP registered."""
        main_grad.backward_dw([self.linear_fc2, self.linear_fc1], every=False)

    # ---- initialisation and checkpoints ------------------------------------------------------------------------------

    def _layers(self) -> tuple[tuple[str, GroupedLinear, Any, int], ...]:
        """(name, layer, its initialiser, the axis that tensor parallelism cuts)."""
        config = self.config
        return (
            ("linear_fc1", self.linear_fc1, config.init_method, 0),
            ("linear_fc2", self.linear_fc2, config.output_layer_init_method, 1),
        )

    def _initialise(self) -> None:
        """Draws the weights with Megatron's initialisers and generators; biases are zero."""
        from megatron.core.tensor_parallel import layers as host

        for _, layer, init, axis in self._layers():
            stride = 2 if axis == 0 and self.activation.gated else 1
            for weight in layer.weight_parameters():
                if weight.is_meta:
                    continue
                if not self.config.use_cpu_initialization:
                    host._initialize_affine_weight_gpu(weight, init, axis, stride=stride, is_expert=True)
                    continue
                whole = list(weight.shape)
                whole[axis] *= self.tp_group.size()
                host._initialize_affine_weight_cpu(
                    *(weight, whole[0], whole[1], weight.shape[axis], axis, init),
                    stride=stride,
                    params_dtype=weight.dtype,
                    rank=self.tp_group.rank(),
                    world_size=self.tp_group.size(),
                )
            for name in layer.bias_names:
                nn.init.zeros_(getattr(layer, name))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sharded state dict of Megatron's distributed checkpoints: one entry per expert, with its global index.

        Raises:
            NotImplementedError: the recipe has delayed scaling, whose state these checkpoints do not hold.
        """
        from megatron.core.transformer import utils as host
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

        if self.recipe is not None and self.recipe.delayed:
            raise refuse(
                "`sharded_state_dict` of GroupedMLP",
                f"recipe {self.recipe.name} with a state of delayed scaling",
                "a recipe without a state",
                "choose FP8Current, FP8Block or MXFP8, or save plain state dicts",
            )
        facts: dict[str, Any] = host.ensure_metadata_has_dp_cp_group(metadata)
        apart = facts.get("singleton_local_shards", False)
        first, total = (at * self.num_local_experts for at in (self.ep_group.rank(), self.ep_group.size()))
        found: dict[str, Any] = {}
        for name, layer, _, axis in self._layers():
            cut = {"weight": axis, "bias": axis} if axis == 0 else {"weight": axis}
            kinds = ("weight", "bias") if layer.bias_names else ("weight",)
            for at in range(self.num_local_experts):
                offsets = sharded_offsets if apart else (*sharded_offsets, (len(sharded_offsets), first + at, total))
                key = f"{prefix}experts.{first + at}.{name}." if apart else f"{prefix}experts.{name}."
                held = {kind: getattr(layer, f"{kind}{at}") for kind in kinds} | {"_extra_state": None}
                made = host.make_sharded_tensors_for_checkpoint(
                    held, key, cut, offsets, tp_group=self.tp_group, dp_cp_group=facts["dp_cp_group"]
                )
                for kind in held:
                    entry = made[f"{key}{kind}"]
                    entry.replica_id = (*entry.replica_id[:2], self.dp_group.rank())
                    if axis == 0 and self.activation.gated and kind in kinds:
                        entry = apply_swiglu_sharded_factory(entry, offsets, apart)
                    found[f"{prefix}{name}.{kind}{at}"] = entry
        return found


def _forget_extra_states(module: nn.Module, incompatible: Any) -> None:
    """`_extra_state` exists for checkpoints of Megatron's other experts, and holds nothing here."""
    del module
    incompatible.unexpected_keys[:] = [key for key in incompatible.unexpected_keys if "_extra_state" not in key]


def _device(config: Any) -> Any:
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


def _part(width: int, ranks: int) -> int:
    if width % ranks:
        raise ValueError(
            f"`moe_ffn_hidden_size` of GroupedMLP: {width}, expected a multiple of the {ranks} ranks that share each "
            "expert; change one of them."
        )
    return width // ranks


# ---------------------------------------------------------------------------------------------------------------------
# What the config asks


def activation_of(config: Any) -> Activation:
    """The activation of a TransformerConfig, in the meaning of Megatron's grouped experts.

    Raises:
        NotImplementedError: no kernel computes it, or Megatron itself gives it several meanings.
    """
    gated, limit, offset = config.gated_linear_unit, config.activation_func_clamp_value, config.glu_linear_offset
    name = _names().get(config.activation_func)
    plain = limit is None and offset == 0.0
    if gated and config.bias_activation_fusion and name == "silu" and not plain:
        raise refuse(
            "`bias_activation_fusion` of the config",
            f"True beside a clamp {limit} or an offset {offset}, which Megatron's fused SwiGLU leaves out",
            "False",
            "turn the fusion off; here the activation is always fused",
        )
    if gated and name in ("silu", "quick_gelu") and not (name == "silu" and plain):
        alpha = 1.0 if name == "silu" else 1.702
        return Activation("clamped_qgeglu", alpha=alpha, limit=limit, offset=offset)
    exact = not (config.bias_activation_fusion and name == "gelu_erf")  # Megatron's fused one is the tanh form
    kind = _GATED.get(name) if gated else name
    if kind is None or not plain or not exact:
        raise refuse(
            "activation of the config",
            f"{getattr(config.activation_func, '__name__', config.activation_func)}, gated_linear_unit {gated}, clamp "
            f"{limit}, offset {offset}, bias_activation_fusion {config.bias_activation_fusion}",
            "gated silu or quick_gelu, with a clamp and an offset if you like, gated gelu or fast_gelu without, or a "
            "function that is not gated (silu, gelu, fast_gelu, quick_gelu, relu, squared_relu), without; gelu without "
            "fusion",
            "choose one of these, or Megatron's own experts",
        )
    return Activation(kind)


_GATED: dict[str | None, str] = {"silu": "swiglu", "gelu_erf": "geglu_erf", "gelu_tanh": "geglu_tanh"}
"""Gated kinds by the function of the gate."""


def _names() -> dict[Any, str]:
    """Our names of Megatron's activation functions."""
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu

    return {
        F.silu: "silu",
        F.gelu: "gelu_erf",
        F.relu: "relu",
        activations.squared_relu: "srelu",
        activations.fast_gelu: "gelu_tanh",
        activations.quick_gelu: "quick_gelu",
        fused_bias_geglu.quick_gelu: "quick_gelu",
    }


def _check(config: Any, recipe: Recipe | None, tp_size: int) -> None:
    """Refuses what the experts of a config would have to do and cannot."""
    formats = [f"{name}={getattr(config, name)!r}" for name in ("fp8", "fp4") if getattr(config, name)]
    if formats and recipe is None:
        raise refuse(
            "formats of the config",
            ", ".join(formats),
            "a recipe of ours beside it, because Megatron's recipes belong to TransformerEngine",
            "pass one, as in `provider(base, recipe=torch_bridge.FP8Block)`",
        )
    offloaded = sorted(set(config.offload_modules or ()) & {"expert_fc1", "moe_act"})
    rows = [
        (
            "activation_func_fp8_input_store",
            config.activation_func_fp8_input_store,
            "turn it off, and pass residuals='save_input' to save more memory without rounding",
        ),
        (
            "use_te_activation_func",
            config.use_te_activation_func,
            "turn it off, because the activation is part of the product and no module of its own",
        ),
        (
            "fine_grained_activation_offloading",
            config.fine_grained_activation_offloading and offloaded,
            "leave these modules out, and use `torch_bridge.offload.cpu_offload` around the layer",
        ),
        (
            "moe_use_legacy_grouped_gemm",
            config.moe_use_legacy_grouped_gemm,
            "turn it off, because its weights have another layout",
        ),
        (
            "add_bias_linear",
            config.add_bias_linear and tp_size > 1,
            f"turn it off, because each of {tp_size} tensor-parallel ranks would add the second bias",
        ),
    ]
    for name, asked, remedy in rows:
        if asked:
            raise refuse(f"`{name}` of the config", repr(asked), "it to be off", remedy)


# ---------------------------------------------------------------------------------------------------------------------
# Specs


def experts(*, recipe: Recipe | None = None, residuals: str | Residuals = "save_fc1") -> type[GroupedMLP]:
    """The class of experts with these options, for the `experts` of Megatron's `MoESubmodules`.

    Args:
        recipe: formats of both products. residuals: what is kept for backward; the default keeps what Megatron keeps
            when it recomputes "moe_act".
    """
    options = {"recipe": recipe, "residuals": residuals_option(residuals), "__doc__": GroupedMLP.__doc__}
    return type("GroupedMLP", (GroupedMLP,), options)


def provider(base: Any, *, recipe: Recipe | None = None, residuals: str | Residuals = "save_fc1") -> Any:
    """A `BackendSpecProvider` whose grouped experts are ours, and whose other modules are those of `base`.

    Args:
        base: a provider of Megatron, such as TESpecProvider(). recipe, residuals: as in `experts`.
    """
    return _Provider(base, experts(recipe=recipe, residuals=residuals))


def register(*, recipe: Recipe | None = None, residuals: str | Residuals = "save_fc1") -> Registration:
    """Makes Megatron's providers for TransformerEngine and for local modules name our grouped experts.

    Call it before specs are made. The last call is in force until it is undone, by `undo()`
    or the end of a `with` block.

    Args:
        recipe, residuals: as in `experts`.

    Raises:
        ImportError: megatron-core is not installed. NotImplementedError: a provider has other parameters.
    """
    check_installed("megatron", "docs/hosts_training.md")
    from megatron.core.extensions.transformer_engine_spec_provider import (
        TESpecProvider,
    )
    from megatron.core.models.backends import LocalSpecProvider

    ours = experts(recipe=recipe, residuals=residuals)

    def named(own: Any) -> Any:
        del own

        def grouped_mlp_modules(
            self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
        ) -> tuple[type, None]:
            del self
            return _chosen(ours, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)

        return grouped_mlp_modules

    owners = (TESpecProvider, LocalSpecProvider)
    return replace("megatron", [Replacement(owner, "grouped_mlp_modules", MODULES, named) for owner in owners])


class _Provider:
    """A provider that asks another one for everything but the grouped experts."""

    def __init__(self, base: Any, ours: type[GroupedMLP]) -> None:
        self._base, self._experts = base, ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, None]:
        """(the class of experts, None, because it has no submodules to choose)."""
        return _chosen(self._experts, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)


def _chosen(ours: type[GroupedMLP], grouped: bool, legacy: bool) -> tuple[type, None]:
    if not grouped or legacy:
        raise refuse(
            "grouped experts of the spec",
            f"moe_grouped_gemm {grouped}, moe_use_legacy_grouped_gemm {legacy}",
            "True and False",
            "set them so, or use Megatron's own provider",
        )
    return ours, None
