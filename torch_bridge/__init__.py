"""Grouped matrix products for PyTorch: the same kernels, rules and messages as `jax_grouped`."""

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
from torch_bridge.debug import explain as explain
from torch_bridge.debug import why_unsupported as why_unsupported
from torch_bridge.deferred import grouped_mlp_bwd_dw as grouped_mlp_bwd_dw
from torch_bridge.deferred import grouped_mlp_bwd_dx as grouped_mlp_bwd_dx
from torch_bridge.deferred import grouped_mlp_fwd as grouped_mlp_fwd
from torch_bridge.linear import grouped_linear as grouped_linear
from torch_bridge.mlp import grouped_mlp as grouped_mlp
from torch_bridge.moe import SharedExpert as SharedExpert
from torch_bridge.moe import moe as moe
from torch_bridge.quantize import dequantize as dequantize
from torch_bridge.quantize import quantize as quantize
from torch_bridge.quantize import scaling_state as scaling_state
from torch_bridge.quantize import straight_through as straight_through
from torch_bridge.quantize import update_scaling as update_scaling
from torch_bridge.routed import routed_mlp as routed_mlp
from torch_bridge.sizes import check_debug_word as check_debug_word
from torch_bridge.sizes import device_sizes as device_sizes
from torch_bridge.sizes import size_status as size_status


def __getattr__(name: str) -> Any:
    """Imports a submodule when it is first used."""
    if name in ("checkpoint", "nn", "offload", "parallel", "route"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
