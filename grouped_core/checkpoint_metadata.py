"""What a checkpoint records beside its tensors (CKP-5), and what it must agree in with the model (CKP-6)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from grouped_core.activations import Activation, resolve
from grouped_core.checkpoint_plan import Plan
from grouped_core.formats import Format
from grouped_core.layouts import LAYOUTS, Layout, stripped, unwrapped
from grouped_core.safetensors_file import parse_json

NAME = "jax_grouped"
"""The name of the metadata in the header of a file, and of the JSON item of a folder."""
VERSION = 1
FILES = {
    "gkn": LAYOUTS["jax_grouped"],
    "gnk": dataclasses.replace(LAYOUTS["jax_grouped"], name="jax_grouped (gnk)", transposed=False, linear=True),
}
"""Layouts of our files by the order of a weight's axes; their names are those of `jax_grouped`."""

Spec = Any
"""An `Activation`, the name of a kind, a mapping of places of layers to these, or None."""


@dataclass(frozen=True)
class Recorded:
    """The metadata of a checkpoint.

    Attributes:
        order: "gkn" or "gnk". layers: by place, the activation of each MLP, and of each grouped linear layer in front
        of an activation; None if it has no gate and none was given. Places are without leading segments `module`.
        groups: by place, the number of experts of all ranks. indexed: by place, whether there is a tensor per expert.
        formats: the formats of quantised weights, by their key. ranks: the number of files of the checkpoint.
    """

    order: str
    layers: Mapping[str, Activation | None] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    indexed: Mapping[str, bool] = field(default_factory=dict)
    formats: Mapping[str, tuple[Format, ...]] = field(default_factory=dict)
    ranks: int = 1

    @property
    def layout(self) -> Layout:
        """The layout of its tensors."""
        return FILES[self.order]


class Other(NamedTuple):
    """A first weight that is in no unit of a plan.

    Attributes:
        kind: "stacked", of layers that a scan stacked; or "linear", a grouped linear layer in front of an activation.
        groups: the number of experts. form: "grouped", or "indexed", with a tensor per expert.
    """

    kind: str
    groups: int
    form: str = "grouped"


def beside(spec: Spec, known: Mapping[str, Activation]) -> Spec:
    """`spec` with the activations that layers know by themselves.

    Raises:
        ValueError: it has another one for such a layer.
    """
    if not known or spec is None:
        return known or spec
    for place, own in known.items():
        given = activation_of(spec, place, gated=False)
        if given is not None and given != own:
            raise ValueError(
                f"`spec` of save: {given} for `{place}`, expected {own} of its module; leave it out, or pass a mapping "
                "of the paths of other experts."
            )
    return {**spec, **known} if isinstance(spec, Mapping) else spec


def activation_of(spec: Spec, place: str, gated: bool) -> Activation | None:
    """The activation that `spec` has for a layer.

    Raises:
        ValueError: there is none, but the layer has a gate, whose columns must be known.
    """
    found = spec
    if isinstance(spec, Mapping):  # of the experts, or of the layer around them
        found = spec.get(place, spec.get(place.removesuffix("experts").removesuffix(".")))
    if found is None and gated:
        where = f"`{place}`" if place else "the tree"
        raise ValueError(
            f"`spec` of save: none for {where}, whose experts have a gate, expected an Activation, which says in what "
            "order their columns are; pass it, or a mapping of such paths to activations."
        )
    return None if found is None else resolve(found)


def described(
    plan: Plan,
    order: str,
    spec: Spec,
    formats: Mapping[str, tuple[Format, ...]],
    ranks: int,
    others: Mapping[str, Other] = MappingProxyType({}),
) -> str:
    """The metadata of a checkpoint, as JSON.

    Args:
        plan: the plan that made its tensors. spec: as in `save`. formats: those of quantised weights. others: by place,
            first weights that are in no unit of the plan; recorded where their activation is known.

    Raises:
        ValueError: the activation of a layer with a gate is missing.
    """
    layers = {}
    for (kind, place), unit in plan.units.units.items():
        if kind not in ("mlp", "shared"):
            continue
        act = activation_of(spec, place, plan.gated[place])
        layers[place] = {
            "kind": kind,
            "groups": plan.groups[place] * (ranks if kind == "mlp" else 1),
            "form": "indexed" if unit.roles["wi"].indexed or (ranks > 1 and kind == "mlp") else "grouped",
            "activation": None if act is None else dataclasses.asdict(act),
            "gate": ""
            if not plan.gated[place]
            else "first"
            if act is None or act.interleave is None
            else "interleaved",
        }
    for place, other in others.items():
        act = activation_of(spec, place, gated=False)
        if act is not None and place not in layers:
            gate = "" if not act.gated else "first" if act.interleave is None else "interleaved"
            layers[place] = {**other._asdict(), "activation": dataclasses.asdict(act), "gate": gate}
    notes = {
        "version": VERSION,
        "layout": order,
        "ranks": ranks,
        "layers": layers,
        "formats": {key: [dataclasses.asdict(each) for each in parts] for key, parts in formats.items()},
    }
    return json.dumps(notes)


