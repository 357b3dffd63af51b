"""Checkpoints of a training run: everything that the next step depends on, saved with Orbax."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lm.errors import UserError

logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax also logs the errors that it raises

KEPT = 2
"""Number of checkpoints to keep; the older one is a fallback if the newest is damaged."""


class Checkpoints:
    """The checkpoints in one folder: `state` (a pytree of arrays) and `notes` (JSON), one pair per saved step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).absolute()
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False),
                item_names=("state", "notes"),
            )
        except OSError as error:
            raise UserError(f"--checkpoint {folder}: {error.strerror or error}") from None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The newest saved step, or None."""
        return self._manager.latest_step()

    def expect(self, a_run: bool) -> None:
        """Raises if a run is to continue and the folder has no checkpoint, or if a run is to start and it has one."""
        if a_run and self.latest is None:
            raise UserError(f"--resume: there is no checkpoint in {self.folder}")
        if self.latest is not None and not a_run:
            raise UserError(f"--checkpoint {self.folder} holds a run; add --resume, or name another folder")

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Writes one checkpoint; it gets its final name only when it is complete."""
        if step == self.latest:
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes))
        try:
            self._manager.save(step, args=items)
        except OSError as error:
            raise UserError(f"cannot write a checkpoint to {self.folder}: {error.strerror or error}") from None

    def notes(self) -> dict[str, Any]:
        """The notes of the newest checkpoint."""
        return self._restore(notes=ocp.args.JsonRestore())["notes"]

    def state(self, like: Any) -> Any:
        """The arrays of the newest checkpoint, in the structure of `like`."""
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._restore(state=ocp.args.StandardRestore(shapes))["state"]

    def _restore(self, **items: Any) -> Any:
        try:
            return self._manager.restore(self.latest, args=ocp.args.Composite(**items))
        # Orbax and its storage raise many kinds of errors for damaged files; the user gets one message for all.
        except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise self.unreadable(error) from None

    def unreadable(self, error: Exception) -> UserError:
        """The error for a damaged checkpoint."""
        first = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        return UserError(
            f"--resume: the checkpoint of step {self.latest} in {self.folder} cannot be read ({first}); "
            "delete its folder to continue from the one before"
        )
