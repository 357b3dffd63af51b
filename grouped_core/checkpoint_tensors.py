"""Trees of tensors as flat mappings of paths, in which a quantised weight is its plain tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from grouped_core.checkpoint_files import some_names
from grouped_core.checkpoint_fp8 import SCALE, coded_keys, widened, widened_entries
from grouped_core.checkpoint_metadata import FILES, Other, Spec, described
from grouped_core.checkpoint_plan import Move, Plan, Shard, fixed_or, interleave_option, plan
from grouped_core.formats import FORMATS, Format, QTensor
from grouped_core.layout_steps import Arrays, run_steps
from grouped_core.layouts import LAYOUTS, OTHER, Layout, layout_option, stacked, units_of
from grouped_core.lora_layout import is_factor
from grouped_core.safetensors_file import Facts, numpy_dtype
from grouped_core.scaling import ARRAYS

PARTS = ("values", "scales", "group_scales", "group_sizes")
Flat = dict[str, Any]


def forms(q: QTensor[Any]) -> list[tuple[str, QTensor[Any]]]:
    """The forms of a quantised weight with the prefix of their parts' names."""
    return [("", q)] + ([] if q.other is None else [(OTHER, q.other)])


def formats_of(q: QTensor[Any]) -> tuple[Format, ...]:
    """The formats of its forms."""
    return tuple(form.format for _, form in forms(q))


def flatten(tree: Mapping[str, Any]) -> tuple[Flat, dict[str, QTensor[Any]]]:
    """A flat tree with the parts of its `QTensor`s as entries of their own, and these by their keys."""
    flat: Flat = {}
    quantised: dict[str, QTensor[Any]] = {}
    for key, value in tree.items():
        if not isinstance(value, QTensor):
            flat[key] = value
            continue
        quantised[key] = value
        for prefix, form in forms(value):
            for part in PARTS:
                if getattr(form, part) is not None:
                    flat[f"{key}.{prefix}{part}"] = getattr(form, part)
    return flat, quantised


def unflatten(flat: Flat, like: Mapping[str, QTensor[Any]]) -> Flat:
    """The inverse of `flatten`: parts of the keys of `like` become `QTensor`s of their facts."""
    made = dict(flat)
    for key, q in like.items():
        made[key] = _assembled(q, {part: made.pop(f"{key}.{part}") for part in _names(q)})
    return made


def _names(q: QTensor[Any]) -> list[str]:
    return [prefix + part for prefix, form in forms(q) for part in PARTS if getattr(form, part) is not None]


def _assembled(q: QTensor[Any], parts: Mapping[str, Any], prefix: str = "") -> QTensor[Any]:
    own = {part: parts[prefix + part] for part in PARTS if prefix + part in parts}
    other = None if q.other is None else _assembled(q.other, parts, OTHER)
    return dataclasses.replace(q, **own, other=other)


# ---------------------------------------------------------------------------------------------------------------------
# Conversion in memory


