"""A mixture-of-experts layer: router, experts, and optionally an expert that all tokens go to.

Letters: T tokens, H hidden size, E experts, k experts per token, F expert width.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from grouped_core.exchange import own_experts
from grouped_core.formats import as_flag, check_flags
from grouped_core.linear_spec import check_keywords
from grouped_core.routing_spec import check_of_layer, router_option
from torch_bridge import main_grad
from torch_bridge._expert_parallel import Layer, Transport, check_chunks, transport_option
from torch_bridge._router import router_logits
from torch_bridge._tensors import draw_key
from torch_bridge.moe import moe
from torch_bridge.nn import _primary
from torch_bridge.nn._checks import cast_rows, check_recipe, compute_dtype, parameter_dtype, positive
from torch_bridge.nn._state import OrderedColumns
from torch_bridge.nn.linear import GroupedLinear, check_layers
from torch_bridge.nn.mlp import GroupedMLP
from torch_bridge.route import MoEAux, topk_router
from torch_bridge.routed import routed_mlp


class Router(Module):
    """Logits fp32 [T, E] of tokens [T, H], computed in fp32 from `weight` [E, H] of any dtype.

    Args:
        hidden: H. num_experts: E. selection_bias: whether there is a buffer `selection_bias`, fp32 [E], that is added
            to the scores which choose experts. It stays fp32 when the layer is cast, and nothing here writes it: copy
            the result of `route.update_bias` or `route.balance_quantile` into it.
        device, dtype: those of the weight.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        selection_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden, num_experts = positive("Router", hidden=hidden, num_experts=num_experts)
        self.weight = Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        has_bias = as_flag("selection_bias", selection_bias, "Router")
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if has_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws a new weight, uniform within 1/sqrt(H), and sets the bias to zero."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.selection_bias is not None:
                self.selection_bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Logits fp32 [T, E] of x [T, H]."""
        return router_logits(x, self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(given := state_dict.get(prefix + "selection_bias"), Tensor):
            state_dict[prefix + "selection_bias"] = given.float()  # `assign=True` would take it as it is
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        before = self.selection_bias
        super()._apply(fn, recurse)
        after = self.selection_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.selection_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Sizes and options."""
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}" + ("" if self.selection_bias is None else ", selection_bias=True")


