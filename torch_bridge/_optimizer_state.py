"""Converts states of optimisers to another layout; a tensor of a parameter's shape moves as the parameter (CKP-4)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from grouped_core.activations import Activation
from grouped_core.checkpoint_plan import Interleaves, Move, Plan, fixed_or, interleave_option, plan
from grouped_core.layout_steps import run_steps
from grouped_core.layouts import Layout, layout_option, unwrapped_paths
from grouped_core.safetensors_file import Facts
from torch_bridge._checkpoint_layers import of_linears, of_mlps
from torch_bridge._checks import is_distributed
from torch_bridge._layout_arrays import TORCH, name_of

Names = Module | Mapping[str, Tensor] | Sequence[str]
"""The parameters of an optimiser in its order: a module, parameters by name, or their names."""


def convert_optimizer(
    state: Mapping[str, Any],
    names: Names,
    target: Module | Mapping[str, Tensor],
    *,
    source_layout: str = "torch_bridge",
    target_layout: str = "torch_bridge",
    interleave: int | tuple[int | None, int | None] | None = None,
) -> dict[str, Any]:
    """Returns the state dict of an optimiser for the same parameters in another layout, such as one tensor per expert.

    Args:
        state: `optimizer.state_dict()`. names: the names of the optimiser's parameters in its order, one parameter
            group after another; or a module, whose `named_parameters()` have that order, all of them, or only those
            that require gradients.
        target: the parameters of the new optimiser by name, in its order; or their module, of which it has all, or
            those that require gradients, as the other optimiser.
        source_layout, target_layout: names of `grouped_core.layouts.LAYOUTS`.
        interleave: as in `convert`. Modules say how their columns alternate, on either side; plain mappings and names
            do not, so beside these it has to be given where columns alternate.

    Returns:
        A state dict for the new optimiser. Tensors of a parameter's shape (moments, master weights) move as the
        parameter; scalars such as `step` are copied where a parameter is divided.

    Raises:
        TypeError: an argument has another type. ValueError: scalars or groups of parameters that are merged differ, a
            part has no state, shapes do not fit, or `interleave` is not the order of a module's columns, or missing.
    """
    here, there = layout_option(source_layout, "source_layout"), layout_option(target_layout, "target_layout")
    _check_kinds(state, names, target)
    blocks, linears = _blocks(names, target, here, there, interleave)
    ids = [each for group in state["param_groups"] for each in group["params"]]
    trained = isinstance(names, Module) and len(ids) != len(list(names.parameters()))
    given = _named(names, trained)
    listed, own = list(given), _facts(given)
    if len(ids) != len(listed):
        raise ValueError(
            f"`names` of convert_optimizer: {len(listed)} names{' that require gradients' if trained else ''} for "
            f"{len(ids)} parameters, expected one each; pass those that the optimiser got, in its order."
        )
    recorded = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    if recorded != listed and sorted(recorded) == sorted(listed):
        first = next(at for at, name in enumerate(recorded) if name != listed[at])
        raise ValueError(
            f"`names` of convert_optimizer: `{listed[first]}` in place {first}, expected `{recorded[first]}` as "
            "the state records; pass the names of all groups, one group after another."
        )
    params = dict(_named(target, trained))
    by_name = dict(zip(listed, ids, strict=True))
    held: dict[str, dict[str, Any]] = {name: dict(state["state"].get(at, {})) for name, at in by_name.items()}
    new: dict[str, dict[str, Any]] = {name: {} for name in params}
    kinds = dict.fromkeys(kind for entries in held.values() for kind in entries)

    def planned(facts: Mapping[str, Facts]) -> Plan:
        first = next(iter(facts.values())).dtype
        wanted = {
            name: Facts(tuple(p.shape), facts[name].dtype if name in facts else first) for name, p in params.items()
        }
        return plan(facts, here, there, blocks, targets=wanted, linears=linears)

    # Parameters without state are known only if they were passed. Dtypes of states need not be those of parameters.
    whole = planned({name: Facts(each.shape, "float32") for name, each in own.items()}) if own else None
    moves: dict[tuple[str, ...], Move] = {move.targets: move for move in whole.moves} if whole else {}
    for kind in kinds:
        values = {name: entries[kind] for name, entries in held.items() if kind in entries}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.dim()}
        if not tensors:
            continue
        facts = {name: Facts(tuple(value.shape), name_of(value.dtype)) for name, value in tensors.items()}
        for name, each in facts.items():
            if name in own and each.shape != own[name].shape:
                raise ValueError(
                    f"`{kind}` of `{name}`: shape {each.shape}, expected {own[name].shape} = shape of the parameter; "
                    "pass `names` in the order of the optimiser, or make a new one if its states are factored."
                )
        made = whole or planned(facts)
        if unused := [name for name in made.unused if name in tensors]:
            raise ValueError(
                f"`{kind}` of `{unused[0]}`: no parameter of the new optimiser takes it, expected one; pass all "
                "of its parameters."
            )
        for move in made.moves:
            lacking = [name for name in move.sources if name not in tensors]
            if lacking == list(move.sources):
                continue
            if lacking:
                raise ValueError(
                    f"`{kind}` of `{lacking[0]}`: missing, expected one as of the {len(move.sources)} parameters that "
                    f"become `{move.targets[0]}`; train all experts of a layer, or none."
                )
            if move.steps and is_distributed(*(tensors[name] for name in move.sources)):
                raise ValueError(
                    f"`{kind}` of `{move.sources[0]}`: a DTensor that would become `{move.targets[0]}`, expected plain "
                    "tensors where parameters change their form; convert before they are sharded, or gather them first "
                    "(torch.distributed.checkpoint.state_dict with `full_state_dict=True`)."
                )
            parts = run_steps(move.steps, [tensors[name] for name in move.sources], TORCH)
            for name, part in zip(move.targets, parts, strict=True):
                new[name][kind] = part.contiguous().clone() if move.steps else part
        moves |= {move.targets: move for move in made.moves}
    found = list(moves.values()) or _plain(listed, params)
    for move in found:
        _copy_scalars(move, held, new)
    return {**state, "state": _numbered(new, params), "param_groups": _groups(state, found, by_name, params)}


def _check_kinds(state: Any, names: Any, target: Any) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise TypeError(
            f"`state` of convert_optimizer: {type(state).__name__}, expected a state dict; pass "
            "`optimizer.state_dict()`."
        )
    kinds = (("names", names, (Module, Mapping, Sequence)), ("target", target, (Module, Mapping)))
    for name, value, known in kinds:
        if not isinstance(value, known) or isinstance(value, str):
            also = ", or names" if Sequence in known else ""
            raise TypeError(
                f"`{name}` of convert_optimizer: {type(value).__name__}, expected a module, or parameters by "
                f"name{also}; pass those of the optimiser in its order."
            )


def _blocks(
    names: Names, target: Any, here: Layout, there: Layout, interleave: Any
) -> tuple[Interleaves, Container[str]]:
    """The blocks in which columns alternate, by place, and the places of layers outside of an MLP that have some.

    Raises:
        ValueError, TypeError: `interleave` is not possible, or contradicts a module.
    """
    given = interleave_option(interleave)
    sides = [_activations(each) for each in (names, target)]
    if interleave is not None:
        _check_agree(sides, given)
    mine, theirs = ({**mlps, **linears} for mlps, linears in sides)
    linears = sides[1][1] if here == there else {}  # by another layout `convert` leaves their columns

    def blocks(place: str) -> tuple[int | None, int | None]:
        acts = [side.get(place) for side in (mine, theirs)]
        if any(act is not None and not act.gated for act in acts):
            return None, None
        source, wanted = (
            fixed_or(layout, block) if act is None else act.interleave
            for layout, block, act in zip((here, there), given, acts, strict=True)
        )
        open_source = acts[0] is None and here.interleave is ... and interleave is None
        if open_source and source != wanted and there.interleave is ...:
            raise ValueError(
                f"`interleave` of convert_optimizer: None for the columns of `{place}` in `names`, which do not say "
                f"their order, expected it beside interleave {wanted} of `target`; pass interleave=(block of `names`, "
                f"{wanted}), or the module as `names`."
            )
        return source, wanted

    return blocks, linears


def _activations(given: Any) -> tuple[dict[str, Activation], dict[str, Activation]]:
    """The activations of MLPs, and behind other layers, by place, where a module is given."""
    modules = {"": given} if isinstance(given, Module) else {}
    return unwrapped_paths(of_mlps(modules)), unwrapped_paths(of_linears(modules))


def _check_agree(sides: Sequence[Sequence[Mapping[str, Activation]]], given: tuple[int | None, int | None]) -> None:
    """Refuses an order of columns other than that of a module."""
    for name, side, block in zip(("names", "target"), sides, given, strict=True):
        for place, act in (item for activations in side for item in activations.items()):
            if act.gated and act.interleave != block:
                raise ValueError(
                    f"`interleave` of convert_optimizer: {block} for `{name}`, expected {act.interleave} of "
                    f"`{place or 'its MLP'}` of that module; leave it out, because modules say it."
                )


def _named(given: Any, trained: bool) -> Any:
    """The parameters of a module by name, of which only some are `trained`; anything else as it is."""
    if not isinstance(given, Module):
        return given
    return {name: each for name, each in given.named_parameters() if each.requires_grad or not trained}


def _facts(given: Any) -> dict[str, Facts]:
    """Returns the facts of the parameters themselves, if they were passed."""
    if not isinstance(given, Mapping):
        return {}
    return {name: Facts(tuple(each.shape), name_of(each.dtype)) for name, each in given.items()}


def _plain(listed: Sequence[str], params: Mapping[str, Tensor]) -> list[Move]:
    """Returns the moves for a state without tensors, such as SGD's without momentum: parameters keep their names.

    Raises:
        ValueError: the names of the parameters differ.
    """
    if list(params) != list(listed):
        raise ValueError(
            "`state` of convert_optimizer: no tensors of parameters, expected some to tell which belong together; pass "
            "the parameters themselves as `names`, or make a new optimiser."
        )
    return [Move((name,), (name,), (), ()) for name in listed]


def _copy_scalars(move: Move, held: Mapping[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> None:
    for kind in dict.fromkeys(kind for name in move.sources for kind in held[name]):
        found = [held[name].get(kind) for name in move.sources]
        if any(isinstance(each, Tensor) and each.dim() for each in found):
            continue
        if any(each is None or bool(each != found[0]) for each in found):
            different = next(at for at, each in enumerate(found) if each is None or bool(each != found[0]))
            raise ValueError(
                f"`{kind}` of `{move.sources[different]}`: {found[different]}, expected {found[0]} as of "
                f"`{move.sources[0]}`, which it is merged with; merge states of the same step."
            )
        for name in move.targets:
            new[name][kind] = found[0].clone() if isinstance(found[0], Tensor) else found[0]


def _numbered(new: Mapping[str, dict[str, Any]], params: Mapping[str, Tensor]) -> dict[int, dict[str, Any]]:
    return {at: new[name] for at, name in enumerate(params) if new[name]}


def _groups(
    state: Mapping[str, Any], moves: Sequence[Move], by_name: Mapping[str, int], params: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Returns the parameter groups, with the numbers of the new parameters.

    A parameter that no move makes stays in the group of its name, or else goes to the first.
    """
    group_of = {at: number for number, group in enumerate(state["param_groups"]) for at in group["params"]}
    numbers = {name: group_of[at] for name, at in by_name.items()}
    for move in moves:
        found = {group_of[by_name[name]] for name in move.sources}
        if len(found) > 1:
            raise ValueError(
                f"`param_groups`: `{move.sources[0]}` and others that are merged with it are in the groups "
                f"{sorted(found)}, expected one group; put all experts of a layer in one."
            )
        numbers |= dict.fromkeys(move.targets, found.pop())
    groups = []
    for number, group in enumerate(state["param_groups"]):
        mine = [(at, name) for at, name in enumerate(params) if numbers.get(name, 0) == number]
        made_group = {**group, "params": [at for at, _ in mine]}
        if "param_names" in group:
            made_group["param_names"] = [name for _, name in mine]
        groups.append(made_group)
    return groups
