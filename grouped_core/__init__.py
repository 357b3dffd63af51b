"""Meaning without a framework: formats, recipes, calls, gradient rules, the oracle.

JAX users import `jax_grouped`, PyTorch users `torch_bridge`; NumPy and CuPy arrays go through `grouped_core.arrays`.
"""

from grouped_core.formats import Format as Format
from grouped_core.formats import QTensor as QTensor
from grouped_core.recipes import *
from grouped_core.sizes import GroupSizes as GroupSizes