class RoutedMLP(GroupedMLP):
    """A `GroupedMLP` that takes tokens instead of sorted rows; parameters, options and methods are the same."""

    operation = staticmethod(routed_mlp)  # pyrefly: ignore[bad-override]

    def forward(  # pyrefly: ignore[bad-override-param-name]
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        *,
        max_rows: int | None = None,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """y [T, H] of x [T, H]: the sum over the places of a token of weights times the MLP of its expert.

        Args:
            x: [T, H]. experts: integers [T, k]. weights: [T, k]. max_rows: room for rows; all as in `routed_mlp`.
            is_first_microbatch, out, grad_input: as in `GroupedMLP`; the buffers are [T, H].

        Raises what `routed_mlp` raises.
        """
        operands = (x, experts, weights, is_first_microbatch, out, grad_input)
        return self.run(*operands, routed=True, max_rows=max_rows)


_ALONE: dict[str, Any] = {
    "transport": "all_to_all",
    "budget_factor": None,
    "once_per_rank": False,
    "send": None,
    "chunks": 1,
}
"""The defaults of the options of a process group, which a layer without one has."""


class MoE(OrderedColumns):
    """y = sum over the k experts of a token of its weight times the expert's MLP, plus the shared expert's.

    It holds `router` (`weight` [E, H]), `experts` (a `GroupedMLP` with `linear_fc1` and `linear_fc2`), and with
    `shared_dim` the `shared` expert and perhaps its `shared_gate`, whose sigmoid multiplies the shared expert's result.
    The losses are returned, not added: hidden state would count them twice under activation checkpointing.

    Args:
        hidden: H. mlp_dim: F. num_experts: E, at most 1024. num_experts_per_tok: k, at most 32.
        score, after_topk, normalize, scale, num_groups, topk_groups, group_topk, sinkhorn, capacity_factor, drop,
            aux_coeff, z_coeff: as in `route.topk_router`.
        jitter: as there, but only in training; each pass then draws its key from the device's generator.
        selection_bias: whether the router has a bias for the choice, see `Router`.
        shared_dim: width of an expert that all tokens go to, dropped ones too; None: there is none.
        shared_gate: whether its result is multiplied by the sigmoid of a product of the token with a learned vector.
        process_group: the group of the ranks over which the experts are spread; rank r of P holds experts r E / P to
            (r + 1) E / P - 1, and router and shared expert are replicated. Every rank has to run each pass. None: this
            process has all experts. The same things must need gradients on every rank (docs/parallel.md).
        transport, budget_factor, once_per_rank, send, chunks: how tokens travel, as in `parallel.moe`.
        bias: whether the experts have biases; the shared one has none.
        single_grouped_weight: one parameter for all experts instead of one each.
        options: the other keywords of `GroupedMLP`, for the experts and the shared expert.

    Raises:
        TypeError, ValueError: an option has an invalid value, or contradicts another.
    """

    operation = staticmethod(moe)
    transport: Transport | None
    shared: GroupedMLP | None
    shared_gate: Router | None

    def __init__(
        self,
        hidden: int,
        mlp_dim: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score: str = "softmax",
        after_topk: bool = False,
        normalize: bool | None = None,
        scale: float = 1.0,
        num_groups: int | None = None,
        topk_groups: int | None = None,
        group_topk: int | None = None,
        jitter: float = 0.0,
        sinkhorn: int = 0,
        capacity_factor: float | None = None,
        drop: str = "probs",
        aux_coeff: float = 0.0,
        z_coeff: float = 0.0,
        selection_bias: bool = False,
        shared_dim: int | None = None,
        shared_gate: bool = False,
        process_group: Any = None,
        transport: str | Transport = "all_to_all",
        budget_factor: float | None = None,
        once_per_rank: bool = False,
        send: str | None = None,
        chunks: int = 1,
        bias: bool = False,
        single_grouped_weight: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_keywords("MoE", options, MoE, GroupedMLP, GroupedLinear)
        flags = {"selection_bias": selection_bias, "shared_gate": shared_gate, "once_per_rank": once_per_rank}
        flags |= {"bias": bias, "single_grouped_weight": single_grouped_weight}
        check_flags("MoE", **flags)
        sizes = {"hidden": hidden, "mlp_dim": mlp_dim, "num_experts": num_experts}
        hidden, mlp_dim, num_experts, self.num_experts_per_tok = positive(
            "MoE", **sizes, num_experts_per_tok=num_experts_per_tok
        )
        if shared_dim is not None:
            (shared_dim,) = positive("MoE", shared_dim=shared_dim)
        self.routing: dict[str, Any] = {
            "score": score,
            "after_topk": after_topk,
            "normalize": normalize,
            "scale": scale,
            "num_groups": num_groups,
            "topk_groups": topk_groups,
            "group_topk": group_topk,
            "sinkhorn": sinkhorn,
            "capacity_factor": capacity_factor,
            "drop": drop,
            "aux_coeff": aux_coeff,
            "z_coeff": z_coeff,
        }
        router_option(num_experts, self.num_experts_per_tok, **self.routing, jitter=jitter)
        if shared_gate and shared_dim is None:
            raise ValueError(
                "`shared_gate` of MoE: True without `shared_dim`, expected a shared expert; give its width, or leave "
                "the gate out."
            )
        self.jitter, self.num_experts = jitter, num_experts
        self.process_group, self.transport, self.chunks, own = None, None, 1, num_experts
        how: dict[str, Any] = {"transport": transport, "budget_factor": budget_factor, "once_per_rank": once_per_rank}
        how |= {"send": send, "chunks": chunks}
        if process_group is not None:
            check_recipe("MoE", options.get("recipe"))
            held = _primary.options(options.get("quantized_weights"), options.get("recipe"), None)
            found = self._transport(process_group, held.recipe, adapted=options.get("lora_rank") is not None, **how)
            self.process_group, self.transport, self.chunks = process_group, found, chunks
            own = own_experts("MoE", num_experts, process_group.size())
        elif how != _ALONE:
            raise ValueError(
                f"`transport`, `budget_factor`, `once_per_rank`, `send`, `chunks` of MoE: {transport!r}, "
                f"{budget_factor}, {once_per_rank}, {send!r} and {chunks} without `process_group`, expected "
                "'all_to_all', None, False, None and 1; pass the ranks over which the experts are spread."
            )
        dtype = parameter_dtype("MoE", options.get("dtype"))
        place: dict[str, Any] = {"device": options.get("device"), "dtype": dtype}
        self.router = Router(hidden, num_experts, selection_bias=selection_bias, **place)
        options["single_grouped_weight"] = single_grouped_weight
        self.experts = RoutedMLP(own, hidden, mlp_dim, bias=bias, **options)
        self.shared = None if shared_dim is None else GroupedMLP(1, hidden, shared_dim, **options)
        self.shared_gate = Router(hidden, 1, **place) if shared_gate else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        check_layers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def spread_experts(
        self,
        process_group: Any,
        *,
        transport: str | Transport = "all_to_all",
        budget_factor: float | None = None,
        once_per_rank: bool = False,
        send: str | None = None,
        chunks: int = 1,
    ) -> None:
        """Sends tokens to the ranks of a process group from now on; `parallel.shard_experts` calls it.

        Args: as of the layer.

        Raises:
            ValueError: the layer is spread already, or an option is invalid.
        """
        how: dict[str, Any] = {"transport": transport, "budget_factor": budget_factor, "once_per_rank": once_per_rank}
        self.transport = self.transport_over(process_group, **how, send=send, chunks=chunks)
        self.process_group, self.chunks = process_group, chunks

    def transport_over(self, process_group: Any, **how: Any) -> Transport:
        """The transport that `spread_experts` would use with these options; raises what it raises, changes nothing."""
        if self.process_group is not None:
            raise ValueError(
                "`process_group` of MoE: the layer is spread already, expected one with all experts; build it without "
                "`process_group`."
            )
        adapted, recipe = bool(self.experts.linear_fc1.lora.rank), self.experts.linear_fc1.recipe
        return self._transport(process_group, recipe, adapted=adapted, **{**_ALONE, **how})

    def _transport(
        self,
        process_group: Any,
        recipe: Any,
        transport: str | Transport,
        budget_factor: float | None,
        once_per_rank: bool,
        send: str | None,
        chunks: int,
        *,
        adapted: bool,
    ) -> Transport:
        check_chunks("MoE", chunks)
        how = (transport, process_group, budget_factor, once_per_rank, send, recipe)
        found = transport_option("MoE", *how, adapted=adapted)
        own_experts("MoE", self.num_experts, process_group.size())
        return found

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        experts: Tensor | None = None,
        sequence_sizes: Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> tuple[Tensor, MoEAux]:
        """(y [..., H], aux) of x [..., H].

        Args:
            x: tokens, in any number of leading axes. mask: bool [...], False for padding, whose routed part is zero and
                whose values must be finite.
            experts: integers [..., k], chosen elsewhere (replay, `route.hash_experts`), -1 for none.
            sequence_sizes: integers [S], as in `route.topk_router`, of the tokens in the order of memory; those of this
                rank, as many on every rank.
            is_first_microbatch: for the cache of quantised weights, as in `GroupedLinear`.

        Raises what `route.topk_router` and `routed_mlp` raise.
        """
        tokens = _tokens(x, self.num_experts, self.experts.linear_fc1.in_features)
        mask, experts = _of_tokens(x, mask, experts)
        jitter, key = (self.jitter, draw_key(tokens.device)) if self.jitter and self.training else (0.0, None)
        weights, chosen, aux = topk_router(
            *(self.router(tokens), self.num_experts_per_tok),
            bias=self.router.selection_bias,
            mask=mask,
            experts=experts,
            jitter=jitter,
            key=key,
            sequence_sizes=sequence_sizes,
            process_group=self.process_group,
            **self.routing,
        )
        if self.transport is not None:
            # The shared expert and its gate read tokens as they came, as on one rank.
            sent = cast_rows(tokens, compute_dtype(tokens, self.experts.linear_fc1.weight_parameters()[0].dtype))
            layer = Layer(
                *(self.process_group, self.transport, self.num_experts, self.chunks),
                lambda _, *arrived, room: self.experts(
                    *arrived, max_rows=room, is_first_microbatch=is_first_microbatch
                ),
                partial(self._shared, tokens, is_first_microbatch),
            )
            y, aux = layer.run(sent, weights, chosen, aux)
            return _shaped_as(x, y), aux
        y = self.experts(tokens, chosen, weights, is_first_microbatch=is_first_microbatch)
        shared = self._shared(tokens, is_first_microbatch)
        return _shaped_as(x, y if shared is None else y + shared), aux

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A copy in the same process group, which cannot be copied itself."""
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _shared(self, tokens: Tensor, first: bool | None) -> Tensor | None:
        if self.shared is None:
            return None
        sizes = torch.full((1,), tokens.shape[0], dtype=torch.int32, device=tokens.device)
        probs = None
        if self.shared_gate is not None:
            # The sigmoid of the router's kernel: one expert, whose score is its weight.
            gate, _, _ = topk_router(self.shared_gate(tokens), 1, score="sigmoid")
            probs = gate.reshape(-1)
        return self.shared(tokens, sizes, probs, is_first_microbatch=first)

    # ---- what the experts offer --------------------------------------------------------------------------------------

    def _layers(self) -> list[GroupedMLP]:
        return [each for each in (self.experts, self.shared) if each is not None]

    def grouped_layers(self) -> list[GroupedLinear]:
        """The linear layers of the shared expert and of the experts, in the order of backward."""
        return [each for layer in reversed(self._layers()) for each in (layer.linear_fc2, layer.linear_fc1)]

    def backward_dw(self, all: bool = False) -> None:
        """Runs the oldest delayed weight gradients (`all`: all) of the shared expert and of the experts."""
        main_grad.backward_dw(self.grouped_layers(), every=all)

    def merge(self) -> None:
        """Adds the adapters of the experts and of the shared expert to their weights, as in `GroupedMLP`."""
        for layer in self._layers():
            layer.check_merge()
        for layer in self._layers():
            layer.merge()

    def pending_wgrads(self) -> int:
        """The number of backward passes whose delayed weight gradients are pending."""
        return max(layer.pending_wgrads() for layer in self._layers())

    def fire_wgrad_hooks(self) -> None:
        """Calls the hooks after delayed weight gradients; needed after the replay of a graph."""
        for layer in reversed(self._layers()):
            layer.fire_wgrad_hooks()

    def refresh_weight_table(self) -> None:
        """Makes captured graphs read the weights at their current addresses."""
        for layer in self._layers():
            layer.refresh_weight_table()

    def set_weight_update(self, flag: bool) -> None:
        """Does what `GroupedLinear.set_weight_update` does, for all layers."""
        for layer in self._layers():
            layer.set_weight_update(flag)

    def reset_parameters(self) -> None:
        """Draws new values for all parameters."""
        self.router.reset_parameters()
        for layer in self._layers():
            layer.reset_parameters()
        if self.shared_gate is not None:
            self.shared_gate.reset_parameters()

    def extra_repr(self) -> str:
        """The experts per token, and options of the choice that were given."""
        text = f"num_experts_per_tok={self.num_experts_per_tok}"
        defaults = {"score": "softmax", "after_topk": False, "scale": 1.0, "sinkhorn": 0, "drop": "probs"}
        defaults |= {"aux_coeff": 0.0, "z_coeff": 0.0}
        given = {name: value for name, value in self.routing.items() if value != defaults.get(name)}
        return "".join([text, *[f", {name}={value!r}" for name, value in given.items()]])


def _tokens(x: Tensor, experts: int, hidden: int) -> Tensor:
    """x [..., H] as [T, H]. Raises ValueError where H is not `hidden`, as for the router [experts, hidden]."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` of MoE: {type(x).__name__}, expected a torch.Tensor; convert it first.")
    if x.dim() == 0:
        raise ValueError(
            f"`x` of MoE: shape {tuple(x.shape)}, expected at least one axis [..., H]; pass tokens of H columns."
        )
    if not torch.jit.is_tracing() and x.shape[-1] != hidden:  # tracing, whose sizes are tensors, is refused later
        raise ValueError(
            f"`x` of MoE: shape {tuple(x.shape)}, expected H = {hidden} columns beside `router.weight` of shape "
            f"({experts}, {hidden}); pass tokens of H columns."
        )
    return x.reshape(-1, x.shape[-1])


def _shaped_as(x: Tensor, y: Tensor) -> Tensor:
    """y [T, H] as x [..., H], which is no view of y: FSDP2 loses gradients of views that are changed in place."""
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, x.shape)


def _of_tokens(x: Tensor, mask: Any, experts: Any) -> tuple[Any, Any]:
    """mask [...] as [T] and experts [..., k] as [T, k], beside x [..., H]; `topk_router` refuses what is no tensor.

    Raises:
        ValueError: their leading axes are not those of x.
    """
    check_of_layer(x.shape[:-1], *[each.shape if isinstance(each, Tensor) else None for each in (mask, experts)])
    if isinstance(mask, Tensor):
        mask = mask.reshape(-1)
    if isinstance(experts, Tensor):
        experts = experts.reshape(-1, experts.shape[-1])
    return mask, experts
