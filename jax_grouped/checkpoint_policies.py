"""Policies for `jax.checkpoint` that know the arrays which the operations of this package save for backward.

Policies of JAX that look at primitives (`dots_saveable`, ...) never see a product of this package, which is a custom
call. The arrays have names instead: `grouped_x` (rows or tokens x), `grouped_fc1` (hidden rows) and `grouped_act`
(activated rows), and where a recipe quantises one, `<name>_q` and `<name>_scale`. What an operation saves at all is
decided by its `residuals`. `Residuals(names=...)` renames them; then write the policy with JAX's own functions.

The input of a `jax.checkpoint` body is always saved, on the device. To move it, name it at the top of the body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from grouped_core.mlp_spec import ROW_NAMES

Policy = Callable[..., Any]
"""A policy, as `jax.checkpoint(policy=...)` takes it."""


def _quantized(name: str) -> tuple[str, str]:
    return f"{name}_q", f"{name}_scale"


_ALL = tuple(each for name in ROW_NAMES for each in (name, *_quantized(name)))


def save_gemms() -> Policy:
    """Saves what the first product of an MLP made, hidden and activated rows, so that backward repeats no product."""
    _, *of_products = ROW_NAMES
    names = [each for name in of_products for each in (name, *_quantized(name))]
    return jax.checkpoint_policies.save_only_these_names(*names)


def save_quantized() -> Policy:
    """Saves codes and scales, which backward then does not make again, and no array in 16 bits or more.

    An MLP multiplies its first product again for the hidden rows, so the form of x that this product reads is saved
    beside the one that backward reads. Codes of weights are made again.
    """
    return jax.checkpoint_policies.save_only_these_names(*(each for name in ROW_NAMES for each in _quantized(name)))


def offload_activations(*names: str) -> Policy:
    """Moves named arrays to host memory in forward and back in backward.

    Args:
        names: those of this module, or any other ones given to `checkpoint_name`; the name of an unquantised array
            selects its codes and scales too. Without names: all of this module.
    """
    wanted = [each for name in names for each in ((name, *_quantized(name)) if name in ROW_NAMES else (name,))] or _ALL
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(wanted),
        offload_src="device",
        offload_dst="pinned_host",
    )
