"""The state of delayed scaling for `flax.serialization`, as a dictionary of its arrays."""

from __future__ import annotations

from typing import Any

from flax import serialization

from grouped_core.scaling import ARRAYS, ScalingState


def _state_dict(state: ScalingState[Any]) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(state, name)) for name in ARRAYS}


def _restored(state: ScalingState[Any], found: dict[str, Any]) -> ScalingState[Any]:
    """`state` with the arrays of `found`; its algorithm is not recorded and stays.

    Raises:
        ValueError: `found` has other names.
    """
    if set(found) != set(ARRAYS):
        raise ValueError(
            f"state of delayed scaling at {serialization.current_path()}: names {sorted(found)}, expected "
            f"{sorted(ARRAYS)}; restore a state dict that flax.serialization made of this model."
        )
    arrays: dict[str, Any] = {
        name: serialization.from_state_dict(getattr(state, name), found[name], name=name) for name in ARRAYS
    }
    return ScalingState(**arrays, algorithm=state.algorithm)


def register() -> None:
    """Makes states of delayed scaling known to Flax, also if the module that calls this is loaded again."""
    serialization.register_serialization_state(ScalingState, _state_dict, _restored, override=True)
