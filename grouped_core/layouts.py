"""How checkpoints of the field name and shape the weights of experts, and which of their tensors belong together.

A row of `LAYOUTS` is one layout. Keys are paths of segments separated by dots and match by whole segments. Letters:
G groups (experts), H hidden size, F expert width, i the index of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from grouped_core.safetensors_file import Facts
from grouped_core.scaling import ARRAYS

_Value = TypeVar("_Value")
Paths = tuple[str, ...]
"""One path of a tensor, or two, of gate and linear half; `{}` is the index of an expert."""

WEIGHTS, BIASES = ("wi", "wo", "linear"), ("wi_bias", "wo_bias", "linear_bias")
OTHER = "other."
"""In front of the names of the parts of a quantised weight's second form."""

_OWN_PARTS = MappingProxyType(
    {
        part: f".{part}"
        for prefix in ("", OTHER)
        for part in (f"{prefix}values", f"{prefix}scales", f"{prefix}group_scales")
    }
)


@dataclass(frozen=True)
class Layout:
    """One layout.

    Attributes:
        name: its public name.
        transposed: whether weights are [in, out] (gkn), not [out, in] (gnk); quantised weights have one layout.
        mlp: ways to write the tensors of an MLP of experts, by role; the first is what is written by default.
        experts: path of the experts' MLP inside a mixture-of-experts layer; "" if its tensors are the layer's own.
        layer: ways to write the layer's other tensors, by role.
        shared: names of the shared expert in the layer. shared_gated: the name if it has a gate; "": the first.
        one: ways to write the tensors of the shared expert, by role; empty: as `mlp`, with an axis of one group.
        parts: endings of the names of quantised parts; empty where the layout has none.
        interleave: block in which gate and linear columns alternate, None for halves, `...` where it may be any.
        linear: whether a grouped linear layer outside of an MLP is recognised, by its tensors `weight0`, `weight1` ...
        state: what is in front of `scale`, `history` and `top` of a layer's state of delayed scaling; "": it has none.
    """

    name: str
    transposed: bool
    mlp: Mapping[str, tuple[Paths, ...]]
    experts: str = ""
    layer: Mapping[str, tuple[Paths, ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ("shared",)
    shared_gated: str = ""
    one: Mapping[str, tuple[Paths, ...]] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    interleave: Any = ...
    linear: bool = False
    state: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.transposed))


def _fc(first: str, *more: str) -> dict[str, tuple[Paths, ...]]:
    """TransformerEngine's names of the given patterns, such as "{layer}.{kind}{{}}"."""
    roles = {"wi": ("linear_fc1", "weight"), "wo": ("linear_fc2", "weight")}
    roles |= {"wi_bias": ("linear_fc1", "bias"), "wo_bias": ("linear_fc2", "bias")}
    return {
        role: tuple((form.format(layer=layer, kind=kind),) for form in (first, *more))
        for role, (layer, kind) in roles.items()
    }


def _flax(pair_first: bool) -> dict[str, tuple[Paths, ...]]:
    single, pair = (("wi",), ("wi.{}",)), (("wi_0", "wi_1"), ("wi_0.{}", "wi_1.{}"))
    wi = (*pair, *single) if pair_first else (*single, *pair)
    others = {name: ((name,), (f"{name}.{{}}",)) for name in ("wo", "wi_bias", "wo_bias")}
    return {"wi": wi, **others}


_GROUPED, _INDEXED, _LOCAL = "{layer}.{kind}", "{layer}.{kind}{{}}", "local_experts.{{}}.{layer}.{kind}"


def _proj(gate: str, linear: str, down: str, kind: str = "weight", prefix: str = "{}.") -> tuple[Paths, Paths]:
    return (f"{prefix}{gate}.{kind}", f"{prefix}{linear}.{kind}"), (f"{prefix}{down}.{kind}",)


