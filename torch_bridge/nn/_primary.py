"""Layers with quantised weights: their Parameters, how these move between devices, and their checkpoints.

The members of one layer share one `QTensor` [G, N, K], which products read; listed Parameters are views of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from grouped_core.formats import QTensor, as_flag, check_flags
from grouped_core.recipes import Recipe
from grouped_core.scaling import ScalingState
from torch_bridge import quantized_weight
from torch_bridge._scaling import WEIGHT, row
from torch_bridge._tensors import StraightThrough, dtype_name
from torch_bridge.nn._checks import check_recipe
from torch_bridge.nn._state import adapt
from torch_bridge.params import preserve_high_precision_init
from torch_bridge.quantized_weight import PARTS, QuantizedWeight, mapped, named_parts, quantized_members


class Options(NamedTuple):
    """How a layer holds its weights: whether quantised, by which recipe, and whether it keeps initial values."""

    quantized: bool = False
    recipe: Recipe | None = None
    preserve: bool = False


_PLAIN = Options()
_defaults: ContextVar[Options] = ContextVar("quantized_model_init", default=_PLAIN)


@contextmanager
def quantized_model_init(
    enabled: bool = True, *, recipe: Recipe | None = None, preserve_high_precision_init: bool = False
) -> Iterator[None]:
    """Layers that are made inside hold quantised weights, unless their own keywords say otherwise.

    Args:
        enabled: False makes plain weights again, inside another such context.
        recipe, preserve_high_precision_init: defaults for layers that do not set them.

    Raises:
        TypeError: `recipe` is not a recipe, or is bound; a flag is not a bool.
    """
    check_recipe("quantized_model_init", recipe)
    flags = {"enabled": enabled, "preserve_high_precision_init": preserve_high_precision_init}
    check_flags("quantized_model_init", **flags)
    token = _defaults.set(Options(enabled, recipe, preserve_high_precision_init))
    try:
        yield
    finally:
        _defaults.reset(token)


def options(quantized: bool | None, recipe: Recipe | None, preserve: bool | None) -> Options:
    """Returns the keywords of a layer, completed with the current defaults.

    Raises:
        TypeError: a flag is not a bool. ValueError: quantised weights with a recipe that does not quantise weights.
    """
    given = _defaults.get()
    recipe = recipe or given.recipe
    of = "GroupedLinear"
    found = Options(
        given.quantized if quantized is None else as_flag("quantized_weights", quantized, of),
        recipe,
        given.preserve if preserve is None else as_flag("preserve_high_precision_init", preserve, of),
    )
    if found.quantized and (recipe is None or recipe.forward[1].plain or recipe.dgrad[1].plain):
        formats = "None" if recipe is None else f"{recipe.forward[1].name} and {recipe.dgrad[1].name} ({recipe.name})"
        raise ValueError(
            f"`recipe` of GroupedLinear: weights in {formats}, expected a recipe that quantises them in forward and "
            "dgrad beside `quantized_weights`; choose one, e.g. FP8Block."
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


def weights(
    shape: tuple[int, int, int],
    single: bool,
    recipe: Recipe,
    dtype: torch.dtype,
    device: Any,
    *,
    one_form: bool = False,
) -> list[Any]:
    """Makes the Parameters of a layer's weight [G, N, K], filled with zeros: one for all groups, or one per group.

    Args:
        one_form: whether there is only the form of forward, which dgrad then reads too.
    """
    formats = (recipe.forward[1], None if one_form else recipe.dgrad[1])
    store = quantized_weight.empty(shape, formats, dtype_name(dtype), device)
    if single:
        return [Parameter(QuantizedWeight(store, packed=True))]
    made = [Parameter(QuantizedWeight(member, packed=False)) for member in quantized_members(store)]
    _house(made, store)
    return made


def _house(listed: Sequence[Any], store: QTensor[Tensor]) -> None:
    for at, (weight, member) in enumerate(zip(listed, quantized_members(store), strict=True)):
        weight.q, weight.home = member, (store, at)


def is_held(parameters: Sequence[Any]) -> bool:
    """Whether a layer's weights are quantised."""
    return isinstance(parameters[0], QuantizedWeight)