def converted(
    tree: Mapping[str, Any],
    source: str,
    target: str,
    interleave: Any,
    facts_of: Callable[[Any], Facts],
    arrays: Arrays,
    own: Mapping[str, int | None],
    linears: Mapping[str, int | None] = MappingProxyType({}),
) -> Flat:
    """A flat tree in another layout; what no layer of experts owns stays as it is.

    FP8 weights with scales of their blocks become bfloat16, as they do when they are loaded (`checkpoint_fp8`).

    Args:
        own: for the path of each MLP of a module, the block in which its columns alternate; it replaces `interleave`.
        linears: the same for grouped linear layers outside of an MLP. They have no name of their own, so their columns
            change only if the layout stays.

    Raises:
        ValueError: a tensor is ambiguous, incomplete or does not fit, or the experts have another layout than `source`.
        TypeError: an argument has another type.
    """
    here, there = layout_option(source, "source"), layout_option(target, "target")
    flat, quantised = flatten(tree)
    facts = {key: facts_of(value) for key, value in flat.items()}
    coded = coded_keys(facts)
    given = interleave_option(interleave)
    pair = (fixed_or(here, given[0]), fixed_or(there, given[1]))
    scanned = stacked(facts, here)
    if here != there or pair[0] != pair[1]:
        for key in scanned.values():
            raise ValueError(
                f"checkpoint: `{key}` of shape {facts[key].shape}, expected the experts of one layer, with three axes; "
                "convert the layers that a scan stacked one by one, e.g. with jax.tree.map(lambda a: a[layer], tree)."
            )
    entries = widened_entries(facts, coded)
    linears = linears if here == there else {}
    known, asked = {**own, **linears}, dict[str, int | None]()

    def blocks(place: str) -> tuple[int | None, int | None]:
        asked[place] = known.get(place, pair[0])
        return asked[place], pair[1]

    made = plan(entries, here, there, blocks, linears=linears)
    if interleave is None and here.interleave is ...:
        _check_known(asked, known, pair[1])
    if not made.units.units and not scanned:
        others = [each.name for each in LAYOUTS.values() if units_of(entries, each, strip=False).units]
        if others:
            raise ValueError(
                f"`source` of convert: {source!r}, expected {' or '.join(map(repr, others))}, the layout of experts "
                f"among {some_names(facts)}; pass the layout that the tree has."
            )

    def read(key: str) -> Any:
        return widened(flat[key], flat[f"{key}{SCALE}"], arrays) if key in coded else flat[key]

    result = {key: value for _, _, key, value in executed(made, read, arrays)}
    return unflatten(result, _quantised_targets(made, quantised, here, there, result))


def _check_known(asked: Mapping[str, int | None], known: Mapping[str, int | None], target: int | None) -> None:
    """Refuses to reorder the columns of a module beside others, such as moments, whose order only the caller knows."""
    moved = [place for place, block in asked.items() if place in known and block != target]
    for place in asked:
        if moved and place not in known:
            block = asked[moved[0]]
            raise ValueError(
                f"`interleave` of convert: None for `{place}` beside `{moved[0]}`, whose columns change from "
                f"interleave {block} to {target}, expected to know the order of both; pass "
                f"interleave=({block}, {target})."
            )


class Made(NamedTuple):
    """A tensor of the target: its place in the plan's moves, its place in the move, its key and its values."""

    move: int
    at: int
    key: str
    value: Any


def executed(made: Plan, read: Callable[[str], Any], arrays: Arrays) -> Iterator[Made]:
    """Executes the moves one by one: no more than the tensors of one move are held at a time."""
    for number, move in enumerate(made.moves):
        values = run_steps(move.steps, [read(key) for key in move.sources], arrays)
        for at, (key, value) in enumerate(zip(move.targets, values, strict=True)):
            yield Made(number, at, key, value)


def _quantised_targets(
    made: Plan, given: Mapping[str, QTensor[Any]], source: Layout, target: Layout, result: Flat
) -> dict[str, QTensor[Any]]:
    """The `QTensor`s that a conversion makes, by their keys, with the tensors of their sources."""
    found: dict[str, QTensor[Any]] = {}
    kept = {key: key for key in given}
    for move in made.moves:
        if move.part != "values" or target.parts.get("values") != ".values":
            continue
        keys, origins = ([name.removesuffix(".values") for name in names] for names in (move.targets, move.sources))
        key = keys[0]
        if all(origin in given for origin in origins):
            groups = {given[origin].values.shape[0] for origin in origins} | {result[n].shape[0] for n in move.targets}
            if max(len(keys), len(origins)) > 2 or len(groups) > 1:
                continue  # expert by expert
            for at, each in enumerate(keys):
                q = given[origins[at % len(origins)]]
                if len(keys) != len(origins):  # halves of columns and the whole
                    q = _of_columns(q, 1 if source.transposed else 0, len(origins), len(keys))
                found[each] = _transposed(q) if source.transposed != target.transposed else q
            for origin in origins:
                kept.pop(origin)
        elif source.parts.get("values") == "_blocks" and len(keys) == 1:
            values = result[move.targets[0]]
            shape = (values.shape[0], values.shape[1], 2 * values.shape[2])
            axis = 2
            q = QTensor(values, result[f"{key}.scales"], None, FORMATS["mxfp4"], axis, shape, "bfloat16")
            found[key] = _transposed(q) if target.transposed else q
    for move in made.moves:  # of no layer, or in the same form
        for key in list(kept):
            if move.targets == (f"{key}.values",):
                found[key] = given[kept.pop(key)]
    return found