def _hugging_face(first: str) -> dict[str, tuple[Paths, ...]]:
    """Per expert in two spellings, or all experts as in the memory of transformers 5; `first` is what is written."""
    found: dict[str, list[Paths]] = {"wi": [], "wo": [], "wi_bias": [], "wo_bias": []}
    spellings = {"proj": ("gate_proj", "up_proj", "down_proj"), "w": ("w1", "w3", "w2")}
    for name in (first, *(each for each in ("proj", "w", "grouped") if each != first)):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            wi, wo = (
                ((f"gate_up_proj{suffix}",), (f"down_proj{suffix}",))
                if name == "grouped"
                else _proj(*spellings[name], kind)
            )
            found[f"wi{suffix}"].append(wi)
            found[f"wo{suffix}"].append(wo)
    return {role: tuple(ways) for role, ways in found.items()}


_OURS: dict[str, Any] = {"parts": _OWN_PARTS}
_HF_ONE = dict(
    zip(("wi", "wo"), (((each,)) for each in _proj("gate_proj", "up_proj", "down_proj", prefix="")), strict=True)
)
_HF: dict[str, Any] = {
    "transposed": False,
    "experts": "experts",
    "layer": {
        "router": (("gate.weight",),),
        "selection_bias": (("gate.e_score_correction_bias",),),
        "shared_gate": (("shared_expert_gate.weight",),),
    },
    "shared": ("shared_experts", "shared_expert"),
    "shared_gated": "shared_expert",
    "one": _HF_ONE,
    "interleave": None,
}
_MEGATRON: dict[str, Any] = {
    "transposed": False,
    "experts": "experts",
    "layer": {
        "router": (("router.weight",),),
        "selection_bias": (("router.expert_bias",),),
        "shared_gate": (("shared_experts.gate_weight",),),
    },
    "shared": ("shared_experts",),
    "one": {"wi": (("linear_fc1.weight",),), "wo": (("linear_fc2.weight",),)},
    "linear": True,
}
_JAX_LAYER = {
    "router": (("router.kernel",),),
    "selection_bias": (("selection_bias",),),
    "shared_gate": (("shared.gate",),),
}

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        row.name: row
        for row in (
            Layout(
                "torch_bridge",
                False,
                _fc(_GROUPED, _INDEXED),
                "experts",
                {
                    "router": (("router.weight",),),
                    "selection_bias": (("router.selection_bias",),),
                    "shared_gate": (("shared_gate.weight",),),
                },
                linear=True,
                state="scaling_",
                **_OURS,
            ),
            Layout("jax_grouped", True, _flax(False), "", _JAX_LAYER, state="scaling.", **_OURS),
            Layout(
                "flax", True, _flax(True), "", {**_JAX_LAYER, "router": (("router.kernel",), ("gate.kernel",))}, **_OURS
            ),
            Layout("megatron_indexed", mlp=_fc(_INDEXED, _GROUPED, _LOCAL), **_MEGATRON),
            Layout("megatron_grouped", mlp=_fc(_GROUPED, _INDEXED, _LOCAL), **_MEGATRON),
            Layout("hugging_face", mlp=_hugging_face("proj"), **_HF),
            Layout("hugging_face_mixtral", mlp=_hugging_face("w"), **_HF),
            Layout("hugging_face_grouped", mlp=_hugging_face("grouped"), **_HF),
            Layout(
                "gpt_oss",
                True,
                {
                    role: ((name,),)
                    for role, name in zip(
                        ("wi", "wi_bias", "wo", "wo_bias"),
                        ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
                        strict=True,
                    )
                },
                "experts",
                {"router": (("router.weight",),)},
                (),
                parts=MappingProxyType({"values": "_blocks", "scales": "_scales"}),
                interleave=1,
            ),
        )
    }
)
"""Every layout by its public name. Those of Hugging Face, and of Megatron, read the same names and write others."""

ROUTER_TRANSPOSED = {"jax_grouped", "flax"}
"""Layouts whose router is [H, E]."""


