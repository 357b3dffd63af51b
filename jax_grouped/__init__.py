"""Grouped matrix products for JAX: `ragged_dot`, a drop-in for `jax.lax.ragged_dot`, experts, routing, MoE layers."""

import importlib
from typing import Any

from grouped_core.activations import Activation as Activation
from grouped_core.activations import deinterleave as deinterleave
from grouped_core.activations import interleave as interleave
from grouped_core.formats import Format as Format
from grouped_core.formats import QTensor as QTensor
from grouped_core.mlp_spec import Residuals as Residuals
from grouped_core.recipes import *
from grouped_core.sizes import GroupSizes as GroupSizes
from jax_grouped import accumulate as accumulate
from jax_grouped import checkpoint_policies as checkpoint_policies
from jax_grouped import parallel as parallel
from jax_grouped import route as route
from jax_grouped.debug import explain as explain
from jax_grouped.debug import why_unsupported as why_unsupported
from jax_grouped.mlp import grouped_mlp as grouped_mlp
from jax_grouped.moe import SharedExpert as SharedExpert
from jax_grouped.moe import moe as moe
from jax_grouped.ops import ragged_dot as ragged_dot
from jax_grouped.ops import size_status as size_status
from jax_grouped.patching import patch as patch
from jax_grouped.quantize import dequantize as dequantize
from jax_grouped.quantize import quantize as quantize
from jax_grouped.quantize import scaling_state as scaling_state
from jax_grouped.quantize import straight_through as straight_through
from jax_grouped.quantize import update_scaling as update_scaling
from jax_grouped.routed import routed_mlp as routed_mlp


def __getattr__(name: str) -> Any:
    """Imports a submodule when it is first used; those of layers need Flax."""
    if name in ("nnx", "linen", "checkpoint"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
