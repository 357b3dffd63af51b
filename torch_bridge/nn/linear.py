"""The grouped linear layer: its parameters and the delivery of their gradients; `linear` does the arithmetic.

Letters: G groups (experts), M rows sorted by group, K in, N out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from grouped_core import gradients, lora
from grouped_core.formats import as_flag
from grouped_core.recipes import Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes
from torch_bridge import _adapter, _autocast, linear, main_grad
from torch_bridge._args import Members
from torch_bridge._calling import run
from torch_bridge._checks import is_distributed
from torch_bridge._compiling import is_compiling
from torch_bridge._gradients import Owner
from torch_bridge._memory import OwnedTable
from torch_bridge._tensors import home
from torch_bridge.nn import _lora, _primary
from torch_bridge.nn._cache import WeightCache
from torch_bridge.nn._checks import (
    cast_rows,
    check_microbatch,
    check_recipe,
    check_width,
    compute_dtype,
    parameter_dtype,
    positive,
)
from torch_bridge.nn._scaling_state import ScaledModule, bound
from torch_bridge.nn._state import adapt, hooked
from torch_bridge.quantized_weight import QuantizedWeight


class GroupedLinear(ScaledModule):
    """y[r] = x[r] weight[g].T + bias[g], where g is the group of row r and each group's weight is [N, K].

    The parameters are `weight0` [N, K] ... and `bias0` [N] ..., or `weight` [G, N, K] and `bias` [G, N]; a checkpoint
    of either form loads into either. Weights are registered before biases, except a single weight with listed biases.
    Input and weights are cast to the dtype of the computation: autocast's if it is on (biases too), otherwise that of
    the parameters.

    Args:
        num_groups: G. in_features: K. out_features: N.
        bias: whether there is a bias.
        device, dtype: those of the parameters; fp32, bf16 or fp16.
        recipe: formats of the products; None uses the operands without quantising them. With delayed scaling the layer
            has its own state, in buffers; pass `scaling_state` to `update_scaling` after each step. With stochastic
            rounding each forward pass draws a key from the device's generator, except in evaluation without gradients.
        scale_bias: `row_scale` then multiplies only the bias.
        accumulate_into_main_grad: the kernel adds weight gradients to the parameters' `main_grad` instead of returning
            them for `.grad`; see `torch_bridge.main_grad` for the attributes of the parameters.
        single_grouped_weight, single_grouped_bias: one parameter for all groups instead of one per group.
        delay_wgrad_compute: weight gradients wait for `backward_dw`. Bias gradients never wait.
        quantized_weights: the weights are quantised in the formats of `recipe`, and the optimiser holds the master
            weights; None: as in `quantized_model_init`, otherwise False.
        preserve_high_precision_init: the initial value of quantised weights stays on the host until it is released
            (`QuantizedWeight.high_precision_init_val`); plain weights are not affected. None: as in
            `quantized_model_init`, otherwise False.
        lora_rank: r; the layer then has an adapter (docs/lora.md), parameters `lora_A` [G, r, K] and `lora_B`
            [G, N, r], and its weights and biases are frozen. Gradients of the adapter follow the options of weight
            gradients. Weights that are quantised for a recipe with plain rows in dgrad hold one form. None: no adapter.
        lora_alpha: the adapter is scaled by lora_alpha / r; None: r. lora_dropout: the probability with which elements
            of x are dropped on their way to `lora_A`, in training.

    Raises:
        TypeError, ValueError: an option has an invalid value, or contradicts another.
    """

    operation = staticmethod(linear.grouped_linear)

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        scale_bias: bool = False,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        quantized_weights: bool | None = None,
        preserve_high_precision_init: bool | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_groups, self.in_features, self.out_features = positive(
            "GroupedLinear", num_groups=num_groups, in_features=in_features, out_features=out_features
        )
        bias, self.scale_bias = (
            as_flag(name, flag, "GroupedLinear") for name, flag in (("bias", bias), ("scale_bias", scale_bias))
        )
        single_weight = as_flag("single_grouped_weight", single_grouped_weight, "GroupedLinear")
        single_bias = as_flag("single_grouped_bias", single_grouped_bias, "GroupedLinear")
        if self.scale_bias and not bias:
            raise ValueError(
                "`scale_bias` of GroupedLinear: True with `bias` False, expected a bias to scale; drop one of them."
            )
        dtype = parameter_dtype("GroupedLinear", dtype)
        check_recipe("GroupedLinear", recipe)
        held = _primary.options(quantized_weights, recipe, preserve_high_precision_init)
        self.lora = lora.layer_options("GroupedLinear", lora_rank, lora_alpha, lora_dropout)
        self.recipe = held.recipe
        accumulates = as_flag("accumulate_into_main_grad", accumulate_into_main_grad, "GroupedLinear")
        self.accumulate_into_main_grad = accumulates
        self.delay_wgrad_compute = as_flag("delay_wgrad_compute", delay_wgrad_compute, "GroupedLinear")
        self.quantized_weights = held.quantized
        self.preserve_high_precision_init = held.preserve
        self.queue = main_grad.GradientQueue()
        self.cache = WeightCache()
        self._table = OwnedTable()
        self.weight_names = self._names("weight", single_weight)
        self.bias_names = self._names("bias", single_bias) if bias else ()
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        biases_first = single_weight and not single_bias
        kinds = [("weight", self.weight_names), ("bias", self.bias_names)]
        for kind, names in reversed(kinds) if biases_first else kinds:
            shape = (self.num_groups, *shapes[kind]) if names == (kind,) else shapes[kind]
            if kind == "weight" and held.quantized and held.recipe is not None:
                whole = (self.num_groups, *shapes[kind])
                frozen = self.lora.rank > 0 and gradients.reads_weights_as_given(held.recipe)
                one_form = frozen or held.recipe.saved_weights == "forward"
                made = _primary.weights(whole, names == (kind,), held.recipe, dtype, device, one_form=one_form)
            else:
                made = [Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in names]
            for name, parameter in zip(names, made, strict=True):
                self.register_parameter(name, parameter)
        if self.lora.rank:
            _lora.hold(self, device, dtype)
        self.init_state(self.recipe, self.num_groups, 1, device)
        self.follow_state(self.scaling_state)
        self.mark_weights()
        self.reset_parameters()

    def _names(self, kind: str, single: bool) -> tuple[str, ...]:
        return (kind,) if single else tuple(f"{kind}{group}" for group in range(self.num_groups))

    def reset_parameters(self) -> None:
        """Draws new values: uniform within 1/sqrt(K), group by group, the same for packed and indexed parameters.

        DTensors are drawn as PyTorch draws them, so their values are others than those of plain parameters. It also
        resets the state of delayed scaling.
        """
        bound = 1 / math.sqrt(self.in_features)
        self.reset_state()  # before quantised weights are drawn, which use its scales
        with torch.no_grad():
            for kind, names in (("weight", self.weight_names), ("bias", self.bias_names)):
                for name in names:
                    parameter = getattr(self, name)

                    def draw(whole: Tensor, packed: bool = name == kind) -> None:
                        for member in whole.unbind() if packed and not is_distributed(whole) else (whole,):
                            member.uniform_(-bound, bound)

                    if isinstance(parameter, QuantizedWeight):
                        _primary.initialise(parameter, self.preserve_high_precision_init, draw)
                    else:
                        draw(parameter)
        if self.lora.rank:
            _lora.reset(self)

    # ---- the product -------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        group_sizes: Tensor | Sequence[int] | GroupSizes,
        row_scale: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """y [M, N] of x [M, K]; rows past the groups are zero.

        Args:
            x: [M, K]. group_sizes: G integers, as in `grouped_linear`. row_scale: [M], multiplies rows of y, or with
                `scale_bias` only the bias.
            is_first_microbatch: None quantises the weights in each pass, and keeps nothing unless `set_weight_update`
                was called; True quantises them into the cache, whose buffers keep their addresses; False reuses these.
                It never decides whether a gradient is added or replaces. Plain recipes have nothing to cache.
            out, grad_input: the caller's buffers for y and the gradient of x, in the dtype of the computation.

        Raises what `grouped_linear` raises; RuntimeError if the cache is empty or older than the weights.
        """
        check_width("GroupedLinear", x, self, "in_features", "weight")
        if is_first_microbatch is not None:
            check_microbatch(is_first_microbatch)
        if self.quantized_weights and is_compiling():
            _primary.refuse_export()
            return _uncompiled(self, x, group_sizes, row_scale, is_first_microbatch, out, grad_input)
        parameters = self.weight_parameters()
        dtype = compute_dtype(x, parameters[0].dtype)
        weights = self.weights(parameters, dtype)
        self.note_addresses(weights)
        recipe = bound(self.recipe, self.scaling_state, x, training=self.training)
        rows = cast_rows(x, dtype)
        name, owners = linear.LINEAR.name, (self.owner(parameters, self.weight_names),)
        arguments: tuple[Any, ...] = (
            rows,
            weights,
            group_sizes,
            True,
            self.biases(x),
            row_scale,
            self.scale_bias,
            recipe,
        )
        if self.lora.rank:
            name, owners = _adapter.NAME, _lora.owners(self)
            dropout = _lora.key(self.lora.dropout, self.training, home(x).device)
            arguments = (*arguments, *_lora.operands(self, dtype), self.lora.scaling, *dropout)
        return run(
            *(name, arguments, "main_grad" if self.accumulate_into_main_grad else None, None, out, grad_input),
            owners=owners,
            caches=(self.cache_of("GroupedLinear", parameters, is_first_microbatch),),
        )

    def cache_of(self, name: str, parameters: tuple[Any, ...], first: bool | None) -> Any:
        """The cache of quantised weights for one forward pass, or None.

        Args:
            name: the layer's name in messages. first: `is_first_microbatch`.
        """
        if self.recipe is None or not self.recipe.quantized:
            return None
        return self.cache.bind(name, parameters, first)

    def weight_parameters(self) -> tuple[Any, ...]:
        """The Parameters of its weights, one, or one per group."""
        return self._held(self.weight_names)

    def _held(self, names: Sequence[str]) -> tuple[Any, ...]:
        held = self._parameters  # faster than attributes of the module; parametrised weights are not in it
        return tuple([held[name] if name in held else getattr(self, name) for name in names])

    def weights(self, parameters: Sequence[Any], dtype: torch.dtype) -> Any:
        """The weights as operands, in `dtype`."""
        if _primary.is_held(parameters):
            return _primary.operand(parameters, dtype)
        members = self._local(parameters, self.weight_names, "weight")
        mixed = len(members) > 1 and _autocast.dtype_of(members[0]) is not None  # may be, or else they are refused
        if members[0].dtype != dtype or (mixed and any(each.dtype != dtype for each in members)):
            members = [each.to(dtype) for each in members]
        return members[0] if self.weight_names[0] == "weight" else members

    def biases(self, x: Any = None) -> Members | None:
        """The biases as operands beside rows `x`: in their own dtype, or that of autocast."""
        if not self.bias_names:
            return None
        members = self._local(self._held(self.bias_names), self.bias_names, "bias")
        members = _autocast.cast(members, _autocast.dtype_of(x))
        return members[0] if self.bias_names[0] == "bias" else members

    def _local(self, members: Sequence[Any], names: Sequence[str], kind: str) -> list[Any]:
        if not is_distributed(*members):
            return list(members)
        return [_local_experts(each, name, name == kind) for each, name in zip(members, names, strict=True)]

    # ---- the adapter -------------------------------------------------------------------------------------------------

    def local_factors(self) -> list[Tensor]:
        """A and B; of expert-sharded parameters this rank's part."""
        return self._local(self._held(_lora.FACTORS), _lora.FACTORS, "")

    def trained_parameters(self) -> tuple[Any, ...]:
        """The Parameters whose gradients the options deliver: the weights, or the factors of the adapter."""
        return self._held(_lora.FACTORS if self.lora.rank else self.weight_names)

    def merge(self) -> None:
        """Adds the adapter to the weights, rounded once to their dtype, and removes it.

        Quantised weights become plain ones of their nominal dtype. The weights stay frozen.

        Raises:
            ValueError: the layer has no adapter, gradients of it are pending, a weight is parametrised, or FSDP2 has
            gathered the Parameters.
        """
        self.check_merge()
        _lora.merge(self)
        self.mark_weights()

    def check_merge(self) -> None:
        """Raises what `merge` raises, and changes nothing."""
        if not self.lora.rank:
            raise ValueError("`merge` of GroupedLinear: no adapter, expected one; make the layer with `lora_rank`.")
        if pending := len(self.queue):
            raise ValueError(
                f"`merge` of GroupedLinear: delayed gradients of {pending} passes are pending, expected none; call "
                "`backward_dw(all=True)` first."
            )
        if computed := [name for name in (*self.weight_names, *_lora.FACTORS) if name not in self._parameters]:
            raise ValueError(
                f"`merge` of GroupedLinear: `{computed[0]}` is computed by a parametrisation, expected a Parameter "
                "that can be written; remove the parametrisation first."
            )
        self.check_kept("`merge` of GroupedLinear")

    def check_kept(self, what: str) -> None:
        """Raises ValueError, for `what`, if the Parameters are those that FSDP2 has gathered for a pass.

        What is written to them is lost when they are sharded again.
        """
        if self._was_sharded and not is_distributed(*self.weight_parameters(), *self._held(_lora.FACTORS)):
            raise ValueError(
                f"{what}: Parameters that FSDP2 has gathered for a pass, expected ones that keep what is written; "
                "gather a full state dict, load it into a layer without `fully_shard`, and use that layer."
            )

    def plain_members(self) -> list[Tensor]:
        """The values of the weights, one tensor per Parameter; quantised ones as float32, which holds them exactly."""
        parameters = self.weight_parameters()
        if _primary.is_held(parameters):
            return [each.dequantize(torch.float32) for each in parameters]
        return self._local(parameters, self.weight_names, "weight")

    def take_plain(self, members: Sequence[Tensor]) -> None:
        """Replaces the values of the weights; quantised weights are replaced by plain ones."""
        parameters = self.weight_parameters()
        if not _primary.is_held(parameters):
            for own, value in zip(self._local(parameters, self.weight_names, "weight"), members, strict=True):
                own.copy_(value)
            return
        self.quantized_weights = False
        if self.recipe is not None and self.recipe.forward[0].plain:  # it was for these weights alone
            self.recipe = None
        for name, own, value in zip(self.weight_names, parameters, members, strict=True):
            setattr(self, name, Parameter(value.to(own.dtype), requires_grad=False))

    def owner(self, parameters: tuple[Any, ...], names: tuple[str, ...], path: str = "") -> Owner | None:
        """The owner of the weight gradients, unless they simply go to autograd.

        Args:
            names: the names of the parameters. path: the path of this layer in the layer that runs it, with a dot;
                messages use both.
        """
        if not self.accumulate_into_main_grad and not self.delay_wgrad_compute:
            return None
        if self.delay_wgrad_compute and not all(each.is_leaf for each in parameters):
            raise ValueError(
                "`delay_wgrad_compute` of GroupedLinear: True beside a weight that is computed from others, as by a "
                "parametrisation, whose gradient must be there in backward, expected Parameters; leave one of them out."
            )
        return Owner(parameters, self.queue if self.delay_wgrad_compute else None, names, path)

    # ---- state for captured graphs and quantised weights -------------------------------------------------------------

    def note_addresses(self, weights: Any) -> None:
        """Lets graphs that are captured from now on follow `refresh_weight_table`; for lists of weights on a GPU.

        Casts of the weights are not registered: a graph makes its own casts, at fixed addresses.
        """
        if not isinstance(weights, (list, tuple)) or is_compiling():  # packed weights, also quantised, need no table
            return
        device = weights[0].device
        if device.type != "cuda" or weights[0].dim() == 3:
            return
        if weights[0] is not self._held(self.weight_names[:1])[0]:
            return
        if not torch.cuda.is_current_stream_capturing():
            self._table.point_to(weights, device.index)

    def refresh_weight_table(self) -> None:
        """Makes captured graphs read the weights at their current addresses; call it before a replay."""
        self.note_addresses(self.weight_parameters())

    def set_weight_update(self, flag: bool) -> None:
        """Sets whether passes with `is_first_microbatch=None`, especially captured ones, quantise the weights again.

        After the first call these passes always launch the quantiser of the weights, into the cache, and it reads the
        flag on the device: one graph serves all microbatches. Whether reused weights are outdated is not checked.
        Plain recipes quantise no weights, so the call has no effect.

        Raises:
            TypeError: `flag` is not a bool. RuntimeError: a graph is being captured.
        """
        flag = as_flag("flag", flag, "set_weight_update")
        if self.recipe is not None and self.recipe.quantized:
            self.cache.set_update(flag, self._held(self.weight_names[:1])[0].device)

    # ---- delayed weight gradients ------------------------------------------------------------------------------------

    def backward_dw(self, all: bool = False) -> None:
        """Computes the oldest delayed weight gradients (`all`: all, oldest first), adds them, and calls the hooks.

        It runs on the current stream, which waits for the operands. If none is pending, nothing happens.
        """
        main_grad.backward_dw([self], every=all)

    def pending_wgrads(self) -> int:
        """The number of backward passes whose delayed weight gradients are pending."""
        return len(self.queue)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Adds a function that is called, without arguments, after each write of delayed weight gradients.

        Raises:
            TypeError: `hook` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"`hook` of GroupedLinear: {type(hook).__name__}, expected a function; pass one.")
        self.queue.hooks.append(hook)

    def fire_wgrad_hooks(self) -> None:
        """Calls the hooks; needed after the replay of a graph, which does not call them."""
        self.queue.fire()

    def follow_state(self, state: ScalingState[Tensor] | None, product: int = 0) -> None:
        """Scales quantised weights by a state of delayed scaling: its own, or that of the layer that contains it."""
        _primary.follow(self.weight_parameters(), state, product)

    def mark_weights(self) -> None:
        """Tells data-parallel wrappers that `backward_dw` calls the hooks of the weights (DLY-7)."""
        if self.delay_wgrad_compute:
            for parameter in self.trained_parameters():
                parameter.skip_backward_post_hook = True

    # ---- moves, copies and checkpoints -------------------------------------------------------------------------------

    _was_sharded = False
    """Whether a weight or a factor of the adapter has been a DTensor."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("weight_names", ()) and (cache := self.__dict__.get("cache")) is not None:
            cache.exchanges += 1
        if isinstance(value, Tensor) and is_distributed(value):
            self.__dict__["_was_sharded"] = True
        super().__setattr__(name, value)

    # NOTE: torch makes new Parameters in these four methods, and their attributes are lost.
    def _apply(self, fn: Any, recurse: bool = True) -> GroupedLinear:
        _primary.applied(self, fn, lambda: super(GroupedLinear, self)._apply(fn, recurse))
        self.follow_state(self.scaling_state)
        self.mark_weights()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle()

    def _settle(self) -> None:
        _primary.gathered(self.weight_parameters())
        self.follow_state(self.scaling_state)
        self.mark_weights()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _primary.saved(self, destination, prefix)
        self.spread_state(self.weight_parameters()[0], destination, prefix)

    def adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Converts the layer's weights and biases in a state dict to its own form, in place.

        Raises:
            ValueError: they are incomplete, there in two layouts, or do not fit.
        """
        shapes = (("weight", self.weight_names, (self.out_features, self.in_features)),)
        shapes += (("bias", self.bias_names, (self.out_features,)),)
        _primary.loaded(self, state_dict, prefix)
        for kind, names, shape in shapes:
            if names:
                adapt(state_dict, prefix, kind, self.num_groups, shape, grouped=names[0] == kind)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self.own_state(self.weight_parameters()[0], state_dict, prefix)
        self.adapt_state(state_dict, prefix)
        if assigns := local_metadata.get("assign_to_params_buffers", False):
            self.place_state(state_dict, prefix)
        self.take_state(state_dict, prefix)
        self.load_state(state_dict, prefix)
        if assigns:
            self.follow_state(self.scaling_state)
            _primary.quantised(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        self._settle()

    def extra_repr(self) -> str:
        """Sizes, and options that differ from the defaults."""
        text = f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={bool(self.bias_names)}"
        for name in ("scale_bias", "accumulate_into_main_grad", "delay_wgrad_compute", "quantized_weights"):
            text += f", {name}=True" if getattr(self, name) else ""
        text += f", lora_rank={self.lora.rank}" if self.lora.rank else ""
        return text + (f", recipe={self.recipe.name}" if self.recipe else "")


def check_layers(module: Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Refuses a state dict that a grouped layer inside of `module` would refuse, before any layer is loaded.

    It has no effect if a module has hooks that may still change the entries.

    Raises:
        ValueError: as `GroupedLinear.adapt_state`.
    """
    if hooked(module):
        return
    shapes = {
        key: torch.empty(each.shape, dtype=each.dtype, device="meta") if isinstance(each, Tensor) else each
        for key, each in state_dict.items()
        if key.startswith(prefix)
    }
    for name, each in module.named_modules():
        if isinstance(each, GroupedLinear):
            each.adapt_state(shapes, f"{prefix}{name}.")


@torch.compiler.disable(reason="quantised Parameters stay outside of graphs")
def _uncompiled(
    layer: GroupedLinear,
    x: Any,
    group_sizes: Any,
    row_scale: Tensor | None,
    first: bool | None,
    out: Tensor | None,
    grad_input: Tensor | None,
) -> Tensor:
    return GroupedLinear.forward(
        layer, x, group_sizes, row_scale, is_first_microbatch=first, out=out, grad_input=grad_input
    )


def _local_experts(parameter: Any, name: str, packed: bool) -> Tensor:
    from torch_bridge import _distributed  # imports torch.distributed.tensor, which is slow

    return _distributed.local_experts(parameter, name, packed)