def layout_option(value: Any, name: str = "layout") -> Layout:
    """`layout=`, `source=` or `target=` of a public function.

    Raises:
        ValueError: there is no such layout. TypeError: it is no text.
    """
    if not isinstance(value, str):
        raise TypeError(f"`{name}`: {type(value).__name__}, expected the name of a layout; pass one of {_known()}.")
    if value not in LAYOUTS:
        raise ValueError(f"`{name}`: {value!r}, expected one of {_known()}; choose one of them.")
    return LAYOUTS[value]


def _known() -> str:
    return ", ".join(LAYOUTS)


def join(*parts: str) -> str:
    """A path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def unwrapped(path: str) -> str:
    """`stripped` for the path of a layer, which is "" if it is inside of wrappers alone."""
    return stripped(f"{path}.").removesuffix(".")


def unwrapped_paths(layers: Mapping[str, _Value]) -> dict[str, _Value]:
    """A mapping of the paths of layers, each `unwrapped`."""
    return {unwrapped(path): each for path, each in layers.items()}


def dotted(prefix: str) -> str:
    """The start of the keys below the path `prefix`, which may end in a dot already; "" is the start of all keys.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(prefix, str):
        raise TypeError(f'`prefix`: {prefix!r}, expected text; pass the path below which the keys are, or "".')
    return f"{prefix.removesuffix('.')}." if prefix else ""


def stripped(key: str) -> str:
    """The key without leading segments `module`, which wrappers of data parallelism add."""
    while key.startswith("module."):
        key = key.removeprefix("module.")
    return key


# ---------------------------------------------------------------------------------------------------------------------
# Which keys belong together


def state_in(name: str, source: Layout, target: Layout, layers: Container[str]) -> str | None:
    """How the target names what the source names `name`, of a state of delayed scaling; None: it is none, or has none.

    Args:
        layers: the paths of mixture-of-experts layers, whose experts may have the state.
    """
    if not source.state or not target.state:
        return None
    path, found, member = name.rpartition(source.state)
    if not found or member not in ARRAYS or (path and not path.endswith(".")):
        return None
    place = path.removesuffix(".")
    above, _, last = place.rpartition(".")
    if source.experts and last == source.experts and above in layers:
        place = above
    return join(place, target.experts if place in layers else "", f"{target.state}{member}")


class Slot(NamedTuple):
    """The place of a tensor in its role: which of two halves, and the index of its expert, or None."""

    half: int
    expert: int | None


