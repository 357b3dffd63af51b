"""Checkpoints in Orbax folders: the arrays as one item, the metadata as a JSON item beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from grouped_core.checkpoint_files import below
from grouped_core.checkpoint_metadata import NAME, Recorded, recorded
from grouped_core.layouts import stripped
from grouped_core.safetensors_file import Facts
from jax_grouped._checkpoint_trees import nested, taken

_ARRAYS = "state"


def write(path: str | os.PathLike[str], arrays: Mapping[str, Any], metadata: str) -> None:
    """Writes arrays by their paths; the folder is complete or not there. An existing one is replaced.

    Raises:
        ValueError: a path is the start of another.
    """
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = {_ARRAYS: ocp.args.StandardSave(nested(arrays)), NAME: ocp.args.JsonSave(json.loads(metadata))}
        checkpointer.save(Path(path).absolute(), args=ocp.args.Composite(**items), force=True)


@dataclass
class Folder:
    """An Orbax folder whose facts are known.

    Attributes:
        entries, notes, where: as in `grouped_core.checkpoint_files.Files`.
    """

    entries: dict[str, Facts]
    notes: Recorded | None
    where: str
    _names: dict[str, str]
    _tree: Any

    def read_all(self, sharding: Callable[[str], Any]) -> dict[str, jax.Array]:
        """All arrays. sharding: of an entry."""
        by_name = {name: key for key, name in self._names.items()}

        def described(name: str, found: Any) -> jax.ShapeDtypeStruct:
            default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            wanted = sharding(by_name[name]) if name in by_name else None
            return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=wanted or default)

        whole = taken(self._tree)
        wanted = whole.rebuilt({name: described(name, found) for name, found in whole.flat.items()})
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(_ARRAYS, NAME)) as checkpointer:
            args = ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(wanted)})
            found = checkpointer.restore(Path(self.where).absolute(), args=args)[_ARRAYS]
        flat = taken(found).flat
        return {key: flat[name] for key, name in self._names.items()}


def opened(path: str | os.PathLike[str], prefix: str = "") -> Folder:
    """Opens a folder; arguments as in `grouped_core.checkpoint_files.opened`.

    Raises:
        ValueError: it is damaged or no folder of Orbax.
    """
    where = Path(path).absolute()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(_ARRAYS, NAME)) as checkpointer:
            tree = ocp.StandardCheckpointHandler().metadata(epath.Path(where / _ARRAYS)).tree
            has_notes = (where / NAME).exists()
            args = ocp.args.Composite(**{NAME: ocp.args.JsonRestore()})
            notes = json.dumps(checkpointer.restore(where, args=args)[NAME]) if has_notes else None
    except Exception as error:
        raise ValueError(
            f"checkpoint `{where}`: no readable Orbax folder with an item `{_ARRAYS}` ({type(error).__name__}: "
            f"{str(error)[:120]}), expected one that `save` wrote; pass its path."
        ) from error
    start = f"{prefix}." if prefix else ""
    names: dict[str, str] = {}
    found = {name: Facts(tuple(each.shape), str(jax.numpy.dtype(each.dtype))) for name, each in _flat(tree).items()}
    for name in found:
        key = stripped(name) if start else name
        if key.startswith(start):
            names[key.removeprefix(start)] = name
    kept = recorded(notes, str(where)) if notes is not None else None
    kept = below(kept, prefix) if kept is not None and prefix else kept
    return Folder({key: found[name] for key, name in names.items()}, kept, str(where), names, tree)


def _flat(tree: Any) -> dict[str, Any]:
    return taken(tree).flat