def refuse_export() -> None:
    """Refuses quantised weights in `torch.export`, which has no code outside of its graph to run them."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "`quantized_weights` under torch.export: quantised Parameters, expected plain ones, which the recipe "
            "quantises in the graph; export a layer without `quantized_weights`."
        )


def operand(parameters: Sequence[Any], dtype: torch.dtype) -> StraightThrough:
    """Returns the weights of all members for a product that computes in `dtype`; gradients go to the Parameters.

    Raises:
        ValueError: a member is not the Parameter that the layer made, so that the layer's product would not read it.
    """
    store, _ = parameters[0].home
    if len(parameters) > 1:
        _check_members(parameters, store)
    whole: Any = parameters[0] if parameters[0].dim() == 3 else list(parameters)
    return StraightThrough(whole, _nominal(store, dtype_name(dtype)))


def _check_members(parameters: Sequence[Any], store: QTensor[Tensor]) -> None:
    """Refuses listed weights that are not, in their order, the members of the store that a product reads."""
    whole = store.shape[0] == len(parameters)
    for at, each in enumerate(parameters):  # in each pass, so nothing is asked twice
        home = getattr(each, "home", None)
        if home is None or home[0] is not store or home[1] != at or not whole:
            own = isinstance(each, QuantizedWeight)
            came = "a quantised Parameter that the layer has not made for it" if own else "a plain Parameter"
            raise ValueError(
                f"`weight{at}` of GroupedLinear: {came}, expected the quantised one of the layer, whose groups share "
                "memory; write values in place (`copy_`), load a state dict, or replace all weights by plain ones."
            )


def _nominal(q: QTensor[Tensor], dtype: str) -> QTensor[Tensor]:
    if q.dtype == dtype:
        return q
    return dataclasses.replace(q, dtype=dtype, other=None if q.other is None else _nominal(q.other, dtype))


def initialise(weight: QuantizedWeight, preserve: bool, draw: Callable[[Tensor], Any]) -> None:
    """Draws a new value, and also keeps it on the host if it is to be preserved; `draw` fills a tensor in place."""
    value = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    draw(value)
    weight.store(value)
    weight.clear_high_precision_init_val()
    if preserve and not value.is_meta:
        preserve_high_precision_init(weight, value)


def follow(parameters: Sequence[Any], state: ScalingState[Tensor] | None, product: int = 0) -> None:
    """Gives weights with delayed scaling their scales and the place of their current amax in the state."""
    if state is None or not is_held(parameters) or not parameters[0].q.format.delayed:
        return
    at = row(product, WEIGHT)
    for weight in parameters:
        weight.scaling = (state.scale[at], state.history[at, 0])


# ---------------------------------------------------------------------------------------------------------------------
# Moves and copies of a module


def applied(layer: Any, fn: Callable[[Tensor], Tensor], apply: Callable[[], Any]) -> None:
    """Runs `apply`, `Module._apply` of the layer with `fn`, such that quantised weights move but are not converted.

    A cast changes only their nominal dtype. If `fn` changes neither device nor dtype, only what it does in place takes
    effect, such as `share_memory_`.

    Raises:
        TypeError: a cast to a dtype that they cannot represent; the layer stays as it was.
    """
    held = {name: layer._parameters[name] for name in layer.weight_names if layer._parameters.get(name) is not None}
    if not held or not is_held(list(held.values())):
        apply()
        return
    first = next(iter(held.values()))
    probe = fn(torch.empty(0, dtype=first.dtype, device=first.device))
    if probe.dtype not in quantized_weight.SOURCES:
        raise TypeError(
            f"quantised weights as {probe.dtype}: expected one of {', '.join(map(str, quantized_weight.SOURCES))}, "
            "which they can represent; cast the layer to one of them."
        )
    layer._parameters.update(dict.fromkeys(held))
    try:
        apply()
    finally:
        layer._parameters.update(held)
    if (probe.dtype, probe.device) == (first.dtype, first.device):
        with torch.no_grad():
            for weight in held.values():
                fn(weight)
                if weight.grad is not None:
                    weight.grad = fn(weight.grad)
        return

    def move(part: Tensor) -> Tensor:
        return torch.zeros_like(part, device=probe.device) if part.is_meta else part.to(probe.device)

    store = _nominal(mapped(first.home[0], move), dtype_name(probe.dtype))
    members = [store] if first.dim() == 3 else quantized_members(store)
    for at, (old, q) in enumerate(zip(held.values(), members, strict=True)):
        new: Any = Parameter(QuantizedWeight(q, packed=old.dim() == 3), old.requires_grad)
        new.__dict__.update({**old.__dict__, "q": q, "home": (store, at)})
        new.grad = None if old.grad is None else fn(old.grad)
        torch.utils.swap_tensors(old, new)


def gathered(parameters: Sequence[Any]) -> None:
    """Makes listed weights views of one store again after a copy has separated them.

    Weights on two devices are skipped, because a checkpoint in several files loads only some of them at a time.
    """
    if not is_held(parameters) or len({each.device for each in parameters}) > 1:
        return
    if parameters[0].dim() == 3:
        parameters[0].home = (parameters[0].q, 0)
        return
    store, _ = parameters[0].home
    if store.shape[0] != len(parameters) or any(map(_strayed, parameters, quantized_members(store))):
        parts = [named_parts(each.q) for each in parameters]
        store = _assembled(parameters[0].q, {name: torch.cat([each[name] for each in parts]) for name in parts[0]})
    _house(parameters, store)


def _strayed(weight: QuantizedWeight, member: QTensor[Tensor]) -> bool:
    return any(
        a.data_ptr() != b.data_ptr()
        for a, b in zip(named_parts(weight.q).values(), named_parts(member).values(), strict=True)
    )


def _assembled(like: QTensor[Tensor], parts: dict[str, Tensor], prefix: str = "") -> QTensor[Tensor]:
    """Makes a `QTensor` with the forms of `like` from the tensors `parts`, whose number of groups may differ."""
    own: dict[str, Any] = {
        name.removeprefix(prefix): part for name, part in parts.items() if name.rpartition(".")[0] == prefix[:-1]
    }
    groups = own["values"].shape[0]
    other = None if like.other is None else _assembled(like.other, parts, "other.")
    return dataclasses.replace(like, **own, other=other, shape=(groups, *like.shape[1:]))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: `{weight}.values`, `{weight}.scales`, `{weight}.group_scales`, and `{weight}.other.values` ...


def saved(layer: Any, destination: dict[str, Any], prefix: str) -> None:
    """Replaces quantised weights of the layer in a state dict by their plain tensors, which share memory."""
    for name in layer.weight_names:
        weight = destination.get(prefix + name)
        if isinstance(weight, QuantizedWeight):
            del destination[prefix + name]
            for part, tensor in named_parts(weight.q).items():
                whole = tensor.detach()
                destination[f"{prefix}{name}.{part}"] = whole if weight.dim() == 3 else whole[0]


def loaded(layer: Any, state: dict[str, Any], prefix: str) -> None:
    """Reassembles quantised weights of a checkpoint, grouped or indexed, in the layer's form, in place.

    Raises:
        ValueError: parts are missing, or have another number of groups, or a weight is there in two forms; and the
            errors of `adapt`.
    """
    parameters = layer.weight_parameters()
    if not is_held(parameters):
        return
    grouped = layer.weight_names[0] == "weight"
    like = named_parts(parameters[0].q)
    _check_one_form(layer.num_groups, state, prefix, list(like))
    _match_forms(layer.num_groups, state, prefix, parameters[0].q)
    for part, tensor in like.items():
        adapt(*(state, prefix, "weight", layer.num_groups, tuple(tensor.shape[1:])), grouped=grouped, suffix=f".{part}")
    for name, weight in zip(layer.weight_names, parameters, strict=True):
        found = {part: state.pop(f"{prefix}{name}.{part}") for part in like if f"{prefix}{name}.{part}" in state}
        if not found:
            continue
        if missing := [part for part in like if part not in found]:
            raise ValueError(
                f"checkpoint: `{prefix}{name}` is quantised without {', '.join(missing)}, expected "
                f"{', '.join(like)}; load a checkpoint of weights in {weight.q.format.name}, or plain ones."
            )
        for part, entry in found.items():
            if not isinstance(entry, Tensor):
                raise ValueError(
                    f"checkpoint: `{prefix}{name}.{part}`: a {type(entry).__name__}, expected a tensor; load a "
                    "complete checkpoint."
                )
        whole = {part: tensor if grouped else tensor[None] for part, tensor in found.items()}
        for part, tensor in whole.items():
            if (tuple(tensor.shape), tensor.dtype) != (tuple(named_parts(weight.q)[part].shape), like[part].dtype):
                raise ValueError(
                    f"checkpoint: `{prefix}{name}.{part}` is {tensor.dtype}{list(tensor.shape)}, expected "
                    f"{like[part].dtype}{list(named_parts(weight.q)[part].shape)} of {weight.q.format.name}; load a "
                    "checkpoint of weights in that format, or plain ones."
                )
        made = QuantizedWeight(_assembled(weight.q, whole), packed=grouped)
        made.scaling = weight.scaling  # used further if it replaces the weight
        state[prefix + name] = made


def _match_forms(groups: int, state: dict[str, Any], prefix: str, like: QTensor[Tensor]) -> None:
    """Gives the quantised weights of a checkpoint as many forms as those of a layer have, in place.

    A second form is left out where the layer has none. Where the checkpoint has none, it is made if each group has one
    scale, because the two forms then have the same codes.
    """
    parts = [part for part in PARTS if getattr(like, part) is not None]
    for name in ("weight", *(f"weight{group}" for group in range(groups))):
        first = f"{prefix}{name}."
        own = {part: state[first + part] for part in parts if isinstance(state.get(first + part), Tensor)}
        second = [first + "other." + part for part in PARTS if first + "other." + part in state]
        if len(own) < len(parts) or own["values"].dim() < 2:
            continue  # what is missing or misshapen is refused later
        if like.other is None:
            for key in second:
                del state[key]
        elif not second and like.format.shares_codes(like.other.format):
            for part, tensor in own.items():
                made = tensor.transpose(-1, -2).contiguous() if part == "values" else tensor.clone()
                state[f"{first}other.{part}"] = made


def _check_one_form(groups: int, state: Mapping[str, Any], prefix: str, parts: Sequence[str]) -> None:
    """Refuses entries of one weight both plain and quantised. Of listed weights each may be in another form.

    Raises:
        ValueError: there are such entries.
    """
    names = ["weight", *(f"weight{group}" for group in range(groups))]
    plain = [name for name in names if _is_plain(state.get(prefix + name))]
    keys = ((name, f"{prefix}{name}.{part}") for name in names for part in reversed(parts))
    coded = {name: key for name, key in keys if key in state}  # the first part of each
    for name in plain:
        both = [key for other, key in coded.items() if "weight" in (name, other) or name == other]
        if both:
            raise ValueError(
                f"checkpoint: both `{prefix}{name}` and `{both[0]}`, the plain and the quantised form of one weight, "
                "expected one of them; remove the other."
            )


def quantised(layer: Any, state: dict[str, Any], prefix: str) -> None:
    """Quantises plain weights of a checkpoint that will replace quantised ones, in place.

    They stay on the device of the checkpoint, and have the nominal dtype of the layer like any value written to it.
    """
    parameters = layer.weight_parameters()
    if not is_held(parameters):
        return
    like = parameters[0]
    entries: dict[str, Any] = {name: state.get(prefix + name) for name in layer.weight_names}
    plain = {name: each for name, each in entries.items() if _is_plain(each) and each.shape == like.shape}
    if not plain:
        return
    formats = (like.q.format, like.q.other and like.q.other.format)
    device = next(iter(plain.values())).device
    store = quantized_weight.empty((layer.num_groups, *like.q.shape[1:]), formats, like.q.dtype, device)
    packed = like.dim() == 3
    members = [store] if packed else quantized_members(store)
    for at, (name, weight, member) in enumerate(zip(layer.weight_names, parameters, members, strict=True)):
        if name in plain:
            made = QuantizedWeight(member, packed=packed)
            made.home, made.scaling = (store, at), weight.scaling
            made.store(plain[name])
            state[prefix + name] = made


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, Tensor) and not isinstance(entry, QuantizedWeight)
