"""Checkpoints in Orbax folders: the arrays as one item, the metadata as a JSON item beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from grouped_core.checkpoint_files import below
from grouped_core.checkpoint_metadata import NAME, Recorded, recorded
from grouped_core.layouts import dotted, stripped
from grouped_core.safetensors_file import Facts
from jax_grouped._checkpoint_trees import nested, taken

_ARRAYS = "state"


def write(path: str | os.PathLike[str], arrays: Mapping[str, Any], metadata: str) -> None:
    """Writes arrays by their paths; the folder is complete or not there. A checkpoint that is there is replaced.

    Raises:
        ValueError: a path is the start of another, Orbax cannot write an array, or other things are at `path`.
    """
    _check_writable(path, arrays)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = {_ARRAYS: ocp.args.StandardSave(nested(arrays)), NAME: ocp.args.JsonSave(json.loads(metadata))}
        checkpointer.save(Path(path).absolute(), args=ocp.args.Composite(**items), force=True)


def _check_writable(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Refuses arrays that Orbax cannot write, because it would fail only after it has removed what is at `path`; and a
    `path` with anything that `save` did not write, because Orbax would remove it.
    """
    where = Path(path).absolute()
    ours = all((where / item).is_dir() for item in (_ARRAYS, NAME))
    if where.exists() and not ours and not (where.is_dir() and not any(where.iterdir())):
        came = "a folder of other files" if where.is_dir() else "a file"
        raise ValueError(
            f"`path` of save: `{where}`, {came}, expected a new or empty folder, or a checkpoint that `save` wrote, "
            "which is replaced; pass another path."
        )
    empty = [key for key, value in arrays.items() if not value.size]
    if empty or not arrays:
        name, what = (empty[0], "elements") if empty else ("tree", "arrays")
        raise ValueError(
            f"`{name}` of save: no {what}, expected some, because Orbax writes none that are empty; leave it out, or "
            "save to a `.safetensors` file."
        )


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
        """Reads all arrays, as NumPy arrays if JAX has their dtype only in 64-bit mode. sharding: that of an entry.

        Raises:
            ValueError: the data are damaged.
        """
        by_name = {name: key for key, name in self._names.items()}

        def described(name: str, found: Any) -> Any:
            if jax.dtypes.canonicalize_dtype(found.dtype) != found.dtype:
                return np.broadcast_to(np.zeros((), found.dtype), found.shape)
            default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            wanted = sharding(by_name[name]) if name in by_name else None
            return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=wanted or default)

        whole = taken(self._tree)
        wanted = whole.rebuilt({name: described(name, found) for name, found in whole.flat.items()})
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(_ARRAYS, NAME)) as checkpointer:
            args = ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(wanted)})
            try:
                found = checkpointer.restore(Path(self.where).absolute(), args=args)[_ARRAYS]
            except Exception as error:  # Orbax raises plain ones
                raise ValueError(
                    f"checkpoint `{self.where}`: damaged arrays ({type(error).__name__}: {str(error)[:120]}), expected "
                    "those that `save` wrote; load an intact checkpoint."
                ) from error
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
    start = stripped(dotted(prefix))
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
