"""Meaning without a framework: formats, recipes, calls, gradient rules, the oracle.

JAX users import `jax_grouped`, PyTorch users `torch_bridge`; NumPy and CuPy arrays go through `grouped_core.arrays`.
"""

from grouped_core.formats import Format as Format
from grouped_core.recipes import BF16 as BF16
from grouped_core.recipes import FP16 as FP16
from grouped_core.recipes import FP32 as FP32
from grouped_core.recipes import Recipe as Recipe
from grouped_core.sizes import GroupSizes as GroupSizes