def _of_columns(q: QTensor[Any], axis: int, multiplied: int, divided: int) -> QTensor[Any]:
    """The facts of `q` with so many times the columns, which are axis `axis` of a member."""
    shape = list(q.shape)
    shape[1 + axis] = shape[1 + axis] * multiplied // divided
    other = None if q.other is None else _of_columns(q.other, axis, multiplied, divided)
    return dataclasses.replace(q, shape=tuple(shape), other=other)


def _transposed(q: QTensor[Any]) -> QTensor[Any]:
    """The same weight with its last two axes named the other way round; codes and scales stay."""
    groups, a, b = q.shape
    return dataclasses.replace(
        q, axis=3 - q.axis, shape=(groups, b, a), other=None if q.other is None else _transposed(q.other)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Saving


class Saved(NamedTuple):
    """What `save` writes.

    Attributes:
        plan: its moves, in the order of the data. metadata: JSON. flat: the tensors to move.
    """

    plan: Plan
    metadata: str
    flat: Flat


def saving(
    tree: Mapping[str, Any],
    layout: str,
    spec: Spec,
    facts_of: Callable[[Any], Facts],
    formats: Mapping[str, tuple[Format, ...]],
    shard: Shard,
    linears: Mapping[str, Other] = MappingProxyType({}),
) -> Saved:
    """Plans the file of a flat tree; nothing but names changes.

    Args:
        layout: "torch_bridge" or "jax_grouped". formats: those of quantised weights that are in parts already, by key.
            linears: grouped linear layers outside of an MLP whose columns an activation reads, by path.

    Raises:
        ValueError: the activation of a layer with a gate is missing, or a name is not possible.
    """
    here = LAYOUTS[layout]
    flat, quantised = flatten(tree)
    facts = {key: facts_of(value) for key, value in flat.items()}
    order = "gkn" if here.transposed else "gnk"
    made = plan(facts, here, FILES[order], lambda _: (None, None), shard=shard, keep=True)
    if shard.ranks > 1:
        _check_same_on_all_ranks(made)
    if shard.rank:
        made.moves = [move for move in made.moves if _of_rank(made, move)]
    made.moves.sort(key=lambda move: -max(numpy_dtype(each.dtype).itemsize for each in move.facts))
    kinds = {**formats, **{key: formats_of(q) for key, q in quantised.items()}}
    named = {
        move.targets[0].removesuffix(f".{move.part}"): kinds[move.sources[0].removesuffix(f".{move.part}")]
        for move in made.moves
        if move.part == "values" and move.sources[0].removesuffix(f".{move.part}") in kinds
    }
    if shard.ranks > 1:
        named = {}  # of members; files of one checkpoint have the same metadata
    layers = {place: Other("stacked", facts[key].shape[1]) for place, key in stacked(facts, here).items()}
    return Saved(made, described(made, order, spec, named, shard.ranks, {**linears, **layers}), flat)


_SCALING = re.compile(
    rf"({'|'.join(re.escape(each.state) for each in LAYOUTS.values() if each.state)})({'|'.join(ARRAYS)})$"
)
"""Names of the state of delayed scaling, in either framework."""


def _check_same_on_all_ranks(made: Plan) -> None:
    """Refuses adapters and scaling states of experts: they differ between ranks, but only rank 0 would write them."""
    for kind, place in made.units.units:
        for move in made.moves:
            key = move.sources[0]
            own = not move.role and (is_factor(key) or _SCALING.search(key) is not None)
            if own and kind != "shared" and key.startswith(f"{place}." if place else ""):
                raise ValueError(
                    f"`{key}` of a checkpoint of several ranks: it belongs to the experts of one rank, but is neither "
                    "a weight nor a bias, expected weights, biases and tensors that are the same on all ranks; merge "
                    "adapters, and save other such tensors apart, or use the framework's own distributed checkpoints."
                )


def _of_rank(made: Plan, move: Move) -> bool:
    """Whether a move belongs to experts, which differ between ranks, so that every rank writes its own."""
    return ("mlp", move.place) in made.units.units and bool(move.role)