def recorded(text: str, where: str) -> Recorded:
    """The metadata in a JSON text.

    Raises:
        ValueError: they are those of a newer version, or damaged.
    """
    try:
        notes = parse_json(text)
    except ValueError as error:
        raise _damaged(where, str(error)[:80]) from error
    if not isinstance(notes, dict) or type(notes.get("version")) is not int or notes["version"] < 1:
        raise _damaged(where, "no version")
    if notes["version"] > VERSION:
        raise ValueError(
            f"checkpoint `{where}`: metadata of version {notes['version']}, expected at most {VERSION}, which this "
            "release knows; install a newer one."
        )
    try:
        return _read(notes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {str(error)[:120]}") from error


def _damaged(where: str, what: str) -> ValueError:
    return ValueError(
        f"checkpoint `{where}`: damaged metadata `{NAME}` ({what}), expected those that `save` writes; load an intact "
        "checkpoint."
    )


def _read(notes: dict[str, Any]) -> Recorded:
    layers: dict[str, Activation | None] = {}
    groups: dict[str, int] = {}
    indexed: dict[str, bool] = {}
    for path, entry in notes["layers"].items():
        place = unwrapped(path)
        given = entry["activation"]
        layers[place] = None if given is None else Activation(**given)
        if type(entry["groups"]) is not int or entry["form"] not in ("grouped", "indexed"):
            raise ValueError(f"groups or form of {path[:80]}")
        groups[place], indexed[place] = entry["groups"], entry["form"] == "indexed"
    formats = {stripped(key): tuple(Format(**each) for each in parts) for key, parts in notes["formats"].items()}
    if notes["layout"] not in FILES or type(notes["ranks"]) is not int or not 1 <= notes["ranks"] < 1 << 20:
        raise ValueError("layout or ranks")
    return Recorded(notes["layout"], layers, groups, indexed, formats, notes["ranks"])


def _shown(place: str) -> str:
    """A layer in a message, by its place in the model."""
    return f"`{place}`" if place else "the one layer"


def check_activations(found: Recorded, activations: Mapping[str, Activation], where: str) -> None:
    """Refuses a checkpoint whose experts have other activations than those of the model, apart from the columns' order.

    Raises:
        ValueError: an activation differs.
    """
    for place, ours in activations.items():
        theirs = found.layers.get(place)
        if theirs is not None and dataclasses.replace(theirs, interleave=None) != dataclasses.replace(
            ours, interleave=None
        ):
            raise ValueError(
                f"checkpoint `{where}`: the activation of {_shown(place)} is {theirs}, expected {ours} of the model; "
                "make the model with that activation, or load into its tensors, a tree."
            )


def reordered(found: Recorded, blocks: Mapping[str, int | None]) -> Iterator[tuple[str, int | None, int | None]]:
    """(place, recorded interleave, wanted one) of each layer in `blocks` whose columns have another order."""
    for place, block in blocks.items():
        act = found.layers.get(place)
        if act is not None and act.interleave != block:
            yield place, act.interleave, block


def check_agreement(
    found: Recorded, target: Layout, blocks: Mapping[str, int | None], convert: bool, where: str
) -> None:
    """Refuses a checkpoint that is not laid out as the model is, unless it is to be converted.

    Args:
        blocks: the interleave of each MLP of the model whose activation is known, by place.

    Raises:
        ValueError: the order of axes or of columns differs.
    """
    if convert:
        return
    order = "gkn" if target.transposed else "gnk"
    if found.layers and found.order != order:
        raise ValueError(
            f"checkpoint `{where}`: weights in the layout {found.order}, expected {order} of the model; pass "
            "convert=True, which turns them."
        )
    for place, recorded, wanted in reordered(found, blocks):
        raise ValueError(
            f"checkpoint `{where}`: columns of {_shown(place)} with interleave {recorded}, expected {wanted} of the "
            f"model; convert them with checkpoint.convert(..., interleave=({recorded}, {wanted})), or pass "
            "convert=True."
        )
