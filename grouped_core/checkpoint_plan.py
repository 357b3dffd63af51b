"""The plan of a conversion: which tensors of a checkpoint make which tensors of another, and by what steps.

Everything is checked here, on facts, before any data is read. A frontend only executes the moves. Letters: G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from grouped_core import layout_steps as steps
from grouped_core.layout_steps import Step, cancelled, facts_after, undone
from grouped_core.layouts import (
    BIASES,
    OTHER,
    ROUTER_TRANSPOSED,
    WEIGHTS,
    Keys,
    Layout,
    Paths,
    Role,
    Unit,
    join,
    state_in,
    units_of,
)
from grouped_core.lora_layout import FirstFactor, first_factor
from grouped_core.safetensors_file import Facts

Interleaves = Callable[[str], tuple[int | None, int | None]]
"""place of an MLP -> the blocks in which its gate and linear columns alternate, in the source and in the target. It is
also asked for places of `linears`, and for those of adapters beside which there is no MLP."""

FIRST = ("wi", "wi_bias", "linear", "linear_bias")
"""Roles whose columns an activation reads."""


@dataclass(frozen=True)
class Move:
    """`steps` make the tensors `targets` of the tensors `sources`.

    Attributes:
        facts: the facts of the targets. role: the role of the tensors in their unit; "" if they have none.
        part: the part of a quantised weight, or "". place: the place of the tensors' unit.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Step, ...]
    facts: tuple[Facts, ...]
    role: str = ""
    part: str = ""
    place: str = ""


@dataclass
class Plan:
    """A whole conversion.

    Attributes:
        moves: in the order of the targets. unused: keys of the source that no move reads. missing: keys of the target
            that no move writes. gated, groups: by the place of an MLP, whether its activation has a gate, and the
            number of its experts. units: the keys of the source, sorted into layers.
    """

    moves: list[Move] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    gated: dict[str, bool] = field(default_factory=dict)
    units: Keys = field(default_factory=lambda: Keys({}, {}))


class Shard(NamedTuple):
    """The experts of one of `ranks` ranks: G / ranks experts, starting with number rank * G / ranks."""

    rank: int
    ranks: int


WHOLE = Shard(0, 1)


def shard_option(shard: tuple[int, int] | None) -> Shard:
    """`shard=` of a public function.

    Raises:
        ValueError: the rank is not one of 0 to ranks - 1. TypeError: it is not a pair of integers.
    """
    if shard is None:
        return WHOLE
    if not isinstance(shard, tuple) or len(shard) != 2 or not all(isinstance(each, int) for each in shard):
        raise TypeError(f"`shard`: {shard!r}, expected (rank, ranks), two integers; pass such a pair.")
    rank, ranks = shard
    if not 0 <= rank < ranks:
        raise ValueError(f"`shard`: {tuple(shard)}, expected (rank, ranks) with 0 <= rank < ranks; pass such a pair.")
    return Shard(rank, ranks)


