"""Layers in sequence. Consecutive linear, activation and linear layers run as one experts' MLP.

Letters: M rows, H hidden size of the model, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from grouped_core.activations import Activation
from grouped_core.sizes import unwrap
from torch_bridge import main_grad
from torch_bridge._compiling import is_compiling
from torch_bridge.activation import scaled_activation_rows
from torch_bridge.nn._checks import check_microbatch
from torch_bridge.nn._routing import addressed
from torch_bridge.nn._state import OrderedColumns
from torch_bridge.nn.activation import ScaledActivation
from torch_bridge.nn.linear import GroupedLinear, check_layers
from torch_bridge.nn.mlp import GroupedMLP, fused_mlp
from torch_bridge.nn.moe import MoE

_MODES = ("auto", "always", "never")
_BUFFERS = ("out", "grad_input")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Activated(NamedTuple):
    """A grouped linear layer, and the activation behind it, which reads its columns.

    Attributes:
        name, reader: the names of the two modules.
    """

    name: str
    layer: GroupedLinear
    reader: str
    activation: Activation


class _Window(NamedTuple):
    """Three layers that form an MLP, and the index of the first."""

    start: int
    fc1: GroupedLinear
    act: ScaledActivation
    fc2: GroupedLinear

    def why_unsupported(self) -> str | None:
        """Why they cannot run as one operation, judged by their construction, without reading weights."""
        fc1, act, fc2 = self.fc1, self.act, self.fc2
        at = f"modules {self.start} to {self.start + 2}"
        if fc1.num_groups != fc2.num_groups:
            return f"{at}: {fc1.num_groups} and {fc2.num_groups} groups, expected the same number in both layers"
        wide = act.activation.fc1_width(fc2.in_features)
        if fc1.out_features != wide:
            return (
                f"{at}: the first layer gives {fc1.out_features} columns, expected {wide} for {act.activation.kind} in "
                f"front of a layer that reads {fc2.in_features}"
            )
        if fc1.in_features != fc2.out_features:
            return f"{at}: {fc1.in_features} columns in and {fc2.out_features} out, expected the same number"
        if fc1.scale_bias:
            return f"{at}: the first layer has `scale_bias`, expected a bias that is not weighted"
        if fc2.bias_names and not fc2.scale_bias:
            return (
                f"{at}: the bias of the second layer is not weighted by the probabilities, expected `scale_bias=True`"
            )
        for name in ("recipe", "accumulate_into_main_grad"):
            if getattr(fc1, name) != getattr(fc2, name):
                return f"{at}: `{name}` differs between the two layers, expected the same"
        if fc1.lora.rank and fc2.lora.rank and fc1.lora[1:] != fc2.lora[1:]:
            return f"{at}: scale or dropout of the adapters differ between the two layers, expected the same"
        weights = [each for layer in (fc1, fc2) for each in layer.weight_parameters()]
        if (fc1.lora.rank or fc2.lora.rank) and any(each.requires_grad for each in weights):
            return f"{at}: a weight requires a gradient beside an adapter, expected frozen weights in both layers"
        if fc1.accumulate_into_main_grad or fc1.delay_wgrad_compute or fc2.delay_wgrad_compute:
            held = [each for layer in (fc1, fc2) for each in layer.weight_parameters() if each.requires_grad]
            if len(set(held)) < len(held):
                return f"{at}: both layers hold one weight, expected two different weights beside accumulators"
        first, second = (getattr(layer, layer.weight_names[0]) for layer in (fc1, fc2))
        if first.dtype != second.dtype:
            return f"{at}: weights of {first.dtype} and {second.dtype}, expected one dtype"
        for layer, kind in ((fc1, GroupedLinear), (act, ScaledActivation), (fc2, GroupedLinear)):
            if _has_own_forward(layer, kind):
                return f"{at}: a {type(layer).__name__} has a `forward` of its own, which one operation would not call"
        hooked = [type(each).__name__ for each in (fc1, act, fc2) if any(getattr(each, hooks) for hooks in _HOOKS)]
        if hooked:
            return f"{at}: a {hooked[0]} has hooks, which one operation would not call"
        return None


class _Plan(NamedTuple):
    """The layers, the number of extra inputs of each, and the windows that could run as one operation.

    Attributes:
        structure: the result of `Sequential._structure` for which the plan is valid.
    """

    structure: tuple[Any, ...]
    layers: tuple[Module, ...]
    takes: list[int]
    windows: list[_Window]


class Sequential(OrderedColumns):
    """Modules applied in sequence; those of this package take their inputs besides rows from `extra`, in module order.

    A `GroupedLinear` takes group_sizes, and with `scale_bias` row_scale; a `ScaledActivation` takes probs; a
    `GroupedMLP` takes group_sizes and probs; other modules take nothing. Consecutive linear, activation and linear
    layers run as one operation, as in `GroupedMLP`; they must then be given the same group_sizes and the same probs.

    Args:
        modules: the modules to apply. fuse: "auto" fuses where possible; "always" raises the reason if it is not
            possible; "never" runs each module by itself.

    Raises:
        ValueError: `fuse` has another value. TypeError: a module is not a Module. NotImplementedError: "always", and
            the reason why it is not possible.
    """

    def __init__(self, *modules: Module, fuse: str = "auto") -> None:
        super().__init__()
        if fuse not in _MODES:
            raise ValueError(
                f"`fuse` of Sequential: {fuse!r}, expected one of {', '.join(_MODES)}; choose one of them."
            )
        for at, module in enumerate(modules):
            if not isinstance(module, Module):
                raise TypeError(
                    f"module {at} of Sequential: {type(module).__name__}, expected a torch.nn.Module; wrap it in one."
                )
            self.add_module(str(at), module)
        self.fuse = fuse
        self._plan: _Plan | None = None
        self._planned()
        if fuse == "always":
            self._refuse()

    def _refuse(self) -> None:
        reason = self.why_unsupported()
        if reason is not None:
            raise NotImplementedError(
                f"`fuse` of Sequential: 'always', expected modules that run as one operation, but {reason}; change "
                "that, or choose fuse='auto'."
            )

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> Module:
        return self._layers()[index]

    def _layers(self) -> list[Module]:
        return [each for each in self._modules.values() if each is not None]

    def activated(self) -> list[Activated]:
        """Its grouped linear layers that an activation follows."""
        named = [(name, each) for name, each in self._modules.items() if each is not None]
        return [
            Activated(name, layer, reader, act.activation)
            for (name, layer), (reader, act) in pairwise(named)
            if isinstance(layer, GroupedLinear) and isinstance(act, ScaledActivation)
        ]

    def _structure(self) -> tuple[Any, ...]:
        """Returns its modules; a nested Sequential is paired with its own structure."""
        return tuple([(each, each._structure()) if isinstance(each, Sequential) else each for each in self._layers()])

    def _planned(self) -> _Plan:
        """Returns the plan for its current layers."""
        plan, structure = self._plan, self._structure()
        if plan is None or plan.structure != structure:
            layers = self._layers()
            plan = _Plan(structure, tuple(layers), [_extras(layer) for layer in layers], self._windows())
            if not is_compiling():  # graphs inside checkpointing must not change modules
                self._plan = plan
        return plan

    def _windows(self) -> list[_Window]:
        layers, found, at = self._layers(), [], 0
        while at + 2 < len(layers):
            fc1, act, fc2 = layers[at : at + 3]
            if isinstance(fc1, GroupedLinear) and isinstance(act, ScaledActivation) and isinstance(fc2, GroupedLinear):
                found.append(_Window(at, fc1, act, fc2))
                at += 3
            else:
                at += 1
        return found

    def why_unsupported(self) -> str | None:
        """None if all consecutive linear, activation, linear layers can be fused and some exist; else the reason."""
        windows = self._planned().windows
        if not windows:
            return "no GroupedLinear, ScaledActivation, GroupedLinear follow each other"
        for window in windows:
            reason = window.why_unsupported()
            if reason is not None:
                return reason
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        check_layers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Any,
        *extra: Any,
        op_kwargs: Mapping[Module | int, Mapping[str, Any]] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """The result of the last module.

        Args:
            x: input of the first module, [M, H] for modules of this package.
            extra: in module order: group_sizes, probs, group_sizes (and probs again for `scale_bias`), ...
            op_kwargs: keywords `out` and `grad_input` (the caller's buffers) of a module, by module or index. In an MLP
                that runs as one operation the first layer takes only `grad_input`, the second only `out`.
            is_first_microbatch: for the caches of quantised weights, passed to every module that has one.

        Raises:
            TypeError: a wrong number of extra inputs, unknown keywords. ValueError: `op_kwargs` addresses a foreign
            module, one module twice, or a buffer that does not exist; layers of one MLP are given different tensors.
            Also the errors of the modules.
        """
        if is_first_microbatch is not None:
            check_microbatch(is_first_microbatch)
        if self.fuse == "always":
            self._refuse()
        _, layers, takes, found = self._planned()
        if sum(takes) != len(extra):
            names = ", ".join(f"{type(layer).__name__} takes {n}" for layer, n in zip(layers, takes, strict=True) if n)
            raise TypeError(
                f"`extra` of Sequential: {len(extra)} inputs, expected {sum(takes)} ({names}); "
                "pass them in the order of modules."
            )
        rest = iter(extra)
        extras = [[next(rest) for _ in range(count)] for count in takes]
        given = addressed(layers, [_keywords(layer) for layer in layers], op_kwargs) if op_kwargs else {}
        windows = {window.start: window for window in found if window.why_unsupported() is None}
        for window in windows.values():  # also with fuse="never", which has the same meaning
            _check_same(window, extras)
        at = 0
        while at < len(layers):
            window = windows.get(at)
            if window is not None and self.fuse != "never":
                x = _run_window(window, x, extras[at], extras[at + 1], given, is_first_microbatch)
                at += 3
                continue
            keywords = dict(given.get(at, {}))
            if is_first_microbatch is not None and isinstance(layers[at], _CACHING):
                keywords["is_first_microbatch"] = is_first_microbatch
            x = _run_one(layers[at], x, extras[at], _sizes_before(layers, extras, at), keywords)
            at += 1
        return x

    # ---- delayed weight gradients ------------------------------------------------------------------------------------

    def _delaying(self) -> list[GroupedLinear]:
        """Its grouped linear layers, in the order of backward."""
        found: list[GroupedLinear] = []
        for layer in reversed(self._layers()):
            if isinstance(layer, GroupedMLP):
                found += [layer.linear_fc2, layer.linear_fc1]
            elif isinstance(layer, MoE):
                found += layer.grouped_layers()
            elif isinstance(layer, Sequential):
                found += layer._delaying()
            elif isinstance(layer, GroupedLinear):
                found.append(layer)
        return list(dict.fromkeys(found))

    def backward_dw(self, all: bool = False) -> None:
        """Runs the oldest delayed weight gradients (`all`: all) of each layer, last layer first, then their hooks."""
        main_grad.backward_dw(self._delaying(), every=all)

    def pending_wgrads(self) -> int:
        """The number of backward passes whose delayed weight gradients are pending."""
        return max((layer.pending_wgrads() for layer in self._delaying()), default=0)

    def fire_wgrad_hooks(self) -> None:
        """Calls the hooks of the layers, last layer first; needed after the replay of a graph, which does not."""
        for layer in self._delaying():
            layer.fire_wgrad_hooks()

    def refresh_weight_table(self) -> None:
        """Makes captured graphs read the weights at their current addresses."""
        for layer in self._delaying():
            layer.refresh_weight_table()

    def set_weight_update(self, flag: bool) -> None:
        """Does what `GroupedLinear.set_weight_update` does, for every layer."""
        for layer in self._delaying():
            layer.set_weight_update(flag)


_CACHING = (GroupedLinear, GroupedMLP, MoE, Sequential)
"""Modules of this package with caches of quantised weights."""


def _extras(layer: Module) -> int:
    """The number of inputs besides rows that a module takes."""
    if isinstance(layer, GroupedLinear):
        return 1 + layer.scale_bias
    if isinstance(layer, Sequential):
        return sum(_extras(each) for each in layer._layers())
    counts: dict[type[Module], int] = {ScaledActivation: 1, GroupedMLP: 2}
    return counts.get(_kind(layer), 0)


def _has_own_forward(layer: Module, kind: type[Module]) -> bool:
    """Whether a layer, or its class, has another `forward` than `kind`."""
    return type(layer).forward is not kind.forward or "forward" in layer.__dict__


def _kind(layer: Module) -> type[Module]:
    return next((kind for kind in (ScaledActivation, GroupedMLP) if isinstance(layer, kind)), Module)


def _keywords(layer: Module) -> tuple[str, ...] | None:
    """The keywords of `op_kwargs` that a module takes; None: it is not a module of this package."""
    if isinstance(layer, (GroupedLinear, GroupedMLP)):
        return _BUFFERS
    return () if isinstance(layer, (ScaledActivation, MoE, Sequential)) else None


def _check_same(window: _Window, extras: Sequence[Sequence[Any]]) -> None:
    """Checks that sizes and probabilities of one MLP are the same objects: comparing values would read the device."""
    first, second = extras[window.start], extras[window.start + 2]
    pairs = [("group_sizes", first[0], second[0])]
    if window.fc2.scale_bias:
        pairs.append(("probs", extras[window.start + 1][0], second[1]))
    for name, a, b in pairs:
        if not _same(a, b):
            raise ValueError(
                f"`extra` of Sequential: `{name}` of modules {window.start} and {window.start + 2} are different "
                "objects, expected the same tensor for all layers of an MLP; pass one tensor in each place."
            )
    if window.fc2.scale_bias and second[1] is None:
        raise ValueError(
            f"`extra` of Sequential: module {window.start + 2} has `scale_bias` and got None, expected probabilities "
            "[M]; pass them, or build the layer without `scale_bias`."
        )


def _same(a: Any, b: Any) -> bool:
    a, b = unwrap(a)[0], unwrap(b)[0]
    if isinstance(a, Sequence) and isinstance(b, Sequence):
        return list(a) == list(b)
    return a is b or (isinstance(a, int) and a == b)  # no sizes, which the layers refuse


def _run_window(
    window: _Window,
    x: Tensor,
    first: Sequence[Any],
    probs: Sequence[Any],
    given: Mapping[int, Mapping[str, Any]],
    first_microbatch: bool | None,
) -> Tensor:
    at1, at2 = window.start, window.start + 2
    for at, name in ((at1, "out"), (at2, "grad_input")):
        if given.get(at, {}).get(name) is not None:
            raise ValueError(
                f"`{name}` of module {at} in Sequential: given, but not materialised, because modules {at1} to {at2} "
                "run as one operation, expected None; leave it out, or choose fuse='never'."
            )
    return fused_mlp(
        window.fc1,
        window.fc2,
        window.act.as_given,
        "save_fc1",
        x,
        first[0],
        probs[0],
        given.get(at2, {}).get("out"),
        given.get(at1, {}).get("grad_input"),
        first_microbatch=first_microbatch,
    )


def _sizes_before(layers: Sequence[Module], extras: Sequence[Sequence[Any]], at: int) -> Tensor | None:
    """Group sizes of the rows that an activation gets from a linear layer, if kernels can read them directly."""
    if at == 0 or not isinstance(layers[at - 1], GroupedLinear):
        return None
    sizes, _ = unwrap(extras[at - 1][0])
    return sizes if isinstance(sizes, Tensor) and sizes.dtype == torch.int32 else None


def _run_one(layer: Module, x: Any, extras: Sequence[Any], sizes: Tensor | None, keywords: Mapping[str, Any]) -> Any:
    # Calls the function directly, so that rows past the groups are not read; hooks need the module itself.
    plain = not _has_own_forward(layer, ScaledActivation) and not any(getattr(layer, hooks) for hooks in _HOOKS)
    if plain and isinstance(layer, ScaledActivation) and sizes is not None and sizes.device == x.device:
        return scaled_activation_rows(x, extras[0], layer.as_given, sizes)
    return layer(x, *extras, **keywords)