@dataclass
class Role:
    """The tensors of one role.

    Attributes:
        paths: the way in which it is written. parts: their keys; the part "" is a plain tensor.
    """

    paths: Paths
    parts: dict[str, dict[Slot, str]] = field(default_factory=dict)

    @property
    def indexed(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return "{}" in self.paths[0]

    @property
    def keys(self) -> Iterator[str]:
        """The keys of all parts."""
        return (key for slots in self.parts.values() for key in slots.values())

    def groups(self) -> int | None:
        """The number of experts of an indexed role by its highest index, else None."""
        if not self.indexed:
            return None
        return 1 + max(slot.expert or 0 for slots in self.parts.values() for slot in slots)

    def ordered(self, part: str, start: int, count: int) -> list[str]:
        """The keys of a part: those of the first half, expert by expert, then those of the second.

        Raises:
            ValueError: some are missing.
        """
        indices: Any = range(start, start + count) if self.indexed else (None,)
        wanted = [Slot(half, index) for half in range(len(self.paths)) for index in indices]
        slots = self.parts[part]
        if missing := [slot for slot in wanted if slot not in slots]:
            raise self._incomplete(slots, missing, count)
        return [slots[slot] for slot in wanted]

    def _incomplete(self, slots: Mapping[Slot, str], missing: list[Slot], count: int) -> ValueError:
        half = missing[0].half
        missing = [slot for slot in missing if slot.half == half]
        present = [key for slot, key in slots.items() if slot.half == half]
        if not present:
            other = self.paths[half].format(missing[0].expert)
            return ValueError(
                f"checkpoint: `{next(iter(slots.values()))}` without its other half `{other}`, expected both; load a "
                "complete checkpoint."
            )
        names = ", ".join(str(slot.expert) for slot in islice(missing, 12)) + (", ..." if len(missing) > 12 else "")
        return ValueError(
            f"checkpoint: the tensors like `{present[0]}` are there for {count - len(missing)} of {count} experts, "
            f"missing {names}, expected all of them; load a complete checkpoint."
        )


@dataclass
class Unit:
    """Tensors that convert together: an MLP of experts, a shared expert, a grouped linear layer, or a router's layer.

    Attributes:
        kind: "mlp", "shared", "linear" or "layer". path: where its names start in its layout. roles: its roles by name.
        layer: the path of the mixture-of-experts layer around it, or None.
    """

    kind: str
    path: str
    roles: dict[str, Role]
    layer: str | None = None

    @property
    def place(self) -> str:
        """Where it is, in every layout the same."""
        if self.layer is None or self.kind == "layer":
            return self.path
        return join(self.layer, "experts" if self.kind == "mlp" else "shared")


def _pattern(path: str, ending: str = "") -> re.Pattern[str]:
    text = re.escape(path).replace(r"\{\}", "(?P<index>0|[1-9][0-9]{0,6})")
    return re.compile(rf"(?:(?P<unit>.+)\.)?{text}{re.escape(ending)}", re.DOTALL)


Table = tuple[tuple[re.Pattern[str], str, Paths, int, str], ...]


@lru_cache(maxsize=64)
def _table(layout: Layout, kind: str) -> Table:
    roles: Mapping[str, tuple[Paths, ...]] = {
        "mlp": layout.mlp,
        "shared": layout.one or layout.mlp,
        "layer": layout.layer,
        "linear": {"linear": (("weight{}",), ("weight",)), "linear_bias": (("bias{}",), ("bias",))},
    }[kind]
    rows = []
    for role, ways in roles.items():
        endings = {"": "", **(layout.parts if role in WEIGHTS else {})}
        for paths in ways:
            for half, path in enumerate(paths):
                rows += [(_pattern(path, ending), role, paths, half, part) for part, ending in endings.items()]
    return tuple(rows)


def _matched(keys: Mapping[str, str], table: Table) -> dict[str, dict[str, Role]]:
    """Roles by the path of their unit. keys: the keys of a checkpoint, by the names that the patterns are matched with.

    Raises:
        ValueError: a role is there in two forms.
    """
    units: dict[str, dict[str, Role]] = {}
    for name, key in keys.items():
        for pattern, role, paths, half, part in table:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            roles = units.setdefault(match["unit"] or "", {})
            found = roles.setdefault(role, Role(paths))
            index = int(match["index"]) if "{}" in paths[0] else None
            if isinstance(found, _Doubled):
                break
            if found.paths != paths or (bool(part) != bool(next(iter(found.parts), part))):
                other = next(found.keys)
                roles[role] = _Doubled(found.paths, found.parts, other, key)
                break
            found.parts.setdefault(part, {})[Slot(half, index)] = key
            break
    return units


@dataclass
class _Doubled(Role):
    first: str = ""
    second: str = ""


def _checked(roles: dict[str, Role]) -> None:
    for role in roles.values():
        if isinstance(role, _Doubled):
            raise ValueError(
                f"checkpoint: both `{role.first}` and `{role.second}`, two forms of the same tensor, expected one of "
                "them; remove the other."
            )


class Keys(NamedTuple):
    """A checkpoint's keys: units by (kind, place), and all other keys by the names that patterns are matched with."""

    units: dict[tuple[str, str], Unit]
    rest: dict[str, str]


def units_of(
    entries: Mapping[str, Facts],
    layout: Layout,
    *,
    strip: bool,
    places: Any = None,
    linears: Container[str] = (),
) -> Keys:
    """The units among the keys of `entries`.

    Args:
        strip: whether leading segments `module` are left out of paths.
        places: (kind, place) of the units to look for; then tensors of any shape count as theirs. None: every MLP
            whose weights have the axes of the layout.
        linears: paths at which a grouped linear layer outside of an MLP is one whose columns an activation reads, and
            so is a unit in either form.

    Raises:
        ValueError: two keys, or two ways to write them, mean the same tensor.
    """
    keys: dict[str, str] = {}
    for key in entries:
        name = stripped(key) if strip else key
        if name in keys:
            raise ValueError(
                f"checkpoint: both `{keys[name]}` and `{key}`, which are one name without `module`, expected one of "
                "them; remove the other."
            )
        keys[name] = key
    layers = _matched(keys, _table(layout, "layer"))
    mlps = _matched(keys, _table(layout, "mlp"))
    found: dict[tuple[str, str], Unit] = {}
    taken: set[str] = set()

    def add(unit: Unit) -> None:
        _checked(unit.roles)
        at = (unit.kind, unit.place)
        if at in found:
            raise ValueError(
                f"checkpoint: both `{next(_first_keys(found[at]))}` and `{next(_first_keys(unit))}` belong to the "
                f"layer `{unit.place}`, expected one of them; remove the other."
            )
        found[at] = unit
        taken.update(key for role in unit.roles.values() for key in role.keys)

    shared_table = _table(layout, "shared")
    for path, roles in layers.items():
        experts = join(path, layout.experts)
        if "router" not in roles or not _whole(mlps.get(experts), entries, places is not None):
            continue
        add(Unit("mlp", experts, mlps.pop(experts), path))
        for name in layout.shared:
            inside = {key: value for key, value in keys.items() if key.startswith(join(path, name) + ".")}
            one = _matched(inside, shared_table).get(join(path, name)) if inside else None
            if one is not None and {"wi", "wo"} <= one.keys():
                mlps.pop(join(path, name), None)
                add(Unit("shared", join(path, name), one, path))
        add(Unit("layer", path, roles, path))
    for path, roles in mlps.items():
        if _whole(roles, entries, places is not None and ("mlp", path) in places):
            add(Unit("mlp", path, roles))
    if layout.linear:
        left = {name: key for name, key in keys.items() if key not in taken}
        for path, roles in _matched(left, _table(layout, "linear")).items():
            if "linear" not in roles:
                continue
            wanted = places is not None and (("linear", path) in places or roles["linear"].indexed)
            if wanted or path in linears:
                add(Unit("linear", path, roles))
    return Keys(found, {name: key for name, key in keys.items() if key not in taken})


def stacked(entries: Mapping[str, Facts], layout: Layout) -> dict[str, str]:
    """By place, the key of the first weight of experts whose plain weights have an additional first axis, the layers of
    a scan. They are not units: a conversion does not know where their axes and columns are.
    """
    keys = {stripped(key): key for key in entries}
    layers = {
        join(path, layout.experts): path
        for path, roles in _matched(keys, _table(layout, "layer")).items()
        if "router" in roles
    }
    found: dict[str, str] = {}
    for path, roles in _matched(keys, _table(layout, "mlp")).items():
        of_weights = [roles[name].parts.get("", {}).values() for name in ("wi", "wo") if name in roles]
        weights = [key for keys_of_one in of_weights for key in keys_of_one]
        if len(of_weights) == 2 and weights and all(len(entries[key].shape) == 4 for key in weights):
            found[join(layers[path], "experts") if path in layers else path] = weights[0]
    return found


def _first_keys(unit: Unit) -> Iterator[str]:
    return (key for role in unit.roles.values() for key in role.keys)


def _whole(roles: dict[str, Role] | None, entries: Mapping[str, Facts], any_shape: bool) -> bool:
    """Whether there are both weights, with the axes of experts."""
    if roles is None or not {"wi", "wo"} <= roles.keys():
        return False
    for role in (roles["wi"], roles["wo"]):
        plain = role.parts.get("", {})
        rank = 2 if role.indexed else 3
        if not any_shape and any(len(entries[key].shape) != rank for key in plain.values()):
            return False
    return True