def interleave_option(interleave: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """`interleave=` of a public function as a pair: the block of the source, and the block of the target.

    Raises:
        ValueError, TypeError: it is not None, an integer of 1 or more, or a pair of these.
    """
    pair = interleave if isinstance(interleave, tuple) else (interleave, interleave)
    for each in pair:
        if each is not None and (not isinstance(each, int) or isinstance(each, bool)):
            raise TypeError(
                f"`interleave`: {type(each).__name__}, expected a block of columns, None, or a pair of these for "
                "source and target; pass one of them."
            )
        if each is not None and each < 1:
            raise ValueError(f"`interleave`: {each}, expected 1 or more, or None for halves; pass one of them.")
    if len(pair) != 2:
        raise ValueError(
            f"`interleave`: {pair}, expected a block, or (of the source, of the target); pass two at most."
        )
    return pair[0], pair[1]


def fixed_or(layout: Layout, given: int | None) -> int | None:
    """The block of a layout: its own where it has one, else the given one."""
    return given if layout.interleave is ... else layout.interleave


# ---------------------------------------------------------------------------------------------------------------------
# From a layout to the common form: one tensor for all experts, [out, in], gate half first


class _Written(NamedTuple):
    """A role as it is written in one layout."""

    layout: Layout
    paths: Paths
    groups: int
    single: bool


def _to_common(written: _Written, role: str, part: str, block: int | None, facts: Mapping[str, Facts]) -> list[Step]:
    """Steps from the tensors of a role to its common form.

    Args:
        block: the block of interleaved columns of a first weight or its bias, else None. facts: those of the parts of a
            quantised weight in the common form, as far as they are known.
    """
    layout, paths, groups, single = written
    found: list[Step] = []
    if role in BIASES or role in WEIGHTS:
        if part == "values" and layout.parts.get(part) == "_blocks":
            found.append(steps.Merge())
        if part == "scales" and layout.parts.get(part) == "_scales":
            found.append(steps.View("uint8", "float8_e8m0fnu"))
        if "{}" in paths[0]:
            found.append(steps.Stack(groups))
        if single:
            found.append(steps.Grow())
    if role in ("router", "shared_gate"):
        return [steps.Transpose()] if layout.name in ROUTER_TRANSPOSED and layout.transposed else []
    axis = -1 if role in BIASES or (layout.transposed and not part) else -2
    if len(paths) == 2:
        found.append(_moved(part, steps.Join(axis), "a pair", facts))
    if layout.transposed and role in WEIGHTS and not part:
        found.append(steps.Transpose())
    if block is not None:
        axis = -1 if role in BIASES else -2
        found.append(_moved(part, steps.Contiguous(block, axis), block, facts))
    return found


def _moved(part: str, step: Step, detail: int | str, facts: Mapping[str, Facts]) -> Step:
    """`step`, which moves rows, or why it cannot move the rows of a quantised part."""
    if part in ("", "values"):
        return step
    rows = facts["values"].shape[-2:-1] if "values" in facts else ()
    if part == "scales" and part in facts and len(facts[part].shape) == 3 and facts[part].shape[-2:-1] == rows:
        return step
    return steps.Impossible(
        "whose scales are those of several output columns together, expected columns to stay in place; dequantise "
        "the weight and quantise it again after the conversion",
        f"{detail}",
    )


def _whole(facts: Facts, written: _Written) -> Facts:
    """The facts of a part of a whole weight whose tensors, of experts and of halves, are all like one of `facts`."""
    shape = (written.groups,) * ("{}" in written.paths[0]) + facts.shape
    if len(written.paths) == 2 and len(shape) == 3:
        shape = (shape[0], 2 * shape[1], shape[2])
    return facts._replace(shape=shape)


def _twin(key: str, twins: Container[str]) -> str:
    """The name of the part of the second form that goes with the part `key` of a weight of `twins`; else ""."""
    weight, _, part = key.rpartition(".")
    return f"{weight}.{OTHER}{part}" if weight in twins else ""


def _is_second(keys: Iterable[str], part: str, twins: Container[str]) -> bool:
    """Whether `keys`, of parts `part`, are those of second forms of weights of `twins`."""
    return part.startswith(OTHER) and all(key.removesuffix(f".{part}") in twins for key in keys)


class _Role(NamedTuple):
    unit: Unit
    name: str
    role: Role


def _paths_for(target: Layout, kind: str, role: str, source: Role | None, keep: bool, index: bool) -> Paths | None:
    """How a role is written in a target that does not exist yet; None: it has no name there."""
    if kind == "linear":
        ways: tuple[Paths, ...] = (("weight",), ("weight{}",)) if role == "linear" else (("bias",), ("bias{}",))
    elif kind == "layer":
        ways = target.layer.get(role, ())
    elif kind == "shared":
        ways = (target.one or target.mlp).get(role, ())
    else:
        ways = target.mlp.get(role, ())
    if (keep or kind == "linear") and source is not None:
        indexed = source.indexed or (index and kind == "mlp")
        same = [each for each in ways if ("{}" in each[0]) == indexed and len(each) == len(source.paths)]
        ways = (*same, *ways)
    return ways[0] if ways else None


def _path_of(unit: Unit, target: Layout, gated_shared: bool) -> str:
    """Where a unit's names start in a target that does not exist yet."""
    if unit.layer is None or unit.kind == "layer":
        return unit.path
    if unit.kind == "mlp":
        return join(unit.layer, target.experts)
    return join(unit.layer, target.shared_gated if gated_shared and target.shared_gated else target.shared[0])


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def plan(
    sources: Mapping[str, Facts],
    source: Layout,
    target: Layout,
    interleaves: Interleaves,
    *,
    targets: Mapping[str, Facts] | None = None,
    shard: Shard = WHOLE,
    keep: bool = False,
    linears: Container[str] = (),
    twins: Container[str] = (),
) -> Plan:
    """Plans a conversion of the tensors `sources`.

    Args:
        targets: the tensors to make; None: those that follow from the sources, in the target's usual form.
        shard: without targets, the rank whose experts the sources hold: they are named by their numbers among those of
            all ranks. With targets, the rank whose experts are taken out of those of all ranks.
        keep: only without targets: experts that have separate tensors in the source have them in the result too.
        linears: places of grouped linear layers outside of an MLP whose columns are permuted like those of an MLP.
        twins: quantised weights of the target whose two forms have the same codes, so that the first makes both.

    Raises:
        ValueError: a tensor is ambiguous, incomplete, or has a wrong shape or dtype. Keys of the target that no source
            provides raise nothing; they are in `Plan.missing`.
    """
    wanted = None if targets is None else units_of(targets, target, strip=True, places=frozenset(), linears=linears)
    places = None if wanted is None else wanted.units.keys()
    given = units_of(sources, source, strip=targets is not None, places=places, linears=linears)
    if wanted is not None and given.units and any(kind == "linear" for kind, _ in given.units):
        wanted = units_of(targets or {}, target, strip=True, places=given.units.keys(), linears=linears)
    made = _Maker(sources, targets, source, target, interleaves, shard, keep, linears, twins, Plan(units=given))
    for at, unit in given.units.items():
        other = None if wanted is None else wanted.units.get(at)
        if wanted is None:
            made.unit(unit, None)
        elif other is not None:
            made.unit(unit, other)
        else:
            made.leave(key for role in unit.roles.values() for key in role.keys)
    rest = None if wanted is None or targets is None else _names(wanted, given)
    made.others(given.rest, rest)
    made.second_forms()
    if targets is not None:
        filled = {key for move in made.plan.moves for key in move.targets}
        made.plan.missing = [key for key in targets if key not in filled]
    return made.checked()


def _names(wanted: Keys, given: Keys) -> dict[str, str]:
    """Keys of the target that are in no unit of both."""
    names = dict(wanted.rest)
    for at, unit in wanted.units.items():
        if at not in given.units:
            names |= {key: key for role in unit.roles.values() for key in role.keys}
    return names


@dataclass
class _Maker:
    sources: Mapping[str, Facts]
    targets: Mapping[str, Facts] | None
    source: Layout
    target: Layout
    interleaves: Interleaves
    shard: Shard
    keep: bool
    linears: Container[str]
    twins: Container[str]
    plan: Plan

    def leave(self, keys: Iterable[str]) -> None:
        """Lists keys as unused, or keeps them as they are where there is no target."""
        for key in keys:
            if self.targets is None:
                self.plan.moves.append(Move((key,), (key,), (), (self.sources[key],)))
            else:
                self.plan.unused.append(key)

    def others(self, rest: Mapping[str, str], targets: Mapping[str, str] | None) -> None:
        """Tensors of no unit, which keep their names. Of adapters, columns are permuted like those of their weights."""
        layers = {path for kind, path in self.plan.units.units if kind == "layer"}
        for name, key in rest.items():
            state = state_in(name, self.source, self.target, layers)
            to = (state or key) if targets is None else targets.get(state or name)
            if to is None:
                self.plan.unused.append(key)
                continue
            facts = self.sources[key]
            if self.targets is not None:
                self._same(key, facts, self.targets[to])
            self.plan.moves.append(Move((key,), (to,), self._of_adapter(name, key), (facts,)))

    def _of_adapter(self, name: str, key: str) -> tuple[Step, ...]:
        """The steps of a tensor of no unit; there are some if it is factor B of an adapter and its columns change.

        Args:
            name: the key as units have it.
        """
        factor = first_factor(name) or self._linear_factor(name)
        if factor is None:
            return ()
        of_layer = ("layer", factor.path) in self.plan.units.units
        place = join(factor.path, "experts") if of_layer else factor.path
        gated = self.plan.gated.get(place)
        source, target = (None, None) if gated is False else self.interleaves(place)
        if source == target:
            return ()
        facts = self.sources[key]
        if len(facts.shape) != 3:
            raise ValueError(
                f"checkpoint: `{key}` {facts}, an adapter whose columns change from interleave {source} to {target}, "
                "expected three axes, those of one layer; convert each layer by itself, or merge the adapters first."
            )
        if gated is None and factor.second and not self._has_gate(key, key.removesuffix(name), factor):
            return ()
        way = [] if source is None else [steps.Contiguous(source, factor.axis)]
        way += [] if target is None else [steps.Interleaved(target, factor.axis)]
        self._after([key], way, [facts])
        return tuple(way)

    def _linear_factor(self, name: str) -> FirstFactor | None:
        """Factor B of one of `linears`. Its columns have a gate if their order changes: else the blocks are None."""
        path = name.removesuffix(".lora_B")
        return FirstFactor(path, -2) if path != name and path in self.linears else None

    def _has_gate(self, key: str, start: str, factor: FirstFactor) -> bool:
        """Whether the columns of an adapter without its weights are a gate and a linear half.

        Args:
            start: the segments that `stripped` leaves out.
        """
        second = self.sources.get(start + factor.second)
        if second is None or len(second.shape) != 3:
            raise ValueError(
                f"checkpoint: `{key}` without its weights and without `{start}{factor.second}`, expected one of them, "
                "to know whether the columns, whose order changes, have a gate; pass them too, or merge the adapters "
                "first."
            )
        return self.sources[key].shape[factor.axis] == 2 * second.shape[factor.depth]

    def unit(self, unit: Unit, other: Unit | None) -> None:
        """The moves of one unit."""
        groups = self._groups(unit, other)
        blocks: tuple[int | None, int | None] = (None, None)
        if unit.kind in ("mlp", "shared"):
            gated = self._gated(unit, groups)
            self.plan.gated[unit.place], self.plan.groups[unit.place] = gated, groups
            blocks = self.interleaves(unit.place) if gated else (None, None)
        elif unit.kind == "linear" and unit.place in self.linears:
            blocks = self.interleaves(unit.place)
        for name, role in unit.roles.items():
            to = None if other is None else other.roles.get(name)
            if other is not None and to is None:
                self.leave(role.keys)
                continue
            self._role(_Role(unit, name, role), to, groups, blocks if name in FIRST else (None, None))

    def _groups(self, unit: Unit, other: Unit | None) -> int:
        """The number of experts of the source, of all ranks if they are in it."""
        if unit.kind in ("shared", "layer"):
            return 1
        if other is not None and self.targets is not None:
            role = next(iter(other.roles.values()))
            local = role.groups()
            if local is None:
                facts = self.targets[next(role.keys)]
                local = facts.shape[0] if facts.shape else 0
            return local * self.shard.ranks
        for role in unit.roles.values():
            if (count := role.groups()) is not None:
                return count
        for role in unit.roles.values():
            facts = self.sources[next(role.keys)]
            if facts.shape:
                return facts.shape[0]
        return 0

    def _common(self, unit: Unit, name: str, groups: int) -> Facts | None:
        """The facts of a plain weight, or of its codes, in the common form, as far as its tensors fit together."""
        role = unit.roles[name]
        part = "" if "" in role.parts else "values"
        if part not in role.parts:
            return None
        written = _Written(self.source, role.paths, groups, unit.kind == "shared" and bool(self.source.one))
        keys = role.ordered(part, 0, groups)
        try:
            found = facts_after(_to_common(written, name, part, None, {}), [self.sources[key] for key in keys])
        except ValueError as error:
            raise self._broken(keys, error) from error
        return found[0]

    def _gated(self, unit: Unit, groups: int) -> bool:
        """Whether the first weight has a gate and a linear half."""
        if len(unit.roles["wi"].paths) == 2:
            return True
        if self.targets is not None and self._is_flat(unit):
            rows = [math.prod(self.sources[next(unit.roles[name].keys)].shape) for name in ("wi", "wo")]
            return rows[0] == 2 * rows[1]
        wi, wo = self._common(unit, "wi", groups), self._common(unit, "wo", groups)
        if wi is None or wo is None or len(wi.shape) != 3 or len(wo.shape) != 3:
            return False
        width, wide = wo.shape[-1] * (2 if wo.dtype == "uint8" else 1), wi.shape[-2]
        if wide not in (width, 2 * width):
            first, second = next(unit.roles["wi"].keys), next(unit.roles["wo"].keys)
            raise ValueError(
                f"checkpoint: `{first}` {self.sources[first]} beside `{second}` {self.sources[second]}, expected "
                f"{width} columns, or {2 * width} with a gate; load a checkpoint whose weights fit together."
            )
        return wide == 2 * width

    def _is_flat(self, unit: Unit) -> bool:
        """Whether members of a weight may be under each other in one matrix."""
        roles = [unit.roles[name] for name in ("wi", "wo") if "" in unit.roles[name].parts]
        ranks = [len(self.sources[next(role.keys)].shape) for role in roles if not role.indexed]
        return unit.kind == "mlp" and 2 in ranks

    def _role(self, at: _Role, other: Role | None, groups: int, blocks: tuple[int | None, int | None]) -> None:
        unit, name, role = at
        single = unit.kind == "shared"
        sharded = unit.kind in ("mlp", "linear") and self.shard.ranks > 1
        local = groups // self.shard.ranks if sharded and self.targets is not None else groups
        start = self.shard.rank * local if sharded else 0
        if other is None:
            paths = _paths_for(self.target, unit.kind, name, role, self.keep, sharded)
            if paths is None or (unit.kind == "shared" and not self.target.shared):
                self.leave(role.keys)
                return
        else:
            paths = other.paths
        if len(paths) == 2 and not self.plan.gated.get(unit.place, True):
            raise ValueError(
                f"checkpoint: `{next(role.keys)}` has no gate, expected one for `{paths[0]}` and `{paths[1]}`; choose "
                "a layout with one first weight."
            )
        picked = role.indexed and self.targets is not None and sharded
        before = _Written(self.source, role.paths, local if picked else groups, single and bool(self.source.one))
        after = _Written(self.target, paths, local, single and bool(self.target.one))
        # A form that the model does not hold is not read: beside adapters a layer has that of forward alone.
        extra = set[str]() if other is None else set(role.parts) - set(other.parts)
        lacking = set[str]() if other is None else set(other.parts) - set(role.parts)
        if other is not None and "values" in role.parts:
            lacking -= {part for part, slots in other.parts.items() if _is_second(slots.values(), part, self.twins)}
        if other is not None and (lacking or not all(each.startswith(OTHER) for each in extra)):
            self._parts(role, other)
            return
        if self.source.parts.get("values") == "_blocks" and "" not in role.parts:
            self._check_blocks(role, groups)
        common: dict[str, Facts] = {}
        for part in sorted((each for each in role.parts if each not in extra), key=lambda each: each != "values"):
            if part and part not in self.target.parts:
                raise ValueError(
                    f"checkpoint: `{next(role.keys)}` is quantised, expected plain weights for the layout "
                    f"{self.target.name}, which has no name for its `{part}`; dequantise it first."
                )
            self._count(role, part, groups)
            keys = role.ordered(part, start if picked else 0, before.groups)
            given = [self.sources[key] for key in keys]
            if part:
                common[part] = _whole(given[0], before)  # tells `_moved` whether its rows are those of the values
                with suppress(ValueError):  # the message is that of the whole conversion
                    common[part] = facts_after(_to_common(before, name, part, None, common), given)[0]
            to = _to_common(before, name, part, blocks[0], common)
            away = undone(_to_common(after, name, part, blocks[1], common))
            if sharded and self.targets is not None and not picked:
                to = [*to, steps.Members(start, local)]
            names = self._targets(at, other, part, paths, local if self.targets is not None else groups)
            way = self._split(keys[0], given, to, away, names)
            found = self._after(keys, way, given)
            if self.targets is not None:
                for key, made in zip(names, found, strict=True):
                    self._same(keys[0], made, self.targets[key])
            move = Move(tuple(keys), tuple(names), way, tuple(found), name, part, unit.place)
            self.plan.moves.append(move)

    def second_forms(self) -> None:
        """Makes the second form of weights of `twins` of the first, where the sources have none."""
        filled = [key for move in self.plan.moves for key in move.targets]
        given = {key.rpartition(f".{OTHER}")[0] for key in filled if f".{OTHER}" in key}
        for move in list(self.plan.moves):
            names = tuple([_twin(key, self.twins) for key in move.targets])
            if self.targets is None or not all(each in self.targets for each in names):
                continue
            if any(key.rpartition(".")[0] in given for key in move.targets):
                continue  # the whole second form, or else what is missing is refused
            turned = names[0].endswith(".values")
            way = (*move.steps, steps.Transpose()) if turned else move.steps
            facts = tuple(steps.Transpose().facts(list(move.facts))) if turned else move.facts
            for key, made in zip(names, facts, strict=True):
                self._same(move.sources[0], made, self.targets[key])
            self.plan.moves.append(replace(move, targets=names, steps=way, facts=facts, part=OTHER + move.part))

    def _parts(self, role: Role, other: Role) -> None:
        found = "plain" if "" in role.parts else f"quantised with {', '.join(sorted(role.parts))}"
        wanted = "plain values" if "" in other.parts else ", ".join(sorted(other.parts))
        raise ValueError(
            f"checkpoint: `{next(role.keys)}` is {found}, expected {wanted} for `{next(other.keys)}`; load a "
            "checkpoint of weights in that form."
        )

    def _count(self, role: Role, part: str, groups: int) -> None:
        """Refuses another number of experts than the target has."""
        slots = role.parts[part]
        if role.indexed and (count := 1 + max(slot.expert or 0 for slot in slots)) > groups:
            key = slots[max(slots, key=lambda slot: slot.expert or 0)]
            raise ValueError(f"`{key}` is of {count} groups, expected {groups}; load a checkpoint of as many experts.")
        if part and not role.indexed and self.targets is not None:
            key = slots[min(slots)]
            shape = self.sources[key].shape
            if (shape[0] if shape else 0) != groups and role.paths and groups > 1:
                raise ValueError(
                    f"`{key}` has {shape[0] if shape else 0} groups, expected {groups}; load a checkpoint of as many "
                    "experts."
                )

    def _check_blocks(self, role: Role, groups: int) -> None:
        """Refuses MXFP4 blocks [G, A, B / 32, 16] and scales [G, A, B / 32] that do not fit together."""
        keys = {part: next(iter(slots.values())) for part, slots in role.parts.items()}
        some = next(iter(keys.values()))
        for part, ending in (("values", "_blocks"), ("scales", "_scales")):
            if part not in keys:
                missing = f"{some.removesuffix('_blocks').removesuffix('_scales')}{ending}"
                raise ValueError(f"checkpoint: `{some}` without `{missing}`, expected both; pass the whole weight.")
        blocks, scales = (self.sources[keys[part]] for part in ("values", "scales"))
        if len(blocks.shape) != 4 or blocks.shape[0] != groups:
            raise ValueError(
                f"checkpoint: `{keys['values']}` {blocks}, expected [{groups}, A, B / 32, 16] of {groups} experts; "
                "load a checkpoint whose tensors fit together."
            )
        if scales.shape != blocks.shape[:3]:
            raise ValueError(
                f"checkpoint: `{keys['scales']}` {scales}, expected {list(blocks.shape[:3])}, a scale for each block "
                f"of `{keys['values']}`; load a checkpoint whose tensors fit together."
            )

    def _targets(self, at: _Role, other: Role | None, part: str, paths: Paths, groups: int) -> list[str]:
        if other is not None:
            return other.ordered(part, 0, groups)
        shared = at.unit.layer is not None and ("layer", at.unit.layer) in self.plan.units.units
        gated = shared and "shared_gate" in self.plan.units.units["layer", at.unit.layer or ""].roles
        path = _path_of(at.unit, self.target, gated)
        ending = self.target.parts[part] if part else ""
        first = self.shard.rank * groups if at.unit.kind == "mlp" else 0
        indices: Sequence[int | None] = range(first, first + groups) if "{}" in paths[0] else (None,)
        return [join(path, each.format(index) + ending) for each in paths for index in indices]

    def _split(
        self, key: str, given: list[Facts], to: list[Step], away: list[Step], names: list[str]
    ) -> tuple[Step, ...]:
        """The steps. The first two axes of a tensor of all experts may be folded; its exact shape tells (CKP-1)."""
        short = cancelled([*to, *away])
        if self.targets is None or len(given) > 1:
            return short
        restore = [step for step in to if not isinstance(step, steps.Members)]
        try:
            local = facts_after(undone(away), [self.targets[name] for name in names])[0]
            members = next((step for step in to if isinstance(step, steps.Members)), None)
            groups = local.shape[0] * self.shard.ranks if members else local.shape[0]
            expected = facts_after(undone(restore), [Facts((groups, *local.shape[1:]), local.dtype)])[0]
        except (ValueError, IndexError):
            return short
        shape = given[0].shape
        if shape == expected.shape or len(expected.shape) < 2:
            return short
        flat = (expected.shape[0] * expected.shape[1], *expected.shape[2:])
        if shape == flat:
            return cancelled([steps.Chunk(expected.shape[0]), *to, *away])
        raise ValueError(
            f"cannot split checkpoint tensor `{key}`: shape {shape}, expected {expected.shape} or {flat}; check the "
            "number of groups, the sizes of the layer and, of quantised weights, their format."
        )

    def _after(self, keys: list[str], way: Sequence[Step], given: list[Facts]) -> list[Facts]:
        try:
            return facts_after(way, given)
        except ValueError as error:
            raise self._broken(keys, error) from error

    def _broken(self, keys: list[str], error: ValueError) -> ValueError:
        at = error.at if isinstance(error, steps.MisfitError) and error.count == len(keys) else 0
        return ValueError(f"checkpoint: `{keys[at]}`: {error}; load a checkpoint whose tensors fit together.")

    def _same(self, key: str, found: Facts, wanted: Facts) -> None:
        if found.shape != wanted.shape:
            raise ValueError(
                f"checkpoint: `{key}` gives shape {found.shape}, expected {wanted.shape} of the model; load a "
                "checkpoint of these sizes."
            )
        if found.dtype != wanted.dtype:
            raise ValueError(
                f"checkpoint: `{key}` has dtype {found.dtype}, expected {wanted.dtype} of the model; make the model in "
                "the dtype of the checkpoint and cast it afterwards."
            )

    def checked(self) -> Plan:
        """The plan, if every target has one source and every source serves one target (CKP-3)."""
        makes: dict[str, str] = {}
        for move in self.plan.moves:
            for key in move.targets:
                if key in makes:
                    raise ValueError(
                        f"checkpoint: `{makes[key]}` and `{move.sources[0]}` both make `{key}`, expected one of them; "
                        "remove the other."
                    )
                makes[key] = move.sources[0]
        return self.plan
