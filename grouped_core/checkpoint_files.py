"""Opening a checkpoint of one or several files, and planning how to load it; nothing here knows a framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from grouped_core.activations import Activation
from grouped_core.checkpoint_metadata import NAME, Recorded, check_activations, check_agreement, recorded, reordered
from grouped_core.checkpoint_plan import WHOLE, Plan, Shard, fixed_or, interleave_option, plan
from grouped_core.formats import Format, as_flag
from grouped_core.layouts import Layout, dotted, layout_option, stacked, stripped, unwrapped_paths
from grouped_core.lora_layout import is_factor
from grouped_core.safetensors_file import Facts, File

SUFFIX = ".safetensors"


class Reader(Protocol):
    """A checkpoint whose facts are known and whose tensors are not read yet."""

    entries: dict[str, Facts]
    notes: Recorded | None
    where: str


@dataclass
class Files:
    """A checkpoint in one or several safetensors files.

    Attributes:
        entries: the facts of all tensors. notes: its metadata; None if another library wrote it. where: its path.
    """

    entries: dict[str, Facts] = field(default_factory=dict)
    notes: Recorded | None = None
    where: str = ""
    _homes: dict[str, tuple[File, str]] = field(default_factory=dict)

    def read(self, key: str) -> NDArray[Any]:
        """The values of one tensor, a new array."""
        file, name = self._homes[key]
        return file.read(name)


def opened(path: str | os.PathLike[str], prefix: str = "") -> Files:
    """Opens a file, or every safetensors file of a folder.

    Args:
        prefix: only the tensors below this path are taken, and the path is removed from their keys. A dot at its end
            makes no difference.

    Raises:
        ValueError: a file is damaged, tensors occur twice, or files are missing. OSError: nothing can be read.
    """
    where = Path(path)
    paths = sorted(where.glob(f"*{SUFFIX}")) if where.is_dir() else [where]
    if not paths:
        raise ValueError(
            f"checkpoint `{where}`: a folder without {SUFFIX} files, expected at least one; pass the path of a "
            "checkpoint."
        )
    found = Files(where=str(where))
    start, kept = stripped(dotted(prefix)), []
    for each in paths:
        file = File(each)
        kept.append((each, recorded(file.metadata[NAME], str(each)) if NAME in file.metadata else None))
        for name, facts in file.entries.items():
            key = stripped(name)
            key = key.removeprefix(start) if key.startswith(start) and start else (name if not start else None)
            if key is None:
                continue
            if key in found.entries:
                raise ValueError(
                    f"checkpoint `{where}`: `{name}` in `{found._homes[key][0].path.name}` and in `{each.name}`, "
                    "expected each tensor once; remove the files of other checkpoints from the folder."
                )
            found.entries[key], found._homes[key] = facts, (file, name)
    found.notes = _notes(where, kept, prefix)
    return found


def _notes(where: Path, kept: Sequence[tuple[Path, Recorded | None]], prefix: str) -> Recorded | None:
    """The metadata that all files share."""
    (first, notes), *others = kept
    for each, other in others:
        if other != notes:
            raise ValueError(
                f"checkpoint `{where}`: `{each.name}` has other metadata than `{first.name}`, expected files of one "
                "checkpoint; remove those of others."
            )
    if notes is not None and notes.ranks != len(kept):
        raise ValueError(
            f"checkpoint `{where}`: {len(kept)} files, expected {notes.ranks}, one of each rank; pass the folder of a "
            "complete checkpoint."
        )
    return below(notes, prefix) if notes is not None and prefix else notes


def below(notes: Recorded, prefix: str) -> Recorded:
    """The metadata of the layers below a path, which becomes their root."""
    start = stripped(dotted(prefix))

    def cut(entries: Mapping[str, Any]) -> dict[str, Any]:
        inside = {f"{key}.": value for key, value in entries.items() if f"{key}.".startswith(start)}
        return {key.removeprefix(start).removesuffix("."): value for key, value in inside.items()}

    return Recorded(
        notes.order, cut(notes.layers), cut(notes.groups), cut(notes.indexed), cut(notes.formats), notes.ranks
    )


class Model(NamedTuple):
    """The module or tree that a checkpoint is loaded into.

    Attributes:
        layout: its layout. entries: the facts of its tensors. activations: the activation of each MLP whose module
            records one, and of each grouped linear layer in front of one, by its path. optional: keys that a checkpoint
            may lack, those of one place only together. formats: the formats of quantised weights, by their key.
    """

    layout: Layout
    entries: Mapping[str, Facts]
    activations: Mapping[str, Activation]
    optional: frozenset[str] = frozenset()
    formats: Mapping[str, tuple[Format, ...]] = {}


def loading(
    reader: Reader, model: Model, layout: str | None, interleave: Any, convert: bool, shard: Shard = WHOLE
) -> Plan:
    """Checks a checkpoint against a model, and plans its load.

    Raises:
        ValueError: the checkpoint is ambiguous, damaged, or does not fit. KeyError: tensors are missing.
        TypeError: an argument has another type.
    """
    convert = as_flag("convert", convert, "load")
    notes, given = reader.notes, interleave_option(interleave)
    if notes is not None and layout is not None:
        raise ValueError(
            f"`layout`: {layout!r} for `{reader.where}`, which records its own layout, expected None; leave it out."
        )
    if notes is None and layout is None:
        raise ValueError(
            f"checkpoint `{reader.where}`: no metadata of this library, expected `layout=` for a foreign file; name "
            "its layout, and `interleave=` if its gate and linear columns alternate."
        )
    source = layout_option(layout) if notes is None else notes.layout
    activations = unwrapped_paths(model.activations)
    blocks = {place: act.interleave for place, act in activations.items()}
    layers: Mapping[str, Activation | None] = {} if notes is None else notes.layers
    known = {place: act.interleave for place, act in layers.items() if act is not None}
    unknown: list[str] = []

    def pair(place: str) -> tuple[int | None, int | None]:
        if place in activations and not activations[place].gated:
            return None, None
        if notes is None:
            return fixed_or(source, given[0]), blocks.get(place, given[1])
        if place not in (blocks if interleave is None else known):
            unknown.append(place)
        if interleave is not None:
            return known.get(place, given[0]), blocks.get(place, given[1])
        mine = known[place] if place in known else blocks.get(place)
        return mine, blocks.get(place, mine)

    if notes is not None:
        if interleave is not None:
            blocks = dict.fromkeys(layers, given[1]) | blocks
        check_activations(notes, activations, reader.where)
        _check_stacked(notes, model, blocks, reader.where)
        check_agreement(notes, model.layout, blocks, convert, reader.where)
    # Of layers outside of an MLP a foreign file says nothing: they are as the model's, unless `interleave` says it.
    linears = set() if notes is None and interleave is None else {*blocks, *layers}
    made = plan(
        reader.entries,
        source,
        model.layout,
        pair,
        targets=model.entries,
        shard=shard,
        linears=linears,
        twins=twins(model.formats),
    )
    if notes is not None:
        _same_formats(notes, model, made, reader.where)
        _check_recorded(notes, made, reader.where)
        if unknown and interleave is None:
            _check_known(notes, blocks, unknown[0], reader.where)
        elif unknown:
            _check_given(notes, given[0], unknown[0], reader.where)
    held = {_place_of(key) for key in model.optional.difference(made.missing)}
    missing = [key for key in made.missing if key not in model.optional or _place_of(key) in held]
    factors = {key for key in model.entries if is_factor(key)}
    if factors != model.entries.keys() and factors <= set(missing):  # a base without adapters
        if factors and (others := [key for key in made.unused if is_factor(key)]):
            raise KeyError(
                f"checkpoint `{reader.where}`: adapters {some_names(others)}, expected {some_names(sorted(factors))} "
                "as in the model, because adapters are not converted between frameworks; carry them over by `to_peft` "
                "and `from_peft`, and load the base without them."
            )
        missing = [key for key in missing if key not in factors]
    if missing:
        raise KeyError(
            f"checkpoint `{reader.where}`: nothing for {some_names(missing)}, expected a tensor for each of the model; "
            "pass `prefix=` if the model is a part of the checkpoint, the layout that its names have, or "
            '`{"experts": model}` if the model is the experts of its mixture-of-experts layer.'
        )
    return made


def _place_of(key: str) -> str:
    """The module or tree whose tensor the key names."""
    return key.rpartition(".")[0]


def _check_recorded(notes: Recorded, made: Plan, where: str) -> None:
    """Refuses experts with a gate whose activation the metadata lack."""
    for place, gated in made.gated.items():
        if gated and notes.layers.get(place) is None:
            raise ValueError(
                f"checkpoint `{where}`: no activation of `{place}` in its metadata, expected one for experts with a "
                "gate; save it again with `spec`."
            )


def _check_given(notes: Recorded, block: int | None, unknown: str, where: str) -> None:
    """Refuses an order of columns that are not recorded, those of `unknown`, other than that of experts beside them."""
    for place, act in notes.layers.items():
        if act is not None and act.gated and act.interleave != block:
            raise ValueError(
                f"`interleave` of load: {block} for the columns of `{unknown}` in checkpoint `{where}`, expected "
                f"{act.interleave}, which it records for `{place}`; pass a pair that starts with that."
            )


def _check_known(notes: Recorded, blocks: Mapping[str, int | None], unknown: str, where: str) -> None:
    """Refuses to reorder the columns of some experts if there are others, such as the moments of an optimiser or of
    adapters alone, and the order of their columns in the model is not known.
    """
    for place, recorded_block, wanted in reordered(notes, blocks):
        raise ValueError(
            f"checkpoint `{where}`: `{unknown}` beside `{place}`, whose columns change from interleave "
            f"{recorded_block} to {wanted}, expected to know the order of both; pass "
            f"interleave=({recorded_block}, {wanted})."
        )


def _check_stacked(notes: Recorded, model: Model, blocks: Mapping[str, int | None], where: str) -> None:
    """Refuses layers that a scan stacked if the order of their columns differs: no conversion can change it."""
    keys = stacked(model.entries, model.layout)
    own = {place: block for place, block in blocks.items() if place in keys}
    for place, recorded_block, wanted in reordered(notes, own):
        raise ValueError(
            f"checkpoint `{where}`: columns of `{keys[place]}`, of layers that a scan stacked, with interleave "
            f"{recorded_block}, expected {wanted} of the model; load it into a model with the former, and convert each "
            f"layer with checkpoint.convert(..., interleave=({recorded_block}, {wanted}))."
        )


def twins(formats: Mapping[str, tuple[Format, ...]]) -> frozenset[str]:
    """The weights, of those with these formats, whose two forms have the same codes."""
    return frozenset(key for key, each in formats.items() if len(each) == 2 and each[0].shares_codes(each[1]))


def _same_formats(notes: Recorded, model: Model, made: Plan, where: str) -> None:
    for move in made.moves:
        if not move.part or not model.formats:
            continue
        ours = model.formats.get(move.targets[0].removesuffix(f".{move.part}"))
        theirs = notes.formats.get(stripped(move.sources[0]).removesuffix(f".{move.part}"))
        if ours is None or theirs is None:
            continue
        read = min(len(ours), len(theirs))
        layouts = [[each.layout for each in formats[:read]] for formats in (ours, theirs)]
        if layouts[0] != layouts[1]:
            raise ValueError(
                f"checkpoint `{where}`: `{move.sources[0]}` in {', '.join(each.name for each in theirs)}, expected "
                f"{', '.join(each.name for each in ours)} of the model; make the model in that format."
            )


def some_names(names: Iterable[str]) -> str:
    """The first of the names, for messages."""
    listed = [f"`{name}`" for name in names]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def unused_message(made: Plan, where: str) -> str | None:
    """The warning that lists tensors of the checkpoint that were not used, or None."""
    if not made.unused:
        return None
    return (
        f"checkpoint `{where}`: {some_names(made.unused)} not used, expected a place in the model for each tensor; "
        "check the layout, or ignore this where the model has no such part."
    )


def part_file(path: str | os.PathLike[str], shard: Shard) -> Path:
    """The file that a rank writes: the path itself, or with several ranks a file in that folder."""
    if shard.ranks == 1:
        return Path(path)
    return Path(path) / f"part-{shard.rank + 1:05d}-of-{shard.ranks:05d}{SUFFIX}"
